"""For `verify`: records the layer outputs and the gradients of one training step on PyTorch."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import keras
import torch

from lockstep.attach.attachment import attachment_of
from lockstep.core.patched import patched
from lockstep.core.state import restore, snapshot, variables_of
from lockstep.engines.torch.ranks.step_plans import is_asked_for
from lockstep.engines.torch.same_model.settings import full_precision
from lockstep.engines.torch.steps.replica import random_state, set_random_state
from lockstep.engines.torch.steps.split_checks import why_custom
from lockstep.engines.torch.steps.steps import recorded
from lockstep.engines.torch.torch_compat import TorchDispatchMode, tree_leaves
from lockstep.errors import counted
from lockstep.keras_compat import XLA, loss_of, takes_training
from lockstep.processes import process_group
from lockstep.processes.call_scope import CALLS
from lockstep.processes.group import current
from lockstep.training.probe_helpers import (
    SHORT_FLOATS,
    build_symbolically,
    part_of,
    shortest_cast,
    tensors,
    trained_once,
)


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
        self._is_traced = False
        self._steps = 0

    @contextmanager
    def precise(self) -> Iterator[None]:
        """Use full-precision matrix products and no `torch.compile`, as several devices do.

        Several processes draw the random numbers of the first one. At the end, the state of
        PyTorch's random numbers is put back.
        """
        model = self._model
        before = model.jit_compile, random_state()
        self._is_traced, model.jit_compile = is_asked_for(model), False
        try:
            if process_group.several():
                with CALLS.call("verify"):
                    current().share_random_state()
            self._random = random_state()
            with full_precision():
                yield
        finally:
            model.jit_compile = before[0]
            set_random_state(before[1])

    def as_compiled(self) -> AbstractContextManager[object]:
        """Give the model its `jit_compile` again inside the context."""
        return patched([(self._model, XLA, self._is_traced)])

    def build(self, batch: Any) -> str | None:
        """Build the model as `fit` does before its first step; return its casts from float64.

        The casts are those of operations in a step that is trained and taken back.
        """
        build_symbolically(self._model, batch)

        def casts() -> set[str]:
            before, seen = snapshot(self._model), _Casts()
            try:
                with self.precise(), seen:
                    trained_once(self._model, batch)
            finally:
                restore(self._model, before)
            return seen.found

        return shortest_cast(self._model, casts)

    def train(self, batch: Any, *, restart: bool = False) -> dict[str, Any]:
        """Train one step on a batch in the structure of `fit`, and return the logs.

        After a restart, the random numbers of the first step are drawn again. With
        `jit_compile=True`, several devices run graphs, as in `fit`.
        """
        model = self._model
        with nullcontext() if self._session() is None else self.as_compiled():
            if restart:
                self._steps = 0
                self._draw_again()
                model.make_train_function(force=True)
            self._steps += 1
            with CALLS.call("verify") if process_group.several() else nullcontext():
                return trained_once(model, batch)

    def remark(self) -> str | None:
        """Return how many steps ran as graphs, if `compile` was given `jit_compile=True`."""
        session = self._session()
        if session is None or not self._is_traced:
            return None
        graphs, devices = session.graphs_run, counted(len(session.devices), "device")
        if not graphs:
            return (
                f"With jit_compile=True, no step on {devices} ran as a graph. A graph is made when "
                "a batch has the form of an earlier one."
            )
        return (
            f"With jit_compile=True, {graphs} of {counted(self._steps, 'step')} on {devices} ran "
            "as graphs, and the rest by Keras's code."
        )

    def inspect(
        self, batches: Iterable[Any], *, layers: bool = True
    ) -> Generator[tuple[dict[str, Any], dict[str, Any]], None, None]:
        """Yield the output of each layer, in order, and the gradient of each variable.

        Layers inside nested models are included. A model with its own `train_step` has no
        gradients here. The random numbers of each batch are those of the first step.
        """
        for batch in batches:
            seen = {
                name: keras.ops.convert_to_numpy(value)
                for name, value in self._seen(batch).items()
                if layers or name.startswith("gradient/")
            }
            yield part_of(seen, "activation"), part_of(seen, "gradient")

    def _seen(self, batch: Any) -> dict[str, Any]:
        self._draw_again()
        variables = variables_of(self._model)
        before = [variable.value.detach().clone() for variable in variables]
        session, data = self._session(), tensors(batch)
        try:
            seen = None if session is None else session.inspect(data)
            return self._alone(data) if seen is None else seen
        finally:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)

    def _draw_again(self) -> None:
        set_random_state(self._random)
        session = self._session()
        if session is not None:
            session.draw_together()

    def _session(self) -> Any:
        attachment = attachment_of(self._model)
        return None if attachment is None else attachment.session

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
