"""Values of losses and metrics that a part of the rows computes with its outputs.

A loss of Keras has one value for each row, and then Keras reduces those of all rows. Where a part
computes the values, nothing reads the outputs of all rows, and XLA leaves them out: the logits of a
language model are larger than its activations. The row trace proves that the values are by rows.
Code of the user's may draw random numbers, or read and change variables: it sees all rows at once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras

from lockstep.core.patched import patched
from lockstep.core.state import unique
from lockstep.engines.replicas.rows_of_losses import losses_by_rows, metrics_by_rows
from lockstep.keras_compat import (
    METRIC_FUNCTION,
    compiled_loss,
    compiled_metrics,
    get_keras_mask,
    is_code_of_keras,
    set_keras_mask,
    single_losses,
)
from lockstep.training.overrides import is_keras


@partial(
    jax.tree_util.register_dataclass, data_fields=["outputs", "values"], meta_fields=["owners"]
)
@dataclass(frozen=True)
class OutputsWithValues:
    """The outputs of a model, with the values of its metrics for each row.

    Attributes:
        outputs: The outputs.
        values: The values, in the order of the calls of metrics.
        owners: The number of the metric of each value.
    """

    outputs: Any
    values: list[Any]
    owners: tuple[int, ...]


class NoValues(Exception):
    """The code of a loss or metric fails for a part of the rows."""


class LossValues:
    """The values of the losses and metrics of one step.

    Args:
        model: The model.
        targets: The targets of the batch.
        is_differentiated: Whether the step takes a gradient: its metrics see outputs without masks.
    """

    def __init__(self, model: Any, targets: Any, *, is_differentiated: bool) -> None:
        self._model, self.targets = model, targets
        self._is_differentiated = is_differentiated
        self._losses = [each for each in losses_by_rows(model) if _is_of_keras(each, "fn")]
        self._metrics = _metrics_of_keras(model)
        self._owners: tuple[list[int], list[int]] = [], []
        self._values: tuple[list[Any], list[Any]] = [], []

    def are_possible(self) -> bool:
        """Return whether each loss may have its values from parts."""
        compiled = compiled_loss(self._model)
        plain = all(is_keras(self._model, name) for name in ("train_step", "test_step"))
        every = [] if compiled is None or not compiled.built else unique(single_losses(compiled))
        return plain and bool(every) and len(every) == len(self._losses)

    def call(self, plain: Callable[..., Any], *args: Any, targets: Any, **kwargs: Any) -> Any:
        """Call the model for some rows; the outputs have the values of losses and metrics too.

        Args:
            plain: The model's `stateless_call`.
            args: Its arguments.
            targets: The targets of the rows.
            kwargs: Its other arguments.

        Raises:
            NoValues: If the code of a loss or metric fails.
        """
        outputs, *others = plain(*args, **kwargs)
        owners: tuple[list[int], list[int]] = [], []
        values: tuple[list[Any], list[Any]] = [], []
        self._owners = owners

        def recorded(kind: int, number: int, function: Callable[..., Any]) -> Callable[..., Any]:
            def function_and_record(*args: Any, **kwargs: Any) -> Any:
                found = function(*args, **kwargs)
                owners[kind].append(number)
                values[kind].append(found)
                return found

            return function_and_record

        # What Keras makes of the values of a part is not used, nor is the state of its metrics.
        model = self._model
        metric_values = [jnp.zeros(each.shape, each.dtype) for each in model.metrics_variables]
        groups = (
            (model.trainable_variables, args[0]),
            (model.non_trainable_variables, others[0]),
            (model.metrics_variables, metric_values),
        )
        state = [pair for group in groups for pair in zip(*group, strict=True)]
        try:
            with keras.StatelessScope(state_mapping=state):
                with patched(self._changes_of_losses(partial(recorded, 0))):
                    compiled_loss(model)(targets, outputs)
                if self._metrics:
                    changes = _changes_of_metrics(model, self._metrics, partial(recorded, 1))
                    with self._without_masks(outputs), patched(changes):
                        compiled_metrics(model).update_state(targets, outputs)
        except Exception as error:  # the code of the user's
            raise NoValues from error
        return ((outputs, values), *others)

    def take(self, outputs: Any) -> Any:
        """Keep the values of all rows, and return the outputs alone."""
        outputs, self._values = outputs
        return outputs

    @contextmanager
    def given_to_losses(self) -> Iterator[None]:
        """Give losses the values of the parts inside the context, if there are any."""

        def change(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
            def value(*args: Any, **kwargs: Any) -> Any:
                (owners, _), (values, _) = self._owners, self._values
                if not values or number not in owners:  # not yet, or not in parts
                    return function(*args, **kwargs)
                place = owners.index(number)
                owners.pop(place)
                return values.pop(place)

            return value

        with patched(self._changes_of_losses(change)):
            yield

    def carried(self, outputs: Any) -> Any:
        """Return the outputs with the values of metrics, which leave the gradient with them."""
        _, values = self._values
        if not values:
            return outputs
        return OutputsWithValues(outputs, values, tuple(self._owners[1]))

    def _changes_of_losses(self, change: Callable[[int, Any], Any]) -> list[tuple[Any, str, Any]]:
        losses = enumerate(self._losses)
        return [(loss, "call", change(number, loss.call)) for number, loss in losses]

    @contextmanager
    def _without_masks(self, outputs: Any) -> Iterator[None]:
        """Take the masks from outputs inside the context, if the step takes a gradient.

        JAX returns other arrays from a gradient, without the masks of Keras.
        """
        leaves = [each for each in keras.tree.flatten(outputs) if isinstance(each, jax.Array)]
        masks = [get_keras_mask(each) for each in leaves]
        if self._is_differentiated:
            for leaf, mask in zip(leaves, masks, strict=True):
                if mask is not None:
                    set_keras_mask(leaf, None)
        yield
        for leaf, mask in zip(leaves, masks, strict=True):
            if mask is not None:
                set_keras_mask(leaf, mask)


@contextmanager
def given_to_metrics(model: Any, given: OutputsWithValues) -> Iterator[None]:
    """Give metrics the values of the parts inside the context."""
    pairs = list(zip(given.owners, given.values, strict=True))

    def change(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
        own = [value for owner, value in pairs if owner == number]
        return lambda *args, **kwargs: own.pop(0) if own else function(*args, **kwargs)

    changes = _changes_of_metrics(model, _metrics_of_keras(model), change)
    with patched([each for each in changes if each[1] == METRIC_FUNCTION]):
        yield


def _metrics_of_keras(model: Any) -> list[Any]:
    return [each for each in metrics_by_rows(model) if _is_of_keras(each, METRIC_FUNCTION)]


def _is_of_keras(owner: Any, name: str) -> bool:
    """Return whether a loss or metric, and the function under this name, are Keras's own code."""
    function = getattr(owner, name, None)
    own = is_code_of_keras(owner.__call__) and type(owner).__module__.startswith("keras.")
    return own and (function is None or is_code_of_keras(function))


def _changes_of_metrics(
    model: Any, metrics: list[Any], change: Callable[[int, Any], Any]
) -> list[tuple[Any, str, Any]]:
    """Return the changes of metrics by rows, and those that keep the others from running."""
    changes = []
    for metric in unique(compiled_metrics(model).metrics):
        number = next((n for n, each in enumerate(metrics) if each is metric), None)
        if number is None:
            changes.append((metric, "update_state", _nothing))
        else:
            function = getattr(metric, METRIC_FUNCTION)
            changes.append((metric, METRIC_FUNCTION, change(number, function)))
    return changes


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Update no metric that needs all rows."""
