"""Refuses a file of the user that trains a model while it is imported."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from lockstep.errors import TargetNotFound


@contextmanager
def training_refused(place: str) -> Iterator[None]:
    """Raise where `fit` of any model is called within the block.

    Keras is not imported, so a file may still choose its backend.

    Args:
        place: The file or module that is being imported, for the message.

    Raises:
        TargetNotFound: At the call of `fit`, before the first step.
    """
    watch = _Watch(place)
    sys.meta_path.insert(0, watch)
    watch.find_spec("", None)  # Keras may be imported already
    try:
        yield
    finally:
        sys.meta_path.remove(watch)
        watch.undo()


class _Watch(MetaPathFinder):
    """Patches Keras as soon as it is imported; as a finder, it sees every import."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._patched: Any = None
        self._begin: Any = None

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find nothing; every loop of Keras and lockstep begins with a list of callbacks."""
        every_list: Any = getattr(sys.modules.get("keras.callbacks"), "CallbackList", None)
        if every_list is not None and self._patched is None:
            self._patched, self._begin = every_list, every_list.on_train_begin
            every_list.on_train_begin = self._refuse
        return None

    def undo(self) -> None:
        if self._patched is not None:
            self._patched.on_train_begin = self._begin

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        line = _line_of_module(sys._getframe(1))
        raise TargetNotFound(
            f"{self._place} trains a model while it is imported{line}, and the command imports it "
            "to call a function.\n"
            "Put what trains under if __name__ == '__main__':, and leave what the function needs "
            "above."
        )


def _line_of_module(frame: FrameType | None) -> str:
    """Where the innermost module on the stack is, in words."""
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            return f" ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})"
        frame = frame.f_back
    return ""
