"""Which rows of a global batch each replica gets."""

from itertools import pairwise


def shard_rows(rows: int, replicas: int) -> tuple[range, ...]:
    """Split the rows of one global batch into contiguous shards, one per replica.

    Every row is in exactly one shard and order is kept. The shards before the last
    rows all have `ceil(rows / replicas)` rows, which is also the most any has; the
    last ones may be shorter or empty.

    Args:
        rows: Rows in the global batch, at least 0.
        replicas: Replicas in the mesh, at least 1.

    Returns:
        `replicas` ranges of row numbers, ascending.

    Example:
        >>> [len(shard) for shard in shard_rows(11, 4)]
        [3, 3, 3, 2]
        >>> [len(shard) for shard in shard_rows(5, 4)]
        [2, 2, 1, 0]
    """
    size = -(-rows // replicas)
    starts = [min(rows, replica * size) for replica in range(replicas + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


def missing_rows(rows: int, replicas: int) -> int:
    """Rows to add so that every replica gets the same number.

    Example:
        >>> missing_rows(103, 8)
        1
    """
    return -rows % replicas
