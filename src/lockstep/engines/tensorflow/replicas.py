"""Replicas that run one step side by side, and what they tell each other.

The rule that makes gradients exact: on every replica, the gradient of a value made
from its own rows is the true one; the gradients of a value that all replicas hold
alike are shares, which add up to the true one. So the loss, which all hold alike, is
divided by the number of replicas before it is differentiated, and the gradients of
the weights are summed.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib

from lockstep.engines.tensorflow.alike import Part, Program, tensors_in
from lockstep.engines.tensorflow.variables import Copies


class Shards:
    """Which rows of one global batch each replica has; the last ones may have none.

    Attributes:
        rows: The rows of the global batch.
        starts: Where the rows of each replica begin.
        counts: How many rows each replica has.
        sizes: How many rows each replica runs: one that has none runs a row of
            another, because some kernels fail on no rows, and its results are dropped.
    """

    def __init__(self, rows: Any, replicas: int) -> None:
        size = -(-rows // replicas)
        bounds = [tf.minimum(rows, replica * size) for replica in range(replicas + 1)]
        self.rows = rows
        self.counts = [bounds[i + 1] - bounds[i] for i in range(replicas)]
        self.sizes = [tf.minimum(tf.maximum(count, 1), rows) for count in self.counts]
        self.starts = [
            tf.minimum(start, rows - ran)
            for start, ran in zip(bounds[:-1], self.sizes, strict=True)
        ]

    def size_of(self, rows: int | None, replica: int) -> int | None:
        """How many rows a replica runs of so many, where that is known while tracing."""
        if rows is None:
            return None
        size = -(-rows // len(self.counts))
        left = max(0, rows - replica * size)
        return min(max(min(size, left), 1), rows)

    def of(self, value: Any, replica: int) -> Any:
        """The rows that a replica runs, of a tensor of the global batch."""
        start = self.starts[replica]
        return value[start : start + self.sizes[replica]]


class Replica:
    """One replica while it runs a step.

    Attributes:
        index: Its number.
        shards: Who has which rows.
        part: What it does while it sees the global batch; `None` where it sees its rows.
    """

    def __init__(self, index: int, shards: Shards, team: "Team", context: Any) -> None:
        self.index = index
        self.shards = shards
        self.part: Part | None = None
        self._team = team
        self._context = context
        self._round = 0
        self._checked = 0

    @property
    def alone(self) -> bool:
        """Whether there is no other replica."""
        return self._team.size == 1

    @contextmanager
    def globally(self, what: str, given: Any, *, last: bool = False) -> Iterator[Part]:
        """While it lasts, what runs sees the global batch, as on every other replica.

        Args:
            what: A name for it.
            given: The tensors it works on, in any structure.
            last: Whether no gradient flows back through it.

        Raises:
            NotAlike: If it may not be the same on every replica.
        """
        before = self.part
        part = self.part = Part(tensors_in(given))
        try:
            yield part
        finally:
            self.part = before
        self._team.program.check(self._checked, what, part.end(), part.given, last=last)
        self._checked += 1

    @contextmanager
    def apart(self) -> Iterator[Part]:
        """While it lasts, inside of a global part, it sees its own rows; the part around."""
        part, self.part = self.part, None
        assert part is not None
        part.pause()
        try:
            yield part
        finally:
            self.part = part
            part.resume()

    @contextmanager
    def alike(self, what: str) -> Iterator[None]:
        """While it lasts, it does with its rows what every other replica does with theirs.

        Raises:
            NotAlike: If it does something else; `what` names it.
        """
        part = Part([])
        yield
        self._team.program.compare(self._checked, what, part.end())
        self._checked += 1

    def own(self, whole: Any) -> Any:
        """The rows this replica runs, of a tensor of the global batch."""
        return self.shards.of(whole, self.index)

    def own_of_alike(self, whole: Any) -> Any:
        """The rows this replica runs, of what all replicas made alike; a single number as it is.

        The first replica is given the gradient of all of it, and the others zeros: so what was
        looked up in a table has one gradient for each time, as on one device, and not a part
        from every replica. Optimizers square and clip them one by one.
        """
        is_one = whole.shape.rank == 0
        if not _has_gradient(whole):
            return whole if is_one else self.own(whole)

        def own(whole: Any) -> Any:
            def back(gradient: Any) -> Any:
                if is_one:
                    found = tf.add_n(self.exchange(gradient))
                else:
                    true = tf.convert_to_tensor(gradient)[: self.shards.counts[self.index]]
                    found = tf.concat(self.exchange(true), axis=0)
                return found if self.index == 0 else tf.zeros_like(found)

            return tf.identity(whole) if is_one else self.own(whole), back

        return tf.custom_gradient(own)(whole)

    def gather(self, value: Any, told: str) -> Any:
        """The rows of all replicas, for what each replica uses in a way of its own.

        The gradient is what all replicas found for the rows of this one.
        """
        true = self.true_rows(value, told)
        if not _has_gradient(value):
            return tf.concat(self.exchange(true), axis=0)

        def gathered(true: Any) -> Any:
            def back(gradient: Any) -> Any:
                gradient = tf.convert_to_tensor(gradient)  # where rows were looked up
                rows = [
                    gradient[start : start + count]
                    for start, count in zip(self.shards.starts, self.shards.counts, strict=True)
                ]
                return tf.add_n([parts[self.index] for parts in self.exchange(rows)])

            return tf.concat(self.exchange(true), axis=0), back

        return tf.custom_gradient(gathered)(true)

    def gather_alike(self, value: Any, told: str) -> Any:
        """The rows of all replicas, for what all replicas do alike.

        Every replica finds the same gradient, its share, so nothing is asked of the
        others for it: the gradient of this replica's rows is that times their number.
        """
        true = self.true_rows(value, told)
        parts = list(self.exchange(true))
        if _has_gradient(value):
            parts[self.index] = self._times(true, self._team.size)
        return tf.concat(parts, axis=0)

    def sum(self, value: Any) -> Any:
        """The sum over replicas, and of the gradients as well."""

        def summed(value: Any) -> Any:
            return tf.add_n(self.exchange(value)), lambda g: tf.add_n(self.exchange(g))

        return tf.custom_gradient(summed)(value)

    def sum_gradients(self, gradients: list[Any]) -> list[Any]:
        """The gradients of the weights, summed over replicas by `tf.distribute`."""
        present = [gradient for gradient in gradients if gradient is not None]
        if self.alone or not present:
            return gradients

        def reduce(strategy: Any, *values: Any) -> Any:
            pairs = [(value, value) for value in values]
            return strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs)

        reduced = iter(self._meet(reduce, present))
        return [None if gradient is None else next(reduced) for gradient in gradients]

    def exchange(self, value: Any) -> tuple[Any, ...]:
        """What every replica gives here, in their order."""
        board = self._team.board(self._round)
        board[self.index] = value
        self._round += 1
        self._meet(lambda strategy: None, [])
        return tuple(board)

    def true_rows(self, value: Any, told: str) -> Any:
        """The rows this replica has, of what it ran; `told` names that in an error."""
        size = self.shards.sizes[self.index]
        with tf.control_dependencies(
            [
                tf.debugging.assert_equal(
                    tf.shape(value)[0],
                    size,
                    f"lockstep: {told} was expected to have the rows of the batch as its first "
                    "dim, and has another number. lockstep.release(model) trains it on one device.",
                )
            ]
        ):
            return value[: self.shards.counts[self.index]]

    @staticmethod
    def _times(value: Any, factor: int) -> Any:
        def same(value: Any) -> Any:
            return tf.identity(value), lambda gradient: gradient * factor

        return tf.custom_gradient(same)(value)

    def _meet(self, merge: Callable[..., Any], values: list[Any]) -> Any:
        """Wait for all replicas; `merge` then runs once for all of them."""
        self._team.leave(self.index)
        with _mode(self._context):
            merged = self._context.merge_call(merge, args=tuple(values))
        self._team.enter(self.index)
        return merged


class Team:
    """The replicas of one step, in lockstep.

    Attributes:
        size: How many they are.
        program: What they all do alike.

    `tf.distribute` runs them in threads, of which one runs at a time; they change
    where the replicas meet. What Keras keeps in Python changes with them: the copy
    that a variable is, and the losses that layers added.
    """

    def __init__(self, strategy: Any, copies: Copies, layers: list[Any]) -> None:
        self.size = int(strategy.num_replicas_in_sync)
        self._strategy = strategy
        self._copies = copies
        self._layers = layers
        self._losses: list[list[tuple[Any, Any]]] = [[([], set()) for _ in layers]] * self.size
        self._boards: list[list[Any]] = []
        self._here = threading.local()
        self.program = Program(copies)

    def run(self, step: Callable[[Replica], Any], shards: Shards) -> list[Any]:
        """What `step` gives on each replica."""
        results: list[Any] = [None] * self.size
        carried = _thread_state()

        def on_replica() -> None:
            context = tf.distribute.get_replica_context()
            # tensorflow/python/distribute/distribute_lib.py: its number while tracing,
            # where the public one is a tensor.
            index = int(context._replica_id)
            replica = self._here.replica = Replica(index, shards, self, context)
            _tracker().__dict__.update(carried)
            self.enter(index)
            with _mode(None):
                results[index] = step(replica)
            self.leave(index)

        before = [(list(layer._losses), set(layer._loss_ids)) for layer in self._layers]
        try:
            self._strategy.run(tf.autograph.experimental.do_not_convert(on_replica))
        finally:
            self._copies.take_off()
            self._set_losses(before)
        return results

    def current(self) -> Replica | None:
        """The replica that runs in this thread and is not in a global part."""
        replica: Replica | None = getattr(self._here, "replica", None)
        return None if replica is None or replica.part is not None else replica

    def current_in_global_part(self) -> Replica | None:
        """The replica that runs in this thread and in a global part, not in a function there."""
        replica: Replica | None = getattr(self._here, "replica", None)
        part = None if replica is None else replica.part
        return replica if part is not None and part.is_at_top() else None

    def board(self, number: int) -> list[Any]:
        """Where the replicas put what they give in one exchange."""
        while len(self._boards) <= number:
            self._boards.append([None] * self.size)
        return self._boards[number]

    def enter(self, replica: int) -> None:
        """This replica runs from here on."""
        self._copies.put_on(replica)
        self._set_losses(self._losses[replica])

    def leave(self, replica: int) -> None:
        """Another replica may run from here on."""
        # keras/src/layers/layer.py, Layer.add_loss and Layer._clear_losses
        self._losses[replica] = [
            (list(layer._losses), set(layer._loss_ids)) for layer in self._layers
        ]

    def _set_losses(self, losses: list[tuple[Any, Any]]) -> None:
        for layer, (values, ids) in zip(self._layers, losses, strict=True):
            layer._losses[:] = values
            layer._loss_ids.clear()
            layer._loss_ids.update(ids)


@contextmanager
def _mode(context: Any) -> Iterator[None]:
    """Let TensorFlow, in this thread, be in a replica's context; `None` for no strategy's.

    Without a strategy Keras scales no loss, and its optimizers update the variables
    they see: keras/src/losses/loss.py, scale_loss_for_distribution, and
    keras/src/backend/tensorflow/optimizer.py.
    """
    # tensorflow/python/distribute/distribute_lib.py
    if context is None:
        mode = distribute_lib._get_default_replica_mode()
    else:
        mode = distribute_lib._InReplicaThreadMode(context)
    distribute_lib._push_per_thread_mode(mode)
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()


def _has_gradient(value: Any) -> bool:
    return bool(value.dtype.is_floating or value.dtype.is_complex)


def _tracker() -> Any:
    # keras/src/backend/common/global_state.py keeps these for each thread.
    return keras.src.backend.common.global_state.GLOBAL_STATE_TRACKER


def _thread_state() -> dict[str, Any]:
    names = ("dtype_policy", "global_seed_generator")
    return {name: vars(_tracker())[name] for name in names if name in vars(_tracker())}
