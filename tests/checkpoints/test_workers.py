"""Signals where processes of their own make the batches."""

from tests.processes.common import python

FORKED = """
import multiprocessing, time
from lockstep.checkpoints.signals import Signals
with Signals() as signals:
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    worker.start()
    worker.terminate()  # by SIGTERM, as the pools of Keras's workers do
    worker.join(10)
    print(worker.exitcode, signals.asked)
    worker.kill()
"""


def test_a_forked_worker_is_ended_by_the_signal_that_a_fit_puts_off():
    assert python(FORKED) == "-15 None"
