"""State in shards on JAX: where arrays are, what programs gather, and what shares the shards."""

import re
from types import SimpleNamespace

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import lockstep
from lockstep.core.devices import sharded_dim
from lockstep.engines.jax.steps.gather_again import (
    compiler_options,
    gathers_again,
    room_for_gathered,
)
from tests.agreement import values
from tests.conformance.common import assert_same
from tests.conformance.test_communication import collectives, training_program
from tests.tiers import rest

WIDE = 256  # a kernel of 256 by 256 floats is large enough to be sharded
ROWS = 21
RNG = np.random.default_rng(4)
X = RNG.normal(size=(ROWS, 32)).astype("float32")
Y = RNG.normal(size=(ROWS, 3)).astype("float32")


def network(optimizer=None, **options):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)
    made = keras.Sequential([keras.Input((32,))])
    for width in (WIDE, WIDE, WIDE):
        made.add(layers.Dense(width, activation="tanh"))
    made.add(layers.Dense(3))
    made.compile(optimizer or keras.optimizers.Adam(1e-3), "mse", metrics=["mae"], **options)
    return made


def sharded(made, devices=4):
    return lockstep.distribute(made, devices, state="sharded")


def fit(made, **options):
    options = {"batch_size": 6, "verbose": 0, "shuffle": False, **options}
    return made.fit(X, Y, **options).history


def variables(made):
    return [*made.variables, *made.optimizer.variables]


def large(made):
    return [v for v in variables(made) if v.value.nbytes >= 2**16]


def assert_in_shards(made, devices=4):
    """Each device holds its share of the large variables, counted from the arrays themselves."""
    held = dict.fromkeys(jax.devices()[:devices], 0)
    for variable in large(made):
        for shard in variable.value.addressable_shards:
            held[shard.device] += shard.data.nbytes
    every = sum(v.value.nbytes for v in large(made))
    assert len(large(made)) >= 6
    assert set(held.values()) == {every // devices}


def test_a_variable_lies_on_the_first_of_its_largest_dims_that_the_devices_divide():
    assert sharded_dim((256, 256), 4, 4) == 0
    assert sharded_dim((1000, 4096), 4, 8) == 1
    assert sharded_dim((4096, 1001), 4, 8) == 0
    assert sharded_dim((1001, 1003), 4, 2) is None
    assert sharded_dim((128, 128), 4, 2) == 0
    assert sharded_dim((128, 127), 4, 2) is None  # below 64 KiB
    assert sharded_dim((4096, 4096), 4, 1) is None


def test_values_go_to_the_shards_without_a_whole_copy_on_a_device(monkeypatch, tmp_path):
    made = sharded(network())
    made.save_weights(tmp_path / "a.weights.h5")
    expected = made.get_weights()
    put = jax.Array
    seen = []
    plain = jax.numpy.asarray

    def noted(value, *args, **kwargs):
        if not isinstance(value, put) and np.size(value) * 4 >= 2**16:
            seen.append(np.shape(value))
        return plain(value, *args, **kwargs)

    monkeypatch.setattr(jax.numpy, "asarray", noted)
    made.load_weights(tmp_path / "a.weights.h5")
    made.set_weights(expected)
    made.layers[0].kernel.assign(expected[0].tolist())
    assert not seen
    monkeypatch.undo()
    assert_same(made.get_weights(), expected, atol=0)


def test_an_array_that_was_assigned_may_be_changed_afterwards():
    made, value = sharded(network()), np.ones((WIDE, WIDE), "float32")
    made.layers[1].kernel.assign(value)
    value[:] = 7
    assert np.all(np.array(made.layers[1].kernel.value) == 1)


def test_reading_a_variable_leaves_no_copy_on_the_host_behind(tmp_path):
    made = sharded(network())
    fit(made)
    made.save(tmp_path / "a.keras")
    made.get_weights()
    # jax/_src/array.py, ArrayImpl._value
    assert [v.path for v in large(made) if v.value._npy_value is not None] == []


def wide():
    """A model with a batch smaller than its weights: the compiler would move activations."""
    made = [keras.Input((64,)), layers.Dense(512, "relu"), layers.Dense(512, "relu")]
    return keras.Sequential([*made, layers.Dense(10)])


def recurrent():
    made = [keras.Input((5, 16)), layers.LSTM(128), layers.Dense(512), layers.Dense(10)]
    return keras.Sequential(made)


def test_each_weight_is_gathered_once_and_nothing_else_moves_but_gradients():
    model, program = training_program(wide(), devices=8, rows=32, state="sharded")
    sizes, counts = collectives(program.as_text())
    weights = [v for v in model.trainable_variables if v.value.nbytes >= 2**16]
    assert counts["all-gather"] == len(weights)
    assert sizes["all-gather"] == sum(v.value.nbytes for v in weights)
    # XLA for CPUs has no reduce-scatter: it reduces all, and each device takes its part.
    assert set(counts) == {"all-gather", "all-reduce"}
    assert sizes["all-reduce"] <= sum(v.value.nbytes for v in model.trainable_variables) + 64


def adapted():
    """LoRA computes its kernels from what is gathered, and relu has a gradient of its own."""
    made = network()
    for layer in made.layers[:-1]:
        layer.enable_lora(4)
        layer.activation = keras.activations.relu
    made.compile("adam", "mse", metrics=["mae"])
    return made


@pytest.mark.thorough
@pytest.mark.parametrize("build", [network, adapted])
def test_weights_may_be_gathered_again_for_the_backward_pass(build, monkeypatch):
    one, kept = build(), sharded(build())
    found = [fit(one), fit(kept)]
    monkeypatch.setenv("LOCKSTEP_GATHER_AGAIN", "1")
    again = sharded(build())
    found.append(fit(again))
    for made, history in zip((kept, again), found[1:], strict=True):
        assert_same(values(made), values(one))
        assert_same(history, found[0])
    gathered = []
    for choice in "01":
        monkeypatch.setenv("LOCKSTEP_GATHER_AGAIN", choice)
        _, program = training_program(build(), devices=4, rows=32, state="sharded")
        gathered.append(collectives(program.as_text())[1]["all-gather"])
    weights = sum(v.value.nbytes >= 2**16 for v in again.weights)
    assert gathered == [weights, 2 * weights]


def test_a_metric_of_gathered_again_outputs_sees_the_mask_that_keras_keeps(monkeypatch):
    """JAX keeps attributes of an output without a gradient, such as the mask of a frozen layer."""
    monkeypatch.setenv("LOCKSTEP_GATHER_AGAIN", "1")
    words = np.where(np.arange(6) < 4, np.random.default_rng(0).integers(1, 300, (16, 6)), 0)

    def build():
        keras.utils.set_random_seed(5)
        inputs = keras.Input((6,), dtype="int32")
        frozen = layers.Embedding(300, 64, mask_zero=True, trainable=False, name="frozen")(inputs)
        trained = layers.Dense(256, name="trained")(frozen)
        made = keras.Model(inputs, {"frozen": frozen, "trained": trained})
        both = {name: ["mae"] for name in ("frozen", "trained")}
        made.compile("sgd", "mse", metrics=both)
        return made

    targets = {"frozen": np.ones((16, 6, 64)), "trained": np.ones((16, 6, 256))}
    found = []
    for made in (build(), sharded(build())):
        made.fit(words, targets, batch_size=8, shuffle=False, verbose=0)
        found.append(made.evaluate(words, targets, verbose=0, return_dict=True))
        found[-1] |= {f"fit_{k}": v[0] for k, v in made.history.history.items()}
    assert_same(found[1], found[0])


def test_they_are_gathered_again_if_they_take_a_quarter_of_the_memory(monkeypatch):
    made = sharded(network())
    size = sum(v.value.nbytes for v in made.weights if v.value.nbytes >= 2**16)

    def devices(memory, platform="gpu"):
        statistics = None if memory is None else {"bytes_limit": memory}
        given = {"memory_stats": lambda: statistics, "platform": platform, "process_index": 0}
        return [SimpleNamespace(**given)]

    rooms = [room_for_gathered(devices(memory)) for memory in (None, 4 * size, 4 * size - 1)]
    assert [gathers_again(made, room) for room in rooms] == [False, False, True]
    assert len(compiler_options(made, devices(1), 0)) == 2
    assert compiler_options(made, devices(1, "cpu"), 0) is None
    monkeypatch.setenv("LOCKSTEP_GATHER_AGAIN", "0")
    assert not gathers_again(made, room_for_gathered(devices(1)))


def test_no_collective_is_in_the_loop_of_an_rnn():
    """XLA for CPUs leaves one all-reduce of gradients in it; that for GPUs moves it out."""
    found = []
    for state in ("replicated", "sharded"):
        _, program = training_program(recurrent(), devices=8, rows=32, state=state)
        text = program.as_text()
        bodies = set(re.findall(r"body=%?([\w.-]+)", text))
        parts = {part.split(" ")[0].lstrip("%"): part for part in re.split(r"\n(?=\S)", text)}
        found.append([collectives(parts[body])[1] for body in sorted(bodies)])
    assert found[0] == found[1]
    assert "all-gather" in collectives(text)[1]  # of the large dense layer


@pytest.mark.whole
def test_an_exported_model_runs_on_one_device(tmp_path):
    made = sharded(network())
    fit(made)
    made.export(tmp_path / "served", verbose=False)
    served = pytest.importorskip("tensorflow").saved_model.load(str(tmp_path / "served"))
    assert_same(served.serve(X).numpy(), made.predict(X, verbose=0))
    assert_in_shards(made)


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore")  # Orbax's own, of which it drops the exceptions
def test_orbax_gets_whole_arrays(tmp_path):
    made, one = sharded(network()), network()
    checkpoint = keras.callbacks.OrbaxCheckpoint(tmp_path)
    fit(made, callbacks=[checkpoint])
    checkpoint.wait_until_finished()
    one.load_weights(tmp_path)
    assert_same(one.get_weights(), made.get_weights(), atol=0)
    assert {len(v.value.devices()) for v in one.variables} == {1}
    assert_in_shards(made)


@keras.saving.register_keras_serializable("conformance")
class Penalized(keras.Model):
    """A step of the user's own, over a model that has a weight of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.Dense(WIDE, activation="tanh")
        self.outer = self.add_weight(shape=(WIDE, WIDE), name="outer")
        self.last = layers.Dense(3)

    def call(self, x, training=False):
        return self.last(ops.matmul(self.inner(x), self.outer))

    def train_step(self, state, data):
        trainable, non_trainable, optimizer, metrics = state
        x, y = data

        def loss_of(trainable):
            outputs, _ = self.stateless_call(trainable, non_trainable, x, training=True)
            return ops.mean(ops.square(outputs - y)) + 1e-3 * ops.sum(ops.square(trainable[0]))

        loss, gradients = jax.value_and_grad(loss_of)(trainable)
        slope = jax.jvp(loss_of, (trainable,), (gradients,))[1]
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
        return {"loss": loss, "slope": slope / 100}, (trainable, non_trainable, optimizer, metrics)


def test_a_step_of_ones_own_and_a_weight_of_the_model_itself():
    runs = []
    for distribute in (lambda made: made, sharded):
        keras.utils.set_random_seed(3)
        made = Penalized()
        made(X[:1])
        made.compile(keras.optimizers.AdamW(1e-3, global_clipnorm=0.1))
        history = fit(distribute(made))
        runs.append((history, values(made)))
    assert isinstance(made.outer.value.sharding.spec[0], str)
    assert_same(runs[1], runs[0], atol=2e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("quantized", [True, *rest(False)])
def test_lora_on_a_frozen_backbone_in_shards(quantized, tmp_path):
    runs = []
    for name, distribute in (("one", lambda made: made), ("many", sharded)):
        made = distribute(network())
        for layer in made.layers if quantized else []:
            layer.quantize("int8")
        for layer in made.layers[:3]:
            layer.enable_lora(4)
            layer.lora_kernel_b.assign(np.full((4, WIDE), 0.01, "float32"))
        made.compile("adam", "mse")
        keras.utils.set_random_seed(8)
        history = fit(made)
        made.save(tmp_path / f"{name}.keras")
        loaded = keras.models.load_model(tmp_path / f"{name}.keras")
        predicted = made.predict(X, verbose=0), loaded.predict(X, verbose=0)
        runs.append((history, made.get_weights(), predicted))
    kernels = [layer._kernel for layer in made.layers[1:3]]
    assert [kernel.dtype for kernel in kernels] == ["int8" if quantized else "float32"] * 2
    assert all(len(kernel.value.sharding.spec) for kernel in kernels)
    assert_same(runs[1], runs[0], atol=2e-5)


def test_the_first_lines_of_fit_name_the_variable_that_the_devices_do_not_divide(capsys):
    fit(sharded(network(), 3), verbose=2)
    assert re.search(
        r", state sharded: 1.7 of 1.7 MB each\n"
        r"lockstep: each device holds 100% of the state, and its share is 33%. The largest "
        r"variable that is not sharded is \S+/kernel \(0.3 MB\).\n",
        capsys.readouterr().out,
    )
