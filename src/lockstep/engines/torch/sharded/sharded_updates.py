"""Updates of variables of which each process has a part.

Where the update of an element depends on that element alone, an optimizer of Keras takes the parts
for its variables. What looks at more is computed from all parts: norms, and whether gradients are
finite. Any other `update_step` gets whole values, one variable after another, in every process.
"""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import torch

from lockstep.core.patched import patched
from lockstep.core.state import optimizers_of
from lockstep.engines.torch.sharded.sharded_variables import (
    PARTS,
    WHOLE,
    Shards,
    is_sharded,
    whole_gradients,
)
from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import (
    CLIP,
    DECAY,
    FINITE,
    UPDATE_ALL,
    UPDATE_ONE,
    counted_steps,
    module_in_keras,
)

_ELEMENTWISE = [
    "SGD",
    "Adam",
    "AdamW",
    "Nadam",
    "Adamax",
    "RMSprop",
    "Adagrad",
    "Adadelta",
    "Lion",
    "Ftrl",
    "ScheduleFreeAdamW",
]
_BY_VARIABLE = ["Lamb", "Adafactor", "Muon"]
"""Optimizers of Keras whose update of an element depends on others of the same variable."""

_OWN = {"__init__", "build", UPDATE_ONE, "get_config", "from_config"}
"""The methods that an optimizer of the user's own may have."""


def check_optimizers(model: Any) -> None:
    """Raise if an optimizer of a model is not known to be exact on parts."""
    for name, optimizer in optimizers_of(model):
        reason = _reason(optimizer)
        if reason is not None:
            raise UnsupportedModel(
                f"{name} of {model.name!r} is {reason}, which is not known to be exact with "
                "sharded state,\nwhere each process holds only a shard of each variable.\nUse a "
                'different Keras optimizer, or remove state="sharded".'
            )
    if any(variable.overwrite_with_gradient for variable in model.trainable_variables):
        raise UnsupportedModel(
            f"{model.name!r} has float8 weights, whose scales are updated through their "
            "gradients.\nThis is not known to be exact with sharded state.\nRemove "
            'state="sharded".'
        )


def _reason(optimizer: Any) -> str | None:
    """Return what an optimizer is or has that is not known to be exact, `None` for nothing."""
    inner = getattr(optimizer, "inner_optimizer", None)
    kind, made = type(optimizer), type(optimizer).__name__
    if inner is not None and kind is keras.optimizers.LossScaleOptimizer:
        return _reason(inner)
    for each in kind.__mro__:
        if not module_in_keras(each):
            known = {name for name in vars(each) if hasattr(keras.optimizers.Optimizer, name)}
            own = known - _OWN - set(vars(_Empty))
            if own:
                return f"{made}, with its own {min(own)}"
        elif each is keras.optimizers.Optimizer or each.__name__ in [*_ELEMENTWISE, *_BY_VARIABLE]:
            break
        else:
            return made
    changed = [name for name in vars(optimizer) if callable(getattr(kind, name, None))]
    return f"{made}, with another {changed[0]}" if changed else None


class _Empty:
    """Has what any class has."""


def update(shards: Shards, optimizer: Any, gradients: list[Any], weights: list[Any]) -> None:
    """Apply gradients to weights, some of which are parts like their variables.

    Every process has to call this.
    """
    if not shards.variables:
        optimizer.apply(gradients, weights)
        return
    trained = [w for w, g in zip(weights, gradients, strict=True) if g is not None]
    owner = getattr(optimizer, "inner_optimizer", optimizer)
    constrained = [w for w in trained if is_sharded(w) and w.constraint is not None]
    before = counted_steps(owner) if constrained else 0
    shards.drop()
    shards.is_updating = True
    with shards.read_by(PARTS), patched(_changes(shards, optimizer, owner, trained)):
        optimizer.apply(gradients, weights)
    if constrained and counted_steps(owner) != before:
        for weight in constrained:
            with shards.read_by(WHOLE):
                weight.assign(weight.constraint(weight))
    shards.is_updating = False


def _changes(
    shards: Shards, optimizer: Any, owner: Any, trained: list[Any]
) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    if optimizer is not owner:
        yield optimizer, FINITE, _finite(shards, getattr(optimizer, FINITE))
    if owner.clipnorm or owner.global_clipnorm:
        yield owner, CLIP, _clipping(shards, owner, trained)
    if not _is_elementwise(owner):
        yield owner, UPDATE_ALL, _updating(shards, owner)
        decay = getattr(owner, DECAY)
        if _home(owner, DECAY).__name__ in _BY_VARIABLE:
            yield owner, DECAY, _decaying(shards, decay)


def _home(optimizer: Any, name: str) -> Any:
    """Return the class that defines a method of an optimizer."""
    return next(each for each in type(optimizer).__mro__ if name in vars(each))


def _is_elementwise(optimizer: Any) -> bool:
    home = _home(optimizer, UPDATE_ONE)
    return bool(module_in_keras(home)) and home.__name__ in _ELEMENTWISE


def _finite(shards: Shards, is_finite: Callable[..., Any]) -> Callable[..., Any]:
    def are_all_finite(grads: Any) -> Any:
        assert shards.group is not None, "a step has set it"
        others = shards.group.sum((~is_finite(grads)).to(torch.float32).reshape(1))
        return others[0] == 0

    return are_all_finite


def _clipping(shards: Shards, owner: Any, trained: list[Any]) -> Callable[..., Any]:
    """Return a method that clips by norms of whole gradients.

    Source of the formulas: keras/src/optimizers/base_optimizer.py, BaseOptimizer._clip_by_norm and
    clip_by_global_norm.
    """

    def clipped(grads: list[Any]) -> list[Any]:
        assert shards.group is not None, "a step has set it"
        squares = [grad.square().sum() for grad in grads]
        parts = [number for number, weight in enumerate(trained) if is_sharded(weight)]
        if parts:
            sums = shards.group.sum(torch.stack([squares[number] for number in parts]))
            for number, total in zip(parts, sums, strict=True):
                squares[number] = total.to(squares[number].dtype)
        if owner.clipnorm:
            most = owner.clipnorm
            norms = [square.sqrt() for square in squares]
            return [g * most / n.clamp(min=most) for g, n in zip(grads, norms, strict=True)]
        most, norm = owner.global_clipnorm, torch.stack(squares).sum().sqrt()
        scale = most * torch.minimum(1.0 / norm, torch.ones_like(norm) / most)
        scale = scale + (norm - norm)  # infinite gradients become NaN
        return [grad * scale for grad in grads]

    return clipped


def _updating(shards: Shards, owner: Any) -> Callable[..., Any]:
    def update_one_by_one(grads: list[Any], variables: list[Any], learning_rate: Any) -> None:
        for gradient, variable in zip(grads, variables, strict=True):
            (whole,) = whole_gradients([variable], [gradient])
            with shards.read_by(WHOLE):
                owner.update_step(whole, variable, learning_rate)

    return update_one_by_one


def _decaying(shards: Shards, decay: Callable[..., Any]) -> Callable[..., Any]:
    def decay_one_by_one(variables: list[Any]) -> None:
        for variable in variables:
            with shards.read_by(WHOLE):
                decay([variable])

    return decay_one_by_one
