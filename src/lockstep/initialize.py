"""The function `initialize`, which joins the processes of a launcher."""

import multiprocessing
import os
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING

from lockstep import ray_train
from lockstep.core.environment import ALONE, Place, find_place
from lockstep.engines import current_engine
from lockstep.errors import ProcessesDisagree
from lockstep.rehearsal import choose_backend

if TYPE_CHECKING:
    from lockstep.core.engine import Engine

_JOINED = "LOCKSTEP_JOINED"
"""The variable with the id of the process that has joined. Its child processes do not join."""


def initialize() -> tuple[int, int]:
    """Join the processes that a launcher has started together with this one.

    `lockstep.distribute` joins them too. A script that needs its rank earlier calls this before
    the first Keras operation. The call does nothing in a single process, or after
    `jax.distributed.initialize`.

    Returns:
        The number of this process, and the number of processes.

    Raises:
        ProcessesDisagree: If the variables of the launcher contradict each other, if the backend
            has already started, or if the processes do not find each other.
        UnsupportedBackend: If there are several processes, and the engine of the backend runs
            in one process only.

    Example:
        >>> rank, size = lockstep.initialize()
    """
    return join(current_engine())


def join(engine: "Engine") -> tuple[int, int]:
    """Join the processes of the launcher; return the rank and the number of processes."""
    place = place_of_this_process(os.environ)
    rank, size = engine.join(place)
    if size > 1:
        os.environ[_JOINED] = str(os.getpid())
    return rank, size


def place_of_this_process(environ: Mapping[str, str]) -> Place:
    """Return the place of this process. A child of a process of the run is alone.

    In Ray Train, all workers make this call.
    """
    if _is_child(environ):
        return ALONE
    worker = ray_train.worker_place()
    return find_place(environ, worker and ray_train.with_address(worker))


def _is_child(environ: Mapping[str, str]) -> bool:
    """Return whether a process of the run has started this one."""
    started_by_another = environ.get(_JOINED, str(os.getpid())) != str(os.getpid())
    return started_by_another or multiprocessing.parent_process() is not None


def join_at_first_use(environ: MutableMapping[str, str]) -> None:
    """Let JAX join the processes of the launcher right before it starts its devices.

    A script may build its model before it calls `distribute`, and JAX cannot join processes after
    its first operation. PyTorch can, and gets the GPU of this process here. Without a launcher,
    nothing is imported. Contradictory variables raise no error here: `import lockstep` has to work
    in every command. `distribute` raises it.
    """
    try:
        place = ALONE if _is_child(environ) else ray_train.worker_place() or find_place(environ)
    except ProcessesDisagree:
        return
    backend = choose_backend(environ)[0] if place.size > 1 else None
    if backend == "torch":
        from lockstep.engines.torch.exchange import accelerators

        accelerators.take_own(place, environ)
    if backend != "jax":
        return
    from lockstep.engines.jax.processes import joining

    def joined() -> None:
        environ[_JOINED] = str(os.getpid())

    joining.at_first_use(place, joined)
