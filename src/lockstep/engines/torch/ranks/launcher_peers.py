"""The processes of a launcher as peers, each of which runs the script."""

import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

from lockstep.core.state import variables_of
from lockstep.engines.replicas.sketches import Mismatch
from lockstep.engines.torch.exchange.group import PeerLost
from lockstep.engines.torch.ranks.launcher_group import TorchGroup, devices_of_all
from lockstep.engines.torch.ranks.peers import Peers, dropped_part
from lockstep.engines.torch.ranks.rank import Rank
from lockstep.engines.torch.same_model.model_pickle import Dumped
from lockstep.engines.torch.same_model.settings import checksum
from lockstep.engines.torch.sharded.sharded_variables import is_sharded
from lockstep.engines.torch.steps.replica import random_state
from lockstep.engines.torch.traced.rank_traces import TraceAnswer
from lockstep.errors import ProcessesDisagree, UnsupportedModel
from lockstep.keras_compat import stored_value
from lockstep.processes.agreement import DataCheck
from lockstep.processes.coordination import digest, lost_connection_error, once
from lockstep.processes.first_process_io import methods_of_all_processes
from lockstep.processes.normalization_constants import constants_of
from lockstep.processes.process_group import check_alike, share_variables
from lockstep.processes.reads_of_all import ReadsOfFirst, agree_on_variable
from lockstep.processes.variable_drift import VariableDrift

_MOST_VARIABLES = 1 << 32
"""The numbers of the variables of one model do not reach those of the next one."""


class LauncherPeers(Peers):
    """The processes of a launcher; see `Peers`.

    Attributes:
        assigned: What this process has assigned to variables.
        saved: Lets the others follow what the first process reads for a file.
    """

    in_script = True

    def __init__(self, model: Any, group: TorchGroup) -> None:
        super().__init__(model, group.device, group.size)
        self._group = group
        self._shared: dict[int, Any] = {}  # the variables that all processes have, by their `id`
        self.assigned = VariableDrift(model, self._held)
        self._number_of_first = next(group.models) * _MOST_VARIABLES
        self._turn = threading.RLock()
        self.saved = ReadsOfFirst(
            lambda: dict(enumerate(self.rank.shards.variables, self._number_of_first)),
            lambda variable: self._gather(stored_value(variable)),
        )
        self._in_epoch = False
        self._agreed_plan: list[Any] | None = None
        self._compares_exchanges = False

    def check_devices(self, devices: tuple[str, ...]) -> None:
        """Raise if the devices are not those of all processes."""
        group = self._group
        every = tuple(device.name for device in devices_of_all(group))
        if devices != every:
            raise ProcessesDisagree(
                f"devices={', '.join(devices)} was requested, but {group.size} processes are "
                f"running, each with one device: {', '.join(every)}.\n"
                "Remove devices, or start one process per device."
            )

    def methods(self, methods: dict[str, Any], *, is_sharded: bool) -> dict[str, Any]:
        """Return the methods to replace on the model, for several processes."""
        saved = self.saved if is_sharded else None
        return methods_of_all_processes(self._model, methods, self.assigned, saved)

    # ------------------------------------------------------------ calls

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Connect the rank with those of the other processes inside the context."""
        with self._in_turn():
            try:
                self.rank.group = self.rank.shards.group = self._group.ranks
                yield
            except BaseException as error:
                self.rank.group = self.rank.shards.group = None
                self._group.leave_ranks()
                if isinstance(error, PeerLost):
                    raise lost_connection_error() from None
                raise

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Keep other threads out: each process would exchange something else at a time."""
        if not self._turn.acquire(blocking=False):
            raise UnsupportedModel(
                f"Two threads use {self._model.name!r}, which is distributed over several "
                "processes.\nEvery process must communicate in the same order, which two "
                "threads cannot ensure.\nRead variables and run steps in one thread."
            )
        try:
            yield
        finally:
            self._turn.release()

    def _answers(self, mine: Any) -> list[Any]:
        found: list[Any] = [{} for _ in range(self.size)]
        found[self._group.rank] = mine
        return found

    @contextmanager
    def compared(self, form: Any) -> Iterator[None]:
        """Let the ranks compare what they exchange in the first step of parts in an epoch."""
        group = self._group.ranks
        group.compares = self._compares_exchanges
        yield
        group.compares = self._compares_exchanges = False

    # ------------------------------------------------------------ the same model everywhere

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

    def take_first_values(self) -> None:
        """Give every process the first one's values of all variables."""
        self._shared = {}
        self.adopt(first=False)

    def make_equal(self, unchecked: bool, dumped: Callable[[], Dumped]) -> bool:
        """Check the parts, and note that the model may have other layers."""
        self._check_parts_are_of_one_step()
        return super().make_equal(unchecked, dumped)

    def note_values(self, *, changes: bool) -> None:
        """Record the values that a step has left, which are those of every process."""
        if changes:
            self._know()

    def assignments(self, *, changes: bool) -> VariableDrift:
        """Return what this process has assigned up to now."""
        if changes:
            self.assigned.note()
        return self.assigned

    @contextmanager
    def epoch(self) -> Iterator[None]:
        """Note the begin and the end of an epoch."""
        self.assigned.note()
        self._in_epoch, self._agreed_plan = True, None
        try:
            yield
        finally:
            self._in_epoch = False
        self._know()

    def next_batch(self, batches: Iterator[Any], *, changes: bool) -> Any:
        """Return the next batch of a call without an epoch, if every process has it."""
        if self._in_epoch:
            return next(batches)
        check = DataCheck(every_pull=True, whole=True)
        noted = iter(check.each(batches))
        (batch,) = check.agreed(lambda: [next(noted)], None, self.assignments(changes=changes))
        check.close()
        return batch

    def agree_on_plan(self, unsplit: str | None, reasons: list[int]) -> None:
        """Check that every process runs the same layers by rows: gloo ends Python otherwise.

        Args:
            unsplit: Why this process runs the batch whole, `None` if it does not.
            reasons: The numbers of the layers that it runs on the whole batch.

        Raises:
            ProcessesDisagree: If another process runs layers otherwise.
        """
        mine = [str(unsplit), reasons]
        if self._in_epoch and self._agreed_plan is not None:
            # Callbacks may differ between processes, so that nothing is exchanged here.
            if mine != self._agreed_plan:
                raise ProcessesDisagree(
                    f"The layers of {self._model.name!r} that run on the whole batch have "
                    "changed within an epoch,\nbut with several processes they are fixed at the "
                    "start of an epoch. Change the model between two epochs."
                )
            return
        self._agreed_plan = mine
        least, greatest = once([mine, self._group.rank])
        if least[0] != greatest[0]:
            first, other = sorted([least[1], greatest[1]])
            raise ProcessesDisagree(
                f"Process {other} runs different layers of {self._model.name!r} on the whole "
                f"batch than process {first}: they would exchange different rows.\nBuild the "
                "same layers in every process. Code that depends on the process cannot be split."
            )
        # Each layer exchanges the weights that it reads.
        self._compares_exchanges = bool(self.rank.shards.variables)

    def agreed_difference(self, found: Mismatch | None) -> Mismatch | None:
        """Return the difference that some process has found, the same one in all processes."""
        mine = found or Mismatch("", "", 0.0)
        _, (_, *greatest) = once([mine.is_of_one, *astuple(mine)])
        return Mismatch(*greatest) if greatest[0] else None

    def agreed_reason(self, reason: str | None) -> str | None:
        """Return the reason of any process: a trace is made by all of them or by none."""
        _, (found,) = once([reason or ""])
        return found or None

    def agreed_trace(self, answers: list[TraceAnswer]) -> TraceAnswer:
        """Return what all processes say of a trace: each runs its graph, or none does."""
        (mine,) = answers
        least, greatest = once([mine.reason, mine.exchanges, mine.draws])
        if greatest[0]:
            return TraceAnswer(greatest[0])
        return super().agreed_trace([TraceAnswer(*least), TraceAnswer(*greatest)])

    def agreed_state(self, states: list[str]) -> str:
        """Return how the compilation of a trace stands in all processes."""
        _, (found,) = once(states)
        return str(found)

    def common_state(self) -> Any:
        """Return the state of the first process, from which every process draws."""
        state = random_state()
        self._group.ranks.broadcast_in_place([each for each in state if each is not None])
        return state

    def _held(self) -> list[Any]:
        return [v for v in self._whole() if id(v) in self._shared]

    def _whole(self) -> list[Any]:
        """Return the variables that every process has whole."""
        return [v for v in variables_of(self._model) if not is_sharded(v)]

    def _know(self) -> None:
        self.assigned.left([variable.value for variable in self._whole()])

    def compare_weights(self) -> None:
        """Raise after an epoch if another process has other weights."""
        weights = [v for v in self._model.trainable_variables if not is_sharded(v)]
        sums = [checksum(weight.value) for weight in weights]
        mine = digest([zlib.crc32(repr(sums).encode()).to_bytes(4, "little")])
        least, greatest = once([mine, self._group.rank])
        if least[0] != greatest[0]:
            raise ProcessesDisagree(
                f"After this epoch, process {greatest[1]} has different weights than process "
                f"{least[1]}: they did not compute the same.\n"
                "A layer or step may depend on the process, the time, or a nondeterministic "
                "operation. Go back to a file of the previous epoch."
            )

    # ------------------------------------------------------------ variables in parts

    def give_parts(self, found: list[Any], dumped: Callable[[], Dumped]) -> None:
        """Keep those of this process: each has the whole values, which `adopt` has shared.

        Those on the host are sent by the first process.
        """
        shards = self.rank.shards
        shards.keep([id(stored_value(variable)) for variable in found])
        if any(map(shards.is_from_host, found)):
            check_alike(shards.new())
            shards.send()
        shards.forget_new()

    def number_of(self, part: Any) -> int:
        """Return the number of a part in the processes."""
        for number, variable in enumerate(self.rank.shards.variables, self._number_of_first):
            if stored_value(variable) is part:
                return number
        raise dropped_part(self._model)

    @contextmanager
    def _used_by_all(self, part: Any, use: str) -> Iterator[Any]:
        """Connect the ranks inside the context, once all use the same part; see `Peers`."""
        self._check_parts_are_of_one_step()
        with self._in_turn():
            agree_on_variable(self.number_of(part), use)
            with self.connected():
                yield part

    def _gather(self, part: Any) -> Any:
        with self.connected():
            return self.call(Rank.gather_part, part)

    def _check_parts_are_of_one_step(self) -> None:
        """Raise if an error has ended an update of the parts before its end."""
        if self.rank.shards.is_updating:
            raise UnsupportedModel(
                f"{self._model.name!r} is lost: its state was sharded, and an error interrupted "
                "an update,\nso the processes hold shards of two different steps.\nBuild the "
                "model again, and resume from a lockstep.Checkpoint."
            )
