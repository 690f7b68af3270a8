"""What is built on the first batch has the types that a device has."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.engines.jax.fit.first_build import as_on_device
from tests.tiers import further

X = np.random.RandomState(0).normal(size=(8, 3))
Y = np.arange(8)[:, None] % 3


class Batches(keras.utils.PyDataset):
    def __init__(self, floats, integers):
        super().__init__()
        self.types = floats, integers

    def __len__(self):
        return 2

    def __getitem__(self, number):
        rows = slice(4 * number, 4 * number + 4)
        return X[rows].astype(self.types[0]), Y[rows].astype(self.types[1])


def unbuilt(**options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([layers.Dense(3, activation="softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"], **options)
    return model


@pytest.mark.parametrize(
    ("call", "options"),
    [
        ("fit", {}),
        ("fit", {"steps_per_execution": 2}),
        *further(("evaluate", {"run_eagerly": True})),
    ],
)
def test_types_of_64_bits_are_built_without_a_warning(call, options):
    """JAX 0.11.1 and later warn where Keras asks for a shape of int64 or float64."""
    model = lockstep.distribute(unbuilt(**options), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = getattr(model, call)(Batches("float64", "int64"), verbose=0)
    alone = unbuilt(**options)
    right = getattr(alone, call)(Batches("float32", "int32"), verbose=0)
    if call == "fit":
        made, right = made.history["loss"], right.history["loss"]
    np.testing.assert_allclose(made, right, rtol=1e-6)


def test_only_what_jax_does_not_have_becomes_a_shape():
    batch = {"x": X, "y": [Y, None], "words": np.array(["a"]), "small": np.ones(3, "float32")}
    seen = as_on_device(batch)
    assert (seen["x"].shape, seen["x"].dtype) == ((8, 3), "float32")
    assert (seen["y"][0].shape, seen["y"][0].dtype) == ((8, 1), "int32")
    assert seen["y"][1] is None
    assert seen["words"] is batch["words"]
    assert seen["small"] is batch["small"]
