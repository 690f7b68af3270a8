"""The results of bench: speed by number of devices."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lockstep.core.report import Report, print_table, table
from lockstep.errors import counted

if TYPE_CHECKING:
    from rich.console import Console

PARTS = ("input", "host", "compute", "communication")
"""The parts of a step."""

LIMITS = {
    "input": "preparing the batches",
    "host": "starting each step from Python",
    "communication": "the all-reduce between the devices",
    "compute": "the computation itself",
    "unknown": "unknown: none of the measured parts explains it",
}
"""The parts that can limit a step, in words."""

PROFILED = (
    "Compute and communication come from a profile of the busiest device in a separate round, "
    "which slows down small steps; waiting for the other devices counts as communication."
)

NOT_PROFILED = (
    "Compute and communication were not measured here. Either of them may limit the speed."
)


@dataclass(frozen=True)
class Measurement:
    """The speed of one model on a number of devices. Times are in seconds.

    Attributes:
        devices: The names of the devices.
        rows: Rows of the global batch.
        rows_per_step: Mean rows of a step. The last batch of an epoch may be smaller.
        steps_per_execution: Mean steps of an execution. Python starts an execution once.
        step: A step of `fit`, the median of the rounds.
        spread: The first and third quartile of the rounds.
        input: The preparation of one batch as in `fit`, with nothing else running.
        host: The processor time of the main thread in one step; `None` where it computes too.
        compute: The computation of the busiest device in one step; `None` without a trace.
        communication: Its collectives in one step, including the time that it waits in them.
        compile: One trace and compilation, without a compilation cache; `None` if unknown.
        checkpoint: One save of the weights with Keras.
        load: The load of the machine before the measurement.
        backend: The backend of Keras.
        not_compiled: Why a step is not compiled on JAX; `""` if it is, or if the user asked.
        as_graphs: Whether steps ran as graphs on PyTorch, as `jit_compile=True` asks for.
    """

    devices: tuple[str, ...]
    rows: int
    rows_per_step: float
    steps_per_execution: float
    step: float
    spread: tuple[float, float]
    input: float
    host: float | None
    compute: float | None
    communication: float | None
    compile: float | None
    checkpoint: float
    load: float
    backend: str = "jax"
    not_compiled: str = ""
    as_graphs: bool = False

    @property
    def rows_per_second(self) -> float:
        """Rows trained on in a second."""
        return self.rows_per_step / self.step

    @property
    def limit(self) -> str:
        """The part of a step that takes longest, a key of `LIMITS`.

        It is unknown where that is less than half of the step; without a trace, where input
        or host does not come close to the step.
        """
        parts = {part: getattr(self, part) or 0.0 for part in PARTS}
        longest = max(parts, key=lambda part: parts[part])
        enough = (0.8 if self.compute is None else 0.5) * self.step
        return longest if parts[longest] >= enough else "unknown"


@dataclass(frozen=True)
class Scaling(Report):
    """The measurements of one model, by number of devices, fewest first.

    Attributes:
        target: The function that made the model.
        rehearsed: Whether several devices were virtual, and shared the cores.
        cores: Cores of the machine.
        versions: Of the packages that matter, by name.
        measurements: One for each number of devices.
    """

    target: str
    rehearsed: bool
    cores: int
    versions: dict[str, str]
    measurements: tuple[Measurement, ...]

    def speedup(self, of: Measurement) -> float:
        """Return the rows per second, divided by those on the fewest devices."""
        return of.rows_per_second / self.measurements[0].rows_per_second

    def efficiency(self, of: Measurement) -> float:
        """Return the speed-up divided by the growth in devices; 1 is perfect."""
        return self.speedup(of) * len(self.measurements[0].devices) / len(of.devices)

    @property
    def verdict(self) -> str:
        """Return one sentence: whether more devices help, and what limits the speed."""
        first, last = self.measurements[0], self.measurements[-1]
        if self.rehearsed:
            return (
                f"These are virtual devices that share {self.cores} cores: they show that the "
                "results are correct, but say nothing about speed."
            )
        if len(self.measurements) == 1:
            return (
                f"{_devices(first)}: {first.rows_per_second:,.0f} rows per second. The "
                f"bottleneck is {LIMITS[first.limit]}."
            )
        best = max(self.measurements, key=lambda m: m.rows_per_second)
        if not _is_faster(best, first):
            fastest = "the fastest" if best is first else "as fast as the others, within the spread"
            return (
                f"More devices do not help this model at this batch size: {_devices(first)} "
                f"{'are' if len(first.devices) > 1 else 'is'} {fastest}. The bottleneck with "
                f"{len(last.devices)} is {LIMITS[last.limit]}."
            )
        more = "" if best is last else f"; {_devices(last)} are no faster"
        return (
            f"{_devices(best)} are {self.speedup(best):.2f} times as fast as "
            f"{len(first.devices)}, an efficiency of {self.efficiency(best):.0%}. The "
            f"bottleneck is {LIMITS[best.limit]}{more}."
        )

    @property
    def advice(self) -> tuple[str, ...]:
        """Return suggestions, one sentence each."""
        last, found = self.measurements[-1], list[str]()
        if last.not_compiled:
            found.append(
                f"On JAX {last.not_compiled}: apply such layers to the data instead, before fit."
            )
        if self.rehearsed:
            return tuple(found)
        if last.compute and last.communication and last.communication > 0.1 * last.step:
            factor = _power_of_two(last.communication / (0.1 * last.compute))
            if factor > 1:
                found.append(
                    f"Try batch_size={last.rows * factor}, if memory and training allow it: the "
                    "all-reduce takes the same time for any batch size, now "
                    f"{last.communication / last.step:.0%} of a step."
                )
        one_by_one = last.steps_per_execution == 1 and last.backend == "jax"
        if last.compute and last.host and last.host > 0.1 * last.step and one_by_one:
            steps = _power_of_two(last.host / (0.05 * last.compute))
            if steps > 1:
                found.append(
                    f"Try compile(steps_per_execution={steps}): Python takes "
                    f"{last.host / last.step:.0%} of a step. On CPUs, a long fit over arrays "
                    "does this automatically."
                )
        if last.input > 0.8 * last.step:
            found.append(
                f"A batch takes {last.input * 1e3:.1f} ms to prepare, and a step "
                f"{last.step * 1e3:.1f} ms: more data workers will help, but more devices will "
                "not."
            )
        return tuple(found)

    @property
    def profiled(self) -> str:
        """Return one sentence: where compute and communication come from."""
        seen = any(measured.compute is not None for measured in self.measurements)
        return PROFILED if seen else NOT_PROFILED

    def as_dict(self) -> dict[str, Any]:
        """Return the same as plain lists, numbers and strings."""
        more = [
            {
                "rows_per_second": m.rows_per_second,
                "speedup": None if self.rehearsed else self.speedup(m),
                "efficiency": None if self.rehearsed else self.efficiency(m),
                "limit": m.limit,
            }
            for m in self.measurements
        ]
        whole = asdict(self)
        pairs = zip(whole["measurements"], more, strict=True)
        return {
            **whole,
            "measurements": [{**measured, **derived} for measured, derived in pairs],
            "verdict": self.verdict,
            "advice": self.advice,
            "profiled": self.profiled,
        }

    def __str__(self) -> str:
        """The verdict and the advice."""
        return " ".join([self.verdict, *self.advice])

    def show(self, console: Console) -> None:
        """Print a table, then the verdict and the advice."""
        columns = [self.cells(measured) for measured in self.measurements]
        shown = table("devices", *(cells[0] for cells in columns))
        for head, *cells in list(zip(self.heads, *columns, strict=True))[1:]:
            if any(cells):
                shown.add_row(head, *cells)
        print_table(console, shown)
        style = "bold red" if self.rehearsed else ""
        console.print(self.verdict, style=style, markup=False, highlight=False)
        for advice in self.advice:
            console.print(advice, markup=False, highlight=False)
        console.print(self.profiled, markup=False, highlight=False)

    @property
    def heads(self) -> tuple[str, ...]:
        """The names of the cells. Virtual devices share the cores: none is faster than another."""
        compared = () if self.rehearsed else ("speed-up", "efficiency")
        parts = (*compared, *PARTS, "compile", "checkpoint", "as graphs")
        return ("devices", "rows/s", "step", "spread", *parts)

    def cells(self, of: Measurement) -> list[str]:
        """The numbers of one measurement as text, in the order of `heads`."""
        parts = (getattr(of, part) for part in PARTS)
        compared = (f"{self.speedup(of):.2f}", f"{self.efficiency(of):.0%}")
        return [
            str(len(of.devices)),
            f"{of.rows_per_second:,.0f}",
            _milliseconds(of.step),
            " to ".join(_milliseconds(seconds) for seconds in of.spread),
            *(() if self.rehearsed else compared),
            *("" if seconds is None else _milliseconds(seconds) for seconds in parts),
            "" if of.compile is None else f"{of.compile:.1f} s",
            f"{of.checkpoint:.2f} s",
            "yes" if of.as_graphs else "",
        ]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _is_faster(one: Measurement, other: Measurement) -> bool:
    """Return whether the slower quartile of one is faster than the faster quartile of another."""
    return one.rows_per_step / one.spread[1] > other.rows_per_step / other.spread[0]


def _devices(of: Measurement) -> str:
    return counted(len(of.devices), "device")


def _power_of_two(least: float) -> int:
    """Return the smallest power of two that is at least this number, and at most 64."""
    power = 1
    while power < least and power < 64:
        power *= 2
    return power
