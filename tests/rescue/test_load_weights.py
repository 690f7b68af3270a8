"""`lockstep.load_weights`: every weight of a live model, or none."""

import json

import h5py
import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.errors import IncompleteFile, NotAModel, UnreadableFile, WeightsDoNotFit
from tests.rescue import old_files
from tests.rescue.old_files import LEGACY


def mlp4():
    """As a user writes it today: no names, Keras 3's own numbers."""
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="relu"),
            layers.Dense(8, activation="relu"),
            layers.Dropout(0.2),
            layers.Dense(6, activation="tanh"),
            layers.Dense(3, activation="softmax"),
        ]
    )


def mlp_same():
    """Every permutation of the layers would fit."""
    config = json.loads((LEGACY / "keras-2.2.4__mlp_same-g4" / "template_config.json").read_text())
    stack = [keras.Input((5,))]
    for entry in config["config"]["layers"]:
        given = entry["config"]
        if entry["class_name"] == "Dense":
            stack.append(layers.Dense(5, activation=given["activation"]))
        else:
            stack.append(layers.BatchNormalization(epsilon=given["epsilon"]))
    return keras.Sequential(stack)


def rnn(reset_after):
    gates = {"recurrent_activation": old_hard_sigmoid}
    return keras.Sequential(
        [
            keras.Input((None, 4)),
            layers.Bidirectional(layers.LSTM(4, return_sequences=True, **gates)),
            layers.GRU(5, return_sequences=True, reset_after=reset_after, **gates),
            layers.BatchNormalization(),
            layers.Bidirectional(
                layers.GRU(3, return_sequences=True, reset_after=reset_after, **gates),
                merge_mode="sum",
            ),
            layers.LSTM(4, **gates),
            layers.Dense(2, activation="softmax"),
        ]
    )


@keras.saving.register_keras_serializable("tests")
def old_hard_sigmoid(x):
    return keras.ops.clip(0.2 * x + 0.5, 0.0, 1.0)


def outputs_differ_by(model, case):
    with np.load(LEGACY / case / "io.npz") as io:
        return float(np.abs(np.asarray(model(io["x0"])) - io["y0"]).max())


@pytest.mark.parametrize(
    ("build", "case", "file"),
    [
        (mlp4, "keras-2.2.4__mlp4-g2", "parallel_weights.h5"),
        (mlp4, "keras-2.2.4__mlp4-g2", "parallel_full.h5"),
        (mlp4, "keras-2.2.4__mlp4-g2", "template_weights.h5"),
        (mlp4, "keras-2.2.4__mlp4-g2", "template_full.h5"),
        (mlp4, "keras-2.3.1-tf2.0.4__mlp4-g2", "parallel_full.h5"),
        (mlp_same, "keras-2.2.4__mlp_same-g4", "parallel_weights.h5"),
        (mlp_same, "keras-2.2.4__mlp_same-g4", "template_weights.h5"),
        (lambda: rnn(False), "keras-2.0.9__rnn-g2", "parallel_weights.h5"),
        (lambda: rnn(False), "keras-2.2.4__rnn-g2", "parallel_full.h5"),
        (lambda: rnn(True), "tfkeras-2.3.4__rnn-g2", "template_weights.h5"),
    ],
)
def test_a_live_model_gives_the_old_outputs(build, case, file):
    model = build()
    if "tfkeras" in case:
        model = rnn_of_tf_keras()
    report = lockstep.load_weights(model, LEGACY / case / file)
    assert all(row.equal for row in report.rows)
    assert outputs_differ_by(model, case) < 2e-6


def rnn_of_tf_keras():
    return keras.Sequential(
        [
            keras.Input((None, 4)),
            layers.Bidirectional(layers.LSTM(4, return_sequences=True)),
            layers.GRU(5, return_sequences=True),
            layers.BatchNormalization(),
            layers.Bidirectional(layers.GRU(3, return_sequences=True), merge_mode="sum"),
            layers.LSTM(4),
            layers.Dense(2, activation="softmax"),
        ]
    )


def test_rescue_takes_the_users_model_and_leaves_it_alone(tmp_path):
    model = mlp4()
    before = [np.array(value) for value in model.get_weights()]
    case = "keras-2.2.4__mlp4-g2"
    report = lockstep.rescue(
        LEGACY / case / "parallel_weights.h5", tmp_path / "new.keras", model=model,
        check=LEGACY / case / "io.npz",
    )  # fmt: skip
    assert report.difference < 2e-6
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_compiled_model_of_the_user_is_saved_whole(tmp_path):
    model = mlp4()
    model.compile("adam", "categorical_crossentropy")
    case = "keras-2.2.4__mlp4-g2"
    lockstep.rescue(LEGACY / case / "parallel_weights.h5", tmp_path / "new.keras", model=model)
    loaded = keras.models.load_model(tmp_path / "new.keras")
    assert outputs_differ_by(loaded, case) < 2e-6
    assert model.optimizer is not None


@pytest.mark.parametrize(
    ("build", "case", "file", "said"),
    [
        (lambda: rnn(False), "keras-2.2.4__mlp4-g2", "parallel_weights.h5", "8 weights but the"),
        (lambda: rnn(True), "keras-2.2.4__rnn-g2", "parallel_full.h5", "reset_after=False"),
    ],
)
def test_weights_of_another_model_raise_and_change_nothing(build, case, file, said):
    model = build()
    before = [np.array(value) for value in model.get_weights()]
    with pytest.raises(WeightsDoNotFit, match=said):
        lockstep.load_weights(model, LEGACY / case / file)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_husk_raises_instead_of_loading_nothing():
    with pytest.raises(IncompleteFile, match="no weights at all"):
        lockstep.load_weights(mlp4(), LEGACY / "keras-2.0.9__mlp_act-g2" / "parallel_full.h5")


def test_what_weights_cannot_tell_is_warned_of():
    with pytest.warns(UserWarning, match="hard_sigmoid"):
        lockstep.load_weights(sigmoid_rnn(), LEGACY / "keras-2.0.9__rnn-g2" / "parallel_weights.h5")


def test_sigmoid_gates_are_no_doubt_where_they_were_the_default(tmp_path):
    """Version 2.10 comes after 2.3, though not as text."""
    weights = [("kernel", (3, 16)), ("recurrent_kernel", (4, 16)), ("bias", (16,))]
    weights = [(f"l/{name}:0", np.ones(shape, "float32")) for name, shape in weights]
    old = old_files.parallel_weights(tmp_path / "w.h5", weights, version="2.10.0")
    model = keras.Sequential([keras.Input((5, 3)), keras.layers.LSTM(4, name="l")])
    assert not lockstep.load_weights(model, old).notes


def sigmoid_rnn():
    return keras.Sequential(
        [
            keras.Input((None, 4)),
            layers.Bidirectional(layers.LSTM(4, return_sequences=True)),
            layers.GRU(5, return_sequences=True, reset_after=False),
            layers.BatchNormalization(),
            layers.Bidirectional(
                layers.GRU(3, return_sequences=True, reset_after=False), merge_mode="sum"
            ),
            layers.LSTM(4),
            layers.Dense(2, activation="softmax"),
        ]
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("m.keras", "keras.models.load_model"),
        ("m.weights.h5", "model.load_weights"),
        ("m.h5", "keras.models.load_model"),
    ],
)
def test_todays_files_are_left_to_keras(name, said, tmp_path):
    model = mlp4()
    (model.save_weights if "weights" in name else model.save)(tmp_path / name)
    with pytest.raises(UnreadableFile, match=f"nothing to rescue.\nUse it directly: .*{said}"):
        lockstep.load_weights(model, tmp_path / name)


def test_only_models_are_loaded_into():
    with pytest.raises(NotAModel, match="got a dict"):
        lockstep.load_weights({}, "x.h5")


def test_a_rescue_leaves_no_trace_in_the_callers_keras(tmp_path):
    """Keras once gave values to the weightless models of a rescue, gigabytes, much later."""
    before = keras.Sequential([keras.Input((1,)), layers.Dense(1)]).layers[0].name
    lockstep.rescue(LEGACY / "keras-2.2.4__rnn-g2" / "parallel_full.h5", tmp_path / "new.keras")
    model = mlp4()
    numbers = [int(name.rpartition("_")[2] or 0) for name in (before, model.layers[0].name)
               if name != "dense"]  # fmt: skip
    assert numbers[-1] - (numbers[0] if len(numbers) == 2 else 0) == 1
    with keras.StatelessScope():
        pass  # leaving it gives values to whatever this thread has left without
    assert model(np.ones((2, 6), "float32")).shape == (2, 3)


def with_kernel(tmp_path, change):
    """A genuine file whose first kernel has other numbers."""
    path = tmp_path / "old.h5"
    path.write_bytes((LEGACY / "keras-2.2.4__mlp4-g2" / "parallel_full.h5").read_bytes())
    with h5py.File(path, "r+") as root:
        replace(root["model_weights/sequential_1/dense_1"], "kernel:0", change)
    return path


def replace(group, name, change):
    values = change(group[name][()])
    del group[name]
    group[name] = values


def test_an_array_that_is_rounded_is_not_called_equal(tmp_path):
    path = with_kernel(tmp_path, lambda a: a.astype("float64") + 1e-12)
    with pytest.warns(UserWarning, match="1 of 8 arrays rounded"):
        report = lockstep.load_weights(mlp4(), path)
    assert [row.equal for row in report.rows] == [False] + [True] * 7


@pytest.mark.parametrize(
    "change", [lambda a: np.full(a.shape, 1e300), lambda a: np.full(a.shape, 2**40 + 1)]
)
def test_numbers_that_the_dtype_cannot_hold_are_refused(change, tmp_path):
    path = with_kernel(tmp_path, change)
    model = mlp4()
    before = [np.array(value) for value in model.get_weights()]
    with pytest.raises(WeightsDoNotFit, match="float32, which cannot hold this value"):
        lockstep.load_weights(model, path)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_other_dtypes_with_the_same_numbers_are_equal(tmp_path):
    path = with_kernel(tmp_path, lambda a: np.round(a * 9).astype("int64"))
    report = lockstep.load_weights(mlp4(), path)
    assert all(row.equal for row in report.rows)
    assert [row.converted for row in report.rows] == [True] + [False] * 7
