"""The result of a plan: the bytes of a device, by number of devices and layout."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from lockstep.core.report import Report, print_table, table
from lockstep.core.step_bytes import UNITS, LayoutBytes, amount
from lockstep.errors import DeviceError, counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

DOES_NOT_FIT = "state alone does not fit"

FULL = 0.85
"""The part of a memory that a compiled peak may take."""

_WIDE = 125
"""Characters of a line that hold the table."""


@dataclass(frozen=True)
class MemoryPlan(Report):
    """The result of `plan`.

    Attributes:
        name: The name of the model.
        backend: The backend that Keras ran on.
        parameters: The number of elements of all weights.
        batch_size: Rows of the global batch.
        layouts: The bytes of a device for each number of devices and each layout.
        memory: Bytes of memory of a device; `None` where not given.
        gpu: The GPU for which the step was compiled; `None` if the peak is estimated.
        notes: Further remarks, a sentence each.
        micro_batch_size: The most rows that a device runs at once; `None` for all of its rows.
    """

    name: str
    backend: str
    parameters: int
    batch_size: int
    layouts: tuple[LayoutBytes, ...]
    memory: int | None = None
    gpu: str | None = None
    notes: tuple[str, ...] = ()
    micro_batch_size: int | None = None

    def with_rows_of(self, other: MemoryPlan) -> MemoryPlan:
        """Return this plan with the layouts and remarks of another one besides its own."""
        layouts = sorted([*self.layouts, *other.layouts], key=lambda each: each.devices)
        notes = dict.fromkeys([*self.notes, *other.notes])
        return replace(self, layouts=tuple(layouts), notes=tuple(notes))

    @property
    def verdict(self) -> str:
        """Which layouts fit the memory of a device, as a sentence; `""` if it is not given."""
        if self.memory is None:
            return ""
        room, fits = amount(self.memory), [each for each in self.layouts if not self._problem(each)]
        if fits:
            names = ", ".join(f"{each.name}" for each in fits)
            return f"{room} hold {names}{'' if fits[0].peak else ', without activations'}."
        least = min(self.layouts, key=lambda each: each.peak or each.held)
        needed = amount(least.peak or least.held)
        return f"No layout fits {room}: the smallest needs {needed} ({least.name})."

    def verdict_of(self, layout: LayoutBytes) -> str:
        """Return what the memory of a device means for one layout; `""` if it is not given."""
        if self.memory is None:
            return ""
        if problem := self._problem(layout):
            return problem
        return f"{self._left(layout)}{' for activations' if layout.peak is None else ''}"

    def _problem(self, layout: LayoutBytes) -> str:
        if self._room(layout) + layout.gradients < 0:
            return DOES_NOT_FIT
        if layout.peak is not None:
            over = layout.peak - (self.memory or 0)
            about = "does not fit:" if self.gpu else "about"
            return f"{about} {amount(over)} over" if over > 0 else ""
        # XLA may use a gradient before it computes the next one.
        return "no room for all gradients" if self._room(layout) < 0 else ""

    def _left(self, layout: LayoutBytes) -> str:
        if problem := self._problem(layout):
            return problem
        if layout.peak is None or self.memory is None:
            return f"{amount(self._room(layout))} left"
        about = "about" if self.gpu is None else "fits:"
        if self.gpu and layout.peak > FULL * self.memory:
            about = "may not fit:"
        return f"{about} {amount(self.memory - layout.peak)} left"

    def _room(self, layout: LayoutBytes) -> int:
        return (self.memory or 0) - layout.held

    def as_dict(self) -> dict[str, Any]:
        """Return the same as plain lists, numbers and strings."""
        rows = [
            {
                **asdict(each),
                "held": each.held,
                "peak": each.peak,
                "sent": each.sent,
                "verdict": self.verdict_of(each),
            }
            for each in self.layouts
        ]
        return {**asdict(self), "layouts": rows, "verdict": self.verdict}

    def __str__(self) -> str:
        """The bytes of a device, one line for each layout."""
        lines = [
            f"{counted(each.devices, 'device')}, {each.name.partition(' ')[2]}: "
            f"{amount(each.held)} each without activations{_at_the_peak(each)}"
            f"{', ' * (self.memory is not None)}{self.verdict_of(each)}"
            for each in self.layouts
        ]
        return "\n".join(lines)

    def show(self, console: Console) -> None:
        """Print a table, then what is in it."""
        from rich.markup import escape

        console.print(
            escape(
                f"{self.name} on {self.backend}: {self.parameters:,} parameters, "
                f"a global batch of {counted(self.batch_size, 'row')}{self._at_once()}. "
                "Bytes of each device:"
            ),
            highlight=False,
        )
        heads = ["devices", "weights", "slots", "gradients", "batch"]
        has_peaks = any(each.peak is not None for each in self.layouts)
        peak = "compiled peak" if self.gpu else "peak, about"
        heads += [peak if has_peaks else "together", "sent in a step"]
        has_rows = any(each.largest_batch is not None for each in self.layouts)
        heads += ["largest batch"] * has_rows
        has_parts = any(each.largest_micro_batch is not None for each in self.layouts)
        heads += ["micro-batch"] * has_parts
        shown = table(*heads, *[] if self.memory is None else [f"of {amount(self.memory)}"])
        for each in self.layouts:
            sizes = (each.weights, each.optimizer, each.gradients, each.batch + each.metrics)
            needed = amount(each.held if each.peak is None else each.peak)
            more = " and more" * (has_peaks and each.peak is None)
            left = [] if self.memory is None else [self._left(each)]
            shown.add_row(
                each.name,
                *map(amount, sizes),
                needed + more,
                amount(each.sent),
                *[f"{each.largest_batch or 0:,} rows"] * has_rows,
                *[_micro_batch(each)] * has_parts,
                *left,
                style="red" if left == [DOES_NOT_FIT] else "",
            )
        print_table(console, shown, narrow=_WIDE)
        for note in (*self.notes, *self._gathered(), *self._remedy(), *self._in_parts()):
            console.print(escape(note), highlight=False)

    def _gathered(self) -> list[str]:
        """Return the sentences on sharded weights, which a device has whole for a time."""
        said = []
        kept = (each for each in self.layouts if each.gathered and not each.gathers_again)
        sharded = {each.policy: each.gathered for each in kept}
        if sharded:
            parts = [
                f"{amount(size)} of temporaries{f' under {policy}' * bool(policy)}"
                for policy, size in sharded.items()
            ]
            said.append(f"Sharded weights are gathered: {', '.join(parts)}.")
        again = ", ".join(each.name for each in self.layouts if each.gathers_again)
        if again:
            said.append(
                f"The weights of {again} are gathered again for the backward pass. Keeping them "
                "would take more than a quarter of the memory that JAX has "
                "(LOCKSTEP_GATHER_AGAIN)."
            )
        return said

    def _at_once(self) -> str:
        size = self.micro_batch_size
        return "" if size is None else f", in micro-batches of {size} per device"

    def _in_parts(self) -> list[str]:
        """Return the micro-batch that fits, of the fewest devices that need one."""
        for each in self.layouts:
            if each.largest_micro_batch and each.micro_batch_peak:
                before, after = amount(each.peak or 0), amount(each.micro_batch_peak)
                return [
                    f"{each.name} fits with micro_batch_size={each.largest_micro_batch} "
                    f"({before} \u2192 {after}, one more forward pass)."
                ]
        return []

    def _remedy(self) -> list[str]:
        """Return what to try if the memory of a device is given and no layout fits."""
        if self.memory is None or not all(map(self._problem, self.layouts)) or self._in_parts():
            return []
        least = min(self.layouts, key=lambda each: each.peak or each.held)
        state = amount(least.weights + least.optimizer)
        return [
            self.verdict,
            f"Weights and slots take {state} of it. Activations grow with the rows per device.",
            "Try more devices, a smaller batch, or mixed precision.",
        ]

    def _repr_html_(self) -> str:
        """What a notebook shows: a bar for each layout, then the table."""
        return _bars(self.layouts, self.memory) + super()._repr_html_()


_COLORS = {
    "weights": "#4878a8",
    "slots": "#7aa6c2",
    "gradients": "#c9a13b",
    "batch": "#8aa17c",
    "activations and temporaries": "#b5655b",
}


def _parts(layout: LayoutBytes) -> dict[str, int]:
    """Return what a device holds at the peak, by kind; without a peak, all gradients."""
    if layout.temporaries is None:
        last = {"gradients": layout.gradients}
    else:
        last = {"activations and temporaries": layout.temporaries}
    state = {"weights": layout.weights, "slots": layout.optimizer}
    return state | {"batch": layout.batch + layout.metrics} | last


def _bars(layouts: Sequence[LayoutBytes], memory: int | None) -> str:
    """Return a picture of the bytes of a device as HTML; a line is the memory of a device."""
    longest = max(memory or 0, *(sum(_parts(each).values()) for each in layouts), 1)
    kinds = dict.fromkeys(kind for each in layouts for kind in _parts(each))
    key = "".join(
        f'<span style="margin-right:1em"><span style="background:{_COLORS[kind]}">&emsp;</span> '
        f"{kind}</span>"
        for kind in kinds
    )
    line = ""
    if memory is not None:
        line = (
            f'<div style="position:absolute;top:0;bottom:0;left:{100 * memory / longest:.2f}%;'
            f'border-left:2px solid #a00" title="memory: {amount(memory)}"></div>'
        )
    rows = []
    for each in layouts:
        parts = "".join(
            f'<div style="width:{100 * size / longest:.2f}%;background:{_COLORS[kind]}" '
            f'title="{kind}: {amount(size)}"></div>'
            for kind, size in _parts(each).items()
        )
        rows.append(
            f'<div style="display:flex"><div style="width:16em">{each.name}</div>'
            f'<div style="flex:1;display:flex;position:relative;height:1.2em">{parts}{line}</div>'
            "</div>"
        )
    return f'<div style="max-width:60em">{"".join(rows)}<div>{key}</div></div>'


def _micro_batch(layout: LayoutBytes) -> str:
    """Return the largest micro-batch that fits, in words."""
    if layout.largest_micro_batch is None:
        return "-"
    return counted(layout.largest_micro_batch, "row") if layout.largest_micro_batch else "none fits"


def _at_the_peak(layout: LayoutBytes) -> str:
    return "" if layout.peak is None else f", about {amount(layout.peak)} at the peak"


def parse_memory(value: str | int) -> int:
    """Return the bytes that a value of `memory=` means.

    Raises:
        DeviceError: If it means none.

    Example:
        >>> parse_memory("24GB"), parse_memory("80 GiB")
        (24000000000, 85899345920)
    """
    factors = {unit.lower(): factor for unit, factor in (UNITS | _BINARY).items()}
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", str(value).lower())
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    size = round(float(found[1]) * factors.get(found[2], 0)) if found else 0
    if size < 1:
        raise DeviceError(
            f"memory={value!r} was given, but an amount with a unit was expected.\n"
            "Pass the memory of one device, such as 24GB or 80GiB."
        )
    return size
