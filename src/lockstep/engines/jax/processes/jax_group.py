"""Several JAX processes that train one model together.

Every process runs the same script. Between calls each process has the whole model on one device of
its own, so that scripts and callbacks work locally. Within a step the same arrays are one array
over all devices of all processes.
"""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep.engines.jax.jax_compat import distributed
from lockstep.errors import LockstepWarning, ProcessesDisagree, UnusableData, counted
from lockstep.processes.coordination import once, patience
from lockstep.processes.group import use
from lockstep.processes.process_group import from_first
from lockstep.processes.reads_of_all import agree_on_variable


class JaxGroup:
    """The processes of `jax.distributed`, and its coordination service; see `ProcessGroup`."""

    @property
    def rank(self) -> int:
        """The number of this process."""
        return int(jax.process_index())

    @property
    def size(self) -> int:
        """The number of processes."""
        return int(jax.process_count())

    def put(self, key: str, text: str) -> None:
        """Store a text, and replace an earlier one."""
        _client().key_value_set(key, text, allow_overwrite=True)

    def get(self, key: str) -> str | None:
        """Return the current text of a key, or `None`."""
        try:
            said: str = _client().key_value_try_get(key)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise
            return None
        return said

    def wait(self, key: str, milliseconds: int) -> str | None:
        """Return the text of a key when it is there, `None` if it is not there in time."""
        try:
            said: str = _client().blocking_key_value_get(key, milliseconds)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None
        return said

    def delete(self, folder: str) -> None:
        """Delete all keys that begin with `folder/`, in the first process."""
        if self.rank == 0:
            _client().key_value_delete(folder)

    def broadcast(self, values: list[np.ndarray]) -> list[np.ndarray]:
        """Return the bytes of the first process, in every process."""
        self._connect()
        return [found for part in _buckets(values) for found in _of_the_first(part)]

    _is_connected = False

    def _connect(self) -> None:
        if not self._is_connected and jax.default_backend() == "cpu":
            with _without_lines_of_gloo():
                multihost_utils.sync_global_devices("lockstep")
                _connect_devices()
        self._is_connected = True

    def gather(self, mine: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
        """Return the bytes of every process, in buckets of limited size."""
        self._connect()
        whole = [np.empty(size, "uint8") for size in sizes]
        room = _BUCKET // self.size
        for start in range(0, max(sizes), room):
            sent = np.zeros(_rounded(min(room, max(sizes) - start)), "uint8")
            part = mine[start : start + room]
            sent[: len(part)] = part
            found = np.asarray(multihost_utils.process_allgather(sent))
            for own, each in zip(whole, found, strict=True):
                taken = own[start : start + room]
                taken[:] = each[: len(taken)]
        return whole

    def share_random_state(self) -> None:
        """Give every process the state of PyTorch that the first one has: it orders a `DataLoader`.

        JAX has no random state, and PyTorch's is of use where every process has imported it.
        """
        torch = sys.modules.get("torch")
        (has_torch,), _ = once([int(hasattr(torch, "get_rng_state"))])
        if has_torch and torch is not None:
            (state,) = from_first([torch.get_rng_state().numpy()])
            torch.set_rng_state(torch.from_numpy(state.copy()))

    def local(self, value: Any) -> Any:
        """Return this process's copy of a replicated array, on its first device."""
        if not isinstance(value, jax.Array) or value.is_fully_addressable:
            return value
        if not value.is_fully_replicated:
            raise ProcessesDisagree(
                f"An array of shape {value.shape} is sharded across processes, and no process "
                "has all of it.\n"
                "Wrap such arrays in lockstep.process_local, or pass host arrays with all rows."
            )
        return value.addressable_data(0)

    def rows_here(self, value: Any) -> Any:
        """Return the rows that this process has of an array of all processes; others as they are.

        Raises:
            UnusableData: If the rows of the array are not those of one process after another.
        """
        if not isinstance(value, jax.Array) or value.is_fully_addressable:
            return value
        _check_by_rows(value)
        # Two devices of a process may have the same rows.
        parts = {shard.index[0].start or 0: shard.data for shard in value.addressable_shards}
        none = np.empty((0, *value.shape[1:]), value.dtype)
        return np.concatenate([none, *(np.asarray(parts[start]) for start in sorted(parts))])

    def is_spread(self, value: Any) -> bool:
        """Return whether no process has this array whole."""
        is_array = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
        return is_array and not (value.is_fully_addressable or value.is_fully_replicated)

    def has_part(self, variable: Any) -> bool:
        """Return whether no process has the value of this variable whole."""
        return self.is_spread(variable.value)

    def to_host(self, value: Any) -> np.ndarray:
        """Return this process's copy as a NumPy array."""
        value = self.local(value)
        if isinstance(value, np.ma.MaskedArray):
            jax.device_put(value)  # raises JAX's error; unmasked, all would count
        return np.asarray(value)

    records_sigterm = True

    def agreed_to_stop(self, steps: int, asked: bool) -> bool:
        """Return whether a process got SIGTERM, and all agreed to stop at this number of steps.

        JAX handles the signal from `jax.distributed.initialize` on.
        """
        config: Any = jax.config  # its types omit the options
        if not config.jax_enable_preemption_service:
            return False
        return bool(multihost_utils.reached_preemption_sync_point(steps))


def _check_by_rows(value: jax.Array) -> None:
    """Check that an array is laid out by rows, those of the first process first.

    Raises:
        UnusableData: If it is not.
    """
    where: dict[int, set[tuple[int, int]]] = {}
    what = "is replicated" if value.is_fully_replicated else None
    places: Any = value.sharding.devices_indices_map(value.shape)
    for device, index in places.items():
        ranges = [part.indices(size)[:2] for part, size in zip(index, value.shape, strict=True)]
        whole = [(0, size) for size in value.shape]
        if ranges[1:] != whole[1:]:
            what = "is split along a dim other than its rows"
        where.setdefault(device.process_index, set()).update(ranges[:1])
    end = 0
    for process in sorted(where):
        for start, stop in sorted(where[process]):
            if start != end and what is None:
                what = "has its rows in a different order than the processes, or repeats some"
            end = stop
    if what is not None:
        raise UnusableData(
            f"An array of shape {value.shape} across all processes {what}, but it must hold the "
            "rows of each process in order.\nShard it by rows across the devices in their "
            'order: NamedSharding(Mesh(jax.devices(), "x"), PartitionSpec("x")).'
        )


def _connect_devices() -> None:
    """Sum a number over all devices of all processes, as the steps do."""
    devices = np.asarray(jax.devices())
    each = NamedSharding(Mesh(devices, "all"), PartitionSpec("all"))
    ones = jax.make_array_from_callback(devices.shape, each, lambda _: np.ones(1))
    jax.jit(jnp.sum)(ones).block_until_ready()


@contextmanager
def _without_lines_of_gloo() -> Iterator[None]:
    """Leave out what Gloo prints where it connects CPUs; other lines follow at the end."""
    try:
        stdout = os.dup(1)
    except OSError:  # it is closed
        yield
        return
    with TemporaryFile() as printed:
        sys.stdout.flush()
        os.dup2(printed.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(stdout, 1)
            os.close(stdout)
            printed.seek(0)
            others = [line for line in printed if not line.startswith(b"[Gloo] ")]
            os.write(1, b"".join(others))


_BUCKET = 256 * 2**20
"""The bytes that are broadcast at once. Each device needs about twice as many for it."""


def _buckets(values: list[np.ndarray], size: int = _BUCKET) -> Iterator[list[np.ndarray]]:
    """Yield the values in lists of at most `size` bytes, or of one value."""
    bucket: list[np.ndarray] = []
    room = size
    for value in values:
        if bucket and value.nbytes > room:
            yield bucket
            bucket, room = [], size
        bucket.append(value)
        room -= value.nbytes
    if bucket:
        yield bucket


def _rounded(size: int) -> int:
    """Return a size that is at most an eighth larger: each size is a program of its own."""
    step = 1 << max(0, size.bit_length() - 4)
    return -(-size // step) * step


def _of_the_first(values: list[np.ndarray]) -> list[np.ndarray]:
    return [np.asarray(part) for part in multihost_utils.broadcast_one_to_all(values)]


GROUP = JaxGroup()
use(GROUP)


def _client() -> Any:
    """Return the connection to JAX's coordination service."""
    # jax/_src/distributed.py, State.client: what jax.distributed.initialize has connected.
    return distributed.global_state.client


def check_started() -> None:
    """Warn if MPICH started several processes and JAX knows of one: each trains alone.

    `core/environment.py` has the launchers that tell a process its rank and their number.
    """
    asked = os.environ.get("PMI_SIZE", "")
    if GROUP.size == 1 and asked.isdecimal() and int(asked) > 1:
        warnings.warn(
            f"PMI_SIZE={asked} processes were started, but JAX sees only one: each process "
            "trains independently, on all rows.\nTo train together, call "
            "jax.distributed.initialize(...) before the first Keras operation.\nFor independent "
            "runs, unset PMI_SIZE.",
            LockstepWarning,
            stacklevel=5,
        )


def check_devices(devices: list[jax.Device]) -> None:
    """Check that the processes can run one program on these devices.

    Raises:
        ProcessesDisagree: If `devices` omits an available device, if its order differs between
            processes, if a process has more devices than another, or if LOCKSTEP_PATIENCE is no
            number.
    """
    if GROUP.size == 1:
        return
    patience()  # an error in its variable is raised here, and not in the middle of a call
    if set(devices) != set(jax.devices(devices[0].platform)):
        raise ProcessesDisagree(
            f"devices={len(devices)} was requested, but {jax.process_count()} processes have "
            f"{jax.device_count()} devices, and all of them must take part.\n"
            "Remove devices, or start fewer processes."
        )
    found = Counter(device.process_index for device in devices)
    counts = [found[process] for process in range(jax.process_count())]
    if max(counts) != min(counts):
        most, least = counts.index(max(counts)), counts.index(min(counts))
        raise ProcessesDisagree(
            f"Process {most} has {counted(counts[most], 'device')}, but process {least} has "
            f"{counts[least]}: on JAX, every process needs the same number of devices.\n"
            "Make the same number of devices visible to every process (CUDA_VISIBLE_DEVICES, "
            "LOCKSTEP_REHEARSE)."
        )
    order = ", ".join(f"{device.platform}:{device.id}" for device in devices)
    lowest, highest = once([order, jax.process_index()])
    if lowest[0] != highest[0]:
        first, other = sorted([lowest[1], highest[1]])
        raise ProcessesDisagree(
            f"Process {other} lists the devices in a different order than process {first}; in "
            f"process {jax.process_index()} it is {order}.\n"
            "Pass devices= in the same order in every process, or remove it."
        )


def whole(value: Any, number: int = 0) -> Any:
    """Return the whole of an array of which each process has a part. Every process calls this.

    Args:
        value: The array. Any other value is returned as it is.
        number: Its number among the arrays that are read.

    Raises:
        ProcessesDisagree: If another process reads another array, or does not answer.
    """
    if not GROUP.is_spread(value):
        return value
    agree_on_variable(number)
    return gathered(value)


def gathered(value: jax.Array) -> jax.Array:
    """Gather an array of all processes, which have agreed on it."""
    mesh = value.sharding.mesh  # type: ignore[attr-defined]  # a NamedSharding
    every: jax.Array = jax.jit(jnp.copy, out_shardings=NamedSharding(mesh, PartitionSpec()))(value)
    return every.addressable_data(0)


def put(value: Any, layout: NamedSharding) -> jax.Array:
    """Lay out an array, which every process has whole, over the devices of all processes."""
    value = GROUP.local(value)
    if not layout.is_fully_replicated:
        host = GROUP.to_host(value)
        return jax.make_array_from_callback(host.shape, layout, lambda rows: host[rows])
    mine = [device for device in layout.mesh.devices.flat if device in layout.addressable_devices]
    copies = [jax.device_put(value, device) for device in mine]
    return jax.make_array_from_single_device_arrays(np.shape(value), layout, copies)
