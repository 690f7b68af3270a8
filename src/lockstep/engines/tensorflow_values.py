"""Losses and metrics whose values each replica computes of its own rows.

A loss of Keras's is a function that gives every row a value, and what becomes of the values:
masks, weights, a reduction. Where the function works row by row, each replica calls it with
its own rows, and the values are gathered, which are few numbers; what becomes of them is
Keras's own code, which sees those of the global batch. Otherwise the function is called with
the gathered outputs. TensorFlow leaves out of a step what nobody uses: outputs that every
function takes by rows are not gathered.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from lockstep.engines.replaced import replaced
from lockstep.engines.tensorflow_alike import tensors_in
from lockstep.engines.tensorflow_beside import remade
from lockstep.engines.tensorflow_proof import program_of, untouched_random_numbers
from lockstep.engines.tensorflow_replicas import Replica, Team
from lockstep.engines.tensorflow_states import Rows, Same, State, Unknown
from lockstep.engines.tensorflow_walk import Walk


class Values:
    """Where the losses and metrics of one step get their values from.

    Attributes:
        choices: By the name of each: `None` where each replica takes its own rows; else why
            it is given the outputs of the whole batch, in words.
    """

    def __init__(self, model: Any, team: Team) -> None:
        self.choices: dict[str, str | None] = {}
        self._model = model
        self._team = team
        self._own: dict[int, tuple[Any, Any]] = {}
        self._reasons: dict[tuple[Any, ...], str | None] = {}

    def gather(self, replica: Replica, output: Any, told: str) -> Any:
        """An output of the model for the global batch, with what Keras keeps beside it."""
        whole = remade(output, lambda part: replica.gather_alike(part, told))
        self._own[id(whole)] = (whole, output)
        return whole

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """While it lasts, losses and metrics take rows where they can."""
        losses = [(loss, "call") for loss in _losses_of(self._model)]
        metrics = [(metric, "_fn") for metric in _metrics_of(self._model)]
        changes = {
            (id(owner), name): (owner, name, self._taking_rows(owner, getattr(owner, name)))
            for owner, name in [*losses, *metrics]
        }
        with replaced(changes.values()):
            yield

    def _taking_rows(self, owner: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        def values(y_true: Any, y_pred: Any, **options: Any) -> Any:
            replica = self._team.current_in_global_part()
            if replica is None:
                return function(y_true, y_pred, **options)
            with replica.apart() as part:
                own = self._own_part_of(y_pred)
                reason = self._why_gathered(owner, function, options, y_true, own)
                self.choices[owner.name] = self.choices.get(owner.name) or reason
                if reason is None:
                    found = self._of_all_rows(
                        replica, owner.name, partial(function, **options), y_true, own
                    )
            if reason is None:
                part.given += tensors_in(found)
                return found
            return function(y_true, y_pred, **options)

        return values

    def _why_gathered(
        self, owner: Any, function: Any, options: dict[str, Any], y_true: Any, own: Any
    ) -> str | None:
        """Why a loss or metric is given gathered outputs, in words; `None`: rows of its own."""
        if own is None:
            return "what it is given is no output of the model"
        if not isinstance(y_true, tf.Tensor) or y_true.shape.rank in (None, 0):
            return "its targets have no rows"
        if y_true.shape[0] == 1 or own.shape.rank in (None, 0):
            return "one row is compared with all"
        if _is_known(owner, function):
            return None
        key = (id(owner), *((t.dtype, tuple(t.shape)[1:]) for t in (y_true, own)))
        if key not in self._reasons:
            self._reasons[key] = unproven(partial(function, **options), y_true, own)
        return self._reasons[key]

    def _of_all_rows(
        self, replica: Replica, name: str, function: Any, y_true: Any, own: Any
    ) -> Any:
        rows = replica.shards.rows
        told = f"the targets of {name!r}"
        check = tf.debugging.assert_equal(
            tf.shape(y_true)[:1],
            tf.reshape(rows, (1,)),
            f"lockstep: {told} have another number of rows than the inputs.",
        )
        with tf.control_dependencies([check]):
            y_true = replica.own(y_true)
        with replica.alike(f"{name!r}"):
            found = function(y_true, own)
        return remade(found, lambda part: replica.gather_alike(part, f"what {name!r} gives"))

    def _own_part_of(self, given: Any) -> Any:
        """What this replica gave to a gathered output, or to what was cast from it; or `None`."""
        dtypes = []
        while id(given) not in self._own:
            if not isinstance(given, tf.Tensor) or given.op.type != "Cast":
                return None
            dtypes.append(given.dtype)
            given = given.op.inputs[0]
        own = self._own[id(given)][1]
        for dtype in reversed(dtypes):
            own = tf.cast(own, dtype)
        return own


def unproven(function: Callable[[Any, Any], Any], y_true: Any, y_pred: Any) -> str | None:
    """Why it is not proven that a function gives each row a value of its own; `None` if it is.

    Args:
        function: Gives values for targets and outputs.
        y_true: Targets, of which shape and dtype count.
        y_pred: Outputs, likewise, and what Keras keeps beside them.
    """
    try:
        with untouched_random_numbers(), tf.init_scope():
            (reason, program), (_, again) = (_traced(function, y_true, y_pred) for _ in range(2))
    except Exception as error:  # whatever it is, it is not a proof
        return f"{type(error).__name__} while it was traced"
    return reason if program == again else "another program at each trace"


def _traced(function: Any, y_true: Any, y_pred: Any) -> tuple[str | None, list[Any]]:
    graph = FuncGraph("lockstep_values")
    rows: list[Any] = []

    def placeholder(value: Any) -> Any:
        rows.append(tf.compat.v1.placeholder(value.dtype, (None, *value.shape[1:])))
        return rows[-1]

    with graph.as_default():
        values = function(remade(y_true, placeholder), remade(y_pred, placeholder))
    outside = {id(inner): outer for outer, inner in graph.captures}

    def known(tensor: Any) -> State:
        outer = outside.get(id(tensor))
        constant = hasattr(outer, "numpy") and tensor.dtype != tf.resource
        return Same() if constant else Unknown("what is kept outside of it")

    walk = Walk(known, {})
    for tensor in rows:
        walk.set(tensor, Rows())
    walk.through(graph.get_operations())
    return _why_not(walk, values), program_of(graph.get_operations())


def _why_not(walk: Walk, values: Any) -> str | None:
    if not isinstance(values, tf.Tensor) or values.shape.rank in (None, 0):
        state = walk.of(values) if isinstance(values, tf.Tensor) else None
        return state.why if isinstance(state, Unknown) else "no value for each row"
    for tensor in tensors_in(values):
        state = walk.of(tensor)
        if state != Rows():
            return state.why if isinstance(state, Unknown) else "no value for each row"
    return walk.failure


def _is_known(owner: Any, function: Any) -> bool:
    """Whether a loss or metric is a function of Keras's, which a proof does not always reach.

    Where the length of sequences is not known, nothing tells rows of the batch from steps once
    Keras has merged them.
    """
    # keras/src/losses/losses.py, LossFunctionWrapper, and keras/src/metrics/reduction_metrics.py
    if getattr(type(owner), "call", None) is keras.src.losses.losses.LossFunctionWrapper.call:
        function = owner.fn
    axis = getattr(owner, "_fn_kwargs", {}).get("axis", -1)
    return function in BY_ROWS and isinstance(axis, int) and (axis == -1 or axis > 0)


BY_ROWS = (
    keras.losses.categorical_crossentropy,
    keras.losses.sparse_categorical_crossentropy,
    keras.metrics.sparse_top_k_categorical_accuracy,
    keras.metrics.top_k_categorical_accuracy,
)
"""Functions of Keras's that give each row a value of its own."""


def _losses_of(model: Any) -> list[Any]:
    # keras/src/trainers/compile_utils.py, CompileLoss, and keras/src/losses/loss.py, Loss.__call__
    compiled = model._compile_loss
    if compiled is None or not compiled.built:
        return []
    losses = [entry.loss for entry in compiled._flat_losses]
    return [each for each in losses if type(each).__call__ is keras.losses.Loss.__call__]


def _metrics_of(model: Any) -> list[Any]:
    # keras/src/metrics/reduction_metrics.py, MeanMetricWrapper.update_state
    compiled = model._compile_metrics
    if compiled is None or not compiled.built:
        return []
    plain = keras.metrics.MeanMetricWrapper.update_state
    return [each for each in compiled.metrics if getattr(type(each), "update_state", None) is plain]
