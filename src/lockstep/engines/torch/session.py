"""One model on PyTorch devices, as the loop of `fit`, `evaluate` and `predict` uses it."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import torch

from lockstep.checkpoint.fit_run import Snapshot
from lockstep.engines.torch.joined_runner import JoinedRunner
from lockstep.engines.torch.step_runner import StepRunner
from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import (
    EpochIterator,
    backend_iterator,
    build_on_first_batch,
    is_built,
    layers_in,
)
from lockstep.launch.status import phase
from lockstep.processes.agreement import DataCheck
from lockstep.state import named_variables, optimizers_of, variables_of
from lockstep.training.callbacks import may_write_between_steps, see_every_batch
from lockstep.training.input import HostIterator
from lockstep.training.session import (
    PREDICT,
    TRAIN,
    Begin,
    Each,
    End,
    Kind,
    Session,
    recorded_type,
)


class TorchSession(Session):
    """Give the loop one model on PyTorch devices; see `Session`.

    Without a checkpoint, the batches are those of Keras's own iterator: PyTorch draws the order
    of the rows, as on one device. A `DataLoader` does not tell its position. Under a checkpoint
    NumPy draws the order, as on other backends, and batches come from the host.

    Args:
        model: The model.
        devices: The names of its devices.
        runner: Runs the steps of the model on these devices.
    """

    _changes = True

    array_type = torch.Tensor
    iterator_type = EpochIterator

    def __init__(self, model: Any, devices: tuple[str, ...], runner: StepRunner) -> None:
        super().__init__(model, devices)
        self._runner = runner

    def batches(self, kind: Kind, *, recorded: bool = False, **data: Any) -> Any:
        """Return Keras's iterator over a `DataLoader`, or a recorded one over host batches."""
        several = isinstance(self._runner, JoinedRunner)
        if recorded:
            return recorded_type(kind, ComparedIterator if several else HostIterator)(**data)
        return ComparedLoader(**data) if several else backend_iterator()(**data)

    def build(self, batches: Any, kind: Kind) -> None:
        """Build what the first step needs, and reset the iterator, as Keras does."""
        if kind is TRAIN and isinstance(batches, HostIterator):
            _check_state(self.model)
        model = self.model
        if isinstance(batches, ComparedIterator):
            if kind is not PREDICT:
                batches.build(lambda: build_on_first_batch(model, batches))
            elif not is_built(model):
                batches.build(lambda: _call(model, batches))
        else:
            if kind is not PREDICT:
                build_on_first_batch(model, batches)
            batches.reset()
        if kind is not TRAIN:
            self.model.eval()

    def fit_state(self) -> "TorchFitState":
        """Return access to the variables, for a checkpoint of one `fit`."""
        return TorchFitState(self.model)

    def is_compiled(self) -> bool:
        """Return whether the first call of a step function compiles it."""
        return len(self.devices) == 1 and bool(self.model.jit_compile)

    def plan_epoch(self, batches: Any, callbacks: Any, kind: Kind) -> None:
        """Decide whether the model may change between two steps of the next epoch."""
        self._changes = may_write_between_steps(callbacks, kind.name)
        if isinstance(batches, ComparedIterator):
            batches.watch(see_every_batch(callbacks, kind.name))

    def run_epoch(
        self, kind: Kind, batches: Any, begin: Begin, end: End, each: Each | None = None
    ) -> Any:
        """Run the steps of one epoch, in the mode of `torch.nn.Module` that Keras sets."""
        if kind is TRAIN:
            self.model.train()
        with phase(kind.phase, compiles=True), self._runner.epoch(changes=self._changes):
            outputs = super().run_epoch(kind, batches, begin, end, each)
            if isinstance(batches, ComparedIterator):
                batches.check_epoch()
        self.model.eval()
        return outputs

    def drawn(self, batches: HostIterator, iterator: Iterator[Any]) -> Iterator[Any]:
        """Draw the batches of one execution, once every process has as many."""
        if not isinstance(self._runner, JoinedRunner):
            return super().drawn(batches, iterator)
        return iter(batches.agreed(lambda: [next(iterator)], self._runner.noted()))

    def joined(self, every: list[Any]) -> Any:
        """Return all rows of the predictions of several steps, as NumPy arrays."""
        return keras.tree.map_structure(_joined, *every)


class ComparedIterator(HostIterator):
    """Host batches that are compared with those of the other processes."""

    def _new_check(self) -> DataCheck:
        return DataCheck(every_pull=True)


class ComparedLoader(ComparedIterator):
    """The batches of Keras's `DataLoader`, in the order that PyTorch draws."""

    def _batches(self) -> Iterator[Any]:
        # keras/src/backend/torch/trainer.py, TorchEpochIterator
        return iter(self.data_adapter.get_torch_dataloader())


class TorchFitState:
    """Give access to the variables in a `fit`; see `lockstep.checkpoint.fit_run.FitState`."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def snapshot(self, logs: dict[str, Any]) -> Snapshot:
        """Copy every variable and the logs of the last step; later steps write in place."""
        named = {name: v.value for name, v in named_variables(self._model).items()}
        variables = len(named)
        # `dict.items` bypasses the fetch of `LazyLogs`.
        for name, value in dict.items(logs):
            if value is not None and not isinstance(value, str | bytes):  # added by a callback
                named[f"logs/{name}"] = torch.as_tensor(value)
        tensors = [tensor.detach().clone() for tensor in named.values()]
        arrays = [
            (name, keras.backend.standardize_dtype(tensor.dtype), tuple(tensor.shape))
            for name, tensor in zip(named, tensors, strict=True)
        ]
        return Snapshot(variables, arrays, map(keras.ops.convert_to_numpy, tensors))

    def sync(self) -> None:
        """Do nothing: variables hold their values between two steps."""


def _check_state(model: Any) -> None:
    """Raise if a step may change what a checkpoint does not save."""
    saved = {id(variable.value) for variable in variables_of(model)}
    tensors = (*model.named_parameters(), *model.named_buffers())
    others = [f"{name} of {model.name!r}" for name, tensor in tensors if id(tensor) not in saved]
    for layer in layers_in(model):
        names = (name for name, _ in optimizers_of(layer))
        others += [f"{name} of {layer.name!r}" for name in names if name != "optimizer"]
    if others:
        raise UnsupportedModel(
            f"A step may change {', '.join(others)}, and lockstep.Checkpoint saves the variables\n"
            "of layers and the optimizer of compile. Make variables by add_weight; with several "
            "optimizers,\nuse keras.callbacks.BackupAndRestore."
        )


def _call(model: Any, batches: HostIterator) -> None:
    """Build the layers of a model that has never been called, on the first batch."""
    for _, _, iterator in batches:
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(next(iterator))
        with torch.no_grad():
            model(inputs)
        break


def _joined(*parts: Any) -> np.ndarray:
    return np.concatenate([keras.ops.convert_to_numpy(part) for part in parts])
