"""With sharded state each device has a shard of each variable; the numbers are those of one device.

What is of one engine is in `tests/conformance/test_sharded_state.py` (arrays and programs of JAX)
and `tests/torch/test_on_sharded_state.py` (code in PyTorch, gathers, processes).
"""

import copy
import pickle
import sys
from math import prod

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.errors import DeviceError, LayoutConflict, NothingToDoWarning, UnsupportedModel
from tests.agreement import assert_equal, both, seeded, values
from tests.conftest import BACKEND
from tests.every_backend.sharded_models import (
    SAMPLE,
    assert_in_shards,
    assert_trained_alike,
    compiled,
    data,
    fit,
    held,
    is_in_shards,
    is_plain,
    later,
    mlp,
    pair,
    variables,
)
from tests.tiers import further, quick_on, rest


@pytest.fixture(autouse=True)
def _small_variables_are_sharded(monkeypatch):
    monkeypatch.setattr(sys.modules["lockstep.core.devices"], "SHARDED_FROM", 0)


# ------------------------------------------------------------------ the numbers of one device

IN_QUICK = {
    "jax": [],  # `test_sharded_cases.py` has some, in float64
    "torch": [("mlp", "AdamW"), ("transformer", "LAMB"), ("recurrent", "global norm"),
              ("convolutions", "Muon"), ("lora", "AdamW"), ("mlp", "Adafactor")],
}[BACKEND]  # fmt: skip
OTHERS = [each for each in SAMPLE if each not in IN_QUICK]
if BACKEND == "jax":
    # The gradient of the bias of keys is zero. In float32, Muon makes an update of its rounding.
    OTHERS.remove(("transformer", "Muon"))


@pytest.mark.parametrize(
    ("name", "optimizer"), [*IN_QUICK, *(rest if BACKEND == "jax" else further)(*OTHERS)]
)
def test_training_equals_one_device(name, optimizer):
    one, many = pair(lambda: compiled(name, optimizer))
    assert_trained_alike(one, many, name)


class SizeOfKernel(keras.metrics.Mean):
    """A metric that reads a weight. On PyTorch the first process alone computes it."""

    def __init__(self, kernel, **kwargs):
        super().__init__(**kwargs)
        self.kernel = kernel

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(keras.ops.mean(keras.ops.abs(self.kernel)))


class Scaled(layers.Layer):
    """A layer of the user's own: PyTorch compares its first step with one device."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones")

    def call(self, x):
        return x * self.scale


class WithWholeVariables(keras.optimizers.Adam):
    """An update of the user's own, which looks at the whole variable."""

    def update_step(self, gradient, variable, learning_rate):
        size = keras.ops.max(keras.ops.abs(variable), axis=-1, keepdims=True)
        super().update_step(gradient * size, variable, learning_rate)


@quick_on("torch")
def test_code_of_the_user_sees_whole_values():
    """In a metric, in a layer beside a frozen one, and in an optimizer."""

    def build():
        inner = [layers.Dense(12), Scaled(), layers.Dense(3)]
        model = keras.Sequential([keras.Input((13,)), *inner])
        model.layers[0].trainable = False
        metrics = [SizeOfKernel(model.layers[2].kernel, name="size")]
        if BACKEND == "jax":  # where Keras's own step cannot have such a metric
            metrics = ["mae"]
        model.compile(WithWholeVariables(0.01), "mse", metrics=metrics)
        return model

    one, many = pair(build)
    assert_trained_alike(one, many)
    assert all(map(is_in_shards, [many.layers[1].scale, many.layers[2].kernel]))


@quick_on("torch")
def test_gradients_that_are_not_finite_in_one_part_alone_drop_the_step():
    def build():
        model = keras.Sequential([keras.Input((12,)), layers.Dense(4)])
        inner = keras.optimizers.SGD(0.01)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**40)
        model.compile(optimizer, "mae")
        return model

    one, many = pair(build)
    x = np.random.default_rng(5).normal(size=(12, 12))
    x[:, 0] = 1e300 if BACKEND == "torch" else 1e35
    for model in (one, many):  # the gradient of the first row of the kernel, in the first shard
        model.fit(x, x[:, 1:5], verbose=0)
    assert float(many.optimizer.dynamic_scale) == 2.0**39
    assert_equal(one, many)


@quick_on("torch")
def test_statistics_adapted_in_shards_are_those_of_one_device(monkeypatch):
    monkeypatch.setattr(sys.modules["lockstep.core.devices"], "SHARDED_FROM", 16)
    x = np.random.default_rng(0).normal(size=(8, 5, 6))

    def build():
        normalization = layers.Normalization(axis=(1, 2))
        normalization.adapt(x)
        made = [keras.Input((5, 6)), normalization, layers.Flatten(), layers.Dense(3)]
        made = keras.Sequential(made)
        made.compile("adam", "mse")
        return made

    def in_shards():
        with lockstep.sharded(3):
            return build()

    one, many = seeded(build), lockstep.distribute(seeded(in_shards), 3, state="sharded")
    for model in (one, many):
        model.fit(x, np.ones((8, 3)), batch_size=3, epochs=2, verbose=0, shuffle=False)
    assert_equal(one, many)


# --------------------------------------------------------------------- what a device holds


def test_a_device_has_its_share_after_any_call(tmp_path):
    one, many = pair()
    if BACKEND == "jax":  # on PyTorch the first step puts the slots into shards
        many.optimizer.build(many.trainable_variables)
        assert_in_shards(many)
    fit(one)
    fit(many, validation_data=data(rows=7))
    assert_in_shards(many)
    many.save(tmp_path / "a.keras")
    many.load_weights(tmp_path / "a.keras")
    for model in (one, many):
        model.set_weights([value + 1 for value in model.get_weights()])
    assert_in_shards(many)
    assert_equal(one, many)
    for variable in variables(many):
        variable.assign(np.full(variable.shape, 3, variable.dtype))
        assert np.all(keras.ops.convert_to_numpy(variable.value) == 3)
        assert (variable + 1).shape == variable.shape
    assert_in_shards(many)


def test_variables_below_64_kib_are_whole(monkeypatch):
    monkeypatch.undo()
    sizes = (66, 123) if BACKEND == "torch" else (129, 126)  # of 8 bytes, or of 4
    model = keras.Sequential([keras.Input((128,)), *map(layers.Dense, sizes)])
    lockstep.distribute(model, 3, state="sharded")
    assert [is_in_shards(variable) for variable in model.variables] == [True, *[False] * 3]
    assert {*held(model.variables[:1])} == {128 * sizes[0] / 3}


def test_variables_of_rnns_and_metrics_are_whole():
    inner = [layers.Bidirectional(layers.LSTM(6)), layers.Dense(6, "sigmoid")]
    model = keras.Sequential([keras.Input((5, 6)), *inner])
    model.compile("adam", "mse", metrics=[keras.metrics.AUC(num_thresholds=6)])
    lockstep.distribute(model, 3, state="sharded")
    model.fit(np.ones((6, 5, 6)), np.ones((6, 6)), verbose=0)
    slots = [slot for slot in model.optimizer.variables if "_dense_" in slot.path]
    assert len(slots) == 4
    split = [variable for variable in variables(model) if is_in_shards(variable)]
    assert list(map(id, split)) == list(map(id, [*model.layers[-1].variables, *slots]))


def test_verify():
    model = compiled()
    found = lockstep.verify(model, data(), devices=3, steps=2, batch_size=10, state="sharded")
    assert found.verdict == "equal"


def test_the_first_line_of_fit_and_placement_give_the_state_of_a_device(capsys):
    model = keras.Sequential([keras.Input((12,)), layers.Dense(12000)])
    model.compile("sgd", "mse")
    lockstep.distribute(model, 3, state="sharded")
    model.fit(np.ones((3, 12)), np.ones((3, 12000)), verbose=2)
    bytes_here = (8 if BACKEND == "torch" else 4) * 13 * 12000 // 3
    sizes = f"{bytes_here / 1e6:.1f} of {3 * bytes_here / 1e6:.1f}"
    assert f", state sharded: {sizes} MB each\n" in capsys.readouterr().out
    assert held(model.variables)[0] == 13 * 12000 / 3
    shown = str(lockstep.placement(model))
    assert "variables in shards" in shown
    assert f"{bytes_here:,}" in shown


def test_one_device_has_the_whole_state_and_a_warning_says_so():
    with pytest.warns(NothingToDoWarning, match="no effect on one device: cpu:0 has the whole"):
        model = lockstep.distribute(compiled(), 1, state="sharded")
    assert not any(map(is_in_shards, model.variables))


# ------------------------------------------------------------- files, copies, other layouts


def test_files_and_copies_are_those_of_one_device(tmp_path):
    one, many = models = pair()
    for model, folder in zip(models, (tmp_path / "one", tmp_path / "many"), strict=True):
        folder.mkdir()
        fit(model, callbacks=[keras.callbacks.ModelCheckpoint(folder / "checkpoint.keras")])
        model.save_weights(folder / "some.weights.h5")
    loaded = keras.models.load_model(tmp_path / "many" / "checkpoint.keras")
    assert_equal(one, loaded)
    one.load_weights(tmp_path / "many" / "some.weights.h5")
    assert_equal(one.get_weights(), many.get_weights())
    for copied in (loaded, pickle.loads(pickle.dumps(many)), keras.models.clone_model(many)):
        assert all(map(is_plain, copied.variables))
    kernel = many.layers[1].kernel
    for copied in (pickle.loads(pickle.dumps(kernel)), copy.deepcopy(kernel), copy.copy(kernel)):
        assert is_plain(copied)
        assert_equal(values_of(copied), values_of(kernel), 0)
    assert_in_shards(many)


def values_of(variable):
    return keras.ops.convert_to_numpy(variable.value)


def test_a_model_moves_between_layouts_and_back_to_keras():
    one, many = pair()
    assert_equal(fit(one), fit(many))
    for devices, state in ((3, "replicated"), (2, "sharded")):
        lockstep.distribute(many, devices, state=state)
        assert_equal(fit(one), fit(many))
    lockstep.release(many)
    assert all(map(is_plain, variables(many)))
    if BACKEND == "jax":
        assert {len(variable.value.devices()) for variable in variables(many)} == {1}
    else:
        assert {id(p) for p in many.parameters()} <= {id(v.value) for v in many.variables}
    assert_equal(fit(one), fit(many))
    assert_equal(one, many)


SHARDS, REPLICAS = "sharded", "replicated"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((3, SHARDS), (1, REPLICAS)),
        *further(((2, REPLICAS), (3, SHARDS)), ((3, SHARDS), (2, REPLICAS))),
        *rest(((3, SHARDS), (2, SHARDS))),
    ],
)
@pytest.mark.parametrize("verbose", [0, *further(2)])
def test_a_checkpoint_resumes_with_another_layout(tmp_path, first, second, verbose):
    """However the optimizer was built: by a first step, or with the model."""
    one = seeded(lambda: compiled(optimizer="Nadam"))
    fit(one, epochs=2)
    for (devices, state), epochs in ((first, 1), (second, 2)):
        _, many = both(lambda: compiled(optimizer="Nadam"), devices, state=state)
        run = [lockstep.Checkpoint(tmp_path / "run")]
        fit(many, epochs=epochs, callbacks=run, verbose=verbose)
    assert_equal(one, many)


@quick_on("torch")
def test_callbacks_and_calls_between_steps_see_whole_values():
    seen = []

    class Halves(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            kernel = self.model.layers[1].kernel
            seen.append(values_of(kernel).copy())
            kernel.assign(kernel * 0.5)

    one, many = pair()
    for model in (one, many):
        fit(model, callbacks=[Halves()])
        model.train_on_batch(*data(rows=5))
        seen.append(keras.ops.convert_to_numpy(model(data(rows=4)[0])))
    assert_equal(seen[: len(seen) // 2], seen[len(seen) // 2 :])
    assert_equal(one, many)


@quick_on("torch")
def test_a_model_that_is_built_and_compiled_later():
    one, many = pair(later)
    for model in (one, many):
        fit(model)
    assert is_in_shards(many.layers[1].kernel)
    (before,) = [slot for slot in many.optimizer.variables if "bias_momentum" in slot.path][:1]
    for model in (one, many):
        model.layers[1].trainable = False
        model.compile(keras.optimizers.Adam(0.01), "mae")
        model.train_on_batch(*data(rows=8))
        fit(model)
    assert_equal(one, many)
    if BACKEND == "torch":  # whose other processes have dropped their parts
        with pytest.raises(UnsupportedModel, match="belonged to 'sequential' when its state"):
            before.numpy()
    lockstep.release(many)
    assert_equal(one, many)


# ----------------------------------------------------------------- built and loaded in shards


@pytest.mark.parametrize(("name", "optimizer"), [("mlp", "AdamW"), *further(("recurrent", "LAMB"))])
def test_a_model_is_built_and_loaded_in_shards(name, optimizer, tmp_path):
    def in_shards():
        with lockstep.sharded(3):
            return compiled(name, optimizer)

    one, many = seeded(lambda: compiled(name, optimizer)), seeded(in_shards)
    assert_equal(one.get_weights(), many.get_weights(), 0)
    before = {id(v): (held([v]), v.value) for v in many.variables if is_in_shards(v)}
    lockstep.distribute(many, 3, state="sharded")
    split = [variable for variable in many.variables if is_in_shards(variable)]
    assert len(split) >= 3
    for variable in split:
        share = prod(variable.shape) / 3
        there, array = before[id(variable)]
        if BACKEND == "torch":  # it was on the host until there are other processes
            assert there == [0]
            assert share <= held([variable])[0] <= share + 1
        else:  # nothing has moved
            assert {*there} == {share}
            assert variable.value is array
    assert_equal(one.get_weights(), many.get_weights(), 0)
    assert_trained_alike(one, many, name)
    recurrent = [layer for layer in many.layers if isinstance(layer, layers.Bidirectional)]
    assert all(is_plain(variable) for layer in recurrent for variable in layer.variables)

    one.save(tmp_path / "one.keras")
    with lockstep.sharded(2):
        loaded = keras.models.load_model(tmp_path / "one.keras")
        loaded.load_weights(tmp_path / "one.keras")
    assert_equal(values(one), values(loaded), 0)
    loaded.layers[-1].bias.assign(one.layers[-1].bias)
    loaded.set_weights(many.get_weights())
    for state in (REPLICAS, SHARDS):
        lockstep.distribute(loaded, 3, state=state)
        assert_equal(fit(one, name=name), fit(loaded, name=name))
    lockstep.release(loaded)
    assert all(map(is_plain, variables(loaded)))
    assert_equal(one, loaded)


# ------------------------------------------------------------------------- what is refused


def test_a_variable_has_one_layout():
    _, many = pair()
    other, x = keras.Sequential([keras.Input((37,)), many.layers[1]]), np.ones((5, 37))

    def assert_predicts():
        found = keras.ops.convert_to_numpy(other(x))
        assert_equal(other.predict(x, verbose=0), found)

    assert_predicts()
    with pytest.raises(LayoutConflict, match=r"with state in shards\.\n.*the same devices"):
        lockstep.distribute(other, 3)
    if BACKEND == "jax":
        lockstep.distribute(other, 3, state="sharded")
    else:
        with pytest.raises(LayoutConflict, match=r"with state in shards\.\n.*models replicated"):
            lockstep.distribute(other, 3, state="sharded")
    lockstep.release(many)
    assert_predicts()
    if BACKEND == "torch":
        lockstep.distribute(other, 3)
        lockstep.distribute(many, 3, state="sharded")
        with pytest.raises(UnsupportedModel, match="shares variables with another model"):
            other.predict(x, verbose=0)
        fit(many)


def test_an_unknown_state():
    for call in (
        lockstep.distribute,
        lambda made, n, state: lockstep.verify(made, data(), n, state=state),
    ):
        with pytest.raises(DeviceError, match="state='shared' was given, but the state must be \""):
            call(mlp(), 2, state="shared")


def test_a_model_with_placed_layers_cannot_be_sharded():
    made = lockstep.place(mlp(), {"dense*": "cpu:1"})
    with pytest.raises(LayoutConflict, match="has layers on several devices"):
        lockstep.distribute(made, 3, state="sharded")
