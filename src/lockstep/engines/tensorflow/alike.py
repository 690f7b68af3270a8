"""What all replicas do alike has to be the same on all of them: losses, metrics, whole layers."""

from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from lockstep.engines.tensorflow.beside import beside
from lockstep.engines.tensorflow.proof.program import program_of
from lockstep.engines.tensorflow.proof.states import calls_of, has_own_gradient
from lockstep.engines.tensorflow.variables import Copies, shared_seeds

_REPEATABLE = """
    AssignAddVariableOp AssignSubVariableOp AssignVariableOp Assert Case If LookupTableFindV2
    LookupTableSizeV2 Print PrintV2 ReadVariableOp ResourceGather ResourceGatherNd
    ResourceScatterAdd ResourceScatterDiv ResourceScatterMax ResourceScatterMin
    ResourceScatterMul ResourceScatterNdAdd ResourceScatterNdMax ResourceScatterNdMin
    ResourceScatterNdSub ResourceScatterNdUpdate ResourceScatterSub ResourceScatterUpdate
    ResourceStridedSliceAssign StatefulPartitionedCall VarIsInitializedOp VariableShape While
"""
REPEATABLE = frozenset(_REPEATABLE.split())
"""Operations with a state, the copy of a variable mostly, that do the same on every replica."""


class NotAlike(Exception):
    """Replicas could do something else each; in words."""


class Part:
    """What a replica does while it sees the global batch.

    Attributes:
        given: The tensors it works on.
        done: Its operations, once it has ended.
    """

    def __init__(self, given: Iterable[Any]) -> None:
        self.given = list(given)
        self.done: list[Any] = []
        self._graph = tf.compat.v1.get_default_graph()
        self.resume()

    def pause(self) -> None:
        """What is done from here on is none of it."""
        self.done += self._graph.get_operations()[self._first :]

    def resume(self) -> None:
        """What is done from here on belongs to it."""
        self._first = len(self._graph.get_operations())

    def end(self) -> list[Any]:
        """All its operations."""
        self.pause()
        return self.done

    def is_at_top(self) -> bool:
        """Whether no function, branch or loop inside of it is being traced."""
        return tf.compat.v1.get_default_graph() is self._graph


class Program:
    """What the first replica did in one part of a step, for the others to be held against."""

    def __init__(self, copies: Copies) -> None:
        """`copies` are the variables, of which every replica has its own."""
        self._copies = copies
        self._done: list[list[Any]] = []

    def check(
        self,
        number: int,
        what: str,
        operations: list[Any],
        given: Iterable[Any],
        *,
        last: bool = False,
    ) -> None:
        """Raise where these operations may not be alike on every replica.

        Args:
            number: Which part of the step it is.
            what: Its name in an error.
            operations: What this replica does.
            given: The tensors it works on, which all replicas have alike.
            last: Whether no gradient flows back through it.

        Raises:
            NotAlike: With the reason.
        """
        for op in _every(operations):
            if has_own_gradient(op) and not last:
                raise NotAlike(f"{what} has a gradient of its own")
            if "PyFunc" in op.type:
                raise NotAlike(f"{what} calls Python while it runs ({op.type})")
            if op.op_def.is_stateful and op.type not in REPEATABLE:
                raise NotAlike(f"{what} draws random numbers or has a state ({op.type})")
        self._check_inputs(what, operations, given)
        self.compare(number, what, operations)

    def compare(self, number: int, what: str, operations: list[Any]) -> None:
        """Raise where these operations are others than those of the first replica.

        Args:
            number: Which part of the step it is.
            what: Its name in an error.
            operations: What this replica does.

        Raises:
            NotAlike: With the reason.
        """
        captures = tf.compat.v1.get_default_graph().captures
        places = self._copies.places()
        variables = {id(inner): places.get(id(outer)) for outer, inner in captures}
        done = program_of(operations, {n: place for n, place in variables.items() if place})
        if number == len(self._done):
            self._done.append(done)
        elif self._done[number] != done:
            raise NotAlike(f"{what} is another program each time Python makes it")

    def _check_inputs(self, what: str, operations: list[Any], given: Iterable[Any]) -> None:
        known = {id(tensor) for tensor in given}
        known |= {id(output) for op in operations for output in op.outputs}
        graph = tf.compat.v1.get_default_graph()
        handles = {id(seeds.value.handle) for seeds in shared_seeds()}
        drawn = {id(inner) for outer, inner in graph.captures if id(outer) in handles}
        for tensor in (tensor for op in operations for tensor in op.inputs):
            if id(tensor) in drawn:
                raise NotAlike(f"{what} draws random numbers without a seed of its own")
            if id(tensor) not in known and tensor.op.type not in ("Const", "Placeholder"):
                raise NotAlike(f"{what} uses what a layer keeps ({tensor.op.name})")


def looks_up_weights(operations: Iterable[Any]) -> bool:
    """Whether one of these takes rows out of a variable, as an embedding does.

    Its gradient then has an entry for each row that was taken, and is no sum.
    """
    gathers = ("GatherNd", "GatherV2", "ResourceGather", "ResourceGatherNd")
    return any(op.type in gathers and _is_read(op.inputs[0]) for op in _every(operations))


def _is_read(tensor: Any) -> bool:
    while tensor.op.type in ("Cast", "Identity"):
        tensor = tensor.op.inputs[0]
    return tensor.dtype == tf.resource or bool(tensor.op.type == "ReadVariableOp")


def tensors_in(tree: Any) -> list[Any]:
    """The tensors of a structure, and what Keras keeps beside them."""
    leaves = [leaf for leaf in keras.tree.flatten(tree) if tf.is_tensor(leaf)]
    parts = tf.nest.flatten(leaves, expand_composites=True)  # of a sparse gradient
    return [*parts, *(tensor for leaf in leaves for tensor in beside(leaf))]


def _every(operations: Iterable[Any]) -> Iterator[Any]:
    for op in operations:
        yield op
        for graph in calls_of(op):
            yield from _every(graph.get_operations())
