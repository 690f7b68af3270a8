"""A model as bytes: its objects by value, for a process of another device or another precision.

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
from collections import OrderedDict
from collections.abc import Callable
from copy import copy
from functools import cache
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, ClassVar, TypeVar

import cloudpickle
import keras

from lockstep.attach.attachment import ATTACHMENT, attachment_of
from lockstep.core.travelling_objects import WITH_RULES as OF_PYTHON_WITH_RULES
from lockstep.core.travelling_objects import reduced
from lockstep.errors import first_line
from lockstep.keras_compat import (
    ATTRIBUTES_OF_RUNS,
    LOOKUP_TABLES,
    DynamicBackend,
    Functional,
    IndexLookup,
    KerasSaveable,
    as_functional,
    layers_in,
    module_in_keras,
    own_trainable_variables,
    renew_tracker,
    tracked_collections,
    variable_key,
)

Result = TypeVar("Result")

_DEEP = 100_000
_DEEP_STACK = 512 * 2**20
"""The limit of recursion and the bytes of stack for a model of many layers."""


class ModelPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles Keras objects by their attributes. A subclass pickles the arrays."""

    by_attributes: ClassVar[tuple[type, ...]] = (KerasSaveable,)

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.file = file

    def reducer_override(self, item: Any) -> Any:
        """Return how one object is pickled."""
        made = reduced(item)
        if made is not NotImplemented:
            return made
        # With code that uses `torch` and `ops`, cloudpickle takes `torch.ops` along, and fails: its
        # class is no plain module.
        if isinstance(item, ModuleType) and type(item) is not ModuleType:
            return importlib.import_module, (item.__name__,)
        if isinstance(item, DynamicBackend):  # without its state, any attribute recurses
            return DynamicBackend, (item.name,)
        if isinstance(item, Functional):
            return _new_functional, (type(item),), self.state(item)
        if isinstance(item, IndexLookup):
            state = self.state(item), item.get_config(), item.get_vocabulary(False)
            return object.__new__, (type(item),), state, None, None, _set_up_lookup
        if isinstance(item, self.by_attributes):
            return object.__new__, (type(item),), self.state(item)
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

    def state(self, item: Any) -> dict[str, Any]:
        """Return the attributes of a Keras object, without those of a run or of an attachment."""
        state = dict(vars(item))
        attachment = attachment_of(item)
        if attachment is not None:
            del state[ATTACHMENT]
            for name in attachment.hooks:
                state.pop(name, None)
            state.update(attachment.replaced)
        if isinstance(item, keras.optimizers.Optimizer):
            kind = type(item)
            known = {variable_key(kind, each): each for each in own_trainable_variables(item)}
            state.update((name, _keyed(value, known, kind)) for name, value in state.items())
        if isinstance(item, IndexLookup):
            state = {name: value for name, value in state.items() if name not in LOOKUP_TABLES}
        if isinstance(item, keras.layers.Layer):
            # Copies: in one pickle, the same list would be one list of all layers.
            # Models get some in their first call of `evaluate` or `predict`.
            is_model = isinstance(item, keras.Model)
            for name, value in ATTRIBUTES_OF_RUNS.items():
                if name in state or (is_model and name.startswith("stop_")):
                    state[name] = copy(value)
        return state


Pickler = TypeVar("Pickler", bound=ModelPickler)


def dumped(item: Any, pickler: Callable[[io.BytesIO], Pickler]) -> Pickler:
    """Return a pickler that has pickled an item into its file."""

    def run() -> Pickler:
        one = pickler(io.BytesIO())
        one.dump(item)
        return one

    try:
        return run()
    except (RecursionError, pickle.PicklingError) as error:
        if "recursion" not in str(error):
            raise
        return _with_deep_stack(run)


def reason_of(error: Exception) -> str:
    """Return the first line of an error, for a message."""
    return first_line(error).rstrip(".")


def trackers_mended(model: Any) -> Any:
    """Return an unpickled model whose layers track their lists again."""
    for layer in layers_in(model):
        renew_tracker(layer)
    return model


def _new_functional(owner: type) -> Any:
    return object.__new__(as_functional(owner))


def _set_up_lookup(layer: Any, given: tuple[dict[str, Any], dict[str, Any], list[Any]]) -> None:
    """Give a layer its attributes, and the table of another one that has its vocabulary."""
    state, config, vocabulary = given
    made = type(layer).from_config({**config, "vocabulary": vocabulary or None})
    tables = {name: vars(made)[name] for name in LOOKUP_TABLES if name in vars(made)}
    vars(layer).update(state | tables)


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


class _ByVariable:
    """A dict or set of an optimizer, whose keys are those of variables.

    Args:
        kind: `dict` or `set`.
        owner: The class of the optimizer.
        items: Each variable with its value.
    """

    def __init__(self, kind: type, owner: type, items: list[tuple[Any, Any]]) -> None:
        self._made = kind, owner, items

    def __reduce__(self) -> Any:
        return _by_variable, self._made


def _by_variable(kind: type, owner: type, items: list[tuple[Any, Any]]) -> Any:
    found = {variable_key(owner, variable): value for variable, value in items}
    return found if kind is dict else set(found)


def _keyed(value: Any, known: dict[Any, Any], owner: type) -> Any:
    """Return a dict or set by the keys of known variables in a form that travels."""
    if not isinstance(value, dict | set) or not value or not known.keys() >= set(value):
        return value
    pairs = value.items() if isinstance(value, dict) else ((each, None) for each in value)
    kind = dict if isinstance(value, dict) else set
    return _ByVariable(kind, owner, [(known[key], v) for key, v in pairs])


def _fill_list(item: Any, state: Any) -> None:
    item.__dict__.update(state[0])
    list.extend(item, state[1])


def _fill_dict(item: Any, state: Any) -> None:
    item.__dict__.update(state[0])
    dict.update(item, state[1])


def _fill_ordered(item: Any, state: Any) -> None:
    item.__dict__.update(state[0])
    for key, value in state[1].items():  # `dict.update` would leave out the order, so all items
        OrderedDict.__setitem__(item, key, value)


def _fill_set(item: Any, state: Any) -> None:
    item.__dict__.update(state[0])
    set.update(item, state[1])


_FILL: dict[type, Callable[[Any, Any], None]] = dict(
    zip(tracked_collections(), (_fill_list, _fill_dict, _fill_ordered, _fill_set), strict=True)
)
"""Keras's tracked collections. Their own methods need attributes that are not there yet."""

WITH_RULES = (
    *(type, FunctionType, ModuleType, DynamicBackend, KerasSaveable),
    *_FILL,
    *OF_PYTHON_WITH_RULES,
)
"""The classes whose objects are not pickled as Python does it, here or by cloudpickle."""


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
