"""Signals where processes of their own make the batches."""

from tests.processes.common import python

FORKED = """
import multiprocessing, time
from lockstep.checkpoints.signals import Signals
fork = multiprocessing.get_context("fork")
begun = fork.Event()
def work():
    begun.set()
    time.sleep(60)
with Signals() as signals:
    worker = fork.Process(target=work)
    worker.start()
    begun.wait(10)
    worker.terminate()  # by SIGTERM, as the pools of Keras's workers do
    worker.join(10)
    print(worker.exitcode, signals.asked)
    worker.kill()
"""


def test_a_forked_worker_is_ended_by_the_signal_that_a_fit_puts_off():
    assert python(FORKED) == "-15 None"
