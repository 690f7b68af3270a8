"""Keras's list of callbacks, without a wait for the device at every batch."""

import time
from typing import Any

import keras
from keras.src.utils.python_utils import (  # keras/src/utils/python_utils.py
    is_default,
    pythonify_logs,
)

from lockstep.engines.jax_clock import Clock
from lockstep.engines.jax_logs import later
from lockstep.engines.recording import Recorder


def see_every_batch(callbacks: Any, batch: str) -> bool:
    """Whether any of them may do something between two steps, or look at one.

    Args:
        callbacks: Keras's list of callbacks.
        batch: The kind of batch: `"train"`, `"test"` or `"predict"`.
    """
    return any(_sees(callback, batch) for callback in callbacks.callbacks)


def may_write_between_steps(callbacks: Any, batch: str) -> bool:
    """Whether code of the user's runs between two steps."""
    return any(_sees(callback, batch) and _is_users(callback) for callback in callbacks.callbacks)


def run_user_code(callbacks: Any) -> bool:
    """Whether code of the user's runs between two epochs."""
    return any(map(_is_users, callbacks.callbacks))


def hear_of_begins(callbacks: Any) -> bool:
    """Whether any of them knows that a batch of training has begun before it is drawn."""
    hooks = ("on_train_batch_begin", "on_batch_begin")
    every = [getattr(each, name, None) for each in callbacks.callbacks for name in hooks]
    return not all(map(is_default, every))


def _is_users(callback: Any) -> bool:
    known = type(callback).__module__.startswith(("keras.", "lockstep."))
    return type(callback) in _WITH_FUNCTIONS or not known


def _sees(callback: Any, batch: str) -> bool:
    if type(callback) in (keras.callbacks.ProgbarLogger, Clock):
        return False
    if type(callback) in _AT_EPOCHS and callback.save_freq == "epoch":
        return False
    hooks = [f"on_{batch}_batch_begin", f"on_{batch}_batch_end"]
    hooks += ["on_batch_begin", "on_batch_end"] if batch == "train" else []
    return not all(is_default(getattr(callback, name, None)) for name in hooks)


_WITH_FUNCTIONS = (keras.callbacks.LambdaCallback, keras.callbacks.LearningRateScheduler)
_AT_EPOCHS = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)


class Callbacks(keras.callbacks.CallbackList):  # type: ignore[misc]
    """Calls callbacks in Keras's order, in the calling thread, with logs fetched on demand.

    Keras hands logs of numbers over, for which it waits for the device after each
    batch, or hands the wait to another thread, which costs more than a small step.
    Here the numbers are fetched for the first callback that looks at them, and the
    progress bar is called for the batches at which it draws.

    Attributes:
        recorder: Is told when all callbacks have been told, or `None`.
    """

    recorder: Recorder | None = None

    def _configure_async_dispatch(self, callbacks: Any) -> None:
        """Nothing is handed to another thread."""
        # keras/src/callbacks/callback_list.py: __init__ has set all three to False.

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Call every callback before a batch of training."""
        logs = pythonify_logs(logs) if logs else {}
        for callback in self.callbacks:
            callback.on_train_batch_begin(batch, logs=logs)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Call every callback before a batch of evaluation."""
        logs = pythonify_logs(logs) if logs else {}
        for callback in self.callbacks:
            callback.on_test_batch_begin(batch, logs=logs)

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Call every callback before a batch of prediction."""
        logs = pythonify_logs(logs) if logs else {}
        for callback in self.callbacks:
            callback.on_predict_batch_begin(batch, logs=logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Call every callback after a batch of training."""
        logs = later(logs, pythonify_logs)
        for callback in self.callbacks:
            if _draws(callback, batch):
                callback.on_train_batch_end(batch, logs=logs)
                self._note_stop(callback)
        if self.recorder is not None:
            self.recorder.batch_ended(batch + 1, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Call every callback after an epoch."""
        logs = pythonify_logs(logs)
        for callback in self.callbacks:
            callback.on_epoch_end(epoch, logs)
            self._note_stop(callback)
        if self.recorder is not None:
            self.recorder.epoch_ended(epoch, logs)

    def _note_stop(self, callback: Any) -> None:
        recorder = self.recorder
        if recorder is not None and recorder.stopped_by is None and self._model.stop_training:
            recorder.stopped_by = type(callback).__name__

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Call every callback after a batch of evaluation."""
        logs = later(logs, pythonify_logs)
        for callback in self.callbacks:
            # Within `fit` the progress bar takes no notice of evaluation.
            if getattr(callback, "_called_in_fit", False) or _draws(callback, batch):
                callback.on_test_batch_end(batch, logs=logs)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        """Call every callback after a batch of prediction."""
        logs = later(logs, pythonify_logs)
        for callback in self.callbacks:
            if _draws(callback, batch):
                callback.on_predict_batch_end(batch, logs=logs)


def _draws(callback: Any, batch: int) -> bool:
    """Whether a callback may do anything visible after this batch.

    Only Keras's own progress bar may not: between two drawings, which its interval
    keeps apart, it would fetch the numbers for nothing. What it counts is counted here.
    """
    if type(callback) is not keras.callbacks.ProgbarLogger:
        return True
    # keras/src/callbacks/progbar_logger.py, ProgbarLogger._update_progbar, and
    # keras/src/utils/progbar.py, Progbar.update: the first call starts its clock.
    bar = callback.progbar
    if callback.verbose != 1 or bar is None or not bar._seen_so_far:
        return True
    if time.time() - bar._last_update >= bar.interval:
        return True
    callback.seen = bar._seen_so_far = batch + 1
    return False
