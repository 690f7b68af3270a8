"""Ray Train starts the processes: what is read of it, and trainings on two nodes."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import keras
import numpy as np
import pytest

from lockstep import ray_train
from lockstep.errors import ProcessesDisagree
from lockstep.initialize import place_of_this_process
from tests.launch.test_training import assert_one_set, assert_trained, truth  # noqa: F401
from tests.launch.two_ray_nodes import SOON, Cluster, clean_environment

ROOT = Path(__file__).parents[2]


class Worker:
    """The second worker of four, on the first of two nodes, as Ray Train and Ray show it."""

    def __init__(self):
        self.version = "2.60.0"
        self.size = 4
        self.assigned = []
        self.share = None
        self.addresses = []

    def get_world_size(self):
        return self.size

    def get_world_rank(self):
        return min(1, self.size - 1)

    def get_local_rank(self):
        return min(1, self.size - 1)

    def get_local_world_size(self):
        return min(2, self.size)

    def get_accelerator_ids(self):
        return {"GPU": self.assigned}

    def get_assigned_resources(self):
        return {} if self.share is None else {"GPU": self.share}

    def broadcast_from_rank_zero(self, address):
        self.addresses.append(address)
        return "10.0.0.1:5000"


@pytest.fixture
def worker(monkeypatch):
    """A stand-in of Ray in a worker of Ray Train."""
    found = Worker()
    modules = {name: ModuleType(name) for name in ("ray", "ray.train", "ray.train.collective")}
    ray, train, collective = modules.values()
    ray.__version__, ray.train = found.version, train
    ray.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    ray.get_runtime_context = lambda: found
    train.get_context = lambda: found
    collective.broadcast_from_rank_zero = found.broadcast_from_rank_zero
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ray_train.with_address.cache_clear()
    yield found
    ray_train.with_address.cache_clear()


def test_the_place_is_that_of_ray_train_and_the_workers_meet_once(worker):
    place = place_of_this_process({})
    assert place_of_this_process({}) == place
    assert (place.rank, place.size, place.local_rank, place.local_size) == (1, 4, 1, 2)
    assert (place.coordinator, place.launcher) == ("10.0.0.1:5000", "Ray Train")
    assert len(worker.addresses) == 1
    assert worker.addresses[0].startswith("127.0.0.1:")
    named = place_of_this_process({"LOCKSTEP_COORDINATOR": "10.0.0.9:7"})
    assert named.coordinator == "10.0.0.9:7"
    assert place_of_this_process({"LOCKSTEP_PROCESSES": "1"}).size == 1


def test_one_worker_is_alone_and_makes_no_call(worker):
    worker.size = 1
    slurm = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2"}
    assert place_of_this_process(slurm).size == 1
    assert not worker.addresses


def test_a_process_that_is_no_worker_is_read_by_its_variables(worker, monkeypatch):
    def outside():
        raise RuntimeError("`get_context` cannot be used outside of a Ray Train function.")

    monkeypatch.setattr(sys.modules["ray.train"], "get_context", outside)
    assert place_of_this_process({}).size == 1


def test_a_scheduler_that_has_started_the_nodes_of_ray_is_not_followed(worker):
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "gpu[07-08]",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "0",
    }
    assert place_of_this_process(slurm).rank == 1


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4"}
REFUSED = {
    "another launcher": (
        {},
        TORCHRUN | {"RANK": "1"},
        "process 1 of 4 (Ray Train: ray.train.get_context()), and process 1 of 2 (torchrun: RANK",
    ),
    "an old Ray": ({"version": "2.40.0"}, {}, "Ray 2.40.0 has started this process"),
    "a part of a GPU": (
        {"assigned": ["3"], "share": 0.5},
        {"CUDA_VISIBLE_DEVICES": "3"},
        "Ray has assigned 0.5 of GPU 3 to it: two workers would train on one GPU",
    ),
    "the GPUs of another worker": (  # as JaxTrainer sets them without `jax_config`
        {"assigned": ["2", "3"]},
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        "It sees the GPUs 0,1 (CUDA_VISIBLE_DEVICES), but Ray has assigned 2,3\nto it",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_contradicts_ray_train_is_refused_with_both_values(case, worker, monkeypatch):
    state, environ, text = REFUSED[case]
    vars(worker).update(state)
    sys.modules["ray"].__version__ = worker.version
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ProcessesDisagree) as caught:
        place_of_this_process(environ)
    assert text in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize(("seen", "own"), [("2", True), ("0,2", False)])
def test_workers_that_see_all_gpus_of_their_node_divide_them(seen, own, worker, monkeypatch):
    """TorchTrainer shows them all; the other trainers show a worker its own."""
    worker.assigned = ["2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert place_of_this_process({}).divides_devices is own


@pytest.fixture(scope="module")
def cluster():
    made = Cluster()
    yield made
    made.end()


def run(cluster, script, *arguments, **environment):
    """Run a script that starts workers; return the exit status and what was printed."""
    more = {
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "KERAS_BACKEND": "jax",
        "LOCKSTEP_REHEARSE": "2",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "RAY_ADDRESS": cluster.address,
        "RAY_DEDUP_LOGS": "0",
        "RAY_TRAIN_V2_ENABLED": "1",
    }
    done = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        env={**clean_environment(), **more, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SOON,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


CASES = Path(__file__).with_name("ray_cases.py")


@pytest.mark.whole
@pytest.mark.parametrize("fault", [(), ("killed", 1)], ids=["", "a killed worker"])
def test_two_nodes_train_what_one_device_trains(fault, cluster, tmp_path, truth):  # noqa: F811
    folder = tmp_path / "run"
    folder.mkdir()
    status, out, error = run(cluster, CASES, "train", folder, 2, *fault)
    assert status == 0, out + error
    assert "returned (0, 2)" in out
    assert "jax, 4 devices" in out
    assert ("lockstep: resumes from" in out) is bool(fault)
    assert_trained(folder, truth)
    assert_one_set(folder, out.replace("(RayTrainWorker", "\n(RayTrainWorker"))


@pytest.mark.whole
def test_two_nodes_train_what_one_process_trains_on_pytorch_in_double_precision(cluster, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    on_torch = {"KERAS_BACKEND": "torch", "LOCKSTEP_REHEARSE": "1"}
    status, out, error = run(cluster, CASES, "train", folder, 2, **on_torch)
    assert status == 0, out + error
    one = tmp_path / "one"
    one.mkdir()
    script = Path(__file__).with_name("torch_train.py")
    status, out, error = run(cluster, script, one, **on_torch)
    assert status == 0, out + error
    alone, together = (np.load(tmp_path / f"{name}-0.npz") for name in ("one", "run"))
    assert alone.files == together.files
    for name in alone.files:
        assert np.abs(alone[name] - together[name]).max() <= 1e-10, name


@pytest.mark.whole
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_workers_with_shards_of_ray_data_train_what_one_device_trains(backend, cluster, tmp_path):
    more = {"KERAS_BACKEND": backend, "LOCKSTEP_REHEARSE": "2" if backend == "jax" else "1"}
    status, out, error = run(cluster, CASES, "own rows", tmp_path, 2, **more)
    assert status == 0, out + error
    assert "rows of 2 processes" in out
    (far,) = (line.split()[1] for line in out.splitlines() if line.startswith("far "))
    assert float(far) < 1e-10


@pytest.mark.whole
def test_a_torch_trainer_is_refused_as_it_has_made_a_process_group(cluster, tmp_path):
    on_torch = {"KERAS_BACKEND": "torch", "LOCKSTEP_REHEARSE": "1"}
    status, out, error = run(cluster, CASES, "TorchTrainer", tmp_path / "run", 2, **on_torch)
    assert status != 0
    assert "has called torch.distributed.init_process_group" in out + error
    assert "In Ray Train, use DataParallelTrainer" in out + error


@pytest.mark.whole
def test_the_example_goes_on_with_another_number_of_workers(cluster, tmp_path):
    small = ["--samples", 203, "--batch", 50, "--save-every", 2, "--folder", tmp_path / "run"]
    example = ROOT / "examples" / "ray_train.py"
    status, out, error = run(cluster, example, "--workers", 2, "--epochs", 1, *small)
    assert status == 0, out + error
    assert "jax, 4 devices" in out
    status, out, error = run(cluster, example, "--workers", 1, "--epochs", 2, *small)
    assert status == 0, out + error
    assert "lockstep: resumes from" in out
    assert "4 devices then, 2 now" in out
    whole = ["--workers", 1, "--epochs", 2, *small[:-1], tmp_path / "whole"]
    status, out, error = run(cluster, example, *whole, LOCKSTEP_REHEARSE="1")
    assert status == 0, out + error
    models = [keras.models.load_model(tmp_path / name / "model.keras") for name in ("run", "whole")]
    for mine, expected in zip(*(model.get_weights() for model in models), strict=True):
        assert np.abs(mine.astype("float64") - expected).max() <= 1e-5


@pytest.mark.whole
def test_a_worker_that_has_started_jax_too_early_is_told_the_call_to_make(cluster, tmp_path):
    status, out, error = run(cluster, CASES, "late", tmp_path / "run", 2)
    assert status != 0
    assert "(Ray Train: ray.train.get_context()), but JAX started its devices" in out + error
    assert "call lockstep.initialize() before the first Keras operation" in out + error


@pytest.mark.whole
def test_workers_of_a_trainer_that_see_the_same_gpus_are_refused(cluster, tmp_path):
    status, out, error = run(cluster, CASES, "gpus of JaxTrainer", tmp_path / "run", 2)
    assert status != 0
    assert "Use DataParallelTrainer, or JaxTrainer with jax_config=JaxConfig()" in out + error
    for case in ("gpus", "gpus of JaxTrainer with JaxConfig()"):
        status, out, error = run(cluster, CASES, case, tmp_path / "run", 2)
        assert status == 0, out + error
        assert {word for line in out.splitlines() for word in line.split("takes ")[1:]} == {
            "0",
            "1",
        }
