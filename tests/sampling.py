"""What the fixed sample leaves out."""

import pytest


def rest(*values):
    """Values for `pytest.mark.parametrize` that run with `--whole` alone; several as a tuple."""
    together = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*each, marks=pytest.mark.whole) for each in together]


def every(step, names):
    """Values of which the fixed sample has the first and each `step`-th one after it."""
    marks = ([], [pytest.mark.whole])
    return [pytest.param(each, marks=marks[n % step > 0]) for n, each in enumerate(names)]


def every_value_once(items):
    """Return the tests in which each value of each parameter occurs, without all combinations.

    Of a test with 2 devices and 9 kinds of data, 9 of the 18 combinations are kept. They have
    all kinds, and the devices in turn.
    """
    values = {}
    for item in items:
        for axis, value in enumerate(_values(item)):
            values.setdefault((_function(item), axis), {})[value] = None

    def is_kept(item):
        axes = [[*values[_function(item), axis]] for axis in range(len(_values(item)))]
        longest = max(map(len, axes), default=0)
        kept = (tuple(axis[n % len(axis)] for axis in axes) for n in range(longest))
        return not axes or _values(item) in kept

    return [item for item in items if is_kept(item)]


def _function(item):
    return item.nodeid.split("[")[0]


def _values(item):
    """The ids of a test's parameters, one for each `parametrize` or fixture."""
    # _pytest/python.py, CallSpec2: `id` joins them by "-", which an id may have in it.
    return tuple(item.callspec._idlist) if hasattr(item, "callspec") else ()
