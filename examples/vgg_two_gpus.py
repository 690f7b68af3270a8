"""VGG16 on two chosen GPUs, as it was written for `multi_gpu_model`.

The variable has to be set before the first operation; then `gpus=2` are those two.
"""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = "0, 1"

import argparse

import keras
import numpy as np
from check_file import check_file

import lockstep

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--samples", type=int, default=2000)
parser.add_argument("--size", type=int, default=224, help="height and width, at least 32")
parser.add_argument("--classes", type=int, default=10)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch", type=int, default=64, help="rows over both GPUs together")
parser.add_argument("--file", default="vgg16.keras")
options = parser.parse_args()

model = keras.applications.VGG16(
    weights=None, input_shape=(options.size, options.size, 3), classes=options.classes
)
parallel_model = lockstep.multi_gpu_model(model, gpus=2)
parallel_model.compile(
    optimizer=keras.optimizers.SGD(learning_rate=0.01, momentum=0.9),
    loss="categorical_crossentropy",
    metrics=["accuracy"],
)

rng = np.random.default_rng(0)
x = rng.random((options.samples, options.size, options.size, 3), dtype="float32")
y = keras.utils.to_categorical(rng.integers(options.classes, size=options.samples), options.classes)

parallel_model.fit(x, y, epochs=options.epochs, batch_size=options.batch, validation_split=0.2)

model.save(options.file)

check_file(options.file, parallel_model, x[:8])
