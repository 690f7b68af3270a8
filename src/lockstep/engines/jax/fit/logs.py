"""Logs that stay on the device until somebody looks at a value."""

from collections.abc import Callable, Iterator
from typing import Any

import jax

Numbers = Callable[[dict[str, Any]], dict[str, Any]]


def later(logs: dict[str, Any] | None, numbers: Numbers) -> dict[str, Any]:
    """What Keras hands to callbacks for `logs`, fetched only when it is looked at.

    Args:
        logs: What a step returned, or what this has made of it.
        numbers: Turns such logs into plain numbers, as Keras does.

    Returns:
        A dict. Where the step returned anything but JAX arrays, a plain one at once:
        a variable, say, would have another value later.
    """
    if type(logs) is LaterLogs:
        return logs
    flat = _flat(logs) if logs else {}
    if flat and all(isinstance(value, jax.Array) for value in flat.values()):
        return LaterLogs(flat, numbers)
    return numbers(logs or {})


def _flat(logs: dict[str, Any]) -> dict[str, Any]:
    flat = {}
    for name in sorted(logs):
        value = logs[name]
        flat.update(_flat(value) if isinstance(value, dict) else {name: value})
    return flat


class LaterLogs(dict[str, Any]):
    """A dict that fetches its values when the first of them is asked for.

    Names, length and order are known before. Whatever gives out, compares or changes a
    value fetches all of them; from then on this is an ordinary dict of numbers. A copy
    is a plain dict.
    """

    __slots__ = ("_numbers",)

    def __init__(self, arrays: dict[str, Any], numbers: Numbers) -> None:
        super().__init__(arrays)
        self._numbers: Numbers | None = numbers

    def fetch(self) -> None:
        """Make the values numbers; does nothing where they are."""
        if self._numbers is not None:
            numbers = self._numbers(dict(dict.items(self)))
            self._numbers = None
            dict.update(self, numbers)

    # An own __iter__ is also what makes dict(logs) and {**logs} ask for the items.
    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self)

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (self.copy(),)

    def __reduce_ex__(self, protocol: Any) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return self.__reduce__()

    def copy(self) -> dict[str, Any]:
        """A plain dict of the numbers."""
        return dict(self.items())


def _fetching(name: str) -> Callable[..., Any]:
    original = getattr(dict, name)

    def method(self: LaterLogs, *args: Any, **kwargs: Any) -> Any:
        self.fetch()
        return original(self, *args, **kwargs)

    method.__name__ = name
    method.__doc__ = original.__doc__
    return method


_OF_ITEMS = ["__getitem__", "__setitem__", "__delitem__", "get", "items", "values"]
_OF_CHANGE = ["pop", "popitem", "setdefault", "update", "clear"]
_OF_WHOLE = ["__eq__", "__ne__", "__repr__", "__or__", "__ror__", "__ior__"]
for _name in [*_OF_ITEMS, *_OF_CHANGE, *_OF_WHOLE]:
    setattr(LaterLogs, _name, _fetching(_name))
