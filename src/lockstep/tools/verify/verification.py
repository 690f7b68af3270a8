"""The result of a verification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from lockstep.core.report import Report, print_table, table
from lockstep.errors import counted

if TYPE_CHECKING:
    from rich.console import Console

LINES = 12
"""Quantities that the table names; the rest is one line."""
BOUND = 1e-5
"""The usual difference by rounding in float32, over some tens of steps, for values of magnitude 1.

Larger values have larger rounding.
"""

DOUBLE_BOUND = 1e-10
"""The difference that rounding in float64 explains, for values of magnitude 1."""

NAMED = 3
"""Names that a sentence has; the rest is a number."""

Verdict = Literal["equal", "different", "cannot tell"]


@dataclass(frozen=True)
class Difference:
    """How much one quantity differs between the runs.

    Attributes:
        name: The path of a variable, or the name of a loss or metric.
        largest: The largest absolute difference over all steps.
        bound: What rounding explains: 1e-5, and 1e-10 for a model in float64; times the largest
            value where that is above 1.
        first_step: The first step beyond the bound, from 1; `None` for never.
    """

    name: str
    largest: float
    bound: float
    first_step: int | None = None


ZERO = 1e-6
"""The part of its value in float32 that a gradient of zero has at most in float64."""


@dataclass(frozen=True)
class SameWeights:
    """Each step of several devices from the weights of one device, in float64.

    Attributes:
        steps: How much each quantity differs after one step.
        one: The largest gradient of each trainable variable, on one device.
        several: The same on several devices.
    """

    steps: tuple[Difference, ...]
    one: dict[str, float]
    several: dict[str, float]

    def small(self) -> set[str]:
        """Return the variables whose gradient may be zero: it is small beside those of others."""
        largest = max(self.one.values(), default=0.0), max(self.several.values(), default=0.0)
        return self.zero_beside(*(dict.fromkeys(self.one, each) for each in largest))

    def zero_beside(self, one: dict[str, float], several: dict[str, float]) -> set[str]:
        """Return the variables whose gradient is zero up to rounding, on one device and on several.

        Args:
            one: The largest gradient of each variable in float32, on one device.
            several: The same on several devices.
        """
        return {
            name
            for name in set(self.one).intersection(self.several, one, several)
            if self.one[name] < ZERO * one[name] and self.several[name] < ZERO * several[name]
        }


@dataclass(frozen=True)
class Verification(Report):
    """The result of `verify`.

    Attributes:
        backend: The backend that Keras ran on.
        devices: The names of the devices that were compared with one.
        steps: Training steps that were compared.
        rows: Rows of the batches, smallest and largest.
        differences: Every loss, metric, weight and optimizer slot, largest first.
        notes: Further remarks, a sentence each.
        first_step: The first step at which the runs differ, from 1; `None` where they agree
            or where the comparison cannot tell.
        first_layer: The layer that differs first in that step, where one could be named.
        cause: Why the runs differ, or why the comparison cannot tell; `None` for equal runs.
        rounding: The largest difference, where it is beyond its bound and the comparison in
            float64 has shown that it is rounding; else `None`.
        not_finite_from: The first step after which, on one device, the loss or a weight is not
            finite; it and later steps are not compared. `None` for never.
        lowered: The shortest float type to which the code of the model casts values of float64,
            where the comparison is in float64; `None` for none. With casts to `"float32"`, the
            bound is that of float32.
        zero_gradients: The variables that differ, and whose gradient is zero up to rounding on one
            device and on several: in float64 it is under 1e-6 of its value in float32. If there
            are any, `rounding` is of each step from the same weights.
        behind_zero_gradients: What else differs over the steps, and agrees from the same weights,
            such as moving statistics behind such a variable.
        micro_batch_size: The most rows that a device ran at once; `None` for all of its rows.
    """

    backend: str
    devices: tuple[str, ...]
    steps: int
    rows: tuple[int, int]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...] = ()
    first_step: int | None = None
    first_layer: str | None = None
    cause: str | None = None
    rounding: float | None = None
    not_finite_from: int | None = None
    lowered: str | None = None
    zero_gradients: tuple[str, ...] = ()
    behind_zero_gradients: tuple[str, ...] = ()
    micro_batch_size: int | None = None

    @property
    def equal(self) -> bool:
        """Whether every step was compared, and the devices gave what one device gives."""
        return self.verdict == "equal"

    @property
    def verdict(self) -> Verdict:
        """`"equal"`, `"different"`, or `"cannot tell"`."""
        if self.cause is None:
            return "equal"
        return "cannot tell" if self.first_step is None else "different"

    def as_dict(self) -> dict[str, Any]:
        """Return the same as plain lists, numbers and strings."""
        return {"equal": self.equal, "verdict": self.verdict, **asdict(self)}

    def __str__(self) -> str:
        """The verdict, its cause and what was compared."""
        cause = f" {self.cause}" if self.cause else ""
        return f"{self._words()}{cause} Compared: {self._compared()}."

    def show(self, console: Console) -> None:
        """Print a table, then the verdict in words."""
        from rich.markup import escape

        console.print(f"{self.backend}: {self._compared()}.", highlight=False)
        shown = table("", "largest difference", "bound", "")
        for difference in self.differences[:LINES]:
            shown.add_row(
                escape(difference.name),
                f"{difference.largest:.1e}",
                f"{difference.bound:.1e}",
                self._remark(difference),
                style="" if self.equal or difference.first_step is None else "red",
            )
        if len(self.differences) > LINES:
            rest = self.differences[LINES:]
            largest = max(difference.largest for difference in rest)
            shown.add_row(f"{len(rest)} more", f"at most {largest:.1e}", "", "")
        print_table(console, shown)
        for note in (*self.notes, *self._named_apart()):
            console.print(escape(note), highlight=False)
        words = escape(self._words()) if self.equal else f"[red]{escape(self._words())}[/red]"
        cause = f" {escape(self.cause)}" if self.cause else ""
        console.print(words + cause, highlight=False)

    def _compared(self) -> str:
        smallest, largest = self.rows
        rows = counted(largest, "row")
        if smallest != largest:
            rows = f"{smallest} to {rows}"
        steps = counted(self.steps, "step")
        size = self.micro_batch_size
        parts = "" if size is None else f", at most {counted(size, 'row')} at once"
        return (
            f"{steps} of {rows}, on one device and on {counted(len(self.devices), 'device')}{parts}"
        )

    def _remark(self, difference: Difference) -> str:
        if difference.first_step is None:
            return ""
        return "rounding" if self.equal else f"from step {difference.first_step}"

    def _named_apart(self) -> list[str]:
        """Return the sentences that name variables without a gradient, and what follows them."""
        said = []
        if self.zero_gradients:
            said.append(
                "These variables have a gradient that is zero up to rounding, and the optimizer "
                f"turns it into updates: {listed(self.zero_gradients)}."
            )
        if self.behind_zero_gradients:
            said.append(
                "These variables agree from the same weights. They differ only because they "
                f"follow such a variable: {listed(self.behind_zero_gradients)}."
            )
        return said

    def _float64_bound(self) -> str:
        if self.lowered is None:
            return "1e-10"
        return f"1e-5, as the code of the model casts values to {self.lowered}"

    def _words(self) -> str:
        who = f"{len(self.devices)} devices give"
        if self.micro_batch_size is not None:
            who = f"{counted(len(self.devices), 'device')} in micro-batches give"
        equal = f"{who} the same results as one device"
        if self.rounding is not None:
            equal += (
                f": in float64 to {self._float64_bound()}{self._but()}. In the precision of the "
                f"model, they differ by up to {self.rounding:.1e}, which is rounding"
            )
        return {
            "equal": f"{equal}.",
            "different": f"The results differ from step {self.first_step} on.",
            "cannot tell": "The comparison cannot tell whether the results are the same.",
        }[self.verdict]

    def _but(self) -> str:
        if not self.zero_gradients:
            return ""
        number = counted(len(self.zero_gradients), "variable")
        return f" in each step from the same weights, except for {number} whose gradient is zero"


def listed(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
