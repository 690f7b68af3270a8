"""The replicas of one step, and the communication between them.

Two rules make gradients exact. The gradient of a value computed from a replica's own
rows is complete on that replica. The gradients of a replicated value sum up to the
complete gradient over all replicas. So the replicated loss is divided by the number
of replicas before differentiation, and the gradients of the weights are summed.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from lockstep.engines.tensorflow.exchange.lookup_gradients import (
    is_by_rows,
    joined,
    lookups_in,
    own_rows,
)
from lockstep.engines.tensorflow.exchange.mirrored_variables import MirroredVariables
from lockstep.engines.tensorflow.exchange.replica_consistency import (
    GlobalSection,
    Program,
    tensors_in,
)
from lockstep.engines.tensorflow.tensorflow_compat import distribute_lib
from lockstep.keras_compat import global_state, losses_with_ids, put_losses_with_ids


class RowShards:
    """The rows of one global batch that each replica has; the last shards may be empty.

    Some kernels fail on empty tensors. So a replica with an empty shard runs one row of
    another replica, and its results are dropped.

    Attributes:
        rows: The number of rows in the global batch.
        starts: The first row that each replica runs.
        counts: The number of rows in the shard of each replica.
        sizes: The number of rows that each replica runs.
    """

    def __init__(self, rows: Any, replicas: int) -> None:
        self.rows = rows
        with own_rows():
            size = -(-rows // replicas)
            bounds = [tf.minimum(rows, replica * size) for replica in range(replicas + 1)]
            self.counts = [bounds[i + 1] - bounds[i] for i in range(replicas)]
            self.sizes = [tf.minimum(tf.maximum(count, 1), rows) for count in self.counts]
            self.starts = [
                tf.minimum(start, rows - ran)
                for start, ran in zip(bounds[:-1], self.sizes, strict=True)
            ]

    def size_of(self, rows: int | None, replica: int) -> int | None:
        """Return how many of `rows` a replica runs, or `None` if `rows` is `None`."""
        if rows is None:
            return None
        size = -(-rows // len(self.counts))
        left = max(0, rows - replica * size)
        return min(max(min(size, left), 1), rows)

    def of(self, value: Any, replica: int) -> Any:
        """Return the rows of a tensor of the global batch that a replica runs."""
        with own_rows():
            start = self.starts[replica]
            return value[start : start + self.sizes[replica]]


class TracedReplica:
    """One replica while it runs a step.

    Attributes:
        index: The number of the replica.
        shards: The shards of the step.
        part: The global section it is in; `None` while it works on its own rows.
    """

    def __init__(self, index: int, shards: RowShards, team: "ReplicaGroup", context: Any) -> None:
        self.index = index
        self.shards = shards
        self.part: GlobalSection | None = None
        self._team = team
        self._context = context
        self._round = 0
        self._checked = 0

    @contextmanager
    def globally(
        self, what: str, given: Any, *, last: bool = False, shares: bool = False
    ) -> Iterator[GlobalSection]:
        """Run code on the global batch, identically on every replica.

        Args:
            what: The name of the code, for errors.
            given: The input tensors, in any structure.
            last: Whether no gradient flows back through the code.
            shares: `GlobalSection.shares`.

        Raises:
            ReplicasDiffer: If the operations may differ between replicas.
        """
        before = self.part
        part = self.part = GlobalSection(tensors_in(given), shares=shares)
        try:
            yield part
        finally:
            self.part = before
        self._team.program.check(self._checked, what, part.end(), part.given, last=last)
        self._checked += 1

    @contextmanager
    def apart(self) -> Iterator[GlobalSection]:
        """Work on this replica's own rows inside a global section, and yield that section."""
        part, self.part = self.part, None
        assert part is not None
        part.pause()
        try:
            yield part
        finally:
            self.part = part
            part.resume()

    @contextmanager
    def same_operations(self, what: str) -> Iterator[None]:
        """Run code on this replica's own rows, with the same operations on every replica.

        Args:
            what: The name of the code, for errors.

        Raises:
            ReplicasDiffer: If the operations differ from those of the first replica.
        """
        part = GlobalSection([])
        yield
        self._team.program.compare(self._checked, what, part.end())
        self._checked += 1

    def rows_of(self, whole: Any) -> Any:
        """Return the rows of a tensor of the global batch that this replica runs."""
        return self.shards.of(whole, self.index)

    def rows_of_replicated(self, whole: Any) -> Any:
        """Return the rows of a replicated tensor that this replica runs; a scalar unchanged.

        The first replica receives the whole gradient, the others zeros. So a table lookup has
        one gradient for each entry, as on one device, and no part from every replica. This
        matters because optimizers square and clip these gradients one by one.
        """
        is_one = whole.shape.rank == 0
        if not _has_gradient(whole):
            return whole if is_one else self.rows_of(whole)

        def own(whole: Any) -> Any:
            def back(gradient: Any) -> Any:
                if is_one:
                    found = tf.add_n(self.exchange(gradient))
                else:
                    true = tf.convert_to_tensor(gradient)[: self.shards.counts[self.index]]
                    found = tf.concat(self.exchange(true), axis=0)
                return found if self.index == 0 else tf.zeros_like(found)

            return tf.identity(whole) if is_one else self.rows_of(whole), back

        return tf.custom_gradient(own)(whole)

    def gather(self, value: Any, what: str) -> Any:
        """All-gather the rows of all replicas for code that may differ between replicas.

        The gradient is the sum over replicas of the gradients of this replica's rows.
        """
        true = self.true_rows(value, what)
        if not _has_gradient(value):
            return tf.concat(self.exchange(true), axis=0)

        def gathered(true: Any) -> Any:
            def back(gradient: Any) -> Any:
                gradient = tf.convert_to_tensor(gradient)  # a lookup gives IndexedSlices
                rows = [
                    gradient[start : start + count]
                    for start, count in zip(self.shards.starts, self.shards.counts, strict=True)
                ]
                return tf.add_n([parts[self.index] for parts in self.exchange(rows)])

            return tf.concat(self.exchange(true), axis=0), back

        return tf.custom_gradient(gathered)(true)

    def gather_replicated(self, value: Any, what: str) -> Any:
        """All-gather the rows of all replicas for code that is identical on every replica.

        Every replica computes the same share of the gradient. So the gradient of this
        replica's rows is its share times the number of replicas, without communication.
        """
        true = self.true_rows(value, what)
        parts = list(self.exchange(true))
        if _has_gradient(value):
            parts[self.index] = _times(true, self._team.size)
        return tf.concat(parts, axis=0)

    def sum(self, value: Any) -> Any:
        """Return the sum over replicas; the gradient is summed over replicas as well."""

        def summed(value: Any) -> Any:
            return tf.add_n(self.exchange(value)), lambda g: tf.add_n(self.exchange(g))

        return tf.custom_gradient(summed)(value)

    def sum_gradients(self, gradients: list[Any]) -> list[Any]:
        """Return the gradients of the weights, summed over replicas by `tf.distribute`.

        Raises:
            ReplicasDiffer: If the entries of a sparse gradient cannot be told apart.
        """
        lookups = [[] if gradient is None else lookups_in(gradient) for gradient in gradients]
        present = [_to_sum(lookup) for each in lookups for lookup in each]
        if not present:
            return gradients

        reduced = iter(self._sums(present))
        summed = [[_summed(lookup, next(reduced)) for lookup in each] for each in lookups]
        return [joined(each) if each else None for each in summed]

    def _sums(self, values: list[Any]) -> list[Any]:
        """Return the sums of tensors over replicas.

        NCCL sums tensors of one type in one call, and not of every type. Its sum on one device
        waits for those on the others, and TensorFlow leaves out an operation whose result nothing
        needs, such as a sum that one replica alone uses. So each result here needs the sums on all
        devices.
        """
        found: list[Any] = [None] * len(values)
        by_type: dict[Any, list[int]] = {}
        for number, value in enumerate(values):
            by_type.setdefault((value.dtype, isinstance(value, tf.IndexedSlices)), []).append(
                number
            )
        for (dtype, is_sparse), numbers in by_type.items():
            given = [values[number] for number in numbers]
            if is_sparse or dtype in _OF_NCCL:
                sums = self._reduced(given)
            elif dtype == tf.bfloat16:
                wide = self._reduced([tf.cast(value, tf.float32) for value in given])
                sums = [tf.cast(total, dtype) for total in wide]
            else:
                sums = [tf.add_n(self.exchange(value)) for value in given]
            for number, total in zip(numbers, sums, strict=True):
                found[number] = total
        every = [total for totals in self.exchange(found) for total in totals]
        with tf.control_dependencies([each for each in every if isinstance(each, tf.Tensor)]):
            return [tf.identity(each) if isinstance(each, tf.Tensor) else each for each in found]

    def _reduced(self, values: list[Any]) -> Any:
        """Return the sums of tensors of one type over replicas, by `tf.distribute`."""

        def reduce(strategy: Any, *values: Any) -> Any:
            pairs = [(value, value) for value in values]
            return strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs)

        return self._meet(reduce, values)

    def exchange(self, value: Any) -> tuple[Any, ...]:
        """Return the `value` of every replica, in the order of replicas."""
        board = self._team.board(self._round)
        board[self.index] = value
        self._round += 1
        self._meet(lambda strategy: None, [])
        return tuple(board)

    def true_rows(self, value: Any, what: str) -> Any:
        """Return the rows of this replica's shard, without the extra row of an empty shard.

        Args:
            value: A tensor of the rows that this replica runs.
            what: The name of the tensor, for errors.
        """
        size = self.shards.sizes[self.index]
        with tf.control_dependencies(
            [
                tf.debugging.assert_equal(
                    tf.shape(value)[0],
                    size,
                    f"lockstep: {what} was expected to have the rows of the batch as its first "
                    "dim, but its first dim has a different size. To train on one device, call "
                    "lockstep.release(model).",
                )
            ]
        ):
            return value[: self.shards.counts[self.index]]

    def rows_with_shared_gradient(self, whole: Any) -> Any:
        """Return the rows of a replicated tensor that this replica runs.

        Every replica receives an equal share of the whole gradient, as code does that each
        replica runs on the global batch.
        """
        if not _has_gradient(whole):
            return self.rows_of(whole)
        count = self.shards.counts[self.index]

        def own(whole: Any) -> Any:
            def back(gradient: Any) -> Any:
                true = tf.convert_to_tensor(gradient)[:count]
                return tf.concat(self.exchange(true), axis=0) / self._team.size

            return self.rows_of(whole), back

        return tf.custom_gradient(own)(whole)

    def looked_up(self, values: Any) -> Any:
        """Return rows of a table, so that the first replica has the whole gradient of them.

        A gradient of a table has an entry for each row that was looked up, and optimizers
        square and clip these entries. The shares of all replicas would be other entries.
        """
        return _times(values, self._team.size if self.index == 0 else 0)

    def _meet(self, merge: Callable[..., Any], values: list[Any]) -> Any:
        """Wait for all replicas, and run `merge` once for all of them."""
        self._team.leave(self.index)
        with _mode(self._context):
            merged = self._context.merge_call(merge, args=tuple(values))
        self._team.enter(self.index)
        return merged


class ReplicaGroup:
    """The replicas of one step, in lockstep.

    `tf.distribute` runs each replica in a thread, one at a time, and switches threads
    where replicas exchange values. Each switch also swaps the Python state of Keras:
    the copies that variables hold, and the losses that layers added.

    Attributes:
        size: The number of replicas.
        program: The operations that all replicas share.
    """

    def __init__(self, strategy: Any, copies: MirroredVariables, layers: list[Any]) -> None:
        self.size = int(strategy.num_replicas_in_sync)
        self._strategy = strategy
        self._copies = copies
        self._layers = layers
        self._losses: list[list[tuple[Any, Any]]] = [[([], set()) for _ in layers]] * self.size
        self._boards: list[list[Any]] = []
        self._here = threading.local()
        self.program = Program(copies)

    def run(self, step: Callable[[TracedReplica], Any], shards: RowShards) -> list[Any]:
        """Return the result of `step` on each replica."""
        results: list[Any] = [None] * self.size
        carried = _thread_state()

        def on_replica() -> None:
            context = tf.distribute.get_replica_context()
            # tensorflow/python/distribute/distribute_lib.py: the number as a Python int
            # while tracing. The public attribute is a tensor.
            index = int(context._replica_id)
            replica = self._here.replica = TracedReplica(index, shards, self, context)
            _tracker().__dict__.update(carried)
            self.enter(index)
            with _mode(None):
                results[index] = step(replica)
            self.leave(index)

        before = [losses_with_ids(layer) for layer in self._layers]
        try:
            self._strategy.run(tf.autograph.experimental.do_not_convert(on_replica))
        finally:
            self._copies.take_off()
            self._set_losses(before)
        return results

    def current(self) -> TracedReplica | None:
        """Return the replica of this thread, or `None` inside a global section."""
        replica: TracedReplica | None = getattr(self._here, "replica", None)
        return None if replica is None or replica.part is not None else replica

    def current_in_global_part(self) -> TracedReplica | None:
        """Return the replica of this thread inside a global section, else `None`.

        Also return `None` inside a function that is traced in the section.
        """
        replica: TracedReplica | None = getattr(self._here, "replica", None)
        part = None if replica is None else replica.part
        return replica if part is not None and part.is_at_top() else None

    def board(self, number: int) -> list[Any]:
        """Return the list that holds the values of one exchange."""
        while len(self._boards) <= number:
            self._boards.append([None] * self.size)
        return self._boards[number]

    def enter(self, replica: int) -> None:
        """Switch the state of Keras to this replica, which runs from here on."""
        self._copies.put_on(replica)
        self._set_losses(self._losses[replica])

    def leave(self, replica: int) -> None:
        """Store the state of this replica; another one may run from here on."""
        self._losses[replica] = [losses_with_ids(layer) for layer in self._layers]

    def _set_losses(self, losses: list[tuple[Any, Any]]) -> None:
        for layer, (values, ids) in zip(self._layers, losses, strict=True):
            put_losses_with_ids(layer, values, ids)


@contextmanager
def _mode(context: Any) -> Iterator[None]:
    """Set the replica context of TensorFlow in this thread; `None` sets no strategy.

    Without a strategy Keras scales no loss, and its optimizers update plain variables.
    See keras/src/losses/loss.py, scale_loss_for_distribution, and
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


_OF_NCCL = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
"""The types of TensorFlow's operation: tensorflow/core/ops/nccl_ops.cc, NcclAllReduce."""


def _to_sum(lookup: Any) -> Any:
    """Return what replicas have to sum up of a gradient: the entries as such, or their values."""
    if isinstance(lookup, tf.IndexedSlices) and not is_by_rows(lookup):
        return lookup.values
    return lookup


def _summed(lookup: Any, found: Any) -> Any:
    """Return the gradient whose `_to_sum` is `found` over all replicas."""
    if isinstance(lookup, tf.IndexedSlices) and not isinstance(found, tf.IndexedSlices):
        return tf.IndexedSlices(found, lookup.indices, lookup.dense_shape)
    return found


def _times(value: Any, factor: int) -> Any:
    """Return a tensor whose gradient is multiplied on its way back."""

    def same(value: Any) -> Any:
        return tf.identity(value), lambda gradient: gradient * factor

    return tf.custom_gradient(same)(value)


def _has_gradient(value: Any) -> bool:
    return bool(value.dtype.is_floating or value.dtype.is_complex)


def _tracker() -> Any:
    # keras/src/backend/common/global_state.py keeps this state for each thread.
    return global_state.GLOBAL_STATE_TRACKER


def _thread_state() -> dict[str, Any]:
    names = ("dtype_policy", "global_seed_generator")
    return {name: vars(_tracker())[name] for name in names if name in vars(_tracker())}
