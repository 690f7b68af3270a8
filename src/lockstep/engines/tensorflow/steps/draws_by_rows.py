"""Random numbers of replicas: each draws its rows of the numbers that one device draws.

The seeds are the same on every replica. The random operations without a state get a counter, and
a block of 16 bytes of results belongs to each count. So a replica starts at the first of its rows.
Code that draws the same numbers for all rows gets them on every replica.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from lockstep.core.patched import patched
from lockstep.engines.tensorflow.exchange.lookup_gradients import own_rows
from lockstep.engines.tensorflow.exchange.replica_consistency import ReplicasDiffer
from lockstep.engines.tensorflow.exchange.replicas import ReplicaGroup, TracedReplica
from lockstep.engines.tensorflow.tensorflow_compat import (
    gen_stateless_random_ops,
    gen_stateless_random_ops_v2,
)
from lockstep.keras_compat import GLOBAL_SEED_GENERATOR, global_state
from lockstep.keras_compat.foreign_patches import replaced

_BY_COUNT = """
    stateless_random_normal_v2 stateless_random_uniform_full_int_v2 stateless_random_uniform_int_v2
    stateless_random_uniform_v2
"""
_IN_ORDER = "stateless_truncated_normal_v2"
"""It draws a number again that is too far from the mean, so the counts of a row are unknown."""

_BY_PARAMETERS = {
    gen_stateless_random_ops: "stateless_multinomial stateless_random_binomial "
    "stateless_random_poisson stateless_parameterized_truncated_normal",
    gen_stateless_random_ops_v2: "stateless_random_gamma_v3",
}
"""They take parameters of each row. Only a layer that is declared row-wise reaches them."""


_OTHER_ROWS = (
    "lockstep: a layer that is declared row-wise draws random numbers for rows of other "
    "devices.\nRemove lockstep.rowwise from it."
)


@contextmanager
def draws_of_one_device(team: ReplicaGroup) -> Iterator[None]:
    """Let the replicas of `team` draw the numbers of one device inside the context."""
    v2 = gen_stateless_random_ops_v2
    names = [*_BY_COUNT.split(), _IN_ORDER]
    draws = [(v2, name, _by_rows(name, vars(v2)[name], team)) for name in names]
    for module, refused in _BY_PARAMETERS.items():
        draws += [
            (module, name, _not_by_rows(vars(module)[name], team)) for name in refused.split()
        ]
    shared = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    seeds = [] if shared is None else [(shared, "next", _drawn_once(shared.next, team))]
    with replaced(draws), patched(seeds):
        yield


def _by_rows(name: str, plain: Callable[..., Any], team: ReplicaGroup) -> Callable[..., Any]:
    """Wrap a random operation of TensorFlow to return the numbers of a replica's rows."""

    def draw(shape: Any, **options: Any) -> Any:
        replica, drawn = team.current(), plain(shape, **options)
        if replica is None or not _has_rows(drawn):
            return drawn
        options.pop("name", None)  # an operation above may have it
        with own_rows():
            first, count, total = _place_of(replica, shape)
            if name == _IN_ORDER:
                drawn = plain(tf.reshape(total, (1,)), **options)
                return tf.reshape(drawn[first : first + count], shape)
            block = 16 // max(drawn.dtype.size, 4)
            with tf.device("CPU:0"):
                blocks, skipped = first // block, first % block
                ahead = tf.cast(tf.stack([blocks, 0]), "uint64")
            options["counter"] += ahead
            if (drawn.shape[1:].num_elements() or 1) % block == 0:
                return plain(shape, **options)
            drawn = plain(tf.reshape(skipped + count, (1,)), **options)
            return tf.reshape(drawn[skipped:], shape)

    return draw


def _place_of(replica: TracedReplica, shape: Any) -> tuple[Any, Any, Any]:
    """Return the place of a replica's numbers, how many they are, and how many all are.

    Args:
        replica: The replica.
        shape: The shape of what it draws for its rows.
    """
    shards, index = replica.shards, replica.index
    with tf.device("CPU:0"):  # numbers of 64 bits would go to a GPU and back
        sizes = (shards.rows, shards.starts[index], shards.sizes[index])
        rows, start, size = (tf.cast(each, "int64") for each in sizes)
        count = tf.reduce_prod(tf.cast(shape, "int64"))
        of_row = count // tf.maximum(size, 1)
        # `tf.debugging` would trace two branches for each check.
        check = tf.raw_ops.Assert(
            condition=tf.equal(of_row * size, count), data=[_OTHER_ROWS, count]
        )
        with tf.control_dependencies([check]):
            return start * of_row, count, rows * of_row


def _not_by_rows(plain: Callable[..., Any], team: ReplicaGroup) -> Callable[..., Any]:
    """Wrap a random operation of TensorFlow to refuse a draw for the rows of a replica."""

    def draw(*args: Any, **options: Any) -> Any:
        drawn = plain(*args, **options)
        if team.current() is not None and _has_rows(drawn):
            raise ReplicasDiffer(f"a layer that is declared row-wise draws by {drawn.op.type}")
        return drawn

    return draw


def _has_rows(drawn: Any) -> bool:
    # Only the number of a replica's rows is unknown while tracing.
    return drawn.shape.rank != 0 and drawn.shape[0] is None


def _drawn_once(draw: Callable[..., Any], team: ReplicaGroup) -> Callable[..., Any]:
    """Wrap `draw` of the seeds that all models share: the first replica draws for all."""
    graph = tf.compat.v1.get_default_graph()

    def draw_once(*args: Any, **kwargs: Any) -> Any:
        replica = team.current()
        if replica is None:
            return draw(*args, **kwargs)
        if tf.compat.v1.get_default_graph() is not graph:
            raise ReplicasDiffer("it draws without a seed inside a TensorFlow function")
        return replica.exchange(draw(*args, **kwargs) if replica.index == 0 else None)[0]

    return draw_once
