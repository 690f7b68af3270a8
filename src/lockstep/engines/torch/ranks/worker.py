"""A worker: the process of a device other than the first. It follows the calls of rank 0.

It waits in a read while there is nothing to do. It ends with the process of rank 0, however
that one ends: a second pipe, which a thread reads, is closed then.
"""

import gc
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any


def main(
    rank: int,
    size: int,
    device: str,
    connection: int,
    lifeline: int,
    memory: int,
    waits: int,
    threads: int,
) -> None:
    """Run one worker until rank 0 closes its connection.

    Args:
        rank: The number of this process.
        size: The number of processes.
        device: The name of the device of this process.
        connection: The file descriptor of a socket to rank 0.
        lifeline: The file descriptor of a pipe that rank 0 never writes to.
        memory: The file descriptor of the memory for batches.
        waits: The file descriptor of the memory that says what each rank waits for.
        threads: The number of threads of an operation.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    rank_0 = Connection(connection)
    worker = None
    try:
        worker = _Worker(rank, size, device, memory, waits, threads, rank_0)
        while True:
            worker.follow(pickle.loads(worker.next_message()))
    except EOFError:
        if worker is not None:
            worker.leave()
        os._exit(0)
    except BaseException as error:
        _report(rank_0, error)
        os._exit(1)


def _end_with(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(0)


def _report(rank_0: Any, error: BaseException) -> None:
    """Send an error to rank 0, if it is still there."""
    from lockstep.engines.torch.exchange.group import PeerLost
    from lockstep.engines.torch.ranks.messages import dump_error

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

    A worker waits for this import at its start, and they are most of it. They can be imported
    afterwards.
    """
    # keras/src: callbacks/orbax_checkpoint.py, wrappers/sklearn_wrapper.py,
    # trainers/data_adapters/array_slicing.py, visualization/plot_image_gallery.py
    hidden = [n for n in ("jax", "sklearn", "pandas", "matplotlib") if n not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        import keras  # noqa: F401
    finally:
        for name in hidden:
            del sys.modules[name]


class _Worker:
    def __init__(
        self,
        rank: int,
        size: int,
        device: str,
        memory: int,
        waits: int,
        threads: int,
        rank_0: Any,
    ) -> None:
        # The frameworks take seconds to import, so that nothing above needs them.
        import_keras()
        import torch
        import torch.distributed as dist

        from lockstep.core.rank_waits import Waits
        from lockstep.engines.torch.exchange.accelerators import make_current
        from lockstep.engines.torch.exchange.group import HOST, RankGroup
        from lockstep.engines.torch.exchange.placement import torch_device_of
        from lockstep.engines.torch.ranks.messages import BatchMemory
        from lockstep.engines.torch.same_model.code_state import SetCode

        self._device = torch_device_of(device)
        make_current(self._device)
        torch.set_num_threads(threads)
        self._rank_0 = rank_0
        self._memory = BatchMemory(memory)
        self._ranks: dict[int, Any] = {}
        self._code = SetCode()
        self._answer("ready", None)
        port = pickle.loads(rank_0.recv_bytes())
        store = dist.TCPStore(HOST, port, size, is_master=False)
        self._group = RankGroup(store, rank, size, self._device)
        self._waits = self._group.waits = Waits(waits, rank, size)

    def next_message(self) -> Any:
        """Return the bytes of the next message, as soon as there is one."""
        from lockstep.core.rank_waits import CALL

        with self._waits.waiting(CALL):
            return self._rank_0.recv_bytes()

    def _answer(self, name: str, content: Any) -> None:
        self._rank_0.send_bytes(pickle.dumps((name, content, "")))

    def follow(self, message: tuple[str, Any]) -> None:
        """Do what rank 0 asks for."""
        name, content = message
        getattr(self, f"_{name}")(*content)

    def _call(self, key: int, method: str, arguments: tuple[Any, ...]) -> Any:
        """Run a marked method in the rank of a model, as rank 0 does.

        The casts of autocast are cleared first: the caller may have entered a new context.
        """
        import torch

        torch.clear_autocast_cache()
        rank = self._ranks[key]
        call = getattr(type(rank), method)
        if call.has_batch:
            written, *others = arguments
            arguments = (self._memory.read(written), *others)
        return call.method(rank, *arguments)

    def _ask(self, key: int, method: str, arguments: tuple[Any, ...]) -> None:
        """Send what a marked method of the rank of a model returns."""
        self._answer(method, self._call(key, method, arguments))

    def _model(self, key: int, data: bytes, draws_together: bool, kept: dict[int, int]) -> None:
        """Take a model, with the parts of variables that the one before has, by their numbers."""
        from lockstep.engines.torch.ranks.rank import Rank
        from lockstep.engines.torch.same_model.model_pickle import load
        from lockstep.engines.torch.sharded.sharded_variables import shards_of
        from lockstep.engines.torch.steps.layers import parts_of

        model, tensors, generators = load(data, self._code)
        for number, before in kept.items():
            tensors[number].data = self._ranks[key].tensors[before].data
        rank = Rank(model, self._device, shards_of(model), reads_shared=True)
        rank.group = rank.shards.group = self._group
        rank.tensors, rank.generators = tensors, generators
        rank.draws_together = draws_together
        rank.forget_model()
        self._ranks[key] = rank
        self._answer("taken", parts_of(rank.plan))

    def leave(self) -> None:
        """End what runs beside the models: the compilation of a graph has files and a process."""
        self._ranks.clear()
        gc.collect()

    def _forget(self, key: int) -> None:
        from lockstep.engines.torch.exchange.accelerators import free_cache

        self._ranks.pop(key, None)
        free_cache(self._device)

    def _settings(self, settings: Any) -> None:
        from lockstep.engines.torch.same_model.settings import apply_settings

        apply_settings(settings)

    def _exchanges(self, compared: bool) -> None:
        self._group.compares = compared

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
