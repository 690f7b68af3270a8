"""Checkpoints of a running `fit`: the callback, the files, and what a resumed run restores."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.checkpoint.callback import Checkpoint as Checkpoint

__all__ = ["Checkpoint"]


def __getattr__(name: str) -> Any:
    if name == "Checkpoint":  # later than the rest of the package, as it imports Keras
        from lockstep.checkpoint.callback import Checkpoint

        return Checkpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
