"""Runs the steps of one model on a pool, from rank 0, and keeps the workers' models equal to it."""

import random
from typing import Any

import keras
import numpy as np
import torch

from lockstep.engines.torch.forward_state import ForwardState
from lockstep.engines.torch.group import PeerLost
from lockstep.engines.torch.layers import Plan
from lockstep.engines.torch.placement import copies_on
from lockstep.engines.torch.pool import Lease, Pool
from lockstep.engines.torch.replica import Replica, random_state
from lockstep.engines.torch.settings import checksum, current_settings
from lockstep.engines.torch.split_checks import replaced_class
from lockstep.engines.torch.step_runner import StepRunner
from lockstep.engines.torch.steps import run_step
from lockstep.engines.torch.whole_batch_steps import (
    SUM_OF_WEIGHTS,
    WholeBatchSteps,
    numbers_in,
    size_of_weights,
)
from lockstep.errors import UnsupportedModel, WorkerDied
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
        self._proven_there: list[int] = []
        self._pool: Pool | None = None
        self._sent: Any = None
        self._tensors: list[Any] = []
        self._versions: list[Any] = []
        self._gradients: list[Any] = []

    def step(self, kind: str, data: Any, rows: int) -> Any:
        """Run one step on all devices, and return the logs or predictions."""
        pool = self._running_pool()
        with pool.in_use():
            self._make_equal(pool)
            self._send_plan(pool)
            description = pool.memory.write(data)
            base: Any
            if self.draws_together:
                base = random_state()
                self._streams.share(base)
            else:
                base = self._draw_base(kind)
                self._streams.seed(base, 0)
            mode = self._model.training
            pool.send("step", self._lease.key, kind, mode, rows, description, base)
            replica = Replica(pool.group, rows, self._streams, self._device)
            self._state.save()
            try:
                result = run_step(kind, self._model, self._plan, replica, data)
                replica.check()
            except PeerLost:
                self._state.put_back()
                raise
            if self.draws_together:
                self._streams.take_over()
            self._versions = [tensor._version for tensor in self._tensors]
        return result

    def unshared(self, batch: Any) -> str | None:
        """Return why the devices cannot share a step on the whole batch, `None` if they can."""
        self._bytes_of_step = None
        leaves = keras.tree.flatten(batch)
        if not all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in leaves):
            return "and is given other data than tensors"
        if replaced_class(self._model) is not None:
            return "and another process does not have that method"
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
            with pool.in_use():
                self._make_equal(pool)
                self._send_gradients(pool)
                self._send_seeds(pool)
                description = pool.memory.write(batch)
                mode, random_numbers = self._model.training, random_state()
                key = self._lease.key
                pool.send("whole_step", key, kind, mode, description, random_numbers)
                self._state.save()
                try:
                    result = self.whole_batch.run(
                        kind,
                        copies_on(self._device, batch),
                        pool.group,
                        self._streams,
                        self._device,
                        draws_together=self.draws_together,
                    )
                    pool.group.check()
                except PeerLost:
                    self._state.put_back()
                    raise
                self._check_logs(numbers_in(result, self._model), pool.receive())
                self._versions = [tensor._version for tensor in self._tensors]
                self._gradients = list(map(_version_of_gradient, self._tensors))
        except WorkerDied as error:
            error.add_note(
                f"The {kind}_step of {self._model.name!r} may have updated some variables before."
            )
            raise
        return result

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

    @property
    def waited(self) -> float:
        """The seconds that this process has waited in collectives."""
        return 0.0 if self._pool is None else self._pool.group.waited

    # -------------------------------------------------------- the same model everywhere

    def _running_pool(self) -> Pool:
        pool = self._lease.pool()
        if pool is not self._pool:
            self._pool = pool
            self._sent = None
            self.unchecked = True
        return pool

    def _make_equal(self, pool: Pool) -> None:
        if self.unchecked or self._structure_changed():
            self._compare_all(pool)
            self.unchecked = self._changes
        else:
            self._send_values(pool, self._assigned())

    def _compare_all(self, pool: Pool) -> None:
        data, tensors = self._dumped()
        settings = current_settings()
        same = len(tensors) == len(self._tensors) and all(map(_is, tensors, self._tensors))
        sent = (data, settings, self.draws_together)
        if same and self._sent == sent:
            pool.send("compare", self._lease.key, [checksum(tensor) for tensor in tensors])
            differ = sorted({number for answer in pool.receive() for number in answer})
        else:
            self._sent = None
            pool.send("model", self._lease.key, data, settings, self.draws_together)
            self._plan = Plan(self._model, draws_together=self.draws_together)
            self._proven_there = []
            self._gradients = []
            self._tensors = tensors
            self._structure = _structure(tensors)
            self._state = ForwardState(self._model)
            self.whole_batch = WholeBatchSteps(self._model)
            differ = list(range(len(tensors)))
            self._sent = sent
        self._send_values(pool, differ)
        self._send_seeds(pool)

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

    def _send_plan(self, pool: Pool) -> None:
        proven = self._proven(self._plan)
        if proven != self._proven_there:
            pool.send("plan", self._lease.key, proven)
            self._plan = Plan(self._model, proven, draws_together=self.draws_together)
            self._proven_there = proven

    def _structure_changed(self) -> bool:
        return _structure(self._tensors) != self._structure

    def _assigned(self) -> list[int]:
        versions = [tensor._version for tensor in self._tensors]
        return [
            number
            for number, (now, before) in enumerate(zip(versions, self._versions, strict=True))
            if now != before
        ]

    def _send_values(self, pool: Pool, numbers: list[int]) -> None:
        if numbers:
            pool.send("values", self._lease.key, numbers)
            pool.group.broadcast_in_place([self._tensors[number] for number in numbers])


_ALIKE = 1e-3
"""The relative distance of logs beyond rounding, which GPUs may do in any order."""


def _is(a: Any, b: Any) -> bool:
    return a is b


def _version_of_gradient(tensor: Any) -> Any:
    gradient = tensor.grad if tensor.is_leaf else None
    return None if gradient is None else (id(gradient), gradient._version)


def _structure(tensors: list[Any]) -> list[bool]:
    return [tensor.requires_grad for tensor in tensors]
