"""Where the processes of a launcher meet, in words: for engines that join them."""

import socket
import sys

from lockstep.errors import ProcessesDisagree
from lockstep.launch.environment import COORDINATOR, Place


def announce_coordinator(place: Place) -> None:
    """Print where the processes meet, and check that this host has the port free.

    A framework reports a port in use late, or ends Python.

    Args:
        place: The place of the first process.

    Raises:
        ProcessesDisagree: If the port is in use.
    """
    address = place.coordinator or ""
    port = int(address.rpartition(":")[2])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ProcessesDisagree(
                f"This is {place}, and the processes cannot meet at {address}: port {port} of this "
                f"host: {error.strerror}.\n"
                f"Set {COORDINATOR}=host:port in every process: a free port of this host."
            ) from None
    said = f"lockstep: {place.size} processes join at {address} ({place.launcher}: "
    print(said + f"{', '.join(place.variables)})", file=sys.stderr, flush=True)


def not_met(place: Place, error: Exception) -> ProcessesDisagree:
    """Return the error of a process that has not met the others."""
    return ProcessesDisagree(
        f"This is {place}, and the others were not met at {place.coordinator}: "
        f"{str(error).splitlines()[0][:60]}\n"
        f"Check that process 0 runs and that its host is reached there, or set "
        f"{COORDINATOR}=host:port in every process."
    )
