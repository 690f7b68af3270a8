"""Plans how batches get to the devices, following the user's input options."""

import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from lockstep.engines.engine import InputOptions
from lockstep.errors import DataOnHostWarning
from lockstep.keras_compat import ArrayDataAdapter, shuffle_of
from lockstep.training.arrays import Arrays, plain_arrays
from lockstep.training.callbacks import may_write_between_steps, run_user_code
from lockstep.training.input import HostIterator

Keep = Callable[[Any, Arrays, bool], Any]
"""Puts the arrays of a `fit` of a model on its devices.

The last argument says whether user code may write into them between two epochs. Returns the data,
or the reason why they stay on the host.
"""


class InputPlanner:
    """Plan how the batches of one model get to its devices.

    Attributes:
        options: The options that the user asks for.
    """

    def __init__(self, options: InputOptions, keep: Keep) -> None:
        self.options = options
        self._keep = keep

    def place_data(self, model: Any, batches: HostIterator, callbacks: Any, batch: str) -> None:
        """Put the data of a fit on the devices once, if asked for and possible.

        Args:
            model: The model. Its step function has been made.
            batches: The iterator over the batches.
            callbacks: Keras's list of callbacks of this call.
            batch: The kind of batch, as in the names of hooks: `"train"` or `"test"`.
        """
        if batches.decided:
            return
        batches.decided = True
        why = _why_in_turn(batches) if self.options.prefetch else None
        if why is not None:
            warnings.warn(
                f"prefetch={self.options.prefetch} was asked for, and {why}.\n"
                "Batches are drawn in their turn instead, with the same numbers.",
                DataOnHostWarning,
                stacklevel=4,
            )
        if not self.options.data_on_devices:
            return
        found = self._data(model, batches, callbacks, batch)
        if not isinstance(found, str):
            batches.policy = replace(batches.policy, data=found)
        else:
            warnings.warn(
                f"data_on_devices=True was asked for, and {found}.\n"
                "Batches go from the host instead, with the same numbers.",
                DataOnHostWarning,
                stacklevel=4,
            )

    def plan_epoch(
        self,
        batches: HostIterator,
        callbacks: Any,
        batch: str,
        *,
        no_batch_hooks: bool,
        in_place: bool,
    ) -> None:
        """Set the `InputPolicy` of the next epoch.

        The hooks are checked again: a callback may have got a batch hook since the last epoch.
        """
        data = batches.policy.data
        if data is not None and may_write_between_steps(callbacks, batch):
            data.leave()
        in_turn = data is not None or _why_in_turn(batches) is not None
        batches.policy = replace(
            batches.policy,
            no_batch_hooks=no_batch_hooks,
            in_place=in_place,
            prefetch=0 if in_turn else self.options.prefetch,
        )

    def _data(self, model: Any, batches: HostIterator, callbacks: Any, batch: str) -> Any:
        """Return the data of a fit on the devices, or the reason why they stay on the host."""
        if may_write_between_steps(callbacks, batch):
            return "a callback with hooks for batches could write into the data between two steps"
        arrays = plain_arrays(batches.data_adapter)
        if arrays is None or not all(map(_can_stay, arrays.leaves)):
            return "the data are not NumPy arrays of numbers"
        return self._keep(model, arrays, run_user_code(callbacks))


def _can_stay(array: np.ndarray) -> bool:
    """Return whether an array can be kept on devices: numbers or booleans."""
    return array.dtype.kind in "biuf" and len(array) < 2**31


def warn_of_own_loop(options: InputOptions, own: str, stacklevel: int) -> None:
    """Warn that an overridden loop, such as `fit`, does not apply the input options."""
    asked = [f"{name}={value}" for name, value in asdict(options).items() if value]
    if asked:
        warnings.warn(
            f"{' and '.join(asked)} asked for, and {own}, which Keras's loop serves.\n"
            "There batches go from the host, each in its turn, with the same numbers.",
            DataOnHostWarning,
            stacklevel,
        )


def _why_in_turn(batches: HostIterator) -> str | None:
    """Return why prefetched batches would differ, or `None` if they would not."""
    adapter = batches.data_adapter
    # keras/src/trainers/data_adapters/array_data_adapter.py, ArrayDataAdapter._get_iterator
    if isinstance(adapter, ArrayDataAdapter) and shuffle_of(adapter) == "batch":
        return "shuffle='batch' draws random numbers for each batch"
    # The order of other arrays is drawn before the first batch.
    if batches.recorded and plain_arrays(adapter) is None:
        return "a Checkpoint saves the position of the batches trained"
    return None
