"""Settings that weights do not record are named by kind: the model may compute something else."""

import warnings

import keras
import pytest
from keras import layers

import lockstep
from tests.rescue import old_files
from tests.rescue.old_files import numbers


def old_gates(x):
    return keras.ops.clip(0.2 * x + 0.5, 0.0, 1.0)


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


@pytest.mark.parametrize(
    ("case", "version", "named"),
    [
        (lambda: lstm(layers.LSTM(4)), "2.2.4", "(here: LSTM)"),
        (lambda: lstm(layers.RNN(layers.LSTMCell(4))), "2.2.4", "(here: LSTM)"),
        (lambda: gru(layers.GRU(4, use_bias=False)), "2.3.1", "(here: GRU)"),
        (lambda: conv(layers.ConvLSTM2D(3, 3)), "2.10.0", "(here: ConvLSTM2D"),
        (
            lambda: dense(layers.Dense(2), layers.Activation("hard_sigmoid")),
            "2.10.0",
            "(here: Activation)",
        ),
        (lambda: lstm(layers.LSTM(4)), "2.10.0", None),
        (lambda: lstm(layers.LSTM(4, recurrent_activation=old_gates)), "2.2.4", None),
        (lambda: dense(layers.Dense(2)), "2.2.4", None),
    ],
)
def test_a_file_of_weights(tmp_path, case, version, named):
    shapes, shape, *inner = case()
    model = keras.Sequential([keras.Input(shape), *inner])
    weights = [(f"l_1/{name}:0", numbers(*dims)) for name, dims in shapes.items()]
    old = old_files.parallel_weights(tmp_path / "old.h5", weights, version=version)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = lockstep.load_weights(model, old)
    warned = [str(one.message) for one in caught if one.category is UserWarning]
    assert warned == list(loaded.notes)
    assert len(loaded.notes) == bool(named)
    for note in loaded.notes:
        assert "weights do not record recurrent_activation, reset_after and hard_sigmoid" in note
        assert named in note
        assert "--check" in note
    notes = lockstep.rescue(old, tmp_path / "new.weights.h5", model=model).notes
    assert set(loaded.notes) <= set(notes)
