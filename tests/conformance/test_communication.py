"""What devices tell one another in a step, read from the compiled program."""

import json
import re
from collections import Counter

import jax
import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from tests.processes.common import warm_python

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}
COLLECTIVE = re.compile(
    r"= (\([^=]*?\)|\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(?:-start)?\("
)
SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


def collectives(text):
    """Bytes by kind of collective, and how many of each there are."""
    sizes, counts = Counter(), Counter()
    text = re.sub(r"/\*.*?\*/", "", text)  # the numbers in long tuples
    for shapes, kind in COLLECTIVE.findall(text):
        counts[kind] += 1
        for name, dims in SHAPE.findall(shapes):
            sizes[kind] += BYTES[name] * int(np.prod([int(d) for d in dims.split(",") if d]))
    return dict(sizes), dict(counts)


def mlp():
    return keras.Sequential([keras.Input((64,)), layers.Dense(256, "relu"), layers.Dense(10)])


def cnn():
    made = [keras.Input((16, 16, 3)), layers.Conv2D(16, 3), layers.BatchNormalization()]
    made += [layers.ReLU(), layers.Conv2D(32, 3), layers.GlobalAveragePooling2D(), layers.Dense(10)]
    return keras.Sequential(made)


def transformer():
    tokens = keras.Input((12,), dtype="int32")
    x = layers.Embedding(50, 32)(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 16)(x, x))
    x = layers.LayerNormalization()(x + layers.Dense(32)(layers.Dense(64, "gelu")(x)))
    return keras.Model(tokens, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


MODELS = {"mlp": mlp, "cnn": cnn, "transformer": transformer}


def training_program(model, devices, rows, times=1, targets=(), **options):
    """The compiled training step, or that of several steps, and the model.

    `targets` is the shape of the targets of a row.
    """
    model = MODELS[model]() if isinstance(model, str) else model
    lockstep.distribute(model, devices, **options)
    model.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    shape = model.input_shape[1:]
    batch = (np.ones((rows, *shape), model.inputs[0].dtype), np.zeros((rows, *targets), "int32"))
    model._symbolic_build(data_batch=batch)
    model.make_train_function()
    step = model.train_function
    state = model._get_jax_state(
        trainable_variables=True,
        non_trainable_variables=True,
        optimizer_variables=True,
        metrics_variables=True,
    )
    state = step.settle(state)
    run, placed = (step.run, step.place(batch))
    if times > 1:
        ((run, placed),) = step.programs(state, [batch] * times)
    return model, run.lower(state, placed).compile()


def gradient_bytes(model):
    return sum(variable.value.nbytes for variable in model.trainable_variables)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_all_reduced_once_and_nothing_else_moves(name):
    model, program = training_program(name, devices=8, rows=32)
    sizes, counts = collectives(program.as_text())
    assert set(counts) == {"all-reduce"}
    statistics = 0  # batch norm sums over the rows of all devices, forward and back
    if name == "cnn":
        channels = sum(layer.gamma.shape[0] for layer in model.layers if hasattr(layer, "gamma"))
        statistics = 4 * 4 * channels
    a_few_scalars = 64
    assert gradient_bytes(model) <= sizes["all-reduce"]
    assert sizes["all-reduce"] <= gradient_bytes(model) + statistics + a_few_scalars
    if not statistics:  # gradients in one bucket, and what the loss and the metric sum
        assert counts["all-reduce"] <= 2
    if name == "mlp":
        assert sizes["all-reduce"] <= 1.001 * gradient_bytes(model)


def test_several_steps_at_once_move_no_more_than_one():
    one, _ = collectives(training_program("mlp", devices=8, rows=32)[1].as_text())
    model, program = training_program("mlp", devices=8, rows=32, times=5)
    sizes, counts = collectives(program.as_text())
    assert (sizes, set(counts)) == (one, {"all-reduce"})  # within the loop, once in the text
    held = sum(v.value.nbytes for v in [*model.variables, *model.optimizer.variables])
    assert program.memory_analysis().alias_size_in_bytes >= 0.99 * held


@pytest.mark.parametrize("name", MODELS)
def test_the_state_is_donated(name):
    model, program = training_program(name, devices=4, rows=32)
    memory = program.memory_analysis()
    state = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    held = sum(v.value.nbytes for v in {id(v): v for v in state}.values())
    assert memory.alias_size_in_bytes >= 0.99 * held


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_evaluation_moves_a_few_scalars(name):
    model, _ = training_program(name, devices=8, rows=32)
    model.make_test_function()
    step = model.test_function
    state = model._get_jax_state(
        trainable_variables=True, non_trainable_variables=True, metrics_variables=True
    )
    batch = (np.ones((32, *model.input_shape[1:]), model.inputs[0].dtype), np.zeros(32, "int32"))
    program = jax.jit(step.run).lower(step.settle(state), step.place(batch)).compile()
    sizes, counts = collectives(program.as_text())
    assert set(counts) == {"all-reduce"}
    assert sizes["all-reduce"] <= 64


SCRIPT = """
import json
from tests.conformance.test_communication import collectives, training_program
_, program = training_program("mlp", {devices}, 1024)
text = program.as_text()
print(json.dumps([collectives(text), text.count(" = ")]))
"""


def test_a_program_for_512_devices_has_the_operations_of_one_for_8():
    found = []
    for devices in (8, 512):
        said = warm_python(SCRIPT.format(devices=devices), LOCKSTEP_REHEARSE=str(devices))
        found.append(json.loads(said.splitlines()[-1]))
    assert found[0][0] == found[1][0]
    assert abs(found[0][1] - found[1][1]) <= 0.1 * found[0][1]
