"""Which layers keep a ragged batch from being split, out of a traced step."""

import jax
import jax.numpy as jnp
import pytest

from lockstep.engines.jax.partition_fallbacks import merging_layers

GATHERS = "%g = f32[8,4] all-gather(f32[2,4] %p)"


def traced(step, rows=7):
    return jax.make_jaxpr(step)(jnp.zeros((rows, 3, 2))).jaxpr


def merge(x):
    with jax.named_scope("model"), jax.named_scope("flat"):
        return jnp.sum(jnp.reshape(x, (-1, 2)) ** 2)


def split(x):
    with jax.named_scope("folds"):
        return jnp.reshape(x, (7, 6))


@pytest.mark.parametrize(
    ("step", "layers"),
    [
        (merge, ["model/flat"]),
        (jax.grad(merge), ["model/flat"]),
        (jax.jit(merge), ["model/flat"]),
        (lambda x: jax.lax.map(lambda _: merge(x), jnp.arange(2)), ["model/flat"]),
        (split, []),
    ],
    ids=["called", "in a gradient", "in a program", "in a loop", "the batch stays a dim"],
)
def test_a_layer_is_named_by_its_path(step, layers):
    assert merging_layers(traced(step), GATHERS, {7}) == layers


def test_a_program_that_gathers_nothing_is_no_news():
    assert merging_layers(traced(merge), "%r = f32[] all-reduce(f32[] %p)", {7}) == []


def test_a_metric_has_no_layers_name():
    assert merging_layers(traced(lambda x: jnp.reshape(x, (-1,))), GATHERS, {7}) == []


def test_another_dim_is_not_the_batch():
    assert merging_layers(traced(merge, rows=8), GATHERS, {7}) == []
