"""The error for virtual devices that are requested after a framework has started."""

from collections.abc import Sequence

from lockstep.core.devices import Device, names_in_words
from lockstep.errors import RehearsalTooLate


def rehearsal_too_late(
    framework: str, asked: int, here: Sequence[Device], *, by_environment: bool = False
) -> RehearsalTooLate:
    """Return the error, with both numbers of devices and a remedy.

    Args:
        framework: The framework that has started.
        asked: The number of virtual devices requested.
        here: The devices that it has started with.
        by_environment: Whether `LOCKSTEP_REHEARSE` asks. The variable is read when lockstep is
            imported, so the remedy is an earlier import.
    """
    names = f"{len(here)}: {names_in_words([device.name for device in here])}"
    if by_environment:
        return RehearsalTooLate(
            f"LOCKSTEP_REHEARSE={asked} is set, but {framework} had already started with "
            f"{names}.\nDevices are fixed at the first operation, and lockstep reads the "
            "variable when it is imported.\nPut `import lockstep` before the first Keras "
            "operation: any layer, tensor or model."
        )
    return RehearsalTooLate(
        f"A rehearsal on {asked} virtual CPU devices was requested, but {framework} has already "
        f"started with {names}.\nDevices are fixed at the first operation. Set "
        f"LOCKSTEP_REHEARSE={asked} before Python starts\n(or call "
        f"lockstep.rehearse(devices={asked}) before the first Keras operation)."
    )
