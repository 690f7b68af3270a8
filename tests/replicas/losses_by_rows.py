"""Losses and metrics take the rows of each replica where they work row by row, and are exact.

These tests are those of every engine with replicas.
"""

import warnings

import keras
import numpy as np
import pytest
from keras import layers, losses, metrics, ops

import lockstep
from lockstep.attach.attachment import attachment_of
from lockstep.errors import UnsplitBatchWarning
from lockstep.keras_compat import get_keras_mask, set_keras_mask
from tests.conformance.common import assert_same

ROWS, STEPS, WORDS = 22, 5, 7

ALIKE = losses.MeanSquaredError(), losses.Huber(0.3), losses.LogCosh(), losses.CosineSimilarity()
WITH_LOSSES = {
    "numbers": [*ALIKE, losses.MeanAbsoluteError(), losses.MeanSquaredLogarithmicError()],
    "shares": [
        losses.KLDivergence(),
        losses.Poisson(),
        losses.CategoricalCrossentropy(label_smoothing=0.1),
        losses.CategoricalFocalCrossentropy(),
    ],
    "yes or no": [losses.BinaryCrossentropy(), losses.BinaryFocalCrossentropy()],
    "signs": [losses.Hinge(), losses.SquaredHinge(), losses.CategoricalHinge()],
    "sets": [losses.Dice(), losses.Tversky()],
    # With Keras's own gamma the loss is 69, whose last bit is as much as the bound of the test.
    "classes": [losses.SparseCategoricalCrossentropy(), losses.Circle(gamma=2.0)],
}
ACROSS = {"hinge", "squared_hinge", "dice", "tversky", "circle"}
"""Those that look across the batch: at the signs of all labels, at sums over all rows, at pairs."""


def _targets(kind, rng):
    numbers = rng.normal(size=(ROWS, WORDS)).astype("float32")
    return {
        "numbers": np.abs(numbers),
        "shares": np.exp(numbers) / np.exp(numbers).sum(-1, keepdims=True),
        "yes or no": (numbers > 0).astype("float32"),
        "signs": (numbers > 1.5).astype("float32") - (np.arange(ROWS) == 3)[:, None] * 1.0,
        "sets": (numbers > 0).astype("float32"),
        "classes": rng.integers(0, WORDS, ROWS),
    }[kind]


def _activation(kind):
    return {"shares": "softmax", "yes or no": "sigmoid", "sets": "sigmoid"}.get(kind)


def leaves(made, x, y, weight=None):
    """All that training and evaluating leave."""
    fitted = made.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False, sample_weight=weight)
    seen = made.evaluate(x, y, batch_size=9, verbose=0, sample_weight=weight, return_dict=True)
    return [*made.get_weights(), *fitted.history.values(), *seen.values()]


def gathered(made):
    """The losses and metrics that are given the outputs of the whole batch."""
    session = attachment_of(made).session
    is_torch = keras.backend.backend() == "torch"
    choices = session.losses.choices if is_torch else session.steps.choices
    return {name for name, why in choices.items() if why is not None}


SAMPLE = {"signs", "classes"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[] if k in SAMPLE else [pytest.mark.whole]) for k in WITH_LOSSES],
)
def test_every_loss_of_keras(kind):
    """One output for each loss, with weights of the rows."""
    every = WITH_LOSSES[kind]
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(ROWS, 4)).astype("float32"), _targets(kind, rng)
    y = [y] * len(every)
    weight = rng.uniform(0, 2, ROWS).astype("float32")

    def make():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        hidden = layers.Dense(6, activation="tanh")(inputs)
        outputs = []
        for number, loss in enumerate(every):
            activation = "softmax" if kind == "classes" and number == 0 else _activation(kind)
            if loss.name == "circle":
                activation = ops.normalize
            outputs.append(layers.Dense(WORDS, activation=activation, name=f"out_{number}")(hidden))
        model = keras.Model(inputs, outputs)
        model.compile(
            keras.optimizers.SGD(0.01),
            every,
            metrics=[["mae"] if kind != "classes" else []] * len(every),
        )
        return model

    with_lockstep = lockstep.distribute(make(), devices=3)
    many = leaves(with_lockstep, x, y, weight)
    assert_same(many, leaves(make(), x, y, weight))
    assert gathered(with_lockstep) == {loss.name for loss in every} & ACROSS


def test_ctc_is_computed_of_the_whole_batch_and_the_layers_are_split():
    """TensorFlow's program of it has a legacy function, zeros from `Empty`, and a gradient."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(9, 12, 4)).astype("float32"), rng.integers(1, 6, (9, 4))

    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((12, 4)), layers.Conv1D(6, 3, padding="same")])
        model.compile(keras.optimizers.SGD(0.01), losses.CTC())
        return model

    with warnings.catch_warnings():
        warnings.simplefilter("error", UnsplitBatchWarning)
        many = leaves(lockstep.distribute(make(), devices=2), x, y)
    assert_same(many, leaves(make(), x, y))


def steps_model(loss, *seen, steps=STEPS, mask=False):
    keras.utils.set_random_seed(1)
    made = keras.Sequential([keras.Input((steps,), dtype="int32")])
    made.add(layers.Embedding(9, 6, mask_zero=mask))
    made.add(layers.Dense(WORDS, activation="softmax"))
    made.compile(keras.optimizers.SGD(0.1), loss, metrics=list(seen))
    return made


def words():
    rng = np.random.default_rng(0)
    return rng.integers(0, 9, (ROWS, STEPS)), rng.integers(0, WORDS, (ROWS, STEPS))


def _stepped(name, ignored, **options):
    sampled = (name, ignored) == ("both", 2)
    marks = [] if sampled else [pytest.mark.whole]
    return pytest.param(options, ignored, id=f"{name}-{ignored}", marks=marks)


@pytest.mark.parametrize(
    ("options", "ignored"),
    [
        _stepped(name, ignored, **options)
        for ignored in (None, 2)
        for name, options in {
            "plain": {},
            "a mask": {"mask": True},
            "a length that is not known": {"steps": None},
            "both": {"mask": True, "steps": None},
        }.items()
    ],
)
def test_a_class_for_each_step(options, ignored):
    """A language model's loss: the steps of a row are merged with the rows, and taken apart."""
    loss = losses.SparseCategoricalCrossentropy(ignore_class=ignored)

    def make():
        more = metrics.SparseTopKCategoricalAccuracy(2), metrics.SparseCategoricalCrossentropy()
        return steps_model(loss, "accuracy", *more, **options)

    with_lockstep = lockstep.distribute(make(), devices=3)
    assert_same(leaves(with_lockstep, *words()), leaves(make(), *words()))
    assert gathered(with_lockstep) == set()


def test_where_the_number_of_rows_is_known_while_tracing():
    """Keras tells it where batches divide the rows: two batches of 11, on 4, 4 and 3 rows."""

    def make():
        return steps_model("sparse_categorical_crossentropy", "accuracy")

    def trained(made):
        return made.fit(*words(), batch_size=ROWS // 2, verbose=0, shuffle=False).history

    with_lockstep = lockstep.distribute(make(), devices=3)
    assert_same(trained(with_lockstep), trained(make()))
    assert gathered(with_lockstep) == set()


class _Inner(layers.Layer):
    """Looks across the batch, and has a layer inside that makes a mask."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.words = layers.Embedding(9, 6, mask_zero=True)

    def call(self, x):
        found = self.words(x)
        mask = get_keras_mask(found)
        found = found - ops.mean(found, axis=0)
        set_keras_mask(found, mask)
        return found


@pytest.mark.filterwarnings("ignore::lockstep.errors.UnsplitBatchWarning")
def test_a_mask_made_inside_of_a_layer_that_runs_whole():
    def make():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((STEPS,), dtype="int32")
        outputs = layers.Dense(WORDS)(layers.LSTM(4, return_sequences=True)(_Inner()(inputs)))
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.1), losses.SparseCategoricalCrossentropy(True))
        return model

    many, one = lockstep.distribute(make(), devices=3), make()
    assert_same(leaves(many, *words()), leaves(one, *words()))
