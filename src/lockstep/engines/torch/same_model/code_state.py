"""The values that a model's code reads from outside of the model, for its workers.

Functions of the script travel with the globals that they name. A worker imports modules anew. So it
is sent the attributes that the user's modules and their classes have here, as far as code of these
modules names them, and the functions that the user has put into Keras, PyTorch or another package.
"""

import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import EnumType
from functools import (
    cache,
    cached_property,
    lru_cache,
    partial,
    partialmethod,
    singledispatchmethod,
)
from itertools import chain
from operator import is_, methodcaller
from types import CellType, CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import keras
import numpy as np
import torch

from lockstep.core.own_code import is_own
from lockstep.engines.replicas.object_states import names_in
from lockstep.keras_compat import KerasSaveable, module_in_keras, tracked_collections

Place = tuple[str, str]
"""The name of a module, and of a class in it, which is empty for the module itself."""

State = dict[Place, dict[str, Any]]

_MAIN = "__main__"
_LARGEST = 1000
"""The number of items up to which a container or array is compared item by item."""

_CONTAINERS = (list, dict, set, *tracked_collections())
_MISSING = object()


class AsDefined:
    """A placeholder for a function or class that is still as its module defines it."""


class Attributes:
    """The attributes of an object, module or class at one moment."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._values = list(attributes.values())

    def are(self, now: Mapping[str, Any]) -> bool:
        """Return whether these are the attributes still, but for the mode of a module of PyTorch.

        Each step is sent with its mode.
        """
        if len(now) != len(self._values):
            return False
        if all(map(is_, now.values(), self._values)):
            return True
        each = zip(now.items(), self._values, strict=True)
        return all(value is before or name == "training" for (name, value), before in each)


class AllAttributes:
    """The attributes of many objects at one moment, compared without a call of Python for each.

    Args:
        every: Their dicts, or views of these.
    """

    def __init__(self, every: list[Mapping[str, Any]]) -> None:
        self._every = every
        self._lengths = list(map(len, every))
        self._values = list(chain.from_iterable(map(_VALUES, every)))

    def are_still(self) -> bool:
        """Return whether each has the same objects in the same order."""
        now = chain.from_iterable(map(_VALUES, self._every))
        return list(map(len, self._every)) == self._lengths and all(map(is_, now, self._values))


_VALUES = methodcaller("values")


class CodeReads:
    """The values that code of a model read from outside of it, when it was pickled."""

    def __init__(self) -> None:
        self._names: list[tuple[Any, str, Any]] = []
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._objects: list[tuple[dict[str, Any], Attributes]] = []
        self._of_users: list[dict[str, Any]] = []

    def watch(self, item: Any) -> None:
        """Note which objects the attributes of an object are, and what those of users contain.

        Args:
            item: An object of Keras, or of a subclass.
        """
        attributes = vars(item)
        self._objects.append((attributes, Attributes(attributes)))
        if not module_in_keras(type(item)):
            self._of_users.append(attributes)
            self._look_into_attributes(attributes)

    def _look_into_attributes(self, attributes: dict[str, Any]) -> None:
        for name, value in attributes.items():
            if name not in _names_of_keras():
                self._look_into(value)

    def add(self, owner: Any, values: dict[str, Any]) -> None:
        """Note values by name.

        Args:
            owner: Whose they are: a dict of globals, a class, or a cell.
            values: The values.
        """
        for name, value in values.items():
            self._names.append((owner, name, value))
            self._look_into(value)

    def names(self) -> list[tuple[Any, str, Any]]:
        """Return the owners, names and values that were noted."""
        return list(self._names)

    def last(self, refused: Callable[[Any], bool]) -> tuple[str, Any] | None:
        """Return the last name that was noted with a value like this, and the value.

        Args:
            refused: Whether it is a value like this.
        """
        for owner, name, value in reversed(self._names):
            if refused(value):
                return (f"{owner.__qualname__}.{name}" if isinstance(owner, type) else name), value
        return None

    def _look_into(self, value: Any) -> None:
        if is_plain_object(value):
            value = vars(value)
        is_array = type(value) is np.ndarray and value.size <= _LARGEST and value.dtype != object
        if not (is_array or type(value) in _CONTAINERS) or id(value) in self._containers:
            return
        self._containers[id(value)] = value, value.copy()
        if is_array:
            return
        if len(value) <= _LARGEST:
            for item in value.values() if isinstance(value, dict) else value:
                self._look_into(item)

    def changed(self) -> bool:
        """Return whether a name stands for another object, or a container has other items.

        Arrays of NumPy of a few numbers are containers too.
        """
        return self._code_changed() or self.objects_changed()

    def _code_changed(self) -> bool:
        return any(_value(owner, name) is not value for owner, name, value in self._names) or (
            not all(_is_alike(*pair) for pair in self._containers.values())
        )

    def objects_changed(self, owners: Collection[Any] | None = None) -> bool:
        """Return whether an attribute of an object, of one of the owners if given, is another."""
        among = None if owners is None else {id(vars(owner)) for owner in owners}
        noted = (pair for pair in self._objects if among is None or id(pair[0]) in among)
        return not all(before.are(now) for now, before in noted)

    def renew(self) -> None:
        """Note the values that names and containers have now."""
        self._objects = [(now, Attributes(now)) for now, _ in self._objects]
        if not self._code_changed():
            return
        names, self._names, self._containers = self._names, [], {}
        for attributes in self._of_users:
            self._look_into_attributes(attributes)
        for owner, name, _ in names:
            value = _value(owner, name)
            if value is not _MISSING:
                self.add(owner, {name: value})


def _value(owner: Any, name: str) -> Any:
    if isinstance(owner, CellType):
        return contents_of(owner).get(name, _MISSING)
    return (owner if isinstance(owner, dict) else vars(owner)).get(name, _MISSING)


def contents_of(cell: CellType) -> dict[str, Any]:
    """Return what a cell of a closure holds, by the name of the attribute."""
    try:
        return {"cell_contents": cell.cell_contents}
    except ValueError:  # the function that made it has not assigned to it yet
        return {}


@cache
def _names_of_keras() -> frozenset[str]:
    """Return the attributes that any object of Keras has: its own lists change in each step."""
    made = (
        keras.layers.Layer(name="any"),
        keras.Model(name="any"),
        keras.losses.Loss(name="any"),
        keras.metrics.Metric(name="any"),
    )
    return frozenset(name for each in made for name in vars(each))


def _is_alike(container: Any, before: Any) -> bool:
    if isinstance(before, np.ndarray):
        return bool(container.tobytes() == before.tobytes())
    if len(container) != len(before):
        return False
    if len(before) > _LARGEST:
        return True
    if isinstance(before, set):
        return bool(container == before)
    if isinstance(before, dict) and list(map(id, container)) != list(map(id, before)):
        return False
    values = (each.values() if isinstance(each, dict) else each for each in (container, before))
    return all(a is b for a, b in zip(*values, strict=True))


def is_plain_object(value: Any) -> bool:
    """Return whether a value has attributes alone: options, say, in a class of the user's."""
    owner = type(value)
    plain = owner.__module__ in (_MAIN, "argparse", "types") or _is_own_name(owner.__module__)
    is_keras = isinstance(value, KerasSaveable | torch.nn.Module)
    return plain and not is_keras and type(getattr(value, "__dict__", None)) is dict


def _is_own_name(name: Any) -> bool:
    module = sys.modules.get(name) if isinstance(name, str) else None
    return isinstance(module, ModuleType) and is_own(module)


# ------------------------------------------------------------------- what is sent


def state_of(
    modules: Iterable[str], code: Iterable[CodeType], travels: Callable[[Any], bool]
) -> State:
    """Return the attributes of the user's modules and their classes that code names.

    A function, a class or a member of an enum that stands where it was defined is `AsDefined`.

    Args:
        modules: The names of modules whose code a model uses.
        code: The code of the functions that travel by value.
        travels: Whether an object can be pickled.
    """
    own = _own_modules(modules)
    functions = [*code, *(f.__code__ for module in own for f in _functions_of(module))]
    names: set[str] = set().union(*map(names_in, functions))
    found: State = {}
    for module in own:
        for owner, qualname in [(module, ""), *((c, c.__qualname__) for c in _classes_of(module))]:
            values = {
                name: AsDefined if _is_of(owner, module, name, value) else value
                for name, value in list(vars(owner).items())  # pickling may add to them
                if name in names and not name.startswith("__") and _may_travel(value, travels)
            }
            if values:
                found[module.__name__, qualname] = values
    return found


def patches(modules: Iterable[str]) -> tuple[State, bool]:
    """Return the functions of the user that stand in packages which a model uses.

    Args:
        modules: The names of modules whose code a model uses.

    Returns:
        The functions, and whether any code of the user stands there: a property or a callable
        object, say, is not sent.
    """
    owners, installed, known, last = _installed(len(sys.modules), _packages(modules))
    if last and last[0].are_still():
        return {}, False
    found: State = {}
    is_patched = False
    for place, owner in owners:
        key = place if place is not _NOT_SENT else (str(id(owner)), "")
        if key in known and known[key].are(vars(owner)):
            continue
        patched = {}
        is_plain = True
        for name, value in list(vars(owner).items()):
            if _is_code_of_user(value, installed):
                is_plain = False
                if type(value) is FunctionType:
                    patched[name] = value
        if patched and place is not _NOT_SENT:
            found[place] = patched
        if is_plain:
            known[key] = Attributes(vars(owner))
        is_patched |= not is_plain
    last[:] = [] if is_patched else [AllAttributes([vars(owner) for _, owner in owners])]
    return found, is_patched


def _is_code_of_user(value: Any, installed: set[int]) -> bool:
    """Return whether a value in a package is a function of the user, or an object that calls one.

    Args:
        value: The value.
        installed: The identities of the globals of the package.
    """
    if type(value) is FunctionType:
        home = value.__globals__.get("__name__")
        is_installed = id(value.__globals__) in installed
        return not is_installed and (home == _MAIN or _is_own_name(home))
    if type(value) in _WRAPPERS:
        return any(_is_code_of_user(each, installed) for each in _functions_in(value))
    kind = type(value)
    return callable(value) and (kind.__module__ == _MAIN or _is_own_name(kind.__module__))


def unpatched(modules: Iterable[str]) -> "AllAttributes | None":
    """Return the attributes of the packages in use, as the last call of `patches` has found them.

    There are none if a function of the user stands in one, or a module is the user's own.

    Args:
        modules: The names of modules whose code a model uses.
    """
    *_, last = _installed(len(sys.modules), _packages(modules))
    return last[0] if last and not _own_modules(modules) else None


def _packages(modules: Iterable[str]) -> frozenset[str]:
    found = {name.partition(".")[0] for name in modules if not _is_own_name(name)}
    return frozenset(found - {"torch", "numpy", "lockstep", _MAIN} | {"keras", "torch.nn"})


@lru_cache(maxsize=1)
def _installed(
    number: int, packages: frozenset[str]
) -> tuple[list[tuple[Place, Any]], set[int], dict[Place, Attributes], list["AllAttributes"]]:
    """Return the modules and classes of packages, and the identities of their globals.

    The dict is for the attributes of those in which no function of the user's was found, and the
    list for those of all, if there was none in any.

    Args:
        number: The number of modules that are imported, with which the result changes.
        packages: The names of the packages.
    """
    starts = tuple(f"{name}." for name in packages)
    owners: list[tuple[Place, Any]] = []
    namespaces = set()
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and f"{name}.".startswith(starts):
            namespaces.add(id(vars(module)))
            parts = [("", module), *((each.__qualname__, each) for each in _classes_of(module))]
            owners += [((name, part), owner) for part, owner in parts]
    owners += [(_NOT_SENT, owner) for owner in _OF_TORCH]
    return owners, namespaces, {}, []


_NOT_SENT: Place = ("", "")
_OF_TORCH: tuple[Any, ...] = (
    torch,
    torch.Tensor,
    torch.linalg,
    torch.nn.functional,
    torch.special,
)
"""Where code of the user is looked for that stands in PyTorch itself. It is not sent."""


def claims_other_home(function: FunctionType) -> bool:
    """Return whether `functools.wraps` has given a function the name of the one it replaces."""
    name = function.__globals__.get("__name__", "")
    if name == function.__module__:
        return False
    return name == _MAIN or (_is_own_name(name) and not _is_own_name(function.__module__))


def _own_modules(names: Iterable[str]) -> list[ModuleType]:
    """Return the user's modules among these, and those that they reach."""
    found: dict[str, ModuleType] = {}
    waiting = sorted(names)
    seen = set(waiting)
    while waiting:
        name = waiting.pop(0)
        if name == _MAIN or not _is_own_name(name):
            continue
        found[name] = module = sys.modules[name]
        for value in list(vars(module).values()):
            reached = value.__name__ if isinstance(value, ModuleType) else _module_of(value)
            if reached not in seen:
                seen.add(reached)
                waiting.append(reached)
    return list(found.values())


def _module_of(value: Any) -> str:
    owner = value if isinstance(value, type | FunctionType) else type(value)
    name = getattr(owner, "__module__", "")
    return name if isinstance(name, str) else ""


def _classes_of(module: ModuleType) -> list[type]:
    name = module.__name__
    own = (v for v in list(vars(module).values()) if isinstance(v, type) and v.__module__ == name)
    return [each for each in dict.fromkeys(own) if "<" not in each.__qualname__]


def _functions_of(module: ModuleType) -> Iterator[FunctionType]:
    for owner in (module, *_classes_of(module)):
        for value in list(vars(owner).values()):
            yield from _functions_in(value)


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """Return a function, and those that a decorator of Python's has put behind it."""
    if isinstance(value, FunctionType):
        yield value
        registry = getattr(value, "registry", None)  # of `functools.singledispatch`
        if isinstance(registry, MappingProxyType):
            yield from (each for each in registry.values() if isinstance(each, FunctionType))
    if isinstance(value, _DECORATED):
        for name in ("__func__", "fget", "fset", "func", "dispatcher", "__wrapped__"):
            yield from _functions_in(getattr(value, name, None))


_DECORATED = (
    *(FunctionType, property, staticmethod, classmethod, type(lru_cache(len))),
    *(cached_property, partial, partialmethod, singledispatchmethod),
)


def _is_of(owner: Any, module: ModuleType, name: str, value: Any) -> bool:
    """Return whether a class, a function or a member of an enum was defined where it stands."""
    if isinstance(owner, EnumType) and name in owner.__members__:
        return True
    if not isinstance(value, type | FunctionType):
        return False
    qualname = name if isinstance(owner, ModuleType) else f"{owner.__qualname__}.{name}"
    at_home = value.__module__ == module.__name__ and value.__qualname__ == qualname
    return at_home and not (isinstance(value, FunctionType) and claims_other_home(value))


_WRAPPERS = frozenset({*_DECORATED} - {FunctionType})

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_ARRAYS = (np.ndarray, np.generic, torch.Tensor, keras.Variable, KerasSaveable)


def _may_travel(value: Any, travels: Callable[[Any], bool]) -> bool:
    if isinstance(value, ModuleType | property | staticmethod | classmethod):
        return False
    if isinstance(value, (*_SCALARS, *_ARRAYS, type)):
        return True
    return travels(value)


# ------------------------------------------------------------------- what a worker does with it


class SetCode:
    """The attributes of modules and classes that a worker has set, as the caller has them."""

    def __init__(self) -> None:
        self._imported: dict[tuple[Place, str], Any] = {}
        self._patched: set[tuple[Place, str]] = set()

    def apply(self, state: State, patched: State) -> None:
        """Set what `state_of` and `patches` have returned in the process of the caller."""
        names = {(place, name) for place, values in patched.items() for name in values}
        for place, name in self._patched - names:
            self._set(place, name, AsDefined)
        self._patched = names
        for place, values in [*state.items(), *patched.items()]:
            for name, value in values.items():
                self._set(place, name, value)

    def _set(self, place: Place, name: str, value: Any) -> None:
        owner = owner_of(place)
        imported = self._imported.setdefault((place, name), vars(owner).get(name, _MISSING))
        if value is not AsDefined:
            setattr(owner, name, value)
        elif imported is not _MISSING and imported is not vars(owner).get(name):
            setattr(owner, name, imported)


def owner_of(place: Place) -> Any:
    """Return a module or class, which is imported for it."""
    owner: Any = importlib.import_module(place[0])
    for name in filter(None, place[1].split(".")):
        owner = getattr(owner, name)
    return owner
