"""What real models do with a batch is split, and in float64 it is what one device gives."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import lockstep
from lockstep.errors import UnsplitBatchWarning, UnsupportedModel
from tests.precision import floats
from tests.tiers import every

WORDS, STEPS, WIDTH = 11, 5, 4


@pytest.fixture(autouse=True)
def _double_precision():
    with floats("float64"):
        yield


class TiedEmbedding(layers.Layer):
    """Looks words up, and gives the scores of words by the same table."""

    def build(self, shape):
        self.table = self.add_weight(shape=(WORDS, WIDTH), name="table")

    def call(self, x, reverse=False):
        if reverse:
            return ops.matmul(x, ops.transpose(ops.convert_to_tensor(self.table)))
        return ops.take(self.table, x, axis=0)


class LanguageModel(keras.Model):
    """Causal attention by hand, with sizes of the batch in shapes."""

    def __init__(self):
        super().__init__()
        self.words = TiedEmbedding()
        self.project = layers.Dense(3 * WIDTH)
        self.words.build(())

    def call(self, x):
        hidden = self.words(x)
        rows, steps = ops.shape(hidden)[0], ops.shape(hidden)[1]
        parts = ops.reshape(self.project(hidden), (rows, steps, 3, 2, WIDTH // 2))
        query, key, value = (parts[:, :, n] for n in range(3))
        places = ops.arange(steps)
        mask = ops.expand_dims(places[:, None] >= places[None, :], 0)
        mask = ops.broadcast_to(mask, (rows, steps, steps))[:, None]
        scores = ops.einsum("bqhd,bkhd->bhqk", query, key)
        scores = ops.softmax(ops.where(mask, scores, -1e9))
        mixed = ops.reshape(ops.einsum("bhqk,bkhd->bqhd", scores, value), (-1, steps, WIDTH))
        return ops.softmax(self.words(hidden + mixed, reverse=True))


class ClassToken(layers.Layer):
    """Puts a weight before the steps of each row."""

    def build(self, shape):
        self.token = self.add_weight(shape=(1, 1, WIDTH), name="token")

    def call(self, x):
        token = ops.tile(self.token, (ops.shape(x)[0], 1, 1))
        return ops.concatenate([token, x], axis=1)


class TwoTowers(keras.Model):
    """Each user is told from the items of the other rows; the loss looks up items."""

    def __init__(self):
        super().__init__()
        self.users, self.items = layers.Embedding(9, WIDTH), layers.Embedding(WORDS, WIDTH)
        self.items.build(())

    def call(self, x):
        return self.users(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        scores = ops.matmul(y_pred, ops.transpose(self.items(y)))
        labels = ops.arange(ops.shape(scores)[0])
        each = keras.losses.sparse_categorical_crossentropy(labels, scores, from_logits=True)
        return ops.mean(each)


class CustomStep(keras.Model):
    """A step in the form of `GradientTape`, around two networks and code across the batch."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential(
            [
                keras.Input((WIDTH,)),
                layers.Dense(8, activation="gelu"),
                layers.BatchNormalization(),
                layers.Dense(3, activity_regularizer=keras.regularizers.L2(0.1)),
            ]
        )
        self.decoder = keras.Sequential(
            [keras.Input((3,)), layers.Dense(8, activation="gelu"), layers.Dense(WIDTH)]
        )
        self.temperature = self.add_weight(shape=(), initializer="ones", name="temperature")
        self.seeds = keras.random.SeedGenerator(1)
        self.tracker = keras.metrics.Mean(name="loss")
        self.built = True

    @property
    def metrics(self):
        return [self.tracker]

    def loss_of(self, x):
        code = self.encoder(x, training=True)
        code = code + 0.1 * keras.random.normal(ops.shape(code), seed=self.seeds)
        code = code * self.temperature + 0.1 * ops.mean(code, axis=0)
        both = self.decoder(ops.concatenate([code, -code], axis=0))
        wanted = ops.concatenate([x, x[::-1]], axis=0)
        return ops.mean(ops.square(both - wanted)) + sum(self.losses)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = self.loss_of(x)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class CompiledStep(CustomStep):
    """Its step is a function of TensorFlow, and makes the slots of the optimizer."""

    train_step = tf.function(CustomStep.train_step)


class TwoOptimizers(CustomStep):
    """Each network has an optimizer and a tape of its own."""

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.other = keras.optimizers.Adam(0.02)

    def train_step(self, x):
        logs = super().train_step(x)
        weights = self.decoder.trainable_variables
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self.decoder(self.encoder(x, training=False)) - x))
        self.other.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return logs


class Penalty(CustomStep):
    """The gradient of a gradient."""

    def train_step(self, x):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                made = self.decoder(self.encoder(x, training=True))
            slope = inner.gradient(made, x)
            loss = ops.mean(ops.square(ops.norm(slope, axis=1) - 1)) + ops.mean(made)
        gradients = outer.gradient(loss, self.trainable_variables)
        pairs = zip(gradients, self.trainable_variables, strict=True)
        self.optimizer.apply_gradients([pair for pair in pairs if pair[0] is not None])
        return {"loss": loss}


class Centered(keras.Model):
    """Looks across the batch between two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Dense(8, activation="gelu"), layers.Dense(2)

    def call(self, x):
        hidden = self.first(x)
        return self.last(hidden - ops.mean(hidden, axis=0))


def _class_token():
    steps = keras.Input((STEPS, WIDTH))
    hidden = layers.MultiHeadAttention(2, 2)(*[ClassToken()(steps)] * 2)
    return keras.Model(steps, layers.Dense(2)(hidden[:, 0]))


def _stack_of_instances():
    """Attention over the instances of each row, which are stacked before the batch."""
    instances = [keras.Input((WIDTH,)) for _ in range(3)]
    stacked = ops.tanh(ops.stack([layers.Dense(4)(each) for each in instances]))
    shares = ops.softmax(layers.Dense(1)(stacked), axis=0)
    return keras.Model(instances, layers.Dense(2)(shares[0] * stacked[0] + shares[1] * stacked[2]))


def _numbers(*shape):
    return np.random.default_rng(3).normal(size=shape)


def _words(*shape):
    return np.random.default_rng(4).integers(0, 9, shape)


SPLIT = {
    "a language model with tied embeddings": (
        LanguageModel,
        (_words(20, STEPS), _words(20, STEPS)),
        # The bias of the keys has no gradient but rounding, which Adam would scale up.
        {
            "loss": "sparse_categorical_crossentropy",
            "metrics": ["accuracy"],
            "optimizer": keras.optimizers.SGD,
        },
    ),
    "a class token": (_class_token, (_numbers(20, STEPS, WIDTH), _numbers(20, 2)), {"loss": "mse"}),
    "two towers": (
        TwoTowers,
        (_words(20), _words(20)),
        {"optimizer": keras.optimizers.Adagrad},
    ),
    "a step with a tape": (CustomStep, (_numbers(20, WIDTH),), {}),
    "two optimizers": (TwoOptimizers, (_numbers(20, WIDTH),), {}),
}
IN_PART = {
    "a model across the batch": (
        Centered,
        (_numbers(20, WIDTH), _numbers(20, 2)),
        {"loss": "mse"},
        r"every device runs 'centered\w*' \(Mean\)",
    ),
    "a stack of instances": (
        _stack_of_instances,
        ([_numbers(20, WIDTH), 2 * _numbers(20, WIDTH), _numbers(20, WIDTH) ** 2], _numbers(20, 2)),
        {"loss": "mse"},
        "the first dim of the output of 'stack' is not the batch, so only the first device",
    ),
    "a step as a function": (
        CompiledStep,
        (_numbers(20, WIDTH),),
        {},
        "calls no layer that is known to work row by row, so only the first device",
    ),
    "a gradient of a gradient": (
        Penalty,
        (_numbers(20, WIDTH),),
        {},
        "computes a gradient inside a tape, so only the first device",
    ),
}


def _trained(make, data, options, devices):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(2)
    model = make()
    optimizer = options.get("optimizer", keras.optimizers.Adam)
    model.compile(**{**options, "optimizer": optimizer(0.05)})
    if devices > 1:
        lockstep.distribute(model, devices)
    history = model.fit(*data, batch_size=6, epochs=2, verbose=0, shuffle=False).history
    return [*history.values(), *model.get_weights(), *map(np.asarray, model.optimizer.variables)]


def _assert_equal(many, one):
    assert len(many) == len(one)
    for mine, right in zip(many, one, strict=True):
        np.testing.assert_allclose(mine, right, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", every(3, SPLIT, quick=1))
def test_a_real_pattern_is_split(name):
    """Batches of 6, 6, 6 and 2 rows on 3 devices; a warning that it is not split would fail."""
    _assert_equal(_trained(*SPLIT[name], 3), _trained(*SPLIT[name], 1))


@pytest.mark.parametrize("name", every(3, IN_PART, quick=1))
def test_what_is_not_split_is_said_and_exact(name):
    *case, said = IN_PART[name]
    with pytest.warns(UnsplitBatchWarning, match=said):
        many = _trained(*case, 3)
    _assert_equal(many, _trained(*case, 1))


class _CompiledHelper(CustomStep):
    @tf.function
    def update(self, x):
        return super().train_step(x)

    def train_step(self, x):
        return self.update(x)


def test_a_function_that_keeps_the_slots_of_before_is_refused():
    """Its updates would not reach the state that is saved."""
    with pytest.raises(UnsupportedModel, match="before they were copied to every device"):
        _trained(_CompiledHelper, (_numbers(20, WIDTH),), {}, 3)
