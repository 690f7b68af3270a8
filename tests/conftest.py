"""One backend, several virtual devices, and nothing left behind."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("LOCKSTEP_REHEARSE", "8" if os.environ["KERAS_BACKEND"] == "jax" else "4")
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")
os.environ.setdefault("LOCKSTEP_INDUCTOR", "0")  # `tests/torch/test_on_compiled_steps.py` has it
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import atexit
import gc
import multiprocessing
import shutil
import signal
import tempfile
import threading
from importlib.metadata import version
from pathlib import Path

import pytest

import lockstep  # noqa: F401  (follows LOCKSTEP_REHEARSE before anything runs)
from lockstep.processes.shares import visible_gpus
from tests.tiers import TIERS, belongs, each_value_once

BACKEND = os.environ["KERAS_BACKEND"]
OF_ALL = ("every_backend", "pretended_gpus")
if BACKEND != "jax":  # each other backend has one folder, and those that all have
    _folders = {each.name for each in Path(__file__).parent.iterdir() if each.is_dir()}
    collect_ignore = sorted(_folders - {BACKEND, *OF_ALL})

REHEARSING = ("LOCKSTEP_", "KERAS_TORCH_DEVICE", "JAX_", "XLA_", "PYTEST_")
FOR_GPUS = {name: v for name, v in os.environ.items() if not name.startswith(REHEARSING)}
"""The environment of a process that sees the GPUs of this machine, if it has any."""

QUICK = "--xla_backend_optimization_level=0"
if version("jaxlib").startswith(("0.7.", "0.8.", "0.9.", "0.10.")):
    QUICK += " --xla_cpu_use_fusion_emitters=false"  # XLA of JAX 0.12 ends Python at this flag


def pytest_addoption(parser):
    parser.addoption("--thorough", action="store_true", help="also tests with the mark `thorough`")
    parser.addoption("--whole", action="store_true", help="all tests, compiled as users do")


def _tier(config):
    return next((tier for tier in TIERS[:0:-1] if config.getoption(f"--{tier}")), TIERS[0])


def pytest_configure(config):
    # Without --whole, XLA compiles in half of the time, to slower loops: operations, layouts and
    # collectives are the same. `--whole` compiles as users do; so does the demo in `.ci/run`.
    if BACKEND == "jax" and _tier(config) != "whole":
        os.environ.setdefault("XLA_FLAGS", QUICK)
        _compile_once()


def _compile_once():
    """Programs that several tests of this process have are compiled once, as users have it."""
    import jax

    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_collection_modifyitems(config, items):
    tier = _tier(config)
    items[:] = [item for item in items if _is_of_this_backend(item)]
    kept = [item for item in items if belongs(item, tier) and _has_its_gpus(item)]
    kept = kept if tier == "whole" else each_value_once(kept)
    ids = {id(item) for item in kept}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in ids])
    items[:] = kept


def pytest_collection_finish(session):
    """Modules and tests are no garbage: `clear_session` walked over them in each test."""
    gc.collect()
    gc.freeze()


def _is_of_this_backend(item):
    """A file that the command names is collected in every lane."""
    folder = item.nodeid.split("/")[1]
    return folder in (BACKEND, *OF_ALL) or folder.endswith(".py") or BACKEND == "jax"


def _has_its_gpus(item):
    needs = item.get_closest_marker("needs_gpu")
    return needs is None or len(visible_gpus(FOR_GPUS)) >= needs.args[0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip a test of another backend that imports PyTorch, where it is not installed.

    `.ci/run-newest` leaves it out. A lockstep that imports it without need fails.
    """
    try:
        return (yield)
    except ModuleNotFoundError as error:
        place = error.__traceback__
        while place.tb_next:
            place = place.tb_next
        of_tests = Path(place.tb_frame.f_code.co_filename).is_relative_to(Path(__file__).parent)
        if BACKEND == "torch" or error.name != "torch" or not of_tests:
            raise
        pytest.skip("PyTorch is not installed")


@pytest.fixture(autouse=True, scope="session")
def _usual_signals():
    """A shell that starts the tests in the background lets them ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    """A test that leaves a process or a thread of its own behind fails."""
    threads = set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t not in threads and not t.daemon]
    for thread in left:
        thread.join(timeout=5)
    left = [t.name for t in left if t.is_alive()]
    children = [child.name for child in multiprocessing.active_children()]
    assert not left, f"threads left behind: {left}"
    assert not children, f"processes left behind: {children}"


@pytest.fixture
def keras():
    import keras

    keras.utils.set_random_seed(7)
    yield keras
    keras.utils.clear_session()
