"""Whether a function of a batch works row by row: the proof that it can run in parts.

The function is traced for each number of rows that runs. A dim whose size differs between the
traces is made of rows. All traces are walked in step: they must have the same operations, with the
same parameters, wired alike. Each value gets a label, by a rule for its operation. An operation
without a rule never accepts rows.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxpr_as_fun

from lockstep.engines.jax.jax_compat import HIGH, expanded, parameters, scan_counts
from lockstep.engines.jax.rowtrace.own_gradients import (
    OwnGradient,
    has_gradient,
    is_of_frameworks_alone,
)
from lockstep.engines.jax.rowtrace.places import place_of
from lockstep.engines.jax.rowtrace.primitive_rules import (
    CALLS,
    FOLLOWED,
    NO_RULE,
    OTHER_ROWS,
    RANDOM_DRAWS,
    by_rule,
    has_rule,
    is_known,
    of_numbers,
)
from lockstep.engines.jax.rowtrace.row_labels import (
    COLUMNS,
    DATA,
    FALSE,
    NUMBER,
    SAME,
    UNIFORM,
    Count,
    Draw,
    Label,
    Mixed,
    Place,
    Row,
    Rows,
    RowsMeet,
    RowTrace,
    Same,
    Total,
    aligned,
    changeable,
    in_one_step,
    joined,
)
from lockstep.engines.jax.rowtrace.traced_operation import (
    BY_COUNT,
    Operation,
    compare_parameters,
    compare_sizes,
    dims_of_rows,
    known_values,
    named,
    rows_of_shapes,
    shape_of,
)
from lockstep.errors import UnsupportedFramework

_LINEAR = named(
    """
    broadcast_in_dim convert_element_type copy copy_p expand_dims name neg reduce_sum reshape rev
    slice squeeze transpose
    """
)
"""Operations of one operand that give the sum of the results for the sum of the operands."""

_EVALUATED = named(
    """
    add and convert_element_type div eq ge gt integer_pow le lt max min mul ne neg not or pow rem
    rsqrt sign sqrt square sub
    """
)
"""Operations that are computed if all operands are scalars made of the number of rows."""

_OTHER_PROGRAM = "is a different program for a different number of rows"


def trace_rows(
    function: Callable[..., tuple[Any, Any, Any]],
    arguments: Callable[[int], tuple[Any, ...]],
    sizes: Sequence[int],
) -> RowTrace:
    """Follow the rows of a batch through a function.

    What is accepted holds for the given numbers of rows: a function that is the same program for
    these may be another one for a further number. Gradients of what is accepted are by rows too,
    and those of values that are the same for all rows are sums over rows: a rule of the user's own
    for a gradient is followed as well. No array is computed, except scalars made of the sizes.

    Args:
        function: Returns outputs, scalar loss terms, and the state that it changes. Each is a tree.
        arguments: Returns the function's arguments for a number of rows: arrays, or
            `jax.ShapeDtypeStruct`. An argument that has another shape for other rows has rows.
        sizes: The numbers of rows that run: of the whole, of a part, of a last part. At least two
            of them must differ.

    Returns:
        The labels of the results, the random draws, and the programs that this holds for.

    Example:
        >>> shape = jax.ShapeDtypeStruct
        >>> found = trace_rows(
        ...     lambda x: (x - x.mean(0), [jnp.mean(x**2)], []),
        ...     lambda rows: (shape((rows, 3), "float32"),),
        ...     sizes=(8, 4),
        ... )
        >>> print(found.outputs.place.operation, found.outputs.why, found.terms[0].is_mean)
        reduce_sum over rows, then sub True
    """
    sizes = tuple(sorted({*sizes}, reverse=True))
    if len(sizes) < 2:
        raise ValueError(f"rows can be told from other dims by two sizes, not by {sizes}")
    given = [arguments(rows) for rows in sizes]
    traced = [jax.make_jaxpr(function, return_shape=True)(*each) for each in given]
    walk = _Walk(sizes)
    nowhere = Place("", "an argument", "")
    leaves = zip(*map(jax.tree.leaves, given), strict=True)
    labels = [walk.made(map(np.shape, each), DATA, nowhere) for each in leaves]
    _, tree = traced[0]
    structure: Any = jax.tree.structure(tree)
    if any(jax.tree.structure(other) != structure for _, other in traced):
        mixed = [Mixed(Place("", "the structure of the outputs", ""), _OTHER_PROGRAM)]
        results: list[Label] = mixed * structure.num_leaves
    else:
        results = walk.follow([program for program, _ in traced], labels, nowhere)
    outputs, terms, state = jax.tree.unflatten(structure, results)
    return RowTrace(
        jax.tree.map(_as_output, outputs),
        jax.tree.map(_as_term, terms),
        jax.tree.map(_as_state, state),
        tuple(walk.draws),
        tuple(walk.trusted),
        {
            rows: partial(_run, program, structure)
            for rows, (program, _) in zip(sizes, traced, strict=True)
        },
    )


def _run(program: Any, structure: Any, *arguments: Any) -> Any:
    """Run a function as it was traced."""
    results = jaxpr_as_fun(program)(*jax.tree.leaves(arguments))
    return jax.tree.unflatten(structure, results)


def _as_output(label: Label) -> Label:
    if isinstance(label, Rows) and label.content not in (NUMBER, COLUMNS):
        return Rows(label.dim, label.outer, label.each)
    return label if isinstance(label, Same | Mixed) else _mixed(label, "an output")


def _as_term(label: Label) -> Label:
    if isinstance(label, Total) and (label.is_sum or label.is_mean):
        return label
    return label if isinstance(label, Same | Mixed) else _mixed(label, "a loss term")


def _as_state(label: Label) -> Label:
    return label if isinstance(label, Same | Mixed) else _mixed(label, "a variable")


def _mixed(label: Label, subject: str) -> Mixed:
    """Return the label of a result that may not have this label."""
    if isinstance(label, Total):
        return Mixed(label.place, "over rows")
    number = isinstance(label, Rows) and label.content != DATA
    why = "contains the indices of the rows" if number else "has an entry for each row"
    return Mixed(Place("", subject, ""), BY_COUNT if isinstance(label, Count) else why)


class _Walk:
    """The walk through the traces of one function.

    Attributes:
        sizes: The numbers of rows, in descending order.
        draws: The random draws found so far.
        trusted: The operations of `RowTrace.trusted` found so far.
    """

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.draws: list[Draw] = []
        self.trusted: dict[Place, None] = {}
        self._derivatives = 0

    # ------------------------------------------------------------------------------- values

    def made(self, shapes: Iterable[tuple[int, ...]], content: str, place: Place) -> Label:
        """Return the label of an array whose rows its sizes alone show."""
        try:
            return rows_of_shapes(list(shapes), self.sizes, content) or SAME
        except RowsMeet as why:
            return Mixed(place, str(why))

    def _constant(self, values: Sequence[Any], place: Place) -> Label:
        if all(value is values[0] for value in values) and np.ndim(values[0]):
            return SAME
        if any(not getattr(value, "is_fully_addressable", True) for value in values):
            return Mixed(place, "is a different array for a different number of rows")
        arrays = [np.asarray(_plain(value)) for value in values]
        shapes, first = [array.shape for array in arrays], arrays[0]
        if all(shape == first.shape for shape in shapes):
            if all(a.dtype == first.dtype and a.tobytes() == first.tobytes() for a in arrays):
                return SAME if first.ndim else Same(first)
            return Count(None if first.ndim else tuple(arrays))
        made = self.made(shapes, UNIFORM, place)
        if not isinstance(made, Rows):
            return made
        along = [np.moveaxis(array, made.dim, -1) for array in arrays]
        value = along[0][..., :1]
        if all(np.array_equal(array, np.broadcast_to(value, array.shape)) for array in along):
            return made
        numbers = all(np.all(array == np.arange(array.shape[-1])) for array in along)
        if made.each == 1 and numbers:
            return replace(made, content=NUMBER)
        return Mixed(place, "has a different constant for each row")

    def _fitting(self, label: Label, shapes: Sequence[tuple[int, ...]], place: Place) -> Label:
        """Return a label if the sizes are those of the label: a check of every rule."""
        if isinstance(label, Mixed):
            return label
        if len({len(shape) for shape in shapes}) > 1:
            return Mixed(place, "creates as many dims as there are rows")
        dims = dims_of_rows(shapes)
        if isinstance(label, Rows):
            sizes = [shape[label.dim] for shape in shapes] if dims == [label.dim] else []
            if sizes == [rows * label.outer * label.each for rows in self.sizes]:
                return label
            return Mixed(place, "has sizes that do not match its rows")
        return Mixed(place, BY_COUNT) if dims else label

    # ----------------------------------------------------------------------------- programs

    def follow(
        self, programs: Sequence[Any], labels: Sequence[Label], caller: Place
    ) -> list[Label]:
        """Return the labels of a program's results.

        Args:
            programs: The program as traced for each number of rows.
            labels: The labels of its inputs.
            caller: The operation that calls it.
        """
        jaxprs = [getattr(program, "jaxpr", program) for program in programs]
        first, unlike = jaxprs[0], replace(caller, operation="the program")
        inputs = [(*jaxpr.constvars, *jaxpr.invars) for jaxpr in jaxprs]
        if len({(len(x.outvars), len(y)) for x, y in zip(jaxprs, inputs, strict=True)}) > 1:
            return [Mixed(unlike, _OTHER_PROGRAM)] * len(first.outvars)
        constants = zip(*(getattr(program, "consts", ()) for program in programs), strict=True)
        given = [*(self._constant(each, caller) for each in constants), *labels]
        variables = zip(*inputs, strict=True)
        known = {each[0]: (each, label) for each, label in zip(variables, given, strict=True)}

        def read(atoms: Sequence[Any], place: Place) -> Label:
            if all(isinstance(atom, Literal) for atom in atoms):
                return self._constant([atom.val for atom in atoms], place)
            if not isinstance(atoms[0], Literal):
                twins, label = known[atoms[0]]
                if all(map(operator.is_, twins, atoms)):
                    return label
            return Mixed(place, _OTHER_PROGRAM)

        for equations in self._in_step(jaxprs, known):
            place = place_of(equations[0], caller)
            made: list[Label] = [Mixed(place, _OTHER_PROGRAM)] * len(equations[0].outvars)
            if len({each.primitive.name for each in equations}) > 1 or len(equations) < len(jaxprs):
                return [Mixed(place, _OTHER_PROGRAM)] * len(first.outvars)
            if len({(len(each.invars), len(each.outvars)) for each in equations}) == 1:
                operands = zip(*(each.invars for each in equations), strict=True)
                read_labels = [read(atoms, place) for atoms in operands]
                made = self._operation(Operation(equations, read_labels, self.sizes, place))
            results = zip(*(each.outvars for each in equations), strict=False)
            pairs = zip(results, made, strict=True)
            known.update({each[0]: (each, label) for each, label in pairs})
        outputs = zip(*(jaxpr.outvars for jaxpr in jaxprs), strict=True)
        return [read(atoms, unlike) for atoms in outputs]

    def _in_step(
        self, jaxprs: Sequence[Any], known: dict[Any, tuple[tuple[Any, ...], Label]]
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the equations of all traces together; fewer than traces if they do not match.

        JAX leaves out a broadcast to one row. Its result is then its operand.
        """
        left = [list(reversed(jaxpr.eqns)) for jaxpr in jaxprs]
        while any(left):
            if self.sizes[-1] == 1 and all(left[:-1]) and (twin := self._left_out(left, known)):
                equations = [each.pop() for each in left[:-1]]
                results = (*(each.outvars[0] for each in equations), twin)
                label, place = known[equations[0].invars[0]][1], Place("", "broadcast_in_dim", "")
                if isinstance(label, Same):
                    label = self.made(map(shape_of, results), UNIFORM, place)
                elif not isinstance(label, Mixed):
                    label = Mixed(place, _OTHER_PROGRAM)
                known[results[0]] = (results, label)
                continue
            yield tuple(each.pop() for each in left if each)

    def _left_out(self, left: Sequence[list[Any]], known: dict[Any, Any]) -> Any:
        """Return the operand of the next broadcast if the trace for one row has none."""
        heads = [each[-1] for each in left if each]
        first, last = heads[0], heads[-1]
        operand = first.invars[0] if first.invars else None
        if any(each.primitive.name != "broadcast_in_dim" for each in heads[: len(left) - 1]):
            return None
        if isinstance(operand, Literal) or operand not in known:
            return None
        twin = known[operand][0][-1]
        has_it = len(heads) == len(left) and last.primitive.name == "broadcast_in_dim"
        if has_it and last.invars[0] is twin:
            return None
        dims, old, new = (
            parameters(first)["broadcast_dimensions"],
            shape_of(twin),
            shape_of(first.outvars[0]),
        )
        sizes = zip(old, new, strict=True) if len(old) == len(new) else [(0, 1)]
        one_row = all(size in (into, into // self.sizes[0]) for size, into in sizes)
        return twin if one_row and tuple(dims) == tuple(range(len(old))) else None

    # --------------------------------------------------------------------------- operations

    def _operation(self, operation: Operation) -> list[Label]:
        """Return the label of each result of an operation."""
        count = len(operation.equations[0].outvars)
        try:
            if operation.rows and not has_rule(operation.name):
                raise RowsMeet(NO_RULE)
            compare_parameters(operation, followed=operation.name in FOLLOWED)
            made = self._label(operation)
        except RowsMeet as why:
            made = Mixed(operation.place, str(why))
        except UnsupportedFramework:
            made = Mixed(operation.place, f"cannot be analyzed with JAX {jax.__version__}")
        labels = made if isinstance(made, list) else [made] * count
        shapes = map(operation.made, range(count))
        fitting = partial(self._fitting, place=operation.place)
        return [fitting(*each) for each in zip(labels, shapes, strict=True)]

    def _label(self, operation: Operation) -> Label | list[Label]:
        name, labels, kinds = operation.name, operation.labels, {*map(type, operation.labels)}
        if name in CALLS:
            return self._call(operation)
        if loop := {"scan": self._scan, "while": self._while, "cond": self._cond}.get(name):
            return loop(operation)
        if name == "optimization_barrier":
            return labels
        if not is_known(operation):
            self.trusted[operation.place] = None
        if name == "custom_linear_solve":
            return self._linear_solve(operation)
        if operation.equations[0].effects and operation.equations[0].outvars:
            raise RowsMeet("has side effects")
        if name == "select_n" and (chosen := _chosen(labels[0])) is not None:
            return labels[1 + chosen]
        if Mixed in kinds:
            return next(label for label in labels if isinstance(label, Mixed))
        if name in RANDOM_DRAWS and kinds <= {Same, Rows} and isinstance(labels[0], Same):
            return self._draw(operation)
        if Total in kinds:
            return self._total(operation)
        if any(label.content in (NUMBER, COLUMNS) for label in operation.rows):
            if kinds <= {Same, Rows, Count}:
                return of_numbers(operation)
            raise RowsMeet(OTHER_ROWS)
        if name in _EVALUATED and (values := known_values(operation)):
            with jax.ensure_compile_time_eval():
                params = operation.params
                primitive = operation.equations[0].primitive
                results = tuple(np.asarray(primitive.bind(*each, **params)) for each in values)
            same = all(result == results[0] for result in results)
            return Same(results[0]) if same else Count(results)
        if Count in kinds:
            if kinds <= {Same, Count}:
                return Count()
            raise RowsMeet(BY_COUNT)
        if Row in kinds:
            return self._of_one_row(operation)
        return by_rule(operation) if Rows in kinds else self._of_same(operation)

    def _of_one_row(self, operation: Operation) -> Label:
        rows = {label for label in operation.labels if not isinstance(label, Same)}
        if len(rows) > 1:
            raise RowsMeet(OTHER_ROWS)
        if not has_rule(operation.name):
            raise RowsMeet(NO_RULE)
        compare_sizes(operation)
        return rows.pop()

    def _of_same(self, operation: Operation) -> Label | list[Label]:
        """Return the label of results whose operands are the same for all rows."""
        shapes = [operation.made(n) for n in range(len(operation.equations[0].outvars))]
        if not any(len({*each}) > 1 for each in shapes):
            compare_sizes(operation)
            return SAME
        if operation.name not in ("broadcast_in_dim", "iota", "tile"):
            raise RowsMeet("creates an array with one entry per row")
        made = rows_of_shapes(shapes[0], self.sizes, UNIFORM)
        if made and operation.name == "iota" and made.dim == operation.params["dimension"]:
            if made.each > 1:
                raise RowsMeet("creates more numbers than there are rows")
            return replace(made, content=NUMBER)
        if made and operation.name == "tile" and operation.shape(0)[made.dim] > 1:
            return replace(made, content=DATA)
        return made or SAME

    def _draw(self, operation: Operation) -> Label | list[Label]:
        shapes = [operation.made(n) for n in range(len(operation.equations[0].outvars))]
        found = [rows_of_shapes(each, self.sizes, DATA) for each in shapes]
        rows = next((each for each in found if each), None)
        bits = operation.params.get("bit_width")
        key = operation.equations[0].invars[0].aval
        drawn = tuple(tuple(shape[len(key.shape) :]) for shape in shapes[-1])
        self.draws.append(Draw(operation.place, rows, str(key.dtype), drawn, bits))
        if not operation.rows:
            return [each or SAME for each in found]
        return [aligned([each, *operation.rows]) if each else SAME for each in found]

    def _total(self, operation: Operation) -> Label:
        """Return the label of an operation on sums over rows: such a sum if it is linear."""
        name, labels = operation.name, operation.labels
        totals = [label for label in labels if isinstance(label, Total)]
        others = [label for label in labels if not isinstance(label, Total)]
        first, alone = totals[0], all(isinstance(label, Same) for label in others)
        exact = jnp.issubdtype(operation.equations[0].outvars[0].aval.dtype, jnp.inexact)
        if name in _LINEAR and len(labels) == 1 and (exact or name != "convert_element_type"):
            return first
        added = name in ("add", "sub", "add_any") and all(x.power == first.power for x in totals)
        if added and (not others or (alone and first.is_mean)):
            return first
        if name == "dot_general" and len(totals) == 1 and alone:
            return first
        if name == "mul" or (name == "div" and exact and isinstance(labels[0], Total)):
            if len(totals) == 1 and alone:
                return first
            if len(totals) == 1 and isinstance(count := others[0], Count) and count.values:
                for power in (1, -1):
                    pairs = zip(count.values, self.sizes, strict=True)
                    each = [float(value) / rows**power for value, rows in pairs]
                    if exact and np.allclose(each, each[0], rtol=1e-6, atol=0):
                        change = power if name == "mul" else -power
                        return replace(first, power=first.power + change)
        return Mixed(first.place, f"over rows, then {name}")

    # -------------------------------------------------------------------- calls and gradients

    def _call(self, operation: Operation) -> list[Label]:
        if operation.name == HIGH:
            programs = tuple(map(expanded, operation.equations))
        else:
            keys = ("call_jaxpr", "fun_jaxpr")
            key = next((key for key in keys if key in operation.params), "jaxpr")
            programs = operation.param(key)
        results = self.follow(programs, operation.labels, operation.place)
        mixed = any(isinstance(label, Mixed) for label in (*operation.labels, *results))
        own = operation.name.startswith("custom_")
        if operation.name == HIGH:
            own = any(map(has_gradient, operation.equations[0].outvars))
        if own and not is_of_frameworks_alone(operation, programs):
            self.trusted[operation.place] = None
        # The gradient of a gradient is followed too; one that calls itself would not end.
        if own and not mixed and self._derivatives < 2:
            self._check_gradient(operation, results, programs)
        elif mixed and not all(isinstance(label, Mixed) for label in results):
            self.trusted[operation.place] = None
        return results

    def _check_gradient(
        self, operation: Operation, results: list[Label], programs: Sequence[Any]
    ) -> None:
        """Follow the gradient that a function has of its own.

        Raises:
            RowsMeet: If the gradient for a row depends on other rows, or that of a value that is
                the same for all rows is no sum over rows.
        """
        gradient = OwnGradient.of(operation, results, programs)
        count, self._derivatives = len(self.draws), self._derivatives + 1
        found = self.follow(gradient.programs, gradient.given, operation.place)
        self._derivatives -= 1
        del self.draws[count:]
        gradient.check(found)

    def _linear_solve(self, operation: Operation) -> list[Label]:
        lengths, labels = operation.params["const_lengths"], operation.labels
        given, start = labels[sum(lengths) :], 0
        found = []
        for length, *programs in zip(lengths, *operation.param("jaxprs"), strict=True):
            if programs[0] is not None:
                inputs = [*labels[start : start + length], *given]
                found.append(self.follow(programs, inputs, operation.place))
            start += length
        if any(each != found[0] for each in found):
            raise RowsMeet("solves with functions that depend on the rows in different ways")
        return found[0]

    # -------------------------------------------------------------------------------- loops

    def _scan(self, operation: Operation) -> list[Label]:
        params, labels, place = operation.params, operation.labels, operation.place
        lengths = operation.param("length")
        over_rows = any(length != lengths[0] for length in lengths)
        start, carried = scan_counts(operation.equations[0])
        stop = start + carried
        given = [in_one_step(label, place) for label in labels[stop:]]
        carry = [changeable(label) for label in labels[start:stop]]
        body, count = params["jaxpr"].jaxpr, len(self.draws)
        kept = [body.outvars[n] is body.invars[start + n] for n in range(stop - start)]
        while True:
            del self.draws[count:]
            inputs = [*labels[:start], *carry, *given]
            made = self.follow(operation.param("jaxpr"), inputs, place)
            after = [
                label if same else self._carried(label, new, over_rows, place)
                for label, new, same in zip(carry, made[: stop - start], kept, strict=True)
            ]
            if after == carry:
                break
            carry = after
        stacked = range(stop - start, len(made))
        return [*carry, *(self._stacked(made[n], operation.made(n), place) for n in stacked)]

    def _carried(self, label: Label, new: Label, over_rows: bool, place: Place) -> Label:
        after = joined(label, new, place)
        if isinstance(after, Row) or (over_rows and not isinstance(after, Mixed)):
            return Mixed(place, "carries values from row to row")
        return after

    def _stacked(self, label: Label, shapes: Sequence[tuple[int, ...]], place: Place) -> Label:
        """Return the label of what the steps of a loop return, one after the other."""
        if isinstance(label, Rows):
            return replace(label, dim=label.dim + 1)
        if isinstance(label, Row):
            return Rows(0, label.outer, label.each)
        return self.made(shapes, UNIFORM, place) if isinstance(label, Same) else changeable(label)

    def _while(self, operation: Operation) -> list[Label]:
        params, labels, place = operation.params, operation.labels, operation.place
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carry, count = [changeable(label) for label in labels[second:]], len(self.draws)
        while True:
            del self.draws[count:]
            inputs = [*labels[first:second], *carry]
            made = self.follow(operation.param("body_jaxpr"), inputs, place)
            inputs = [*labels[:first], *carry]
            (going,) = self.follow(operation.param("cond_jaxpr"), inputs, place)
            after = [joined(*each, place) for each in zip(carry, made, strict=True)]
            if not isinstance(going, Same):
                ends = "runs a number of steps that depends on the rows"
                end = going if isinstance(going, Mixed) else Mixed(place, ends)
                after = [label if isinstance(label, Mixed) else end for label in after]
            if after == carry:
                return carry
            carry = after

    def _cond(self, operation: Operation) -> list[Label]:
        index, *labels = operation.labels
        if isinstance(index, Mixed):
            return [index] * len(operation.equations[0].outvars)
        if not isinstance(index, Same):
            raise RowsMeet("selects a branch from the values of the rows")
        branches = zip(*operation.param("branches"), strict=True)
        made = [self.follow(each, labels, operation.place) for each in branches]
        found = made[0]
        for other in made[1:]:
            pairs = zip(found, other, strict=True)
            found = [joined(*pair, operation.place) for pair in pairs]
        return [changeable(label) for label in found] if len(made) > 1 else found


def _plain(value: Any) -> Any:
    """Return the numbers of a constant, of a random key too."""
    if jnp.issubdtype(getattr(value, "dtype", np.float32), jax.dtypes.prng_key):
        return jax.random.key_data(value)
    return value


def _chosen(label: Label) -> int | None:
    """Return the case that a predicate chooses for all rows, if it is known."""
    if isinstance(label, Rows):
        return 0 if label.content == FALSE else None
    return int(label.value) if isinstance(label, Same) and label.value is not None else None
