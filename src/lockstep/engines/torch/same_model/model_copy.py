"""A copy of a model in its own process, whose code may be followed without an effect on the model.

Classes, modules and functions are those of the user, as nothing may replace them. Layers,
variables, containers and what functions close over are copies, and tensors are new.
"""

import io
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from lockstep.attach.model_pickle import trackers_mended
from lockstep.engines.torch.same_model.model_pickle import (
    TensorPickler,
    TensorUnpickler,
    pickled,
    tensor_of,
)
from lockstep.engines.torch.sharded.sharded_variables import ShardedVariable, without_value


def copy_of(model: Any) -> Any:
    """Return a copy of a model or layer. The values of its tensors are zeros.

    In place of an attribute that cannot be pickled, it has a `LeftOut`.

    Raises:
        Exception: If it cannot be pickled without them.
    """
    pickler = pickled(model, _Pickler)
    return trackers_mended(_Unpickler(pickler.file.getvalue(), pickler.kept).load())


class _Pickler(TensorPickler):
    def __init__(self, file: io.BytesIO, left_out: Any = None) -> None:
        super().__init__(file, left_out)
        self.kept: list[Any] = []
        self._namespaces: set[int] = set()

    def persistent_id(self, item: Any) -> int | None:
        """Return the number of an object that the copy has in common with the model."""
        if isinstance(item, FunctionType):
            common = not item.__closure__ and item is not tensor_of
        else:
            common = isinstance(item, type | ModuleType | CodeType) or id(item) in self._namespaces
        if not common:
            return None
        self.kept.append(item)
        return len(self.kept) - 1

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, ShardedVariable):
            return without_value(item)
        if isinstance(item, FunctionType) and item.__closure__:
            self._namespaces.add(id(item.__globals__))
            made = item.__code__, item.__globals__, item.__name__, None, item.__closure__
            return FunctionType, made, _state_of(item), None, None, _set_state
        if isinstance(item, CellType):
            return CellType, (), _content(item), None, None, _fill
        return super().reducer_override(item)


class _Unpickler(TensorUnpickler):
    def __init__(self, data: bytes, kept: list[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._kept = kept

    def persistent_load(self, number: int) -> Any:
        """Return an object that the copy has in common with the model."""
        return self._kept[number]


def _state_of(function: FunctionType) -> tuple[Any, ...]:
    return dict(vars(function)), function.__defaults__, function.__kwdefaults__


def _set_state(function: FunctionType, state: tuple[Any, ...]) -> None:
    attributes, function.__defaults__, function.__kwdefaults__ = state
    vars(function).update(attributes)


def _content(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # the function that made it has not assigned to it yet
        return ()


def _fill(cell: CellType, content: tuple[Any, ...]) -> None:
    for value in content:
        cell.cell_contents = value
