"""Steps that are traced once: what is not traced, what changes between steps, and what is said.

`tests/every_backend/test_traced_cases.py` has the numbers of ordinary models.
"""

import json
import os
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import lockstep
from lockstep.attach.attachment import session_of
from lockstep.engines.torch.traced import gradients
from lockstep.engines.torch.traced.trace import TracedStep
from lockstep.errors import NotTracedWarning
from lockstep.tools.bench.measurement import measure
from tests.agreement import assert_equal, both

X = np.random.default_rng(0).normal(size=(22, 4))
Y = np.random.default_rng(1).normal(size=(22, 2))
FIT = {"batch_size": 8, "epochs": 3, "verbose": 0, "shuffle": False}
DEVICES = pytest.mark.parametrize("devices", [1, 3])


def network(*inside, optimizer="adam"):
    made = keras.Sequential([keras.Input((4,)), layers.Dense(5, activation="tanh"), *inside])
    made.add(layers.Dense(2))
    made.compile(optimizer, "mse", metrics=["mae"])
    return made


def fitted(build, devices, **options):
    """The same training by Keras alone and traced; the warnings of the second one."""
    one, many = both(build, devices)
    many.jit_compile = True
    histories = [one.fit(X, Y, **{**FIT, **options}).history]
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always", NotTracedWarning)
        histories.append(many.fit(X, Y, **{**FIT, **options}).history)
    assert_equal(histories[0], histories[1])
    assert_equal(one, many)
    return many, [str(each.message) for each in given if each.category is NotTracedWarning]


def traces(model):
    """How many graphs a model has."""
    return len(session_of(model)._plans._traces._traces)


@DEVICES
def test_a_step_is_traced_for_each_form_of_a_batch(devices):
    many, reasons = fitted(network, devices)
    assert not reasons
    assert traces(many) == 2  # batches of 8 rows and of 6


def test_nothing_is_traced_without_being_asked_for():
    _, many = both(network)
    many.fit(X, Y, **FIT)
    assert traces(many) == 0


@keras.saving.register_keras_serializable("traced")
class Reads(layers.Layer):
    """Scales by a value that Python reads."""

    def __init__(self, how, **options):
        super().__init__(**options)
        self.how = how

    def call(self, inputs):
        total = ops.sum(inputs)
        read = {
            "numpy": lambda: float(total.detach().numpy()),
            "bool": lambda: 2.0 if total > 0 else 3.0,
        }
        return inputs * (1 + 0.1 * read[self.how]())


@pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")
@pytest.mark.parametrize("how", ["numpy", "bool"])
def test_a_value_that_python_reads_keeps_a_step_from_being_traced(how):
    many, reasons = fitted(lambda: network(Reads(how)), 1)
    (reason,) = reasons
    assert "in the layer 'reads" in reason
    assert "test_on_traced_steps.py" in reason  # the line of the user's
    assert traces(many) == 0


def test_a_metric_and_an_optimizer_that_read_values_are_named():
    def build():
        made = network(optimizer="nadam")
        made.compile("nadam", "mse", metrics=[keras.metrics.BinaryIoU(name="iou")])
        return made

    many, (train,) = fitted(build, 1)
    assert "Python reads the value of a tensor in the optimizer 'nadam" in train
    with pytest.warns(NotTracedWarning, match="in the metric 'iou'"):
        many.evaluate(X, Y > 0, batch_size=11, verbose=0)


def test_a_trace_that_takes_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr(gradients, "LONGEST", -1.0)
    many, (reason,) = fitted(network, 1)
    assert "takes more than" in reason
    assert traces(many) == 0


@keras.saving.register_keras_serializable("traced")
class Counts(layers.Layer):
    """Scales by the number of calls, which Python counts."""

    def __init__(self, **options):
        super().__init__(**options)
        self.calls = 0

    def call(self, inputs):
        if not isinstance(inputs, keras.KerasTensor):
            self.calls += 1
        return inputs * (1 + self.calls)


def test_a_step_that_changes_a_state_of_python_is_not_traced():
    _, (reason,) = fitted(lambda: network(Counts()), 1)
    assert "changes something other" in reason


@keras.saving.register_keras_serializable("traced")
class Keeps(layers.Layer):
    """Scales by what the calls before have left, in a place that pickling does not show."""

    def __init__(self, how, **options):
        super().__init__(**options)
        self.how = how
        self.kept, self.filled = torch.ones(()), torch.ones(())

    def call(self, inputs):
        if torch.is_tensor(inputs) and inputs.device.type != "meta":
            getattr(self, self.how)()
        return inputs * self.kept * self.filled

    def assigned(self):
        self.kept = self.kept * 0.9

    def in_place(self):
        self.filled.mul_(0.9)


@pytest.mark.parametrize("how", ["assigned", "in_place"])
def test_a_step_that_keeps_a_tensor_is_not_traced_and_not_changed(how):
    _, (reason,) = fitted(lambda: network(Keeps(how)), 1)
    assert "changes something other" in reason


@keras.saving.register_keras_serializable("traced")
class Branches(layers.Layer):
    """Takes a branch whose other one has no finite gradient."""

    def call(self, inputs):
        total = ops.sum(inputs)
        return inputs * ops.cond(total > 0, lambda: ops.sqrt(total), lambda: 0.1 * total)


@pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")
def test_gradients_through_a_branch_are_those_of_the_branch_that_runs():
    _, (reason,) = fitted(lambda: network(Branches()), 1)
    assert "keras.ops.cond" in reason


@keras.saving.register_keras_serializable("traced")
def huge(y_true, y_pred):
    """A loss that overflows until its scale has become small."""
    return 1e3 * ops.mean(ops.square(ops.cast(y_true, y_pred.dtype) - y_pred), axis=-1)


def test_updates_that_a_loss_scale_leaves_out_are_left_out():
    def build():
        inner = keras.optimizers.Adam(0.01)
        made = keras.Sequential([keras.Input((4,)), layers.Dense(2, dtype="float32")])
        made.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**126), huge)
        return made

    many, reasons = fitted(build, 1, epochs=8)
    assert not reasons
    assert traces(many) == 2


class Hooks(keras.callbacks.Callback):
    """Halves the gradient of a weight from an epoch on."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.model.layers[0].kernel.value.register_hook(lambda gradient: gradient / 2)


def test_a_hook_on_a_weight_is_not_left_out():
    _, reasons = fitted(network, 1, callbacks=[Hooks()])
    assert any("hook" in reason for reason in reasons)


class Norms(keras.callbacks.Callback):
    """Notes the gradients that each batch has left."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        weights = self.model.trainable_weights
        self.found.append([float(weight.value.grad.abs().sum()) for weight in weights])


def test_gradients_are_left_in_the_weights():
    one, many = both(network, 1)
    many.jit_compile = True
    norms = []
    for model in (one, many):
        norms.append(Norms())
        model.fit(X, Y, **FIT, callbacks=[norms[-1]])
    assert_equal(norms[0].found, norms[1].found)


class Clocked(keras.Sequential):
    """A step whose log is a number of Python."""

    def train_step(self, data):
        return {**super().train_step(data), "constant": 7.0}


@pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")
def test_a_log_that_is_a_number_of_python_keeps_a_step_from_being_traced():
    def build():
        made = Clocked([keras.Input((4,)), layers.Dense(2)])
        made.compile("adam", "mse")
        return made

    _, (reason,) = fitted(build, 1)
    assert "Python number" in reason


@DEVICES
def test_data_that_change_an_attribute_between_steps_are_seen(devices):
    def run(model):
        def batches():
            for number in range(8):
                model.layers[1].rate = 1.0 + number // 2
                yield X[:8], Y[:8]

        return model.fit(batches(), steps_per_epoch=6, verbose=0, shuffle=False).history

    one, many = both(lambda: network(Scales()), devices)
    many.jit_compile = True
    assert_equal(run(one), run(many))
    assert_equal(one, many)


class Changes(keras.callbacks.Callback):
    """Changes attributes that steps read, between epochs."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.clipnorm = 0.01 * (epoch + 1)
        self.model.layers[1].rate = 0.5
        self.model.layers[0].trainable = epoch != 1


@DEVICES
def test_changes_between_epochs_are_traced_anew(devices):
    def build():
        return network(Scales())

    fitted(build, devices, callbacks=[Changes()])


@keras.saving.register_keras_serializable("traced")
class Scales(layers.Layer):
    """Scales by an attribute."""

    rate = 1.0

    def call(self, inputs):
        return inputs * self.rate


@keras.saving.register_keras_serializable("traced")
class TwoUpdates(keras.Model):
    """A step of the user's own with two backward passes, and a mean over the batch."""

    def __init__(self, **options):
        super().__init__(**options)
        self.one, self.other = layers.Dense(3), layers.Dense(2)
        self.second = keras.optimizers.SGD(0.01)

    def build(self, shape):
        self.one.build(shape)
        self.other.build((*shape[:-1], 3))

    def call(self, inputs):
        return self.other(self.one(inputs))

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        ops.mean(ops.square(self(x) - y)).backward()
        weights = self.one.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([each.value.grad for each in weights], weights)
        self.zero_grad()
        found = self(x)
        loss = ops.mean(ops.square(found - ops.mean(found, axis=0) - y))
        loss.backward()
        weights = self.other.trainable_weights
        with torch.no_grad():
            self.second.apply([each.value.grad for each in weights], weights)
        return {"loss": loss}


@pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")
@DEVICES
def test_a_step_of_the_users_own_is_traced(devices):
    def build():
        made = TwoUpdates()
        made.build((None, 4))
        made.compile(keras.optimizers.Adam(), "mse")
        made.optimizer.build(made.one.trainable_weights)
        made.second.build(made.other.trainable_weights)
        return made

    many, reasons = fitted(build, devices)
    assert not reasons
    assert traces(many) == 2


def test_an_error_in_the_data_leaves_the_model_of_the_last_step():
    def batches():
        yield X[:8], Y[:8]
        yield X[8:16], Y[8:16]
        yield X[:8], Y[:8]
        raise OSError("no disk")

    one, many = both(network, 3)
    many.jit_compile = True
    for model in (one, many):
        with pytest.raises(OSError, match="no disk"):
            model.fit(batches(), verbose=0, shuffle=False)
    assert_equal(one, many)


@DEVICES
def test_calls_on_batches_and_predictions_are_traced(devices):
    one, many = both(network, devices)
    many.jit_compile = True
    for _ in range(4):
        for name in ("train_on_batch", "test_on_batch"):
            assert_equal(getattr(one, name)(X, Y), getattr(many, name)(X, Y))
        assert_equal(one.predict_on_batch(X), many.predict_on_batch(X))
    assert_equal(one, many)
    assert traces(many) == 3


@pytest.mark.filterwarnings("ignore::lockstep.errors.NotTracedWarning")
def test_the_line_of_fit_says_so(capsys):
    _, many = both(network, 3)
    many.jit_compile = True
    many.fit(X, Y, batch_size=8, verbose=2)
    assert ", traced" in capsys.readouterr().out
    many.jit_compile = False
    lockstep.release(many)
    lockstep.distribute(many, 3, micro_batch_size=2)
    many.jit_compile = True
    many.fit(X, Y, batch_size=8, verbose=2)
    assert ", not traced" in capsys.readouterr().out


def test_a_graph_writes_into_no_tensor_of_the_model():
    made = network()
    batch = torch.tensor(X), torch.tensor(Y)
    made.train_step(batch)
    before = [variable.value.detach().clone() for variable in made.variables]
    step = TracedStep(made, "train", batch, None)
    computed = step.run(batch)
    assert_equal(before, [variable.value.detach() for variable in made.variables])
    computed.write()
    reference = network()
    reference.set_weights([each.numpy() for each in before[: len(reference.weights)]])
    assert any(
        not np.array_equal(variable.value.detach().numpy(), was.numpy())
        for variable, was in zip(made.variables, before, strict=True)
    )


SCRIPT = """
import json, sys
import keras, numpy as np
import lockstep
from lockstep.attach.attachment import session_of
from lockstep.engines.torch.ranks import traced_steps
from lockstep.engines.torch.traced import inductor, trace


class Later(inductor.Compilation):
    def __init__(self, module, inputs, ranks):
        self.program, self.end, self.asked = lambda *given: module(*given), lambda: None, 0

    def state(self):
        self.asked += 1
        return inductor.COMPILED if self.asked > 1 + rank else inductor.COMPILING


traced_steps._RUNS, trace.Compilation = 1, Later
rank = lockstep.initialize()[0] if sys.argv[1] == "several" else 0

keras.utils.set_random_seed(1)
inside = [keras.layers.Dropout(0.2)]
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5), *inside, keras.layers.Dense(2)])
model.compile("adam", "mse")
if sys.argv[1] == "several":
    lockstep.distribute(model)
    model.jit_compile = True
x, y = (np.random.default_rng(n).normal(size=(22, 4 - 2 * n)).astype("float32") for n in (0, 1))
losses = model.fit(x, y, batch_size=8, epochs=3, verbose=0).history["loss"]
if rank == 0:
    print("losses", json.dumps(losses))
if sys.argv[1] == "several":
    steps = session_of(model)._runner.rank.traces._steps.values()
    print("compiled", [step._program is not step._module for step in steps])
"""


def test_processes_of_a_launcher_trace_a_step_together(tmp_path):
    """They begin to run what was compiled at the same step, when the last of them has it."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("LOCKSTEP_")}
    found = []
    for run, how in ((["-m", "lockstep", "run", "--processes", "2"], "several"), ([], "one")):
        ended = subprocess.run(
            [sys.executable, *run, str(script), how],
            env={**kept, "LOCKSTEP_PATIENCE": "30"},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert ended.returncode == 0, ended.stderr[-2000:]
        (line,) = (each for each in ended.stdout.splitlines() if "losses" in each)
        # The other process may write on the same line.
        found.append(json.loads(line.partition("losses")[2].partition("]")[0] + "]"))
        assert "NotTracedWarning" not in ended.stderr
        if how == "several":
            assert ended.stdout.count("compiled [True, False]") == 2  # the last batches are few
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_training_goes_on_after_an_error_in_a_step():
    """The processes of the other devices are new then, and have no graphs: a KeyError."""

    def build():
        made = keras.Sequential([keras.Input((3,)), layers.Embedding(5, 4), layers.Flatten()])
        made.add(layers.Dense(2))
        made.compile("sgd", "mse")
        return made

    words = np.random.default_rng(0).integers(0, 5, size=(8, 3))
    wrong = words.copy()
    wrong[7] = 9
    one, many = both(build)
    many.jit_compile = True
    for given in (words, words, words, wrong, words, words, words):
        for model in (one, many):
            if given is wrong:
                with pytest.raises(IndexError):
                    model.train_on_batch(given, Y[:8])
            else:
                model.train_on_batch(given, Y[:8])
    assert_equal(one, many)
    assert traces(many) == 1


def test_bench_says_whether_steps_ran_as_graphs():
    for asked in (True, False):
        made = network()
        made.jit_compile = asked
        assert measure(made, (X, Y), 1, steps=4, rounds=1, batch_size=8).as_graphs == asked
        made.jit_compile = False  # else Keras's function is compiled
        lockstep.release(made)
