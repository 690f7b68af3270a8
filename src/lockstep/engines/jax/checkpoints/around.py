"""What lasts as long as a `fit` does, from before its first callback is called."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras

from lockstep.engines import callback_states
from lockstep.engines.jax.checkpoints import backup
from lockstep.engines.jax.several import processes
from lockstep.engines.recording import Recorder
from lockstep.errors import CheckpointError, UnsupportedModel


@contextmanager
def around_fit(model: Any, fit: Callable[..., Any], given: Any) -> Iterator[None]:
    """Make what callbacks write safe while `fit` runs, and let a checkpoint see it whole.

    Args:
        model: The model.
        fit: The method that will run.
        given: The callbacks that it is given: one, a list, a `CallbackList`, or `None`.

    Raises:
        CheckpointError: If these callbacks cannot work together.
        UnsupportedModel: If a checkpoint of this model could not be exact.
    """
    callbacks = processes.flat(given)
    recorders = [each for each in callbacks if isinstance(each, Recorder)]
    if processes.several():
        processes.check_orbax(callbacks)
    with ExitStack() as stack:
        for callback in callbacks:
            if isinstance(callback, keras.callbacks.BackupAndRestore):
                stack.enter_context(backup.made_safe(callback))
        if recorders:
            _check(model, given, fit, callbacks, recorders)
            others = (each for each in callbacks if each is not recorders[0])
            recorders[0].beside = tuple(type(each).__name__ for each in others)
            several, first = processes.several(), processes.is_first()
            stack.enter_context(recorders[0].around(model, writes=first, alone=not several))
            found = recorders[0].goes_on_from()
            if several:
                processes.check_same_run(found)
            if found is not None:
                stack.enter_context(callback_states.appending(callbacks))
        yield


def _check(
    model: Any, given: Any, fit: Callable[..., Any], callbacks: list[Any], recorders: list[Any]
) -> None:
    if isinstance(given, keras.callbacks.CallbackList):
        raise CheckpointError(
            "lockstep.Checkpoint was given in a keras.callbacks.CallbackList, which would not tell "
            "it all it has\nto know. Give fit a plain list of callbacks."
        )
    if len(recorders) > 1:
        raise CheckpointError(
            f"{len(recorders)} checkpoints were given to one fit, and a run is resumed from one.\n"
            "Leave the others out."
        )
    if any(isinstance(each, keras.callbacks.BackupAndRestore) for each in callbacks):
        raise CheckpointError(
            "BackupAndRestore and lockstep.Checkpoint were given to one fit, and both would "
            "resume it.\nLeave BackupAndRestore out."
        )
    if not fit.__module__.startswith("lockstep."):
        raise UnsupportedModel(
            f"{type(model).__name__} has a fit of its own, and lockstep.Checkpoint can see into "
            "lockstep's loop only.\nOverride train_step instead of fit, or use "
            "keras.callbacks.BackupAndRestore."
        )
