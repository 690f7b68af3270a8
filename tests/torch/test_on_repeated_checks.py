"""A change in Python that no list has is an error at the next comparison with one device."""

import functools
import os
import warnings
from contextlib import ExitStack

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops
from keras.src.backend.torch import numpy as backend_numpy
from torch.overrides import TorchFunctionMode

import lockstep
from lockstep.core.rank_waits import ANSWER, CALL, GATHER, NOTHING, parted
from lockstep.engines.replicas.repeated_checks import StepCounts
from lockstep.engines.replicas.sketches import is_about_to_overflow
from lockstep.errors import ProcessesDisagree, UnsplitBatchWarning, UnsupportedModel
from tests.agreement import assert_equal, both
from tests.precision import floats
from tests.tiers import further
from tests.torch import outside_state

OPTIONS = {"batch_size": 6, "shuffle": False, "verbose": 0}
NUMBERS = np.random.default_rng(0)
X, Y = NUMBERS.normal(size=(48, 4)), NUMBERS.normal(size=(48, 2))


def model_of(*more, loss="mse"):
    made = keras.Sequential(
        [keras.Input((4,)), layers.Dense(5, "tanh"), *more, layers.Dense(2, name="last")]
    )
    made.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss)
    return made


class Changes(keras.callbacks.Callback):
    """Changes something before one step, counted from 0."""

    def __init__(self, change, step=3):
        super().__init__()
        self.change, self.step = change, step

    def on_train_batch_begin(self, batch, logs=None):
        if batch == self.step:
            self.change()


QUICK = ["a class method", "a member of an enum"]

CHANGES = {
    "a class method": lambda patch: patch.setattr(
        outside_state.Options, "factor", classmethod(lambda cls: 2.0)
    ),
    "a member of an enum": lambda patch: patch.setattr(outside_state.Mode.ONE, "factor", 2.0),
    "a class of Keras": lambda patch: patch.setattr(layers.Dense, "scale_of_test", 2.0),
    "custom objects": lambda patch: patch.setitem(
        keras.saving.get_custom_objects(), "scale_of_test", 2.0
    ),
    "a global of two underscores": lambda patch: patch.setattr(outside_state, "__scale", 2.0),
}


@pytest.mark.parametrize(
    "kind", ["a member of an enum", *further(*list(CHANGES)[2:]), "a class method"]
)
def test_a_change_that_no_list_has_is_an_error_and_the_model_is_as_before(kind, monkeypatch):
    one, many = both(lambda: model_of(outside_state.Scaled(kind, name="scaled")))
    one.fit(X[:18], Y[:18], **OPTIONS)
    change = Changes(lambda: CHANGES[kind](monkeypatch))
    error = r"In train step 4 of this fit .* the output of '.*scaled' differs .* that agreed is 2\."
    with pytest.raises(ProcessesDisagree, match=error):
        many.fit(X, Y, callbacks=[change], **OPTIONS)
    assert_equal(one, many)
    lockstep.release(many)


def test_without_the_check_nothing_is_compared_again(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CHECK", "0")
    _, many = both(lambda: model_of(outside_state.Scaled("a class method")))
    change = Changes(lambda: CHANGES["a class method"](monkeypatch))
    many.fit(X, Y, callbacks=[change], **OPTIONS)
    lockstep.release(many)


def test_a_cache_that_a_worker_has_not_is_an_error_in_a_model_of_keras():
    settings = {"scale": 1.0}

    @functools.cache
    def scale():
        return settings["scale"]

    def scaled(y_true, y_pred):
        return scale() * ops.mean(ops.square(y_true - y_pred), axis=-1)

    _, many = both(lambda: model_of(loss=scaled))

    class Sends(Changes):
        """Lets the model be sent anew at each step, with an empty cache."""

        def on_train_batch_begin(self, batch, logs=None):
            self.model.steps = batch
            super().on_train_batch_begin(batch, logs)

    change = Sends(lambda: settings.update(scale=2.0), step=5)
    with pytest.raises(ProcessesDisagree, match=r"In train step 8 of this fit .* the gradient of"):
        many.fit(X, Y, callbacks=[change], **OPTIONS)
    lockstep.release(many)


def test_the_last_step_of_an_epoch_is_compared_where_code_of_the_user_runs(tmp_path):
    """No callback runs between two steps, and a file is there from the begin of an epoch on."""
    path = str(tmp_path / "there")
    one, many = both(lambda: model_of(outside_state.ReadsFile(path, name="reads")))
    one.fit(X, Y, **OPTIONS)
    many.fit(X, Y, **OPTIONS)
    assert_equal(one, many)

    there = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: open(path, "w").close())
    with pytest.raises(ProcessesDisagree, match=r"After train step 8 of this fit .*reads"):
        many.fit(X, Y, callbacks=[there], **OPTIONS)
    lockstep.release(many)


def test_the_step_that_first_sees_a_change_is_proved_and_compared(monkeypatch):
    one, many = both(lambda: model_of(outside_state.Center(name="center")))
    change = Changes(lambda: monkeypatch.setattr(outside_state, "CENTER", True))
    expected = one.fit(X, Y, callbacks=[change], **OPTIONS).history
    monkeypatch.setattr(outside_state, "CENTER", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnsplitBatchWarning)
        found = many.fit(X, Y, callbacks=[change], **OPTIONS).history
    assert_equal(expected, found)
    assert_equal(one, many)
    (said,) = [str(each.message) for each in caught if "'center'" in str(each.message)]
    assert "exact" not in said
    lockstep.release(many)


def _quantized(x1, x2):
    """Multiply, and round with one scale for the whole tensor."""
    product = torch.matmul(x1, x2)
    scale = product.detach().abs().max() / 7
    return product + (torch.round(product / scale) * scale - product).detach()


@pytest.mark.filterwarnings("ignore:On PyTorch every device runs 'dense")
def test_a_function_of_keras_that_a_script_replaces_is_compared(monkeypatch):
    monkeypatch.setattr(backend_numpy, "matmul", _quantized)
    one, many = both(model_of)
    assert_equal(one.fit(X, Y, **OPTIONS).history, many.fit(X, Y, **OPTIONS).history)
    assert_equal(one, many)
    lockstep.release(many)


@pytest.mark.filterwarnings("ignore:On PyTorch")
def test_a_function_of_pytorch_that_a_script_replaces_is_compared(monkeypatch):
    """No callback runs, and the model has layers of Keras alone. Workers do not get it."""
    plain = torch.tanh
    monkeypatch.setattr(torch, "tanh", lambda x: plain(x - x.mean(0)))
    one, many = both(model_of)
    assert_equal(one.fit(X, Y, **OPTIONS).history, many.fit(X, Y, **OPTIONS).history)
    assert_equal(one, many)
    lockstep.release(many)


FOUND = {"calls": 0}


class Remembers(layers.Layer):
    """Mixes the rows, and counts its calls in a module."""

    def call(self, x):
        FOUND["calls"] += 1
        return x - ops.mean(x, axis=0)


def test_code_of_the_user_that_runs_whole_is_not_said_to_be_exact():
    _, many = both(lambda: model_of(Remembers(name="remembers")))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnsplitBatchWarning)
        many.fit(X, Y, **OPTIONS)
    (said,) = [str(each.message) for each in caught if "'remembers'" in str(each.message)]
    assert "Its first step agrees with one device." in said
    assert "exact" not in said
    lockstep.release(many)


def test_a_long_loop_is_compared_again_and_again():
    steps = StepCounts(call="train_on_batch", calls=1)
    due = []
    for steps.number in range(1, 1100):
        due += [steps.number] if steps.are_due() else []
    assert due == [2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024]


def test_a_training_that_explodes_is_no_alarm():
    """Squares of what a batch norm is given overflow on one device, and on several they do not."""
    big = {"output/000/0/big": np.array([[3e19, 1.0, 1.0, 2.0]])}
    assert is_about_to_overflow(big)
    assert is_about_to_overflow({"output/000/0/big": np.array([[np.nan, 1.0, 1.0, 2.0]])})
    assert not is_about_to_overflow({"output/000/0/small": np.array([[3.0, 1.0, 1.0, 2.0]])})


class Rounds(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return torch.round(found * 16) / 16 if func in (torch.tanh, torch.Tensor.tanh) else found


def _hook(module, inputs, output):
    return output * 1.5 if isinstance(module, layers.Dense) else None


AROUND = {
    "Rounds, a mode of PyTorch": Rounds,
    "a global PyTorch module hook": lambda: torch.nn.modules.module.register_module_forward_hook(
        _hook
    ),
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.round(decimals=1) if tensor.is_floating_point() else tensor,
        lambda tensor: tensor,
    ),
}


@pytest.mark.parametrize("later", [False, *further(True)])
@pytest.mark.parametrize("kind", AROUND)
def test_one_device_runs_a_batch_with_code_around_every_operation(kind, later):
    """The code comes from a callback, or is there before the call."""
    found = []
    for made in both(model_of):
        with ExitStack() as stack, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UnsplitBatchWarning)
            change = Changes(lambda: stack.enter_context(_context(AROUND[kind]())), 3 * later)
            found.append(made.fit(X, Y, callbacks=[change], **OPTIONS).history)
        said = [str(each.message) for each in caught]
    assert_equal(*found)
    assert any(kind in each and "only the first device runs" in each for each in said), said
    lockstep.release(made)


def _context(made):
    if hasattr(made, "remove"):
        stack = ExitStack()
        stack.callback(made.remove)
        return stack
    return made


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("step", [0, *further(3)])
def test_anomalies_are_looked_for_on_every_device(step):
    one, many = both(model_of)
    expected = one.fit(X, Y, **OPTIONS).history
    try:
        change = Changes(lambda: torch.autograd.set_detect_anomaly(True), step)
        assert_equal(expected, many.fit(X, Y, callbacks=[change], **OPTIONS).history)
    finally:
        torch.autograd.set_detect_anomaly(False)
    many.fit(X, Y, **OPTIONS)
    lockstep.release(many)


class Noise(layers.Layer):
    """Draws without a seed."""

    def call(self, x):
        return x + 0.1 * keras.random.normal(ops.shape(x), dtype=x.dtype)


@pytest.mark.filterwarnings("ignore:On PyTorch every device runs 'noise'")
def test_draws_without_a_seed_are_those_of_one_device():
    found = []
    for made in both(lambda: model_of(Noise(name="noise")), same_random_numbers=True):
        keras.utils.clear_session(free_memory=False)  # Keras's generator begins anew
        keras.utils.set_random_seed(5)
        found.append(made.fit(X, Y, **OPTIONS).history)
    assert_equal(*found)
    lockstep.release(made)


def test_draws_without_a_seed_are_refused_in_a_layer_that_is_declared_row_wise():
    _, many = both(lambda: model_of(lockstep.rowwise(Noise())), same_random_numbers=True)
    before = many.get_weights()
    with pytest.raises(UnsupportedModel, match=r"numbers\nwithout a seed, such as keras.random"):
        many.fit(X, Y, **OPTIONS)
    assert_equal(before, many.get_weights())
    lockstep.release(many)


def test_a_log_of_time_is_no_alarm():
    """No weight depends on a log that is not the same twice."""

    class Timed(keras.metrics.Mean):
        def update_state(self, y_true, y_pred, sample_weight=None):
            super().update_state(y_pred)

        def result(self):
            return super().result() * 0 + os.times().elapsed

    def build():
        made = model_of()
        made.compile(keras.optimizers.SGD(0.05), "mse", metrics=[Timed(name="time")])
        return made

    one, many = both(build)
    a, b = (made.fit(X, Y, **OPTIONS).history for made in (one, many))
    assert_equal(a["loss"], b["loss"])
    assert_equal(one, many)
    lockstep.release(many)


def test_rounding_that_a_layer_enlarges_is_no_alarm():
    """Keras takes the mean of squares minus the squared mean, which has no digits left here."""

    def build():
        made = keras.Sequential(
            [keras.Input((4,)), layers.BatchNormalization(), layers.Dense(2, name="last")]
        )
        made.compile(keras.optimizers.SGD(0.05), "mse")
        return made

    with floats("float32"):
        _, many = both(build)
        far = X.astype("float32") + 3000
        many.fit(far, Y, callbacks=[Changes(lambda: None)], **OPTIONS)
    assert many.layers[0].compute_dtype == "float32"
    lockstep.release(many)


def test_ranks_that_wait_for_different_things_are_told_apart():
    assert parted(((3, GATHER, 48), (2, GATHER, 48))) is None
    assert parted(((3, GATHER, 48), (2, NOTHING, 0))) is None
    found = parted(((3, ANSWER, 0), (2, CALL, 0)))
    assert found == ("for an answer", 1, "for its next call")


def test_ranks_that_wait_in_different_exchanges_end_in_words(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_PATIENCE", "1")
    one, many = both(model_of, devices=2)
    many.predict(X, verbose=0)

    class Gathers(keras.callbacks.Callback):
        """Lets the first device gather, and nobody else."""

        def on_train_batch_begin(self, batch, logs=None):
            peers = self.model._lockstep.session._peers
            with peers.connected():
                peers.rank.group.gather(torch.zeros(2, 3), (2, 2))

    with pytest.raises(UnsupportedModel, match="For 1 seconds, the first device waits to gather"):
        many.fit(X, Y, callbacks=[Gathers()], **OPTIONS)
    assert_equal(one.get_weights(), many.get_weights())
    assert_equal(one.predict(X, verbose=0), many.predict(X, verbose=0))
    lockstep.release(many)
