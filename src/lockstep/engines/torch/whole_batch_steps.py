"""Steps with code that may do anything with the batch, on several replicas.

Every replica runs the code of the step on the global batch. Each call of a layer with weights that
works row by row is shared: a replica runs the layer on its rows, and the outputs are all-gathered.
So the code sees what it sees on one device, and the layers, which are nearly all of the work, are
split.

A tensor is replicated outside of a shared call, and each replica has its own rows inside. The
operations at this border are each other's derivatives: taking rows and joining them, using a weight
and summing its gradients. So gradients of gradients are right too.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import FunctionType
from typing import Any

import keras
import torch

from lockstep.engines.left_out import LeftOutMetric, LeftOutUsed
from lockstep.engines.patched import patched
from lockstep.engines.replicas.first_step import watched
from lockstep.engines.replicas.object_states import ObjectStates, held_in_words
from lockstep.engines.rowwise import call_refused, is_in_float8
from lockstep.engines.torch.code_state import is_plain_object
from lockstep.engines.torch.group import Group, buckets_of
from lockstep.engines.torch.layers import Plan, copied_states
from lockstep.engines.torch.model_copy import copy_of
from lockstep.engines.torch.model_pickle import dump
from lockstep.engines.torch.replica import RandomStreams, Replica
from lockstep.engines.torch.scratch import Scratch
from lockstep.engines.torch.split_checks import has_torch_hooks
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
    values_replaced,
)
from lockstep.state import unique

Call = Callable[..., Any]

_SENT = (torch.Tensor, keras.Variable, bool, int, float, str, type(None))
_KEPT = 256
"""The number of proofs that are kept."""

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
        self._functions: set[FunctionType] = set()
        self._inside = False
        self._watched: set[int] = set()
        self._calls: list[tuple[Any, Any]] = []
        self._own_calls: dict[int, Any] = {}
        self._variables: list[Any] = []

    def run(
        self,
        kind: str,
        data: Any,
        group: Group,
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
        layers = layers_in(self._model)

        def sharing(layer: Any) -> Call:
            call = layer.call

            def called(*args: Any, **kwargs: Any) -> Any:
                if self._inside or not layer.weights or (draws_together and _draws(layer)):
                    return call(*args, **kwargs)
                reason = self._why_whole(layer, args, kwargs)
                if reason is not None:
                    return self._run_whole(layer, call, args, kwargs, reason)
                self.shared += 1
                rows = next(len(leaf) for leaf in _with_rows((args, kwargs)))
                return self._share(
                    _CallReplica(group, rows, streams, device), layer, call, args, kwargs
                )

            def shared_call(*args: Any, **kwargs: Any) -> Any:
                outputs = called(*args, **kwargs)
                if id(layer) in self._watched and not self._inside:
                    self._record(layer, args, outputs)
                return outputs

            return shared_call

        self._calls = [(layer, vars(layer).get("call")) for layer in layers]
        self._own_calls = {id(layer): call for layer, call in self._calls}
        self._variables = unique([v for layer in layers for v in layer.variables])
        step = getattr(self._model, f"{kind}_step")
        changes = [(layer, "call", sharing(layer)) for layer in layers]
        if isinstance(compiled_metrics(self._model), LeftOutMetric):
            changes.append((self._model, "compute_metrics", self._without_metrics))
        sharing_calls = patched(changes)
        # keras/src/backend/torch/trainer.py: one_step_on_data
        gradients = nullcontext() if kind == "train" else torch.no_grad()
        with sharing_calls, copied_states(self._model), gradients:
            return step(data)

    def _without_metrics(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the metrics of the model but for those that rank 0 alone has."""
        with patched([(self._model, COMPILED_METRICS, None)]):
            return type(self._model).compute_metrics(self._model, *args, **kwargs)

    @contextmanager
    def watched(self, record: Callable[[Any, Any, Any], None]) -> Iterator[None]:
        """Call `record` with the layers that a step calls, their arguments and whole outputs."""
        self._record, self._watched = record, set(map(id, watched(self._model)))
        try:
            yield
        finally:
            self._watched = set()

    def _run_whole(self, layer: Any, call: Call, args: Any, kwargs: Any, reason: str) -> Any:
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
        for number, (each, _) in enumerate(self._calls):
            if number in self.distrusted and layer in layers_in(each):
                return self.distrusted[number]
        leaves = keras.tree.flatten((args, kwargs))
        rows = {len(leaf) for leaf in _with_rows(leaves)}
        if not all(isinstance(leaf, _SENT) for leaf in leaves):  # it may hold a tensor
            return "it is given an object that is no tensor"
        if len(rows) != 1 or 0 in rows:
            return f"its inputs have {sorted(rows)} rows"
        form = str(keras.tree.map_structure(_form, (args, kwargs)))
        attributes = tuple(_attributes(layer, self._own_calls))
        # It would be of this replica's rows alone, if the call were shared.
        if _NEEDS_GRADIENT in attributes or _IN_GRAPH in attributes:
            return "it holds a tensor that needs a gradient and is no variable"
        # An attribute may be a list that grows: the key is a number. A function that is kept has
        # no other's identity.
        key = (layer, layer.training, form, hash(repr(attributes)))
        if key not in self._known:
            if len(self._known) >= _KEPT:  # an attribute may change at each step
                self._known.clear()
                self._functions.clear()
            self._functions |= {part for part in attributes if isinstance(part, FunctionType)}
            with self._plain_calls():
                self._known[key] = _refused(layer, args, kwargs)
        return self._known[key]

    @contextmanager
    def _plain_calls(self) -> Iterator[None]:
        """Let layers have their own `call` again inside the context."""
        methods = [(layer, vars(layer)["call"], before) for layer, before in self._calls]
        for layer, _, before in methods:
            del vars(layer)["call"]
            if before is not None:
                vars(layer)["call"] = before
        try:
            yield
        finally:
            for layer, method, _ in methods:
                vars(layer)["call"] = method

    # ------------------------------------------------------------------ a call that is shared

    def _share(
        self, replica: "_CallReplica", layer: Any, call: Call, args: Any, kwargs: Any
    ) -> Any:
        # All layers and weights of the model, as a layer may use those of another one.
        plan = Plan.of_all(unique([*layers_in(layer), *(each for each, _ in self._calls)]))
        tensors = [(variable, stored_value(variable)) for variable in self._variables]
        trained = [pair for pair in tensors if pair[1] is not None and pair[1].requires_grad]
        used = _Used.apply(replica.group, *(tensor for _, tensor in trained))
        self._inside = True
        try:
            with (
                plan.in_force(replica),
                values_replaced([variable for variable, _ in trained], used),
                replica.streams.separate(replica.rank, self.shared),
            ):
                args, kwargs = keras.tree.map_structure(replica.own_part, (args, kwargs))
                entered = _graph_nodes((used, args, kwargs))
                own = call(*args, **kwargs)
        finally:
            self._inside = False
        reason = _wrong_gradient(own, entered)
        if reason is not None:
            raise UnsupportedModel(
                f"Layer {layer.name!r} of {self._model.name!r} {reason}: its gradient would cover "
                "some rows only.\nMake the tensor an argument of the call, make its layer an "
                "attribute of the model, or call lockstep.release(model)."
            )
        return replica.all_joined(own, layer)


class _CallReplica(Replica):
    """The rows of one replica in one shared call."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._inputs: list[tuple[Any, Any, int]] = []

    def own_part(self, leaf: Any) -> Any:
        """Return what this replica gets of an argument."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not leaf.ndim:
            return _Used.apply(self.group, leaf)[0]
        own = _Rows.apply(leaf, self.group, self.counts)
        if not len(own):  # it runs one row for its form; see `Replica`
            own = torch.cat([own, leaf[:1].detach()])
        mask = get_keras_mask(leaf)
        if mask is not None:
            set_keras_mask(own, self.take(mask))
        self._inputs.append((leaf, own, own._version))
        return own

    def all_joined(self, outputs: Any, layer: Any) -> Any:
        """Return the outputs of a layer for all rows; an input that it returns is that input."""
        name = f"{{}} of layer {layer.name!r} ({type(layer).__name__})"
        for whole, own, version in self._inputs:
            if own._version != version:  # the layer has written into it: `x += 1` in `call`
                whole.copy_(self.joined(own, name.format("An input")))
        inputs = {id(own): whole for whole, own, _ in self._inputs}

        def whole_output(leaf: Any) -> Any:
            is_input = id(leaf) in inputs
            return inputs[id(leaf)] if is_input else self.joined(leaf, name.format("An output"))

        return keras.tree.map_structure(whole_output, outputs)

    def joined(self, own: Any, name: str) -> Any:
        """Return the output of all replicas, given that of this one."""
        if not isinstance(own, torch.Tensor):
            return own
        return self.gather(own, name) if own.ndim else _SameOnAll.apply(own, self.group)

    def gather(self, own: Any, name: str, *, for_loss: bool = False) -> Any:
        """Return the rows of all replicas, and their mask: a replicated tensor."""
        whole = _Joined.apply(self.true_rows(own, name), self.group, self.counts)
        mask = get_keras_mask(own)
        if mask is not None:
            set_keras_mask(whole, self.group.gather(self.true_rows(mask, name), self.counts))
        return whole


# ---------------------------------------------------------------- the border of a shared call


class _Rows(torch.autograd.Function):  # type: ignore[misc]
    """The rows of this replica of a replicated tensor."""

    @staticmethod
    def forward(ctx: Any, whole: Any, group: Group, counts: tuple[int, ...]) -> Any:
        ctx.group, ctx.counts = group, counts
        start = sum(counts[: group.rank])
        return whole[start : start + counts[group.rank]].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return _Joined.apply(gradient, ctx.group, ctx.counts), None, None


class _Joined(torch.autograd.Function):  # type: ignore[misc]
    """The replicated tensor of the rows of all replicas."""

    @staticmethod
    def forward(ctx: Any, own: Any, group: Group, counts: tuple[int, ...]) -> Any:
        ctx.group, ctx.counts = group, counts
        whole = group.gather(own, counts)
        if not (whole.is_floating_point() or whole.is_complex()):
            ctx.mark_non_differentiable(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return _Rows.apply(gradient, ctx.group, ctx.counts), None, None


class _Used(torch.autograd.Function):  # type: ignore[misc]
    """Replicated tensors, as every replica uses them: their gradients are summed at a time."""

    @staticmethod
    def forward(ctx: Any, group: Group, *values: Any) -> Any:
        ctx.group = group
        ctx.set_materialize_grads(False)  # a layer may use some of the weights
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        reached = [gradient for gradient in gradients if gradient is not None]
        sums = iter(_Summed.apply(ctx.group, *reached) if reached else ())
        return None, *(None if gradient is None else next(sums) for gradient in gradients)


class _Summed(torch.autograd.Function):  # type: ignore[misc]
    """The replicated sums of tensors of each replica."""

    @staticmethod
    def forward(ctx: Any, group: Group, *own: Any) -> Any:
        ctx.group = group
        ctx.set_materialize_grads(False)
        running = [group.start_sum([each.clone() for each in bucket]) for bucket in buckets_of(own)]
        return tuple(total for finish in running for total in finish())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        reached = [gradient for gradient in gradients if gradient is not None]
        used = iter(_Used.apply(ctx.group, *reached) if reached else ())
        return None, *(None if gradient is None else next(used) for gradient in gradients)


class _SameOnAll(torch.autograd.Function):  # type: ignore[misc]
    """A scalar that does not depend on rows: every replica has computed the same."""

    @staticmethod
    def forward(ctx: Any, own: Any, group: Group) -> Any:
        ctx.group = group
        return own.view_as(own)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient / ctx.group.size, None


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
            return "computes with a tensor that is no argument and no weight of the model"
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


def _attributes(layer: Any, own_calls: dict[int, Any]) -> Iterator[Any]:
    """Return what decides the operations of a layer, and whether it holds a tensor in a graph.

    Args:
        layer: The layer.
        own_calls: The attribute `call` of layers, by identity, before the step replaced it.
    """
    for inner in layers_in(layer):
        own = not module_in_keras(type(inner))
        for name, value in vars(inner).items():
            if name == "call" and id(inner) in own_calls:
                value = own_calls[id(inner)]  # that of the step is another one at each step
            if own or not name.startswith("_"):
                yield name
                yield from _parts(value)


def keeps_graph(model: Any) -> bool:
    """Return whether an attribute of a model holds a tensor that operations have made for a loss.

    Another process would have its values without its graph.
    """
    return any(part is _IN_GRAPH for value in vars(model).values() for part in _parts(value))


def _parts(value: Any, inside: tuple[Any, ...] = ()) -> Iterator[Any]:
    if isinstance(value, _PLAIN):
        yield value
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
        return "a module of PyTorch has weights in it"
    if any(isinstance(inner, keras.layers.SpectralNormalization) for inner in layers_in(layer)):
        return "it assigns to its weights"
    if any(map(is_in_float8, layers_in(layer))):
        return "it is in float8, which scales by the whole batch"
    if any(map(has_torch_hooks, layers_in(layer))):
        return "it has a hook or parametrization of PyTorch"
    try:
        copy = copy_of(layer)
        states = ObjectStates(layers_in(copy))
        if states.fixed:
            return held_in_words(states)
        before = dump(copy)
        rows = len(_with_rows((args, kwargs))[0])
        args, kwargs = keras.tree.map_structure(_symbol, (args, kwargs))
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
