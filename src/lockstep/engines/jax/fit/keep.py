"""Whether the data of a fit stay on the devices."""

import os
import warnings
import weakref
from dataclasses import asdict
from typing import Any

import jax

from lockstep.engines.engine import InputOptions
from lockstep.engines.jax.fit.callbacks import may_write_between_steps, run_user_code
from lockstep.engines.jax.fit.prefetch import batches_ahead, unasked, warn_if_left_out
from lockstep.engines.jax.on_devices.arrays import plain_arrays
from lockstep.engines.jax.on_devices.resident import Resident, can_stay
from lockstep.engines.jax.several import processes
from lockstep.engines.jax.steps.input import HostIterator
from lockstep.engines.jax.steps.step import StepFunction
from lockstep.engines.jax.steps.steps import Steps
from lockstep.errors import DataOnHostWarning

WHOLE_BYTES = 2**28
"""Up to here every device has all rows, and none has to send any; then each has its share."""
SHARE_UNASKED = 0.1
"""Of the memory of a device, for data that nobody asked to be kept."""
SHARE_ASKED = 0.5
"""Of the memory of a device that is free, for data that were asked to be kept."""
MEMORY_UNKNOWN = 2**30
"""Bytes of data that may be kept unasked on a device that does not tell its memory."""


class Keeper:
    """Keeps the data of fits on the devices of one model, where that is right and they fit.

    Attributes:
        options: What the user wants.
    """

    def __init__(self, steps: Steps, options: InputOptions) -> None:
        self.options = options
        self._steps = steps
        self._kept: weakref.WeakSet[Resident] = weakref.WeakSet()

    def keep(self, model: Any, batches: HostIterator, callbacks: Any, batch: str) -> None:
        """Let the batches of a fit be gathered on the devices, if they can; decided once.

        Args:
            model: The model, whose step function has been made.
            batches: What yields the batches.
            callbacks: Keras's list of callbacks of this call.
            batch: The kind of batch, as in the names of their hooks: `"train"` or `"test"`.
        """
        if batches.decided:
            return
        batches.decided = True
        warn_if_left_out(self.options.prefetch or 0, batches)
        wanted = self.options.data_on_devices
        if wanted is False or (wanted is None and self._steps.platform == "cpu"):
            return
        found = self._data(model, batches, callbacks, batch)
        if isinstance(found, Resident):
            batches.data = found
            self._kept.add(found)
        elif wanted:
            warnings.warn(
                f"data_on_devices=True was asked for, and {found}.\n"
                "Batches go from the host instead, with the same numbers.",
                DataOnHostWarning,
                stacklevel=4,
            )

    def heed(self, model: Any, batches: HostIterator, callbacks: Any, batch: str) -> None:
        """Follow hooks for batches that a callback has put in place since the last epoch."""
        if batches.data is not None and may_write_between_steps(callbacks, batch):
            batches.data.leave()
        wanted = self.options.prefetch
        if wanted is None:
            step = getattr(model, f"{batch}_function")
            ahead = isinstance(step, StepFunction) and step.ahead
            quiet = ahead and not may_write_between_steps(callbacks, batch)
            wanted = unasked(batches) if quiet else 0
        batches.prefetch = batches_ahead(wanted, batches)

    def leave(self) -> None:
        """The model leaves its devices: a fit under way goes on with batches from the host."""
        for data in self._kept:
            data.leave()

    def _data(
        self, model: Any, batches: HostIterator, callbacks: Any, batch: str
    ) -> Resident | str:
        if processes.several():
            return "JAX runs in several processes"
        if model.run_eagerly or not model.jit_compile:
            return "the model runs operation by operation"
        if may_write_between_steps(callbacks, batch):
            return "a callback with hooks for batches could write into the data between two steps"
        arrays = plain_arrays(batches.data_adapter)
        if arrays is None or not all(map(can_stay, arrays.leaves)):
            return "the data are not NumPy arrays of numbers"
        size = sum(array.nbytes for array in arrays.leaves)
        split = self._steps.platform != "cpu" and size > WHOLE_BYTES
        each = size // len(self._steps.devices) if split else size
        room = self._room()
        if room is not None and each > room:
            return f"{each / 2**20:.0f} MiB are more than the {room / 2**20:.0f} MiB free for them"
        try:
            watched = run_user_code(callbacks)
            return Resident(arrays, self._steps.by_rows, split=split, watched=watched)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return f"{each / 2**20:.0f} MiB do not fit on a device"

    def _room(self) -> int | None:
        """The bytes of data that each device may hold, `None` where nothing is known."""
        wanted = self.options.data_on_devices
        told = [device.memory_stats() for device in self._steps.devices]
        if not all(stats and "bytes_limit" in stats for stats in told):
            return self._share_of_host() if wanted else MEMORY_UNKNOWN
        if not wanted:
            return int(SHARE_UNASKED * min(stats["bytes_limit"] for stats in told))
        free = [stats["bytes_limit"] - stats.get("bytes_in_use", 0) for stats in told]
        return int(SHARE_ASKED * min(free))

    def _share_of_host(self) -> int | None:
        """For devices that do not tell their memory: CPU devices, which share the machine's."""
        try:
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, OSError, ValueError):  # not on Windows
            return None
        return int(SHARE_ASKED * memory / len(self._steps.devices))


def warn_of_own_loop(options: InputOptions, own: str, stacklevel: int) -> None:
    """Say that a class's own `fit`, say, does not do with its data what the user wants."""
    asked = [f"{name}={value}" for name, value in asdict(options).items() if value]
    if asked:
        warnings.warn(
            f"{' and '.join(asked)} asked for, and {own}, which Keras's loop serves.\n"
            "There batches go from the host, each in its turn, with the same numbers.",
            DataOnHostWarning,
            stacklevel,
        )
