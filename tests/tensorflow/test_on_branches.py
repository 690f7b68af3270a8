"""Which device every operation of branches really runs on.

These tests ask TensorFlow what it ran: the graph of each device, after all optimizations.
"""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import lockstep
from tests.every_backend.branch_models import (
    assert_equal_runs,
    chain,
    data,
    rows,
    train,
    two_branches,
)

DEVICES = ("cpu:0", "cpu:1", "cpu:2")


def ran(call):
    """Return the name, the type and the device of each operation that `call` runs."""
    here = context.context()
    here.enable_graph_collection()
    try:
        call()
        collected = here.export_run_metadata()
    finally:
        here.disable_graph_collection()
    return [
        (node.name, node.op, node.device.split("/device:")[-1].lower())
        for function in collected.function_graphs
        for graph in function.partition_graphs
        for node in graph.node
    ]


def products_of(nodes):
    return dict(collections.Counter(device for _, op, device in nodes if "MatMul" in op))


@pytest.fixture(scope="module")
def trained():
    """The operations of a training of the old recipe."""
    x, y = data()
    return ran(lambda: two_branches(DEVICES).fit(x, y, batch_size=13, verbose=0))


def test_every_operation_of_a_training_step_is_on_the_device_of_its_layer(trained):
    # The LSTM: two products forward, and three backward, as its input needs no gradient.
    # A dense layer: one forward, and two backward.
    assert products_of(trained) == {"cpu:0": 5, "cpu:1": 5 + 3, "cpu:2": 3}
    homes = {"second": "cpu:1", "head": "cpu:2", "merged": "cpu:2", "drop": "cpu:2"}
    seen = collections.Counter()
    for name, op, device in trained:
        parts = name.split("/")
        for layer, home in homes.items():
            of_layer = any(part in (layer, f"{layer}_1") for part in parts)
            # A constant may be anywhere, and transfers are on both of their devices.
            if of_layer and op not in ("Const", "_Send", "_Recv", "_HostSend", "_HostRecv"):
                assert device == home, (name, op, device)
                seen[layer, "gradient_tape" in parts] += 1
    assert seen.keys() == {(layer, True) for layer in homes} | {(layer, False) for layer in homes}


def test_the_update_of_a_weight_is_on_its_device(trained):
    roots = collections.Counter(device for _, op, device in trained if op == "Sqrt")
    # Adam has one square root for each weight: three of the LSTM, two of each dense layer. Those
    # of the learning rate are on the device of the first output, one for each weight.
    assert roots == {"cpu:0": 3, "cpu:1": 2, "cpu:2": 2 + 7}


def test_a_shared_weight_is_copied_once_in_a_step(trained):
    reads = [(name, device) for name, op, device in trained if op == "ReadVariableOp"]
    assert [name for name, _ in reads if "lockstep_device_cpu_1/shared" in name] == []
    at_home = [(name, device) for name, device in reads if "lockstep_device_cpu_0/shared" in name]
    assert any("while" in name for name, _ in at_home)  # at home a loop reads the variable
    assert {device for _, device in at_home} == {"cpu:0"}


class Recomputed(keras.layers.Layer):
    """TensorFlow computes its gradient by the variables that it finds in the call."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(4, 8), name="kernel")

    def call(self, x):
        return tf.recompute_grad(lambda x: tf.tanh(tf.matmul(x, self.kernel)))(x)


def test_a_layer_that_recomputes_its_gradient_on_another_device():
    def build():
        keras.utils.set_random_seed(4)
        a, b, shared = keras.Input((4,)), keras.Input((4,)), Recomputed()
        with lockstep.on("cpu:0"):
            left = shared(a)
        with lockstep.on("cpu:1"):
            right = shared(b)
        model = keras.Model([a, b], keras.layers.Dense(8)(keras.layers.add([left, right])))
        model.compile("sgd", "mse")
        return model

    x, y = rows()
    assert_equal_runs(train(lockstep.release(build()), [x, x], y), train(build(), [x, x], y))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "lay_out",
    [
        lambda model: lockstep.place(model, {"dense_0": 0, "dense_1": 1}),
        lambda model: lockstep.distribute(model, 2),
    ],
    ids=["place", "distribute"],
)
def test_a_model_with_the_same_layers_traces_its_steps_again(lay_out):
    """A program keeps the `tf.Variable` with which it was traced."""

    def run(*changes):
        model, (x, y) = chain(2), rows(16)
        other = keras.Sequential([model, keras.layers.Rescaling(2.0)])
        other.compile("sgd", "mse")
        found = []
        for change in changes:
            change(model)
            model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
            found += [other.predict(x, verbose=0), other.evaluate(x, y, verbose=0)]
            other.fit(x, y, batch_size=8, shuffle=False, verbose=0)
            found += model.get_weights()
        return found

    one, many = run(id, id, id), run(id, lay_out, lockstep.release)
    for mine, theirs in zip(many, one, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)


class CustomStep(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def test_a_training_step_of_the_users_own():
    def build():
        model = chain()
        own = CustomStep(model.inputs, model.outputs)
        own.compile("adam", "mse")
        return own

    places = {"dense_[012]": 0, "dense_[345]": 1}
    placed, one = lockstep.place(build(), places), build()
    nodes = ran(lambda: placed.fit(*rows(8), batch_size=8, verbose=0))
    # The first layer has no gradient of its input. The step makes the slots of the optimizer, so
    # TensorFlow traces it twice.
    assert products_of(nodes) == {"cpu:0": 2 * (3 * 3 - 1), "cpu:1": 2 * 3 * 3}
    one.fit(*rows(8), batch_size=8, verbose=0)
    for mine, theirs in zip(placed.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_the_end_of_data_of_unknown_length_counts_no_step():
    """Keras 3.15.1 counts one there if it runs without XLA, on one device too."""

    def generated():
        x, y = rows()
        for first in range(0, 20, 5):
            yield x[first : first + 5], y[first : first + 5]

    signature = (tf.TensorSpec((None, 4)), tf.TensorSpec((None, 8)))
    data = tf.data.Dataset.from_generator(generated, output_signature=signature)
    one, placed = chain(), lockstep.place(chain(), {"dense_[012]": 0, "dense_[345]": 1})
    one.compile("adam", "mse", jit_compile=True)
    for model in (one, placed):
        model.fit(data, epochs=2, shuffle=False, verbose=0)
    assert placed.optimizer.iterations == one.optimizer.iterations == 8
    for mine, theirs in zip(placed.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)


def test_a_line_says_what_runs_where(capsys):
    model = lockstep.place(chain(), {"dense_0": 0, "dense_1": 1})
    model.compile("sgd", "mse", jit_compile=True)
    model.fit(*rows(), verbose=2)
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("lockstep: tensorflow, layers on cpu:0, cpu:1, rehearsed")
    assert line.endswith(", without XLA")


def test_a_model_that_cannot_be_placed_is_unchanged(monkeypatch):
    from lockstep.engines.tensorflow.branches import placed_variables

    model = chain()
    before = {variable.path: variable.value for variable in model.variables}
    moves = []

    def move(variable, device):
        moves.append(device)
        if len(moves) == 6:
            raise MemoryError("full")
        return plain(variable, device)

    plain = placed_variables.move
    monkeypatch.setattr(placed_variables, "move", move)
    with pytest.raises(MemoryError, match="full"):
        lockstep.place(model, {"dense_[345]": 0, "dense_[012]": 1})
    assert not [name for name in vars(model) if "lockstep" in name]
    assert {variable.value.device[-5:] for variable in model.variables} == {"CPU:0"}
    for variable in model.variables:
        np.testing.assert_array_equal(variable.value, before[variable.path])
