"""A model gets on devices and off again, or it is as it was."""

import functools

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.attach.attachment import session_of
from lockstep.core.layout import DataParallel
from lockstep.engines import current_engine
from lockstep.errors import UnsupportedBackend, UnsupportedModel


def chain():
    keras.utils.set_random_seed(3)
    made = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(1)])
    made.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    return made


def fit(model):
    x = np.random.default_rng(0).normal(size=(14, 4)).astype("float32")
    model.fit(x, x[:, :1], batch_size=4, epochs=2, shuffle=False, verbose=0)
    return [*model.get_weights(), *map(np.array, model.optimizer.variables[:1])]


def devices_of(model):
    session = session_of(model)
    return None if session is None else session.devices


def assert_same(one, other):
    for mine, its in zip(one, other, strict=True):
        np.testing.assert_allclose(mine, its, atol=1e-6)


@pytest.mark.parametrize("name", ["make_train_function", "make_predict_function"])
def test_a_maker_of_the_users_own_is_refused(name):
    """TensorFlow and PyTorch replaced it without a word."""
    model = chain()
    vars(model)[name] = lambda force=False: None
    with pytest.raises(UnsupportedModel, match=f"has its own {name}"):
        lockstep.distribute(model, 2)
    assert session_of(model) is None


def test_a_step_function_of_the_users_own_is_refused():
    model = chain()
    vars(model)["train_function"] = lambda iterator: {}
    with pytest.raises(UnsupportedModel, match="already has a custom train_function"):
        lockstep.distribute(model, 2)
    vars(model)["train_function"] = None
    lockstep.distribute(model, 2)
    assert_same(fit(model), fit(chain()))


def test_micro_batches_are_exact_or_refused():
    model = chain()
    before = set(vars(model))
    if keras.backend.backend() != "tensorflow":
        assert_same(fit(lockstep.distribute(model, 1, micro_batch_size=2)), fit(chain()))
        return
    with pytest.raises(UnsupportedBackend) as caught:
        lockstep.distribute(model, 1, micro_batch_size=2)
    assert str(caught.value) == (
        "micro_batch_size=2 was requested, but 'tensorflow' does not support micro-batches.\n"
        "Only JAX and PyTorch do.\n"
        "Set KERAS_BACKEND=jax before Keras is imported, or remove micro_batch_size."
    )
    assert set(vars(model)) == before
    assert session_of(model) is None


def test_a_model_that_keras_has_trained_is_attached_and_released():
    model, alone = chain(), chain()
    assert_same(fit(model), fit(alone))
    lockstep.distribute(model, 2)
    assert_same(fit(model), fit(alone))
    lockstep.release(model)
    assert not [name for name in vars(model) if "lockstep" in name]
    assert_same(fit(model), fit(alone))


@pytest.mark.each_value_once
@pytest.mark.parametrize("after", ["nothing", "open", "methods"])
@pytest.mark.parametrize("before", [None, 1])
def test_a_failure_while_it_gets_on_devices_leaves_it_as_it_was(monkeypatch, before, after):
    model, alone = chain(), chain()
    if before is not None:
        lockstep.distribute(model, before)
    assert_same(fit(model), fit(alone))
    names, devices = {*vars(model)}, devices_of(model)
    session = type(current_engine().session(model, DataParallel(("cpu:0", "cpu:1"))))
    step = "methods" if after == "methods" else "open"
    plain, failed = getattr(session, step), []

    def failing(self, *args):
        if failed:
            return plain(self, *args)
        failed.append(step)
        if after != "nothing":
            plain(self, *args)
        raise OSError("no more memory")

    monkeypatch.setattr(session, step, failing)
    with pytest.raises(OSError, match="no more memory"):
        lockstep.distribute(model, 2)
    assert {*vars(model)} == names
    assert devices_of(model) == devices
    assert_same(fit(model), fit(alone))
    lockstep.distribute(model, 2)
    assert len(session_of(model).devices) == 2
    assert_same(fit(model), fit(alone))


@pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")  # of PyTorch
def test_reset_states_sets_the_states_of_every_stateful_layer_to_zero():
    """Keras 3 has no such method of a model; the page of limits promises it on every backend."""
    inner = [layers.LSTM(3, stateful=True, return_sequences=True), layers.GRU(2, stateful=True)]
    model = keras.Sequential([keras.Input(batch_shape=(4, 5, 2)), *inner])
    lockstep.distribute(model, 2)
    x = np.random.default_rng(0).normal(size=(4, 5, 2)).astype("float32")
    first = model.predict(x, verbose=0)
    assert np.abs(model.predict(x, verbose=0) - first).max() > 1e-4, "the state goes on"
    model.reset_states()
    np.testing.assert_allclose(model.predict(x, verbose=0), first, atol=1e-6)


def test_tensorflow_has_no_state_in_shards():
    model = chain()

    def distribute():
        lockstep.distribute(model, 2, state="sharded")

    if keras.backend.backend() != "tensorflow":
        distribute()
        assert session_of(model).layout.state == "sharded"
        return

    def build():
        with lockstep.sharded(2):
            pass

    for call in (distribute, build):
        with pytest.raises(UnsupportedBackend, match='state="sharded" was requested') as refused:
            call()
        assert str(refused.value).count("\n") == 2
        assert str(refused.value).endswith("Run the same script with KERAS_BACKEND=jax.")
    assert session_of(model) is None


@pytest.mark.parametrize("name", ["fit", "save"])
def test_a_method_that_a_tool_replaces_on_the_class_later_is_called(name, monkeypatch, tmp_path):
    """As `mlflow.keras.autolog()` does; a logger that was switched on late logged nothing."""
    model, seen = lockstep.distribute(chain(), 2), []
    original = getattr(keras.Model, name)

    @functools.wraps(original)
    def logged(self, *args, **kwargs):
        seen.append(name)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(keras.Model, name, logged)
    again = fit(model)
    model.save(tmp_path / "model.keras")
    assert seen == [name]
    monkeypatch.undo()
    model.save(tmp_path / "model.keras")
    assert seen == [name]
    assert_same(again, fit(chain()))
    assert_same(fit(keras.models.load_model(tmp_path / "model.keras")), fit(model))
    lockstep.release(model)
    assert not {"fit", "save"} & {*vars(model)}
