"""One replica in one step: its rows, and what it exchanges with the other replicas.

Every replica computes the loss of the global batch, divided by the number of replicas. So
the sum of these losses is the loss, and the sum of the gradients is its gradient. The
backward passes below keep that sum.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch

from lockstep.core.devices import shard_rows
from lockstep.core.left_out import LeftOutUsed
from lockstep.engines.torch.exchange import accelerators
from lockstep.engines.torch.exchange.group import RankGroup, summed_gradients
from lockstep.engines.torch.same_model.generators import state_of
from lockstep.engines.torch.sharded.sharded_variables import Shards
from lockstep.errors import counted


@dataclass(frozen=True)
class Draws:
    """Where the code of one step draws random numbers of PyTorch.

    Attributes:
        base: What decides the numbers of each rank; `None` where all draw those of one device.
        state: The state from which all draw those of one device.
        in_script: Whether each rank is a script, whose own state stays as it is.
        by_update: Whether an update draws from the state of rank 0, which is sent for it.
    """

    base: bytes | None = None
    state: Any = None
    in_script: bool = False
    by_update: bool = False


class RandomStreams:
    """The state of PyTorch's random numbers for code that every replica runs alike.

    Outside of `common` each replica draws from PyTorch's own state, which differs.

    Attributes:
        are_common: Whether the code that runs now is inside `common`.
    """

    def __init__(self) -> None:
        self.are_common = False
        self._common: Any = None
        self._is_one = False
        self._outside: Any = None

    @contextmanager
    def of_step(self, draws: Draws, rank: int) -> Iterator[None]:
        """Draw inside the context as one rank does in a step."""
        if draws.base is None:
            self.share(draws.state)
            yield
            set_random_state(self._common)  # the next step goes on from there
        elif draws.in_script:
            with self.apart(draws.base, rank):
                yield
        else:
            self.seed(draws.base, rank)
            yield

    def seed(self, base: bytes, rank: int) -> None:
        """Seed both kinds of numbers; rank 0 keeps PyTorch's own state."""
        own = random_state()
        self._is_one = False
        self._seed_common(base)
        if rank == 0:
            set_random_state(own)
        else:
            _seed(_number(base, rank))

    @contextmanager
    def apart(self, base: bytes, rank: int) -> Iterator[None]:
        """Seed both kinds of numbers inside the context, and put PyTorch's own state back."""
        self._outside, self._is_one = random_state(), False
        self._seed_common(base)
        _seed(_number(base, rank))
        try:
            yield
        finally:
            set_random_state(self._outside)
            self._outside = None

    def _seed_common(self, base: bytes) -> None:
        _seed(_number(base, "common"))
        self._common = random_state()

    def share(self, state: Any) -> None:
        """Let code that every replica runs alike draw from this state of PyTorch."""
        set_random_state(state)
        self._common, self._is_one = random_state(), True

    @contextmanager
    def of_update(self) -> Iterator[None]:
        """Draw in an update what one device draws, if this process knows it.

        The processes of a pool do not: they are sent the state of rank 0.
        """
        if self._is_one:
            with self.common():
                yield
        elif self._outside is not None:  # that of the script, the same in every process
            own = random_state()
            set_random_state(self._outside)
            try:
                yield
            finally:
                self._outside = random_state()
                set_random_state(own)
        else:
            yield

    def state(self) -> Any:
        """Return the state of both kinds of numbers."""
        return random_state(), self._common

    def set_state(self, state: Any) -> None:
        """Go on from what `state` has returned."""
        own, self._common = state
        set_random_state(own)

    @contextmanager
    def separate(self, rank: int, number: int) -> Iterator[None]:
        """Draw other numbers on every replica inside the context, and go on from before after it.

        Args:
            rank: The number of the replica.
            number: The number of the context in its step.
        """
        before = random_state()
        _seed(_number(before[0].numpy().tobytes(), rank, number))
        try:
            yield
        finally:
            set_random_state(before)

    @contextmanager
    def common(self) -> Iterator[None]:
        """Draw the same numbers on every replica inside the context."""
        own, before = random_state(), self.are_common
        set_random_state(self._common)
        self.are_common = True
        try:
            yield
        finally:
            self.are_common = before
            self._common = random_state()
            set_random_state(own)


class Replica:
    """One replica of a batch.

    A replica without rows runs the first row of the batch, and nobody uses the result:
    some layers take no empty batch.

    Attributes:
        group: The ranks.
        counts: The number of rows of each replica.
        rows: The number of rows of the batch.
        device: The PyTorch device of this replica.
        number: What distinguishes the random numbers of Keras that this replica draws.
        is_part: Whether it has a part of the rows of a replica.
        has_updated: Whether the optimizer has begun to change variables in this step.
        is_over: Whether the step has ended: the other replicas send nothing any more.
        shares_draws: Whether an update draws from the state of rank 0, which is sent for it.
        has_drawn: Whether the update has drawn random numbers of PyTorch.
        metrics_have_drawn: Whether the metrics have.
        streams: The random numbers of this replica.
        shards: The variables of which each replica has a part.
        reached: The tensors that the code of the model reaches.
        drawn_from: The generators of Python and NumPy from which calls of the model draw.
        notes: For each part that has run, the numbers of `generators` that have drawn; `None` where
            nobody asks.
        generators: Those that may draw.
    """

    def __init__(
        self,
        group: RankGroup,
        rows: int,
        streams: RandomStreams,
        device: torch.device,
        *,
        shards: Shards | None = None,
        shares_draws: bool = False,
        reached: Sequence[Any] = (),
        drawn_from: Sequence[Any] = (),
    ) -> None:
        self.reached, self.drawn_from = reached, drawn_from
        self.generators: Sequence[Any] = ()
        self.notes: list[set[int]] | None = None
        self.shards = shards or Shards()
        self.shares_draws = shares_draws
        self.has_drawn = self.metrics_have_drawn = False
        ranges = _shards(rows, group.size)
        self.group = group
        self._own = ranges[group.rank]
        self.counts = tuple(map(len, ranges))
        self.rows = rows
        self.device = device
        self.number, self.is_part = group.rank, False
        self.has_updated = self.is_over = False
        self.streams = streams

    @property
    def rank(self) -> int:
        """The number of this replica."""
        return self.group.rank

    @property
    def scale(self) -> int:
        """What the gradient of a tensor of the global batch is multiplied by on its way to rows."""
        return self.size

    @property
    def size(self) -> int:
        """The number of replicas."""
        return self.group.size

    @property
    def count(self) -> int:
        """The number of rows of this replica."""
        return len(self._own)

    @contextmanager
    def noting_draws(self) -> Iterator[None]:
        """Note which generators draw inside the context, if somebody asks."""
        if self.notes is None:
            yield
            return
        before = list(map(state_of, self.generators))
        yield
        now = list(map(state_of, self.generators))
        pairs = enumerate(zip(before, now, strict=True))
        self.notes.append({number for number, (was, state) in pairs if was != state})

    def parts(self, number: int, rows: int) -> list[Self]:
        """Return parts of the rows of this replica; the last ones may have fewer rows, or none.

        Args:
            number: The number of parts.
            rows: The most rows of a part.
        """
        parts = [copy(self) for _ in range(number)]
        for position, part in enumerate(parts):
            part._own = self._own[position * rows :][:rows]
            part.number, part.is_part = self.rank + position * self.size, True
        return parts

    def take(self, whole: Any) -> Any:
        """Return the rows of this replica."""
        if not len(self._own):
            return whole[:1]
        return whole[self._own.start : self._own.stop]

    def true_rows(self, own: Any, name: str) -> Any:
        """Return the rows that are this replica's, without one that is run for its form.

        Args:
            own: A tensor with the rows of this replica.
            name: What the tensor is, for the error.

        Raises:
            OtherRows: If the tensor has other rows.
        """
        count = len(self._own)
        if own.ndim == 0 or len(own) != max(count, 1):
            raise _other_rows(name, own, max(count, 1))
        return own[:count]

    def check_whole(self, whole: Any, name: str) -> None:
        """Raise `OtherRows` if this tensor does not have the rows of the batch."""
        if len(whole) != self.rows:
            raise _other_rows(name, whole, self.rows)

    def share_of(self, own: Any, name: str) -> Any:
        """Return values of the global batch whose mean over the replicas is that of all rows.

        Those of other replicas are zero. Nothing is exchanged.
        """
        rows = self.true_rows(own, name)
        before, after = (
            rows.new_zeros((count, *rows.shape[1:]))
            for count in (self._own.start, self.rows - self._own.stop)
        )
        return torch.cat([before, rows * self.size, after])

    def start_mean(self, value: Any) -> Callable[[], Any]:
        """Begin to take the mean of a value over the replicas, and return what waits for it."""
        finish = self.group.start_sum([value.detach().clone()])
        return lambda: finish()[0] / self.size

    def gather_each(self, value: Any) -> Any:
        """Return a value of each replica, stacked; gradients flow back to each of them."""
        return _Each.apply(value, self.group)

    def sum(self, value: Any) -> Any:
        """Return the sum over the replicas; gradients flow back to each of them."""
        return _Sum.apply(value, self.group)

    def summed_gradients(self, tensors: Sequence[Any]) -> AbstractContextManager[None]:
        """Sum the gradients of a backward pass in the context over the replicas."""
        return summed_gradients(self.group, tensors)

    @contextmanager
    def drawing_as_one(self) -> Iterator[None]:
        """Draw random numbers of PyTorch inside the context as the update of one device does."""
        if self.shares_draws:
            state = random_state()
            self.group.broadcast_in_place([each for each in state if each is not None])
            set_random_state(state)
        with self.streams.of_update():
            before = random_state()
            yield
            self.has_drawn = not all(map(_is_same, before, random_state()))

    @contextmanager
    def drawing_in_metrics(self) -> Iterator[None]:
        """Draw random numbers of PyTorch inside the context as the metrics of one device do.

        In a pool rank 0 alone does: its metrics are the truth.
        """
        with self.streams.of_update():
            before = random_state()
            yield
            self.metrics_have_drawn = not all(map(_is_same, before, random_state()))

    def check(self) -> None:
        """Return when the other replicas have sent what this one asked for; see `RankGroup`."""
        self.group.check()


class OtherRows(LeftOutUsed):
    """A tensor that is to have the rows of the batch has others: one device runs the step."""

    @property
    def why(self) -> str:
        """Why one device has to run the step, as the end of a sentence about its model."""
        return f"has {self}"


def _other_rows(name: str, tensor: Any, rows: int) -> OtherRows:
    form, expected = tuple(tensor.shape), counted(rows, "row")
    return OtherRows(f"{name[0].lower()}{name[1:]} of shape {form} for {expected}")


_shards = lru_cache(shard_rows)


class _Each(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, value: Any, group: RankGroup) -> Any:
        ctx.group = group
        return group.gather(value[None], (1,) * group.size)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return _Sum.apply(gradient, ctx.group)[ctx.group.rank], None


class _Sum(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, value: Any, group: RankGroup) -> Any:
        ctx.group = group
        return group.sum(value)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return _Sum.apply(gradient, ctx.group), None


def seed_of_replica(seed: Any, rank: int) -> Any:
    """Return another seed of Keras for each rank, and on rank 0 the seed itself.

    Args:
        seed: The seed that a `SeedGenerator` gives: a tensor of two integers.
        rank: The number of the replica.
    """
    if rank == 0:
        return seed
    numbers = [int(number) & 0xFFFFFFFF for number in seed.tolist()]
    drawn = np.random.SeedSequence([*numbers, rank]).generate_state(2) >> 2
    return torch.tensor(drawn.astype("int64"), dtype=seed.dtype, device=seed.device)


def _number(base: bytes, *salt: object) -> int:
    digest = hashlib.sha256(base + repr(salt).encode()).digest()
    return int.from_bytes(digest[:7], "little")


def random_state() -> tuple[Any, Any]:
    """Return the state of PyTorch's random numbers, on the host and on the current device."""
    cuda = accelerators.cuda
    return torch.get_rng_state(), cuda.get_rng_state() if cuda.is_initialized() else None


def _is_same(before: Any, now: Any) -> bool:
    return before is None if now is None else before is not None and torch.equal(before, now)


def set_random_state(state: tuple[Any, Any]) -> None:
    """Set what `random_state` returned, here or in another process."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        accelerators.cuda.set_rng_state(state[1])


def _seed(number: int) -> None:
    """Seed PyTorch on the host and the current device.

    `torch.manual_seed` formats the stack for each kind of device that has not started, which takes
    a millisecond.
    """
    torch.default_generator.manual_seed(number)
    if accelerators.cuda.is_initialized():
        accelerators.cuda.manual_seed(number)
