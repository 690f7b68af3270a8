"""Models that have every kind of variable, and data for them."""

import keras
import numpy as np
from keras import layers

from tests.checkpoints.data import arrays
from tests.checkpoints.runs import small
from tests.conformance.side_by_side import held_out, smooth


def with_validation():
    return {**arrays(), "validation_data": held_out()}


def everything():
    """Batch norm, dropout, an average of the weights, Adam, a schedule, metrics of all kinds."""
    made = smooth(metrics=("mae", "closeness"))
    made.compile(
        keras.optimizers.Adam(
            keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.9),
            use_ema=True,
            ema_overwrite_frequency=4,
            global_clipnorm=1.0,
        ),
        "mse",
        metrics=["mae", "cosine_similarity"],
    )
    return made


def accumulating():
    made = small()
    made.compile(
        keras.optimizers.LossScaleOptimizer(
            keras.optimizers.AdamW(0.01, gradient_accumulation_steps=3), dynamic_growth_steps=4
        ),
        "mse",
    )
    return made


def recurrent():
    keras.utils.set_random_seed(5)
    made = keras.Sequential(
        [
            keras.Input(batch_shape=(8, 3, 2)),
            layers.LSTM(4, stateful=True, return_sequences=True),
            layers.Dense(2),
        ]
    )
    made.compile("sgd", "mse")
    return made


def sequences():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, 56, 3, 2)).astype("float32")
    return {"x": x, "y": y, "batch_size": 8, "shuffle": False}
