from hypothesis import given
from hypothesis import strategies as st

from lockstep.shards import missing_rows, shard_rows

ROWS = st.integers(0, 10_000)
REPLICAS = st.integers(1, 600)


@given(ROWS, REPLICAS)
def test_every_row_is_in_one_shard_in_order(rows, replicas):
    shards = shard_rows(rows, replicas)
    assert len(shards) == replicas
    assert [row for shard in shards for row in shard] == list(range(rows))


@given(ROWS, REPLICAS)
def test_no_shard_is_larger_than_its_share(rows, replicas):
    assert max(map(len, shard_rows(rows, replicas))) == -(-rows // replicas)


@given(ROWS, REPLICAS)
def test_missing_rows_make_it_divisible(rows, replicas):
    assert (rows + missing_rows(rows, replicas)) % replicas == 0
    assert 0 <= missing_rows(rows, replicas) < replicas
