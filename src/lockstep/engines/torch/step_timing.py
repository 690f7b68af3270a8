"""Times the steps on PyTorch, and what rank 0 waits for."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import torch

from lockstep.engines.engine import Trace
from lockstep.training.step_clock import StepClock


@contextmanager
def tracing(waited: Callable[[], float]) -> Iterator[Trace]:
    """Measure the computation and the communication of rank 0 in this context, on a CPU.

    A call of NCCL does not wait, so that nothing is known of GPUs.

    Args:
        waited: Returns the seconds that rank 0 has waited in collectives up to now.
    """
    found = Trace()
    before, computed = waited(), time.thread_time()
    yield found
    found.communication = waited() - before
    found.compute = time.thread_time() - computed
    found.seen = not torch.cuda.is_initialized()


class TorchClock(StepClock):
    """Time the steps of an epoch on PyTorch; see `StepClock`."""

    def counting(self, function: Any) -> Any:
        """Return the step function of the model, made to count its batches."""

        def counted(batches: Any) -> Any:
            drawn = list(batches)
            for batch in drawn:
                leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
                rows = next((len(leaf) for leaf in leaves if leaf.ndim), 0)
                self.count(1, rows, rows)
            return function(iter(drawn))

        return counted

    def wait(self) -> None:
        """Wait until the GPU of rank 0 has done its steps."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def host_time(self) -> float:
        """Return the time of the main thread, which on a CPU computes, so that it is left out."""
        return super().host_time() if torch.cuda.is_initialized() else 0.0
