"""`lockstep inspect old.py` against Keras 3: what it calls old fails there, or is ignored."""

import warnings
from pathlib import Path

import keras
import pytest

import lockstep
from lockstep.errors import UnreadableFile

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))

IMPORTS = {
    "from keras.layers.core import Dense": "from keras.layers import Dense",
    "from keras.layers.merge import concatenate as join": (
        "from keras.layers import concatenate as join"
    ),
    "from keras.layers import CuDNNLSTM": "from keras.layers import LSTM",
    "from keras.engine.topology import Layer": "from keras.layers import Layer",
    "from keras.utils import multi_gpu_model": "from lockstep import multi_gpu_model",
    "from keras.utils.training_utils import multi_gpu_model as m": (
        "from lockstep import multi_gpu_model as m"
    ),
    "from keras.utils import np_utils": "from keras.utils import to_categorical",
    "from keras.utils.vis_utils import plot_model": "from keras.utils import plot_model",
    "from keras.backend import mean": "from keras.ops import mean",
}

CALLS = {
    "keras.optimizers.SGD(lr=0.1)": "learning_rate=",
    "keras.optimizers.SGD(0.1, decay=1e-6)": "InverseTimeDecay",
    "keras.optimizers.Nadam(schedule_decay=0.004)": "leave it out",
    "keras.layers.LSTM(3, batch_input_shape=(2, 3, 4))": "batch_shape",
    "keras.layers.Conv2D(3, 3, border_mode='same')": "padding=",
    "keras.callbacks.ModelCheckpoint('w.{epoch:02d}.hdf5')": ".keras",
    "keras.callbacks.ModelCheckpoint('w.h5', save_weights_only=True)": ".weights.h5",
    "keras.callbacks.ModelCheckpoint('w.keras', period=2)": "save_freq=",
    "keras.callbacks.TensorBoard(write_grads=True)": "leave it out",
    "keras.Sequential().fit_generator(None)": "fit(...)",
    "keras.Sequential().fit([[1.0]], workers=2)": "PyDataset",
    "keras.Sequential().predict_generator(None, 10)": (
        "predict(..., steps=10): by position, it would be batch_size"
    ),
    "keras.Sequential().fit([[1.0]], max_q_size=10)": "PyDataset",
    "keras.Sequential().evaluate([[1.0]], show_accuracy=True)": 'pass metrics=["accuracy"]',
    "keras.layers.Dense(output_dim=10)": "units=",
    "keras.layers.Conv2D(nb_filter=3, kernel_size=2)": "filters=",
    "keras.backend.flatten": "keras.ops.reshape(x, (-1,))",
    "keras.backend.function": "keras.Model(inputs, outputs)",
    "keras.Model(input=keras.Input((3,)))": "inputs=",
    "keras.backend.set_value": "variable.assign",
    "keras.utils.multi_gpu_model": "lockstep.multi_gpu_model",
}


def changes(tmp_path, text):
    script = tmp_path / "old.py"
    script.write_text(text)
    return lockstep.inspect(script).changes


@pytest.mark.parametrize("old", IMPORTS)
def test_an_import_that_fails_becomes_one_that_works(old, tmp_path):
    (change,) = changes(tmp_path, old)
    assert (change.line, change.old) == (1, old.split(" as ")[0])
    assert change.new == IMPORTS[old]
    with pytest.raises(ImportError):
        exec(old)
    exec(change.new)


@pytest.mark.parametrize("old", CALLS)
def test_a_call_that_keras_refuses_or_ignores_is_listed(old, tmp_path):
    (change,) = changes(tmp_path, f"import keras\n\n{old}")
    assert change.line == 3
    assert CALLS[old] in change.new
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((AttributeError, TypeError, ValueError, UserWarning)):
            exec(old, {"keras": keras})


SILENT = {
    "keras.layers.Convolution2D(32, 3, 5, padding='same')": "Convolution2D(32, (3, 5))",
    "p = keras.utils.multi_gpu_model(m)\nsingle = p.layers[-2]": "p: it is now the model itself",
    "p.m = lockstep.multi_gpu_model(m)\nsingle = p.m.layers[-2]": "p.m: it is now the model itself",
    "m.fit_generator(data, 3, 2)": "fit(..., steps_per_epoch=3, epochs=2): by position",
}


@pytest.mark.parametrize("old", SILENT)
def test_what_keras_takes_for_something_else_is_listed(old, tmp_path):
    assert any(SILENT[old] in change.new for change in changes(tmp_path, f"import keras\n{old}"))


def test_an_argument_that_keras_ignores_is_listed(tmp_path):
    old = "keras.callbacks.ReduceLROnPlateau(monitor='val_loss', epsilon=0.3)"
    (change,) = changes(tmp_path, f"import keras\n{old}")
    assert change.new.startswith("min_delta=")
    assert eval(old).min_delta == keras.callbacks.ReduceLROnPlateau().min_delta


def test_arguments_of_multi_gpu_model_without_an_effect_are_listed(tmp_path):
    old = (
        "from lockstep import multi_gpu_model as f\nlockstep.multi_gpu_model(m, 2, cpu_merge=False)"
    )
    (change,) = changes(tmp_path, old)
    assert (change.old, change.new[:12]) == ("multi_gpu_model(cpu_merge=)", "leave it out")


STOPS = "model.compile('sgd', 'mse', metrics={})\nkeras.callbacks.EarlyStopping(monitor='val_acc')"


def test_the_name_that_a_metric_was_given_is_the_one_to_monitor(tmp_path):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["acc"])
    x = [[1.0]]
    assert "acc" in model.evaluate(keras.ops.array(x), keras.ops.array(x), 1, 0, return_dict=True)
    for named in ("['acc']", "{'out': ['mae', 'acc']}"):
        assert changes(tmp_path, f"import keras\n{STOPS.format(named)}") == ()
    for other in ("['accuracy']", "names"):
        (change,) = changes(tmp_path, f"import keras\n{STOPS.format(other)}")
        assert change.new == 'monitor="val_accuracy", for metrics=["accuracy"]'


def test_what_keras_has_as_well_is_not_listed(tmp_path):
    for same in ("layers.Embedding(9, output_dim=3)", "layers.Conv2D(32, 3, 2)", "m.layers[-2]"):
        assert changes(tmp_path, f"from keras import layers\n{same}") == ()
    layer = keras.layers.Convolution2D(32, 3, 5)
    assert (layer.kernel_size, layer.strides) == ((3, 3), (5, 5))  # which it was not in Keras 1


def test_the_keras_of_tensorflow_becomes_keras(tmp_path):
    text = """\
import tensorflow as tf
from tensorflow.python.keras.layers import Dense
from tensorflow.keras.models import Model
tf.keras.backend.clear_session()
with tf.device("/cpu:0"):
    model = tf.keras.utils.multi_gpu_model(None)
"""
    assert [(change.line, change.new) for change in changes(tmp_path, text)] == [
        (2, "from keras.layers import Dense"),
        (3, "from keras.models import Model"),
        (4, "keras, here and below, with `import keras`"),
        (5, "leave the `with` out: lockstep places the model"),
        (6, "lockstep.multi_gpu_model"),
    ]


def test_an_old_learning_rate_that_is_set_without_effect_is_listed(tmp_path):
    (change,) = changes(tmp_path, "model.optimizer.lr = 0.2")
    assert "optimizer.learning_rate" in change.new
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.lr = 0.2
    assert float(optimizer.learning_rate.numpy()) == pytest.approx(0.1)


def test_the_schedule_for_decay_is_that_of_keras_2():
    schedule = keras.optimizers.schedules.InverseTimeDecay(0.1, 1, 1e-2)
    for step in (0, 1, 50):
        assert float(schedule(step)) == pytest.approx(0.1 / (1 + 1e-2 * step), rel=1e-6)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_a_script_that_runs_today_has_nothing_to_change(example):
    assert lockstep.inspect(example).changes == ()


def test_nothing_of_the_script_is_executed_and_names_of_others_stay(tmp_path):
    text = "import torch\ntorch.optim.Adam([], lr=3)\nraise SystemExit\n"
    assert changes(tmp_path, text) == ()


def test_a_script_of_python_2_is_refused_with_its_line(tmp_path):
    with pytest.raises(UnreadableFile, match=r"not Python 3\. line 2"):
        changes(tmp_path, "import keras\nprint 'x'\n")
