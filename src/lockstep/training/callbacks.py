"""Keras's list of callbacks, without a device wait at every batch."""

import sys
from typing import Any

import keras

from lockstep.checkpoint.callback import Checkpoint
from lockstep.core.fit_arguments import callbacks_in
from lockstep.core.own_code import is_own
from lockstep.keras_compat import (
    counted_without_drawing,
    is_bar_of_evaluation,
    is_default,
)
from lockstep.processes.first_process_io import LOGGERS
from lockstep.training.fit_clock import CHECKPOINT, NO_CLOCK, Clock, FitClock
from lockstep.training.logs import lazy_logs, pythonify_logs
from lockstep.training.predictions import RowsToFunction


class StepTimer(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """A callback that only times the steps; the loop runs as without it, and calls it."""


def see_every_batch(callbacks: Any, batch: str) -> bool:
    """Return whether any callback may act or read values between two steps.

    Args:
        callbacks: Keras's list of callbacks.
        batch: The kind of batch: `"train"`, `"test"` or `"predict"`.
    """
    each = (_sees(callback, batch) for callback in callbacks.callbacks)
    return _is_users_list(callbacks) or any(each)


def may_write_between_steps(callbacks: Any, batch: str) -> bool:
    """Return whether user code runs between two steps."""
    each = (_sees(c, batch) and (_is_users(c) or _is_patched(c)) for c in callbacks.callbacks)
    return _is_users_list(callbacks) or any(each)


def _is_users(callback: Any) -> bool:
    known = _is_known(type(callback).__module__)
    return type(callback) in _WITH_FUNCTIONS or _has_own_hooks(callback) or not known


def _is_patched(callback: Any) -> bool:
    """Return whether a hook of the user's was set on a class of Keras or of a logger."""
    owner = type(callback)
    hooks = [getattr(owner, name) for name in dir(owner) if name.startswith("on_")]
    return not all(_is_known(str(getattr(hook, "__module__", ""))) for hook in hooks)


def _is_known(module: str) -> bool:
    """Return whether the callbacks of a module are Keras's, or only write, as those of loggers."""
    package = module.partition(".")[0]
    found = sys.modules.get(module)
    if package in LOGGERS:
        return found is not None and not is_own(found)  # a module of the user may have the name
    return package in ("keras", "lockstep")


def _is_users_list(callbacks: Any) -> bool:
    known = type(callbacks) in (Callbacks, TimedCallbacks, keras.callbacks.CallbackList)
    return not known or _has_own_hooks(callbacks)


def shows_bar(callbacks: Any) -> bool:
    """Return whether Keras's bar is among the callbacks of a loop: its call prints lines."""
    return any(type(each) is keras.callbacks.ProgbarLogger for each in callbacks_in(callbacks))


def _has_own_hooks(instance: Any) -> bool:
    return any(name.startswith("on_") for name in vars(instance))


def _sees(callback: Any, batch: str) -> bool:
    hooks = [f"on_{batch}_batch_begin", f"on_{batch}_batch_end"]
    hooks += ["on_batch_begin", "on_batch_end"] if batch == "train" else []
    if any(hook in vars(callback) for hook in hooks):  # set on this instance
        return True
    if type(callback) is keras.callbacks.ProgbarLogger:
        return False
    if isinstance(callback, StepTimer | Checkpoint):
        return False
    if isinstance(callback, RowsToFunction):
        return callback.may_act
    if type(callback) in _AT_EPOCHS and callback.save_freq == "epoch":
        return False
    return not all(is_default(getattr(callback, name, None)) for name in hooks)


_WITH_FUNCTIONS = (
    *(keras.callbacks.LambdaCallback, keras.callbacks.LearningRateScheduler),
    *(keras.callbacks.CallbackList, RowsToFunction),  # a nested list, of any callbacks
)
_AT_EPOCHS = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)


class Callbacks(keras.callbacks.CallbackList):  # type: ignore[misc]
    """Call callbacks in Keras's order, in the calling thread, with logs fetched on demand.

    Keras passes logs of numbers. For these it waits for the device after each batch, or waits in
    another thread, which costs more than a small step. This list fetches the numbers when the first
    callback reads them. It calls the progress bar only for the batches at which the bar draws, and
    skips callbacks without batch hooks. The batch hooks are listed when an epoch begins. A
    checkpoint is called last, so that it saves the effects of all other callbacks.

    Attributes:
        clock: What times the `fit`.
    """

    clock: Clock = NO_CLOCK
    _checkpoint: Checkpoint | None = None

    def _configure_async_dispatch(self, callbacks: Any) -> None:
        """Use no other thread."""
        # keras/src/callbacks/callback_list.py: __init__ has set all three to False.

    def set_model(self, model: Any) -> None:
        """Pass the model to every callback."""
        super().set_model(model)
        self._note_hooks()

    def append(self, callback: Any) -> None:
        """Add a callback."""
        super().append(callback)
        self._note_hooks()

    def _note_hooks(self) -> None:
        """List the callbacks of each batch hook, so that the others are not called."""
        self.callbacks.sort(key=lambda callback: isinstance(callback, Checkpoint))
        last = self.callbacks[-1] if self.callbacks else None
        self._checkpoint = last if isinstance(last, Checkpoint) else None
        self._hooked = {
            hook: [callback for callback in self.callbacks if _has(callback, hook)]
            for hook in _BATCH_HOOKS
        }

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Call every callback before an epoch."""
        super().on_epoch_begin(epoch, logs)
        self._note_hooks()

    def on_test_begin(self, logs: Any = None) -> None:
        """Call every callback before evaluation."""
        super().on_test_begin(logs)
        self._note_hooks()

    def on_predict_begin(self, logs: Any = None) -> None:
        """Call every callback before prediction."""
        super().on_predict_begin(logs)
        self._note_hooks()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Call every callback before a batch of training."""
        self._begin("on_train_batch_begin", batch, logs)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Call every callback before a batch of evaluation."""
        self._begin("on_test_batch_begin", batch, logs)

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Call every callback before a batch of prediction."""
        self._begin("on_predict_batch_begin", batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Call every callback after a batch of training."""
        self._end("on_train_batch_end", batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Call every callback after an epoch."""
        logs = pythonify_logs(logs)
        for callback in self.callbacks:
            self._call(callback, "on_epoch_end", epoch, logs)
            self._note_stop(callback)

    def _note_stop(self, callback: Any) -> None:
        """Record on the run of the checkpoint the callback that stopped the training."""
        run = None if self._checkpoint is None else self._checkpoint._run
        if run is not None and run.stopped_by is None and self._model.stop_training:
            run.stopped_by = type(callback).__name__

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Call every callback after a batch of evaluation."""
        self._end("on_test_batch_end", batch, logs)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        """Call every callback after a batch of prediction."""
        self._end("on_predict_batch_end", batch, logs)

    def _begin(self, hook: str, batch: int, logs: Any) -> None:
        if hooked := self._hooked[hook]:
            logs = pythonify_logs(logs) if logs else {}
            for callback in hooked:
                self._call(callback, hook, batch, logs=logs)

    def _end(self, hook: str, batch: int, logs: Any) -> None:
        hooked = [callback for callback in self._hooked[hook] if _draws(callback, batch)]
        if hooked:
            logs = lazy_logs(logs, self._numbers)
            for callback in hooked:
                self._call(callback, hook, batch, logs=logs)
                self._note_stop(callback)

    def _call(self, callback: Any, hook: str, *args: Any, **kwargs: Any) -> None:
        """Call a hook of a callback."""
        getattr(callback, hook)(*args, **kwargs)

    def _numbers(self, logs: dict[str, Any]) -> dict[str, Any]:
        """Fetch the logs that a callback reads."""
        return pythonify_logs(logs)


class TimedCallbacks(Callbacks):
    """Times the hooks of each callback; the callbacks are called as without it.

    Args:
        clock: The clock of the `fit`.
        args: Those of `Callbacks`.
        kwargs: Those of `Callbacks`.
    """

    def __init__(self, clock: FitClock, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.clock: FitClock = clock

    def on_train_begin(self, logs: Any = None) -> None:
        """Call every callback before training."""
        self._call_each("on_train_begin", logs=logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Call every callback after training."""
        self._call_each("on_train_end", logs=logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Call every callback before an epoch."""
        self._call_each("on_epoch_begin", epoch, logs=logs)
        self._note_hooks()

    def on_test_begin(self, logs: Any = None) -> None:
        """Call every callback before evaluation."""
        self._call_each("on_test_begin", logs=logs)
        self._note_hooks()

    def on_test_end(self, logs: Any = None) -> None:
        """Call every callback after evaluation."""
        self._call_each("on_test_end", logs=logs)

    def _call_each(self, hook: str, *args: Any, logs: Any) -> None:
        logs = pythonify_logs(logs)
        for callback in self.callbacks:
            self._call(callback, hook, *args, logs)

    def _call(self, callback: Any, hook: str, *args: Any, **kwargs: Any) -> None:
        part = CHECKPOINT if isinstance(callback, Checkpoint) else None
        self.clock.call(part, callback, hook, *args, **kwargs)

    def _numbers(self, logs: dict[str, Any]) -> dict[str, Any]:
        return self.clock.fetched(pythonify_logs, logs)


_KINDS = ("train", "test", "predict")
_BATCH_HOOKS = [f"on_{kind}_batch_{end}" for kind in _KINDS for end in ("begin", "end")]


def _has(callback: Any, hook: str) -> bool:
    """Return whether a callback overrides a batch hook of Keras, which is empty by default."""
    bar = type(callback) is keras.callbacks.ProgbarLogger
    if bar and "_test_" in hook and not is_bar_of_evaluation(callback):  # it ignores these batches
        return False
    names = [hook]
    if "_train_" in hook:  # keras/src/callbacks/callback.py: on_train_batch_* calls it
        names.append(hook.replace("_train", ""))
    return not all(is_default(getattr(callback, name, None)) for name in names)


def _draws(callback: Any, batch: int) -> bool:
    """Return whether a callback may have a visible effect after this batch.

    Only Keras's own progress bar may have none. Between two drawings it would fetch the numbers
    without need. This function updates its batch count instead.
    """
    if type(callback) is not keras.callbacks.ProgbarLogger:
        return True
    return not counted_without_drawing(callback, batch)
