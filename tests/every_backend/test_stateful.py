"""Stateful RNNs carry their state from batch to batch, and each device runs its rows of it.

The truth is the layer without state on the whole sequence, eager calls, and Keras on one device.
Keras 3.15.1 drops the state of a stateful RNN on JAX, on one device too: there, a hand-written
loop stands for it (`tests/conformance/test_stateful.py`).
"""

import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep
from lockstep.errors import LayoutConflict, UnsplitBatchWarning, UnsupportedModel
from tests.agreement import assert_equal, both, values
from tests.conftest import BACKEND
from tests.tables import Table
from tests.tiers import further, quick_on_jax, rest

ROWS, STEPS, PIECE = 8, 12, 3

LAYERS = Table(
    {
        "LSTM": lambda **kw: layers.LSTM(5, **kw),
        "GRU": lambda **kw: layers.GRU(5, **kw),
        "GRU_reset_before": lambda **kw: layers.GRU(5, reset_after=False, **kw),
        "SimpleRNN": lambda **kw: layers.SimpleRNN(5, **kw),
        "stacked_cells": lambda **kw: layers.RNN([layers.LSTMCell(4), layers.GRUCell(5)], **kw),
        "ConvLSTM1D": lambda **kw: layers.ConvLSTM1D(3, 2, padding="same", **kw),
        "ConvLSTM2D": lambda **kw: layers.ConvLSTM2D(2, 2, padding="same", **kw),
    }
)
SHAPES = {"ConvLSTM1D": (6, 2), "ConvLSTM2D": (4, 4, 1)}
IN_QUICK = LAYERS if BACKEND == "jax" else ("LSTM", "stacked_cells")


def one_layer(name, steps, stateful):
    keras.utils.set_random_seed(2)
    return keras.Sequential(
        [
            keras.Input(batch_shape=(ROWS, steps, *SHAPES.get(name, (2,)))),
            LAYERS[name](return_sequences=True, stateful=stateful),
        ]
    )


def sequences(name="LSTM"):
    shape = (ROWS, STEPS, *SHAPES.get(name, (2,)))
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def targets():
    return np.random.default_rng(1).normal(size=(ROWS, STEPS, 2)).astype("float32")


def pieces(x):
    """The pieces of every row one after the other, as stateful RNNs want them."""
    return np.concatenate([x[:, start : start + PIECE] for start in range(0, STEPS, PIECE)])


def put_together(y):
    return np.concatenate(np.split(y, STEPS // PIECE), axis=1)


@pytest.mark.parametrize("devices", [3, *rest(1, 4)])
@pytest.mark.parametrize(
    "name", [*IN_QUICK, *further(*(name for name in LAYERS if name not in IN_QUICK))]
)
def test_predicting_in_pieces_equals_the_whole(name, devices):
    x = sequences(name)
    whole = one_layer(name, STEPS, stateful=False).predict(x, batch_size=ROWS, verbose=0)
    made = lockstep.distribute(one_layer(name, PIECE, stateful=True), devices)
    resets = [made.layers[0].reset_state, made.layers[0].reset_states, made.reset_states]
    if name == "stacked_cells" and BACKEND != "jax":  # where Keras's own cannot reset them
        resets = resets[2:]
    for reset in resets:
        in_pieces = made.predict(pieces(x), batch_size=ROWS, verbose=0)
        assert_equal(put_together(in_pieces), whole)
        reset()
    one_by_one = [made.predict_on_batch(x[:, s : s + PIECE]) for s in range(0, STEPS, PIECE)]
    assert_equal(np.concatenate(one_by_one, axis=1), whole)


@quick_on_jax
@pytest.mark.each_value_once
@pytest.mark.parametrize("of", ["layer", "model"])
@pytest.mark.parametrize("devices", [1, 4])
def test_a_reset_between_two_batches_of_one_call_counts(devices, of):
    """It was lost on JAX: within a call the state is carried outside of the variables."""
    x, y = pieces(sequences()), np.ones((ROWS * STEPS // PIECE, PIECE, 5), "float32")

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

    assert_equal(trained(stateful=True), trained(stateful=False))


@pytest.mark.parametrize("devices", [4, *rest(1)])
def test_bidirectional_equals_eager_calls(devices):
    """Called eagerly, Keras does carry the state, which makes it the truth on each backend."""

    def make():
        keras.utils.set_random_seed(2)
        wrapped = layers.Bidirectional(layers.LSTM(4, return_sequences=True, stateful=True))
        return keras.Sequential([keras.Input(batch_shape=(ROWS, PIECE, 2)), wrapped])

    x, eager, made = sequences(), make(), lockstep.distribute(make(), devices)
    for _ in range(2):
        for start in range(0, STEPS, PIECE):
            piece = x[:, start : start + PIECE]
            right = ops.convert_to_numpy(ops.stop_gradient(eager(piece)))
            assert_equal(made.predict(piece, batch_size=ROWS, verbose=0), right)
        made.layers[0].reset_states()
        eager.layers[0].reset_states()


@quick_on_jax
def test_a_layer_deep_inside_keeps_its_state():
    def make(steps, stateful):
        keras.utils.set_random_seed(2)
        options = {"return_sequences": True, "stateful": stateful}
        inner = keras.Sequential(
            [keras.Input(batch_shape=(ROWS, steps, 2)), layers.GRU(4, **options)]
        )
        inputs = keras.Input(batch_shape=(ROWS, steps, 2))
        return keras.Model(inputs, layers.LSTM(3, **options)(inner(inputs)))

    x = sequences()
    whole = make(STEPS, False).predict(x, batch_size=ROWS, verbose=0)
    made = lockstep.distribute(make(PIECE, True), 4)
    assert_equal(put_together(made.predict(pieces(x), batch_size=ROWS, verbose=0)), whole)


@quick_on_jax
def test_evaluating_in_pieces_equals_the_whole():
    x, y = sequences(), targets()
    whole, made = classifier(STEPS, stateful=False), classifier(PIECE, stateful=True)
    for each in (whole, made):
        each.compile("sgd", "mse")
    lockstep.distribute(made, 4)
    loss = made.evaluate(pieces(x), pieces(y), batch_size=ROWS, verbose=0)
    assert_equal(loss, whole.evaluate(x, y, batch_size=ROWS, verbose=0))


def classifier(steps, stateful):
    keras.utils.set_random_seed(4)
    return keras.Sequential(
        [
            keras.Input(batch_shape=(ROWS, steps, 2)),
            layers.LSTM(5, return_sequences=True, stateful=stateful),
            layers.Dense(2),
        ]
    )


@quick_on_jax
@pytest.mark.parametrize("devices", [3, *rest(1, 2, 4)])
def test_a_state_moves_with_its_model(devices):
    x = sequences()
    whole = one_layer("LSTM", STEPS, stateful=False).predict(x, verbose=0)
    made = lockstep.distribute(one_layer("LSTM", PIECE, stateful=True), 2)
    found = []
    for number, start in enumerate(range(0, STEPS, PIECE)):
        if number == 2:
            lockstep.distribute(made, devices)
        found.append(made.predict(x[:, start : start + PIECE], batch_size=ROWS, verbose=0))
    assert_equal(np.concatenate(found, axis=1), whole)


@pytest.mark.skipif(
    BACKEND == "torch",
    reason="on PyTorch the first device has the variables of both",
)
def test_a_state_may_be_shared_with_another_model_on_the_same_devices_alone():
    made = lockstep.distribute(one_layer("LSTM", PIECE, stateful=True), 2)
    made.predict(pieces(sequences()), batch_size=ROWS, verbose=0)
    other = keras.Sequential([keras.Input(batch_shape=(ROWS, PIECE, 2)), *made.layers])
    with pytest.raises(LayoutConflict, match="is shared with"):
        lockstep.distribute(other, 4)
    lockstep.distribute(other, 2)
    x = sequences()[:, :PIECE]
    made.reset_states()
    right = one_layer("LSTM", PIECE, stateful=False).predict(x, verbose=0)
    assert_equal(other.predict(x, batch_size=ROWS, verbose=0), right)


@quick_on_jax
def test_the_state_is_no_weight_and_in_no_file(tmp_path):
    plain = one_layer("LSTM", PIECE, stateful=True)
    made = lockstep.distribute(one_layer("LSTM", PIECE, stateful=True), 4)
    made.predict(pieces(sequences()), batch_size=ROWS, verbose=0)
    assert len(made.get_weights()) == len(plain.get_weights()) == 3
    made.save(tmp_path / "made.keras")
    plain.save(tmp_path / "plain.keras")
    made.save_weights(tmp_path / "made.weights.h5")
    loaded = keras.models.load_model(tmp_path / "made.keras")
    assert_equal(loaded.get_weights(), made.get_weights())
    plain.load_weights(tmp_path / "made.weights.h5")
    made.load_weights(tmp_path / "made.weights.h5")


REFUSED = Table(
    {
        "jax": (ValueError, "batch size"),
        "torch": (ValueError, "the batch size of the input sequences must be the same"),
        "tensorflow": (
            UnsupportedModel,
            r"^The state of '\w+' has 8 rows, but the batch has a different number",
        ),
    }
)


def test_another_number_of_rows_is_refused():
    error, words = REFUSED[BACKEND]
    made = lockstep.distribute(classifier(PIECE, stateful=True), 3)
    made.compile("sgd", "mse")
    x, y = pieces(sequences())[:13], pieces(targets())[:13]
    with pytest.raises(error, match=words):
        made.fit(x, y, batch_size=ROWS, verbose=0)
    with pytest.raises(error, match=words):
        made.predict(x[:5], verbose=0)


# --------------------------------------------- Keras on one device, where it keeps the state


def _both_ways(**options):
    return layers.Bidirectional(layers.LSTM(4, return_sequences=True, **options), name="rnn")


RNNS = Table(
    {
        "LSTM": lambda **kw: layers.LSTM(4, return_sequences=True, **kw),
        "GRU": lambda **kw: layers.GRU(4, return_sequences=True, **kw),
        "GRU, backwards": lambda **kw: layers.GRU(
            4, return_sequences=True, reset_after=False, go_backwards=True, **kw
        ),
        "SimpleRNN, unrolled": lambda **kw: layers.SimpleRNN(
            4, return_sequences=True, unroll=True, **kw
        ),
        "stacked cells": lambda **kw: layers.RNN(
            [layers.LSTMCell(3), layers.GRUCell(4)], return_sequences=True, **kw
        ),
        "both ways": _both_ways,
        "ConvLSTM1D": lambda **kw: layers.ConvLSTM1D(
            2, 2, padding="same", return_sequences=True, **kw
        ),
    }
)
NO_STOCK = pytest.mark.skipif(BACKEND == "jax", reason="Keras on JAX drops the state")
PIECES = 4


def pair(name, devices, *, rows=5, masked=False):
    """A model for Keras alone, and one on several devices.

    Keras 3.15.1 on PyTorch raises in the fit of a stateful LSTM or GRU with its fast path. The
    other path is the truth.
    """
    fast = iter((False, "auto"))

    def make():
        shape = (PIECE, 6, 2) if name.startswith("Conv") else (PIECE, 2)
        inputs = keras.Input(batch_shape=(rows, *shape))
        hidden = layers.Masking()(inputs) if masked else inputs
        options = {"use_cudnn": next(fast)} if name.startswith(("LSTM", "GRU", "both")) else {}
        hidden = RNNS[name](stateful=True, **(options if BACKEND == "torch" else {}))(hidden)
        made = keras.Model(inputs, layers.Dense(2)(hidden))
        made.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        return made

    return both(make, devices)


def in_pieces(made, *, masked=False):
    rng = np.random.default_rng(0)
    rows = made.input_shape[0] * PIECES
    x = rng.normal(size=(rows, *made.input_shape[1:])).astype("float32")
    if masked:
        x *= (np.arange(PIECE) < rng.integers(1, PIECE + 1, (rows, 1)))[..., None]
    return x, rng.normal(size=(rows, *made.output_shape[1:])).astype("float32")


def states(made):
    rnn = made.layers[-2]
    ways = [rnn.forward_layer, rnn.backward_layer] if hasattr(rnn, "forward_layer") else [rnn]
    every = [state for each in ways for state in keras.tree.flatten(each.states)]
    return [np.array(ops.convert_to_numpy(state)) for state in every]


class _ResetsAfterTwo(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            for layer in self.model.layers:
                if hasattr(layer, "reset_state"):
                    layer.reset_state()
                elif hasattr(layer, "reset_states"):
                    layer.reset_states()


@NO_STOCK
@pytest.mark.parametrize(
    ("name", "devices", "masked"),
    [
        ("LSTM", 3, True),
        ("stacked cells", 3, False),
        *further(("LSTM", 3, False), ("LSTM", 1, False), ("GRU", 1, False)),
        *rest(
            ("GRU", 3, False),
            ("both ways", 3, True),
            ("both ways", 3, False),
            ("both ways", 1, False),
            ("stacked cells", 1, False),
            ("GRU, backwards", 3, False),
            ("SimpleRNN, unrolled", 3, False),
            ("ConvLSTM1D", 3, False),
        ),
    ],
)
def test_the_state_goes_from_row_to_row(name, devices, masked):
    """No warning: the layer is split."""
    alone, made = pair(name, devices, masked=masked)
    x, y = in_pieces(alone, masked=masked)
    options = {"batch_size": 5, "verbose": 0}
    # Keras 3.15.1 cannot reset the states of stacked cells.
    resets = [] if name == "stacked cells" else [_ResetsAfterTwo()]
    for each in (made, alone):
        each.fit(x, y, shuffle=False, epochs=2, callbacks=resets, **options)
    assert_equal(values(made), values(alone))
    assert max(np.abs(state).max() for state in states(alone)) > 0.01
    assert_equal(states(made), states(alone))
    assert_equal(made.predict(x, **options), alone.predict(x, **options))
    lockstep.distribute(made, 2)  # in the middle of the sequences
    assert_equal(made.evaluate(x, y, **options), alone.evaluate(x, y, **options))
    lockstep.release(made)
    assert_equal(states(made), states(alone))
    assert_equal(made.predict(x, **options), alone.predict(x, **options))


@NO_STOCK
def test_every_device_runs_its_rows_of_the_state():
    """There is no warning of a layer that runs whole; one device has no row."""
    alone, made = pair("LSTM", 4, rows=3)
    x, y = in_pieces(alone)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnsplitBatchWarning)
        for model in (alone, made):
            model.fit(x, y, batch_size=3, shuffle=False, verbose=0)
    assert_equal(states(made), states(alone))
    assert_equal(values(made), values(alone))


@pytest.mark.whole
@NO_STOCK
def test_a_state_that_is_no_matter_of_rows_is_not_split():
    """A layer of one's own around it is not proven, and runs whole."""

    @keras.saving.register_keras_serializable("lockstep_tests")
    class Around(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            fast = {"use_cudnn": False} if BACKEND == "torch" else {}  # as for `pair`
            self.rnn = layers.LSTM(4, return_sequences=True, stateful=True, **fast)

        def build(self, shape):
            self.rnn.build(shape)

        def call(self, x):
            return self.rnn(x)

    def make():
        inputs = keras.Input(batch_shape=(5, PIECE, 2))
        made = keras.Model(inputs, layers.Dense(2)(Around(name="around")(inputs)))
        made.compile(keras.optimizers.SGD(0.1), "mse")
        return made

    alone, made = both(make)
    x, y = in_pieces(alone)
    with pytest.warns(UnsplitBatchWarning, match="'around'"):
        mine = made.fit(x, y, batch_size=5, shuffle=False, verbose=0).history
    assert_equal(mine, alone.fit(x, y, batch_size=5, shuffle=False, verbose=0).history)
    assert_equal(values(made), values(alone))
