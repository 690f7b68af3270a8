"""Models whose layers are put on devices, and how they are trained and compared."""

import json
import re
import zipfile
from contextlib import nullcontext

import keras
import numpy as np

import lockstep

ROWS = 26


def data(seed=0):
    rng = np.random.default_rng(seed)
    x = [rng.normal(size=(ROWS, 5, 3)).astype("float32") for _ in range(2)]
    return x, rng.normal(size=(ROWS, 2)).astype("float32")


def two_branches(devices=None, optimizer="adam", **options):
    """The old recipe: a shared LSTM on two devices, and the rest on a third."""
    keras.utils.clear_session(free_memory=False)  # the names of layers begin anew
    keras.utils.set_random_seed(4)
    on = [nullcontext()] * 3 if devices is None else [lockstep.on(device) for device in devices]
    a, b = keras.Input((5, 3), name="a"), keras.Input((5, 3), name="b")
    shared = keras.layers.LSTM(4, name="shared")
    with on[0]:
        encoded_a = shared(a)
    with on[1]:
        encoded_b = keras.layers.Dense(3, name="second")(shared(b))
    with on[2]:
        merged = keras.layers.Concatenate(name="merged")([encoded_a, encoded_b])
    outputs = keras.layers.Dense(2, name="head")(keras.layers.Dropout(0.3, name="drop")(merged))
    model = keras.Model([a, b], outputs, name="two_branches")
    model.compile(optimizer, "mse", metrics=["mae"], **options)
    return model


def chain(count=6, norm=False):
    keras.utils.set_random_seed(4)
    layers = [keras.layers.Dense(8, activation="tanh", name=f"dense_{n}") for n in range(count)]
    if norm:
        layers.insert(2, keras.layers.BatchNormalization(name="norm"))
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("adam", "mse")
    return model


def rows(count=22):
    rng = np.random.default_rng(2)
    return rng.normal(size=(count, 4)).astype("f4"), rng.normal(size=(count, 8)).astype("f4")


def train(model, x, y, **options):
    keras.utils.set_random_seed(6)  # of the shuffling
    options = {"batch_size": 8, "epochs": 2, "verbose": 0, "validation_split": 0.2, **options}
    history = model.fit(x, y, **options).history
    found = {name: np.array(values) for name, values in history.items()}
    found["predict"] = model.predict(x, batch_size=7, verbose=0)
    found["evaluate"] = np.array(model.evaluate(x, y, verbose=0))
    slots = model.optimizer.variables
    return found | {v.path: keras.ops.convert_to_numpy(v) for v in [*model.variables, *slots]}


def assert_equal_runs(one, many):
    """The tests of PyTorch make a process compute in float64."""
    bound = 1e-10 if keras.config.floatx() == "float64" else 1e-6
    for mine, theirs in zip(many.values(), one.values(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=bound)


def device_of(variable):
    """The name of the device of a variable; "lazy" are those that a test of PyTorch simulates."""
    if keras.backend.backend() == "tensorflow":
        return variable.value.device.split("/device:")[1].lower()
    if keras.backend.backend() == "torch":
        return str(variable.value.device).replace("lazy", "gpu")
    (device,) = variable.value.devices()
    return f"cpu:{device.id}"


def config_in(path):
    with zipfile.ZipFile(path) as file:
        text = file.read("config.json").decode()
    # Keras writes the identity of an object in this process.
    return json.loads(re.sub(r'"shared_object_id": \d+', "", text).replace(", }", "}"))
