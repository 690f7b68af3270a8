"""The models of `models.py` in PyTorch, and loops over them as PyTorch's users write them.

All loops take their batches in the same way, by slicing tensors: a `DataLoader` would cost
each of them more.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from hardware import check
from rows import BATCH
from torch import nn

Run = Callable[[], None]


class Attention(nn.Module):
    """Attention over itself, and a dense layer behind it, each added and normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(32, 2, batch_first=True)
        self.dense = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.first, self.second = nn.LayerNorm(32, 1e-3), nn.LayerNorm(32, 1e-3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x + self.heads(x, x, x, need_weights=False)[0])
        return self.second(x + self.dense(x))


class Mean(nn.Module):
    """The mean over some dims."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(self.dims)


def mlp() -> nn.Module:
    made = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*made)


def cnn() -> nn.Module:
    made: list[nn.Module] = [nn.Unflatten(1, (1, 16, 16))]
    for channels in (1, 16):
        made += [nn.Conv2d(channels, 16, 3, padding="same"), nn.ReLU()]
    return nn.Sequential(*made, Mean(2, 3), nn.Linear(16, 10))


def transformer() -> nn.Module:
    made = [nn.Unflatten(1, (16, 16)), nn.Linear(16, 32), Attention(), Attention(), Mean(1)]
    return nn.Sequential(*made, nn.Linear(32, 10))


def parameters(model: nn.Module) -> int:
    """How many numbers are trained."""
    return sum(parameter.numel() for parameter in model.parameters())


def device_of(model: nn.Module) -> torch.device:
    """Where it has its parameters, and wants its batches."""
    return next(model.parameters()).device


def epoch(
    model: nn.Module,
    optimizer: Any,
    x: torch.Tensor,
    y: torch.Tensor,
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward,
) -> Run:
    """One epoch over shuffled rows, with the mean loss and the accuracy."""

    device = device_of(model)

    def run() -> None:
        order = torch.randperm(len(x))
        total = torch.zeros((), device=device)
        right = torch.zeros((), dtype=torch.int64, device=device)
        for start in range(0, len(x), BATCH):
            rows = order[start : start + BATCH]
            inputs, targets = x[rows].to(device), y[rows].to(device)
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = nn.functional.cross_entropy(outputs, targets)
            backward(loss)
            optimizer.step()
            total += loss.detach() * len(inputs)
            right += (outputs.argmax(1) == targets).sum()
        (total / len(x)).item(), (right / len(x)).item()

    return run


# ---- each is given a model where it is to run, and gives it, its optimizer and `backward`

Made = tuple[nn.Module, Any, Callable[[torch.Tensor], Any]]


def alone(model: nn.Module, make_optimizer: Callable[..., Any]) -> Made:
    """A plain loop."""
    return model, make_optimizer(model.parameters()), torch.Tensor.backward


def data_parallel(model: nn.Module, make_optimizer: Callable[..., Any]) -> Made:
    """Hand-written DistributedDataParallel."""
    if not torch.distributed.is_initialized():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        over = "nccl" if device_of(model).type == "cuda" else "gloo"
        torch.distributed.init_process_group(over, rank=rank, world_size=size)
    wrapped = nn.parallel.DistributedDataParallel(model)
    return wrapped, make_optimizer(wrapped.parameters()), torch.Tensor.backward


def accelerate(model: nn.Module, make_optimizer: Callable[..., Any]) -> Made:
    """Hugging Face Accelerate; one process alone it does not wrap."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=device_of(model).type == "cpu")
    model, optimizer = accelerator.prepare(model, make_optimizer(model.parameters()))
    return model, optimizer, accelerator.backward


def fabric(model: nn.Module, make_optimizer: Callable[..., Any]) -> Made:
    """Lightning Fabric with its strategy for data parallelism."""
    from lightning_fabric import Fabric

    hosts = int(os.environ["WORLD_SIZE"])  # one device in each process, as between hosts
    made = Fabric(accelerator=device_of(model).type, devices=1, num_nodes=hosts, strategy="ddp")
    made.launch()
    model, optimizer = made.setup(model, make_optimizer(model.parameters()))
    return model, optimizer, made.backward


def device_for(platform: str) -> torch.device:
    """The one device of this process.

    Raises:
        ImportError: If this PyTorch has none of the platform.
    """
    has = platform == "cpu" or torch.cuda.is_available()
    check(platform, f"PyTorch {torch.__version__}", platform if has else "cpu")
    return torch.device("cpu" if platform == "cpu" else "cuda")


def environment(platform: str, rank: int, size: int, port: int) -> dict[str, str]:
    """What a launcher sets for a process, one on each host."""
    ranks = {"RANK": rank, "NODE_RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": size}
    named = {name: str(value) for name, value in ranks.items()}
    named |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "1"}
    return named | ({"ACCELERATE_USE_CPU": "true"} if platform == "cpu" else {})
