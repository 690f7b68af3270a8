"""LoRA: devices send the factors' gradients, and nothing else differs from Keras."""

import collections
from functools import partial

import h5py
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.engines.jax.introspection.probe import JaxProbe
from lockstep.engines.jax.steps import lora
from lockstep.engines.replicas.sketches import Bounds, first_mismatch
from lockstep.keras_compat import double_precision
from tests.conformance.cases.fine_tuning import AsDense, Reads, WithCall, network, with_factors
from tests.conformance.test_communication import collectives, gradient_bytes, training_program
from tests.precision import floats

RNG = np.random.default_rng(0)


# -------------------------------------------------------------------------------------- values


EINSUMS = {
    "abc,cd->abd": ((None, 6), "d", (4, 2, 5)),
    "...x,xy->...y": ((6,), "y", (4, 2, 5)),
    "bsd,kdh->bskh": ((None, 3, 2), "kh", (4, 2, 5)),
    "btnh,nhd->btd": ((None, 7), "d", (4, 2, 3, 2)),
    "abc,cd->adb": ((6, None), "d", (4, 2, 5)),
    "bnc,nce->bne": ((3, 6), "e", (4, 3, 5)),  # n is a dim of the batch
    "abc,dc->abd": ((None, 6), "d", (4, 2, 5)),  # the last dim is the input's
    "btnh,dnh->btd": ((None, 7), None, (4, 2, 3, 2)),
}
CASES = {
    "dense": (lambda: layers.Dense(6, "silu"), (4, 5)),
    "dense, three dims, no bias": (lambda: layers.Dense(6, use_bias=False), (4, 2, 5)),
    **{
        equation: (partial(layers.EinsumDense, equation, out, bias_axes=bias), shape)
        for equation, (out, bias, shape) in EINSUMS.items()
    },
    "embedding": (lambda: layers.Embedding(9, 4), None),
    "reversible": (lambda: layers.ReversibleEmbedding(9, 4, mask_zero=True), None),
    "logits": (lambda: layers.ReversibleEmbedding(9, 5, logit_soft_cap=3.0), (4, 2, 5)),
}


@pytest.fixture
def float64(monkeypatch):
    """Compute in float64 throughout; Keras reads its table of types in each operation."""
    monkeypatch.setitem(double_precision._dtypes.BIT64_TO_BIT32_DTYPE, "float64", "float64")
    jax.config.update("jax_enable_x64", True)
    with floats("float64"):
        yield
    jax.config.update("jax_enable_x64", False)


def prepared(name, dtype):
    """A layer with LoRA, and its inputs."""
    make, shape = CASES[name]
    layer = make()
    layer.build(shape)
    with_factors(layer, dtype=dtype)
    x = RNG.integers(0, 9, (4, 3)) if shape is None else RNG.normal(size=shape)
    return layer, jnp.asarray(x)


def derivatives(layer, x, called):
    """Return the value, and derivatives of the first three orders; `called` calls the layer."""
    options = {"reverse": True} if getattr(layer, "logit_soft_cap", None) else {}

    def loss(values, x):
        mapping = list(zip(layer.variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            y = called(lambda: layer(x, **options))
        assert y.dtype == "float64"
        return jnp.sum(jnp.sin(y) * y)

    def penalty(values, x):
        """Of the gradient of the inputs, or of the variables where inputs are whole numbers."""
        argument = int(jnp.issubdtype(x.dtype, jnp.floating))
        slopes = jax.tree.leaves(jax.grad(loss, argnums=argument)(values, x))
        return sum(jnp.sum(jnp.sin(each) ** 2) for each in slopes)

    def of_second(values, x):
        return sum(jnp.sum(each**2) for each in jax.grad(penalty)(values, x))

    orders = (loss, jax.grad(loss), jax.grad(jax.checkpoint(penalty)), jax.grad(of_second))
    values = [variable.value for variable in layer.variables]
    return jax.jit(lambda *given: [order(*given) for order in orders])(values, x)


@pytest.mark.parametrize("name", CASES)
def test_derivatives_of_three_orders_are_those_of_keras(name, float64):
    layer, x = prepared(name, "float64")
    assert lora._call_by_factors(layer) is not None

    def by_factors(call):
        return lora.with_lora_by_factors(layer, call)()

    stock, found = derivatives(layer, x, lambda call: call()), derivatives(layer, x, by_factors)
    for one, other in zip(jax.tree.leaves(stock), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-12, atol=1e-12 * np.max(np.abs(one)))


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "bfloat16"])
def test_values_are_those_of_keras_bit_for_bit(policy):
    with floats("float32", policy):
        for name in CASES:
            layer, x = prepared(name, None)
            found = lora.with_lora_by_factors(layer, partial(layer, x))()
            assert found.dtype == policy.removeprefix("mixed_")
            np.testing.assert_array_equal(found, layer(x))


# --------------------------------------------------------------------------------------- bytes


def wide(policy=None, quantized=False, step=False):
    """A kernel has 64 times the bytes of its factors."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    hidden = [layers.Dense(256, "gelu", dtype=policy) for _ in range(3)]
    model = (Stepping if step else keras.Sequential)([keras.Input((256,)), *hidden])
    for layer in model.layers:
        if quantized:
            layer.quantize("int8")
        layer.enable_lora(2)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Stepping(keras.Sequential):
    """A step of its own, without a metric."""

    def train_step(self, state, data):
        trainable, others, slots, metrics = state

        def loss(trainable):
            outputs, _ = self.stateless_call(trainable, others, data[0], training=True)
            return keras.losses.SparseCategoricalCrossentropy(from_logits=True)(data[1], outputs)

        value, gradients = jax.value_and_grad(loss)(trainable)
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        return {"loss": value}, (trainable, others, slots, metrics)


@pytest.mark.parametrize(
    ("made", "options"),
    [
        (wide, {"state": "replicated"}),
        (wide, {"state": "sharded"}),
        (partial(wide, "mixed_bfloat16"), {"state": "sharded"}),
        (partial(wide, step=True), {}),
        (partial(wide, quantized=True), {}),
        (wide, {"micro_batch_size": 2}),
    ],
)
def test_devices_send_the_gradients_of_the_factors_alone(made, options):
    model, program = training_program(made(), devices=4, rows=32, **options)
    sizes, counts = collectives(program.as_text())
    sent = gradient_bytes(model)
    assert sent == 3 * (2 * 256 * 2 + 256) * 4  # of both factors and a bias
    assert sent <= sizes["all-reduce"] <= sent + 64
    gathered = options.get("state") == "sharded"
    assert counts.get("all-gather", 0) == 3 * gathered  # each kernel once
    if options.keys() <= {"state"}:
        (planned,) = [
            each
            for each in lockstep.plan(made, devices=4).layouts
            if (each.devices, each.state) == (4, options.get("state", "replicated"))
        ]
        assert planned.temporaries is not None
        halves = {"bfloat16": 2}.get(model.layers[0].compute_dtype, 1)  # CPUs sum in float32
        assert planned.all_reduce * halves == 2 * 3 / 4 * sent
        assert planned.all_gather * halves * 4 / 3 == sizes.get("all-gather", 0)


# ---------------------------------------------------------------------------------------- fits


WORDS = RNG.integers(0, 20, (23, 6)).astype("int32")
TARGETS = RNG.integers(0, 3, 23)


def tuned(policy):
    keras.utils.clear_session(free_memory=False)  # it sets the policy back
    keras.utils.set_random_seed(3)
    with floats("float32", policy):
        model = with_factors(network())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, weighted_metrics=["accuracy"])
    return model


def fitted(model, **options):
    options = {"batch_size": 5, "epochs": 2, "shuffle": False, "verbose": 0, **options}
    return np.asarray(model.fit(WORDS, TARGETS, **options).history["loss"])


class Saves(keras.callbacks.Callback):
    """Saves the model between two steps."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.model.save(self.folder / "saved.keras")
            self.model.save_weights(self.folder / "saved.weights.h5")


def saved(lay_out, folder):
    """What a fit leaves in files, by name, and what the loaded model predicts."""
    folder.mkdir()
    model = lay_out(tuned("float32"))
    attributes = [set(vars(layer)) for layer in model.layers]
    fitted(model, epochs=1, callbacks=[Saves(folder)])
    assert [set(vars(layer)) for layer in model.layers] == attributes
    found = {}
    for layer in model.layers:
        layer.save_own_variables(store := {})
        found |= {f"{layer.name}/{key}": np.asarray(each) for key, each in store.items()}
    with h5py.File(folder / "saved.weights.h5") as file:
        names = []
        file.visit(names.append)
        found |= {name: file[name][()] for name in names if isinstance(file[name], h5py.Dataset)}
    own = {each.__name__: each for each in (Reads, WithCall, AsDense)}
    loaded = keras.saving.load_model(folder / "saved.keras", custom_objects=own, compile=False)
    return found | {"predictions": loaded.predict(WORDS, verbose=0)}


def test_files_and_layers_are_those_of_keras(tmp_path):
    one = saved(lambda model: model, tmp_path / "one")
    many = saved(partial(lockstep.distribute, devices=2), tmp_path / "many")
    assert one.keys() == many.keys()
    for name, value in one.items():
        np.testing.assert_allclose(many[name], value, atol=1e-5, err_msg=name)


def test_a_step_that_fails_leaves_the_layers_as_they_were():
    def failing(y, y_pred):
        raise ZeroDivisionError("in the loss")

    model = lockstep.distribute(tuned("float32"), 2)
    model.compile("sgd", failing)
    before = [dict(vars(layer)) for layer in model.layers]
    with pytest.raises(ZeroDivisionError, match="in the loss"):
        fitted(model)
    for layer, attributes in zip(model.layers, before, strict=True):
        assert vars(layer).keys() == attributes.keys()
        assert vars(layer).get("_kernel") is attributes.get("_kernel")


def test_a_step_that_is_inspected_has_the_outputs_of_layers_with_lora():
    model = wide()
    batch = np.ones((4, 256), "float32"), np.zeros(4, "int32")
    ((one,),) = JaxProbe(model).recorded([batch])
    ((many,),) = JaxProbe(lockstep.distribute(model, 2)).recorded([batch])
    assert collections.Counter(name.partition("/")[0] for name in one) == {
        "output": 3,
        "gradient": 9,
    }
    assert first_mismatch(one, [many], 4, Bounds(1e-5, 1e-5, 1e-5)) is None


@pytest.mark.thorough
def test_verify_calls_what_differs_rounding():
    found = lockstep.verify(tuned("mixed_bfloat16"), (WORDS, TARGETS), devices=3)
    assert found.equal, str(found)
    assert "in float64 to 1e-10" in str(found)
