"""Micro-batches on JAX: memory, random numbers of a part, and what only its proofs refuse."""

import dataclasses
from itertools import product

import jax
import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keras import layers, ops

import lockstep
from lockstep.core import micro_batches as texts
from lockstep.core.devices import micro_batches
from lockstep.engines.jax.parts.row_draws import PartKeys, PartRows
from lockstep.errors import UnsplitBatchWarning, UnsupportedModel
from tests.conformance.common import assert_same, weights
from tests.conformance.test_communication import collectives, training_program
from tests.models import Own, chain

ROWS = 22


def data(rows=ROWS, seed=2):
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=(rows, width)).astype("float32") for width in (4, 2))


def fit(made, **options):
    return made.fit(*data(), **{"batch_size": 8, "verbose": 0, "shuffle": False, **options})


# ------------------------------------------------------------------------------- memory


def words(head):
    inputs = keras.Input((32,), dtype="int32")
    x = layers.Embedding(50, 16)(inputs)
    x = layers.LayerNormalization()(x + layers.Dense(16)(layers.Dense(64, "gelu")(x)))
    return keras.Model(inputs, layers.Dense(head)(x))


def transformer():
    inputs = keras.Input((32,), dtype="int32")
    x = layers.Embedding(50, 16)(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8, dropout=0.1)(x, x))
    x = layers.LayerNormalization()(x + layers.Dense(16)(layers.Dense(64, "gelu")(x)))
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))


def recurrent():
    made = [keras.Input((32, 8)), layers.LSTM(16, return_sequences=True), layers.LSTM(16)]
    return keras.Sequential([*made, layers.Dense(4)])


def convolutional():
    made = [keras.Input((16, 16, 3))]
    made += [layers.Conv2D(8, 3, padding="same", activation="relu") for _ in range(4)]
    return keras.Sequential([*made, layers.GlobalAveragePooling2D(), layers.Dense(4)])


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: words(512), id="token head"),
        pytest.param(transformer, id="transformer"),
        pytest.param(recurrent, id="lstm", marks=pytest.mark.thorough),
        pytest.param(convolutional, id="cnn", marks=pytest.mark.thorough),
    ],
)
def test_four_parts_take_at_most_three_tenths_of_the_temporaries(make):
    """A head of 512 words has logits that are larger than all else: they never exist at once.

    `plan`, which knows no buffers of XLA, sees it too.
    """
    rows, targets = 64, (32,) if len(make().output_shape) == 3 else ()
    at_once, in_parts = (
        training_program(make(), 1, rows, targets=targets, micro_batch_size=size)[1]
        for size in (None, rows // 4)
    )
    at_once, in_parts = (
        program.memory_analysis().temp_size_in_bytes for program in (at_once, in_parts)
    )
    assert in_parts <= 0.3 * at_once

    def build():
        model = make()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    planned = [
        lockstep.plan(build, devices=1, batch_size=rows, micro_batch_size=size)
        .layouts[0]
        .temporaries
        for size in (None, rows // 4)
    ]
    assert planned[1] <= 0.4 * planned[0]


def test_no_row_moves_between_devices():
    """Part j has the j-th block of each device."""
    _, program = training_program("transformer", devices=8, rows=64, micro_batch_size=2)
    assert set(collectives(program.as_text())[1]) == {"all-reduce"}


# ------------------------------------------------------------------------------ layers


def test_quantized_layers_with_adapters_are_those_of_the_whole_batch():
    """Keras defines the gradient of a product with int8, and it is 0 for the scale."""
    found = []
    for size in (None, 3):
        made = chain()
        for layer in made.layers:
            layer.quantize("int8")
            layer.enable_lora(2)
        made.compile("sgd", "mse")
        if size:
            lockstep.distribute(made, 1, micro_batch_size=size)
        found.append((fit(made, epochs=2).history, weights(made)))
    assert_same(*found, atol=1e-6)


def test_the_first_rows_are_cut_into_parts_that_a_batch_may_have():
    """`take_along_axis` is another program for one row, and 12 rows are four parts of 3."""

    def sorted_along(layer, x):
        return ops.take_along_axis(x, ops.argsort(x, axis=-1), axis=-1)

    found = []
    for size in (None, 3):
        made = chain(Own(sorted_along))
        if size:
            lockstep.distribute(made, 1, micro_batch_size=size)
        x, y = data(24)
        history = made.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0).history
        found.append((history, weights(made)))
    assert_same(*found, atol=1e-6)


# ------------------------------------------------------------------------ random numbers

DRAWS = {
    "normal": keras.random.normal,
    "uniform": keras.random.uniform,
    "truncated": keras.random.truncated_normal,
    "whole numbers": lambda shape, seed: keras.random.randint(shape, 0, 100, seed=seed),
    "of 16 bits": lambda shape, seed: keras.random.uniform(shape, dtype="bfloat16", seed=seed),
    "dropout": lambda shape, seed: keras.random.dropout(ops.ones(shape), 0.3, seed=seed),
}


@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    kind=st.sampled_from(sorted(DRAWS)),
    seed=st.integers(0, 2**32 - 1),
    parts=st.integers(1, 4),
    devices=st.integers(1, 3),
    block=st.integers(1, 3),
    each=st.integers(1, 3),
    before=st.lists(st.integers(1, 3), max_size=2),
    after=st.lists(st.integers(1, 3), max_size=2),
)
def test_a_part_draws_the_numbers_of_its_rows(
    kind, seed, parts, devices, block, each, before, after
):
    """Part j has the j-th block of `block` rows of each device, in any dim, with `each` entries."""
    rows, of = devices * block, devices * parts * block
    whole, part = ((*before, number * each, *after) for number in (of, rows))
    expected = np.asarray(DRAWS[kind](whole, seed=seed), "float64")
    found = [
        np.asarray(_drawn(kind, part, whole, PartRows(rows, of, block, parts * block), j, seed))
        for j in range(parts)
    ]
    dim = len(before)
    blocks = np.stack(found).reshape(parts, *before, devices, block * each, *after)
    moved = np.moveaxis(blocks, 0, dim + 1)
    np.testing.assert_array_equal(moved.reshape(whole).astype("float64"), expected)


def _drawn(kind, part, whole, rows, number, seed):
    keys = PartKeys()
    keys.settle(rows, (((part, whole),),))
    with keys.drawn(rows.rows, np.uint32(number * rows.block)):
        return ops.cast(DRAWS[kind](part, seed=seed), "float32")


# ------------------------------------------------------------------------- what is counted


def test_parts_have_equal_sizes_within_the_bound():
    for rows, devices, size in product((1, 7, 11, 256, 75), (1, 2, 3), (1, 4, 32)):
        number, each = micro_batches(rows, devices, size)
        largest = -(-rows // devices)
        assert each <= size
        assert (number - 1) * each < largest <= number * each
        assert number == -(-largest // size)  # no more parts than are needed


def test_what_xla_cannot_split_runs_whole_in_parts_too():
    """XLA ended the process: the first rows were split unevenly over a sort."""

    def ordered():
        return Own(lambda self, x: ops.sort(x, axis=-1))

    one, made = chain(ordered()), lockstep.distribute(chain(ordered()), 3, micro_batch_size=2)
    with pytest.warns(UnsplitBatchWarning, match="the gradient of a sort"):
        fit(made)
    fit(one)
    assert_same(weights(made), weights(one), atol=1e-6)


class Noisy(keras.losses.Loss):
    """A loss that draws, and reads a metric of the model."""

    def __init__(self):
        super().__init__()
        self.seeds, self.seen = keras.random.SeedGenerator(3), None

    def call(self, y, found):
        noise = keras.random.normal(ops.shape(y), seed=self.seeds)
        return ops.mean((y + noise - found) ** 2, -1) * (1 + self.seen.result())


class Counted(keras.Sequential):
    """The loss of an epoch is a metric that the loss of a batch reads."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.noisy, self.seen = Noisy(), keras.metrics.Mean(name="seen")
        self.seeds, self.noisy.seen = self.noisy.seeds, self.seen

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.seen.update_state(y_pred)
        return super().compute_metrics(x, y, y_pred, sample_weight)


@pytest.mark.parametrize("devices", [1, 3])
def test_a_loss_that_draws_and_reads_a_metric_sees_all_rows(devices):
    found = []
    for size in (None, 2):
        keras.utils.set_random_seed(1)
        made = Counted([keras.Input((4,)), layers.Dense(2)])
        made.compile("sgd", made.noisy)
        if size is not None:
            lockstep.distribute(made, devices, micro_batch_size=size)
        history = fit(made, epochs=2)
        found.append((history.history["loss"], weights(made), np.array(made.seeds.state)))
    for one, parts in zip(*found, strict=True):
        assert_same(one, parts, atol=1e-6)


# --------------------------------------------------------------------------------- refusals


class Apart(keras.Sequential):
    """Its step calls the layers, and not the model."""

    def train_step(self, state, data):
        trainable, others, slots, metrics = state
        with keras.StatelessScope(zip(self.trainable_variables, trainable, strict=True)):
            found = self.layers[0](data[0])
        return {"mean": ops.mean(found)}, (trainable, others, slots, metrics)


def test_a_step_in_which_nothing_would_be_cut():
    made = Apart([keras.Input((4,)), layers.Dense(2)], name="apart")
    made.compile("sgd", "mse")
    assert refusal(made) == (
        "The train_step of 'apart' does not call self.stateless_call, so micro_batch_size=3 "
        "cannot split its rows:\n"
        "all rows of a device would run at once.\n"
        "Call self.stateless_call in the step, or remove micro_batch_size."
    )


def refusal(made, **options):
    lockstep.distribute(made, 1, micro_batch_size=3)
    before = weights(made)
    with pytest.raises(UnsupportedModel) as caught:
        fit(made, **options)
    assert_same(weights(made), before, atol=0)
    text = str(caught.value)
    assert len(text.splitlines()) <= 3
    assert max(map(len, text.splitlines())) <= 200
    return text


def test_a_layer_across_rows():
    centre = Own(lambda self, x: x - ops.mean(x, axis=0), name="centre")
    assert refusal(chain(centre)).startswith(
        "'centre' (Own) is not known to work row by row, as micro_batch_size needs:\n"
        "centre: reduce_sum over rows, then sub (test_micro_batches.py:"
    )


def test_a_loss_that_is_neither_a_sum_nor_a_mean():
    def call(self, x):
        self.add_loss(ops.sqrt(ops.sum(x**2)))
        return x

    assert refusal(chain(Own(call, name="odd"))).startswith(
        "'sequential' adds a loss that is neither the sum nor the mean over its rows:\n"
        "odd: reduce_sum over rows, then sqrt"
    )


def test_random_numbers_that_a_part_cannot_draw():
    seeds = keras.random.SeedGenerator(1)
    gamma = Own(lambda self, x: x + keras.random.gamma(ops.shape(x), 1.0, seed=seeds), name="gamma")
    gamma.seeds = seeds
    assert refusal(chain(gamma)) == (
        "'sequential': 'gamma' draws a key for each row, as keras.random.gamma, beta, binomial "
        "and shuffle do,\n"
        "so a micro-batch cannot draw the random numbers of its rows.\n"
        "Draw with keras.random.normal, uniform or dropout, or remove micro_batch_size."
    )


def test_a_number_of_rows_in_a_layer():
    merged = Own(lambda self, x: ops.reshape(x, (2, 24)) if x.shape[0] else x, name="merged")
    split = Own(lambda self, x: ops.reshape(x, (-1, 6)), name="split")
    text = refusal(chain(merged, split), steps_per_epoch=1)
    assert text.startswith("'sequential' works with a whole batch, but fails with the 3 rows of a")


@pytest.mark.parametrize("option", [{"run_eagerly": True}, {"jit_compile": False}])
def test_a_step_that_is_not_compiled(option):
    assert refusal(chain(**option)) == (
        "'sequential' was compiled with run_eagerly=True or jit_compile=False, but "
        "micro_batch_size=3 needs a compiled step.\n"
        "Remove both from compile(), or remove micro_batch_size."
    )


def test_rows_that_differ_in_the_first_batch(monkeypatch):
    """The second guard, with the first one out of the way, and something taken on trust."""
    from lockstep.engines.jax.parts import call_in_parts
    from lockstep.engines.jax.rowtrace.row_labels import Place, Rows

    plain = call_in_parts.trace_rows

    def all_by_rows(*args):
        found = plain(*args)
        labels = jax.tree.map(lambda _: Rows(0), found.outputs)
        return dataclasses.replace(found, outputs=labels, trusted=(Place("", "call", ""),))

    monkeypatch.setattr(call_in_parts, "trace_rows", all_by_rows)
    text = refusal(chain(Own(lambda self, x: x - ops.mean(x, axis=0))))
    assert text.startswith(
        "'sequential' gives different outputs if the first rows run in two parts"
    )


def test_the_texts_of_refusals_are_short():
    layer = layers.Dense(1, name="dense")
    for text in (
        texts.no_micro_batches("tensorflow", 8),
        texts.runs_alone(layer, "has a train_step of its own", 8),
        texts.adds_losses(layer),
        texts.draws_for_all_rows(layer),
        texts.not_compiled(layer, 8, [layer]),
        texts.has_no_rows(layer, (3, 4), 8),
    ):
        assert len(str(text).splitlines()) <= 3
