"""Steps with code that may do anything with the batch, on several replicas.

Every replica runs the code of the step on the global batch. Each call of a layer with weights that
works row by row is shared: a replica runs the layer on its rows, and the outputs are `Rows`, which
are all-gathered if anything but another shared call uses them. So the code sees what it sees on one
device, and the layers, which are nearly all of the work, are split.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import keras
import torch

from lockstep.core.left_out import LeftOutMetric, LeftOutUsed
from lockstep.core.patched import patched
from lockstep.core.state import unique
from lockstep.engines.replicas.first_step import watched
from lockstep.engines.replicas.object_states import ObjectStates, held_in_words
from lockstep.engines.rowwise import call_refused, is_in_float8
from lockstep.engines.torch.exchange.group import RankGroup
from lockstep.engines.torch.exchange.placement import version_of
from lockstep.engines.torch.same_model.code_state import is_plain_object
from lockstep.engines.torch.same_model.model_copy import copy_of
from lockstep.engines.torch.same_model.model_pickle import dump
from lockstep.engines.torch.steps.layers import ReplicaPlan, copied_states
from lockstep.engines.torch.steps.replica import RandomStreams, Replica
from lockstep.engines.torch.steps.rows import (
    copied,
    enter,
    gathered,
    is_transformed,
    leave,
    outside_transforms,
    same_on_all,
    used,
)
from lockstep.engines.torch.steps.scratch import Scratch
from lockstep.engines.torch.steps.split_checks import has_torch_hooks
from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import (
    COMPILED_METRICS,
    compiled_metrics,
    get_keras_mask,
    layers_in,
    module_in_keras,
    seed_generators,
    set_keras_mask,
    stored_value,
    value_in_scope,
    values_replaced,
)

Call = Callable[..., Any]

_SENT = (torch.Tensor, keras.Variable, bool, int, float, str, type(None))
_KEPT = 100_000
"""Proofs are dropped once their keys have more attributes than this."""

_PLAIN = (bool, int, float, str, type(None), FunctionType)


class WholeBatchSteps:
    """Runs the steps of one model on the global batch, in one of its processes.

    Every process decides alike which calls are shared: it has the same code and the same shapes.

    Attributes:
        distrusted: Why layers are not shared although they were proven, by their number in
            `layers_in`: they gave other numbers in a first step.
        shared: The number of calls that were shared in the last step.
        whole: Why a layer ran on the whole batch in the last step, by its name.
    """

    def __init__(self, model: Any, distrusted: dict[int, str] | None = None) -> None:
        self.distrusted = distrusted or {}
        self.shared = 0
        self.whole: dict[str, str] = {}
        self._model = model
        self._known: dict[Any, str | None] = {}
        self._size = 0
        self._inside = False
        self._watched: set[Any] = set()
        self._calls: dict[Any, Call] = {}
        self._own_calls: dict[Any, Any] = {}
        self._variables: list[Any] = []
        self._used: dict[int, _Weight] = {}
        self._replicas: list[_SharedCall] = []

    def run(
        self,
        kind: str,
        data: Any,
        group: RankGroup,
        streams: RandomStreams,
        device: torch.device,
        *,
        draws_together: bool,
    ) -> Any:
        """Run one step, and return what it returns: the same on every replica.

        Args:
            kind: `"train"`, `"test"` or `"predict"`.
            data: The global batch, as the step takes it.
            group: The ranks.
            streams: The random numbers of this replica.
            device: The device of this replica.
            draws_together: Whether every layer draws the random numbers of the global batch.
        """
        self.shared, self.whole = 0, {}
        self._replica = partial(_SharedCall, group, streams=streams, device=device)
        self._draws_together = draws_together
        layers = layers_in(self._model)
        self._calls = {layer: layer.call for layer in layers}
        self._own_calls = {layer: vars(layer)["call"] for layer in layers if "call" in vars(layer)}
        self._variables = unique([v for layer in self._calls for v in layer.variables])
        changes: list[Any] = [(layer, "call", self._called(layer)) for layer in self._calls]
        if isinstance(compiled_metrics(self._model), LeftOutMetric):
            changes.append((self._model, "compute_metrics", self._without_metrics))
        step = getattr(self._model, f"{kind}_step")
        # keras/src/backend/torch/trainer.py: one_step_on_data
        gradients = nullcontext() if kind == "train" else torch.no_grad()
        try:
            with patched(changes), copied_states(self._model), gradients:
                logs = gathered(step(data))
                self._gather_kept()
                return logs
        finally:
            for replica in self._replicas:
                replica.is_over = True
            self._replicas, self._used = [], {}

    def _without_metrics(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the metrics of the model but for those that rank 0 alone has."""
        with patched([(self._model, COMPILED_METRICS, None)]):
            return type(self._model).compute_metrics(self._model, *args, **kwargs)

    @contextmanager
    def watched(self, record: Callable[[Any, Any, Any], None]) -> Iterator[None]:
        """Call `record` with the layers that a step calls, their arguments and whole outputs."""
        self._record, self._watched = record, set(watched(self._model))
        try:
            yield
        finally:
            self._watched = set()

    def _gather_kept(self) -> None:
        """Gather what the step has kept in attributes: one process alone may read them after it."""
        for layer in self._calls if self._replicas else ():
            for tensor in _tensors_in(vars(layer)):
                gathered(tensor)

    # ------------------------------------------------------------------ the calls of a step

    def _called(self, layer: Any) -> Call:
        """Return what is called in a step in place of the `call` of a layer."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return self._calls[layer](*args, **kwargs)
            outputs = self._outputs(layer, args, kwargs)
            if layer in self._watched and not is_transformed():
                self._record(layer, args, copied(outputs))
            return outputs

        return call

    def _outputs(self, layer: Any, args: Any, kwargs: Any) -> Any:
        call = self._calls[layer]
        if not layer.weights or (self._draws_together and _draws(layer)):
            return call(*args, **kwargs)
        reason = self._why_whole(layer, args, kwargs)
        if reason is None:
            self.shared += 1
            return self._share(layer, call, args, kwargs)
        before = self.shared
        outputs = call(*args, **kwargs)
        if self.shared == before:  # no layer inside it was shared
            for name in self.whole.keys() & {inner.name for inner in layers_in(layer)}:
                del self.whole[name]
            self.whole[layer.name] = reason
        return outputs

    # ------------------------------------------------------------------ which calls are shared

    def _why_whole(self, layer: Any, args: Any, kwargs: Any) -> str | None:
        """Return why a call is not shared, `None` if it is."""
        for number, each in enumerate(self._calls):
            if number in self.distrusted and layer in layers_in(each):
                return self.distrusted[number]
        if is_transformed():
            return "it is called inside torch.func"
        in_scope = map(value_in_scope, self._variables)
        if any(value is not None and value.requires_grad for value in in_scope):
            return "stateless_call passes it different weights that need a gradient"
        leaves = keras.tree.flatten((args, kwargs))
        rows = {len(leaf) for leaf in _with_rows(leaves)}
        if not all(isinstance(leaf, _SENT) for leaf in leaves):  # it may hold a tensor
            return "one of its arguments is not a tensor"
        if len(rows) != 1 or 0 in rows:
            return f"its inputs have {sorted(rows)} rows"
        places = {id(leaf): place for place, leaf in enumerate(leaves)}
        form = str(
            keras.tree.map_structure(
                lambda leaf: (
                    (_form(leaf), places[id(leaf)])  # a layer may ask `a is b`
                    if isinstance(leaf, torch.Tensor)
                    else _form(leaf)
                ),
                (args, kwargs),
            )
        )
        attributes = tuple(_attributes(layer, self._own_calls))
        # It would be of this replica's rows alone, if the call were shared.
        if _NEEDS_GRADIENT in attributes or _IN_GRAPH in attributes:
            return "it holds a tensor that needs a gradient but is not a variable"
        key = layer, layer.training, form, attributes
        if key not in self._known:
            if self._size > _KEPT:  # an attribute may change at each step, and grow
                self._known, self._size = {}, 0
            self._size += len(attributes)
            with self._plain_calls():
                self._known[key] = _refused(layer, args, kwargs)
        return self._known[key]

    @contextmanager
    def _plain_calls(self) -> Iterator[None]:
        """Let layers have their own `call` again inside the context."""
        calls = {layer: vars(layer).pop("call") for layer in self._calls}
        for layer, call in self._own_calls.items():
            vars(layer)["call"] = call
        try:
            yield
        finally:
            for layer, call in calls.items():
                vars(layer)["call"] = call

    # ------------------------------------------------------------------ a call that is shared

    def _share(self, layer: Any, call: Call, args: Any, kwargs: Any) -> Any:
        rows = next(len(leaf) for leaf in _with_rows((args, kwargs)))
        replica = self._replica(rows)
        self._replicas.append(replica)
        # All layers and weights of the model, as a layer may use those of another one.
        plan = ReplicaPlan.of_all(unique([*layers_in(layer), *self._calls]))
        trained, weights = self._weights(layer, replica.group)
        self._inside = True
        try:
            with (
                outside_transforms(),
                plan.in_force(replica),
                values_replaced(trained, weights),
                replica.streams.separate(replica.rank, self.shared),
            ):
                args, kwargs = keras.tree.map_structure(replica.own_part, (args, kwargs))
                entered = _graph_nodes((weights, args, kwargs))
                own = call(*args, **kwargs)
        finally:
            self._inside = False
        reason = _wrong_gradient(own, entered)
        if reason is not None:
            raise UnsupportedModel(
                f"Layer {layer.name!r} of {self._model.name!r} {reason}, so its gradient would "
                "cover only some rows.\nMake the tensor an argument of the call, make its layer "
                "an attribute of the model, or call lockstep.release(model)."
            )
        return replica.outputs(own, layer)

    def _weights(self, layer: Any, group: RankGroup) -> tuple[list[Any], list[Any]]:
        """Return the trained variables of the model, and what a shared call uses as their values.

        The gradients of a layer's own weights are summed at a time, for all its calls until the
        weights change. A layer may use those of other layers too.
        """
        own = set(map(id, layer.variables))
        values = [(variable, stored_value(variable)) for variable in self._variables]
        trained = [pair for pair in values if pair[1] is not None and pair[1].requires_grad]
        for is_own in (True, False):
            new = [
                (variable, value)
                for variable, value in trained
                if (id(variable) in own) == is_own and not self._is_used(variable, value, is_own)
            ]
            with torch.inference_mode(False), torch.enable_grad():
                shared = used(group, *(value for _, value in new))
            for (variable, value), each in zip(new, shared, strict=True):
                self._used[id(variable)] = _Weight(value, version_of(value), each, is_own)
        variables = [variable for variable, _ in trained]
        return variables, [self._used[id(variable)].used for variable in variables]

    def _is_used(self, variable: Any, value: Any, is_own: bool) -> bool:
        known = self._used.get(id(variable))
        return (
            known is not None
            and known.value is value
            and known.version == version_of(value)
            and known.is_own >= is_own
        )


class _Weight(NamedTuple):
    """The value of a trained variable, and what shared calls use for it until it changes.

    Attributes:
        is_own: Whether its gradients are summed with those of a layer that has been called.
    """

    value: Any
    version: Any
    used: Any
    is_own: bool


class _SharedCall(Replica):
    """The rows of one replica in one shared call."""

    scale = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._inputs: list[tuple[Any, Any, int]] = []

    def own_part(self, leaf: Any) -> Any:
        """Return what this replica gets of an argument."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not leaf.ndim:
            return used(self.group, leaf)[0]
        for whole, own, _ in self._inputs:
            if whole is leaf:
                return own
        own = enter(leaf, self)
        self._inputs.append((leaf, own, own._version))
        return own

    def outputs(self, outputs: Any, layer: Any) -> Any:
        """Return the outputs of a layer for all rows; an input that it returns is that input."""
        name = f"{{}} of layer {layer.name!r} ({type(layer).__name__})"
        with outside_transforms():
            written = [  # by the layer: `x += 1` in `call`
                (whole, leave(own, self, name.format("An input")).whole())
                for whole, own, version in self._inputs
                if own._version != version
            ]
        made = {id(own): whole for whole, own, _ in self._inputs}

        def output(own: Any) -> Any:
            if not isinstance(own, torch.Tensor):
                if isinstance(own, _SENT):
                    return own
                raise UnsupportedModel(
                    f"Layer {layer.name!r} returns an object of {type(own).__name__}, which may "
                    "hold only the rows of one device.\nReturn tensors, or lists, tuples or "
                    "dicts of them, or remove lockstep.rowwise."
                )
            if id(own) not in made:
                name_of = name.format("An output")
                made[id(own)] = (
                    leave(own, self, name_of) if own.ndim else same_on_all(own, self.group)
                )
            return made[id(own)]

        with outside_transforms():
            result = keras.tree.map_structure(output, outputs)
        for whole, every in written:
            whole.copy_(every)
        self._inputs = []  # a step has many calls: activations live no longer than on one device
        return result


# ---------------------------------------------------------------- helpers


def _graph_nodes(nest: Any) -> list[Any]:
    leaves = [leaf for leaf in keras.tree.flatten(nest) if isinstance(leaf, torch.Tensor)]
    return [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None]


def _wrong_gradient(outputs: Any, entered: list[Any]) -> str | None:
    """Return why a gradient would miss the rows of other replicas, `None` if it does not.

    Args:
        outputs: The outputs of a shared call.
        entered: The nodes by which arguments and weights have entered the call.
    """
    nodes, seen = _graph_nodes(outputs), set(entered)
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        name = type(node).__name__
        if name == "AccumulateGrad" and isinstance(node.variable, torch.nn.Parameter):
            return "computes with a tensor that is neither an argument nor a weight of the model"
        if name == "CheckpointFunctionBackward":
            return "uses torch.utils.checkpoint with use_reentrant=True"
        nodes += [following for following, _ in node.next_functions if following is not None]
    return None


def _with_rows(nest: Any) -> list[Any]:
    leaves = keras.tree.flatten(nest)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim]


def _draws(layer: Any) -> bool:
    return any(seed_generators(inner) for inner in layers_in(layer))


def _form(leaf: Any) -> Any:
    if isinstance(leaf, keras.Variable):
        return leaf.path
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    mask = get_keras_mask(leaf)
    return leaf.ndim, tuple(leaf.shape[1:]), leaf.dtype, None if mask is None else mask.ndim


_NEEDS_GRADIENT, _IN_GRAPH = object(), object()


def _attributes(layer: Any, own_calls: dict[Any, Any]) -> Iterator[Any]:
    """Return what decides the operations of a layer, and whether it holds a tensor in a graph.

    Args:
        layer: The layer.
        own_calls: The attribute `call` of layers that had one before the step.
    """
    for inner in layers_in(layer):
        own = not module_in_keras(type(inner))
        for name, value in vars(inner).items():
            if name == "call":
                value = own_calls.get(inner)  # that of the step is another one at each step
            if own or not name.startswith("_"):
                yield name
                yield from _parts(value)


def keeps_graph(model: Any) -> bool:
    """Return whether an attribute of a model holds a tensor that operations have made for a loss.

    Another process would have its values without its graph.
    """
    return any(part is _IN_GRAPH for value in vars(model).values() for part in _parts(value))


def _tensors_in(value: Any, inside: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Return the tensors that a value holds in an order that is the same in all processes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(part, inside)
    elif is_plain_object(value) and not any(value is each for each in inside):
        yield from _tensors_in(vars(value), (*inside, value))


def _parts(value: Any, inside: tuple[Any, ...] = ()) -> Iterator[Any]:
    if isinstance(value, _PLAIN):
        yield type(value), value  # 1 is no True
    elif isinstance(value, dict):
        for name, part in value.items():
            yield str(name)
            yield from _parts(part, inside)
    elif isinstance(value, list | tuple | set):
        yield len(value)
        for part in value:
            yield from _parts(part, inside)
    elif isinstance(value, torch.Tensor):
        without = _NEEDS_GRADIENT if value.requires_grad else tuple(value.shape)
        yield without if value.grad_fn is None else _IN_GRAPH
    else:
        yield type(value)
        if is_plain_object(value) and not any(value is each for each in inside):
            yield from _parts(vars(value), (*inside, value))


def _refused(layer: Any, args: Any, kwargs: Any) -> str | None:
    """Return why a call is not known to work row by row, `None` if it does."""
    if any(map(_has_torch_weights, layer.modules())):
        return "it contains a PyTorch module with weights"
    if any(isinstance(inner, keras.layers.SpectralNormalization) for inner in layers_in(layer)):
        return "it assigns to its weights"
    if any(map(is_in_float8, layers_in(layer))):
        return "it is in float8, whose scale depends on the whole batch"
    if any(map(has_torch_hooks, layers_in(layer))):
        return "it has a hook or parametrization of PyTorch"
    try:
        copy = copy_of(layer)
        states = ObjectStates(layers_in(copy))
        if states.fixed:
            return held_in_words(states)
        before = dump(copy)
        rows = len(_with_rows((args, kwargs))[0])
        symbols: dict[int, Any] = {}
        args, kwargs = keras.tree.map_structure(
            lambda leaf: symbols.setdefault(id(leaf), _symbol(leaf)), (args, kwargs)
        )
        held = layers_in(copy)
        reason = call_refused(copy, args, kwargs, rows=rows, held=held, scratch=Scratch)
        if reason is None and not dump(copy).is_of_same_model(before):
            reason = "a call changes its attributes"
        states.put_back()
    except (Exception, LeftOutUsed) as error:  # any error means that it is not known
        reason = str(error).strip().splitlines()[0][:160] or type(error).__name__
    return reason


def _has_torch_weights(module: Any) -> bool:
    known = keras.layers.Layer, torch.nn.ParameterList, torch.nn.ParameterDict
    return (
        not isinstance(module, known) and next(module.parameters(recurse=False), None) is not None
    )


def _symbol(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape = (None, *leaf.shape[1:]) if leaf.ndim else ()
    symbol = keras.KerasTensor(shape, keras.backend.standardize_dtype(leaf.dtype))
    mask = get_keras_mask(leaf)
    if mask is not None:
        set_keras_mask(symbol, _symbol(mask))
    return symbol


def numbers_in(logs: Any, model: Any) -> dict[str, float]:
    """Return the numbers among the logs of a step, by name, and the sum of the weights.

    The logs do not show weights that differ, as all replicas have the same outputs of each layer.
    """
    found: dict[str, float] = {}
    for name, value in logs.items() if isinstance(logs, dict) else ():
        number = value.detach() if isinstance(value, torch.Tensor) else value
        with suppress(TypeError, ValueError, RuntimeError):
            found[str(name)] = float(number)
    sums = [tensor.sum(dtype=torch.float64) for tensor in _float_weights(model)]
    found[SUM_OF_WEIGHTS] = float(sum(sums))
    return found


def size_of_weights(model: Any) -> float:
    """Return the root of the sum of the squares of the weights."""
    norms = [tensor.norm().double() ** 2 for tensor in _float_weights(model)]
    return math.sqrt(float(sum(norms)))


SUM_OF_WEIGHTS = "the sum of the weights"


def _float_weights(model: Any) -> list[Any]:
    values = [stored_value(weight) for weight in model.weights]
    return [value.detach() for value in values if value.is_floating_point()]
