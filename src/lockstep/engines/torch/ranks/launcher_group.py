"""Several PyTorch processes, started by a launcher, that train one model together.

Every process runs the same script, and is one rank: it has the whole model, and trains on its rows
of each batch.
"""

import atexit
import itertools
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import keras
import numpy as np
import torch
import torch.distributed as dist

from lockstep.core.devices import Device
from lockstep.core.environment import Place
from lockstep.core.shared_gpu import check_one_gpu, shares_of_gpu
from lockstep.core.status import phase
from lockstep.engines.torch.exchange.accelerators import (
    check_nccl,
    device_of,
    is_gpu,
    make_current,
    name_of,
    number_of_gpus,
)
from lockstep.engines.torch.exchange.group import HOST, PeerLost, RankGroup
from lockstep.engines.torch.exchange.placement import keras_uses_gpus
from lockstep.engines.torch.sharded.sharded_variables import is_sharded
from lockstep.engines.torch.steps.replica import random_state, set_random_state
from lockstep.errors import ProcessesDisagree
from lockstep.processes.coordination import lost_connection_error, patience
from lockstep.processes.group import use
from lockstep.processes.process_group import from_first
from lockstep.processes.shares import announce_coordinator, devices_of_process, not_met
from lockstep.processes.stderr_lines import without_lines

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.02
"""Seconds between two looks for a key."""

_LAST_WORDS = 2.0
"""Seconds in which the words of a process that has ended are still looked for."""

_AT_EXIT = 10.0
"""Seconds that process 0, which has the store, waits for the end of the others."""


_WATCH_KEY = "watch"


class RankWatch:
    """Calls a function, in a thread, when a process of the group has ended, or left after an error.

    Gloo notices by itself. NCCL waits for a process that has ended, until its group is aborted. So
    each process holds a connection to the first one, which breaks with either of them. The first
    process closes all of them when one has broken.

    Args:
        store: The store where the processes of this group meet.
        host: The host of the first process.
        rank: The number of this process.
        size: The number of processes.
        local: Whether all processes are on this host.
        lost: What to call.
    """

    def __init__(
        self,
        store: Any,
        host: str,
        rank: int,
        size: int,
        *,
        local: bool,
        lost: Callable[[], None],
    ) -> None:
        self._lost = lost
        self._sockets: list[socket.socket] = []
        if rank:
            port = int(bytes(store.get(_WATCH_KEY)))
            self._sockets.append(socket.create_connection((HOST if local else host, port)))
            run = self._follow_first
        else:
            # Both families, where the host has both.
            both = not local and socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            listener = socket.create_server(
                (HOST if local else "", 0), family=family, dualstack_ipv6=both, backlog=size
            )
            self._sockets.append(listener)
            store.set(_WATCH_KEY, str(listener.getsockname()[1]))
            run = self._follow_others
        threading.Thread(target=run, name="lockstep-ranks", daemon=True).start()

    def close(self) -> None:
        """Break the connections of this process, so that the others notice it."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _follow_first(self) -> None:
        with suppress(OSError):
            self._sockets[0].recv(1)  # nothing is ever sent
        self._lost()

    def _follow_others(self) -> None:
        (listener,) = self._sockets
        with suppress(OSError, ValueError), selectors.DefaultSelector() as waiting:
            waiting.register(listener, selectors.EVENT_READ)
            while all(key.fileobj is listener for key, _ in waiting.select()):
                connection, _ = listener.accept()
                self._sockets.append(connection)
                waiting.register(connection, selectors.EVENT_READ)
        self.close()
        self._lost()


class TorchGroup:
    """The processes of a launcher, and a store of process 0; see `processes.group.ProcessGroup`.

    Args:
        store: The store where the processes meet.
        rank: The number of this process.
        size: The number of processes.
        device: The PyTorch device of this process.
        local: Whether all processes are on this host.

    Attributes:
        models: Numbers for the models, which are the same in every process.
    """

    def __init__(
        self, store: Any, rank: int, size: int, device: torch.device, *, local: bool
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.models = itertools.count()
        self._store = store
        self._local = local
        self._keys: set[str] = set()
        self._ranks: RankGroup | None = None
        self._watch: RankWatch | None = None
        self._lost_at: float | None = None
        self._broken = 0
        atexit.register(self._end)

    @property
    def ranks(self) -> RankGroup:
        """The collectives of the processes, made anew after a failure of any of them."""
        if self._ranks is None:
            store = dist.PrefixStore(f"lockstep/ranks/{self._broken}", self._store)
            most = timedelta(seconds=patience())
            self._ranks = ranks = RankGroup(
                store, self.rank, self.size, self.device, most=most, local=self._local
            )
            if is_gpu(self.device):
                place = self._store.host, self.rank, self.size
                lost = partial(self._note_lost, ranks)
                self._watch = RankWatch(store, *place, local=self._local, lost=lost)
        return self._ranks

    def leave_ranks(self) -> None:
        """Close the connections after a failure, so that the other processes notice it."""
        self._ranks, self._lost_at = None, None
        self._broken += 1
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def put(self, key: str, text: str) -> None:
        """Store a text, and replace an earlier one."""
        self._keys.add(key)
        self._store.set(key, text)

    def get(self, key: str) -> str | None:
        """Return the current text of a key, or `None`."""
        try:
            return self._text(key) if self._store.check([key]) else None
        except dist.DistNetworkError as error:
            raise self._without_first() from error

    def wait(self, key: str, milliseconds: int) -> str | None:
        """Return the text of a key when it is there, `None` if it is not there in time."""
        # The store's own wait prints a warning in C++ each time that it ends without the key.
        until = time.monotonic() + milliseconds / 1000
        pause = _FIRST_PAUSE
        while (text := self.get(key)) is None and time.monotonic() < until:
            if self._lost_at is not None and time.monotonic() > self._lost_at + _LAST_WORDS:
                raise self._without_another()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return text

    def delete(self, folder: str) -> None:
        """Delete the keys that begin with `folder/`: those of this process."""
        for key in [key for key in self._keys if key.startswith(f"{folder}/")]:
            self._keys.discard(key)
            self._store.delete_key(key)

    def broadcast(self, values: list[np.ndarray]) -> list[np.ndarray]:
        """Return the bytes of the first process, in every process."""
        tensors = [torch.from_numpy(value.copy()) for value in values]
        self.ranks.broadcast_in_place(tensors)
        return [tensor.numpy() for tensor in tensors]

    def gather(self, mine: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
        """Return the bytes of every process."""
        if not any(sizes):
            return [mine] * len(sizes)
        try:
            whole = self.ranks.gather(torch.from_numpy(mine), sizes)
        except PeerLost:
            self.leave_ranks()
            raise lost_connection_error() from None
        return [part.numpy() for part in whole.split(sizes)]

    def share_random_state(self) -> None:
        """Give every process the states of PyTorch's random numbers that the first one has."""
        host, device = random_state()
        parts = [part.numpy() for part in (host, device) if part is not None]
        shared = [torch.from_numpy(part.copy()) for part in from_first(parts)]
        set_random_state((shared[0], shared[1] if len(shared) > 1 else None))

    def local(self, value: Any) -> Any:
        """Return the value: a tensor is of one process."""
        return value

    def rows_here(self, value: Any) -> Any:
        """Return the value: a tensor is of one process."""
        return value

    def has_part(self, variable: Any) -> bool:
        """Return whether no process has the value of this variable whole."""
        return is_sharded(variable)

    def to_host(self, value: Any) -> np.ndarray:
        """Return a tensor as a NumPy array."""
        return np.asarray(keras.ops.convert_to_numpy(value) if torch.is_tensor(value) else value)

    records_sigterm = False

    def agreed_to_stop(self, steps: int, asked: bool) -> bool:
        """Return whether a process got SIGTERM, and all agreed to stop at this number of steps.

        No process passes its next step before a process with the signal has written that all
        leave after it.
        """
        key = "lockstep/leave/{}"
        if asked:
            self.put(key.format(steps + 1), "")
            self.get(key.format(steps + 1))  # an answer shows that the store has the key
        return self.get(key.format(steps)) is not None

    def _text(self, key: str) -> str:
        return bytes(self._store.get(key)).decode()

    def _note_lost(self, ranks: RankGroup) -> None:
        """End what this process waits for: another one has ended. A thread calls it."""
        if ranks is self._ranks:
            self._lost_at = time.monotonic()
            ranks.abort()

    def _without_another(self) -> ProcessesDisagree:
        return ProcessesDisagree(
            f"Another process has ended while process {self.rank} continues, but a step needs "
            "every process.\nSee the output of the other processes. The weights are those after "
            "the last common step."
        )

    def _without_first(self) -> ProcessesDisagree:
        return ProcessesDisagree(
            f"Process 0 has ended while process {self.rank} continues, but a step needs every "
            "process.\n"
            "See the output of process 0. The weights are those after the last common step."
        )

    def _end(self) -> None:
        with suppress(RuntimeError, ProcessesDisagree):
            self.put(f"lockstep/ended/{self.rank}", "")
            until = time.monotonic() + _AT_EXIT
            for rank in range(self.size if self.rank == 0 else 0):
                self.wait(f"lockstep/ended/{rank}", int(1000 * (until - time.monotonic())))


_joined: list[TorchGroup] = []


def joined() -> TorchGroup | None:
    """Return the processes that this one has joined, `None` for a process on its own."""
    return _joined[0] if _joined else None


def join_group(group: TorchGroup) -> None:
    """Let all agreements of this process go over this group."""
    _joined[:] = [group]
    use(group)


_UNNAMED = b"[c10d] The hostname of the client socket cannot be retrieved."
"""What each process says where no name belongs to the address of the other host. It is harmless:
PyTorch then writes the address in its messages."""

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def join(place: Place, rehearsed: int) -> tuple[int, int]:
    """Join the other processes, unless this has been done; return the rank and the size.

    Args:
        place: The place of this process.
        rehearsed: The number of virtual devices of this process.

    Raises:
        ProcessesDisagree: If the processes do not find each other, or one has several devices.
    """
    group = joined()
    if group is None and place.size > 1:
        device = _own_device(place, rehearsed)
        make_current(device)
        host, _, port = (place.coordinator or "").rpartition(":")
        host = host.strip("[]")
        if place.rank == 0:
            announce_coordinator(place)
        most = timedelta(seconds=patience())
        try:
            with phase("joining", compiles=True), without_lines(_UNNAMED):
                store = dist.TCPStore(host, int(port), place.size, place.rank == 0, most)
        except dist.DistError as error:
            raise not_met(place, error) from error
        group = TorchGroup(store, place.rank, place.size, device, local=host in _LOOPBACK)
        join_group(group)
    return (place.rank, place.size) if group is None else (group.rank, group.size)


def _own_device(place: Place, rehearsed: int) -> torch.device:
    """Return the one device on which this process trains."""
    on_gpu = keras_uses_gpus()
    if not on_gpu:
        mine = list(range(rehearsed))
    else:
        visible = number_of_gpus()
        shares = shares_of_gpu(os.environ)
        if shares is not None:
            check_one_gpu(shares, visible)
            place = replace(place, divides_devices=True)
        found = devices_of_process(place, visible)
        mine = list(range(visible)) if found is None else found
    if len(mine) != 1:
        raise ProcessesDisagree(
            f"This is {place}, and it has {len(mine)} devices, but on 'torch' each process "
            f"trains on one.\nStart {place.size * len(mine)} processes, or make one device "
            "visible to each (CUDA_VISIBLE_DEVICES, LOCKSTEP_REHEARSE=1)."
        )
    if not on_gpu:
        return torch.device("cpu")
    check_nccl()
    return device_of(mine[0])


def devices_of_all(group: TorchGroup) -> tuple[Device, ...]:
    """Return the devices of joined processes: one of each, by its rank."""
    on_gpus = is_gpu(group.device)
    platform, name = ("gpu", name_of(group.device)) if on_gpus else ("cpu", "cpu")
    return tuple(Device(f"{platform}:{rank}", name) for rank in range(group.size))
