"""What to say where virtual devices are asked for after a framework has started."""

from collections.abc import Sequence

from lockstep.devices import Device, names_in_words
from lockstep.errors import RehearsalTooLate


def too_late(framework: str, asked: int, here: Sequence[Device]) -> RehearsalTooLate:
    """The error, with both numbers of devices and what to do."""
    return RehearsalTooLate(
        f"A rehearsal on {asked} virtual CPU devices was asked for, and {framework} has started "
        f"with {len(here)}: {names_in_words([device.name for device in here])}.\n"
        "Devices are fixed at the first operation. Set "
        f"LOCKSTEP_REHEARSE={asked} before Python starts\n(or call "
        f"lockstep.rehearse(devices={asked}) before the first Keras operation)."
    )
