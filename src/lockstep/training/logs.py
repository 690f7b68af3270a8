"""Logs that stay on the device until a value is read."""

from collections.abc import Callable, Iterator
from typing import Any

import keras

Numbers = Callable[[dict[str, Any]], dict[str, Any]]


def lazy_logs(logs: dict[str, Any] | None, numbers: Numbers) -> dict[str, Any]:
    """Return the `logs` for callbacks as a dict that fetches its values on demand.

    Args:
        logs: The logs that a step or this function returned.
        numbers: Turns such logs into plain numbers, as Keras does.

    Returns:
        A dict. It is plain if the step returned a value of another type: a variable, for
            example, would have another value later.
    """
    if type(logs) is LazyLogs:
        return logs
    flat = _flat(logs) if logs else {}
    if flat and all(map(_is_array, flat.values())):
        return LazyLogs(flat, numbers)
    return numbers(logs or {})


def _is_array(value: Any) -> bool:
    """Return whether a value is an array that never changes."""
    return keras.ops.is_tensor(value) and not hasattr(value, "assign")  # a variable


def pythonify_logs(logs: dict[str, Any] | None) -> dict[str, Any]:
    """Return logs as a flat dict of Python numbers, as Keras's function of this name does.

    Keras's function catches every exception while it waits for a value, a `KeyboardInterrupt` too.
    """
    # keras/src/utils/python_utils.py, pythonify_logs
    return {name: _number(value) for name, value in _flat(logs or {}).items()}


def _number(value: Any) -> Any:
    try:
        if keras.ops.is_tensor(value):
            value = keras.ops.convert_to_numpy(value)
        return float(value)
    except Exception:  # not one number
        return value


def _flat(logs: dict[str, Any]) -> dict[str, Any]:
    flat = {}
    for name in sorted(logs):
        value = logs[name]
        flat.update(_flat(value) if isinstance(value, dict) else {name: value})
    return flat


class LazyLogs(dict[str, Any]):
    """A dict that fetches its values when the first of them is read.

    Names, length and order are known before. Any method that returns, compares or changes a value
    fetches all of them. After that this is an ordinary dict of numbers. A copy is a plain dict.
    """

    __slots__ = ("_numbers",)

    def __init__(self, arrays: dict[str, Any], numbers: Numbers) -> None:
        super().__init__(arrays)
        self._numbers: Numbers | None = numbers

    def fetch(self) -> None:
        """Turn the values into numbers, unless they are numbers."""
        if self._numbers is not None:
            numbers = self._numbers(dict(dict.items(self)))
            self._numbers = None
            dict.update(self, numbers)

    # This __iter__ also makes dict(logs) and {**logs} call the item methods.
    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self)

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (self.copy(),)

    def __reduce_ex__(self, protocol: Any) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return self.__reduce__()

    def copy(self) -> dict[str, Any]:
        """Return a plain dict of the numbers."""
        return dict(self.items())


def _fetching(name: str) -> Callable[..., Any]:
    original = getattr(dict, name)

    def method(self: LazyLogs, *args: Any, **kwargs: Any) -> Any:
        self.fetch()
        return original(self, *args, **kwargs)

    method.__name__ = name
    method.__doc__ = original.__doc__
    return method


_OF_ITEMS = ["__getitem__", "__setitem__", "__delitem__", "get", "items", "values"]
_OF_CHANGE = ["pop", "popitem", "setdefault", "update", "clear"]
_OF_WHOLE = ["__eq__", "__ne__", "__repr__", "__or__", "__ror__", "__ior__"]
for _name in [*_OF_ITEMS, *_OF_CHANGE, *_OF_WHOLE]:
    setattr(LazyLogs, _name, _fetching(_name))
