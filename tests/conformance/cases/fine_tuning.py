"""Frozen weights with the factors of LoRA."""

from contextlib import nullcontext

import keras
import numpy as np
from keras import layers, ops

from tests.conformance.cases.case import Case, classes, fitted_with, rows_of
from tests.precision import floats

WIDTH, WORDS = 8, 20


class Reads(layers.Layer):
    """Calls a layer with LoRA, and reads its kernel too."""

    def __init__(self, **options):
        super().__init__(**options)
        self.inner = layers.Dense(WIDTH, "gelu")

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x) + 0.1 * ops.matmul(x, self.inner.kernel)


class WithCall(layers.Dense):
    """A subclass with a call of its own."""

    def call(self, x, training=None):
        return ops.tanh(ops.matmul(x, self.kernel)) + self.bias


class AsDense(layers.Dense):
    """A subclass with the call of Keras."""


def network():
    """Layers that can have LoRA, one after the other."""
    on_jax = keras.backend.backend() == "jax"  # others do not split what is made again
    words = keras.Input((6,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, mask_zero=True)(words)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    regularizer = keras.regularizers.L2(1e-2)
    x = layers.EinsumDense(
        "abc,cd->abd",
        (None, WIDTH),
        bias_axes="d",
        activation="silu",
        activity_regularizer=regularizer,
    )(x)
    x = layers.EinsumDense("abc,dc->abd", (None, WIDTH))(x)  # the last dim is the input's
    x = AsDense(WIDTH, "softplus", kernel_regularizer="l2")(WithCall(WIDTH)(Reads()(x)))
    for mode in ("full", "activations"):
        with keras.RematScope(mode=mode) if on_jax else nullcontext():
            x = layers.Dense(WIDTH, "silu", use_bias=mode == "full")(x)
    return keras.Model(words, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def with_factors(model, rank=3, dtype=None):
    """Enable LoRA in every layer of a model that can have it.

    Args:
        model: The model.
        rank: The rank of the factors.
        dtype: Their type; Keras makes them in float32 whatever the layer computes in.
    """
    rng = np.random.default_rng(0)
    for layer in model._flatten_layers():
        if not hasattr(layer, "enable_lora"):
            continue
        add = layer.add_weight
        if dtype is not None:
            vars(layer)["add_weight"] = lambda add=add, **given: add(**given | {"dtype": dtype})
        layer.enable_lora(rank, lora_alpha=5)
        vars(layer).pop("add_weight", None)
        for variable in layer._trainable_variables[-2:]:
            variable.assign(0.2 * rng.normal(size=variable.shape))
    return model


def _compiled(made, policy=None):
    def make(sizes):
        dtype = keras.config.floatx()
        with floats(dtype, policy):
            model = with_factors(made(), dtype=None if policy else dtype)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, weighted_metrics=["accuracy"])
        return model

    return make


class Penalized(keras.Model):
    """Has the gradient of a gradient in its loss, computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        with keras.RematScope(mode="full"):
            hidden = layers.Dense(WIDTH, "softplus"), layers.Dense(WIDTH, "gelu")
        self.inner = keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(3)])

    def call(self, x, training=None):
        return self.inner(x, training=training)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        import jax

        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        slope = jax.checkpoint(jax.grad(lambda x: ops.sum(self.inner(x) ** 2)))(x)
        return loss + 0.1 * ops.mean(ops.sum(slope**2, axis=-1))


class WithStep(Penalized):
    """Makes two updates in a step, with the gradients of all variables, the frozen ones too."""

    def train_step(self, state, data):
        import jax

        trainable, others, slots, metrics = state
        x, y = data

        def loss(trainable, others):
            outputs, after = self.stateless_call(trainable, others, x, training=True)
            return ops.mean((outputs - ops.one_hot(y, 3)) ** 2), after

        both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        for _ in range(2):
            (value, others), (gradients, frozen) = both(trainable, others)
            size = sum(ops.sum(each**2) for each in frozen if each.ndim == 2)
            gradients = [each * (1 + ops.tanh(size)) for each in gradients]
            trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        return {"loss": value}, (trainable, others, slots, metrics)


def _in_batches(data):
    return rows_of(data, classes(3))


_WORDS = _in_batches(lambda rows, rng: rng.integers(0, WORDS, (rows, 6)).astype("int32"))
_NUMBERS = _in_batches(lambda rows, rng: rng.normal(size=(rows, 6)).astype("float32"))

FINE_TUNING = {
    "LoRA, gradient penalty": Case(_compiled(Penalized), _NUMBERS),
    "LoRA, mixed_bfloat16": Case(_compiled(network, "mixed_bfloat16"), _WORDS, bound=2.0**-7),
    "LoRA": Case(_compiled(network), _WORDS, fitted_with(in_batches=True)),
    # Each update of a bias is rounded to its type too.
    "LoRA, bfloat16": Case(_compiled(network, "bfloat16"), _WORDS, bound=2.0**-6),
    "LoRA, an own step": Case(_compiled(WithStep), _NUMBERS),
}
