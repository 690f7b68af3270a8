"""Temporary replacement of attributes of instances."""

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
