"""Runs the steps of one model in one of several processes of a launcher."""

import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lockstep.engines.replicas.first_step import Difference, Recording, Sketches
from lockstep.engines.torch.first_step import recorded_step
from lockstep.engines.torch.forward_state import ForwardState
from lockstep.engines.torch.group import PeerLost
from lockstep.engines.torch.layers import Plan
from lockstep.engines.torch.replica import Replica
from lockstep.engines.torch.settings import checksum
from lockstep.engines.torch.step_runner import StepRunner
from lockstep.engines.torch.steps import run_step
from lockstep.engines.torch.torch_group import TorchGroup
from lockstep.errors import ProcessesDisagree
from lockstep.processes.agreement import DataCheck
from lockstep.processes.constants import constants_of
from lockstep.processes.coordination import digest, lost_connection_error, once
from lockstep.processes.process_group import share_variables
from lockstep.processes.variable_drift import VariableDrift
from lockstep.state import variables_of


class JoinedRunner(StepRunner):
    """Runs the steps of one model, each process on its rows of the same batch.

    Attributes:
        assigned: What this process has assigned to variables.
    """

    def __init__(self, model: Any, group: TorchGroup) -> None:
        super().__init__(model, group.device)
        self._group = group
        self._shared: dict[int, Any] = {}  # the variables that all processes have, by their `id`
        self.assigned = VariableDrift(model, self._held)
        self._in_epoch = self._trained = False
        self._agreed_plan: list[Any] | None = None

    def adopt(self, *, first: bool) -> None:
        """Give every process the first one's values of new variables.

        Args:
            first: Whether no step function exists yet. Then all processes compare what they have.
        """
        variables = variables_of(self._model)
        new = [v for v in variables if id(v) not in self._shared]
        if new or first:
            share_variables([*new, *(constants_of(self._model) if new else [])])
        self._shared = {id(variable): variable for variable in variables}

    @contextmanager
    def epoch(self, *, changes: bool) -> Iterator[None]:
        """Run the steps of one epoch inside the context, and compare the weights at its end."""
        self.assigned.note()
        self._in_epoch, self._agreed_plan = True, None
        try:
            with super().epoch(changes=changes):
                yield
        finally:
            self._in_epoch = False
        self._know()
        if self._trained:
            self._trained = False
            self._compare_weights()

    def agreed(self, batches: Iterator[Any]) -> Any:
        """Return the next batch of a call without an epoch, if every process has it."""
        if self._in_epoch:
            return next(batches)
        check = DataCheck(every_pull=True)
        noted = iter(check.each(batches))
        (batch,) = check.agreed(lambda: [next(noted)], None, self.noted())
        check.check()
        return batch

    def agree_on_plan(self, unsplit: str | None) -> None:
        """Check that every process runs the same layers by rows: gloo ends Python otherwise.

        Args:
            unsplit: Why this process runs the batch whole, `None` if it does not.

        Raises:
            ProcessesDisagree: If another process runs layers otherwise.
        """
        mine = [str(unsplit), sorted(self._reasons)]
        if self._in_epoch and self._agreed_plan is not None:
            # Callbacks may differ between processes, so that nothing is exchanged here.
            if mine != self._agreed_plan:
                raise ProcessesDisagree(
                    f"The layers of {self._model.name!r} that run on the whole batch have changed "
                    "within an epoch,\nand several processes agree on them at its start. Change "
                    "the model between two epochs."
                )
            return
        self._agreed_plan = mine
        least, greatest = once([mine, self._group.rank])
        if least[0] != greatest[0]:
            first, other = sorted([least[1], greatest[1]])
            raise ProcessesDisagree(
                f"Process {other} runs other layers of {self._model.name!r} on the whole batch "
                f"than process {first}: they would not exchange the same rows.\n"
                "Give every process the same layers. Code that depends on the process cannot be "
                "split."
            )

    def noted(self) -> VariableDrift:
        """Return what this process has assigned up to now."""
        if self._changes:
            self.assigned.note()
        return self.assigned

    def stepped(self) -> None:
        """Record the values that a step has left, which are those of every process."""
        if self._changes:
            self._know()

    def step(self, kind: str, data: Any, rows: int) -> Any:
        """Run one step in every process, and return the logs or predictions in each."""
        if self.unchecked:
            proven = self._proven(Plan(self._model))
            self._plan = self._planned(proven)
            self._state = ForwardState(self._model)
        self._state.save()
        self._trained |= kind == "train"
        with self._together(rows) as replica, self._random_numbers(kind):
            result = run_step(kind, self._model, self._plan, self.losses, replica, data)
        self.unchecked = self._changes
        return result

    @contextmanager
    def _together(self, rows: int) -> Iterator[Replica]:
        """Exchange rows with the other processes inside the context."""
        replica = Replica(self._group.ranks, rows, self._streams, self._device, returns=True)
        try:
            yield replica
            replica.check()
        except PeerLost:
            self._group.leave_ranks()
            if not replica.has_updated:  # else the metrics alone are lost
                self._state.put_back()
            raise lost_connection_error() from None
        except BaseException:
            self._group.leave_ranks()
            raise

    def recorded(self, kind: str, data: Any, rows: int) -> tuple[Recording, list[Sketches]]:
        """Run one step in every process without an update; see `StepRunner`.

        Each process has the sketches of its own rows.
        """
        self._plan = self._planned(self._proven(Plan(self._model)))
        self._state = ForwardState(self._model)
        self._state.save()
        with self._together(rows) as replica:
            recording = recorded_step(
                self._model, lambda: self._drawn_as_one(kind, replica, data), is_custom=False
            )
        self._know()
        self.unchecked = True
        several: list[Sketches] = [{} for _ in range(self._group.size)]
        several[self._group.rank] = recording.sketches()
        return recording, several

    def _drawn_as_one(self, kind: str, replica: Replica, data: Any) -> Any:
        with self._streams.of_one_device():
            return run_step(kind, self._model, self._plan, self.losses, replica, data)

    def agreed_difference(self, found: Difference | None) -> Difference | None:
        """Return the difference that some process has found, the same one in all processes."""
        mine = found or Difference("", "", 0.0)
        _, greatest = once([mine.kind, mine.name, mine.distance, mine.layer])
        return Difference(*greatest) if greatest[0] else None

    def _random_numbers(self, kind: str) -> AbstractContextManager[None]:
        if self.draws_together:
            return self._streams.of_one_device()
        return self._streams.apart(self._draw_base(kind), self._group.rank)

    def _held(self) -> list[Any]:
        return [v for v in variables_of(self._model) if id(v) in self._shared]

    def _know(self) -> None:
        self.assigned.left([variable.value for variable in variables_of(self._model)])

    def _compare_weights(self) -> None:
        sums = [checksum(variable.value) for variable in self._model.trainable_variables]
        mine = digest([zlib.crc32(repr(sums).encode()).to_bytes(4, "little")])
        least, greatest = once([mine, self._group.rank])
        if least[0] != greatest[0]:
            raise ProcessesDisagree(
                f"After this epoch, process {greatest[1]} has other weights than process "
                f"{least[1]}: they have not computed alike.\nA layer or step may depend on the "
                "process, the time, or operations in any order. Go back to a file of the epoch "
                "before."
            )
