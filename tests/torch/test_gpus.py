"""PyTorch on real GPUs. No machine with one has run these yet: they run where GPUs are."""

import subprocess
import sys

import pytest

from tests.conftest import FOR_GPUS


def run(request, *arguments):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *map(str, arguments)],
        cwd=request.config.rootpath,
        env={**FOR_GPUS, "KERAS_BACKEND": "torch"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.needs_gpu(2)
@pytest.mark.parametrize(
    "case", ["everything", "sharded", "micro_batches", "branches", "resumed", "checkpointed"]
)
def test_several_gpus_leave_what_one_device_leaves(case, request, tmp_path):
    run(request, "tests.pretended_gpus.training", tmp_path, case)


@pytest.mark.needs_gpu(2)
@pytest.mark.parametrize(
    "name", ["moved", "killed", "branches", "branches_and_cpu", "branches_clipped"]
)
def test_several_gpus(name, request):
    run(request, "tests.torch.on_gpus", name)


@pytest.mark.needs_gpu(1)
def test_devices_that_ranks_cannot_have_are_refused(request):
    run(request, "tests.torch.on_gpus", "refused")
