"""The result of a verification."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

BOUND = 1e-5
"""The difference that rounding in float32 explains, over some tens of steps."""

DOUBLE_BOUND = 1e-10
"""The same in float64, for values of magnitude 1. Larger values have larger rounding."""

Verdict = Literal["equal", "different", "cannot tell"]


@dataclass(frozen=True)
class Difference:
    """How much one quantity differs between the runs.

    Attributes:
        name: The path of a variable, or the name of a loss or metric.
        largest: The largest absolute difference over all steps.
        bound: What rounding explains: 1e-5, or ten times what it did on one device. For a model
            in float64, 1e-10 times the largest value where that is above 1.
        first_step: The first step beyond the bound, from 1; `None` for never.
    """

    name: str
    largest: float
    bound: float
    first_step: int | None = None

    @property
    def by_rounding(self) -> bool:
        """Whether it is beyond 1e-5, and within what rounding does on one device."""
        return self.first_step is None and self.largest > BOUND


@dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    Attributes:
        backend: The backend that Keras ran on.
        devices: The names of the devices that were compared with one.
        steps: Training steps that were compared.
        rows: Rows of the batches, smallest and largest.
        control: How rounding was measured on one device.
        differences: Every loss, metric, weight and optimizer slot, largest first.
        notes: Further remarks, a sentence each.
        first_step: The first step at which the runs differ, from 1; `None` where they agree
            or where the comparison cannot tell.
        first_layer: The layer that differs first in that step, where one could be named.
        cause: Why the runs differ, or why the comparison cannot tell; `None` for equal runs.
        not_finite_from: The first step after which, on one device, the loss or a weight is not
            finite; it and later steps are not compared. `None` for never.
    """

    backend: str
    devices: tuple[str, ...]
    steps: int
    rows: tuple[int, int]
    control: str
    differences: tuple[Difference, ...]
    notes: tuple[str, ...] = ()
    first_step: int | None = None
    first_layer: str | None = None
    cause: str | None = None
    not_finite_from: int | None = None

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
        """The same as plain lists, numbers and strings, for JSON."""
        return {"equal": self.equal, "verdict": self.verdict, **asdict(self)}
