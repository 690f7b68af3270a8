"""Batches of `train_on_batch` and its kind on JAX: memory, dtypes, states, interrupts, threads."""

import threading

import jax
import keras
import ml_dtypes
import numpy as np
import pytest

import lockstep
from lockstep.engines.jax.steps.execution import StepFunction
from tests.conformance.common import assert_same, compile_, data, model, weights
from tests.conformance.test_evaluation import aligned

DEVICES = pytest.mark.parametrize("devices", [1, 3])
ROWS = 7


def both(make=model, devices=3):
    return lockstep.distribute(make(), devices), make()


@pytest.mark.each_value_once
@DEVICES
@pytest.mark.parametrize("memory", [np.ndarray, np.memmap])
def test_batches_go_from_the_host_to_the_devices_that_need_them(
    devices, memory, monkeypatch, tmp_path
):
    def in_memory(array, name):
        if memory is np.ndarray:
            return array
        np.save(tmp_path / name, array)
        return np.load(tmp_path / f"{name}.npy", mmap_mode="r")

    def seen(step, iterator):
        batch = next(iterator)
        batches.extend(leaf for leaf in keras.tree.flatten(batch) if leaf is not None)
        return draws(step, iter((batch,)))

    made = lockstep.distribute(model(), devices)
    x, y = map(in_memory, data(ROWS), "xy")
    assert type(x) is memory
    made.train_on_batch(x, y), made.test_on_batch(x, y), made.predict_on_batch(x)  # compiled
    batches, draws = [], StepFunction.draws
    monkeypatch.setattr(StepFunction, "draws", seen)
    with jax.transfer_guard_device_to_device("disallow_explicit"):
        made.train_on_batch(x, y), made.test_on_batch(x, y), made.predict_on_batch(x)
    assert len(batches) == 5
    assert all(isinstance(leaf, np.ndarray) for leaf in batches)


KINDS = {
    "bytes": lambda x: np.abs(x).astype("uint8"),
    "whole numbers of 64 bits": lambda x: x.astype("int64"),
    "floats of 64 bits": lambda x: x.astype("float64"),
    "floats of 16 bits": lambda x: x.astype("float16"),
    "brain floats": lambda x: x.astype(ml_dtypes.bfloat16),
    "truth values": lambda x: x > 0,
    "a view with gaps": lambda x: np.repeat(x, 2, axis=0)[::2],
    "rows that are read only": lambda x: np.broadcast_to(x[:1], x.shape),
    "an array of JAX's": jax.numpy.asarray,
}


@pytest.mark.each_value_once
@DEVICES
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_any_kind(kind, devices):
    made, alone = both(devices=devices)
    x, y = data(ROWS)
    x = KINDS[kind](x)
    found, right = (
        [each.train_on_batch(x, y), each.test_on_batch(x, y), each.predict_on_batch(x)]
        for each in (made, alone)
    )
    assert_same(found, right)
    assert_same(weights(made), weights(alone))


@DEVICES
def test_rows_in_the_other_byte_order(devices):
    made, alone = both(devices=devices)
    x, y = data(ROWS)
    other = x.astype(">f4"), y.astype(">f4")
    assert_same(made.train_on_batch(*other), alone.train_on_batch(x, y))
    assert_same(made.test_on_batch(*other), alone.test_on_batch(x, y))
    assert_same(made.predict_on_batch(other[0]), alone.predict_on_batch(x))
    assert_same(made.predict(other[0], verbose=0), alone.predict(x, verbose=0))
    assert_same(weights(made), weights(alone))


REFUSED = {
    "words": lambda x: np.array([["a"] * 4] * len(x)),
    "objects": lambda x: x.astype(object),
    "times": lambda x: x.astype("datetime64[s]"),
    "floats that JAX has not": lambda x: x.astype(np.longdouble),
    "records": lambda x: np.zeros(len(x), [("a", "f4"), ("b", "i4")]),
    "a masked array": lambda x: np.ma.masked_array(x, x > 0),
    "nothing": lambda x: None,
}


@pytest.mark.each_value_once
@DEVICES
@pytest.mark.parametrize("kind", REFUSED)
def test_what_keras_refuses_is_refused_and_changes_nothing(kind, devices):
    made, alone = both(devices=devices)
    x, y = data(ROWS)
    before = weights(made)
    for call in ("train_on_batch", "test_on_batch"):
        raised = []
        for each in (alone, made):
            with pytest.raises(Exception) as error:  # noqa: PT011  # whatever Keras says
                getattr(each, call)(REFUSED[kind](x), y)
            raised.append(error.type)
        assert raised[0] is raised[1]
    assert_same(weights(made), before, atol=0)
    assert_same(made.train_on_batch(x, y), alone.train_on_batch(x, y))


class Silent(keras.Sequential):
    """Trains, and says nothing of it: nobody waits for a number."""

    def train_step(self, state, data):
        _, state = super().train_step(state, data)
        return {}, state


@pytest.mark.each_value_once
@DEVICES
@pytest.mark.parametrize("made_by", [keras.Sequential, Silent])
def test_rows_may_be_written_into_after_the_call(made_by, devices):
    """JAX takes memory at such an address as it is, and runs on while Python does.

    Keras's own steps train the silent one on the rows of the next batch.
    """

    def run(distributed):
        keras.utils.set_random_seed(5)
        made = made_by([keras.Input((256,)), *map(keras.layers.Dense, [512, 512, 256])])
        if distributed:
            lockstep.distribute(made, devices)
        compile_(made)
        rng = np.random.default_rng(0)
        x, y = (aligned(rng.normal(size=(120, 256)).astype("float32")) for _ in range(2))
        for _ in range(4):
            if distributed:
                made.train_on_batch(x, y)
            else:
                made.train_on_batch(x.copy(), y.copy())
            x[...], y[...] = (rng.normal(size=(120, 256)) for _ in range(2))
        return weights(made)

    assert_same(run(True), run(False))


class Narrow(keras.Sequential):
    """Returns states of metrics in a type that the variables do not have."""

    def test_step(self, state, data):
        logs, (trainable, others, metrics) = super().test_step(state, data)
        return logs, (trainable, others, [jax.numpy.full((), 2, "int32") for _ in metrics])


@DEVICES
def test_what_a_step_of_ones_own_returns_is_assigned_as_keras_does(devices):
    made = Narrow([keras.Input((4,)), keras.layers.Dense(2)])
    compile_(made)
    lockstep.distribute(made, devices)
    made.test_on_batch(*data(ROWS))
    states = [variable.value for variable in made.metrics_variables]
    assert [str(state.dtype) for state in states] == ["float32"] * len(states)
    assert [float(state) for state in states] == [2] * len(states)


def test_a_state_of_another_shape_is_refused_as_keras_does():
    made, alone = both(devices=1)
    values = [keras.ops.zeros((3, *variable.shape)) for variable in alone.trainable_variables]
    said = []
    for each in (alone, made):
        vars(each)["_jax_state"], each._jax_state_synced = {"trainable_variables": values}, False
        with pytest.raises(ValueError, match="must match") as refused:
            each.jax_state_sync()
        said.append(str(refused.value).split("Target")[0])
    assert said[0] == said[1]


@pytest.mark.each_value_once
@DEVICES
@pytest.mark.parametrize("where", ["programs", "outputs"])
def test_an_interrupt_finds_the_weights_before_the_step_or_after_it(where, devices, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    made, alone = both(devices=devices)
    x, y = data(ROWS)
    made.train_on_batch(x, y), alone.train_on_batch(x, y)
    with monkeypatch.context() as patch:
        patch.setattr(StepFunction, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.train_on_batch(2 * x, y)
    if where == "outputs":  # of a step that has run
        alone.train_on_batch(2 * x, y)
    assert_same(weights(made), weights(alone))
    assert_same(made.predict_on_batch(x), alone.predict_on_batch(x))
    assert_same(made.train_on_batch(x, y), alone.train_on_batch(x, y))


@DEVICES
def test_batches_of_several_threads_have_their_turns(devices):
    """Keras alone, where one of them trains, gives away arrays that the other is about to take."""
    made, alone = both(devices=devices)
    x, y = data(ROWS)
    right = [alone.predict_on_batch(x)]
    for _ in range(30):
        alone.train_on_batch(x, y)
        right.append(alone.predict_on_batch(x))
    found, done = [], threading.Event()

    def asks():
        while not done.is_set():
            found.append(made.predict_on_batch(x))

    threads = [threading.Thread(target=asks) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(30):
            made.train_on_batch(x, y)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert_same(weights(made), weights(alone))
    assert found
    for rows in found:
        assert min(np.abs(rows - each).max() for each in right) < 1e-5


@DEVICES
def test_a_step_function_that_somebody_has_put_around_is_called(devices):
    made, alone = both(devices=devices)
    x, y = data(ROWS)
    made.train_on_batch(x, y), alone.train_on_batch(x, y)
    step, batches = made.train_function, []

    def around(state, iterator):
        batches.append(next(iterator))
        return step(state, iter(batches[-1:]))

    made.train_function = around
    assert_same(made.train_on_batch(x, y), alone.train_on_batch(x, y))
    assert len(batches) == 1
    assert_same(weights(made), weights(alone))


def test_a_state_that_is_put_back_in_a_stateless_scope_stays_in_it():
    for each in both(devices=1):
        before = weights(each)
        values = [variable.value + 1 for variable in each.trainable_variables]
        vars(each)["_jax_state"], each._jax_state_synced = {"trainable_variables": values}, False
        with keras.StatelessScope() as scope:
            each.jax_state_sync()
        found = [scope.get_current_value(variable) for variable in each.trainable_variables]
        assert_same(found, values, atol=0)
        assert_same(weights(each), before, atol=0)
