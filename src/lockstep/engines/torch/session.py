"""One model on PyTorch devices, as the loop of `fit`, `evaluate` and `predict` uses it."""

from typing import Any

import keras
import numpy as np
import torch

from lockstep.engines.torch.step_runner import StepRunner
from lockstep.keras_compat import EpochIterator, build_on_first_batch, torch_iterator
from lockstep.training.callbacks import may_write_between_steps
from lockstep.training.session import PREDICT, TRAIN, Begin, Each, End, Kind, Session


class TorchSession(Session):
    """Give the loop one model on PyTorch devices; see `Session`.

    The batches are those of Keras's own iterator: PyTorch draws the order of the rows, as on
    one device.

    Args:
        model: The model.
        devices: The names of its devices.
        runner: Runs the steps of the model on these devices.
    """

    array_type = torch.Tensor
    iterator_type = EpochIterator

    def __init__(self, model: Any, devices: tuple[str, ...], runner: StepRunner) -> None:
        super().__init__(model, devices)
        self._runner = runner

    def batches(self, kind: Kind, *, recorded: bool = False, **data: Any) -> Any:
        """Return Keras's iterator over a `DataLoader`."""
        return torch_iterator()(**data)

    def build(self, batches: Any, kind: Kind) -> None:
        """Build what the first step needs, and reset the iterator, as Keras does."""
        if kind is not PREDICT:
            build_on_first_batch(self.model, batches)
        batches.reset()
        if kind is not TRAIN:
            self.model.eval()

    def is_compiled(self) -> bool:
        """Return whether the first call of a step function compiles it."""
        return len(self.devices) == 1 and bool(self.model.jit_compile)

    def plan_epoch(self, batches: Any, callbacks: Any, kind: Kind, *, in_place: bool) -> None:
        """Decide whether the model may change between two steps of the next epoch."""
        self._changes = may_write_between_steps(callbacks, kind.name)

    def run_epoch(
        self, kind: Kind, batches: Any, begin: Begin, end: End, each: Each | None = None
    ) -> Any:
        """Run the steps of one epoch, in the mode of `torch.nn.Module` that Keras sets."""
        if kind is TRAIN:
            self.model.train()
        with self._runner.epoch(changes=self._changes):
            outputs = super().run_epoch(kind, batches, begin, end, each)
        self.model.eval()
        return outputs

    def joined(self, every: list[Any]) -> Any:
        """Return all rows of the predictions of several steps, as NumPy arrays."""
        return keras.tree.map_structure(_joined, *every)


def _joined(*parts: Any) -> np.ndarray:
    return np.concatenate([keras.ops.convert_to_numpy(part) for part in parts])
