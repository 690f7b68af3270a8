"""Where each rank computes. The device "meta" stands for another one than that of Keras."""

import numpy as np
import pytest
import torch

from lockstep.engines.torch.exchange import accelerators, placement
from lockstep.engines.torch.exchange.placement import check_placement, copies_on, torch_device_of
from lockstep.engines.torch.same_model.settings import (
    apply_settings,
    current_settings,
    full_precision,
)
from lockstep.errors import DeviceError, UnsupportedBackend
from tests.processes.common import python

META = torch.device("meta")


def test_names():
    assert torch_device_of("gpu:1") == torch.device("cuda", 1)
    assert torch_device_of("cpu:1") == torch.device("cpu")


def test_batches_are_copied():
    rows = torch.ones(3)
    assert copies_on(META, (rows, None))[0].device == META
    copy, _ = copies_on(rows.device, (rows, None))
    copy += 1
    np.testing.assert_array_equal(rows, np.ones(3))


def test_devices_that_ranks_cannot_have(monkeypatch):
    with pytest.raises(DeviceError, match="of different kinds"):
        check_placement(("gpu:0", "cpu:0"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(accelerators.dist, "is_nccl_available", lambda: False)
    check_placement(("gpu:0",))
    with pytest.raises(UnsupportedBackend, match="has no NCCL"):
        check_placement(("gpu:0", "gpu:1"))
    monkeypatch.setattr(accelerators.dist, "is_nccl_available", lambda: True)
    check_placement(("gpu:0", "gpu:1"))
    with pytest.raises(DeviceError, match=r"gpu:0.\nName this GPU first, or .*set_device\(1\)"):
        check_placement(("gpu:1", "gpu:0"))


@pytest.mark.whole
def test_a_worker_imports_no_other_framework_with_keras():
    """They were most of the time in which a worker starts."""
    script = (
        "import sys\n"
        "from lockstep.engines.torch.ranks.worker import import_keras\n"
        "import_keras()\n"
        "names = ('jax', 'sklearn', 'tensorflow', 'pandas', 'matplotlib')\n"
        "print([name for name in names if name in sys.modules])\n"
        "import jax, sklearn, pandas, matplotlib"
    )
    assert python(script, KERAS_BACKEND="torch") == "[]"


def test_keras_on_a_device_that_lockstep_does_not_know_is_refused(monkeypatch):
    """The first step ended in an error of PyTorch about types of tensors."""
    monkeypatch.setattr(placement, "torch_default_device", lambda: "mps:0")
    with pytest.raises(UnsupportedBackend, match=r"on 'mps', .*\n.*\nSet KERAS_TORCH_DEVICE=cpu"):
        placement.keras_uses_gpus()


def test_the_new_names_of_precision_reach_the_workers():
    """Reading the old names raises once a new one is set: the first step of a pool did."""
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this PyTorch has the old names alone")
    before = current_settings()["precision"]
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        sent = current_settings()
        with full_precision():
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert current_settings() == sent
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        apply_settings(sent)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert current_settings() == sent
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
        torch.backends.cudnn.conv.fp32_precision = "tf32"
    assert current_settings()["precision"] == before


def test_a_trial_writes_into_no_tensor_that_it_has_not_changed():
    """NaN is not equal to itself: parts of sharded variables were said to be changed in place."""
    kept, changed = torch.tensor([1.0, float("nan")]), torch.zeros(2)
    undo = placement.Undo([kept, changed])
    undo.save()
    changed += 1
    before = kept._version
    undo.put_back()
    assert kept._version == before
    assert not changed.any()
