"""`verify` passes what is right, and names what is wrong."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import threading
import types
import warnings

import cloudpickle
import keras
import numpy as np
import pytest
import scipy.sparse
from click.testing import CliRunner
from keras import layers
from rich.console import Console

import lockstep
from lockstep.attach.attachment import session_of
from lockstep.cli import main
from lockstep.errors import DeviceError, TargetNotFound, UnsupportedBackend, UnusableData
from lockstep.keras_compat import double_precision
from lockstep.tools.targets import model_and_data
from lockstep.tools.verify import comparison, float64
from lockstep.tools.verify.verification import Difference, Verification
from tests.conformance.common import devices_of, distances, snapshot
from tests.processes.common import warm_end
from tests.tiers import rest


def data(rows=70):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 6)).astype("float32"), rng.normal(size=(rows, 1)).astype(
        "float32"
    )


def with_layer(*between, optimizer="sgd"):
    keras.utils.set_random_seed(0)
    made = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="gelu", name="first")])
    for layer in between:
        made.add(layer)
    made.add(layers.Dense(1, name="last"))
    made.compile(optimizer, "mse", metrics=["mae"])
    return made


def with_a_gradient_of_zero(*between):
    """Batch norm takes the mean away again; Adam makes steps of what rounding leaves of a bias."""
    zero = layers.Dense(8, name="zero")
    return with_layer(zero, layers.BatchNormalization(), *between, optimizer="adam")


@pytest.mark.thorough
def test_what_float64_shows_to_be_rounding_is_said_to_be_rounding():
    found = lockstep.verify(with_a_gradient_of_zero(), data(), devices=4, batch_size=10)
    assert found.equal, found.cause
    beyond = {d.name: d.largest for d in found.differences if d.first_step is not None}
    assert any(name.endswith("zero/bias") for name in beyond)
    assert "loss" not in beyond
    assert found.rounding == max(beyond.values()) > 1e-5
    assert "4 devices give the same results as one device: in float64 to 1e-10." in str(found)
    assert f"by up to {found.rounding:.1e}, which is rounding." in str(found)


class Pulls(layers.Layer):
    """On several devices, gives another layer's beta a gradient, and changes no output."""

    model = None

    def __init__(self, other, **kwargs):
        super().__init__(**kwargs)
        self.other = other

    def call(self, x):
        if self.model is not None and any("lockstep" in name for name in vars(self.model)):
            beta = self.other.beta
            x = x + 1e-5 * keras.ops.sum(beta - keras.ops.stop_gradient(beta))
        return x


@pytest.mark.parametrize("fault", [None, "lost", *rest("kept")])
def test_variables_without_a_gradient_are_named_apart_and_faults_are_not(fault, monkeypatch):
    """The second batch norm removes the first beta; Lion moves it by the sign of rounding.

    MobileNetV2 was said to differ. A fault of a beta that is kept, and one that gives the lost beta
    a gradient on several devices, are found.
    """
    keras.utils.clear_session(free_memory=False)
    norms = {name: layers.BatchNormalization(name=name) for name in ("lost", "kept")}
    between = [norms["lost"], layers.Dense(8, use_bias=False), norms["kept"]]
    made = with_layer(*between, Pulls(norms[fault or "lost"]), optimizer=keras.optimizers.Lion(0.1))
    made.layers[0].use_bias = False
    if fault:
        monkeypatch.setattr(Pulls, "model", made)
    found = lockstep.verify(made, data(), devices=2, steps=3, batch_size=20)
    if fault:
        assert (found.verdict, found.zero_gradients) == ("different", ()), found.cause
        assert any(re.search(f"{fault}.beta", d.name) for d in found.differences if d.first_step)
        return
    assert found.equal, found.cause
    assert found.zero_gradients == ("sequential/lost/beta",)
    assert "sequential/kept/moving_mean" in found.behind_zero_gradients
    assert "in each step from the same weights, except for 1 variable whose gradient" in str(found)
    console = Console(file=io.StringIO(), width=200)
    found.show(console)
    assert "gradient that is zero up to rounding, and the optimizer" in console.file.getvalue()


def test_a_module_of_two_names_is_sent_by_value_once(monkeypatch, tmp_path):
    """multiprocessing keeps `__main__` as `__mp_main__` too: a console script had no verdict."""
    module = types.ModuleType("mine")
    module.__file__ = str(tmp_path / "mine.py")
    for name in ("mine", "__mp_mine__"):
        monkeypatch.setitem(sys.modules, name, module)
    with float64._own_code_by_value():
        assert "mine" in cloudpickle.list_registry_pickle_by_value()
    assert "mine" not in cloudpickle.list_registry_pickle_by_value()


@pytest.fixture(scope="module")
def verified():
    """One comparison of a right model: its result, the steps that were read, and its lines."""
    read, steps = comparison._read, []
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as said:
        patch.setattr(comparison, "_read", lambda file: steps.append(file.stem) or read(file))
        found = lockstep.verify(with_layer(), data(96), devices=2, steps=3)
    return found, steps, said.getvalue().splitlines()


def test_each_step_is_read_once_and_each_run_is_a_line(verified):
    """It was read once for each variable. In a pipe, nothing was printed for minutes."""
    found, steps, said = verified
    assert found.equal
    assert steps == ["1", "2", "3"]
    assert said == ["one device ...", "2 devices ..."]


@pytest.mark.whole
def test_half_precision_is_compared_in_float64_with_dropout_too():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        made = with_layer(layers.Dropout(0.2), layers.Dense(8, activation="gelu"))
    finally:
        keras.config.set_dtype_policy(before)
    found = lockstep.verify(made, data(), devices=4, steps=4, batch_size=9)
    assert found.equal, found.cause
    assert found.rounding > 1e-5
    assert made.layers[0].dtype_policy.name == "mixed_bfloat16"


def test_large_values_have_large_rounding():
    """It is relative: sums of values of a million cannot be 1e-5 apart in float32."""
    x, y = data()
    made = with_layer()
    made.compile("sgd", lambda y, guess: keras.ops.mean(y) + keras.ops.mean(guess))
    found = lockstep.verify(made, (x, y + 1e6), devices=4, steps=3)
    assert found.equal, found.cause
    assert found.rounding is None
    (loss,) = [d for d in found.differences if d.name == "loss"]
    assert loss.bound == pytest.approx(10, rel=0.01)


@pytest.mark.whole
def test_a_model_that_no_other_process_can_have():
    lock = threading.Lock()
    made = with_a_gradient_of_zero(layers.Lambda(lambda x: x if lock else None))
    made.optimizer.build(made.trainable_variables)
    before = snapshot(made)
    found = lockstep.verify(made, data(), devices=4, batch_size=10)
    assert (found.verdict, found.first_step, found.rounding) == ("cannot tell", None, None)
    assert (
        "comparison, the model cannot be sent to another process (cannot pickle '_thread.lock'"
    ) in found.cause
    assert found.cause.startswith(
        "A higher precision than float32 is not possible: the largest difference is"
    )
    assert (
        "times as much as one device differs from itself if the order of rows changes: for"
        in found.cause
    )
    assert found.cause.endswith("--float64 builds the model in float64, and can decide.")
    assert "give the same results as one device" not in str(found)
    assert set(distances(before, snapshot(made)).values()) == {0.0}


# -------------------------------------------------------------------- broken on purpose


class NumpyNoise(layers.Layer):
    """Draws its numbers in Python, once for each time that it is traced."""

    def call(self, x):
        return x + np.random.normal(size=(1,)).astype("float32")


def test_a_layer_that_draws_in_python_is_named():
    made = with_layer(NumpyNoise(name="culprit"))
    found = lockstep.verify(made, data(), devices=4, steps=3)
    assert not found.equal
    assert found.first_step == 1
    assert found.first_layer.endswith("culprit")
    assert "not deterministic" in found.cause


class Warns(layers.Layer):
    def call(self, x):
        warnings.warn("of the author of the layer", stacklevel=1)
        return x


def test_a_warning_of_the_model_is_given():
    with warnings.catch_warnings(action="ignore"):
        made = with_layer(Warns())
    with pytest.warns(UserWarning, match="of the author of the layer"):
        assert lockstep.verify(made, data(), devices=2, steps=1).equal


class DeviceReader(layers.Layer):
    """Multiplies with another number if the model is on several devices when it is traced."""

    model, factor = None, 1.5

    def call(self, x):
        attached = self.model is not None and any("lockstep" in name for name in vars(self.model))
        return x * (self.factor if attached else 1.0)


class OfThisProcess(DeviceReader):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.home = os.getpid()

    def call(self, x):
        return super().call(x) if os.getpid() == self.home else x


@pytest.mark.whole
def test_a_fault_that_another_process_does_not_have_is_not_called_rounding(monkeypatch):
    made = with_layer(OfThisProcess(name="culprit"))
    monkeypatch.setattr(DeviceReader, "model", made)
    found = lockstep.verify(made, data(), devices=4, steps=3)
    assert (found.verdict, found.rounding) == ("cannot tell", None)
    assert "culprit' differ by more than 0.1, which is not rounding" in found.cause


def test_a_loss_by_the_place_of_rows():
    """Later rows count more, as where a batch is a stretch of time."""

    def late(y, guess):
        rows = keras.ops.arange(keras.ops.shape(guess)[0], dtype="float32")
        return keras.ops.mean(rows[:, None] * (y - guess) ** 2)

    made = with_layer()
    made.compile("sgd", late)
    found = lockstep.verify(made, data(), devices=4, steps=3)
    assert found.equal, found.cause


@pytest.mark.whole
def test_where_rounding_explodes_nothing_is_called_equal(capsys):
    """In float64 as well: a difference grows by the square of 3e4 in each step."""
    made = with_layer(layers.Lambda(lambda x: keras.ops.sin(3e4 * x)))
    found = lockstep.verify(made, data(), devices=4, steps=5)
    assert not found.equal
    found.show(Console())
    assert "give the same results as one device" not in capsys.readouterr().out


# -------------------------------------------------------------------- nothing to compare


def out_of_range(y, guess):
    """As labels that no class has: the loss does not depend on the weights."""
    return 0 * keras.ops.mean(guess) + keras.ops.mean(y)


@pytest.mark.parametrize(
    ("optimizer", "loss", "trained", "said"),
    [
        (keras.optimizers.SGD(0.0), "mse", True, "No weight changed in 3 steps on one device"),
        ("sgd", out_of_range, True, "The usual causes: labels out of range, a learning rate"),
        ("sgd", "mse", False, "The model has no trainable weight"),
    ],
)
def test_where_nothing_was_trained_nothing_is_called_equal(optimizer, loss, trained, said):
    made = with_layer()
    made.trainable = trained
    made.compile(optimizer, loss)
    found = lockstep.verify(made, data(), devices=2, steps=3)
    assert (found.verdict, found.first_step) == ("cannot tell", None)
    assert said in found.cause


def test_weights_that_do_not_move_are_named():
    made = with_layer(layers.Lambda(keras.ops.stop_gradient))
    found = lockstep.verify(made, data(), devices=2, steps=3)
    assert found.equal
    first = made.layers[0]
    assert found.notes == (
        "These weights did not change on one device, so they are not tested: "
        f"{first.kernel.path}, {first.bias.path}.",
    )


def test_weights_that_are_not_finite_beside_a_finite_loss():
    made = with_layer()
    made.compile(keras.optimizers.SGD(float("inf")), "mse")
    found = lockstep.verify(made, data(), devices=4, steps=1)
    assert (found.verdict, found.not_finite_from) == ("cannot tell", 1)


@pytest.mark.whole
def test_a_difference_before_the_loss_is_not_finite_is_a_difference(monkeypatch):
    made = with_layer(DeviceReader(name="culprit"))
    monkeypatch.setattr(DeviceReader, "model", made)
    x, y = data(70)
    x[33] = np.nan
    found = lockstep.verify(made, (x, y), devices=4, steps=3)
    assert (found.verdict, found.first_step, found.not_finite_from) == ("different", 1, 2)
    assert any("not finite from step 2 on" in note for note in found.notes)


@pytest.mark.parametrize("devices", [1, *rest("cpu:2", [3])])
def test_one_device_is_not_compared_with_itself(devices):
    """It was, and was said to be equal."""
    with pytest.raises(DeviceError, match="verify needs at least 2 devices"):
        lockstep.verify(with_layer(), data(), devices=devices)


@pytest.mark.whole
def test_stateful_rnns_are_compared_with_one_device_that_carries_their_state(monkeypatch):
    """One device was stock Keras, which drops the state, and every such model was said to part."""
    made = keras.Sequential(
        [
            keras.Input(batch_shape=(6, 3, 2)),
            layers.LSTM(4, stateful=True),
            DeviceReader(name="culprit"),
            layers.Dense(1),
        ]
    )
    made.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(18, 3, 2)), rng.normal(size=(18, 1))
    found = lockstep.verify(made, (x, y), devices=4, steps=3, batch_size=6)
    assert found.equal, found.cause
    assert "drops the states of stateful RNNs" in found.notes[0]
    assert all(d.bound < 1e-3 for d in found.differences if "lstm" in d.name)
    on = session_of
    monkeypatch.setattr(
        DeviceReader, "call", lambda self, x: x * (1.5 if len(on(made) or ()) == 4 else 1.0)
    )
    found = lockstep.verify(made, (x, y), devices=4, steps=3, batch_size=6)
    assert found.first_layer.endswith("culprit")
    assert devices_of(made) == {1}


def test_names_are_printed_as_they_are():
    """What stands in brackets was taken for the console's markup, and left out."""
    found = Verification(
        "jax",
        ("cpu:0",),
        2,
        (3, 3),
        (Difference("enc[red]oder/kernel", 1.0, 1e-5, 1),),
        notes=("A note on a[bold].",),
        first_step=1,
        cause="The first layer that differs is 'cul[bold]prit'.",
    )
    console = Console(file=io.StringIO(), width=100)
    found.show(console)
    for name in ("enc[red]oder/kernel", "a[bold].", "cul[bold]prit"):
        assert name in console.file.getvalue()


# ------------------------------------------------------------------------ leaves no trace


def test_the_model_is_untouched_when_training_fails():
    made = with_layer()
    made.compile("sgd", lambda y_true, y_pred: keras.ops.mean(y_pred["nothing"]))
    made.optimizer.build(made.trainable_variables)
    before = snapshot(made)
    with pytest.raises(TypeError):
        lockstep.verify(made, data(), devices=4, steps=2)
    assert set(distances(before, snapshot(made)).values()) == {0.0}
    assert devices_of(made) == {1}


# ------------------------------------------------------------------------------- the data


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return data(5)


def generator():
    while True:
        yield data(5)


def tf_data():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(data()).batch(5)


def data_loader():
    import torch

    tensors = [torch.from_numpy(part) for part in data()]
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*tensors), batch_size=5)


@pytest.mark.parametrize("source", [Batches, *rest(generator, tf_data, data_loader)])
def test_data_sets(source):
    found = lockstep.verify(with_layer(), source(), devices=2, steps=4)
    assert found.equal
    assert found.rows == (5, 5)


def test_a_data_set_without_an_end():
    class Endless(keras.utils.PyDataset):
        num_batches = None

        def __getitem__(self, number):
            x, y = data()
            return x[number : number + 5], y[number : number + 5]

    found = lockstep.verify(with_layer(), Endless(), devices=2, steps=3)
    assert found.equal
    assert found.steps == 3


@pytest.mark.thorough
def test_a_step_of_its_own_that_differs_is_reported_where_the_model_has_no_call():
    class NoCall(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)
            self.dense.build((None, 6))
            self.built = True

        def train_step(self, state, x):
            trainable = state[0]
            outputs, _ = self.dense.stateless_call(trainable, [], x)
            times = 1 if session_of(self) is None else 2
            return {"loss": times * keras.ops.mean(outputs)}, state

    made = NoCall()
    made.compile("sgd")
    found = lockstep.verify(made, data()[0], devices=3, steps=2)
    assert (found.verdict, found.first_step, found.first_layer) == ("different", 1, None)


def test_a_model_that_fit_cannot_build_either():
    class NoCall(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)

    made = NoCall()
    made.compile("sgd", "mse")
    with pytest.raises(UnusableData, match="is not built, and Keras cannot build it") as caught:
        lockstep.verify(made, data(), devices=2)
    assert len(str(caught.value).splitlines()) <= 3


def test_a_data_set_whose_error_says_nothing_is_refused_in_words():
    from lockstep.tools.batches import first_batches

    class Empty(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, number):
            raise ValueError

    with pytest.raises(UnusableData, match="does not accept this Empty: ValueError\n"):
        first_batches(Empty(), 1, None)


def test_a_data_set_that_writes_into_one_array_again_and_again():
    """Its batches were kept as they were, which is the last one each time."""

    def one_buffer():
        x, y = data(5)
        for _ in range(3):
            x += 1
            yield x, y

    from lockstep.tools.batches import first_batches

    # Keras takes the first two batches of a generator at once, for `fit` as well.
    _, two, three = (x for x, _ in first_batches(one_buffer(), 3, None))
    np.testing.assert_array_equal(three, two + 1)


def test_sample_weights_count():
    x, y = data()
    found = lockstep.verify(with_layer(), (x, y, np.linspace(0, 2, len(x))), devices=3, steps=3)
    assert found.equal


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (lambda x, y: (x, y[:-1]), "the same number of rows"),
        (lambda x, y: iter([]), "has none"),
        (lambda x, y: 3, "got a int"),
        (lambda x, y: (x, y, y, y), "got 4 parts"),
        (lambda x, y: (scipy.sparse.csr_matrix(x), y), "but got a csr_matrix"),
    ],
)
def test_data_that_cannot_be_used(bad, text):
    with pytest.raises(UnusableData, match=text):
        lockstep.verify(with_layer(), bad(*data()), devices=2)


def test_numbers_that_are_none():
    for wrong in (0, -3, 2.5, True):  # 0 was taken for 32
        with pytest.raises(UnusableData, match=re.escape(f"batch_size={wrong!r} was given")):
            lockstep.verify(with_layer(), data(), devices=2, batch_size=wrong)
        with pytest.raises(UnusableData, match=re.escape(f"steps={wrong} was requested")):
            lockstep.verify(with_layer(), data(), devices=2, steps=wrong)
    numbers = {"steps": np.int64(1), "batch_size": np.int32(7)}
    assert lockstep.verify(with_layer(), data(), devices=2, **numbers).rows == (7, 7)


def test_a_model_that_is_not_compiled():
    with pytest.raises(UnusableData, match="is not compiled"):
        lockstep.verify(keras.Sequential([layers.Dense(1)]), data(), devices=2)


# ---------------------------------------------------------------------------- its report


def test_the_report_as_json(verified):
    found, *_ = verified
    read = json.loads(found.as_json())
    assert read["equal"] is True
    assert read["devices"] == ["cpu:0", "cpu:1"]
    assert read["backend"] == "jax"
    assert {d["name"] for d in read["differences"]} == {d.name for d in found.differences}


def test_the_report_as_json_knows_no_infinity():
    def refuse(constant):
        raise AssertionError(constant)

    parted = Difference("loss", float("inf"), float("nan"), 1)
    found = Verification("jax", ("cpu:0",), 2, (3, 3), (parted,))
    (read,) = json.loads(found.as_json(), parse_constant=refuse)["differences"]
    assert read == {"name": "loss", "largest": "inf", "bound": "nan", "first_step": 1}


def test_the_report_as_a_table(verified, capsys):
    verified[0].show(Console())
    said = capsys.readouterr().out
    assert "3 steps of 32 rows, on one device and on 2" in said
    assert "2 devices give the same results as one device." in said


SCRIPT = """
import keras, numpy as np
from keras import layers

class Noise(layers.Layer):
    def call(self, x):
        return x + np.random.normal(size=(1,)).astype("float32")

def build(*between):
    model = keras.Sequential([keras.Input((2,)), *between, layers.Dense(1)])
    model.compile("sgd", "mse")
    return model, (np.ones((20, 2), "float32"), np.ones((20, 1), "float32"))

def broken():
    print("what the user's code says")
    return build(Noise())

def not_finite():
    model, (x, y) = build()
    return model, (x * np.nan, y)

def fails():
    return 1 / 0

def only_a_model():
    return build()[0]

def swapped():
    return build()[::-1]

def of(width):
    return build()

def ends():
    raise SystemExit(0)

def another_backend():
    import os
    os.environ["KERAS_BACKEND"] = "tensorflow"
    return build()
"""


@pytest.mark.parametrize(
    ("target", "code", "said"),
    [
        ("train.py:build", 0, '"equal": true'),
        ("train.py:broken", 1, "not deterministic"),
        ("train.py:not_finite", 3, '"verdict": "cannot tell"'),
        ("train.py:fails", 2, "ZeroDivisionError"),
        ("train.py:only_a_model", 2, "(model, data) was expected"),
        ("train.py:nothing", 2, "has no function 'nothing'"),
        ("nowhere.py:build", 2, "there is no file nowhere.py"),
        ("train:build", 0, '"equal": true'),
        ("nowhere:build", 2, "there is no module 'nowhere'"),
    ],
)
def test_the_command(tmp_path, target, code, said):
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--devices", "3", "--rehearse", "--steps", "2", "--json"]
    status, printed, error = warm_end(["-m", "lockstep", "verify", target, *options], tmp_path)
    assert status == code, error
    assert said in printed + error
    if printed:  # with what the function prints on the other side
        assert "equal" in json.loads(printed)


def test_the_command_on_one_device(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # which puts the path back afterwards
    asked = CliRunner().invoke(main, ["verify", "train.py:build", "--devices", "1"])
    sys.modules.pop("train", None)
    assert asked.exit_code == 2
    assert "verify needs at least 2 devices" in asked.output


def test_the_help_tells_the_exit_status():
    told = CliRunner().invoke(main, ["verify", "--help"]).output
    for line in ("0  equal", "1  different", "2  could not run", "3  cannot tell"):
        assert f"\n    {line}" in told or f"\n  {line}" in told, told


def test_the_command_on_a_backend_that_there_is_not():
    asked = CliRunner().invoke(main, ["devices"], env={"KERAS_BACKEND": "nonsense"})
    assert asked.exit_code == 1
    assert "KERAS_BACKEND='nonsense' is set, but Keras only has jax, tensorflow" in asked.output


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("train.py:swapped", TargetNotFound, "returned (data, model), but (model, data) was"),
        ("train.py:of", TargetNotFound, "of needs arguments: missing a required argument"),
        (".train:build", TargetNotFound, "a module name cannot begin with a dot"),
        (
            "train.py:another_backend",
            UnsupportedBackend,
            "tensorflow, but Keras had already started on jax",
        ),
        ("train.py:ends", TargetNotFound, "exited Python (with 0) before the function could be"),
        ("script.py:build", TargetNotFound, "script.py exited Python (with None) before"),
        ("script:build", TargetNotFound, "script exited Python (with None) before"),
    ],
)
def test_targets_that_are_refused(tmp_path, monkeypatch, name, error, said):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "script.py").write_text(SCRIPT + "import sys\nsys.exit()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # which puts the path back afterwards
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    with pytest.raises(error, match=re.escape(said)):
        model_and_data(name)
    sys.modules.pop("train", None)
    sys.modules.pop("script", None)


def test_a_target_sees_no_arguments_of_the_command(tmp_path, monkeypatch):
    """argparse at the import of a script took lockstep's own arguments."""
    arguments = "import argparse\nargparse.ArgumentParser().parse_args()\n"
    (tmp_path / "parses.py").write_text(SCRIPT + arguments)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", asked := ["lockstep", "verify", "parses.py:build"])
    assert model_and_data("parses.py:build")[0].compiled
    assert sys.argv is asked
    sys.modules.pop("parses", None)


# ----------------------------------------------------------------------------- in float64

TARGET = """
import keras
import numpy as np
from keras import layers, ops


MODELS = []


class ReadsDevices(layers.Layer):
    def call(self, x):
        attached = any("lockstep" in name for model in MODELS for name in vars(model))
        return x * (1 + 1e-7 if attached else 1.0)


def attention():
    keras.utils.set_random_seed(0)
    x = keras.Input((6, 8))
    y = layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)
    y = layers.MaxPooling1D()(layers.LayerNormalization()(x + y))
    y = layers.Dense(1)(layers.GlobalAveragePooling1D()(y))
    model = keras.Model(x, y)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    rng = np.random.default_rng(0)
    return model, (rng.normal(size=(70, 6, 8)), rng.normal(size=(70, 1)))


def slightly_wrong():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), ReadsDevices(name="culprit"), layers.Dense(1)])
    MODELS.append(model)
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    return model, (rng.normal(size=(40, 6)), rng.normal(size=(40, 1)))


class Encoder(layers.Layer):
    "Computes its loss in float32, as models in mixed precision do."

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4)

    def call(self, x):
        mean = ops.cast(self.dense(x), "float32")
        self.add_loss(ops.mean(ops.sum(ops.square(mean) - ops.exp(mean), axis=-1)))
        return mean


class Cast(layers.Layer):
    def call(self, x):
        return x.astype(self.name).astype(x.dtype)


def trained(*parts):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), *parts, layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    rng = np.random.default_rng(0)
    return model, (rng.normal(size=(70, 6)), rng.normal(size=(70, 1)))


def mixed():
    keras.config.set_dtype_policy("mixed_bfloat16")
    return trained(Encoder())


def to_float32():
    return trained(layers.BatchNormalization(), Cast(name="float32"))


def to_bfloat16():
    explodes = layers.Lambda(lambda x: ops.sin(3e4 * x))
    return trained(layers.Dense(4), explodes, Cast(name="bfloat16"))

"""


def command(tmp_path, function, *arguments, backend="jax"):
    (tmp_path / "train.py").write_text(TARGET)
    words = ["-m", "lockstep", "verify", f"train.py:{function}", "--devices", "3", "--rehearse",
             "--steps", "8", "--batch-size", "9", "--json", *arguments]  # fmt: skip
    if backend == "jax":
        status, printed, said = warm_end(words, tmp_path)
        return status, (json.loads(printed) if printed else said)
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path, env={**os.environ, "KERAS_BACKEND": backend},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, (json.loads(done.stdout) if done.stdout else done.stderr)


@pytest.mark.parametrize("backend", ["jax", *rest("tensorflow", "torch")])
@pytest.mark.whole
def test_in_float64_attention_pooling_and_adam_are_equal_to_1e_10(backend, tmp_path):
    code, found = command(tmp_path, "attention", "--float64", backend=backend)
    assert code == 0, found
    assert found["rounding"] is None
    assert max(d["largest"] for d in found["differences"]) < 1e-10
    assert max(d["bound"] for d in found["differences"]) < 1e-8  # of the largest values


@pytest.mark.parametrize("backend", ["torch", *rest("jax", "tensorflow")])
@pytest.mark.whole
def test_the_command_lets_float64_decide(backend, tmp_path):
    """The gradient of the key's bias is zero: in float32, Adam makes steps of its rounding."""
    code, found = command(tmp_path, "attention", backend=backend)
    assert (code, found["verdict"]) == (0, "equal"), found
    assert found["rounding"] > 1e-5


@pytest.mark.whole
def test_in_float64_what_float32_would_take_for_rounding_is_a_difference(tmp_path):
    assert command(tmp_path, "slightly_wrong")[0] == 0
    code, found = command(tmp_path, "slightly_wrong", "--float64")
    assert (code, found["verdict"], found["first_step"]) == (1, "different", 1)
    assert found["first_layer"].endswith("culprit")


@pytest.mark.parametrize("option", [[], *rest(["--float64"])])
def test_mixed_precision_with_casts_of_keras_is_compared_to_1e_10(tmp_path, option):
    """A logged number in float32 made the verdict "different"; --float64 was refused."""
    code, found = command(tmp_path, "mixed", *option)
    assert (code, found["verdict"], found["lowered"]) == (0, "equal", None), found
    if option:
        assert max(d["largest"] for d in found["differences"]) < 1e-10
    else:
        assert found["rounding"] > 1e-5


@pytest.mark.whole
def test_a_cast_of_the_framework_bounds_what_float64_can_say(tmp_path):
    code, found = command(tmp_path, "to_float32", "--float64")
    assert (code, found["verdict"], found["lowered"]) == (0, "equal", "float32"), found
    assert min(d["bound"] for d in found["differences"]) == 1e-5
    assert found["notes"] == [
        "The code of the model casts float64 values to float32, so the float32 bound applies."
    ]


def test_a_cast_to_half_precision_leaves_the_answer_open(tmp_path):
    code, found = command(tmp_path, "to_bfloat16", "--float64")
    assert (code, found["verdict"], found["first_step"]) == (3, "cannot tell", None), found
    assert re.fullmatch(
        r"A higher precision than bfloat16 is not possible: the largest difference is \S+ \(\S+\), "
        r"[\d.]+ times as much as one device differs from itself if the order of rows changes. "
        r"Without the casts to bfloat16 in the code of the model, float64 decides.",
        found["cause"],
    ), found["cause"]


@pytest.mark.parametrize("causal", [False, True])
def test_the_attention_of_float64_is_that_of_keras(causal):
    """jax.nn.dot_product_attention computes logits in float32, so that another one replaces it."""
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=(3, 2, 5, 3, 4)).astype("float32")
    mask = rng.random((2, 1, 5, 5)) < 0.7
    mask[..., 0] = True
    given = {"mask": mask, "bias": rng.normal(size=(2, 3, 5, 5)).astype("float32")}
    for options in ({}, given, {"scale": 0.3}):
        options["is_causal"] = causal
        theirs = keras.ops.dot_product_attention(query, key, value, **options)
        ours = double_precision._attention(query, key, value, **options)
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
