"""The sums by which processes compare the values of tensors that stay on their GPU."""

import pytest
import torch

from lockstep.engines.torch.same_model.settings import flattened, sums_along_sides

TYPES = "float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool", "complex64"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [1, 5, 49, 1000])
def test_a_change_of_any_value_gives_another_sum(dtype, size):
    values = torch.arange(size).remainder(2).to(getattr(torch, dtype))
    before = sums_along_sides(values)
    for place in range(size):
        other = values.clone()
        other[place] = 0 if other[place] != 0 else 1
        assert not torch.equal(sums_along_sides(other), before)
    assert torch.equal(sums_along_sides(values.clone()), before)


@pytest.mark.parametrize("size", [8, 49, 1000])
def test_two_values_that_change_places_give_another_sum(size):
    values = torch.rand(size, generator=torch.Generator().manual_seed(0))
    before = sums_along_sides(values)
    for place in range(size - 1):
        other = values.clone()
        other[[place, size // 3]] = other[[size // 3, place]]
        assert torch.equal(sums_along_sides(other), before) == (place == size // 3)
    assert not torch.equal(sums_along_sides(values.flip(0)), before)


def test_nothing_has_sums():
    assert len(sums_along_sides(torch.empty(0))) == 0


def test_a_row_of_a_column_has_bytes():
    column = torch.arange(12.0).reshape(2, 6)[:1, 0]
    assert column.stride() == (6,)
    assert flattened(column).view(torch.uint8).tolist() == [0, 0, 0, 0]
