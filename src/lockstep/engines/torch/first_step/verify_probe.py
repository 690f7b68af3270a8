"""For `verify`: trains and records steps of one model on PyTorch."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from lockstep.attach.attachment import attachment_of
from lockstep.core.patched import patched
from lockstep.core.state import restore, snapshot
from lockstep.engines.replicas.first_step import watched
from lockstep.engines.replicas.sketches import Sketches
from lockstep.engines.torch.first_step.first_step import recorded_step, stock_step
from lockstep.engines.torch.same_model.settings import full_precision
from lockstep.engines.torch.steps.layers import copied_states
from lockstep.engines.torch.steps.replica import random_state, set_random_state
from lockstep.engines.torch.steps.split_checks import is_asked_for, why_custom
from lockstep.engines.torch.torch_compat import TorchDispatchMode, tree_leaves
from lockstep.errors import counted
from lockstep.keras_compat import XLA
from lockstep.processes import process_group
from lockstep.processes.call_scope import CALLS
from lockstep.processes.group import current
from lockstep.training.probe_helpers import (
    SHORT_FLOATS,
    build_symbolically,
    calls_watched,
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
        self._remarks: list[str] = []
        self._steps = 0

    @contextmanager
    def precise(self) -> Iterator[list[str]]:
        """Use full-precision matrix products, as several devices do.

        Several processes draw the random numbers of the first one. At the end, the state of
        PyTorch's random numbers is put back.
        """
        before = random_state()
        try:
            if process_group.several():
                with CALLS.call("verify"):
                    current().share_random_state()
            self._random = random_state()
            with full_precision():
                yield self._remarks
        finally:
            set_random_state(before)

    def build(self, batch: Any) -> str | None:
        """Build the model as `fit` does before its first step; return its casts from float64.

        The casts are those of operations in a step that is trained and taken back.
        """
        build_symbolically(self._model, batch)

        def casts() -> set[str]:
            before, seen = snapshot(self._model), _Casts()
            try:
                with self.precise(), seen:
                    self.train(batch)
            finally:
                restore(self._model, before)
            return seen.found

        return shortest_cast(self._model, casts)

    def train(self, batch: Any, *, restart: bool = False) -> dict[str, Any]:
        """Train one step on a batch in the structure of `fit`, and return the logs.

        After a restart, the random numbers of the first step are drawn again. With
        `jit_compile=True`, several devices run graphs, as in `fit`; one device runs Keras's code
        without `torch.compile`.
        """
        model, session = self._model, self._session()
        with patched([(model, XLA, False)] if session is None else []):
            if restart:
                self._steps = 0
                self._draw_again()
                model.make_train_function(force=True)
            self._steps += 1
            with CALLS.call("verify") if process_group.several() else nullcontext():
                logs = trained_once(model, batch)
        self._remarks[:] = [] if session is None else self._on_graphs(session)
        return logs

    def _on_graphs(self, session: Any) -> list[str]:
        """Say how many steps ran as graphs, if `compile` was given `jit_compile=True`."""
        if not is_asked_for(self._model):
            return []
        graphs, devices = session.graphs_run, counted(len(session.devices), "device")
        if not graphs:
            return [
                f"With jit_compile=True, no step on {devices} ran as a graph. A graph is made when "
                "a batch has the form of an earlier one."
            ]
        return [
            f"With jit_compile=True, {graphs} of {counted(self._steps, 'step')} on {devices} ran "
            "as graphs, and the rest by Keras's code."
        ]

    def recorded(
        self, batches: Iterable[Any], *, layers: bool = True
    ) -> Generator[list[Sketches], None, None]:
        """Yield the sketches of each replica; see `Probe`."""
        model = self._model
        for batch in batches:
            self._draw_again()
            session, data = self._session(), tensors(batch)
            several = None if session is None else session.recorded(data)
            if several is not None:
                yield several
                continue
            is_custom = why_custom(model, "train") is not None
            with copied_states(model):
                one = recorded_step(
                    model,
                    partial(stock_step, model, "train", data),
                    is_custom=is_custom,
                    watch=partial(calls_watched, watched(model)) if is_custom else None,
                )
            yield [one.sketches()]

    def _draw_again(self) -> None:
        set_random_state(self._random)
        session = self._session()
        if session is not None:
            session.draw_together()

    def _session(self) -> Any:
        attachment = attachment_of(self._model)
        return None if attachment is None else attachment.session
