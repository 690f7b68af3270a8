"""The call of a model in parts of the rows of a rank, and which models cannot have parts.

In training, each part but the last runs under `torch.utils.checkpoint`: the backward pass computes
the activations of a part again, so those of one part exist at a time. This second run draws the
numbers of the first one, and leaves no other trace.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lockstep.core import micro_batches as refused
from lockstep.core.devices import micro_batches
from lockstep.core.state import unique
from lockstep.engines.torch.exchange.placement import copies_on, version_of
from lockstep.engines.torch.same_model.generators import set_state, state_of
from lockstep.engines.torch.steps.layers import NOISES, ReasonsByNumber, ReplicaPlan
from lockstep.engines.torch.steps.replica import Replica
from lockstep.keras_compat import (
    added_losses,
    get_keras_mask,
    global_state,
    seed_generators,
    set_keras_mask,
    stored_value,
)


def check_layers(
    model: Any, plan: ReplicaPlan, reasons: ReasonsByNumber, size: int, *, trains: bool
) -> None:
    """Raise if a model cannot run in parts of its rows.

    Args:
        model: The model.
        plan: How its layers run.
        reasons: Why candidates of the plan are not known to work row by row.
        size: The micro-batch size.
        trains: Whether the step trains.

    Raises:
        UnsupportedModel: If it cannot.
    """
    refused.check_rows(model)
    whole = {id(plan.candidates[number]): reason for number, reason in reasons.items()}
    for norm in unique([*plan.norms, *plan.whole]):
        if isinstance(norm, keras.layers.BatchNormalization) and trains and norm.trainable:
            raise refused.needs_all_rows(norm, size)
    for layer in unique([*plan.every, *plan.whole]):
        if getattr(layer, "activity_regularizer", None) is not None or _adds_losses(layer):
            raise refused.adds_losses(layer)
    for layer in plan.whole:
        if id(layer) in whole:
            raise refused.not_by_rows(refused.in_words(layer), whole[id(layer)])
        if type(layer) not in NOISES:
            raise refused.draws_for_all_rows(layer)


def _adds_losses(layer: Any) -> bool:
    code = getattr(type(layer).call, "__code__", None)
    return not isinstance(layer, keras.Model) and "add_loss" in getattr(code, "co_names", ())


def call_in_parts(
    model: Any, plan: ReplicaPlan, replica: Replica, x: Any, options: dict[str, Any]
) -> Any | None:
    """Return the outputs of a model for the rows of a replica; `None` if these are one part.

    Every replica runs as many parts, as they may exchange weights in each.

    Args:
        model: The model.
        plan: How its layers run.
        replica: The replica.
        x: The inputs of the global batch.
        options: The other arguments of the call.
    """
    assert plan.micro_batch_size is not None, "the model runs in parts"
    number, rows = micro_batches(replica.rows, replica.size, plan.micro_batch_size)
    if number == 1:
        return None
    numbers = _RandomNumbers(plan, replica)
    paths = {id(stored_value(variable)): variable.path for variable in model.variables}
    tensors = unique([*map(stored_value, model.variables), *replica.reached])
    watched = [each for each in tensors if not numbers.has(each)]
    versions = list(map(version_of, watched))
    parts, made = replica.parts(number, rows), []

    def call(part: Replica) -> Any:
        own = keras.tree.map_structure(
            # A copy, because a layer may write into its input, which is read again.
            lambda leaf: copies_on(part.device, part.take(leaf) if _has_rows(leaf) else leaf),
            x,
        )
        with plan.in_force(part):
            outputs = model(own, **options)
        for layer in plan.every:
            if added_losses(layer):
                raise refused.adds_losses(layer)
        return outputs

    for part in parts:
        run = _run_of(partial(call, part), numbers, replica)
        # The backward pass begins with the last part, whose activations can stay until then.
        if torch.is_grad_enabled() and part is not parts[-1]:
            with set_checkpoint_early_stop(False):  # a layer may catch the exception that stops it
                made.append(checkpoint(run, use_reentrant=False, preserve_rng_state=False))
        else:
            made.append(run())
    for tensor, version in zip(watched, versions, strict=True):
        if version_of(tensor) != version:
            raise refused.changes_in_parts(model, paths.get(id(tensor)))
    return keras.tree.map_structure(lambda *leaves: _joined(model, replica, parts, leaves), *made)


def _has_rows(leaf: Any) -> bool:
    return leaf is not None and bool(leaf.ndim)


def _joined(model: Any, replica: Replica, parts: list[Replica], leaves: tuple[Any, ...]) -> Any:
    """Return an output for the rows of a replica, or for a row that it has run for its form."""
    own = []
    for part, leaf in zip(parts, leaves, strict=True):
        if not leaf.ndim or len(leaf) != max(part.count, 1):
            raise refused.has_no_rows(model, tuple(leaf.shape), max(part.count, 1))
        is_form = not replica.count and part is parts[0]
        own.append(leaf if is_form else leaf[: part.count])
    joined = torch.cat(own)
    masks = [get_keras_mask(leaf) for leaf in leaves]
    if masks[0] is not None:
        set_keras_mask(joined, _joined(model, replica, parts, tuple(masks)))
    return joined


class _RandomNumbers:
    """The random numbers with which the parts of one call begin.

    Keras's seeds, and what all ranks draw alike, begin each part from the same state. So they end
    in that of a call with all rows. So do the generators of Python and NumPy from which the first
    step has drawn. PyTorch's own numbers go on from part to part.
    """

    def __init__(self, plan: ReplicaPlan, replica: Replica) -> None:
        generators = [*plan.seeds(), *(each for one in plan.whole for each in seed_generators(one))]
        self._states = [stored_value(seeds.state) for seeds in unique(generators)]
        self._streams = replica.streams
        self._generators = replica.drawn_from
        self._start = self.now()

    def has(self, tensor: Any) -> bool:
        """Return whether a tensor is one of the seeds."""
        return any(tensor is state for state in self._states)

    def now(self) -> Any:
        """Return the state of all numbers."""
        seeds = [state.clone() for state in self._states]
        return seeds, self._streams.state(), list(map(state_of, self._generators))

    def begin(self) -> Any:
        """Let the next part begin, and return the state in which it does."""
        _, (own, _), _ = self.now()
        seeds, (_, common), generators = self._start
        begun = seeds, (own, common), generators
        self.go_on(begun)
        return begun

    def go_on(self, state: Any) -> None:
        """Go on from what `now` or `begin` has returned."""
        seeds, streams, generators = state
        with torch.no_grad():
            for variable, value in zip(self._states, seeds, strict=True):
                variable.copy_(value)
        self._streams.set_state(streams)
        for generator, data in zip(self._generators, generators, strict=True):
            set_state(generator, data)


def _run_of(call: Callable[[], Any], numbers: _RandomNumbers, replica: Replica) -> Any:
    """Return a function that runs a part, and runs it again without a trace."""
    begun: Any = None
    thread = dict(_of_thread())

    def run() -> Any:
        nonlocal begun
        if begun is None:
            begun = numbers.begin()
            with replica.noting_draws():
                return call()
        now = numbers.now()
        try:
            with _state_of(thread):
                numbers.go_on(begun)
                return call()
        finally:
            numbers.go_on(now)

    return run


def _of_thread() -> dict[str, Any]:
    """Return what Keras keeps for each thread: a GPU's backward pass has a thread of its own."""
    state: dict[str, Any] = vars(global_state.GLOBAL_STATE_TRACKER)
    return state


@contextmanager
def _state_of(thread: dict[str, Any]) -> Iterator[None]:
    """Give Keras the state of another thread inside the context."""
    state = _of_thread()
    before = dict(state)
    state.clear()
    state.update(thread)
    try:
        yield
    finally:
        state.clear()
        state.update(before)
