"""One `fit` with a `lockstep.Checkpoint`: it resumes the run, and saves it between two steps."""

import contextlib
import math
import operator
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.checkpoint.array_file import Entry
from lockstep.checkpoint.background import Background
from lockstep.checkpoint.callback_states import less_is_better
from lockstep.checkpoint.data_states import OF_EACH, unseeded_shuffle
from lockstep.checkpoint.fingerprint import (
    changed_rate,
    check_facts,
    check_variables,
    is_rate,
    rates_of,
)
from lockstep.checkpoint.fit_run import FitRun, Observer
from lockstep.checkpoint.folder_lock import only_writer
from lockstep.checkpoint.manifest import read_manifest
from lockstep.checkpoint.plain_state import from_plain, to_plain
from lockstep.checkpoint.run_folder import Found, Retention, RunFolder
from lockstep.checkpoint.run_report import position_in_words
from lockstep.checkpoint.signals import Signals
from lockstep.core.engine import Snapshot
from lockstep.errors import (
    CheckpointError,
    CheckpointMismatch,
    CheckpointWarning,
    counted,
    shown,
)
from lockstep.processes import process_group


@dataclass(frozen=True)
class Settings:
    """The arguments of `lockstep.Checkpoint`.

    Raises:
        CheckpointError: If one is invalid. The message names valid values.
    """

    folder: Path
    every: str
    steps: int | None
    seconds: float | None
    keep: int
    monitor: str | None
    mode: str
    keep_best: bool
    background: bool
    verbose: bool
    learning_rate: str

    def __post_init__(self) -> None:
        given: Any = self  # the values may have any types
        steps, seconds, keep, monitor = given.steps, given.seconds, given.keep, given.monitor
        wrong = None
        if not isinstance(given.every, str) or given.every != "epoch":
            said = f"every={shown(given.every)} was requested"
            wrong = said, 'every="epoch", steps=500 or seconds=600'
        elif steps is not None and seconds is not None:
            wrong = f"steps={steps} and seconds={seconds} were requested", "one of the two"
        elif steps is not None and not _number(steps, operator.index) >= 1:
            wrong = f"steps={shown(steps)} was requested", "a whole number of at least 1"
        elif seconds is not None and not _number(seconds, float) > 0:
            wrong = f"seconds={shown(seconds)} was requested", "a number above 0"
        elif not _number(keep, operator.index) >= 1:
            wrong = f"keep={shown(keep)} was requested", "a whole number of at least 1"
        elif not (monitor is None or isinstance(monitor, str)):
            said = f"monitor={shown(monitor)} was requested"
            wrong = said, 'the name of a log, such as "val_loss"'
        elif not isinstance(given.mode, str) or given.mode not in ("auto", "min", "max"):
            wrong = f"mode={shown(given.mode)} was requested", '"auto", "min" or "max"'
        elif not isinstance(given.learning_rate, str) or given.learning_rate not in (
            "run",
            "compile",
        ):
            wrong = (
                f"learning_rate={shown(given.learning_rate)} was requested",
                '"run" or "compile"',
            )
        if wrong:
            raise CheckpointError(f"{wrong[0]}.\nPass {wrong[1]}.")


def _number(value: Any, read: Callable[[Any], float]) -> float:
    """Return a number of Python or NumPy, 0 for any other value."""
    try:
        return 0 if isinstance(value, bool | str | bytes) else read(value)
    except (TypeError, ValueError):
        return 0


class CheckpointRun(Observer):
    """One `fit` with a checkpoint.

    Args:
        settings: What the user asks for.
        others: The class names of the other callbacks.

    Attributes:
        stopped_by: The class of the callback that stopped the run.
        prints: Whether `fit` prints its progress.
    """

    records = True

    def __init__(self, settings: Settings, others: tuple[str, ...]) -> None:
        self.stopped_by: str | None = None
        self.prints = False
        self._settings, self._others = settings, others
        self._writes = process_group.is_first()
        self._folder = RunFolder(settings.folder)
        self._retention = Retention(settings.keep, settings.keep_best)
        self._background = Background(settings.background)
        self._signals = Signals(process_group.recorded_signals())
        self._found: Found | None = None
        self._run: FitRun | None = None
        self._told_left_over = False
        self._less = True
        self._facts: dict[str, Any] = {}
        self._epoch = self._step = self._since = 0
        self._last_save = 0.0

    @contextmanager
    def opened(self) -> Iterator[str | None]:
        """Open the folder for one `fit`, and stop every thread and signal handler afterwards.

        Yields:
            The name of the checkpoint to resume from, or `None`.
        """
        with ExitStack() as stack:
            with _refused_in_words(self._folder.path):
                self._folder.check()
                if self._writes:
                    self._folder.open()
                    stack.enter_context(only_writer(self._folder.path))
                self._found = self._folder.newest(_warn)
            try:
                with self._signals:
                    yield None if self._found is None else self._found.path.name
                    self._background.finish()
                    if self._any_asked():  # after the end of the last epoch
                        self._signals.leave()
            finally:
                self._background.finish()
        self._say_failure()

    def begin(self, fit: Callable[[], FitRun], epoch: int) -> int:
        """Start to record a `fit`, after `on_train_begin` of every callback, and resume it.

        Returns:
            The epoch to begin with, in place of `epoch`.
        """
        run, found = fit(), self._found
        self._run = run
        self._facts = run.facts()
        if self._settings.learning_rate == "compile" and run.model.optimizer is None:
            raise CheckpointError(
                f'learning_rate="compile" was requested, but {run.model.name!r} is compiled '
                "without an optimizer.\n"
                'Remove learning_rate="compile": the saved rates are then used.'
            )
        self._epoch, self._step, self._since = epoch, 0, 0
        self._last_save = time.monotonic()
        monitor, mode = self._settings.monitor, self._settings.mode
        if monitor is not None:
            self._less = less_is_better(run.model, monitor, mode)
        self._retention.keeps_end = run.has_own_rows
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

    def epoch_began(self) -> None:
        """Undo the changes of other callbacks if the run resumes within this epoch."""
        if self._run is not None:
            self._run.epoch_began()

    def epoch(self, logs: Any) -> Any:
        """Return the logs of an epoch's last step, also if the run resumed right after it."""
        return self._fit.logs_of(logs)

    def step_ended(self, step: int, logs: Any) -> None:
        """Save if a save is due, after the other callbacks have seen this batch."""
        if self._run is None:
            return
        self._say_failure()
        self._since += step - self._step
        self._step = step
        asked = self._is_asked()
        if self._fit.model.stop_training and not asked:
            return  # the epoch ends now, and its end is saved
        # While another save runs, this one is deferred to the next step.
        if asked or self._all_save(self._is_due() and not self._background.busy()):
            self._save(self._epoch, step, logs, {"monitor": None})
        if asked:  # a signal that came after the question is answered after the next step
            self._leave(saved=True)

    def end(self, error: Exception) -> None:
        """Leave as a signal asks, if it has ended the workers that make the batches."""
        if self._signals.asked is None or self._run is None:
            return
        _warn(
            f"{type(error).__name__} was raised after a signal to stop: {str(error)[:200]}\n"
            "The previous checkpoint is still valid."
        )
        self._leave(saved=False, together=False)  # the other processes wait within a step

    def epoch_ended(self, epoch: int, logs: Any) -> None:
        """Save if a save is due, after the other callbacks have seen this epoch."""
        if self._run is None:
            return
        self._say_failure()
        self._epoch, self._step = epoch, 0
        monitored = self._monitored(logs)
        last = self._fit.model.stop_training or epoch == self._fit.epochs
        asked = self._is_asked()
        better = monitored is not None and self._is_better(monitored)
        settings = self._settings
        every_epoch = settings.steps is None and settings.seconds is None
        every_epoch |= self._fit.has_own_rows  # from where another number of processes goes on
        due = every_epoch or last or asked or better or self._is_due()
        if self._all_save(due):
            finite = math.isfinite(float(logs.get("loss", 0.0)))
            self._save(epoch, 0, {}, {"monitor": monitored, "finite": finite})
        if asked:
            self._leave(saved=True)

    # ----------------------------------------------------------------------- saving

    @property
    def _fit(self) -> FitRun:
        """The current `fit`."""
        assert self._run is not None
        return self._run

    def _is_due(self) -> bool:
        steps, seconds = self._settings.steps, self._settings.seconds
        if steps is not None:
            return self._since >= steps
        return seconds is not None and time.monotonic() - self._last_save >= seconds

    def _all_save(self, due: bool) -> bool:
        """Whether this process saves now; all do if a save needs all, as the first one asks."""
        if not (self._fit.is_spread or self._fit.has_own_rows):
            return due
        return process_group.any_asked(due and self._writes)

    def _save(self, epoch: int, step: int, logs: dict[str, Any], said: dict[str, Any]) -> None:
        """Wait for the previous save, copy the state and start to write it."""
        if not self._writes:
            if self._fit.has_own_rows:
                self._fit.state(step)
            if self._fit.is_spread:
                self._fit.session.snapshot(logs, writes=False)
            return
        self._background.finish()
        self._say_failure()
        self._since, self._last_save = 0, time.monotonic()
        if self._settings.verbose:
            print(
                f"\nlockstep: saving {position_in_words(epoch, step)} to {self._folder.path}",
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
        snapshot = run.session.snapshot(logs, writes=True)
        assert snapshot is not None  # this process writes
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
        monitor = self._settings.monitor
        if monitor is None:
            return None
        if monitor not in logs:
            _warn(
                f"monitor={monitor!r} was requested, but the logs of this epoch only contain "
                f"{', '.join(logs)}."
            )
            return None
        value = float(logs[monitor])
        return {"name": monitor, "value": value, "mode": "min" if self._less else "max"}

    def _is_better(self, monitored: dict[str, Any]) -> bool:
        self._background.finish()
        best = self._retention.best_of(self._folder.checkpoints(), like=monitored)
        if best is None:
            return True
        value, before = monitored["value"], self._retention.monitored[best]["value"]
        return bool(value < before if monitored["mode"] == "min" else value > before)

    def _is_asked(self) -> bool:
        """Whether a signal ends this call after this step, in this and every other process."""
        told = process_group.agreed_to_stop(self._signals.asked is not None)
        if told and self._signals.asked is None:  # another process has received it
            self._signals.asked = signal.SIGTERM
        return told

    def _any_asked(self) -> bool:
        """Whether any process has recorded a signal after the last step."""
        mine = self._signals.asked is not None
        return mine if self._run is None else process_group.any_asked(mine)

    def _leave(self, saved: bool, *, together: bool = True) -> None:
        """End as the signal would have.

        Args:
            saved: Whether the last step was saved.
            together: Whether every process leaves after this step.
        """
        self._background.finish()
        saved = not self._say_failure() and saved and self._writes
        if saved and self.prints:
            print(
                f"\nlockstep: saved {position_in_words(self._epoch, self._step)} to "
                f"{self._folder.path}; run the same command to resume",
                flush=True,
            )
        if together:
            process_group.wait_for_all()
        self._signals.leave()

    def _say_failure(self) -> bool:
        """Warn if the last save failed, and return whether it did."""
        failed = self._background.take_failure()
        if failed is not None:
            _warn(
                f"A checkpoint could not be written into {self._folder.path}: "
                f"{type(failed).__name__}: {failed}.\nTraining continues. The previous "
                "checkpoint is still valid, and the next save will be tried."
            )
        left_over = self._folder.left_over
        if left_over is not None and not self._told_left_over:
            self._told_left_over = True
            _warn(f"{left_over}\nTraining and saving continue. Remove the folder by hand.")
        return failed is not None

    # --------------------------------------------------------------------- resuming

    def _resume(self, run: FitRun, found: Found, asked: int) -> int:
        found, restored = self._where_to_go_on(run, found)
        path, state = str(found.path), found.state
        epoch, step = state["epoch"], state["step"]
        here = [Entry(*each) for each in run.variables()]
        there = [Entry(name, array.dtype.name, array.shape) for name, array in found.arrays.items()]
        there, values = there[: state["variables"]], _variables(found)
        takes_rate, warning = self._rate(found)
        if takes_rate:
            rest = [pair for pair in zip(there, values, strict=True) if not is_rate(pair[0].name)]
            check_variables(
                path,
                [entry for entry, _ in rest],
                [entry for entry in here if not is_rate(entry.name)],
            )
            rates, others = iter(run.rates()), iter(value for _, value in rest)
            values = [next(rates if is_rate(entry.name) else others) for entry in here]
        else:
            check_variables(path, there, here)
        check_facts(path, state, self._facts)
        if warning and self._writes:
            _warn(warning)
        if asked > epoch:
            raise CheckpointError(
                f"initial_epoch={asked} was requested, but {path} is at epoch {epoch}.\n"
                "Remove initial_epoch: fit resumes from the checkpoint."
            )
        restored["logs"] = {
            name.removeprefix("logs/"): array
            for name, array in found.arrays.items()
            if name.startswith("logs/")
        }
        if restored["stopped"]:
            restored["stopped"] = self._stays_stopped(run, found)
        self._say_where(run, found, restored["stopped"])
        words = run.restore(epoch, step, values, restored)
        if words and self._writes:  # other processes have fewer callbacks
            _warn(f"The state of some callbacks was not restored from {path}: {'; '.join(words)}.")
        self._epoch, self._step = epoch, step
        return run.epochs if restored["stopped"] else epoch

    def _where_to_go_on(self, run: FitRun, found: Found) -> tuple[Found, dict[str, Any]]:
        """Return the checkpoint, and its state of the run.

        If each process has its own rows, another number of processes has other batches: it begins
        at the newest end of an epoch.
        """
        restored = from_plain(found.state["run"], found.arrays)
        state, begins_again = found.state, False
        if state["step"] and not run.is_of_as_many(restored):
            begins_again, newest = True, found.path
            found = self._folder.newest_end() or found
            restored, state = from_plain(found.state["run"], found.arrays), found.state
            if self._writes:
                _warn(
                    f"{newest} was saved within an epoch by a different number of processes "
                    "that read their own rows.\nThe run resumes from the beginning of an epoch"
                    + (", so some rows are trained again." if state["step"] else ".")
                )
        kinds = {facts["data"].get("kind") for facts in (state, self._facts)}
        if len(kinds) == 2 and OF_EACH in kinds:  # one process has the rows as plain data
            state = {**state, "data": self._facts["data"]}
        return replace(found, state={**state, "step": 0} if begins_again else state), restored

    def _rate(self, found: Found) -> tuple[bool, str]:
        """Return whether the learning rate of `compile` replaces that of the run, or a warning.

        It does if it is asked for and `compile` has another one than before. So a rate that a
        callback has lowered is kept where the same script runs again.

        Raises:
            CheckpointMismatch: If it is not asked for, and there is another schedule.
        """
        written, here = found.state["compiled"], self._facts["compiled"]
        asked = self._settings.learning_rate == "compile"
        changed = changed_rate(written, here)
        if changed is None or asked:
            return asked and (changed is not None or written is None or here is None), ""
        then, now = changed
        take = 'To use the learning rate of compile, pass Checkpoint(..., learning_rate="compile").'
        if isinstance(then, dict) or isinstance(now, dict):
            raise CheckpointMismatch(
                f"{found.path} was written with a different learning rate: it was "
                f"{_rate(then, now)}, but compile has {_rate(now, then)}.\n{take}"
            )
        for mine, before in zip(rates_of(here), rates_of(written), strict=False):
            mine["learning_rate"] = before["learning_rate"]  # asked again at the next start
        names = list(found.arrays)[: found.state["variables"]]
        kept = [float(found.arrays[name]) for name in names if is_rate(name)]
        if now in kept:  # a second fit of one script has the rate of the run
            return False, ""
        return False, (
            f"The learning rate {_rate(now)} of compile is ignored: {found.path} was compiled "
            f"with {_rate(then)}, and the run continues with {', '.join(map(_rate, kept))}.\n"
            f"{take}"
        )

    def _stays_stopped(self, run: FitRun, found: Found) -> bool:
        """Whether a run that a callback stopped stays stopped; warns if epochs are left."""
        state = found.state
        by, epoch = state.get("stopped_by"), state["epoch"]
        if by is not None and by not in self._others:
            return False  # removing the callback lets the run continue
        longer = run.epochs > state.get("epochs", run.epochs)
        if epoch < run.epochs and (by != "EarlyStopping" or longer):
            _warn(
                f"{by or 'A callback'} stopped the run of {found.path} after {epoch} of "
                f"{counted(run.epochs, 'epoch')}, so fit does not continue it.\n"
                f"To continue from this checkpoint, remove {by or 'that callback'} from "
                "callbacks. To continue from the previous checkpoint, delete this one."
            )
        return True

    def _say_where(self, run: FitRun, found: Found, stopped: bool) -> None:
        if not self._writes:
            return
        state = found.state
        at = f"epoch {state['epoch'] + 1}"
        at += f", after step {state['step']}" if state["step"] else ", its beginning"
        if stopped or state["epoch"] >= run.epochs:
            at = f"the end, after {counted(state['epoch'], 'epoch')}, nothing left to do"
        was, now = len(state["devices"]), len(run.devices)
        print(
            f"lockstep: resumes from {found.path}: {at}; {counted(was, 'device')} then, {now} now",
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
            f"The checkpoint folder {folder} cannot be used: {error.strerror or error}.\n"
            "Name a folder that you can read and write, on a disk with enough space."
        ) from error


def _rate(rate: Any, other: Any = None) -> str:
    """Return a learning rate or a schedule in a few words: what differs from another one."""
    if not isinstance(rate, dict):
        return f"{rate:.6g}"
    numbers = rate.get("config") or {}
    alike = isinstance(other, dict) and other.get("class_name") == rate.get("class_name")
    beside = (other.get("config") or {}) if alike else {}
    inner = ", ".join(
        f"{name}={value}"
        for name, value in numbers.items()
        if name != "name" and (name not in beside or beside[name] != value)
    )
    return f"{rate.get('class_name')}({inner})"[:90]


def _variables(found: Found) -> list[Any]:
    return list(found.arrays.values())[: found.state["variables"]]


def _plain(state: dict[str, Any], arrays: dict[str, Any]) -> Any:
    try:
        return to_plain(state, "state", arrays)
    except TypeError as error:
        raise CheckpointError(
            f"The state of this run cannot be saved: {error}. A checkpoint can hold only "
            "numbers, strings,\narrays, lists and dicts. Return only these from get_state()."
        ) from error


def _warn(words: str) -> None:
    warnings.warn(words, CheckpointWarning, stacklevel=3)
