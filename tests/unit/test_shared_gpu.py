"""One GPU as several devices: who can have it, and what each process gets."""

import pytest

from lockstep.core import shared_gpu
from lockstep.core.fit_lines import fit_line
from lockstep.core.layout import DataParallel
from lockstep.errors import DeviceError, LaunchError, LockstepError, UnsupportedBackend
from lockstep.processes.shares import devices_of_each


@pytest.fixture
def one_gpu(tmp_path):
    """The root of a machine with one GPU."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    return tmp_path


def test_each_process_gets_the_gpu_and_a_part_of_the_memory_that_jax_takes(one_gpu):
    found = devices_of_each(3, None, {"LOCKSTEP_SHARE_GPU": "3"}, one_gpu)
    assert found == 3 * [
        {
            "CUDA_VISIBLE_DEVICES": "0",
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.250",
        }
    ]


@pytest.mark.parametrize("name", ["XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"])
def test_memory_that_the_user_divides_is_not_divided(name, one_gpu):
    (first, _) = devices_of_each(2, None, {"LOCKSTEP_SHARE_GPU": "2", name: "false"}, one_gpu)
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in first


def test_a_fraction_of_the_user_stays(one_gpu):
    given = {"LOCKSTEP_SHARE_GPU": "2", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1"}
    (first, _) = devices_of_each(2, None, given, one_gpu)
    assert first["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.1"


@pytest.mark.parametrize(
    ("processes", "gpus", "kind", "said"),
    [
        (
            2,
            1,
            LaunchError,
            "--processes=2 was requested, but LOCKSTEP_SHARE_GPU=3 makes 3 devices",
        ),
        (
            3,
            2,
            DeviceError,
            "makes 3 devices out of one GPU, but 2 GPUs are visible.\nSet CUDA_VISIBLE",
        ),
        (3, 0, DeviceError, "but 0 GPUs are visible.\nTo rehearse on virtual CPU devices, set"),
    ],
)
def test_other_numbers_of_processes_or_gpus_are_refused(processes, gpus, kind, said, tmp_path):
    (tmp_path / "dev").mkdir()
    for number in range(gpus):
        (tmp_path / "dev" / f"nvidia{number}").touch()
    with pytest.raises(kind) as caught:
        devices_of_each(processes, None, {"LOCKSTEP_SHARE_GPU": "3"}, tmp_path)
    assert said in str(caught.value)


def test_a_tpu_is_not_known_to_be_several_devices():
    with pytest.raises(DeviceError) as caught:
        shared_gpu.check_one_gpu(2, 0, tpus=8)
    assert "the devices are TPUs" in str(caught.value)
    assert "to train on 8 TPUs, or set LOCKSTEP_REHEARSE=2" in str(caught.value)


def test_a_rehearsal_comes_before_a_shared_gpu(one_gpu):
    given = {"LOCKSTEP_SHARE_GPU": "3", "LOCKSTEP_REHEARSE": "1"}
    assert devices_of_each(2, None, given, one_gpu) == [{}, {}]


@pytest.mark.parametrize("value", ["0", "two", "-1", "1.5"])
def test_a_number_of_shares_is_a_whole_number(value):
    with pytest.raises(DeviceError, match="a shared GPU needs a whole number of at least 1"):
        shared_gpu.shares_of_gpu({"LOCKSTEP_SHARE_GPU": value})


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "NCCL was not found, and version 2.30 or later is needed"),
        ((2, 27, 3), "NCCL 2.27.3 is installed, but 2.30 or later is needed"),
    ],
)
def test_an_nccl_that_cannot_share_is_refused(version, said):
    environ = {"LOCKSTEP_SHARE_GPU": "2"}
    with pytest.raises(UnsupportedBackend) as caught:
        shared_gpu.let_ranks_share(environ, version)
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3
    assert environ == {"LOCKSTEP_SHARE_GPU": "2"}


def test_a_newer_nccl_is_told_that_ranks_share():
    environ = {"LOCKSTEP_SHARE_GPU": "2"}
    shared_gpu.let_ranks_share(environ, (2, 30, 4))
    assert environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"


def test_the_line_of_fit_says_that_the_gpu_is_shared(monkeypatch):
    monkeypatch.delenv("LOCKSTEP_REHEARSE")
    monkeypatch.setenv("LOCKSTEP_SHARE_GPU", "2")
    layout = DataParallel(("gpu:0", "gpu:1"))
    line = fit_line("torch", layout, {"batch_size": 32, "x": None})
    assert "2 devices (gpu:0, gpu:1, one GPU, shared), global batch 32" in line
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.375")
    line = fit_line("jax", layout, {"batch_size": 32, "x": None})
    assert "one GPU, shared, 38% of its memory each)" in line


def test_the_version_of_nccl_is_read_from_a_library_that_is_here():
    version = shared_gpu.nccl_version()
    assert version is None or version > (2, 0)
    assert issubclass(UnsupportedBackend, LockstepError)
