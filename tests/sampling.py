"""What the fixed sample leaves out."""

import pytest


def rest(*values):
    """Values for `pytest.mark.parametrize` that run with `--whole` alone; several as a tuple."""
    together = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*each, marks=pytest.mark.whole) for each in together]
