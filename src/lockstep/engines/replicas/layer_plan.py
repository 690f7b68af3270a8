"""Sorts the layers of a model by how a split step runs them."""

from collections.abc import Collection, Iterable
from typing import Any, Self

import keras

from lockstep.engines.rowwise import (
    UPDATES_METRIC,
    drawing_layers,
    is_batch_norm,
    is_container,
    is_declared,
    stateful_rnns,
    works_by_rows,
)
from lockstep.keras_compat import layers_in, operations_of


class LayerPlan:
    """The layers of a model that run by rows, and those that run on the global batch.

    Args:
        model: The model; `None` for a plan without layers, which the caller fills.
        proven: The numbers of those `candidates` that work row by row.
        draws_together: Whether layers that draw random numbers run on the global batch, so that
            the numbers are those of one device.
        distrusted: The numbers of those `parts` that gave other numbers in a first step. They run
            on the global batch.

    Attributes:
        parts: Layers and operations, but for containers, in the order of the model.
        candidates: Layers and operations that are not Keras's own known ones, or the model
            itself, in the order of the model. The order is the same in every process.
        whole: Layers and operations that run on the global batch.
        norms: Batch norms. They use the moments of the global batch.
        stateful: Stateful RNNs. Each replica runs its own rows of their state.
        every: Every layer that is not inside one of `whole`.
    """

    def __init__(
        self,
        model: Any,
        proven: Collection[int] = (),
        *,
        draws_together: bool = False,
        distrusted: Collection[int] = (),
    ) -> None:
        self.draws_together = draws_together
        self.parts: list[Any] = []
        self.candidates: list[Any] = []
        self.whole: list[Any] = []
        self.norms: list[Any] = []
        self.stateful: list[Any] = []
        self.every: list[Any] = []
        self._proven = proven
        self._distrusted = distrusted
        self._seen: set[int] = set()
        if model is not None:
            self._sort(model)

    @classmethod
    def of_all(cls, layers: list[Any]) -> Self:
        """Return a plan in which every layer may run by rows."""
        plan = cls(None)
        plan.every = list(layers)
        plan.norms = [layer for layer in layers if is_batch_norm(layer)]
        return plan

    def _sort(self, part: Any) -> None:
        if id(part) in self._seen:
            return
        self._seen.add(id(part))
        rnns = stateful_rnns(part)
        if is_container(part):
            self.every.append(part)
            for inner in operations_of(part):
                self._sort(inner)
            return
        self.parts.append(part)
        if len(self.parts) - 1 in self._distrusted:
            self.whole.append(part)
            if not (is_batch_norm(part) or works_by_rows(part) or rnns):
                self.candidates.append(part)  # the others keep their numbers
        elif is_batch_norm(part):
            self.norms.append(part)
            self.every.append(part)
        elif works_by_rows(part):
            self._split(part)
        elif rnns and self.draws_together and drawing_layers(part):
            self.whole.append(part)
        elif rnns:
            self.stateful += rnns
            self.every += layers_in(part)
        else:
            self.candidates.append(part)
            if len(self.candidates) - 1 in self._proven:
                self._split(part)
            else:
                self.whole.append(part)

    def _split(self, part: Any) -> None:
        drawing = drawing_layers(part) if self.draws_together else []
        apart = {id(layer) for whole in drawing for layer in layers_in(whole)}
        inside = [layer for layer in layers_in(part) if id(layer) not in apart]
        self.norms += [layer for layer in inside if is_batch_norm(layer)]
        self.every += inside
        self.whole += drawing


def advice_for(reasons: Iterable[str]) -> str:
    """Return what lets layers be split that run on the whole batch; `""` if nothing does.

    Args:
        reasons: Why they run so.

    Example:
        >>> advice_for(["an output without rows"])
        ''
    """
    found = [
        _MOVE_METRIC if reason.startswith(UPDATES_METRIC) else _DECLARE
        for reason in reasons
        if not reason.startswith(_NOT_DECLARABLE)
    ]
    return "".join(dict.fromkeys(found))


def declared_cause(name: str, model: Any) -> str:
    """Return that a declared layer updates a log or variable for all rows; `""` if none does.

    Args:
        name: The name of the log, or the path of the variable.
        model: The model.
    """
    for layer in layers_in(model):
        if not is_declared(layer):
            continue
        updated = [each for inner in layers_in(layer) for each in [*inner.metrics, inner]]
        names = {each.name for each in updated if isinstance(each, keras.metrics.Metric)}
        if name in names | {v.path for each in updated for v in each.variables}:
            return f" (remove lockstep.rowwise from {layer.name!r}, whose call updates it)"
    return ""


_DECLARE = (
    "If each output row depends only on its own input row, declare the layer with "
    "lockstep.rowwise. "
)
_MOVE_METRIC = (
    "To have the layer split, let only compile or compute_metrics update the metric, not a call. "
)
_NOT_DECLARABLE = (
    "a call changes its attributes",
    "an output",
    "batch norm in a loop",
    "in the first step",
    "it cannot be pickled",
    "it holds an object",
    "random numbers for all rows",
    "rows merged with",
)
"""Begin the reasons with which a declared layer would be wrong, or would not be split either."""
