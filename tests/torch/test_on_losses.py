"""Losses and metrics by rows on PyTorch: what a process holds and sends."""

import keras
import numpy as np
import pytest
from keras import layers, losses, ops

import lockstep
from lockstep.engines.torch.exchange.group import RankGroup
from lockstep.errors import UnsplitBatchWarning
from tests.agreement import assert_equal, both
from tests.replicas.losses_by_rows import *  # noqa: F403
from tests.replicas.losses_by_rows import ROWS, WORDS, gathered, leaves, steps_model, words

MANY_WORDS, STEPS = 300, 8


@pytest.fixture
def bytes_gathered(monkeypatch):
    """The bytes that the first process receives of all processes in each gather."""
    found = []
    gather = RankGroup.gather

    def counted(self, rows, counts):
        whole = gather(self, rows, counts)
        found.append(whole.nbytes)
        return whole

    monkeypatch.setattr(RankGroup, "gather", counted)
    return found


def language_model(*, metrics=()):
    made = keras.Sequential([keras.Input((STEPS,), dtype="int32")])
    made.add(layers.Embedding(MANY_WORDS, 6, mask_zero=True))
    made.add(layers.Dense(MANY_WORDS))
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(keras.optimizers.SGD(0.1), loss, metrics=list(metrics))
    return made


@pytest.mark.parametrize("devices", [2, 3])
def test_a_process_receives_numbers_for_each_step_and_no_logits(devices, bytes_gathered):
    """With as many rows for each device, one number each of loss, accuracy and mask."""
    rows = 4 * devices
    rng = np.random.default_rng(0)
    x, y = (rng.integers(0, MANY_WORDS, (rows, STEPS)) for _ in range(2))
    made = lockstep.distribute(language_model(metrics=["accuracy"]), devices)
    made.fit(x, y, batch_size=rows, epochs=2, verbose=0)
    made.evaluate(x, y, batch_size=rows, verbose=0)
    of_one_number = rows * STEPS * np.dtype("float64").itemsize
    assert max(bytes_gathered) <= of_one_number
    assert max(bytes_gathered) < of_one_number * MANY_WORDS / 100


def test_a_metric_that_needs_all_outputs_says_so_once(monkeypatch, bytes_gathered):
    monkeypatch.setattr("lockstep.engines.torch.steps.loss_sharding._LARGE", 2**10)

    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.seen = self.add_weight(name="seen", initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.seen.assign(ops.maximum(self.seen, ops.max(y_pred)))

        def result(self):
            return ops.convert_to_tensor(self.seen)

    rng = np.random.default_rng(0)
    x, y = (rng.integers(0, MANY_WORDS, (12, STEPS)) for _ in range(2))
    one, many = both(lambda: language_model(metrics=[Largest(), "accuracy"]))
    with pytest.warns(UnsplitBatchWarning) as warned:
        found = many.fit(x, y, batch_size=6, epochs=2, verbose=0, shuffle=False).history
    right = one.fit(x, y, batch_size=6, epochs=2, verbose=0, shuffle=False).history
    assert_equal(found, right)
    said = [each.message for each in warned if each.category is UnsplitBatchWarning]
    assert [str(message).split("(")[0] for message in said] == [
        "On PyTorch every device gathers the outputs of 'sequential' for 'largest' "
    ]
    assert gathered(many) == {"largest"}
    assert max(bytes_gathered) == 6 * STEPS * MANY_WORDS * 8


class Counted(losses.Loss):
    """A loss that is another one at each call."""

    def __init__(self):
        super().__init__(name="counted")
        self.calls = 0

    def call(self, y_true, y_pred):
        self.calls += 1
        return self.calls * ops.mean(ops.square(y_true - y_pred), axis=-1)


class Whole(losses.Loss):
    """A loss with a `__call__` of its own, which sees all outputs."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.sum(ops.square(y_true - y_pred)) / ops.cast(ops.shape(y_pred)[0], y_pred.dtype)


class Norm(keras.Model):
    """A model with losses and metrics of its own."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.sum(ops.square(y - y_pred)) / ops.max(ops.abs(y_pred))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "top": ops.max(y_pred)}


def noisy(y_true, y_pred):
    noise = keras.random.normal(ops.shape(y_pred), seed=3, dtype=y_pred.dtype)
    return ops.mean(ops.square(y_true - y_pred + noise), axis=-1)


def two_outputs(loss, metrics=None, kind=keras.Model, **options):
    inputs = keras.Input((4,))
    hidden = layers.Dense(6, activation="tanh")(inputs)
    outputs = {name: layers.Dense(3, name=name)(hidden) for name in ("left", "right")}
    made = kind(inputs, outputs if options.pop("several", True) else outputs["left"])
    made.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, metrics=metrics, **options)
    return made


@pytest.mark.each_value_once
@pytest.mark.parametrize(
    ("build", "whole"),
    [
        (lambda: two_outputs({"left": "mse", "right": "mae"}, {"left": ["mae"]}), set()),
        (lambda: two_outputs({"left": "mse"}, {"right": ["mae"]}), set()),
        (
            lambda: two_outputs(
                {"left": Counted(), "right": "mse"}, loss_weights={"left": 2.0, "right": 0.5}
            ),
            {"counted"},
        ),
        (lambda: two_outputs(Whole(), several=False), set()),
        (lambda: two_outputs(losses.Huber(reduction="sum"), ["mse"], several=False), set()),
        (lambda: two_outputs(noisy, several=False), {"noisy"}),
        (lambda: two_outputs(None, kind=Norm, several=False), set()),
        (lambda: two_outputs(losses.MeanSquaredError(dtype="float32"), several=False), set()),
    ],
    ids=["two", "one each", "counted", "a call", "a sum", "noisy", "own", "a cast"],
)
@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@pytest.mark.parametrize("rows", [2, 11])
def test_uneven_batches_give_the_logs_and_weights_of_one_device(build, whole, rows):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 4)), rng.normal(size=(rows, 3))
    one, many = both(build)
    if len(one.outputs) > 1:
        y = {"left": y, "right": -y}
    run = [leaves(made, x, y) for made in (one, many)]
    assert_equal(*run)
    assert gathered(many) == whole


def test_a_batch_of_one_row_is_compared_with_no_other():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(1, 4)), rng.normal(size=(1, 3))
    one, many = both(lambda: two_outputs("mse", ["mae"], several=False))
    assert_equal(*[leaves(made, x, y) for made in (one, many)])


def test_a_loss_that_is_compiled_anew_is_followed_anew():
    one, many = both(lambda: steps_model("sparse_categorical_crossentropy"))
    for made in (one, many):
        made.fit(*words(), batch_size=ROWS, verbose=0)
        made.compile(keras.optimizers.SGD(0.1), _largest_of_all)
    assert_equal(*[leaves(made, *words()) for made in (one, many)])
    assert "_largest_of_all" in gathered(many)


def _largest_of_all(y_true, y_pred):
    return losses.sparse_categorical_crossentropy(y_true, y_pred) * ops.max(y_pred) / WORDS


class Shard:
    """The first two of four rows; the other replica has zeros."""

    rank, size, rows, counts, scale, is_over = 0, 2, 4, (2, 2), 2, False
    backward_order = None  # gradients come from the thread of the step

    def __init__(self):
        self.group, self.asked = self, 0

    def true_rows(self, own, name):
        return own

    def gather(self, own, counts):
        import torch

        self.asked += 1
        return torch.cat([own, torch.zeros_like(own)])


def test_what_rows_are_asked():
    """Code of Keras sees the form of the global batch; values are gathered when they are read."""
    import torch

    from lockstep.engines.torch.steps.rows import leave

    replica = Shard()
    own = torch.arange(6.0).reshape(2, 3).requires_grad_()
    made = leave(own, replica, "An output")
    cast = ops.convert_to_tensor(made, dtype="float64")
    assert (tuple(cast.shape), cast.dtype, len(cast), cast.ndim) == ((4, 3), torch.float64, 4, 2)
    assert ops.convert_to_tensor(cast, dtype="float64") is cast
    assert (made.requires_grad, cast.requires_grad, made.to(torch.int32).requires_grad) == (
        (True, True, False)
    )
    assert not replica.asked
    assert float((cast * 2)[1, 2].detach()) == 10
    assert float(ops.sum(made).detach()) == 15
    assert replica.asked == 1
    (cast * made).sum().backward()  # of a loss that is divided by the number of replicas
    np.testing.assert_array_equal(own.grad, 4 * own.detach())
