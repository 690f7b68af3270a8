"""The states of Python objects that a step may change, restored after a trial step.

These are attributes of layers, objects that they hold, and objects that the user's code reads
from globals, closures and classes: counters, lists, generators of random numbers. If the code
reaches an object that cannot be rewound (an iterator) or is shared (a file), no trial step runs.
"""

import _thread
import decimal
import io
import logging
import pickle
import random
import sys
import threading
import warnings
import weakref
from argparse import Namespace
from array import array
from collections import defaultdict, deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    MutableMapping,
)
from contextlib import suppress
from contextvars import ContextVar
from functools import cache, lru_cache, partial
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import keras
import numpy as np

from lockstep.core.left_out import LeftOut, LeftOutMetric
from lockstep.core.own_code import is_own
from lockstep.errors import LockstepWarning

_MOST = 200_000
"""Objects that are looked at, at most; with more of them, nothing is tried."""

_LARGEST = 2**28
"""The bytes of all arrays that are kept, at most; with more of them, nothing is tried."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), LeftOut, LeftOutMetric)
_OF_KERAS = (keras.layers.Layer, keras.optimizers.Optimizer, keras.losses.Loss, keras.Metric)

_LOCK, _RLOCK = type(_thread.allocate_lock()), type(_thread.RLock())
_CACHE = type(lru_cache(len))
_PATIENCE = 1.0
"""Seconds that another thread may hold a lock before it counts as held."""

_FIXED = """
    _abc _frozen_importlib _frozen_importlib_external _operator _struct abc ast builtins datetime
    decimal fractions importlib inspect ipaddress logging numbers operator pathlib re struct types
    typing uuid warnings zoneinfo
"""
_ENTERED = (
    "_collections _thread collections contextlib dataclasses enum functools os string weakref"
)
_OF_PYTHON = dict.fromkeys(_FIXED.split(), False) | dict.fromkeys(_ENTERED.split(), True)
"""The modules of Python whose objects have no state, or have it in their attributes alone."""


_WITHOUT_STATE = frozenset(
    {"absl", "jax", "jaxlib", "keras", "lockstep", "ml_dtypes", "numpy", "tensorflow", "torch"}
)
"""The libraries whose other objects have no state that a step moves, or the engine keeps it."""

_CODE = (FunctionType, BuiltinFunctionType, type)
_CONTENT = (list, set, MutableMapping, deque, np.ndarray)
"""What is kept of the objects that a library's module has by name, such as `os.environ`."""


class ObjectStates:
    """The states of the objects that code reaches from some others.

    Attributes:
        fixed: The class of an object that cannot be put back; `""` if there is none.
        unknown: The class of an object of a library whose state is not known; `""` without one.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.fixed = self.unknown = ""
        self._undo: list[Callable[[], Any]] = []
        self._seen: dict[int, Any] = {}
        self._named: set[tuple[int, str]] = set()
        self._bytes = 0
        self._waiting = list(roots)
        self._undo.append(_with_decimals(decimal.getcontext()))
        while self._waiting:
            value = self._waiting.pop()
            if id(value) in self._seen or _is_plain(value):
                continue
            if len(self._seen) == _MOST:
                self._fix(value, f" among more than {_MOST} objects")
                break
            self._seen[id(value)] = value  # alive, so that no identity is reused
            self._keep(value)

    def put_back(self) -> None:
        """Give the objects the states that they had."""
        for undo in self._undo:
            undo()

    def _keep(self, value: Any) -> None:
        kind = type(value)
        if kind in weakref.ProxyTypes:
            with suppress(ReferenceError):  # the object has ended
                self._waiting.append(value.__repr__.__self__)
            return
        if isinstance(value, dict | tuple) and not issubclass(kind, dict | tuple):
            # TensorFlow's modules wrap the dicts and tuples among their attributes.
            value = getattr(value, "__wrapped__", None)
        is_code = isinstance(value, type | ModuleType | FunctionType)
        if not is_code and _is_of_user(kind):  # whatever else it is
            self._keep_attributes(value, everything=True)
        if isinstance(value, list | dict | set | deque):
            self._keep_content(value)
            self._waiting += [value.default_factory] if isinstance(value, defaultdict) else []
        elif isinstance(value, tuple | frozenset):
            self._waiting += value
        elif isinstance(value, np.ndarray):
            self._keep_array(value)
        elif isinstance(value, bytearray | array):
            self._undo.append(partial(_set_numbers, value, value[:]))
        elif isinstance(value, np.random.Generator):
            self._waiting.append(value.bit_generator)
        elif isinstance(value, np.random.BitGenerator):
            self._undo.append(partial(setattr, value, "state", value.state))
            self._waiting.append(getattr(value, "seed_seq", None))
        elif isinstance(value, np.random.SeedSequence):  # it counts what it has spawned
            seeds: Any = value
            self._undo.append(partial(seeds.__setstate__, seeds.__reduce__()[2]))
        elif isinstance(value, random.SystemRandom):
            self._fix(value)
        elif isinstance(value, random.Random):
            self._undo.append(partial(value.setstate, value.getstate()))
        elif _top(kind) in ("numpy", "torch") and hasattr(value, "set_state"):
            self._undo.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, FunctionType):
            self._keep_function(value)
        elif isinstance(value, MethodType):
            self._waiting += [value.__self__, value.__func__]
        elif isinstance(value, partial):
            self._waiting += [value.func, value.args, value.keywords]
        elif isinstance(value, type | ModuleType):
            if _is_of_user(value):
                self._keep_names(value)
        elif _is_tensor_like(value) and not isinstance(value, _OF_KERAS):
            pass  # a tensor, say, which the engine keeps
        elif not self._keep_of_python(value):
            self._keep_object(value)

    def _keep_of_python(self, value: Any) -> bool:
        """Keep an object of a class of Python's own that has rules here; return whether it has."""
        if isinstance(value, io.StringIO | io.BytesIO):
            if not value.closed:
                self._undo.append(partial(_set_text, value, value.getvalue(), value.tell()))
        elif isinstance(value, io.IOBase):
            standard = (sys.stdin, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
            if not value.closed and all(value is not each for each in standard):
                self._fix(value)
        elif isinstance(value, Iterator | AsyncIterator | Coroutine | ContextVar):
            home = _home(type(value), "__next__")
            if _is_of_user(home):
                return False  # its state is in its attributes
            if _top(home) not in ("keras", "lockstep"):  # Keras keeps one over validation data
                self._fix(value)
        elif isinstance(value, _LOCK | _RLOCK):
            if _is_held(value):
                self._fix(value)
            else:
                self._undo.append(partial(_let_go, value))
        elif isinstance(value, BuiltinFunctionType | MethodWrapperType):
            self._waiting.append(value.__self__)
        elif isinstance(value, property):
            self._waiting += [value.fget, value.fset, value.fdel]
        elif isinstance(value, staticmethod | classmethod):
            self._waiting.append(value.__func__)
        elif isinstance(value, memoryview):
            self._waiting.append(value.obj)
        elif isinstance(value, MappingProxyType):
            self._waiting += value.values()
        elif isinstance(value, weakref.ref):
            self._waiting.append(value())
        elif isinstance(value, _CACHE):
            self._keep_content(vars(value))
            info = value.cache_info()
            if not info.currsize:  # what it has, it gives again: it is taken to be of a function
                self._undo.append(partial(_forget, value, info.misses))
        else:
            return False
        return True

    def _fix(self, value: Any, more: str = "") -> None:
        kind = type(value)
        place = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        self.fixed = self.fixed or place + kind.__qualname__ + more

    def _keep_array(self, value: Any) -> None:
        if not value.flags.writeable:  # by others perhaps
            self._waiting.append(value.base)
        elif self._bytes + value.nbytes > _LARGEST:
            self._fix(value, f" with {value.nbytes} bytes")
        else:
            self._bytes += value.nbytes
            plain = value.view(np.ndarray)
            self._undo.append(partial(np.copyto, plain, plain.copy()))
            if value.dtype.hasobject:
                self._waiting += plain.ravel().tolist()
        if isinstance(value, np.ma.MaskedArray):
            self._keep_content(vars(value))

    def _keep_object(self, value: Any) -> None:
        """Keep an object of a library, if its attributes are known to be its state."""
        kind = type(value)
        if kind in (SimpleNamespace, Namespace):
            self._keep_attributes(value, everything=True)
        elif isinstance(value, logging.Logger):
            self._undo.append(partial(_set_level, value, value.level))
        elif isinstance(value, decimal.Context):
            self._undo.append(_with_decimals(value))
        elif not _is_of_user(kind) and _top(kind) in sys.stdlib_module_names:
            if _OF_PYTHON.get(_top(kind), False):
                self._keep_attributes(value)
            elif _top(kind) not in _OF_PYTHON:
                self._fix(value)
        elif isinstance(value, _OF_KERAS) or _top(kind) == "torch":  # optimizers
            self._keep_attributes(value)
        elif not (_is_of_user(kind) or _top(kind) in _WITHOUT_STATE):
            self._keep_of_library(value)

    def _keep_of_library(self, value: Any) -> None:
        """Keep an object of a library by its attributes, or by what it gives to be pickled."""
        kind: Any = type(value)
        if not hasattr(kind, "__setstate__") and _is_plain_class(kind):
            self._keep_attributes(value, everything=True)
        elif sys.getsizeof(value) > _LARGEST:
            self._fix(value, f" with {sys.getsizeof(value)} bytes")
        elif (state := _pickled(value)) is not None and state == _pickled(value):
            self._undo.append(partial(_load_state, value, state))
        else:
            self.unknown = self.unknown or f"{kind.__module__}.{kind.__qualname__}"

    def _keep_attributes(self, value: Any, *, everything: bool = False) -> None:
        kind = type(value)
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict:
            self._keep_content(attributes)
        self._waiting.append(kind)
        for base in filter(_has_slots, kind.__mro__ if everything else ()):
            for slot in vars(base).values():
                if isinstance(slot, MemberDescriptorType):
                    now = _content_of(slot, value)
                    self._undo.append(partial(_fill, slot, value, now))
                    self._waiting.append(now)

    def _keep_content(self, value: Any) -> None:
        """Keep what is in a collection. Keras's own collections need no tracking for it."""
        base: Any = next(kind for kind in (list, dict, set, deque) if isinstance(value, kind))
        content = base(value)
        self._waiting += content.values() if base is dict else content
        self._undo.append(partial(_set_content, base, value, content))

    def _keep_function(self, function: FunctionType) -> None:
        if _is_of_user(function):
            for cell in function.__closure__ or ():
                now = _content(cell)
                self._undo.append(partial(_assign, cell, "cell_contents", now))
                self._waiting.append(now)
            self._waiting += [function.__defaults__, function.__kwdefaults__]
            self._keep_content(vars(function))
            self._keep_globals(function.__globals__, names_in(function.__code__))

    def _keep_globals(self, names_of_module: dict[str, Any], names: Iterable[str]) -> None:
        before = {name: names_of_module.get(name, _EMPTY) for name in names}
        self._undo.append(partial(_set_names, names_of_module, before))
        self._waiting += before.values()
        for value in before.values():
            if isinstance(value, ModuleType) and not _is_of_user(value):
                self._keep_named(value, names)

    def _keep_named(self, library: ModuleType, names: Iterable[str]) -> None:
        """Keep the attributes of a library's module that code names, such as `os.environ`."""
        for name in names:
            value = vars(library).get(name)
            if (id(library), name) in self._named or library is sys:
                continue
            self._named.add((id(library), name))
            if isinstance(value, ModuleType):
                self._keep_named(value, names)
            elif not (isinstance(value, _CODE) or name.startswith("__")):
                self._undo.append(partial(_assign, library, name, vars(library).get(name, _EMPTY)))
                if isinstance(value, _CONTENT):
                    self._waiting.append(value)

    def _keep_names(self, owner: Any) -> None:
        """Keep the names of a class or module."""
        names = {n: value for n, value in vars(owner).items() if n not in _OF_IMPORT}
        self._undo.append(partial(_remove_others, owner, names))
        for name, value in names.items():
            is_method = isinstance(value, staticmethod | classmethod | MethodType)
            self._waiting.append(value.__func__ if is_method else value)
            self._undo.append(partial(_assign, owner, name, value))
        if isinstance(owner, type):
            self._waiting += [*owner.__mro__, type(owner)]


_EMPTY = LeftOut("an empty place")
_OF_IMPORT = ("__builtins__", "__loader__", "__spec__", "__warningregistry__")


def held_in_words(states: ObjectStates) -> str:
    """Return why code that reaches an object which cannot be put back is not tried."""
    return f"it holds an object of {states.fixed}, whose state cannot be restored"


def _has(value: Any, name: str) -> bool:
    """Return whether an object has an attribute; a `__getattr__` of the user may raise anything."""
    with suppress(Exception):
        getattr(value, name)
        return True
    return False


def _is_tensor_like(value: Any) -> bool:
    return _top(type(value)) in _WITHOUT_STATE and _has(value, "dtype")


def _assign(owner: Any, name: str, value: Any) -> None:
    """Give a class, module or cell what it had; `_EMPTY` if it had nothing."""
    now = _content(owner) if isinstance(owner, CellType) else vars(owner).get(name, _EMPTY)
    if now is not value:
        (delattr(owner, name) if value is _EMPTY else setattr(owner, name, value))


def _remove_others(owner: Any, names: dict[str, Any]) -> None:
    for name in set(vars(owner)).difference(names, _OF_IMPORT):
        if not isinstance(vars(owner)[name], ModuleType):  # imported: that is done once
            delattr(owner, name)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the function that made it has not assigned to it yet
        return _EMPTY


def _set_names(names_of_module: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in before.items():
        if value is _EMPTY:
            names_of_module.pop(name, None)
        else:
            names_of_module[name] = value


def _content_of(slot: Any, owner: Any) -> Any:
    try:
        return slot.__get__(owner)
    except AttributeError:
        return _EMPTY


def _fill(slot: Any, owner: Any, value: Any) -> None:
    """Give a slot of an object what it had. A frozen class has no way but this."""
    if value is not _EMPTY:
        slot.__set__(owner, value)
    elif _content_of(slot, owner) is not _EMPTY:
        slot.__delete__(owner)


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


def _set_numbers(value: Any, content: Any) -> None:
    if value != content:
        value[:] = content


def _set_text(file: Any, content: Any, position: int) -> None:
    if file.closed:
        return
    if file.getvalue() != content:
        file.seek(0)
        file.truncate()
        file.write(content)
    file.seek(position)


def _is_held(lock: Any) -> bool:
    """Return whether code holds a lock. Another thread may hold it for a moment."""
    if isinstance(lock, _RLOCK):  # this thread can take it in any case
        try:
            threading.Condition(lock).notify(0)
        except RuntimeError:
            return False
        return True
    if not lock.acquire(timeout=_PATIENCE):
        return True
    lock.release()
    return False


def _let_go(lock: Any) -> None:
    while _is_held(lock):
        lock.release()


def _forget(cache: Any, misses: int) -> None:
    if cache.cache_info().misses != misses:
        cache.cache_clear()


def _with_decimals(context: Any) -> Callable[[], None]:
    """Return what gives the context of decimal numbers the values that it has."""
    options = {name: getattr(context, name) for name in _OF_DECIMALS}
    flags, traps = dict(context.flags), dict(context.traps)

    def put_back() -> None:
        for name, value in options.items():
            setattr(context, name, value)
        context.flags.update(flags)
        context.traps.update(traps)

    return put_back


_OF_DECIMALS = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")


def _set_level(logger: logging.Logger, level: int) -> None:
    if logger.level != level:
        logger.setLevel(level)  # which forgets what it has cached


def _pickled(value: Any) -> bytes | None:
    with suppress(Exception):
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return None


def _load_state(value: Any, state: bytes) -> None:
    """Give an object of a library the state that was pickled, if it has another one."""
    if _pickled(value) == state:
        return
    with suppress(Exception):
        value.__setstate__(pickle.loads(state).__reduce_ex__(pickle.HIGHEST_PROTOCOL)[2])
    if _pickled(value) != state:
        kind = type(value)
        warnings.warn(
            "The trial run of a first step changed an object of "
            f"{kind.__module__}.{kind.__qualname__}, whose state cannot be restored.\n"
            "The results may differ from one device. Keep this state in a variable or an "
            "attribute of a layer.",
            LockstepWarning,
            stacklevel=2,
        )


_HEAP_TYPE = 1 << 9  # Include/object.h: Py_TPFLAGS_HEAPTYPE


@cache
def _is_plain_class(kind: Any) -> bool:
    """Return whether attributes and slots are all of the state of the objects of a class.

    So it is, with its bases, a class of a Python file, and its objects have no other memory.
    """
    bases = kind.__mro__[:-1]
    slots = [v for b in bases for v in vars(b).values() if isinstance(v, MemberDescriptorType)]
    expected = object.__basicsize__ + 8 * len(slots) + 16  # attributes, and weak references
    return kind.__basicsize__ <= expected and all(map(_is_in_python, bases))


def _is_in_python(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return bool(kind.__flags__ & _HEAP_TYPE) and file.endswith(".py")


def _has_slots(kind: type) -> bool:
    """Return whether all members of a class are slots of Python, and may be assigned."""
    return _is_of_user(kind) or _is_plain_class(kind)


def _home(kind: type, name: str) -> type:
    """Return the class that defines a method of another one."""
    return next((each for each in kind.__mro__ if name in vars(each)), kind)


@cache
def names_in(code: CodeType) -> frozenset[str]:
    """Return the names and the text in the code of a function and of those inside it."""
    inner = [names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    text = [each for each in code.co_consts if isinstance(each, str)]
    return frozenset(code.co_names).union(text, *inner)


def _is_plain(value: Any) -> bool:
    kind = type(value)
    return kind in _PLAIN or (kind is tuple and all(type(each) in _PLAIN for each in value))


def _top(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _is_of_user(value: Any) -> bool:
    """Return whether a class, function or module is in a file of the user's, or in none."""
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    module = sys.modules.get(str(name))
    if name == "__main__" or module is None:
        return True
    return is_own(module)
