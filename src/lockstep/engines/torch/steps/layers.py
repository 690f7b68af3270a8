"""The plan by which each layer of a split model runs in one step."""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import torch
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from lockstep.core.left_out import LeftOutUsed
from lockstep.core.micro_batches import needs_all_rows
from lockstep.core.patched import patched
from lockstep.core.state import stateful_layers, unique
from lockstep.engines.replicas.layer_plan import LayerPlan
from lockstep.engines.rowwise import (
    arrays_in,
    call_name,
    is_container,
)
from lockstep.engines.torch.exchange.group import LoneRank
from lockstep.engines.torch.exchange.placement import with_rows
from lockstep.engines.torch.steps.replica import RandomStreams, Replica, seed_of_replica
from lockstep.engines.torch.steps.rows import enter, gathered, leave
from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import (
    EXPECTED_BATCH_SIZE,
    GLOBAL_SEED_GENERATOR,
    MOMENTS,
    calls_of,
    global_state,
    operations_of,
    reduction_axes,
    seed_generators,
)

ReasonsByNumber = dict[int, str]
"""Why candidates of a plan are refused, by their number in `ReplicaPlan.candidates`."""


class ReplicaPlan(LayerPlan):
    """Runs each layer of a model in a replica as its `LayerPlan` says.

    Attributes:
        micro_batch_size: The most rows that run through the model at once; `None` for all rows.
    """

    micro_batch_size: int | None = None
    _record: Callable[[Any, Any, Any], None] | None = None

    @contextmanager
    def watched(self, record: Callable[[Any, Any, Any], None]) -> Iterator[None]:
        """Call `record` inside the context with the model, and its outputs for own rows."""
        self._record = record
        try:
            yield
        finally:
            self._record = None

    def called(self, model: Any, outputs: Any) -> None:
        """Note the outputs of the model for the rows of this replica."""
        if self._record is not None:
            self._record(model, None, outputs)

    def _no_moments(self, layer: Any, replica: Replica) -> Callable[[Any, Any], tuple[Any, Any]]:
        def moments(inputs: Any, mask: Any) -> tuple[Any, Any]:
            raise needs_all_rows(layer, self.micro_batch_size or 0)

        return moments

    def seeds(self) -> list[Any]:
        """Return the seed generators of Keras from which layers draw apart on each replica."""
        generators = [seeds for layer in unique(self.every) for seeds in seed_generators(layer)]
        return unique([*generators, *filter(None, [_without_seed()])])

    def norms_on_one_device(self, device: torch.device) -> AbstractContextManager[None]:
        """Let batch norms that use all replicas compute as they do, but on one device."""

        def moments(layer: Any) -> Callable[[Any, Any], Any]:
            def of_all_rows(inputs: Any, mask: Any) -> Any:
                replica = Replica(LoneRank(device), len(inputs), RandomStreams(), device)
                return moments_over(layer, replica)(inputs, mask)

            return of_all_rows

        return patched([(layer, MOMENTS, moments(layer)) for layer in self.norms])

    @contextmanager
    def in_force(self, replica: Replica) -> Iterator[None]:
        """Apply this plan to the layers inside the context."""
        changes: list[tuple[Any, str, Any]] = []
        for layer in self.whole:
            if self.draws_together and type(layer) in NOISES:
                changes.append((layer, "call", _with_noise_of_all(layer, layer.call, replica)))
                continue
            name = call_name(layer)
            call = _on_global_batch(layer, getattr(layer, name), replica)
            changes.append((layer, name, call))
            if hasattr(layer, "compute_mask"):
                mask = _on_global_batch(layer, layer.compute_mask, replica)
                changes.append((layer, "compute_mask", mask))
        for rnn in unique(self.stateful):
            changes += by_rows(rnn, replica)
        moments = self._no_moments if replica.is_part else moments_over
        changes += [(layer, MOMENTS, moments(layer, replica)) for layer in self.norms]
        for layer in unique([*self.every, *self.whole]):
            if getattr(layer, "activity_regularizer", None) is not None:
                hook = _of_global_outputs(layer, layer.activity_regularizer, replica)
                changes.append((layer, "activity_regularizer", hook))
        shared = _without_seed() if self.draws_together else None
        for seeds in self.seeds():
            draw = _by_all_alone if seeds is shared else _of_this_replica
            changes.append((seeds, "next", draw(seeds.next, replica)))
        with patched(changes):
            yield
        if self.draws_together and shared is None and _without_seed() is not None:
            raise _drawn_apart()  # a layer has made it, and not on all rows


def parts_of(plan: ReplicaPlan) -> list[str]:
    """Return what a plan knows of each part of its model: the same in every process."""
    kinds = {
        "candidate": plan.candidates,
        "whole": plan.whole,
        "batch norm": plan.norms,
        "stateful": plan.stateful,
    }
    return [
        f"{type(part).__name__} {part.name!r} ({kind})"
        for kind, parts in kinds.items()
        for part in parts
    ]


def unknown_rows(model: Any, whole: Collection[int]) -> str | None:
    """Return why the rows of some tensor in a graph are unknown, `None` if all are known.

    Every tensor has to have the first dim of the inputs: it may be open, or a number where a
    batch has built the model. A step checks what layers on the global batch return.

    Args:
        model: The model.
        whole: The identities of layers and operations that run on the global batch.
    """
    if not hasattr(model, "inputs"):  # a sequence that has no graph: a step checks all outputs
        return None
    inputs = {tuple(tensor.shape[:1]) for tensor in keras.tree.flatten(model.inputs)}
    if len(inputs) != 1:
        return f"has inputs with different first dims {sorted(map(str, inputs))}"
    for part in _parts_in(model):
        for node in calls_of(part):
            if id(part) in whole and arrays_in(node):
                return f"passes a constant array to {part.name!r}"
            for tensor in (*node.input_tensors, *node.output_tensors):
                if len(tensor.shape) and tuple(tensor.shape[:1]) not in inputs:
                    return f"has a different first dim {tuple(tensor.shape)} at {part.name!r}"
    if any(len(output.shape) == 0 for output in keras.tree.flatten(model.outputs)):
        return "has an output without rows"
    return None


def _parts_in(container: Any) -> list[Any]:
    found = []
    for part in operations_of(container):
        found.append(part)
        if is_container(part):
            found += _parts_in(part)
    return found


def _with_noise_of_all(
    layer: Any, call: Callable[..., Any], replica: Replica
) -> Callable[..., Any]:
    """Wrap `call` of a noise layer: draw for all rows, and use what is drawn for own rows."""
    name = f"An input of layer {layer.name!r} ({type(layer).__name__})"

    def call_with_noise(inputs: Any, training: bool = False) -> Any:
        if not training:
            return call(inputs, training=False)
        replica.true_rows(inputs, name)
        with torch.no_grad(), replica.streams.common():
            every = with_rows(inputs, replica.rows)
            every.fill_(type(layer) is not keras.layers.GaussianNoise)
            noise = replica.take(call(every, training=True))
        if isinstance(layer, keras.layers.GaussianNoise):
            return inputs + noise
        if isinstance(layer, keras.layers.GaussianDropout):
            return inputs * noise
        # As Keras divides: a rounded factor would move all rows in one direction.
        return torch.where(noise == 0, 0.0, inputs / (1 - layer.rate))

    return call_with_noise


NOISES = (
    keras.layers.Dropout,
    keras.layers.GaussianDropout,
    keras.layers.GaussianNoise,
    keras.layers.SpatialDropout1D,
    keras.layers.SpatialDropout2D,
    keras.layers.SpatialDropout3D,
)
"""Layers that multiply their inputs by noise, or add noise, whatever the inputs are."""


def _on_global_batch(layer: Any, call: Callable[..., Any], replica: Replica) -> Callable[..., Any]:
    """Wrap `call`: gather the rows of its inputs, return this replica's rows of its outputs."""
    enters = f"An input of layer {layer.name!r} ({type(layer).__name__})"
    leaves = f"An output of layer {layer.name!r} ({type(layer).__name__})"

    def whole(value: Any) -> Any:
        has_rows = isinstance(value, torch.Tensor) and value.ndim
        return gathered(leave(value, replica, enters)) if has_rows else value

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        replica.check_whole(value, leaves)
        return enter(value, replica)

    def gathered_call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = keras.tree.map_structure(whole, (args, kwargs))
        with replica.streams.common(), _HookWatch() as hooks:
            outputs = call(*args, **kwargs)
        if hooks.found or _has_own_gradient((args, kwargs), outputs):
            raise LeftOutUsed(
                f"a gradient inside layer {layer.name!r}, but a device has only the gradient of "
                "its own rows"
            )
        return keras.tree.map_structure(own, outputs)

    return gathered_call


class _HookWatch(TorchFunctionMode):  # type: ignore[misc]
    """Notes whether code asks for the gradient of a tensor inside the context."""

    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= getattr(func, "__name__", "") in _HOOK_METHODS
        return func(*args, **(kwargs or {}))


_HOOK_METHODS = ("register_hook", "register_post_accumulate_grad_hook")


def _has_own_gradient(inputs: Any, outputs: Any) -> bool:
    """Return whether a user's `torch.autograd.Function` is between inputs and outputs."""
    seen = {node for node in map(_node_of, keras.tree.flatten(inputs)) if node is not None}
    waiting = list(map(_node_of, keras.tree.flatten(outputs)))
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
        if isinstance(node, BackwardCFunction):
            # Keras has one for `keras.ops.custom_gradient`, with the function of the user.
            function = getattr(node, "grad_fn", None) or type(node)._forward_cls
            if function.__module__.partition(".")[0] not in ("keras", "lockstep", "torch"):
                return True
    return False


def _node_of(value: Any) -> Any:
    return value.grad_fn if isinstance(value, torch.Tensor) else None


def _of_global_outputs(layer: Any, regularizer: Any, replica: Replica) -> Callable[[Any], Any]:
    """Wrap an activity regularizer to see the outputs of all replicas."""
    name = f"An output of layer {layer.name!r} ({type(layer).__name__})"

    def regularize(output: Any) -> Any:
        if output.ndim == 0:
            return regularizer(output)
        loss = regularizer(gathered(leave(output, replica, name)))
        # keras/src/layers/layer.py, Layer.__call__ divides by the rows of `output`.
        return loss * (len(output) / replica.rows)

    return regularize


def _of_this_replica(draw: Callable[..., Any], replica: Replica) -> Callable[..., Any]:
    """Wrap `draw` to return a different seed on every replica, on the first one its own.

    Layers on the global batch may draw from Keras's seed generator too. They get the same seed.
    """

    def draw_here(*args: Any, **kwargs: Any) -> Any:
        seed = draw(*args, **kwargs)
        return seed if replica.streams.are_common else seed_of_replica(seed, replica.number)

    return draw_here


def _without_seed() -> Any:
    """Return Keras's seed generator for draws without a seed, `None` before the first one."""
    return global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)


def _by_all_alone(draw: Callable[..., Any], replica: Replica) -> Callable[..., Any]:
    """Wrap `draw` of the generator without a seed: only code on all rows draws as one device."""

    def draw_here(*args: Any, **kwargs: Any) -> Any:
        if not replica.streams.are_common:
            raise _drawn_apart()
        return draw(*args, **kwargs)

    return draw_here


def _drawn_apart() -> UnsupportedModel:
    return UnsupportedModel(
        "same_random_numbers=True was requested, but code that runs on the rows of one device "
        "draws random numbers\nwithout a seed, such as keras.random.normal(shape), so they "
        "would differ from one device.\nGive the layer a keras.random.SeedGenerator, and pass "
        "it as seed=."
    )


def moments_over(layer: Any, replica: Replica) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return a replacement for a batch norm's `_moments` that uses the global batch.

    Each replica gives the sum of its inputs and their squared distance from their own mean, which
    are joined by the formula of Chan, Golub and LeVeque, "Updating Formulae and a Pairwise
    Algorithm for Computing Sample Variances" (1979). The mean of squares minus the squared mean
    would lose all digits for inputs far from zero.
    """
    axes = reduction_axes(layer)
    name = f"The input of layer {layer.name!r}"

    def moments(inputs: Any, mask: Any) -> tuple[Any, Any]:
        inputs = replica.true_rows(inputs, name)
        others = math.prod(inputs.shape[axis] for axis in axes if axis)
        if mask is None:
            count = inputs.new_tensor(replica.rows * others)
            counts = inputs.new_tensor(replica.counts) * others
            total = inputs.sum(axes)
            own = total / max(len(inputs) * others, 1)
            squares = (inputs - _along(own, inputs, axes)).square().sum(axes)
            sums, squares = replica.gather_each(torch.stack([total, squares])).unbind(1)
        else:
            kept = replica.true_rows(mask, f"{name} (its mask)").unsqueeze(-1)
            kept = kept.broadcast_to(inputs.shape).bool()
            number = kept.to(inputs.dtype).sum(axes)
            total = torch.where(kept, inputs, 0).sum(axes)
            own = total / number.clamp(min=1)
            distance = torch.where(kept, inputs - _along(own, inputs, axes), 0)
            stacked = torch.stack([total, distance.square().sum(axes), number])
            sums, squares, counts = replica.gather_each(stacked).unbind(1)
            # Keras adds the same epsilon if there is a mask.
            count = counts.sum(0) + keras.config.epsilon()
        counts = counts.reshape(len(counts), -1)
        mean = sums.sum(0) / count
        away = sums / counts.clamp(min=1) - mean
        variance = (squares + counts * away.square()).sum(0) / count
        return mean, variance

    return moments


def _along(values: Any, inputs: Any, axes: Any) -> Any:
    """Return values of each channel in a shape that is broadcast to the inputs."""
    return values.reshape([1 if axis in axes else size for axis, size in enumerate(inputs.shape)])


@contextmanager
def copied_states(model: Any) -> Iterator[None]:
    """Let the stateful RNNs of a model compute with copies of their states in the context.

    Keras 3.15.1 computes with the tensor of the state variable, and assigns the new state to it.
    PyTorch then has no old state for the backward pass, and raises.
    """
    # keras/src/layers/rnn/rnn.py, RNN.call; keras/src/layers/rnn/lstm.py, LSTM.inner_loop
    layers = stateful_layers(model)
    with patched([(layer, "inner_loop", _on_copies(layer.inner_loop)) for layer in layers]):
        yield


def by_rows(rnn: Any, replica: Replica) -> list[tuple[Any, str, Any]]:
    """Return the attributes to patch so that this replica runs its rows of an RNN's states.

    Row i of a batch continues row i of the batch before. The new rows of all replicas are
    gathered, so the states of every process are complete.

    Returns:
        Tuples of the RNN, the name of an attribute, and its new value.
    """
    # keras/src/layers/rnn/rnn.py, RNN.call
    call, states = rnn.call, rnn.states

    def call_by_rows(sequences: Any, initial_state: Any = None, **kwargs: Any) -> Any:
        if initial_state is None:
            _check_rows(states, replica)
            initial_state = keras.tree.map_structure(
                lambda state: replica.take(state.value).clone(), states
            )
        return call(sequences, initial_state=initial_state, **kwargs)

    name = f"The state of {rnn.name!r}"
    assigned = keras.tree.map_structure(lambda state: _Gathered(state, replica, name), states)
    return [
        (rnn, "call", call_by_rows),
        (rnn, "states", assigned),
        (rnn, EXPECTED_BATCH_SIZE, None),
    ]


class _Gathered:
    """A state variable to which a replica assigns its rows."""

    def __init__(self, state: Any, replica: Replica, name: str) -> None:
        self._state = state
        self._replica = replica
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def assign(self, own: Any) -> None:
        """Assign the gathered rows of all replicas."""
        self._state.assign(gathered(leave(own.detach(), self._replica, self._name)))


def _check_rows(states: Any, replica: Replica) -> None:
    expected = {len(state.value) for state in keras.tree.flatten(states)}
    if expected != {replica.rows}:
        raise ValueError(
            "If an RNN is stateful, the batch size of the input sequences must be the same as the "
            f"batch size\nof its state, {expected.pop()}. A batch has {replica.rows} rows."
        )


def _on_copies(inner_loop: Callable[..., Any]) -> Callable[..., Any]:
    def inner_loop_on_copies(*, initial_state: Any, **kwargs: Any) -> Any:
        copies = keras.tree.map_structure(torch.clone, initial_state)
        return inner_loop(initial_state=copies, **kwargs)

    return inner_loop_on_copies
