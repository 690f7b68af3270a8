"""Who runs the calls of a rank together with it: workers of a pool, or scripts of a launcher."""

# ruff: noqa: B027 (an empty method is what one kind of peers has no need of)

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeVar, cast

import torch

from lockstep.core.held_signals import HeldSignals
from lockstep.core.state import variables_of
from lockstep.engines.replicas.sketches import Mismatch
from lockstep.engines.torch.exchange.group import LoneRank
from lockstep.engines.torch.exchange.placement import check_placement
from lockstep.engines.torch.ranks.rank import (
    Answer,
    Arguments,
    Call,
    Marked,
    PlanArguments,
    Question,
    Rank,
)
from lockstep.engines.torch.same_model.model_pickle import Dumped
from lockstep.engines.torch.sharded.sharded_variables import Shards, shards_in
from lockstep.engines.torch.steps.replica import random_state
from lockstep.engines.torch.traced.rank_traces import TraceAnswer
from lockstep.errors import UnsupportedModel

Method = TypeVar("Method", bound=Callable[..., Any])


def uninterrupted(method: Method) -> Method:
    """Let signals wait for the end of a call, if the other processes have parts of the model.

    An exception within a call ends them, and their parts.
    """

    @functools.wraps(method)
    def run(self: Any, *args: Any) -> Any:
        if not self.rank.shards.variables:
            return method(self, *args)
        with HeldSignals():
            return method(self, *args)

    return cast(Method, run)


class Peers(ABC):
    """Who runs the calls of a rank together with it.

    Attributes:
        rank: The rank of this process.
        size: The number of processes.
        times_sent: How often the model was sent to processes that had another one.
        in_script: Whether every process runs the script.
        user_code_between_steps: Whether code of the user runs between two steps.
    """

    in_script = False

    def __init__(self, model: Any, device: torch.device, size: int) -> None:
        self.rank = Rank(model, device, Shards(self))
        self.size = size
        self.times_sent = 0
        self.user_code_between_steps = True
        self._model = model
        self._plan: PlanArguments | None = None

    @abstractmethod
    def check_devices(self, devices: tuple[str, ...]) -> None:
        """Raise if these are no devices of the processes."""

    def start(self) -> None:
        """Start the processes that the first step needs, without waiting for them."""

    def to_start(self) -> int:
        """Return the number of processes that the first step would wait for."""
        return 0

    def methods(self, methods: dict[str, Any], *, is_sharded: bool) -> dict[str, Any]:
        """Return the methods to replace on the model, given those of all engines."""
        return methods

    def end(self) -> None:
        """Leave the other processes: the model goes back to one device."""

    def connected(self) -> AbstractContextManager[None]:
        """Connect the rank with the other ones inside the context."""
        return nullcontext()

    # ------------------------------------------------------------ calls

    def call(
        self,
        call: Call[Arguments, Answer],
        *arguments: Arguments.args,
        **here: Arguments.kwargs,
    ) -> Answer:
        """Run a method of `Rank` in every process, and return the answer of this one.

        Args:
            call: The method.
            arguments: Its arguments in every process.
            here: Arguments in this process alone.
        """
        self._send(call, arguments)
        return call.method(self.rank, *arguments, **here)

    def ask(
        self,
        question: Question[Arguments, Answer],
        *arguments: Arguments.args,
        **here: Arguments.kwargs,
    ) -> list[Answer]:
        """Run a method of `Rank` in every process, and return the answers that are known here."""
        self._send(question, arguments)
        return self._answers(question.method(self.rank, *arguments, **here))

    def _send(self, call: Marked[..., Any], arguments: tuple[Any, ...]) -> None:
        """Send a call to the processes that do not make it by themselves."""

    def _answers(self, mine: Any) -> list[Any]:
        """Return the answers of all ranks, given that of this one."""
        return [mine]

    def compared(self, form: Any) -> AbstractContextManager[None]:
        """Let the ranks compare what they exchange in the first step of a form."""
        return nullcontext()

    # ------------------------------------------------------------ the same model everywhere

    def code_changed(self) -> tuple[bool, bool]:
        """Return whether code has changed the model since a step, and whether a step has."""
        return False, False

    def is_sent(self, dumped: Dumped) -> bool:
        """Return whether the processes that follow this one have this model.

        Here they have that of their script.
        """
        return True

    def make_equal(self, unchecked: bool, dumped: Callable[[], Dumped]) -> bool:
        """Let every process have the same model, and return whether all of it was compared.

        Here the script of each process has changed it alike, and it may have other layers.

        Args:
            unchecked: Whether code of the user's may have changed anything.
            dumped: Returns the model as bytes.
        """
        if unchecked:
            self.rank.sort_layers()
            self._plan = None
            with suppress(UnsupportedModel):  # no process needs a copy of it
                found = dumped()
                self.rank.tensors, self.rank.generators = found.tensors, found.generators
        return unchecked

    def share_plan(self, plan: PlanArguments) -> None:
        """Give every rank this plan."""
        if plan != self._plan:
            self.call(Rank.take_plan, plan)
            self._plan = plan

    def share_code_state(self) -> None:
        """Let every rank draw the numbers, and have the gradients, that code of a step may use."""

    def note_step(self, *, by_own_code: bool = False) -> None:
        """Note what a step of all ranks has left, which is the same in every process.

        Args:
            by_own_code: Whether the step was the user's own, which may keep gradients.
        """

    def epoch(self) -> AbstractContextManager[None]:
        """Note the begin and the end of an epoch."""
        return nullcontext()

    def compare_weights(self) -> None:
        """Raise after an epoch if another process has other weights.

        Raises:
            ProcessesDisagree: If it has.
        """

    # ------------------------------------------------------------ variables in parts

    def number_of(self, part: Any) -> int:
        """Return the number of a part in the processes.

        Raises:
            UnsupportedModel: If they have dropped it.
        """
        raise dropped_part(self._model)

    def give_parts(self, found: list[Any], dumped: Callable[[], Dumped]) -> None:
        """Let every process have its parts of new variables.

        Args:
            found: All variables that are sharded.
            dumped: Returns the model as bytes.
        """

    def gathered(self, part: Any) -> tuple[Any, bool]:
        """Return the parts of all processes; see `Remote`."""
        with self._used_by_all(part, "reads") as name:
            return self.call(Rank.gather_part, name), self.rank.shards.is_written(part)

    def scatter(self, part: Any, whole: Any) -> None:
        """Give each process its part of a whole value; see `Remote`."""
        with self._used_by_all(part, "assigns to") as name:
            self.call(Rank.scatter_part, name, whole=whole)
            self.rank.shards.note([part])

    @contextmanager
    def _used_by_all(self, part: Any, use: str) -> Iterator[Any]:
        """Connect the ranks inside the context, for a use of one part; yield what names it there.

        Args:
            part: The part of this process.
            use: What code does with it, in words.
        """
        with self.connected():
            yield part

    # What the processes of a launcher agree on; the workers of a pool follow rank 0.

    def adopt(self, *, first: bool) -> None:
        """Let every process have the same values of new variables."""

    def take_first_values(self) -> None:
        """Let every process have the values of the first one, after a step that each has run."""

    def next_batch(self, batches: Iterator[Any], *, changes: bool) -> Any:
        """Return the next batch, once every process has one.

        Args:
            batches: The batches.
            changes: Whether code of the user may have changed the model.
        """
        return next(batches)

    def agree_on_plan(self, unsplit: str | None, reasons: list[int]) -> None:
        """Check that every process runs the same layers by rows."""

    def assignments(self, *, changes: bool) -> Any:
        """Return what this process has assigned up to now, for the other processes."""
        return None

    def agreed_difference(self, found: Mismatch | None) -> Mismatch | None:
        """Return the difference that all processes act on."""
        return found

    def agreed_reason(self, reason: str | None) -> str | None:
        """Return why no process traces a step, `None` if all may."""
        return reason

    def agreed_trace(self, answers: list[TraceAnswer]) -> TraceAnswer:
        """Return what all ranks say of a trace, given the answers that are known here."""
        first, *others = sorted(answers, key=lambda answer: answer.reason, reverse=True)
        if first.reason:
            return first
        if any(each != first for each in others):
            return TraceAnswer("does not run the same collectives in every process")
        return first

    def agreed_state(self, states: list[str]) -> str:
        """Return how the compilation of a trace stands in all ranks.

        Args:
            states: How it stands in those that are known here; see `inductor.COMPILED`.
        """
        return max(states)

    def common_state(self) -> Any:
        """Return the state of PyTorch's random numbers from which every rank draws."""
        return random_state()

    def note_values(self, *, changes: bool) -> None:
        """Note the values that any step has left.

        Args:
            changes: Whether code of the user may change the model before the next one.
        """


class NoPeers(Peers):
    """The peers of the rank of one device: there are none.

    Args:
        model: The model.
        device: The PyTorch device of this process.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(model, device, 1)
        self.rank.group = LoneRank(device)

    def check_devices(self, devices: tuple[str, ...]) -> None:
        """Raise if this process cannot compute on the device."""
        check_placement(devices)

    # One device has the whole of each variable.

    def gathered(self, part: Any) -> tuple[Any, bool]:
        """Return the whole."""
        return part, False

    def scatter(self, part: Any, whole: Any) -> None:
        """Take the whole."""
        part.copy_(whole)


def check_parts(model: Any, shards: Shards) -> None:
    """Raise if the model has a variable of which the processes have parts for another one."""
    found = shards_in(variables_of(model))
    if any(each is not shards and each.host is None for each in found):
        raise UnsupportedModel(
            f"{model.name!r} shares variables with another model, whose state is sharded.\n"
            "A sharded variable can belong to only one model.\n"
            "Call lockstep.release on the other model first."
        )


def dropped_part(model: Any) -> UnsupportedModel:
    """Return the error for a part that the processes do not have any more."""
    return UnsupportedModel(
        f"This variable belonged to {model.name!r} when its state was sharded, but no longer "
        "does:\nthe other processes have deleted their shards. It may belong to an earlier "
        "optimizer.\nCopy its value before it is removed from the model."
    )
