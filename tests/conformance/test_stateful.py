"""Stateful RNNs: a long sequence fed in pieces equals the sequence fed whole.

Keras 3.15.1 drops the state of a stateful RNN on JAX, on one device too, so that the
truth here is the mathematics: the layer without state on the whole sequence, a
hand-written loop that hands the state on, and TensorFlow on one device.
"""

import inspect

import jax
import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.errors import LayoutConflict
from tests.conformance.common import assert_same, distances, snapshot
from tests.processes.common import python
from tests.tiers import rest

ROWS, STEPS, PIECE = 8, 12, 3

LAYERS = {
    "LSTM": lambda **kw: layers.LSTM(5, **kw),
    "GRU": lambda **kw: layers.GRU(5, **kw),
    "GRU_reset_before": lambda **kw: layers.GRU(5, reset_after=False, **kw),
    "SimpleRNN": lambda **kw: layers.SimpleRNN(5, **kw),
    "stacked_cells": lambda **kw: layers.RNN([layers.LSTMCell(4), layers.GRUCell(5)], **kw),
    "ConvLSTM1D": lambda **kw: layers.ConvLSTM1D(3, 2, padding="same", **kw),
    "ConvLSTM2D": lambda **kw: layers.ConvLSTM2D(2, 2, padding="same", **kw),
}
SHAPES = {"ConvLSTM1D": (6, 2), "ConvLSTM2D": (4, 4, 1)}


def one_layer(name, steps, stateful):
    keras.utils.set_random_seed(2)
    return keras.Sequential(
        [
            keras.Input(batch_shape=(ROWS, steps, *SHAPES.get(name, (2,)))),
            LAYERS[name](return_sequences=True, stateful=stateful),
        ]
    )


def sequences(name):
    shape = (ROWS, STEPS, *SHAPES.get(name, (2,)))
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def pieces(x):
    """The pieces of every row one after the other, as stateful RNNs want them."""
    return np.concatenate([x[:, start : start + PIECE] for start in range(0, STEPS, PIECE)])


def put_together(y):
    return np.concatenate(np.split(y, STEPS // PIECE), axis=1)


@pytest.mark.parametrize("devices", [3, *rest(1, 4)])
@pytest.mark.parametrize("name", LAYERS)
def test_predicting_in_pieces_equals_the_whole(name, devices):
    x = sequences(name)
    whole = one_layer(name, STEPS, stateful=False).predict(x, batch_size=ROWS, verbose=0)
    made = lockstep.distribute(one_layer(name, PIECE, stateful=True), devices)
    for reset in (made.layers[0].reset_state, made.layers[0].reset_states, made.reset_states):
        in_pieces = made.predict(pieces(x), batch_size=ROWS, verbose=0)
        assert_same(put_together(in_pieces), whole)
        reset()
    one_by_one = [made.predict_on_batch(x[:, s : s + PIECE]) for s in range(0, STEPS, PIECE)]
    assert_same(np.concatenate(one_by_one, axis=1), whole)


@pytest.mark.each_value_once
@pytest.mark.parametrize("of", ["layer", "model"])
@pytest.mark.parametrize("devices", [1, 4])
def test_a_reset_between_two_batches_of_one_call_counts(devices, of):
    """It was lost: within a call the state is carried outside of the variables."""
    x, y = pieces(sequences("LSTM")), np.ones((ROWS * STEPS // PIECE, PIECE, 5), "float32")

    def trained(stateful):
        made = one_layer("LSTM", PIECE, stateful)
        made.compile("sgd", "mse")
        callbacks = []
        if stateful:
            lockstep.distribute(made, devices)
            reset = made.layers[0].reset_state if of == "layer" else made.reset_states
            each = {
                f"on_{kind}_batch_begin": lambda batch, logs: reset()
                for kind in ("train", "test", "predict")
            }
            callbacks = [keras.callbacks.LambdaCallback(**each)]
        options = {"batch_size": ROWS, "verbose": 0, "callbacks": callbacks}
        losses = made.fit(x, y, shuffle=False, **options).history["loss"]
        return losses, made.evaluate(x, y, **options), made.predict(x, **options)

    assert_same(trained(stateful=True), trained(stateful=False))


@pytest.mark.parametrize("devices", [4, *rest(1)])
def test_bidirectional_equals_eager_calls(devices):
    """Called eagerly, Keras does carry the state, which makes it the truth here."""

    def make():
        keras.utils.set_random_seed(2)
        wrapped = layers.Bidirectional(layers.LSTM(4, return_sequences=True, stateful=True))
        return keras.Sequential([keras.Input(batch_shape=(ROWS, PIECE, 2)), wrapped])

    x, eager, made = sequences("LSTM"), make(), lockstep.distribute(make(), devices)
    for _ in range(2):
        for start in range(0, STEPS, PIECE):
            piece = x[:, start : start + PIECE]
            assert_same(made.predict(piece, batch_size=ROWS, verbose=0), eager(piece))
        made.layers[0].reset_states()
        eager.layers[0].reset_states()


def test_a_layer_deep_inside_keeps_its_state():
    def make(steps, stateful):
        keras.utils.set_random_seed(2)
        inner = keras.Sequential(
            [
                keras.Input(batch_shape=(ROWS, steps, 2)),
                layers.GRU(4, return_sequences=True, stateful=stateful),
            ]
        )
        inputs = keras.Input(batch_shape=(ROWS, steps, 2))
        return keras.Model(
            inputs, layers.LSTM(3, return_sequences=True, stateful=stateful)(inner(inputs))
        )

    x = sequences("LSTM")
    whole = make(STEPS, False).predict(x, batch_size=ROWS, verbose=0)
    made = lockstep.distribute(make(PIECE, True), 4)
    assert_same(put_together(made.predict(pieces(x), batch_size=ROWS, verbose=0)), whole)


# --------------------------------------------------------------------------- training


def classifier(steps, stateful):
    keras.utils.set_random_seed(4)
    return keras.Sequential(
        [
            keras.Input(batch_shape=(ROWS, steps, 2)),
            layers.LSTM(5, return_sequences=True, stateful=stateful),
            layers.Dense(2),
        ]
    )


def train_by_hand(x, y, learning_rate):
    """Truncated back-propagation: the state goes on, the gradient does not."""
    model = classifier(PIECE, stateful=False)
    lstm, dense = model.layers
    weights = [v.value for v in model.trainable_variables]

    def loss_of(weights, state, x, y):
        mapping = list(zip(model.trainable_variables, weights, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            lstm.return_state = True
            sequence, *state = lstm(x, initial_state=state)
            lstm.return_state = False
            return keras.ops.mean((dense(sequence) - y) ** 2), state

    state = [keras.ops.zeros((ROWS, 5))] * 2
    losses = []
    for start in range(0, STEPS, PIECE):
        piece = np.s_[:, start : start + PIECE]
        (loss, state), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            weights, state, x[piece], y[piece]
        )
        weights = [w - learning_rate * g for w, g in zip(weights, gradients, strict=True)]
        losses.append(float(loss))
    return np.mean(losses), weights


@pytest.mark.parametrize("devices", [3, *rest(1, 4)])
def test_training_equals_a_hand_written_loop(devices):
    x = sequences("LSTM")
    y = np.random.default_rng(1).normal(size=(ROWS, STEPS, 2)).astype("float32")
    loss, weights = train_by_hand(x, y, 0.5)
    made = lockstep.distribute(classifier(PIECE, stateful=True), devices)
    made.compile(keras.optimizers.SGD(0.5), "mse")
    history = made.fit(pieces(x), pieces(y), batch_size=ROWS, shuffle=False, verbose=0).history
    assert history["loss"][0] == pytest.approx(loss, abs=1e-5)
    assert_same([v.value for v in made.trainable_variables], weights)


def test_evaluating_in_pieces_equals_the_whole():
    x = sequences("LSTM")
    y = np.random.default_rng(1).normal(size=(ROWS, STEPS, 2)).astype("float32")
    whole = classifier(STEPS, stateful=False)
    whole.compile("sgd", "mse")
    made = lockstep.distribute(classifier(PIECE, stateful=True), 4)
    made.compile("sgd", "mse")
    loss = made.evaluate(pieces(x), pieces(y), batch_size=ROWS, verbose=0)
    assert loss == pytest.approx(whole.evaluate(x, y, batch_size=ROWS, verbose=0), abs=1e-5)


def test_n_devices_equal_one_over_several_epochs():
    x = sequences("LSTM")
    y = np.random.default_rng(1).normal(size=(ROWS, STEPS, 2)).astype("float32")

    def train(devices):
        keras.utils.clear_session(free_memory=False)  # the same names each time
        made = lockstep.distribute(classifier(PIECE, stateful=True), devices)
        made.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        reset = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: made.reset_states()
        )
        made.fit(
            pieces(x),
            pieces(y),
            batch_size=ROWS,
            shuffle=False,
            epochs=5,
            verbose=0,
            callbacks=[reset],
        )
        return snapshot(made)

    one = train(1)
    for devices in (3, 8):
        assert max(distances(one, train(devices)).values()) <= 1e-5


# ----------------------------------------------------------------- where the state is


def test_a_row_keeps_its_state_on_its_device():
    made = lockstep.distribute(one_layer("LSTM", PIECE, stateful=True), 4)
    made.predict(pieces(sequences("LSTM")), batch_size=ROWS, verbose=0)
    for state in made.layers[0].states:
        shards = state.value.addressable_shards
        assert [shard.data.shape for shard in shards] == [(2, 5)] * 4
        assert [shard.index[0].start or 0 for shard in shards] == [0, 2, 4, 6]


@pytest.mark.parametrize("devices", [3, *rest(1, 2, 4)])
def test_a_state_moves_with_its_model(devices):
    x = sequences("LSTM")
    whole = one_layer("LSTM", STEPS, stateful=False).predict(x, verbose=0)
    made = lockstep.distribute(one_layer("LSTM", PIECE, stateful=True), 2)
    found = []
    for number, start in enumerate(range(0, STEPS, PIECE)):
        if number == 2:
            lockstep.distribute(made, devices)
        found.append(made.predict(x[:, start : start + PIECE], batch_size=ROWS, verbose=0))
    assert_same(np.concatenate(found, axis=1), whole)


def test_a_state_may_be_shared_with_another_model_on_the_same_devices_alone():
    made = lockstep.distribute(one_layer("LSTM", PIECE, stateful=True), 2)
    made.predict(pieces(sequences("LSTM")), batch_size=ROWS, verbose=0)
    other = keras.Sequential([keras.Input(batch_shape=(ROWS, PIECE, 2)), *made.layers])
    with pytest.raises(LayoutConflict, match="is shared with"):
        lockstep.distribute(other, 4)
    lockstep.distribute(other, 2)
    x = sequences("LSTM")[:, :PIECE]
    made.reset_states()
    right = one_layer("LSTM", PIECE, stateful=False).predict(x, verbose=0)
    assert_same(other.predict(x, batch_size=ROWS, verbose=0), right)


def test_the_state_is_no_weight_and_in_no_file(tmp_path):
    plain = one_layer("LSTM", PIECE, stateful=True)
    made = lockstep.distribute(one_layer("LSTM", PIECE, stateful=True), 4)
    made.predict(pieces(sequences("LSTM")), batch_size=ROWS, verbose=0)
    assert len(made.get_weights()) == len(plain.get_weights()) == 3
    made.save(tmp_path / "made.keras")
    plain.save(tmp_path / "plain.keras")
    made.save_weights(tmp_path / "made.weights.h5")
    loaded = keras.models.load_model(tmp_path / "made.keras")
    assert_same(loaded.get_weights(), made.get_weights())
    plain.load_weights(tmp_path / "made.weights.h5")
    made.load_weights(tmp_path / "made.weights.h5")


def test_release_leaves_the_layer_as_keras_has_it():
    made = one_layer("LSTM", PIECE, stateful=True)
    before = len(made.variables)
    lockstep.distribute(made, 4)
    assert len(made.variables) == before + 2
    lockstep.release(made)
    assert len(made.variables) == before
    assert "reset_state" not in vars(made.layers[0])
    made.layers[0].reset_state()
    assert made.predict(sequences("LSTM")[:, :PIECE], batch_size=ROWS, verbose=0).shape


def test_a_batch_of_another_size_is_refused_as_on_one_device():
    made = lockstep.distribute(one_layer("LSTM", PIECE, stateful=True), 4)
    with pytest.raises(ValueError, match="batch size"):
        made.predict(sequences("LSTM")[:5, :PIECE], verbose=0)


# ------------------------------------------------------------- TensorFlow on one device


def train_a_piece_at_a_time(path):
    import keras
    import numpy as np

    model = keras.models.load_model(path / "start.keras")
    data = np.load(path / "data.npz")
    model.compile(keras.optimizers.SGD(0.1), "mse")
    history = model.fit(data["x"], data["y"], batch_size=8, shuffle=False, epochs=3, verbose=0)
    np.savez(path / "trained.npz", *model.get_weights(), loss=history.history["loss"])


@pytest.mark.whole
def test_equals_tensorflow_on_one_device(tmp_path):
    x = sequences("LSTM")
    y = np.random.default_rng(1).normal(size=(ROWS, STEPS, 2)).astype("float32")
    start = classifier(PIECE, stateful=True)
    start.save(tmp_path / "start.keras")
    np.savez(tmp_path / "data.npz", x=pieces(x), y=pieces(y))
    script = inspect.getsource(train_a_piece_at_a_time)
    script += f"\nimport pathlib\ntrain_a_piece_at_a_time(pathlib.Path({str(tmp_path)!r}))"
    python(script, KERAS_BACKEND="tensorflow")
    with np.load(tmp_path / "trained.npz") as trained:
        truth = dict(trained)

    made = lockstep.distribute(classifier(PIECE, stateful=True), 4)
    made.set_weights(start.get_weights())
    made.compile(keras.optimizers.SGD(0.1), "mse")
    history = made.fit(pieces(x), pieces(y), batch_size=ROWS, shuffle=False, epochs=3, verbose=0)
    assert_same(history.history["loss"], list(truth["loss"]))
    assert_same(made.get_weights(), [truth[f"arr_{n}"] for n in range(5)])
