"""Where each rank computes. The device "meta" stands for another one than that of Keras."""

import numpy as np
import pytest
import torch

from lockstep.engines.torch.placement import (
    check_placement,
    copies_on,
    torch_device_of,
)
from lockstep.errors import DeviceError
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
    with pytest.raises(DeviceError, match="of several kinds"):
        check_placement(("gpu:0", "cpu:0"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    check_placement(("gpu:0", "gpu:1"))
    with pytest.raises(DeviceError, match=r"gpu:0.\nName that one first, or .*set_device\(1\)"):
        check_placement(("gpu:1", "gpu:0"))


@pytest.mark.whole
def test_a_worker_imports_no_other_framework_with_keras():
    """JAX and scikit-learn were half of the time in which a worker starts."""
    script = (
        "import sys\n"
        "from lockstep.engines.torch.worker import import_keras\n"
        "import_keras()\n"
        "print([name for name in ('jax', 'sklearn', 'tensorflow') if name in sys.modules])\n"
        "import jax, sklearn"
    )
    assert python(script, KERAS_BACKEND="torch") == "[]"
