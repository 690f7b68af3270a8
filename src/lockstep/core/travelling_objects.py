"""Makes objects picklable that Python's pickle refuses, or finds under a wrong name.

A script has them in globals, closures and classes: functions under the decorators of `functools`,
weak references, locks that nobody holds. Their state in the other process is that of a new object:
an empty cache, say.
"""

import _thread
import functools
import pickle
import random
import sys
import threading
import weakref
from collections.abc import Callable
from types import FunctionType, MappingProxyType
from typing import Any, cast

import numpy as np

_LOCK, _RLOCK = type(_thread.allocate_lock()), type(_thread.RLock())
CACHE = type(functools.lru_cache(len))
"""The class of functions under `functools.cache` and `functools.lru_cache`."""

_DISPATCHER = cast(FunctionType, functools.singledispatch(len)).__code__


def reduced(item: Any) -> Any:
    """Return how pickle makes an object anew, `NotImplemented` for one without a rule here.

    Raises:
        pickle.PicklingError: If it cannot be in two processes: a thread, or a lock that is held.
    """
    kind = type(item)
    if kind in weakref.ProxyTypes:
        return weakref.proxy, (item.__repr__.__self__,)
    if isinstance(item, random.Random) and item is _own_random():
        return _own_random, ()  # as by `from random import random`
    if isinstance(item, np.random.RandomState) and item is _own_numpy():
        return _own_numpy, ()
    rule = _RULES.get(kind)
    if rule is not None:
        return rule(item)
    if isinstance(item, FunctionType) and item.__code__ is _DISPATCHER:
        return _reduced_dispatcher(item)
    if isinstance(item, threading.Thread):
        raise pickle.PicklingError(f"the thread {item.name!r} runs in one process")
    return NotImplemented


def _own_random() -> Any:
    """Return the generator whose methods are the functions of `random`."""
    return vars(random)["random"].__self__


def _own_numpy() -> Any:
    """Return the generator whose methods are the functions of `numpy.random`."""
    return vars(np.random)["random_sample"].__self__


def _is_importable(item: Any) -> bool:
    """Return whether an object is found by its name in another process."""
    found: Any = sys.modules.get(item.__module__)
    if item.__module__ == "__main__" or found is None:
        return False
    for name in item.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is item


def _reduced_cache(item: Any) -> Any:
    if _is_importable(item):
        return NotImplemented
    made = (*functools.WRAPPER_ASSIGNMENTS, "__wrapped__", "cache_parameters")
    state = {name: value for name, value in vars(item).items() if name not in made}
    return _cached, (item.__wrapped__, item.cache_parameters()), state or None


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduced_property(item: Any) -> Any:
    return _property, (item.func, item.attrname)


def _property(function: Callable[[Any], Any], name: str | None) -> Any:
    made = functools.cached_property(function)
    if name is not None:
        made.__set_name__(object, name)
    return made


def _reduced_dispatcher(item: Any) -> Any:
    if _is_importable(item):
        return NotImplemented
    others = {kind: each for kind, each in item.registry.items() if kind is not object}
    # The other functions may call this one.
    return functools.singledispatch, (item.registry[object],), others, None, None, _register


def _register(dispatcher: Any, others: dict[type, Any]) -> None:
    for kind, function in others.items():
        dispatcher.register(kind, function)


def _reduced_lock(item: Any) -> Any:
    if not item.acquire(blocking=False):
        raise pickle.PicklingError("a held lock belongs to one process")
    item.release()
    return (_thread.allocate_lock if type(item) is _LOCK else _thread.RLock), ()


def _reduced_reference(item: Any) -> Any:
    return _reference, (item(), item.__callback__)


def _reference(target: Any, callback: Any) -> Any:
    return weakref.ref(set() if target is None else target, callback)


_RULES: dict[type, Callable[[Any], Any]] = {
    CACHE: _reduced_cache,
    functools.cached_property: _reduced_property,
    MappingProxyType: lambda item: (MappingProxyType, (dict(item),)),
    threading.local: lambda item: (threading.local, (), dict(vars(item))),
    weakref.ref: _reduced_reference,
    weakref.WeakMethod: lambda item: (weakref.WeakMethod, (item(),)),
    weakref.WeakSet: lambda item: (weakref.WeakSet, (list(item),)),
    weakref.WeakKeyDictionary: lambda item: (weakref.WeakKeyDictionary, (dict(item),)),
    weakref.WeakValueDictionary: lambda item: (weakref.WeakValueDictionary, (dict(item),)),
    **dict.fromkeys((_LOCK, _RLOCK), _reduced_lock),
}

WITH_RULES = (*_RULES, *weakref.ProxyTypes, threading.Thread, random.Random, np.random.RandomState)
"""The classes whose objects may have a rule here, besides functions."""
