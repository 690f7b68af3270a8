"""Data of each process as data of the global batch."""

import functools
from collections.abc import Callable
from typing import Any

import keras

from lockstep.core.process_local import ProcessLocal, SplitReading, check_wrapped_together
from lockstep.errors import UnusableData
from lockstep.processes.call_scope import CALLS, OWN_DATA, PLAIN_DATA, other_data_error
from lockstep.processes.coordination import once
from lockstep.processes.group import current
from lockstep.processes.own_rows import OwnRows, Passes, check_class_weight
from lockstep.processes.process_group import several
from lockstep.processes.row_exchange import RowExchange
from lockstep.processes.split_arrays import SplitArrays
from lockstep.processes.split_reading import SplitRows


def global_data(data: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an iterator over global batches.

    Args:
        data: Those of Keras's `EpochIterator`, where `x` may be rows of this process.

    Raises:
        ProcessesDisagree: If another process was given data of the other kind.
        UnusableData: If parts of the data are wrapped one by one.
    """
    own: Any = data.get("x")
    check_wrapped_together(own)
    is_own = isinstance(own, ProcessLocal)
    if several():
        kind = _KINDS[type(own)] if is_own else PLAIN_DATA
        least, greatest = once([kind, current().rank])
        if least[0] != greatest[0]:
            raise other_data_error((greatest[1], greatest[0]), (least[1], least[0]))
    if not is_own:
        return data
    if several():
        adapter: type[OwnRows] = OwnRows
        if isinstance(own, SplitReading):
            adapter = SplitArrays if own.is_arrays else SplitRows
        return {"x": adapter(own, data), **_kept(data)}
    if own.makes_batches is not None:
        check_class_weight(data)
        return {"x": Passes(own.data), **_kept(data)}
    x, y, sample_weight = own.parts
    return {**data, "x": x, "y": y, "sample_weight": sample_weight}


def _kept(data: dict[str, Any]) -> dict[str, Any]:
    """Return what an adapter that is made already does not take."""
    return {name: data[name] for name in _OF_STEPS if name in data}


_OF_STEPS = ("steps_per_epoch", "steps_per_execution")


_KINDS = {ProcessLocal: OWN_DATA, SplitReading: "lockstep.split_reading"}


def joining_rows(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method that takes one batch: rows of each process are joined first.

    Args:
        name: The name of the method. `predict_on_batch` returns the rows of this process.
        method: The method.
    """

    @functools.wraps(method)
    def method_on_own_rows(*args: Any, **kwargs: Any) -> Any:
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        own = {key: value for key, value in given.items() if isinstance(value, ProcessLocal)}
        if not own:
            return method(*args, **kwargs)
        if any(isinstance(value, SplitReading) for value in own.values()):
            raise UnusableData(f"{name} was given lockstep.split_reading, but needs arrays.")
        if not several():
            given |= {key: value.data for key, value in own.items()}
            return _called(method, given)
        for key, value in given.items():
            if key not in own and value is not None and key in (0, 1, 2, *_OF_ROWS):
                raise UnusableData(
                    f"{name} was given rows of this process, together with a "
                    f"{type(value).__name__} of all rows.\n"
                    "Wrap each of x, y and sample_weight with lockstep.process_local."
                )
        with CALLS.call(name) as outermost:
            if outermost:
                CALLS.note_own_rows()
            rows = RowExchange()
            found = rows.joined(tuple(value.data for value in own.values()))
            rows.close()
            assert found is not None  # there is a batch
            batch, counts = found
            result = _called(method, given | dict(zip(own, batch, strict=True)))
        if name != "predict_on_batch":
            return result
        return keras.tree.map_structure(lambda leaf: leaf[counts.mine], result)

    return method_on_own_rows


def _called(method: Callable[..., Any], given: dict[Any, Any]) -> Any:
    args = [value for key, value in given.items() if isinstance(key, int)]
    return method(*args, **{key: v for key, v in given.items() if not isinstance(key, int)})


_OF_ROWS = ("x", "y", "sample_weight")
