"""Any model, at any time of its life, is distributed in place and stays itself."""

import copy
import pickle

import jax
import numpy as np
import pytest

import lockstep
from tests.conformance import common
from tests.conformance.common import assert_same, compile_, data, devices_of, fit, model, weights
from tests.tiers import rest


@pytest.fixture(scope="module")
def one():
    """The truth: the same training on one device, by Keras alone."""
    made = model()
    history = fit(made, epochs=2)
    x, y = data()
    return {
        "weights": weights(made),
        "history": history,
        "predicted": made.predict(x, verbose=0, batch_size=9),
        "evaluated": made.evaluate(x, y, verbose=0, batch_size=9),
    }


def assert_trains_like(one, made):
    assert_same(fit(made, epochs=2), one["history"])
    x, y = data()
    assert_same(weights(made), one["weights"])
    assert_same(made.predict(x, verbose=0, batch_size=9), one["predicted"])
    assert_same(made.evaluate(x, y, verbose=0, batch_size=9), one["evaluated"])


# -------------------------------------------------------------------- when in its life


def test_the_same_object_comes_back():
    made = model()
    assert lockstep.distribute(made, 3) is made
    assert lockstep.release(made) is made


@pytest.mark.whole
def test_compiled_before(one):
    assert_trains_like(one, lockstep.distribute(model(), 3))


def test_compiled_after(one):
    made = lockstep.distribute(model(compiled=False), 3)
    compile_(made)
    assert_trains_like(one, made)


def test_compiled_again(one):
    made = lockstep.distribute(model(), 3)
    made.compile("adam", "mae")
    compile_(made)
    assert_trains_like(one, made)


def test_built_by_fit():
    # Keras draws the weights in another order when fit builds the model, so the truth
    # is one device built by fit.
    alone, made = model(built=False), lockstep.distribute(model(built=False), 3)
    assert_same(fit(made), fit(alone))
    assert_same(weights(made), weights(alone))
    assert devices_of(made) == {3}


def test_trained_before_and_after(one):
    made = model()
    fit(made)
    lockstep.distribute(made, 4)
    fit(made)
    assert_same(weights(made), one["weights"])


def test_moved_between_device_counts_and_released():
    alone, made = model(), model()
    for devices in (3, 8, 2):
        lockstep.distribute(made, devices)
        assert_same(fit(made), fit(alone))
        assert devices_of(made) == {devices}
    lockstep.release(made)
    assert devices_of(made) == {1}
    assert_same(fit(made), fit(alone))
    assert_same(weights(made), weights(alone))


@pytest.mark.whole
def test_distributed_by_a_callback_in_the_middle_of_fit(keras, one):
    class Distribute(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                lockstep.distribute(self.model, 3)
            if batch == 5:
                lockstep.release(self.model)

    made = model()
    assert_same(fit(made, epochs=2, callbacks=[Distribute()]), one["history"])
    assert_same(weights(made), one["weights"])


def test_distributed_by_a_callback_after_the_first_validation(keras):
    class Distribute(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1 and self.model is made:
                lockstep.distribute(self.model, 3)

    alone, made = model(), model()
    options = {"epochs": 3, "validation_data": data(11, seed=4), "callbacks": [Distribute()]}
    assert_same(fit(made, **options), fit(alone, **options))
    assert_same(weights(made), weights(alone))
    assert devices_of(made) == {3}


@pytest.mark.parametrize("when", ["distribute", "release", "fit"])
def test_weights_set_after_a_call_that_was_refused_stay(when, keras):
    """Such a call leaves the state of the one before in Keras's `_jax_state`."""
    made = model()
    if when != "distribute":
        lockstep.distribute(made, 3)
    x, y = data(7)
    made.train_on_batch(x, y)
    with pytest.raises(ValueError, match="incompatible with the layer"):
        made.predict_on_batch(x[:, :3])
    mine = [np.full(weight.shape, 0.25, "float32") for weight in made.get_weights()]
    made.set_weights(mine)
    if when == "distribute":
        lockstep.distribute(made, 3)
    elif when == "release":
        lockstep.release(made)
    else:
        found = []
        look = keras.callbacks.LambdaCallback(
            on_train_begin=lambda logs: found.append(look.model.get_weights())
        )
        fit(made, callbacks=[look])
        assert_same(found[0], mine, atol=0)
        return
    assert_same(made.get_weights(), mine, atol=0)


def test_weights_loaded_after(one, tmp_path):
    path = tmp_path / "start.weights.h5"
    model().save_weights(path)
    made = lockstep.distribute(model(), 3)
    for weight in made.weights:
        weight.assign(weight * 2)
    made.load_weights(path)
    assert_trains_like(one, made)


def test_release_takes_every_trace_away():
    plain = set(vars(model()))
    made = lockstep.release(lockstep.distribute(model(), 3))
    fit(made)
    assert set(vars(made)) - plain <= {"history", "_eval_epoch_iterator", "_jax_state"}


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
        assert_same(made.predict(x, verbose=0), truth)
    lockstep.release(made)
    assert made.call is doubled
    assert_same(made.predict(x, verbose=0), truth)


def test_release_from_one_device_goes_to_the_usual_one():
    made = lockstep.distribute(model(), [5])
    fit(made)
    assert {device.id for v in made.variables for device in v.value.devices()} == {5}
    lockstep.release(made)
    assert {device.id for v in made.variables for device in v.value.devices()} == {0}
    assert not any(v.value.committed for v in made.variables)


def test_release_of_a_model_that_is_not_distributed_changes_nothing(one):
    assert_trains_like(one, lockstep.release(model()))


def test_one_device_is_bitwise_the_same(one):
    made = lockstep.distribute(model(), 1)
    assert fit(made, epochs=2) == one["history"]
    for mine, theirs in zip(weights(made), one["weights"], strict=True):
        np.testing.assert_array_equal(mine, theirs)


# ---------------------------------------------------------------------- other ways to run


def test_on_batch_methods():
    alone, made = model(), lockstep.distribute(model(), 3)
    x, y = data(10)
    for rows in (10, 7, 1):
        batch = x[:rows], y[:rows]
        assert_same(made.train_on_batch(*batch), alone.train_on_batch(*batch))
        assert_same(made.test_on_batch(*batch), alone.test_on_batch(*batch))
        predicted = made.predict_on_batch(batch[0])
        assert predicted.shape == (rows, 2)
        assert_same(predicted, alone.predict_on_batch(batch[0]))


def test_rows_in_the_other_byte_order():
    """With padding and without."""
    made = lockstep.distribute(model(), 3)
    x, _ = data(10)
    for rows in (9, 10):
        native = made.predict(x[:rows], verbose=0)
        assert_same(made.predict(x[:rows].astype(">f4"), verbose=0), native, atol=0)


def test_direct_calls():
    alone, made = model(), lockstep.distribute(model(), 3)
    x, _ = data(7)
    assert_same(made(x), alone(x))
    assert_same(made(x, training=True), alone(x, training=True))
    assert_same(made(x), alone(x))  # the moving statistics went on


@pytest.mark.parametrize("device", [0, 5])
@pytest.mark.whole
def test_inputs_committed_to_one_device(device):
    alone, made = model(), lockstep.distribute(model(), 3)
    x, y = data(7)
    x_there = jax.device_put(x, jax.devices()[device])
    assert_same(made(x_there), alone(x))
    assert_same(made.train_on_batch(x_there, y), alone.train_on_batch(x, y))
    assert_same(made.predict(x_there, verbose=0), alone.predict(x, verbose=0))


def test_weights_committed_to_one_device():
    alone, made = model(), lockstep.distribute(model(), 3)
    x, _ = data(7)
    for mine, theirs in zip(made.weights, alone.weights, strict=True):
        mine.assign(jax.device_put(0.5 * np.asarray(theirs.value), jax.devices()[6]))
        theirs.assign(0.5 * theirs)
    assert_same(made(x), alone(x))
    assert_same(fit(made), fit(alone))


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["run_eagerly", *rest("jit_compile")])
def test_without_compilation(how):
    alone, made = model(compiled=False), lockstep.distribute(model(compiled=False), 3)
    for each in (alone, made):
        option = {"run_eagerly": True} if how == "run_eagerly" else {"jit_compile": False}
        each.compile("sgd", "mse", metrics=["mae"], **option)
    assert_same(fit(made), fit(alone))
    x, _ = data(9)
    assert_same(made.predict(x, verbose=0, batch_size=4), alone.predict(x, verbose=0, batch_size=4))


def test_steps_per_execution_with_a_ragged_tail():
    alone, made = model(compiled=False), lockstep.distribute(model(compiled=False), 3)
    for each in (alone, made):
        each.compile("sgd", "mse", metrics=["mae"], steps_per_execution=3)
    assert_same(fit(made), fit(alone))
    x, _ = data()
    predicted = made.predict(x, verbose=0, batch_size=7)
    assert predicted.shape == (common.ROWS, 2)
    assert_same(predicted, alone.predict(x, verbose=0, batch_size=7))


def test_custom_train_step(keras):
    class Custom(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, x):
            return self.dense(x)

        def train_step(self, state, data):
            x, y = data
            trainable, non_trainable, optimizer, metrics = state

            def loss_of(trainable):
                predicted, non_trainable_after = self.stateless_call(trainable, non_trainable, x)
                return keras.ops.mean((predicted - y) ** 2), (predicted, non_trainable_after)

            (loss, (predicted, non_trainable)), gradients = jax.value_and_grad(
                loss_of, has_aux=True
            )(trainable)
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
            logs = {"loss": loss, "rows": x.shape[0], "largest": keras.ops.max(predicted)}
            return logs, (trainable, non_trainable, optimizer, metrics)

    def make():
        keras.utils.set_random_seed(3)
        made = Custom()
        made.compile("sgd")
        return made

    alone, made = make(), lockstep.distribute(make(), 3)
    assert_same(fit(made), fit(alone))
    assert_same(weights(made), weights(alone))


def test_a_fit_that_the_class_overrides_still_runs(keras):
    class Counting(keras.Sequential):
        fits = 0

        def fit(self, *args, **kwargs):
            self.fits += 1
            return super().fit(*args, **kwargs)

    made = Counting([keras.Input((4,)), keras.layers.Dense(2)])
    made.compile("sgd", "mse")
    lockstep.distribute(made, 3)
    fit(made)
    assert made.fits == 1


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.whole
def test_a_fit_that_the_class_overrides_validates(keras, devices):
    class Own(keras.Sequential):
        def fit(self, *args, **kwargs):
            return super().fit(*args, **kwargs)

    found = []
    for distributed in (False, True):
        keras.utils.set_random_seed(3)
        made = Own([keras.Input((4,)), keras.layers.Dense(2)])
        made.compile("sgd", "mse", metrics=["mae"], steps_per_execution=2)
        if distributed:
            lockstep.distribute(made, devices)
        found.append([fit(made, epochs=2, validation_data=data(11, seed=4)), weights(made)])
    assert len(found[0][0]) == 4
    assert_same(found[1], found[0])


def test_stateless_methods_in_a_loop_of_ones_own(keras):
    def train(made):
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(made.trainable_variables)
        x, y = data(12)

        @jax.jit
        def step(trainable, non_trainable, state):
            def loss_of(trainable):
                predicted, after = made.stateless_call(trainable, non_trainable, x, training=True)
                return keras.ops.mean((predicted - y) ** 2), after

            (loss, after), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
            trainable, state = optimizer.stateless_apply(state, gradients, trainable)
            return loss, trainable, after, state

        trainable = [v.value for v in made.trainable_variables]
        non_trainable = [v.value for v in made.non_trainable_variables]
        state = [v.value for v in optimizer.variables]
        for _ in range(3):
            loss, trainable, non_trainable, state = step(trainable, non_trainable, state)
        return loss, trainable

    alone, made = model(compiled=False), lockstep.distribute(model(compiled=False), 3)
    assert_same(train(made), train(alone))


# ------------------------------------------------------------- variables that change


@pytest.fixture
def compiling(caplog):
    """The compilations of step programs since the last call."""
    with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):

        def since():
            found = [r for r in caplog.records if "Compiling jit(program)" in r.getMessage()]
            caplog.clear()
            return len(found)

        yield since


def test_assigned_values_cost_no_compilation(compiling, keras):
    made = lockstep.distribute(model(), 3)
    fit(made)
    assert compiling() == 2  # batches of 7, and the last one of 4
    made.set_weights([2 * w for w in made.get_weights()])
    made.optimizer.learning_rate = 0.01
    made.optimizer.iterations.assign(0)
    fit(made)
    assert compiling() == 0

    class Assign(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.optimizer.learning_rate = 0.1 / (1 + batch)
            self.model.layers[0].kernel.assign(self.model.layers[0].kernel * 0.9)

    fit(made, callbacks=[Assign()])
    assert compiling() == 0


def test_values_assigned_by_callbacks_count(keras):
    class Assign(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.optimizer.learning_rate = 0.1 / (1 + batch)
            self.model.layers[0].kernel.assign(self.model.layers[0].kernel * 0.9)

    alone, made = model(), lockstep.distribute(model(), 3)
    assert_same(fit(made, callbacks=[Assign()]), fit(alone, callbacks=[Assign()]))
    assert_same(weights(made), weights(alone))


@pytest.mark.whole
def test_learning_rate_schedule(keras):
    alone, made = model(), lockstep.distribute(model(), 3)
    for each in (alone, made):
        schedule = keras.optimizers.schedules.CosineDecay(0.1, 5)
        each.compile(keras.optimizers.SGD(schedule), "mse")
    assert_same(fit(made), fit(alone))


def test_layers_added_later(keras):
    def grow(made):
        keras.utils.set_random_seed(4)
        made.add(keras.layers.Dense(2))
        compile_(made)

    alone, made = model(), lockstep.distribute(model(), 3)
    fit(alone), fit(made)
    grow(alone), grow(made)
    assert_same(fit(made), fit(alone))
    assert devices_of(made) == {3}
    assert devices_of(lockstep.release(made)) == {1}


@pytest.mark.whole
def test_lora_enabled_later(keras):
    def tune(made):
        keras.utils.set_random_seed(4)
        made.layers[0].enable_lora(2)
        compile_(made)

    alone, made = model(), lockstep.distribute(model(), 3)
    tune(alone), tune(made)
    assert_same(fit(made), fit(alone))
    assert_same(weights(made), weights(alone))


@pytest.mark.whole
def test_layers_frozen_between_fits():
    alone, made = model(), lockstep.distribute(model(), 3)
    for each in (alone, made):
        fit(each)
        each.layers[0].trainable = False
        compile_(each)
    assert_same(fit(made), fit(alone))
    assert_same(weights(made), weights(alone))


# ------------------------------------------------------------------ models that share


def autoencoder(keras):
    keras.utils.set_random_seed(8)
    inputs = keras.Input((4,))
    code = keras.layers.Dense(3, activation="tanh")(inputs)
    encoder = keras.Model(inputs, code)
    whole = keras.Model(inputs, keras.layers.Dense(2)(encoder(inputs)))
    for each in (whole, encoder):
        each.compile("sgd", "mse")
    return whole, encoder


def test_encoder_taken_out_of_a_distributed_autoencoder(keras):
    alone, alone_encoder = autoencoder(keras)
    made, encoder = autoencoder(keras)
    lockstep.distribute(made, 3)
    x, _ = data()
    codes = np.ones((common.ROWS, 3), "float32")
    for whole, part in ((alone, alone_encoder), (made, encoder)):
        fit(whole)
        part.fit(x, codes, verbose=0, shuffle=False, batch_size=7)
        fit(whole)
    assert_same(encoder.predict(x, verbose=0), alone_encoder.predict(x, verbose=0))
    assert_same(encoder(x), alone_encoder(x))
    assert_same(weights(made), weights(alone))


def test_models_that_share_layers_on_the_same_devices(keras):
    alone, alone_encoder = autoencoder(keras)
    made, encoder = autoencoder(keras)
    lockstep.distribute(made, 3)
    lockstep.distribute(encoder, 3)
    codes = np.ones((common.ROWS, 3), "float32")
    x, _ = data()
    for whole, part in ((alone, alone_encoder), (made, encoder)):
        fit(whole)
        part.fit(x, codes, verbose=0, shuffle=False, batch_size=7)
    lockstep.release(made)
    assert devices_of(encoder) == {3}  # still held by the encoder
    part_history = encoder.fit(x, codes, verbose=0, shuffle=False, batch_size=7).history
    alone_encoder_history = alone_encoder.fit(
        x, codes, verbose=0, shuffle=False, batch_size=7
    ).history
    assert_same(part_history, alone_encoder_history)
    lockstep.release(encoder)
    assert devices_of(made) == devices_of(encoder) == {1}
    assert_same(weights(made), weights(alone))
    assert_same(fit(made), fit(alone))


def test_models_that_share_layers_on_other_devices_are_refused(keras):
    made, encoder = autoencoder(keras)
    lockstep.distribute(encoder, 2)
    before = weights(made)
    with pytest.raises(lockstep.errors.LayoutConflict, match="shared with"):
        lockstep.distribute(made, 4)
    assert_same(weights(made), before, atol=0)
    x, _ = data()
    encoder.fit(x, np.ones((common.ROWS, 3), "float32"), verbose=0)  # the other one still works


def test_a_model_that_is_gone_holds_nothing(keras):
    import gc

    made, encoder = autoencoder(keras)
    lockstep.distribute(made, 4)
    del made
    gc.collect()
    lockstep.distribute(encoder, 2)
    assert devices_of(encoder) == {2}


def gan(keras):
    keras.utils.set_random_seed(9)
    generator = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    critic = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    critic.compile("sgd", "mse")
    critic.trainable = False
    both = keras.Sequential([keras.Input((4,)), generator, critic])
    both.compile("sgd", "mse")
    critic.trainable = True
    return generator, critic, both


@pytest.mark.parametrize("which", ["critic", "both", "critic and both"])
def test_gan_trained_in_turn(keras, which):
    def train(generator, critic, both):
        x, _ = data(10)
        real = np.ones((10, 3), "float32")
        losses = []
        for _ in range(3):
            critic.trainable = True
            fake = generator.predict(x, verbose=0)
            losses.append(critic.train_on_batch(real, np.ones((10, 1))))
            losses.append(critic.train_on_batch(fake, np.zeros((10, 1))))
            critic.trainable = False
            losses.append(both.train_on_batch(x, np.ones((10, 1))))
        return losses, weights(both)

    truth = train(*gan(keras))
    generator, critic, both = gan(keras)
    if "critic" in which:
        lockstep.distribute(critic, 3)
    if "both" in which:
        lockstep.distribute(both, 3)
    assert_same(train(generator, critic, both), truth)


@pytest.mark.parametrize("call", ["predict", "train_on_batch"])
def test_an_array_that_another_model_has_given_to_a_step_is_told(keras, call):
    """XLA ended the process; Keras alone gives an error of JAX."""
    x, y = data()
    online, target = (lockstep.distribute(model(seed=seed), 3) for seed in (1, 2))
    for mine, its in zip(target.weights, online.weights, strict=True):
        mine.assign(its)
    online.train_on_batch(x, y)
    given = (x,) if call == "predict" else (x, y)
    with pytest.raises(
        lockstep.errors.UnsupportedModel, match="shares its array with another model"
    ):
        getattr(target, call)(*given)
    for mine, its in zip(target.weights, online.weights, strict=True):
        mine.assign(keras.ops.copy(its))
    before = online.predict(x, verbose=0)
    online.train_on_batch(x, y)
    assert_same(target.predict(x, verbose=0), before)


@pytest.mark.whole
def test_a_distributed_model_inside_another(keras):
    def make():
        inner = model(compiled=False)
        outer = keras.Sequential([keras.Input((4,)), inner, keras.layers.Dense(2)])
        compile_(outer)
        return inner, outer

    _, alone = make()
    inner, outer = make()
    lockstep.distribute(inner, 3)
    assert_same(fit(outer), fit(alone))  # the outer one is not distributed
    lockstep.distribute(outer, 3)
    assert_same(fit(outer), fit(alone))
    assert_same(weights(outer), weights(alone))


# ------------------------------------------------------------------------- copies of it


@pytest.mark.parametrize(
    "copied",
    [
        lambda keras, made: keras.models.clone_model(made),
        lambda keras, made: copy.copy(made),
        lambda keras, made: copy.deepcopy(made),
        lambda keras, made: pickle.loads(pickle.dumps(made)),
        lambda keras, made: keras.Sequential.from_config(made.get_config()),
    ],
    ids=["clone_model", "copy", "deepcopy", "pickle", "from_config"],
)
def test_copies_are_undistributed(keras, copied):
    made = lockstep.distribute(model(), 3)
    fit(made)
    other = copied(keras, made)
    other.set_weights(made.get_weights())
    assert devices_of(other) == {1}
    assert devices_of(made) == {3}
    assert not any("lockstep" in name for name in vars(other))
    x, _ = data(7)
    assert_same(other(x), made(x))


def exported(made, folder):
    """The variables of an exported model, and what it gives where TensorFlow can run it."""
    import tensorflow as tf

    made.export(folder, verbose=False)
    loaded = tf.saved_model.load(folder)
    try:
        served = np.asarray(loaded.serve(data(7)[0]))
    except tf.errors.InvalidArgumentError as error:
        # A JAX that is newer than TensorFlow writes operations that this one cannot read.
        served = type(error).__name__
    return (
        sorted(v.name for v in loaded.variables),
        [np.asarray(v) for v in loaded.variables],
        served,
    )


def test_export_gives_what_one_device_exports(tmp_path):
    alone, made = model(), lockstep.distribute(model(), 3)
    fit(alone), fit(made)
    names, values, served = exported(made, tmp_path / "made")
    names_of_one, values_of_one, served_by_one = exported(alone, tmp_path / "alone")
    assert len(names) == len(names_of_one)
    assert_same(values, values_of_one)
    if isinstance(served_by_one, str):
        assert served == served_by_one
    else:
        assert_same(served, served_by_one)
