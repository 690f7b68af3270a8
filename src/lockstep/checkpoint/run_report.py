"""What a folder of a run holds, read from the manifests of its checkpoints."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint.fingerprint import parts_of
from lockstep.checkpoint.manifest import FILE, read_manifest
from lockstep.checkpoint.run_folder import Retention, RunFolder
from lockstep.core.report import Report, print_table
from lockstep.errors import CheckpointError, DamagedCheckpoint, counted

if TYPE_CHECKING:
    from rich.console import Console


def position_in_words(epoch: int, step: int) -> str:
    """A position in a run, with the number of the epoch that Keras prints.

    Args:
        epoch: Epochs before it.
        step: Steps of the next epoch before it.

    Example:
        >>> position_in_words(2, 120), position_in_words(2, 0)
        ('epoch 3, after step 120', 'the end of epoch 2')
    """
    return f"epoch {epoch + 1}, after step {step}" if step else f"the end of epoch {epoch}"


@dataclass(frozen=True)
class SavedState:
    """One checkpoint, as its manifest describes it.

    Attributes:
        name: Its folder.
        position: Where in the run it was saved, in words.
        saved: The local time when it was complete, such as `"2026-11-24 22:15"`.
        devices: The devices of the run.
        size: Bytes on disk.
        monitored: The monitored value, if any, in words.
        best: Whether it is the best by what was monitored.
        flaw: Why it cannot be used; `None` if the manifest is right. The numbers are not read.
    """

    name: str
    position: str = ""
    saved: str = ""
    devices: int = 0
    size: int = 0
    monitored: str = ""
    best: bool = False
    flaw: str | None = None


@dataclass(frozen=True)
class RunReport(Report):
    """The checkpoints of a run, and the command that makes a `.keras` file of the newest.

    Attributes:
        path: The folder of the run, or of one checkpoint.
        epochs: The number of epochs that the run is to have, `None` if it is unknown.
        model: The name and class of the model, empty if it is unknown.
        needs: Classes of the model that are not Keras's: their code is yours.
        checkpoints: The checkpoints, newest first.
        command: The command to run next.
    """

    path: str
    epochs: int | None
    model: str
    needs: tuple[str, ...]
    checkpoints: tuple[SavedState, ...]
    command: str

    def __str__(self) -> str:
        """The newest checkpoint, and the command that exports it."""
        held = counted(len(self.checkpoints), "checkpoint")
        whole = [saved for saved in self.checkpoints if saved.flaw is None]
        newest = f"; the newest is at {whole[0].position}" if whole else ", all of them damaged"
        return f"{self.path}: {held}{newest}. Next: {self.command}"

    def show(self, console: Console) -> None:
        """Print a table of the checkpoints, and the command."""
        from rich.filesize import decimal
        from rich.table import Table
        from rich.text import Text

        console.print(Text(self.path, "bold"), soft_wrap=True)
        held = counted(len(self.checkpoints), "checkpoint")
        lines = [f"  holds  {held} by lockstep.Checkpoint"]
        lines += [f"  model  {self.model}"] if self.model else []
        lines += [f"  needs  {', '.join(self.needs)} (your code)"] if self.needs else []
        lines += [f"  run    of {counted(self.epochs, 'epoch')}"] if self.epochs else []
        for line in lines:
            console.print(Text(line))
        table = Table(box=None, pad_edge=False)
        table.add_column("checkpoint", no_wrap=True)
        for title in ("saved at", "time", "size", "monitored"):
            table.add_column(title, overflow="fold")
        for saved in self.checkpoints:
            if saved.flaw is not None:
                table.add_row(Text(saved.name), Text(f"DAMAGED: {saved.flaw}", "red"))
                continue
            best = " (best)" if saved.best else ""
            table.add_row(
                *map(Text, (saved.name, saved.position, saved.saved, decimal(saved.size))),
                Text(f"{saved.monitored}{best}"),
            )
        print_table(console, table)
        console.print(Text(f"next: {self.command}", "bold"), soft_wrap=True)


def is_run(path: Path) -> bool:
    """Whether the path is the folder of a run, or of one of its checkpoints."""
    return path.is_dir() and (RunFolder(path).marked() or (path / FILE).exists())


def runs_within(path: Path) -> list[Path]:
    """The runs that a folder holds."""
    within = sorted(path.iterdir()) if path.is_dir() else []
    return [each for each in within if RunFolder(each).marked()]


def report_run(path: Path) -> RunReport:
    """Describe the folder of a run, or of one checkpoint, from the manifests.

    The arrays are not read; `lockstep export` checks every one.

    Args:
        path: A folder for which `is_run` is true.

    Raises:
        CheckpointError: If there is no checkpoint in it, or the folder is no run.
        NewerCheckpoint: If a newer lockstep wrote it.
    """
    alone = (path / FILE).exists()
    folder = RunFolder(path)
    paths = [path] if alone else folder.checkpoints() if folder.check() else []
    if not paths:
        raise CheckpointError(
            f"{path} is the folder of a run, but it contains no checkpoint yet.\n"
            "Run the training script: it saves at the end of each epoch, or at the interval of "
            "its Checkpoint."
        )
    states: dict[Path, dict[str, Any]] = {}
    flaws: dict[Path, str] = {}
    retention = Retention(1, True)
    for each in paths:
        try:
            states[each] = read_manifest(each).state
        except DamagedCheckpoint as error:
            flaws[each] = str(error)
        else:
            retention.note(each, states[each])
    best = None if alone else retention.best_of(paths)
    newest = next(iter(states.values()), {})
    config = newest.get("model")
    needs = own_classes(config)
    words = ["lockstep", "export", str(path), "-o", _output(path, alone)]
    if config is None or needs:
        words += ["--model", "FILE.PY:FUNCTION"]
    return RunReport(
        path=str(path),
        epochs=newest.get("epochs"),
        model=_model(config),
        needs=needs,
        checkpoints=tuple(
            SavedState(each.name, flaw=flaws[each])
            if each in flaws
            else _described(each, states[each], each == best)
            for each in paths
        ),
        command=shlex.join(words),
    )


def _described(path: Path, state: dict[str, Any], best: bool) -> SavedState:
    monitor = state.get("monitor")
    return SavedState(
        name=path.name,
        position=position_in_words(state["epoch"], state["step"]),
        saved=datetime.fromtimestamp((path / FILE).stat().st_mtime).strftime("%Y-%m-%d %H:%M"),
        devices=len(state["devices"]),
        size=sum(file.stat().st_size for file in path.iterdir()),
        monitored=f"{monitor['name']} {monitor['value']:.4g}" if monitor else "",
        best=best,
    )


def _output(path: Path, alone: bool) -> str:
    run = path.resolve().parent if alone else path.resolve()
    return f"{run.name or 'model'}.keras"


def _model(config: Any) -> str:
    if not isinstance(config, dict):
        return ""
    inner = config.get("config")
    name = inner.get("name") if isinstance(inner, dict) else None
    return f"{name!r} ({config.get('class_name')})" if name else str(config.get("class_name", ""))


def own_classes(config: Any) -> tuple[str, ...]:
    """Return the classes and lambdas in a configuration that Keras alone cannot make."""
    return tuple(dict.fromkeys(_own_classes(config)))


def _own_classes(config: Any) -> Iterator[str]:
    # keras/src/saving/serialization_lib.py: Keras's own classes have no registered name; those
    # that have one, as Functional, have a module of Keras.
    for part in parts_of(config):
        name, module = part.get("class_name"), str(part.get("module"))
        if name == "__lambda__":
            yield "a lambda"
        elif part.get("registered_name") is not None and not module.startswith("keras."):
            yield str(name)
