"""The traced steps of one rank, by their number."""

import hashlib
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import keras
import torch

from lockstep.engines.torch.exchange.group import PeerLost, RankGroup
from lockstep.engines.torch.steps.replica import random_state, set_random_state
from lockstep.engines.torch.traced.gradients import Untraceable
from lockstep.engines.torch.traced.graph import exchanging
from lockstep.engines.torch.traced.split import Mesh
from lockstep.engines.torch.traced.trace import Computed, TracedStep


@dataclass(frozen=True)
class TraceAnswer:
    """What a rank says of a trace.

    Attributes:
        reason: Why there is none; `""` if there is.
        exchanges: A hash of what a run exchanges.
        draws: Whether a run draws from PyTorch's own random numbers.
    """

    reason: str = ""
    exchanges: str = ""
    draws: bool = False


class RankTraces:
    """The traced steps of one rank.

    Args:
        model: The model.
        device: The PyTorch device of this rank.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._steps: dict[int, TracedStep] = {}
        self._meshes: dict[tuple[int, int], Mesh] = {}

    def trace(
        self, number: int, kept: Sequence[int], kind: str, batch: Any, group: RankGroup
    ) -> TraceAnswer:
        """Trace a step, and return whether this was possible.

        Args:
            number: Its number.
            kept: The numbers of the other traces that are still used.
            kind: `"train"`, `"test"` or `"predict"`.
            batch: A global batch of its form.
            group: The ranks.
        """
        self._steps = {each: step for each, step in self._steps.items() if each in kept}
        try:
            step = TracedStep(self._model, kind, batch, self._mesh(group))
        except Exception as error:  # any code of the user's may raise anything there
            return TraceAnswer(_reason(error))
        self._steps[number] = step
        exchanges = hashlib.blake2b(repr(step.exchanges).encode(), digest_size=16).hexdigest()
        return TraceAnswer("", exchanges, step.draws)

    def run(self, number: int, batch: Any, state: Any, group: RankGroup) -> Computed:
        """Compute a step; no tensor of the model changes.

        Args:
            number: The number of its trace.
            batch: The global batch.
            state: The state of PyTorch's random numbers, if it draws.
            group: The ranks.
        """
        step = self._steps[number]
        if state is not None:
            set_random_state(state)
        with exchanging(group):
            computed = step.run(batch)
        group.check()
        return computed

    def compiled(self, number: int, batch: Any) -> str:
        """Return how the compilation of a traced step stands; see `TracedStep.compiled`.

        Args:
            number: The number of its trace.
            batch: A global batch of its form.
        """
        return self._steps[number].compiled(batch)

    def compared(self, number: int, batch: Any, group: RankGroup) -> str:
        """Return how a compiled step differs from its graph; see `TracedStep.compared`.

        Args:
            number: The number of its trace.
            batch: A global batch of its form.
            group: The ranks.
        """
        with exchanging(group):
            found = self._steps[number].compared(batch)
        group.check()
        return found

    def use_compiled(self, number: int, use: bool) -> None:
        """Let a traced step run what has been compiled of it, or leave that out.

        Args:
            number: The number of its trace.
            use: Whether to run it.
        """
        self._steps[number].use_compiled(use)

    def try_out(self, number: int, batch: Any, state: Any, group: RankGroup) -> Computed:
        """Compute a step as `run`, and leave PyTorch's random numbers as they are."""
        before = random_state()
        try:
            computed = self.run(number, batch, state, group)
            return computed._replace(random_state=random_state())
        finally:
            set_random_state(before)

    def _mesh(self, group: RankGroup) -> Mesh | None:
        if group.size == 1:
            return None
        place = group.rank, group.size
        if place not in self._meshes:
            self._meshes[place] = Mesh(*place, self._device.type)
        return self._meshes[place]


def _reason(error: Exception) -> str:
    """Return why a step could not be traced, in which part, and the line of the user's code."""
    if isinstance(error, PeerLost):
        raise error
    place = ""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_of_library(frame.filename)]
    if own:
        place = f"{own[-1].filename}, line {own[-1].lineno}: {(own[-1].line or '').strip()}"
    parts = [part for frame, _ in traceback.walk_tb(error.__traceback__) if (part := _part(frame))]
    text = next((line for line in _lines(error) if line), type(error).__name__)
    if isinstance(error, Untraceable):
        return _short(text)
    reads = "data-dependent" in text.lower() or "numpy() is not supported" in text
    if reads or "DataDependent" in type(error).__name__:
        text = "Python reads the value of a tensor"
    what = f"in the {parts[-1]}" if parts else ""
    return " ".join(filter(None, [_short(text), what, f"({place})" if place else ""]))


def _lines(error: Exception) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if "Exception encountered" not in line]


def _short(text: str) -> str:
    text = text.replace("\x1b[1m", "").replace("\x1b[0m", "")
    text = text.rstrip(".")
    return text if len(text) <= _MOST else text[: _MOST - 3] + "..."


_MOST = 160


def _part(frame: FrameType) -> str:
    """Return the part of the model whose method a frame runs, or ""."""
    item: Any = frame.f_locals.get("self")
    if isinstance(item, keras.Model):  # it runs all others
        return ""
    kinds = (keras.layers.Layer, keras.Loss, keras.Metric, keras.Optimizer)
    kind = next((each for each in kinds if isinstance(item, each)), None)
    return f"{kind.__name__.lower()} {item.name!r}" if kind is not None else ""


def _is_of_library(path: str) -> bool:
    parts = path.replace("\\", "/").split("/")
    return "site-packages" in parts or "lockstep" in parts or path.startswith("<")
