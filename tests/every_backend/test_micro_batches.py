"""Micro-batches: rows in parts leave what all rows leave, and what cannot have parts is refused.

What is of one engine is in `tests/conformance/test_micro_batches.py` (memory of programs, draws of
a part, proofs) and `tests/torch/test_on_micro_batches.py` (random numbers, second runs, memory).
"""

import sys
import zipfile

import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep
from lockstep.attach.attachment import session_of
from lockstep.errors import DeviceError, UnsupportedModel
from tests.agreement import BOUND, assert_equal, both, values
from tests.conftest import BACKEND
from tests.models import Own, Stop, chain, features
from tests.tables import Table
from tests.tiers import further, quick_on_jax

QUIET = {"verbose": 0, "shuffle": False, "batch_size": 9}
NEAR = min(BOUND, 1e-6)
"""The bound of chains: a few steps of two layers round less in float32, too."""


# ------------------------------------------------------------ the numbers of the whole batch


def dense():
    return chain(optimizer=keras.optimizers.Adam(0.02), metrics=["mae"]), features(), {}


def weighted():
    x, y = features()
    weights = np.random.default_rng(2).uniform(size=len(x))
    return chain(weighted_metrics=["mae"]), (x, y), {"sample_weight": weights}


def classes():
    x, y = features()
    made = chain(loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return made, (x, (y[:, 0] > 0).astype(int)), {"class_weight": {0: 0.3, 1: 2.0}}


def masked():
    tokens = np.random.default_rng(3).integers(0, 5, (23, 3))
    inner = [layers.Embedding(5, 4, mask_zero=True), layers.LSTM(3, return_sequences=True)]
    made = keras.Sequential([keras.Input((3,), dtype="int32"), *inner, layers.Dense(5, "softmax")])
    made.compile("adam", "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    return made, (tokens, tokens[:, ::-1].copy()), {}


def transformer():
    tokens = np.random.default_rng(3).integers(0, 5, (23, 4))
    inputs = keras.Input((4,), dtype="int32")
    x = layers.Embedding(5, 8, mask_zero=True)(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    x = layers.LayerNormalization()(x + layers.Dense(8)(layers.Dense(12, "gelu")(x)))
    made = keras.Model(inputs, layers.Dense(5)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2)
    made.compile(keras.optimizers.AdamW(0.01, clipnorm=0.5), loss)
    return made, (tokens, tokens), {}


def two_of_each():
    (x, y), (other, _) = features(), features(seed=2)
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    both_of = layers.Concatenate()([layers.Dense(3)(a), layers.Dense(5, "tanh")(b)])
    made = keras.Model(
        {"a": a, "b": b},
        {"p": layers.Dense(2, name="p")(both_of), "q": layers.Dense(1, name="q")(both_of)},
    )
    made.compile("adam", {"p": "mse", "q": "mae"}, loss_weights={"p": 1.0, "q": 0.3})
    return made, ({"a": x, "b": other}, {"p": y, "q": y[:, :1]}), {}


def regularized():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.9)
    optimizer = keras.optimizers.SGD(schedule, momentum=0.9, global_clipnorm=0.5, use_ema=True)
    inner = layers.Dense(
        5, "tanh", kernel_regularizer="l1", bias_regularizer="l2", name="regularized"
    )
    return chain(inner, optimizer=optimizer), features(), {}


def contrastive():
    def loss(y, found):
        return ops.logsumexp(found @ ops.transpose(y), axis=-1) - ops.sum(found * y, axis=-1)

    return chain(loss=loss), features(), {}


def curves():
    x, y = features()
    made = keras.Sequential([keras.Input((4,)), layers.Dense(1, "sigmoid")])
    measured = [keras.metrics.AUC(num_thresholds=7), keras.metrics.F1Score(threshold=0.5)]
    made.compile("adam", "binary_crossentropy", metrics=measured)
    return made, (x, (y[:, :1] > 0).astype(float)), {}


def convolutional():
    rng = np.random.default_rng(4)
    images, targets = rng.normal(size=(23, 6, 6, 2)), rng.normal(size=(23, 2))
    inner = [layers.Conv2D(4, 3, activation="relu"), layers.GroupNormalization(2)]
    frozen = layers.BatchNormalization(trainable=False)
    pooled = [frozen, layers.MaxPooling2D(), layers.Flatten(), layers.Dense(2)]
    made = keras.Sequential([keras.Input((6, 6, 2)), *inner, *pooled])
    made.compile("sgd", "mse")
    return made, (images, targets), {}


def accumulated():
    return chain(optimizer=keras.optimizers.Adam(gradient_accumulation_steps=2)), features(), {}


class OwnLoss(keras.Model):
    """Its code is followed, and its loss sees all rows."""

    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Dense(6, "tanh"), layers.Dense(2)

    def call(self, x):
        return self.last(ops.relu(self.first(x)) + 1)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean((y - y_pred) ** 2) + ops.var(y_pred)


def subclassed():
    made = OwnLoss()
    made.compile("sgd")
    return made, features(), {}


def unbuilt():
    """Keras gives its input the number of rows of the batch."""
    made = keras.Sequential([layers.Dense(6, "tanh"), layers.Dense(2)])
    made.compile("sgd", "mse")
    return made, features(), {}


def recurrent():
    layer = layers.Bidirectional(layers.GRU(3))
    made = keras.Sequential([keras.Input((2, 2)), layer, layers.Dense(2)])
    made.compile("sgd", "mse")
    x, y = features()
    return made, (x.reshape(-1, 2, 2), y), {}


ZOO = (
    *(dense, weighted, classes, masked, transformer, two_of_each, regularized, contrastive),
    *(curves, convolutional, accumulated, subclassed),
)
RUNS = [
    pytest.param(case, devices, marks=[] if quick and BACKEND == "torch" else pytest.mark.thorough)
    for number, case in enumerate(ZOO)
    for devices, quick in ((1, number % 2), (3, not number % 2))
]
"""Each model is quick on one number of devices; JAX has quick cases in test_micro_batch_cases."""


@pytest.fixture
def in_shards(monkeypatch):
    """Shards variables of any size."""
    monkeypatch.setattr(sys.modules["lockstep.core.devices"], "SHARDED_FROM", 0)


def compare(case, devices, **options):
    """Train by Keras alone and in parts of two rows; the last batch has five rows."""
    one, many = both(lambda: case()[0], devices, micro_batch_size=2, **options)
    _, (x, y), more = case()
    found = []
    for model in (one, many):
        history = model.fit(x, y, epochs=2, **QUIET, **more).history
        seen = model.evaluate(x, y, batch_size=9, verbose=0, return_dict=True)
        found.append((history, seen, model.predict(x, batch_size=9, verbose=0)))
    assert_equal(*found)
    assert_equal(one, many)


@pytest.mark.parametrize(("case", "devices"), [*RUNS, (unbuilt, 1)])
def test_parts_give_the_numbers_of_the_batch(case, devices):
    compare(case, devices)


@pytest.mark.parametrize("case", [dense, *further(transformer)])
def test_parts_give_the_numbers_of_the_batch_with_sharded_state(case, in_shards):
    compare(case, 3, state="sharded")


def test_an_rnn_without_dropout_draws_nothing():
    compare(recurrent, 3, **({"same_random_numbers": True} if BACKEND == "torch" else {}))


def test_one_update_for_the_whole_batch():
    one, made = both(chain, 1, micro_batch_size=3)
    for each in (one, made):
        each.train_on_batch(*features(9))
    assert int(made.optimizer.iterations) == 1
    assert_equal(one, made, NEAR)


@pytest.mark.parametrize("size", [9, *further(1000)])
def test_a_size_above_the_batch_cuts_nothing(size, capsys):
    dropout = {"seed": 5}
    one, made = both(lambda: chain(layers.Dropout(0.4, **dropout)), 1, micro_batch_size=size)
    for model in (one, made):
        model.fit(*features(), **(QUIET | {"verbose": 2}))
    assert all(np.array_equal(*each) for each in zip(values(one), values(made), strict=True))
    assert "9 rows, 1 micro-batch of 9" in capsys.readouterr().out


def test_batch_norm_runs_in_parts_where_it_does_not_train():
    one, made = both(lambda: chain(layers.BatchNormalization()), 2, micro_batch_size=3)
    x, y = features()
    assert_equal(made.predict(x, verbose=0), one.predict(x, verbose=0), NEAR)
    assert_equal(made.evaluate(x, y, verbose=0), one.evaluate(x, y, verbose=0), NEAR)


@quick_on_jax
def test_a_layer_frozen_and_freed_between_fits():
    one, made = both(chain, 2, micro_batch_size=2)
    for each in (one, made):
        for trainable in (True, False, True):
            each.layers[0].trainable = trainable
            each.compile(keras.optimizers.SGD(0.05), "mse")
            each.fit(*features(), **QUIET)
    assert_equal(one, made, NEAR)


# -------------------------------------------------------------------- on and off, and files


def test_release_undoes_it():
    one, made = both(chain, 1, micro_batch_size=2)
    before = set(vars(one))
    made.fit(*features(), **QUIET)
    assert lockstep.release(made) is made
    assert session_of(made) is None
    assert not {"stateless_call", "compute_loss_and_updates"} & set(vars(made))
    assert set(vars(made)) >= before
    made.fit(*features(), **QUIET)
    one.fit(*features(), epochs=2, **QUIET)
    assert_equal(one.get_weights(), made.get_weights(), NEAR)


def test_another_size_takes_the_place_of_the_first(capsys):
    made = lockstep.distribute(chain(), 2, micro_batch_size=1)
    made.fit(*features(), **QUIET)
    lockstep.distribute(made, 2, micro_batch_size=2)
    made.fit(*features(), **(QUIET | {"verbose": 2, "batch_size": 8}))
    assert "8 rows over 2 devices: 4 each, 2 micro-batches of 2" in capsys.readouterr().out


def test_a_saved_file_is_that_of_one_device(tmp_path):
    one, parts = both(lambda: chain(layers.Dropout(0.2, name="dropout")), 2, micro_batch_size=2)
    files = []
    for model, name in ((one, "one"), (parts, "parts")):
        model.predict(features()[0], verbose=0)
        model.save(tmp_path / f"{name}.keras")
        with zipfile.ZipFile(tmp_path / f"{name}.keras") as file:
            files.append({each: file.read(each) for each in file.namelist()})
    one, parts = files
    assert one.keys() == parts.keys()
    for name in one.keys() - {"metadata.json", "config.json"}:  # with the time, and addresses
        assert one[name] == parts[name], name
    assert len(one["config.json"]) == len(parts["config.json"])


def test_a_run_goes_on_with_another_size(tmp_path):
    dropout = [] if BACKEND == "torch" else [0.2]  # whose parts draw for themselves on PyTorch

    def make():
        return chain(*map(layers.Dropout, dropout))

    one = make()
    one.fit(*features(), epochs=2, **QUIET)
    for size, stop in ((3, 1), (2, None)):
        made = lockstep.distribute(make(), 1, micro_batch_size=size)
        checkpoint = lockstep.Checkpoint(tmp_path / "run", steps=1)
        try:
            made.fit(*features(), epochs=2, callbacks=[checkpoint, Stop(stop)], **QUIET)
        except KeyboardInterrupt:
            assert stop is not None
    assert_equal(one, made, NEAR)


def test_verify_compares_one_device_in_parts_with_itself():
    found = lockstep.verify(chain(layers.Dropout(0.2)), features(), 1, 2, micro_batch_size=3)
    assert found.equal
    assert "on one device and on 1 device, at most 3 rows at once" in str(found)
    if BACKEND == "jax":  # the other has random numbers of its own in each part
        assert str(found).startswith(
            "1 device in micro-batches give the same results as one device."
        )


# --------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "8"])
def test_a_size_that_is_no_number_of_rows(size):
    made = chain()
    before = dict(vars(made))
    for call in (lockstep.distribute, lambda *a, **k: lockstep.verify(a[0], features(), a[1], **k)):
        with pytest.raises(DeviceError) as caught:
            call(made, 2, micro_batch_size=size)
        assert str(caught.value) == (
            f"micro_batch_size={size!r} was given, but a whole number of at least 1 was "
            "expected.\n"
            "Pass the most rows that a device may run at once, such as 32, or remove the "
            "argument."
        )
    assert vars(made).keys() == before.keys()


class Counting(layers.Layer):
    """Counts its calls in a variable, whatever the rows are."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), trainable=False, name="count")

    def call(self, x):
        self.count.assign_add(1.0)
        return x


class Running(layers.Layer):
    """Keeps the mean of its inputs."""

    def build(self, shape):
        self.mean = self.add_weight(shape=shape[1:], trainable=False, name="mean")

    def call(self, x):
        self.mean.assign(ops.mean(x, axis=0))
        return x


class Turned(keras.Sequential):
    """Declares that its rows are apart, and turns them."""

    def call(self, x, training=None, mask=None):
        return ops.transpose(super().call(x))


def stateful():
    keras.utils.clear_session(free_memory=False)
    inner = [keras.Input((2, 2), batch_size=9), layers.LSTM(4, stateful=True, name="memory")]
    made = keras.Sequential([*inner, layers.Dense(2)])
    made.compile("sgd", "mse")
    return made


def fixed():
    inputs = keras.Input((4,), batch_size=9)
    made = keras.Model(inputs, layers.Dense(2)(inputs), name="fixed")
    made.compile("sgd", "mse")
    return made


def turned():
    made = Turned([keras.Input((4,)), layers.Dense(2)], name="turned")
    made.compile("sgd", lambda y, found: ops.mean(found))
    return lockstep.rowwise(made) if BACKEND == "torch" else made


def centred():
    return chain(Own(lambda self, x: x - ops.mean(x, axis=0), name="centre"))


CALLS = keras.Variable(0.0, trainable=False)
OF_ALL = Table(
    {
        "a batch norm that trains": (
            lambda: chain(layers.BatchNormalization(name="norm")),
            "'norm' (BatchNormalization) needs all rows of the batch at once, but "
            "micro_batch_size=3 splits them.\n"
            "Use GroupNormalization or LayerNormalization, freeze the layer (trainable=False),\n"
            "or remove micro_batch_size.",
        ),
        "a layer across rows": (
            centred,
            "'centre' (Own) is not known to work row by row, as micro_batch_size needs:\n",
        ),
        "a stateful RNN": (stateful, "'memory' is stateful: it keeps one state per row"),
        "a fixed number of rows": (
            fixed,
            "'fixed' is built for batches of 9 rows, but micro_batch",
        ),
    }
)
OF_ONE = Table(
    {
        "jax": {
            "a variable that changes": (
                lambda: chain(Running(name="running")),
                "'sequential/running/mean' is updated in the call of a layer from all rows of the "
                "batch, but\nmicro_batch_size splits the rows. Remove micro_batch_size.",
            ),
            "an output without rows": (
                turned,
                "'turned' has an output of shape (2, 9) for 9 rows: its",
            ),
        },
        "torch": {
            "a variable that changes": (
                lambda: chain(Counting(name="counting")),
                "'sequential/counting/count' changes in the call of a layer or loss. With",
            ),
            "a variable of no layer": (
                lambda: chain(Own(lambda self, x: (CALLS.assign_add(1.0), x)[1])),
                "a variable or tensor outside of 'sequential' changes in the call of a layer "
                "or loss",
            ),
            "an output without rows": (
                turned,
                "'turned' has an output of shape (2, 1) for 1 rows: its",
            ),
        },
    }
)
REFUSED = OF_ALL | OF_ONE.get(BACKEND, {})


def refusal(made, devices=1, size=3, **options):
    """The text of the refusal of a fit in parts, which changes nothing."""
    lockstep.distribute(made, devices, micro_batch_size=size, **options)
    before = values(made)
    x, y = features(9)
    with pytest.raises(UnsupportedModel) as caught:
        made.fit(x.reshape(9, *made.inputs[0].shape[1:]), y, **QUIET)
    assert_equal(values(made)[: len(before)], before)
    text = str(caught.value)
    assert len(text.splitlines()) <= 3
    assert max(map(len, text.splitlines())) <= 200
    return text


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_have_parts_is_refused_before_an_update(what):
    build, said = REFUSED[what]
    assert refusal(build()).startswith(said)


def test_a_refusal_of_several_devices():
    assert refusal(centred(), 3, size=2).startswith(
        "'centre' (Own) is not known to work row by row"
    )


class AlwaysTraining(keras.Model):
    """Its batch norm takes the moments of the rows in `predict` too."""

    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization(name="norm")

    def call(self, x):
        return self.norm(x, training=True)


def test_a_batch_norm_that_takes_moments_where_nothing_trains():
    made = lockstep.distribute(AlwaysTraining(), 1, micro_batch_size=3)
    with pytest.raises(UnsupportedModel, match=r"'norm' \(BatchNormalization\) needs all rows"):
        made.predict(features()[0], verbose=0)
