"""Several steps in one program give what as many single steps give, and Keras."""

import gc
import weakref

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.engines.jax.steps import steps
from lockstep.errors import LayoutConflict, UnsupportedModel
from tests.conformance import common
from tests.conformance.common import assert_same, weights
from tests.conformance.side_by_side import BATCH, assert_same_runs, both, held_out, smooth, train
from tests.sampling import rest

STEPS = 7  # of an epoch of `train`


@pytest.fixture
def together(monkeypatch):
    """How many steps each program for several steps had."""
    counted = []
    stacked = steps.stacked

    def counting(batches):
        counted.append(len(batches))
        return stacked(batches)

    monkeypatch.setattr(steps, "stacked", counting)
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
def test_auto_gives_the_numbers_of_single_steps(devices, together, monkeypatch):
    common.several_steps_are_faster(monkeypatch)
    x, y = common.data(110)
    found = []
    for made in (smooth(), lockstep.distribute(at_once(smooth(), "auto"), devices)):
        if not found:
            at_once(made, 1)
        history = made.fit(
            x, y, batch_size=BATCH, epochs=6, validation_split=0.3, shuffle=False, verbose=0
        ).history
        found.append([history, weights(made), made.predict(x[:9], batch_size=2, verbose=0)])
    assert max(together) > 2
    assert_same(found[1], found[0])


def test_auto_leaves_steps_single_where_a_callback_looks_at_each(together, monkeypatch, tmp_path):
    common.several_steps_are_faster(monkeypatch)

    def script(made, folder):
        times = "auto" if "_lockstep" in vars(made) else 1
        x, y = common.data(110)
        return (
            at_once(made, times)
            .fit(x, y, batch_size=BATCH, epochs=4, verbose=0, shuffle=False, callbacks=[PerBatch()])
            .history
        )

    assert_same_runs(*both(script, tmp_path, devices=3))
    assert not together


@pytest.mark.parametrize("rows", [21, *rest(3, 16)])
def test_auto_on_little_data(rows):
    x, y = common.data(rows)
    found = []
    for times in (1, "auto"):
        made = smooth()
        if times == "auto":
            lockstep.distribute(made, 2)
        at_once(made, times).fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0)
        found.append(weights(made))
    assert_same(found[1], found[0])


def test_auto_on_a_generator_takes_as_many_batches_as_keras(together, monkeypatch):
    common.several_steps_are_faster(monkeypatch)
    taken, found = [], []
    for times in (1, "auto"):
        made = smooth()
        if times == "auto":
            lockstep.distribute(made, 2)
        counted = []

        def endless(counted=counted):
            while True:
                counted.append(1)
                yield common.data(BATCH, seed=len(counted))

        at_once(made, times).fit(endless(), steps_per_epoch=50, epochs=3, verbose=0, shuffle=False)
        taken.append(len(counted))
        found.append(weights(made))
    assert together
    assert taken[1] == taken[0]
    assert_same(found[1], found[0])


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_auto_counts_the_steps_of_data_without_a_length_as_keras_does(together, monkeypatch):
    import tensorflow as tf

    common.several_steps_are_faster(monkeypatch)
    x, y = common.data(150 * BATCH)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).filter(lambda *_: True)
    found = []
    for times in (1, "auto"):
        made = smooth()
        if times == "auto":
            lockstep.distribute(made, 2)
        bar = keras.callbacks.ProgbarLogger()
        at_once(made, times).fit(batches, epochs=3, verbose=0, shuffle=False, callbacks=[bar])
        found.append([[bar.seen, bar.target], weights(made)])
    assert max(together) > 2
    assert found[1][0] == found[0][0] == [150, 150]
    assert_same(found[1][1], found[0][1], atol=1e-4)


def test_auto_is_single_steps_after_a_callback_has_released_the_model(
    together, monkeypatch, tmp_path
):
    common.several_steps_are_faster(monkeypatch)

    class Release(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 2 and "_lockstep" in vars(self.model):
                lockstep.release(self.model)

    def script(made, folder):
        times = "auto" if "_lockstep" in vars(made) else 1
        options = {"batch_size": BATCH, "epochs": 5, "verbose": 0, "shuffle": False}
        x, y = common.data(110 * BATCH)
        return (
            at_once(made, times)
            .fit(x, y, **options, validation_data=(x, y), callbacks=[Release()])
            .history
        )

    one, many = both(script, tmp_path, devices=2)
    assert max(together) > 2
    assert int(many.model.optimizer.iterations) == 5 * 110
    assert_same(many.returned, one.returned, atol=1e-4)


def test_a_file_of_a_model_with_auto_is_trained_by_plain_keras(tmp_path):
    made = at_once(lockstep.distribute(smooth(dropout=0.0), 2), "auto")
    made.fit(*common.data(20), verbose=0, shuffle=False)
    made.save(tmp_path / "auto.keras")
    loaded = keras.models.load_model(tmp_path / "auto.keras")
    assert loaded.steps_per_execution == 1
    loaded.fit(*common.data(20), verbose=0, shuffle=False)
    lockstep.release(made)
    made.fit(*common.data(20), verbose=0, shuffle=False)
    assert_same(weights(made), weights(loaded))


def test_auto_is_refused_where_keras_loop_runs():
    class OwnFit(keras.Sequential):
        def fit(self, *args, **kwargs):
            return super().fit(*args, **kwargs)

    made = OwnFit([keras.Input((4,)), layers.Dense(2)])
    made.compile("sgd", "mse", steps_per_execution="auto")
    lockstep.distribute(made, 2)
    with pytest.raises(UnsupportedModel, match=r"'auto'\) was asked for, and OwnFit has"):
        made.fit(*common.data(8), verbose=0)


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
    shard = getattr(steps.Steps, name)
    monkeypatch.setattr(steps.Steps, name, running)
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


def test_auto_stays_on_other_devices():
    made = lockstep.distribute(at_once(smooth(), "auto"), 1)
    assert lockstep.distribute(made, 2).steps_per_execution == "auto"
    train(made)
    other = lockstep.distribute(keras.Sequential([made.layers[0], layers.Dense(2)]), 2)
    with pytest.raises(LayoutConflict):
        lockstep.distribute(made, 3)
    assert made.steps_per_execution == "auto"
    lockstep.release(other)
    assert lockstep.release(made).steps_per_execution == 1


def test_auto_stays_where_distribute_fails(monkeypatch):
    def full(self, value, layout):
        raise MemoryError("full")

    made = at_once(smooth(), "auto")
    monkeypatch.setattr(steps.Steps, "moved", full)
    with pytest.raises(MemoryError, match="full"):
        lockstep.distribute(made, 2)
    assert made.steps_per_execution == "auto"


def test_auto_holds_nothing_of_an_evaluation_that_is_over():
    made = lockstep.distribute(at_once(smooth(), "auto"), 2)
    made.evaluate(*held_out(), verbose=0)
    old = weakref.ref(made.layers[0].kernel.value)
    made.set_weights([0 * value for value in made.get_weights()])
    gc.collect()
    assert old() is None


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
