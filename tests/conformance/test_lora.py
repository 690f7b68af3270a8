"""LoRA on JAX: devices exchange the gradients of the factors, and train what one device trains."""

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from tests.conformance.test_communication import collectives, gradient_bytes, training_program

WIDE = 128
STATES = ("replicated", "sharded")


def dense():
    made = keras.Sequential([keras.Input((WIDE,))])
    for activation in ("tanh", "relu", None):
        made.add(layers.Dense(WIDE, activation=activation))
    made.add(layers.Dense(10, use_bias=False))
    return made


def attention():
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, WIDE, mask_zero=True)(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, WIDE // 2)(x, x))
    x = layers.EinsumDense("abc,cd->abd", (None, WIDE), bias_axes="d", activation="gelu")(x)
    x = layers.EinsumDense("abc,dc->abd", (None, WIDE))(x)  # the factors meet at an input
    return keras.Model(tokens, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def adapted(build, **options):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    model = build()
    rng = np.random.default_rng(0)
    for layer in model._flatten_layers():
        if isinstance(layer, layers.Dense | layers.EinsumDense):
            layer.enable_lora(3, lora_alpha=5)
            factor = layer.lora_kernel_b  # its initial zeros hide the gradient of the other one
            factor.assign(0.1 * rng.normal(size=factor.shape))
    model.compile(
        keras.optimizers.SGD(0.01, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **options,
    )
    return model


def data(model, rows=23):
    rng = np.random.default_rng(1)
    shape = (rows, *model.input_shape[1:])
    x = rng.integers(0, 20, shape) if len(shape) == 2 and shape[1] == 6 else rng.normal(size=shape)
    return x, rng.integers(0, 10, rows)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("build", [dense, attention])
def test_devices_train_what_one_device_trains(build, state):
    """Keras keeps the factors in float32, in a float64 model too."""
    found = []
    for devices in (None, 3):
        model = adapted(build)
        if devices:
            lockstep.distribute(model, devices, state=state)
        before = model.get_weights()
        history = model.fit(*data(model), batch_size=5, epochs=2, shuffle=False, verbose=0).history
        changed = [np.any(a != b) for a, b in zip(before, model.get_weights(), strict=True)]
        assert sum(changed) >= 2 * 4
        found.append(
            [*history["loss"], *model.get_weights(), model.predict(data(model)[0], verbose=0)]
        )
    for one, many in zip(*found, strict=True):
        np.testing.assert_allclose(many, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("state", STATES)
def test_gradients_of_whole_kernels_are_not_exchanged(state):
    model, program = training_program(adapted(dense), devices=4, rows=32, state=state)
    sizes, _ = collectives(program.as_text())
    assert gradient_bytes(model) < model.layers[0].kernel.nbytes / 2
    assert sizes["all-reduce"] <= gradient_bytes(model) + 64


def test_a_layer_has_its_own_methods_after_a_step():
    model = lockstep.distribute(adapted(dense), 2)
    model.fit(*data(model), verbose=0)
    assert not [layer for layer in model.layers if "call" in vars(layer)]
    assert model.layers[0].activation is keras.activations.tanh
    assert isinstance(model.layers[0].lora_kernel_a, keras.Variable)
