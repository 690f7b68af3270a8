"""What is carried besides weights, and into which formats."""

import json
import zipfile

import h5py
import keras
import numpy as np
import pytest
from safetensors.numpy import load_file

import lockstep
from lockstep.errors import WeightsDoNotFit
from lockstep.rescue import hdf5
from tests.rescue import old_files
from tests.rescue.old_files import LEGACY
from tests.rescue.whole import custom_for


def rescued(case, output, file="parallel_full.h5", **kwargs):
    report = lockstep.rescue(
        LEGACY / case / file, output, custom_objects=custom_for(case), **kwargs
    )
    return report, keras.models.load_model(output) if str(output).endswith(".keras") else None


def slots(model):
    return {v.name: np.asarray(v.value) for v in model.optimizer.variables}


def test_adam_state_of_tf_keras_lands_at_the_variables_it_names(tmp_path):
    case = "tfkeras-2.3.4__cnn_bn-g2"
    report, model = rescued(case, tmp_path / "new.keras")
    assert report.optimizer == "carried"
    assert report.compiled
    found = slots(model)
    with h5py.File(LEGACY / case / "parallel_full.h5") as old:
        state = old["optimizer_weights"]
        assert found["iteration"] == state["Adam/iter:0"][()] > 0
        for variable in model.trainable_variables:
            name = variable.path.replace("/", "_")
            for new, short in (("momentum", "m"), ("velocity", "v")):
                truth = state[f"Adam/{variable.path}/{short}:0"][()]
                assert np.abs(truth).max() > 0
                np.testing.assert_array_equal(found[f"{name}_{new}"], truth)


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        ("keras-2.2.4__mlp4-g2", ("momentum", "velocity")),  # Adam
        ("keras-2.2.4__rnn-g2", ("momentum",)),  # SGD with momentum
        ("keras-2.2.4__backbone_frozen-g2", ("momentum", "velocity")),  # only the head trained
        ("keras-2.2.4__backbone_partfrozen-g4", ("momentum",)),
        ("keras-2.3.1-tf2.0.4__backbone_frozen-g2", ("momentum", "velocity")),
        ("keras-2.0.9__cnn_bn-g2-kuza55", ("momentum", "velocity")),
        ("tfkeras-1.15.5__cnn_bn-g2", ("momentum", "velocity")),
    ],
)
def test_optimizer_state_is_carried_in_the_order_of_old_optimizers(case, kinds, tmp_path):
    report, model = rescued(case, tmp_path / "new.keras")
    assert report.optimizer == "carried", report.notes
    found = slots(model)
    trained = model.trainable_variables
    with h5py.File(LEGACY / case / "parallel_full.h5") as old:
        group = old["optimizer_weights"]
        arrays = [group[name][()] for name in group.attrs["weight_names"]]
    assert found["iteration"] == arrays[0] > 0
    for position, kind in enumerate(kinds):
        for index, variable in enumerate(trained):
            truth = arrays[1 + position * len(trained) + index]
            name = f"{variable.path.replace('/', '_')}_{kind}"
            np.testing.assert_array_equal(found[name], truth)


def test_training_goes_on_where_it_was(tmp_path):
    _, model = rescued("keras-2.2.4__mlp4-g2", tmp_path / "new.keras")
    assert type(model.optimizer).__name__ == "Adam"
    assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(0.01)
    assert model.loss == "categorical_crossentropy"
    steps = int(model.optimizer.iterations.numpy())
    x, y = np.ones((4, 6), "float32"), np.eye(3, dtype="float32")[[0, 1, 2, 0]]
    history = model.fit(x, y, epochs=1, verbose=0).history
    assert set(history) == {"accuracy", "loss"}
    assert int(model.optimizer.iterations.numpy()) == steps + 1


def test_a_frozen_backbone_stays_frozen(tmp_path):
    _, model = rescued("keras-2.2.4__backbone_frozen-g2", tmp_path / "new.keras")
    assert len(model.trainable_variables) == 4
    assert len(model.weights) == 28


def compiled(tmp_path, training, optimizer=(), units=3, version="2.2.4"):
    weights = [
        ("dense_1/kernel:0", np.ones((4, units), "float32")),
        ("dense_1/bias:0", np.ones(units, "float32")),
    ]
    old = old_files.parallel_full(
        tmp_path / "old.h5", old_files.sequential([old_files.dense(units)], (None, 4)), weights,
        training=training, optimizer=optimizer, version=version,
    )  # fmt: skip
    report = lockstep.rescue(old, tmp_path / "new.keras")
    return report, keras.models.load_model(tmp_path / "new.keras")


def sgd(**config):
    return {"class_name": "SGD", "config": {"lr": 0.1, "decay": 0.0, "momentum": 0.0, **config}}


def test_losses_named_by_the_merge_layers_are_those_of_the_templates_outputs(tmp_path):
    """multi_gpu_model renamed the outputs; Keras 2.0.9 named them concatenate_1, ..."""
    _, model = compiled(tmp_path, {"optimizer_config": sgd(), "loss": {"merged": "mse"}})
    assert model.loss == "mse"


def test_decay_goes_on_as_a_schedule(tmp_path):
    _, model = compiled(tmp_path, {"optimizer_config": sgd(decay=0.5), "loss": "mse"})
    schedule = keras.optimizers.schedules.deserialize(model.optimizer.get_config()["learning_rate"])
    for step in (0, 1, 7):
        assert float(schedule(step)) == pytest.approx(0.1 / (1 + 0.5 * step))


def test_clipnorm_of_keras_2_clipped_all_gradients_together(tmp_path):
    _, model = compiled(tmp_path, {"optimizer_config": sgd(clipnorm=1.5), "loss": "mse"})
    assert model.optimizer.global_clipnorm == 1.5
    assert model.optimizer.clipnorm is None


@pytest.mark.parametrize("version", ["2.2.4-tf", "2.4.0", "2.10.0"])
def test_clipnorm_of_tf_keras_clipped_each_gradient(version, tmp_path):
    training = {"optimizer_config": sgd(clipnorm=1.5), "loss": "mse"}
    _, model = compiled(tmp_path, training, version=version)
    assert model.optimizer.clipnorm == 1.5
    assert model.optimizer.global_clipnorm is None


def test_a_loss_of_the_users_own_leaves_the_model_uncompiled_and_says_so(tmp_path):
    report, model = compiled(tmp_path, {"optimizer_config": sgd(), "loss": "my_loss"})
    assert any("my_loss" in note for note in report.notes)
    assert not report.compiled
    assert not model.compiled


def test_optimizer_state_that_does_not_fit_is_dropped_and_says_so(tmp_path):
    wrong = [("SGD/iterations:0", np.int64(3)), ("SGD/v:0", np.ones((9, 9), "float32"))]
    report, model = compiled(
        tmp_path, {"optimizer_config": sgd(momentum=0.9), "loss": "mse"}, wrong
    )
    assert report.optimizer == "dropped"
    assert any("discarded" in note for note in report.notes)
    assert int(model.optimizer.iterations.numpy()) == 0


def test_keras_2_layout_is_what_the_template_itself_saved(tmp_path):
    case = "keras-2.2.4__mlp4-g2"
    rescued(case, tmp_path / "new.h5")
    with (
        h5py.File(tmp_path / "new.h5") as new,
        h5py.File(LEGACY / case / "template_full.h5") as truth,
    ):
        assert json.loads(new.attrs["model_config"]) == json.loads(truth.attrs["model_config"])
        for key in ("keras_version", "backend"):
            assert new.attrs[key] == truth.attrs[key]
        new, truth = new["model_weights"], truth["model_weights"]
        assert [n.decode() for n in new.attrs["layer_names"]] == [
            n.decode() for n in truth.attrs["layer_names"]
        ]
        for layer in truth:
            wanted = list(truth[layer].attrs["weight_names"])
            assert list(new[layer].attrs["weight_names"]) == wanted
            for name in wanted:
                np.testing.assert_array_equal(new[layer][name][()], truth[layer][name][()])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case", [f"keras-2.2.4__{kind}-g2" for kind in ("backbone_frozen", "rnn", "only_nested")]
)
def test_keras_2_layout_can_be_rescued_again(case, tmp_path):
    rescued(case, tmp_path / "new.h5", check=LEGACY / case / "io.npz")
    again = lockstep.rescue(tmp_path / "new.h5", tmp_path / "again.keras",
                            check=LEGACY / case / "io.npz")  # fmt: skip
    assert again.template is None
    assert again.difference < 1e-5


def test_long_names_are_written_in_chunks_as_keras_2_did(tmp_path):
    case = LEGACY / "keras-2.1.5__longattr-g2" / "parallel_weights.h5"
    with h5py.File(case) as old, h5py.File(tmp_path / "new.h5", "w") as new:
        genuine = next(group for group in old.values() if "weight_names1" in group.attrs)
        wanted = hdf5.names(genuine, "weight_names")
        hdf5.write_names(new, "weight_names", wanted)
        assert set(new.attrs) == set(genuine.attrs) == {"weight_names0", "weight_names1"}
        assert hdf5.names(new, "weight_names") == wanted


def test_weights_h5_is_loaded_by_plain_keras(tmp_path):
    case = "keras-2.2.4__only_nested-g2"
    report, _ = rescued(case, tmp_path / "new.weights.h5", check=LEGACY / case / "io.npz")
    assert report.difference < 1e-5


def test_arrays_alone_keep_their_names_in_safetensors(tmp_path):
    case = LEGACY / "keras-2.2.4__slashnames-g2"
    report = lockstep.rescue(case / "parallel_weights.h5", tmp_path / "new.safetensors")
    found = load_file(tmp_path / "new.safetensors")
    with h5py.File(case / "template_weights.h5") as truth:
        for layer in truth.attrs["layer_names"]:
            for name in truth[layer].attrs["weight_names"]:
                value = truth[layer][name][()]
                np.testing.assert_array_equal(found.pop(name.decode().split(":")[0]), value)
    assert not found
    assert "arrays only" in report.notes[-1]


def test_a_keras_archive_is_an_ordinary_zip(tmp_path):
    rescued("keras-2.2.4__mlp4-g2", tmp_path / "new.keras")
    with zipfile.ZipFile(tmp_path / "new.keras") as archive:
        assert archive.testzip() is None
        assert set(archive.namelist()) == {"metadata.json", "config.json", "model.weights.h5"}


def test_it_holds_exactly_the_arrays_that_keras_would_save(tmp_path):
    """The rescued file and the same model saved by Keras itself have one layout."""
    _, model = rescued("keras-2.2.4__rnn-g2", tmp_path / "new.keras")
    model.save(tmp_path / "keras.keras")
    listings = []
    for name in ("new", "keras"):
        with zipfile.ZipFile(tmp_path / f"{name}.keras") as archive:
            archive.extract("model.weights.h5", tmp_path / name)
        with h5py.File(tmp_path / name / "model.weights.h5") as handle:
            found = {}
            handle.visititems(
                lambda path, thing, found=found: (
                    found.update({path: thing[()].tobytes()})
                    if isinstance(thing, h5py.Dataset)
                    else None
                )
            )
        listings.append(found)
    assert listings[0] == listings[1]


def dense_layers(*names):
    """Dense layers of 4 units, one after another, with their weights."""
    layers = [old_files.dense(4, name=name, use_bias=False) for name in names]
    rng = np.random.default_rng(2)
    weights = [(f"{name}/kernel:0", rng.normal(size=(4, 4)).astype("float32")) for name in names]
    return old_files.sequential(layers, (None, 4)), weights


@pytest.mark.parametrize(
    ("first", "carried"),
    [("Adam/{slot}/{layer}/kernel:0", True), ("Variable_{slot}_{layer}", False)],
)
def test_adam_state_since_2_11_goes_by_variable_and_names_tell(first, carried, tmp_path):
    """TensorFlow 2.11 listed m, v, m, v where all before it listed m, m, v, v."""
    template, weights = dense_layers("a", "b")
    state = {
        (slot, layer): np.full((4, 4), number, "float32")
        for number, (layer, slot) in enumerate([("a", "m"), ("a", "v"), ("b", "m"), ("b", "v")])
    }
    listed = [(first.format(slot=slot, layer=layer), one) for (slot, layer), one in state.items()]
    adam = {"class_name": "Adam", "config": {"name": "Adam", "learning_rate": 0.001}}
    old = old_files.parallel_full(
        tmp_path / "old.h5", template, weights, version="2.11.0",
        training={"optimizer_config": adam, "loss": "mse"},
        optimizer=[("iteration:0", np.int64(7)), *listed],
    )  # fmt: skip
    report = lockstep.rescue(old, tmp_path / "new.keras")
    assert report.optimizer == ("carried" if carried else "dropped")
    assert any("discarded" in note for note in report.notes) != carried
    if carried:
        found = slots(keras.models.load_model(tmp_path / "new.keras"))
        for (slot, layer), truth in state.items():
            name = {"m": "momentum", "v": "velocity"}[slot]
            # From Keras 3.16 on, the name of the model stands before it.
            (value,) = (v for n, v in found.items() if n.endswith(f"{layer}_kernel_{name}"))
            np.testing.assert_array_equal(value, truth)


def test_state_of_fewer_weights_says_that_some_were_frozen(tmp_path):
    """A nested model that stands last and was frozen as a whole: nothing else tells."""
    template, weights = dense_layers("a")
    back, more = dense_layers("b")
    back["config"]["name"] = "back"
    template["config"]["layers"].append(back)
    state = [("iterations:0", np.int64(9)), ("m", np.ones((4, 4), "float32")),
             ("v", np.ones((4, 4), "float32")), ("vhat", np.zeros(1, "float32"))]  # fmt: skip
    adam = {"class_name": "Adam", "config": {"lr": 0.01, "epsilon": 1e-7}}
    old = old_files.parallel_full(
        tmp_path / "old.h5", template, weights + more, optimizer=state,
        training={"optimizer_config": adam, "loss": "mse"},
    )  # fmt: skip
    report = lockstep.rescue(old, tmp_path / "new.keras")
    assert report.optimizer == "dropped"
    assert any("covers 1 weight, but the model trains 2" in note for note in report.notes)


def metric(class_name, **config):
    return {"class_name": class_name, "config": {"dtype": "float32", **config}}


def test_metrics_keep_their_settings_and_names(tmp_path):
    given = [
        metric("Precision", name="p", thresholds=0.8, top_k=None, class_id=1),
        metric("TopKCategoricalAccuracy", name="top", k=2),
        metric("AUC", name="auc", num_thresholds=50, curve="PR"),
        metric("MeanMetricWrapper", name="right", fn="categorical_accuracy"),
        metric("Precision", name="gone", no_such_setting=1),
    ]
    report, model = compiled(
        tmp_path, {"optimizer_config": sgd(), "loss": "mse", "metrics": given}, version="2.4.0"
    )
    assert any("'gone'" in note for note in report.notes)
    x = np.array([[1, 0, 0, 0], [0, 1, 0, 0]], "float32")
    found = model.evaluate(x, np.array([[0, 1, 0], [1, 0, 0]], "float32"), verbose=0)
    assert np.isfinite(found).all()
    made = {one.name: one.get_config() for one in model._compile_metrics.metrics}
    assert set(made) == {"p", "top", "auc", "right"}
    assert np.ravel(made["p"]["thresholds"]) == [0.8]
    assert made["p"]["class_id"] == 1
    assert made["top"]["k"] == 2
    assert (made["auc"]["curve"], made["auc"]["num_thresholds"]) == ("PR", 50)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["mae"], {"a_mae", "b_mae"}),
        ({"b": "mae"}, {"b_mae"}),
        ([["mae"], []], {"a_mae"}),
        ([], set()),
    ],
)
def test_metrics_of_several_outputs_go_where_keras_2_put_them(given, wanted, tmp_path):
    dense = {"units": 2, "activation": "linear", "use_bias": False}
    template = {
        "class_name": "Model",
        "config": {
            "name": "model_1",
            "layers": [
                {"class_name": "InputLayer", "name": "i", "inbound_nodes": [],
                 "config": {"name": "i", "batch_input_shape": [None, 4]}},
                *({"class_name": "Dense", "name": name, "inbound_nodes": [[["i", 0, 0, {}]]],
                   "config": {"name": name, **dense}} for name in "ab"),
            ],
            "input_layers": [["i", 0, 0]],
            "output_layers": [["a", 0, 0], ["b", 0, 0]],
        },
    }  # fmt: skip
    old = old_files.parallel_full(
        tmp_path / "old.h5", template,
        [(f"{name}/kernel:0", np.ones((4, 2), "float32")) for name in "ab"],
        inputs=("i",), merges=("a", "b"),
        training={"optimizer_config": sgd(), "loss": "mse", "metrics": given},
    )  # fmt: skip
    lockstep.rescue(old, tmp_path / "new.keras")
    model = keras.models.load_model(tmp_path / "new.keras")
    x, y = np.ones((2, 4)), [np.zeros((2, 2)), np.ones((2, 2))]
    found = model.evaluate(x, y, verbose=0, return_dict=True)
    assert {name for name in found if name.endswith("mae")} == wanted
    truth = {"a_mae": 4.0, "b_mae": 3.0}
    assert all(found[name] == pytest.approx(truth[name]) for name in wanted)


def floats(tmp_path, dtype, kernel):
    """A file of one Dense layer of a dtype, with a float64 kernel."""
    layer = old_files.dense(3, name="d", dtype=dtype, use_bias=False)
    weights = [("d/kernel:0", np.full((4, 3), kernel))]
    return old_files.parallel_full(
        tmp_path / "old.h5", old_files.sequential([layer], (None, 4)), weights
    )


def kernel_in(path):
    with (
        zipfile.ZipFile(path) as archive,
        archive.open("model.weights.h5") as inner,
        h5py.File(inner) as handle,
    ):
        return handle["layers/dense/vars/0"][()]


def test_float64_weights_stay_float64(tmp_path):
    report = lockstep.rescue(floats(tmp_path, "float64", 1 + 1e-12), tmp_path / "new.keras")
    assert [(row.equal, row.converted) for row in report.rows] == [(True, False)]
    assert kernel_in(tmp_path / "new.keras").dtype == "float64"
    assert (kernel_in(tmp_path / "new.keras") == 1 + 1e-12).all()


def test_weights_that_are_rounded_are_not_called_equal(tmp_path):
    report = lockstep.rescue(floats(tmp_path, "float32", 1 + 1e-12), tmp_path / "new.keras")
    assert [row.equal for row in report.rows] == [False]
    assert any("1 of 1 array rounded" in note for note in report.notes)
    assert (kernel_in(tmp_path / "new.keras") == np.float32(1)).all()


def test_numbers_beyond_the_dtype_are_refused(tmp_path):
    with pytest.raises(WeightsDoNotFit, match="1e\\+300 as float64"):
        lockstep.rescue(floats(tmp_path, "float32", 1e300), tmp_path / "new.keras")
    assert not (tmp_path / "new.keras").exists()
