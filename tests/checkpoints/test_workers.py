"""Signals where processes of their own make the batches."""

from tests.processes.common import python

POOL = """
import multiprocessing, time
from lockstep.checkpoints.signals import Signals
with Signals() as signals:
    pool = multiprocessing.get_context("fork").Pool(2)
    pool.map(abs, range(4))
    pool.terminate()  # by SIGTERM to each of them
    workers = pool._pool
    for worker in workers:
        worker.join(20)
        if worker.exitcode is None:
            worker.kill()
    print([worker.exitcode for worker in workers], signals.asked)
"""


def test_a_forked_worker_is_ended_by_the_signal_that_a_fit_puts_off():
    assert python(POOL) == "[-15, -15] None"
