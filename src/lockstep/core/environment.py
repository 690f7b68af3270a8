"""Reads the rank of this process, and the number of processes, from the environment.

Several launchers may have set their variables. The first of `_READERS` that did is followed, and
the others must agree with it.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lockstep.errors import ProcessesDisagree, shown

Environment = Mapping[str, str]

PROCESSES = "LOCKSTEP_PROCESSES"
PROCESS = "LOCKSTEP_PROCESS"
LOCAL_PROCESS = "LOCKSTEP_LOCAL_PROCESS"
LOCAL_PROCESSES = "LOCKSTEP_LOCAL_PROCESSES"
COORDINATOR = "LOCKSTEP_COORDINATOR"

_FIRST_PORT, _PORTS = 61440, 4096
"""The range of ports for launchers that name none; JAX takes the same one."""


@dataclass(frozen=True)
class Place:
    """The place of this process among those that were started together.

    Attributes:
        rank: The number of this process, from 0.
        size: The number of processes.
        local_rank: The number of this process on its host, `None` where unknown.
        local_size: The number of processes on its host, `None` where unknown.
        coordinator: Where all processes meet, as `host:port`; `None` where unknown.
        launcher: The launcher that set the variables; `""` if there is none.
        variables: The variables that were read.
        trains_together: Whether the launcher starts only processes that train together. A scheduler
            also starts processes that train apart, such as a sweep.
        divides_devices: Whether each process already sees the devices that are its own.
    """

    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None
    coordinator: str | None = None
    launcher: str = ""
    variables: tuple[str, ...] = ()
    trains_together: bool = True
    divides_devices: bool = False

    def __str__(self) -> str:
        """Return the place in words, with the launcher."""
        return f"process {self.rank} of {self.size} ({self.launcher}: {', '.join(self.variables)})"


ALONE = Place()


def find_place(environ: Environment, worker: Place | None = None) -> Place:
    """Return the place of this process, from the variables of its launcher.

    In this order: `LOCKSTEP_*`, the three variables of JAX, torchrun (or its `PET_*` options
    alone), `TF_CONFIG`, Slurm, Open MPI. `LOCKSTEP_COORDINATOR` alone replaces the address of any
    launcher, and `LOCKSTEP_PROCESSES=1` alone makes a process train by itself.

    Args:
        environ: The environment, usually `os.environ`.
        worker: The place that Ray Train gives this process, which sets no variables. It comes
            first. Schedulers such as Slurm are not read then: they have started the nodes of Ray.

    Returns:
        The place; of one process where no launcher started several.

    Raises:
        ProcessesDisagree: If variables are missing, are no numbers, or contradict each other.

    Example:
        >>> names = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
        >>> found = find_place(names)
        >>> found.rank, found.size, found.coordinator
        (1, 2, 'host:29501')
    """
    if _is_apart(environ):
        return replace(ALONE, launcher="lockstep", variables=(PROCESSES,))
    found = [place for reader in _READERS if (place := reader(environ)) and place.size > 1]
    if worker is not None:
        found = [worker, *(place for place in found if place.trains_together)]
    if not found:
        return ALONE
    first, *others = found
    for other in others:
        _check_agree(first, other)
    if environ.get(COORDINATOR) and COORDINATOR not in first.variables:
        variables = (*first.variables, COORDINATOR)
        first = replace(first, coordinator=_address(environ, COORDINATOR), variables=variables)
    if first.coordinator is None and first.size > 1:
        raise ProcessesDisagree(
            f"This is {first}, but no environment variable gives the address of the "
            f"coordinator.\nSet {COORDINATOR}=host:port in every process: the host of process "
            "0, and a free port on it."
        )
    return first


# ---------------------------------------------------------------------- one launcher each


def _is_apart(environ: Environment) -> bool:
    return environ.get(PROCESSES) == "1" and not environ.get(PROCESS)


def _lockstep(environ: Environment) -> Place | None:
    names = (PROCESSES, PROCESS, COORDINATOR)
    if not _any(environ, names[:2]):
        return None
    size, rank = _size_and_rank(environ, PROCESSES, PROCESS)
    return Place(
        rank,
        size,
        _number(environ, LOCAL_PROCESS),
        _number(environ, LOCAL_PROCESSES),
        _address(environ, COORDINATOR),
        "lockstep",
        names if environ.get(COORDINATOR) else names[:2],
        divides_devices=True,
    )


def _jax(environ: Environment) -> Place | None:
    names = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS")
    if not _any(environ, names[:2]):
        return None
    size, rank = _size_and_rank(environ, *names[:2])
    return Place(
        rank,
        size,
        coordinator=_address(environ, names[2]),
        launcher="JAX",
        variables=names if environ.get(names[2]) else names[:2],
    )


def _torchrun(environ: Environment) -> Place | None:
    if not _any(environ, ("RANK", "WORLD_SIZE")):
        return _torchrun_options(environ)
    size, rank = _size_and_rank(environ, "WORLD_SIZE", "RANK")
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return Place(
        rank,
        size,
        _number(environ, "LOCAL_RANK"),
        _number(environ, "LOCAL_WORLD_SIZE"),
        _master(environ, "MASTER_ADDR", "MASTER_PORT"),
        "torchrun",
        tuple(name for name in names if environ.get(name)),
    )


def _torchrun_options(environ: Environment) -> Place | None:
    """The options of torchrun, for a script that torchrun does not start: one process per host."""
    names = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
    if not _any(environ, names[:2]):
        return None
    size, rank = _size_and_rank(environ, *names[:2])
    return Place(
        rank,
        size,
        0,
        1,
        _master(environ, *names[2:]),
        "torchrun's options",
        tuple(name for name in names if environ.get(name)),
    )


def _tf_config(environ: Environment) -> Place | None:
    """TensorFlow's cluster: https://www.tensorflow.org/guide/distributed_training#TF_CONFIG."""
    text = environ.get("TF_CONFIG", "").strip()
    if not text:
        return None
    try:
        described = json.loads(text)
        cluster, task = described.get("cluster") or {}, described.get("task") or {}
        kind, index = task.get("type"), str(task.get("index"))
        others = bool(cluster.get("ps"))
        # TensorFlow's order. The chief was called master once.
        members = [
            (name, str(index), str(address))
            for name in _TRAIN
            for index, address in enumerate(list(cluster.get(name) or ()))
        ]
    except (AttributeError, TypeError, ValueError):
        raise _unreadable_cluster(text, "JSON with 'cluster' and 'task' was expected") from None
    if not cluster:
        return None
    if others or (kind is not None and kind not in _TRAIN):
        raise ProcessesDisagree(
            "TF_CONFIG has "
            f"{f'a task of type {shown(kind)}' if kind not in _TRAIN else 'ps tasks'}, but "
            "lockstep supports only chief and worker tasks, which hold the weights themselves.\n"
            "Start only chief and workers, or set LOCKSTEP_PROCESSES=1 to train in this process "
            "alone."
        )
    ranks = [rank for rank, member in enumerate(members) if member[:2] == (kind, index)]
    if len(members) < 2:
        return None
    if not ranks:
        raise _unreadable_cluster(
            text,
            (
                f"its task (type {shown(kind)}, index {index}) is not among its {len(members)} "
                "members"
            ),
        )
    if not all(_is_address(address) for *_, address in members):
        raise _unreadable_cluster(text, "addresses with a port were expected")
    rank, hosts = ranks[0], [address.rpartition(":")[0] for *_, address in members]
    return Place(
        rank,
        len(members),
        hosts[:rank].count(hosts[rank]),
        hosts.count(hosts[rank]),
        members[0][2],
        "TensorFlow's cluster",
        ("TF_CONFIG",),
    )


_TRAIN = ("chief", "master", "worker")
"""The tasks of a cluster of TensorFlow that train. The others are `ps` and `evaluator`."""


def _unreadable_cluster(text: str, why: str) -> ProcessesDisagree:
    return ProcessesDisagree(
        f"TF_CONFIG={text[:100]!r} is set, but {why}: the rank of this process is unknown.\n"
        "Set it as described in TensorFlow's guide, or unset it to train in one process."
    )


def _slurm(environ: Environment) -> Place | None:
    # Only srun sets a step; a batch script that runs outside of srun has SLURM_PROCID=0, too.
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_NODELIST")
    if not environ.get(names[0]):
        return None
    size, rank = _size_and_rank(environ, *names[:2])
    hosts = environ.get("SLURM_STEP_NODELIST", "")
    job, step = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_STEP_ID")
    known = hosts and job is not None
    port = _FIRST_PORT + ((job or 0) + 31 * (step or 0)) % _PORTS
    one_host = environ.get("SLURM_STEP_NUM_NODES") == "1"
    tasks = size if one_host else _tasks_on_host(environ)
    return Place(
        rank,
        size,
        _number(environ, "SLURM_LOCALID"),
        tasks,
        f"{first_host(hosts)}:{port}" if known else None,
        "Slurm",
        tuple(name for name in names if environ.get(name)),
        trains_together=False,
        divides_devices=_any(environ, ("SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_TASK_BIND"))
        or _has_bound_gpus(environ, tasks),
    )


def _has_bound_gpus(environ: Environment, tasks: int | None) -> bool:
    """Return whether Slurm has given each task of this host its own GPUs, as by `--gpu-bind`.

    A task sees the GPUs that it is bound to. Slurm's variable counts those of the step on the host.
    With `--gpu-bind=closest`, tasks may be bound to the same ones.
    """
    in_all = _number(environ, "SLURM_GPUS_ON_NODE")
    named = [environ[name] for name in _OF_SLURM if environ.get(name)]
    if in_all is None or not named:
        return False
    own = len(named[0].split(","))
    return own < in_all and (tasks or 1) * own <= in_all


_OF_SLURM = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""The variables in which Slurm names the GPUs of a task: src/plugins/gres/common/gres_common.c."""


def _tasks_on_host(environ: Environment) -> int | None:
    """Return the number of tasks on this host, from a list such as `2(x3),1`."""
    host = _number(environ, "SLURM_NODEID")
    tasks: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            return None
        tasks += [int(found[1])] * int(found[2] or 1)
    return tasks[host] if host is not None and host < len(tasks) else None


def first_host(hosts: str) -> str:
    """Return the first host of a list in Slurm's notation.

    Example:
        >>> first_host("node[007-012,020],login")
        'node007'
    """
    prefix, bracket, rest = re.match(r"([^,\[]*)(\[?)(.*)", hosts).groups()  # type: ignore[union-attr]
    return prefix + re.split("[-,\\]]", rest)[0] if bracket else prefix


def _open_mpi(environ: Environment) -> Place | None:
    names = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    if not _any(environ, names):
        return None
    size, rank = _size_and_rank(environ, *names)
    address = None
    # Open MPI 4: "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"
    uri = re.match(r"(\d+)\.\d+;tcp6?://\[?([^,:\]]+)", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    # The daemon of mpirun itself has the number 0. If another one has started process 0, that is on
    # another host, which no variable names.
    daemon = re.match(r"\d+\.(\d+);", environ.get("OMPI_MCA_orte_local_daemon_uri", ""))
    elsewhere = rank == 0 and daemon is not None and daemon[1] != "0"
    if uri is not None and not elsewhere:
        address = f"{uri[2]}:{_FIRST_PORT + int(uri[1]) // 2**12 % _PORTS}"
    return Place(
        rank,
        size,
        _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        address,
        "Open MPI",
        names,
        trains_together=False,
    )


_READERS: tuple[Callable[[Environment], Place | None], ...] = (
    _lockstep,
    _jax,
    _torchrun,
    _tf_config,
    _slurm,
    _open_mpi,
)

# ------------------------------------------------------------------------------- values


def _check_agree(first: Place, other: Place) -> None:
    """Check that a second launcher says the same, or has started the first one on each host."""
    share = first.size // other.size
    nested = first.size % other.size == 0 and first.rank // share == other.rank
    if not nested:
        raise ProcessesDisagree(
            f"This is {first}, and {other}: two launchers disagree.\n"
            "Use only one of them, or unset the variables of the other."
        )


def _any(environ: Environment, names: tuple[str, ...]) -> bool:
    return any(environ.get(name) for name in names)


def _size_and_rank(environ: Environment, size_name: str, rank_name: str) -> tuple[int, int]:
    size, rank = _number(environ, size_name), _number(environ, rank_name)
    if size is None or rank is None:
        (there, value), missing = (
            ((rank_name, rank), size_name) if size is None else ((size_name, size), rank_name)
        )
        if size == 1:
            return 1, 0
        raise ProcessesDisagree(
            f"{there}={value} is set, but {missing} is not: the rank or the world size of this "
            "process is unknown.\n"
            f"Set {missing} as well, or unset {there} to train in one process."
        )
    if size < 1 or rank >= size:
        raise ProcessesDisagree(
            f"{rank_name}={rank} and {size_name}={size} are set, but ranks go from 0 to the "
            "number of processes minus 1.\nSet both to the values of the launcher."
        )
    return size, rank


def _number(environ: Environment, name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise ProcessesDisagree(
            f"{name}={text!r} is set, but it must be a whole number.\n"
            "Set it to the value of the launcher, or unset it."
        )
    return int(text)


def _address(environ: Environment, name: str) -> str | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not _is_address(text):
        raise ProcessesDisagree(
            f"{name}={text!r} is set, but it must be an address with a port.\n"
            f"For example, set {name}=10.0.0.1:29500, the same in every process."
        )
    return text


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 2**16


def _master(environ: Environment, host_name: str, port_name: str) -> str | None:
    """The coordinator beside torchrun's store, which holds the port that is named."""
    host, port = environ.get(host_name, "").strip(), _number(environ, port_name)
    if not host or port is None:
        return None
    return f"[{host}]:{port + 1}" if ":" in host else f"{host}:{port + 1}"
