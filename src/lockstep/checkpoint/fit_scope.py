"""The scope of one `fit` with a checkpoint, from before its first callback is called."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras

from lockstep.checkpoint import callback_states
from lockstep.checkpoint.callback import Checkpoint
from lockstep.checkpoint.fit_run import Processes
from lockstep.errors import CheckpointError


@contextmanager
def fit_scope(given: Any, processes: Processes, *, own_loop: bool = False) -> Iterator[None]:
    """Let a checkpoint among the callbacks see the whole of `fit`.

    Args:
        given: The callbacks that `fit` is given: one, a list, a `CallbackList`, or `None`.
        processes: The processes that run it.
        own_loop: Whether the class overrides `fit`. The checkpoint then starts when that `fit`
            calls Keras's; see `lockstep.training.inner_fit`.

    Raises:
        CheckpointError: If these callbacks cannot work together, or the folder cannot be used.
    """
    checkpoint = checkpoint_among(given)
    if checkpoint is None or own_loop:
        yield
        return
    callbacks = callbacks_in(given)
    _check(given, callbacks)
    others = tuple(type(each).__name__ for each in callbacks if each is not checkpoint)
    with ExitStack() as stack:
        several, first = processes.several(), processes.is_first()
        scope = checkpoint.opened(others, writes=first, signals=processes.recorded_signals())
        found = stack.enter_context(scope)
        if several:
            processes.check_same_run(found)
        if found is not None:
            stack.enter_context(callback_states.appending(callbacks))
        yield


def checkpoint_among(given: Any) -> Checkpoint | None:
    """Return the checkpoint among the callbacks of a `fit`."""
    return next((each for each in callbacks_in(given) if isinstance(each, Checkpoint)), None)


def callbacks_in(given: Any) -> list[Any]:
    """Return the callbacks of a loop, from one, a list, a `CallbackList`, or `None`."""
    if isinstance(given, keras.callbacks.CallbackList):
        given = given.callbacks
    return keras.tree.flatten(given) if given else []


def _check(given: Any, callbacks: list[Any]) -> None:
    checkpoints = [each for each in callbacks if isinstance(each, Checkpoint)]
    if isinstance(given, keras.callbacks.CallbackList):
        raise CheckpointError(
            "lockstep.Checkpoint was given in a keras.callbacks.CallbackList, which would not tell "
            "it all it has\nto know. Give fit a plain list of callbacks."
        )
    if len(checkpoints) > 1:
        raise CheckpointError(
            f"{len(checkpoints)} checkpoints were given to one fit, and a run is resumed from "
            "one.\nLeave the others out."
        )
    if any(isinstance(each, keras.callbacks.BackupAndRestore) for each in callbacks):
        raise CheckpointError(
            "BackupAndRestore and lockstep.Checkpoint were given to one fit, and both would "
            "resume it.\nLeave BackupAndRestore out."
        )
