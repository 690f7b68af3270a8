"""Keras's list of callbacks, without a wait for the device at every batch."""

import time
from typing import Any

import keras
from keras.src.utils.python_utils import (  # keras/src/utils/python_utils.py
    is_default,
    pythonify_logs,
)

from lockstep.engines.jax.fit.clock import Clock
from lockstep.engines.jax.fit.logs import later
from lockstep.engines.recording import Recorder


def see_every_batch(callbacks: Any, batch: str) -> bool:
    """Whether any of them may do something between two steps, or look at one.

    Args:
        callbacks: Keras's list of callbacks.
        batch: The kind of batch: `"train"`, `"test"` or `"predict"`.
    """
    each = (_sees(callback, batch) for callback in callbacks.callbacks)
    return _is_users_list(callbacks) or any(each)


def is_timed(callbacks: Any) -> bool:
    """Whether a `Clock` is among them."""
    return any(type(callback) is Clock for callback in callbacks.callbacks)


def may_write_between_steps(callbacks: Any, batch: str) -> bool:
    """Whether code of the user's runs between two steps."""
    each = (_sees(callback, batch) and _is_users(callback) for callback in callbacks.callbacks)
    return _is_users_list(callbacks) or any(each)


def run_user_code(callbacks: Any) -> bool:
    """Whether code of the user's runs between two epochs."""
    return _is_users_list(callbacks) or any(map(_is_users, callbacks.callbacks))


def hear_of_begins(callbacks: Any) -> bool:
    """Whether any of them knows that a batch of training has begun before it is drawn."""
    hooks = ("on_train_batch_begin", "on_batch_begin")
    every = [getattr(each, name, None) for each in callbacks.callbacks for name in hooks]
    return not all(map(is_default, every))


def _is_users(callback: Any) -> bool:
    known = type(callback).__module__.startswith(("keras.", "lockstep."))
    return type(callback) in _WITH_FUNCTIONS or _has_own_hooks(callback) or not known


def _is_users_list(callbacks: Any) -> bool:
    known = type(callbacks) in (Callbacks, keras.callbacks.CallbackList)
    return not known or _has_own_hooks(callbacks)


def _has_own_hooks(instance: Any) -> bool:
    return any(name.startswith("on_") for name in vars(instance))


def _sees(callback: Any, batch: str) -> bool:
    hooks = [f"on_{batch}_batch_begin", f"on_{batch}_batch_end"]
    hooks += ["on_batch_begin", "on_batch_end"] if batch == "train" else []
    if any(hook in vars(callback) for hook in hooks):  # of this instance
        return True
    if type(callback) in (keras.callbacks.ProgbarLogger, Clock):
        return False
    if type(callback) in _AT_EPOCHS and callback.save_freq == "epoch":
        return False
    return not all(is_default(getattr(callback, name, None)) for name in hooks)


_WITH_FUNCTIONS = (
    *(keras.callbacks.LambdaCallback, keras.callbacks.LearningRateScheduler),
    keras.callbacks.CallbackList,  # one among the others, of anybody's callbacks
)
_AT_EPOCHS = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)


class Callbacks(keras.callbacks.CallbackList):  # type: ignore[misc]
    """Calls callbacks in Keras's order, in the calling thread, with logs fetched on demand.

    Keras hands logs of numbers over, for which it waits for the device after each
    batch, or hands the wait to another thread, which costs more than a small step.
    Here the numbers are fetched for the first callback that looks at them, the progress
    bar is called for the batches at which it draws, and a callback without hooks for
    batches at none. Which ones have some is seen when an epoch begins.

    Attributes:
        recorder: Is told when all callbacks have been told, or `None`.
    """

    recorder: Recorder | None = None

    def _configure_async_dispatch(self, callbacks: Any) -> None:
        """Nothing is handed to another thread."""
        # keras/src/callbacks/callback_list.py: __init__ has set all three to False.

    def set_model(self, model: Any) -> None:
        """Hand the model to every callback, as Keras does when all of them are there."""
        super().set_model(model)
        self._note_hooks()

    def append(self, callback: Any) -> None:
        """Call this one too."""
        super().append(callback)
        self._note_hooks()

    def _note_hooks(self) -> None:
        """Which callbacks have something to do at a batch; the others are not called there."""
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
        logs = self._end("on_train_batch_end", batch, logs)
        if self.recorder is not None:
            self.recorder.batch_ended(batch + 1, later(logs, pythonify_logs))

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
        self._end("on_test_batch_end", batch, logs)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        """Call every callback after a batch of prediction."""
        self._end("on_predict_batch_end", batch, logs)

    def _begin(self, hook: str, batch: int, logs: Any) -> None:
        if hooked := self._hooked[hook]:
            logs = pythonify_logs(logs) if logs else {}
            for callback in hooked:
                getattr(callback, hook)(batch, logs=logs)

    def _end(self, hook: str, batch: int, logs: Any) -> Any:
        hooked = [callback for callback in self._hooked[hook] if _draws(callback, batch)]
        if hooked:
            logs = later(logs, pythonify_logs)
            for callback in hooked:
                getattr(callback, hook)(batch, logs=logs)
                self._note_stop(callback)
        return logs


_KINDS = ("train", "test", "predict")
_BATCH_HOOKS = [f"on_{kind}_batch_{end}" for kind in _KINDS for end in ("begin", "end")]


def _has(callback: Any, hook: str) -> bool:
    """Whether a callback does anything in a hook for batches, which Keras left empty."""
    bar = type(callback) is keras.callbacks.ProgbarLogger
    if bar and "_test_" in hook and callback._called_in_fit:  # it takes no notice then
        return False
    names = [hook]
    if "_train_" in hook:  # keras/src/callbacks/callback.py: which calls this one
        names.append(hook.replace("_train", ""))
    return not all(is_default(getattr(callback, name, None)) for name in names)


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
