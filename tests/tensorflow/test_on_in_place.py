"""The model stays the model: one object, plain files, back and forth between devices."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import lockstep
from lockstep.errors import (
    DeviceNotFound,
    LayoutConflict,
    UnsplitBatchWarning,
)
from tests.conformance.common import assert_same, data
from tests.sampling import rest


def model(built=True):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)
    made = keras.Sequential([keras.Input((4,))] if built else [])
    made.add(layers.Dense(6, activation="tanh"))
    made.add(layers.BatchNormalization())
    made.add(layers.Dense(2))
    made.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse", metrics=["mae"])
    return made


def values(made):
    return [keras.ops.convert_to_numpy(v) for v in [*made.variables, *made.optimizer.variables]]


def fit(made, **kwargs):
    options = {"batch_size": 7, "verbose": 0, "shuffle": False, **kwargs}
    return made.fit(*data(), **options).history


def holders(made):
    every = [*made.variables, *made.optimizer.variables]
    return {type(variable.value).__name__ for variable in every}


@pytest.mark.whole
@pytest.mark.parametrize("built", [False, *rest(True)])
def test_moved_between_devices_and_back_in_the_middle_of_a_training(built):
    alone, made = model(built), model(built)
    for devices in (3, None, 2, 4):
        if devices:
            assert lockstep.distribute(made, devices) is made
        else:
            lockstep.release(made)
        assert_same(fit(made), fit(alone))
    assert_same(values(made), values(alone))
    before = [v.path for v in made.variables]
    lockstep.release(made)
    assert holders(made) == {"ResourceVariable"}
    assert [v.path for v in made.variables] == before
    assert_same(fit(made), fit(alone))


def test_every_device_has_the_same_copy_and_assignment_reaches_all():
    made = lockstep.distribute(model(), 3)
    fit(made)
    made.layers[0].kernel.assign(np.full((4, 6), 0.25, "float32"))
    made.optimizer.learning_rate = 0.125
    made.set_weights([2 * w for w in made.get_weights()])
    for variable in [*made.variables, *made.optimizer.variables]:
        first, *others = [copy.numpy() for copy in variable.value.values]
        for other in others:
            np.testing.assert_array_equal(first, other)
    assert float(made.optimizer.learning_rate.numpy()) == 0.125
    assert [copy.device[-5:] for copy in made.variables[0].value.values] == [
        "CPU:0",
        "CPU:1",
        "CPU:2",
    ]


@pytest.mark.whole
def test_files_are_those_of_one_device(tmp_path):
    alone, made = model(), lockstep.distribute(model(), 3)
    for each, name in ((alone, "alone"), (made, "made")):
        fit(each)
        each.save(tmp_path / f"{name}.keras")
        each.save_weights(tmp_path / f"{name}.weights.h5")
    loaded = [keras.models.load_model(tmp_path / f"{name}.keras") for name in ("alone", "made")]
    assert loaded[0].get_config() == loaded[1].get_config()
    assert_same(values(loaded[1]), values(loaded[0]))
    assert holders(loaded[1]) == {"ResourceVariable"}
    made.load_weights(tmp_path / "alone.weights.h5")
    assert_same(fit(made), fit(alone))


@pytest.mark.whole
def test_copies_are_not_distributed():
    made = lockstep.distribute(model(), 2)
    fit(made)
    copy = keras.models.clone_model(made)
    copy.set_weights(made.get_weights())
    x, _ = data()
    assert_same(copy(x), made(x))
    assert_same(made.predict(x, verbose=0), made(x))
    assert "_lockstep" not in vars(copy)


@pytest.mark.parametrize("rows", [1, 5, *rest(2, 11)])
def test_one_batch_of_any_size(rows):
    alone, made = model(), lockstep.distribute(model(), 4)
    x, y = data(rows)
    for _ in range(2):
        assert_same(made.train_on_batch(x, y), alone.train_on_batch(x, y))
    assert_same(made.test_on_batch(x, y), alone.test_on_batch(x, y))
    assert_same(values(made), values(alone))
    predicted = made.predict_on_batch(x)
    assert predicted.shape == (rows, 2)  # stock MirroredStrategy gives them twice on 2 devices
    assert_same(predicted, alone.predict_on_batch(x))


class CustomStep(keras.Model):
    """A model with a training step in TensorFlow's form."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


@pytest.mark.whole
def test_a_train_step_of_its_own_is_exact():
    def make():
        keras.utils.set_random_seed(1)
        made = CustomStep()
        made.compile(keras.optimizers.Adam(0.01))
        made(np.zeros((1, 4), "float32"))
        return made

    alone, made = make(), lockstep.distribute(make(), 3)
    assert_same(fit(made), fit(alone))
    assert_same(values(made), values(alone))
    for variable in made.variables:
        assert_same(*[[copy.numpy()] for copy in variable.value.values[:2]])


class LooksAcross(layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, axis=0)


class ByRows(layers.Layer):
    def call(self, x):
        return keras.ops.tanh(x) * 2


@pytest.mark.whole
def test_a_layer_of_its_own_is_split_if_it_works_by_rows():
    def make(layer):
        keras.utils.set_random_seed(1)
        made = keras.Sequential([keras.Input((4,)), layers.Dense(5), layer, layers.Dense(2)])
        made.compile("sgd", "mse")
        return made

    with warnings.catch_warnings():
        warnings.simplefilter("error", UnsplitBatchWarning)
        mine = fit(lockstep.distribute(make(ByRows()), 3))
    assert_same(mine, fit(make(ByRows())))
    with pytest.warns(UnsplitBatchWarning, match="every device runs 'across'"):
        mine = fit(lockstep.distribute(make(LooksAcross(name="across")), 3))
    assert_same(mine, fit(make(LooksAcross())))


def test_a_model_of_a_strategy_is_refused():
    with tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        made = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    with pytest.raises(LayoutConflict, match="in the scope of a tf"):
        lockstep.distribute(made, 2)


@pytest.mark.whole
def test_shared_layers_go_to_the_same_devices():
    shared = layers.Dense(2)
    a, b = (keras.Sequential([keras.Input((4,)), shared]) for _ in range(2))
    lockstep.distribute(a, 2)
    with pytest.raises(LayoutConflict, match="is shared with"):
        lockstep.distribute(b, 3)
    lockstep.distribute(b, 2)
    lockstep.release(a)
    assert type(shared.kernel.value).__name__ == "MirroredVariable"
    lockstep.release(b)
    assert type(shared.kernel.value).__name__ == "ResourceVariable"


def test_more_devices_than_are_here():
    assert lockstep.devices() == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    with pytest.raises(DeviceNotFound, match="4 are here"):
        lockstep.distribute(model(), 5)


@pytest.mark.whole
@pytest.mark.parametrize("devices", [1, 3])
def test_xla_serves_one_device_and_is_said_to_be_left_out_on_several(capsys, devices):
    alone, made = model(), lockstep.distribute(model(), devices)
    made.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse", metrics=["mae"], jit_compile=True)
    assert_same(fit(made, verbose=2), fit(alone))
    said = capsys.readouterr().out.splitlines()[0]
    rows, without = ("3", ", without XLA") if devices == 3 else ("7", "")
    assert said.endswith(f"{rows} per replica, compiling the training step{without}")


class FailsToSave(layers.Dense):
    """A layer whose variables cannot be written, as on a disk that is full."""

    fails = False

    def save_own_variables(self, store):
        if self.fails:
            raise OSError("no space left")
        super().save_own_variables(store)


@pytest.mark.parametrize("devices", [None, 2])
def test_a_save_that_fails_leaves_the_file_before_it(devices, tmp_path):
    keras.utils.clear_session(free_memory=False)
    layer = FailsToSave(2)
    made = keras.Sequential([keras.Input((4,)), layers.Dense(6), layer])
    if devices is not None:
        lockstep.distribute(made, devices)
    path = tmp_path / "model.weights.h5"
    made.save_weights(path)
    before = path.read_bytes()
    layer.fails = True
    with pytest.raises(OSError, match="no space left"):
        made.save_weights(path)
    kept = path.exists() and path.read_bytes() == before
    assert kept == (devices is not None), "stock Keras writes into the file that it replaces"
    assert [each.name for each in tmp_path.iterdir()] in ([path.name], [])
