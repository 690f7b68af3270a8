"""Stateful RNNs on JAX, where Keras 3.15.1 drops their state, on one device too.

`tests/every_backend/test_stateful.py` has what holds on each backend. The truth here is a
hand-written loop that hands the state on, and TensorFlow on one device.
"""

import inspect

import jax
import keras
import numpy as np
import pytest

import lockstep
from tests.conformance.common import assert_same, distances, snapshot
from tests.every_backend.test_stateful import (
    PIECE,
    ROWS,
    STEPS,
    classifier,
    one_layer,
    pieces,
    sequences,
    targets,
)
from tests.processes.common import python
from tests.tiers import rest


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
    x = sequences()
    y = targets()
    loss, weights = train_by_hand(x, y, 0.5)
    made = lockstep.distribute(classifier(PIECE, stateful=True), devices)
    made.compile(keras.optimizers.SGD(0.5), "mse")
    history = made.fit(pieces(x), pieces(y), batch_size=ROWS, shuffle=False, verbose=0).history
    assert history["loss"][0] == pytest.approx(loss, abs=1e-5)
    assert_same([v.value for v in made.trainable_variables], weights)


def test_n_devices_equal_one_over_several_epochs():
    x = sequences()
    y = targets()

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


def test_a_row_keeps_its_state_on_its_device():
    made = lockstep.distribute(one_layer("LSTM", PIECE, stateful=True), 4)
    made.predict(pieces(sequences()), batch_size=ROWS, verbose=0)
    for state in made.layers[0].states:
        shards = state.value.addressable_shards
        assert [shard.data.shape for shard in shards] == [(2, 5)] * 4
        assert [shard.index[0].start or 0 for shard in shards] == [0, 2, 4, 6]


def test_release_leaves_the_layer_as_keras_has_it():
    made = one_layer("LSTM", PIECE, stateful=True)
    before = len(made.variables)
    lockstep.distribute(made, 4)
    assert len(made.variables) == before + 2
    lockstep.release(made)
    assert len(made.variables) == before
    assert "reset_state" not in vars(made.layers[0])
    made.layers[0].reset_state()
    assert made.predict(sequences()[:, :PIECE], batch_size=ROWS, verbose=0).shape


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
    x = sequences()
    y = targets()
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
