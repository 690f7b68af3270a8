"""`fit`, `evaluate` and `predict` of a model on a mesh, with little Python per step.

What they do, and in which order, is Keras's: callbacks, logs, what a callback may read
and change, and what stops them. What is left out is what Keras does at every step
for every variable, and the wait for the numbers of every step.
"""

import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
from keras.src.backend.jax.trainer import JAXTrainer
from keras.src.trainers.data_adapters.array_slicing import train_validation_split
from keras.src.utils.python_utils import pythonify_logs
from keras.src.utils.traceback_utils import filter_traceback

from lockstep.announce import LONG, first_step_line
from lockstep.engines.jax.checkpoints.position import RecordedIterator, RecordedValidation
from lockstep.engines.jax.checkpoints.recording import Recording, recorder_among
from lockstep.engines.jax.checkpoints.workers import Watch, drawn_elsewhere
from lockstep.engines.jax.fit.callbacks import (
    Callbacks,
    hear_of_begins,
    is_timed,
    see_every_batch,
)
from lockstep.engines.jax.fit.keep import Keeper
from lockstep.engines.jax.fit.own import is_chained, is_keras, knows_arguments
from lockstep.engines.jax.on_devices.sharded import fetched
from lockstep.engines.jax.outside import uncommit
from lockstep.engines.jax.several import processes
from lockstep.engines.jax.steps.epoch import NO_BATCH, PREDICT, TEST, TRAIN, Begin, End, run_epoch
from lockstep.engines.jax.steps.input import HostIterator
from lockstep.engines.jax.steps.step import StepFunction
from lockstep.errors import UnusableData

# Everything private below is what JAXTrainer itself goes by, and has its place in
# keras/src/trainers/trainer.py or keras/src/backend/jax/trainer.py (`_jax_state`).


class Loop:
    """The three loops of one model.

    Attributes:
        model: The model.
        keeper: Decides whether the data of `fit` stay on the devices.
    """

    def __init__(self, model: Any, devices: tuple[str, ...], keeper: Keeper) -> None:
        self.model = model
        self._devices = devices
        self._many = len(devices) > 1 and not processes.several()
        self.keeper = keeper
        self._ran: Any = None

    def compiles(self) -> bool:
        """Whether the next `fit` begins by compiling the training step."""
        if self.model.run_eagerly or not self.model.jit_compile:
            return False
        function = self.model.train_function
        return function is None or function is not self._ran

    def replaces(self, name: str) -> bool:
        """Whether this loop can stand in for the method of the model of that name.

        Not where the model has one of its own, nor where this Keras knows arguments
        that the loop does not.
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
        """Keras's `fit`."""
        model = self.model
        model._assert_compile_called("fit")
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
        model._eval_epoch_iterator = None
        recorder = recorder_among(callbacks)
        batches = (HostIterator if recorder is None else RecordedIterator)(
            x=x,
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            steps_per_epoch=steps_per_epoch,
            shuffle=shuffle,
            class_weight=class_weight,
            steps_per_execution=model.steps_per_execution,
        )
        batches.build(lambda: model._symbolic_build(iterator=batches))
        callbacks = self._callbacks(callbacks, verbose, epochs, batches, add_history=True)
        model.make_train_function()
        self.keeper.keep(model, batches, callbacks, "train")
        model.stop_training = False
        train_logs: dict[str, Any] | None = None
        epoch_logs: dict[str, Any] = {}
        callbacks.on_train_begin()
        first_epoch = model._initial_epoch or initial_epoch
        if recorder is not None:
            if held_out is not None:
                model._eval_epoch_iterator = self._held_out(
                    RecordedValidation, held_out, validation_steps
                )
            recording = Recording(
                model,
                self._devices,
                batches,
                model._eval_epoch_iterator,
                callbacks.callbacks,
                epochs,
            )
            first_epoch = recorder.begin(recording, first_epoch)
            callbacks.recorder = recorder
        watch = Watch(None if recorder is None else batches.data_adapter)
        try:
            for epoch in range(first_epoch, epochs):
                model.reset_metrics()
                callbacks.on_epoch_begin(epoch)
                self._heed(batches, callbacks, "train")
                if recorder is not None:
                    recording.epoch_began()
                begin, end = callbacks.on_train_batch_begin, callbacks.on_train_batch_end
                if self.compiles():
                    begin, end = _telling(begin, end) if verbose != 0 else (begin, end)
                    self._ran = model.train_function
                logs = run_epoch(model, TRAIN, batches, begin, end)
                if recorder is not None:
                    logs = recording.logs_of(logs)
                if logs is not NO_BATCH:
                    train_logs = dict(self._results(logs))
                elif train_logs is None:
                    raise _no_batch(f"fit, in epoch {epoch + 1},")
                epoch_logs = dict(train_logs)  # those of Keras, where an epoch had no batch
                if held_out is not None and model._should_eval(epoch, validation_freq):
                    epoch_logs.update(self._validate(held_out, validation_steps, callbacks))
                callbacks.on_epoch_end(epoch, epoch_logs)
                if model.stop_training:
                    break
        except Exception as error:
            if recorder is not None:  # before the state is taken apart
                drawing = error is batches.broke_off and drawn_elsewhere(batches.data_adapter)
                recorder.failed(error, drawing and not hear_of_begins(callbacks))
            raise
        finally:
            watch.stop()
            self._after_fit(epochs)
        callbacks.on_train_end(logs=epoch_logs)
        return model.history

    def _validate(
        self, held_out: dict[str, Any], steps: int | None, callbacks: Any
    ) -> dict[str, Any]:
        model = self.model
        # A model's own `evaluate` may hand this on to Keras's.
        if getattr(model, "_eval_epoch_iterator", None) is None:
            model._eval_epoch_iterator = self._held_out(HostIterator, held_out, steps)
        logs = model.evaluate(
            **held_out,
            steps=steps,
            callbacks=callbacks,
            return_dict=True,
            _use_cached_eval_dataset=True,
        )
        return {f"val_{name}": value for name, value in logs.items()}

    def _held_out(self, made: Any, held_out: dict[str, Any], steps: int | None) -> Any:
        times = self.model.steps_per_execution
        return made(**held_out, steps_per_execution=times, steps_per_epoch=steps, shuffle=False)

    def _after_fit(self, epochs: int) -> None:
        model = self.model
        model.jax_state_sync()
        if isinstance(model.optimizer, keras.optimizers.Optimizer) and epochs > 0:
            model.optimizer.finalize_variable_values(model.trainable_weights)
        if getattr(model, "_eval_epoch_iterator", None) is not None:
            del model._eval_epoch_iterator
        model._jax_state = None

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
        """Keras's `evaluate`."""
        model = self.model
        model._assert_compile_called("evaluate")
        within_fit = kwargs.pop("_use_cached_eval_dataset", False)
        if kwargs:
            raise ValueError(f"Arguments not recognized: {kwargs}")
        if within_fit and not isinstance(model._eval_epoch_iterator, HostIterator):
            # Keras's fit has made it: the class has its own, or it began before `distribute`.
            given = (x, y, batch_size, verbose, sample_weight, steps, callbacks, return_dict)
            return JAXTrainer.evaluate(model, *given, _use_cached_eval_dataset=True)
        batches = (
            model._eval_epoch_iterator
            if within_fit
            else HostIterator(
                x=x,
                y=y,
                sample_weight=sample_weight,
                batch_size=batch_size,
                steps_per_epoch=steps,
                shuffle=False,
                steps_per_execution=model.steps_per_execution,
            )
        )
        batches.build(lambda: model._symbolic_build(iterator=batches))
        callbacks = self._callbacks(callbacks, verbose, 1, batches)
        model.make_test_function()
        if within_fit:
            self.keeper.keep(model, batches, callbacks, "test")
        batches.in_place = is_chained(model)  # the last step ends after all others
        model.stop_evaluating = False
        callbacks.on_test_begin()
        self._heed(batches, callbacks, "test")
        model.reset_metrics()
        logs = run_epoch(
            model, TEST, batches, callbacks.on_test_batch_begin, callbacks.on_test_batch_end
        )
        if logs is NO_BATCH:
            raise _no_batch("evaluate")
        logs = pythonify_logs(self._results(logs))
        callbacks.on_test_end(logs)
        model._jax_state = None
        return logs if return_dict else model._flatten_metrics_in_order(logs)

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
        """Keras's `predict`."""
        model = self.model
        batches = HostIterator(
            x=x,
            batch_size=batch_size,
            steps_per_epoch=steps,
            shuffle=False,
            steps_per_execution=model.steps_per_execution,
        )
        if batches.num_batches == 0:  # which Keras refuses, in words of its own
            return JAXTrainer.predict(model, x, batch_size, verbose, steps, callbacks)
        if not all(layer.built for layer in model._flatten_layers()):
            batches.build(lambda: _call(model, batches))
        callbacks = self._callbacks(callbacks, verbose, 1, batches)
        model.make_predict_function()
        model.stop_predicting = False
        every: list[Any] = []
        batches.in_place = True  # what the steps return is fetched, all of it
        callbacks.on_predict_begin()
        self._heed(batches, callbacks, "predict")
        sees = see_every_batch(callbacks, "predict")

        def end(step: int, outputs: Any) -> None:
            outputs = fetched(outputs) if sees else outputs
            callbacks.on_predict_batch_end(step, {"outputs": outputs})

        begin = callbacks.on_predict_batch_begin
        run_epoch(model, PREDICT, batches, begin, end, each=every.append)
        model.jax_state_sync()
        if not every:
            raise _no_batch("predict")
        jax.block_until_ready(every)  # before anybody may write into the rows
        callbacks.on_predict_end()
        model._jax_state = None
        if not keras.tree.is_nested(every[0]):
            return _joined(*every)
        return keras.tree.map_structure(_joined, *every)

    def _results(self, logs: dict[str, Any]) -> dict[str, Any]:
        """The logs of an epoch, which metrics compute one operation after the other."""
        self.model.jax_state_sync()
        if self._many:  # each of which would compute the same
            uncommit(self.model.metrics_variables)
        results: dict[str, Any] = self.model._get_metrics_result_or_logs(logs)
        return results

    def _heed(self, batches: HostIterator, callbacks: Any, batch: str) -> None:
        """Follow the hooks for batches that there are now: a callback may put some in place."""
        sees = see_every_batch(callbacks, batch)
        batches.watch(sees)
        # Under a recorder steps stay single: what a clock finds out would be in the last bits.
        single = sees or getattr(callbacks, "recorder", None) is not None
        function = getattr(self.model, f"{batch}_function")
        pace, alone = None, False  # of a step of Keras's, where a callback has released the model
        if isinstance(function, StepFunction):
            pace, alone = function.pace, function.alone
        batches.pace = None if single else pace
        free = alone and pace is None and batches.steps_per_execution == 1
        batches.unseen = free and not single and not is_timed(callbacks)
        self.keeper.heed(self.model, batches, callbacks, batch)

    def _callbacks(
        self, callbacks: Any, verbose: Any, epochs: int, batches: HostIterator, **kwargs: Any
    ) -> Any:
        if isinstance(callbacks, keras.callbacks.CallbackList):
            return callbacks
        return Callbacks(
            callbacks,
            add_progbar=verbose != 0,
            verbose=verbose,
            epochs=epochs,
            steps=batches.num_batches,
            model=self.model,
            **kwargs,
        )


def _joined(*parts: Any) -> np.ndarray:
    # One by one: np.concatenate takes longer to find out that they are arrays.
    return np.concatenate([np.asarray(part) for part in parts])


def _no_batch(call: str) -> UnusableData:
    return UnusableData(
        f"{call} was given 0 batches, and at least 1 is needed.\n"
        "A generator ends once, and a filter may leave nothing: give data that has rows."
    )


def _call(model: Any, batches: HostIterator) -> None:
    """Build the layers of a model that has never been called, on the first batch."""
    for _, _, iterator in batches:
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(next(iterator))
        with keras.StatelessScope():
            model(inputs)
        break


def _telling(begin: Begin, end: End) -> tuple[Begin, End]:
    """The same hooks, that say how long it took to call the first step where it took long."""
    times: list[float] = []

    def telling_begin(step: int) -> None:
        begin(step)
        if not times:
            times.append(time.monotonic())

    def telling_end(step: int, logs: Any) -> None:
        if len(times) == 1:
            times.append(time.monotonic() - times[0])
            if times[1] >= LONG:
                print(first_step_line(times[1]), flush=True)
        end(step, logs)

    return telling_begin, telling_end
