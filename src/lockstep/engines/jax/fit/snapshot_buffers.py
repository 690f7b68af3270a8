"""Copies of arrays that stay unchanged while training continues."""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_AHEAD = 4
"""The number of arrays in transfer to the host while one is written."""


class SnapshotBuffers:
    """Copy the state of a model repeatedly.

    On accelerators the copy runs on the device, after the current step and before the step that
    overwrites the buffers. It moves to the host while training continues, and needs the device
    memory of one state until then. CPU devices have no such order. The copy is made at once, into
    host memory that is kept for the next copy. Memory that was never used costs an operating system
    many times the copy.

    Args:
        on_host: Whether the devices are CPUs.
    """

    def __init__(self, on_host: bool) -> None:
        self._on_host = on_host
        self._copy = jax.jit(lambda values: [jnp.copy(value) for value in values])
        self._kept: dict[str, np.ndarray] = {}

    def of(self, names: list[str], values: Iterable[Any]) -> Iterator[np.ndarray]:
        """Return the current values on the host, one after the other.

        Iterate once, in any thread. On CPU devices, iterate before the next copy.
        """
        if self._on_host:
            return iter([self._kept_copy(*each) for each in zip(names, values, strict=True)])
        return _fetched(self._on_device([*values]))

    def _kept_copy(self, name: str, value: Any) -> np.ndarray:
        seen = np.asarray(value)  # while this view exists, no step writes into it
        kept = self._kept.get(name)
        if kept is None or kept.shape != seen.shape or kept.dtype != seen.dtype:
            kept = self._kept[name] = np.empty_like(seen)
        np.copyto(kept, seen)
        return kept

    def _on_device(self, values: list[Any]) -> list[Any]:
        copies = list(values)
        on_one: dict[Any, list[int]] = {}
        for n, value in enumerate(values):
            if isinstance(value, np.ndarray):
                continue
            devices = tuple(value.sharding.device_set)
            if len(devices) > 1:
                copies[n] = jnp.copy(value)
            else:  # of branches, each device has other values, and a program runs on one device
                on_one.setdefault(devices[0], []).append(n)
        for numbers in on_one.values():
            copied = self._copy([values[n] for n in numbers])
            for n, copy in zip(numbers, copied, strict=True):
                copies[n] = copy
        return copies


def _fetched(copies: list[Any]) -> Iterator[np.ndarray]:
    """Yield the values on the host, and free each copy after its transfer."""
    for copy in copies[:_AHEAD]:
        _begin_to_fetch(copy)
    for n in range(len(copies)):
        if n + _AHEAD < len(copies):
            _begin_to_fetch(copies[n + _AHEAD])
        value = np.asarray(copies[n])
        copies[n] = None
        yield value


def _begin_to_fetch(copy: Any) -> None:
    if isinstance(copy, jax.Array):  # a variable that all processes gathered is here already
        copy.copy_to_host_async()
