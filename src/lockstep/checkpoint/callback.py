"""`lockstep.Checkpoint`: save the state of a run and resume it."""

import contextlib
import math
import os
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import keras

from lockstep.checkpoint.arguments import check_arguments, check_kept
from lockstep.checkpoint.array_file import Entry
from lockstep.checkpoint.background import Background
from lockstep.checkpoint.callback_states import less_is_better
from lockstep.checkpoint.data_workers import Watch
from lockstep.checkpoint.differences import check_facts, check_variables
from lockstep.checkpoint.fit_run import FitRun, Snapshot
from lockstep.checkpoint.folder_lock import only_writer
from lockstep.checkpoint.json_state import from_plain, to_plain
from lockstep.checkpoint.manifest import read_manifest
from lockstep.checkpoint.retention import Retention
from lockstep.checkpoint.run_folder import Found, RunFolder
from lockstep.checkpoint.run_report import position_in_words
from lockstep.checkpoint.signals import Signals
from lockstep.checkpoint.unseeded_shuffle import unseeded_shuffle
from lockstep.errors import (
    CheckpointError,
    CheckpointWarning,
    UnsupportedBackend,
    UnsupportedModel,
    counted,
)

MODEL = "model.keras"


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
        keep_model: Whether to write a plain `model.keras` into the folder when `fit` ends. It
            holds the best checkpoint if `monitor` is set, else the model as it is.
        background: Whether a thread writes while training continues.
        verbose: Whether each save prints a line.

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
        keep_model: bool = False,
        background: bool = True,
        verbose: int = 0,
    ) -> None:
        super().__init__()
        check_arguments(every, steps, seconds, keep, mode)
        check_kept(monitor, keep_best, keep_model)
        # Absolute, because a callback may change the working directory.
        self._folder = RunFolder(Path(directory).expanduser().absolute())
        self._steps, self._seconds = steps, seconds
        self._every_epoch = steps is None and seconds is None
        self._monitor, self._mode = monitor, mode
        self._keep_model, self._verbose = keep_model, bool(verbose)
        self._retention = Retention(keep, keep_best)
        self._background = Background(background)
        self._signals = Signals()
        self._found: Found | None = None
        self._run: FitRun | None = None
        self._watch: Watch | None = None
        self._others: tuple[str, ...] = ()
        self.stopped_by: str | None = None  # the class of the callback that stopped the run
        self._within_fit = self._told_left_over = False
        self._writes = self._less = True
        self._facts: dict[str, Any] = {}
        self._logs: dict[str, Any] = {}
        self._epoch = self._step = self._since = 0
        self._last_save = 0.0

    # ------------------------------------------------------------------ called by `fit`

    @contextmanager
    def opened(
        self, others: tuple[str, ...], *, writes: bool, signals: tuple[int, ...]
    ) -> Iterator[str | None]:
        """Open the folder for one `fit`, and stop every thread and signal handler afterwards.

        Args:
            others: The class names of the other callbacks.
            writes: Whether this process writes the checkpoints.
            signals: The signals after which the step is saved, and the call ends.

        Yields:
            The name of the checkpoint to resume from, or `None`.
        """
        with ExitStack() as stack:
            with _refused_in_words(self._folder.path):
                self._folder.check()
                if writes:
                    self._folder.open()
                    stack.enter_context(only_writer(self._folder.path))
                self._found = self._folder.newest(_warn)
            self._others, self._writes = others, writes
            self._run, self._within_fit, self._told_left_over = None, True, False
            self._signals = Signals(signals)
            try:
                with self._signals:
                    yield None if self._found is None else self._found.path.name
                    self._background.finish()
                    self._write_model()
                    if self._any_asked():  # after the end of the last epoch
                        self._signals.leave()
            finally:
                self._background.finish()
                if self._watch is not None:
                    self._watch.stop()
                self._found = self._run = self._watch = None
                self._within_fit = False
        self._say_failure()

    def on_train_begin(self, logs: Any = None) -> None:
        """Raise if another training loop than lockstep's runs, which reports no steps here."""
        backend = keras.backend.backend()
        if backend not in ("jax", "tensorflow", "torch"):
            raise UnsupportedBackend(
                f"lockstep.Checkpoint was given on {backend!r}, and it needs 'jax', 'tensorflow' "
                "or 'torch'.\nSet KERAS_BACKEND=jax before Keras is imported, or use "
                "keras.callbacks.BackupAndRestore."
            )
        if not self._within_fit:
            raise UnsupportedModel(
                "lockstep.Checkpoint needs lockstep's training loop, and another loop runs: "
                "the model is not\ndistributed, or its fit does not call Keras's fit. Call "
                "lockstep.distribute(model, devices=1) first; one device is enough.\nIn a loop of "
                "your own, call super().fit, or use keras.callbacks.BackupAndRestore."
            )

    def begin(self, run: FitRun, epoch: int) -> int:
        """Start to record a `fit`, after `on_train_begin` of every callback, and resume it.

        Returns:
            The epoch to begin with, in place of `epoch`.
        """
        self._run, found = run, self._found
        self._watch = Watch(run.adapter)
        self._facts, self.stopped_by = run.facts(), None
        self._epoch, self._step, self._since = epoch, 0, 0
        self._last_save = time.monotonic()
        if self._monitor is not None:
            self._less = less_is_better(run.model, self._monitor, self._mode)
        self._retention.monitored.clear()
        self._retention.broken.clear()
        for path in self._folder.checkpoints():
            self._note(path)
        _plain(run.state(0), {})  # raise now rather than after an epoch
        unseeded = unseeded_shuffle(run.adapter)
        if unseeded is not None and self._writes:
            _warn(unseeded)
        if found is None:
            return epoch
        self._found = None  # free its arrays
        return self._resume(run, found, epoch)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Undo the changes of other callbacks if the run resumes within this epoch."""
        if self._run is not None:
            self._run.epoch_began()

    def epoch_logs(self, logs: Any) -> Any:
        """Return the logs of an epoch's last step, also if the run resumed right after it."""
        return self._fit.logs_of(logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save if a save is due, after the other callbacks have seen this batch."""
        if self._run is None:
            return
        step = batch + 1
        self._say_failure()
        self._since += step - self._step
        self._step, self._logs = step, logs
        asked = self._is_asked()
        if self._fit.model.stop_training and not asked:
            return  # the epoch ends now, and its end is saved
        # While another save runs, this one is deferred to the next step.
        if asked or (self._is_due() and not self._background.busy()):
            self._save(self._epoch, step, logs, {"monitor": None})
        if asked:  # a signal that came after the question is answered after the next step
            self._leave(saved=True)

    def failed(self, error: Exception) -> None:
        """Save the last step and leave if a signal has ended the source of the batches."""
        if self._signals.asked is None or self._run is None:
            return
        saved = self._writes and self._step > 0 and self._run.is_between_steps(error)
        if saved:
            self._save(self._epoch, self._step, self._logs, {"monitor": None})
        _warn(
            f"{type(error).__name__} came after a signal to leave: {str(error)[:200]}\n"
            + ("The last step is saved." if saved else "The checkpoint before is as it was.")
        )
        self._leave(saved, together=False)  # the other processes wait within a step

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save if a save is due, after the other callbacks have seen this epoch."""
        if self._run is None:
            return
        self._say_failure()
        self._epoch, self._step = epoch + 1, 0
        monitored = self._monitored(logs)
        last = self._fit.model.stop_training or epoch + 1 == self._fit.epochs
        asked = self._is_asked()
        better = monitored is not None and self._is_better(monitored)
        due = self._every_epoch or last or asked or better or self._is_due()
        if due:
            finite = math.isfinite(float(logs.get("loss", 0.0)))
            self._save(epoch + 1, 0, {}, {"monitor": monitored, "finite": finite})
        if asked:
            self._leave(saved=True)

    # ----------------------------------------------------------------------- saving

    @property
    def _fit(self) -> FitRun:
        """The current `fit`."""
        assert self._run is not None
        return self._run

    def _is_due(self) -> bool:
        if self._steps is not None:
            return self._since >= self._steps
        return self._seconds is not None and time.monotonic() - self._last_save >= self._seconds

    def _save(self, epoch: int, step: int, logs: dict[str, Any], said: dict[str, Any]) -> None:
        """Wait for the previous save, copy the state and start to write it."""
        if not self._writes:
            return
        self._background.finish()
        self._say_failure()
        self._since, self._last_save = 0, time.monotonic()
        if self._verbose:
            print(
                f"\nlockstep: saves {position_in_words(epoch, step)} to {self._folder.path}",
                flush=True,
            )
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
        snapshot = run.fit_state.snapshot(logs)
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
        """Whether a signal ends this call after this step, in this and every other process."""
        told = self._fit.processes.agreed_to_stop(self._signals.asked is not None)
        if told and self._signals.asked is None:  # another process has received it
            self._signals.asked = signal.SIGTERM
        return told

    def _any_asked(self) -> bool:
        """Whether any process has recorded a signal after the last step."""
        mine = self._signals.asked is not None
        return mine if self._run is None else self._fit.processes.any_asked(mine)

    def _leave(self, saved: bool, *, together: bool = True) -> None:
        """End as the signal would have.

        Args:
            saved: Whether the last step was saved.
            together: Whether every process leaves after this step.
        """
        self._background.finish()
        saved = not self._say_failure() and saved and self._writes
        if saved and (self.params or {}).get("verbose"):
            print(
                f"\nlockstep: saved {position_in_words(self._epoch, self._step)} to "
                f"{self._folder.path}; run the same command to go on",
                flush=True,
            )
        if together:
            self._fit.processes.wait_for_all()
        self._signals.leave()

    def _say_failure(self) -> bool:
        """Warn if the last save failed, and return whether it did."""
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
        return failed is not None

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

    def _resume(self, run: FitRun, found: Found, asked: int) -> int:
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
        if words and self._writes:  # other processes have fewer callbacks
            _warn(f"Not every callback resumes from {path}: {'; '.join(words)}.")
        self._epoch, self._step = epoch, step
        return run.epochs if restored["stopped"] else epoch

    def _stays_stopped(self, run: FitRun, found: Found) -> bool:
        """Whether a run that a callback stopped stays stopped; warns if epochs are left."""
        state = found.state
        by, epoch = state.get("stopped_by"), state["epoch"]
        if by is not None and by not in self._others:
            return False  # removing the callback lets the run continue
        longer = run.epochs > state.get("epochs", run.epochs)
        if epoch < run.epochs and (by != "EarlyStopping" or longer):
            _warn(
                f"{found.path} is of a run that {by or 'a callback'} stopped after {epoch} of "
                f"{counted(run.epochs, 'epoch')}, and it stays stopped.\nTo go on from there, "
                f"leave {by or 'that one'} out of callbacks; from the checkpoint before, "
                "remove this one."
            )
        return True

    def _say_where(self, run: FitRun, found: Found, stopped: bool) -> None:
        if not (self.params or {}).get("verbose"):
            return
        state = found.state
        at = f"epoch {state['epoch'] + 1}"
        at += f", after step {state['step']}" if state["step"] else ", its beginning"
        if stopped or state["epoch"] >= run.epochs:
            at = f"the end, after {counted(state['epoch'], 'epoch')}: nothing is left to do"
        was, now = len(state["devices"]), len(run.devices)
        print(
            f"lockstep: goes on from {found.path}: {at}; {counted(was, 'device')} then, {now} now",
            flush=True,
        )

    def _note(self, path: Path) -> None:
        with contextlib.suppress(CheckpointError):
            self._retention.note(path, read_manifest(path).state)


@contextmanager
def _refused_in_words(folder: Path) -> Iterator[None]:
    """Convert an `OSError` at the start of `fit` to a `CheckpointError`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{folder} was given for checkpoints, and cannot be used: "
            f"{error.strerror or error}.\n"
            "Name a folder that this user may read and write, on a disk that has room."
        ) from error


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
