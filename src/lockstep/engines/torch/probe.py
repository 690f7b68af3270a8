"""Records the layer outputs and the gradients of one training step on PyTorch."""

import itertools
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import keras
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.engines import attachments
from lockstep.engines.engine import Clock, Compiling, Data, Trace
from lockstep.engines.probe_helpers import (
    SHORT_FLOATS,
    build_symbolically,
    part_of,
    shortest,
    tensors,
    trained_once,
)
from lockstep.engines.torch import step_timing
from lockstep.engines.torch.replica import random_state, set_random_state
from lockstep.engines.torch.split_checks import why_custom
from lockstep.engines.torch.steps import recorded
from lockstep.errors import UnsupportedBackend
from lockstep.keras_compat import loss_of, takes_training, torch_iterator
from lockstep.processes import process_group
from lockstep.processes.call_scope import CALLS
from lockstep.processes.group import current
from lockstep.state import variables_of


class _Casts(TorchDispatchMode):  # type: ignore[misc]
    """Collects the short float types that operations give for values of float64."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operation, in the forward or the backward pass."""
        result = operation(*args, **(kwargs or {}))
        given = [each.dtype for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)]
        if torch.float64 in given:
            got = [each.dtype for each in tree_leaves(result) if torch.is_tensor(each)]
            self.found |= {str(each).removeprefix("torch.") for each in got} & {*SHORT_FLOATS}
        return result


class TorchProbe:
    """Probes one model, attached or not; see `Probe` for the contract.

    In training, replicas draw their own random numbers, which differ from those of one device.
    In a probed step, every device draws those of the global batch.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._random = random_state()

    def compiling(self) -> AbstractContextManager[Compiling]:
        """Return no time: steps run operation by operation."""
        return nullcontext(Compiling())

    def tracing(self) -> AbstractContextManager[Trace]:
        """Measure the computation and communication of rank 0 in this context."""
        attachment = attachments.attachment_of(self._model)
        return step_timing.tracing(lambda: 0.0 if attachment is None else attachment.waited())

    def clock(self, most: int) -> Clock:
        """Return a callback for one `fit` that times its steps."""
        return step_timing.TorchClock(most)

    def feed(self, data: Data, batch_size: int | None, most: int) -> tuple[float, int]:
        """Draw the batches of one epoch as `fit` does, without training."""
        if process_group.several():
            raise UnsupportedBackend(
                "bench was asked for in one of several processes on 'torch', and it measures a "
                "single one there.\nStart it without a launcher."
            )
        x, y, sample_weight = data
        batches = torch_iterator()(
            x=x, y=y, sample_weight=sample_weight, batch_size=batch_size, shuffle=True
        )
        number = batches.num_batches or most
        # keras/src/backend/torch/trainer.py, TorchEpochIterator
        drawn = iter(batches.data_adapter.get_torch_dataloader())
        if number > most:  # the start of an epoch serves all its batches
            next(drawn)
        start = time.perf_counter()
        count = sum(1 for _ in itertools.islice(drawn, min(most, number)))
        return time.perf_counter() - start, count

    @contextmanager
    def precise(self) -> Iterator[None]:
        """Use full-precision matrix products and no `torch.compile`, as several devices do."""
        model = self._model
        before = torch.get_float32_matmul_precision(), model.jit_compile
        torch.set_float32_matmul_precision("highest")
        model.jit_compile = False
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before[0])
            model.jit_compile = before[1]

    @contextmanager
    def synchronized(self) -> Iterator[None]:
        """Give several processes the values and random numbers of the first one.

        At the end, the state of PyTorch's random numbers is put back.
        """
        before = random_state()
        try:
            with process_group.values_of_first(self._model):
                if process_group.several():
                    with CALLS.call("verify"):
                        current().share_random_state()
                yield
        finally:
            set_random_state(before)

    def restart(self) -> None:
        """Make the step anew, and draw the random numbers of the first step again."""
        self._draw_again()
        self._model.make_train_function(force=True)

    def build(self, batch: Any) -> None:
        """Build what is not built yet, as `fit` does before its first step."""
        build_symbolically(self._model, batch)

    def lowered(self, batch: Any) -> str | None:
        """Train a step, and return the shortest float type that operations give for float64."""
        with _Casts() as casts:
            trained_once(self._model, batch)
        return shortest(casts.found)

    def train(self, batch: Any) -> dict[str, Any]:
        """Train one step on a batch in the structure of `fit`, and return the logs."""
        with CALLS.call("verify") if process_group.several() else nullcontext():
            return trained_once(self._model, batch)

    def inspect(self, batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the layer outputs for `batch`, in order, and the gradient of each variable.

        The model does not change. Layers inside nested models are included. A model with its
        own `train_step` has no gradients here.
        """
        self._draw_again()
        variables = variables_of(self._model)
        before = [variable.value.detach().clone() for variable in variables]
        attachment = attachments.attachment_of(self._model)
        data = tensors(batch)
        try:
            seen = None if attachment is None else attachment.inspect(data)
            if seen is None:
                seen = self._alone(data)
        finally:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
        seen = {name: keras.ops.convert_to_numpy(value) for name, value in seen.items()}
        return part_of(seen, "activation"), part_of(seen, "gradient")

    def notes(self) -> list[str]:
        """Return no notes: a warning names what is not split."""
        return []

    def _draw_again(self) -> None:
        set_random_state(self._random)
        attachment = attachments.attachment_of(self._model)
        if attachment is not None:
            attachment.draw_together()

    def _alone(self, data: Any) -> dict[str, Any]:
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        options = {"training": True} if takes_training(model) else {}
        with recorded(model, lambda output: output) as seen:
            if why_custom(model, "train") is not None:
                # Such a model may call its layers in any way, and leave `call` undefined.
                with suppress(Exception):
                    model(x, **options)
                return seen
            y_pred = model(x, **options)
            model.zero_grad()
            loss_of(model, x, y, y_pred, sample_weight, training=True).backward()
        for variable in model.trainable_variables:
            if variable.value.grad is not None:
                seen[f"gradient/{variable.path}"] = variable.value.grad
        return seen
