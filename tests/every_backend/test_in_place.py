"""The model stays the model on each backend: one object, plain files, there and back."""

import copy
import gc
import pickle

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.attach.attachment import session_of
from lockstep.errors import DeviceNotFound, LayoutConflict
from tests.agreement import assert_equal, seeded, values
from tests.conformance.common import data, devices_of
from tests.conftest import BACKEND
from tests.tables import Table
from tests.tiers import further, quick_on_jax, rest


def model(built=True, compiled=True):
    def build():
        made = keras.Sequential([keras.Input((4,))] if built else [])
        made.add(layers.Dense(6, activation="tanh", kernel_regularizer="l2"))
        made.add(layers.BatchNormalization())
        made.add(layers.Dense(2, activity_regularizer="l2"))
        return compile_(made) if compiled else made

    return seeded(build)


def compile_(made, **options):
    made.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse", metrics=["mae"], **options)
    return made


def pair(build=model, devices=3):
    """Two models: one for Keras alone, one on several devices."""
    return build(), lockstep.distribute(build(), devices)


def fit(made, **kwargs):
    options = {"batch_size": 7, "verbose": 0, "shuffle": False, **kwargs}
    return made.fit(*data(), **options).history


def array(value):
    return keras.ops.convert_to_numpy(value)


def assert_on(made, devices):
    """The model is on so many devices: a session says so, and on JAX each array."""
    session = session_of(made)
    assert devices == (1 if session is None else len(session.devices))
    if BACKEND == "jax":
        assert devices_of(made) == {devices}


def traces(made):
    return [name for name in vars(made) if "lockstep" in name]


# -------------------------------------------------------------------- when in its life


@pytest.mark.parametrize("built", [False, *rest(True)])
def test_moved_between_devices_and_back_in_the_middle_of_a_training(built):
    alone, made = model(built), model(built)
    for devices in (3, None, 2, 1):
        if devices:
            assert lockstep.distribute(made, devices) is made
        else:
            assert lockstep.release(made) is made
        assert_equal(fit(made), fit(alone))
        assert_on(made, devices or 1)
    assert_equal(made, alone)
    before = [v.path for v in made.variables]
    lockstep.release(made)
    assert not traces(made)
    assert [v.path for v in made.variables] == before
    assert_equal(fit(made), fit(alone))
    assert set(vars(made)) - set(vars(alone)) <= {"_eval_epoch_iterator", "_jax_state"}
    fit(lockstep.release(made))  # which is not distributed
    fit(alone)
    assert_equal(made, alone)


def test_compiled_and_loaded_after(tmp_path):
    alone, made = pair(lambda: model(compiled=False))
    alone.save_weights(tmp_path / "start.weights.h5")
    for weight in made.weights:
        weight.assign(weight * 2)
    made.load_weights(tmp_path / "start.weights.h5")
    for each in (alone, made):
        compile_(each)
    assert_equal(fit(made, epochs=2), fit(alone, epochs=2))
    assert_equal(made, alone)


@quick_on_jax
def test_distributed_by_a_callback_after_the_first_validation():
    class Distribute(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1 and self.model is made:
                lockstep.distribute(self.model, 3)

    alone, made = model(), model()
    options = {"epochs": 3, "validation_data": data(11, seed=4), "callbacks": [Distribute()]}
    assert_equal(fit(made, **options), fit(alone, **options))
    assert_equal(made, alone)
    assert_on(made, 3)


@pytest.mark.whole
def test_distributed_by_a_callback_in_the_middle_of_fit():
    class Distribute(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                lockstep.distribute(self.model, 3)
            if batch == 5:
                lockstep.release(self.model)

    alone, made = model(), model()
    assert_equal(fit(made, epochs=2, callbacks=[Distribute()]), fit(alone, epochs=2))
    assert_equal(made, alone)


@quick_on_jax
def test_methods_that_an_instance_was_given_stay_its_own():
    x, _ = data()
    made = model()
    plain = made.call

    def doubled(*args, **kwargs):
        return plain(*args, **kwargs) * 2

    made.call = doubled
    truth = made.predict(x, verbose=0)
    for devices in (3, 2):
        lockstep.distribute(made, devices)
        assert_equal(made.predict(x, verbose=0), truth)
    lockstep.release(made)
    assert made.call is doubled
    assert_equal(made.predict(x, verbose=0), truth)


def test_one_device_is_bitwise_the_same():
    alone, made = pair(devices=1)
    assert fit(made, epochs=2) == fit(alone, epochs=2)
    assert_equal(made, alone, 0)


# ---------------------------------------------------------------------- other ways to run


@pytest.mark.parametrize("rows", [5, *rest(1, 2, 11)])
def test_batches_of_any_size(rows):
    """Of fewer rows than devices too; stock MirroredStrategy predicts such rows twice."""
    alone, made = pair()
    x, y = data(2 * rows + 1)
    given = {"batch_size": rows, "verbose": 0}
    mine, theirs = (m.fit(x, y, shuffle=False, **given).history for m in (made, alone))
    assert_equal(mine, theirs)
    assert_equal(made.evaluate(x, y, **given), alone.evaluate(x, y, **given))
    assert_equal(made.predict(x, batch_size=rows, verbose=0), alone.predict(x, verbose=0))
    x, y = x[:rows], y[:rows]
    assert_equal(made.train_on_batch(x, y), alone.train_on_batch(x, y))
    assert_equal(made.test_on_batch(x, y), alone.test_on_batch(x, y))
    assert_equal(made, alone)
    predicted = made.predict_on_batch(x)
    assert predicted.shape == (rows, 2)
    assert_equal(predicted, alone.predict_on_batch(x))


@quick_on_jax
def test_direct_calls():
    alone, made = pair()
    x, _ = data(7)
    for training in (False, True, False):  # the moving statistics go on
        assert_equal(*[array(each(x, training=training)) for each in (made, alone)])


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")  # on TensorFlow
@pytest.mark.parametrize("option", [{"run_eagerly": True}, *rest({"jit_compile": False})])
def test_without_compilation(option):
    alone, made = pair()
    x, y = data(9)
    for each in (alone, made):
        compile_(each, **option)
    assert_equal(fit(made), fit(alone))
    assert_equal(made.predict(x, verbose=0, batch_size=4), alone.predict(x, verbose=0))
    for name, batch in (("train", (x, y)), ("test", (x, y)), ("predict", (x,))):
        assert_equal(*[getattr(each, f"{name}_on_batch")(*batch) for each in (made, alone)])
    assert_equal(made, alone)


@quick_on_jax
def test_a_fit_that_the_class_overrides_runs_and_validates():
    class Counting(keras.Sequential):
        fits = 0

        def fit(self, *args, **kwargs):
            self.fits += 1
            return super().fit(*args, **kwargs)

    def build():
        made = Counting([keras.Input((4,)), layers.Dense(2)])
        return compile_(made, steps_per_execution=1 if BACKEND == "torch" else 2)

    alone, made = pair(lambda: seeded(build))
    options = {"epochs": 2, "validation_data": data(11, seed=4)}
    assert_equal(fit(made, **options), fit(alone, **options))
    assert_equal(made, alone)
    assert made.fits == 1


# ------------------------------------------------------------- variables that change


def test_what_is_assigned_between_calls_reaches_every_device():
    alone, made = pair()
    for each in (alone, made):
        fit(each)
        each.set_weights([0.5 * weight for weight in each.get_weights()])
        each.train_on_batch(*data())
        each.layers[0].kernel.assign(np.full((4, 6), 0.25, "float32"))
        each.optimizer.learning_rate = 0.125
        each.train_on_batch(*data())
        each.compile(keras.optimizers.Adam(0.01), "mae")
        fit(each)
    assert_equal(made, alone)


@quick_on_jax
def test_values_assigned_by_callbacks_count():
    class Assign(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.optimizer.learning_rate = 0.1 / (1 + batch)
            self.model.layers[0].kernel.assign(self.model.layers[0].kernel * 0.9)

    alone, made = pair()
    assert_equal(*[fit(each, callbacks=[Assign()]) for each in (made, alone)])
    assert_equal(made, alone)


def grown(made):
    made.add(layers.Dense(2))


def tuned(made):
    """On PyTorch the new weights are of float32, for which the bound is too small."""
    made.layers[0].enable_lora(2)


def frozen(made):
    made.layers[0].trainable = False


@quick_on_jax
@pytest.mark.parametrize("change", [grown, *further(frozen, *[tuned] * (BACKEND != "torch"))])
def test_layers_changed_between_fits(change):
    alone, made = pair()
    for each in (alone, made):
        fit(each)
        keras.utils.set_random_seed(4)
        change(each)
        compile_(each)
    assert_equal(fit(made), fit(alone))
    assert_equal(made, alone)
    assert_on(made, 3)
    assert_on(lockstep.release(made), 1)


# ------------------------------------------------------------------ models that share


def autoencoder():
    def build():
        inputs = keras.Input((4,))
        encoder = keras.Model(inputs, layers.Dense(3, activation="tanh")(inputs))
        whole = keras.Model(inputs, layers.Dense(2)(encoder(inputs)))
        for each in (whole, encoder):
            each.compile("sgd", "mse")
        return whole, encoder

    return seeded(build)


CODES = np.ones((len(data()[0]), 3), "float32")


def encode(encoder):
    x, _ = data()
    return encoder.fit(x, CODES, verbose=0, shuffle=False, batch_size=7).history


@quick_on_jax
def test_encoder_taken_out_of_a_distributed_autoencoder():
    (alone, alone_encoder), (made, encoder) = autoencoder(), autoencoder()
    lockstep.distribute(made, 3)
    x, _ = data()
    for whole, part in ((alone, alone_encoder), (made, encoder)):
        fit(whole)
        encode(part)
        fit(whole)
    assert_equal(encoder.predict(x, verbose=0), alone_encoder.predict(x, verbose=0))
    assert_equal(array(encoder(x)), array(alone_encoder(x)))
    assert_equal(made, alone)


@quick_on_jax
def test_models_that_share_layers_on_the_same_devices():
    (alone, alone_encoder), (made, encoder) = autoencoder(), autoencoder()
    for each in (made, encoder):
        lockstep.distribute(each, 3)
    for whole, part in ((alone, alone_encoder), (made, encoder)):
        fit(whole)
        encode(part)
    lockstep.release(made)
    assert_on(encoder, 3)  # which still holds the layer
    assert_equal(encode(encoder), encode(alone_encoder))
    lockstep.release(encoder)
    for each in (made, encoder):
        assert not traces(each)
        assert_on(each, 1)
    assert_equal(made, alone)
    assert_equal(fit(made), fit(alone))


@quick_on_jax
@pytest.mark.skipif(BACKEND == "torch", reason="there the first device has the variables of both")
def test_models_that_share_layers_on_other_devices_are_refused():
    made, encoder = autoencoder()
    lockstep.distribute(encoder, 2)
    before = values(made)
    with pytest.raises(LayoutConflict, match="is shared with"):
        lockstep.distribute(made, 3)
    assert_equal(values(made), before, 0)
    encode(encoder)  # the other one still works


@quick_on_jax
def test_a_model_that_is_gone_holds_nothing():
    made, encoder = autoencoder()
    lockstep.distribute(made, 3)
    del made
    gc.collect()
    lockstep.distribute(encoder, 2)
    assert_on(encoder, 2)


def gan():
    def build():
        generator = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
        critic = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
        critic.compile("sgd", "mse")
        critic.trainable = False
        both = keras.Sequential([keras.Input((4,)), generator, critic])
        both.compile("sgd", "mse")
        critic.trainable = True
        return generator, critic, both

    return seeded(build)


@quick_on_jax
@pytest.mark.parametrize("which", ["critic and both", *further("critic", "both")])
def test_gan_trained_in_turn(which):
    def train(generator, critic, both):
        x, _ = data(10)
        losses = []
        for _ in range(3):
            critic.trainable = True
            fake = generator.predict(x, verbose=0)
            losses.append(critic.train_on_batch(CODES[:10], np.ones((10, 1))))
            losses.append(critic.train_on_batch(fake, np.zeros((10, 1))))
            critic.trainable = False
            losses.append(both.train_on_batch(x, np.ones((10, 1))))
        return losses, both.get_weights()

    truth = train(*gan())
    generator, critic, both = gan()
    for name, each in (("critic", critic), ("both", both)):
        if name in which:
            lockstep.distribute(each, 3)
    assert_equal(train(generator, critic, both), truth)


@pytest.mark.whole
def test_a_distributed_model_inside_another():
    def build():
        inner = model(compiled=False)
        return inner, compile_(keras.Sequential([keras.Input((4,)), inner, layers.Dense(2)]))

    (_, alone), (inner, outer) = seeded(build), seeded(build)
    lockstep.distribute(inner, 3)
    assert_equal(fit(outer), fit(alone))  # the outer one is not distributed
    lockstep.distribute(outer, 3)
    assert_equal(fit(outer), fit(alone))
    assert_equal(outer, alone)


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


# ------------------------------------------------------------------- files, and copies of it


COPIES = Table(
    {
        "clone_model": keras.models.clone_model,
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
        "pickle": lambda made: pickle.loads(pickle.dumps(made)),
        "from_config": lambda made: keras.Sequential.from_config(made.get_config()),
    }
)


def test_files_and_copies_are_those_of_one_device(tmp_path):
    alone, made = pair()
    for each, name in ((alone, "alone"), (made, "made")):
        fit(each)
        each.save(tmp_path / f"{name}.keras")
        each.save_weights(tmp_path / f"{name}.weights.h5")
    loaded = [keras.models.load_model(tmp_path / f"{name}.keras") for name in ("alone", "made")]
    assert loaded[0].get_config() == loaded[1].get_config()
    assert_equal(loaded[1], loaded[0])
    assert not traces(loaded[1])
    x, _ = data(7)
    for name, copied in COPIES.items():
        other = copied(made)
        other.set_weights(made.get_weights())
        assert not traces(other), name
        assert_on(other, 1)
        assert_equal(array(other(x)), array(made(x)))
    assert_on(made, 3)
    made.load_weights(tmp_path / "alone.weights.h5")
    assert_equal(fit(made), fit(alone))


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
