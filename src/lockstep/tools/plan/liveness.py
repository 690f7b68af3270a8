"""An estimate of the memory that a step needs beside its arguments, from its trace on JAX."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

MEDIAN_ERROR = 0.09
WORST_ERROR = (-0.19, 0.58)
"""Of the peak against what XLA compiles for GPUs; `benchmarks/plan_error.py` measures them."""

_CALLS = {"jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint"}
_CALLS |= {"custom_jvp_call", "custom_vjp_call"}
_LOOPS = {"scan", "while", "cond"}
_VIEWS = """
broadcast_in_dim copy expand_dims name reshape sharding_constraint squeeze transpose
"""
_COSTLY = "atan2 cbrt cos erf erf_inv erfc exp exp2 expm1 log log1p logistic pow sin tanh"
_CHEAP = """
abs add add_any and bitcast_convert_type ceil clamp concatenate convert_element_type div
dynamic_slice eq floor ge gt imag integer_pow iota is_finite le lt max min mul ne neg nextafter not
optimization_barrier or pad random_fold_in random_seed random_unwrap random_wrap real
reduce_precision rem rev round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical
sign slice split sqrt square stop_gradient sub xor
"""
_BY_ELEMENT = {*_VIEWS.split(), *_COSTLY.split(), *_CHEAP.split()}
_PRODUCT, _POOLING_GRADIENT = "dot_general", "select_and_scatter_add"

_FAR = 60
"""Operations to the last reader of a costly result, from which the result is stored."""


@dataclass(frozen=True)
class _Operation:
    name: str
    reads: list[int]
    writes: list[int]
    bodies: list["TracedProgram"]

    @property
    def by_element(self) -> bool:
        return self.name in _BY_ELEMENT

    @property
    def reads_memory(self) -> bool:
        """Whether it reads arrays from memory. A reduction can compute what it reads."""
        return not self.by_element and not self.name.startswith(("reduce_", "arg"))


@dataclass(frozen=True)
class _Kernel:
    """An operation, and operations by element that are computed in it.

    Attributes:
        operation: The operation.
        reads: The numbers of the arrays that it reads from memory.
        writes: The numbers of the arrays that it writes to memory.
        forms: For an array that it reads alone: its size in the form in which it is read.
    """

    operation: _Operation
    reads: set[int]
    writes: list[int]
    forms: dict[int, int]


class TracedProgram:
    """The arrays and the kernels of a program, as XLA could compile it for a GPU.

    Args:
        program: The jaxpr.
        longer: The jaxpr for twice as many rows. Arrays of another shape there are made of rows.
        state: The number of arrays that are the first inputs and, updated, the last outputs.
    """

    def __init__(self, program: Any, longer: Any, state: int = 0) -> None:
        self._arrays: list[tuple[int, bool]] = []
        operations: list[_Operation] = []
        known: dict[Any, int | None] = {}
        for pair in zip(_inputs(program), _inputs(longer), strict=True):
            self._add(known, *pair)
        self._arguments = set(range(len(self._arrays)))
        self._inline(program, longer, known, operations)
        results = [_read(known, each) for each in program.outvars]
        first, updated = len(program.constvars), results[len(results) - state :]
        self._state = list(zip(range(first, first + state), updated, strict=True))
        self._results = {each for each in results if each is not None} - self._arguments
        self._kernels = list(self._fused(operations))

    def _add(self, known: dict[Any, int | None], variable: Any, other: Any) -> int:
        known[variable] = number = len(self._arrays)
        value = variable.aval
        size = prod(value.shape) * getattr(value.dtype, "itemsize", 0)
        self._arrays.append((size, value.shape != other.aval.shape))
        return number

    def _inline(
        self, program: Any, longer: Any, known: dict[Any, int | None], found: list[_Operation]
    ) -> None:
        """Add the operations of a program and of those that it calls."""
        for each, other in zip(program.eqns, longer.eqns, strict=True):
            name = each.primitive.name
            reads = [_read(known, value) for value in each.invars]
            bodies = list(zip(_bodies(each), _bodies(other), strict=True))
            if name in _CALLS:
                ((body, longer_body),) = bodies
                inner = dict(zip(body.invars, reads, strict=True))
                for pair in zip(body.constvars, longer_body.constvars, strict=True):
                    self._add(inner, *pair)
                self._inline(body, longer_body, inner, found)
                returned = [_read(inner, value) for value in body.outvars]
                known.update(zip(each.outvars, returned, strict=True))
                continue
            made = zip(each.outvars, other.outvars, strict=True)
            writes = [self._add(known, *pair) for pair in made]
            programs = [TracedProgram(*pair) for pair in bodies] if name in _LOOPS else []
            arrays = [number for number in reads if number is not None]
            found.append(_Operation(name, arrays, writes, programs))

    def _fused(self, operations: Sequence[_Operation]) -> Iterator[_Kernel]:
        """Yield the kernels, in order.

        The result of an operation by element is computed where it is read. It is stored if an
        operation needs it in memory, or if it is costly and read in the backward pass. A matrix
        product computes what it reads from one array.
        """
        last = {each: number for number, one in enumerate(operations) for each in one.reads}
        in_memory = [one for one in operations if one.reads_memory]
        needed = {each for one in in_memory for each in one.reads}
        needed_whole = {each for one in in_memory if one.name != _PRODUCT for each in one.reads}
        sources: dict[int, set[int]] = {}  # of the results that are not stored
        costly: set[int] = set()
        for number, one in enumerate(operations):
            reads = set[int]().union(*(sources.get(each, {each}) for each in one.reads))
            is_costly = one.name in _COSTLY.split() or not costly.isdisjoint(one.reads)
            from_one = not is_costly and len(reads - self._arguments) <= 1
            stored = []
            for each in one.writes:
                is_far = one.name in _COSTLY.split() and last.get(each, number) - number > _FAR
                can_be = one.name in _VIEWS.split() or (from_one and each not in needed_whole)
                needs = each in self._results or (each in needed and not can_be)
                if one.by_element and not is_far and not needs:
                    sources[each] = reads
                    costly.update([each] if is_costly else [])
                else:
                    stored.append(each)
            if stored:
                forms: dict[int, int] = {}
                for each in one.reads if one.reads_memory else ():
                    only = sources.get(each, {each})
                    forms |= dict.fromkeys(only if len(only) == 1 else (), self._arrays[each][0])
                read = [each for each in stored if each in last or each in self._results]
                yield _Kernel(one, reads, read, forms)

    def peak(
        self,
        share: float,
        shards: Sequence[int] = (),
        *,
        updates_early: bool = False,
        gathers_again: bool = False,
    ) -> float:
        """Return the bytes of a device at the peak, without the arguments.

        An array is in memory from the kernel that writes it to the last one that reads it. An
        update is written into the memory of the old value.

        Args:
            share: The part of the rows that the device has.
            shards: The number of shards of each array of the state, 1 for an array that is whole.
                Other kernels than those by element read a sharded array whole.
            updates_early: Whether XLA updates a weight as soon as it has its gradient, as on one
                device. Between devices it sums gradients together.
            gathers_again: Whether each kernel gathers the sharded arrays that it reads, and each
                gradient is reduced to its shard at once.
        """
        sizes = [size * share if grows else size for size, grows in self._arrays]
        gathered: dict[int, int] = {}
        for (old, new), number in zip(self._state, shards, strict=False):
            if number > 1:
                gathered[old] = len(sizes)
                sizes.append(0)
                sizes[old] /= number
                if new is not None and new != old:
                    sizes[new] /= number
        olds = {new: old for old, new in self._state if new not in self._arguments}
        whole = self._reduce_gradients(sizes, shards) if gathers_again else {}
        born: dict[int, int] = {}
        last = dict.fromkeys(self._results, len(self._kernels))
        for number, kernel in enumerate(self._kernels):
            time = number
            if updates_early and kernel.operation.by_element and olds.keys() >= {*kernel.writes}:
                time = max(born.get(each, 0) for each in (*kernel.reads, *kernel.writes))
                time = max(time, *(last.get(olds[each], 0) for each in kernel.writes))
            reads = set(kernel.reads)
            for each in kernel.forms.keys() & gathered.keys():
                if gathers_again:
                    gathered[each] = len(sizes)
                    sizes.append(0)
                array = gathered[each]
                sizes[array] = max(sizes[array], kernel.forms[each])
                born.setdefault(array, number)
                reads.add(array)
            for each in reads:
                last[each] = max(last.get(each, 0), time)
            born |= dict.fromkeys(kernel.writes, time)
        before = [0.0] * (len(self._kernels) + 1)
        after = list(before)
        for each, time in born.items():
            before[time] += sizes[each] if each in last else 0
        for each in last.keys() - self._arguments:
            after[last[each]] -= sizes[each]
        for new, old in olds.items():
            if new in born and old in last:
                (before if last[old] == born[new] else after)[last[old]] -= sizes[old]
        live = top = 0.0
        for kernel, more, less in zip(self._kernels, before, after, strict=False):
            live += more
            inner = max((body.peak(share) for body in kernel.operation.bodies), default=0.0)
            inner += sum(whole.get(each, 0.0) for each in kernel.writes)
            if kernel.operation.name == _POOLING_GRADIENT:  # which XLA expands
                inner = 2 * sum(sizes[each] for each in kernel.writes)
            top = max(top, live + inner)
            live += less
        return top

    def _reduce_gradients(self, sizes: list[float], shards: Sequence[int]) -> dict[int, float]:
        """Cut the gradients of sharded arrays to shards, and return what each had besides."""
        besides: dict[int, float] = {}
        shards_of = zip(self._state, shards, strict=False)
        number = {new: n for (_, new), n in shards_of if n > 1 and new is not None}
        for kernel in self._kernels:
            for new in number.keys() & set(kernel.writes):
                shard = sizes[new]
                for each in kernel.reads - self._arguments - besides.keys():
                    if sizes[each] in (number[new] * shard, number[new] * shard / 2):
                        besides[each] = sizes[each] - sizes[each] / number[new]
                        sizes[each] /= number[new]
        return besides


def _inputs(program: Any) -> list[Any]:
    return [*program.constvars, *program.invars]


def _read(known: dict[Any, int | None], value: Any) -> int | None:
    """Return the number of an array; `None` for a constant in the program."""
    return None if hasattr(value, "val") else known[value]


def _bodies(equation: Any) -> Iterator[Any]:
    for parameter in equation.params.values():
        for part in parameter if isinstance(parameter, list | tuple) else [parameter]:
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                yield inner
