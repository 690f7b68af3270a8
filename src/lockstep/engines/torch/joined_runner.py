"""Runs the steps of one model in one of several processes of a launcher."""

import threading
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from lockstep.engines.replicas.first_step import Difference, Recording, Sketches
from lockstep.engines.torch.first_step import recorded_step
from lockstep.engines.torch.forward_state import ForwardState
from lockstep.engines.torch.group import Group, PeerLost
from lockstep.engines.torch.layers import Plan
from lockstep.engines.torch.replica import Replica
from lockstep.engines.torch.settings import checksum
from lockstep.engines.torch.sharded_variables import Shards, is_sharded
from lockstep.engines.torch.step_runner import StepRunner, uninterrupted
from lockstep.engines.torch.steps import run_step
from lockstep.engines.torch.torch_group import TorchGroup
from lockstep.errors import ProcessesDisagree, UnsupportedModel
from lockstep.keras_compat import stored_value
from lockstep.processes.agreement import DataCheck
from lockstep.processes.constants import constants_of
from lockstep.processes.coordination import digest, lost_connection_error, once
from lockstep.processes.process_group import check_alike, share_variables
from lockstep.processes.reads_of_all import ReadsOfFirst, agree_on_variable
from lockstep.processes.variable_drift import VariableDrift
from lockstep.state import variables_of

_MOST_VARIABLES = 1 << 32
"""The numbers of the variables of one model do not reach those of the next one."""


class JoinedRunner(StepRunner):
    """Runs the steps of one model, each process on its rows of the same batch.

    Attributes:
        assigned: What this process has assigned to variables.
        saved: Lets the others follow what the first process reads for a file.
    """

    def __init__(self, model: Any, group: TorchGroup) -> None:
        super().__init__(model, group.device)
        self._group = group
        self._shared: dict[int, Any] = {}  # the variables that all processes have, by their `id`
        self.assigned = VariableDrift(model, self._held)
        self.shards = Shards(self)
        self._number_of_first = next(group.models) * _MOST_VARIABLES
        self._turn = threading.RLock()
        self.saved = ReadsOfFirst(
            lambda: dict(enumerate(self.shards.variables, self._number_of_first)),
            lambda variable: self._gather(stored_value(variable)),
        )
        self._in_epoch = self._trained = False
        self._agreed_plan: list[Any] | None = None
        self._compares_exchanges = False

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
        # Each layer exchanges the weights that it reads.
        self._compares_exchanges = bool(self.shards.variables)

    def noted(self) -> VariableDrift:
        """Return what this process has assigned up to now."""
        if self._changes:
            self.assigned.note()
        return self.assigned

    def stepped(self) -> None:
        """Record the values that a step has left, which are those of every process."""
        if self._changes:
            self._know()

    @uninterrupted
    def step(self, kind: str, data: Any, rows: int) -> Any:
        """Run one step in every process, and return the logs or predictions in each."""
        self._check_parts_are_of_one_step()
        self.shards.check_written()
        self._check_casts_of_parts(kind)
        if self.unchecked:
            proven = self._proven(Plan(self._model))
            self._plan = self._planned(proven)
            self._state = ForwardState(self._model)
        self._state.save()
        self._trained |= kind == "train"
        with self._together(rows) as replica, self._random_numbers(kind):
            result = run_step(kind, self._model, self._plan, self.losses, replica, data)
        self._compares_exchanges = False
        self.unchecked = self._changes
        return result

    @contextmanager
    def _together(self, rows: int) -> Iterator[Replica]:
        """Exchange rows with the other processes inside the context."""
        with self._connected() as ranks:
            ranks.compares = self._compares_exchanges
            replica = Replica(ranks, rows, self._streams, self._device, shards=self.shards)
            try:
                yield replica
                replica.check()
            except BaseException:  # such as KeyboardInterrupt
                if not replica.has_updated:  # else the metrics alone are lost
                    self._state.put_back()
                raise
            ranks.compares = False

    @contextmanager
    def _connected(self) -> Iterator[Group]:
        """Exchange tensors with the other processes inside the context."""
        with self._in_turn():
            try:
                self.shards.group = self._group.ranks
                yield self.shards.group
            except BaseException as error:
                self.shards.group = None
                self._group.leave_ranks()
                if isinstance(error, PeerLost):
                    raise lost_connection_error() from None
                raise

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Keep other threads out: each process would exchange something else at a time."""
        if not self._turn.acquire(blocking=False):
            raise UnsupportedModel(
                f"Two threads use {self._model.name!r}, whose processes exchange what it has.\n"
                "They have to do so in the same order in every process.\n"
                "Read variables and run steps in one thread."
            )
        try:
            yield
        finally:
            self._turn.release()

    # -------------------------------------------------------- variables in parts

    def _processes(self) -> int:
        return self._group.size

    def _ranks(self) -> Group:
        with self._connected() as ranks:
            return ranks

    def _give_parts(self, found: list[Any]) -> None:
        """Keep those of this process: each has the whole values, which `adopt` has shared.

        Those on the host are sent by the first process.
        """
        self.shards.keep([id(stored_value(variable)) for variable in found])
        if any(map(self.shards.is_from_host, found)):
            check_alike(self.shards.new())
            self.shards.send()
        self.shards.forget_new()

    def _number(self, part: Any) -> int:
        for number, variable in enumerate(self.shards.variables, self._number_of_first):
            if stored_value(variable) is part:
                return number
        raise self._dropped()

    def gathered(self, part: Any) -> tuple[Any, bool]:
        """Return the parts of all processes, which call this together; see `Remote`."""
        self._check_parts_are_of_one_step()
        with self._in_turn():
            agree_on_variable(self._number(part))
            return self._gather(part), self.shards.is_written(part)

    def _gather(self, part: Any) -> Any:
        with self._connected() as ranks:
            flat = ranks.gather(part, [len(part)] * ranks.size)
            ranks.check()
        return flat

    def scatter(self, part: Any, whole: Any) -> None:
        """Give each process its part of the value that the first one has; see `Remote`."""
        self._check_parts_are_of_one_step()
        with self._in_turn(), torch.no_grad():
            agree_on_variable(self._number(part), "assigns to")
            with self._connected() as ranks:
                flat = self.shards.padded(whole, len(part))
                ranks.broadcast_in_place([flat])
                ranks.check()
            part.copy_(flat[ranks.rank * len(part) :][: len(part)])
            self.shards.note([part])

    def _check_parts_are_of_one_step(self) -> None:
        """Raise if an error has ended an update of the parts before its end."""
        if self.shards.is_updating:
            raise UnsupportedModel(
                f"{self._model.name!r} is lost: its state was sharded, and an error has ended an "
                "update,\nso that the processes have parts of two steps.\n"
                "Build it anew, and resume from a lockstep.Checkpoint."
            )

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
        return [v for v in self._whole() if id(v) in self._shared]

    def _whole(self) -> list[Any]:
        """Return the variables that every process has whole."""
        return [v for v in variables_of(self._model) if not is_sharded(v)]

    def _know(self) -> None:
        self.assigned.left([variable.value for variable in self._whole()])

    def _compare_weights(self) -> None:
        weights = [v for v in self._model.trainable_variables if not is_sharded(v)]
        sums = [checksum(weight.value) for weight in weights]
        mine = digest([zlib.crc32(repr(sums).encode()).to_bytes(4, "little")])
        least, greatest = once([mine, self._group.rank])
        if least[0] != greatest[0]:
            raise ProcessesDisagree(
                f"After this epoch, process {greatest[1]} has other weights than process "
                f"{least[1]}: they have not computed alike.\nA layer or step may depend on the "
                "process, the time, or operations in any order. Go back to a file of the epoch "
                "before."
            )
