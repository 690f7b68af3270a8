"""Any model, at any time of its life, is distributed in place and stays itself."""

import jax
import numpy as np
import pytest

import lockstep
from tests.conformance import common
from tests.conformance.common import assert_same, data, fit, model, weights

# -------------------------------------------------------------------- when in its life


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


def test_release_from_one_device_goes_to_the_usual_one():
    made = lockstep.distribute(model(), [5])
    fit(made)
    assert {device.id for v in made.variables for device in v.value.devices()} == {5}
    lockstep.release(made)
    assert {device.id for v in made.variables for device in v.value.devices()} == {0}
    assert not any(v.value.committed for v in made.variables)


# ---------------------------------------------------------------------- other ways to run


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


# ------------------------------------------------------------------ models that share


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


# ------------------------------------------------------------------------- copies of it


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
