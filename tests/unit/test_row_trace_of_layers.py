"""Which of Keras's layers and models work row by row, against what they compute in parts."""

from functools import partial

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers, ops

from lockstep.engines.jax.rowtrace.row_labels import Mixed, Rows, Same, Total
from lockstep.engines.jax.rowtrace.row_trace import trace_rows
from tests.precision import floats
from tests.tiers import further

SIZES = 12, 7, 5
"""The whole, a part and a ragged rest."""


@pytest.fixture(scope="module", autouse=True)
def _float64():
    jax.config.update("jax_enable_x64", True)
    with floats("float64"):
        yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(autouse=True)
def _seeded():
    keras.utils.set_random_seed(7)
    yield
    keras.utils.clear_session(free_memory=False)


class Centred(layers.Layer):
    def call(self, x):
        return x - ops.mean(x, 0)


class Variational(layers.Layer):
    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(1)

    def call(self, x):
        mean, spread = ops.split(x, 2, -1)
        self.add_loss(-0.5 * ops.mean(1 + spread - ops.square(mean) - ops.exp(spread)))
        return mean + ops.exp(spread) * keras.random.normal(ops.shape(mean), seed=self.seed)


class Balanced(layers.Layer):
    def call(self, x):
        shares = ops.softmax(x)
        self.add_loss(ops.sum(ops.mean(shares, 0) ** 2))
        return x * shares


class WithGamma(layers.Layer):
    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(1)

    def call(self, x):
        return x * keras.random.gamma(ops.shape(x), 2.0, seed=self.seed)


class Itself(layers.Layer):
    """Gives Keras a shape where a layer cannot tell it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x, training=False):
        return self.inner(x, training=training)

    def compute_output_shape(self, shape):
        return shape


def frozen(layer):
    layer.trainable = False
    return layer


def normalization():
    layer = layers.Normalization()
    layer.adapt(np.random.RandomState(0).rand(20, 6))
    return layer


def attention(**options):
    layer = layers.MultiHeadAttention(2, 4, dropout=0.1)
    return lambda x: layer(x, x, **options)


def grouped_attention():
    layer = layers.GroupQueryAttention(4, 4, 2)
    return lambda x: layer(x, x)


def masked(layer):
    return lambda: lambda x: layer()(layers.Embedding(9, 8, mask_zero=True)(x))


def both(layer):
    return lambda: lambda x: layer()([x, ops.tanh(x)])


L = layers
VECTOR, STEPS, IDS, IMAGE, WAVE = (6,), (8, 4), (5,), (8, 8, 3), (128, 1)

BY_ROWS = {
    VECTOR: {
        "Dense": lambda: L.Dense(3),
        "activity regularizer": lambda: L.Dense(3, activity_regularizer="l2"),
        "SpectralNormalization": lambda: L.SpectralNormalization(L.Dense(4)),
        "LayerNormalization": L.LayerNormalization,
        "RMSNormalization": L.RMSNormalization,
        "UnitNormalization": L.UnitNormalization,
        "Normalization": normalization,
        "BatchNormalization, frozen": lambda: frozen(L.BatchNormalization()),
        "Dropout": lambda: L.Dropout(0.3),
        "Dropout, shared": lambda: L.Dropout(0.3, noise_shape=(1, 6)),
        "GaussianNoise": lambda: L.GaussianNoise(0.3),
        "GaussianDropout": lambda: L.GaussianDropout(0.3),
        "AlphaDropout": lambda: L.AlphaDropout(0.3),
        "Variational": Variational,
        "gamma": WithGamma,
        "Discretization": lambda: L.Discretization([0.0, 1.0, 2.0]),
        "RepeatVector": lambda: L.RepeatVector(3),
        "Softmax": L.Softmax,
        "PReLU": L.PReLU,
        "ELU": L.ELU,
        "LeakyReLU": L.LeakyReLU,
        "ReLU": lambda: L.ReLU(max_value=6),
        **{
            name: partial(L.Activation, name)
            for name in ("gelu", "silu", "softplus", "selu", "mish", "log_softmax", "hard_sigmoid")
        },
        "Dot": both(lambda: L.Dot(axes=1)),
        "Add": both(L.Add),
        "Concatenate": both(L.Concatenate),
        "Maximum": both(L.Maximum),
        "Lambda": lambda: L.Lambda(lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)),
    },
    STEPS: {
        "Dense of steps": lambda: L.Dense(3),
        "EinsumDense": lambda: L.EinsumDense("abc,cd->abd", (None, 5)),
        "Conv1D": lambda: L.Conv1D(4, 3, padding="causal", dilation_rate=2),
        "Conv1DTranspose": lambda: L.Conv1DTranspose(4, 3),
        "DepthwiseConv1D": lambda: L.DepthwiseConv1D(3),
        "SeparableConv1D": lambda: L.SeparableConv1D(4, 3),
        "MaxPooling1D": L.MaxPooling1D,
        "GlobalAveragePooling1D": L.GlobalAveragePooling1D,
        "LSTM": lambda: L.LSTM(4),
        "LSTM, backwards": lambda: L.LSTM(4, return_sequences=True, go_backwards=True),
        "GRU": lambda: L.GRU(4),
        "Bidirectional GRU": lambda: L.Bidirectional(L.GRU(4), merge_mode="sum"),
        "RNN": lambda: L.RNN([L.LSTMCell(3), L.GRUCell(4)]),
        "Attention": both(L.Attention),
        "AdditiveAttention": both(L.AdditiveAttention),
        "MultiHeadAttention": attention,
        "GroupQueryAttention": grouped_attention,
        "Masking": L.Masking,
        "Flatten": L.Flatten,
        "Reshape": lambda: L.Reshape((-1, 2)),
        "Permute": lambda: L.Permute((2, 1)),
        "UpSampling1D": L.UpSampling1D,
        "Cropping1D": L.Cropping1D,
        "SpatialDropout1D": lambda: L.SpatialDropout1D(0.3),
    },
    IDS: {
        "Embedding": masked(L.Identity),
        "masked LSTM": masked(lambda: L.LSTM(4, dropout=0.1, recurrent_dropout=0.1)),
        "masked LSTM, unrolled": masked(lambda: L.LSTM(4, unroll=True)),
        "masked GRU": masked(lambda: L.GRU(4, return_sequences=True, reset_after=False)),
        "masked SimpleRNN": masked(lambda: L.SimpleRNN(4)),
        "masked Bidirectional": masked(lambda: L.Bidirectional(L.LSTM(4, return_sequences=True))),
        "masked TimeDistributed": masked(lambda: L.TimeDistributed(L.Dense(3))),
        "masked pooling": masked(L.GlobalAveragePooling1D),
        "masked attention": masked(lambda: attention(use_causal_mask=True)),
        "CategoryEncoding": lambda: L.CategoryEncoding(9, "multi_hot"),
        "CategoryEncoding, counted": lambda: L.CategoryEncoding(9, "count"),
        "ReversibleEmbedding": lambda: L.ReversibleEmbedding(9, 4),
    },
    IMAGE: {
        "Conv2D": lambda: L.Conv2D(4, 3, strides=2, padding="same"),
        "Conv2D of groups": lambda: L.Conv2D(6, 3, groups=3),
        "Conv2DTranspose": lambda: L.Conv2DTranspose(4, 3, strides=2),
        "DepthwiseConv2D": lambda: L.DepthwiseConv2D(3),
        "SeparableConv2D": lambda: L.SeparableConv2D(4, 3),
        "MaxPooling2D": L.MaxPooling2D,
        "AveragePooling2D": lambda: L.AveragePooling2D(2, padding="same"),
        "GlobalMaxPooling2D": L.GlobalMaxPooling2D,
        "AdaptiveAveragePooling2D": lambda: L.AdaptiveAveragePooling2D(3),
        "GroupNormalization": lambda: L.GroupNormalization(3),
        "BatchNormalization of images, frozen": lambda: frozen(L.BatchNormalization()),
        "UpSampling2D": lambda: L.UpSampling2D(interpolation="bilinear"),
        "ZeroPadding2D": L.ZeroPadding2D,
        "Cropping2D": L.Cropping2D,
        "SpatialDropout2D": lambda: L.SpatialDropout2D(0.3),
        "Rescaling": lambda: L.Rescaling(0.5),
        "Resizing": lambda: L.Resizing(5, 5),
        "CenterCrop": lambda: L.CenterCrop(5, 5),
        "Solarization": L.Solarization,
        "AutoContrast": L.AutoContrast,
        "RandomFlip": L.RandomFlip,
        "RandomRotation": lambda: L.RandomRotation(0.1),
        "RandomZoom": lambda: L.RandomZoom(0.1),
        "RandomTranslation": lambda: L.RandomTranslation(0.1, 0.1),
        "RandomContrast": lambda: L.RandomContrast(0.1),
        "RandomBrightness": lambda: L.RandomBrightness(0.1),
        "RandomErasing": L.RandomErasing,
        "RandomHue": lambda: L.RandomHue(0.1),
        "RandomSaturation": lambda: L.RandomSaturation(0.1),
        "RandomGrayscale": L.RandomGrayscale,
        "RandomColorJitter": lambda: L.RandomColorJitter(brightness_factor=0.1),
        "RandomPosterization": lambda: L.RandomPosterization(4),
        "RandomSharpness": lambda: L.RandomSharpness(0.1),
        "RandomShear": lambda: L.RandomShear(0.1),
        "RandomInvert": lambda: L.RandomInvert(0.5),
        "RandomGaussianBlur": L.RandomGaussianBlur,
        "RandomPerspective": L.RandomPerspective,
    },
    (3, *IMAGE): {
        "ConvLSTM2D": lambda: L.ConvLSTM2D(2, 3, return_sequences=True),
        "TimeDistributed": lambda: L.TimeDistributed(L.Conv2D(2, 3)),
        "Conv3D": lambda: L.Conv3D(2, 2),
        "AveragePooling3D": lambda: L.AveragePooling3D(2),
    },
    WAVE: {
        "STFTSpectrogram": lambda: L.STFTSpectrogram(frame_length=32, frame_step=16, fft_length=32),
    },
}

MIXING = {  # and the operation that mixes rows first
    VECTOR: {
        "BatchNormalization": (L.BatchNormalization, "reduce_sum over rows"),
        "Centred": (Centred, "reduce_sum over rows"),
        "Balanced": (Balanced, "reduce_sum over rows"),
        "Lambda of a mean": (
            lambda: L.Lambda(lambda x: x - jnp.mean(x, 0), name="lambda_of_a_mean"),
            "reduce_sum over rows",
        ),
        "Dot of all": (
            lambda: L.Lambda(lambda x: ops.matmul(x, ops.transpose(x)), name="dot_of_all"),
            "dot_general combines rows",
        ),
    },
    IDS: {"masked BatchNormalization": (masked(L.BatchNormalization), "reduce_sum over rows")},
    IMAGE: {
        "Equalization": (lambda: Itself(L.Equalization()), "reduce_sum over rows, then add"),
        "BatchNormalization of images": (L.BatchNormalization, "reduce_sum over rows"),
        "MixUp": (L.MixUp, "sort"),
        "CutMix": (L.CutMix, "sort"),
    },
    (256,): {
        "MelSpectrogram": (
            lambda: L.MelSpectrogram(fft_length=64, sequence_stride=16),
            "reduce_max over rows",
        ),
    },
}


def of_shapes(table):
    return [(shape, name) for shape, cases in table.items() for name in cases]


def built(shape, layer):
    dtype = "int32" if shape == IDS else "float64"
    x = keras.Input(shape, dtype=dtype)
    return keras.Model(x, layer(x)), shape, dtype


def traced(model, shape, dtype, sizes=SIZES):
    trainable = [each.value for each in model.trainable_variables]
    others = [each.value for each in model.non_trainable_variables]

    def call(x):
        outputs, after, losses = model.stateless_call(
            trainable, others, x, training=True, return_losses=True
        )
        changed = {
            each.path: new
            for each, new, old in zip(model.non_trainable_variables, after, others, strict=True)
            if new is not old
        }
        return outputs, losses, changed

    found = trace_rows(call, lambda rows: (jax.ShapeDtypeStruct((rows, *shape), dtype),), sizes)
    return found, lambda x: call(x)[0]


def assert_by_rows(found):
    assert not found.mixed
    assert all(isinstance(each, Rows) and each.joins for each in jax.tree.leaves(found.outputs))


def assert_same_in_parts(call, shape, dtype):
    x = np.random.RandomState(0).normal(size=(12, *shape))
    x = np.random.RandomState(0).randint(0, 9, (12, *shape)) if dtype == "int32" else x
    whole, *parts = map(jax.jit(call), (x, x[:6], x[6:]))
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-10, atol=1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize(("shape", "name"), of_shapes(BY_ROWS), ids=str)
def test_a_layer_works_by_rows(shape, name):
    layer = BY_ROWS[shape][name]()
    found, call = traced(*(case := built(shape, layer)))
    assert_by_rows(found)
    if not found.draws:
        assert_same_in_parts(call, *case[1:])
    for draw in found.draws:
        assert draw.rows in (None, Rows(0))


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        pytest.param(*each, marks=[] if each[0] == VECTOR else pytest.mark.thorough)
        for each in of_shapes(MIXING)
    ],
    ids=str,
)
def test_a_layer_that_mixes_rows_is_named(shape, name):
    layer, operation = MIXING[shape][name]
    model, *of_input = built(shape, layer())
    label, *_ = traced(model, *of_input)[0].mixed
    assert label.place.layer.split("/")[0] in [each.name for each in model.layers]
    assert str(label).startswith(f"{label.place.layer}: {operation}")


def test_losses_and_states_of_layers():
    x = keras.Input(VECTOR)
    y = Variational()(L.SpectralNormalization(L.Dense(4, kernel_regularizer="l2"))(x))
    y = L.Dropout(0.1)(L.Dense(3, activity_regularizer="l2")(y))
    found, _ = traced(keras.Model(x, y), VECTOR, "float64")
    assert_by_rows(found)
    sums = [label for label in found.terms if isinstance(label, Total)]
    assert len(found.terms) == 3
    assert [label.is_mean for label in sums] == [True, True]
    assert {*found.state.values()} == {Same()}
    assert any("spectral" in path for path in found.state)
    assert [draw.entries for draw in found.draws if draw.rows] == [2, 3]


def block(x):
    y = L.LayerNormalization()(x)
    x = x + L.MultiHeadAttention(2, 8, dropout=0.1)(y, y, use_causal_mask=True)
    y = L.Dense(16)(L.Dense(32, activation="gelu")(L.LayerNormalization()(x)))
    return x + L.Dropout(0.1)(y)


def transformer(x):
    y = L.Embedding(50, 16, mask_zero=True)(x) + L.Embedding(5, 16)(ops.arange(5))
    return L.Dense(50)(block(block(y)))


def recurrent(x):
    y = L.Embedding(9, 8, mask_zero=True)(x)
    y = L.Bidirectional(L.LSTM(4, return_sequences=True))(y)
    return L.Dense(3)(L.LSTM(4)(y))


def convolutional(x):
    y = L.GroupNormalization(3)(x)  # in float32 in Keras: first, where the parts have equal numbers
    y = L.Conv2D(8, 3, padding="same", activation="relu")(y)
    y = y + L.Conv2D(8, 3, padding="same")(y)
    return L.Dense(10)(L.Flatten()(L.MaxPooling2D()(y)))


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((16, 2)),
        *further((SIZES,), ((9, 1),)),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("shape", "model"), [(IDS, transformer), (IDS, recurrent), (IMAGE, convolutional)]
)
def test_a_model_works_by_rows(shape, model, sizes):
    found, call = traced(*(case := built(shape, model)), sizes=sizes)
    assert_by_rows(found)
    assert len(found.draws) == 4 * (model is transformer)
    if sizes is SIZES and not found.draws:
        assert_same_in_parts(call, *case[1:])


def test_one_layer_that_mixes_rows_is_found_in_a_model():
    def build(x):
        y = L.Conv2D(4, 3)(x)
        y = keras.Sequential([L.ReLU(), L.BatchNormalization(name="bn_3")], name="block")(y)
        return L.Dense(2)(L.Flatten()(y))

    found, _ = traced(*built(IMAGE, build))
    label = found.outputs
    assert label.place.layer == "block/bn_3"
    assert label.place.operation == "reduce_sum"
    assert [path for path, each in found.state.items() if isinstance(each, Mixed)] == [
        "block/bn_3/moving_mean",
        "block/bn_3/moving_variance",
    ]
