"""Choose the checkpoints to keep: the newest, the best, and one with a finite loss."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.checkpoint.run_folder import Found, RunFolder
from lockstep.errors import DamagedCheckpoint


@dataclass
class Retention:
    """The rule that selects the checkpoints to keep.

    Attributes:
        keep: Number of newest checkpoints to keep.
        best: Whether to keep the best checkpoint too.
        monitored: The name, value and mode of `monitor`, for each checkpoint that has them.
        broken: Checkpoints whose loss is not finite.
    """

    keep: int
    best: bool
    monitored: dict[Path, dict[str, Any]] = field(default_factory=dict)
    broken: set[Path] = field(default_factory=set)

    def note(self, path: Path, state: dict[str, Any]) -> None:
        """Record the monitored value of a checkpoint, and whether its loss is finite."""
        monitor = state.get("monitor")
        if monitor is not None:
            self.monitored[path] = monitor
        if state.get("finite") is False:
            self.broken.add(path)

    def best_of(self, paths: list[Path], like: dict[str, Any] | None = None) -> Path | None:
        """Return the best checkpoint; of equal ones, the oldest.

        Args:
            paths: The checkpoints, newest first.
            like: A monitored value; only values of the same name and mode are compared. `None`
                takes that of the newest checkpoint.
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
        """Return the best undamaged checkpoint, or `None`.

        Args:
            folder: The folder of the run.
            say: Called with a message for each damaged checkpoint.
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
        """Return the checkpoints to keep.

        Args:
            paths: The checkpoints, newest first.
        """
        staying = set(paths[: self.keep])
        if staying <= self.broken:  # keep one with a finite loss
            staying |= set([path for path in paths if path not in self.broken][:1])
        best = self.best_of(paths) if self.best else None
        return staying | {best} if best is not None else staying
