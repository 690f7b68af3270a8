"""Draws random numbers of Keras in a graph, from a seed that the graph computes."""

import ast
from collections.abc import Callable
from typing import Any

import torch


class SeededGenerator(torch.Generator):  # type: ignore[misc]
    """Stands for a generator of PyTorch in a trace.

    Attributes:
        seed_of_keras: The two numbers of the seed.
    """

    seed_of_keras: Any = None


def seeded(seed: Any) -> SeededGenerator:
    """Return what stands for a generator with a seed of Keras."""
    generator = SeededGenerator(seed.device)
    generator.seed_of_keras = seed
    return generator


def _draw(seed: torch.Tensor, inputs: list[torch.Tensor], name: str, options: str) -> torch.Tensor:
    """Draw as a function of PyTorch does from a generator with this seed.

    keras/src/backend/torch/random.py, torch_seed_generator

    Args:
        seed: The two numbers of a seed of Keras.
        inputs: The tensors among the arguments.
        name: The name of the function.
        options: Its arguments, in Python; a tensor is its number in a set.
    """
    generator = torch.Generator(device=seed.device)
    generator.manual_seed(int(seed[0] + seed[1]) & 0xFFFFFFFF)
    return _called(inputs, name, options, {"generator": generator})


def _drawn(seed: Any, inputs: list[Any], name: str, options: str) -> Any:
    return _called(inputs, name, options, {})


def _called(inputs: list[Any], name: str, written: str, more: dict[str, Any]) -> Any:
    arguments, options = ast.literal_eval(written)

    def read(value: Any) -> Any:
        if isinstance(value, set):
            return inputs[next(iter(value))]
        if isinstance(value, str):
            kind, _, text = value.partition(":")
            return getattr(torch, text) if kind == "dtype" else torch.device(text)
        return value

    given = {key: read(value) for key, value in options.items()}
    return getattr(torch, name)(*map(read, arguments), **given, **more)


torch.library.custom_op("lockstep::draw", _draw, mutates_args=()).register_fake(_drawn)


def draw_in_graph(
    whole: Callable[[Any], Any], function: Any, arguments: Any, options: dict[str, Any]
) -> Any:
    """Return what a function of PyTorch draws, given a `SeededGenerator` as its generator.

    Args:
        whole: Returns a tensor as every rank has it.
        function: The function.
        arguments: Its arguments.
        options: Its arguments by name.
    """
    inputs: list[Any] = []

    def write(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            inputs.append(whole(value.detach()))
            return {len(inputs) - 1}
        if isinstance(value, torch.dtype):
            return f"dtype:{str(value).rpartition('.')[2]}"
        if isinstance(value, torch.device | str):
            return f"device:{value}"
        return tuple(value) if isinstance(value, list | tuple) else value

    seed = whole(options.pop("generator").seed_of_keras)
    written = repr((list(map(write, arguments)), {key: write(v) for key, v in options.items()}))
    return torch.ops.lockstep.draw(seed, inputs, function.__name__, written)
