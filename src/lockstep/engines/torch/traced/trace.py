"""Traces one step to a graph: Keras's own or the user's, with its gradients and its update."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import keras
import torch
from torch.distributed.tensor.experimental import implicit_replication
from torch.fx import GraphModule

from lockstep.core.held_signals import HeldSignals
from lockstep.core.patched import patched
from lockstep.core.state import optimizers_of, unique, variables_of
from lockstep.engines.replicas.first_step import unchanged_objects
from lockstep.engines.torch.exchange.group import PeerLost
from lockstep.engines.torch.first_step.first_step import stock_step
from lockstep.engines.torch.steps.replica import random_state, set_random_state
from lockstep.engines.torch.steps.split_checks import is_flat
from lockstep.engines.torch.torch_compat import TorchDispatchMode, copy_each
from lockstep.engines.torch.traced.draws import seeded
from lockstep.engines.torch.traced.gradients import TracedTensors, Untraceable
from lockstep.engines.torch.traced.graph import cleaned, draws, exchanges, traced
from lockstep.engines.torch.traced.guards import Guard, refusal
from lockstep.engines.torch.traced.inductor import Compilation, reason_of
from lockstep.engines.torch.traced.split import Mesh, SplitOperations, own_rows
from lockstep.keras_compat import (
    GLOBAL_SEED_GENERATOR,
    global_state,
    own_trainable_variables,
    stored_value,
    traced_by_torch,
)


class TracedStep:
    """The graph of a step on the rows of this rank.

    Args:
        model: The model.
        kind: `"train"`, `"test"` or `"predict"`.
        batch: The global batch, in the structure that the step takes: tensors, or `None`.
        mesh: The ranks; `None` for one.

    Attributes:
        variables: The variables of the model.
        updates: The variables that each update of an optimizer is given, in their order.
        exchanges: What the ranks exchange in a run.
        draws: Whether a run draws from PyTorch's own random numbers.

    Raises:
        Untraceable: If it cannot be a graph.
    """

    def __init__(self, model: Any, kind: str, batch: Any, mesh: Mesh | None) -> None:
        self._model, self._kind, self._mesh = model, kind, mesh
        self.variables = variables_in(model)
        self.updates: list[list[Any]] = []
        self._reached: list[list[bool]] = []
        self._batch = batch
        self._outputs: tuple[Any, list[Any]] = None, []
        self._gradients = 0
        self._left: list[int] = []
        inputs = [*map(_value, self.variables), *self.own(batch)]
        named = mesh.named() if mesh is not None else nullcontext()
        with unchanged_objects(model), implicit_replication(), named, _without_warnings():
            module = traced(self._step, inputs)
            if mesh is not None:
                module = cleaned(module, mesh.rank, mesh.size)
        self._batch = None
        self.exchanges, self.draws = exchanges(module.graph), draws(module.graph)
        self._module, self._changed = self._without_unchanged(module)
        self._program: Callable[..., Any] = self._module
        self._compilation: Compilation | None = None
        self._guard: Guard | None = None

    def own(self, batch: Any) -> list[Any]:
        """Return what this rank takes of the tensors of a batch."""
        mesh = self._mesh
        return [
            leaf if mesh is None or not leaf.ndim else own_rows(leaf, mesh.rank, mesh.size)
            for leaf in _tensors(batch)
        ]

    def compiled(self, batch: Any) -> str:
        """Begin to compile the graph if that has not begun, and return how it stands.

        Args:
            batch: A global batch of the form of the traced one.
        """
        if self._compilation is None:
            ranks = 1 if self._mesh is None else self._mesh.size
            inputs = self._inputs(batch)
            try:
                reason = refusal(self._module)
                if reason is not None:
                    return reason
                self._compilation = Compilation(self._module, inputs, ranks)
                self._guard = Guard(self._module, inputs, len(self.variables))
            except Exception as error:  # such as a full disk, or no memory for a process
                return reason_of(error)
        return self._compilation.state()

    def compared(self, batch: Any) -> str:
        """Return how what has been compiled differs from the graph for NaN and infinity, "" if not.

        A compiler may take `x * 0` for 0, and no comparison of ordinary batches sees that. An
        operation that refuses such values does so in all ranks, each of which has a row of them.
        """
        assert self._compilation is not None, "it is compiled"
        assert self._compilation.program is not None, "it is loaded"
        assert self._guard is not None, "it is compiled"
        alike, before = True, random_state()
        rows = [len(leaf) for leaf in _tensors(batch) if leaf.ndim]
        if self._mesh is not None and min(rows, default=0) < self._mesh.size:
            return ""
        for value in (math.nan, math.inf):
            inputs = self._guard.with_value(self._inputs(batch), value)
            runs: list[Any] = []
            for program in (self._module, self._compilation.program):
                set_random_state(before)
                try:
                    with torch.no_grad():
                        runs.append(program(*inputs))
                except PeerLost:
                    raise
                except Exception:
                    runs.append(None)
                finally:
                    set_random_state(before)
            one, other = runs
            if one is None or other is None:
                alike &= one is other  # both refuse these values
            else:
                alike &= all(map(_are_alike, one, other))
        return "" if alike else "what is compiled makes other values of NaN or infinity"

    def _inputs(self, batch: Any) -> list[Any]:
        return [*map(_value, self.variables), *self.own(batch)]

    def use_compiled(self, use: bool) -> None:
        """Let steps run what has been compiled, or leave it out from now on."""
        self._program = self._module
        if self._compilation is None:  # it could not begin
            return
        if use:
            assert self._compilation.program is not None, "it is loaded"
            self._program = self._compilation.program
        self._compilation.end()

    def run(self, batch: Any) -> "Computed":
        """Compute a step; no tensor of the model changes.

        Args:
            batch: The global batch, of the form of the traced one.
        """
        inputs = self._inputs(batch)
        program, guard = self._program, self._guard
        with torch.no_grad():
            if program is not self._module and guard is not None and not guard.admits(inputs):
                program = self._module
            found = program(*inputs)
        gradients, found = found[: self._gradients], found[self._gradients :]
        values, outputs = found[: len(self._changed)], found[len(self._changed) :]
        changed = [self.variables[number] for number in self._changed]
        parts, lists = iter(gradients), []
        for variables, reached in zip(self.updates, self._reached, strict=True):
            lists.append(
                [next(parts) if has else None for _, has in zip(variables, reached, strict=True)]
            )
        count = len(outputs) - len(self._left)
        left = {
            id(self.variables[n]): each for n, each in zip(self._left, outputs[count:], strict=True)
        }
        result = self._result(iter(outputs[:count]))
        return Computed(self.updates, lists, self.variables, changed, list(values), result, left)

    def _result(self, outputs: Iterator[Any]) -> Any:
        structure, leaves = self._outputs
        filled = [next(outputs) if leaf is _TENSOR else leaf for leaf in leaves]
        if structure == 0:
            return filled[0]
        if type(structure) is not dict:
            return keras.tree.pack_sequence_as(structure, filled)
        # Flattening sorts the keys of a dict, and bars show logs in their order.
        if all(part == 0 for part in structure.values()):
            packed = dict(zip(sorted(structure), filled, strict=True))
        else:
            packed = keras.tree.pack_sequence_as(structure, filled)
        return {name: packed[name] for name in structure}

    def _step(self, *inputs: Any) -> tuple[Any, ...]:
        """Run the step on tensors that stand for those of the model and the batch."""
        mesh, count = self._mesh, len(self.variables)
        whole = _same if mesh is None else mesh.whole
        copied = [each.clone() for each in inputs]  # Keras writes into some of them
        values, rows = copied[:count], iter(copied[count:])
        mapping, stand_ins = [], {}
        trained: dict[int, Any] = {}
        for variable, value in zip(self.variables, values, strict=True):
            stand_in = value if mesh is None else mesh.everywhere(value)
            if _value(variable).requires_grad:
                stand_in = stand_in.detach().requires_grad_()
                trained[id(variable)] = stand_in
            mapping.append((variable, stand_in))
            stand_ins[id(_value(variable))] = stand_in
        leaves = [self._split(leaf, rows) for leaf in keras.tree.flatten(self._batch)]
        batch = keras.tree.pack_sequence_as(self._batch, leaves)
        given: list[Any] = []
        self.updates, self._reached = [], []
        with ExitStack() as contexts:
            scope = contexts.enter_context(_Scope(mapping, trained))
            contexts.enter_context(traced_by_torch(seeded, partial(_both, scope)))
            contexts.enter_context(self._noted_updates(given, whole))
            summed = list if mesh is None else mesh.summed
            contexts.enter_context(TracedTensors(stand_ins, trained, summed, whole))
            if mesh is not None:
                contexts.enter_context(SplitOperations(mesh))
            result = stock_step(self._model, self._kind, batch)
            if any(isinstance(leaf, int | float) for leaf in keras.tree.flatten(result)):
                raise Untraceable("it returns a Python number as a log: return a tensor")
            known = {id(variable) for variable in self.variables}
            if any(each not in known for each in scope.state_mapping):
                raise Untraceable("it assigns a variable that does not belong to the model")
            new = [whole(scope.get_current_value(each).detach()) for each in self.variables]
            outputs = [
                whole(leaf.detach())
                for leaf in keras.tree.flatten(result)
                if isinstance(leaf, torch.Tensor)
            ]
            left = [trained[id(v)].grad if id(v) in trained else None for v in self.variables]
            self._left = [number for number, each in enumerate(left) if each is not None]
            outputs += [whole(each.detach()) for each in left if each is not None]
        self._outputs = (
            keras.tree.map_structure(lambda leaf: 0, result),
            [
                _TENSOR if isinstance(leaf, torch.Tensor) else leaf
                for leaf in keras.tree.flatten(result)
            ],
        )
        self._gradients = len(given)
        return (*given, *new, *outputs)

    def _split(self, leaf: Any, rows: Iterator[Any]) -> Any:
        if leaf is None:
            return None
        own = next(rows)
        return own if self._mesh is None or not leaf.ndim else self._mesh.rows(own, len(leaf))

    @contextmanager
    def _noted_updates(self, given: list[Any], whole: Callable[[Any], Any]) -> Iterator[None]:
        """Note the gradients that optimizers are given inside the context."""

        def noting(optimizer: Any) -> Callable[..., Any]:
            plain = optimizer.apply

            # keras/src/optimizers/base_optimizer.py, BaseOptimizer.apply
            def apply(grads: Any, trainable_variables: Any = None) -> Any:
                variables = trainable_variables or own_trainable_variables(optimizer)
                self.updates.append(list(variables))
                self._reached.append([each is not None for each in grads])
                given.extend(whole(each.detach()) for each in grads if each is not None)
                return plain(grads, trainable_variables)

            return apply

        changes = [(each, "apply", noting(each)) for _, each in optimizers_of(self._model)]
        with patched(changes):
            yield

    def _without_unchanged(self, module: GraphModule) -> tuple[GraphModule, list[int]]:
        """Let a graph not return the values of variables that it does not change."""
        graph = module.graph
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        (output,) = (node for node in graph.nodes if node.op == "output")
        found = list(output.args[0])
        first, count = self._gradients, len(self.variables)
        values = found[first : first + count]
        changed = [n for n, value in enumerate(values) if value is not placeholders[n]]
        kept = [*found[:first], *(values[n] for n in changed), *found[first + count :]]
        output.args = (tuple(kept),)
        graph.eliminate_dead_code()
        for node in graph.nodes:
            if node.op == "call_function" and _writes(node.target):
                raise Untraceable("it writes into a tensor that is not a Keras variable")
        module.recompile()
        return module, changed


class Computed(NamedTuple):
    """What a run of a graph has computed.

    Attributes:
        updates: The variables that each update of an optimizer was given.
        gradients: Their gradients; `None` where there is none.
        all_variables: The variables of the model.
        variables: The variables that change.
        values: Their new values.
        result: The logs or predictions.
        left: The gradients that the step leaves in trained variables, by the `id` of these.
        random_state: The state of PyTorch's random numbers after it, of a run that was tried.
    """

    updates: list[list[Any]]
    gradients: list[list[Any]]
    all_variables: list[Any]
    variables: list[Any]
    values: list[Any]
    result: Any
    left: dict[int, Any]
    random_state: Any = None

    def write(self) -> None:
        """Give the variables their new values and gradients; signals wait for the end of it."""
        by_type: dict[Any, tuple[list[Any], list[Any]]] = {}
        for variable, value in zip(self.variables, self.values, strict=True):
            olds, news = by_type.setdefault(value.dtype, ([], []))
            olds.append(_value(variable))
            news.append(value)
        with HeldSignals(), torch.no_grad():
            for olds, news in by_type.values():
                copy_each(olds, news)
            if self.updates:
                for variable in self.all_variables:
                    if _value(variable).requires_grad:
                        _value(variable).grad = self.left.get(id(variable))


class _Scope(keras.StatelessScope):  # type: ignore[misc]
    """Lets variables have other values inside the context, assigned as on PyTorch.

    No gradient flows through an assignment, and a trained variable goes on to take gradients.

    Args:
        mapping: Variables and their values.
        trained: The values that take gradients, by the `id` of the variable.
    """

    def __init__(self, mapping: list[tuple[Any, Any]], trained: dict[int, Any]) -> None:
        super().__init__(state_mapping=mapping, collect_losses=True)
        self._trained = trained

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Take the new value of a variable."""
        variable, value = update
        self.take(id(variable), value)

    def take(self, number: int, value: Any) -> None:
        """Take the new value of the variable with this `id`."""
        value = value.detach()
        if number in self._trained:
            self._trained[number] = value = value.clone().requires_grad_()
        self.state_mapping[number] = value


class _Leaf:
    """Stands for a tensor in the structure of a result."""


_TENSOR = _Leaf()


class _WithoutDraws(TorchDispatchMode):  # type: ignore[misc]
    """Refuses draws of PyTorch's own: a graph runs both branches, and one device one of them."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in operation.tags:
            raise Untraceable("it draws random numbers in a branch of keras.ops.cond")
        return operation(*arguments, **(options or {}))


def _both(scope: _Scope, pred: Any, true_fn: Any, false_fn: Any) -> Any:
    """Run both branches of `keras.ops.cond`, and take results and variables of the right one."""
    before = dict(scope.state_mapping)

    def branch(run: Callable[[], Any]) -> tuple[Any, dict[int, Any]]:
        """Return the result of a branch, and the variables that it changes."""
        copied = {key: value.clone() for key, value in before.items()}
        scope.state_mapping.clear()
        scope.state_mapping.update(copied)
        with _WithoutDraws():
            result, after = run(), dict(scope.state_mapping)
        if any(getattr(leaf, "requires_grad", False) for leaf in keras.tree.flatten(result)):
            raise Untraceable(
                "gradients flow through keras.ops.cond, and a graph runs both branches"
            )
        # Optimizers, which take no gradients, write in place: PyTorch does not tell that here.
        changed = {
            key: value
            for key, value in after.items()
            if value is not copied.get(key) or not torch.is_grad_enabled()
        }
        return result, changed

    pred = pred.to(torch.bool)
    (one, ones), (other, others) = branch(true_fn), branch(false_fn)
    scope.state_mapping.clear()
    scope.state_mapping.update(before)
    for key in ones.keys() | others.keys():
        was = before.get(key)
        scope.take(key, torch.where(pred, ones.get(key, was), others.get(key, was)))
    return keras.tree.map_structure(
        lambda a, b: torch.where(pred, a, b) if isinstance(a, torch.Tensor) else a, one, other
    )


def variables_in(model: Any) -> list[Any]:
    """Return the variables that a graph has: those of a model, its optimizers and Keras's seed."""
    slots = [variable for _, each in optimizers_of(model) for variable in each.variables]
    seeds = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return unique([*variables_of(model), *slots, *([] if seeds is None else [seeds.state])])


def _tensors(batch: Any) -> list[Any]:
    leaves = batch if is_flat(batch) else keras.tree.flatten(batch)
    return [leaf for leaf in leaves if leaf is not None]


def _value(variable: Any) -> Any:
    return stored_value(variable)


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the same entries of two tensors are NaN, and the same ones infinite."""
    return all(torch.equal(of(one), of(other)) for of in (torch.isnan, torch.isinf))


def _same(value: Any) -> Any:
    return value


def _writes(operation: Any) -> bool:
    schema = getattr(operation, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Leave out warnings of the trace: those of a step were shown when it ran."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
