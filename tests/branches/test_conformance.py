"""Every conformance case with its layers on three devices equals one device, in float64."""

import pytest

from tests.conformance.cases import FAMILIES

REFUSED = {"run_eagerly=True", "jit_compile=False"}
"""Operations that run one by one have no scopes of devices; test_bad_input.py has the message."""

SAMPLE = {
    *("cnn, sgd", "several inputs and outputs, adamw", "shared layer, adamw", "nested model, sgd"),
    *("subclassed, adamw", "masked lstm, sgd", "attention, sgd", "added losses, sgd"),
    *("NumPy, class_weight", "metrics reset between epochs", "in-batch contrastive loss"),
    *("batch norm", "counters, running maximum and mean", "spatial and recurrent dropout"),
    *("gradient accumulation over 3 steps", "mixed_float16, loss scaled", "binary IoU, R2"),
    "trainable toggled between fits",
}


def _cases():
    for family, cases in FAMILIES.items():
        for name in cases:
            if name not in REFUSED:
                marks = [pytest.mark.xdist_group("branches")]
                marks += [] if name in SAMPLE else [pytest.mark.whole]
                yield pytest.param(family, name, marks=marks)


def test_the_sample_names_cases():
    assert {name for cases in FAMILIES.values() for name in cases} >= SAMPLE | REFUSED


@pytest.mark.parametrize(("family", "name"), list(_cases()))
def test_layers_on_devices_equal_one_device(workers, family, name):
    far = workers("jax").difference(family, name, 3, by_layer=True)
    assert not far, f"beyond the bound: {far}"
