"""How many steps of a `fit` run as one program where the user left `steps_per_execution` at 1.

A small model spends its step in the call of its program. The decision needs no clock and no
compiler: two runs with the same arguments decide alike, and so does a run that goes on.
"""

import os
from typing import Any

from lockstep.checkpoint.callback import Checkpoint
from lockstep.training.callbacks import StepTimer, see_every_batch
from lockstep.training.input import HostIterator

AT_ONCE = 20
"""The steps of one program. More save little, and an interrupt waits longer."""

LEAST = 200
"""The full batches of a call from which the program is worth its compilation."""


def steps_at_once(model: Any, batches: Any, callbacks: Any, epochs: int) -> int:
    """Return how many steps of a `fit` run as one program, 1 unless nobody looks between them.

    Args:
        model: The model.
        batches: The iterator over the batches, at the place where the `fit` begins.
        callbacks: Keras's list of callbacks.
        epochs: The `epochs` of the `fit`.
    """
    if os.environ.get("LOCKSTEP_STEPS_AT_ONCE") == "0" or model.steps_per_execution != 1:
        return 1
    if not isinstance(batches, HostIterator) or _looks_between_steps(callbacks):
        return 1
    full = batches.full_batches()
    if full < AT_ONCE or full * epochs < LEAST or batches.skip % AT_ONCE:
        return 1
    return AT_ONCE if batches.may_run_at_once(model) else 1


def _looks_between_steps(callbacks: Any) -> bool:
    """Return whether a callback acts between two steps, saves there or times them."""
    return see_every_batch(callbacks, "train") or any(
        isinstance(each, StepTimer) or (isinstance(each, Checkpoint) and not each.saves_at_epochs)
        for each in callbacks.callbacks
    )
