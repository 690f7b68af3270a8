"""The model stays the model on each backend: one object, plain files, there and back."""

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.attach.attachment import session_of
from lockstep.errors import DeviceNotFound, LayoutConflict
from tests.agreement import assert_equal, values
from tests.conformance.common import data
from tests.conftest import BACKEND
from tests.tiers import rest


def model(built=True):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)
    made = keras.Sequential([keras.Input((4,))] if built else [])
    made.add(layers.Dense(6, activation="tanh", kernel_regularizer="l2"))
    made.add(layers.BatchNormalization())
    made.add(layers.Dense(2, activity_regularizer="l2"))
    made.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse", metrics=["mae"])
    return made


def fit(made, **kwargs):
    options = {"batch_size": 7, "verbose": 0, "shuffle": False, **kwargs}
    return made.fit(*data(), **options).history


def traces(made):
    return [name for name in vars(made) if "lockstep" in name]


@pytest.mark.parametrize("built", [False, *rest(True)])
def test_moved_between_devices_and_back_in_the_middle_of_a_training(built):
    alone, made = model(built), model(built)
    for devices in (3, None, 2, 1):
        if devices:
            assert lockstep.distribute(made, devices) is made
        else:
            assert lockstep.release(made) is made
        assert_equal(fit(made), fit(alone))
    assert_equal(values(made), values(alone))
    before = [v.path for v in made.variables]
    lockstep.release(made)
    assert not traces(made)
    assert [v.path for v in made.variables] == before
    assert_equal(fit(made), fit(alone))


@pytest.mark.parametrize("rows", [5, *rest(1, 2, 11)])
def test_batches_of_any_size(rows):
    """Of fewer rows than devices too; stock MirroredStrategy predicts such rows twice."""
    alone, made = model(), lockstep.distribute(model(), 3)
    x, y = data(2 * rows + 1)
    given = {"batch_size": rows, "verbose": 0}
    mine, theirs = (m.fit(x, y, shuffle=False, **given).history for m in (made, alone))
    assert_equal(mine, theirs)
    assert_equal(made.evaluate(x, y, **given), alone.evaluate(x, y, **given))
    assert_equal(made.predict(x, batch_size=rows, verbose=0), alone.predict(x, verbose=0))
    x, y = x[:rows], y[:rows]
    assert_equal(made.train_on_batch(x, y), alone.train_on_batch(x, y))
    assert_equal(made.test_on_batch(x, y), alone.test_on_batch(x, y))
    assert_equal(values(made), values(alone))
    predicted = made.predict_on_batch(x)
    assert predicted.shape == (rows, 2)
    assert_equal(predicted, alone.predict_on_batch(x))
    lockstep.release(made)


def test_what_is_assigned_between_calls_reaches_every_device():
    alone, made = model(), lockstep.distribute(model(), 3)
    for each in (alone, made):
        fit(each)
        each.set_weights([0.5 * weight for weight in each.get_weights()])
        each.train_on_batch(*data())
        each.layers[0].kernel.assign(np.full((4, 6), 0.25, "float32"))
        each.optimizer.learning_rate = 0.125
        each.train_on_batch(*data())
        each.compile(keras.optimizers.Adam(0.01), "mae")
        fit(each)
    assert_equal(values(made), values(alone))
    lockstep.release(made)


def test_files_and_copies_are_those_of_one_device(tmp_path):
    alone, made = model(), lockstep.distribute(model(), 3)
    for each, name in ((alone, "alone"), (made, "made")):
        fit(each)
        each.save(tmp_path / f"{name}.keras")
        each.save_weights(tmp_path / f"{name}.weights.h5")
    loaded = [keras.models.load_model(tmp_path / f"{name}.keras") for name in ("alone", "made")]
    assert loaded[0].get_config() == loaded[1].get_config()
    assert_equal(values(loaded[1]), values(loaded[0]))
    copy = keras.models.clone_model(made)
    copy.set_weights(made.get_weights())
    x, _ = data()
    assert_equal(made.predict(x, verbose=0), copy.predict(x, verbose=0))
    assert not traces(loaded[1])
    assert not traces(copy)
    made.load_weights(tmp_path / "alone.weights.h5")
    assert_equal(fit(made), fit(alone))
    lockstep.release(made)


@pytest.mark.whole
@pytest.mark.skipif(
    BACKEND == "torch",
    reason="on PyTorch the first device has the variables of both",
)
def test_shared_layers_go_to_the_same_devices():
    shared = layers.Dense(2)
    a, b = (keras.Sequential([keras.Input((4,)), shared]) for _ in range(2))
    lockstep.distribute(a, 2)
    with pytest.raises(LayoutConflict, match="is shared with"):
        lockstep.distribute(b, 3)
    lockstep.distribute(b, 2)
    lockstep.release(a)
    assert len(session_of(b).devices) == 2
    lockstep.release(b)
    assert not traces(a)
    assert not traces(b)


def test_more_devices_than_are_here():
    here = lockstep.devices()
    with pytest.raises(DeviceNotFound, match=f"{len(here)} are available"):
        lockstep.distribute(model(), len(here) + 1)


class FailsToSave(layers.Dense):
    """A layer whose variables cannot be written, as on a disk that is full."""

    fails = False

    def save_own_variables(self, store):
        if self.fails:
            raise OSError("no space left")
        super().save_own_variables(store)


@pytest.mark.parametrize("devices", [2, *rest(None)])
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


@pytest.mark.whole
@pytest.mark.skipif(BACKEND != "torch", reason="other engines refuse it")
def test_shared_layers_may_have_different_devices_on_pytorch():
    def two():
        keras.utils.set_random_seed(1)
        shared = layers.Dense(2)
        made = [keras.Sequential([keras.Input((4,)), shared, layers.Dense(1)]) for _ in range(2)]
        for each in made:
            each.compile("adam", "mse")
        return made

    alone, several = two(), two()
    for number, each in enumerate(several):
        lockstep.distribute(each, 2 + number)
    x, _ = data()
    for pair in (alone, several):
        for _ in range(2):
            for each in pair:
                each.fit(x, x[:, :1], batch_size=5, shuffle=False, verbose=0)
    for one, many in zip(alone, several, strict=True):
        assert_equal(many, one)
