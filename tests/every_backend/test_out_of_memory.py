"""An error of a device without memory says what holds it, and what to try."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep

BACKEND = keras.backend.backend()


class Large(layers.Layer):
    """Sorts hundreds of gigabytes, which no compiler leaves out."""

    def call(self, x):
        many = ops.tile(ops.stop_gradient(x), (1, 500_000_000))
        return x + 0 * ops.sort(many, axis=1)[:, :4]

    def compute_output_shape(self, shape):
        return shape


def notes(error):
    return [each for each in getattr(error, "__notes__", []) if "of optimizer slots" in each]


def too_large(state):
    made = keras.Sequential([keras.Input((4,)), layers.Dense(4096), layers.Dense(4), Large()])
    made.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return lockstep.distribute(made, 2, state=state)


@pytest.mark.thorough
@pytest.mark.parametrize("state", ["replicated", *["sharded"] * (BACKEND != "tensorflow")])
def test_the_note_has_the_bytes_of_a_device_and_what_to_try(state, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CHECK", "0")
    x = np.ones((64, 4), "float32")
    with pytest.raises(Exception, match=r"(?i)memory|OOM") as caught:
        too_large(state).fit(x, x, batch_size=64, verbose=0)
    (note,) = notes(caught.value)
    size = (4096 * 4 * 2 + 4096 + 4) * np.dtype(keras.config.floatx()).itemsize
    assert len(note.splitlines()) == 3
    if state == "replicated":
        assert f"each of 2 devices holds {size / 1e3:.0f} kB of weights" in note
    if BACKEND != "tensorflow":
        said = "Try micro_batch_size=16 in distribute, which keeps the numbers, batch_size=32,"
        assert said in note
    else:
        assert "Try batch_size=32," in note
    assert ('state="sharded"' in note) == (BACKEND != "tensorflow" and state == "replicated")
    if BACKEND == "tensorflow":  # which waits 10 seconds for memory on each device
        return
    with pytest.raises(Exception, match=r"(?i)memory|OOM") as caught:
        keras.tree.map_structure(float, too_large(state).train_on_batch(x, x))
    assert "Try batches of fewer rows," in notes(caught.value)[0]


def test_other_errors_get_no_note():
    made = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    made.compile("sgd", "mse")
    lockstep.distribute(made, 2)
    with pytest.raises(Exception, match="shape") as caught:
        made.fit(np.ones((8, 5), "float32"), np.ones((8, 2), "float32"), verbose=0)
    assert not notes(caught.value)
