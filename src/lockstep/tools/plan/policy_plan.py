"""The plan of a model under one dtype policy."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import keras

from lockstep.attach.attachment import session_of
from lockstep.core.engine import Engine
from lockstep.core.fit_lines import not_compiled_words
from lockstep.core.state import optimizers_of
from lockstep.core.step_bytes import LayoutBytes, Leaf, layout_bytes
from lockstep.engines import current_engine
from lockstep.errors import UnsupportedBackend, UnusableData
from lockstep.keras_compat import layers_not_compiled
from lockstep.tools.plan.abstract_model import abstract_model, arrays_of, built_model
from lockstep.tools.plan.memory_plan import MemoryPlan
from lockstep.tools.plan.temporaries import (
    Dims,
    Layouts,
    Request,
    compiled_temporaries,
    estimated_temporaries,
    largest_batch,
    with_micro_batches,
)
from lockstep.tools.targets import call_target

_EXACT = "The bytes of weights, slots, gradients and the batch are exact."
_SENT = (
    "Sent in a step: gradients and weights, with a ring all-reduce. Statistics of batch norm, "
    "the loss and metrics are not included."
)


@dataclass(frozen=True)
class _Target:
    """What is planned.

    Attributes:
        given: A model, a function that builds one, or the name of a function.
        name: How texts call it.
        model: The model, whose variables may have no values.
        batch: The shapes of a batch.
        has_targets: Whether there are data, and so targets.
    """

    given: Any
    name: str
    model: Any
    batch: Any
    has_targets: bool

    @property
    def arrays(self) -> list[Leaf]:
        """The shapes of the arrays of the batch, and the bytes of their elements."""
        return arrays_of(self.batch if self.has_targets else self.batch[0])


def plan_of_policy(given: Any, data: Any, asked: Request) -> MemoryPlan:
    """Return the plan for one dtype policy; see `plan`."""
    engine = current_engine()
    target = _target(given, data, asked.batch_size)
    layouts, no_shards = _layouts(engine, target, asked)
    layouts, of_peak = _with_temporaries(engine, target, layouts, asked)
    in_parts = list[str]()
    if asked.memory is not None:
        found, in_parts = with_micro_batches(engine, target.model, target.batch, layouts, asked)
        layouts = _changed(layouts, found)
    if asked.find_largest_batch and asked.gpu and asked.memory:
        layouts = _with_largest_batch(engine, target, layouts, asked)
    gpu = asked.gpu
    return MemoryPlan(
        name=target.model.name,
        backend=engine.name,
        parameters=target.model.count_params(),
        batch_size=max((shape[0] for shape, _ in target.arrays if shape), default=0),
        micro_batch_size=asked.micro_batch_size,
        layouts=tuple([replace(each, policy=asked.policy) for each, _ in layouts]),
        memory=asked.memory,
        gpu=None if gpu is None else gpu["device_description_str"],
        notes=(_EXACT, *of_peak, _SENT, *_not_counted(engine, target), *no_shards, *in_parts),
    )


def _target(given: Any, data: Any, batch_size: int | None) -> _Target:
    """Return the model on shapes, and the shapes of a batch."""
    if isinstance(given, keras.Model):
        if session_of(given) is not None:
            raise UnusableData(
                f"{given.name!r} is distributed, but plan needs the model on one device.\n"
                "Call lockstep.release(model) first, or pass a function that builds it."
            )
        batch = built_model(given, data, given.name, batch_size)
        return _Target(given, given.name, given, batch, data is not None)
    name = given if isinstance(given, str) else getattr(given, "__name__", "build")
    function = partial(call_target, given) if isinstance(given, str) else given
    model, batch, has_targets = abstract_model(function, name, batch_size, data)
    if session_of(model) is not None:
        raise UnusableData(
            f"{name} distributes {model.name!r}, but plan needs the model on one device.\n"
            "Return the model without calling lockstep.distribute."
        )
    return _Target(given, name, model, batch, has_targets)


def _not_counted(engine: Engine, target: _Target) -> list[str]:
    """Return what of the model the bytes do not have, a sentence each."""
    model, notes = target.model, list[str]()
    if not target.has_targets:
        gives = "was given" if model is target.given else "returns"
        notes.append(
            f"{target.name} {gives} no data: the batch is counted from the inputs, without targets."
        )
    others = [each for each, optimizer in optimizers_of(model) if optimizer is not model.optimizer]
    if others:
        notes.append(
            f"The slots of {', '.join(others)} are not counted, because they are created in a step."
        )
    if engine.name == "jax" and not model.run_eagerly and (layers := layers_not_compiled(model)):
        notes.append(f"On JAX {not_compiled_words(layers)}: it may need more memory.")
    return notes


def _layouts(engine: Engine, target: _Target, asked: Request) -> tuple[Layouts, list[str]]:
    """Return the bytes of each layout without temporaries, and why there is none with shards."""
    layouts: list[tuple[int, Dims]] = [(count, None) for count in asked.counts]
    notes = list[str]()
    try:
        dims = [(count, engine.sharded_dims(target.model, count)) for count in asked.counts]
        layouts += [each for each in dims if each[0] > 1]
    except UnsupportedBackend as error:
        notes.append(f"{engine.name} has no sharded state. {str(error).splitlines()[1]}")
    layouts.sort(key=lambda each: each[0])
    again = _gathers_again(engine.name, inf if asked.memory is None else asked.memory)
    arrays = target.arrays
    return [
        (layout_bytes(target.model, arrays, count, dims, again), dims) for count, dims in layouts
    ], notes


def _gathers_again(backend: str, memory: float) -> Callable[[int], bool]:
    """Return a function: whether weights of so many bytes are gathered again on JAX.

    The other engines keep them from the forward pass, or never have them all at once.
    """
    if backend != "jax":
        return lambda size: False
    from lockstep.engines.jax.steps.gather_again import would_gather_again

    return partial(would_gather_again, memory=memory)


def _with_temporaries(
    engine: Engine, target: _Target, layouts: Layouts, asked: Request
) -> tuple[Layouts, list[str]]:
    """Return layouts with the peak of a step, and what to say of it."""
    model, batch = target.model, target.batch
    if asked.gpu is None:
        found, words = estimated_temporaries(engine, model, batch, layouts, target.given, asked)
    else:
        found, words = compiled_temporaries(engine, model, batch, layouts, asked)
    return _changed(layouts, found), words


def _with_largest_batch(
    engine: Engine, target: _Target, layouts: Layouts, asked: Request
) -> Layouts:
    """Return layouts with the largest global batch that fits each of them."""
    plain = [layout for layout, _ in layouts]
    rows = [largest_batch(engine, target.model, target.batch, each, asked) for each in plain]
    found = [replace(each, largest_batch=n) for each, n in zip(plain, rows, strict=True)]
    return _changed(layouts, found)


def _changed(layouts: Layouts, found: list[LayoutBytes]) -> Layouts:
    return [(new, dims) for new, (_, dims) in zip(found, layouts, strict=True)]
