"""Where a replica could take its own rows for the whole batch: exact all the same."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses, ops

import lockstep
from lockstep.keras_compat import get_keras_mask
from tests.conformance.common import assert_same
from tests.tiers import further, rest

ROWS, WIDTH = 7, 4


def _mse():
    return losses.MeanSquaredError(name="mse")


def _squares(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), -1)


def _compiled(outputs, inputs, loss, kind=keras.Model, **options):
    made = kind(inputs, outputs, name="made")
    made.compile(keras.optimizers.SGD(0.1), loss, **options)
    return made


def _plain(loss, kind=keras.Model, **options):
    inputs = keras.Input((WIDTH,))
    return _compiled(layers.Dense(2)(inputs), inputs, loss, kind, **options)


class _Consistent(keras.Model):
    """Adds a term whose targets are outputs of the model."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        plain = super().compute_loss(x, y, y_pred, sample_weight)
        return plain + losses.MeanSquaredError()(y_pred[1], y_pred[0])


def _outputs_as_targets():
    inputs = keras.Input((WIDTH,))
    outputs = [layers.Dense(2)(inputs), layers.Dense(2)(inputs)]
    return _compiled(outputs, inputs, [_mse(), _mse()], _Consistent)


class _ScaledTargets(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y * ops.mean(ops.square(y_pred)), y_pred, sample_weight)


class _WithGradient(keras.Model):
    """Adds the gradient of the loss with respect to the outputs."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        with tf.GradientTape() as tape:
            tape.watch(y_pred)
            loss = super().compute_loss(x, y, y_pred, sample_weight)
        found = tape.gradient(loss, y_pred, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return loss + 10 * tf.reduce_sum(tf.square(found))


def _counts_rows(y_true, y_pred):
    return _squares(y_true, y_pred) / (y_true.shape[0] or 1)


def _counts_outputs(y_true, y_pred):
    return _squares(y_true, y_pred) / (y_pred.shape[0] or 1)


class _Masked(losses.Loss):
    """By rows without a mask, and across them with one."""

    def call(self, y_true, y_pred):
        each, mask = _squares(y_true, y_pred), get_keras_mask(y_pred)
        if mask is None:
            return each
        mask = ops.cast(mask, each.dtype)
        return each * mask / (1 + ops.sum(mask))


def _mask_on_the_second():
    inputs, loss = keras.Input((3, WIDTH)), _Masked()
    outputs = [layers.Dense(2)(inputs), layers.Dense(2)(layers.Masking()(inputs))]
    return _compiled(outputs, inputs, [loss, loss])


class _OverTheBatch(layers.Layer):
    def call(self, x):
        return ops.softmax(ops.squeeze(x, -1))


def _softmax_over_the_batch():
    inputs = keras.Input((WIDTH,))
    shares = layers.Reshape((1,))(_OverTheBatch()(layers.Dense(1)(inputs)))
    return _compiled(layers.Multiply()([layers.Dense(2)(inputs), shares]), inputs, _mse())


def _one_dim(layer):
    def make():
        inputs = keras.Input((WIDTH,))
        number = layers.Reshape(())(layers.Dense(1)(inputs))
        shares = layers.Reshape((1,))(layer()(number))
        return _compiled(layers.Multiply()([layers.Dense(2)(inputs), shares]), inputs, _mse())

    return make


def _own_call():
    loss = losses.CategoricalCrossentropy(from_logits=True)
    loss.call = lambda y_true, y_pred: _squares(y_true, y_pred) / ops.max(ops.abs(y_pred))
    return _plain(loss)


def _reads_a_state(of):
    def make():
        inputs = keras.Input(batch_shape=(ROWS, 3, WIDTH))
        rnn = layers.LSTM(3, stateful=True)
        hidden, flat = rnn(inputs), layers.Flatten()(inputs)
        scaled = layers.Lambda(lambda z: z * (1 + ops.mean(of(rnn.states[0]))), output_shape=(12,))
        return _compiled(
            layers.Dense(2)(layers.Concatenate()([hidden, scaled(flat)])), inputs, _mse()
        )

    return make


def _asserts(y_true, y_pred):
    with tf.control_dependencies([tf.Assert(tf.reduce_max(y_true) > 1.0, ["no"])]):
        return tf.identity(_squares(y_true, y_pred))


class _NamedCall(keras.Model):
    """Calls the compiled loss in a way of its own."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(self.loss.call(y_true=y, y_pred=y_pred))


def _operated(make):
    """A model whose outputs go through what `make` does with a tensor of rows."""

    def built():
        inputs = keras.Input((WIDTH,))
        return _compiled(layers.Dense(2)(make(layers.Dense(WIDTH)(inputs))), inputs, _mse())

    return built


def _scaled_by_a_sum(x):
    return x * ops.tanh(ops.sum(ops.sum(x, axis=-1), axis=-1))


def _each_row_less_all(x):
    less = ops.subtract(ops.max(x, axis=-1, keepdims=True), ops.min(x, axis=-1))
    return x * ops.mean(less, axis=-1, keepdims=True)


_A_NUMBER_FOR_EACH_ROW = np.linspace(0, 1, ROWS * WIDTH, dtype="float32").reshape(ROWS, WIDTH)


class _AddsALossOfEachRow(layers.Layer):
    def call(self, x):
        self.add_loss(ops.mean(ops.square(x), axis=-1))
        return x


SAMPLE = {
    "an operation on tensors of other ranks": _operated(_each_row_less_all),
    "losses of rows": _operated(lambda x: _AddsALossOfEachRow()(x)),
    "a gradient within the loss": lambda: _plain(_mse(), _WithGradient),
    "a loss that counts rows": lambda: _plain(_counts_rows),
    "a state as a tensor": _reads_a_state(ops.convert_to_tensor),
}
REST = {
    "outputs as targets": _outputs_as_targets,
    "a mask on the second output": _mask_on_the_second,
    "softmax over the batch": _softmax_over_the_batch,
    "a layer given numbers for each row": _operated(
        lambda x: layers.GRU(WIDTH)(layers.Reshape((2, 2))(x), initial_state=_A_NUMBER_FOR_EACH_ROW)
    ),
    "an operation along the only dim": _operated(_scaled_by_a_sum),
    "an operation on as many numbers as rows": _operated(
        lambda x: ops.multiply(x, _A_NUMBER_FOR_EACH_ROW)
    ),
    "an activation that turns the batch round": _operated(
        lambda x: layers.Dense(WIDTH, activation=ops.flip)(x)
    ),
    "a call of the instance's own": _own_call,
    "softmax of one dim": _one_dim(layers.Softmax),
    "targets made of outputs": lambda: _plain(_mse(), _ScaledTargets),
    "a loss that counts outputs": lambda: _plain(_counts_outputs),
    "a metric that counts rows": lambda: _plain(_mse(), metrics=[_counts_rows]),
    "a state as a value": _reads_a_state(lambda state: state.value),
    "activation of one dim": _one_dim(lambda: layers.Activation("log_softmax")),
    "unit length of one dim": _one_dim(layers.UnitNormalization),
    "softmax over everything": _one_dim(lambda: layers.Softmax(axis=None)),
    "an assertion about the batch": lambda: _plain(_asserts),
    "the loss called by names": lambda: _plain(_mse(), _NamedCall),
}


def _data(made):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, *made.input_shape[1:])).astype("float32")
    if len(made.input_shape) == 3:
        x[1::2, 1:] = 0  # masked, where there is a mask
    y = [rng.normal(size=(ROWS, *s.shape[1:])).astype("float32") for s in made.outputs]
    y[0].flat[0] = 2.0
    return x, y if len(y) > 1 else y[0]


first, *others = SAMPLE.values()


@pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")
@pytest.mark.parametrize(
    "make",
    [first, *further(*others), *rest(*REST.values())],
    ids=[*SAMPLE, *REST],
)
def test_n_devices_equal_one(make):
    """As a batch of known size, and in `fit`, where Keras does not tell the size."""

    def trained(distribute):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        made = make()
        distribute(made)
        x, y = _data(made)
        logs = [made.train_on_batch(x, y), made.test_on_batch(x, y)]
        logs += made.fit(x, y, batch_size=ROWS, epochs=2, verbose=0, shuffle=False).history.values()
        return [*logs, *made.get_weights()]

    assert_same(trained(lambda made: lockstep.distribute(made, 3)), trained(lambda made: None))


@pytest.mark.thorough
def test_verify_leaves_the_state_of_an_rnn_alone():
    made = _reads_a_state(ops.convert_to_tensor)()
    x, y = _data(made)
    found = lockstep.verify(made, (x, y), devices=3, steps=3, batch_size=ROWS)
    assert found.equal, found.cause
    rnn = next(layer for layer in made.layers if isinstance(layer, layers.LSTM))
    assert all(np.all(ops.convert_to_numpy(state) == 0) for state in rnn.states)


class InTwoParts(keras.Model):
    """A step of two micro-batches, the second of which may have no rows."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = layers.BatchNormalization(), layers.Dense(1)

    def call(self, x, training=False):
        return self.head(self.norm(x, training=training))

    def train_step(self, batch):
        x, y = batch
        for rows in (slice(None, 3), slice(3, None)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(self(x[rows], training=True) - y[rows]))
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


@pytest.mark.thorough
def test_a_batch_norm_of_no_rows_gives_what_keras_gives():
    """Its moments are 0 / 0; several devices gave zero, and went on."""
    x = np.random.default_rng(0).normal(size=(9, 3)).astype("float32")  # batches of 7 and 2

    def weights(devices):
        keras.utils.set_random_seed(1)
        model = InTwoParts()
        model.compile("sgd", "mse")
        model(x[:2])
        if devices:
            lockstep.distribute(model, devices)
        model.fit(x, x[:, :1], batch_size=7, shuffle=False, verbose=0)
        return model.get_weights()

    one, three = weights(None), weights(3)
    assert any(np.isnan(each).any() for each in one)
    for mine, theirs in zip(three, one, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)
