"""What a compiled program tells about itself: the text of XLA's scheduled module, read.

The order of the lines of the entry is the order in which a GPU is given its work. An
asynchronous collective is a line where it starts and one where its result is waited for;
what stands between the two runs while the bytes are under way.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from math import prod

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
BYTES |= {"s64": 8, "u64": 8, "f64": 8}
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
FREE = {"parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all"}
"""What costs a device nothing."""

_LINE = re.compile(r"(?:ROOT )?%?(\S+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(.*)")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(\S+) .*\{$")

Shape = tuple[str, tuple[int, ...]]


@dataclass
class Operation:
    """One line of a computation.

    Attributes:
        name: Its name in the computation.
        kind: What XLA calls the operation.
        shapes: Of its result, or of the parts of its result.
        operands: The names of what it takes.
        rest: What stands after the operands.
        flops: Multiplications and additions of its matrix products and convolutions,
            those of the computations that it calls with them.
    """

    name: str
    kind: str
    shapes: list[Shape]
    operands: list[str]
    rest: str
    flops: int = 0

    @property
    def nbytes(self) -> int:
        return sum(BYTES.get(name, 0) * prod(dims) for name, dims in self.shapes)


@dataclass
class Collective:
    """One collective of a schedule.

    Attributes:
        kind: Which.
        nbytes: Of its result.
        flops: Of what runs between its start and the wait for its result.
        kernels: How many operations run there that are not free.
        after: Share of the flops of all that the program still has to do when it starts.
    """

    kind: str
    nbytes: int
    flops: int
    kernels: int
    after: float


@dataclass
class Program:
    """A scheduled program.

    Attributes:
        lines: Operations of all computations.
        entry: Those of the entry that cost something, in the order of the schedule.
        collectives: In the order in which they start.
    """

    lines: int
    entry: list[Operation]
    collectives: list[Collective] = field(default_factory=list)

    @property
    def flops(self) -> int:
        return sum(operation.flops for operation in self.entry)

    def counts(self) -> dict[str, int]:
        return dict(Counter(collective.kind for collective in self.collectives))

    def nbytes(self, kind: str) -> int:
        return sum(each.nbytes for each in self.collectives if each.kind == kind)


def read(text: str) -> Program:
    """The program that a compiled module's text describes."""
    computations, entry = _computations(text)
    _count_flops(computations)
    operations = computations[entry]
    program = Program(
        lines=sum(map(len, computations.values())),
        entry=[operation for operation in operations if operation.kind not in FREE],
    )
    program.collectives = list(_collectives(program))
    return program


def _computations(text: str) -> tuple[dict[str, list[Operation]], str]:
    found: dict[str, list[Operation]] = {}
    entry = name = ""
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():  # the numbers in long tuples
        header = _COMPUTATION.match(line)
        if header and " = " not in line.split("(")[0]:
            name = header[1]
            found[name] = []
            entry = name if line.startswith("ENTRY") else entry
            continue
        parts = _LINE.match(line.strip())
        if parts and name:
            shapes = [
                (kind, tuple(int(dim) for dim in dims.split(",") if dim))
                for kind, dims in _SHAPE.findall(parts[2])
            ]
            operands = re.findall(r"%([^\s,()]+)", parts[4])
            found[name].append(Operation(parts[1], parts[3], shapes, operands, parts[5]))
    return found, entry


def _count_flops(computations: dict[str, list[Operation]]) -> None:
    done: dict[str, int] = {}

    def of_computation(name: str) -> int:
        if name not in done:
            done[name] = 0
            shapes = {operation.name: operation.shapes for operation in computations.get(name, [])}
            for operation in computations.get(name, []):
                called = re.search(r"(?:calls|body)=%?([^\s,}]+)", operation.rest)
                operation.flops = _flops(operation, shapes)
                operation.flops += of_computation(called[1]) if called else 0
                done[name] += operation.flops
        return done[name]

    for name in computations:
        of_computation(name)


def _flops(operation: Operation, shapes: dict[str, list[Shape]]) -> int:
    taken = [shapes[name][0][1] for name in operation.operands if shapes.get(name)]
    if operation.kind == "dot":
        contracting = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", operation.rest)
        return 2 * prod(operation.shapes[0][1]) * _dims(taken[0], contracting)
    if "dim_labels=" in operation.rest and len(taken) > 1:
        return _flops_of_convolution(operation, taken)
    if "__cublas" in operation.rest:
        wanted = re.search(r'"lhs_contracting_dimensions":(\[.*?\])', operation.rest)
        dims = [int(dim) for dim in json.loads(wanted[1])] if wanted else []
        return 2 * prod(operation.shapes[0][1]) * prod(taken[0][dim] for dim in dims)
    return 0


def _dims(shape: tuple[int, ...], wanted: re.Match[str] | None) -> int:
    return prod(shape[int(dim)] for dim in wanted[1].split(",") if dim) if wanted else 1


def _flops_of_convolution(operation: Operation, taken: list[tuple[int, ...]]) -> int:
    """Every output position meets every weight once, forward and in both backward passes."""
    labels = re.search(r"dim_labels=\w+_(\w+)->(\w+)", operation.rest)
    result = operation.shapes[0][1]
    if labels is None:
        return 0
    if "BackwardInput" in operation.rest:
        output, kernel = taken[0], taken[1]
    elif "BackwardFilter" in operation.rest:
        output, kernel = taken[1], result
    else:
        output, kernel = result, taken[1]
    positions = prod(output) // output[labels[2].index("f")]
    return 2 * positions * prod(kernel)


def _collectives(program: Program) -> list[Collective]:
    found, left = [], program.flops
    ends = {
        operation.operands[0]: position
        for position, operation in enumerate(program.entry)
        if operation.kind.endswith("-done") and operation.operands
    }
    for position, operation in enumerate(program.entry):
        kind = operation.kind.removesuffix("-start")
        if kind in COLLECTIVES:
            between = program.entry[position + 1 : ends.get(operation.name, position + 1)]
            own = [other for other in between if not other.kind.endswith(("-start", "-done"))]
            found.append(
                Collective(
                    kind=kind,
                    nbytes=operation.nbytes,
                    flops=sum(other.flops for other in own),
                    kernels=len(own),
                    after=left / (program.flops or 1),
                )
            )
        left -= operation.flops
    return found
