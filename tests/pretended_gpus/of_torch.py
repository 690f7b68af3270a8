"""The CPU of PyTorch in the place of its GPUs, to the engine of lockstep.

Tensors stay on the CPU. As on GPUs, a backward pass runs in a thread of its own, which stays for
the next one; the devices have random numbers of their own; and what NCCL exchanges is there after
`wait`. NCCL itself does not notice that a process has ended: it waits until it is aborted.
"""

import os
import queue
import threading
from types import SimpleNamespace
from typing import ClassVar

from tests.pretended_gpus.visible import numbers_of_visible, version_of_nccl

MEMORY = 10**11


def _backward_in_its_thread():
    import torch
    from torch.autograd import graph

    run_backward = graph._engine_run_backward
    asked = queue.SimpleQueue()
    kinds = ("cpu", "cuda")

    def serve():
        while True:
            asked.get()()

    def run(*args, **kwargs):
        if threading.current_thread() is thread:
            return run_backward(*args, **kwargs)
        if not thread.is_alive():
            thread.start()
        done, ends = [], threading.Event()
        gradients = torch.is_grad_enabled()
        casts = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]

        def there():
            try:
                torch.set_grad_enabled(gradients)
                for kind, enabled, dtype in casts:
                    torch.set_autocast_enabled(kind, enabled)
                    torch.set_autocast_dtype(kind, dtype)
                done.append((run_backward(*args, **kwargs), None))
            except BaseException as error:
                done.append((None, error))
            ends.set()

        asked.put(there)
        ends.wait()
        (result, error) = done.pop()
        if error is not None:
            raise error
        return result

    thread = threading.Thread(target=serve, name="autograd", daemon=True)
    graph._engine_run_backward = torch.autograd._engine_run_backward = run


class _Cuda:
    """What lockstep asks of `torch.cuda`, and nothing that PyTorch does not have there."""

    def __init__(self):
        import torch

        self._torch, self._current = torch, 0
        self._generators = [torch.Generator() for _ in numbers_of_visible()]
        names = [name for name in vars(_Cuda) if not name.startswith("_")]
        assert all(hasattr(torch.cuda, name) for name in names), names

    def is_available(self):
        return self.device_count() > 0

    def is_initialized(self):
        return self.is_available()

    def device_count(self):
        return len(self._generators)

    def get_device_properties(self, number):
        name = f"pretended {numbers_of_visible()[number]}"
        return SimpleNamespace(name=name, total_memory=MEMORY)

    def get_device_name(self, device=None):
        return "pretended"

    def current_device(self):
        return self._current

    def set_device(self, device):
        self._current = device if isinstance(device, int) else device.index
        assert self._current in range(self.device_count()), f"invalid device ordinal {device}"

    def current_stream(self):
        return SimpleNamespace(synchronize=_wait_for_all)

    def empty_cache(self):
        pass

    def set_per_process_memory_fraction(self, fraction, device):
        print(f"takes {fraction:.2f} of its GPU", flush=True)

    nccl = SimpleNamespace(version=version_of_nccl)

    def get_rng_state(self):
        return self._generators[self._current].get_state()

    def set_rng_state(self, state):
        self._generators[self._current].set_state(state)

    def manual_seed(self, number):
        self._generators[self._current].manual_seed(number)


def _wait_for_all():
    for nccl in _Nccl.made:
        nccl.wait_for_all()


class _Nccl:
    """What lockstep calls of `ProcessGroupNCCL`, by gloo."""

    made: ClassVar = []

    def __init__(self, store, rank, size, most):
        from lockstep.engines.torch.exchange.group import _gloo

        self._gloo, self._aborted = _gloo(store, rank, size, most, local=True), threading.Event()
        self._waiting = []
        _Nccl.made.append(self)

    def _sent(self, tensor):
        import torch

        strange = (torch.uint16, torch.uint32, torch.uint64, torch.complex32)
        if tensor.dtype in strange:
            raise ValueError(f"Unconvertible NCCL type {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        return tensor.detach().clone()

    def _later(self, start, result):
        work = _Work(self, start, result)
        self._waiting.append(work)
        return work

    def allreduce(self, tensors):
        (tensor,) = tensors
        sent = self._sent(tensor)
        return self._later(lambda: self._gloo.allreduce([sent]), (tensor, lambda: sent))

    def broadcast(self, tensor, root):
        sent = self._sent(tensor)
        return self._later(lambda: self._gloo.broadcast(sent, root), (tensor, lambda: sent))

    def _allgather_base(self, out, given):
        sent, got = self._sent(given), self._sent(out)
        return self._later(lambda: self._gloo._allgather_base(got, sent), (out, lambda: got))

    def _reduce_scatter_base(self, out, given):
        sent = self._sent(given)
        own = slice(self._gloo.rank() * len(out), (self._gloo.rank() + 1) * len(out))
        return self._later(lambda: self._gloo.allreduce([sent]), (out, lambda: sent[own]))

    def wait_for_all(self):
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            work.finish()

    def aborted(self):
        self._aborted.wait()

    def abort(self):
        self._aborted.set()
        self._gloo.abort()


class _Work:
    def __init__(self, nccl, start, result):
        self._nccl, self._result, self._is_done = nccl, result, False
        try:
            self._work = start()
        except RuntimeError:  # a process has ended, which NCCL does not notice
            self._work = None

    def wait(self):
        self.finish()
        return True

    def finish(self):
        import torch

        if self._is_done:
            return
        self._is_done = True
        try:
            if self._work is None:
                raise RuntimeError
            self._work.wait()
        except RuntimeError:
            self._nccl.aborted()
            return
        there, made = self._result
        with torch.no_grad():
            there.copy_(made())


def _gpus():

    from lockstep.engines.torch.exchange import accelerators

    accelerators.cuda = _Cuda()
    accelerators.KIND = "cpu" if accelerators.cuda.is_available() else "cuda"
    accelerators.reduce_add = lambda tensors, destination: sum(tensors)
    there = not os.environ.get("PRETENDED_NO_NCCL")
    accelerators.dist = SimpleNamespace(is_nccl_available=lambda: there)


def _exchanges():
    from lockstep.engines.torch.exchange import group

    group._nccl = _Nccl


AFTER = {
    "torch": _backward_in_its_thread,
    "lockstep.engines.torch.exchange.accelerators": _gpus,
    "lockstep.engines.torch.exchange.group": _exchanges,
}
