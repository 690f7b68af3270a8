"""Compares the first step of each form on several devices with that of one, before any update.

Engines with a copy of the model on each device guess: a layer that was followed is taken to work
row by row, and a worker is taken to run the code of the caller. So the first few rows of a batch
are run by Keras's own step on one device, twice, and by all devices. The outputs of the layers, the
logs, the gradients and the other updates are compared by sketches. Nothing is updated.

One device is its own measure: a step that is not the same twice has a state that no run sets back,
such as that of a generator in a library, so nothing that several devices give can be compared.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from lockstep.core.left_out import LeftOutMetric
from lockstep.core.patched import patched
from lockstep.core.state import optimizers_of, rnn_states
from lockstep.engines.replicas.layer_plan import declared_cause
from lockstep.engines.replicas.object_states import ObjectStates
from lockstep.engines.replicas.sketches import (
    GRADIENT,
    LOG,
    OUTPUT,
    STATE,
    Bounds,
    Mismatch,
    Sketches,
    bounds_for,
    first_mismatch,
    has_entries,
    has_rank,
    is_about_to_overflow,
    sketch,
    steady,
)
from lockstep.engines.rowwise import is_declared, untouched_random_numbers
from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import (
    METRIC_FUNCTION,
    compiled_loss,
    compiled_metrics,
    layers_in,
    module_in_keras,
    own_trainable_variables,
    single_losses,
)
from lockstep.training.overrides import is_keras
from lockstep.training.probe_helpers import watched_layers

Computed = tuple[list[Sketches], set[str]]
"""What each replica has computed, and the types of the outputs of its layers."""


def is_checked() -> bool:
    """Return whether first steps are checked: `LOCKSTEP_CHECK=0` turns it off."""
    return os.environ.get("LOCKSTEP_CHECK", "1") != "0"


def is_guessed(model: Any, kind: str, followed: Iterable[Any]) -> bool:
    """Return whether a step runs any code but Keras's own.

    Args:
        model: The model.
        kind: `"train"`, `"test"` or `"predict"`.
        followed: The parts of the model whose code was followed.
    """
    if any(isinstance(part, keras.layers.Layer) for part in followed):
        return True
    if not all(is_keras(model, name) for name in (f"{kind}_step", "compute_loss")):
        return True
    if not all(map(_is_plain_layer, layers_in(model))):
        return True
    return kind != "predict" and not all(map(_is_of_keras, _compiled_parts(model)))


def _compiled_parts(model: Any) -> list[Any]:
    loss, metrics = compiled_loss(model), compiled_metrics(model)
    losses = [] if loss is None or not loss.built else single_losses(loss)
    are_here = not (metrics is None or isinstance(metrics, LeftOutMetric))
    measured = list(metrics.metrics) if are_here and metrics.built else []
    functions = [getattr(part, "fn", None) for part in losses]
    functions += [getattr(part, METRIC_FUNCTION, None) for part in measured]
    optimizers = [optimizer for _, optimizer in optimizers_of(model)]
    return [*losses, *measured, *optimizers, *(each for each in functions if each is not None)]


def _is_of_keras(part: Any) -> bool:
    return bool(module_in_keras(part if hasattr(part, "__name__") else type(part)))


def _is_plain_layer(layer: Any) -> bool:
    if not (module_in_keras(type(layer)) and module_in_keras(type(layer).call)):
        return False
    if "call" in vars(layer) or getattr(layer, "quantization_mode", None):
        return False
    if isinstance(layer, keras.Model):
        return True
    # Keras wraps methods of the class on the instance.
    options = [value for name, value in vars(layer).items() if not hasattr(type(layer), name)]
    return all(_is_of_keras(value) for value in options if callable(value))


# ------------------------------------------------------------------------- what a step computes


class Recording:
    """What one run of a step has computed, as sketches.

    Attributes:
        seen: The sketches, as tensors of the backend.
        dtypes: The types of the outputs of the layers.
    """

    def __init__(self, model: Any) -> None:
        self.seen: dict[str, Any] = {}
        self.dtypes: set[str] = set()
        self._numbers = {id(layer): number for number, layer in enumerate(watched(model))}

    def outputs(self, layer: Any, outputs: Any) -> None:
        """Take the outputs of a layer."""
        for leaf in keras.tree.flatten(outputs):
            if keras.ops.is_tensor(leaf) and has_entries(leaf):
                self.dtypes.add(keras.backend.standardize_dtype(leaf.dtype))
                self._add(OUTPUT, f"{self._numbers[id(layer)]}/{layer.path or layer.name}", leaf)

    def logs(self, logs: Any) -> None:
        """Take the logs of a step."""
        for name, value in logs.items() if isinstance(logs, dict) else ():
            is_known = keras.ops.is_tensor(value) and has_rank(value)
            if isinstance(value, int | float) or is_known:
                self._add(LOG, name, value)

    def gradients(self, variables: Any, gradients: Any) -> None:
        """Take the gradients of variables."""
        for variable, gradient in zip(variables, gradients, strict=True):
            if gradient is not None:  # a lookup on TensorFlow gives indexed rows
                gradient = keras.ops.convert_to_tensor(gradient)
                self._add(GRADIENT, variable.path, keras.ops.reshape(gradient, (1, -1)))

    def states(self, model: Any, values: dict[int, Any] | None = None) -> None:
        """Take the variables that a step changes besides the weights.

        Args:
            model: The model.
            values: The values of variables by their `id`, if they were not assigned.
        """
        values = values or {}
        rnns = {id(state) for state in rnn_states(model)}
        for variable in model.non_trainable_variables:
            if id(variable) in rnns or self.is_fixed(variable):
                continue
            if "float" in variable.dtype:
                value = keras.ops.reshape(values.get(id(variable), variable.value), (1, -1))
                if has_entries(value):
                    self._add(STATE, variable.path, value)

    def is_fixed(self, variable: Any) -> bool:
        """Return whether no layer can change a variable in a step."""
        return False

    def _add(self, kind: str, path: str, value: Any) -> None:
        count = sum(name.endswith(f"/{path}") for name in self.seen if name.startswith(kind))
        self.seen[f"{kind}/{count:03d}/{path}"] = sketch(value)

    def sketches(self) -> Sketches:
        """Return the sketches on the host."""
        return {name: keras.ops.convert_to_numpy(value) for name, value in self.seen.items()}


@contextmanager
def without_updates(model: Any, recording: Callable[[], Recording]) -> Iterator[None]:
    """Let the optimizers of a model record their gradients inside the context, and do no more."""

    def recording_apply(optimizer: Any) -> Callable[..., None]:
        # keras/src/optimizers/base_optimizer.py, BaseOptimizer.apply
        def apply(grads: Any, trainable_variables: Any = None) -> None:
            variables = trainable_variables or own_trainable_variables(optimizer)
            recording().gradients(variables, grads)

        return apply

    with patched([(each, "apply", recording_apply(each)) for _, each in optimizers_of(model)]):
        yield


def watched(model: Any) -> list[Any]:
    """Return the layers whose outputs are compared, the model last."""
    return [*(watched_layers(model) if hasattr(model, "layers") else []), model]


@contextmanager
def unchanged_objects(model: Any) -> Iterator[None]:
    """Put back what a step changes of Python's objects, and Python's and NumPy's random numbers."""
    before = states_of(model)
    try:
        with untouched_random_numbers():
            yield
    finally:
        before.put_back()


def can_be_tried(model: Any) -> bool:
    """Return whether a step can be run without an update, and leave no trace."""
    return not states_of(model).fixed


def states_of(model: Any) -> ObjectStates:
    """Return the states of the objects that the code of a model reaches."""
    return ObjectStates([*layers_in(model), *_compiled_parts(model)])


# ------------------------------------------------------------------------- the check


def rows_to_check(model: Any, rows: int, replicas: int, most: int | None = None) -> list[slice]:
    """Return which rows of a batch are run: a few, and others in case that these differ.

    The shards are uneven where the batch has enough rows. A model of a fixed batch runs all rows.

    Args:
        model: The model.
        rows: The rows of the batch.
        replicas: The number of replicas.
        most: The most rows that one device may run at once; `None` without a bound.
    """
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    count = min(rows, 2 * replicas + 1, rows if most is None else most)
    if count == rows or rnn_states(model) or any(each.shape[:1] != (None,) for each in inputs):
        return [slice(0, rows)]
    start = min(count, rows - count)
    return [slice(0, count), slice(start, start + count)]


def form_of(data: Any) -> str:
    """Return the structure, types and shapes of a batch, and whether its rows are known."""

    def form(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype"):
            return None
        return str(leaf.dtype), len(leaf.shape), *leaf.shape[1:], tuple(leaf.shape[:1]) == (None,)

    return str(keras.tree.map_structure(form, data))


def few_rows(data: Any, rows: int, part: slice) -> Any:
    """Return some rows of every leaf of a batch; a leaf without these rows stays as it is."""

    def some(leaf: Any) -> Any:
        has_rows = leaf is not None and len(leaf.shape) and leaf.shape[0] == rows
        return leaf[part] if has_rows else leaf

    return keras.tree.map_structure(some, data)


def compare(
    model: Any,
    data: Any,
    rows: int,
    replicas: int,
    alone: Callable[[Any], Computed],
    together: Callable[[Any, int], Computed],
    most: int | None = None,
    *,
    repeated: bool = False,
    by_all: bool = False,
) -> Mismatch | None:
    """Return the first difference between two runs of one device, or of several devices and one.

    It is `None` if they agree. Several devices run in any case: each process of a launcher is one,
    and all take part.

    A gradient that differs on some rows and not on others is that of a kink. Code that fails on a
    few rows is compared on all, unless one device may not run these at once.

    Where a step is compared again, training may have led to where rounding grows. So one device
    also runs the rows with inputs that are rounded otherwise: what that moves is no fault.

    Args:
        model: The model.
        data: The batch.
        rows: The rows of the batch.
        replicas: The number of replicas.
        alone: Runs a batch on one device.
        together: Runs a batch of that many rows on all devices.
        most: The most rows that one device may run at once; `None` without a bound.
        repeated: Whether the step is no first one. One device then runs the rows again only if it
            parts from several.
        by_all: Whether it runs them in any case, as each process runs the same.
    """
    found = None
    parts = rows_to_check(model, rows, replicas, most)
    while parts:
        part = parts.pop(0)
        some = few_rows(data, rows, part)
        count = len(range(*part.indices(rows)))
        try:
            (one,), dtypes = alone(some)
            again, near = one, None
            if not repeated or by_all:
                again = alone(some)[0][0]
            if repeated and by_all:
                near = alone(_rounded_otherwise(some))[0][0]
        except Exception:
            if count == rows:
                raise
            if most is not None and most < rows:
                return None
            parts = [slice(0, rows)]
            continue
        several, others = together(some, count)
        bounds = bounds_for(model, dtypes | others)
        found = _parted(one, again, near, several, count, bounds)
        if found is not None and repeated and not by_all:
            again, near = alone(some)[0][0], alone(_rounded_otherwise(some))[0][0]
            found = _parted(one, again, near, several, count, bounds)
        if found is None or found.is_of_one or found.kind == OUTPUT:
            return found
    return found


def agreed(
    data: Any, alone: Callable[[Any], Recording], several: Recording, bounds: Bounds
) -> Mismatch | None:
    """Return the first place where a step on all rows disagrees with one device; `None` for none.

    What rounding moves as far is no fault; see `compare`.

    Args:
        data: The batch.
        alone: Runs a batch on one device.
        several: What was computed of it otherwise.
        bounds: How far they may be apart.
    """
    one, others = alone(data).sketches(), several.sketches()
    found = first_mismatch(one, [others], 1, bounds)
    if found is None:
        return None
    again, near = alone(data).sketches(), alone(_rounded_otherwise(data)).sketches()
    return _parted(one, again, near, [others], 1, bounds)


def _rounded_otherwise(data: Any) -> Any:
    """Return a batch whose inputs are moved by the last digit of their type, up or down."""

    def moved(leaf: Any) -> Any:
        name = keras.backend.standardize_dtype(leaf.dtype) if hasattr(leaf, "dtype") else ""
        if name not in ("float32", "float64"):
            return leaf
        signs = np.random.default_rng(0).integers(0, 2, size=tuple(leaf.shape)) * 2.0 - 1.0
        last = keras.ops.convert_to_tensor(signs * np.finfo(name).eps, name)
        return leaf + leaf * last

    if isinstance(data, tuple) and data:
        return (keras.tree.map_structure(moved, data[0]), *data[1:])
    return keras.tree.map_structure(moved, data)


def _parted(
    one: Sketches,
    again: Sketches,
    near: Sketches | None,
    several: list[Sketches],
    rows: int,
    bounds: Bounds,
) -> Mismatch | None:
    """Return the first difference between two runs of one device, or of several devices and one."""
    one = steady(one, again, bounds)
    if (of_one := first_mismatch(one, [again], rows, bounds)) is not None:
        return replace(of_one, is_of_one=True)
    if near is not None and is_about_to_overflow(one):
        return None  # squares overflow on some devices alone
    return first_mismatch(one, several, rows, bounds, near)


def distrusted_part(
    found: Mismatch,
    model: Any,
    parts: list[Any],
    distrusted: dict[int, str],
    *,
    is_custom: bool,
) -> str | None:
    """Let the smallest part whose output differs run on the global batch from now on.

    Args:
        found: What differs.
        model: The model.
        parts: The parts of the model, those outside before those inside.
        distrusted: Why parts run on the global batch, by their number. A part is added.
        is_custom: Whether the step is the user's own, where the model itself is such a part.

    Returns:
        Its name; `None` if there is no such part.

    Raises:
        UnsupportedModel: If its author has declared that it works row by row.
    """
    if found.kind != OUTPUT:
        return None
    layer = watched(model)[found.layer]
    for number, part in reversed(list(enumerate(parts))):
        if not isinstance(part, keras.layers.Layer) or (part is model and not is_custom):
            continue
        inside = layers_in(part)
        if number in distrusted or not any(layer is inner for inner in inside):
            continue
        declared = [inner for inner in inside if is_declared(inner)]
        if declared:
            raise UnsupportedModel(
                f"Layer {declared[0].name!r} is declared row-wise, but on several devices "
                f"{found} from one device:\na row depends on other rows, or the processes run "
                "different code. Remove lockstep.rowwise from it."
            )
        distrusted[number] = f"in the first step, {found} from one device"
        return str(part.name)
    return None


def check_declared_losses(found: Mismatch, model: Any) -> None:
    """Raise if a loss or metric was declared to work row by row.

    Raises:
        UnsupportedModel: If there is one: the values of several devices differ from those of one.
    """
    declared = [part for part in _compiled_parts(model) if is_declared(part)]
    if declared:
        name = getattr(declared[0], "__name__", None) or getattr(declared[0], "name", "")
        raise UnsupportedModel(
            f"{name!r} of {model.name!r} is declared row-wise, but on several devices {found}\n"
            "from one device: the value of a row depends on other rows.\n"
            "Remove lockstep.rowwise from it."
        )


class FirstSteps:
    """Which first steps of a model have been compared, and with what result.

    Attributes:
        alone: Why one device runs steps alone, by their kind.
        unknown: The class of an object whose state a trial may have moved; `""` without one.
    """

    def __init__(self, model: Any) -> None:
        self.alone: dict[str, str] = {}
        self.unknown = ""
        self._model = model
        self._compared: set[Any] = set()

    def forget(self, kind: str) -> None:
        """Compare the next step of this kind again: the model may be compiled differently."""
        self.alone.pop(kind, None)
        self._compared = {form for form in self._compared if form[0] != kind}

    def is_due(self, kind: str, form: Any, guessed: Callable[[], bool]) -> bool:
        """Return whether a step has to be compared: once for each form, if code was guessed.

        If it would have to be and cannot be undone, `alone` has the kind from then on.

        Args:
            kind: The kind of the step.
            form: The form of its batch.
            guessed: Returns whether the step runs any code but Keras's own.
        """
        if (kind, form) in self._compared or not is_checked():
            return False
        self._compared.add((kind, form))
        if not guessed():
            return False
        states = states_of(self._model)
        if not states.fixed:
            self.unknown = self.unknown or states.unknown
            return True
        self.alone[kind] = (
            f"has custom code, and {UNTRIED} {states.fixed}, whose state cannot be restored:\n"
            f"so a first {kind} step cannot be run and compared with one device"
        )
        return False

    def settle(
        self,
        kind: str,
        find: Callable[[], Mismatch | None],
        distrust: Callable[[Mismatch], str | None],
    ) -> None:
        """Compare a first step until all devices agree with one, or else let one run it alone.

        Args:
            kind: The kind of the step.
            find: Compares the step.
            distrust: Lets a part run on the global batch because of a difference, and returns its
                name; `None` if there is no such part.
        """
        found = find()
        for _ in range(_MOST_PARTS):
            if found is None:
                return
            before = found
            if found.is_of_one or distrust(found) is None or (found := find()) == before:
                break
        if found is not None and found.is_of_one:
            self.alone[kind] = f"{NOT_TWICE}: in its first {kind} step, {found}"
        elif found is not None:
            why = f"in its first {kind} step, {found} from one device"
            self.alone[kind] = f"{PARTED}: {why}{declared_cause(found.name, self._model)}"


PARTED = "does not give the same results on every device"
"""Begins the reason of a step that was tried. It may have changed what nothing here knows of."""

NOT_TWICE = "gives different results in two runs on one device"
"""Begins the reason of a step that was tried, and has changed what nothing here knows of."""

UNTRIED = "holds an object of"
"""Is in the reason of a step that was not tried: the object only runs forward, say."""


def known_of_alone(what: str, on_jax: str) -> str:
    """Return what is known of the steps that one device runs alone, and what to do.

    Args:
        what: Why it does.
        on_jax: The sentence that JAX would split it.
    """
    if NOT_TWICE in what:
        return "Draw random numbers with keras.random, and keep state in Keras variables."
    return on_jax if PARTED in what else f"The result is exact. {on_jax}"


_MOST_PARTS = 8
"""Parts that are found one after the other to give other numbers, at most."""
