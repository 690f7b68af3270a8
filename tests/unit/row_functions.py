"""Functions of JAX that mix the rows of a batch, and those that only look as if they did."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WEIGHTS = np.random.RandomState(0).rand(6, 6).astype("float32")


def key():
    return jax.random.key(0)


def count(x):
    return x.shape[0]


def numbers(x):
    return jnp.arange(count(x))


def in_groups_of_two(x):
    pairs = x[: count(x) // 2 * 2].reshape(-1, 2, 6)
    return x - pairs.mean(1).sum(0)


def routed_with_capacity(x):
    chosen = jax.nn.one_hot(jnp.argmax(x, -1), 6)
    places = jnp.cumsum(chosen, 0) * chosen
    return x * (places.sum(-1, keepdims=True) < 2)


def halves_changed(x):
    half = count(x) // 2
    return jnp.concatenate([x[half:], x[:half]])


def added_by_segment(x):
    chosen = jnp.argmax(x, -1)
    return jax.ops.segment_sum(x, chosen, 6)[chosen]


def mixed_up(x):
    part = jax.random.uniform(key(), (count(x), 1))
    return part * x + (1 - part) * x[::-1]


def another_program(x):
    return x * 2 if count(x) > 10 else x + 1


def another_wiring(x):
    one, two = x + 1.0, x + 2.0
    return one * 3.0 if count(x) > 10 else two * 3.0


def until_all_are_small(x):
    return lax.while_loop(lambda y: jnp.any(y > 1), lambda y: y / 2, x)


def average_so_far(x):
    return lax.scan(lambda carry, row: (carry * 0.9 + row, carry), jnp.zeros(6), x)[1]


def mixes_later(x):
    return lax.fori_loop(0, 3, lambda n, y: jnp.where(n == 0, y, y - y.mean(0)), x)


def key_from_row_to_row(x):
    def step(carry, row):
        return jax.random.split(carry)[0], row * jax.random.uniform(carry)

    return lax.scan(step, key(), x)[1]


def siamese_shifted(x):
    both = jnp.concatenate([x, x * 2])
    return both[count(x) - 1 : -1] + x


def whitened(x):
    return x @ jnp.linalg.eigh(x.T @ x)[1]


def by_keys_of_numbers(x):
    def noisy(number, row):
        return row * jax.random.uniform(jax.random.fold_in(key(), number))

    return jax.vmap(noisy)(numbers(x), x)


def any_is_negative(x):
    return lax.cond(x.mean() > 0, lambda y: y, lambda y: -y, x)


MIXING = {  # of rows of 6 numbers
    "mean": lambda x: x - x.mean(0),
    "batch norm": lambda x: (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3),
    "norm of all": lambda x: x / jnp.linalg.norm(x),
    "clipped by norm": lambda x: x / jnp.maximum(1.0, jnp.sqrt((x**2).sum())),
    "maximum": lambda x: x - x.max(0, keepdims=True),
    "argmax": lambda x: x * jnp.argmax(x, 0),
    "median": lambda x: x - jnp.median(x, 0),
    "softmax over rows": lambda x: jax.nn.softmax(x, 0),
    "logsumexp over rows": lambda x: x - jax.nn.logsumexp(x, 0),
    "sort over rows": lambda x: jnp.sort(x, 0),
    "sum so far": lambda x: jnp.cumsum(x, 0),
    "associative scan": lambda x: lax.associative_scan(jnp.add, x, axis=0),
    "differences": lambda x: jnp.diff(x, axis=0, prepend=0.0),
    "fourier over rows": lambda x: jnp.fft.fft(x, axis=0).real,
    "svd of all": lambda x: jnp.linalg.svd(x, full_matrices=False)[0],
    "windows over rows": lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME"),
    "convolution over rows": lambda x: (
        lax.conv_general_dilated(x.T[None], jnp.ones((6, 6, 3), x.dtype), (1,), "SAME")[0].T
    ),
    "similarities": lambda x: x @ x.T,
    "attention over rows": lambda x: jax.nn.softmax(x @ x.T) @ x,
    "pairs": lambda x: jnp.linalg.norm(x[:, None] - x[None] + 1e-3, axis=-1).sum(-1),
    "products with all": lambda x: jax.vmap(lambda row: (row * x).sum())(x),
    "products with all, in a loop": lambda x: lax.map(lambda row: (row * x).sum(), x),
    "einsum": lambda x: jnp.einsum("bi,ci->bc", x, x).sum(-1),
    "covariance": lambda x: x @ jnp.cov(x.T),
    "contrastive loss": lambda x: jax.nn.log_softmax(x @ x.T / 0.1),
    "next row": lambda x: jnp.roll(x, 1, 0),
    "reversed": lambda x: x[::-1],
    "beside its reverse": lambda x: jnp.concatenate([x, x[::-1]], 1),
    "shifted": lambda x: jnp.concatenate([jnp.zeros((1, 6)), x])[:-1],
    "first row": lambda x: x - x[:1],
    "row 0": lambda x: x + x[0],
    "row 0 is set": lambda x: x.at[0].set(0.0),
    "shuffled": lambda x: jax.random.permutation(key(), x),
    "drawn rows": lambda x: x[jax.random.randint(key(), (count(x),), 0, count(x))],
    "numbered": lambda x: x + numbers(x)[:, None],
    "numbered by a constant": lambda x: x * np.arange(count(x), dtype="float32")[:, None],
    "embedded by number": lambda x: x + jnp.asarray(np.tile(WEIGHTS, (9, 1)))[numbers(x)],
    "first four rows": lambda x: jnp.where(numbers(x)[:, None] < 4, x, 0),
    "index of the next row": lambda x: x[(numbers(x) + 1) % count(x), 0],
    "index of the last row": lambda x: x[numbers(x)[::-1], 0],
    "number as a column": lambda x: (x @ np.ones((6, 64), "float32") * np.arange(64.0))[
        numbers(x), numbers(x)
    ],
    "repeated weights": lambda x: x + jnp.repeat(WEIGHTS[0], count(x)).reshape(count(x), 6),
    "tiled weights, turned": lambda x: x + jnp.tile(WEIGHTS[0], count(x)).reshape(6, count(x)).T,
    "two rows": lambda x: jnp.concatenate([x, 2 * x])[jnp.arange(2 * count(x)).reshape(-1, 2)].sum(
        1
    ),
    "divided by the rows": lambda x: x / count(x),
    "divided by their root": lambda x: x / np.sqrt(count(x)),
    "divided by a count": lambda x: x / (x > 0).sum(),
    "as many steps as rows": lambda x: lax.scan(
        lambda carry, _: (carry * 1.1, None), x, None, length=count(x)
    )[0],
    "gradient of a mean": lambda x: jax.grad(lambda y: (y.mean(0) ** 2).sum())(x),
    "rows and columns": lambda x: jnp.swapaxes(x, 0, 1).reshape(count(x), 6),
    "tiled and cut": lambda x: jnp.tile(x, (2, 1)).reshape(count(x), 2, 6),
    "repeated and tiled": lambda x: (jnp.repeat(x, 2, 0) + jnp.tile(x, (2, 1))).reshape(-1, 2, 6),
    "counted by class": lambda x: x * jnp.bincount(jnp.argmax(x, -1), length=6),
    "written to other rows": lambda x: jnp.zeros_like(x).at[jnp.argsort(x[:, 0])].set(x),
    "in groups of two": in_groups_of_two,
    "routed with capacity": routed_with_capacity,
    "halves changed": halves_changed,
    "added by segment": added_by_segment,
    "mixed up": mixed_up,
    "until all are small": until_all_are_small,
    "average so far": average_so_far,
    "mixes later": mixes_later,
    "key from row to row": key_from_row_to_row,
    "siamese, shifted": siamese_shifted,
    "whitened": whitened,
    "keys of numbers": by_keys_of_numbers,
    "any is negative": any_is_negative,
    "place among rows": lambda x: x * jnp.searchsorted(jnp.sort(x[:, 0]), x[:, 0])[:, None],
    "positive rows first": lambda x: x[jnp.nonzero(x[:, 0] > 0, size=count(x))[0]],
    "another program": another_program,
    "another wiring": another_wiring,
}


def heads(x):
    split = x.reshape(count(x), 4, 2, 3).transpose(0, 2, 1, 3)
    weights = jax.nn.softmax(jnp.einsum("bhtd,bhsd->bhts", split, split))
    return (weights @ split).transpose(0, 2, 1, 3).reshape(x.shape)


def heads_first(x):
    rows, steps, size = x.shape
    split = jnp.stack(jnp.split(x, 2, -1)).reshape(2 * rows, steps, size // 2)
    split = jax.nn.softmax(split @ split.swapaxes(1, 2)) @ split
    return jnp.concatenate(jnp.split(split, 2, 0), -1)


def over_time(x):
    def step(carry, now):
        carry = jnp.tanh(carry + now @ WEIGHTS)
        return carry, carry

    made = lax.scan(step, jnp.zeros((count(x), 6)), jnp.swapaxes(x, 0, 1))[1]
    return jnp.swapaxes(made, 0, 1)


def time_first(x):
    turned = jnp.swapaxes(x, 0, 1)
    return jnp.swapaxes((turned.reshape(-1, 6) @ WEIGHTS).reshape(turned.shape), 0, 1)


def siamese(x):
    both = jnp.tanh(jnp.concatenate([x, x * 2]))
    return both[: count(x)] - both[count(x) :]


def routed(x):
    values, chosen = lax.top_k(x, 2)
    return jnp.einsum("btk,btke->bte", values, jax.nn.one_hot(chosen, 6))


def own_slices(x):
    def cut(row, start):
        return lax.dynamic_slice_in_dim(row, start, 2)

    return jax.vmap(cut)(x, jnp.argmax(x[:, 0], -1) % 3)


def own_keys(x):
    keys = jax.random.split(key(), count(x))
    return x * jax.vmap(lambda each: jax.random.uniform(each, (4, 6)))(keys)


def last_step(x):
    return x[numbers(x), jnp.argmax(x[..., 0], -1)]


BY_ROWS = {  # of rows of 4 x 6 numbers
    "dense, flat": lambda x: (x.reshape(-1, 6) @ WEIGHTS).reshape(x.shape),
    "heads": heads,
    "heads first": heads_first,
    "over time": over_time,
    "time first": time_first,
    "siamese": siamese,
    "routed": routed,
    "own slices": own_slices,
    "last step": last_step,
    "last step set": lambda x: x.at[numbers(x), jnp.argmax(x[..., 0], -1)].set(1.0),
    "repeated weights, turned": lambda x: (
        x + jnp.repeat(WEIGHTS[0], count(x)).reshape(6, count(x)).T[:, None]
    ),
    "tiled weights": lambda x: x + jnp.tile(WEIGHTS[0], count(x)).reshape(count(x), 1, 6),
    "repeated": lambda x: jnp.repeat(x, 3, 0).reshape(-1, 3, *x.shape[1:]).sum(1),
    "tiled": lambda x: jnp.tile(x, (3, 1, 1)).reshape(3, *x.shape).sum(0),
    "gradient by row": lambda x: jax.vmap(jax.grad(lambda row: (row**3).sum() ** 2))(x),
    "gradient of a sum": lambda x: jax.grad(lambda y: jnp.tanh(y @ WEIGHTS).sum())(x),
    "loop over rows": lambda x: lax.map(lambda row: jax.nn.softmax(row @ WEIGHTS), x),
    "three steps": lambda x: lax.while_loop(
        lambda both: both[0] < 3, lambda both: (both[0] + 1, both[1] * 2), (0, x)
    )[1],
    "qr of each": lambda x: jnp.linalg.qr(x)[1],
    "solved for each": lambda x: jnp.linalg.solve(x[:, :4, :4] + 9 * jnp.eye(4), x),
    "steps reversed": lambda x: x[:, ::-1],
    "steps rolled": lambda x: jnp.roll(x, 1, 1),
    "steps sorted": lambda x: jnp.sort(x, 1),
    "steps ordered": lambda x: jnp.take_along_axis(x, jnp.argsort(x, 1), 1),
    "steps taken": lambda x: jnp.take(x, jnp.array([2, 0]), axis=1),
    "steps added": lambda x: lax.associative_scan(jnp.add, x, axis=1),
    "step 0 set": lambda x: x.at[:, 0].set(0.0),
    "start step": lambda x: jnp.concatenate([jnp.zeros((count(x), 1, 6)), x], 1),
    "one hot": lambda x: jax.nn.one_hot(jnp.argmax(x, -1), 6),
    "einsum": lambda x: jnp.einsum("btd,bsd,de->bte", x, x, WEIGHTS),
    "similarities of steps": jax.vmap(lambda row: row @ row.T),
    "layer norm": lambda x: (x - x.mean((1, 2), keepdims=True)) / x.std((1, 2), keepdims=True),
    "ones": lambda x: x * np.ones((count(x), 1, 1), "float32"),
    "causal": lambda x: x * jnp.tril(jnp.ones((4, 4)))[None, :, :1],
    "fourier": lambda x: jnp.fft.fft(x).real,
    "padded": lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0))),
    "branch of each": jax.vmap(lambda row: lax.cond(row.sum() > 0, jnp.sin, jnp.cos, row)),
    "logsumexp": lambda x: jax.nn.logsumexp(x, -1),
    "any of a row": lambda x: jnp.where(jnp.any(x < 0, (1, 2), keepdims=True), x, -x),
    "attention of jax.nn": lambda x: jax.nn.dot_product_attention(*[x[:, :, None]] * 3),
    "interpolated": jax.vmap(lambda row: jnp.interp(row[0], jnp.arange(6.0), row[1])),
    "binned": lambda x: jnp.searchsorted(jnp.linspace(-1, 1, 5), x) + 0.0,
    "times a power": lambda x: jnp.ldexp(x, 3) + jnp.frexp(x)[0],
    "resized": lambda x: jax.image.resize(x, (count(x), 8, 6), "bilinear"),
    "computed again": jax.checkpoint(lambda x: jnp.tanh(x @ WEIGHTS)),
    "mean in vain": lambda x: (x.mean(0), x)[1],
}

DRAWN = {
    "dropout": lambda x: x * jax.random.bernoulli(key(), 0.5, x.shape),
    "dropout of rows": lambda x: x * jax.random.bernoulli(key(), 0.5, (count(x), 1, 1)),
    "keys by row": own_keys,
}
