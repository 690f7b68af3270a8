"""The warm processes that run the cases."""

import pytest

from tests.conformance.worker import Worker


@pytest.fixture(scope="session")
def workers():
    """Return the worker of a backend, which starts when a test first asks for it."""
    started = {}

    def worker_of(backend):
        if backend not in started:
            started[backend] = Worker(backend)
        return started[backend]

    yield worker_of
    for worker in started.values():
        worker.close()
