"""Runs the steps of one model on a pool, from rank 0, and keeps the workers' models equal to it."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import torch

from lockstep.engines.replicas.first_step import Recording, Sketches, bounds_for, difference
from lockstep.engines.torch.code_state import CodeReads
from lockstep.engines.torch.first_step import recorded_step, sketched
from lockstep.engines.torch.forward_state import ForwardState
from lockstep.engines.torch.generators import state_of
from lockstep.engines.torch.group import Group, PeerLost
from lockstep.engines.torch.layers import Plan, parts_of
from lockstep.engines.torch.loss_sharding import LossSharding
from lockstep.engines.torch.placement import copies_on
from lockstep.engines.torch.pool import Lease, Pool
from lockstep.engines.torch.replica import Replica, random_state
from lockstep.engines.torch.settings import checksum, current_settings
from lockstep.engines.torch.sharded_variables import Shards
from lockstep.engines.torch.split_checks import replaced_class
from lockstep.engines.torch.step_runner import StepRunner, uninterrupted
from lockstep.engines.torch.steps import run_step
from lockstep.engines.torch.whole_batch_steps import (
    SUM_OF_WEIGHTS,
    WholeBatchSteps,
    keeps_graph,
    numbers_in,
    size_of_weights,
)
from lockstep.errors import ProcessesDisagree, UnsupportedModel, WorkerDied
from lockstep.keras_compat import (
    GLOBAL_SEED_GENERATOR,
    global_state,
    is_rematerialized,
    layers_in,
    stored_value,
)


class PoolRunner(StepRunner):
    """Runs the steps of one model on a pool; see `StepRunner`.

    The model of this process is the truth: a worker's copy is made anew, or given other
    values, where it is not the same. A step compares everything. Within `epoch`, only the
    first step does, and the others compare the versions of the tensors.

    Args:
        model: The model.
        device: The PyTorch device of this process.
        lease: The part of the model in its pool.
    """

    def __init__(self, model: Any, device: torch.device, lease: Lease) -> None:
        super().__init__(model, device)
        self._lease = lease
        self._plan_there: tuple[list[int], list[int], bool] = [], [], True
        self._pool: Pool | None = None
        self._sent: Any = None
        self._tensors: list[Any] = []
        self._versions: list[Any] = []
        self._gradients: list[Any] = []
        self._exchanged: set[str] = set()
        self._reads = CodeReads()
        self._age_of_casts = 0.0
        self._trained = False
        self._in_modules = False
        self._random_numbers: Any = None
        self._generators: list[Any] = []
        self._states: list[bytes] = []
        self._update_draws = False
        self._trained_in_epoch = False
        self._proofs_are_old = False
        self.shards = Shards(self)
        self._parts: dict[int, int] = {}

    def unsplit(self, x: Any) -> str | None:
        """Return why one device has to run batches like this one alone, `None` if not."""
        self.unchecked = self.unchecked or self._reads.changed()  # or a proof would be an old one
        differs, self.unchecked = self.unchecked, self.unchecked or self._proofs_are_old
        reason = super().unsplit(x)
        self.unchecked, self._proofs_are_old = differs, False
        return reason

    @uninterrupted
    def step(self, kind: str, data: Any, rows: int) -> Any:
        """Run one step on all devices, and return the logs or predictions."""
        self.shards.check_written()
        with self._in_use() as pool:
            self._make_equal(pool)
            self._send_plan(pool)
            self._check_casts_of_parts(kind)
            self._trained |= kind == "train"
            self._trained_in_epoch |= kind == "train"
            description = pool.memory.write(data)
            base: Any
            if self.draws_together:
                base = random_state()
                self._streams.share(base)
            else:
                base = self._draw_base(kind)
                self._streams.seed(base, 0)
            mode = self._model.training
            # Another process cannot mend its part of a variable afterwards.
            shares_draws = self._update_draws or bool(self.shards.variables)
            replica = self._replica(pool, rows, shares_draws=shares_draws)
            self._state.save()
            with self._exchanges_compared(pool, kind, mode, _forms(data)):
                pool.send(
                    "step", self._lease.key, kind, mode, rows, description, base, shares_draws
                )
                try:
                    result = run_step(kind, self._model, self._plan, self.losses, replica, data)
                    replica.check()
                except BaseException:  # such as KeyboardInterrupt
                    if not replica.has_updated:  # else the metrics alone are lost
                        self._state.put_back()
                    raise
            if self.draws_together:
                self._streams.take_over()
            self._note_state()
            if replica.has_drawn and not self.draws_together:
                self._update_draws = True
                self.unchecked |= not shares_draws  # the others have drawn other numbers
        return result

    @uninterrupted
    def recorded(self, kind: str, data: Any, rows: int) -> tuple[Recording, list[Sketches]]:
        """Run one step on all devices without an update; see `StepRunner`."""
        self.shards.check_written()
        with self._in_use() as pool:
            self._make_equal(pool)
            self._send_plan(pool)
            description = pool.memory.write(data)
            mode, numbers = self._model.training, random_state()
            self._streams.share(numbers)
            replica = self._replica(pool, rows)
            with self._exchanges_compared(pool, "recorded", kind, mode, _forms(data)):
                pool.send("recorded", self._lease.key, kind, mode, rows, description, numbers)
                recording = recorded_step(
                    self._model,
                    lambda: run_step(kind, self._model, self._plan, self.losses, replica, data),
                    is_custom=False,
                    tensors=self.tensors(),
                )
                pool.send("sketches")
                found = [recording.sketches(), *pool.receive()]
        self.unchecked = True  # workers have moving means of that step
        return recording, found

    @contextmanager
    def epoch(self, *, changes: bool) -> Iterator[None]:
        """Run the steps of one epoch inside the context, and compare the weights at its end."""
        self._trained_in_epoch = False
        with super().epoch(changes=changes):
            yield
            if self._trained_in_epoch and not self.unchecked:
                self._compare_weights()

    @uninterrupted
    def _compare_weights(self) -> None:
        """Raise if a worker has another weight than this process, which no code has changed here.

        Norms of an update differ by rounding where processes have other numbers of threads.

        Raises:
            ProcessesDisagree: If there is one.
        """
        with self._in_use() as pool:
            paths = {id(stored_value(v)): v.path for v in self._model.trainable_variables}
            known = [
                id(tensor) in paths and id(tensor) not in self._parts and _version_of(tensor) == was
                for tensor, was in zip(self._tensors, self._versions, strict=True)
            ]
            sums = [
                checksum(tensor) if is_known else None
                for tensor, is_known in zip(self._tensors, known, strict=True)
            ]
            pool.send("compare", self._lease.key, sums)
            differ = sorted({number for answer in pool.receive() for number in answer})
            if not differ:
                return
            pool.send("sketch", self._lease.key, differ)
            mine, bounds = sketched(self._tensors, differ), bounds_for(self._model, ())
            for rank, theirs in enumerate(pool.receive(), 1):
                found = difference(mine, [theirs], 1, bounds)
                if found is not None:
                    path = paths[id(self._tensors[int(found.name)])]
                    raise ProcessesDisagree(
                        f"After this epoch, {path!r} of {self._model.name!r} differs by "
                        f"{found.distance:.1e} on replica {rank} from the first device: they have "
                        "not computed alike.\nThe optimizer, a schedule, a loss or a regularizer "
                        "may depend on the process, the time, or what data or\ncallbacks change. "
                        "Go back to a file of the epoch before, or call lockstep.release(model)."
                    )

    def _replica(self, pool: Pool, rows: int, *, shares_draws: bool = False) -> Replica:
        return Replica(
            pool.group,
            rows,
            self._streams,
            self._device,
            shards=self.shards,
            shares_draws=shares_draws,
        )

    def unshared(self, batch: Any) -> str | None:
        """Return why the devices cannot share a step on the whole batch, `None` if they can."""
        self._bytes_of_step = None
        leaves = keras.tree.flatten(batch)
        if not all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in leaves):
            return "and is given other data than tensors"
        if replaced_class(self._model) is not None:
            return "and another process does not have that method"
        if keeps_graph(self._model):
            return "and keeps a tensor with its gradient graph (keep that of .detach())"
        if self.unchecked:
            try:
                self._dumped()
            except UnsupportedModel as error:
                return "and " + str(error).splitlines()[0].partition("' ")[2].rstrip(".")
        for variable in self._model.variables:
            tensor = stored_value(variable)
            if tensor is not None and (
                tensor._backward_hooks or tensor._post_accumulate_grad_hooks
            ):
                return f"and the hook on the gradient of {variable.path!r} stays in one process"
        # Layers that are computed again in the backward pass would not use shared weights.
        remade = [each.name for each in layers_in(self._model) if is_rematerialized(each)]
        return f"and has {remade[0]!r} made in a RematScope" if remade else None

    def step_on_whole_batch(self, kind: str, batch: Any) -> Any:
        """Run one step on the whole batch on every device; see `StepRunner`."""
        pool = self._running_pool()
        try:
            with self._whole_step(pool, "whole_step", kind, batch) as run:
                self._trained |= kind == "train"
                self._trained_in_epoch |= kind == "train"
                self._state.save()
                try:
                    result = run()
                    pool.group.check()
                except PeerLost:
                    self._state.put_back()
                    raise
                self._check_logs(numbers_in(result, self._model), pool.receive())
                self._note_state()
                self._gradients = list(map(_version_of_gradient, self._tensors))
        except WorkerDied as error:
            error.add_note(
                f"The {kind}_step of {self._model.name!r} may have updated some variables before."
            )
            raise
        return result

    @contextmanager
    def _whole_step(
        self, pool: Pool, name: str, kind: str, batch: Any
    ) -> Iterator[Callable[[], Any]]:
        """Send a step on the whole batch, and yield the function that runs it here."""
        with pool.in_use():
            self._make_equal(pool)
            self._send_gradients(pool)
            self._send_seeds(pool)
            description = pool.memory.write(batch)
            mode, random_numbers = self._model.training, random_state()
            distrusted = self.whole_batch.distrusted
            key = self._lease.key

            def run() -> Any:
                return self.whole_batch.run(
                    kind,
                    copies_on(self._device, batch),
                    pool.group,
                    self._streams,
                    self._device,
                    draws_together=self.draws_together,
                )

            with self._exchanges_compared(pool, name, kind, mode, _forms(batch)):
                pool.send(name, key, kind, mode, description, random_numbers, list(distrusted))
                yield run

    def recorded_on_whole_batch(self, kind: str, batch: Any) -> Recording:
        """Run one step on the whole batch on every device without an update."""
        pool = self._running_pool()
        with self._whole_step(pool, "recorded_whole_step", kind, batch) as run:
            recording = recorded_step(
                self._model,
                run,
                is_custom=True,
                tensors=self.tensors(),
                watch=self.whole_batch.watched,
            )
            pool.receive()
        self.unchecked = True
        return recording

    def _check_logs(self, mine: dict[str, float], every: list[dict[str, float]]) -> None:
        sizes = {SUM_OF_WEIGHTS: size_of_weights(self._model)}
        for rank, theirs in enumerate(every, 1):
            for name in mine.keys() & theirs.keys():
                far = _ALIKE * sizes.get(name, abs(mine[name])) + 1e-8
                if not np.isclose(mine[name], theirs[name], rtol=0, atol=far, equal_nan=True):
                    raise UnsupportedModel(
                        f"The first device computed {name}={mine[name]:.9g} in a step of "
                        f"{self._model.name!r}, and replica {rank} {theirs[name]:.9g}: the step "
                        "uses\nsomething that the model does not hold, such as a global variable "
                        "or the time.\nMake it an attribute of the model, or call "
                        "lockstep.release(model)."
                    )

    # -------------------------------------------------------- the same model everywhere

    def _running_pool(self) -> Pool:
        if self.shards.variables and self._pool is not None and self._pool.closed:
            raise self._lost("")
        pool = self._lease.pool()
        if pool is not self._pool:
            self._pool = pool
            self._sent = None
            self.unchecked = True
        return pool

    @contextmanager
    def _in_use(self) -> Iterator[Pool]:
        """Hold the pool, as `Pool.in_use` does. With it end the parts of its processes."""
        pool = self._running_pool()
        try:
            with pool.in_use():
                yield pool
        except BaseException as error:
            if not pool.closed or len(self.shards.variables) == len(self.shards.new()):
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
            f"{why}{self._model.name!r} is lost: its state was sharded, and the processes that had "
            "parts of it have ended.\nBuild it anew, and resume from a lockstep.Checkpoint."
        )

    lay_out = uninterrupted(StepRunner.lay_out)
    bring_home = uninterrupted(StepRunner.bring_home)

    def _processes(self) -> int:
        return self._lease.size

    def _ranks(self) -> Group:
        return self._running_pool().group

    def _give_parts(self, found: list[Any]) -> None:
        with self._in_use() as pool:
            self._compare_all(pool)
            self.shards.send()

    @uninterrupted
    def gathered(self, part: Any) -> tuple[Any, bool]:
        """Return the parts of all processes; see `Remote`."""
        number = self._number(part)
        with self._in_use() as pool:
            pool.send("gather", self._lease.key, number)
            flat = pool.group.gather(part, [len(part)] * pool.group.size)
            return flat, self.shards.is_written(part)

    @uninterrupted
    def scatter(self, part: Any, whole: Any) -> None:
        """Give each process its part of a whole value; see `Remote`."""
        number = self._number(part)
        with self._in_use() as pool, torch.no_grad():
            flat = self.shards.padded(whole, len(part))
            pool.send("scatter", self._lease.key, number)
            pool.group.broadcast_in_place([flat])
            part.copy_(flat[: len(part)])
            self.shards.note([part])

    def _number(self, part: Any) -> int:
        number = self._parts.get(id(part))
        if number is None:
            raise self._dropped()
        return number

    def _make_equal(self, pool: Pool) -> None:
        moved = self._in_modules and pool.in_modules != self._lease.key
        if self.unchecked or moved or self._structure_changed() or self._reads.changed():
            self._compare_all(pool)
            self.unchecked = self._changes
        else:
            self._send_values(pool, self._assigned())
            if _states_of_random_numbers() != self._random_numbers:  # by data, say, or a metric
                self._send_seeds(pool)
            self._send_states(pool, self._states)

    def _compare_all(self, pool: Pool) -> None:
        self._check_parts()
        dumped = self._dumped()
        data, tensors, in_modules = dumped.data, dumped.tensors, dumped.in_modules
        self._reads, self._generators = dumped.reads, dumped.generators
        if in_modules and pool.in_modules != self._lease.key:  # another model has put its own there
            self._sent = None
        settings = {**current_settings(), "age_of_casts": self._casts.age()}
        if settings != pool.settings:
            pool.settings = None
            pool.send("settings", settings)
            pool.settings = settings
        same = len(tensors) == len(self._tensors) and all(map(_is, tensors, self._tensors))
        sent = (data, self.draws_together)
        if same and self._sent == sent:
            sums = [None if id(each) in self._parts else checksum(each) for each in tensors]
            pool.send("compare", self._lease.key, sums)
            differ = sorted({number for answer in pool.receive() for number in answer})
        else:
            self._check_casts(settings["age_of_casts"])
            self._sent = None
            sharded = {id(stored_value(variable)) for variable in self.shards.variables}
            parts = {id(each): n for n, each in enumerate(tensors) if id(each) in sharded}
            there = {parts[key]: n for key, n in self._parts.items() if key in parts}
            pool.send("model", self._lease.key, data, self.draws_together, there)
            self._plan = self._planned(())
            self._check_taken(pool.receive())
            self._exchanged = set()
            self._plan_there = [], [], True
            self.times_sent += 1
            self._gradients = []
            self._tensors, self._parts = tensors, parts
            self.shards.keep(parts)
            self._structure = _structure(tensors)
            self._state = ForwardState(self._model)
            self.losses = LossSharding(self._model, by_rows=self.losses.by_rows)
            self.whole_batch = WholeBatchSteps(self._model, self.whole_batch.distrusted)
            differ = [n for n, each in enumerate(tensors) if id(each) not in parts]
            self._sent = sent
            self._in_modules = in_modules
            if in_modules:
                pool.in_modules = self._lease.key
        self.losses.without_metrics = not dumped.has_metrics
        self._age_of_casts = settings["age_of_casts"]
        self._send_values(pool, differ)
        self._send_seeds(pool)
        self._send_states(pool, [])

    def _check_casts(self, age: float) -> None:
        """Raise if autocast computes with weights from before an update, which no worker has."""
        if age and age == self._age_of_casts and self._trained:
            raise UnsupportedModel(
                f"{self._model.name!r} has changed within one torch.autocast, which computes with "
                "the weights\nfrom before the first update as long as it lasts. Enter it anew for "
                "each call, or give it\ncache_enabled=False; keras.config.set_dtype_policy sets "
                "mixed precision without it."
            )
        self._trained = False

    def _check_taken(self, every: list[list[str]]) -> None:
        """Raise if a worker has made another model of the bytes than this process has."""
        mine = parts_of(Plan(self._model, draws_together=self.draws_together))
        for rank, theirs in enumerate(every, 1):
            if theirs != mine:
                here, there = (sorted(set(a) - set(b)) for a, b in ((mine, theirs), (theirs, mine)))
                raise UnsupportedModel(
                    f"{self._model.name!r} has {here} here and {there} on replica {rank}: the "
                    "code that its process imports is another one.\nDo not change it after its "
                    "import, or call lockstep.release(model)."
                )

    @contextmanager
    def _exchanges_compared(self, pool: Pool, *form: Any) -> Iterator[None]:
        """Let the ranks compare what they exchange in the first step of a form."""
        if str(form) in self._exchanged:
            yield
            return
        pool.compare_exchanges(True)
        yield
        pool.compare_exchanges(False)
        self._exchanged.add(str(form))

    def _send_gradients(self, pool: Pool) -> None:
        """Send the gradients that a step may add to: a user's own may accumulate them."""
        versions = list(map(_version_of_gradient, self._tensors))
        before = self._gradients or [None] * len(versions)
        changed = [
            n for n, pair in enumerate(zip(versions, before, strict=True)) if pair[0] != pair[1]
        ]
        if changed:
            there = [number for number in changed if versions[number] is not None]
            pool.send("gradients", self._lease.key, changed, there)
            pool.group.broadcast_in_place([self._tensors[number].grad for number in there])

    def _send_seeds(self, pool: Pool) -> None:
        seeds = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
        keras_seed = None if seeds is None else keras.ops.convert_to_numpy(seeds.state)
        pool.send("seeds", random.getstate(), np.random.get_state(), keras_seed)
        self._random_numbers = _states_of_random_numbers()

    def _send_states(self, pool: Pool, known: list[bytes]) -> None:
        """Send the states of generators that are not those which the workers are known to have."""
        self._states = list(map(state_of, self._generators))
        moved = {n: state for n, state in enumerate(self._states) if known[n : n + 1] != [state]}
        if moved:
            pool.send("generators", self._lease.key, moved)

    def _send_plan(self, pool: Pool) -> None:
        plan = self._proven(self._plan), sorted(self.distrusted), self.losses.by_rows
        if plan != self._plan_there:
            pool.send("plan", self._lease.key, *plan)
            self._plan = self._planned(plan[0])
            self._plan_there = plan
            self._exchanged = set()

    def _note_state(self) -> None:
        """Note what a step has left, which is the same in every process."""
        self._versions = list(map(_version_of, self._tensors))
        self._renew_reads()
        self._random_numbers = _states_of_random_numbers()
        self._states = list(map(state_of, self._generators))

    def _renew_reads(self) -> None:
        if self._reads.changed():  # by the code of the step
            followed = [
                layer
                for part in self._plan.candidates
                for layer in (layers_in(part) if isinstance(part, keras.layers.Layer) else [part])
            ]
            self._proofs_are_old |= self._reads.objects_changed(followed)
            self._reads.renew()

    def _structure_changed(self) -> bool:
        return _structure(self._tensors) != self._structure

    def _assigned(self) -> list[int]:
        versions = map(_version_of, self._tensors)
        return [
            number
            for number, (now, before) in enumerate(zip(versions, self._versions, strict=True))
            if now != before and id(self._tensors[number]) not in self._parts
        ]

    def _send_values(self, pool: Pool, numbers: list[int]) -> None:
        if numbers:
            pool.send("values", self._lease.key, numbers)
            pool.group.broadcast_in_place([self._tensors[number] for number in numbers])


_ALIKE = 1e-3
"""The relative distance of logs beyond rounding, which GPUs may do in any order."""


def _forms(nest: Any) -> Any:
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else (leaf.dtype, leaf.shape[1:]), nest
    )


def _states_of_random_numbers() -> Any:
    """Return what shows whether Python's, NumPy's or Keras's random numbers have moved.

    Those of PyTorch are sent with each step.
    """
    _, numbers, *rest = np.random.get_state()
    seeds = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    moved = None if seeds is None else _version_of(stored_value(seeds.state))
    return random.getstate(), np.asarray(numbers).tobytes(), rest, seeds, moved


def _is(a: Any, b: Any) -> bool:
    return a is b


def _version_of(tensor: Any) -> int:
    """Return the number of changes of a tensor. PyTorch counts none of an inference tensor."""
    return 0 if tensor.is_inference() else tensor._version


def _version_of_gradient(tensor: Any) -> Any:
    gradient = tensor.grad if tensor.is_leaf else None
    return None if gradient is None else (id(gradient), gradient._version)


def _structure(tensors: list[Any]) -> list[bool]:
    return [tensor.requires_grad for tensor in tensors]
