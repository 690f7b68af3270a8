"""Micro-batches on PyTorch: the numbers of the batch, random numbers, memory, and refusals."""

import random
import sys
import threading

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import lockstep
from lockstep.attach.attachment import session_of
from lockstep.engines.torch.steps import steps
from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import added_losses
from tests.conformance.test_micro_batches import Own, Stop
from tests.tiers import further
from tests.torch.agreement import assert_equal, both, values

QUIET = {"verbose": 0, "shuffle": False, "batch_size": 9}


def features(rows=23, seed=1):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 4)), rng.normal(size=(rows, 2))


def chain(*inner, optimizer=None, loss="mse", **options):
    made = keras.Sequential([keras.Input((4,)), layers.Dense(6, "tanh"), *inner, layers.Dense(2)])
    made.compile(optimizer or keras.optimizers.SGD(0.05, momentum=0.9), loss, **options)
    return made


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
    inner = layers.Dense(5, "tanh", kernel_regularizer="l1", bias_regularizer="l2")
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


ZOO = (
    *(dense, weighted, classes, masked, transformer, two_of_each, regularized, contrastive),
    *(curves, convolutional, accumulated, subclassed),
)
RUNS = [
    pytest.param(case, devices, marks=[] if quick else pytest.mark.thorough)
    for number, case in enumerate(ZOO)
    for devices, quick in ((1, number % 2), (3, not number % 2))
]
"""Each model is quick on one number of devices."""


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


@pytest.mark.parametrize(("case", "devices"), RUNS)
def test_parts_give_the_numbers_of_the_batch(case, devices):
    compare(case, devices)


@pytest.mark.parametrize("case", [dense, *further(transformer)])
def test_parts_give_the_numbers_of_the_batch_with_sharded_state(case, in_shards):
    compare(case, 3, state="sharded")


def test_no_layer_gets_more_than_two_rows(monkeypatch):
    made = lockstep.distribute(chain(), 1, micro_batch_size=2)
    x, y = features()
    seen, plain = [], torch.matmul

    def noting(a, b):
        if not a.is_meta:  # Keras learns shapes
            seen.append(len(a))
        return plain(a, b)

    monkeypatch.setattr(torch, "matmul", noting)
    made.train_on_batch(x[:9], y[:9])
    assert set(seen) == {1, 2}  # the first rows are compared with one device
    made.train_on_batch(x[:9], y[:9])
    assert set(seen) == {1, 2}  # and again at step 2
    seen.clear()
    made.train_on_batch(x[:9], y[:9])
    assert seen == [2] * 8 + [1] * 2 + [2] * 8  # forward, and all but the last part again
    made.test_on_batch(x[:9], y[:9])
    made.predict_on_batch(x[:9])
    assert set(seen) == {1, 2}


def test_one_update_for_the_whole_batch():
    made = lockstep.distribute(chain(), 1, micro_batch_size=2)
    made.train_on_batch(*features(9))
    assert int(made.optimizer.iterations) == 1


# ------------------------------------------------------------------------- random numbers


def noisy(seed):
    return lambda: chain(layers.Dropout(0.4, seed=seed), layers.GaussianNoise(0.1, seed=3))


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("seed", [None, 5])
def test_the_random_numbers_of_one_device(devices, seed):
    one, many = both(noisy(seed), devices, micro_batch_size=2, same_random_numbers=True)
    x, y = features()
    found = []
    for model in (one, many):
        keras.utils.set_random_seed(7)
        found.append(model.fit(x, y, epochs=2, **QUIET).history)
    assert_equal(*found)
    assert_equal(one, many)


class Masks(layers.Layer):
    """Multiplies by numbers that it draws."""

    def __init__(self, seeds, **options):
        super().__init__(**options)
        self.seeds = seeds

    def call(self, x):
        return x * keras.random.uniform(ops.shape(x), seed=self.seeds)


@pytest.mark.parametrize("seeds", [None, 5])
def test_a_second_run_of_a_part_draws_the_numbers_of_the_first(seeds, monkeypatch):
    """Their gradient is that of the numbers of the forward pass, and each part has its own."""
    seeds = None if seeds is None else keras.random.SeedGenerator(seeds)
    made = chain(Masks(seeds), layers.Dropout(0.5))
    lockstep.distribute(made, 1, micro_batch_size=2)
    x, y = features(8)
    made.train_on_batch(x, y)
    before = None if seeds is None else int(seeds.state.value[1])
    seen = {"uniform": [], "dropout": []}

    def noting(kind, plain):
        def draw(*args, **kwargs):
            found = plain(*args, **kwargs)
            seen[kind].append((found if kind == "uniform" else found == 0).detach().clone())
            return found

        return draw

    drawn = keras.src.backend.random.uniform
    monkeypatch.setattr(keras.src.backend.random, "uniform", noting("uniform", drawn))
    dropped = torch.nn.functional.dropout
    monkeypatch.setattr(torch.nn.functional, "dropout", noting("dropout", dropped))
    made.train_on_batch(x, y)
    for found in seen.values():
        assert len(found) == 7  # the last part runs once
        for number, first in enumerate(found[:4]):
            assert number == 3 or any(torch.equal(first, again) for again in found[4:])
            assert not any(torch.equal(first, other) for other in found[:number])
    assert seeds is None or int(seeds.state.value[1]) == before + 1
    first = seen["dropout"][:4]
    made.train_on_batch(x, y)
    assert not any(torch.equal(one, other) for one in first for other in seen["dropout"][7:11])


def test_a_backward_pass_in_another_thread(monkeypatch):
    """PyTorch runs that of a GPU so. Keras keeps its seeds for each thread."""
    found, plain = [], steps._backward

    def in_a_thread(*args):
        result = []
        thread = threading.Thread(target=lambda: result.append(plain(*args)))
        thread.start()
        thread.join()
        return result[0]

    for backward in (plain, in_a_thread):
        monkeypatch.setattr(steps, "_backward", backward)
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(3)
        made = lockstep.distribute(chain(Masks(None)), 1, micro_batch_size=2)
        made.fit(*features(), **QUIET)
        found.append(values(made))
    assert_equal(*found)


# --------------------------------------------------------------------------------- memory


def live_bytes(run):
    """Return the largest number of bytes that tensors have at a time while a function runs."""
    with torch.profiler.profile(profile_memory=True) as seen:
        run()
    now = most = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


WIDE = [layers.GlobalAveragePooling1D, lambda: layers.Dense(2)], "mse", (2,)
HEAD = [lambda: layers.Dense(400, "softmax")], "sparse_categorical_crossentropy", (32,)


@pytest.mark.parametrize(("end", "loss", "targets", "bound"), [(*WIDE, 0.4), (*HEAD, 0.7)])
def test_a_step_in_four_parts_holds_fewer_bytes(end, loss, targets, bound):
    """Of a head of 400 words, the outputs of all rows exist, and their gradient."""
    rng, most = np.random.default_rng(0), []
    x, y = rng.normal(size=(64, 32, 16)), rng.integers(0, 2, (64, *targets))
    for size in (64, 16):
        inner = [layers.Dense(64, "gelu") for _ in range(6 if bound < 0.5 else 1)]
        made = keras.Sequential([keras.Input((32, 16)), *inner, *(make() for make in end)])
        made.compile("sgd", loss)
        lockstep.distribute(made, 1, micro_batch_size=size)
        made.train_on_batch(x, y)
        most.append(live_bytes(lambda made=made: made.train_on_batch(x, y)))
    assert most[1] <= bound * most[0]


# ------------------------------------------------------------------- on and off, and files


def test_release_undoes_it():
    one, made = both(chain, 1, micro_batch_size=2)
    x, y = features()
    made.fit(x, y, **QUIET)
    assert lockstep.release(made) is made
    assert session_of(made) is None
    made.fit(x, y, **QUIET)
    one.fit(x, y, epochs=2, **QUIET)
    assert_equal(one.get_weights(), made.get_weights())


def test_a_size_above_the_batch_cuts_nothing(capsys):
    one, made = both(noisy(None), 1, micro_batch_size=100)
    for model in (one, made):
        keras.utils.set_random_seed(7)
        model.fit(*features(), **(QUIET | {"verbose": 2}))
    assert_equal(one, made)
    assert "9 rows, 1 micro-batch of 9" in capsys.readouterr().out


def test_the_line_of_fit_says_how_a_batch_is_cut(capsys):
    made = lockstep.distribute(noisy(5)(), 3, micro_batch_size=2)
    made.fit(*features(), **(QUIET | {"verbose": 2}))
    line = capsys.readouterr().out.splitlines()[0]
    assert "9 rows over 3 devices: 3 each, 2 micro-batches of 2" in line
    assert "with random numbers of each micro-batch" in line


def test_a_run_goes_on_with_another_size(tmp_path):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(11)
    one = chain()
    one.fit(*features(), epochs=2, **QUIET)
    for size, stop in ((3, 1), (2, None)):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(11)
        made = lockstep.distribute(chain(), 1, micro_batch_size=size)
        checkpoint = lockstep.Checkpoint(tmp_path / "run", steps=1)
        try:
            made.fit(*features(), epochs=2, callbacks=[checkpoint, Stop(stop)], **QUIET)
        except KeyboardInterrupt:
            assert stop is not None
    assert_equal(one, made)


def test_verify_compares_one_device_in_parts_with_itself():
    found = lockstep.verify(chain(layers.Dropout(0.2)), features(), 1, 2, micro_batch_size=3)
    assert found.equal
    assert "on one device and on 1 device, at most 3 rows at once" in str(found)


# --------------------------------------------------------------------------------- refusals


class Twice(layers.Layer):
    """Adds a loss in its call."""

    def call(self, x):
        self.add_loss(ops.sum(x**2))
        return x


class Counting(layers.Layer):
    """Counts its calls in a variable, whatever the rows are."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), trainable=False, name="count")

    def call(self, x):
        self.count.assign_add(1.0)
        return x


class OwnStep(keras.Sequential):
    """Has a training step of its own."""

    def train_step(self, data):
        return super().train_step(data)


class Turned(keras.Sequential):
    """Declares that its rows are apart, and turns them."""

    def call(self, x, training=None, mask=None):
        return ops.transpose(super().call(x))


def stateful():
    inner = [keras.Input((2, 2), batch_size=9), layers.LSTM(4, stateful=True, name="memory")]
    made = keras.Sequential([*inner, layers.Dense(2)])
    made.compile("sgd", "mse")
    return made


def fixed():
    inputs = keras.Input((4,), batch_size=9)
    made = keras.Model(inputs, layers.Dense(2)(inputs), name="fixed")
    made.compile("sgd", "mse")
    return made


def own_step():
    made = OwnStep([keras.Input((4,)), layers.Dense(2)], name="own")
    made.compile("sgd", "mse")
    return made


def centred():
    return chain(Own(lambda self, x: x - ops.mean(x, axis=0), name="centre"))


CALLS = keras.Variable(0.0, trainable=False)


def counted_loss(y, found):
    CALLS.assign_add(1.0)
    return ops.mean((y - found) ** 2, -1)


def noisy_loss(y, found):
    return ops.mean((y - found * keras.random.uniform(())) ** 2, -1)


REFUSED = {
    "a batch norm that trains": (
        lambda: chain(layers.BatchNormalization(name="norm")),
        "'norm' (BatchNormalization) needs all rows of the batch at once, but "
        "micro_batch_size=3 splits",
    ),
    "a layer across rows": (
        centred,
        "'centre' (Own) is not known to work row by row, as micro_batch_size needs:\n",
    ),
    "a loss of a layer": (
        lambda: chain(Twice(name="twice")),
        "'twice' (Twice) adds a loss in its call, by add_loss or an activity regularizer.\n",
    ),
    "an activity regularizer": (
        lambda: chain(layers.Dense(3, activity_regularizer="l2", name="active")),
        "'active' (Dense) adds a loss in its call, by add_loss or an activity regularizer.\n",
    ),
    "a variable that changes": (
        lambda: chain(Counting(name="counting")),
        "'sequential/counting/count' changes in the call of a layer or loss. With "
        "micro_batch_size, this call runs once\n"
        "for",
    ),
    "a stateful RNN": (stateful, "'memory' is stateful: it keeps one state per row"),
    "a fixed number of rows": (fixed, "'fixed' is built for batches of 9 rows, but micro_batch"),
    "a step of the user's own": (
        own_step,
        "'own' has a train_step of its own,\n"
        "so its step would run all rows at once, but micro_batch_size=3 was requested.\n",
    ),
    "a variable of no layer": (
        lambda: chain(Own(lambda self, x: (CALLS.assign_add(1.0), x)[1])),
        "a variable or tensor outside of 'sequential' changes in the call of a layer or loss",
    ),
    "a declared loss that counts": (
        lambda: chain(loss=lockstep.rowwise(counted_loss)),
        "The loss 'counted_loss' is declared row-wise, but changes a variable or draws random",
    ),
    "a declared loss that draws": (
        lambda: chain(loss=lockstep.rowwise(noisy_loss)),
        "The loss 'noisy_loss' is declared row-wise, but changes a variable or draws random",
    ),
    "a declared layer across rows": (
        lambda: chain(lockstep.rowwise(Own(lambda self, x: x - ops.mean(x, axis=0)))),
        "'sequential' gives different outputs if the first rows run in two parts (",
    ),
}


def refusal(made, devices=1, **options):
    lockstep.distribute(made, devices, micro_batch_size=3, **options)
    before = values(made)
    x, y = features(9)
    with pytest.raises(UnsupportedModel) as caught:
        made.fit(x.reshape(9, *made.inputs[0].shape[1:]), y, **QUIET)
    assert_equal(values(made)[: len(before)], before)
    text = str(caught.value)
    assert len(text.splitlines()) <= 3
    assert max(map(len, text.splitlines())) <= 200
    return text


@pytest.mark.parametrize("size", [1, *further(3)])
def test_a_wrong_declaration_is_found_with_parts_of_few_rows(size):
    """Where no device had two parts, the first step had compared nothing."""
    made = chain(lockstep.rowwise(Own(lambda self, x: x - ops.mean(x, axis=0))))
    lockstep.distribute(made, 3, micro_batch_size=size)
    with pytest.raises(
        UnsupportedModel, match="gives different outputs if the first rows run in two"
    ):
        made.fit(*features(), **QUIET)


class Counted(keras.losses.Loss):
    """Its value depends on the number of its calls."""

    def __init__(self):
        super().__init__()
        self.calls = keras.Variable(0.0, trainable=False)
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, y, found):
        self.calls.assign_add(1.0)
        noise = keras.random.uniform((), seed=self.seeds)
        return ops.mean((y - found) ** 2, -1) * ops.exp(-self.calls / 10) * noise


def test_the_first_step_leaves_the_state_of_a_loss_as_it_was():
    """It was called once more, and drew once more, on one device."""
    one, many = both(lambda: chain(loss=Counted()), 1, micro_batch_size=2)
    assert_equal(*[each.fit(*features(), **QUIET).history for each in (one, many)])
    assert float(many.loss.calls) == float(one.loss.calls) == 3


class Skipped(layers.Layer):
    """Leaves its rows out now and then, as one number of Python, NumPy or its own says."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def call(self, x, training=False):
        return x * (0.0 if training and self.draw() < 0.2 else 1.0)


@pytest.mark.parametrize("draw", [np.random.uniform, random.random])
def test_both_runs_of_all_parts_draw_one_number_of_python_or_numpy(draw):
    one, many = both(lambda: chain(lockstep.rowwise(Skipped(draw))), 1, micro_batch_size=2)
    found = []
    for model in (one, many):
        keras.utils.set_random_seed(8)
        history = model.fit(*features(90), **{**QUIET, "epochs": 3}).history
        found.append((history, draw()))
    assert_equal(*found)
    assert_equal(one, many)


def unbuilt():
    made = keras.Sequential([layers.Dense(6, "tanh"), layers.Dense(2)])
    made.compile("sgd", "mse")
    return made, features(), {}


def test_a_sequential_that_a_batch_has_built_has_parts():
    """Keras gives its input the number of rows of the batch."""
    compare(unbuilt, 1)


def recurrent():
    layer = layers.Bidirectional(layers.GRU(3))
    made = keras.Sequential([keras.Input((2, 2)), layer, layers.Dense(2)])
    made.compile("sgd", "mse")
    x, y = features()
    return made, (x.reshape(-1, 2, 2), y), {}


def test_an_rnn_without_dropout_draws_nothing():
    compare(recurrent, 3, same_random_numbers=True)


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_have_parts_is_refused_before_an_update(what):
    build, said = REFUSED[what]
    keras.utils.clear_session(free_memory=False)
    assert refusal(build()).startswith(said)


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


def test_a_refusal_of_several_devices():
    keras.utils.clear_session(free_memory=False)
    assert refusal(centred(), 3).startswith("'centre' (Own) is not known to work row by row")


def test_random_numbers_of_one_device_that_a_part_cannot_draw():
    inner = layers.GRU(3, dropout=0.2, name="recurrent")
    made = keras.Sequential([keras.Input((2, 2)), inner, layers.Dense(2)])
    made.compile("sgd", "mse")
    assert refusal(made, same_random_numbers=True).startswith(
        "'recurrent' (GRU) draws random numbers in its call. For a part of the rows, it\ncannot"
    )


def test_an_output_without_rows():
    made = Turned([keras.Input((4,)), layers.Dense(2)], name="turned")
    made.compile("sgd", lambda y, found: ops.mean(found))
    assert "'turned'" in refusal(lockstep.rowwise(made))


def test_no_loss_of_a_second_run_stays_on_a_layer():
    made = lockstep.distribute(
        chain(layers.Dense(3, kernel_regularizer="l2")), 1, micro_batch_size=2
    )
    made.fit(*features(), **QUIET)
    assert not any(map(added_losses, made.layers))
