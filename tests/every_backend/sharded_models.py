"""Models of which each device has a shard, their data, and what a device really holds."""

from math import prod

import keras
import numpy as np
from keras import layers, optimizers

from lockstep.keras_compat import stored_value
from tests.agreement import assert_equal, both
from tests.tables import Table

BACKEND = keras.backend.backend()
WIDTHS = (37, 12, 3)
"""Three devices divide 12 and 3. PyTorch pads the shards of the others, and JAX replicates them."""


def mlp():
    first = {"kernel_regularizer": "l2", "kernel_constraint": keras.constraints.MaxNorm(1)}
    wide, narrow, last = WIDTHS
    made = [layers.Dense(wide, "relu", **first), layers.Dense(narrow, "tanh"), layers.Dense(last)]
    return keras.Sequential([keras.Input((13,)), *made])


def convolutions():
    made = [layers.Conv2D(6, 3, use_bias=False), layers.BatchNormalization(), layers.ReLU()]
    made += [layers.DepthwiseConv2D(3), layers.Flatten(), layers.Dense(3)]
    return keras.Sequential([keras.Input((8, 8, 2)), *made])


def transformer():
    tokens = keras.Input((6,), dtype="int32")
    embedding = layers.ReversibleEmbedding(7, 9)
    x = embedding(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    x = x + layers.EinsumDense("bti,io->bto", (None, 9))(x)
    return keras.Model(tokens, embedding(x, reverse=True))


def recurrent():
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(7, 6, mask_zero=True)(tokens)
    x = layers.Bidirectional(layers.GRU(4))(x)
    return keras.Model(tokens, layers.Dense(3)(x))


def lora():
    model = keras.Sequential([keras.Input((13,)), *map(layers.Dense, WIDTHS)])
    for layer in model.layers[:2]:
        layer.enable_lora(2)
        if BACKEND == "torch":
            _make_double(layer, layer.lora_kernel_a, layer.lora_kernel_b)
    return model


def _make_double(layer, *variables):
    """Keras makes them in float32."""
    import torch

    for variable in variables:
        variable._dtype = "float64"
        variable._value = torch.nn.Parameter(variable._value.double())
    layer._track_variables()


MODELS = Table({made.__name__: made for made in (mlp, convolutions, transformer, recurrent, lora)})


def data(name="mlp", rows=31):
    draw = np.random.default_rng(5)
    if name == "convolutions":
        return draw.normal(size=(rows, 8, 8, 2)), draw.normal(size=(rows, 3))
    if name == "transformer":
        return draw.integers(1, 7, (rows, 6)), draw.integers(0, 7, (rows, 6))
    if name == "recurrent":
        return draw.integers(0, 7, (rows, 6)), draw.normal(size=(rows, 3))
    return draw.normal(size=(rows, 13)), draw.normal(size=(rows, 3))


OPTIMIZERS = Table(
    {
        "SGD": lambda: optimizers.SGD(0.05, momentum=0.9),
        "AdamW": lambda: optimizers.AdamW(0.01, amsgrad=True),
        "LAMB": lambda: optimizers.Lamb(0.01),
        "Muon": lambda: optimizers.Muon(0.01),
        "Adafactor": lambda: optimizers.Adafactor(0.01),
        "global norm": lambda: optimizers.Adam(0.01, global_clipnorm=0.1),
        "norm": lambda: optimizers.SGD(0.05, clipnorm=0.1),
        "value": lambda: optimizers.SGD(0.05, clipvalue=0.01, weight_decay=0.01),
        "average": lambda: optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3),
        "accumulation": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3),
        "accumulation, LAMB": lambda: optimizers.Lamb(0.01, gradient_accumulation_steps=2),
        "scaled": lambda: optimizers.LossScaleOptimizer(
            optimizers.Adam(0.01), initial_scale=2.0**40
        ),
        "Nadam": lambda: optimizers.Nadam(0.01),
        "Adamax": lambda: optimizers.Adamax(0.01),
        "RMSprop": lambda: optimizers.RMSprop(0.01, centered=True, momentum=0.5),
        "Adagrad": lambda: optimizers.Adagrad(0.05),
        "Adadelta": lambda: optimizers.Adadelta(0.5),
        "Lion": lambda: optimizers.Lion(0.001),
        "Ftrl": lambda: optimizers.Ftrl(0.05, l2_shrinkage_regularization_strength=0.01),
        "ScheduleFreeAdamW": lambda: optimizers.ScheduleFreeAdamW(0.01),
    }
)

SAMPLE = [
    *[("mlp", each) for each in OPTIMIZERS],
    *[(each, "AdamW") for each in MODELS],
    *[(each, "LAMB") for each in MODELS],
    *[(each, "Muon") for each in MODELS],
    *[(each, "global norm") for each in MODELS],
]
SAMPLE = list(dict.fromkeys(SAMPLE))


def compiled(name="mlp", optimizer=None, **options):
    """One of the models, with one of the optimizers."""
    model, loss = MODELS[name](), "mse"
    if name == "transformer":
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    chosen = OPTIMIZERS[optimizer]() if optimizer else optimizers.Adam(0.01)
    model.compile(chosen, loss, **options)
    return model


def later():
    """A model that `fit` builds."""
    model = keras.Sequential([layers.Dense(7, "relu"), layers.Dense(3)])
    model.compile(optimizers.Lamb(0.01), "mse")
    return model


def pair(build=compiled, devices=3):
    """Two models of one seed: one for Keras alone, one in shards."""
    return both(build, devices, state="sharded")


def fit(model, rows=31, name="mlp", **options):
    """A history. By default the last of four batches has one row."""
    x, y = data(name, rows)
    options = {"batch_size": 10, "shuffle": False, "verbose": 0, **options}
    return model.fit(x, y, **options).history


def assert_trained_alike(one, many, name="mlp", **options):
    """Train both, and compare logs, variables, scores and predictions."""
    assert_equal(*[fit(model, name=name, epochs=2, **options) for model in (one, many)])
    assert_equal(one, many)
    x, y = data(name)
    assert_equal(*[model.evaluate(x, y, verbose=0) for model in (one, many)])
    assert_equal(*[model.predict(x, verbose=0) for model in (one, many)])


def variables(model):
    return [*model.variables, *model.optimizer.variables]


def is_in_shards(variable):
    """Whether each device has a shard of the variable."""
    if BACKEND == "torch":
        return type(variable) is not keras.Variable
    return any(getattr(variable.value.sharding, "spec", ()))


def is_plain(variable):
    """Whether the variable is one of Keras, as without lockstep."""
    return type(variable) is keras.Variable and getattr(variable, "_layout", None) is None


def held(some):
    """The elements of these variables on each device that this process can see."""
    if BACKEND == "torch":
        return [sum(stored_value(variable).numel() for variable in some)]
    there = {}
    for variable in some:
        for shard in variable.value.addressable_shards:
            there[shard.device] = there.get(shard.device, 0) + shard.data.size
    return [*there.values()]


def assert_in_shards(model, devices=3):
    """Each device has its share of each weight and slot, but for what the devices cannot divide."""
    large = [
        variable
        for variable in [*model.trainable_variables, *model.optimizer.variables[2:]]
        if BACKEND == "torch" or any(size % devices == 0 for size in variable.shape)
    ]
    assert len(large) >= 6
    assert all(map(is_in_shards, large))
    share = sum(prod(variable.shape) for variable in large) / devices
    padding = len(large) if BACKEND == "torch" else 0
    assert [n for n in held(large) if not share <= n <= share + padding] == []
