"""Short steps of a `fit` run 20 at once on JAX, by themselves.

XLA may round one program otherwise than another one: what is compared is 200 steps of float32.
"""

import os
import signal
import threading

import jax
import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.engines.jax.steps import scan
from lockstep.engines.jax.steps.execution import Execution
from lockstep.training.callbacks import StepTimer

BATCH, FULL, EPOCHS = 4, 41, 5
"""205 full batches in a fit: two times 20, one, and a ragged one in each epoch."""
SHAPES = {"dense": (6,), "recurrent": (5, 3)}


def built(kind="dense", optimizer=None, width=8):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    inner = {
        "dense": [layers.Dense(width, "relu"), layers.BatchNormalization(), layers.Dropout(0.3)],
        "recurrent": [layers.LSTM(width), layers.Dropout(0.2)],
        "convolutional": [layers.Reshape((6, 1)), layers.Conv1D(4, 3), layers.Flatten()],
    }[kind]
    made = keras.Sequential(
        [keras.Input(SHAPES.get(kind, (6,))), *inner, layers.Dense(3, "softmax")]
    )
    made.compile(
        optimizer or keras.optimizers.Adam(0.01),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        weighted_metrics=["accuracy"],
    )
    return made


def data(kind="dense", full=FULL):
    rng = np.random.default_rng(1)
    rows = BATCH * full + 1
    x = rng.normal(size=(rows, *SHAPES.get(kind, (6,)))).astype("float32")
    return x, rng.integers(0, 3, rows)


def fit(made, kind="dense", full=FULL, **options):
    given = {"batch_size": BATCH, "epochs": EPOCHS, "verbose": 0} | options
    return made.fit(*data(kind, full), **given).history


def values(made):
    return [np.asarray(each) for each in (*made.weights, *made.optimizer.variables)]


def assert_near(mine, theirs):
    for one, other in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-6)


@pytest.fixture
def executions(monkeypatch):
    """The numbers of steps of the executions of training."""
    seen = []
    step = Execution.step

    def noted(self, iterator, times):
        if self._kind.name == "train":
            seen.append(times)
        return step(self, iterator, times)

    monkeypatch.setattr(Execution, "step", noted)
    return seen


OF_AN_EPOCH = [20, 20, 2]
CASES = {
    "averages, clipping and a schedule": (
        "dense",
        lambda: keras.optimizers.AdamW(
            keras.optimizers.schedules.CosineDecay(0.01, 150),
            use_ema=True,
            ema_overwrite_frequency=13,
            clipnorm=1.0,
        ),
        {"class_weight": {0: 1.0, 1: 1.5, 2: 0.3}},
    ),
    "accumulation": (
        "dense",
        lambda: keras.optimizers.SGD(0.02, momentum=0.9, gradient_accumulation_steps=3),
        {"shuffle": False},
    ),
    "recurrent": ("recurrent", None, {"validation_data": data("recurrent", 3)}),
}


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_weights_slots_and_history_are_those_of_single_steps(
    case, devices, executions, monkeypatch
):
    kind, optimizer, options = CASES[case]
    found = []
    for setting in ("0", "1"):
        monkeypatch.setenv("LOCKSTEP_STEPS_AT_ONCE", setting)
        executions.clear()
        made = lockstep.distribute(built(kind, optimizer and optimizer()), devices)
        history = fit(made, kind, **options)
        ran = list(executions)
        found.append((history, values(made)))
    assert ran[:3] == OF_AN_EPOCH
    (plain, arrays), (at_once, mine) = found
    assert_near(arrays, mine)
    assert plain.keys() == at_once.keys()
    for name in plain:
        np.testing.assert_allclose(plain[name], at_once[name], rtol=1e-5, atol=1e-6)


def test_the_numbers_are_those_of_keras(executions):
    alone, mine = built(), lockstep.distribute(built(), 1)
    theirs, ours = (fit(each, shuffle=False) for each in (alone, mine))
    assert executions == OF_AN_EPOCH * EPOCHS
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)
    assert_near(values(alone), values(mine))


class Looks(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pass


class LooksAtEpochs(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        pass


def generated():
    x, y = data(full=210)
    for first in range(0, len(x), BATCH):
        yield x[first : first + BATCH], y[first : first + BATCH]


@pytest.mark.parametrize(
    ("why", "options", "at_once"),
    [
        (
            "a progress bar and hooks of epochs",
            {"verbose": 1, "callbacks": [LooksAtEpochs()]},
            True,
        ),
        ("a hook of batches", {"callbacks": [Looks()]}, False),
        ("a clock of steps", {"callbacks": [StepTimer()]}, False),
        ("a profile", {"callbacks": [lockstep.Profile(verbose=0)]}, True),
        ("few steps", {"epochs": 4}, False),
        ("steps of an epoch", {"steps_per_epoch": 42}, False),
        ("a checkpoint of steps", {"callbacks": lockstep.Checkpoint, "steps": 50}, False),
        ("a checkpoint of epochs", {"callbacks": lockstep.Checkpoint}, True),
    ],
)
def test_who_looks_between_steps_sees_each(why, options, at_once, executions, tmp_path):
    if options.get("callbacks") is lockstep.Checkpoint:
        steps = options.get("steps")
        options = {"callbacks": [lockstep.Checkpoint(tmp_path / "run", steps=steps)]}
    fit(lockstep.distribute(built(), 1), **options)
    assert (max(executions) == 20) is at_once
    assert max(executions) in (1, 20)


def test_long_steps_convolutions_and_other_data_run_one_by_one(executions, monkeypatch):
    fit(lockstep.distribute(built("convolutional"), 1), "convolutional")
    lockstep.distribute(built(), 1).fit(generated(), steps_per_epoch=205, shuffle=False, verbose=0)
    monkeypatch.setattr(scan, "MOST_NUMBERS", 1000)
    fit(lockstep.distribute(built(), 1))
    assert set(executions) == {1}
    executions.clear()
    by_two = built()
    by_two.steps_per_execution = 2
    fit(lockstep.distribute(by_two, 1))
    assert set(executions) == {2}


def test_numbers_that_a_program_computes():
    def program(x, steps):
        y = x @ x  # 8 * 8 numbers of 8 products each
        return jax.lax.fori_loop(0, steps, lambda _, z: z + 1, y)

    def count(steps):
        made = jax.make_jaxpr(lambda x: program(x, steps))(np.ones((8, 8), "float32"))
        return scan.numbers_computed(made.jaxpr)

    assert count(5) - count(4) == 64 + 1  # and the counter
    assert 64 <= count(0) < 80
    unknown = jax.make_jaxpr(lambda x, n: jax.lax.fori_loop(0, n, lambda _, z: z + 1, x))
    assert scan.numbers_computed(unknown(1.0, 3).jaxpr) > scan.MOST_NUMBERS


@pytest.mark.parametrize("after", [0.0, 0.01, 0.03])
def test_an_interrupt_leaves_the_weights_of_whole_steps(after, executions):
    made = lockstep.distribute(built(), 1)
    fit(made, epochs=EPOCHS)  # compiles
    keras.utils.set_random_seed(3)
    before = values(made)

    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
    begin = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: timer.start())
    with pytest.raises(KeyboardInterrupt):
        fit(made, epochs=10_000, shuffle=False, callbacks=[begin])
    steps = int(made.optimizer.iterations) - EPOCHS * (FULL + 1)
    found = values(made)

    keras.utils.set_random_seed(3)
    again = lockstep.distribute(built(), 1)
    fit(again, epochs=EPOCHS)
    for variable, value in zip((*again.weights, *again.optimizer.variables), before, strict=True):
        variable.assign(value)
    keras.utils.set_random_seed(3)
    whole, rest = divmod(steps, FULL + 1)
    x, y = data()
    with_steps = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    again.fit(x, y, epochs=whole, **with_steps)
    if rest:
        again.fit(x[: rest * BATCH], y[: rest * BATCH], **with_steps)
    assert_near(values(again), found)


def test_a_run_that_goes_on_decides_alike(executions, tmp_path):
    """What remains is less than 200 batches; the arguments of the call decide."""

    class Stops(keras.callbacks.Callback):
        fails = True

        def get_state(self):
            return {}

        def set_state(self, state):
            pass

        def on_epoch_end(self, epoch, logs=None):
            if epoch == 2 and self.fails:
                raise RuntimeError("stop")

    expected = lockstep.distribute(built(), 1)
    fit(expected)
    run = tmp_path / "run"
    first = lockstep.distribute(built(), 1)
    with pytest.raises(RuntimeError, match="stop"):
        fit(first, callbacks=[lockstep.Checkpoint(run), Stops()])
    executions.clear()
    second = lockstep.distribute(built(), 1)
    Stops.fails = False
    fit(second, callbacks=[lockstep.Checkpoint(run), Stops()])
    assert executions[:3] == OF_AN_EPOCH
    assert len(executions) < 3 * EPOCHS
    for one, other in zip(values(expected), values(second), strict=True):
        np.testing.assert_array_equal(one, other)


def test_one_line_says_it(capsys):
    made = lockstep.distribute(built(), 1)
    fit(made, verbose=2)
    fit(made, verbose=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("lockstep: 20 short steps run in one program") == 1
