"""Runs the first step of a form on PyTorch without an update; see `engines/replicas/first_step`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import torch

from lockstep.core.state import optimizers_of, unique, variables_of
from lockstep.engines.replicas.first_step import (
    Recording,
    unchanged_objects,
    watched,
    without_updates,
)
from lockstep.engines.replicas.sketches import STATE, Sketches, sketch
from lockstep.engines.torch.exchange.placement import Undo
from lockstep.engines.torch.sharded.sharded_variables import (
    parts_for_pytorch,
    was_sharded,
    whole_gradients,
)
from lockstep.engines.torch.steps.replica import random_state, set_random_state
from lockstep.engines.torch.steps.rows import is_transformed
from lockstep.engines.torch.steps.steps import watching
from lockstep.keras_compat import (
    GLOBAL_SEED_GENERATOR,
    global_state,
    same_draws_for_all_rows,
    stored_value,
    torch_current_device,
)
from lockstep.training.probe_helpers import Record


class _Recording(Recording):
    """Records gradients of whole values, of which each process has a part."""

    def gradients(self, variables: Any, gradients: Any) -> None:
        super().gradients(variables, whole_gradients(variables, gradients))

    def is_fixed(self, variable: Any) -> bool:
        return was_sharded(variable)


def recorded_step(
    model: Any,
    run: Callable[[], Any],
    *,
    is_custom: bool,
    tensors: Sequence[Any] = (),
    watch: Callable[[Record], AbstractContextManager[None]] | None = None,
) -> Recording:
    """Run a step, and return what it has computed. The model is as before after it.

    Args:
        model: The model.
        run: Runs the step, and returns its logs or predictions.
        is_custom: Whether code of the user's own may assign to any variable.
        tensors: Tensors that the code reaches besides the variables of the model.
        watch: Makes a context in which a function is given each layer, its arguments and outputs.
    """
    recording = _Recording(model)

    def record(layer: Any, arguments: Any, outputs: Any) -> None:
        if torch_current_device() != "meta" and not is_transformed():  # Keras learns shapes
            with torch.no_grad():
                recording.outputs(layer, outputs)

    with (
        unchanged_objects(model),
        unchanged_tensors(model, tensors, every=is_custom),
        same_draws_for_all_rows(),
        without_updates(model, lambda: recording),
    ):
        with watching(watched(model), record) if watch is None else watch(record):
            logs = run()
        with torch.no_grad():
            recording.logs(logs)
            recording.states(model)
        return recording


def sketched(tensors: Sequence[Any], numbers: Sequence[int]) -> Sketches:
    """Return sketches of some tensors, by their numbers."""
    return {
        f"{STATE}/000/{number}": keras.ops.convert_to_numpy(sketch(tensors[number].reshape(1, -1)))
        for number in numbers
    }


def stock_step(model: Any, kind: str, data: Any) -> Any:
    """Run a step of the model's class on one device, and return its logs or predictions."""
    # keras/src/backend/torch/trainer.py: one_step_on_data
    with nullcontext() if kind == "train" else torch.no_grad():
        return getattr(model, f"{kind}_step")(data)


@contextmanager
def unchanged_tensors(model: Any, others: Sequence[Any], *, every: bool) -> Iterator[None]:
    """Put back what a step without an update changes; with `every`, all tensors of the model."""
    with parts_for_pytorch():
        parameters = list(model.parameters())
    undo = Undo(_tensors(model, [*others, *parameters], every=every))
    undo.save()
    gradients = [None if each.grad is None else each.grad.clone() for each in parameters]
    numbers = random_state()
    try:
        yield
    finally:
        set_random_state(numbers)
        undo.put_back()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _tensors(model: Any, others: Sequence[Any], *, every: bool) -> list[Any]:
    slots = [v for _, each in optimizers_of(model) for v in each.variables]
    seeds = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    variables = [*variables_of(model), *slots, *([] if seeds is None else [seeds.state])]
    values = [stored_value(variable) for variable in variables]
    found = unique([*values, *others, *model.buffers()])
    trained = [each for each in found if _is_trained(each)]
    # No optimizer assigns to these now. Code of a layer, loss or metric may.
    few = sum(each.nbytes for each in trained) <= _COPIED
    fixed = set(map(id, [*map(stored_value, slots), *([] if few else trained)]))
    if every:
        fixed = set()
    return [
        each for each in found if each is not None and not each.is_meta and id(each) not in fixed
    ]


_COPIED = 2**28
"""Bytes of trained variables up to which they are copied before a step is tried."""


def _is_trained(tensor: Any) -> bool:
    return tensor is not None and bool(tensor.requires_grad)
