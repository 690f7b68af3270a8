"""Which checkpoints stay: the newest few, the best one, and one to go back to."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.checkpoints.folder import Found, RunFolder
from lockstep.errors import DamagedCheckpoint


@dataclass
class Retention:
    """Chooses the checkpoints that stay.

    Attributes:
        keep: How many of the newest.
        best: Whether the best one stays too.
        monitored: What each checkpoint that has it says of `monitor`: name, value and mode.
        broken: Those whose loss is no finite number.
    """

    keep: int
    best: bool
    monitored: dict[Path, dict[str, Any]] = field(default_factory=dict)
    broken: set[Path] = field(default_factory=set)

    def note(self, path: Path, state: dict[str, Any]) -> None:
        """Take notice of a checkpoint by what it says of itself."""
        monitor = state.get("monitor")
        if monitor is not None:
            self.monitored[path] = monitor
        if state.get("finite") is False:
            self.broken.add(path)

    def best_of(self, paths: list[Path], like: dict[str, Any] | None = None) -> Path | None:
        """The best of some checkpoints, the newest first; of equals the oldest.

        Args:
            paths: The checkpoints.
            like: A value with a name and a mode; those of another are not compared. `None`: the
                newest one's.
        """
        paths = [path for path in paths if path in self.monitored]
        if not paths:
            return None
        name, mode = ((like or self.monitored[paths[0]])[key] for key in ("name", "mode"))
        valued: list[tuple[Path, float]] = [
            (path, said["value"])
            for path, said in ((path, self.monitored[path]) for path in paths)
            if (said["name"], said["mode"]) == (name, mode) and said["value"] == said["value"]
        ]  # no NaN
        if not valued:
            return None
        return min(reversed(valued), key=lambda each: each[1] if mode == "min" else -each[1])[0]

    def read_best(self, folder: RunFolder, say: Callable[[str], None]) -> Found | None:
        """The best checkpoint that is whole, `None` where there is none.

        Args:
            folder: Where they are.
            say: Is told in words of every one that is damaged and passed over.
        """
        paths = folder.checkpoints()
        while (best := self.best_of(paths)) is not None:
            try:
                return folder.read(best)
            except DamagedCheckpoint as error:
                say(f"The best checkpoint is damaged and was passed over: {error}")
                paths.remove(best)
        return None

    def staying(self, paths: list[Path]) -> set[Path]:
        """Those that stay of some checkpoints, the newest first."""
        staying = set(paths[: self.keep])
        if staying <= self.broken:  # one to go back to
            staying |= set([path for path in paths if path not in self.broken][:1])
        best = self.best_of(paths) if self.best else None
        return staying | {best} if best is not None else staying
