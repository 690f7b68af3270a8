"""What weights cannot tell is told: each case computes something else than the old model."""

import warnings

import keras
import pytest
from keras import layers

import lockstep
from tests.rescue import old_files
from tests.rescue.old_files import numbers


def lstm(*inner):
    return {"kernel": (3, 16), "recurrent_kernel": (4, 16), "bias": (16,)}, (5, 3), *inner


def gru(*inner):
    return {"kernel": (3, 12), "recurrent_kernel": (4, 12)}, (5, 3), *inner


def conv(*inner):
    return (
        {"kernel": (3, 3, 2, 12), "recurrent_kernel": (3, 3, 3, 12), "bias": (12,)},
        (4, 5, 5, 2),
        *inner,
    )


def dense(*inner):
    return {"kernel": (3, 2), "bias": (2,)}, (3,), *inner


def old_gates(x):
    return keras.ops.clip(0.2 * x + 0.5, 0.0, 1.0)


def file_of(tmp_path, shapes, **config):
    weights = [(f"l_1/{name}:0", numbers(*shape)) for name, shape in shapes.items()]
    if not config:
        return old_files.parallel_weights(tmp_path / "old.h5", weights)
    template = old_files.sequential([("LSTM", {"name": "l_1", **config})], (None, 5, 3))
    return old_files.parallel_full(tmp_path / "old.h5", template, weights, shapes=((None, 5, 3),))


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (lambda: lstm(layers.LSTM(4)), "sigmoid gates"),
        (lambda: lstm(layers.RNN(layers.LSTMCell(4))), "sigmoid gates"),
        (lambda: lstm(layers.LSTM(4, recurrent_activation="hard_sigmoid")), "Keras 3's hard_si"),
        (lambda: gru(layers.GRU(4, use_bias=False, recurrent_activation=old_gates)), "reset_after"),
        (lambda: conv(layers.ConvLSTM2D(3, 3)), "sigmoid gates"),
        (lambda: dense(layers.Dense(2), layers.Activation("hard_sigmoid")), "Keras 3's hard_sig"),
        (lambda: lstm(layers.LSTM(4, recurrent_activation=old_gates)), None),
        (lambda: dense(layers.Dense(2)), None),
    ],
)
def test_a_file_of_weights(tmp_path, case, said):
    shapes, shape, *inner = case()
    model = keras.Sequential([keras.Input(shape), *inner])
    old = file_of(tmp_path, shapes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = lockstep.load_weights(model, old)
    warned = [str(one.message) for one in caught if one.category is UserWarning]
    assert warned == list(loaded.notes)
    assert len(loaded.notes) == bool(said)
    assert all(said in note for note in loaded.notes)
    notes = lockstep.rescue(old, tmp_path / "new.weights.h5", model=model).notes
    assert [note for note in notes if said and said in note] == list(loaded.notes)


@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        ({}, {"recurrent_activation": "hard_sigmoid"}, ["=sigmoid", "says hard_sigmoid"]),
        ({}, {"recurrent_activation": "sigmoid"}, []),
        ({"activation": "relu"}, {"recurrent_activation": "sigmoid"}, ["=relu", "says tanh"]),
        ({"recurrent_activation": old_gates}, {"recurrent_activation": "hard_sigmoid"}, []),
    ],
)
def test_the_config_in_a_file_is_asked(tmp_path, mine, theirs, said):
    shapes, shape, layer = lstm(layers.LSTM(4, **mine))
    old = file_of(tmp_path, shapes, units=4, activation="tanh", **theirs)
    model = keras.Sequential([keras.Input(shape), layer])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        notes = lockstep.load_weights(model, old).notes
    assert len(notes) == bool(said)
    assert all(part in note for note in notes for part in said)
