"""Draws random numbers of Keras in a graph, from a seed that the graph computes."""

import ast
from collections.abc import Callable
from operator import attrgetter
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


def _called(inputs: list[Any], name: str, options: str, more: dict[str, Any]) -> Any:
    arguments, given = _read(inputs, options)
    return getattr(torch, name)(*arguments, **given, **more)


def _written(nest: Any, number_of: Callable[[Any], int | None]) -> str:
    """Return arguments as Python, with a set of its number for a tensor.

    Args:
        nest: The arguments, and those by name.
        number_of: Returns the number of a tensor, `None` for what is none.
    """

    def write(value: Any) -> Any:
        number = number_of(value)
        if number is not None:
            return {number}
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return f"torch:{str(value).rpartition('.')[2]}"
        if isinstance(value, torch.device | str):
            return f"text:{value}"
        if isinstance(value, dict):
            return {name: write(each) for name, each in value.items()}
        return tuple(map(write, value)) if isinstance(value, list | tuple) else value

    return repr(write(nest))


def _read(inputs: list[Any], written: str) -> Any:
    def read(value: Any) -> Any:
        if isinstance(value, set):
            return inputs[next(iter(value))]
        if isinstance(value, str):
            kind, _, text = value.partition(":")
            return getattr(torch, text) if kind == "torch" else text
        if isinstance(value, dict):
            return {name: read(each) for name, each in value.items()}
        return tuple(map(read, value)) if isinstance(value, tuple) else value

    return read(ast.literal_eval(written))


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

    def number_of(value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        inputs.append(whole(value.detach()))
        return len(inputs) - 1

    seed = whole(options.pop("generator").seed_of_keras)
    written = _written((arguments, options), number_of)
    return torch.ops.lockstep.draw(seed, inputs, function.__name__, written)


# ------------------------------------------------------------------------- an order for a compiler


def _in_order(
    inputs: list[torch.Tensor], operation: str, options: str, before: torch.Tensor | None
) -> list[torch.Tensor]:
    """Run an operation that draws from PyTorch's own random numbers.

    Args:
        inputs: The tensors among its arguments.
        operation: Its name.
        options: Its arguments, in Python; a tensor is its number in a set.
        before: What the draw before it has given.
    """
    arguments, given = _read(inputs, options)
    found = attrgetter(operation)(torch.ops)(*arguments, **given)
    return [found] if isinstance(found, torch.Tensor) else list(found)


torch.library.custom_op("lockstep::in_order", _in_order, mutates_args=()).register_fake(_in_order)


def draw_in_order(operation: Any, arguments: Any, options: Any, before: Any) -> tuple[str, Any]:
    """Return the name and the arguments of an operation that runs a draw after another one.

    Args:
        operation: The draw. Its result is the list that the operation returns, or its only part.
        arguments: Its arguments. Tensors among them are numbers of type `NodeNumber`.
        options: Its arguments by name.
        before: What the draw before it has given.
    """
    inputs: list[Any] = []

    def number_of(value: Any) -> int | None:
        if not isinstance(value, NodeNumber):
            return None
        inputs.append(value)
        return len(inputs) - 1

    written = _written((arguments, options), number_of)
    return "lockstep.in_order.default", (inputs, str(operation), written, before)


class NodeNumber(int):
    """Stands for the node of this number of a graph, in the arguments of others."""
