"""Tells whether a model would be pickled to the same bytes as before, without pickling it.

The pickler knows all objects that it has met. Each is looked at in a few calls of C: which objects
it refers to, by identity, and how many. What a reducer reads besides is looked at too: globals by
name, attachments, tensors, where classes stand. An object of a kind that is not listed here may
have a state that none of this shows: then there is no graph, and the model is pickled each time.
"""

import copyreg
import enum
import gc
import inspect
import sys
from collections import OrderedDict, defaultdict, namedtuple
from functools import cache, partial
from itertools import chain, repeat
from operator import attrgetter, is_
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any

import cloudpickle
import torch

from lockstep.attach.attachment import attachment_of
from lockstep.attach.holders import Holders
from lockstep.attach.model_pickle import ModelPickler
from lockstep.engines.replicas.object_states import names_in
from lockstep.engines.torch.same_model.code_state import AllAttributes
from lockstep.keras_compat import IndexLookup, KerasSaveable, tracked_collections

_FIXED = (str, bytes, CodeType, torch.dtype, torch.device, Holders)
"""Objects that stay as they are; holders are pickled as empty ones."""

_CONTAINERS = (dict, list, tuple, set, frozenset, defaultdict, OrderedDict, *tracked_collections())
_FIELD = type(vars(namedtuple("Any", "field"))["field"])
_OF_CODE = (CellType, MethodType, staticmethod, classmethod, property, partial, _FIELD)
_WITH_REDUCERS = (inspect.Parameter, inspect.Signature, enum.Enum)
"""Classes of Python whose reducers read the attributes of an object alone."""

_OF_PYTHON = ("keras", "inspect", "enum", "abc", "torch", "lockstep")
"""Packages whose classes have no state of C, but for the tensors of PyTorch."""

_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_MISSING = object()


class ObjectGraph:
    """The objects that a pickler has met, as they were then.

    Args:
        met: The objects.
        by_value: The classes and functions among them that were pickled by value.
        names: Owners, names and values of what code reads from outside.
        packages: The attributes of the packages that are in use.

    Attributes:
        is_complete: Whether all is seen that the bytes depend on.
    """

    def __init__(
        self,
        met: list[Any],
        by_value: list[Any],
        names: list[tuple[Any, str, Any]],
        packages: AllAttributes,
    ) -> None:
        self._packages = packages
        self._looked: list[Any] = []
        self._sized: list[Any] = []
        self._keyed: list[Any] = []
        self._tensors: list[Any] = []
        self._types: list[type] = []
        self._homes: list[tuple[Any, attrgetter[Any]]] = []
        self._names = [(owner, name) for owner, name, _ in names if isinstance(owner, dict)]
        self._absent: list[tuple[dict[str, Any], str]] = []
        among = set(map(id, by_value))
        self.is_complete = all(self._add(item, id(item) in among) for item in met)
        self._before = self._found() if self.is_complete else ()

    def is_same(self) -> bool:
        """Return whether the objects, and what else the bytes depend on, are as they were."""
        if not self._packages.are_still():
            return False
        (now, *values), (before, *values_before) = self._found(), self._before
        return values == values_before and all(
            len(a) == len(b) and all(map(is_, a, b)) for a, b in zip(now, before, strict=True)
        )

    def _found(self) -> tuple[Any, ...]:
        """Return lists that are compared by identity, and what is compared by value."""
        owners, names = zip(*self._names, strict=True) if self._names else ((), ())
        by_identity = (
            gc.get_referents(*self._looked),
            list(map(type, self._looked)),
            list(chain.from_iterable(self._keyed)),  # a dict refers to its values alone
            list(map(dict.get, owners, names, repeat(_MISSING))),
            [find(where) for where, find in self._homes],
        )
        return (
            by_identity,
            list(map(len, self._sized)),
            list(map(_NAMES_OF_TYPE, self._types)),
            [name in owner for owner, name in self._absent],
            list(map(_form_of, self._tensors)),
            list(sys.modules),
            dict(copyreg.dispatch_table),
            cloudpickle.list_registry_pickle_by_value(),
        )

    # ------------------------------------------------------------------- objects that were met

    def _add(self, item: Any, by_value: bool) -> bool:
        """Look at an object from now on; return whether all is seen that its bytes depend on."""
        kind: Any = type(item)
        if kind in _FIXED:
            return True
        if isinstance(item, type):
            return self._add_type(item, by_value)
        if isinstance(item, torch.Tensor):
            self._tensors.append(item)
            return True
        if kind is ModuleType:
            self._names.append((sys.modules, item.__name__))
            return sys.modules.get(item.__name__) is item
        if kind is BuiltinFunctionType:  # a method of an object, or a function of a module
            return not isinstance(item.__self__, ModuleType) or self._add_home(item)
        if kind is FunctionType and not by_value and _is_at_home(item):
            return self._add_home(item)
        if kind in _CONTAINERS:
            self._take(item)
        elif kind is FunctionType or kind in _OF_CODE or _is_transparent(kind):
            self._looked.append(item)
        else:
            return False
        attributes = getattr(item, "__dict__", None)
        if attributes is not None:
            self._take(attributes)
        if kind is FunctionType:
            self._add_function(item, by_value)
        return not isinstance(item, KerasSaveable) or self._add_of_keras(item)

    def _add_type(self, item: type, by_value: bool) -> bool:
        if by_value:
            (attributes,) = gc.get_referents(vars(item))  # the dict behind it
            self._take(attributes)
            self._types.append(item)
            return type(item) is type
        # cloudpickle has names of its own for classes of Python's that stand nowhere.
        is_pythons = item.__module__ == "builtins" and not item.__flags__ & _HEAP
        return is_pythons or self._add_home(item)

    def _add_home(self, item: Any) -> bool:
        if not _is_at_home(item):
            return False
        self._homes.append((sys.modules[item.__module__], attrgetter(item.__qualname__)))
        return True

    def _add_function(self, item: FunctionType, by_value: bool) -> None:
        for content in (item.__kwdefaults__, item.__annotations__):
            if content is not None:
                self._take(content)
        self._looked += item.__closure__ or ()
        if by_value:
            there = item.__globals__
            self._absent += [(there, n) for n in names_in(item.__code__) if n not in there]
            self._names += [(there, name) for name in _OF_MODULE]

    def _add_of_keras(self, item: Any) -> bool:
        """Look at what `ModelPickler.state` reads besides the attributes."""
        attachment = attachment_of(item)
        if attachment is not None:
            self._take(vars(attachment))
            self._take(attachment.hooks)
            self._take(attachment.replaced)
        found = [each for each in vars(item).values() if isinstance(each, dict | set)]
        for each in found:  # an optimizer's are pickled by the keys of its variables
            self._take(each)
        return all(type(each) in _CONTAINERS for each in found)

    def _take(self, content: Any) -> None:
        self._looked.append(content)
        self._sized.append(content)
        if isinstance(content, dict):
            self._keyed.append(content)


_OF_MODULE = ("__package__", "__name__", "__path__", "__file__")
"""Globals that cloudpickle gives to each function by value."""
_NAMES_OF_TYPE = attrgetter("__name__", "__qualname__", "__module__", "__bases__")


@cache
def _is_transparent(kind: type) -> bool:
    """Return whether the attributes of an object of a class are all that its bytes depend on."""
    package = kind.__module__.partition(".")[0]
    if issubclass(kind, torch.nn.ParameterDict | torch.nn.ParameterList):
        return package == "torch"
    if kind.__module__ == ModelPickler.__module__:  # it was made for the bytes
        return True
    if package not in ("keras", "inspect", "enum") or issubclass(kind, IndexLookup):
        return False
    of_c = [each for each in kind.__mro__ if each.__module__.partition(".")[0] not in _OF_PYTHON]
    reducers = ("__reduce__", "__reduce_ex__", "__getstate__")
    return set(of_c) <= {object, tuple, int, str} and (
        issubclass(kind, (KerasSaveable, *_WITH_REDUCERS))
        or all(getattr(kind, name) is getattr(object, name) for name in reducers)
    )


def _is_at_home(item: Any) -> bool:
    """Return whether a class or function stands where its name says, so that pickle finds it."""
    try:
        found: Any = attrgetter(item.__qualname__)(sys.modules[item.__module__])
    except (AttributeError, KeyError):
        return False
    return found is item


def _form_of(tensor: Any) -> Any:
    """Return what the bytes have of a tensor, which they name by its number."""
    place = None if tensor.is_meta else tensor.untyped_storage().data_ptr()
    form = type(tensor), tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad
    return *form, place, tensor.data_ptr(), tensor.stride()
