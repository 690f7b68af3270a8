"""The promise: in float64, training over N devices leaves what one device leaves, to 1e-10.

Every case is a test of its own. This runs all of one backend:
`KERAS_BACKEND=tensorflow python -m pytest tests/every_backend/test_cases.py --whole`.
"""

from importlib.util import find_spec

import pytest

from tests.conformance.cases import FAMILIES
from tests.conftest import BACKEND

DEVICES = {"jax": [1, 2, 3, 4, 8], "tensorflow": [1, 2, 3, 4], "torch": [1, 2, 3, 4]}

LIKE_ANOTHER = [
    # number by number, as Adam and SGD are; and a type or a length that another case has
    *("Adamax", "Nadam", "RMSprop, centered", "Adagrad", "Adadelta", "Lion", "Ftrl"),
    *("mixed_bfloat16 with Adam", "steps_per_execution=2", "schedule: piecewise"),
    *("NumPy dict", "NumPy list", "tf.data, dict inputs", "tf.data, class_weight"),
    *("PyDataset", "Grain MapDataset", "generator that ends", "TensorFlow tensors"),
]
"""Cases that the fixed sample leaves out, because it has others that differ in less."""

SAMPLE = {
    "tensorflow": {
        "scalar custom loss (Dice)": 2,
    },
    "torch": {
        "masked lstm, sgd": 3,
        "minibatch deviation": 3,
        "mixed_float16, loss scaled": 3,
    },
}
"""The quick cases of these backends, each with a number of devices."""

OF_JAX = ("LoRA, gradient penalty", "LoRA, an own step")
"""Cases in which the model calls JAX."""

EXCLUDED = {
    "tensorflow": {
        # Keras 3.15.1 on TensorFlow differs from itself on one device: in each epoch a reader
        # runs ahead of the validation steps, as far as it happens to.
        "generator that does not end",
        *OF_JAX,
        # Keras 3.15.1 on TensorFlow refuses these, on one device too.
        *("LoRA, mixed_bfloat16", "LoRA, bfloat16"),
    },
    "torch": {
        *OF_JAX,
        # Replicas draw for themselves: tests/torch/test_on_fits.py.
        *("Gaussian noise and Gaussian dropout", "alpha dropout", "random flips of images"),
        *("spatial and recurrent dropout", "random numbers of a layer's own"),
        # Keras 3.15.1 on PyTorch refuses these, on one device too.
        *("steps_per_execution=2", "steps_per_execution=3", "steps_per_execution beyond the epoch"),
        "masking layer and row weights",
    },
}


def _in_sample(name, devices, position):
    if BACKEND in SAMPLE:
        return SAMPLE[BACKEND].get(name) == devices
    if name.endswith("adamw"):  # one of them; the model with SGD is in the sample
        return name == "attention, adamw" and devices == 3
    if name in LIKE_ANOTHER or position % 2:
        return False
    return DEVICES[BACKEND][1 + position // 2 % 4] == devices


def _runs():
    cases = [(family, name) for family, named in FAMILIES.items() for name in named]
    for position, (family, name) in enumerate(cases):
        if name in EXCLUDED.get(BACKEND, ()):
            continue
        for devices in DEVICES[BACKEND]:
            marks = [] if _in_sample(name, devices, position) else [pytest.mark.whole]
            if BACKEND not in SAMPLE and position // 2 % 2:
                marks.append(pytest.mark.thorough)
            yield pytest.param(family, name, devices, marks=marks)


@pytest.mark.parametrize(("family", "name", "devices"), list(_runs()))
def test_n_devices_equal_one(worker, family, name, devices):
    if name.startswith("torch ") and find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    far = worker.difference(family, name, devices)
    assert not far, f"beyond the bound: {far}"
