"""Which checkpoints stay: the newest few, and the best one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Retention:
    """Chooses the checkpoints that stay.

    Attributes:
        keep: How many of the newest.
        best: Whether the best one stays too.
        monitored: The value of each checkpoint that has one, and whether less is better.
    """

    keep: int
    best: bool
    monitored: dict[Path, tuple[float, bool]]

    def note(self, path: Path, state: dict[str, Any]) -> None:
        """Take notice of a checkpoint by what it says of itself."""
        monitor = state.get("monitor")
        if monitor is not None:
            self.monitored[path] = (monitor["value"], monitor["mode"] == "min")

    def best_of(self, paths: list[Path]) -> Path | None:
        """The best of some checkpoints, the newest first; of equals the oldest."""
        valued = [(path, *self.monitored[path]) for path in paths if path in self.monitored]
        valued = [(path, value, less) for path, value, less in valued if value == value]  # no NaN
        if not valued:
            return None
        return min(reversed(valued), key=lambda each: each[1] if each[2] else -each[1])[0]

    def staying(self, paths: list[Path]) -> set[Path]:
        """Those that stay of some checkpoints, the newest first."""
        staying = set(paths[: self.keep])
        best = self.best_of(paths) if self.best else None
        return staying | {best} if best is not None else staying
