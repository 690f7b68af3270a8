"""Every conformance case with its layers on three devices equals one device, in float64."""

import pytest

from tests.conformance.cases import FAMILIES
from tests.conftest import BACKEND

LEFT_OUT = {
    # Operations that run one by one have no scopes of devices; test_bad_input.py has the message.
    "jax": {"run_eagerly=True", "jit_compile=False"},
    "tensorflow": {
        "run_eagerly=True",
        # Keras 3.15.1 differs from itself on one device; see test_cases.py.
        "generator that does not end",
        # Keras 3.15.1 raises an error on one device: `in_top_k` takes no float64.
        "AUC, F1, IoU, precision, recall",
    },
    "torch": {
        # Keras 3.15.1 on PyTorch refuses these, on one device too.
        *("steps_per_execution=2", "steps_per_execution=3", "steps_per_execution beyond the epoch"),
        "masking layer and row weights",
    },
}

SAMPLE = {
    "jax": {
        *("several inputs and outputs, adamw", "shared layer, adamw", "masked lstm, sgd"),
        *("added losses, sgd", "batch norm", "counters, running maximum and mean"),
        *("spatial and recurrent dropout", "mixed_float16, loss scaled"),
    },
    "tensorflow": {"shared layer, adamw", "spatial and recurrent dropout", "batch norm"},
    "torch": {"shared layer, adamw", "batch norm", "spatial and recurrent dropout"},
}


def _cases():
    for family, cases in FAMILIES.items():
        for name in (each for each in cases if each not in LEFT_OUT[BACKEND]):
            marks = [] if name in SAMPLE[BACKEND] else [pytest.mark.whole]
            yield pytest.param(family, name, marks=marks)


@pytest.mark.parametrize(("family", "name"), list(_cases()))
def test_layers_on_devices_equal_one_device(worker, family, name):
    """On PyTorch, the devices are those of tests/torch/simulated_gpus.py."""
    far = worker.difference(family, name, 3, by_layer=True)
    assert not far, f"beyond the bound: {far}"
