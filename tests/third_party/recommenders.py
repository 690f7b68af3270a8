"""Recommenders of KerasRS and KerasHub layers, on made-up clicks."""

import keras
import keras_hub
import keras_rs
import numpy as np
from keras import layers, ops

from tests.third_party.row import DROPOUT, Row, numbers

USERS, ITEMS = 20, 30


class TwoTowers(keras.Model):
    """Each user is told from the items of the other rows of the batch; then items are looked up."""

    def __init__(self):
        super().__init__()
        self.users = layers.Embedding(USERS, 8)
        self.items = layers.Embedding(ITEMS, 8)
        self.retrieval = keras_rs.layers.BruteForceRetrieval(k=5, return_scores=True)
        self.retrieval.update_candidates(np.zeros((ITEMS, 8), keras.config.floatx()))
        self.loss_fn = keras.losses.CategoricalCrossentropy(from_logits=True)

    def call(self, x, training=False):
        user = self.users(x)
        if training:
            return {"user": user}
        scores, found = self.retrieval(user)
        return {"user": user, "scores": scores, "found": found}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        item = self.items(y)
        scores = ops.matmul(y_pred["user"], ops.transpose(item))
        return self.loss_fn(ops.eye(ops.shape(scores)[0], dtype=scores.dtype), scores)


def retrieval(distribute):
    model = TwoTowers()
    model.compile(keras.optimizers.Adagrad(0.1))
    distribute(model)
    rng = np.random.default_rng(1)
    users, items = rng.integers(0, USERS, 44), rng.integers(0, ITEMS, 44)
    model.items.build(())
    history = model.fit(
        users.astype("int32"), items.astype("int32"), batch_size=6, epochs=2, verbose=0
    ).history
    # As a copy: stock Keras on JAX cannot predict where two variables share a buffer.
    model.retrieval.update_candidates(np.array(ops.convert_to_numpy(model.items.embeddings)))
    return history, model.predict(np.arange(9, dtype="int32"), batch_size=6, verbose=0)


class SASRec(keras.Model):
    """Self-attention over what each user saw, and the next item told from one that was not next."""

    def __init__(self, length=10, dim=16):
        super().__init__()
        self.items = keras_hub.layers.ReversibleEmbedding(ITEMS + 1, dim)
        self.positions = keras_hub.layers.PositionEmbedding(length)
        self.dropout = layers.Dropout(DROPOUT)
        self.decoders = [
            keras_hub.layers.TransformerDecoder(32, 2, dropout=DROPOUT, normalize_first=True)
            for _ in range(1)
        ]
        self.norm = layers.LayerNormalization()
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True, reduction=None)

    def call(self, x, training=False):
        seen = x["seen"]
        padding = ops.not_equal(seen, 0)
        hidden = self.items(seen)
        hidden = self.dropout(hidden + self.positions(hidden), training=training)
        for decoder in self.decoders:
            hidden = decoder(hidden, decoder_padding_mask=padding, training=training)
        return self.norm(hidden)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        right = ops.sum(y_pred * self.items(x["next"]), axis=-1)
        wrong = ops.sum(y_pred * self.items(x["other"]), axis=-1)
        counted = ops.cast(ops.not_equal(x["next"], 0), y_pred.dtype)
        losses = self.loss_fn(ops.ones_like(right)[..., None], right[..., None])
        losses += self.loss_fn(ops.zeros_like(wrong)[..., None], wrong[..., None])
        return ops.sum(losses * counted) / ops.sum(counted)


def sasrec(distribute):
    model = SASRec()
    model.compile(keras.optimizers.Adam(1e-3))
    distribute(model)
    rng = np.random.default_rng(2)
    seen = rng.integers(1, ITEMS + 1, (28, 11)) * (np.arange(11) >= rng.integers(0, 6, (28, 1)))
    other = rng.integers(1, ITEMS + 1, (28, 10))
    x = {"seen": seen[:, :-1], "next": seen[:, 1:], "other": other}
    x = {name: ids.astype("int32") for name, ids in x.items()}
    history = model.fit(x, batch_size=6, epochs=2, verbose=0).history
    return history, model.predict(x, batch_size=6, verbose=0)


def dlrm(distribute):
    """Embeddings of categories and a network of numbers meet in dot products."""
    dense = keras.Input((6,), name="numbers")
    categories = [keras.Input((), dtype="int32", name=f"category_{n}") for n in range(3)]
    parts = [layers.Embedding(12, 8)(category) for category in categories]
    parts.append(layers.Dense(8, activation="gelu")(dense))
    hidden = keras_rs.layers.DotInteraction()(parts)
    hidden = keras_rs.layers.FeatureCross()(layers.Concatenate()([hidden, parts[-1]]))
    hidden = layers.Dense(8, activation="gelu")(hidden)
    model = keras.Model([dense, *categories], layers.Dense(1, activation="sigmoid")(hidden))
    model.compile(keras.optimizers.Adam(1e-3), "binary_crossentropy", metrics=["AUC"])
    distribute(model)
    rng = np.random.default_rng(3)
    x = {"numbers": numbers(44, 6)}
    x |= {f"category_{n}": rng.integers(0, 12, 44).astype("int32") for n in range(3)}
    y = rng.integers(0, 2, 44).astype("int32")
    history = model.fit(x, y, batch_size=6, epochs=2, verbose=0).history
    return history, model.predict(x, batch_size=6, verbose=0)


ROWS = {
    "KerasRS retrieval, two towers": Row(retrieval),
    "KerasRS and KerasHub SASRec": Row(sasrec),
    "KerasRS DLRM": Row(dlrm, unsplit={"jax": "not split: dot_interaction"}),
}
