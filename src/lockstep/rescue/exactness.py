"""Whether an array that was written or assigned holds exactly the numbers of the old one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from lockstep.errors import WeightsDoNotFit, counted
from lockstep.rescue.rescue_report import Row


def numbers(variable: Any) -> Any:
    """Return the value of a variable as a NumPy array, or its initial value if it has none."""
    return np.asarray(keras.ops.convert_to_numpy(variable.value))


def as_dtype(values: Any, dtype: Any, name: str) -> Any:
    """Cast an array of a file to the dtype of a variable.

    Rounding a float to a shorter float is allowed; `is_exact` detects it.

    Raises:
        WeightsDoNotFit: A finite float becomes infinite, or a cast from or to integers
            changes a number.
    """
    if values.dtype == dtype:
        return values
    cast = _cast(values, dtype)
    floats = all("float" in one.name for one in (values.dtype, cast.dtype))
    lost = (np.isfinite(values) & ~np.isfinite(cast)) if floats else ~_unchanged(values, cast)
    if np.any(lost):
        raise WeightsDoNotFit(
            f"{name} holds {values[lost].flat[0]} as {values.dtype}, but the model's variable "
            f"is {cast.dtype}, which cannot hold this value.\n"
            "Nothing was changed. Use a model whose layers have the dtype of the file."
        )
    return cast


def is_exact(found: Any, values: Any) -> bool | None:
    """Return True if an array holds these numbers, False for rounded and None for other ones."""
    found, cast = np.asarray(found), np.asarray(_cast(values, found.dtype))
    # Bit by bit: NaN equals itself, -0.0 is not 0.0.
    one, other = (np.ascontiguousarray(each).reshape(-1).view("u1") for each in (found, cast))
    if found.shape != cast.shape or not np.array_equal(one, other):
        return None
    return found.dtype == values.dtype or bool(_unchanged(values, found).all())


def rounded(rows: Sequence[Row]) -> list[str]:
    """Return a note on rounded arrays, if there are any."""
    some = [row.target for row in rows if not row.equal]
    return [
        f"{len(some)} of {counted(len(rows), 'array')} rounded: the file has more digits than the "
        f"model's dtype (the first is {name!r})"
        for name in some[:1]
    ]


def _cast(values: Any, dtype: Any) -> Any:
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(dtype, copy=False)


def _unchanged(values: Any, cast: Any) -> Any:
    """Return where a cast keeps the number: casting back restores it."""
    back = _cast(cast, values.dtype)
    return (back == values) | ((back != back) & (values != values))


@contextmanager
def quiet() -> Iterator[None]:
    """Hide a warning of NumPy 2 about how Keras 3.15 converts variables."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
        yield
