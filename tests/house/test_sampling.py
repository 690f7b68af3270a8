"""The fixed sample of the tests leaves out combinations, and no value."""

from types import SimpleNamespace

import pytest

from tests.sampling import every_value_once


def items(name, *axes):
    combinations = [()]
    for axis in axes:
        combinations = [(*one, value) for one in combinations for value in axis]
    for ids in combinations:
        nodeid = f"{name}[{'-'.join(ids)}]"
        yield SimpleNamespace(nodeid=nodeid, callspec=SimpleNamespace(_idlist=list(ids)))


def test_every_value_of_each_parameter_is_in_the_sample():
    kept = every_value_once([*items("a", "12", "abcde", "xyz")])
    assert [tuple(item.callspec._idlist) for item in kept] == [
        ("1", "a", "x"), ("1", "c", "z"), ("1", "e", "y"), ("2", "b", "y"), ("2", "d", "x")
    ]  # fmt: skip


def test_tests_with_one_parameter_or_none_are_all_in_the_sample():
    alone = [SimpleNamespace(nodeid="b"), *items("c", "12345"), *items("d", "1", "23")]
    assert every_value_once(alone) == alone


@pytest.mark.parametrize("one", ["a-b"])
@pytest.mark.parametrize("other", ["c"])
def test_the_parameters_of_pytest_are_read(one, other, request):
    """`_idlist` is private: this fails if a new pytest has it no more."""
    assert list(request.node.callspec._idlist) == [other, one]
