"""What `--custom` and `custom_objects` give, beside what Keras has itself."""

import json

import h5py
import keras
import numpy as np
import pytest
from click.testing import CliRunner

import lockstep
from lockstep.cli import main
from lockstep.errors import NeedsCode
from tests.rescue import old_files

SCALE = """
import keras
from keras import backend as K
from keras.layers import LSTM, Dense
from numpy import tanh

@keras.saving.register_keras_serializable("users_code")
class Scale(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=(shape[-1],))

    def call(self, x):
        return x * self.scale
"""


@pytest.mark.parametrize("way", ["--custom", "custom_objects"])
def test_imports_beside_the_users_classes_do_not_replace_the_translation(tmp_path, way):
    rng = np.random.default_rng(0)
    lstm = [rng.normal(size=shape).astype("float32") for shape in [(3, 16), (4, 16), (16,)]]
    config = old_files.sequential(
        [("LSTM", {"name": "lstm_1", "units": 4, "recurrent_activation": "hard_sigmoid"}),
         ("Scale", {"name": "scale_1"})], (None, 5, 3))  # fmt: skip
    names = ["lstm_1/kernel:0", "lstm_1/recurrent_kernel:0", "lstm_1/bias:0"]
    weights = [*zip(names, lstm, strict=True), ("scale_1/scale:0", np.full(4, 2, "float32"))]
    old = old_files.parallel_full(tmp_path / "old.h5", config, weights, shapes=((None, 5, 3),))
    (tmp_path / "users_code.py").write_text(SCALE)
    namespace = {"__name__": "users_code"}
    exec(SCALE, namespace)
    new = tmp_path / "new.keras"
    if way == "--custom":
        command = ["rescue", old, "-o", new, "--custom", tmp_path / "users_code.py"]
        done = CliRunner().invoke(main, [str(part) for part in command])
        assert done.exit_code == 0, done.output
    else:
        given = {name: namespace[name] for name in ("Scale", "LSTM", "Dense")}
        lockstep.rescue(old, new, custom_objects=given)
    model = keras.models.load_model(new, custom_objects={"Scale": namespace["Scale"]})
    x = 3 * rng.normal(size=(2, 5, 3)).astype("float32")
    np.testing.assert_allclose(
        model(x), 2 * old_files.lstm(x, *lstm, old_files.old_hard_sigmoid)[:, -1], atol=1e-5
    )


def test_layers_in_the_place_of_slices_stay_if_nothing_numbers_them(tmp_path):
    """A template over an image and its mirror image, joined along the batch, is no wrapper."""
    kernel, bias = old_files.numbers(4, 3), old_files.numbers(3)
    template = old_files.sequential([old_files.dense(3)], (None, 4))
    old = old_files.parallel_full(
        tmp_path / "old.h5", template, [("dense_1/kernel:0", kernel), ("dense_1/bias:0", bias)]
    )
    with h5py.File(old, "a") as root:
        config = json.loads(root.attrs["model_config"])
        for entry in config["config"]["layers"]:
            if entry["class_name"] == "Lambda":
                entry["config"]["arguments"] = {}
        root.attrs["model_config"] = json.dumps(config).encode()
    assert not lockstep.inspect(old).parallel
    new = tmp_path / "new.keras"
    with pytest.raises(NeedsCode, match="lambda_1"):
        lockstep.rescue(old, new)
    given = {"lambda_1": _same, "lambda_2": _mirrored}
    report = lockstep.rescue(old, new, custom_objects=given)
    assert report.template is None
    model = keras.models.load_model(new, custom_objects={"_same": _same, "_mirrored": _mirrored})
    x = old_files.numbers(2, 4)
    wanted = np.concatenate([x @ kernel + bias, x[:, ::-1] @ kernel + bias])
    np.testing.assert_allclose(model(x), wanted, atol=1e-6)


def _same(x):
    return x


def _mirrored(x):
    return x[:, ::-1]
