"""A model as bytes for the workers: its objects by value, its tensors by number.

Keras pickles a model as a `.keras` file. That needs a configuration and registered classes,
and loses the optimizer's part in a training. Here objects are pickled by their attributes,
and classes and functions of `__main__` by value.
"""

import importlib
import io
import marshal
import pickle
import sys
import threading
from collections.abc import Callable
from copy import copy
from functools import cache
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import cloudpickle
import keras
import torch

from lockstep.engines.attachments import ATTACHMENT, attachment_of
from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import (
    ATTRIBUTES_OF_RUNS,
    DynamicBackend,
    KerasSaveable,
    layers_in,
    module_in_keras,
    own_trainable_variables,
    renew_tracker,
    tracked_collections,
)

Result = TypeVar("Result")

_DEEP = 100_000
_DEEP_STACK = 512 * 2**20
"""The limit of recursion and the bytes of stack for a model of many layers."""


def dump(model: Any) -> tuple[bytes, list[Any]]:
    """Return the bytes of a model, and the tensors that they name by their number.

    The same model gives the same bytes, whatever the values of its tensors are.

    Raises:
        UnsupportedModel: If an attribute of the model cannot be pickled.
    """
    try:
        try:
            return _dumped(model)
        except (RecursionError, pickle.PicklingError) as error:
            if "recursion" not in str(error):
                raise
            return _with_deep_stack(lambda: _dumped(model))
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:160] if str(error) else repr(error)
        raise UnsupportedModel(
            f"{model.name!r} cannot be sent to the processes of its devices: {reason}\n"
            "Files, locks, data sets and the like are no attributes that a model of several "
            "processes can have.\nKeep them out of the model and its layers."
        ) from error


def load(data: bytes) -> tuple[Any, list[Any]]:
    """Return the model, and new tensors for the numbers in the bytes, not yet filled."""
    unpickler = _Unpickler(io.BytesIO(data))
    model = unpickler.load()
    for layer in layers_in(model):
        renew_tracker(layer)
    return model, [unpickler.tensors[number] for number in range(len(unpickler.tensors))]


def _dumped(model: Any) -> tuple[bytes, list[Any]]:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(model)
    return buffer.getvalue(), pickler.tensors


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Any] = []
        self._storages: dict[int, int] = {}

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return tensor_of, self._described(item)
        # With code that uses `torch` and `ops`, cloudpickle takes `torch.ops` along, and fails: its
        # class is no plain module.
        if isinstance(item, ModuleType) and type(item) is not ModuleType:
            return importlib.import_module, (item.__name__,)
        if isinstance(item, KerasSaveable):
            return object.__new__, (type(item),), _state(item)
        if isinstance(item, DynamicBackend):  # without its state, any attribute recurses
            return DynamicBackend, (item.name,)
        fill = _FILL.get(type(item))
        if fill is not None:
            content: Any = dict(item) if isinstance(item, dict) else list(item)
            kind: Any = type(item)
            return kind.__new__, (kind,), (dict(vars(item)), content), None, None, fill
        if isinstance(item, FunctionType) and _is_inner(item):
            content = _contents(item)
            if content is not None:
                made = item.__module__, _code(item.__code__), item.__defaults__, content
                return _function, made, dict(vars(item)) or None
        return super().reducer_override(item)

    def _described(self, item: Any) -> tuple[Any, ...]:
        number = len(self.tensors)
        self.tensors.append(item)
        place = item.untyped_storage().data_ptr()
        first = self._storages.setdefault(place, number) if place else number
        if first != number and not _is_reshaped(item, self.tensors[first]):
            raise ValueError("two of its tensors share their memory.")
        parameter = isinstance(item, torch.nn.Parameter)
        # "cuda" is the current device of each process.
        device = item.device.type
        return number, first, tuple(item.shape), item.dtype, device, item.requires_grad, parameter


def _is_reshaped(tensor: Any, other: Any) -> bool:
    """Return whether two tensors of one memory have the same numbers, in another shape.

    An adapted `Normalization` has its mean as a variable, and in the shape of its inputs.
    """
    same = tensor.dtype == other.dtype and tensor.data_ptr() == other.data_ptr()
    both = tensor.is_contiguous() and other.is_contiguous()
    return bool(same and both and tensor.numel() == other.numel())


def tensor_of(*described: Any) -> Any:
    """Name a tensor in the bytes of a model: `_Unpickler` calls a method of its own instead."""
    raise pickle.UnpicklingError("the bytes of a model are read by `load` alone")


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.tensors: dict[int, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, tensor_of.__name__):
            return self._tensor
        return super().find_class(module, name)

    def _tensor(
        self,
        number: int,
        first: int,
        shape: Any,
        dtype: Any,
        device: str,
        requires_grad: bool,
        parameter: bool,
    ) -> Any:
        if first == number:
            tensor = torch.zeros(shape, dtype=dtype, device=device)
        else:  # in the memory of the first one
            tensor = self.tensors[first].detach().view(shape)
        if parameter:
            tensor = torch.nn.Parameter(tensor, requires_grad=requires_grad)
        self.tensors[number] = tensor
        return tensor


def _state(item: Any) -> dict[str, Any]:
    """Return the attributes of a Keras object, without those of a run or of an attachment."""
    state = dict(vars(item))
    attachment = attachment_of(item)
    if attachment is not None:
        del state[ATTACHMENT]
        for name in attachment.hooks:
            state.pop(name, None)
        state.update(attachment.replaced)
    if isinstance(item, keras.optimizers.Optimizer):
        known = {id(variable): variable for variable in own_trainable_variables(item)}
        state.update((name, _keyed(value, known)) for name, value in state.items())
    if isinstance(item, keras.layers.Layer):
        # Copies: in one pickle, the same list would be one list of all layers.
        state.update(
            (name, copy(value)) for name, value in ATTRIBUTES_OF_RUNS.items() if name in state
        )
    return state


def _is_inner(function: FunctionType) -> bool:
    """Return whether a function was made by a function of Keras: each layer has several.

    cloudpickle looks through all modules for each, which takes longer than all other objects.
    """
    inner = "<locals>" in function.__qualname__ and function.__kwdefaults__ is None
    return inner and bool(module_in_keras(function))


def _contents(function: FunctionType) -> tuple[Any, ...] | None:
    """Return what a function holds of the one that made it; `None` if a part is not there yet."""
    try:
        return tuple(cell.cell_contents for cell in function.__closure__ or ())
    except ValueError:
        return None


@cache
def _code(code: CodeType) -> bytes:
    # Once for each: the bytes may differ from call to call.
    return marshal.dumps(code)


def _function(module: str, code: bytes, defaults: Any, contents: tuple[Any, ...]) -> FunctionType:
    of_module = vars(importlib.import_module(module))
    made: CodeType = marshal.loads(code)
    cells = tuple(map(CellType, contents))
    return FunctionType(made, of_module, made.co_name, defaults, cells)


class _ById:
    """A dict or set of an optimizer, whose keys are the identities of variables.

    keras/src/optimizers/base_optimizer.py, BaseOptimizer._var_key
    """

    def __init__(self, kind: type, items: list[tuple[Any, Any]]) -> None:
        self._kind = kind
        self._items = items

    def __reduce__(self) -> Any:
        return _by_id, (self._kind, self._items)


def _by_id(kind: type, items: list[tuple[Any, Any]]) -> Any:
    found = {id(variable): value for variable, value in items}
    return found if kind is dict else set(found)


def _keyed(value: Any, known: dict[int, Any]) -> Any:
    """Return a dict or set by the identities of known variables in a form that travels."""
    if not isinstance(value, dict | set) or not value or not known.keys() >= set(value):
        return value
    pairs = value.items() if isinstance(value, dict) else ((key, None) for key in value)
    return _ById(dict if isinstance(value, dict) else set, [(known[k], v) for k, v in pairs])


def _fill_list(item: Any, state: Any) -> None:
    item.__dict__.update(state[0])
    list.extend(item, state[1])


def _fill_dict(item: Any, state: Any) -> None:
    item.__dict__.update(state[0])
    dict.update(item, state[1])


def _fill_set(item: Any, state: Any) -> None:
    item.__dict__.update(state[0])
    set.update(item, state[1])


_FILL: dict[type, Callable[[Any, Any], None]] = dict(
    zip(tracked_collections(), (_fill_list, _fill_dict, _fill_dict, _fill_set), strict=True)
)
"""Keras's tracked collections. Their own methods need attributes that are not there yet."""


def _with_deep_stack(call: Callable[[], Result]) -> Result:
    """Run a call in a thread whose stack is large enough for a model of many layers."""
    found: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            errors.append(error)

    limit, size = sys.getrecursionlimit(), threading.stack_size(_DEEP_STACK)
    sys.setrecursionlimit(_DEEP)
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(limit)
        threading.stack_size(size)
    if errors:
        raise errors[0]
    return found[0]
