"""What a process tells `lockstep run` about itself: its phase, its progress, and why it failed.

The launcher names a file in `LOCKSTEP_STATUS`. A thread writes it every second, so that a step
costs no more than an assignment. Without the variable nothing is written.
"""

import atexit
import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from lockstep.errors import LockstepError, counted

STATUS = "LOCKSTEP_STATUS"
DUMP_STACKS: int = getattr(signal, "SIGUSR1", 0)  # Windows has none
"""The signal on which a process writes the Python stacks of its threads to its stderr."""

_EVERY = 1.0


@dataclass
class Status:
    """The state of one process.

    Attributes:
        phase: What the process does, such as "training"; `""` outside of the calls of a model.
        step: The number of steps of all calls.
        detail: More words on the phase, such as "epoch 3".
        compiles: Whether the phase may compile a program.
        distributed: Whether a model was distributed.
        failure: The first line of an uncaught exception, or all of an error of lockstep.
        failed_by: The process whose failure made this one fail, if known.
        failed_at: The time of the exception, in seconds since 1970.
    """

    phase: str = ""
    step: int = 0
    detail: str = ""
    compiles: bool = False
    distributed: bool = False
    failure: str | None = None
    failed_by: int | None = None
    failed_at: float | None = None

    def stepped(self) -> None:
        """Count a step; its program is compiled."""
        self.step += 1
        self.compiles = False

    def __str__(self) -> str:
        """Return the phase in words.

        Example:
            >>> str(Status("training", step=412, detail="epoch 3"))
            'training, epoch 3, after 412 steps'
        """
        if not self.phase:
            return "no call of a model"
        words = [self.phase, self.detail, "compiling" if self.compiles else ""]
        if self.step:
            words.append(f"after {counted(self.step, 'step')}")
        return ", ".join(word for word in words if word)


STATUS_OF_PROCESS = Status()
"""The status of this process."""


@contextmanager
def phase(name: str, compiles: bool = False) -> Iterator[None]:
    """Be in a phase inside the context. A process that stands still there may be stuck."""
    status = STATUS_OF_PROCESS
    before = status.phase, status.compiles
    status.phase, status.compiles = name, compiles
    try:
        yield
    finally:
        status.phase, status.compiles = before


def read(file: Path) -> Status | None:
    """Return the status in a file, `None` if there is none yet."""
    try:
        return Status(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def report_from_environment(environ: MutableMapping[str, str]) -> None:
    """Report to the launcher that the environment names, if it does.

    The variable is removed: the processes that this one starts are none of the run.
    """
    path = environ.pop(STATUS, None)
    if path is None:
        return
    reporter = _Reporter(Path(path))
    atexit.register(reporter.write)
    sys.excepthook = reporter.wrapped(sys.excepthook)
    if hasattr(faulthandler, "register"):
        with contextlib.suppress(ValueError, OSError):  # a stderr without a file
            faulthandler.register(DUMP_STACKS, all_threads=True)
    threading.Thread(target=reporter.write_forever, name="lockstep-status", daemon=True).start()


class _Reporter:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._process = os.getpid()
        self._written = ""
        self._lock = threading.Lock()

    def write_forever(self) -> None:
        while True:
            self.write()
            time.sleep(_EVERY)

    def wrapped(self, hook: object) -> "_Hook":
        """Return an exception hook that reports the exception first."""
        return _Hook(self, hook)

    def failed(self, error: BaseException | None, kind: type[BaseException]) -> None:
        if os.getpid() != self._process:  # a fork
            return
        status = STATUS_OF_PROCESS
        text = " ".join(str(error).split()) if issubclass(kind, LockstepError) else str(error)
        status.failure = f"{kind.__name__}: {text}".splitlines()[0]
        status.failed_by = getattr(error, "left_by", None)
        status.failed_at = time.time()
        self.write()

    def write(self) -> None:
        with self._lock:
            text = json.dumps(asdict(STATUS_OF_PROCESS))
            if text == self._written:
                return
            beside = self._file.with_suffix(".new")
            with contextlib.suppress(OSError):  # the launcher is gone
                beside.write_text(text)
                beside.replace(self._file)
                self._written = text


class _Hook:
    def __init__(self, reporter: _Reporter, hook: object) -> None:
        self._reporter = reporter
        self._hook = hook

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._reporter.failed(error, kind)
        self._hook(kind, error, trace)  # type: ignore[operator]
