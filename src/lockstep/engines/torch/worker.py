"""The process of one device but the first: it follows the calls of rank 0.

It waits in a read while there is nothing to do. It ends with the process of rank 0, however
that one ends: a second pipe, which a thread reads, is closed then.
"""

import os
import pickle
import random
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


def main(
    rank: int, size: int, device: str, connection: int, lifeline: int, memory: int, threads: int
) -> None:
    """Run one worker until rank 0 closes its connection.

    Args:
        rank: The number of this process.
        size: The number of processes.
        device: The name of the device of this process.
        connection: The file descriptor of a socket to rank 0.
        lifeline: The file descriptor of a pipe that rank 0 never writes to.
        memory: The file descriptor of the memory for batches.
        threads: The number of threads of an operation.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    rank_0 = Connection(connection)
    try:
        worker = _Worker(rank, size, device, memory, threads, rank_0)
        while True:
            worker.follow(pickle.loads(rank_0.recv_bytes()))
    except EOFError:
        os._exit(0)
    except BaseException as error:
        _report(rank_0, error)
        os._exit(1)


def _end_with(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(0)


def _report(rank_0: Any, error: BaseException) -> None:
    """Send an error to rank 0, if it is still there."""
    from lockstep.engines.sent_error import dump_error
    from lockstep.engines.torch.group import PeerLost

    traceback.print_exception(error)
    try:
        if isinstance(error, PeerLost):
            rank_0.send_bytes(pickle.dumps(("lost", None, "")))
            return
        text = "".join(traceback.format_exception(error))
        rank_0.send_bytes(pickle.dumps(("error", dump_error(error), text)))
    except OSError:
        pass


def import_keras() -> None:
    """Import Keras without the packages that it imports only because they are installed.

    A worker waits for this import at its start, and JAX and scikit-learn are half of it. They can
    be imported afterwards.
    """
    # keras/src/callbacks/orbax_checkpoint.py, keras/src/wrappers/sklearn_wrapper.py
    hidden = [name for name in ("jax", "sklearn") if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        import keras  # noqa: F401
    finally:
        for name in hidden:
            del sys.modules[name]


@dataclass
class _Copy:
    """A copy of a model of rank 0, and how its steps run."""

    model: Any
    plan: Any
    losses: Any
    tensors: list[Any]
    generators: list[Any]
    whole_batch: Any
    shards: Any


class _Worker:
    def __init__(
        self, rank: int, size: int, device: str, memory: int, threads: int, rank_0: Any
    ) -> None:
        # The frameworks take seconds to import, so that nothing above needs them.
        import_keras()
        import torch
        import torch.distributed as dist

        from lockstep.engines.torch.batch_memory import BatchMemory
        from lockstep.engines.torch.code_state import SetCode
        from lockstep.engines.torch.group import HOST, Group
        from lockstep.engines.torch.placement import make_current, torch_device_of
        from lockstep.engines.torch.replica import RandomStreams

        self._device = torch_device_of(device)
        make_current(self._device)
        torch.set_num_threads(threads)
        self._rank_0 = rank_0
        self._memory = BatchMemory(memory)
        self._models: dict[int, _Copy] = {}
        self._recording: Any = None
        self._code = SetCode()
        self._streams = RandomStreams()
        rank_0.send_bytes(pickle.dumps(("ready", None, "")))
        port = pickle.loads(rank_0.recv_bytes())
        store = dist.TCPStore(HOST, port, size, is_master=False)
        self._group = Group(store, rank, size, self._device)

    def follow(self, message: tuple[str, Any]) -> None:
        """Do what rank 0 asks for."""
        name, content = message
        getattr(self, f"_{name}")(*content)

    def _settings(self, settings: Any) -> None:
        from lockstep.engines.torch.settings import apply_settings

        apply_settings(settings)

    def _model(self, key: int, data: bytes, draws_together: bool, kept: dict[int, int]) -> None:
        """Take a model, with the parts of variables that the one before has, by their numbers."""
        from lockstep.engines.torch.layers import Plan, parts_of
        from lockstep.engines.torch.loss_sharding import LossSharding
        from lockstep.engines.torch.model_pickle import load
        from lockstep.engines.torch.sharded_variables import shards_of
        from lockstep.engines.torch.whole_batch_steps import WholeBatchSteps

        model, tensors, generators = load(data, self._code)
        for number, before in kept.items():
            tensors[number].data = self._models[key].tensors[before].data
        plan = Plan(model, draws_together=draws_together)
        shards = shards_of(model)
        shards.group = self._group
        self._models[key] = _Copy(
            model,
            plan,
            LossSharding(model),
            tensors,
            generators,
            WholeBatchSteps(model),
            shards,
        )
        self._rank_0.send_bytes(pickle.dumps(("taken", parts_of(plan), "")))

    def _exchanges(self, compared: bool) -> None:
        self._group.compares = compared

    def _plan(
        self, key: int, proven: list[int], distrusted: list[int], losses_by_rows: bool
    ) -> None:
        from lockstep.engines.torch.layers import Plan

        copy = self._models[key]
        together = copy.plan.draws_together
        copy.plan = Plan(copy.model, proven, draws_together=together, distrusted=distrusted)
        copy.losses.by_rows = losses_by_rows

    def _forget(self, key: int) -> None:
        import torch

        self._models.pop(key, None)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _compare(self, key: int, sums: list[int | None]) -> None:
        from lockstep.engines.torch.settings import checksum

        tensors = self._models[key].tensors
        differ = [
            number
            for number, (tensor, expected) in enumerate(zip(tensors, sums, strict=True))
            if expected is not None and checksum(tensor) != expected
        ]
        self._rank_0.send_bytes(pickle.dumps(("differ", differ, "")))

    def _sketch(self, key: int, numbers: list[int]) -> None:
        from lockstep.engines.torch.first_step import sketched

        found = sketched(self._models[key].tensors, numbers)
        self._rank_0.send_bytes(pickle.dumps(("sketched", found, "")))

    def _values(self, key: int, numbers: list[int]) -> None:
        tensors = self._models[key].tensors
        self._group.broadcast_in_place([tensors[number] for number in numbers])

    def _generators(self, key: int, states: dict[int, bytes]) -> None:
        from lockstep.engines.torch.generators import set_state

        for number, state in states.items():
            set_state(self._models[key].generators[number], state)

    def _gather(self, key: int, number: int) -> None:
        part = self._models[key].tensors[number]
        self._group.gather(part, [len(part)] * self._group.size)

    def _scatter(self, key: int, number: int) -> None:
        import torch

        part = self._models[key].tensors[number]
        flat = part.new_empty(len(part) * self._group.size)
        self._group.broadcast_in_place([flat])
        with torch.no_grad():
            part.copy_(flat[self._group.rank * len(part) :][: len(part)])

    def _gradients(self, key: int, changed: list[int], there: list[int]) -> None:
        import torch

        tensors = self._models[key].tensors
        for number in changed:
            tensors[number].grad = torch.empty_like(tensors[number]) if number in there else None
        self._group.broadcast_in_place([tensors[number].grad for number in there])

    def _seeds(self, python: Any, numpy: Any, keras_seed: Any) -> None:
        import numpy as np

        from lockstep.keras_compat import (
            GLOBAL_SEED_GENERATOR,
            global_seed_generator,
            global_state,
        )

        random.setstate(python)
        np.random.set_state(numpy)
        if keras_seed is None:  # a step that needs one makes it, from Python's random numbers
            global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, None)
        else:
            global_seed_generator().state.assign(keras_seed)

    def _step(
        self,
        key: int,
        kind: str,
        training: bool,
        rows: int,
        batch: Any,
        base: Any,
        shares_draws: bool,
    ) -> None:
        copy = self._models[key]
        if copy.plan.draws_together:
            self._streams.share(base)
        else:
            self._streams.seed(base, self._group.rank)
        self._prepared(copy, kind, training, rows, batch, shares_draws=shares_draws)()

    def _recorded(
        self, key: int, kind: str, training: bool, rows: int, batch: Any, state: Any
    ) -> None:
        from lockstep.engines.torch.first_step import recorded_step

        copy = self._models[key]
        self._streams.share(state)
        step = self._prepared(copy, kind, training, rows, batch)
        self._recording = recorded_step(copy.model, step, is_custom=False)

    def _sketches(self) -> None:
        """Send what the last step without an update has computed."""
        self._rank_0.send_bytes(pickle.dumps(("recorded", self._recording.sketches(), "")))
        self._recording = None

    def _prepared(
        self,
        copy: _Copy,
        kind: str,
        training: bool,
        rows: int,
        batch: Any,
        *,
        shares_draws: bool = False,
    ) -> Any:
        """Return a function that runs a step."""
        from lockstep.engines.torch.replica import Replica
        from lockstep.engines.torch.steps import run_step

        if copy.model.training != training:
            copy.model.train(training)
        replica = Replica(
            self._group,
            rows,
            self._streams,
            self._device,
            shards=copy.shards,
            shares_draws=shares_draws,
        )
        data = self._own_copy(copy.model, batch)
        return lambda: run_step(kind, copy.model, copy.plan, copy.losses, replica, data)

    def _whole_step(self, *step: Any) -> None:
        from lockstep.engines.torch.whole_batch_steps import numbers_in

        model, run = self._on_whole_batch(*step)
        self._rank_0.send_bytes(pickle.dumps(("logs", numbers_in(run(), model), "")))

    def _recorded_whole_step(self, key: int, *step: Any) -> None:
        from lockstep.engines.torch.first_step import recorded_step

        model, run = self._on_whole_batch(key, *step)
        recorded_step(model, run, is_custom=True, watch=self._models[key].whole_batch.watched)
        self._rank_0.send_bytes(pickle.dumps(("recorded", None, "")))

    def _on_whole_batch(
        self, key: int, kind: str, training: bool, batch: Any, state: Any, distrusted: list[int]
    ) -> Any:
        """Return the model, and a function that runs a step on the whole batch."""
        from lockstep.engines.torch.placement import copies_on
        from lockstep.engines.torch.replica import set_random_state

        copy = self._models[key]
        model, steps = copy.model, copy.whole_batch
        if model.training != training:
            model.train(training)
        data = copies_on(self._device, self._memory.read(batch))
        set_random_state(state)
        steps.distrusted = dict.fromkeys(distrusted, "")

        def run() -> Any:
            together = copy.plan.draws_together
            return steps.run(
                kind, data, self._group, self._streams, self._device, draws_together=together
            )

        return model, run

    def _own_copy(self, model: Any, batch: Any) -> Any:
        """Return the tensors of a batch, copied where Keras may write into them.

        Keras multiplies sample weights by a mask in place. All processes see the memory. The
        step itself copies the rows of the inputs that this replica takes.
        """
        from lockstep.engines.torch.placement import copies_on
        from lockstep.training.overrides import is_keras

        x, y, sample_weight = self._memory.read(batch)
        y, sample_weight = copies_on(self._device, (y, sample_weight))
        if not (is_keras(model, "compute_loss") and is_keras(model, "compute_metrics")):
            x = copies_on(self._device, x)  # code of the user's own is given them
        return x, y, sample_weight
