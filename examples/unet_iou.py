"""A U-Net that finds discs in noise; a metric of one's own names its checkpoints.

Checkpoints are written while the model trains over several devices, by Keras's own
callback, and each is a plain Keras file.
"""

import argparse
from pathlib import Path

import keras
import numpy as np
from check_file import check_file
from keras import layers, ops

import lockstep

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--devices", type=int, default=4)
parser.add_argument("--samples", type=int, default=2000)
parser.add_argument("--size", type=int, default=128, help="height and width, a multiple of 4")
parser.add_argument("--filters", type=int, default=32)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch", type=int, default=32, help="rows over all devices together")
parser.add_argument("--folder", type=Path, default=Path("unet"))
options = parser.parse_args()


class IoU(keras.metrics.Metric):
    """Intersection over union of the masks, over all rows seen."""

    def __init__(self, name="iou", **kwargs):
        super().__init__(name=name, **kwargs)
        self.intersection = self.add_weight(name="intersection", initializer="zeros")
        self.union = self.add_weight(name="union", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        wanted, found = y_true > 0.5, y_pred > 0.5
        both = ops.logical_and(wanted, found)
        either = ops.logical_or(wanted, found)
        self.intersection.assign_add(ops.sum(ops.cast(both, "float32")))
        self.union.assign_add(ops.sum(ops.cast(either, "float32")))

    def result(self):
        return self.intersection / ops.maximum(self.union, 1.0)


def convolutions(x, filters):
    for _ in range(2):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization()(x)
        x = layers.Activation("swish")(x)
    return x


def unet(size, filters):
    inputs = keras.Input((size, size, 1))
    fine = convolutions(inputs, filters)
    middle = convolutions(layers.AveragePooling2D(2)(fine), 2 * filters)
    coarse = convolutions(layers.AveragePooling2D(2)(middle), 4 * filters)
    x = layers.Conv2DTranspose(2 * filters, 2, strides=2)(coarse)
    x = convolutions(layers.Concatenate()([x, middle]), 2 * filters)
    x = layers.Conv2DTranspose(filters, 2, strides=2)(x)
    x = convolutions(layers.Concatenate()([x, fine]), filters)
    return keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid")(x))


def discs(samples, size, rng):
    """Noisy images with one disc each, and the masks of the discs."""
    row, column = np.mgrid[:size, :size]
    centres = rng.uniform(0.3 * size, 0.7 * size, (samples, 2, 1, 1))
    radii = rng.uniform(0.15 * size, 0.3 * size, (samples, 1, 1))
    masks = (row - centres[:, 0]) ** 2 + (column - centres[:, 1]) ** 2 < radii**2
    images = masks + rng.normal(0, 0.5, masks.shape)
    return images[..., None].astype("float32"), masks[..., None].astype("float32")


keras.utils.set_random_seed(1)
x, y = discs(options.samples, options.size, np.random.default_rng(0))

model = lockstep.distribute(unet(options.size, options.filters), options.devices)
model.compile(optimizer="adam", loss="binary_crossentropy", metrics=[IoU()])
model.fit(
    x,
    y,
    batch_size=options.batch,
    epochs=options.epochs,
    validation_split=0.2,
    callbacks=[
        keras.callbacks.ModelCheckpoint(
            options.folder / "unet-{epoch:02d}-{val_iou:.3f}.keras",
            monitor="val_iou",
            mode="max",
            save_best_only=True,
        )
    ],
)

best = max(options.folder.glob("unet-*.keras"))
model.load_weights(best)
check_file(best, model, x[:8])
