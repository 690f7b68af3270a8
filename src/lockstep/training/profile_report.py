"""What `lockstep.Profile` found: the parts of the time of a `fit`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lockstep.core.report import Report, print_table, table

if TYPE_CHECKING:
    from rich.console import Console

PARTS = {
    "input": "waiting for data",
    "steps": "steps",
    "callbacks": "callbacks",
    "validation": "validation",
    "checkpoint": "checkpoint",
    "compile": "compiling",
    "other": "other",
}
"""The parts of a `fit`, in words."""

SHORT = 0.002
"""The duration of a step, in seconds, below which the work to start it matters."""

_SHOWN = 0.02
"""The share of the time from which the part `other` is shown."""

_NAMED = 3
"""The number of callbacks that are named."""


@dataclass(frozen=True)
class FitProfile(Report):
    """Where the time of one `fit` went. Times are in seconds; the parts add up to `wall`.

    Attributes:
        wall: From the start of `fit` to its end.
        input: The wait for data; `None` on TensorFlow, where the steps include it.
        steps: The steps of training.
        callbacks: The callbacks, but for `lockstep.Checkpoint`.
        validation: The validation.
        checkpoint: `lockstep.Checkpoint`.
        compile: The compilation of the steps, as far as it can be told from them.
        other: What remains.
        by_callback: The time of each class of callbacks, longest first.
        step: One step of training.
        taken: The steps of training that were taken.
        steps_per_execution: Steps of an execution.
        data: The kind of data, a key of `lockstep.training.profile_report.DATA`, or `"other"`.
        workers: The workers that prepare batches; `None` if that is unknown.
        backend: The backend of Keras.
        ended_by: The class of the error that ended the `fit`; `None` without one.
        platform: The kind of the devices: `"cpu"`, `"gpu"` or `"tpu"`; empty if that is unknown.
    """

    wall: float
    input: float | None
    steps: float
    callbacks: float
    validation: float
    checkpoint: float
    compile: float
    other: float
    by_callback: dict[str, float]
    step: float
    taken: int
    steps_per_execution: int
    data: str
    workers: int | None
    backend: str
    ended_by: str | None = None
    platform: str = ""

    @property
    def verdict(self) -> str:
        """Return one line: the time, and its parts."""
        ended = f" until {self.ended_by}" if self.ended_by else ""
        told = []
        for part, words in PARTS.items():
            seconds = getattr(self, part) or 0.0
            if not self._is_shown(part, seconds):
                continue
            words = "steps with their data" if part == "steps" and self.input is None else words
            named = self._named() if part == "callbacks" else ""
            told.append(f"{words} {self._text(seconds)}{named}")
        return f"of {self._text(self.wall)} s{ended}: {', '.join(told)}"

    def _is_shown(self, part: str, seconds: float) -> bool:
        if part == "other":
            return seconds > _SHOWN * self.wall
        return part == "steps" or float(self._text(seconds)) > 0

    def _text(self, seconds: float) -> str:
        return f"{seconds:.1f}" if self.wall >= 10 else f"{seconds:.2f}"

    def _named(self) -> str:
        each = [(name, self._text(seconds)) for name, seconds in self.by_callback.items()]
        each = [(name, text) for name, text in each if float(text) > 0][:_NAMED]
        return f" ({', '.join(f'{name} {text}' for name, text in each)})" if each else ""

    @property
    def advice(self) -> str:
        """Return one line: what to try, and the time of the `fit` with it at best."""
        parts = {part: getattr(self, part) or 0.0 for part in PARTS if part != "other"}
        longest = max(parts, key=lambda part: parts[part])
        if not parts[longest]:
            return ""
        if longest == "steps":
            return self._advice_on_steps()
        if longest == "compile":
            return "A longer fit does not compile again."
        saved = parts[longest]
        if longest == "input":
            words = _more_input(self.data, self.workers)
        elif longest == "validation":
            words = "a larger validation_freq, or less validation data"
        elif longest == "checkpoint":
            words = "to save less often, such as lockstep.Checkpoint(..., seconds=600)"
        else:
            name, saved = next(iter(self.by_callback.items()))
            words = f"to let {name} save or log less often"
            words = "verbose=2, as the progress bar takes time" if name == _BAR else words
        best = max(self.wall - saved, self.steps)
        return f"Try {words}: at best {self._text(best)} s."

    def _advice_on_steps(self) -> str:
        one_by_one = self.steps_per_execution == 1 and self.backend != "torch"  # Keras refuses it
        if self.step < SHORT and one_by_one:
            return (
                f"Try compile(steps_per_execution=10): a step takes only {self.step * 1e3:.2g} "
                "ms, and Python starts each one."
            )
        return "The steps take the longest: lockstep bench shows whether more devices help."

    def as_dict(self) -> dict[str, Any]:
        """Return the same as plain lists, numbers and strings."""
        return {**asdict(self), "verdict": self.verdict, "advice": self.advice}

    def __str__(self) -> str:
        """The verdict and the advice, a line each; on TPUs what is not known of them."""
        unknown = _NO_TPU_YET if self.platform == "tpu" else ""
        return "\n".join(filter(None, (self.verdict, self.advice, unknown)))

    def show(self, console: Console) -> None:
        """Print a table, then the advice."""
        shown = table("part", "s", "share")
        for part, words in PARTS.items():
            seconds = getattr(self, part)
            if seconds is None:
                continue
            words = "steps with their data" if part == "steps" and self.input is None else words
            shown.add_row(words, self._text(seconds), f"{seconds / (self.wall or 1):.0%}")
            if part == "callbacks":
                for name, spent in list(self.by_callback.items())[:_NAMED]:
                    if float(self._text(spent)) > 0:
                        shown.add_row(f"  {name}", self._text(spent), "")
        shown.add_row("fit", self._text(self.wall), "")
        print_table(console, shown)
        for line in str(self).splitlines()[1:]:
            console.print(line, markup=False, highlight=False)


_NO_TPU_YET = (
    "Profile has not been tested on a TPU, so the split into parts may be wrong. The total time "
    "of `fit` is right."
)
_BAR = "ProgbarLogger"

DATA = {
    "arrays": "a larger batch_size, or a tf.data pipeline with prefetch",
    "tf.data": "map(..., num_parallel_calls=tf.data.AUTOTUNE) and prefetch(tf.data.AUTOTUNE)",
    "PyDataset": "workers=4 in the PyDataset",
    "generator": "a PyDataset with workers=4 instead of the generator",
    "DataLoader": "num_workers=4 in the DataLoader",
    "Grain": "Grain's mp_prefetch",
}
"""What makes batches faster, by kind of data without workers."""


def _more_input(data: str, workers: int | None) -> str:
    if data in ("PyDataset", "DataLoader") and (workers or 0) > 1:
        return f"more than {workers} workers of the {data}"
    return DATA.get(data, "workers for the data, or a tf.data pipeline with prefetch")
