"""What verify found."""

from dataclasses import asdict, dataclass
from typing import Any

BOUND = 1e-5
"""What rounding in float32 explains, over some tens of steps."""


@dataclass(frozen=True)
class Difference:
    """How far one quantity came apart.

    Attributes:
        name: The path of a variable, or the name of a loss or metric.
        largest: The largest absolute difference over all steps.
        bound: What rounding explains: 1e-5, or ten times what it did on one device.
        first_step: The first step beyond the bound, from 1; `None` for never.
    """

    name: str
    largest: float
    bound: float
    first_step: int | None = None

    @property
    def by_rounding(self) -> bool:
        """Whether it is beyond 1e-5, and rounding alone does as much on one device."""
        return self.first_step is None and self.largest > BOUND


@dataclass(frozen=True)
class Verification:
    """What `verify` found.

    Attributes:
        backend: The backend that Keras ran on.
        devices: The names of the devices that were compared with one.
        steps: Training steps taken.
        rows: Rows of the batches, smallest and largest.
        control: How rounding was measured on one device.
        differences: Every loss, metric, weight and optimizer slot, largest first.
        notes: What else is worth knowing, a sentence each.
        first_step: The first step at which the runs parted, `None` for never, or where it
            cannot be told, as `cause` then says.
        first_layer: The layer that parted there, where one could be named.
        cause: Why, as far as it can be told; `None` where they did not part.
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

    @property
    def equal(self) -> bool:
        """Whether the devices gave what one device gives."""
        return self.cause is None

    def as_dict(self) -> dict[str, Any]:
        """The same as plain lists, numbers and strings, for JSON."""
        return {"equal": self.equal, **asdict(self)}
