"""The warm process that runs the conformance cases in float64."""

import pytest

from tests.conformance.worker import Worker
from tests.conftest import BACKEND

collect_ignore = []
if BACKEND == "tensorflow":  # which refuses sharded state
    collect_ignore += ["test_sharded_cases.py", "test_sharded_state.py"]
    collect_ignore += ["test_micro_batch_cases.py", "test_micro_batches.py"]  # and micro-batches
if BACKEND != "torch":  # which alone traces steps
    collect_ignore.append("test_traced_cases.py")


@pytest.fixture(scope="session")
def worker():
    """Return the worker of this backend, which starts when a test first asks for it."""
    started = Worker(BACKEND)
    yield started
    started.close()
