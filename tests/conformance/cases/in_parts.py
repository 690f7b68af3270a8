"""Cases for `micro_batch_size` alone: what may go wrong where rows run in parts."""

import keras
from keras import layers, ops

from tests.conformance.cases.case import Case, Sizes, features, rows_of

SHORT = Sizes(batch=11, rows=40, held_out=13)
"""Three batches of 11 rows, and one of 7."""


def compiled(model, loss="mse", **options):
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, **options)
    return model


class Own(layers.Layer):
    """Runs a function of the layer, its inputs, and a seed generator."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.seeds = keras.random.SeedGenerator(5)

    def call(self, x):
        return self.function(x, self.seeds)

    def compute_output_shape(self, shape):
        return shape


def draws(function):
    """A model with a layer that adds random numbers."""

    def make(_):
        inner = [layers.Dense(6, "tanh"), Own(lambda x, seeds: x + 0.1 * function(x, seeds))]
        return compiled(keras.Sequential([keras.Input((4,)), *inner, layers.Dense(2)]))

    return Case(make, sizes=lambda _: SHORT)


def _keys_of_the_user(x, seeds):
    import jax

    one, two = jax.random.split(seeds.next(), 2)
    return keras.random.normal(x.shape, seed=one) + keras.random.uniform((1, 6), seed=two)


def _of_every_kind(x, seeds):
    whole = keras.random.randint(x.shape, 0, 9, seed=seeds)
    short = keras.random.truncated_normal(x.shape, seed=seeds)
    chosen = keras.random.categorical(x, 6, seed=seeds)
    return sum(ops.cast(each, x.dtype) for each in (whole, short, chosen)) / 9


class Network(keras.Model):
    """Two dense layers with dropout."""

    def __init__(self):
        super().__init__()
        self.first, self.drop = layers.Dense(6, "tanh"), layers.Dropout(0.3)
        self.last = layers.Dense(2)

    def call(self, x, training=False):
        return self.last(self.drop(self.first(x), training=training))


class OwnStep(Network):
    """A training step of the user's own; its loss has a term of the whole batch."""

    def step_loss(self, trainable, others, x, y):
        found, others = self.stateless_call(trainable, others, x, training=True)
        return ops.mean((y - found) ** 2) + 0.1 * ops.var(found), others

    def train_step(self, state, data):
        import jax

        trainable, others, slots, metrics = state
        gradient = jax.value_and_grad(self.step_loss, has_aux=True)
        (loss, others), gradients = gradient(trainable, others, *data[:2])
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        return {"loss": loss}, (trainable, others, slots, metrics)


class Penalty(OwnStep):
    """The loss has the gradient with respect to the inputs: a gradient of a gradient."""

    def step_loss(self, trainable, others, x, y):
        import jax

        loss, after = super().step_loss(trainable, others, x, y)

        def total(x):
            return ops.sum(self.stateless_call(trainable, others, x, training=True)[0])

        return loss + ops.mean(jax.grad(total)(x) ** 2), after


class TwoCalls(OwnStep):
    """A step calls the model twice, with other numbers of rows, as a GAN does."""

    def step_loss(self, trainable, others, x, y):
        twice = ops.concatenate([x, -x])
        found, others = self.stateless_call(trainable, others, twice, training=True)
        again, others = self.stateless_call(trainable, others, x, training=True)
        return ops.mean((ops.concatenate([y, y]) - found) ** 2) + ops.mean(again) ** 2, others


class RowsAsAttribute(Network):
    """The call stores the number of rows, and the loss divides by it."""

    def call(self, x):
        self.rows = x.shape[0]
        return self.last(self.first(x))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.sum((y - y_pred) ** 2) / self.rows


class Temperature(Network):
    """One output has no rows."""

    def build(self, shape):
        self.first.build(shape)
        self.last.build((None, 6))
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        return {"rows": self.last(self.first(x)), "scale": self.scale * 1.0}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean((y - y_pred["rows"] * y_pred["scale"]) ** 2)


class Autoencoder(keras.Model):
    """A variational autoencoder with its divergence by `add_loss`."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = layers.Dense(6), layers.Dense(2)
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x):
        mean, log = ops.split(self.encoder(x), 2, axis=-1)
        drawn = mean + ops.exp(log / 2) * keras.random.normal(ops.shape(mean), seed=self.seeds)
        self.add_loss(-ops.mean(ops.sum(1 + log - mean**2 - ops.exp(log), -1)) / 2)
        self.add_loss(0.01 * ops.sum(ops.abs(mean)))
        return self.decoder(drawn)


def _nested(_):
    inner = keras.Sequential(
        [keras.Input((6,)), layers.Dense(6, activity_regularizer="l2"), layers.Dropout(0.3)]
    )
    shared, inputs = layers.Dense(6, kernel_regularizer="l1"), keras.Input((4,))
    x = shared(inner(shared(layers.Dense(6)(inputs))))
    return compiled(keras.Model(inputs, layers.Dense(2)(inner(x))))


def _group_norm(_):
    inputs = keras.Input((6, 6, 2))
    x = layers.GroupNormalization(2)(layers.Conv2D(4, 3, activation="relu")(inputs))
    x = layers.GlobalAveragePooling2D()(layers.MaxPooling2D()(x))
    return compiled(keras.Model(inputs, layers.Dense(2)(x)))


def _frozen_norm(_):
    norm = layers.BatchNormalization(trainable=False)
    inner = [layers.Dense(6), norm, layers.ReLU(), layers.Dense(2)]
    return compiled(keras.Sequential([keras.Input((4,)), *inner]))


def _missing_target(_):
    inputs = keras.Input((4,))
    x = layers.Dense(6, "tanh")(inputs)
    made = keras.Model(inputs, [layers.Dense(2)(x), layers.Dense(3)(x)])
    return compiled(made, ["mse", None])


def _two_directions(_):
    inner = layers.GRU(3, return_sequences=True, recurrent_dropout=0.2)
    made = [keras.Input((5, 2)), layers.Masking(), layers.Bidirectional(inner), layers.LSTM(3)]
    return compiled(keras.Sequential([*made, layers.Dense(2)]))


def _words(_):
    """Logits of each token, whose values of the loss and the metrics are computed in parts."""
    inner = [layers.Embedding(9, 4, mask_zero=True), layers.LSTM(5, return_sequences=True)]
    made = keras.Sequential([keras.Input((6,), dtype="int32"), *inner, layers.Dense(9)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2)
    top = keras.metrics.SparseTopKCategoricalAccuracy(2)
    return compiled(made, loss, metrics=["accuracy", top], weighted_metrics=["accuracy"])


def _tokens(rows, rng):
    return rng.integers(0, 9, (rows, 6))


def _fitted(model, training, held_out, sizes):
    """Fit only: Keras cannot join predictions without rows."""
    return model.fit(*training, batch_size=sizes.batch, shuffle=False, verbose=0).history


def _short(make, data=None):
    return Case(make, **({} if data is None else {"data": data}), sizes=lambda _: SHORT)


IN_PARTS = {
    "keys of the user's": draws(_keys_of_the_user),
    "draws of every kind": draws(_of_every_kind),
    "draws with rows second": draws(
        lambda x, seeds: ops.transpose(keras.random.normal((6, ops.shape(x)[0]), seed=seeds))
    ),
    "an own step": _short(lambda _: compiled(OwnStep())),
    "a gradient penalty": _short(lambda _: compiled(Penalty())),
    "two calls in a step": _short(lambda _: compiled(TwoCalls())),
    "rows as an attribute": _short(lambda _: compiled(RowsAsAttribute())),
    "an output without rows": Case(
        lambda _: compiled(Temperature(), None), live=_fitted, sizes=lambda _: SHORT
    ),
    "an autoencoder": _short(lambda _: compiled(Autoencoder())),
    "nested and shared": _short(_nested),
    "group norm": _short(_group_norm, rows_of(features(6, 6, 2), features(2))),
    "frozen norm": _short(_frozen_norm),
    "a missing target": _short(
        _missing_target,
        lambda rows, rng: (
            features(4)(rows, rng),
            [features(2)(rows, rng), features(3)(rows, rng)],
        ),
    ),
    "two directions": _short(_two_directions, rows_of(features(5, 2), features(2))),
    "words": _short(_words, rows_of(_tokens, _tokens)),
}
