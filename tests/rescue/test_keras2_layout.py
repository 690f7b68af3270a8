"""`.h5` output where the file, the model or both lack what Keras 2 goes by."""

import h5py
import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.errors import NeedsCode
from tests.rescue import old_files

RNG = np.random.default_rng(0)
LAYERS = [(RNG.normal(size=(5, 5)).astype("float32"), np.full(5, n, "float32")) for n in range(4)]


def weights(order):
    return [
        (f"dense_{n + 1}/{kind}:0", value)
        for n in order
        for kind, value in zip(("kernel", "bias"), LAYERS[n], strict=True)
    ]


def stack(**names):
    dense = [layers.Dense(5, **({"name": f"d{n}"} if names else {})) for n in range(4)]
    return keras.Sequential([keras.Input((5,)), *dense])


def outputs(x):
    for kernel, bias in LAYERS:
        x = x @ kernel + bias
    return x


@pytest.mark.parametrize("loss", ["mse", {"dense_4": "mse"}])
def test_a_live_model_gets_a_file_under_its_own_names(tmp_path, loss):
    """The config in the file names other layers than the model; Keras 2's order is its layers'."""
    config = old_files.sequential(
        [old_files.dense(5, name=f"dense_{n + 1}") for n in range(4)], (None, 5)
    )
    training = {"optimizer_config": {"class_name": "SGD", "config": {"lr": 0.1}}, "loss": loss}
    old = old_files.parallel_full(
        tmp_path / "old.h5", config, weights(range(4)), shapes=((None, 5),), training=training,
        merges=("dense_4",),
    )  # fmt: skip
    model = stack(named=True)
    x = RNG.normal(size=(3, 5)).astype("float32")
    np.savez(tmp_path / "io.npz", x0=x, y0=outputs(x))
    report = lockstep.rescue(old, tmp_path / "new.h5", model=model, check=tmp_path / "io.npz")
    assert len(report.rows) == 8
    with h5py.File(tmp_path / "new.h5") as new:
        assert [name.decode() for name in new.attrs["layer_names"]] == ["d0", "d1", "d2", "d3"]
        for number, (kernel, _) in enumerate(LAYERS):
            first = new[f"d{number}"].attrs["weight_names"][0]
            np.testing.assert_array_equal(new[f"d{number}"][first][()], kernel)


def test_weights_without_a_model_have_no_order_of_layers(tmp_path):
    """A layer that was frozen lies last in a parallel file, and Keras 2 loads by order."""
    old = old_files.parallel_weights(tmp_path / "old.h5", weights([1, 2, 3, 0]))
    with pytest.raises(NeedsCode, match="--config"):
        lockstep.rescue(old, tmp_path / "new.h5")
    config = old_files.sequential(
        [old_files.dense(5, name=f"dense_{n + 1}", trainable=n > 0) for n in range(4)], (None, 5)
    )
    lockstep.rescue(old, tmp_path / "new.h5", config=config)
    model = stack()
    model.load_weights(tmp_path / "new.h5")  # Keras's own, which goes by order
    x = RNG.normal(size=(3, 5)).astype("float32")
    np.testing.assert_allclose(model(x), outputs(x), rtol=1e-5)
