"""`lockstep.Checkpoint`: save what a run changes, and go on from there."""

import contextlib
import math
import os
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import keras

from lockstep.checkpoints.arguments import check_arguments, check_kept
from lockstep.checkpoints.arrays import Entry
from lockstep.checkpoints.background import Background
from lockstep.checkpoints.differences import check_facts, check_variables
from lockstep.checkpoints.folder import Found, RunFolder
from lockstep.checkpoints.lock import only_writer
from lockstep.checkpoints.manifest import read_manifest
from lockstep.checkpoints.plain import from_plain, to_plain
from lockstep.checkpoints.retention import Retention
from lockstep.checkpoints.signals import Signals
from lockstep.engines.callback_states import less_is_better
from lockstep.engines.recording import Recorder, Run, Snapshot
from lockstep.errors import CheckpointError, CheckpointWarning, UnsupportedModel

MODEL = "model.keras"


class Checkpoint(Recorder, keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Save everything a `fit` changes, and let the next `fit` with this folder go on from there.

    A run that was killed at any moment and started again, on any number of devices, ends with
    the weights and the history of a run that was not: bit for bit on the same number of
    devices, and within what devices make of rounding on another. What is on disk is complete
    or absent; a save that fails leaves the one before, and warns (`CheckpointWarning`). The
    first SIGTERM or SIGINT ends the step, saves and leaves `fit` (docs/checkpoints.md).

    Args:
        directory: The folder of this run; new, empty, or one that it has written.
        every: `"epoch"`, the only word there is: save at the end of every epoch.
        steps: Save after so many steps instead, within epochs too.
        seconds: Save after so many seconds instead, within epochs too.
        keep: How many of the newest checkpoints stay, at least 1.
        monitor: A name in the logs of an epoch, such as `"val_loss"`. An epoch in which it is
            better than ever is saved too.
        mode: `"min"`, `"max"`, or `"auto"`, which asks the metric.
        keep_best: Whether the checkpoint with the best monitored value stays too.
        keep_model: Whether a plain `model.keras` is written into the folder when `fit` ends:
            of the best checkpoint where something is monitored, else of the model as it is.
        background: Whether a thread writes while training goes on.

    Raises:
        CheckpointError: If the arguments make no sense, or, from `fit`, if the folder holds
            something else (`NotARun`), was written with another model, optimizer or data
            (`CheckpointMismatch`) or by a newer lockstep (`NewerCheckpoint`), or if no
            checkpoint in it is whole (`DamagedCheckpoint`).
        UnsupportedModel: From `fit`, if the model is not distributed (one device is enough).

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
        keep_model: bool = False,
        background: bool = True,
    ) -> None:
        super().__init__()
        check_arguments(every, steps, seconds, keep, mode)
        check_kept(monitor, keep_best, keep_model)
        # A callback may change the folder that relative paths are of.
        self._folder = RunFolder(Path(directory).expanduser().absolute())
        self._steps, self._seconds = steps, seconds
        self._every_epoch = steps is None and seconds is None
        self._monitor, self._mode = monitor, mode
        self._keep_model = keep_model
        self._retention = Retention(keep, keep_best)
        self._background = Background(background)
        self._signals = Signals()
        self._found: Found | None = None
        self._run: Run | None = None
        self._within_fit = self._told_left_over = False
        self._writes = self._less = True
        self._facts: dict[str, Any] = {}
        self._logs: dict[str, Any] = {}
        self._epoch = self._step = self._since = 0
        self._last_save = 0.0

    # ------------------------------------------------------- what `fit` tells a recorder

    @contextmanager
    def around(self, model: Any, *, writes: bool, alone: bool) -> Iterator[None]:
        """Lasts as long as `fit` does; no thread and no handler of signals is left after it.

        Of several processes one writes; which signals they wait for is up to JAX.
        """
        self._writes = writes
        self._folder.check()
        with ExitStack() as stack:
            if writes:
                self._folder.open()
                stack.enter_context(only_writer(self._folder.path))
            self._found = self._folder.newest(_warn)
            self._run, self._within_fit, self._told_left_over = None, True, False
            self._signals = Signals()
            try:
                with self._signals if alone else nullcontext():
                    yield
                    self._background.finish()
                    self._write_model()
                    if self._signals.asked is not None:  # since the last epoch ended
                        self._signals.leave()
            finally:
                self._background.finish()
                self._found = self._run = None
                self._within_fit = False
        self._say_failure()

    def goes_on_from(self) -> str | None:
        """The name of the checkpoint to go on from, `None` where there is none."""
        return None if self._found is None else self._found.path.name

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuse a model that is not distributed: nobody tells this callback of its steps."""
        if not self._within_fit:
            raise UnsupportedModel(
                "lockstep.Checkpoint was given to a model that is not distributed by lockstep's "
                "JAX engine, whose loop alone\nit can see into. Call "
                "lockstep.distribute(model, devices=1) first; one device is enough."
            )

    def begin(self, run: Run, epoch: int) -> int:
        """All callbacks know that training begins; the epoch to begin with, instead of `epoch`."""
        self._run, found = run, self._found
        self._facts, self.stopped_by = run.facts(), None
        self._epoch, self._step, self._since = epoch, 0, 0
        self._last_save = time.monotonic()
        if self._monitor is not None:
            self._less = less_is_better(run.model, self._monitor, self._mode)
        self._retention.monitored.clear()
        self._retention.broken.clear()
        for path in self._folder.checkpoints():
            self._note(path)
        _plain(run.state(0), {})  # better now than after an epoch
        if found is None:
            return epoch
        self._found = None  # its arrays are large
        return self._resume(run, found, epoch)

    def batch_ended(self, step: int, logs: dict[str, Any]) -> None:
        """So many steps of the epoch are done, and all callbacks have been told."""
        self._say_failure()
        self._since += step - self._step
        self._step, self._logs = step, logs
        asked = self._is_asked()
        if self._fit.model.stop_training and not asked:
            return  # the end of the epoch comes at once, and is saved
        # A save within an epoch is left out while one is under way; the next step asks again.
        if asked or (self._is_due() and not self._background.busy()):
            self._save(self._epoch, step, logs, {"monitor": None})
        self._leave_if_asked()

    def failed(self, error: Exception, between_steps: bool) -> None:
        """Where a signal has ended what makes the batches, save the last step and leave."""
        if self._signals.asked is None or self._run is None:
            return
        saved = between_steps and self._step > 0
        if saved:
            self._save(self._epoch, self._step, self._logs, {"monitor": None})
        _warn(
            f"{type(error).__name__} came after a signal to leave: {str(error)[:200]}\n"
            + ("The last step is saved." if saved else "The checkpoint before is as it was.")
        )
        self._leave_if_asked()

    def epoch_ended(self, epoch: int, logs: dict[str, Any]) -> None:
        """An epoch is done, and all callbacks have been told."""
        self._say_failure()
        self._epoch, self._step = epoch + 1, 0
        monitored = self._monitored(logs)
        last = self._fit.model.stop_training or epoch + 1 == self._fit.epochs
        asked = self._is_asked()
        better = monitored is not None and self._is_better(monitored)
        if self._every_epoch or last or asked or better or self._is_due():
            finite = math.isfinite(float(logs.get("loss", 0.0)))
            self._save(epoch + 1, 0, {}, {"monitor": monitored, "finite": finite})
        self._leave_if_asked()

    # ----------------------------------------------------------------------- saving

    @property
    def _fit(self) -> Run:
        """The `fit` that is under way."""
        assert self._run is not None
        return self._run

    def _is_due(self) -> bool:
        if self._steps is not None:
            return self._since >= self._steps
        return self._seconds is not None and time.monotonic() - self._last_save >= self._seconds

    def _save(self, epoch: int, step: int, logs: dict[str, Any], said: dict[str, Any]) -> None:
        """Copy the state, and have it written; waits for the save before to be done."""
        if not self._writes:
            return
        self._background.finish()
        self._say_failure()
        self._since, self._last_save = 0, time.monotonic()
        others: dict[str, Any] = {}
        run = self._fit
        state = {
            "epoch": epoch,
            "step": step,
            "devices": list(run.devices),
            "epochs": run.epochs,
            "stopped_by": self.stopped_by,
            **said,
            **self._facts,
            "run": _plain(run.state(step), others),
        }
        snapshot = run.snapshot(logs)
        self._background.run(partial(self._write, epoch, step, state, snapshot, others))

    def _write(
        self, epoch: int, step: int, state: dict[str, Any], snapshot: Snapshot, others: Any
    ) -> None:
        entries = [Entry(*each) for each in snapshot.arrays]
        state["variables"] = snapshot.variables
        entries += [Entry(name, array.dtype.name, array.shape) for name, array in others.items()]
        arrays = (array for group in (snapshot.values, others.values()) for array in group)
        path = self._folder.save(f"epoch-{epoch:04}-step-{step:06}", state, entries, arrays)
        self._retention.note(path, state)
        self._folder.keep(self._retention.staying(self._folder.checkpoints()))

    def _monitored(self, logs: dict[str, Any]) -> dict[str, Any] | None:
        if self._monitor is None:
            return None
        if self._monitor not in logs:
            _warn(
                f"monitor={self._monitor!r} was asked for, and the logs of this epoch have "
                f"{', '.join(logs)}."
            )
            return None
        value = float(logs[self._monitor])
        return {"name": self._monitor, "value": value, "mode": "min" if self._less else "max"}

    def _is_better(self, monitored: dict[str, Any]) -> bool:
        self._background.finish()
        best = self._retention.best_of(self._folder.checkpoints(), like=monitored)
        if best is None:
            return True
        value, before = monitored["value"], self._retention.monitored[best]["value"]
        return bool(value < before if monitored["mode"] == "min" else value > before)

    def _is_asked(self) -> bool:
        """Whether a signal has come; of several processes, to one of them."""
        if self._fit.is_told_to_leave():
            self._signals.asked = signal.SIGTERM
        return self._signals.asked is not None

    def _leave_if_asked(self) -> None:
        if self._signals.asked is not None:
            self._background.finish()
            self._say_failure()
            self._fit.wait_for_others()
            self._signals.leave()

    def _say_failure(self) -> None:
        failed = self._background.take_failure()
        if failed is not None:
            _warn(
                f"A checkpoint could not be written into {self._folder.path}: "
                f"{type(failed).__name__}: {failed}.\nTraining goes on, and the checkpoint before "
                "is as it was; the next one is tried."
            )
        left_over = self._folder.left_over
        if left_over is not None and not self._told_left_over:
            self._told_left_over = True
            _warn(f"{left_over}\nTraining and its checkpoints go on; remove it by hand.")

    def _write_model(self) -> None:
        if not (self._keep_model and self._writes) or self._run is None:
            return
        best = self._retention.read_best(self._folder, _warn)
        values = None if best is None else _variables(best)
        try:
            self._run.save_model(str(self._folder.path / MODEL), values)
        except OSError as error:
            _warn(f"{MODEL} could not be written into {self._folder.path}: {error}.")

    # --------------------------------------------------------------------- resuming

    def _resume(self, run: Run, found: Found, asked: int) -> int:
        path, state = str(found.path), found.state
        epoch, step = state["epoch"], state["step"]
        here = [Entry(*each) for each in run.variables()]
        there = [Entry(name, array.dtype.name, array.shape) for name, array in found.arrays.items()]
        check_variables(path, there[: state["variables"]], here)
        check_facts(path, state, self._facts)
        if asked > epoch:
            raise CheckpointError(
                f"initial_epoch={asked} was asked for, and {path} is at epoch {epoch}.\n"
                "Leave initial_epoch out: fit goes on where the checkpoint is."
            )
        restored = from_plain(state["run"], found.arrays)
        restored["logs"] = {
            name.removeprefix("logs/"): array
            for name, array in found.arrays.items()
            if name.startswith("logs/")
        }
        if restored["stopped"]:
            restored["stopped"] = self._stays_stopped(run, found)
        self._say_where(run, found, restored["stopped"])
        words = run.restore(epoch, step, _variables(found), restored)
        if words and self._writes:  # others have fewer callbacks
            _warn(f"Callbacks differ from those that {path} was written with: {'; '.join(words)}.")
        self._epoch, self._step = epoch, step
        return run.epochs if restored["stopped"] else epoch

    def _stays_stopped(self, run: Run, found: Found) -> bool:
        """Whether a run that a callback has stopped is at its end; it says so where it must."""
        state = found.state
        by, epoch = state.get("stopped_by"), state["epoch"]
        if by is not None and by not in self.beside:
            return False  # it was left out, so that the run goes on
        longer = run.epochs > state.get("epochs", run.epochs)
        if epoch < run.epochs and (by != "EarlyStopping" or longer):
            _warn(
                f"{found.path} is of a run that {by or 'a callback'} stopped after {epoch} of "
                f"{run.epochs} epochs, and it stays stopped.\nTo go on from there, leave "
                f"{by or 'that one'} out of callbacks; from the checkpoint before, remove this one."
            )
        return True

    def _say_where(self, run: Run, found: Found, stopped: bool) -> None:
        if not (self.params or {}).get("verbose"):
            return
        state = found.state
        at = f"epoch {state['epoch'] + 1}"
        at += f", after step {state['step']}" if state["step"] else ", its beginning"
        if stopped or state["epoch"] >= run.epochs:
            at = f"the end, after {state['epoch']} epochs: nothing is left to do"
        was, now = len(state["devices"]), len(run.devices)
        print(
            f"lockstep: goes on from {found.path}: {at}; {was} devices then, {now} now", flush=True
        )

    def _note(self, path: Path) -> None:
        with contextlib.suppress(CheckpointError):
            self._retention.note(path, read_manifest(path).state)


def _variables(found: Found) -> list[Any]:
    return list(found.arrays.values())[: found.state["variables"]]


def _plain(state: dict[str, Any], arrays: dict[str, Any]) -> Any:
    try:
        return to_plain(state, "state", arrays)
    except TypeError as error:
        raise CheckpointError(
            f"The state of this run cannot be written down: {error}, and a checkpoint has numbers, "
            "strings,\narrays, lists and dicts. Let get_state() give those."
        ) from error


def _warn(words: str) -> None:
    warnings.warn(words, CheckpointWarning, stacklevel=3)
