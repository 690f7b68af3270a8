"""What runs when. The mark stands in the file of a test, where a reader sees it.

| tier | mark | what it holds |
|---|---|---|
| quick | none | every refusal and message, every pure unit test, one training of each behaviour on each engine, a fixed float64 sample of the conformance cases |
| thorough | `@pytest.mark.thorough`, `further(...)` | further values, layers of the zoo, kills, clusters, files, several processes |
| whole | `@pytest.mark.whole`, `rest(...)`, `every(...)`, `@pytest.mark.each_value_once` | every combination |

A tier contains those above it.
"""  # noqa: E501

import os

import pytest

TIERS = ("quick", "thorough", "whole")


def further(*values):
    """Values for `pytest.mark.parametrize` that run from `--thorough` on; several as a tuple."""
    return _marked(pytest.mark.thorough, values)


def rest(*values):
    """Values for `pytest.mark.parametrize` that run with `--whole` alone; several as a tuple."""
    return _marked(pytest.mark.whole, values)


def _marked(mark, values):
    together = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*each, marks=mark) for each in together]


def quick_on(*backends):
    """A mark for a test that is quick on these backends, and thorough on the others."""
    here = os.environ["KERAS_BACKEND"] in backends
    return (lambda test: test) if here else pytest.mark.thorough


quick_on_jax = quick_on("jax")
"""For code that all backends share."""


def every(step, names, quick=None):
    """Values of which the first and each `step`-th one after it run without `--whole`.

    With `quick=1`, the first of these is quick, and the others are thorough.
    """

    def mark(number):
        if number % step:
            return pytest.mark.whole
        return [] if quick is None or number < quick * step else pytest.mark.thorough

    return [pytest.param(each, marks=mark(number)) for number, each in enumerate(names)]


def belongs(item, tier):
    """Whether a test belongs to a tier, by its marks."""
    above = TIERS[TIERS.index(tier) + 1 :]
    return not any(item.get_closest_marker(name) for name in above)


def each_value_once(items):
    """Return the tests without combinations that `@pytest.mark.each_value_once` leaves out.

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
        return not item.get_closest_marker("each_value_once") or _values(item) in kept

    return [item for item in items if is_kept(item)]


def _function(item):
    return item.nodeid.split("[")[0]


def _values(item):
    """The ids of a test's parameters, one for each `parametrize` or fixture."""
    # _pytest/python.py, CallSpec2: `id` joins them by "-", which an id may have in it.
    return tuple(item.callspec._idlist) if hasattr(item, "callspec") else ()
