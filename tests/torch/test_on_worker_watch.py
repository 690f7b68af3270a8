"""Workers that a signal has stopped are ended, whichever of the pool they are."""

import signal
import subprocess
import threading

from lockstep.engines.torch.ranks import pool


def test_each_worker_that_stays_stopped_is_killed_and_named(monkeypatch):
    monkeypatch.setattr(pool, "_EVERY", 0.02)
    monkeypatch.setenv("LOCKSTEP_PATIENCE", "0.1")
    for place in range(2):
        workers = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
        lost = threading.Event()
        watch = pool.WorkerWatch(workers, lost.set, lambda: None)
        try:
            workers[place].send_signal(signal.SIGSTOP)
            with watch.watching():
                assert lost.wait(30)
            assert list(watch.stopped) == [workers[place].pid]
            assert workers[place].wait() == -signal.SIGKILL
            assert workers[1 - place].poll() is None
        finally:
            watch.close()
            for worker in workers:
                worker.kill()
                worker.wait()
