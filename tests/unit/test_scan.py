"""Which batches go into one program together."""

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.engines.jax.steps.scan import is_worth_it, repeated, runs_of_alike, stacked


def batch(rows, dtype="float32", fill=0):
    return np.full((rows, 2), fill, dtype), np.full(rows, fill, dtype)


def rows_of(runs):
    return [[len(each[0]) for each in run] for run in runs]


def test_batches_of_one_shape_and_type_go_together():
    batches = [batch(3), batch(3), batch(2), batch(3), batch(3, "float64")]
    assert rows_of(runs_of_alike(batches)) == [[3, 3], [2], [3], [3]]


def test_what_is_no_host_array_goes_alone():
    for other in [(jnp.ones((3, 2)),), (np.float32(1),), (), ({"a": 3.0},)]:
        assert rows_of_any(runs_of_alike([other, other])) == [1, 1]


def rows_of_any(runs):
    return [len(run) for run in runs]


def test_stacked_batches_keep_their_order_and_structure():
    whole = stacked([({"a": np.full((2, 3), number)}, None) for number in range(4)])
    assert whole[1] is None
    assert whole[0]["a"].shape == (4, 2, 3)
    assert whole[0]["a"][:, 0, 0].tolist() == [0, 1, 2, 3]


def test_each_step_gets_the_state_of_the_one_before_and_the_last_outputs_come_out():
    def step(state, batch):
        (total,) = state
        return {"seen": total * 10 + batch}, (total + batch,)

    outputs, state = jax.jit(repeated(step))((jnp.float32(1),), jnp.arange(4.0))
    assert float(outputs["seen"]) == (1 + 0 + 1 + 2) * 10 + 3
    assert float(state[0]) == 7


def test_a_step_that_changes_the_type_of_its_state_runs_one_by_one():
    def step(state, batch):
        return {}, (state[0].astype("float16"),)

    many = jax.jit(repeated(step))
    assert not is_worth_it(lambda: many.trace((jnp.float32(1),), jnp.arange(4.0)), "gpu")


def test_a_convolution_runs_one_by_one_on_a_cpu_only():
    def step(state, batch):
        grown = jax.lax.conv_general_dilated(batch, state[0], (1,), "SAME")
        return {}, (state[0] + grown.sum(),)

    many = jax.jit(repeated(step))

    def trace():
        return many.trace((jnp.ones((1, 1, 3)),), jnp.ones((4, 2, 1, 5)))

    assert not is_worth_it(trace, "cpu")
    assert is_worth_it(trace, "gpu")
