"""Test patterns between every pair of devices, for `lockstep doctor --devices`."""

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

from lockstep.engines.engine import Engine
from lockstep.plurals import counted

VALUES = 2**22
"""Values of a pattern: 16 MiB, more than a device copies in one piece."""

CAUSE = (
    "The usual cause is the IOMMU or PCIe ACS, which change direct copies between GPUs.\n"
    "Change: turn both off (BIOS, or iommu=off for the kernel). Until then, training on these "
    "devices is wrong."
)

Exchange = Callable[[Any, str, str], tuple[Any, Any]]
"""As `Engine.exchanged`."""


def wrong_pairs(exchange: Exchange, devices: Sequence[str], values: int = VALUES) -> list[str]:
    """Copy and sum patterns of bits between every pair of devices, in both directions.

    The results are compared bit for bit with those of the host.

    Args:
        exchange: As `Engine.exchanged`.
        devices: The names of the devices.
        values: The number of values in a pattern.

    Returns:
        One sentence for each copy or sum that is wrong.
    """
    import numpy as np

    random = np.random.default_rng(0).integers(0, 2**30, values, dtype="int32")
    # Neighbouring bits that differ, both ways, and bits that have no order.
    patterns = (np.full(values, 0x2AAAAAAA, "int32"), np.full(values, 0x15555555, "int32"), random)
    found = []
    for source, target in permutations(devices, 2):
        for what, factor in (("copy", 1), ("sum", 2)):
            wrong = sum(
                int(np.count_nonzero(exchange(each, source, target)[factor - 1] != each * factor))
                for each in patterns
            )
            if wrong:
                of = f"{wrong:,} of {counted(len(patterns) * values, 'value')}"
                found.append(f"{source} to {target}: {of} of the {what} are wrong.")
    return found


def check(engine: Engine, *, rehearsed: bool) -> tuple[list[str], str]:
    """Test the devices of an engine.

    On rehearsed devices the test itself is tried as well: with one bit that is flipped on the
    way, it has to find that pair and no other.

    Args:
        engine: The engine of the backend.
        rehearsed: Whether the devices are virtual.

    Returns:
        The sentences on wrong pairs, and a sentence on what was tested.
    """
    here = engine.devices()
    names = [device.name for device in here if device.platform == here[0].platform]
    if len(names) < 2:
        return [], f"{names[0]} is the only device: there is no pair to test."
    values = VALUES // 64 if rehearsed else VALUES
    found = wrong_pairs(engine.exchanged, names, values)
    pairs = counted(len(names) * (len(names) - 1) // 2, "pair")
    said = f"{pairs} of devices tested by copies and sums, bit for bit."
    if rehearsed:
        flipped = wrong_pairs(_flipping(engine.exchanged, names[0], names[1]), names, values)
        if [each.split(": ")[0] for each in flipped] != [f"{names[0]} to {names[1]}"]:
            found.append("A flipped bit was not found: the test itself is wrong.")
        said += f" A bit that was flipped from {names[0]} to {names[1]} was found."
    return found, said


def _flipping(exchange: Exchange, source: str, target: str) -> Exchange:
    """Return an exchange that flips one bit of what it copies between two devices."""

    def flipped(values: Any, one: str, other: str) -> tuple[Any, Any]:
        copy, total = exchange(values, one, other)
        if (one, other) == (source, target):
            copy = copy.copy()
            copy[len(copy) // 2] ^= 1
        return copy, total

    return flipped
