"""One model on PyTorch devices: its step functions, and what the loop needs of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np
import torch
import torch.distributed as dist

from lockstep.attach.holders import check_shared
from lockstep.checkpoint.data_position import recorded_type
from lockstep.core.engine import PREDICT, TRAIN, Execute, Kind, Session, Snapshot
from lockstep.core.layout import Layout
from lockstep.core.state import named_variables, optimizers_of, variables_of
from lockstep.core.status import STATUS_OF_PROCESS
from lockstep.engines.torch.layers import copied_states
from lockstep.engines.torch.sharded_variables import is_sharded, parts_for_pytorch
from lockstep.errors import (
    LayoutConflict,
    UnsupportedBackend,
    UnsupportedModel,
)
from lockstep.keras_compat import (
    backend_iterator,
    build_on_first_batch,
    layers_in,
    stored_value,
    wrapped_by_keras,
)
from lockstep.training.input import HostIterator, drawn


class TorchSession(Session):
    """One model in this process, by Keras's own steps; see `Session`.

    Without a checkpoint, the batches are those of Keras's own iterator: PyTorch draws the order
    of the rows, as on one device. A `DataLoader` does not tell its position. Under a checkpoint
    NumPy draws the order, as on other backends, and batches come from the host.
    """

    def __init__(self, model: Any, layout: Layout) -> None:
        super().__init__(model, layout)
        self._find_homes()
        self._check()

    def _find_homes(self) -> None:
        """Decide where the variables are to be."""

    def _check(self) -> None:
        """Raise if the model cannot be on these devices."""
        for variable in variables_of(self.model):
            check_shared(self, variable)
        if len(self.devices) > 1:
            check_reduced_once(self.model)

    def step_function(self, kind: Kind, force: bool) -> Callable[[Any], Any]:
        """Return the step function of the model, or a new one; variables are laid out before."""
        known: Callable[[Any], Any] | None = getattr(self.model, kind.function)
        self._adopt(first=known is None)
        return self._made(kind) if force or known is None else known

    def _adopt(self, first: bool) -> None:
        """Lay out variables that are new.

        Args:
            first: Whether there is no step function yet.
        """

    def _made(self, kind: Kind) -> Callable[[Any], Any]:
        """Make the step function; Keras checks the options, and makes it for one device."""
        model = self.model
        if len(self.devices) > 1:  # this may have changed since
            check_reduced_once(model)
        getattr(type(model), f"make_{kind.function}")(model, force=True)
        return self._run(kind.name, getattr(model, kind.function))

    def _run(self, kind: str, plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the step function, given that of Keras."""

        def run(batches: Any) -> Any:
            result = self._step(kind, partial(self._on_one, plain), iter(batches))
            STATUS_OF_PROCESS.stepped()
            return result if kind == "predict" else copies(result)

        return run

    def _on_one(self, plain: Callable[[Any], Any], batches: list[Any]) -> Any:
        """Run a step of Keras in this process."""
        with copied_states(self.model):
            return plain([as_tensors(batch) for batch in batches])

    def _step(self, kind: str, plain: Callable[[Any], Any], batches: Iterator[Any]) -> Any:
        """Run a step on the next batch, given the function that runs it in this process."""
        return plain([next(batches)])

    def inspect(self, batch: Any) -> Any:
        """Return layer outputs and gradients of a step, `None` if this process runs it alone."""
        return None

    def draw_together(self) -> None:
        """Let every device draw the random numbers of the global batch, as one device does."""

    # ------------------------------------------------------------ in a loop

    def batches(self, kind: Kind, *, recorded: bool = False, **data: Any) -> Any:
        """Return Keras's iterator over a `DataLoader`, or a recorded one over host batches."""
        return recorded_type(kind, HostIterator)(**data) if recorded else backend_iterator()(**data)

    def build(self, batches: Any, kind: Kind) -> None:
        """Build what the first step needs, and reset the iterator, as Keras does."""
        if kind is TRAIN and isinstance(batches, HostIterator) and batches.recorded:
            _check_state(self.model)
        self._build_on(batches, kind)
        if kind is not TRAIN:
            self.model.eval()

    def _build_on(self, batches: Any, kind: Kind) -> None:
        if kind is not PREDICT:  # Keras's `predict` resets nothing: data may count the resets
            build_on_first_batch(self.model, batches)
            batches.reset()

    def is_compiled(self) -> bool:
        """Return whether the first call of a step function compiles it."""
        return len(self.devices) == 1 and bool(self.model.jit_compile)

    @contextmanager
    def epoch(self, kind: Kind, batches: Any, callbacks: Any) -> Iterator[Execute]:
        """Run the steps of one epoch, in the mode of `torch.nn.Module` that Keras sets."""
        if kind is TRAIN:
            self.model.train()
        yield partial(self._execute, kind, batches)
        self.model.eval()

    def _execute(self, kind: Kind, batches: Any, iterator: Iterator[Any], times: int) -> Any:
        if isinstance(batches, HostIterator):
            iterator = self._drawn(batches, iterator, times)
        return kind.function_of(self.model)(iterator)

    def _drawn(self, batches: HostIterator, iterator: Iterator[Any], times: int) -> Iterator[Any]:
        """Draw the batches of one execution."""
        return drawn(iterator, times)

    def snapshot(self, logs: dict[str, Any], *, writes: bool) -> Snapshot | None:
        """Copy every variable and the logs of the last step; later steps write in place."""
        if not writes:
            for variable in filter(is_sharded, named_variables(self.model).values()):
                _ = variable.value  # every process takes part
            return None
        named = {name: _copy_of(v) for name, v in named_variables(self.model).items()}
        variables = len(named)
        # `dict.items` bypasses the fetch of `LazyLogs`.
        for name, value in dict.items(logs):
            if value is not None and not isinstance(value, str | bytes):  # added by a callback
                named[f"logs/{name}"] = torch.as_tensor(value).detach().clone()
        arrays = [
            (name, keras.backend.standardize_dtype(tensor.dtype), tuple(tensor.shape))
            for name, tensor in named.items()
        ]
        return Snapshot(variables, arrays, map(keras.ops.convert_to_numpy, named.values()))


def _copy_of(variable: Any) -> Any:
    """Copy the value of a variable: to the host, if no device has it whole."""
    value = variable.value.detach()
    return value.cpu() if is_sharded(variable) else value.clone()


def _check_state(model: Any) -> None:
    """Raise if a step may change what a checkpoint does not save."""
    saved = {id(stored_value(variable)) for variable in variables_of(model)}
    # Layers of a Sequential or functional model are no modules of the model.
    layers = layers_in(model)
    modules = [module for layer in layers for module in layer.modules()]
    # Among what Keras gives to PyTorch are kernels that `quantize` has replaced: nobody reads them.
    of_keras = [module for module in modules if isinstance(module, keras.layers.Layer)]
    saved |= {id(tensor) for layer in of_keras for tensor in layer.torch_params.values()}
    found: dict[int, str] = {}
    with parts_for_pytorch():
        for layer in layers:
            for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
                found.setdefault(id(tensor), f"{name} of {layer.name!r}")
    others = [name for tensor, name in found.items() if tensor not in saved]
    for layer in layers:
        names = (name for name, _ in optimizers_of(layer))
        others += [f"{name} of {layer.name!r}" for name in names if name != "optimizer"]
    if others:
        raise UnsupportedModel(
            f"A step may change {', '.join(others)}, and lockstep.Checkpoint saves the variables\n"
            "of layers and the optimizer of compile. Make variables by add_weight; with several "
            "optimizers,\nuse keras.callbacks.BackupAndRestore."
        )


def copies(nest: Any) -> Any:
    """Copy the tensors of a batch, or of logs: a metric may return that of its variable."""
    return keras.tree.map_structure(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, nest
    )


def as_tensors(nest: Any) -> Any:
    """Convert arrays of the host, as Keras's `DataLoader` does."""
    if type(nest) is tuple and all(type(leaf) is torch.Tensor for leaf in nest):
        return nest
    return keras.tree.map_structure(
        lambda leaf: keras.ops.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf,
        nest,
    )


def check_reduced_once(model: Any) -> None:
    """Raise if Keras would sum gradients over processes too."""
    if wrapped_by_keras(model):
        raise LayoutConflict(
            f"{model.name!r} was asked onto several devices, and Keras has wrapped it in "
            "DistributedDataParallel, which would reduce gradients too.\nMake the model anew, "
            "without torch.distributed.init_process_group."
        )
    # From 3.16 on, Keras wraps a model in `make_train_function` if there is a default group.
    if dist.is_initialized():
        raise UnsupportedBackend(
            "Several devices were asked for on 'torch' in a process that has called "
            "torch.distributed.init_process_group.\nOn PyTorch, lockstep connects the processes by "
            "itself, also those of torchrun: leave that call out.\n"
            "In Ray Train, use DataParallelTrainer in place of TorchTrainer."
        )
    if keras.distribution.distribution() is not None:
        raise LayoutConflict(
            "Several devices were asked for on 'torch', and a keras.distribution is set, which "
            "would reduce gradients too.\nCall keras.distribution.set_distribution(None) first."
        )
