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
from lockstep.engines.tensorflow.alike import tensors_in
from lockstep.engines.tensorflow.beside import remade, signature
from lockstep.engines.tensorflow.proof.program import program_of
from lockstep.engines.tensorflow.proof.proof import untouched_random_numbers
from lockstep.engines.tensorflow.proof.states import Rows, Same, State, Unknown
from lockstep.engines.tensorflow.proof.walk import Walk
from lockstep.engines.tensorflow.replicas import Replica, Team


class Values:
    """Where the losses and metrics of one step get their values from.

    Attributes:
        choices: By the name of each: `None` where each replica takes its own rows; else why
            it is given the outputs of the whole batch, in words.
    """

    def __init__(self, model: Any, team: Team, x: Any, y: Any) -> None:
        """`x` and `y` are the inputs and targets of the step, for the whole batch."""
        self.choices: dict[str, str | None] = {}
        self._model = model
        self._team = team
        self._targets = {id(leaf): leaf for leaf in keras.tree.flatten(y)}
        self._rows = _known_rows(x)
        self._own: dict[int, tuple[Any, Any]] = {}
        self._reasons: dict[tuple[Any, ...], str | None] = {}

    def gather(self, replica: Replica, output: Any, told: str) -> Any:
        """An output of the model for the global batch, with what Keras keeps beside it."""

        def gathered(part: Any) -> Any:
            whole = replica.gather_alike(part, told)
            if whole.shape.rank:  # a function sees on one device how many rows there are
                whole.set_shape([self._rows, *whole.shape[1:]])
            return whole

        whole = remade(output, gathered)
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
        def values(*given: Any, **options: Any) -> Any:
            replica = self._team.current_in_global_part()
            if replica is None or len(given) != 2:
                return function(*given, **options)
            y_true, y_pred = given
            with replica.apart() as part:
                own = self._own_part_of(y_pred)
                reason = self._why_gathered(owner, function, options, y_true, own)
                self.choices[owner.name] = self.choices.get(owner.name) or reason
                if reason is None:
                    found = self._of_all_rows(replica, owner, function, options, y_true, own)
            if reason is None:
                part.given += tensors_in(found)
                return found
            return function(y_true, y_pred, **options)

        return values

    def _why_gathered(
        self, owner: Any, function: Any, options: dict[str, Any], y_true: Any, own: Any
    ) -> str | None:
        """Why a loss or metric is given gathered outputs, in words; `None`: rows of its own."""
        if own is None or id(_before_casts(y_true)) not in self._targets:
            return "what it is given are no outputs and targets of the model"
        if not isinstance(y_true, tf.Tensor) or not (y_true.shape.rank and own.shape.rank):
            return "its targets or the outputs have no rows"
        if y_true.shape[0] == 1:
            return "one row is compared with all"
        source = _function_of(owner, function)
        if own.shape.rank > 1 and source in BY_ROWS and _is_along_classes(owner):
            return None
        key = (id(owner), y_true.shape[0], signature(y_true), signature(own))
        if key not in self._reasons:
            asks = not _is_of_keras(source)
            given = partial(function, **options)
            self._reasons[key] = unproven(given, y_true, own, asks_for_rows=asks)
        return self._reasons[key]

    def _of_all_rows(
        self,
        replica: Replica,
        owner: Any,
        function: Any,
        options: dict[str, Any],
        y_true: Any,
        own: Any,
    ) -> Any:
        name, rows = owner.name, replica.shards.rows
        told = f"the targets of {name!r}"
        check = tf.debugging.assert_equal(
            tf.shape(y_true)[:1],
            tf.reshape(rows, (1,)),
            f"lockstep: {told} have another number of rows than the inputs. "
            "lockstep.release(model) trains it on one device.",
        )
        # Keras's own functions do not ask how many rows there are, and one of the user's may.
        known = None if _is_of_keras(_function_of(owner, function)) else y_true.shape[0]
        size = replica.shards.size_of(known, replica.index)

        def with_size(part: Any) -> Any:
            part = tf.identity(part)
            part.set_shape([size, *part.shape[1:]])
            return part

        with tf.control_dependencies([check]):
            y_true = replica.own(y_true)
        if size is not None:
            y_true, own = with_size(y_true), remade(own, with_size)
        with replica.alike(f"{name!r}"):
            found = function(y_true, own, **options)
        return remade(found, lambda part: replica.gather_alike(part, f"what {name!r} gives"))

    def _own_part_of(self, given: Any) -> Any:
        """What this replica gave to a gathered output, or to what was cast from it; or `None`."""
        whole = _before_casts(given)
        if id(whole) not in self._own:
            return None
        own = self._own[id(whole)][1]
        for dtype in _casts(given):
            own = tf.cast(own, dtype)
        return own


def _known_rows(x: Any) -> int | None:
    """The rows of a batch, where they are known while tracing."""
    shapes = [leaf.shape for leaf in keras.tree.flatten(x) if isinstance(leaf, tf.Tensor)]
    known = [shape[0] for shape in shapes if shape.rank]
    return known[0] if known else None


def _before_casts(tensor: Any) -> Any:
    while isinstance(tensor, tf.Tensor) and tensor.op.type == "Cast":
        tensor = tensor.op.inputs[0]
    return tensor


def _casts(tensor: Any) -> list[Any]:
    """The types that a tensor was cast to, in order."""
    found = []
    while tensor.op.type == "Cast":
        found.append(tensor.dtype)
        tensor = tensor.op.inputs[0]
    return found[::-1]


def unproven(
    function: Callable[[Any, Any], Any], y_true: Any, y_pred: Any, *, asks_for_rows: bool = True
) -> str | None:
    """Why it is not proven that a function gives each row a value of its own; `None` if it is.

    Args:
        function: Gives values for targets and outputs.
        y_true: Targets, of which shape and dtype count.
        y_pred: Outputs, likewise, and what Keras keeps beside them.
        asks_for_rows: Whether it may do something else for another number of rows, where
            that is known while tracing.
    """
    rows = y_true.shape[0] if asks_for_rows else None
    try:
        with untouched_random_numbers(), tf.init_scope():
            (reason, program), (_, again) = (_traced(function, y_true, y_pred) for _ in range(2))
            if rows is not None:
                numbers = (rows, rows + 1)
                (_, one), (_, more) = (_traced(function, y_true, y_pred, n) for n in numbers)
                reason = reason if one == more else "it looks at the number of rows"
    except Exception as error:  # whatever it is, it is not a proof
        return f"{type(error).__name__} while it was traced"
    return reason if program == again else "another program at each trace"


def _traced(
    function: Any, y_true: Any, y_pred: Any, known: int | None = None
) -> tuple[str | None, list[Any]]:
    """Why it is not proven, and the program, where that many rows are known to the tracer."""
    graph = FuncGraph("lockstep_values")
    rows: list[Any] = []

    def placeholder(value: Any) -> Any:
        rows.append(tf.compat.v1.placeholder(value.dtype, (known, *value.shape[1:])))
        return rows[-1]

    with graph.as_default():
        values = function(remade(y_true, placeholder), remade(y_pred, placeholder))
    outside = {id(inner): outer for outer, inner in graph.captures}

    def kept(tensor: Any) -> State:
        outer = outside.get(id(tensor))
        constant = hasattr(outer, "numpy") and tensor.dtype != tf.resource
        return Same() if constant else Unknown("what is kept outside of it")

    walk = Walk(kept, {})
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


def _function_of(owner: Any, function: Any) -> Any:
    """The function that a loss wraps, where nothing else comes between; else `function`."""
    # keras/src/losses/losses.py, LossFunctionWrapper.call
    wraps = keras.src.losses.losses.LossFunctionWrapper.call
    return owner.fn if getattr(function, "__func__", None) is wraps else function


def _is_of_keras(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("keras.src.")


def _is_along_classes(owner: Any) -> bool:
    axis = getattr(owner, "_fn_kwargs", {}).get("axis", -1)
    return isinstance(axis, int) and (axis == -1 or axis > 0)


BY_ROWS = (
    keras.losses.categorical_crossentropy,
    keras.losses.sparse_categorical_crossentropy,
    keras.metrics.sparse_top_k_categorical_accuracy,
    keras.metrics.top_k_categorical_accuracy,
)
"""Functions of Keras's that give each row a value of its own, which a proof does not always reach.

Where the length of sequences is not known, nothing tells rows of the batch from steps once
Keras has merged them.
"""


def _losses_of(model: Any) -> list[Any]:
    # keras/src/trainers/compile_utils.py, CompileLoss, and keras/src/losses/loss.py, Loss.__call__
    compiled = model._compile_loss
    if compiled is None or not compiled.built or not _is_keras_own(model, "compute_loss"):
        return []
    losses = [entry.loss for entry in compiled._flat_losses]
    return [each for each in losses if type(each).__call__ is keras.losses.Loss.__call__]


def _metrics_of(model: Any) -> list[Any]:
    # keras/src/metrics/reduction_metrics.py, MeanMetricWrapper.update_state
    compiled = model._compile_metrics
    if compiled is None or not compiled.built or not _is_keras_own(model, "compute_metrics"):
        return []
    plain = keras.metrics.MeanMetricWrapper.update_state
    return [each for each in compiled.metrics if getattr(type(each), "update_state", None) is plain]


def _is_keras_own(model: Any, name: str) -> bool:
    # keras/src/trainers/trainer.py: one of the user's own may do anything with what it is given.
    plain = getattr(keras.src.trainers.trainer.Trainer, name)
    return getattr(getattr(model, name), "__func__", None) is plain
