"""`lockstep.Checkpoint`, and the scope of one `fit` with it."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import keras

from lockstep.checkpoint import callback_states
from lockstep.checkpoint.checkpoint_run import CheckpointRun, Settings
from lockstep.checkpoint.fit_run import NO_OBSERVER, Observer
from lockstep.core.files import path_text
from lockstep.core.fit_arguments import callbacks_in
from lockstep.errors import CheckpointError, UnsupportedBackend, UnsupportedModel
from lockstep.processes import process_group


class Checkpoint(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Save the complete state of a `fit`, and resume it in the next `fit` with the same folder.

    A run may be killed at any moment and resumed on any number of devices. On the same number,
    the weights and the history equal those of an uninterrupted run bit for bit; on another
    number, they differ by rounding between devices. A checkpoint on disk is complete or absent.
    A failed save keeps the previous checkpoint and warns (`CheckpointWarning`). The first SIGTERM
    or SIGINT finishes the step, saves and leaves `fit` (docs/checkpoints.md).

    Args:
        directory: The folder of this run: new, empty, or written by this run.
        every: `"epoch"`, the only value: save at the end of every epoch.
        steps: Save after this many steps instead, also within epochs.
        seconds: Save after this many seconds instead, also within epochs.
        keep: Number of newest checkpoints to keep, at least 1.
        monitor: A name in the logs of an epoch, such as `"val_loss"`. Every epoch with a new
            best value is saved too.
        mode: `"min"`, `"max"`, or `"auto"` to derive it from the metric.
        keep_best: Whether to keep the checkpoint with the best monitored value too.
        background: Whether a thread writes while training continues.
        verbose: Whether each save prints a line.
        learning_rate: `"run"`: a resumed run goes on with its own learning rate, and warns if
            `compile` has another one than before. `"compile"`: it goes on with that of `compile`,
            a number or a schedule, if it is another one than before.

    Raises:
        CheckpointError: If an argument is invalid. From `fit`: if the folder cannot be used,
            holds something else (`NotARun`), was written with another model, optimizer or data
            (`CheckpointMismatch`) or by a newer lockstep (`NewerCheckpoint`), or if every
            checkpoint in it is damaged (`DamagedCheckpoint`).
        UnsupportedModel: From `fit`, if the model is not distributed. One device is enough.
        UnsupportedBackend: From `fit`, if there is no engine for the backend of Keras.

    Example:
        >>> model.fit(x, y, epochs=20, callbacks=[lockstep.Checkpoint("runs/digits")])
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        every: str = "epoch",
        *,
        steps: int | None = None,
        seconds: float | None = None,
        keep: int = 3,
        monitor: str | None = None,
        mode: str = "auto",
        keep_best: bool = True,
        background: bool = True,
        verbose: int = 0,
        learning_rate: str = "run",
    ) -> None:
        super().__init__()
        # Absolute, because a callback may change the working directory.
        folder = Path(path_text(directory, "directory", CheckpointError)).expanduser().absolute()
        best = (monitor, mode, keep_best)
        self._settings = Settings(
            folder, every, steps, seconds, keep, *best, background, bool(verbose), learning_rate
        )
        self._run: CheckpointRun | None = None

    @property
    def saves_at_epochs(self) -> bool:
        """Whether no save is due within an epoch."""
        return self._settings.steps is None and self._settings.seconds is None

    def on_train_begin(self, logs: Any = None) -> None:
        """Raise if another training loop than lockstep's runs, which reports no steps here."""
        backend = keras.backend.backend()
        if backend not in ("jax", "tensorflow", "torch"):
            raise UnsupportedBackend(
                f"lockstep.Checkpoint does not work on {backend!r}; it needs 'jax', "
                "'tensorflow' or 'torch'.\nSet KERAS_BACKEND=jax before Keras is imported, or "
                "use keras.callbacks.BackupAndRestore."
            )
        if self._run is None:
            raise UnsupportedModel(
                "lockstep.Checkpoint works only in lockstep's training loop. Either the model "
                "is not distributed, or its fit\ndoes not call Keras's fit. Call "
                "lockstep.distribute(model, devices=1) first; one device is enough.\nIf the "
                "class overrides fit, call super().fit in it, or use "
                "keras.callbacks.BackupAndRestore."
            )

        self._run.prints = bool((self.params or {}).get("verbose"))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Undo the changes of other callbacks if the run resumes within this epoch."""
        if self._run is not None:
            self._run.epoch_began()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save if a save is due, after the other callbacks have seen this batch."""
        if self._run is not None:
            self._run.step_ended(batch + 1, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save if a save is due, after the other callbacks have seen this epoch."""
        if self._run is not None:
            self._run.epoch_ended(epoch + 1, logs)


@contextmanager
def fit_scope(given: Any, *, own_loop: bool = False) -> Iterator[None]:
    """Let a checkpoint among the callbacks see the whole of `fit`.

    Args:
        given: The callbacks that `fit` is given: one, a list, a `CallbackList`, or `None`.
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
    run = CheckpointRun(checkpoint._settings, others)
    with ExitStack() as stack:
        found = stack.enter_context(run.opened())
        if process_group.several():
            process_group.check_same_run(found)
        if found is not None:
            stack.enter_context(callback_states.appending(callbacks))
        checkpoint._run = run
        stack.callback(setattr, checkpoint, "_run", None)
        yield


def observer_among(given: Any) -> Observer:
    """Return what observes a `fit` for the checkpoint among its callbacks, in `fit_scope`."""
    checkpoint = checkpoint_among(given)
    run = None if checkpoint is None else checkpoint._run
    return NO_OBSERVER if run is None else run


def checkpoint_among(given: Any) -> Checkpoint | None:
    """Return the checkpoint among the callbacks of a `fit`."""
    return next((each for each in callbacks_in(given) if isinstance(each, Checkpoint)), None)


def _check(given: Any, callbacks: list[Any]) -> None:
    checkpoints = [each for each in callbacks if isinstance(each, Checkpoint)]
    if isinstance(given, keras.callbacks.CallbackList):
        raise CheckpointError(
            "lockstep.Checkpoint was passed in a keras.callbacks.CallbackList, which hides "
            "events that\nit needs. Pass a plain list of callbacks to fit."
        )
    if len(checkpoints) > 1:
        raise CheckpointError(
            f"{len(checkpoints)} Checkpoint callbacks were passed to one fit, but a run can "
            "resume from only one.\nRemove the others."
        )
    if any(isinstance(each, keras.callbacks.BackupAndRestore) for each in callbacks):
        raise CheckpointError(
            "BackupAndRestore and lockstep.Checkpoint were passed to one fit, but only one of "
            "them can resume it.\nRemove BackupAndRestore."
        )
