"""What `lockstep plan` says, and the one thing to do where it cannot plan."""

import json

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.errors import DeviceError, TargetNotFound, UnusableData
from lockstep.plan.memory_plan import parse_memory
from lockstep.step_bytes import amount
from tests.processes.common import warm_end


def compiled(*made, loss="mse"):
    model = keras.Sequential([*made, layers.Dense(512)], name="wide")
    model.compile("adam", loss)
    return model


def wide():
    return compiled(keras.Input((512,)))


def no_shape():
    return compiled()


def no_size():
    return compiled(keras.Input((None, 8), name="tokens"))


def not_compiled():
    return keras.Sequential([keras.Input((2,)), layers.Dense(1)], name="wide")


def trains():
    model = wide()
    model.fit(np.ones((4, 512)), np.ones((4, 512)))
    return model


def distributes():
    return lockstep.distribute(wide(), 2)


def returns_history():
    return {"loss": [0.1]}


class Uncallable(keras.Model):
    def call(self, x):
        raise RuntimeError("needs real numbers")


def not_traceable():
    model = Uncallable(name="wide")
    model.compile("sgd", "mse")
    return model, (np.ones((4, 2)), np.ones((4, 1)))


@pytest.mark.parametrize(
    ("build", "options", "error", "said"),
    [
        (
            wide,
            {"memory": "24 parsecs"},
            DeviceError,
            "memory='24 parsecs' was given, and an amount with its unit was expected.\n"
            "Write the memory of one device, such as 24GB or 80GiB.",
        ),
        (
            wide,
            {"devices": (1, 0)},
            DeviceError,
            "devices=(1, 0) was given, and numbers of devices of at least 1 were expected.\n"
            "Give a number, or several, such as (1, 2, 4).",
        ),
        (
            wide,
            {"batch_size": 0},
            UnusableData,
            "batch_size=0 was given, and a whole number of at least 1 was expected.\n"
            "Leave batch_size out for that of the data.",
        ),
        (
            no_shape,
            {},
            UnusableData,
            "no_shape returned 'wide' without data, and the model has no input shape.\n"
            "Return (model, data), or begin the model with keras.Input(shape).",
        ),
        (
            no_size,
            {},
            UnusableData,
            "'tokens' has the shape (None, None, 8), and a plan needs every size.\n"
            "Return (model, data) with a batch of the usual size.",
        ),
        (
            not_compiled,
            {},
            UnusableData,
            "A compiled model was expected, and 'wide' is not compiled.\n"
            "Call model.compile(optimizer, loss) first: the optimizer needs memory too.",
        ),
        (
            trains,
            {},
            TargetNotFound,
            "trains trains or runs 'wide', and a plan gives the model no values.\n"
            "Let it return the compiled model, and call fit elsewhere.",
        ),
        (
            distributes,
            {},
            UnusableData,
            "distributes distributes 'wide', and a plan needs the model on one device.\n"
            "Return it before lockstep.distribute.",
        ),
        (
            returns_history,
            {},
            TargetNotFound,
            "returns_history returned a dict, and a compiled model was expected.\n"
            "Return the model, or (model, data).",
        ),
        (
            not_traceable,
            {},
            UnusableData,
            "'wide' is not built, and Keras cannot build it from the shapes of a batch.\n"
            "Build it in not_traceable: give it an Input, or call model.build(shape).",
        ),
        (
            "nowhere.py:build",
            {},
            TargetNotFound,
            "'nowhere.py' was asked for, and there is no file nowhere.py.",
        ),
    ],
)
def test_what_cannot_be_planned_has_a_remedy(build, options, error, said):
    with pytest.raises(error) as caught:
        lockstep.plan(build, **options)
    assert str(caught.value).startswith(said)
    assert len(str(caught.value).splitlines()) <= 3


def test_a_model_without_data_has_the_batch_of_its_inputs():
    found = lockstep.plan(wide, 1, batch_size=8)
    assert found.layouts[0].batch == 8 * 512 * 4
    assert "wide returns no data: the batch is that of the inputs, without targets." in found.notes


def test_an_input_may_have_a_fixed_number_of_rows():
    found = lockstep.plan(lambda: compiled(keras.Input(batch_shape=(6, 512))), 4, batch_size=8)
    assert found.batch_size == 6
    assert found.layouts[0].batch == 2 * 512 * 4


def test_targets_may_be_class_numbers_where_there_are_no_data():
    for loss in ("sparse_categorical_crossentropy", "categorical_crossentropy"):
        found = lockstep.plan(lambda loss=loss: compiled(keras.Input((512,)), loss=loss), 1)
        assert found.layouts[0].metrics == 8


def test_the_report_says_what_the_memory_means():
    found = lockstep.plan(wide, (1, 4), batch_size=4, memory="3.5MB")
    whole, replicated, sharded = found.layouts
    assert whole.weights == replicated.weights == 4 * 513 * 512
    assert sharded.weights == 4 * (512 * 512 // 4 + 512)
    assert found.verdict(whole) == "no room for all gradients"
    assert found.verdict(sharded).startswith("leaves 2.4")
    smaller = lockstep.plan(wide, 1, memory="3MB")
    assert smaller.verdict(smaller.layouts[0]) == "state alone does not fit"
    assert lockstep.plan(wide, 1).verdict(whole) == ""
    assert str(found).splitlines()[0] == (
        "1 device, replicated: 4.21 MB each without activations, no room for all gradients"
    )
    kernel = 512 * 512 * 4
    assert (sharded.gathered, sharded.all_gather) == (kernel, kernel * 3 // 4)
    assert sharded.sent == replicated.sent == 2 * 3 * whole.weights // 4


def test_the_slots_of_other_optimizers_are_named():
    def build():
        model = wide()
        model.critic = keras.optimizers.Adam()
        return model

    notes = lockstep.plan(build, 1).notes
    assert "The slots of critic are not counted: a step makes them." in notes


def test_amounts():
    assert list(map(amount, (0, 999, 1_000, 311_352, 24e9, 3.9e15))) == [
        *("0 B", "999 B", "1.00 kB", "311 kB", "24.0 GB", "3,900 TB")
    ]
    assert parse_memory("24GB") == parse_memory(" 24 gb ") == parse_memory(24 * 10**9) == 24e9
    assert parse_memory("1.5 GiB") == 1.5 * 2**30
    for wrong in ("24", "GB", "0GB", "-1GB", True, -1):
        with pytest.raises(DeviceError):
            parse_memory(wrong)


SCRIPT = """
import keras

def build():
    print("made")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model
"""


def test_the_command_prints_a_table_or_json(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["-m", "lockstep", "plan", "train.py:build", "--devices", "1,2", "--memory", "1GB"]
    status, printed, _ = warm_end(words, tmp_path)
    assert status == 0
    assert "│ 2 sharded    │ 12 B" in printed
    status, printed, error = warm_end([*words, "--json"], tmp_path)
    assert (status, error.strip()) == (0, "made")
    found = json.loads(printed)
    assert [each["devices"] for each in found["layouts"]] == [1, 2, 2]
    assert found["activations"] is None
    assert found["layouts"][0]["verdict"] == "leaves 1,000 MB for activations"


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--devices", "two"], 2, "--devices=two was asked for; write numbers of devices, such"),
        (
            ["--memory", "big"],
            1,
            "DeviceError: memory='big' was given, and an amount with its unit",
        ),
    ],
)
def test_the_command_refuses_what_it_cannot_read(words, status, said, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done, _, error = warm_end(["-m", "lockstep", "plan", "train.py:build", *words], tmp_path)
    assert done == status
    assert said in error
