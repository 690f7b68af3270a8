"""BERT fine-tuned to classify texts, with the checkpoint callback that people wrote.

With KerasHub installed the encoder is its `BertBackbone` (with random weights here;
`BertBackbone.from_preset` has trained ones), otherwise a small one built by hand.
"""

import argparse
from pathlib import Path

import keras
import numpy as np
from check_file import check_file
from keras import layers, ops

import lockstep

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--gpus", type=int, default=4)
parser.add_argument("--samples", type=int, default=5000)
parser.add_argument("--length", type=int, default=128, help="tokens in a text")
parser.add_argument("--vocabulary", type=int, default=30522)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--heads", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch", type=int, default=32, help="rows over all devices together")
parser.add_argument("--folder", type=Path, default=Path("bert"))
options = parser.parse_args()

CLASSES = 3


def bert_backbone():
    try:
        import keras_hub
    except ImportError:
        print("KerasHub is not installed: the encoder is one built by hand.")
        return encoder_by_hand()
    return keras_hub.models.BertBackbone(
        vocabulary_size=options.vocabulary,
        num_layers=options.layers,
        num_heads=options.heads,
        hidden_dim=options.width,
        intermediate_dim=4 * options.width,
        max_sequence_length=options.length,
    )


def encoder_by_hand():
    inputs = {
        name: keras.Input((options.length,), dtype="int32", name=name)
        for name in ("token_ids", "segment_ids", "padding_mask")
    }
    positions = ops.cumsum(ops.ones_like(inputs["token_ids"]), axis=-1) - 1
    x = layers.Add()(
        [
            layers.Embedding(options.vocabulary, options.width)(inputs["token_ids"]),
            layers.Embedding(2, options.width)(inputs["segment_ids"]),
            layers.Embedding(options.length, options.width)(positions),
        ]
    )
    x = layers.Dropout(0.1)(layers.LayerNormalization()(x))
    mask = ops.expand_dims(inputs["padding_mask"], 1)
    for _ in range(options.layers):
        attention = layers.MultiHeadAttention(options.heads, options.width // options.heads)
        attended = layers.Dropout(0.1)(attention(x, x, attention_mask=mask))
        x = layers.LayerNormalization()(layers.Add()([x, attended]))
        hidden = layers.Dense(4 * options.width, activation="gelu")(x)
        hidden = layers.Dropout(0.1)(layers.Dense(options.width)(hidden))
        x = layers.LayerNormalization()(layers.Add()([x, hidden]))
    pooled = layers.Dense(options.width, activation="tanh")(x[:, 0])
    return keras.Model(inputs, {"sequence_output": x, "pooled_output": pooled})


class ParallelModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves the model given to it, and not the one that `fit` runs: here they are one."""

    def __init__(self, model, *args, **kwargs):
        self.single_model = model
        super().__init__(*args, **kwargs)

    def set_model(self, model):
        super().set_model(self.single_model)


def texts(rng):
    """Random texts of random lengths; the class of a text is that of its first token."""
    shape = (options.samples, options.length)
    lengths = rng.integers(options.length // 2, options.length + 1, (options.samples, 1))
    padding_mask = (np.arange(options.length) < lengths).astype("int32")
    token_ids = rng.integers(1, options.vocabulary, shape).astype("int32") * padding_mask
    x = {
        "token_ids": token_ids,
        "segment_ids": np.zeros(shape, "int32"),
        "padding_mask": padding_mask,
    }
    return x, token_ids[:, 0] % CLASSES


keras.utils.set_random_seed(1)
backbone = bert_backbone()
pooled = backbone(backbone.input)["pooled_output"]
outputs = layers.Dense(CLASSES, activation="softmax")(layers.Dropout(0.1)(pooled))
model = keras.Model(backbone.input, outputs)

parallel_model = lockstep.multi_gpu_model(model, gpus=options.gpus)
parallel_model.compile(
    optimizer=keras.optimizers.Adam(2e-5),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)

x, y = texts(np.random.default_rng(0))
parallel_model.fit(
    x,
    y,
    batch_size=options.batch,
    epochs=options.epochs,
    validation_split=0.1,
    callbacks=[
        ParallelModelCheckpoint(
            model,
            filepath=options.folder / "bert-{epoch:02d}-{val_loss:.4f}.keras",
            monitor="val_loss",
            save_best_only=True,
        )
    ],
)

best = max(options.folder.glob("bert-*.keras"))
parallel_model.load_weights(best)
check_file(best, parallel_model, {name: array[:8] for name, array in x.items()})
