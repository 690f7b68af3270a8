"""The processes of all devices but the first: started once, and kept warm between calls."""

import atexit
import itertools
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing.connection import Connection
from socket import socketpair
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from lockstep.core.own_code import is_own
from lockstep.core.rank_waits import ANSWER, Waits, parted
from lockstep.engines.torch.exchange.group import HOST, OTHER_CODE, PeerLost, RankGroup
from lockstep.engines.torch.exchange.placement import torch_device_of
from lockstep.engines.torch.ranks.messages import BatchMemory, load_error, new_file
from lockstep.errors import UnsupportedModel, WorkerDied
from lockstep.processes.coordination import patience

_START = """\
import json, sys
options = json.loads(sys.argv[1])
sys.path[:] = options.pop("path")
from lockstep.engines.torch.ranks.worker import main
main(**options)
"""
_TO_REPORT = 20.0
"""Seconds that workers have to report after one of them was lost."""

_TO_END = 5.0
"""Seconds that a worker has to end after its connection was closed."""

_IDLE = 60.0
"""Seconds that workers wait for the next model when no model needs them any more."""

_LAST_LINES = 12


class Pool:
    """The workers of one set of devices, with rank 0 in this process.

    The constructor starts them and does not wait: they take seconds to import Keras, while the
    script of the user builds its model and reads its data. `connect` waits for them.

    Args:
        devices: The names of the devices, that of rank 0 first.

    Attributes:
        settings: The settings that the workers have, `None` before they were sent any.
        in_modules: The key of the model whose tensors the modules of the workers hold.
    """

    def __init__(self, devices: tuple[str, ...]) -> None:
        self.lock = threading.RLock()
        self.settings: Any = None
        self.in_modules: int | None = None
        self.closed = False
        self._called = False
        self._devices = devices
        self._owner = os.getpid()
        self._models: set[int] = set()
        self._expected: set[int] = set()
        self._to_forget: list[int] = []
        self._idle_since: float | None = None
        self._started = time.time_ns()
        self._surroundings = _surroundings()
        self._files: list[int] = []
        self._workers: list[_Worker] = []
        self._watch: WorkerWatch | None = None
        self._group: RankGroup | None = None
        _running.add(self)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        size = len(self._devices)
        batch_file, waits_file = new_file(), new_file()
        reading, writing = os.pipe()
        self._files = [batch_file, waits_file, writing]
        self.waits = Waits(waits_file, 0, size)
        threads = max(1, torch.get_num_threads() // size)
        for rank in range(1, size):
            device = self._devices[rank]
            options = {"rank": rank, "size": size, "device": device, "threads": threads}
            files = {"lifeline": reading, "memory": batch_file, "waits": waits_file}
            self._workers.append(_Worker(options, files))
        os.close(reading)
        self.memory = BatchMemory(batch_file)
        processes = [worker.process for worker in self._workers]
        self._watch = WorkerWatch(processes, self._abort, self._rest, self.waits.every)

    def connect(self) -> None:
        """Wait for the workers, and make the group of the ranks; do nothing if it is there.

        Raises:
            WorkerDied: If a worker has ended.
            Exception: The error of a worker, as itself.
        """
        if self._group is not None:
            return
        assert self._watch is not None, "the constructor has started the workers"
        size = len(self._devices)
        try:
            with self.lock, self._watch.watching():
                for worker in self._workers:
                    worker.receive()  # it is ready
                store = dist.TCPStore(HOST, 0, size, is_master=True, wait_for_workers=False)
                for worker in self._workers:
                    worker.send(pickle.dumps(store.port))
                self._store = store
                self._group = RankGroup(store, 0, size, torch_device_of(self._devices[0]))
                self._group.waits = self.waits
        except PeerLost:
            raise self._failure() from None
        except BaseException:
            self.close()
            raise

    @property
    def group(self) -> RankGroup:
        """The ranks of this pool."""
        assert self._group is not None, "`connect` makes it"
        return self._group

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Hold the pool for one step. An error while workers are in it ends the pool.

        Raises:
            WorkerDied: If a worker has ended.
            Exception: The error of a worker, as itself.
        """
        with self.lock:
            try:
                while self._to_forget:
                    self.send("forget", self._to_forget.pop())
                self._called = False
                with self._watch.watching() if self._watch is not None else nullcontext():
                    yield
            except PeerLost:
                raise self._failure() from None
            except BaseException:
                if self._called:
                    self.close()
                raise

    def send(self, name: str, *content: Any) -> None:
        """Send a call to every worker."""
        self._called = True
        data = pickle.dumps((name, content), pickle.HIGHEST_PROTOCOL)
        for worker in self._workers:
            worker.send(data)

    def compare_exchanges(self, compared: bool) -> None:
        """Let every rank compare what it exchanges from now on, or no longer; see `RankGroup`."""
        self.send("exchanges", compared)
        self.group.compares = compared

    def receive(self) -> list[Any]:
        """Return the answer of each worker."""
        with self.waits.waiting(ANSWER):
            return [worker.receive()[1] for worker in self._workers]

    def hold(self, key: int, *, is_new: bool = False) -> bool:
        """Keep the pool for the model of this key; return `False` if it has ended.

        Args:
            key: The key.
            is_new: Whether the pool was started for this model. Files that were written while the
                workers started do not end it.
        """
        with self.lock:
            if not self._models and not is_new and not self.closed and self._is_outdated():
                self.close()
            if self.closed:
                return False
            self._expected.discard(key)
            self._models.add(key)
            self._idle_since = None
            return True

    def expect(self, key: int) -> None:
        """Keep the workers for the first step of the model of this key."""
        self._expected.add(key)
        self._idle_since = None

    def drop(self, key: int) -> None:
        """Forget a model. Without any model, the pool waits for the next one, and then ends.

        The garbage collector calls this within any other call, so that nothing is sent here.
        """
        self._expected.discard(key)
        if key in self._models:
            self._models.discard(key)
            self._to_forget.append(key)
        if not self._models and not self._expected:
            self._idle_since = time.monotonic()

    def can_be_used(self) -> bool:
        """Return whether the next model can have these workers."""
        return not self.closed and (bool(self._models) or not self._is_outdated())

    def is_ready(self) -> bool:
        """Return whether the workers can follow calls, or have ended, so that nobody waits."""
        return self._group is not None or all(w.connection.poll() for w in self._workers)

    def _is_outdated(self) -> bool:
        """Return whether workers that were started now would import or read something else."""
        if self._surroundings != _surroundings():
            return True
        files = [
            getattr(module, "__file__", None)
            for module in list(sys.modules.values())
            if isinstance(module, ModuleType) and module.__name__ != "__main__" and is_own(module)
        ]
        return any(_written(file) > self._started for file in files if file is not None)

    def _rest(self) -> None:
        """Let workers without a model free its memory, and end them after a while.

        The thread of the watch calls this.
        """
        since = self._idle_since
        if since is None or self.closed or not self.lock.acquire(blocking=False):
            return
        try:
            if self._models or self._expected:
                return
            while self._to_forget:
                self.send("forget", self._to_forget.pop())
            if time.monotonic() - since >= _IDLE:
                self.close()
        except PeerLost:
            self.close()
        finally:
            self.lock.release()

    def close(self) -> None:
        """End the workers, and wait for their end."""
        if self.closed:
            return
        self.closed = True
        _running.discard(self)
        self._leave()
        if self._watch is not None:
            self._watch.close()
        if os.getpid() == self._owner:
            for worker in self._workers:
                worker.end()

    def leave(self) -> None:
        """Close the files of the workers in a forked process, which has no part in the pool."""
        self.closed = True
        self._leave()

    def _leave(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []
        for worker in self._workers:
            worker.connection.close()

    def _abort(self) -> None:
        if self._group is not None:
            self._group.abort()

    def _failure(self) -> BaseException:
        """Return the error that ended a worker, and end the others."""
        deadline = time.monotonic() + _TO_REPORT
        reports = [worker.report(deadline) for worker in self._workers]
        error = self._error_in(reports)
        if self._watch is not None and self._watch.parted:
            one, rank, another = self._watch.parted
            error = UnsupportedModel(
                f"For {self._watch.limit:g} seconds, the first device waits {one}, and replica "
                f"{rank} waits {another}: they do not run the same code.\n{OTHER_CODE}"
            )
        self.close()
        return error

    def _error_in(self, reports: list[Any]) -> BaseException:
        for worker, (kind, sent, text) in zip(self._workers, reports, strict=True):
            if kind == "error":
                return self._error_of(worker, sent, text)
        # One that was lost by another worker has said so, and ended by itself.
        dead = [
            worker
            for worker, report in zip(self._workers, reports, strict=True)
            if report[0] != "lost"
        ]
        # A signal is negative. Others end by a connection that its end has broken.
        ended = [worker for worker in dead if worker.process.poll() is not None]
        first = min(ended, key=lambda worker: worker.process.returncode, default=None)
        return self._death_of(first or (dead or self._workers)[0])

    def _error_of(self, worker: "_Worker", sent: bytes | None, text: str) -> BaseException:
        where = f"replica {worker.rank} ({self._devices[worker.rank]})"
        error = None if sent is None else load_error(sent)
        if error is None:
            error = WorkerDied(
                f"The process of {where} ended with an error that cannot be pickled:\n"
                f"{text.strip().splitlines()[-1]}\n"
                "The model is in the state after the last completed step."
            )
        error.add_note(f"This error is from {where}, whose traceback is:\n{text.rstrip()}")
        return error

    def _death_of(self, worker: "_Worker") -> WorkerDied:
        said = worker.last_lines()
        device = self._devices[worker.rank]
        stopped = {} if self._watch is None else self._watch.stopped
        seconds = stopped.get(worker.process.pid)
        if seconds is None:
            what = (
                f"The process of replica {worker.rank} ({device}) has ended {worker.how()}; it was "
                f"process {worker.process.pid}."
            )
        else:
            what = (
                f"The process of replica {worker.rank} ({device}) was suspended by a signal for "
                f"{seconds:g} seconds, and was killed (LOCKSTEP_PATIENCE sets this time)."
            )
        error = WorkerDied(
            f"{what}\nThe model is in the state after the last completed step. Call again to "
            "continue: new processes are started."
        )
        if said:
            error.add_note(f"The last lines of its output were:\n{said}")
        return error


_EVERY = 1.0
"""Seconds between two looks after the workers."""


class WorkerWatch:
    """Looks after the workers of a pool once a second, in a thread, while they are in use.

    A worker that stays stopped for `LOCKSTEP_PATIENCE` seconds is killed, because no call to it
    would return. Rank 0 then meets its end as that of any other worker. Likewise all are killed if
    the ranks wait for as long in different exchanges.

    Args:
        workers: The processes.
        lost: Called when one of them has ended. Gloo notices by itself, and NCCL does not.
        rest: Called once a second while they are not in use.
        waits: Returns what each rank waits for; see `Waits.every`.

    Attributes:
        stopped: The seconds that a killed worker had been stopped, by its process id.
        parted: What `rank_waits.parted` has returned, if the ranks have waited so for too long.
        limit: The seconds that they are given.
    """

    def __init__(
        self,
        workers: "Sequence[subprocess.Popen[bytes]]",
        lost: Callable[[], None],
        rest: Callable[[], None],
        waits: Callable[[], tuple[tuple[int, ...], ...]] = tuple,
    ) -> None:
        self.stopped: dict[int, float] = {}
        self.parted: tuple[str, int, str] | None = None
        self._waits = waits
        self._workers = workers
        self._lost = lost
        self._rest = rest
        self.limit = patience()
        self._busy = threading.Event()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="lockstep-workers", daemon=True).start()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look after the workers inside the context."""
        before = self._busy.is_set()
        self._busy.set()
        try:
            yield
        finally:
            if not before:
                self._busy.clear()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _run(self) -> None:
        # Looks are counted, and not time: a stop of the whole job by Ctrl-Z stops them too.
        looks = dict.fromkeys([worker.pid for worker in self._workers], 0)
        waits, same = self._waits(), 0
        while not self._closed.wait(_EVERY):
            if not self._busy.is_set():
                self._rest()
                continue
            for worker in self._workers:
                stopped = self._busy.is_set() and _is_stopped(worker)
                looks[worker.pid] = looks[worker.pid] + 1 if stopped else 0
                if looks[worker.pid] * _EVERY >= self.limit:
                    self.stopped[worker.pid] = self.limit
                    worker.kill()
            before, waits = waits, self._waits()
            found = parted(waits) if waits and waits == before else None
            same = same + 1 if found is not None else 0
            if same * _EVERY >= self.limit:
                self.parted = found
                for worker in self._workers:
                    worker.kill()
            if any(worker.poll() is not None for worker in self._workers):
                self._lost()
                return


def _is_stopped(worker: "subprocess.Popen[bytes]") -> bool:
    try:
        # WNOWAIT leaves the state for `subprocess`.
        found = os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # it has ended
        return False
    return found is not None


class _Worker:
    """The process of one rank, as rank 0 sees it."""

    def __init__(self, options: dict[str, Any], files: dict[str, int]) -> None:
        self.rank = options["rank"]
        ours, theirs = socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        files = {**files, "connection": theirs.fileno()}
        environment = {**os.environ, "KERAS_BACKEND": "torch"}
        environment.pop("LOCKSTEP_REHEARSE", None)
        arguments = json.dumps({**options, **files, "path": sys.path})
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=environment,
                pass_fds=tuple(files.values()),
            )
        self.connection = Connection(ours.detach())

    def send(self, data: bytes) -> None:
        """Send bytes."""
        try:
            self.connection.send_bytes(data)
        except OSError as error:
            raise PeerLost(str(error)) from error

    def receive(self) -> Any:
        """Return the next message.

        Raises:
            PeerLost: If the worker has ended, or reports an error.
        """
        try:
            message = pickle.loads(self.connection.recv_bytes())
        except (OSError, EOFError) as error:
            raise PeerLost(str(error)) from error
        if message[0] in ("error", "lost"):
            self._reported = message
            raise PeerLost(message[0])
        return message

    _reported: Any = None

    def report(self, deadline: float) -> tuple[str, bytes | None, str]:
        """Return how the worker has ended: `"error"`, `"lost"` or `"ended"`, and the error."""
        try:
            while self._reported is None:
                if not self.connection.poll(max(0.0, deadline - time.monotonic())):
                    return "silent", None, ""
                self.receive()
        except (PeerLost, OSError):  # the second one if the connection is closed here
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_TO_END)
        return self._reported or ("ended", None, "")

    def end(self) -> None:
        """Wait for the end of the process, whose connection is closed; then kill it."""
        try:
            self.process.wait(_TO_END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._output.close()

    def how(self) -> str:
        """Return how the process ended, in words."""
        code = self.process.returncode
        if code is not None and code < 0:
            return f"by signal {-code}"
        return f"with exit status {code}"

    def last_lines(self) -> str:
        """Return the last lines that the process has printed."""
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return "\n".join(lines[-_LAST_LINES:])


def _surroundings() -> Any:
    """Return what a worker takes over at its start."""
    variables = {name: each for name, each in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return list(sys.path), variables, os.getcwd(), torch.get_num_threads()


def _written(file: str) -> int:
    """Return when a file was written, in nanoseconds; 0 if it is not there."""
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return 0


_running: "weakref.WeakSet[Pool]" = weakref.WeakSet()
_pools: dict[tuple[str, ...], Pool] = {}
_keys = itertools.count()


class Lease:
    """The part of one model in the pool of its devices, which runs while models need it.

    Args:
        devices: The names of the devices.

    Attributes:
        key: The number of the model in the pool.
        size: The number of devices.
    """

    def __init__(self, devices: tuple[str, ...]) -> None:
        self.key = next(_keys)
        self.size = len(devices)
        self._devices = devices
        self._pool: Pool | None = None

    def start(self) -> None:
        """Start the workers, if these devices have none, for the first step of the model."""
        pool = _pools.get(self._devices)
        if pool is None or not pool.can_be_used():
            if pool is not None:
                pool.close()
            pool = _pools[self._devices] = Pool(self._devices)
        pool.expect(self.key)
        self._pool = pool

    def is_ready(self) -> bool:
        """Return whether the next step has workers without waiting for them."""
        pool = _pools.get(self._devices)
        return pool is not None and pool.can_be_used() and pool.is_ready()

    def pool(self) -> Pool:
        """Return the running pool of these devices, or a new one."""
        pool = _pools.get(self._devices)
        if pool is None or not pool.hold(self.key):
            pool = _pools[self._devices] = Pool(self._devices)
            pool.hold(self.key, is_new=True)
        self._pool = pool
        pool.connect()
        return pool

    def end(self) -> None:
        """Let the pool forget the model, and end after a while if it was the last one."""
        if self._pool is not None:
            self._pool.drop(self.key)
            self._pool = None


@atexit.register
def _close_all() -> None:
    for pool in list(_running):
        pool.close()


def _leave_all() -> None:
    for pool in list(_running):
        pool.leave()
    _running.clear()
    _pools.clear()


os.register_at_fork(after_in_child=_leave_all)
