"""Replacement of attributes of instances, for a context or until it is undone."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def patched(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replace attributes of instances inside the context, without Keras's tracking.

    Args:
        changes: Tuples of an instance, the name of an attribute, and its value.
    """
    changes = list(changes)
    before = [(item, name, vars(item).get(name, _ABSENT)) for item, name, _ in changes]
    for item, name, value in changes:
        vars(item)[name] = value
    try:
        yield
    finally:
        for item, name, value in reversed(before):
            if value is _ABSENT:
                vars(item).pop(name, None)
            else:
                vars(item)[name] = value


class Replaced:
    """Attributes of instances that were replaced, without Keras's tracking."""

    def __init__(self) -> None:
        self._changes: list[tuple[Any, str, Any, Any]] = []

    def replace(self, item: Any, name: str, value: Any) -> None:
        """Replace an attribute."""
        self._changes.append((item, name, value, vars(item).get(name, _ABSENT)))
        vars(item)[name] = value

    def undo(self) -> None:
        """Put back what was there, except for attributes that were replaced again since."""
        for item, name, value, before in reversed(self._changes):
            if vars(item).get(name) is not value:
                continue
            if before is _ABSENT:
                del vars(item)[name]
            else:
                vars(item)[name] = before
        self._changes.clear()
