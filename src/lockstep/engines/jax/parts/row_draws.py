"""Random numbers of a part of the rows, equal to those that a draw of all rows has there.

JAX numbers the entries of a draw, and computes each from the key and its number. A part of the rows
draws the entries of its rows if it gets their numbers in the draw of all rows. A PRNG of
`jax.extend.random.define_prng_impl` does that: a third word of its key is the first row of the
part, and it knows which draws have rows.

Whether a draw has rows is not guessed from its shape. The program is traced with two numbers of
rows, and a draw whose shape differs has rows. See `draws_by_rows`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from threading import get_ident
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import random as jax_random

from lockstep.engines.jax.rowtrace.primitive_rules import OF_KERAS
from lockstep.engines.jax.rowtrace.row_labels import Draw
from lockstep.keras_compat import keys_replaced

Shape = tuple[int, ...]
Draws = tuple[tuple[tuple[Shape, Shape], ...], ...]
"""For each key that a model draws, in order: the shapes of its draws in a part and in the whole."""

_PRNG = "threefry2x32"
_MOST = 2**32
"""The entries of the largest draw: the numbers of entries are 32 bits long."""


@dataclass(frozen=True)
class PartRows:
    """Which rows of a batch a part has. They are blocks of consecutive rows.

    Attributes:
        rows: The number of rows of the part.
        of: The number of rows of the batch.
        block: The number of rows of a block.
        stride: From the first row of a block to that of the next one.
    """

    rows: int
    of: int
    block: int
    stride: int


class UnknownDraw(Exception):
    """A part cannot draw the numbers of its rows. The text says which draw it is."""


def check_prng() -> None:
    """Raise `UnknownDraw` if JAX draws by another method than the one here."""
    config: Any = jax.config
    if config.jax_default_prng_impl != _PRNG or not config.jax_threefry_partitionable:
        raise UnknownDraw(
            "draws with a JAX random number generator that is not the default "
            "(jax_default_prng_impl, jax_threefry_partitionable)"
        )


class PartKeys:
    """The keys that Keras draws in a call, which is traced before its draws are known.

    A key has a number in its type, and a method that asks here for the draws of that number when a
    program with it is compiled or run.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[PartRows, Draws]] = {}

    @contextmanager
    def drawn(self, rows: int, first: Any) -> Iterator[None]:
        """Let Keras draw such keys inside the context.

        Args:
            rows: The number of rows of the part.
            first: The number of its first row.
        """
        with _keys(partial(self._method, rows), first):
            yield

    def settle(self, rows: PartRows, draws: Draws) -> None:
        """Set what parts of so many rows draw, as `draws_by_rows` has returned it."""
        self._known[rows.rows] = rows, draws

    def _method(self, rows: int, number: int) -> Any:
        """Return threefry for keys with this number, in a part of so many rows."""

        def numbers(first: Any, shape: Shape) -> Any:
            part, draws = self._known[rows]
            shapes = dict(draws[number]) if number < len(draws) else {}
            return _numbers(first, shape, shapes.get(shape, shape), part)

        return _method(f"row{number}", numbers)


def draws_by_rows(found: Sequence[Draw], sizes: Sequence[int], rows: int) -> Draws:
    """Return the draws of a part, from a program that was traced with `PartKeys`.

    Args:
        found: The draws of the program.
        sizes: The numbers of rows that it was traced with, in descending order. The first is the
            whole.
        rows: The number of rows of the part, one of the sizes.

    Raises:
        UnknownDraw: If a draw by rows has no key of Keras, or is of a kind that depends on the
            number of entries otherwise.
    """
    shapes: dict[int, dict[Shape, Shape]] = {}
    for draw in found:
        number = int(draw.key[len(OF_KERAS) : -1]) if draw.key.startswith(OF_KERAS) else None
        if draw.rows is not None:
            _check(draw, number)
        if number is None or draw.bits is None:
            continue
        small, large = draw.shapes[sizes.index(rows)], draw.shapes[0]
        if shapes.setdefault(number, {}).setdefault(small, large) != large:
            raise UnknownDraw(
                f"{_layer(draw)} draws {small} for the rows and for other shapes, from one seed"
            )
    every = range(max(shapes, default=-1) + 1)
    return tuple(tuple(sorted(shapes.get(number, {}).items())) for number in every)


def _check(draw: Draw, number: int | None) -> None:
    """Raise `UnknownDraw` unless a part can have the numbers of a draw by rows."""
    if draw.bits is None:
        raise UnknownDraw(
            f"{_layer(draw)} draws a key for each row, as keras.random.gamma, beta, binomial and "
            "shuffle do"
        )
    if number is None:
        raise UnknownDraw(
            f"{_layer(draw)} draws with jax.random, with a key that Keras did not create"
        )
    if math.prod(draw.shapes[0]) >= _MOST:
        raise UnknownDraw(f"{_layer(draw)} draws 2**32 numbers or more at once")


def _layer(draw: Draw) -> str:
    return repr(draw.place.layer) if draw.place.layer else "the model"


@contextmanager
def _keys(method_of: Callable[[int], Any], first: Any) -> Iterator[None]:
    """Give every key that Keras draws a number, a method, and the first row."""
    numbers, thread = count(), get_ident()

    def with_first_row(key: Any) -> Any:
        is_other = get_ident() != thread  # of a data set, for example
        if is_other or key.shape != (2,):  # a key of JAX's own type, or of the user's making
            return key
        row = jnp.asarray(first, "uint32").reshape(1)
        words = jnp.concatenate([key.astype("uint32"), row])
        return jax.random.wrap_key_data(words, impl=method_of(next(numbers)))

    with keys_replaced(with_first_row):
        yield


def _method(tag: str, numbers: Callable[[Any, Shape], Any]) -> Any:
    """Return threefry, with the number of the first row in the third word of a key.

    Args:
        tag: The tag of the type of its keys.
        numbers: Returns the number of each entry of a draw, from the first row and the shape.
    """

    # jax/_src/prng.py, _threefry_random_bits_partitionable
    def random_bits(key: Any, width: int, shape: Shape) -> Any:
        high, low, first = key
        number = numbers(first, tuple(shape))
        one, two = jax_random.threefry2x32_p.bind(high, low, jnp.zeros_like(number), number)
        if width == 64:
            return (one.astype("uint64") << np.uint64(32)) | two.astype("uint64")
        return (one ^ two).astype(f"uint{width}")

    def plain(key: Any) -> Any:
        return jax.random.wrap_key_data(key[:2], impl=_PRNG)

    def split(key: Any, shape: Shape) -> Any:
        words = jax.random.key_data(jax.random.split(plain(key), shape))
        rest = jnp.broadcast_to(key[2:], (*words.shape[:-1], 1))
        return jnp.concatenate([words, rest], axis=-1)

    def fold_in(key: Any, data: Any) -> Any:
        words = jax.random.key_data(jax.random.fold_in(plain(key), data))
        return jnp.concatenate([words, key[2:]])

    def seed(_: Any) -> Any:
        raise NotImplementedError("keys are made from keys of Keras")

    return jax_random.define_prng_impl(
        key_shape=(3,),
        seed=seed,
        split=split,
        random_bits=random_bits,
        fold_in=fold_in,
        name=f"lockstep_{tag}",
        tag=tag,
    )


def _numbers(first: Any, shape: Shape, whole: Shape, part: PartRows) -> Any:
    """Return the number of each entry of a draw, in the draw of all rows.

    Args:
        first: The number of the first row of the part.
        shape: The shape of the draw in the part.
        whole: Its shape in the whole. The dim that differs is made of rows.
        part: The rows of the part.
    """
    number = jnp.zeros(shape, "uint32")
    for dim, (size, full) in enumerate(zip(shape, whole, strict=True)):
        index = jax.lax.broadcasted_iota("uint32", shape, dim)
        if size != full:
            each = np.uint32(size // part.rows)
            row, inside = index // each, index % each
            block, offset = row // np.uint32(part.block), row % np.uint32(part.block)
            index = (first + block * np.uint32(part.stride) + offset) * each + inside
        number = number * np.uint32(full) + index
    return number
