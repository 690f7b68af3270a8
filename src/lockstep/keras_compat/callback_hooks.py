"""Private hooks of Keras's callbacks, and private attributes of its losses and metrics."""

import operator
import time
from typing import Any

import keras

from lockstep.keras_compat.rows import (
    LossFunctionWrapper,
    _call,
    _held,
    _named,
    _read,
    _read_and_write,
)

STATE_OF_CALLBACKS: dict[str, tuple[str, ...]] = {
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_weights", "best_epoch"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "ModelCheckpoint": (
        "best",
        "_current_epoch",
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
    ),
    # Whether the weights and their averages are swapped, as they are between two epochs.
    "SwapEMAWeights": ("_ema_weights_in_model",),
    "TensorBoard": ("_global_train_batch", "_global_test_batch", "_previous_epoch_iterations"),
    "CSVLogger": ("keys",),
    "History": ("history", "epoch"),
}
"""The attributes that Keras's callbacks change during a run."""
for _callback, _names in STATE_OF_CALLBACKS.items():
    _held(getattr(keras.callbacks, _callback), *_names)
set_monitor_op = _call(keras.callbacks.EarlyStopping, "_set_monitor_op")
"""Let a callback find out whether less or more of what it monitors is better.

It raises `ValueError` if the mode is `"auto"` and no metric says it.
"""
is_bar_of_evaluation = _read(keras.callbacks.ProgbarLogger, "_called_in_fit", to=operator.not_)
"""Whether this `ProgbarLogger` shows an evaluation, and none within `fit`."""
_seen, _set_seen = _read_and_write(keras.utils.Progbar, "_seen_so_far")
_last_drawn = _read(keras.utils.Progbar, "_last_update")


def counted_without_drawing(bar: Any, batch: int) -> bool:
    """Count a batch for a `ProgbarLogger` that would not draw now.

    keras/src/callbacks/progbar_logger.py, ProgbarLogger._update_progbar, and
    keras/src/utils/progbar.py, Progbar.update: the first call starts its clock.

    Returns:
        Whether the batch was counted. Where it was not, the bar has to be called.
    """
    picture = bar.progbar
    if bar.verbose != 1 or picture is None or not _seen(picture):
        return False
    if time.time() - _last_drawn(picture) >= picture.interval:
        return False
    bar.seen = batch + 1
    _set_seen(picture, bar.seen)
    return True


EXPECTED_BATCH_SIZE = _held(keras.layers.RNN, "_expected_batch_size")
"""The attribute of a stateful RNN with the rows of its state."""
options_of = _read(keras.metrics.MeanMetricWrapper, "_fn_kwargs", {})
"""The keyword arguments with which a loss or a metric calls its function."""
METRIC_FUNCTION = _held(keras.metrics.MeanMetricWrapper, "_fn")
"""The attribute of a `MeanMetricWrapper` with its function."""
_named(LossFunctionWrapper, "call")
