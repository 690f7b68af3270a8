"""The lines that `fit` prints at its start and in its first step."""

import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from lockstep.core.devices import micro_batches, names_in_words, rehearsed_devices, shard_rows
from lockstep.core.fit_arguments import Given, batch_size_of
from lockstep.core.layout import Branches, Layout
from lockstep.core.shared_gpu import shared_words
from lockstep.core.step_bytes import amount
from lockstep.errors import counted

LONG = 1.0
"""The duration of a first step, in seconds, from which a line reports it."""


WAIT = 5.0
"""The duration of a first step, in seconds, from which a line says what it waits for."""


class Wait:
    """A wait that prints a line if it takes longer than `WAIT`, once."""

    def __init__(self, line: str) -> None:
        self._line = line
        self._began = 0.0
        self._timer: threading.Timer | None = None
        self._is_told = False

    def start(self) -> None:
        """Begin to wait."""
        self._began = time.monotonic()
        if not self._is_told:
            self._timer = threading.Timer(WAIT, self._tell)
            self._timer.daemon = True
            self._timer.start()

    def stop(self) -> float:
        """End the wait, and return its seconds."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            timer.join()
        return time.monotonic() - self._began

    def _tell(self) -> None:
        self._is_told = True
        print(self._line, flush=True)


def waiting_line(phase: str, work: str) -> str:
    """Return the line that says what a slow first step waits for.

    Args:
        phase: What the steps do, such as "training".
        work: What is done before the step runs, as a noun.
    """
    return f"lockstep: the first {phase} step takes more than {WAIT:.0f} s: {work}"


def first_step_line(phase: str, work: str, seconds: float) -> str:
    """Return the line that reports that a slow first step is ready."""
    return f"lockstep: the first {phase} step started after {seconds:.1f} s: {work}"


def fit_line(backend: str, layout: Layout, given: Given, compiles: bool = False) -> str:
    """Return one line with the backend, the devices, and the global and per-replica batch.

    Args:
        backend: The name of the backend.
        layout: How the model is laid out.
        given: What `fit` is called with.
        compiles: Whether the training step is compiled first.
    """
    count = len(layout.devices)
    names = names_in_words(layout.devices)
    names += ", rehearsed" if rehearsed_devices(os.environ) else shared_words(os.environ)
    if isinstance(layout, Branches):
        what = f"layers on {names}"
    else:
        size = layout.micro_batch_size
        batch = _batch_words(given, count) if size is None else _parts_words(given, count, size)
        what = f"{counted(count, 'device')} ({names}), {batch}"
    return f"lockstep: {backend}, {what}" + (", compiling the training step" if compiles else "")


def _batch_words(given: Given, replicas: int) -> str:
    batch_size = batch_size_of(given)
    if batch_size is None:
        return f"batch size set by the data, each batch split across {replicas}"
    largest = len(shard_rows(batch_size, replicas)[0])
    up_to = "up to " if batch_size % replicas else ""
    return f"global batch {batch_size} = {up_to}{largest} per replica"


def _parts_words(given: Given, devices: int, size: int) -> str:
    rows = batch_size_of(given)
    if rows is None:
        return f"batch size set by the data, in micro-batches of at most {counted(size, 'row')}"
    number, each = micro_batches(rows, devices, size)
    parts = f"{counted(number, 'micro-batch')} of {each}"
    if devices == 1:
        return f"{counted(rows, 'row')}, {parts}"
    largest = len(shard_rows(rows, devices)[0])
    up_to = "up to " if rows % devices else ""
    return f"{counted(rows, 'row')} over {devices} devices: {up_to}{largest} each, {parts}"


def not_compiled_words(layers: Sequence[Any]) -> str:
    """Return which layers keep a step from being compiled, `""` without any."""
    names = [f"{layer.name} ({type(layer).__name__})" for layer in layers]
    return f"the step is not compiled because of {', '.join(names)}" if names else ""


def replicated_words(held: int, has_slots: bool, memory: int | None) -> str:
    """Return the bytes of the variables that each device holds.

    Args:
        held: The bytes.
        has_slots: Whether the optimizer has made its slots, as it does in the first step.
        memory: The memory of a device; `None` where unknown.
    """
    of = "" if memory is None else f" (memory {amount(memory)})"
    return f", {amount(held)} of state each{of}{'' if has_slots else ', without optimizer slots'}"


def kinds_words(kinds: Iterable[str]) -> str:
    """Return the kinds of hardware of the devices, `""` if all have the same.

    Args:
        kinds: The kind of each device.
    """
    names = sorted(set(kinds))
    if len(names) < 2:
        return ""
    return f", different devices ({', '.join(names)}): a step waits for the slowest"


def sharded_words(sizes: Sequence[tuple[str, int, int]], devices: int) -> str:
    """Return the state that each device holds, for a state in shards.

    A sentence follows if a device holds more than twice its share.

    Args:
        sizes: The path, the bytes and the number of shards of each variable.
        devices: The number of devices.
    """
    total = sum(size for _, size, _ in sizes)
    held = sum(size // shards for _, size, shards in sizes)
    if not total:
        return ", state sharded"
    words = f", state sharded: {held / 1e6:,.1f} of {total / 1e6:,.1f} MB each"
    if held * devices <= 2 * total:
        return words
    path, size, _ = max((each for each in sizes if each[2] == 1), key=lambda each: each[1])
    return (
        f"{words}\nlockstep: each device holds {held / total:.0%} of the state, and its share is "
        f"{1 / devices:.0%}. The largest variable that is not sharded is {path} "
        f"({size / 1e6:,.1f} MB)."
    )
