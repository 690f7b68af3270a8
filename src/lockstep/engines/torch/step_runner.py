"""Runs the steps of one model on a pool, from rank 0, and keeps the workers' models equal to it."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import torch

from lockstep.engines.torch.group import PeerLost
from lockstep.engines.torch.layers import Plan
from lockstep.engines.torch.model_pickle import dump
from lockstep.engines.torch.placement import torch_device_of
from lockstep.engines.torch.pool import Lease, Pool
from lockstep.engines.torch.replica import RandomStreams, Replica, random_state
from lockstep.engines.torch.row_proofs import ReasonsByNumber, RowProofs
from lockstep.engines.torch.settings import checksum, current_settings
from lockstep.engines.torch.steps import run_step
from lockstep.engines.torch.unsplit import unsplit_model
from lockstep.keras_compat import GLOBAL_SEED_GENERATOR, global_state
from lockstep.state import rnn_states


class StepRunner:
    """Runs the steps of one model on several devices.

    The model of this process is the truth: a worker's copy is made anew, or given other
    values, where it is not the same. A step compares everything. Within `epoch`, only the
    first step does, and the others compare the versions of the tensors.

    Attributes:
        lease: The part of the model in its pool.
        unchecked: Whether the next step compares everything.
        draws_together: Whether every device draws the random numbers of the global batch.
    """

    def __init__(self, model: Any, devices: tuple[str, ...]) -> None:
        self.lease = Lease(devices)
        self.unchecked = True
        self.draws_together = False
        self._model = model
        self._proofs = RowProofs(model)
        self._reasons: ReasonsByNumber = {}
        self._unsplit: str | None = None
        self._proven: list[int] = []
        self._changes = True
        self._pool: Pool | None = None
        self._device = torch_device_of(devices[0])
        self._streams = RandomStreams()
        self._draws = 0
        self._sent: Any = None
        self._tensors: list[Any] = []
        self._versions: list[Any] = []
        self._state: list[Any] = []
        self._kept: dict[int, tuple[int, Any]] = {}

    @contextmanager
    def epoch(self, *, changes: bool) -> Iterator[None]:
        """Run the steps of one epoch inside the context.

        Args:
            changes: Whether code of the user may change the model between two steps.
        """
        before, self._changes, self.unchecked = self._changes, changes, True
        try:
            yield
        finally:
            self._changes, self.unchecked = before, True

    def unsplit(self, x: Any) -> str | None:
        """Return why one device has to run batches like this one alone, `None` if not."""
        reasons = self._proofs.reasons(x, unchecked=self.unchecked)
        if self.unchecked or reasons is not self._reasons:
            self._reasons = reasons
            self._unsplit = unsplit_model(self._model, reasons)
        return self._unsplit

    def step(self, kind: str, data: Any, rows: int) -> Any:
        """Run one step on all devices, and return the logs or predictions.

        `unsplit` has to be called for its batch before.

        Args:
            kind: `"train"`, `"test"` or `"predict"`.
            data: Inputs, targets and sample weights: tensors, or `None`.
            rows: The number of rows of the batch.
        """
        pool = self._running_pool()
        with pool.in_use():
            if self.unchecked or self._structure_changed():
                self._compare_all(pool)
                self.unchecked = self._changes
            else:
                self._send_values(pool, self._assigned())
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
            pool.send("step", self.lease.key, kind, mode, rows, description, base)
            replica = Replica(pool.group, rows, self._streams, self._device)
            self._keep()
            try:
                result = run_step(kind, self._model, self._plan, replica, data)
                replica.check()
            except PeerLost:
                self._put_back()
                raise
            if self.draws_together:
                self._streams.take_over()
            self._versions = [tensor._version for tensor in self._tensors]
        return result

    @property
    def whole_layers(self) -> dict[str, str]:
        """Why every device runs some layers on the whole batch, by name, in the last step."""
        parts = self._plan.candidates
        return {parts[number].name: reason for number, reason in self._reasons.items()}

    # -------------------------------------------------------- the same model everywhere

    def _running_pool(self) -> Pool:
        pool = self.lease.pool()
        if pool is not self._pool:
            self._pool = pool
            self._sent = None
            self.unchecked = True
        return pool

    def _compare_all(self, pool: Pool) -> None:
        data, tensors = dump(self._model)
        settings = current_settings()
        same = len(tensors) == len(self._tensors) and all(map(_is, tensors, self._tensors))
        sent = (data, settings, self.draws_together)
        if same and self._sent == sent:
            pool.send("compare", self.lease.key, [checksum(tensor) for tensor in tensors])
            differ = sorted({number for answer in pool.receive() for number in answer})
        else:
            self._sent = None
            pool.send("model", self.lease.key, data, settings, self.draws_together)
            self._plan = Plan(self._model, draws_together=self.draws_together)
            self._proven = []
            self._tensors = tensors
            self._structure = _structure(tensors)
            self._state = _state_of(self._model)
            self._kept = {}
            differ = list(range(len(tensors)))
            self._sent = sent
        self._send_values(pool, differ)
        seeds = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
        keras_seed = None if seeds is None else keras.ops.convert_to_numpy(seeds.state)
        pool.send("seeds", random.getstate(), np.random.get_state(), keras_seed)

    def _send_plan(self, pool: Pool) -> None:
        candidates = range(len(self._plan.candidates))
        proven = [number for number in candidates if number not in self._reasons]
        if proven != self._proven:
            pool.send("plan", self.lease.key, proven)
            self._plan = Plan(self._model, proven, draws_together=self.draws_together)
            self._proven = proven

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
            pool.send("values", self.lease.key, numbers)
            pool.group.broadcast_in_place([self._tensors[number] for number in numbers])

    def _draw_base(self, kind: str) -> bytes:
        """Return what decides the random numbers of the next step, besides those of rank 0.

        It is another one for each step, and a resumed run has that of the run before. It is
        drawn from no state: PyTorch's own also decides the order of shuffled rows.
        """
        self._draws += 1
        number = self._draws
        if kind == "train" and self._model.optimizer is not None:
            # keras/src/optimizers/base_optimizer.py: it counts steps, accumulated ones too
            number = int(self._model.optimizer._iterations.value)
        base = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
        base.update(f"{kind} {number}".encode())
        return base.digest()

    # ------------------------------------------------------------- a step that fails

    def _keep(self) -> None:
        """Copy what a forward pass may change, where it has changed since the last copy."""
        for tensor in self._state:
            kept = self._kept.get(id(tensor))
            if kept is None or kept[0] != tensor._version:
                self._kept[id(tensor)] = (tensor._version, tensor.detach().clone())

    def _put_back(self) -> None:
        with torch.no_grad():
            for tensor in self._state:
                version, value = self._kept[id(tensor)]
                if tensor._version != version:
                    tensor.copy_(value)


def _is(a: Any, b: Any) -> bool:
    return a is b


def _structure(tensors: list[Any]) -> list[bool]:
    return [tensor.requires_grad for tensor in tensors]


def _state_of(model: Any) -> list[Any]:
    """Return the tensors that a forward pass may change: moving means, seeds and the like."""
    layers = model._flatten_layers()
    weights = {id(variable) for layer in layers for variable in layer._trainable_variables}
    variables = [v for v in model.non_trainable_variables if id(v) not in weights]
    return [variable.value for variable in [*variables, *rnn_states(model)]]
