"""Compares a traced step with Keras's own step on one device, before any update."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import torch

from lockstep.core.patched import patched
from lockstep.core.state import optimizers_of, unique
from lockstep.engines.replicas.first_step import Recording, agreed, unchanged_objects
from lockstep.engines.replicas.sketches import STATE, Mismatch, bounds_for
from lockstep.engines.torch.exchange.placement import copies
from lockstep.engines.torch.first_step.first_step import stock_step, unchanged_tensors
from lockstep.engines.torch.same_model.model_pickle import dump
from lockstep.engines.torch.same_model.settings import checksum
from lockstep.engines.torch.steps.replica import random_state
from lockstep.engines.torch.traced.trace import Computed, variables_in
from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import own_trainable_variables, stored_value


def compared(
    model: Any, kind: str, batch: Any, traced: Computed, tensors: list[Any]
) -> Mismatch | None:
    """Return in what a traced step parts from Keras's step on one device, `None` if it does not.

    Outputs, logs, gradients and states are compared by sketches, as in a first step. Optimizers of
    the one device are given the gradients of the traced step: an update may enlarge their rounding,
    and so is compared by itself.

    Args:
        model: The model.
        kind: `"train"`, `"test"` or `"predict"`.
        batch: The global batch.
        traced: What the traced step has computed.
        tensors: Tensors that code of the model reaches besides its variables.
    """
    updated: dict[int, Any] = {}
    numbers: list[Any] = []

    def alone(some: Any) -> Recording:
        return _recorded(model, kind, some, tensors, traced.gradients, updated, numbers)

    several = _sketched(model, kind, traced)
    found = agreed(batch, alone, several, bounds_for(model, several.dtypes))
    found = found or _update_difference(traced, updated)
    if found is None and not all(map(_equal, numbers[0], traced.random_state)):
        found = Mismatch(STATE, "PyTorch's random numbers", 1.0)
    return found


def _equal(one: Any, other: Any) -> bool:
    return one is other or torch.equal(one, other)


def keeps_state(model: Any, kind: str, batch: Any, tensors: list[Any]) -> bool:
    """Return whether a step keeps a state in other places than in variables of Keras.

    These are objects of Python, tensors, random numbers of Python and NumPy, and whatever makes
    the same step give another result the next time. A graph keeps none of it. What cannot be told
    counts as such a state.

    Args:
        model: The model.
        kind: `"train"`, `"test"` or `"predict"`.
        batch: The global batch.
        tensors: Tensors that code of the model reaches besides its variables.
    """
    values = {id(stored_value(variable)) for variable in variables_in(model)}

    def run() -> Any:
        return copies(stock_step(model, kind, copies(batch)))

    def run_again() -> Any:
        with unchanged_tensors(model, (), every=True):
            return run()

    with (
        unchanged_objects(model),
        unchanged_tensors(model, tensors, every=True),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        run_again()  # the first one may fill caches
        results = run_again(), run_again()
        before = _state_of_python(model, values)
        run()
        same = before is not None and _is_same(before, _state_of_python(model, values))
        return not (same and _are_close(*results))


def _state_of_python(model: Any, values: set[int]) -> Any:
    """Return the state of all but the variables, `None` if it is not known."""
    try:
        dumped = dump(model)
    except UnsupportedModel:
        return None
    others = [each for each in dumped.tensors if id(each) not in values]
    numbers = [str(part) for part in np.random.get_state()]
    seen = dumped.data, dumped.states, random.getstate(), numbers, list(map(checksum, others))
    return seen, others


def _is_same(before: Any, now: Any) -> bool:
    if now is None or before[0] != now[0]:
        return False
    return all(one is other for one, other in zip(before[1], now[1], strict=True))


def _are_close(one: Any, other: Any) -> bool:
    """Return whether two runs of a step have given the same."""
    pairs = zip(keras.tree.flatten(one), keras.tree.flatten(other), strict=True)
    return all(
        torch.allclose(a, b, rtol=1e-5, equal_nan=True) if isinstance(a, torch.Tensor) else a == b
        for a, b in pairs
        if not isinstance(a, keras.Variable)
    )


def _sketched(model: Any, kind: str, traced: Computed) -> Recording:
    recording = Recording(model)
    for variables, gradients in zip(traced.updates, traced.gradients, strict=True):
        recording.gradients(variables, gradients)
    _add_result(recording, model, kind, traced.result)
    pairs = zip(traced.variables, traced.values, strict=True)
    recording.states(model, {id(variable): value for variable, value in pairs})
    return recording


def _add_result(recording: Recording, model: Any, kind: str, result: Any) -> None:
    if kind == "predict":
        recording.outputs(model, result)
    else:
        recording.logs(result)


def _recorded(
    model: Any,
    kind: str,
    batch: Any,
    tensors: list[Any],
    given: list[list[Any]],
    updated: dict[int, Any],
    numbers: list[Any],
) -> Recording:
    """Run Keras's step on one device, with an update by the gradients that are given."""
    recording, lists = Recording(model), iter(given)
    before = {id(v): v for _, each in optimizers_of(model) for v in each.variables}

    def applying(optimizer: Any) -> Callable[..., None]:
        plain = optimizer.apply

        # keras/src/optimizers/base_optimizer.py, BaseOptimizer.apply
        def apply(grads: Any, trainable_variables: Any = None) -> None:
            variables = trainable_variables or own_trainable_variables(optimizer)
            recording.gradients(variables, grads)
            plain(copies(next(lists, list(grads))), trainable_variables)

        return apply

    changes = [(each, "apply", applying(each)) for _, each in optimizers_of(model)]
    with (
        unchanged_objects(model),
        unchanged_tensors(model, tensors, every=True),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # the step itself shows them
        with patched(changes):
            result = stock_step(model, kind, copies(batch))
        numbers.append(random_state())
        with torch.no_grad():
            _add_result(recording, model, kind, result)
            recording.states(model)
            for variable in unique([*model.trainable_variables, *before.values()]):
                updated.setdefault(id(variable), stored_value(variable).detach().clone())
    return recording


def _update_difference(traced: Computed, updated: dict[int, Any]) -> Mismatch | None:
    """Return which variable the two updates leave with other values."""
    values = {id(v): value for v, value in zip(traced.variables, traced.values, strict=True)}
    known = {id(variable): variable for variable in traced.all_variables}
    for number, alone in updated.items():
        variable = known.get(number)
        if variable is None:
            continue
        old = stored_value(variable).detach()
        new = values.get(number, old)
        if not bool(torch.isfinite(alone).all()):
            continue
        moved, apart, size = (_norm(alone, old), _norm(alone, new), _norm(alone, 0 * alone))
        last = torch.finfo(alone.dtype).eps if alone.is_floating_point() else 0.0
        if not apart <= _RELATIVE * moved + 8 * last * size:
            return Mismatch(STATE, variable.path, apart / max(moved, 1e-30))
    return None


def _norm(one: Any, other: Any) -> float:
    """Return the size of the difference of two tensors."""
    return float(torch.linalg.vector_norm(one.to(torch.float64) - other.to(torch.float64)))


_RELATIVE = 1e-4
"""How far two updates by the same gradients may be apart, relative to their size."""
