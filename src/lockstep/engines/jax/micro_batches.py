"""The call of a model in parts of its rows, inside a step.

A step calls `model.stateless_call` once: rows in, outputs out. Here that call runs in parts. Each
part is a step of a `jax.lax.scan` whose body is `jax.checkpoint`ed, so the backward pass computes
the activations of a part again, and no more than one part has its activations at a time. What a
step does with the outputs (loss, gradient with respect to them, metrics, optimizer) is Keras's code
on the global batch.

The model is followed first: see `lockstep.engines.jax.rowtrace`. What does not work row by row is
refused before the first update.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.experimental import sparse
from jax.sharding import NamedSharding, PartitionSpec

from lockstep.devices import micro_batches
from lockstep.engines import micro_batches as refused
from lockstep.engines.jax.first_rows import compare_first_rows
from lockstep.engines.jax.loss_values import (
    LossValues,
    NoValues,
    OutputsWithValues,
    given_to_metrics,
)
from lockstep.engines.jax.row_draws import (
    Draws,
    PartRows,
    UnknownDraw,
    check_prng,
    drawn_for,
    draws_by_rows,
    numbered_keys,
)
from lockstep.engines.jax.rowtrace.row_labels import Mixed, Rows, Same
from lockstep.engines.jax.rowtrace.row_trace import trace_rows
from lockstep.engines.jax.steps.live_state import Program, State
from lockstep.engines.jax.steps.padded import is_padded
from lockstep.engines.jax.steps.step import StepFunction
from lockstep.engines.jax.steps.steps import Steps
from lockstep.engines.patched import patched
from lockstep.errors import UnsupportedModel
from lockstep.fit_lines import arguments_of
from lockstep.keras_compat import UPDATE_METRICS, get_keras_mask, layers_in, set_keras_mask
from lockstep.state import stateful_layers
from lockstep.training.overrides import is_keras
from lockstep.training.session import TRAIN, Kind

Step = Callable[..., Any]

_AT_ONCE = "_lockstep_at_once"
"""The attribute of a model whose steps run all rows of a device at once."""


def all_rows_at_once(model: Any) -> AbstractContextManager[None]:
    """Let the steps that are traced inside the context run all rows of a device at once."""
    return patched([(model, _AT_ONCE, True)])


class MicroBatches:
    """Runs one model on at most `size` rows of a device at once, inside its steps.

    Args:
        model: The model.
        steps: Its steps over the mesh.
        size: The most rows that a device runs at once.
    """

    def __init__(self, model: Any, steps: Steps, size: int) -> None:
        self._model, self._steps, self._size = model, steps, size
        self._in_step = False
        self._values: LossValues | None = None  # that the next call of the model is to compute

    def methods(self, stateless_call: Callable[..., Any]) -> dict[str, Any]:
        """Return the methods to replace on the model.

        Args:
            stateless_call: The method of that name, for all rows at once.
        """
        methods = {"stateless_call": self._stateless_call(stateless_call)}
        name = "compute_loss_and_updates"
        if is_keras(self._model, name) and is_keras(self._model, UPDATE_METRICS):
            methods[name] = self._compute_loss_and_updates(getattr(self._model, name))
            methods[UPDATE_METRICS] = self._update_metrics(getattr(self._model, UPDATE_METRICS))
        return methods

    def step(self, step: Step) -> Step:
        """Return a step whose calls of the model run in parts."""

        @wraps(step)
        def step_in_parts(*args: Any, **kwargs: Any) -> Any:
            try:
                with self._running(True):
                    return step(*args, **kwargs)
            except jax.errors.UnexpectedTracerError as error:
                raise refused.keeps_a_tensor(self._model, self._size) from error

        return step_in_parts

    def check(self, *, compiled: bool, layers: list[Any]) -> None:
        """Raise if a step runs operation by operation."""
        if not compiled:
            raise refused.not_compiled(self._model, self._size, layers)

    def checked(self, made: StepFunction, kind: Kind) -> StepFunction:
        """Return a step function that compares the first rows in parts with them at once.

        It does so before the first step with batches of a form.
        """
        known: set[str] = set()

        def check(program: Program, state: State, batch: Any) -> Any:
            is_stacked = program is not made.run
            arrays = jax.tree.map(_array_of, batch, is_leaf=is_padded)
            start = 2 if is_stacked else 1
            form = str(jax.tree.map(lambda each: (str(each.dtype), each.shape[start:]), arrays))
            if made.check_program is not None:
                placed = made.check_program(program, state, batch)
            else:
                placed = batch
                jax.eval_shape(program, state, batch)  # what is refused, for the rows that run
            if form not in known and self._compare(kind, state, batch, is_stacked):
                known.add(form)
            return placed

        return replace(made, check_program=check)

    @contextmanager
    def _running(self, in_step: bool) -> Iterator[None]:
        before, self._in_step = self._in_step, in_step
        try:
            yield
        finally:
            self._in_step = before

    def _stateless_call(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return the model's `stateless_call`, in parts while a step is traced."""
        self._plain = plain

        @wraps(plain)
        def stateless_call(
            trainable: Any, others: Any, *args: Any, return_losses: bool = False, **kwargs: Any
        ) -> Any:
            at_once = partial(plain, return_losses=return_losses)
            call = _Call.of(self._model, at_once, return_losses, args, kwargs)
            cuts = self._in_step and call.rows and _AT_ONCE not in vars(self._model)
            parts = self._parts(call.rows) if cuts else None
            if parts is None:
                return at_once(trainable, others, *args, **kwargs)
            values, self._values = self._values, None
            with self._running(False):  # a model may call itself
                if values is not None:
                    both = partial(values.call, at_once)
                    more = kwargs | {"targets": values.targets}
                    wide = _Call.of(self._model, both, return_losses, args, more)
                    with suppress(NoValues, UnsupportedModel):  # a loss that needs all rows
                        outputs, *rest = _run(wide, trainable, others, parts, self._size)
                        return values.take(outputs), *rest
                return _run(call, trainable, others, parts, self._size)

        return stateless_call

    def _compute_loss_and_updates(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return the model's `compute_loss_and_updates`: parts compute the values of losses."""

        @wraps(plain)
        def compute_loss_and_updates(*args: Any, **kwargs: Any) -> Any:
            given = arguments_of(plain, args, kwargs)
            training = bool(given.get("training"))
            values = LossValues(self._model, given.get("y"), is_differentiated=training)
            if not (self._in_step and values.are_possible()):
                return plain(*args, **kwargs)
            self._values = values
            try:
                with values.given_to_losses():
                    loss, (unscaled, outputs, *rest) = plain(*args, **kwargs)
            finally:
                self._values = None
            return loss, (unscaled, values.carried(outputs), *rest)

        return compute_loss_and_updates

    def _update_metrics(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return Keras's update of the metrics of a step, with values that parts have computed."""

        @wraps(plain)
        def update_metrics(*args: Any) -> Any:
            found = next((each for each in args if isinstance(each, OutputsWithValues)), None)
            if found is None:
                return plain(*args)
            args = tuple(each.outputs if each is found else each for each in args)
            with given_to_metrics(self._model, found):
                return plain(*args)

        return update_metrics

    def _compare(self, kind: Kind, state: State, batch: Any, is_stacked: bool) -> bool:
        """Compare the first rows in two parts with them at once; return `False` without parts."""
        data = jax.tree.map(partial(_step_of, is_stacked), batch, is_leaf=is_padded)
        x = keras.utils.unpack_x_y_sample_weight(data)[0]
        every = [leaf for leaf in jax.tree.leaves(x, is_leaf=is_padded) if _rows_of(leaf)]
        rows = _rows_of(every[0]) if every else 0
        if not rows or self._parts(rows) is None:
            return False
        count = min(rows, max(2, self._size))
        parts = _Parts(count, 1, -(-count // 2), self._steps.replicated)

        def first(leaf: Any) -> Any:
            array = _array_of(leaf)
            return array[:count] if _rows_of(leaf) == rows else array

        def in_parts(tv: Any, ntv: Any, x: Any, **kwargs: Any) -> Any:
            given = kwargs.pop("return_losses")
            call = _Call.of(self._model, partial(plain, return_losses=given), given, (x,), kwargs)
            return _run(call, tv, ntv, parts, self._size)

        plain = self._plain
        values = state[0], state[1], jax.tree.map(first, x, is_leaf=is_padded)
        if not is_keras(self._model, f"{kind.name}_step") and not _takes(plain, values):
            return True  # a step of the user's own calls the model with something else
        compare_first_rows(self._model, plain, in_parts, values, self._size, trains=kind is TRAIN)
        return True

    def _parts(self, rows: int) -> "_Parts | None":
        """Return how a batch is cut, `None` if each device runs all of its rows at once."""
        steps = self._steps
        devices = 1 if steps.is_whole else len(steps.devices)
        number, each = micro_batches(rows, devices, self._size)
        if number == 1:
            return None
        layout = steps.replicated if steps.is_whole or devices == 1 else steps.by_rows
        return _Parts(rows, devices, each, layout)


def _step_of(is_stacked: bool, leaf: Any) -> Any:
    """Return an array of a batch, of the first one if several are stacked."""
    if not is_stacked:
        return leaf
    return replace(leaf, padded=leaf.padded[0]) if is_padded(leaf) else leaf[0]


def _array_of(leaf: Any) -> Any:
    return leaf.padded if is_padded(leaf) else leaf


def _rows_of(leaf: Any) -> int:
    """Return the rows of an array of a batch, 0 without any."""
    if is_padded(leaf):
        return int(leaf.rows)
    return int(leaf.shape[0]) if getattr(leaf, "ndim", 0) else 0


def _takes(call: Callable[..., Any], values: tuple[Any, ...]) -> bool:
    """Return whether a model can be called with these inputs."""
    try:
        jax.eval_shape(call, *values)
    except Exception:  # the code of the model may raise anything
        return False
    return True


@dataclass(frozen=True)
class _Parts:
    """How the rows of a batch are cut into parts.

    Where all parts have as many rows, part j has the j-th block of each device, and no row moves.
    Otherwise parts are consecutive rows, and the last one has those that remain.

    Attributes:
        rows: The rows of the batch.
        devices: The devices over which they are split.
        each: The rows of a device in a part.
        layout: The layout of arrays by rows.
    """

    rows: int
    devices: int
    each: int
    layout: NamedSharding

    @property
    def size(self) -> int:
        """The rows of a part."""
        return self.devices * self.each

    @property
    def full(self) -> int:
        """The number of parts with `size` rows."""
        return self.rows // self.size

    @property
    def rest(self) -> int:
        """The rows of the last part; 0 if all parts have as many."""
        return self.rows % self.size

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of rows of the programs: of the batch, of a part, of the last part."""
        sizes = {self.rows, self.size, self.rest or self.size}
        return tuple(sorted(sizes, reverse=True))

    def of_part(self) -> PartRows:
        """Return the rows of a part, for its draws."""
        if self.rest:
            return PartRows(self.size, self.rows, self.size, self.size)
        return PartRows(self.size, self.rows, self.each, self.full * self.each)

    def of_rest(self) -> PartRows:
        """Return the rows of the last part, for its draws."""
        return PartRows(self.rest, self.rows, self.rest, self.rest)

    def firsts(self) -> Any:
        """Return the number of the first row of each full part."""
        step = self.size if self.rest else self.each
        return jnp.arange(self.full, dtype="uint32") * jnp.uint32(step)

    def cut(self, array: Any) -> Any:
        """Return the rows of the full parts; the part is the first dim."""
        array = array[: self.full * self.size]
        if self.rest or self.devices == 1:
            return self.laid_out(array.reshape(self.full, self.size, *array.shape[1:]), 1)
        blocks = array.reshape(self.devices, self.full, self.each, *array.shape[1:])
        parts = self.laid_out(jnp.swapaxes(self.laid_out(blocks, 0), 0, 1), 1)
        return self.laid_out(parts.reshape(self.full, self.size, *array.shape[1:]), 1)

    def joined(self, parts: Any, rest: Any) -> Any:
        """Return all rows of an array, in order, from those of `cut` and of the last part."""
        each, others = parts.shape[1] // self.devices, parts.shape[2:]
        if not self.rest and self.devices > 1:
            blocks = parts.reshape(self.full, self.devices, each, *others)
            parts = self.laid_out(jnp.swapaxes(self.laid_out(blocks, 1), 0, 1), 0)
        joined = parts.reshape(self.full * self.devices * each, *others)
        if self.rest:
            joined = jnp.concatenate([joined, rest])
        return self.laid_out(joined, 0)

    def laid_out(self, array: Any, dim: int) -> Any:
        """Return the array with its rows, in this dim, split over the devices."""
        if self.layout.is_fully_replicated:
            return array
        spec = PartitionSpec(*[None] * dim, *self.layout.spec)
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.layout.mesh, spec))


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
class _Call:
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
    ) -> "_Call":
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
class _Proof:
    """What is known of a call: how its results are made of those of parts.

    Attributes:
        outputs: For each output, whether it has rows; else it is the same for all rows.
        masks: The same of their masks, `None` without one.
        losses: For each loss `"same"`, `"sum"` or `"mean"`.
        draws: The draws of a part, by its number of rows.
        whole: What the call makes with all rows, besides arrays.
    """

    outputs: list[bool]
    masks: list[bool | None]
    losses: list[str]
    draws: dict[int, Draws]
    whole: _Made


def _run(call: _Call, trainable: Any, others: Any, parts: _Parts, size: int) -> Any:
    """Call a model in parts of its rows."""
    proof = _proof(call, trainable, others, parts, size)
    made = _Made()

    def part(arrays: Any, first: Any, rows: PartRows) -> Any:
        with drawn_for(rows, first, proof.draws[rows.rows]):
            return call.made(trainable, others, arrays, made)

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
        last = partial(part, first=start, rows=parts.of_rest())
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


def _loss(parts: _Parts, rule: str, many: Any, rest: Any) -> Any:
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


def _proof(call: _Call, trainable: Any, others: Any, parts: _Parts, size: int) -> _Proof:
    """Prove that a call works row by row, at the numbers of rows that run.

    Raises:
        UnsupportedModel: If it does not, or is not known to.
    """
    model = call.model
    _check(call, size)
    made: dict[int, _Made] = {}

    def function(trainable: Any, others: Any, arrays: Any, rest: Any) -> Any:
        leaves = list(call.leaves)
        for position, leaf in rest.items():
            leaves[position] = leaf
        rows = arrays[0][0].shape[0]
        made[rows] = _Made()
        with numbered_keys():
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

        pairs = enumerate(call.leaves)
        fixed = {n: leaf for n, leaf in pairs if isinstance(leaf, jax.Array)}
        for position in call.positions:
            fixed.pop(position, None)
        values = jax.tree.map(_shape, (list(trainable), list(others), fixed))
        return *values[:2], jax.tree.map(with_rows, call.arrays), values[2]

    found = trace_rows(function, arguments, parts.sizes)
    whole = made[call.rows]
    if any(one.changed != whole.changed or one.arrays != whole.arrays for one in made.values()):
        raise refused.not_by_rows(repr(model.name), "It is another program for fewer rows")
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
        sizes = {rows: draws_by_rows(found.draws, parts.sizes, rows) for rows in parts.sizes[1:]}
    except UnknownDraw as why:
        raise refused.cannot_draw(model, str(why)) from None
    return _Proof(
        [isinstance(label, Rows) for label in outputs],
        [None if label is None else isinstance(label, Rows) for label in masks],
        [_rule(label) for label in found.terms],
        sizes,
        whole,
    )


def _shape(array: Any) -> Any:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _rule(term: Any) -> str:
    if isinstance(term, Same):
        return "same"
    return "mean" if term.is_mean else "sum"


def _check(call: _Call, size: int) -> None:
    """Raise if a model cannot have parts of its rows, whatever its code is."""
    model = call.model
    for layer in stateful_layers(model):
        raise refused.is_stateful(layer)
    if any(map(_is_sparse, call.leaves)):
        raise refused.not_by_rows(repr(model.name), "It has sparse inputs")
    shapes = getattr(model, "inputs", None) or ()
    fixed = {each.shape[0] for each in keras.tree.flatten(shapes) if each.shape} - {None}
    for rows in fixed:
        raise refused.has_fixed_rows(model, rows)


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
