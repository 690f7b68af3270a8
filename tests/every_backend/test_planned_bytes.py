"""A plan gives the bytes that the first device of each backend holds after a step."""

import json
import math
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.core.state import GROUPS, named_variables
from lockstep.errors import UnsupportedBackend
from lockstep.keras_compat import stored_value

BACKEND = keras.backend.backend()


def bytes_of_float():
    """The tests of PyTorch make a process compute in float64."""
    return np.dtype(keras.config.floatx()).itemsize


def dense():
    made = [keras.Input((40,)), layers.Dense(512, "relu"), layers.BatchNormalization()]
    model = keras.Sequential([*made, layers.Dropout(0.1), layers.Dense(3)])
    model.compile("adam", "mse", metrics=["mae"])
    return model, (np.ones((14, 40), "float64"), np.ones((14, 3), "int64"))


def recurrent():
    tokens = keras.Input((6,), dtype="int32")
    x = layers.LSTM(32)(layers.Embedding(2000, 16)(tokens))
    model = keras.Model(tokens, layers.Dense(4)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model, (np.ones((14, 6), "int32"), np.zeros(14, "int64"))


def mixed():
    made = [keras.Input((64,)), *(layers.Dense(256, dtype="mixed_bfloat16") for _ in range(2))]
    model = keras.Sequential(made)
    model.layers[0].trainable = False
    model.compile(keras.optimizers.AdamW(0.1, clipnorm=1.0), "mse")
    return model, (np.ones((14, 64), "float32"), np.ones((14, 256), "float32"))


def bytes_on_first_device(variable):
    value = stored_value(variable)
    if BACKEND == "jax":
        return value.addressable_shards[0].data.nbytes
    if BACKEND == "torch":
        assert value.device.type != "meta"
        return value.nbytes
    value = getattr(value, "values", [value])[0]  # of a mirrored variable
    return math.prod(value.shape) * value.dtype.size


SHARDS = BACKEND != "tensorflow"
STATES = ["replicated", *["sharded"] * SHARDS]


@pytest.mark.each_value_once
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("build", [dense, recurrent, mixed])
def test_planned_bytes_are_those_of_the_first_device(build, state, monkeypatch):
    monkeypatch.setattr(sys.modules["lockstep.core.devices"], "SHARDED_FROM", 64)
    plan = lockstep.plan(build, devices=2, batch_size=7)
    planned = next(each for each in plan.layouts if each.state == state)
    model, (x, y) = build()
    lockstep.distribute(model, 2, state=state)
    model.fit(x, y, batch_size=7, verbose=0)
    held = dict.fromkeys(GROUPS, 0)
    for name, variable in named_variables(model).items():
        held[name.split("/")[0]] += bytes_on_first_device(variable)
    assert planned.weights == held["trainable"] + held["non_trainable"]
    assert planned.optimizer == held["optimizer"]
    assert planned.metrics == held["metrics"]
    assert planned.gradients == held["trainable"]
    if BACKEND == "torch":
        gradients = [stored_value(variable).grad for variable in model.trainable_variables]
        assert planned.gradients == sum(each.nbytes for each in gradients)
    assert ("sharded" in {each.state for each in plan.layouts}) == SHARDS
    assert bool([note for note in plan.notes if "no sharded state" in note]) != SHARDS


def test_the_first_device_has_the_rows_of_a_ragged_batch():
    """Four of seven rows. JAX stores 64 bits as 32; the type of the inputs is that of Keras."""
    plan = lockstep.plan(dense, devices=2, batch_size=7)
    targets = 3 * (4 if BACKEND == "jax" else 8)
    assert plan.layouts[0].batch == 4 * (40 * bytes_of_float() + targets)


def test_no_value_is_made():
    made = []

    def build():
        made.append(keras.Sequential([keras.Input((3000,)), layers.Dense(2_000_000)]))
        made[0].compile("adam", "mse")
        return made[0]

    weights = lockstep.plan(build, devices=2).layouts[0].weights
    assert weights == bytes_of_float() * 3001 * 2_000_000  # 24 GB in float32


def test_code_that_needs_values_gets_a_remedy():
    def build():
        model = keras.Sequential([keras.Input((64,)), layers.Dense(512)])
        keras.ops.convert_to_numpy(model.layers[0].kernel.value) @ "a product with a text"

    with pytest.raises(Exception) as caught:  # noqa: PT011
        lockstep.plan(build, devices=2)
    assert "use model.build(shape)" in caught.value.__notes__[0]


def test_statistics_of_data_are_taken():
    def build():
        normal = layers.Normalization()
        normal.adapt(np.ones((4, 2000)))
        model = keras.Sequential([keras.Input((2000,)), normal, layers.Dense(16)])
        model.compile("sgd", "mse")
        return model

    rows = 8 if BACKEND == "tensorflow" else 4  # an integer of the layer
    weights = lockstep.plan(build, devices=2).layouts[0].weights
    assert weights == bytes_of_float() * (2001 * 16 + 2 * 2000) + rows


@pytest.mark.parametrize("rows", [None, 12])
def test_rows_of_a_data_set(rows):
    class Data(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, number):
            return np.ones((8, 40), "float32"), np.ones((8, 3), "float32")

    plan = lockstep.plan(lambda: (dense()[0], Data()), devices=2, batch_size=rows)
    assert plan.batch_size == (rows or 8)
    assert plan.layouts[0].batch == (rows or 8) // 2 * 43 * 4


SCRIPT = """
import keras

def build():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(512)])
    model.compile("adam", "mse")
    return model
"""


@pytest.mark.thorough
def test_activations_are_those_of_jax_and_say_so(tmp_path):
    """The figures are those of a plan on JAX. A function without a name has no other process."""
    (tmp_path / "train.py").write_text(SCRIPT)
    words = [
        "-m",
        "lockstep",
        "plan",
        str(tmp_path / "train.py:build"),
        "--devices",
        "1,2",
        "--json",
    ]
    found = []
    for backend in ("jax", BACKEND):
        printed = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=os.environ | {"KERAS_BACKEND": backend},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        found.append(json.loads(printed))
    sizes = [
        [each["temporaries"] for each in plan["layouts"] if each["state"] == "replicated"]
        for plan in found
    ]
    assert sizes[0] == sizes[1]
    assert min(sizes[0]) > 0
    label = f"Activations are those of a step compiled by JAX. {BACKEND} may need more memory."
    assert (label in found[1]["notes"]) == (BACKEND != "jax")
    plan = lockstep.plan(dense, devices=2)
    assert (plan.layouts[0].peak is None) == (BACKEND != "jax")
    assert any("pass the name of the function" in note for note in plan.notes) == (BACKEND != "jax")


def test_a_gpu_is_compiled_for_on_jax_alone():
    if BACKEND != "jax":
        with pytest.raises(
            UnsupportedBackend, match=r"(?s)that is not installed\..*KERAS_BACKEND=jax"
        ):
            lockstep.plan(dense, devices=2, gpu="h100")
