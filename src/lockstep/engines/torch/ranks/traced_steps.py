"""Which steps of a model run as graphs, and which are not traced, and why."""

import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import keras
import torch

from lockstep.core.layout import Layout
from lockstep.engines.replicas.first_step import can_be_tried, is_checked
from lockstep.engines.replicas.sketches import Mismatch
from lockstep.engines.torch.ranks.step_runner import StepRunner, TracesLost
from lockstep.engines.torch.steps.split_checks import is_flat
from lockstep.engines.torch.traced.comparison import compared, keeps_state
from lockstep.engines.torch.traced.inductor import COMPILED, COMPILING, is_wanted
from lockstep.errors import NotTracedWarning, UnsupportedModel
from lockstep.keras_compat import stored_value
from lockstep.processes import process_group


@dataclass
class Trace:
    """The graph of steps of one kind on batches of one form.

    Attributes:
        number: Its number in the ranks.
        draws: Whether it draws from PyTorch's own random numbers.
        is_new: Whether it has not run yet.
        runs: How often it was asked for.
        may_compile: Whether it may be compiled, and nobody has decided yet.
        is_compiling: Whether the ranks compile it.
    """

    number: int
    draws: bool
    is_new: bool = True
    runs: int = 0
    may_compile: bool = field(default_factory=is_wanted)
    is_compiling: bool = False


class TracedSteps:
    """The traced steps of one model, if `compile` was given `jit_compile=True`.

    Args:
        model: The model.
        runner: Runs its steps on all devices.
        layout: How it is laid out.

    Attributes:
        prints: Whether the call that runs prints lines.
    """

    def __init__(self, model: Any, runner: StepRunner, layout: Layout) -> None:
        self.prints = False
        self._model = model
        self._runner = runner
        self._layout = layout
        self._traces: dict[Any, Trace] = {}
        self._seen: Counter[Any] = Counter()
        self._refused: dict[str, str] = {}
        self._number = 0
        self._bytes: Any = None
        self._made_in_call = 0

    def begin_call(self) -> None:
        """Note that a method of the model is called."""
        self._made_in_call = 0

    def forget(self) -> None:
        """Trace anew: the model may be compiled differently."""
        self._traces.clear()
        self._refused.clear()
        self._seen.clear()

    def of(self, kind: str, batch: Any) -> Trace | None:
        """Return the graph that runs a step, `None` where Keras's code runs it.

        A new one is compared with one device before.

        Args:
            kind: `"train"`, `"test"` or `"predict"`.
            batch: Tensors or `None`, in the structure that the step takes.
        """
        try:
            return self._of(kind, batch)
        except TracesLost:
            self.lost()
            return None

    def lost(self) -> None:
        """Trace anew: new processes were started, say, because one has ended."""
        self._traces.clear()

    def _of(self, kind: str, batch: Any) -> Trace | None:
        if kind in self._refused:
            return None
        if any(map(_has_hook, self._model.trainable_variables)):
            self.refuse(kind, "the gradient of a weight has a hook")
            return None
        if self._has_changed():
            self._traces.clear()
        key = self._form(kind, batch)
        trace = self._traces.get(key)
        if trace is None:
            self._seen[key] += 1
            if self._seen[key] == 1 or self._made_in_call >= _MOST_IN_CALL:
                return None
            trace = self._made(kind, batch)
            if trace is None:
                return None
            found = self.difference(kind, batch, trace) if is_checked() else None
            if found is not None:
                self.refuse(kind, f"in its {kind} step, {found} from one device")
                return None
            self._traces[key] = trace
        trace.runs += 1
        if trace.may_compile and trace.runs % _RUNS == 0:
            self._compile(kind, batch, trace)
        return trace

    def _compile(self, kind: str, batch: Any, trace: Trace) -> None:
        """Begin to compile a graph, or let steps run what has been compiled of it.

        It rounds in another order: this step is compared with one device once more.
        """
        for other in self._traces.values():
            if other.is_compiling and other is not trace:  # its form may not come again soon
                other.is_compiling = self._runner.compiled_trace(other.number, batch) == COMPILING
                if other.is_compiling:
                    return
        state = self._runner.compiled_trace(trace.number, batch)
        trace.is_compiling = state == COMPILING
        if trace.is_compiling:
            return
        trace.may_compile = False
        self._runner.use_compiled_trace(trace.number, state == COMPILED)
        if state == COMPILED and is_checked():
            found = self.difference(kind, batch, trace)
            state = COMPILED if found is None else f"{found} from one device"
            if state == COMPILED:
                state = self._runner.compared_traces(trace.number, batch)
            self._runner.use_compiled_trace(trace.number, state == COMPILED)
        if state == COMPILED:
            self._tell(f"{kind} steps are compiled from now on")
        else:
            self._tell(f"{kind} steps are not compiled: {state}")

    def _tell(self, line: str) -> None:
        if self.prints and process_group.is_first():
            print(f"\nlockstep: {line}", flush=True)  # a bar leaves its line open

    def difference(self, kind: str, batch: Any, trace: Trace) -> Mismatch | None:
        """Return where a traced step differs from one device, `None` if it does not."""
        runner = self._runner
        try:
            computed = runner.tried_traced_step(trace.number, batch, draws=trace.draws)
        except TracesLost:  # Keras's code runs the step
            self.lost()
            return None
        found = compared(self._model, kind, batch, computed, runner.tensors())
        return runner.peers.agreed_difference(found)

    def refuse(self, kind: str, reason: str) -> None:
        """Let Keras's code run steps of this kind from now on, and say why."""
        self._refused[kind] = reason
        if process_group.is_first():
            warnings.warn(
                f"jit_compile=True was requested, but the {kind} step of {self._model.name!r} "
                f"cannot be traced: {reason}.\nKeras's code runs its steps, with the same results. "
                "Change that code, or remove jit_compile=True.",
                NotTracedWarning,
                stacklevel=2,
            )

    def _made(self, kind: str, batch: Any) -> Trace | None:
        reason = self._reason()
        model, tensors = self._model, self._runner.tensors()
        if reason is None and keeps_state(model, kind, batch, tensors):
            reason = "it changes something other than Keras variables, or draws numbers from Python"
        reason = self._runner.peers.agreed_reason(reason)
        if reason is None:
            self._number += 1
            self._made_in_call += 1
            kept = [trace.number for trace in self._traces.values()]
            answer = self._runner.trace(self._number, kept, kind, batch)
            if not answer.reason:
                return Trace(self._number, answer.draws)
            reason = answer.reason
        self.refuse(kind, reason)
        return None

    def _reason(self) -> str | None:
        """Return why no step of the model can be traced, `None` if it may be."""
        if self._layout.is_sharded:
            return "its state is sharded"
        if self._layout.micro_batch_size is not None:
            return "its batches run in micro-batches"
        if torch.is_autocast_enabled(self._runner.rank.device.type):
            return "it runs inside torch.autocast"
        if not can_be_tried(self._model):
            return "it contains an object whose state cannot be restored"
        if self._bytes is None:
            return "it contains an object that cannot be pickled, so its changes cannot be detected"
        return None

    def _has_changed(self) -> bool:
        """Return whether the model, or what its code reads, has changed since the last look."""
        runner = self._runner
        may_have = runner.unchecked or runner.peers.user_code_between_steps
        if not may_have and self._bytes is not None:
            return False
        before = self._bytes
        try:
            dumped = runner.dumped()
            self._bytes = dumped.data, tuple(map(id, dumped.tensors)), runner.times_sent()
        except UnsupportedModel:
            self._bytes = None
        return before != self._bytes or self._bytes is None

    def _form(self, kind: str, batch: Any) -> Any:
        flat = is_flat(batch)
        leaves = batch if flat else keras.tree.flatten(batch)
        forms = tuple(
            (leaf.dtype, tuple(leaf.shape), leaf.stride())
            if isinstance(leaf, torch.Tensor)
            else type(leaf)
            for leaf in leaves
        )
        structure = len(batch) if flat else str(keras.tree.map_structure(lambda leaf: 0, batch))
        return kind, structure, forms, self._model.training


def _has_hook(variable: Any) -> bool:
    tensor = stored_value(variable)
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


_MOST_IN_CALL = 8
"""Traces that one call makes, at most."""

_RUNS = 16
"""The number of runs after which compiling begins, and between two looks whether it has ended."""
