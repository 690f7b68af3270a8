"""The memory of small programs, counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from lockstep.tools.plan.liveness import TracedProgram

WIDE, ROWS = 256, 1024
SQUARE, BATCH = WIDE * WIDE * 4, ROWS * WIDE * 4


def traced(program, state=1):
    weight = jax.ShapeDtypeStruct((WIDE, WIDE), "float32")
    batches = (jax.ShapeDtypeStruct((rows, WIDE), "float32") for rows in (ROWS, 2 * ROWS))
    return TracedProgram(*(jax.make_jaxpr(program)(weight, x).jaxpr for x in batches), state)


def step(weight, x):
    """A hidden array, a gradient from both, and an update."""
    hidden = x @ weight
    return weight - 0.1 * (x.T @ (2 * hidden))


def test_what_is_made_of_rows_is_split_and_the_gradient_is_whole():
    program = traced(step)
    # The update is written into the memory of the weight, and 2 * hidden is computed in a product.
    assert program.peak(1) == BATCH + SQUARE
    assert program.peak(1 / 4) == BATCH / 4 + SQUARE


def test_a_sharded_weight_is_gathered_while_products_read_it():
    def deep(weight, x):
        hidden = x @ weight
        return weight - 0.1 * (x.T @ (hidden @ weight.T))

    # The hidden array, what a second product makes of it, and the weight; then the gradient.
    assert traced(deep).peak(1, [4]) == max(2 * BATCH + SQUARE, BATCH + SQUARE)
    assert traced(deep).peak(1, [1]) == 2 * BATCH
    assert traced(step).peak(1, [4]) == BATCH + SQUARE


def test_a_weight_that_is_gathered_again_is_there_for_one_product():
    def deep(first, second, x):
        hidden = x @ first
        out = hidden @ second
        gradient = hidden.T @ out
        return first - x.T @ (out @ second.T), second - gradient

    weight = jax.ShapeDtypeStruct((WIDE, WIDE), "float32")
    shapes = (jax.ShapeDtypeStruct((rows, WIDE), "float32") for rows in (ROWS, 2 * ROWS))
    program = TracedProgram(*(jax.make_jaxpr(deep)(weight, weight, x).jaxpr for x in shapes), 2)
    few = 1 / 1024
    # The second weight and its gradient; then a quarter of the gradient, and what is being made.
    assert program.peak(few, [4, 4]) == pytest.approx(2 * SQUARE, rel=0.05)
    assert program.peak(few, [4, 4], gathers_again=True) == pytest.approx(1.25 * SQUARE, rel=0.05)


def test_on_one_device_a_weight_is_updated_as_soon_as_it_has_its_gradient():
    def two(first, second, x):
        gradients = x.T @ x, x.T @ (x + 1)
        return first - gradients[0], second - gradients[1]

    weight = jax.ShapeDtypeStruct((WIDE, WIDE), "float32")
    shapes = (jax.ShapeDtypeStruct((rows, WIDE), "float32") for rows in (ROWS, 2 * ROWS))
    program = TracedProgram(*(jax.make_jaxpr(two)(weight, weight, x).jaxpr for x in shapes), 2)
    assert program.peak(1) == 2 * SQUARE
    assert program.peak(1, updates_early=True) == SQUARE


def test_elements_are_computed_where_they_are_read():
    def chain(weight, x):
        return jnp.sum(jnp.tanh(x @ weight + 1) * 2)

    assert traced(chain, 0).peak(1) == BATCH + 4  # the product, and the sum


@pytest.mark.parametrize("costly", [True, False])
def test_a_costly_result_that_is_read_much_later_is_stored(costly):
    def late(weight, x):
        hidden = x @ weight
        kept = jnp.exp(hidden) if costly else hidden + 1
        total = jnp.sum(kept)
        for _ in range(70):
            total = total * 2
        return total + jnp.sum(kept)

    stored = 2 * BATCH if costly else BATCH
    assert stored <= traced(late, 0).peak(1) <= stored + 64


def test_the_body_of_a_loop_counts_once():
    def loop(weight, x):
        def body(carry, _):
            return jnp.sin(carry @ weight) @ weight, None

        return lax.scan(body, x, None, length=9)[0]

    # The carry, and in the body the product, its sine and the next carry.
    assert traced(loop, 0).peak(1) == pytest.approx(BATCH + 3 * BATCH, abs=BATCH)
    assert traced(loop, 0).peak(1 / 4) == traced(loop, 0).peak(1) / 4


def test_calls_are_counted_like_their_operations():
    assert traced(jax.jit(step)).peak(1) == traced(step).peak(1)
    assert traced(jax.checkpoint(step)).peak(1) == traced(step).peak(1)


def test_another_structure_for_other_rows_is_refused():
    def odd(weight, x):
        return x @ weight if len(x) == ROWS else x

    with pytest.raises(ValueError, match="argument"):
        traced(odd, 0)
