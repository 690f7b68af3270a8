"""Micro-batches on PyTorch: the numbers of the batch, random numbers, memory, and refusals."""

import random
import threading

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import lockstep
from lockstep.engines.torch.steps import steps
from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import added_losses
from tests.agreement import assert_equal, both, values
from tests.every_backend.test_micro_batches import CALLS, QUIET, refusal
from tests.models import Own, chain, features
from tests.tiers import further


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


def test_the_line_of_fit_says_how_a_batch_is_cut(capsys):
    made = lockstep.distribute(noisy(5)(), 3, micro_batch_size=2)
    made.fit(*features(), **(QUIET | {"verbose": 2}))
    line = capsys.readouterr().out.splitlines()[0]
    assert "9 rows over 3 devices: 3 each, 2 micro-batches of 2" in line
    assert "with random numbers of each micro-batch" in line


# --------------------------------------------------------------------------------- refusals


class Twice(layers.Layer):
    """Adds a loss in its call."""

    def call(self, x):
        self.add_loss(ops.sum(x**2))
        return x


class OwnStep(keras.Sequential):
    """Has a training step of its own."""

    def train_step(self, data):
        return super().train_step(data)


def own_step():
    made = OwnStep([keras.Input((4,)), layers.Dense(2)], name="own")
    made.compile("sgd", "mse")
    return made


def counted_loss(y, found):
    CALLS.assign_add(1.0)
    return ops.mean((y - found) ** 2, -1)


def noisy_loss(y, found):
    return ops.mean((y - found * keras.random.uniform(())) ** 2, -1)


REFUSED = {
    "a loss of a layer": (
        lambda: chain(Twice(name="twice")),
        "'twice' (Twice) adds a loss in its call, by add_loss or an activity regularizer.\n",
    ),
    "an activity regularizer": (
        lambda: chain(layers.Dense(3, activity_regularizer="l2", name="active")),
        "'active' (Dense) adds a loss in its call, by add_loss or an activity regularizer.\n",
    ),
    "a step of the user's own": (
        own_step,
        "'own' has a train_step of its own,\n"
        "so its step would run all rows at once, but micro_batch_size=3 was requested.\n",
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


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_have_parts_is_refused_before_an_update(what):
    build, said = REFUSED[what]
    keras.utils.clear_session(free_memory=False)
    assert refusal(build()).startswith(said)


def test_random_numbers_of_one_device_that_a_part_cannot_draw():
    inner = layers.GRU(3, dropout=0.2, name="recurrent")
    made = keras.Sequential([keras.Input((2, 2)), inner, layers.Dense(2)])
    made.compile("sgd", "mse")
    assert refusal(made, same_random_numbers=True).startswith(
        "'recurrent' (GRU) draws random numbers in its call. For a part of the rows, it\ncannot"
    )


def test_no_loss_of_a_second_run_stays_on_a_layer():
    made = lockstep.distribute(
        chain(layers.Dense(3, kernel_regularizer="l2", name="penalized")), 1, micro_batch_size=2
    )
    made.fit(*features(), **QUIET)
    assert not any(map(added_losses, made.layers))
