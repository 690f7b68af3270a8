"""The arguments of a call of `fit`: by name, its callbacks, and what they ask for."""

import inspect
from collections.abc import Callable
from numbers import Integral
from typing import Any

Given = dict[str, Any]
"""The arguments of one call, by name."""


def arguments_of(fit: Callable[..., Any], args: tuple[Any, ...], kwargs: Given) -> Given:
    """Return the arguments of `fit` in this call, by name."""
    # `fit` itself raises for a wrong call. A `fit` of the user may take **kwargs.
    return {**dict(zip(names_by_place(fit), args, strict=False)), **kwargs}


def callbacks_in(given: Any) -> list[Any]:
    """Return the callbacks of a loop, from one, a list, a `CallbackList`, or `None`."""
    import keras

    if isinstance(given, keras.callbacks.CallbackList):
        given = given.callbacks
    return keras.tree.flatten(given) if given else []


def names_by_place(method: Callable[..., Any]) -> list[str]:
    """Return the names of the positional arguments of a method.

    Arguments that the method takes as `*args` have the names of the method that it overrides.
    """
    names, open_end = _names(method)
    owner = type(getattr(method, "__self__", None))
    name = getattr(method, "__name__", "")
    for overridden in (vars(base).get(name) for base in owner.__mro__):
        if not open_end or overridden is None:
            continue
        longer, open_end = _names(overridden)
        if longer[1 : len(names) + 1] == names:  # all but self
            names = longer[1:]
    return names


def _names(method: Callable[..., Any]) -> tuple[list[str], bool]:
    """Return the names of positional arguments, and whether `*args` follows them."""
    parameters = inspect.signature(method).parameters.values()
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [each.name for each in parameters if each.kind in by_place]
    return names, any(each.kind is each.VAR_POSITIONAL for each in parameters)


def wants_words(given: Given) -> bool:
    """Whether a call of `fit` with these arguments asks for any output."""
    return bool(given.get("verbose", "auto"))


def batch_size_of(given: Given) -> int | None:
    """Return the rows of a batch in a call of `fit`, `None` if only the data know."""
    batch_size, data = given.get("batch_size"), given.get("x")
    if not batch_size:  # 0 is None for Keras too
        batch_size = getattr(data, "batch_size", None)
    if batch_size is None and not given.get("steps_per_epoch") and _is_arrays(data):
        batch_size = 32  # what Keras takes for arrays where nothing is said
    # An attribute of the user's own may be anything, and with steps_per_epoch arrays are cut so.
    if type(batch_size) is bool or not isinstance(batch_size, Integral) or batch_size < 1:
        return None
    return int(batch_size)


def _is_arrays(data: Any) -> bool:
    return hasattr(data, "shape") or isinstance(data, list | tuple | dict)
