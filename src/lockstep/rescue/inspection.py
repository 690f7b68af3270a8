"""What a file is, without loading it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Entry:
    """One array of a file."""

    path: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Inspection:
    """What a file is, and the one command that makes it usable.

    Attributes:
        path: The file.
        kind: `"keras2"` (HDF5 with layer groups), `"keras"`, `"weights.h5"`, `"torch"`,
            `"safetensors"` or `"named arrays"`.
        library: Which library wrote it, as far as the file tells.
        contents: `"full model"`, `"weights"` or `"nothing"`.
        parallel: Whether it is of a model over several devices; None where a file of
            weights does not tell.
        devices: How many, where that can be known.
        template: Name of the single model inside.
        complete: Whether all that it lists is there.
        flaw: What is missing, where something is.
        optimizer: Whether it holds optimizer state.
        compiled: Whether it holds loss and metrics.
        arrays: All arrays of the weights, in file order.
        needs: Classes and Lambdas whose code the user must give.
        command: The one command that makes it usable.
        notes: What else there is to know.
    """

    path: str
    kind: str
    library: str
    contents: str
    parallel: bool | None
    complete: bool
    command: str
    devices: int | None = None
    template: str | None = None
    flaw: str | None = None
    optimizer: bool = False
    compiled: bool = False
    arrays: tuple[Entry, ...] = ()
    needs: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """The findings as plain values, for `--json`."""
        return asdict(self)


def show(found: Inspection, console: Any) -> None:
    """Print findings on a rich console."""
    from rich.markup import escape
    from rich.tree import Tree

    what = {True: "parallel", False: "single device", None: "parallel or single (see below)"}
    over = f" over {found.devices} devices" if found.devices else ""
    inside = f", template {found.template!r}" if found.template else ""
    console.print(f"[bold]{escape(found.path)}[/]")
    console.print(f"  written by  {escape(found.library)}")
    console.print(f"  holds       {found.contents}, {len(found.arrays)} arrays")
    console.print(f"  model       {what[found.parallel]}{over}{escape(inside)}")
    extras = [name for name, there in (("optimizer state", found.optimizer),
                                       ("loss and metrics", found.compiled)) if there]  # fmt: skip
    console.print(f"  also        {', '.join(extras) or 'no optimizer state'}")
    state = "complete" if found.complete else f"DAMAGED: {found.flaw}"
    console.print(f"  state       {escape(state)}")
    if found.needs:
        console.print(f"  needs       {escape(', '.join(found.needs))} (your code)")
    for note in found.notes:
        console.print(f"  note        {escape(note)}")
    tree = Tree("weights", hide_root=True)
    places: dict[str, Any] = {"": tree}
    for entry in found.arrays:
        parts = entry.path.split("/")
        for depth in range(1, len(parts)):
            here = "/".join(parts[:depth])
            if here not in places:
                above = places["/".join(parts[: depth - 1])]
                places[here] = above.add(escape(parts[depth - 1]))
        shape = " x ".join(map(str, entry.shape)) or "scalar"
        places["/".join(parts[:-1])].add(escape(f"{parts[-1]}  {shape}  {entry.dtype}"))
    console.print(tree)
    console.print(f"next: [bold]{escape(found.command)}[/]", soft_wrap=True)
