"""The steps of a model in micro-batches: its call runs in parts of the rows.

A step calls `model.stateless_call` once: rows in, outputs out. Here that call runs in parts. What a
step does with the outputs (loss, gradient with respect to them, metrics, optimizer) is Keras's code
on the global batch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import jax
import keras

from lockstep.core import micro_batches as refused
from lockstep.core.devices import micro_batches
from lockstep.core.engine import TRAIN, Kind
from lockstep.core.fit_arguments import arguments_of
from lockstep.engines.jax.parts.call_in_parts import Call, prove, run_in_parts
from lockstep.engines.jax.parts.first_rows import compare_first_rows
from lockstep.engines.jax.parts.loss_values import (
    LossValues,
    NoValues,
    OutputsWithValues,
    given_to_metrics,
)
from lockstep.engines.jax.parts.row_parts import RowParts
from lockstep.engines.jax.steps.execution import Program, State, StepFunction
from lockstep.engines.jax.steps.padded import is_padded
from lockstep.engines.jax.steps.programs import Programs
from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import UPDATE_METRICS
from lockstep.training.overrides import is_keras

Step = Callable[..., Any]


class MicroBatches:
    """Runs one model on at most `size` rows of a device at once, inside its steps.

    Args:
        model: The model.
        steps: Its steps over the mesh.
        size: The most rows that a device runs at once.
    """

    def __init__(self, model: Any, steps: Programs, size: int) -> None:
        self._model, self._programs, self._size = model, steps, size
        self._in_step = False
        self._at_once = False
        self._called = False  # in the step that is traced
        self._is_proved = True  # all that has run in parts, with its gradients
        self._values: LossValues | None = None  # that the next call of the model is to compute

    @contextmanager
    def all_rows_at_once(self) -> Iterator[None]:
        """Let the steps that are traced inside the context run all rows of a device at once."""
        before, self._at_once = self._at_once, True
        try:
            yield
        finally:
            self._at_once = before

    def methods(self, stateless_call: Callable[..., Any]) -> dict[str, Any]:
        """Return the methods to replace on the model.

        Args:
            stateless_call: The method of that name, for all rows at once.
        """
        methods = {"stateless_call": self._stateless_call(stateless_call)}
        name = "compute_loss_and_updates"
        if is_keras(self._model, name) and is_keras(self._model, UPDATE_METRICS):
            methods[name] = self._compute_loss_and_updates(getattr(self._model, name))
            methods[UPDATE_METRICS] = self._update_metrics(getattr(self._model, UPDATE_METRICS))
        return methods

    def step(self, step: Step) -> Step:
        """Return a step whose calls of the model run in parts."""

        @wraps(step)
        def step_in_parts(state: State, data: Any) -> Any:
            self._called = False
            with self._running(True):
                result = step(state, data)
            x = keras.utils.unpack_x_y_sample_weight(data)[0]
            rows = next(filter(None, (_rows_of(leaf, False) for leaf in jax.tree.leaves(x))), 0)
            if rows and not self._called and self._parts(rows) is not None:
                raise refused.cuts_nothing(
                    self._model, getattr(step, "__name__", "step"), self._size
                )
            return result

        return step_in_parts

    def check(self, *, compiled: bool, layers: list[Any]) -> None:
        """Raise if a step runs operation by operation."""
        if not compiled:
            raise refused.not_compiled(self._model, self._size, layers)

    def checked(self, made: StepFunction, kind: Kind) -> StepFunction:
        """Return a step function that compares the first rows in parts with them at once.

        It does so before the first step with batches of a form, if the row trace has taken anything
        on trust. Otherwise a rule has proved of each operation how its values are made of those of
        parts, and JAX derives gradients from the same operations or from rules that are followed:
        a difference can be rounding only.
        """
        known: set[Any] = set()
        compared: set[Any] = set()

        def check(program: Program, state: State, batch: Any) -> Any:
            leaves = jax.tree.leaves(batch)
            form = program is made.run, tuple([(each.shape, str(each.dtype)) for each in leaves])
            if form in known and made.check_program is None:
                return batch
            if made.check_program is not None:
                placed = made.check_program(program, state, batch)
            else:
                placed = batch
                jax.eval_shape(program, state, batch)  # what is refused, for the rows that run
            rows_apart = tuple([(shape[1 + (not form[0]) :], dtype) for shape, dtype in form[1]])
            is_new = not self._is_proved and rows_apart not in compared
            if is_new and self._compare(kind, state, batch, not form[0]):
                compared.add(rows_apart)
            known.add(form)
            return placed

        return replace(made, check_program=check)

    @contextmanager
    def _running(self, in_step: bool) -> Iterator[None]:
        before, self._in_step = self._in_step, in_step
        try:
            yield
        finally:
            self._in_step = before

    def _stateless_call(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return the model's `stateless_call`, in parts while a step is traced."""
        self._plain = plain

        @wraps(plain)
        def stateless_call(
            trainable: Any, others: Any, *args: Any, return_losses: bool = False, **kwargs: Any
        ) -> Any:
            self._called = True
            at_once = partial(plain, return_losses=return_losses)
            call = Call.of(self._model, at_once, return_losses, args, kwargs)
            cuts = self._in_step and call.rows and not self._at_once
            parts = self._parts(call.rows) if cuts else None
            if parts is None:
                return at_once(trainable, others, *args, **kwargs)
            values, self._values = self._values, None
            with self._running(False):  # a model may call itself
                if values is not None:
                    both = partial(values.call, at_once)
                    more = kwargs | {"targets": values.targets}
                    wide = Call.of(self._model, both, return_losses, args, more)
                    with suppress(NoValues, UnsupportedModel):  # a loss that needs all rows
                        outputs, *rest = self._in_parts(wide, trainable, others, parts)
                        return values.take(outputs), *rest
                return self._in_parts(call, trainable, others, parts)

        return stateless_call

    def _in_parts(self, call: Call, trainable: Any, others: Any, parts: RowParts) -> Any:
        proof = prove(call, trainable, others, parts, self._size)
        self._is_proved &= proof.is_complete
        return run_in_parts(call, trainable, others, parts, proof)

    def _compute_loss_and_updates(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return the model's `compute_loss_and_updates`: parts compute the values of losses."""

        @wraps(plain)
        def compute_loss_and_updates(*args: Any, **kwargs: Any) -> Any:
            given = arguments_of(plain, args, kwargs)
            training = bool(given.get("training"))
            values = LossValues(self._model, given.get("y"), is_differentiated=training)
            if not (self._in_step and values.are_possible()):
                return plain(*args, **kwargs)
            self._values = values
            try:
                with values.given_to_losses():
                    loss, (unscaled, outputs, *rest) = plain(*args, **kwargs)
            finally:
                self._values = None
            return loss, (unscaled, values.carried(outputs), *rest)

        return compute_loss_and_updates

    def _update_metrics(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return Keras's update of the metrics of a step, with values that parts have computed."""

        @wraps(plain)
        def update_metrics(*args: Any) -> Any:
            found = next((each for each in args if isinstance(each, OutputsWithValues)), None)
            if found is None:
                return plain(*args)
            args = tuple(each.outputs if each is found else each for each in args)
            with given_to_metrics(self._model, found):
                return plain(*args)

        return update_metrics

    def _compare(self, kind: Kind, state: State, batch: Any, is_stacked: bool) -> bool:
        """Compare the first rows in two parts with them at once; return `False` without parts."""
        x = keras.utils.unpack_x_y_sample_weight(batch)[0]
        leaves = jax.tree.leaves(x, is_leaf=is_padded)
        rows = next((found for each in leaves if (found := _rows_of(each, is_stacked))), 0)
        if not rows or self._parts(rows) is None:
            return False
        # For one row JAX may trace another program, and the parts of the batch may have more rows.
        count = min(rows, max(2 if self._size == 1 else 4, self._size))
        parts = RowParts(count, 1, -(-count // 2), self._programs.replicated)
        plain = self._plain

        def first(leaf: Any) -> Any:
            array = _array_of(leaf)[0] if is_stacked else _array_of(leaf)
            own = array[:count] if _rows_of(leaf, is_stacked) == rows else array
            # Every device runs them all: XLA cannot split each layer unevenly.
            return jax.lax.with_sharding_constraint(own, self._programs.replicated)

        def first_rows(x: Any) -> Any:
            return jax.tree.map(first, x, is_leaf=is_padded)

        def in_parts(tv: Any, ntv: Any, x: Any, **kwargs: Any) -> Any:
            given = kwargs.pop("return_losses")
            call = Call.of(self._model, partial(plain, return_losses=given), given, (x,), kwargs)
            return self._in_parts(call, tv, ntv, parts)

        def at_once(tv: Any, ntv: Any, x: Any) -> Any:
            return plain(tv, ntv, first_rows(x))

        values = state[0], state[1], x
        if not is_keras(self._model, f"{kind.name}_step") and not _takes(at_once, values):
            return True  # a step of the user's own calls the model with something else
        trains = kind is TRAIN
        compare_first_rows(self._model, plain, in_parts, first_rows, values, self._size, trains)
        return True

    def _parts(self, rows: int) -> RowParts | None:
        """Return how a batch is cut, `None` if each device runs all of its rows at once."""
        steps = self._programs
        devices = 1 if steps.is_whole else len(steps.devices)
        number, each = micro_batches(rows, devices, self._size)
        if number == 1:
            return None
        layout = steps.replicated if steps.is_whole or devices == 1 else steps.by_rows
        return RowParts(rows, devices, each, layout)


def _array_of(leaf: Any) -> Any:
    return leaf.padded if is_padded(leaf) else leaf


def _rows_of(leaf: Any, is_stacked: bool) -> int:
    """Return the rows of an array of a batch, 0 without any."""
    if is_padded(leaf):
        return int(leaf.rows)
    shape = getattr(leaf, "shape", ())[int(is_stacked) :]
    return int(shape[0]) if shape else 0


def _takes(call: Callable[..., Any], values: tuple[Any, ...]) -> bool:
    """Return whether a model can be called with these inputs."""
    try:
        jax.eval_shape(call, *values)
    except Exception:  # the code of the model may raise anything
        return False
    return True
