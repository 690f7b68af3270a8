"""Numbers in JSON."""

import math
from typing import Any


def finite(value: Any) -> Any:
    """Return lists and dicts with the strings "inf" and "nan" for numbers that are not finite."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [*map(finite, value)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
