"""Optimizers, their features, precisions, and ways to run a step."""

import keras
from keras import layers, ops, optimizers
from keras.optimizers import schedules

from tests.conformance.cases.case import Case, features, fitted_with, on_arrays, rows_of


def _network(policy=None):
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(5, activation="tanh", dtype=policy),
            layers.Dense(2, dtype=policy),
        ]
    )


def _with(optimizer, policy=None, **options):
    def make(sizes):
        model = _network(policy)
        model.compile(optimizer(), "mse", metrics=["mae"], **options)
        return model

    return make


def _sgd(**options):
    return lambda: optimizers.SGD(**{"learning_rate": 0.05, "momentum": 0.9, **options})


def _adaptive(optimizer, **options):
    return Case(_with(lambda: optimizer(**options)))


def _scaled(inner):
    # The scale grows after five good steps, and falls where float16 overflows.
    return lambda: optimizers.LossScaleOptimizer(inner(), 2.0**10, dynamic_growth_steps=5)


def _half(policy, optimizer):
    return Case(_with(optimizer, policy), bound=EPSILON[policy])


EPSILON = {"mixed_bfloat16": 2.0**-7, "mixed_float16": 2.0**-10}
"""The relative distance of two numbers of the type in which layers compute. Each device
rounds its share of a gradient to that type, and one device the whole."""


class _Words(layers.Layer):
    """Words with their positions: TensorFlow's gradients of both tables are sparse."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.words, self.positions = layers.Embedding(9, 4), layers.Embedding(6, 4)

    def build(self, shape):
        self.words.build(shape)
        self.positions.build(shape)

    def call(self, x):
        return ops.tanh(self.words(x) + self.positions(ops.arange(ops.shape(x)[1])))


def _positions(sizes):
    model = keras.Sequential(
        [keras.Input((6,), dtype="int32"), _Words(), layers.Flatten(), layers.Dense(2)]
    )
    model.compile(optimizers.Adam(0.01), "mse")
    return model


def _frozen_and_back(model, training, held_out, sizes):
    """A layer is frozen for the second fit, and learns again in the third."""
    outcome = {}
    for position, trainable in enumerate((True, False, True)):
        model.layers[0].trainable = trainable
        model.compile(_sgd()(), "mse")
        outcome[f"fit {position}"] = model.fit(
            *training, batch_size=sizes.batch, shuffle=False, verbose=0
        ).history
    return outcome | on_arrays(model, training, held_out, sizes)


def _several(steps):
    return Case(_with(_sgd(), steps_per_execution=steps), live=fitted_with(in_batches=True))


OPTIMIZERS = {
    "SGD, Nesterov": Case(_with(_sgd(nesterov=True))),
    "gradient accumulation over 3 steps": Case(_with(_sgd(gradient_accumulation_steps=3))),
    "gradient accumulation with Adam": _adaptive(
        optimizers.Adam, learning_rate=0.01, gradient_accumulation_steps=4
    ),
    "clipvalue": Case(_with(_sgd(clipvalue=0.02))),
    "clipnorm": Case(_with(_sgd(clipnorm=0.1))),
    "global_clipnorm": Case(_with(_sgd(global_clipnorm=0.1))),
    "weight decay": Case(_with(_sgd(weight_decay=0.01))),
    "Adam": _adaptive(optimizers.Adam, learning_rate=0.01),
    "Adam, amsgrad": _adaptive(optimizers.Adam, learning_rate=0.01, amsgrad=True),
    "AdamW": _adaptive(optimizers.AdamW, learning_rate=0.01),
    "Adamax": _adaptive(optimizers.Adamax, learning_rate=0.01),
    "Nadam": _adaptive(optimizers.Nadam, learning_rate=0.01),
    "RMSprop, centered": _adaptive(optimizers.RMSprop, learning_rate=0.01, centered=True),
    "Adagrad": _adaptive(optimizers.Adagrad, learning_rate=0.05),
    "Adadelta": _adaptive(optimizers.Adadelta, learning_rate=1.0),
    "Adafactor": _adaptive(optimizers.Adafactor, learning_rate=0.01),
    "Lion": _adaptive(optimizers.Lion, learning_rate=0.003),
    "Ftrl": _adaptive(optimizers.Ftrl, learning_rate=0.05),
    "Lamb": _adaptive(optimizers.Lamb, learning_rate=0.01),
    "Muon": _adaptive(optimizers.Muon, learning_rate=0.01),
    "schedule: cosine with warm-up": Case(
        _with(
            lambda: optimizers.SGD(
                schedules.CosineDecay(0.0, 15, warmup_target=0.1, warmup_steps=5), momentum=0.9
            )
        )
    ),
    "schedule: piecewise": Case(
        _with(lambda: optimizers.SGD(schedules.PiecewiseConstantDecay([4, 9], [0.1, 0.03, 0.01])))
    ),
    "loss scaling in float32": Case(_with(_scaled(_sgd()))),
    "mixed_bfloat16": _half("mixed_bfloat16", _sgd()),
    "mixed_bfloat16 with Adam": _half("mixed_bfloat16", lambda: optimizers.Adam(0.01)),
    "mixed_float16, loss scaled": _half("mixed_float16", _scaled(_sgd())),
    "trainable toggled between fits": Case(_with(_sgd()), live=_frozen_and_back),
    "jit_compile=False": Case(_with(_sgd(), jit_compile=False)),
    "run_eagerly=True": Case(_with(_sgd(), run_eagerly=True)),
    "steps_per_execution=2": _several(2),
    "steps_per_execution=3": _several(3),
    "steps_per_execution beyond the epoch": _several(100),
    "Adam on words and positions": Case(
        _positions, rows_of(lambda rows, rng: rng.integers(0, 9, (rows, 6)), features(2))
    ),
}
