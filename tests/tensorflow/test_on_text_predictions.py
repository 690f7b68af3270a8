"""`lockstep.predict` of text, whose vocabulary is no variable."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import lockstep
from lockstep.errors import PredictionFileError

TEXTS = np.array(["a cat", "a dog", "the cat", "a bird", "the dog sat"] * 4)


def model(known):
    keras.utils.set_random_seed(1)
    text = layers.TextVectorization(output_mode="multi_hot", max_tokens=6, pad_to_max_tokens=True)
    text.adapt(known)
    made = keras.Sequential([keras.Input((), dtype="string"), text, layers.Dense(2)])
    made.layers[1].kernel.assign(np.arange(12.0).reshape(6, 2))
    return made


def batches(stop=None):
    for number, first in enumerate(range(0, 20, 4)):
        if number == stop:
            raise ZeroDivisionError
        yield (tf.constant(TEXTS[first : first + 4]),)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_texts_go_on_and_another_vocabulary_is_refused(tmp_path):
    made, other = model(TEXTS), model(["one two", "three four five"])
    wanted, path = made.predict(tf.constant(TEXTS), verbose=0), tmp_path / "scores.npy"
    with pytest.raises(ZeroDivisionError):
        lockstep.predict(made, batches(3), path, verbose=0)
    with pytest.raises(PredictionFileError, match="with a different model"):
        lockstep.predict(other, batches(), path, verbose=0)
    lockstep.predict(made, batches(), path, verbose=0)
    np.testing.assert_allclose(np.load(path), wanted, rtol=0, atol=1e-6)
