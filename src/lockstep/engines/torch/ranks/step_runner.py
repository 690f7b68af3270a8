"""Runs the steps of one model on several devices, in workers of a pool or scripts of a launcher."""

import hashlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from lockstep.core.state import variables_of
from lockstep.engines.replicas.first_step import Recording
from lockstep.engines.replicas.sketches import Sketches
from lockstep.engines.torch.ranks.peers import Peers, check_parts, uninterrupted
from lockstep.engines.torch.ranks.rank import Answer, Call, PlanArguments, Rank
from lockstep.engines.torch.same_model.model_pickle import Dumped, dump
from lockstep.engines.torch.sharded.sharded_updates import check_optimizers
from lockstep.engines.torch.sharded.sharded_variables import (
    Shards,
    is_on_host,
    is_sharded,
)
from lockstep.engines.torch.sharded.to_shard import to_shard
from lockstep.engines.torch.steps.layers import ReplicaPlan
from lockstep.engines.torch.steps.loss_sharding import LossSharding
from lockstep.engines.torch.steps.replica import Draws, random_state
from lockstep.engines.torch.steps.split_checks import form_of_rows
from lockstep.engines.torch.steps.whole_batch_steps import (
    SUM_OF_WEIGHTS,
    WholeBatchSteps,
    size_of_weights,
)
from lockstep.engines.torch.traced.rank_traces import TraceAnswer
from lockstep.engines.torch.traced.trace import Computed
from lockstep.errors import UnsupportedModel, WorkerDied
from lockstep.keras_compat import counted_steps, stored_value


class TracesLost(Exception):
    """The ranks do not have a traced step any more: they were sent the model again."""


class StepRunner:
    """Runs the steps of one model on several devices, of which this process has one.

    Args:
        peers: Who runs them together with this process.

    Attributes:
        peers: Who runs them.
        rank: The rank of this process.
        unchecked: Whether the next step compares everything. Within `epoch`, only the first one
            does, unless code of the user may change the model.
        proofs_are_old: Whether a step has changed objects whose code was followed.
        graphs_run: How many steps ran as graphs.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.rank = peers.rank
        self.unchecked = True
        self.proofs_are_old = False
        self.graphs_run = 0
        self._model = peers.rank.model
        self._changes = True
        self._draws = 0
        self._update_draws = False
        self._trained = False
        self._bytes_of_step: Dumped | None = None
        self._last_bytes: Dumped | None = None
        self._pickled = 0
        self._sent_before: dict[int, int] = {}

    @property
    def shards(self) -> Shards:
        """The variables of which each process has a part."""
        return self.rank.shards

    @property
    def losses(self) -> LossSharding:
        """How losses and metrics are computed."""
        return self.rank.losses

    @property
    def whole_batch(self) -> WholeBatchSteps:
        """The steps that run on the whole batch."""
        return self.rank.whole_batch

    @property
    def plan(self) -> ReplicaPlan:
        """The plan of the last step."""
        return self.rank.plan

    @contextmanager
    def epoch(self, *, changes: bool, own_data: bool) -> Iterator[None]:
        """Run the steps of one epoch inside the context.

        Args:
            changes: Whether code of the user may change the model between two steps.
            own_data: Whether code of the user makes the batches.
        """
        before, self._changes, self.unchecked = self._changes, changes, True
        self.peers.user_code_between_steps = changes or own_data
        self._last_bytes, self._pickled = None, 0  # an epoch compares all bytes anew
        self._trained = False
        try:
            with self.peers.epoch():
                yield
        finally:
            self._changes, self.unchecked = before, True
            self.peers.user_code_between_steps = True

    def compare_weights(self) -> None:
        """Raise if the steps of an epoch have left other weights in another process."""
        if self._trained and (self.peers.in_script or not self.unchecked):
            self.peers.compare_weights()

    def next_batch(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, once every process has one."""
        return self.peers.next_batch(batches, changes=self._changes)

    def assignments(self) -> Any:
        """Return what this process has assigned up to now, for the other processes."""
        return self.peers.assignments(changes=self._changes)

    def note_values(self) -> None:
        """Note that a step has run, on all devices or on one."""
        self.peers.note_values(changes=self._changes)

    def has_changed(self) -> bool:
        """Return whether code may have changed the model since the last step, or in it."""
        self._bytes_of_step = None
        changed, by_step = self.peers.code_changed()
        self.unchecked |= changed
        self.proofs_are_old |= by_step
        return self.unchecked or self.proofs_are_old

    @property
    def user_code_between_steps(self) -> bool:
        """Whether code of the user may run between two steps: a launcher's scripts differ in it."""
        return self.peers.user_code_between_steps or self.peers.in_script

    def is_patched(self) -> bool:
        """Return whether a script has replaced code of Keras, or of another package in use."""
        try:
            return self.dumped().is_patched
        except UnsupportedModel:
            return True  # not known

    def times_sent(self) -> int:
        """Return how often the model will have been sent when the next step runs, at least once."""
        sent = self.peers.times_sent
        if sent and self.unchecked:
            with suppress(UnsupportedModel):  # it cannot be sent, and one device runs its steps
                sent += not self.peers.is_sent(self.dumped())
        return max(sent, 1)

    # ------------------------------------------------------------ steps

    @uninterrupted
    def step(self, kind: str, data: Any, rows: int, plan: PlanArguments) -> Any:
        """Run one step on all devices, and return the logs or predictions.

        Args:
            kind: `"train"`, `"test"` or `"predict"`; see `run_step`.
            data: Inputs, targets and sample weights: tensors, or `None`.
            rows: The number of rows of the batch.
            plan: How each rank runs layers and losses.
        """
        rank = self.rank
        with self._of_equal_ranks("step", kind, data, plan) as form:
            draws = self._draws_of(kind)
            with self.peers.compared(form):
                result = self.peers.call(Rank.step, data, kind, self._model.training, rows, draws)
            self._trained |= kind == "train"
            self.peers.note_step()
            if not (rank.draws_together or self.peers.in_script):
                # The others have drawn other numbers.
                self._update_draws |= rank.has_drawn
                others = rank.has_drawn and not draws.by_update
                self.unchecked |= others or rank.metrics_have_drawn
        return result

    @uninterrupted
    def recorded(
        self, kind: str, data: Any, rows: int, plan: PlanArguments
    ) -> tuple[Recording, list[Sketches]]:
        """Run one step on all devices without an update.

        Args:
            kind: `"train"`, `"test"` or `"predict"`.
            data: Inputs, targets and sample weights of a few rows.
            rows: Their number.
            plan: How each rank runs layers and losses.

        Returns:
            What this replica has computed, and the sketches of each replica that is known here.
        """
        draws = Draws(state=random_state())
        with (
            self._of_equal_ranks("recorded", kind, data, plan) as form,
            self.peers.compared(form),
        ):
            recording = self.peers.call(
                Rank.recorded, data, kind, self._model.training, rows, draws
            )
            found = self.peers.ask(Rank.sketches)
        self.peers.note_values(changes=True)
        self.unchecked = True  # workers have moving means of that step
        return recording, found

    @contextmanager
    def _of_equal_ranks(
        self, name: str, kind: str, data: Any, plan: PlanArguments
    ) -> Iterator[Any]:
        """Let all ranks have the same model inside the context, and yield the form of a step."""
        self.shards.check_written()
        with self.peers.connected():
            self._make_equal()
            self.peers.share_plan(plan)
            yield name, kind, self._model.training, form_of_rows(data)

    def step_on_whole_batch(self, kind: str, batch: Any) -> Any:
        """Run one step on the whole batch on every device, and share the calls of its layers.

        Args:
            kind: `"train"`, `"test"` or `"predict"`.
            batch: Tensors or `None`, in the structure that the step takes.

        Raises:
            UnsupportedModel: If another device has computed other logs.
        """
        try:
            with self.peers.connected():
                self._trained |= kind == "train"
                result = self._on_whole_batch(Rank.whole_step, kind, batch)
                self._check_logs(*self.peers.ask(Rank.numbers))
                self.peers.note_step(by_own_code=True)
        except WorkerDied as error:
            error.add_note(
                f"The {kind}_step of {self._model.name!r} may already have updated some variables."
            )
            raise
        return result

    def recorded_on_whole_batch(self, kind: str, batch: Any) -> Recording:
        """Run one step on the whole batch on every device without an update."""
        with self.peers.connected():
            recording = self._on_whole_batch(Rank.recorded_whole_step, kind, batch)
        self.unchecked = True
        return recording

    def _on_whole_batch(
        self, step: Call[[Any, str, bool, Any, Any], Answer], kind: str, batch: Any
    ) -> Answer:
        self._make_equal()
        self.peers.share_code_state()
        training, distrusted = self._model.training, list(self.whole_batch.distrusted)
        with self.peers.compared((step, kind, training, form_of_rows(batch))):
            return self.peers.call(step, batch, kind, training, random_state(), distrusted)

    def _check_logs(self, mine: dict[str, float], *every: dict[str, float]) -> None:
        sizes = {SUM_OF_WEIGHTS: size_of_weights(self._model)}
        for rank, theirs in enumerate(every, 1):
            for name in mine.keys() & theirs.keys():
                far = _ALIKE * sizes.get(name, abs(mine[name])) + 1e-8
                if not np.isclose(mine[name], theirs[name], rtol=0, atol=far, equal_nan=True):
                    raise UnsupportedModel(
                        f"The first device computed {name}={mine[name]:.9g} in a step of "
                        f"{self._model.name!r}, but replica {rank} computed {theirs[name]:.9g}: "
                        "the step uses\n"
                        "a value outside of the model, such as a global variable or the time.\n"
                        "Make it an attribute of the model, or call lockstep.release(model)."
                    )

    def trace(self, number: int, kept: list[int], kind: str, batch: Any) -> TraceAnswer:
        """Let every rank trace a step for batches like this one; see `RankTraces`.

        Args:
            number: The number of the trace.
            kept: The numbers of the other traces that are still used.
            kind: `"train"`, `"test"` or `"predict"`.
            batch: The global batch.
        """
        with self.peers.connected():
            self._make_equal()
            answers = self.peers.ask(Rank.trace, batch, number, kept, kind, self._model.training)
            self._sent_before[number] = self.peers.times_sent
            return self.peers.agreed_trace([each for each in answers if each])

    def traced_step(self, number: int, kind: str, batch: Any, *, draws: bool) -> Any:
        """Run one traced step on all devices, and return the logs or predictions.

        Args:
            number: The number of the trace.
            kind: `"train"`, `"test"` or `"predict"`.
            batch: The global batch.
            draws: Whether the step draws from PyTorch's own random numbers.

        Raises:
            TracesLost: Before anything runs.
        """
        with self._ranks_with(number):
            result = self._traced(Rank.traced_step, number, batch, draws=draws)
            self._trained |= kind == "train"
            self.graphs_run += 1
            self.peers.note_step()
        return result

    def tried_traced_step(self, number: int, batch: Any, *, draws: bool) -> Computed:
        """Run one traced step without an update, and return what it computes here."""
        with self._ranks_with(number):
            return self._traced(Rank.tried_traced_step, number, batch, draws=draws)

    def compiled_trace(self, number: int, batch: Any) -> str:
        """Return how the compilation of a traced step stands in all ranks, and begin it."""
        with self._ranks_with(number):
            answers = self.peers.ask(Rank.compiled_trace, batch, number)
            return self.peers.agreed_state([each for each in answers if isinstance(each, str)])

    def compared_traces(self, number: int, batch: Any) -> str:
        """Return how a compiled step differs from its graph for NaN and infinity, "" if not."""
        with self._ranks_with(number):
            answers = self.peers.ask(Rank.compared_traces, batch, number)
            return self.peers.agreed_state([each for each in answers if isinstance(each, str)])

    def use_compiled_trace(self, number: int, use: bool) -> None:
        """Let all ranks run what has been compiled of a traced step, or leave that out."""
        with self._ranks_with(number):
            self.peers.call(Rank.use_compiled_trace, number, use)

    @contextmanager
    def _ranks_with(self, number: int) -> Iterator[None]:
        """Let all ranks have the same model inside the context.

        Raises:
            TracesLost: If they do not have the traced step of this number.
        """
        with self.peers.connected():
            self._make_equal()
            if self._sent_before[number] != self.peers.times_sent:
                raise TracesLost
            yield

    def _traced(
        self, step: Call[[Any, int, bool, Any], Answer], number: int, batch: Any, *, draws: bool
    ) -> Answer:
        training = self._model.training
        state = self.peers.common_state() if draws else None
        with self.peers.compared(("traced", number)):
            return self.peers.call(step, batch, number, training, state)

    def _make_equal(self) -> None:
        if self.peers.make_equal(self.unchecked, self.dumped):
            self.unchecked = self._changes

    def _draws_of(self, kind: str) -> Draws:
        """Return where the next step draws random numbers."""
        in_script = self.peers.in_script
        # Another process cannot mend its part of a variable afterwards.
        by_update = not in_script and (self._update_draws or bool(self.shards.variables))
        if self.rank.draws_together:
            return Draws(state=random_state(), by_update=by_update)
        return Draws(self._draw_base(kind), in_script=in_script, by_update=by_update)

    def _draw_base(self, kind: str) -> bytes:
        """Return what decides the random numbers of the next step, besides those of rank 0.

        It is another one for each step, and a resumed run has that of the run before. It is
        drawn from no state: PyTorch's own also decides the order of shuffled rows.
        """
        self._draws += 1
        number = self._draws
        if kind == "train" and self._model.optimizer is not None:
            number = counted_steps(self._model.optimizer)
        base = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
        base.update(f"{kind} {number}".encode())
        return base.digest()

    def tensors(self) -> list[Any]:
        """Return tensors that the code of the model reaches, those of closures included."""
        try:
            return self.dumped().tensors
        except UnsupportedModel:  # the processes of a launcher need no copy of it
            return []

    def dumped(self) -> Dumped:
        """Return the model as bytes: made at most once in a step, and not if they are known."""
        if self._bytes_of_step is None:
            last = self._last_bytes
            if last is None or not last.is_still():
                self._pickled += 1
                changes = self._changes or self.peers.user_code_between_steps
                last = dump(self._model, with_graph=changes and self._pickled < _TRIES)
            self._bytes_of_step = self._last_bytes = last
        return self._bytes_of_step

    # ------------------------------------------------------------ variables in parts

    @uninterrupted
    def lay_out(self) -> None:
        """Shard the variables that are large and not sharded yet."""
        model, shards = self._model, self.shards
        found = to_shard(model, self.peers.size)
        new = [each for each in found if not is_sharded(each) or is_on_host(each)]
        check_parts(model, shards)
        for variable in found:
            if is_sharded(variable) and not is_on_host(variable):
                self.peers.number_of(stored_value(variable))
        check_optimizers(model)
        if not new:
            return
        self._bytes_of_step = self._last_bytes = None
        with self.peers.connected():
            shards.group = self.rank.group
        shards.take(new, self.dumped().holders)
        self._bytes_of_step = self._last_bytes = None
        try:
            if shards.share_memory(self.dumped().tensors):
                raise UnsupportedModel(
                    f"{model.name!r} holds the tensor of one of its large variables in a second "
                    "place, such as in another\nvariable, so sharding would separate the two. "
                    'Read the variable where its value is needed, or remove state="sharded".'
                )
            self.peers.give_parts(found, self.dumped)
        except BaseException:
            self.bring_home(shards.new())
            raise
        finally:
            self._bytes_of_step = self._last_bytes = None
        self.unchecked = True

    def leave_host(self, *, sharded: bool) -> None:
        """Move variables from the host to the device that `lay_out` will not shard.

        Args:
            sharded: Whether it will shard some.
        """
        self._bytes_of_step = self._last_bytes = None
        leave_host(self._model, to_shard(self._model, self.peers.size) if sharded else ())

    @uninterrupted
    def bring_home(self, variables: list[Any]) -> None:
        """Make sharded variables plain ones again."""
        if variables:
            self._bytes_of_step = self._last_bytes = None
            self.shards.release(self.dumped().holders, variables)
            self._bytes_of_step = self._last_bytes = None


def leave_host(model: Any, kept: Collection[Any] = ()) -> None:
    """Move the variables of a model from the host to the device, but for those to be kept."""
    known = set(map(id, kept))
    waiting = [v for v in variables_of(model) if is_on_host(v) and id(v) not in known]
    if waiting:
        Shards().release(dump(model).holders, waiting)


_TRIES = 4
"""How often the objects of a model are noted in an epoch: steps may make some of them anew."""

_ALIKE = 1e-3
"""The relative distance of logs beyond rounding, which GPUs may do in any order."""
