"""`load_weights` sets all that a model computes with, or leaves it as it was."""

import h5py
import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.errors import UnreadableFile, WeightsDoNotFit
from tests.rescue.old_files import names, numbers, single_weights


@pytest.mark.parametrize("nested", [False, True])
def test_normalization_computes_with_what_was_loaded(tmp_path, nested):
    """It keeps constants made of its weights, and a compiled predict keeps them once more."""
    mean, variance, kernel, bias = numbers(3) * 10, numbers(3) ** 2 + 1, numbers(3, 2), numbers(2)
    inner = "inner" if nested else "normalization"
    own = [("normalization/mean:0", mean), ("normalization/variance:0", variance),
           ("normalization/count:0", np.int64(9))]  # fmt: skip
    dense = [("dense/kernel:0", kernel), ("dense/bias:0", bias)]
    old = single_weights(tmp_path / "old.h5", [(inner, own), ("dense", dense)])
    scaled = layers.Normalization(name="normalization")
    if nested:
        scaled = keras.Sequential([keras.Input((3,)), scaled], name="inner")
    model = keras.Sequential([keras.Input((3,)), scaled, layers.Dense(2, name="dense")])
    x = numbers(4, 3) * 10
    model.predict(x, verbose=0)
    lockstep.load_weights(model, old)
    want = ((x - mean) / np.sqrt(variance)) @ kernel + bias
    np.testing.assert_allclose(model(x), want, atol=1e-4)
    np.testing.assert_allclose(model.predict(x, verbose=0), want, atol=1e-4)


def test_an_array_that_cannot_be_read_leaves_the_model_as_it_was(tmp_path):
    old = tmp_path / "old.h5"
    with h5py.File(old, "w") as root:
        names(root, "layer_names", ["dense_1", "dense_2"])
        root.attrs["keras_version"] = b"2.2.4"
        for name in ("dense_1", "dense_2"):
            group = root.create_group(name)
            listed = [f"{name}/kernel:0", f"{name}/bias:0"]
            names(group, "weight_names", listed)
            for weight, value in zip(listed, (numbers(40, 40), numbers(40)), strict=True):
                group.create_dataset(weight, data=value, compression="gzip", chunks=value.shape)
        chunk = root["dense_2/dense_2/kernel:0"].id.get_chunk_info(0)
    with open(old, "r+b") as file:
        file.seek(chunk.byte_offset + chunk.size // 2)
        file.write(b"\xff" * 40)
    model = keras.Sequential([keras.Input((40,)), layers.Dense(40), layers.Dense(40)])
    before = model.get_weights()
    with pytest.raises(UnreadableFile):
        lockstep.load_weights(model, old)
    for was, now in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(was, now)


class WithATemperature(keras.Model):
    """A weight beside those of its layers."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3, name="d")
        self.temperature = self.add_weight(name="temperature", shape=(), initializer="ones")

    def call(self, x):
        return self.dense(x) * self.temperature


def test_a_weight_that_a_model_made_itself_is_set_or_missed(tmp_path):
    model = WithATemperature()
    model(np.ones((1, 4), "float32"))
    dense = ("d", [("d/kernel:0", numbers(4, 3)), ("d/bias:0", numbers(3))])
    with pytest.raises(WeightsDoNotFit):
        lockstep.load_weights(model, single_weights(tmp_path / "without.h5", [dense]))
    own = ("top_level_model_weights", [("temperature:0", np.float32(2.5))])
    lockstep.load_weights(model, single_weights(tmp_path / "with.h5", [dense, own]))
    assert float(model.temperature) == 2.5
    np.testing.assert_array_equal(model.dense.kernel, dense[1][0][1])
