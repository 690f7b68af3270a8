"""Follows rows through a traced layer, operation by operation."""

from collections.abc import Callable, Iterable
from typing import Any

from lockstep.engines.tensorflow.proof.rules import RULES
from lockstep.engines.tensorflow.proof.states import (
    Same,
    State,
    Unknown,
    calls_of,
    function_of,
    has_own_gradient,
)

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_CHOICES = ("If", "StatelessIf", "Case", "StatelessCase")
_LOOPS = ("While", "StatelessWhile")


class Walk:
    """What is known of every tensor of a graph, and what went wrong on the way.

    Attributes:
        failure: The first operation that changes something outside, of which it is not
            proven that every replica changes the same.
    """

    def __init__(self, outside: Callable[[Any], State], told: dict[int, State]) -> None:
        """Begin where nothing is known.

        Args:
            outside: What is known of a tensor that no operation of the walk has made.
            told: What is known of tensors whatever made them, by their identity.
        """
        self.failure: str | None = None
        self._outside = outside
        self._told = told
        self._states: dict[int, State] = {}
        self._kept: list[Any] = []  # an identity stays taken as long as its tensor is here

    def of(self, tensor: Any) -> State:
        """What is known of a tensor."""
        if id(tensor) not in self._states:
            self.set(tensor, self._outside(tensor))
        return self._states[id(tensor)]

    def set(self, tensor: Any, state: State) -> None:
        """Know this of a tensor."""
        self._states[id(tensor)] = self._told.get(id(tensor), state)
        self._kept.append(tensor)

    def through(self, operations: Iterable[Any]) -> None:
        """Follow the rows through these operations, in the order in which they were made."""
        for op in operations:
            if op.type == "Placeholder":
                continue
            states = [self.of(tensor) for tensor in op.inputs]
            for output, state in zip(op.outputs, self._outputs(op, states), strict=True):
                self.set(output, state)

    def _outputs(self, op: Any, states: list[State]) -> list[State]:
        if has_own_gradient(op):
            return self._unknown(op, "a gradient of its own", fails=True)
        if calls_of(op):
            return self._called(op, states)
        if op.type == "IdentityN":
            return states
        if op.type == "Assert":  # it fails, or changes nothing
            if not isinstance(states[0], Same):
                self.failure = self.failure or "an assertion about the batch"
            return []
        unknown = next((state for state in states if isinstance(state, Unknown)), None)
        if unknown is not None:
            return self._unknown(op, unknown.why)
        same = all(isinstance(state, Same) for state in states)
        if same and (op.type in RULES or not op.op_def.is_stateful):
            return [Same()] * len(op.outputs)
        state = RULES[op.type](op, states) if op.type in RULES else None
        return self._unknown(op, op.type) if state is None else [state] * len(op.outputs)

    def _called(self, op: Any, states: list[State]) -> list[State]:
        """Through the functions that an operation calls."""
        if op.type in _CALLS:
            return self._inside(function_of(op, "f"), states)
        if op.type in _CHOICES and isinstance(states[0], Same):
            branches = [self._inside(graph, states[1:]) for graph in calls_of(op)]
            return [_either(op, *outputs) for outputs in zip(*branches, strict=True)]
        if op.type in _LOOPS:
            for _ in range(2 * len(states) + 1):
                after = self._inside(function_of(op, "body"), states)
                found = [_either(op, *pair) for pair in zip(states, after, strict=True)]
                if found == states:
                    break
                states = found
            (again,) = self._inside(function_of(op, "cond"), states)
            if isinstance(again, Same):
                return states
        return self._unknown(op, op.type)

    def _inside(self, graph: Any, states: list[State]) -> list[State]:
        inner = Walk(self._outside, self._told)
        for tensor, state in zip(graph.inputs, states, strict=True):
            inner.set(tensor, state)
        inner.through(graph.get_operations())
        self.failure = self.failure or inner.failure
        return [inner.of(tensor) for tensor in graph.outputs]

    def _unknown(self, op: Any, why: str, *, fails: bool = False) -> list[State]:
        if fails or op.op_def.is_stateful:
            self.failure = self.failure or why
        return [Unknown(why)] * len(op.outputs)


def _either(op: Any, *states: State) -> State:
    """What holds of a tensor that is one of these."""
    first, *others = states
    unknown = next((state for state in states if isinstance(state, Unknown)), None)
    if unknown is not None:
        return unknown
    return first if all(state == first for state in others) else Unknown(op.type)
