"""Convert arrays of old files for variables, and find numbers that a cast changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.counted import counted
from lockstep.errors import WeightsDoNotFit
from lockstep.rescue.keras2 import Stored
from lockstep.rescue.rescue_report import Row
from lockstep.rescue.weight_tree import Convert


def converted(stored: Stored, convert: Convert | None) -> Any:
    """Return the numbers of an old array in the layout of the new layer."""
    found = stored.read()
    return found if convert is None else convert(found)


def as_dtype(values: Any, dtype: Any, name: str) -> Any:
    """Cast an array of a file to the dtype of a variable.

    Rounding a float to a shorter float is allowed; `is_exact` detects it.

    Raises:
        WeightsDoNotFit: A finite float becomes infinite, or a cast from or to integers
            changes a number.
    """
    import numpy as np

    if values.dtype == dtype:
        return values
    cast = _cast(values, dtype)
    floats = all("float" in one.name for one in (values.dtype, cast.dtype))
    lost = (np.isfinite(values) & ~np.isfinite(cast)) if floats else ~_unchanged(values, cast)
    if np.any(lost):
        raise WeightsDoNotFit(
            f"{name} holds {values[lost].flat[0]} as {values.dtype}, and the model's variable is "
            f"{cast.dtype}, which cannot hold it.\n"
            "Nothing was changed. Give a model whose layers have the dtype of the file."
        )
    return cast


def is_exact(found: Any, values: Any) -> bool | None:
    """Return whether an array holds exactly these numbers, or rounded ones.

    Returns:
        True for the same numbers, False for rounded ones, None for other numbers.
    """
    if not _same(found, _cast(values, found.dtype)):
        return None
    if found.dtype == values.dtype:
        return True
    return bool(_unchanged(values, found).all())


def rounded(rows: Sequence[Row]) -> list[str]:
    """Return a note on rounded arrays, if there are any."""
    some = [row.target for row in rows if not row.equal]
    if not some:
        return []
    return [
        f"{len(some)} of {counted(len(rows), 'array')} rounded: the file has more digits than the "
        f"model's dtype (the first is {some[0]!r})"
    ]


def _cast(values: Any, dtype: Any) -> Any:
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(dtype, copy=False)


def _unchanged(values: Any, cast: Any) -> Any:
    """Return where a cast keeps the number: casting back restores it."""
    back = _cast(cast, values.dtype)
    return (back == values) | ((back != back) & (values != values))


def _same(one: Any, other: Any) -> bool:
    """Return whether two arrays are equal bit by bit: NaN equals itself, -0.0 is not 0.0."""
    import numpy as np

    one, other = np.asarray(one), np.asarray(other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    one, other = (np.ascontiguousarray(each).reshape(-1).view("u1") for each in (one, other))
    return bool(np.array_equal(one, other))
