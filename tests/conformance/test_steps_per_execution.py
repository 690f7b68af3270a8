"""Several steps in one program give what as many single steps give, and Keras."""

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.engines.jax.steps import programs
from tests.conformance import common
from tests.conformance.common import assert_same, weights
from tests.conformance.side_by_side import BATCH, assert_same_runs, both, held_out, smooth, train
from tests.tiers import rest

STEPS = 7  # of an epoch of `train`


@pytest.fixture
def together(monkeypatch):
    """How many steps each program for several steps had."""
    counted = []
    stacked = programs.stacked

    def counting(batches):
        counted.append(len(batches))
        return stacked(batches)

    monkeypatch.setattr(programs, "stacked", counting)
    return counted


def at_once(made, times):
    made.compile(made.optimizer, "mse", metrics=["mae"], steps_per_execution=times)
    return made


class Logs(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.kept = []

    def on_train_batch_begin(self, batch, logs=None):
        self.kept.append(("begin", batch))

    def on_train_batch_end(self, batch, logs=None):
        self.kept.append(("end", batch, dict(logs)))

    def on_test_batch_end(self, batch, logs=None):
        self.kept.append(("test", batch, dict(logs)))


@pytest.mark.parametrize(
    ("times", "devices", "programs"),
    [(3, 3, [3, 3]), (20, 1, [7]), *rest((2, 1, [2, 2, 2]), (20, 4, [7]))],
)
def test_fit_evaluate_and_predict(times, devices, programs, together, tmp_path):
    def script(made, folder):
        logs = Logs()
        history = train(at_once(made, times), [logs], validation_data=None)
        fitted = list(together)
        evaluated = made.evaluate(*held_out(), batch_size=5, verbose=0, callbacks=[logs])
        predicted = made.predict(held_out()[0], batch_size=5, verbose=0)
        return [history, logs.kept, evaluated, predicted], fitted

    one, many = both(lambda made, folder: script(made, folder)[0], tmp_path, devices)
    assert together[: len(programs)] == programs
    names = [[call[:2] for call in run.returned[1]] for run in (one, many)]
    assert names[1] == names[0]
    one.returned[1], many.returned[1] = (
        [call[2:] for call in run.returned[1] if len(call) > 2] for run in (one, many)
    )
    assert_same_runs(one, many)


class PerBatch(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.05 / (1 + batch)

    def on_train_batch_end(self, batch, logs=None):
        bias = self.model.layers[0].bias
        bias.assign(bias * 0.9)


@pytest.mark.parametrize("devices", [3, *rest(1)])
def test_a_ragged_last_batch(devices, together):
    alone, made = common.model(), lockstep.distribute(common.model(), devices)
    assert_same(common.fit(at_once(made, 4), epochs=2), common.fit(at_once(alone, 4), epochs=2))
    assert together == [4, 3] * 2  # and the last of four rows alone
    assert_same(weights(made), weights(alone))


def test_a_callback_that_changes_the_learning_rate_and_weights(together, tmp_path):
    assert_same_runs(
        *both(lambda made, _: train(at_once(made, 3), [PerBatch()]), tmp_path, devices=3)
    )
    assert together


def test_stopping_after_an_execution(together, tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = True

    one, many = both(lambda made, _: train(at_once(made, 3), [Stop()]), tmp_path, devices=1)
    assert_same_runs(one, many)
    assert int(many.model.optimizer.iterations) == 3
    assert together[0] == 3


def test_a_generator_gives_as_many_batches_as_to_keras():
    taken = []
    for devices in (None, 1):
        made = at_once(smooth(), 3)
        if devices:
            lockstep.distribute(made, devices)
        counted = []

        def endless(counted=counted):
            while True:
                counted.append(1)
                yield common.data(BATCH)

        source = endless()
        for _ in range(2):
            made.fit(source, steps_per_epoch=5, epochs=2, verbose=0, shuffle=False)
            counted.append("fit")
        taken.append(counted)
    assert taken[1] == taken[0]


def test_batches_of_many_shapes(together):
    def source():
        for rows in (7, 7, 7, 5, 5, 1, 7, 7):
            yield common.data(rows, seed=rows)

    found = []
    for devices in (None, 3):
        made = at_once(smooth(), 8)
        if devices:
            lockstep.distribute(made, devices)
        made.fit(source(), steps_per_epoch=8, verbose=0, shuffle=False)
        found.append(weights(made))
    assert_same(found[1], found[0])
    assert together == [3, 2, 2]


def test_a_convolution_on_cpu_runs_step_by_step(together):
    """There a loop around a convolution is several times slower than the steps."""
    found = []
    x, y = common.data()
    for devices in (None, 1):
        keras.utils.set_random_seed(2)
        made = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Reshape((4, 1)),
                layers.Conv1D(2, 2),
                layers.Flatten(),
                layers.Dense(2),
            ]
        )
        made.compile("sgd", "mse", steps_per_execution=3)
        if devices:
            lockstep.distribute(made, devices)
        made.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        found.append(weights(made))
    assert together == [3]  # looked at once, and not run
    assert_same(found[1], found[0], atol=0)


def test_more_data_than_may_stand_on_the_devices_runs_step_by_step(monkeypatch, together):
    from lockstep.engines.jax.steps import scan

    monkeypatch.setattr(scan, "MOST_BYTES", 100)
    made = lockstep.distribute(at_once(smooth(), 3), 1)
    train(made)
    assert together == []
    assert all(np.isfinite(value).all() for value in weights(made))


@pytest.mark.parametrize(("most", "ahead"), [(100, 2), (2**20, 7)])
def test_batches_that_are_not_stacked_are_drawn_one_by_one(most, ahead, monkeypatch):
    """Keras holds one batch at a time, and the two it looks at before."""
    from lockstep.engines.jax.steps import scan

    def source():
        for _ in range(7):
            notes.append("drawn")
            yield common.data(BATCH)

    def running(self, each):
        notes.extend(["runs"] * (len(each[0]) if most > 100 else 1))
        return shard(self, each)

    notes = []
    monkeypatch.setattr(scan, "MOST_BYTES", most)
    name = "_shard_stacked" if most > 100 else "_shard"
    shard = getattr(programs.Programs, name)
    monkeypatch.setattr(programs.Programs, name, running)
    made = lockstep.distribute(at_once(smooth(), 7), 2)
    made.fit(source(), steps_per_epoch=7, shuffle=False, verbose=0)
    drawn = [notes[:place].count("drawn") for place, what in enumerate(notes) if what == "runs"]
    assert max(count - number for number, count in enumerate(drawn)) == ahead
    right = smooth()
    right.fit(source(), steps_per_epoch=7, shuffle=False, verbose=0)
    assert_same(weights(made), weights(right))


def test_more_steps_than_an_epoch_has_are_as_many_as_it_has(monkeypatch, together):
    from lockstep.engines.jax.steps import scan

    data = common.data(7 * BATCH)
    monkeypatch.setattr(scan, "MOST_BYTES", 10 * sum(array[:BATCH].nbytes for array in data))
    made = lockstep.distribute(at_once(smooth(), 1000), 2)
    made.fit(*data, batch_size=BATCH, shuffle=False, verbose=0)
    right = smooth()
    right.fit(*data, batch_size=BATCH, shuffle=False, verbose=0)
    assert_same(weights(made), weights(right))
    assert together == [7]


def test_state_of_a_recurrent_layer_and_accumulated_gradients_go_from_step_to_step(together):
    """Keras alone drops the state of the layer on JAX: single steps are the truth."""
    found = []
    x = np.random.default_rng(1).normal(size=(24, 3, 2)).astype("float32")
    for times in (1, 4):
        keras.utils.set_random_seed(2)
        made = keras.Sequential(
            [keras.Input(batch_shape=(4, 3, 2)), layers.GRU(3, stateful=True), layers.Dense(1)]
        )
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2, use_ema=True)
        made.compile(optimizer, "mse", steps_per_execution=times)
        lockstep.distribute(made, 2)
        made.fit(x, x[:, 0, :1], batch_size=4, shuffle=False, verbose=0)
        found.append([weights(made), [np.asarray(v.value) for v in made.non_trainable_variables]])
    assert together == [4, 2]
    assert_same(found[1], found[0])


class FitsItself(keras.Sequential):
    """Its `fit` runs Keras's own loop, which stacks the batches of several steps (Keras 3.16)."""

    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs)


@pytest.mark.parametrize("rows", [46, *rest(42, 8)])
def test_several_steps_in_the_loop_of_keras(rows):
    """Seven batches in executions of three; the last batch has fewer rows."""
    x, y = common.data(rows)
    found = []
    for devices in (None, 3):
        keras.utils.set_random_seed(4)
        made = FitsItself([keras.Input((4,)), layers.Dense(5, "tanh"), layers.Dense(2)])
        made.compile("sgd", "mse", metrics=["mae"], steps_per_execution=3)
        if devices is not None:
            lockstep.distribute(made, devices)
        options = {"batch_size": 7, "epochs": 2, "verbose": 0, "validation_data": (x, y)}
        history = made.fit(x, y, **options).history
        found.append([history, weights(made), made.predict(x, batch_size=7, verbose=0)])
        assert int(made.optimizer.iterations) == 2 * -(-rows // 7)
    assert_same(found[1], found[0])
