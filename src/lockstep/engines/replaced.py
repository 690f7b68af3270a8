"""Attributes of instances, replaced for a while."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """While it lasts, each instance has this attribute, past Keras's tracking.

    Args:
        changes: An instance, the name of an attribute, and what it is.
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
