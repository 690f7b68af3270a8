"""Checks that all replicas run the same operations in losses, metrics and unsplit layers."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from lockstep.engines.tensorflow.exchange.mirrored_variables import MirroredVariables, shared_seeds
from lockstep.engines.tensorflow.exchange.tensor_metadata import mask_and_logits
from lockstep.engines.tensorflow.exchange.traced_operations import (
    every_operation,
    has_own_gradient,
    is_repeatable,
    program_of,
)
from lockstep.errors import UnsupportedModel


class ReplicasDiffer(Exception):
    """Replicas may run different operations; the message is the reason."""


@contextmanager
def assertions_in_words() -> Iterator[None]:
    """Raise what an assertion of lockstep in a running step says, without TensorFlow's words.

    Raises:
        UnsupportedModel: With the message of the assertion.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        # The message is in a list, with its quotes and line breaks escaped.
        found = re.search(r"\[lockstep: (.*?)\] \[", error.message)
        if found is None:
            raise
        said = found[1].replace("\\'", "'").replace("\\n", "\n")
        raise UnsupportedModel(said[0].upper() + said[1:]) from None


class GlobalSection:
    """The operations that a replica adds to the graph while it works on the global batch.

    Attributes:
        given: The input tensors.
        done: The operations; complete after `end`.
        shares: Whether every replica computes an equal share of the gradient here. Otherwise
            the first one computes all of it.
    """

    def __init__(self, given: Iterable[Any], *, shares: bool = False) -> None:
        self.given = list(given)
        self.shares = shares
        self.done: list[Any] = []
        self._graph = tf.compat.v1.get_default_graph()
        self.resume()

    def pause(self) -> None:
        """Stop collecting operations."""
        self.done += self._graph.get_operations()[self._first :]

    def resume(self) -> None:
        """Collect operations from here on."""
        self._first = len(self._graph.get_operations())

    def end(self) -> list[Any]:
        """Stop collecting, and return all operations."""
        self.pause()
        return self.done

    def is_at_top(self) -> bool:
        """Return whether no function, branch or loop inside the section is being traced."""
        return tf.compat.v1.get_default_graph() is self._graph


class Program:
    """The operations of the first replica in each section of a step, to compare others with."""

    def __init__(self, copies: MirroredVariables) -> None:
        """`copies` are the variables that every replica has its own copies of."""
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
        """Raise if these operations may differ between replicas.

        Args:
            number: The number of the section in the step.
            what: The name of the section, for errors.
            operations: The operations of this replica.
            given: The input tensors, which are replicated.
            last: Whether no gradient flows back through the section.

        Raises:
            ReplicasDiffer: With the reason.
        """
        for op in every_operation(operations):
            if has_own_gradient(op) and not last:
                raise ReplicasDiffer(f"{what} has a custom gradient")
            if "PyFunc" in op.type:
                raise ReplicasDiffer(f"{what} calls Python while it runs ({op.type})")
            if not is_repeatable(op):
                raise ReplicasDiffer(f"{what} draws random numbers or is stateful ({op.type})")
        self._check_inputs(what, operations, given)
        self.compare(number, what, operations)

    def compare(self, number: int, what: str, operations: list[Any]) -> None:
        """Raise if these operations differ from those of the first replica.

        Args:
            number: The number of the section in the step.
            what: The name of the section, for errors.
            operations: The operations of this replica.

        Raises:
            ReplicasDiffer: With the reason.
        """
        captures = tf.compat.v1.get_default_graph().captures
        places = self._copies.places()
        done = program_of(
            operations,
            {
                id(inner): places.get(id(outer), id(outer))
                for outer, inner in captures
                if outer.dtype == tf.resource
            },
        )
        if number == len(self._done):
            self._done.append(done)
        elif self._done[number] != done:
            raise ReplicasDiffer(f"{what} gives a different program each time it is traced")

    def _check_inputs(self, what: str, operations: list[Any], given: Iterable[Any]) -> None:
        known = {id(tensor) for tensor in given}
        known |= {id(output) for op in operations for output in op.outputs}
        graph = tf.compat.v1.get_default_graph()
        handles = {id(seeds.value.handle) for seeds in shared_seeds()}
        drawn = {id(inner) for outer, inner in graph.captures if id(outer) in handles}
        for tensor in (tensor for op in operations for tensor in op.inputs):
            if id(tensor) in drawn:
                raise ReplicasDiffer(f"{what} draws random numbers without its own seed")
            if id(tensor) not in known and tensor.op.type not in ("Const", "Placeholder"):
                raise ReplicasDiffer(f"{what} uses a tensor that a layer stores ({tensor.op.name})")


def looks_up_weights(operations: Iterable[Any]) -> bool:
    """Return whether one of these operations gathers rows of a variable, like an embedding.

    The gradient of such a lookup has one entry per gathered row and is not summed.
    """
    gathers = ("GatherNd", "GatherV2", "ResourceGather", "ResourceGatherNd")
    return any(op.type in gathers and _is_read(op.inputs[0]) for op in every_operation(operations))


def _is_read(tensor: Any) -> bool:
    while tensor.op.type in ("Cast", "Identity"):
        tensor = tensor.op.inputs[0]
    return tensor.dtype == tf.resource or bool(tensor.op.type == "ReadVariableOp")


def tensors_in(tree: Any) -> list[Any]:
    """Return the tensors of a structure, with their Keras masks and logits."""
    leaves = [leaf for leaf in keras.tree.flatten(tree) if tf.is_tensor(leaf)]
    parts = tf.nest.flatten(leaves, expand_composites=True)  # a sparse gradient has parts
    return [*parts, *(tensor for leaf in leaves for tensor in mask_and_logits(leaf))]
