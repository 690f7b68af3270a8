"""`fit`, `evaluate` and `predict` of a model on its devices, with little Python per step.

The order of operations, the callbacks, the logs and the ways to stop are Keras's. Two parts of
Keras's loops are left out: the work per step for every variable, and the wait for the logs of every
step.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras

from lockstep.checkpoint.callback import Checkpoint, observer_among
from lockstep.checkpoint.fit_run import NO_OBSERVER, FitRun, Observer
from lockstep.core.engine import NO_BATCH, PREDICT, TEST, TRAIN, Kind, Session
from lockstep.core.fit_lines import LONG, Wait, first_step_line, waiting_line
from lockstep.core.process_local import ProcessLocal, check_beside
from lockstep.core.status import STATUS_OF_PROCESS, phase
from lockstep.errors import UnusableData
from lockstep.keras_compat import (
    WITHIN_FIT,
    check_compiled,
    filter_traceback,
    finalizes_after_errors,
    first_epoch_of,
    forget_validation,
    keep_validation,
    kept_validation,
    keras_joins_predictions,
    metric_results,
    train_validation_split,
    trainer_class,
    validates_after,
    values_in_order,
)
from lockstep.processes.process_group import several
from lockstep.training.callbacks import Callbacks, TimedCallbacks, see_every_batch
from lockstep.training.fit_clock import CHECKPOINT, NO_CLOCK, VALIDATION, Clock, FitClock
from lockstep.training.global_data import global_data
from lockstep.training.input import HostIterator
from lockstep.training.logs import pythonify_logs
from lockstep.training.overrides import is_keras, knows_arguments
from lockstep.training.predictions import Rows, RowsInMemory, RowsOfProcess, taker_among
from lockstep.training.profile import Profile, clock_among
from lockstep.training.steps_at_once import steps_at_once

Begin = Callable[[int], None]
End = Callable[[int, Any], None]


@dataclass
class _Fit:
    """One call of `fit`.

    Attributes:
        held_out: The data of the validation, as `evaluate` takes them.
        first: The epoch to begin with.
        logs: Those of the last epoch.
    """

    epochs: int
    verbose: Any
    held_out: dict[str, Any] | None
    validation_steps: int | None
    validation_freq: Any
    first: int = 0
    observer: Observer = NO_OBSERVER
    clock: Clock = NO_CLOCK
    batches: Any = None
    callbacks: Any = None
    logs: dict[str, Any] = field(default_factory=dict)


class Loop:
    """Run `fit`, `evaluate` and `predict` of one model.

    Args:
        session: The model on its devices.
    """

    def __init__(self, session: Session) -> None:
        self.model = session.model
        self._session = session
        self._ran: Any = None
        self._tested: Any = None
        self._prints = False
        self._validation: Any = None

    def compiles(self) -> bool:
        """Return whether the next `fit` compiles the training step first."""
        function = self.model.train_function
        return self._session.is_compiled() and (function is None or function is not self._ran)

    def replaces(self, name: str) -> bool:
        """Return whether this loop can replace the model's method `name`.

        It cannot if the model overrides the method, or if this version of Keras has arguments that
        the loop does not have.
        """
        mine: Callable[..., Any] = getattr(type(self), name)
        return is_keras(self.model, name) and knows_arguments(mine, name)

    # ------------------------------------------------------------------------ fit

    @filter_traceback  # type: ignore[untyped-decorator]
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: Any = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> Any:
        """Run Keras's `fit`."""
        check_compiled(self.model, "fit")
        beside = {"y": y, "sample_weight": sample_weight, "validation_split": validation_split}
        check_beside(x, beside)
        most_epochs = keras.config.max_epochs()
        if most_epochs and most_epochs < epochs:
            warnings.warn(f"Limiting epochs to {most_epochs}", stacklevel=4)
            epochs = most_epochs
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = train_validation_split(
                (x, y, sample_weight), validation_split=validation_split
            )
        held_out: dict[str, Any] | None = None
        if validation_data is not None:
            parts = keras.utils.unpack_x_y_sample_weight(validation_data)
            held_out = dict(zip(("x", "y", "sample_weight"), parts, strict=True))
            held_out["batch_size"] = validation_batch_size or batch_size
        data = {"x": x, "y": y, "sample_weight": sample_weight, "batch_size": batch_size}
        data |= {"steps_per_epoch": steps_per_epoch, "shuffle": shuffle}
        data |= {"class_weight": class_weight}
        fit = _Fit(epochs, verbose, held_out, validation_steps, validation_freq)
        self._prepare(fit, data, callbacks, initial_epoch)
        ended = False
        try:
            self._epochs(fit)
            ended = True
        except Exception as error:
            fit.observer.end(error)
            raise
        finally:
            self._finish(finalizes=epochs > 0 and (ended or finalizes_after_errors()))
        fit.callbacks.on_train_end(logs=fit.logs)
        return self.model.history

    def _prepare(self, fit: "_Fit", data: dict[str, Any], callbacks: Any, first: int) -> None:
        """Build the model, begin with the callbacks, and resume a run.

        Args:
            fit: The call.
            data: The arguments of Keras's `EpochIterator`.
            callbacks: Those that `fit` was given.
            first: The epoch to begin with, unless a run or Keras resumes.
        """
        model, session = self.model, self._session
        forget_validation(model)
        fit.observer, fit.clock = observer_among(callbacks), clock_among(callbacks)
        fit.batches = self._batches(
            TRAIN,
            recorded=fit.observer.records,
            **data,
            steps_per_execution=model.steps_per_execution,
        )
        session.build(fit.batches, TRAIN)
        fit.callbacks = self._callbacks(
            callbacks, fit.verbose, fit.epochs, fit.batches, clock=fit.clock, add_history=True
        )
        model.make_train_function()
        model.stop_training = False
        fit.callbacks.on_train_begin()
        with fit.clock.part(CHECKPOINT):
            epoch = first_epoch_of(model, first)
            fit.first = fit.observer.begin(lambda: self._observed(fit), epoch)
        steps = steps_at_once(model, fit.batches, fit.callbacks, fit.epochs)
        if steps > 1:
            fit.batches.run_at_once(steps)
            if fit.verbose != 0 and model.train_function is not self._ran:
                print(f"lockstep: {steps} short steps run in one program", flush=True)

    def _observed(self, fit: "_Fit") -> FitRun:
        model, session = self.model, self._session
        if fit.held_out is not None:
            self._validation = self._held_out(fit, recorded=True)
            keep_validation(model, self._validation)
        return FitRun(
            session,
            fit.batches,
            kept_validation(model),
            [c for c in fit.callbacks.callbacks if not isinstance(c, Checkpoint | Profile)],
            fit.epochs,
        )

    def _epochs(self, fit: "_Fit") -> None:
        """Run the epochs, with their validation."""
        model, callbacks = self.model, fit.callbacks
        train_logs: dict[str, Any] | None = None
        for epoch in range(fit.first, fit.epochs):
            model.reset_metrics()
            STATUS_OF_PROCESS.detail = f"epoch {epoch + 1}"
            callbacks.on_epoch_begin(epoch)
            hooks = callbacks.on_train_batch_begin, callbacks.on_train_batch_end
            prints = model.train_function is not self._ran and fit.verbose != 0
            with self._first_steps(TRAIN, *hooks, prints=prints) as hooks:
                self._ran = model.train_function
                logs = self._epoch(TRAIN, fit.batches, callbacks, *hooks)
            logs = fit.observer.epoch(logs)
            if logs is not NO_BATCH:
                train_logs = dict(self._results(logs))
            elif train_logs is None:
                raise _no_batch(f"fit, in epoch {epoch + 1},")
            fit.logs = dict(train_logs)  # no batch: those of the last epoch
            if fit.held_out is not None and validates_after(model, epoch, fit.validation_freq):
                with fit.clock.part(VALIDATION):
                    fit.logs.update(self._validate(fit, fit.held_out))
            callbacks.on_epoch_end(epoch, fit.logs)
            if model.stop_training:
                break

    def _validate(self, fit: "_Fit", held_out: dict[str, Any]) -> dict[str, Any]:
        model = self.model
        # An overridden `evaluate` may pass the iterator on to Keras's.
        if kept_validation(model) is None:
            self._validation = self._held_out(fit)
            keep_validation(model, self._validation)
        self._prints = fit.verbose != 0
        logs = model.evaluate(
            **held_out,
            steps=fit.validation_steps,
            callbacks=fit.callbacks,
            return_dict=True,
            **{WITHIN_FIT: True},
        )
        return {f"val_{name}": value for name, value in logs.items()}

    def _held_out(self, fit: "_Fit", recorded: bool = False) -> Any:
        return self._batches(
            TEST,
            recorded=recorded,
            **(fit.held_out or {}),
            steps_per_execution=self.model.steps_per_execution,
            steps_per_epoch=fit.validation_steps,
            shuffle=False,
        )

    def _finish(self, finalizes: bool) -> None:
        """Let the optimizer set the final values, and forget the data of the validation."""
        model = self.model
        if isinstance(model.optimizer, keras.optimizers.Optimizer) and finalizes:
            model.optimizer.finalize_variable_values(model.trainable_weights)
        forget_validation(model)
        self._validation = None

    # ------------------------------------------------------------------- evaluate

    @filter_traceback  # type: ignore[untyped-decorator]
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run Keras's `evaluate`."""
        model, session = self.model, self._session
        check_compiled(model, "evaluate")
        check_beside(x, {"y": y, "sample_weight": sample_weight})
        within_fit = kwargs.pop(WITHIN_FIT, False)
        if kwargs:
            raise ValueError(f"Arguments not recognized: {kwargs}")
        mine = self._validation is not None and kept_validation(model) is self._validation
        if within_fit and not mine:
            # Keras's fit made the iterator: fit is overridden, or began before `distribute`.
            given = (x, y, batch_size, verbose, sample_weight, steps, callbacks, return_dict)
            return trainer_class().evaluate(model, *given, **{WITHIN_FIT: True})
        batches = (
            kept_validation(model)
            if within_fit
            else self._batches(
                TEST,
                x=x,
                y=y,
                sample_weight=sample_weight,
                batch_size=batch_size,
                steps_per_epoch=steps,
                shuffle=False,
                steps_per_execution=model.steps_per_execution,
            )
        )
        session.build(batches, TEST)
        callbacks = self._callbacks(callbacks, verbose, 1, batches)
        model.make_test_function()
        model.stop_evaluating = False
        callbacks.on_test_begin()
        model.reset_metrics()
        hooks = callbacks.on_test_batch_begin, callbacks.on_test_batch_end
        prints = self._prints if within_fit else verbose != 0
        prints &= model.test_function is not self._tested
        with self._first_steps(TEST, *hooks, prints=prints) as hooks:
            self._tested = model.test_function
            logs = self._epoch(TEST, batches, callbacks, *hooks)
        if logs is NO_BATCH:
            raise _no_batch("evaluate")
        logs = pythonify_logs(self._results(logs))
        callbacks.on_test_end(logs)
        return logs if return_dict else values_in_order(model, logs)

    # -------------------------------------------------------------------- predict

    @filter_traceback  # type: ignore[untyped-decorator]
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Run Keras's `predict`.

        One of the callbacks may take the rows; see `lockstep.training.predictions`.
        """
        model, session = self.model, self._session
        taker = taker_among(callbacks)
        own = type(x) is ProcessLocal and several()
        if taker is None and keras_joins_predictions() and not isinstance(x, ProcessLocal):
            return trainer_class().predict(model, x, batch_size, verbose, steps, callbacks)
        batches = self._batches(
            PREDICT,
            recorded=taker is not None,
            x=x,
            batch_size=batch_size,
            steps_per_epoch=steps,
            shuffle=False,
            steps_per_execution=model.steps_per_execution,
        )
        if batches.num_batches == 0 and own:
            raise _no_batch("predict")
        if batches.num_batches == 0:  # Keras raises its own error
            return trainer_class().predict(model, x, batch_size, verbose, steps, callbacks)
        session.build(batches, PREDICT)
        callbacks = self._callbacks(callbacks, verbose, 1, batches)
        model.make_predict_function()
        model.stop_predicting = False
        rows: Rows = taker or (RowsOfProcess() if own else RowsInMemory())
        callbacks.on_predict_begin()

        def end(step: int, outputs: Any) -> None:
            rows.take(outputs)
            callbacks.on_predict_batch_end(step, {"outputs": outputs})

        begin = callbacks.on_predict_batch_begin
        with rows.opened(session, batches):
            self._epoch(PREDICT, batches, callbacks, begin, end)
            if not rows.has_rows():
                raise _no_batch("predict")
        predictions = rows.joined()
        callbacks.on_predict_end()
        return predictions

    def _epoch(self, kind: Kind, batches: Any, callbacks: Any, begin: Begin, end: End) -> Any:
        """Run the steps of one epoch, and return the outputs of the last one, or `NO_BATCH`.

        Args:
            kind: The kind of steps.
            batches: The iterator over the batches.
            callbacks: Keras's list of callbacks.
            begin: Called before an execution with the number of its first step.
            end: Called after an execution with the number of its last step and its outputs.
        """
        stopped: list[StopIteration] = []

        def goes_on(hook: Callable[..., None], *args: Any) -> bool:
            """Call a hook; its own `StopIteration` does not mean the end of the data."""
            try:
                hook(*args)
            except StopIteration as error:
                stopped.append(error)
            return not stopped

        outputs: Any = NO_BATCH
        if isinstance(batches, HostIterator):
            batches.watch(see_every_batch(callbacks, kind.name))
        epoch = self._session.epoch(kind, batches, callbacks)
        clock = getattr(callbacks, "clock", NO_CLOCK)
        with (
            phase(kind.phase, compiles=True),
            epoch as run,
            clock.steps(self._session, kind, batches, run) as (each, execute),
        ):
            with batches.catch_stop_iteration():
                for first, last, iterator in each:
                    if not goes_on(begin, first):
                        break
                    outputs = execute(iterator, last - first + 1)
                    if not goes_on(end, last, outputs) or getattr(self.model, kind.stop):
                        break
            if stopped:
                raise stopped[0]
            if isinstance(batches, HostIterator):
                batches.check_epoch()
        return outputs

    @contextmanager
    def _first_steps(
        self, kind: Kind, begin: Begin, end: End, *, prints: bool
    ) -> Iterator[tuple[Begin, End]]:
        """Wrap the hooks of an epoch so that lines tell of slow first steps.

        A line says what a step waits for, while it waits. Another one follows when the step is
        ready that the next batches run: the first device may run the first batch alone.

        Args:
            kind: The kind of steps.
            begin: See `_epoch`.
            end: See `_epoch`.
            prints: Whether to print.
        """
        work = self._session.first_work(kind, 0) if prints else None
        if work is None:
            yield begin, end
            return
        phase = "validation" if kind is TEST else kind.phase
        spent, waits, is_ready = 0.0, Wait(waiting_line(phase, work)), False

        def begin_timed(step: int) -> None:
            begin(step)
            if not is_ready:
                waits.start()

        def end_timed(step: int, outputs: Any) -> None:
            nonlocal spent, is_ready
            if not is_ready:
                spent += waits.stop()
                is_ready = self._session.first_work(kind, step + 1) is None
                if is_ready and spent >= LONG:
                    print(first_step_line(phase, work, spent), flush=True)
            end(step, outputs)

        try:
            yield begin_timed, end_timed
        finally:
            waits.stop()

    def _batches(self, kind: Kind, *, recorded: bool = False, **data: Any) -> Any:
        """Return the iterator over the global batches."""
        return self._session.batches(kind, recorded=recorded, **global_data(data))

    def _results(self, logs: dict[str, Any]) -> dict[str, Any]:
        return metric_results(self.model, logs)

    def _callbacks(
        self,
        callbacks: Any,
        verbose: Any,
        epochs: int,
        batches: Any,
        clock: Clock = NO_CLOCK,
        **kwargs: Any,
    ) -> Any:
        if isinstance(callbacks, keras.callbacks.CallbackList):
            return callbacks
        made = partial(TimedCallbacks, clock) if isinstance(clock, FitClock) else Callbacks
        return made(
            callbacks,
            add_progbar=verbose != 0,
            verbose=verbose,
            epochs=epochs,
            steps=batches.num_batches,
            model=self.model,
            **kwargs,
        )


def _no_batch(call: str) -> UnusableData:
    return UnusableData(
        f"{call} was given 0 batches, but at least 1 is needed.\n"
        "The generator may be used up, or a filter may remove all rows. Pass data with rows."
    )
