"""Numbers as JSON has them."""

import math
from typing import Any


def finite(value: Any) -> Any:
    """The same lists and dicts; a number that is not finite is the string "inf" or "nan"."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [*map(finite, value)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
