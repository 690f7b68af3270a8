"""The example of the old `multi_gpu_model`: Xception on random images over several devices.

The two names are one model here, so it does not matter which of them is saved.
"""

import argparse

import numpy as np
from check_file import check_file
from keras.applications import Xception

from lockstep import multi_gpu_model

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--gpus", type=int, default=8)
parser.add_argument("--samples", type=int, default=1000)
parser.add_argument("--size", type=int, default=224, help="height and width, at least 71")
parser.add_argument("--classes", type=int, default=1000)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch", type=int, default=256, help="rows over all devices together")
parser.add_argument("--file", default="my_model.keras")
options = parser.parse_args()

num_samples, num_classes = options.samples, options.classes
height = width = options.size

model = Xception(weights=None, input_shape=(height, width, 3), classes=num_classes)

parallel_model = multi_gpu_model(model, gpus=options.gpus)
parallel_model.compile(loss="categorical_crossentropy", optimizer="rmsprop")

x = np.random.random((num_samples, height, width, 3))
y = np.random.random((num_samples, num_classes))

parallel_model.fit(x, y, epochs=options.epochs, batch_size=options.batch)

model.save(options.file)

check_file(options.file, parallel_model, x[:4])
