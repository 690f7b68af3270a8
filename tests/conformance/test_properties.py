"""Whatever the batch, the devices, the weights and the model: N devices agree with one."""

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from keras import layers, ops

import lockstep

# Keras says so of a softmax over one unit, which a random model may have.
pytestmark = pytest.mark.filterwarnings("ignore:You are using a softmax over axis:UserWarning")

BOUND = 1e-5

few = settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # shrinking would compile for many minutes
    suppress_health_check=list(HealthCheck),
)
many = settings(few, max_examples=40)

devices = st.integers(1, 8)
rows = st.integers(2, 40)


class _MeanOfBatch(layers.Layer):
    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


# What may stand in a random model: all smooth, some of it looks at the whole batch.
PARTS = {
    "tanh": lambda width: layers.Dense(width, activation="tanh"),
    "gelu": lambda width: layers.Dense(width, activation="gelu", kernel_regularizer="l2"),
    "norm": lambda width: layers.BatchNormalization(momentum=0.8),
    "rows": lambda width: layers.LayerNormalization(epsilon=0.01),
    "drop": lambda width: layers.Dropout(0.2),
    "noise": lambda width: layers.GaussianNoise(0.1),
    "center": lambda width: _MeanOfBatch(),
    "softmax": lambda width: layers.Softmax(),
}

LOSSES = st.sampled_from(["mse", "mae", "huber", "log_cosh", "poisson"])


@st.composite
def networks(draw):
    """A functional model in words: two paths of a few parts, added or joined."""
    path = st.lists(st.sampled_from(sorted(PARTS)), max_size=3)
    return {
        "paths": draw(st.lists(path, min_size=1, max_size=2)),
        "width": draw(st.integers(1, 6)),
        "merge": draw(st.sampled_from(["Add", "Concatenate", "Multiply"])),
        "skip": draw(st.booleans()),
    }


def build(words):
    inputs = keras.Input((3,))
    ends = []
    for path in words["paths"]:
        x = start = layers.Dense(words["width"], activation="tanh")(inputs)
        for part in path:
            x = PARTS[part](words["width"])(x)
        ends.append(layers.Add()([x, start]) if words["skip"] else x)
    x = getattr(layers, words["merge"])()(ends) if len(ends) > 1 else ends[0]
    return keras.Model(inputs, layers.Dense(2, activation="softplus")(x))


def train(make, data, count, batch, compile_options):
    """Two passes over the data and an evaluation; everything that is left."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)
    model = make()
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), **compile_options)
    if count is not None:
        lockstep.distribute(model, count)
    x, y, weight = data
    history = model.fit(x, y, batch, 2, sample_weight=weight, shuffle=False, verbose=0).history
    evaluated = model.evaluate(x, y, batch, sample_weight=weight, verbose=0)
    predicted = model.predict(x, batch, verbose=0)
    return [history, evaluated, predicted, model.get_weights()]


def assert_agree(make, data, count, batch, **compile_options):
    one = keras.tree.flatten(train(make, data, None, batch, compile_options))
    several = keras.tree.flatten(train(make, data, count, batch, compile_options))
    for mine, theirs in zip(several, one, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=BOUND)


def whole_batches_or_several_rows(total, batch):
    """A batch of one row through batch norm turns rounding into numbers: none such."""
    return total - 1 if total % batch == 1 else total


def random_models(words, total, batch, count, loss, seed):
    total = whole_batches_or_several_rows(total, batch)
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(total, 3)).astype("float32")
    y = rng.uniform(0, 2, size=(total, 2)).astype("float32")
    assert_agree(lambda: build(words), (x, y, None), count, batch, loss=loss, metrics=["mae"])


def random_weights_and_masks(total, batch, count, reduction, weights, lengths):
    rng = np.random.default_rng(total)
    tokens = rng.integers(1, 9, (total, 5))
    tokens[np.arange(5) >= np.resize(lengths, (total, 1))] = 0
    y = rng.normal(size=(total, 5, 2)).astype("float32") / 4
    weight = np.resize(np.float32(weights), (total, 1))

    def make():
        return keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                layers.Embedding(9, 3, mask_zero=True),
                layers.Dense(2, activation="tanh"),
            ]
        )

    loss = keras.losses.MeanSquaredError(reduction=reduction)
    data = tokens.astype("int32"), y, weight
    assert_agree(make, data, count, batch, loss=loss, weighted_metrics=["mae"])


model_cases = given(
    words=networks(),
    total=st.integers(3, 40),
    batch=st.integers(2, 17),
    count=devices,
    loss=LOSSES,
    seed=st.integers(0, 99),
)
mask_cases = given(
    total=rows,
    batch=st.integers(1, 17),
    count=devices,
    reduction=st.sampled_from(["sum", "sum_over_batch_size", "mean_with_sample_weight"]),
    weights=st.lists(st.floats(0, 2, width=32), min_size=1, max_size=7),
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=7),
)

test_random_models = pytest.mark.thorough(few(model_cases(random_models)))
test_random_weights_and_masks = few(mask_cases(random_weights_and_masks))
test_many_random_models = pytest.mark.whole(many(model_cases(random_models)))
test_many_random_weights_and_masks = pytest.mark.whole(many(mask_cases(random_weights_and_masks)))
