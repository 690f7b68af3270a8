"""One model on one device: what each of its processes runs, alike in all of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

import torch

from lockstep.core.state import rnn_states, unique
from lockstep.engines.replicas.first_step import Recording
from lockstep.engines.replicas.sketches import Sketches
from lockstep.engines.torch.exchange.group import PeerLost, RankGroup
from lockstep.engines.torch.exchange.placement import Undo, copies_on
from lockstep.engines.torch.first_step.first_step import recorded_step, sketched, unchanged_tensors
from lockstep.engines.torch.same_model.generators import GLOBAL, set_state
from lockstep.engines.torch.same_model.settings import checksum
from lockstep.engines.torch.sharded.sharded_variables import Shards
from lockstep.engines.torch.steps.layers import ReplicaPlan
from lockstep.engines.torch.steps.loss_sharding import LossSharding
from lockstep.engines.torch.steps.replica import (
    Draws,
    OtherRows,
    RandomStreams,
    Replica,
    set_random_state,
)
from lockstep.engines.torch.steps.steps import run_step
from lockstep.engines.torch.steps.whole_batch_steps import WholeBatchSteps, numbers_in
from lockstep.engines.torch.traced.rank_traces import RankTraces, TraceAnswer
from lockstep.engines.torch.traced.trace import Computed
from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import layers_in, own_trainable_variables
from lockstep.training.overrides import is_keras

PlanArguments = tuple[tuple[int, ...], tuple[int, ...], bool, int | None]
"""What each rank makes the `ReplicaPlan` of a step from: which candidates are proven, which parts
are distrusted although they are, whether losses and metrics may take the rows of each rank, and
the micro-batch size."""


Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class Marked(Generic[Arguments, Answer]):
    """A method of `Rank` that all ranks run at a time: `Peers` has it run in the others."""

    has_batch = False
    is_answered = False

    def __init__(self, method: Callable[Concatenate[Any, Arguments], Answer]) -> None:
        self.method = method

    @overload
    def __get__(self, rank: None, kind: Any) -> Self: ...

    @overload
    def __get__(self, rank: Any, kind: Any) -> Callable[Arguments, Answer]: ...

    def __get__(self, rank: Any, kind: Any) -> Any:
        return self if rank is None else partial(self.method, rank)


class Call(Marked[Arguments, Answer]):
    """Marks a method whose one answer is that of this process."""


class CallOnBatch(Call[Arguments, Answer]):
    """The same, with a batch as the first argument: a pool has it in memory that all read."""

    has_batch = True


class Question(Marked[Arguments, Answer]):
    """Marks a method whose answers are those of all ranks, in their order."""

    is_answered = True


class QuestionOnBatch(Question[Arguments, Answer]):
    """The same, with a batch as the first argument: a pool has it in memory that all read."""

    has_batch = True


class Rank:
    """One model on the device of this process.

    Each process of the model has one. A marked method runs in all of them at a time: a message of
    the first process starts it in the workers of a pool, the script itself in the processes of a
    launcher.

    Args:
        model: The model.
        device: The PyTorch device of this process.
        shards: The variables of which each process has a part.
        reads_shared: Whether the tensors of a batch are in memory that other processes read too.

    Attributes:
        group: The ranks, while they are connected.
        plan: How the layers run in a step.
        losses: How the losses and metrics are computed.
        whole_batch: The steps that run on the whole batch.
        traces: The steps that were traced.
        streams: The random numbers of this rank.
        draws_together: Whether every rank draws the random numbers of the global batch.
        tensors: The tensors that the code of the model reaches, in the order of all ranks.
        generators: The generators of random numbers that it reaches, likewise.
        has_drawn: Whether the last update has drawn random numbers of PyTorch.
        metrics_have_drawn: Whether the last metrics have.
    """

    plan: ReplicaPlan
    losses: LossSharding
    whole_batch: WholeBatchSteps

    def __init__(
        self, model: Any, device: torch.device, shards: Shards, *, reads_shared: bool = False
    ) -> None:
        self.model = model
        self.device = device
        self.shards = shards
        self.group: RankGroup | None = None
        self.streams = RandomStreams()
        self.draws_together = False
        self.tensors: list[Any] = []
        self.generators: list[Any] = []
        self.has_drawn = self.metrics_have_drawn = False
        self._reads_shared = reads_shared
        self._numbers: dict[str, float] = {}
        self._recording: Recording | None = None
        self._drawn_from: list[Any] = []
        self.losses = LossSharding(model)
        self.whole_batch = WholeBatchSteps(model)
        self.traces = RankTraces(model, device)
        self._undo: Undo

    def forget_model(self) -> None:
        """Forget what is known of the model, which is another one now."""
        self.losses = LossSharding(self.model, by_rows=self.losses.by_rows)
        self.whole_batch = WholeBatchSteps(self.model, self.whole_batch.distrusted)
        self.sort_layers()

    def sort_layers(self) -> None:
        """Sort the layers of the model anew: it may have other ones."""
        self._undo = Undo(_changed_by_steps(self.model))
        self.take_plan(((), (), self.losses.by_rows, None))

    @Call
    def take_plan(self, plan: PlanArguments) -> None:
        """Let layers and losses run so from now on."""
        proven, distrusted, losses_by_rows, micro_batch_size = plan
        together = self.draws_together
        self.plan = ReplicaPlan(self.model, proven, draws_together=together, distrusted=distrusted)
        self.plan.micro_batch_size = micro_batch_size
        self.losses.by_rows = losses_by_rows

    # ------------------------------------------------------------ steps

    @CallOnBatch
    def step(self, batch: Any, kind: str, training: bool, rows: int, draws: Draws) -> Any:
        """Run one step, and return the logs or predictions, which are those of every rank.

        Args:
            batch: Inputs, targets and sample weights of the global batch.
            kind: The kind of step; see `run_step`.
            training: The mode of the modules of PyTorch.
            rows: The number of rows of the batch.
            draws: Where the step draws random numbers.
        """
        with self._replica(training, rows, draws) as replica:
            with self.streams.of_step(draws, replica.rank):
                data = self._own(batch)
                result = run_step(kind, self.model, self.plan, self.losses, replica, data)
            replica.check()
        self.has_drawn = replica.has_drawn
        self.metrics_have_drawn = replica.metrics_have_drawn
        return result

    @CallOnBatch
    def recorded(self, batch: Any, kind: str, training: bool, rows: int, draws: Draws) -> Recording:
        """Run one step without an update, and return what this rank has computed."""
        with self._replica(training, rows, draws) as replica:
            data = self._own(batch)
            replica.notes, replica.generators = [], [*GLOBAL, *self.generators]

            def run() -> Any:
                with self.streams.of_step(draws, replica.rank):
                    return run_step(kind, self.model, self.plan, self.losses, replica, data)

            # A layer runs once for each part: the outputs of the model are compared.
            watch = self.plan.watched if self.plan.micro_batch_size is not None else None
            recording = recorded_step(
                self.model, run, is_custom=False, tensors=self.tensors, watch=watch
            )
            replica.check()
        # Another thread may draw for the data meanwhile, but hardly in each of the parts.
        drawn = set.intersection(*replica.notes) if replica.notes else set()
        new = [replica.generators[number] for number in sorted(drawn)]
        self._drawn_from = unique([*self._drawn_from, *new])
        self._recording = recording
        return recording

    @Question
    def sketches(self) -> Sketches:
        """Return what the last step without an update has computed."""
        assert self._recording is not None, "there was such a step"
        found, self._recording = self._recording.sketches(), None
        return found

    @CallOnBatch
    def whole_step(self, batch: Any, kind: str, training: bool, state: Any, distrusted: Any) -> Any:
        """Run one step on the whole batch, and return the logs; see `WholeBatchSteps`.

        Args:
            batch: The batch, in the structure that the step takes.
            kind: `"train"`, `"test"` or `"predict"`.
            training: The mode of the modules of PyTorch.
            state: The state of PyTorch's random numbers.
            distrusted: The numbers of layers that are not shared.
        """
        self._undo.save()
        try:
            logs = self._on_whole_batch(batch, kind, training, state, distrusted)()
            self._connected().check()
        except PeerLost:
            self._undo.put_back()
            raise
        self._numbers = numbers_in(logs, self.model)
        return logs

    @Question
    def numbers(self) -> dict[str, float]:
        """Return the numbers among the logs of the last step on the whole batch."""
        return self._numbers

    @CallOnBatch
    def recorded_whole_step(
        self, batch: Any, kind: str, training: bool, state: Any, distrusted: Any
    ) -> Recording:
        """Run one step on the whole batch without an update."""
        run = self._on_whole_batch(batch, kind, training, state, distrusted)
        watch = self.whole_batch.watched
        return recorded_step(self.model, run, is_custom=True, tensors=self.tensors, watch=watch)

    @QuestionOnBatch
    def trace(
        self, batch: Any, number: int, kept: list[int], kind: str, training: bool
    ) -> TraceAnswer:
        """Trace a step for batches like this one; see `RankTraces`."""
        self._begin_step(training)
        with unchanged_tensors(self.model, self.tensors, every=True):
            return self.traces.trace(number, kept, kind, batch, self._connected())

    @CallOnBatch
    def traced_step(self, batch: Any, number: int, training: bool, state: Any) -> Any:
        """Run a traced step, and return the logs or predictions, which are those of every rank.

        Args:
            batch: The global batch.
            number: The number of the trace.
            training: The mode of the modules of PyTorch.
            state: The state of PyTorch's random numbers, if it draws.
        """
        self._begin_step(training)
        computed = self.traces.run(number, batch, state, self._connected())
        computed.write()
        return computed.result

    @CallOnBatch
    def tried_traced_step(self, batch: Any, number: int, training: bool, state: Any) -> Computed:
        """Run a traced step, and return what it computes. The model is as before after it."""
        self._begin_step(training)
        return self.traces.try_out(number, batch, state, self._connected())

    @QuestionOnBatch
    def compiled_trace(self, batch: Any, number: int) -> str:
        """Return how the compilation of a traced step stands; see `TracedStep.compiled`."""
        return self.traces.compiled(number, batch)

    @QuestionOnBatch
    def compared_traces(self, batch: Any, number: int) -> str:
        """Return how a compiled step differs from its graph; see `TracedStep.compared`."""
        return self.traces.compared(number, batch, self._connected())

    @Call
    def use_compiled_trace(self, number: int, use: bool) -> None:
        """Let a traced step run what has been compiled of it, or leave that out."""
        self.traces.use_compiled(number, use)

    def _on_whole_batch(
        self, batch: Any, kind: str, training: bool, state: Any, distrusted: Any
    ) -> Any:
        self._begin_step(training)
        set_random_state(state)
        if self._connected().rank:
            self.whole_batch.distrusted = dict.fromkeys(distrusted, "")
        return partial(
            self.whole_batch.run,
            kind,
            copies_on(self.device, batch),
            self._connected(),
            self.streams,
            self.device,
            draws_together=self.draws_together,
        )

    @contextmanager
    def _replica(self, training: bool, rows: int, draws: Draws) -> Iterator[Replica]:
        """Make the replica of one batch, and put back what a step has changed that fails."""
        self._begin_step(training)
        replica = Replica(
            self._connected(),
            rows,
            self.streams,
            self.device,
            shards=self.shards,
            shares_draws=draws.by_update,
            reached=self.tensors,
            drawn_from=self._drawn_from,
        )
        self._undo.save()
        try:
            yield replica
        except BaseException as error:  # such as KeyboardInterrupt
            if not replica.has_updated:  # else the metrics alone are lost
                self._undo.put_back()
            elif isinstance(error, OtherRows):  # one device would update once more
                raise UnsupportedModel(
                    f"{self.model.name!r} {error.why}. This was found after an update.\n"
                    "Keep the batch dim first, or set KERAS_BACKEND=jax."
                ) from error
            raise

    def _begin_step(self, training: bool) -> None:
        order = self._connected().backward_order
        if order is not None:
            order.begin_step()
        if self.model.training != training:
            self.model.train(training)

    def _own(self, batch: Any) -> Any:
        """Return the tensors of a batch, copied where Keras may write into shared memory.

        Keras multiplies sample weights by a mask in place. The step itself copies the rows of the
        inputs that this rank takes.
        """
        if not self._reads_shared:
            return batch
        x, y, sample_weight = batch
        y, sample_weight = copies_on(self.device, (y, sample_weight))
        if not all(is_keras(self.model, name) for name in ("compute_loss", "compute_metrics")):
            x = copies_on(self.device, x)  # code of the user's own is given them
        return x, y, sample_weight

    def _connected(self) -> RankGroup:
        assert self.group is not None, "the ranks are connected"
        return self.group

    # ------------------------------------------------------------ values

    @Call
    def take_values(self, numbers: list[int]) -> None:
        """Take the values that the first rank has of some tensors."""
        self._connected().broadcast_in_place([self.tensors[number] for number in numbers])

    @Call
    def take_gradients(self, changed: list[int], there: list[int]) -> None:
        """Take the gradients that the first rank has of some tensors: of those that are there."""
        for number in changed if self._connected().rank else ():
            tensor = self.tensors[number]
            tensor.grad = torch.empty_like(tensor) if number in there else None
        self._connected().broadcast_in_place([self.tensors[number].grad for number in there])

    @Call
    def take_generators(self, states: dict[int, bytes]) -> None:
        """Take the states that the first rank has of some generators."""
        for number, state in states.items() if self._connected().rank else ():
            set_state(self.generators[number], state)

    @Question
    def differing(self, sums: list[int | None]) -> list[int]:
        """Return the numbers of the tensors whose checksum is not that of the first rank.

        Args:
            sums: The checksum of each tensor there, `None` for one that is not compared.
        """
        if not self._connected().rank:
            return []
        return [
            number
            for number, (tensor, expected) in enumerate(zip(self.tensors, sums, strict=True))
            if expected is not None and checksum(tensor) != expected
        ]

    @Question
    def sketched(self, numbers: list[int]) -> Sketches:
        """Return sketches of some tensors, by their numbers."""
        return sketched(self.tensors, numbers)

    @Call
    def gather_part(self, part: Any) -> Any:
        """Return the parts that all ranks have of a variable, joined.

        Args:
            part: The part of this rank, or its number in `tensors`.
        """
        group = self._connected()
        part = self.tensors[part] if isinstance(part, int) else part
        flat = group.gather(part, [len(part)] * group.size)
        group.check()
        return flat

    @Call
    def scatter_part(self, part: Any, whole: Any = None) -> None:
        """Take the part of this rank of the whole value that the first rank has.

        Args:
            part: The part of this rank, or its number in `tensors`.
            whole: The whole value, on the first rank.
        """
        group = self._connected()
        part = self.tensors[part] if isinstance(part, int) else part
        size = len(part)
        with torch.no_grad():
            if whole is None:
                flat = part.new_empty(size * group.size)
            else:
                flat = self.shards.padded(whole, size)
            group.broadcast_in_place([flat])
            group.check()
            part.copy_(flat[group.rank * size :][:size])


def _changed_by_steps(model: Any) -> list[Any]:
    """Return moving means, seeds and the like, which a step changes before its update."""
    layers = layers_in(model)
    weights = {id(variable) for layer in layers for variable in own_trainable_variables(layer)}
    variables = [v for v in model.non_trainable_variables if id(v) not in weights]
    return [variable.value for variable in [*variables, *rnn_states(model)]]
