"""One call of a model in parts of its rows: the proof that it may be, and the loop over the parts.

Each part is a step of a `jax.lax.scan` whose body is `jax.checkpoint`ed, so the backward pass
computes the activations of a part again, and no more than one part has its activations at a time.
No padding reaches the model. The last part has the rows that remain, and a program of its own.

The call is followed first: see `lockstep.engines.jax.rowtrace`. What does not work row by row is
refused.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.experimental import sparse

from lockstep.core import micro_batches as refused
from lockstep.engines.jax.parts.row_draws import (
    PartKeys,
    PartRows,
    UnknownDraw,
    check_prng,
    draws_by_rows,
)
from lockstep.engines.jax.parts.row_parts import RowParts
from lockstep.engines.jax.rowtrace.row_labels import Mixed, Rows, Same
from lockstep.engines.jax.rowtrace.row_trace import trace_rows
from lockstep.keras_compat import get_keras_mask, layers_in, set_keras_mask


@dataclass
class _Made:
    """What a trace of a call has made besides arrays.

    Attributes:
        outputs: The outputs of the call, with tensors of the trace.
        arrays: The positions of the arrays among their leaves.
        changed: The positions of the variables that the call changes.
        attributes: The numbers and words that are attributes of layers after the call.
    """

    outputs: Any = None
    arrays: tuple[int, ...] = ()
    changed: tuple[int, ...] = ()
    attributes: "dict[int, tuple[Any, dict[str, Any]]]" = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """One call of a model: what it is called with, without its rows.

    Attributes:
        model: The model.
        plain: Its `stateless_call`.
        has_losses: Whether the call returns losses.
        leaves: The leaves of the arguments.
        tree: Their structure.
        positions: The positions of the leaves that have rows.
        rows: The number of rows; 0 if no argument is an array.
    """

    model: Any
    plain: Callable[..., Any]
    has_losses: bool
    leaves: tuple[Any, ...]
    tree: Any
    positions: tuple[int, ...]
    rows: int

    @classmethod
    def of(
        cls, model: Any, plain: Callable[..., Any], has_losses: bool, args: Any, kwargs: Any
    ) -> "Call":
        """Return the call with these arguments. The first array among them has the rows."""
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_sparse)
        sizes = [leaf.shape[0] if getattr(leaf, "ndim", 0) else None for leaf in leaves]
        rows = next((size for size in sizes if size is not None), 0)
        positions = [n for n, size in enumerate(sizes) if size is not None and size == rows]
        return cls(model, plain, has_losses, tuple(leaves), tree, tuple(positions), rows)

    @property
    def arrays(self) -> list[Any]:
        """The arguments that have rows, each with its mask or `None`."""
        return [(self.leaves[n], get_keras_mask(self.leaves[n])) for n in self.positions]

    @property
    def fixed(self) -> dict[int, Any]:
        """The arguments that are arrays without rows, by their positions."""
        pairs = enumerate(self.leaves)
        arrays = {n: leaf for n, leaf in pairs if isinstance(leaf, jax.Array)}
        return {n: leaf for n, leaf in arrays.items() if n not in self.positions}

    def made(self, trainable: Any, others: Any, arrays: list[Any], made: _Made) -> Any:
        """Call the model with these rows, and return what depends on them.

        Args:
            trainable: The values of the trainable variables.
            others: Those of the other variables.
            arrays: The arguments that have rows, each with its mask or `None`.
            made: Gets what is no array.

        Returns:
            The outputs with their masks, the losses, and the variables that have changed.
        """
        leaves = list(self.leaves)
        for position, (array, mask) in zip(self.positions, arrays, strict=True):
            leaves[position] = array
            if mask is not None:
                set_keras_mask(array, mask)
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        outputs, after, *losses = self.plain(trainable, others, *args, **kwargs)
        every = keras.tree.flatten(outputs)
        made.outputs = outputs
        made.arrays = tuple(n for n, leaf in enumerate(every) if isinstance(leaf, jax.Array))
        pairs = enumerate(zip(after, others, strict=True))
        made.changed = tuple(n for n, (new, old) in pairs if new is not old)
        made.attributes = _attributes(self.model)
        arrays_out = [every[n] for n in made.arrays]
        masks = [get_keras_mask(each) for each in arrays_out]
        return (arrays_out, masks), list(*losses), [after[n] for n in made.changed]


def _is_sparse(leaf: Any) -> bool:
    return isinstance(leaf, sparse.JAXSparse)


_PLAIN = (bool, int, float, str, tuple, type(None))


def _attributes(model: Any) -> dict[int, tuple[Any, dict[str, Any]]]:
    """Return the attributes of the layers that are numbers or words, by the `id` of the layer."""
    layers = [model, *layers_in(model)]
    return {
        id(layer): (
            layer,
            {name: each for name, each in vars(layer).items() if isinstance(each, _PLAIN)},
        )
        for layer in layers
    }


@dataclass(frozen=True)
class Proof:
    """What is known of a call: how its results are made of those of parts.

    Attributes:
        outputs: For each output, whether it has rows; else it is the same for all rows.
        masks: The same of their masks, `None` without one.
        losses: For each loss `"same"`, `"sum"` or `"mean"`.
        programs: For each number of rows the call as it was traced and proved. Code of a model may
            do something else each time that it is traced.
        is_complete: Whether it holds for gradients and values alike. Otherwise something was taken
            on trust, and values have to be compared: see `RowTrace.trusted`.
        whole: What the call makes with all rows, besides arrays.
    """

    outputs: list[bool]
    masks: list[bool | None]
    losses: list[str]
    programs: dict[int, Callable[..., Any]]
    is_complete: bool
    whole: _Made


def run_in_parts(call: Call, trainable: Any, others: Any, parts: RowParts, proof: Proof) -> Any:
    """Call a model in parts of its rows, as `prove` has proved that it may."""

    def part(arrays: Any, first: Any, rows: PartRows) -> Any:
        run = proof.programs[rows.rows]
        return run(list(trainable), list(others), arrays, call.fixed, first)

    def body(_: None, given: Any) -> Any:
        first, arrays = given
        return None, part(jax.tree.map(lambda a: parts.laid_out(a, 0), arrays), first, rows)

    rows = parts.of_part()
    cut = jax.tree.map(parts.cut, call.arrays)
    again = jax.checkpoint(body, prevent_cse=False)  # a loop is no common subexpression
    _, ((several, masks), losses, after) = jax.lax.scan(again, None, (parts.firsts(), cut))
    rest: Any = jax.tree.map(lambda _: None, (several, masks, losses))
    if parts.rest:
        start = parts.full * parts.size
        last = partial(part, first=jnp.uint32(start), rows=parts.of_rest())
        own = jax.tree.map(lambda a: parts.laid_out(a[start:], 0), call.arrays)
        (outputs, own_masks), own_losses, _ = jax.checkpoint(last)(own)
        rest = outputs, own_masks, own_losses
    leaves = keras.tree.flatten(proof.whole.outputs)
    found = zip(proof.whole.arrays, several, rest[0], proof.outputs, strict=True)
    for position, many, one, has_rows in found:
        leaves[position] = parts.joined(many, one) if has_rows else many[0]
    of_masks = zip(proof.whole.arrays, masks, rest[1], proof.masks, strict=True)
    for position, many, one, by_rows in of_masks:
        if by_rows is not None:
            mask = parts.joined(many, one) if by_rows else many[0]
            set_keras_mask(leaves[position], mask)
    state = list(others)
    for position, many in zip(proof.whole.changed, after, strict=True):
        state[position] = many[0]
    _put_back(proof.whole.attributes)
    result = keras.tree.pack_sequence_as(proof.whole.outputs, leaves), state
    if not call.has_losses:
        return result
    pairs = zip(proof.losses, losses, rest[2], strict=True)
    return *result, [_loss(parts, rule, many, one) for rule, many, one in pairs]


def _loss(parts: RowParts, rule: str, many: Any, rest: Any) -> Any:
    """Return a loss of all rows, from those of the parts."""
    if rule == "same":
        return many[0]
    of_all = many.sum(0)
    if rule == "sum":
        return of_all + rest if parts.rest else of_all
    of_all = of_all * (parts.size / parts.rows)
    return of_all + rest * (parts.rest / parts.rows) if parts.rest else of_all


def _put_back(attributes: dict[int, tuple[Any, dict[str, Any]]]) -> None:
    """Give layers the numbers and words that a call with all rows sets, such as their number."""
    for layer, values in attributes.values():
        now = vars(layer)
        now.update({name: each for name, each in values.items() if now.get(name) != each})


def prove(call: Call, trainable: Any, others: Any, parts: RowParts, size: int) -> Proof:
    """Prove that a call works row by row, at the numbers of rows that run.

    Args:
        call: The call.
        trainable: The values of the trainable variables.
        others: Those of the other variables.
        parts: The parts of its rows.
        size: The micro-batch size, for messages.

    Raises:
        UnsupportedModel: If it does not, or is not known to.
    """
    model = call.model
    _check(call)
    made: dict[int, _Made] = {}
    keys = PartKeys()

    def function(trainable: Any, others: Any, arrays: Any, fixed: Any, first: Any) -> Any:
        leaves = list(call.leaves)
        for position, leaf in fixed.items():
            leaves[position] = leaf
        rows = arrays[0][0].shape[0]
        made[rows] = _Made()
        with keys.drawn(rows, first):
            try:
                traced = replace(call, leaves=tuple(leaves))
                return traced.made(trainable, others, arrays, made[rows])
            except Exception as error:
                if rows == call.rows:
                    raise
                raise refused.fails_with_fewer_rows(model, rows, error) from error

    def arguments(rows: int) -> Any:
        def with_rows(array: Any) -> Any:
            return jax.ShapeDtypeStruct((rows, *array.shape[1:]), array.dtype)

        first = jax.ShapeDtypeStruct((), "uint32")
        values = jax.tree.map(_shape, (list(trainable), list(others), call.fixed))
        return *values[:2], jax.tree.map(with_rows, call.arrays), values[2], first

    found = trace_rows(function, arguments, parts.sizes)
    whole = made[call.rows]
    if any(one.changed != whole.changed or one.arrays != whole.arrays for one in made.values()):
        raise refused.not_by_rows(repr(model.name), "Its program differs for fewer rows")
    changed = [model.non_trainable_variables[n] for n in whole.changed]
    for label in jax.tree.leaves(found.outputs):
        if isinstance(label, Mixed):
            _refuse(model, label, size)
    for variable, label in zip(changed, found.state, strict=True):
        if not isinstance(label, Same):
            _refuse(model, label, size, variable)
    leaves = keras.tree.flatten(whole.outputs)
    outputs, masks = found.outputs
    for position, label in zip(whole.arrays, outputs, strict=True):
        if isinstance(label, Rows) and not label.joins:
            raise refused.has_no_rows(model, tuple(leaves[position].shape), call.rows)
    for label in found.terms:
        if isinstance(label, Mixed):
            raise refused.neither_sum_nor_mean(model, str(label))
    try:
        check_prng()
        for part in (parts.of_part(), parts.of_rest()):
            if part.rows:
                keys.settle(part, draws_by_rows(found.draws, parts.sizes, part.rows))
    except UnknownDraw as why:
        raise refused.cannot_draw(model, str(why)) from None
    return Proof(
        [isinstance(label, Rows) for label in outputs],
        [None if label is None else isinstance(label, Rows) for label in masks],
        [_rule(label) for label in found.terms],
        found.programs,
        not found.trusted,
        whole,
    )


def _shape(array: Any) -> Any:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _rule(term: Any) -> str:
    if isinstance(term, Same):
        return "same"
    return "mean" if term.is_mean else "sum"


def _check(call: Call) -> None:
    """Raise if a model cannot have parts of its rows, whatever its code is."""
    refused.check_rows(call.model)
    if any(map(_is_sparse, call.leaves)):
        raise refused.not_by_rows(repr(call.model.name), "It has sparse inputs")


def _refuse(model: Any, label: Mixed, size: int, variable: Any = None) -> None:
    """Raise the error for what depends on several rows."""
    norm = refused.training_batch_norm(model, label.place.layer)
    if norm is None and variable is not None:
        norm = refused.training_batch_norm(model, variable.path)
    if norm is not None:
        raise refused.needs_all_rows(norm, size)
    if variable is not None:
        raise refused.changes_by_rows(variable)
    raise refused.not_by_rows(refused.layer_in_words(model, label.place.layer), str(label))
