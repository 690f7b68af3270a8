"""What a step may change of Python's objects, put back after a step that was only tried.

These are attributes of layers, objects that hang on them, and what the user's code reaches by its
globals, closures and classes: counters, lists, generators of random numbers.
"""

import random
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from types import (
    CellType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import keras
import numpy as np

from lockstep.engines.left_out import LeftOut, LeftOutMetric
from lockstep.engines.own_code import is_own

_MOST = 20_000
"""Objects that are looked at, at most."""

_LARGEST = 2**16
"""The numbers of an array that is kept, at most."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), LeftOut, LeftOutMetric)
_OF_KERAS = (keras.layers.Layer, keras.optimizers.Optimizer, keras.losses.Loss, keras.Metric)


class ObjectStates:
    """The states of the objects that code reaches from some others.

    Attributes:
        can_be_put_back: Whether nothing was met that only runs forward: a generator of Python's, or
            a counter of `itertools`.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.can_be_put_back = True
        self._undo: list[Callable[[], Any]] = []
        self._seen: dict[int, Any] = {}
        self._waiting = list(roots)
        while self._waiting and len(self._seen) < _MOST:
            value = self._waiting.pop()
            if id(value) not in self._seen and type(value) not in _PLAIN:
                self._seen[id(value)] = value  # alive, so that no identity is reused
                self._keep(value)

    def put_back(self) -> None:
        """Give the objects the states that they had."""
        for undo in self._undo:
            undo()

    def _keep(self, value: Any) -> None:
        if isinstance(value, dict) and not issubclass(type(value), dict):
            # TensorFlow's modules wrap the dicts among their attributes.
            value = getattr(value, "__wrapped__", None)
        if isinstance(value, list | dict | set | deque):
            self._keep_content(value)
        elif isinstance(value, tuple):
            self._waiting += value
        elif isinstance(value, np.ndarray):
            if value.size <= _LARGEST and value.flags.writeable and not value.dtype.hasobject:
                self._undo.append(partial(np.copyto, value, value.copy()))
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._undo.append(partial(setattr, bits, "state", bits.state))
        elif isinstance(value, random.Random):
            self._undo.append(partial(value.setstate, value.getstate()))
        elif _top(type(value)) in ("numpy", "torch") and hasattr(value, "set_state"):
            self._undo.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, GeneratorType | count):
            self.can_be_put_back = False
        elif isinstance(value, FunctionType):
            self._keep_function(value)
        elif isinstance(value, MethodType):
            self._waiting += [value.__self__, value.__func__]
        elif isinstance(value, partial):
            self._waiting += [value.func, value.args, value.keywords]
        elif isinstance(value, type | ModuleType):
            if _is_of_user(value):
                self._keep_names(value, [n for n in vars(value) if not n.startswith("__")])
        elif not hasattr(value, "dtype") or isinstance(value, _OF_KERAS):
            self._keep_object(value)

    def _keep_object(self, value: Any) -> None:
        attributes = getattr(value, "__dict__", None)
        of_libraries = isinstance(value, _OF_KERAS) or _top(type(value)) == "torch"  # optimizers
        kind = type(value)
        is_of_user = kind in (SimpleNamespace, Namespace) or _is_of_user(kind)
        if type(attributes) is dict and (of_libraries or is_of_user):
            self._keep_content(attributes)
            self._waiting.append(kind)
        if is_of_user:
            bases = filter(_is_of_user, kind.__mro__)
            for name in (name for base in bases for name in _slots_of(base)):
                if hasattr(value, name):
                    now = getattr(value, name)
                    self._undo.append(partial(setattr, value, name, now))
                    self._waiting.append(now)

    def _keep_content(self, value: Any) -> None:
        """Keep what is in a collection. Keras's own collections need no tracking for it."""
        base: Any = next(kind for kind in (list, dict, set, deque) if isinstance(value, kind))
        content = base(value)
        self._waiting += content.values() if base is dict else content
        self._undo.append(partial(_set_content, base, value, content))

    def _keep_function(self, function: FunctionType) -> None:
        if _is_of_user(function):
            cells = [cell for cell in function.__closure__ or () if _is_full(cell)]
            for cell in cells:
                self._undo.append(partial(_assign, cell, "cell_contents", cell.cell_contents))
                self._waiting.append(cell.cell_contents)
            self._waiting += [function.__defaults__, function.__kwdefaults__]
            if vars(function):
                self._keep_content(vars(function))
            names = [n for n in _names_in(function.__code__) if n in function.__globals__]
            self._undo.append(
                partial(
                    function.__globals__.update,
                    {name: function.__globals__[name] for name in names},
                )
            )
            self._waiting += [function.__globals__[name] for name in names]

    def _keep_names(self, owner: Any, names: list[str]) -> None:
        for name in names:
            value = vars(owner)[name]
            self._waiting.append(getattr(value, "__func__", value))
            self._undo.append(partial(_assign, owner, name, value))


def _assign(owner: Any, name: str, value: Any) -> None:
    now = owner.cell_contents if isinstance(owner, CellType) else vars(owner).get(name)
    if now is not value:
        setattr(owner, name, value)


def _set_content(base: Any, value: Any, content: Any) -> None:
    if base is set:
        same = set(value) == content
    elif base is dict:
        same = list(value) == list(content) and all(
            dict.__getitem__(value, key) is content[key] for key in content
        )
    else:
        same = len(value) == len(content) and all(
            a is b for a, b in zip(value, content, strict=True)
        )
    if not same:
        base.clear(value)
        (base.extend if base in (list, deque) else base.update)(value, content)


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if not name.startswith("__"))


def _names_in(code: Any) -> set[str]:
    inner = [_names_in(each) for each in code.co_consts if isinstance(each, type(code))]
    return set(code.co_names).union(*inner)


def _is_full(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # the function that made it has not assigned to it yet
        return False


def _top(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _is_of_user(value: Any) -> bool:
    """Return whether a class, function or module is in a file of the user's, or in none."""
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    module = sys.modules.get(str(name))
    if name == "__main__" or module is None:
        return True
    return is_own(module)
