"""Losses and metrics that each replica computes on its own rows; see `rows_of_losses`.

Keras's code of a step is given `Rows` (`rows.py`). A loss or metric of Keras that works row by row
takes the rows of this replica from them. Anything else gathers the rows of all replicas first. So
an output that nothing uses whole is never gathered.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import torch
from torch.utils.checkpoint import checkpoint

from lockstep.core import micro_batches as refused
from lockstep.core.left_out import LeftOutMetric
from lockstep.core.patched import patched
from lockstep.core.state import unique
from lockstep.engines.replicas.rows_of_losses import (
    is_of_keras,
    losses_by_rows,
    metrics_by_rows,
    why_whole,
    wrapped_function,
)
from lockstep.engines.rowwise import is_declared
from lockstep.engines.torch.exchange.placement import version_of
from lockstep.engines.torch.sharded.sharded_variables import STEP
from lockstep.engines.torch.steps.replica import Replica
from lockstep.engines.torch.steps.rows import Rows, enter, gathered, leave
from lockstep.engines.torch.steps.scratch import Scratch
from lockstep.keras_compat import (
    COMPILED_METRICS,
    GLOBAL_SEED_GENERATOR,
    METRIC_FUNCTION,
    compiled_loss,
    compiled_metrics,
    get_keras_mask,
    global_state,
    loss_of,
    loss_tracker,
    set_keras_mask,
    single_losses,
    stored_value,
)
from lockstep.training.overrides import is_keras


class Outputs:
    """The outputs of the model in one step.

    Args:
        replica: This replica.
        own: The outputs for the rows of this replica.
        name: What they are, for an error.
        most: The most rows for which a function is called at once; `None` for all rows.

    Attributes:
        replica: This replica.
        rows: The outputs of the global batch, as Keras's code is given them.
        sums_loss: Whether a loss may have the values of this replica alone: the mean over the
            replicas is the loss.
        has_share: Whether the loss has.
    """

    def __init__(self, replica: Replica, own: Any, name: str, most: int | None) -> None:
        self.replica = replica
        self._most = most
        self.sums_loss = self.has_share = False
        self.rows = keras.tree.map_structure(lambda each: leave(each, replica, name), own)

    def values(self, function: Callable[..., Any], y_true: Any, y_pred: Rows, name: str) -> Any:
        """Return what a function gives for the rows of the global batch.

        Every replica has to call this. If the loss is summed, the values of other replicas are
        zero, and those of this one are multiplied by the number of replicas.

        Args:
            function: A function of targets and outputs that works row by row.
            y_true: The targets of the global batch.
            y_pred: The outputs.
            name: The name of the function, for an error.
        """
        own = self.replica.take(y_true), enter(y_pred, self.replica)
        found = self._of_own(function, *own, name)
        what = f"The result of {name!r}"
        if self.sums_loss and self._may_sum(found):
            self.has_share = True
            return self.replica.share_of(found, what)
        return keras.tree.map_structure(lambda part: leave(part, self.replica, what).whole(), found)

    def _of_own(self, function: Callable[..., Any], y_true: Any, y_pred: Any, name: str) -> Any:
        """Return what a function gives for own rows: in parts, which are computed again."""
        most = self._most
        if most is None or len(y_pred) <= most:
            return function(y_true, y_pred)
        pieces = zip(_split(y_true, most), _split(y_pred, most), strict=True)
        seeds = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
        reached = [*self.replica.reached, *([] if seeds is None else [stored_value(seeds.state)])]
        versions = list(map(version_of, reached))
        if torch.is_grad_enabled():
            made = [checkpoint(function, *piece, use_reentrant=False) for piece in pieces]
        else:
            made = [function(*piece) for piece in pieces]
        if versions != list(map(version_of, reached)):  # the seeds of keras.random are among these
            raise refused.loss_keeps_state(name)
        return keras.tree.map_structure(lambda *leaves: _joined(leaves), *made)

    def _may_sum(self, values: Any) -> bool:
        """Return whether values may be multiplied, and summed in another order.

        Those that were cast to a shorter type would differ by more than the rounding of outputs.
        """
        is_wide = isinstance(values, torch.Tensor) and values.dtype in (
            torch.float32,
            torch.float64,
        )
        return (
            is_wide
            and all(
                each.dtype.itemsize <= values.dtype.itemsize
                for each in keras.tree.flatten(self.rows)
            )
            and get_keras_mask(values) is None  # a mask would be gathered
        )


class LossSharding:
    """Shards the losses and metrics of one model over the replicas where this is exact.

    Functions of Keras that work row by row take the rows of each replica, and losses that are
    declared to do so. Other code of the user's may keep what it is given, write into it, or have a
    state: it is given the outputs of the global batch.

    Attributes:
        by_rows: Whether a loss or metric that works row by row takes its own rows.
        choices: For each name of a loss or metric: `None` if each replica takes its own rows,
            else why it takes the outputs of the global batch.
        large: Those choices that gather many bytes.
        without_metrics: Whether the other replicas do not have the metrics of `compile`, which
            cannot be pickled.
    """

    def __init__(self, model: Any, *, by_rows: bool = True) -> None:
        self.by_rows = by_rows
        self.choices: dict[str, str | None] = {}
        self.large: dict[str, str] = {}
        self.without_metrics = False
        self._model = model
        self._reasons: dict[Any, tuple[Any, str | None]] = {}

    def loss(self, outputs: Outputs, data: Any, *, training: bool) -> Any:
        """Return the loss of the global batch. Every replica has to call this."""
        x, y, sample_weight = data
        losses = losses_by_rows(self._model)
        y_pred = outputs.rows
        if not self._are_all_losses(losses):
            y_pred = gathered(y_pred)
        elif training and len(losses) == 1 and losses[0].reduction in _LINEAR:
            # A loss of one output among several has a metric, which needs its value.
            outputs.sums_loss = not compiled_loss(self._model).metrics
        with patched(
            [(each, "call", self._taking_rows(outputs, each, each.call)) for each in losses]
        ):
            try:
                return loss_of(self._model, x, y, y_pred, sample_weight, training=training)
            finally:
                outputs.sums_loss = False

    def metrics(self, outputs: Outputs, data: Any, loss: Any) -> Any:
        """Return the logs of the global batch, given its loss. Every replica has to call this."""
        x, y, sample_weight = data
        model, compiled = self._model, compiled_metrics(self._model)
        loss_tracker(model).update_state(loss, sample_weight=outputs.replica.rows)
        y_pred = outputs.rows
        changes: list[tuple[Any, str, Any]] = []
        left_out = isinstance(compiled, LeftOutMetric)
        by_keras = is_keras(model, "compute_metrics")
        if left_out:
            changes.append((model, COMPILED_METRICS, None))
        elif compiled is not None:
            by_keras &= compiled.built
        if left_out or self.without_metrics or not by_keras:
            y_pred = gathered(y_pred)
        elif compiled is not None:
            by_rows, take = metrics_by_rows(model), partial(self._taking_rows, outputs)
            known = set(map(id, by_rows))
            changes += [
                (each, METRIC_FUNCTION, take(each, getattr(each, METRIC_FUNCTION)))
                for each in by_rows
            ]
            changes += [
                (each, "update_state", self._gathering(each))
                for each in unique([each for each in compiled.metrics if id(each) not in known])
            ]
        try:
            replica = outputs.replica
            with replica.shards.read_by(STEP), replica.drawing_in_metrics(), patched(changes):
                return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        finally:
            outputs.replica.is_over = True

    def _are_all_losses(self, losses: list[Any]) -> bool:
        """Return whether Keras's code alone and these losses see the outputs."""
        compiled = compiled_loss(self._model)
        if not self.by_rows or not is_keras(self._model, "compute_loss"):
            return False
        return compiled is None or (
            compiled.built and len(losses) == len(unique(single_losses(compiled)))
        )

    def _gathering(self, metric: Any) -> Callable[..., Any]:
        update = metric.update_state

        def update_state(*args: Any, **kwargs: Any) -> Any:
            self._note(metric, "it needs all rows", args)
            args, kwargs = gathered((args, kwargs))
            return update(*args, **kwargs)

        return update_state

    def _taking_rows(
        self, outputs: Outputs, owner: Any, function: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return a function of own rows in place of one of the global batch, where this is exact.

        Args:
            outputs: The outputs of the step.
            owner: A loss or metric.
            function: Its function.
        """

        def values(*given: Any, **options: Any) -> Any:
            reason = self._why_gathered(owner, function, options, given)
            if reason is not None:
                self._note(owner, reason, given)
                return function(*gathered(given), **options)
            self.choices[owner.name] = self.choices.get(owner.name)
            y_true, y_pred = given
            return outputs.values(
                lambda *own: function(*own, **options), y_true, y_pred, owner.name
            )

        return values

    def _why_gathered(self, owner: Any, function: Any, options: Any, given: Any) -> str | None:
        if len(given) != 2 or not isinstance(given[1], Rows):
            return "its arguments are not the outputs and targets of the model"
        y_true, y_pred = given
        replica = y_pred.values.replica
        if not (isinstance(y_true, torch.Tensor) and y_true.ndim):
            return "its targets have no rows"
        if len(y_true) != replica.rows:
            return "its targets have a different number of rows"
        if len(y_true) == 1:
            return "the batch has one row"
        if not self.by_rows:
            return "it gave a different value in the check of the first step"
        source = wrapped_function(owner, function)
        is_loss = isinstance(owner, keras.losses.Loss)
        declared = is_loss and (is_declared(owner) or is_declared(source))
        if not (declared or is_of_keras(source)):
            return "it is custom code"
        if y_pred.is_written:
            return "code has written into the outputs"
        key = id(owner), id(source), str(_form(y_true, y_pred))
        if key not in self._reasons:  # the owner is kept, so that no other one gets its identity
            reason = why_whole(owner, function, options, y_true, y_pred, Scratch)
            self._reasons[key] = (owner, source), _agreed(reason, replica)
        return self._reasons[key][1]

    def _note(self, owner: Any, reason: str, given: Any) -> None:
        wholes = [each for each in given if isinstance(each, Rows) and len(each) > 1]
        if wholes:
            self.choices[owner.name] = reason
        if sum(math.prod(each.shape) * each.dtype.itemsize for each in wholes) >= _LARGE:
            self.large[owner.name] = reason


def _split(tensor: Any, rows: int) -> Any:
    pieces, mask = tensor.split(rows), get_keras_mask(tensor)
    if mask is not None:
        for piece, own in zip(pieces, mask.split(rows), strict=True):
            set_keras_mask(piece, own)
    return pieces


def _joined(leaves: Sequence[Any]) -> Any:
    joined = torch.cat(leaves)
    masks = [get_keras_mask(leaf) for leaf in leaves]
    if masks[0] is not None:
        set_keras_mask(joined, _joined(masks))
    return joined


def _form(*tensors: Any) -> Any:
    """Return what Keras's functions ask of shapes: ranks, dims of 1, equal dims; no rows."""
    names: dict[int, int] = {0: 0, 1: 1}
    return [
        (each.dtype, [names.setdefault(dim, len(names)) for dim in each.shape[1:]])
        for each in tensors
    ]


def _agreed(reason: str | None, replica: Replica) -> str | None:
    """Return why any replica takes the outputs of the global batch, `None` if none does."""
    votes = torch.tensor([float(reason is not None)], device=replica.device)
    if replica.sum(votes).item() and reason is None:
        return "another process does not know that it works row by row"
    return reason


_LINEAR = ("sum", "sum_over_batch_size", "mean", "mean_with_sample_weight")
"""The reductions of Keras that are linear in the values, given targets and weights of all rows."""

_LARGE = 2**26
"""Bytes of the outputs of a global batch from which on the user is told why they are gathered."""
