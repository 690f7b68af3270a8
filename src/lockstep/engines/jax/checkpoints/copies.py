"""Copies of arrays, which stay as they are while training goes on."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_AHEAD = 4
"""How many arrays are on their way to the host while one is being written."""


class Copies:
    """Copies the state of a model, again and again.

    On accelerators a copy is ordered on the device, behind the step that runs and before the
    one that overwrites its buffers, and comes to the host while training goes on; it takes
    the memory of one state on the device until it is there. On CPU devices, which have no
    order of their own, the copy is made at once, into memory of the host that is kept for the
    next one: memory that was never used costs an operating system many times the copy.

    Args:
        on_host: Whether the devices are CPUs.
    """

    def __init__(self, on_host: bool) -> None:
        self._on_host = on_host
        self._copy = jax.jit(lambda values: [jnp.copy(value) for value in values])
        self._kept: dict[str, np.ndarray] = {}

    def of(self, names: list[str], values: list[Any]) -> Iterator[np.ndarray]:
        """The values as they are now, on the host, one after the other.

        To be gone through once, by any thread, and on CPU devices before the next copy.
        """
        if self._on_host:
            return iter([self._kept_copy(*each) for each in zip(names, values, strict=True)])
        return _fetched(self._on_device(values))

    def _kept_copy(self, name: str, value: Any) -> np.ndarray:
        seen = np.asarray(value)  # while there is this view, a step does not write into it
        kept = self._kept.get(name)
        if kept is None or kept.shape != seen.shape or kept.dtype != seen.dtype:
            kept = self._kept[name] = np.empty_like(seen)
        np.copyto(kept, seen)
        return kept

    def _on_device(self, values: list[Any]) -> list[Any]:
        spread = {n for n, value in enumerate(values) if len(value.sharding.device_set) > 1}
        copies = [jnp.copy(value) if n in spread else None for n, value in enumerate(values)]
        whole = [n for n in range(len(values)) if n not in spread]
        for n, copy in zip(whole, self._copy([values[n] for n in whole]), strict=True):
            copies[n] = copy
        return copies


def _fetched(copies: list[Any]) -> Iterator[np.ndarray]:
    """The values on the host, one after the other; each copy is let go of when it is there."""
    for copy in copies[:_AHEAD]:
        copy.copy_to_host_async()
    for n in range(len(copies)):
        if n + _AHEAD < len(copies):
            copies[n + _AHEAD].copy_to_host_async()
        value = np.asarray(copies[n])
        copies[n] = None
        yield value
