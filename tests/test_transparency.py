"""The promise: a model trained over three devices is the model that one device trains.

Each variable of the model and of its optimizer is compared, in float64, on the backend at hand.
`LOCKSTEP_REHEARSE=3 python -m tests.test_transparency` prints the largest difference.
"""

import os
import subprocess
import sys

import lockstep  # before Keras, so that LOCKSTEP_REHEARSE counts


def train(devices=None):
    """Train a model that notices a wrong row; return its variables and the losses of epochs."""
    import keras
    import numpy as np

    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((8,), dtype="int32"),
            keras.layers.Embedding(20, 6, mask_zero=True),
            keras.layers.LSTM(5),
            keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3),
        ]
    )
    model.compile(keras.optimizers.AdamW(0.01, clipnorm=1.0), "mse", metrics=["mae"])
    if devices:
        lockstep.distribute(model, devices)
    rng = np.random.default_rng(0)
    x, y, row_weights = rng.integers(0, 20, (53, 8)), rng.normal(size=(53, 3)), rng.random(53)
    fitted = model.fit(x, y, batch_size=10, epochs=2, sample_weight=row_weights, verbose=0)
    variables = {each.path: each for each in model.variables + model.optimizer.variables}
    arrays = {path: keras.ops.convert_to_numpy(each) for path, each in variables.items()}
    return arrays | {name: np.asarray(value) for name, value in fitted.history.items()}


def largest_difference():
    """Return the largest difference of three devices from one, of any value."""
    import lockstep.keras_compat

    lockstep.keras_compat.compute_in_float64()
    one, three = train(), train(devices=3)
    assert one.keys() == three.keys()
    return max(abs(one[name] - three[name]).max() for name in one)


def test_three_devices_leave_what_one_device_leaves():
    script = [sys.executable, "-m", "tests.test_transparency"]
    environment = os.environ | {"LOCKSTEP_REHEARSE": "3"}
    printed = subprocess.run(script, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert 0.0 <= float(printed.stdout.split()[-1]) <= 1e-10


if __name__ == "__main__":
    print(largest_difference())
