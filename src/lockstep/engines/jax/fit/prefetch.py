"""How many batches a thread makes ready."""

import warnings

from lockstep.engines.jax.steps.input import HostIterator, plain_arrays
from lockstep.errors import CheckpointWarning


def batches_ahead(wanted: int, batches: HostIterator) -> int:
    """How many batches of the next epoch a thread makes ready before their turn.

    None of data that stay on the devices, which gather them there.
    """
    return 0 if batches.data is not None or _moves_position(batches) else wanted


def warn_if_left_out(wanted: int, batches: HostIterator) -> None:
    """Say that batches are drawn in their turn although the user wants them before."""
    if wanted and _moves_position(batches):
        warnings.warn(
            f"prefetch={wanted} was asked for, and a Checkpoint saves the position of the batches "
            "trained, which\nthese data do not have once others are drawn. They are drawn in "
            "their turn, with the same numbers.",
            CheckpointWarning,
            stacklevel=5,
        )


def _moves_position(batches: HostIterator) -> bool:
    """Whether a position is saved that would move with what is drawn early.

    That of arrays does not: their order is drawn before the first batch, but for `"batch"`.
    """
    adapter = batches.data_adapter
    return batches.recorded and (plain_arrays(adapter) is None or adapter._shuffle == "batch")
