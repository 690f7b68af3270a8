"""`lockstep.Profile`, and the scope of one `fit` with it."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras

from lockstep.checkpoint.callback import fit_scope
from lockstep.core.engine import TRAIN
from lockstep.core.files import path_text, replacing
from lockstep.core.fit_arguments import callbacks_in
from lockstep.errors import LockstepWarning, ProfileError, UnsupportedModel, first_line, shown
from lockstep.keras_compat import (
    ArrayDataAdapter,
    GeneratorDataAdapter,
    GrainDatasetAdapter,
    PyDatasetAdapter,
    TFDatasetAdapter,
    TorchDataLoaderAdapter,
    loader_of,
)
from lockstep.processes import process_group
from lockstep.training.fit_clock import CHECKPOINT, NO_CLOCK, OTHER, VALIDATION, Clock, FitClock
from lockstep.training.profile_report import FitProfile


class Profile(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Tell where the time of a `fit` went, and what to try.

    The numbers are those of the same `fit` without it, bit for bit, and the steps run as without
    it. The parts add up to the time of `fit`: the wait for data, steps, callbacks, validation,
    checkpoints, compilation. Of several processes, the first prints and writes
    (docs/faster.md).

    Args:
        path: A JSON file to write at the end of `fit`; its folder must exist. `None` for none.
        verbose: 1 to print the result at the end of `fit`, 0 not to.

    Attributes:
        report: What was found, `None` before the end of a `fit`. An error that ends a `fit` leaves
            the report of what ran.

    Raises:
        ProfileError: If an argument is invalid. From `fit`: if it has two profiles, or the folder
            of `path` does not exist.
        UnsupportedModel: From `fit`, if the model is not distributed. One device is enough.

    Example:
        >>> profile = lockstep.Profile()
        >>> model.fit(x, y, epochs=2, callbacks=[profile])
        >>> profile.report.wall >= profile.report.steps
        True
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, verbose: int = 1) -> None:
        super().__init__()
        if verbose not in (0, 1):
            raise ProfileError(f"verbose={shown(verbose)} was requested.\nPass 0 or 1.")
        self.report: FitProfile | None = None
        # Absolute, because a callback may change the working directory.
        self._path = None if path is None else _absolute(path)
        self._prints = bool(verbose)
        self._clock: FitClock | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Raise if another training loop than lockstep's runs, which this does not see."""
        if self._clock is None:
            raise UnsupportedModel(
                "lockstep.Profile works only in lockstep's training loop. Either the model is "
                "not distributed, or its fit\ndoes not call Keras's fit. Call "
                "lockstep.distribute(model, devices=1) first; one device is enough.\nIf the "
                "class overrides fit, call super().fit in it."
            )

    def _begin(self) -> FitClock:
        """Start the clock of a `fit`."""
        if self._path is not None and process_group.is_first() and not self._path.parent.is_dir():
            raise ProfileError(
                f"path={str(self._path)!r} was requested, but there is no folder "
                f"{str(self._path.parent)!r}.\nCreate it first."
            )
        self.report, self._clock = None, FitClock()
        return self._clock

    def _end(self, clock: FitClock, error: BaseException | None) -> None:
        """Keep, print and write what the clock has measured, if a step ran."""
        self._clock = None
        report = _report(clock, None if error is None else type(error).__name__)
        if not report.taken:
            return
        self.report = report
        if not process_group.is_first():
            return
        if self._prints:
            after_bar = "\n" if error is not None else ""  # an error leaves a line of it open
            print(f"{after_bar}lockstep: {report}", flush=True)
        if self._path is not None:
            try:
                with replacing(self._path) as temporary:
                    temporary.write_text(report.as_json() + "\n")
            except OSError as failed:  # the fit itself has gone well
                warnings.warn(
                    f"The profile was not written to {self._path}: {first_line(failed)}",
                    LockstepWarning,
                    stacklevel=2,
                )


def _absolute(path: Any) -> Path:
    return Path(path_text(path, "path", ProfileError)).expanduser().absolute()


def profile_among(given: Any) -> Profile | None:
    """Return the profile among the callbacks of a `fit`."""
    return next((each for each in callbacks_in(given) if isinstance(each, Profile)), None)


def clock_among(given: Any) -> Clock:
    """Return what times a `fit` for the profile among its callbacks, in `observed_fit`."""
    profile = profile_among(given)
    return NO_CLOCK if profile is None or profile._clock is None else profile._clock


@contextmanager
def observed_fit(given: Any, *, own_loop: bool = False) -> Iterator[None]:
    """Let a checkpoint and a profile among the callbacks see the whole of `fit`.

    Args:
        given: The callbacks that `fit` is given: one, a list, a `CallbackList`, or `None`.
        own_loop: Whether the class overrides `fit`. Both then start when that `fit` calls Keras's;
            see `lockstep.training.inner_fit`.

    Raises:
        CheckpointError: If a checkpoint cannot work with these callbacks or its folder.
        ProfileError: If a profile cannot.
    """
    profile = profile_among(given)
    if profile is None or own_loop:
        with fit_scope(given, own_loop=own_loop):
            yield
        return
    _check(given)
    clock, error = profile._begin(), None
    try:
        with clock.part(CHECKPOINT), fit_scope(given), clock.part(OTHER):
            yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        profile._end(clock, error)


def _check(given: Any) -> None:
    profiles = [each for each in callbacks_in(given) if isinstance(each, Profile)]
    if isinstance(given, keras.callbacks.CallbackList):
        raise ProfileError(
            "lockstep.Profile was passed in a keras.callbacks.CallbackList, where it cannot "
            "time the callbacks.\nPass a plain list of callbacks to fit."
        )
    if len(profiles) > 1:
        raise ProfileError(
            f"{len(profiles)} profiles were given to one fit, but one measures the whole fit.\n"
            "Remove the others."
        )


def _report(clock: FitClock, ended_by: str | None) -> FitProfile:
    wall, split = clock.stop(), clock.split()
    by_callback = dict(sorted(clock.callbacks.items(), key=lambda each: -each[1]))
    callbacks, checkpoint = sum(by_callback.values()), clock.parts[CHECKPOINT]
    validation = clock.parts[VALIDATION] - split.compile_validation
    compile = split.compile + split.compile_validation
    told = (split.input or 0.0) + split.steps + callbacks + validation + checkpoint + compile
    data, workers = _kind_of(clock.adapter)
    return FitProfile(
        wall=wall,
        input=split.input,
        steps=split.steps,
        callbacks=callbacks,
        validation=validation,
        checkpoint=checkpoint,
        compile=compile,
        other=wall - told,
        by_callback=by_callback,
        step=split.step,
        taken=clock.ran[TRAIN.name].steps,
        steps_per_execution=clock.steps_per_execution,
        data=data,
        workers=workers,
        backend=keras.backend.backend(),
        ended_by=ended_by,
        platform=clock.platform,
    )


_KINDS = {
    ArrayDataAdapter: "arrays",
    TFDatasetAdapter: "tf.data",
    GeneratorDataAdapter: "generator",
    GrainDatasetAdapter: "Grain",
}


def _kind_of(adapter: Any) -> tuple[str, int | None]:
    """Return the kind of the data of an adapter, and its workers if it tells them."""
    if isinstance(adapter, PyDatasetAdapter):
        return "PyDataset", adapter.py_dataset.workers
    if isinstance(adapter, TorchDataLoaderAdapter):
        return "DataLoader", loader_of(adapter).num_workers
    return next((name for kind, name in _KINDS.items() if isinstance(adapter, kind)), "other"), None
