"""Let the optimizers of a model update each variable on its device.

Keras's optimizers on PyTorch update all variables by one operation over lists of tensors, with
scalars of one device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import torch

from lockstep.core.patched import patched
from lockstep.engines.torch.branches.local_calls import (
    copies_in_use,
    tensors_on,
    write_back,
)
from lockstep.engines.torch.exchange.placement import current_device
from lockstep.keras_compat import (
    ACCUMULATE,
    ADD_SLOT,
    CLIP,
    DECAY,
    UPDATE_ALL,
    UPDATE_ONE,
    decays,
    updates_all_at_once,
)

Method = Callable[..., Any]


@contextmanager
def updates_at_home(optimizers: list[Any]) -> Iterator[None]:
    """Update variables, and make slots, on the devices of the variables inside the context.

    Args:
        optimizers: Optimizers of Keras.
    """
    owners = [getattr(each, "inner_optimizer", each) for each in optimizers]
    with patched([change for owner in owners for change in _changes(owner)]):
        yield


def _changes(owner: Any) -> list[tuple[Any, str, Method]]:
    changes = {
        ADD_SLOT: _slots_at_home(owner.add_variable_from_reference),
        CLIP: _clipping(owner),
        DECAY: _decaying(owner),
        ACCUMULATE: _accumulating(owner),
    }
    # Other optimizers update one variable after another, and may keep what they learn from each.
    if updates_all_at_once(owner):
        changes[UPDATE_ALL] = _updating_all(owner)
    else:
        changes[UPDATE_ONE] = _updating_one(owner)
    return [(owner, name, method) for name, method in changes.items()]


def _groups(tensors: list[Any]) -> dict[torch.device, list[int]]:
    """Return the numbers of the tensors of each device, those of the current device last."""
    groups: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(tensors):
        groups.setdefault(tensor.device, []).append(number)
    here = current_device()
    return dict(sorted(groups.items(), key=lambda group: group[0] == here))


def _on(device: torch.device) -> Any:
    return keras.device(str(device))


def _values(variables: Any) -> list[Any]:
    return [variable.value for variable in variables]


def _scalars(owner: Any) -> list[Any]:
    """Return the counters and rates of an optimizer, which updates of all devices read."""
    return [variable for variable in owner.variables if variable.shape == ()]


def _slots_at_home(make: Method) -> Method:
    def make_at_home(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        with _on(reference_variable.value.device):
            return make(reference_variable, *args, **kwargs)

    return make_at_home


def _clipping(owner: Any) -> Method:
    clip = getattr(owner, CLIP)

    def clip_at_home(grads: list[Any]) -> list[Any]:
        if owner.global_clipnorm:
            return _clipped_by_global_norm(grads, owner.global_clipnorm)
        clipped = list(grads)
        for device, numbers in _groups(grads).items():
            with _on(device):
                for number, grad in zip(numbers, clip([grads[n] for n in numbers]), strict=True):
                    clipped[number] = grad
        return clipped

    is_keras = getattr(type(owner), CLIP) is getattr(keras.optimizers.Optimizer, CLIP)
    return clip_at_home if is_keras else clip


def _clipped_by_global_norm(grads: list[Any], most: float) -> list[Any]:
    """Return the gradients, scaled on their devices: only scalars go to another one.

    Source of the formula: keras/src/optimizers/base_optimizer.py, clip_by_global_norm.
    """
    squares = []
    for grad in grads:
        with _on(grad.device):
            squares.append(keras.ops.sum(keras.ops.square(grad)))
    norm = keras.ops.sqrt(keras.ops.sum(keras.ops.stack(squares)))
    scale = most * keras.ops.minimum(1.0 / norm, 1.0 / most) + (norm - norm)
    scales = {device: scale.to(device) for device in {grad.device for grad in grads}}
    return [grad * scales[grad.device] for grad in grads]


def _decaying(owner: Any) -> Method:
    decay = getattr(owner, DECAY)

    def decay_at_home(variables: list[Any]) -> None:
        if owner.weight_decay is None:
            return
        decayed = [variable for variable in variables if decays(owner, variable)]
        if not decayed:
            decay(variables)
        for device, numbers in _groups(_values(decayed)).items():
            with _on(device), copies_in_use(_scalars(owner), device):
                decay([decayed[number] for number in numbers])

    return decay_at_home


def _accumulating(owner: Any) -> Method:
    accumulate = getattr(owner, ACCUMULATE)

    def accumulate_at_home(grads: list[Any], acc_grads: list[Any]) -> None:
        for device, numbers in _groups(_values(acc_grads)).items():
            with _on(device):
                there = tensors_on(device, [grads[number] for number in numbers])
                accumulate(there, [acc_grads[number] for number in numbers])

    return accumulate_at_home


def _updating_all(owner: Any) -> Method:
    update = getattr(owner, UPDATE_ALL)

    def update_at_home(grads: list[Any], trainable_variables: list[Any], rate: Any) -> None:
        every: list[tuple[Any, Any]] = []
        for device, numbers in _groups(_values(trainable_variables)).items():
            with _on(device), copies_in_use(_scalars(owner), device) as changed:
                there, rate_there = tensors_on(device, ([grads[n] for n in numbers], rate))
                update(there, [trainable_variables[n] for n in numbers], rate_there)
            every += changed
        # A product such as that of Nadam grows once in a step, in each update from the same value.
        write_back(every)

    return update_at_home


def _updating_one(owner: Any) -> Method:
    update = owner.update_step

    def update_at_home(gradient: Any, variable: Any, learning_rate: Any) -> None:
        device = variable.value.device
        with _on(device), copies_in_use(owner.variables, device) as changed:
            there = tensors_on(device, (gradient, learning_rate))
            update(there[0], variable, there[1])
        write_back(changed)

    return update_at_home
