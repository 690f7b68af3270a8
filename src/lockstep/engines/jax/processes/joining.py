"""JAX joins the processes that a launcher has started, before it starts its devices."""

import linecache
import os
import socket
import sys
import threading
from collections.abc import Callable

import jax

from lockstep.core.environment import Place
from lockstep.core.status import phase
from lockstep.engines.jax.jax_compat import distributed, xla_bridge
from lockstep.errors import ProcessesDisagree
from lockstep.processes.shares import (
    announce_coordinator,
    devices_of_process,
    not_met,
    visible_gpus,
)

_first_use: list[str] = []
"""The line of the user's code that started JAX's devices, if it was seen."""
_LIBRARIES = ("jax", "jaxlib", "keras", "lockstep", "numpy", "contextlib", "functools", "importlib")


def join(place: Place) -> tuple[int, int]:
    """Join the other processes, unless this has been done; return the rank and the size.

    Raises:
        ProcessesDisagree: If JAX has started already, or the processes do not find each other.
    """
    if _is_joined():
        return jax.process_index(), jax.process_count()
    if place.size > 1:
        if xla_bridge.backends_are_initialized():
            raise _too_late(place)
        _connect(place)
    return place.rank, place.size


def at_first_use(place: Place, joined: Callable[[], None]) -> None:
    """Join the other processes when JAX starts its devices, unless this has been done by then.

    A scheduler may have started processes that train apart. Then only the line that starts the
    devices is kept, for the error of `join`.

    Args:
        place: The place of this process.
        joined: Called when the processes have joined, here or before.
    """
    if xla_bridge.backends_are_initialized():
        return
    # jax/_src/xla_bridge.py: every use of a device calls `backends`, which starts them once.
    start = xla_bridge.backends
    lock = threading.Lock()

    def start_joined() -> dict[str, object]:
        with lock:
            if xla_bridge.backends is start_joined:
                xla_bridge.backends = start
                if place.trains_together and not _is_joined():
                    _connect(place)
                _first_use.append(_line_of_user())
                if _is_joined():
                    joined()
        try:
            return start()
        except RuntimeError as error:
            if _is_joined() and "gloo" in str(error) and not _has_address(socket.gethostname()):
                raise _no_address(place) from error
            raise

    xla_bridge.backends = start_joined


def _is_joined() -> bool:
    # jax/_src/distributed.py, State.client: what jax.distributed.initialize has connected.
    return distributed.global_state.client is not None


def _connect(place: Place) -> None:
    if place.rank == 0:
        announce_coordinator(place)
    mine = devices_of_process(place, len(visible_gpus(os.environ)))
    try:
        with phase("joining", compiles=True):
            jax.distributed.initialize(
                place.coordinator,
                place.size,
                place.rank,
                mine,
                cluster_detection_method="deactivate",
            )
    except jax.errors.JaxRuntimeError as error:
        raise not_met(place, error) from error


def _has_address(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def _no_address(place: Place) -> ProcessesDisagree:
    name = socket.gethostname()
    return ProcessesDisagree(
        f"JAX connects the CPUs of {place.size} processes by host name, but the name of this "
        f"host, {name!r}, has no address.\nAdd a line to /etc/hosts with the network address of "
        f"this host, and {name}.\nIf all processes run on this host, use 127.0.0.1."
    )


def _too_late(place: Place) -> ProcessesDisagree:
    where = f", at {_first_use[0]}" if _first_use else ", before lockstep was imported"
    return ProcessesDisagree(
        f"This is {place}, but JAX started its devices before the processes were "
        f"connected{where}.\nTo train together, call lockstep.initialize() before the first "
        "Keras operation.\nFor independent runs, set LOCKSTEP_PROCESSES=1."
    )


def _line_of_user() -> str:
    """Return the innermost line of the stack that is in none of the libraries."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES and frame.f_back:
        frame = frame.f_back
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, line, frame.f_globals).strip()
    return f"{os.path.basename(file)} line {line}: {text[:60]}"
