"""The workers of a pool as the peers of rank 0, whose model they have copies of."""

import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import torch

from lockstep.core.held_signals import HeldSignals
from lockstep.engines.replicas.sketches import bounds_for, first_mismatch
from lockstep.engines.torch.exchange.placement import check_placement, version_of
from lockstep.engines.torch.ranks.peers import Peers, check_parts, dropped_part, uninterrupted
from lockstep.engines.torch.ranks.pool import Lease, Pool
from lockstep.engines.torch.ranks.rank import Marked, PlanArguments, Rank
from lockstep.engines.torch.same_model.code_state import CodeReads
from lockstep.engines.torch.same_model.generators import state_of
from lockstep.engines.torch.same_model.model_pickle import Dumped
from lockstep.engines.torch.same_model.settings import checksum, current_settings
from lockstep.engines.torch.steps.layers import parts_of
from lockstep.errors import ProcessesDisagree, UnsupportedModel, WorkerDied
from lockstep.keras_compat import (
    GLOBAL_SEED_GENERATOR,
    global_state,
    layers_in,
    stored_value,
)


class PoolPeers(Peers):
    """The workers of a pool; see `Peers`.

    The model of this process is the truth: a worker's copy is made anew, or given other
    values, where it is not the same.

    Args:
        model: The model.
        device: The PyTorch device of this process.
        lease: The part of the model in its pool.
    """

    def __init__(self, model: Any, device: torch.device, lease: Lease) -> None:
        # The end of the model ends its part in the pool; a lease knows no model.
        weakref.finalize(model, lease.end)
        super().__init__(model, device, lease.size)
        self._lease = lease
        self._pool: Pool | None = None
        self._sent: Any = None
        self._parts: dict[int, int] = {}
        self._structure: list[bool] = []
        self._exchanged: set[Any] = set()
        self._reads = CodeReads()
        self._proofs_are_old = False
        self._objects_changed = False
        self._in_modules = False
        self._versions: list[Any] = []
        self._gradients: list[Any] = []
        self._random_numbers: Any = None
        self._states: list[bytes] = []

    def check_devices(self, devices: tuple[str, ...]) -> None:
        """Raise if a process cannot compute on one of these devices."""
        check_placement(devices)

    def start(self) -> None:
        """Start the workers, if their devices have none."""
        self._lease.start()

    def to_start(self) -> int:
        """Return the number of processes that the first step would wait for."""
        return 0 if self._lease.is_ready() else self.size - 1

    def end(self) -> None:
        """Let the pool forget the model."""
        self._lease.end()

    # ------------------------------------------------------------ calls

    def _running_pool(self) -> Pool:
        if self.rank.shards.variables and self._pool is not None and self._pool.closed:
            raise self._lost("")
        pool = self._lease.pool()
        if pool is not self._pool:
            self._pool = pool
            self._sent = None
        self.rank.group = pool.group
        return pool

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Hold the pool, as `Pool.in_use` does. With it end the parts of its processes."""
        pool, shards = self._running_pool(), self.rank.shards
        try:
            with pool.in_use():
                yield
        except BaseException as error:
            if not pool.closed or len(shards.variables) == len(shards.new()):
                raise
            if isinstance(error, WorkerDied):
                lost = self._lost(str(error).splitlines()[0] + "\n")
                for note in getattr(error, "__notes__", []):
                    lost.add_note(note)
                raise lost from None
            error.add_note(f"lockstep: {self._lost('')}")
            raise

    def _lost(self, why: str) -> WorkerDied:
        return WorkerDied(
            f"{why}{self._model.name!r} is lost: its state was sharded, and the processes with "
            "its shards have ended.\n"
            "Build the model again, and resume from a lockstep.Checkpoint."
        )

    @property
    def _held(self) -> Pool:
        assert self._pool is not None, "`connected` holds it"
        return self._pool

    def _send(self, call: Marked[..., Any], arguments: tuple[Any, ...]) -> None:
        if call.has_batch:
            batch, *others = arguments
            arguments = (self._held.memory.write(batch), *others)
        how = "ask" if call.is_answered else "call"
        self._held.send(how, self._lease.key, call.method.__name__, arguments)

    def _answers(self, mine: Any) -> list[Any]:
        return [mine, *self._held.receive()]

    @contextmanager
    def compared(self, form: Any) -> Iterator[None]:
        """Let the ranks compare what they exchange in the first step of a form."""
        if form in self._exchanged:
            yield
            return
        self._held.compare_exchanges(True)
        yield
        self._held.compare_exchanges(False)
        self._exchanged.add(form)

    # ------------------------------------------------------------ the same model everywhere

    def code_changed(self) -> tuple[bool, bool]:
        """Return whether code has changed the model since a step, and whether a step has."""
        by_step, self._proofs_are_old = self._proofs_are_old, False
        return self.user_code_between_steps and self._reads.changed(), by_step

    def make_equal(self, unchecked: bool, dumped: Callable[[], Dumped]) -> bool:
        """Let every process have the same model, and return whether all of it was compared.

        Otherwise, the versions of the tensors are.
        """
        moved = self._in_modules and self._held.in_modules != self._lease.key
        structure_changed = _structure(self.rank.tensors) != self._structure
        unchecked |= self._sent is None or moved or structure_changed
        if unchecked:
            self._compare_all(dumped())
            return True
        self._send_values(self._assigned())
        if _states_of_random_numbers() != self._random_numbers:  # by data, say, or a metric
            self._send_seeds()
        self._send_states(self._states)
        return False

    def _compare_all(self, dumped: Dumped) -> None:
        rank, pool, key = self.rank, self._held, self._lease.key
        check_parts(self._model, rank.shards)
        data, tensors = dumped.data, dumped.tensors
        self._reads, rank.generators = dumped.reads, dumped.generators
        if dumped.in_modules and pool.in_modules != key:  # another model has put its own there
            self._sent = None
        settings = current_settings()
        if settings != pool.settings:
            pool.settings = None
            pool.send("settings", settings)
            pool.settings = settings
        if self.is_sent(dumped):
            sums = [None if id(each) in self._parts else checksum(each) for each in tensors]
            differ = self._differing(sums)
        else:
            self._sent, self._objects_changed = None, False
            sharded = {id(stored_value(variable)) for variable in rank.shards.variables}
            parts = {id(each): n for n, each in enumerate(tensors) if id(each) in sharded}
            there = {parts[part]: n for part, n in self._parts.items() if part in parts}
            pool.send("model", key, data, rank.draws_together, there)
            rank.forget_model()
            self._check_taken(pool.receive())
            self._exchanged = set()
            self._plan = (), (), True, None
            self.times_sent += 1
            self._gradients = []
            rank.tensors, self._parts = tensors, parts
            rank.shards.keep(parts)
            self._structure = _structure(tensors)
            differ = [n for n, each in enumerate(tensors) if id(each) not in parts]
            self._sent = data, rank.draws_together
            self._in_modules = dumped.in_modules
            if dumped.in_modules:
                pool.in_modules = key
        rank.losses.without_metrics = not dumped.has_metrics
        self._send_values(differ)
        self._send_seeds()
        self._send_states([])

    def is_sent(self, dumped: Dumped) -> bool:
        """Return whether the workers have this model, whatever the values of its tensors are."""
        rank = self.rank
        same = len(dumped.tensors) == len(rank.tensors)
        same = same and all(map(_is, dumped.tensors, rank.tensors))
        # Objects that a step has changed, and code has set back, are those that were sent. The
        # workers have those after the step.
        known = self._sent == (dumped.data, rank.draws_together)
        return same and known and not self._objects_changed

    def _differing(self, sums: list[int | None]) -> list[int]:
        """Return the numbers of the tensors that have another checksum in a worker."""
        return sorted({n for found in self.ask(Rank.differing, sums) for n in found})

    def _check_taken(self, every: list[list[str]]) -> None:
        """Raise if a worker has made another model of the bytes than this process has."""
        mine = parts_of(self.rank.plan)
        for rank, theirs in enumerate(every, 1):
            if theirs != mine:
                here, there = (sorted(set(a) - set(b)) for a, b in ((mine, theirs), (theirs, mine)))
                raise UnsupportedModel(
                    f"{self._model.name!r} has {here} here, but {there} on replica {rank}: the "
                    "process of the replica imports different code.\n"
                    "Do not change code after it was imported, or call lockstep.release(model)."
                )

    def share_plan(self, plan: PlanArguments) -> None:
        """Give every rank this plan. With another one they exchange other tensors."""
        if plan != self._plan:
            self._exchanged = set()
        super().share_plan(plan)

    def share_code_state(self) -> None:
        """Let every rank draw the numbers, and have the gradients, that code of a step may use."""
        versions = list(map(_version_of_gradient, self.rank.tensors))
        before = self._gradients or [None] * len(versions)
        changed = [
            n for n, pair in enumerate(zip(versions, before, strict=True)) if pair[0] != pair[1]
        ]
        if changed:
            there = [number for number in changed if versions[number] is not None]
            self.call(Rank.take_gradients, changed, there)
        self._send_seeds()

    def _send_seeds(self) -> None:
        seeds = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
        keras_seed = None if seeds is None else keras.ops.convert_to_numpy(seeds.state)
        self._held.send("seeds", random.getstate(), np.random.get_state(), keras_seed)
        self._random_numbers = _states_of_random_numbers()

    def _send_states(self, known: list[bytes]) -> None:
        """Send the states of generators that are not those which the workers are known to have."""
        self._states = list(map(state_of, self.rank.generators))
        moved = {n: state for n, state in enumerate(self._states) if known[n : n + 1] != [state]}
        if moved:
            self.call(Rank.take_generators, moved)

    def _send_values(self, numbers: list[int]) -> None:
        if numbers:
            self.call(Rank.take_values, numbers)

    def _assigned(self) -> list[int]:
        tensors = self.rank.tensors
        return [
            number
            for number, (now, before) in enumerate(
                zip(map(version_of, tensors), self._versions, strict=True)
            )
            if now != before and id(tensors[number]) not in self._parts
        ]

    def note_step(self, *, by_own_code: bool = False) -> None:
        """Note what a step of all ranks has left, which is the same in every process."""
        self._versions = list(map(version_of, self.rank.tensors))
        if by_own_code:
            self._gradients = list(map(_version_of_gradient, self.rank.tensors))
        self._random_numbers = _states_of_random_numbers()
        self._states = list(map(state_of, self.rank.generators))
        # What the step has changed here, it has changed in every process. It matters where proofs
        # depend on it, or where the next look would take it for a change by code between two steps.
        seen = self.user_code_between_steps or by_own_code or bool(self.rank.plan.candidates)
        if seen:
            self._note_objects()

    def _note_objects(self) -> None:
        """Note the objects that the code of steps has changed, in every process."""
        if self._reads.changed():
            self._objects_changed = True
            followed = [
                layer
                for part in self.rank.plan.candidates
                for layer in (layers_in(part) if isinstance(part, keras.layers.Layer) else [part])
            ]
            self._proofs_are_old |= self._reads.objects_changed(followed)
            self._reads.renew()

    @contextmanager
    def epoch(self) -> Iterator[None]:
        """Note what the steps of an epoch have changed, before callbacks see its end."""
        try:
            yield
        finally:
            self._note_objects()

    @uninterrupted
    def compare_weights(self) -> None:
        """Raise if a worker has another weight than this process, which no code has changed here.

        Norms of an update differ by rounding where processes have other numbers of threads.

        Raises:
            ProcessesDisagree: If there is one.
        """
        tensors = self.rank.tensors
        with self.connected():
            paths = {id(stored_value(v)): v.path for v in self._model.trainable_variables}
            known = [
                id(tensor) in paths and id(tensor) not in self._parts and version_of(tensor) == was
                for tensor, was in zip(tensors, self._versions, strict=True)
            ]
            sums = [
                checksum(tensor) if is_known else None
                for tensor, is_known in zip(tensors, known, strict=True)
            ]
            differ = self._differing(sums)
            if not differ:
                return
            mine, *every = self.ask(Rank.sketched, differ)
            bounds = bounds_for(self._model, ())
            for rank, theirs in enumerate(every, 1):
                found = first_mismatch(mine, [theirs], 1, bounds)
                if found is not None:
                    path = paths[id(tensors[int(found.name)])]
                    raise ProcessesDisagree(
                        f"After this epoch, {path!r} of {self._model.name!r} differs by "
                        f"{found.distance:.1e} on replica {rank} from the first device: they "
                        "did not compute the same.\nThe optimizer, a schedule, a loss or a "
                        "regularizer may depend on the process, the time, or values that data "
                        "or\ncallbacks change. Go back to a file of the previous epoch, or call "
                        "lockstep.release(model)."
                    )

    # ------------------------------------------------------------ variables in parts

    def give_parts(self, found: list[Any], dumped: Callable[[], Dumped]) -> None:
        """Let every process have its parts of new variables."""
        with self.connected():
            self._compare_all(dumped())
            self.rank.shards.send()

    @contextmanager
    def _used_by_all(self, part: Any, use: str) -> Iterator[int]:
        """Connect the ranks inside the context, and yield the number of a part; see `Peers`.

        Signals wait: an exception within a call ends the other processes, and their parts.
        """
        number = self.number_of(part)
        with HeldSignals(), self.connected():
            yield number

    def number_of(self, part: Any) -> int:
        """Return the number of a part in the processes."""
        number = self._parts.get(id(part))
        if number is None:
            raise dropped_part(self._model)
        return number


def _states_of_random_numbers() -> Any:
    """Return what shows whether Python's, NumPy's or Keras's random numbers have moved.

    Those of PyTorch are sent with each step.
    """
    _, numbers, *rest = np.random.get_state()
    seeds = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    moved = None if seeds is None else version_of(stored_value(seeds.state))
    return random.getstate(), np.asarray(numbers).tobytes(), rest, seeds, moved


def _is(a: Any, b: Any) -> bool:
    return a is b


def _version_of_gradient(tensor: Any) -> Any:
    gradient = tensor.grad if tensor.is_leaf else None
    return None if gradient is None else (id(gradient), version_of(gradient))


def _structure(tensors: list[Any]) -> list[bool]:
    return [tensor.requires_grad for tensor in tensors]
