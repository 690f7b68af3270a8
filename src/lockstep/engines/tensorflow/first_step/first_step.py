"""Runs the first step of a form on TensorFlow without an update; see `engines/replicas/first_step`.

One program is traced of Keras's own step on the first device, and one of the step of all devices.
"""

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import tensorflow as tf

from lockstep.core.state import optimizers_of
from lockstep.engines.replicas.first_step import (
    Recording,
    unchanged_objects,
    watched,
    without_updates,
)
from lockstep.engines.replicas.sketches import Sketches
from lockstep.engines.tensorflow.exchange.mirrored_variables import mirrored_variables, shared_seeds
from lockstep.engines.tensorflow.tensorflow_compat import eager_variable_scope
from lockstep.keras_compat import stored_value
from lockstep.training.probe_helpers import calls_watched


class RecordedSteps:
    """Runs steps of one model without an update, and returns what they have computed.

    Attributes:
        dtypes: The types of the outputs of the layers.
    """

    def __init__(self, model: Any, *, is_custom: bool) -> None:
        self.dtypes: set[str] = set()
        self._model = model
        self._is_custom = is_custom
        self._replicas: dict[int, Recording] = {}

    def watching(self) -> AbstractContextManager[None]:
        """Record the outputs of the layers that are called inside the context."""
        return calls_watched(watched(self._model), self._record)

    def run(
        self, step: Callable[[Any], Any], data: Any, signature: Any, size: int
    ) -> list[Sketches]:
        """Return what each replica has computed; one device is the first replica.

        Args:
            step: Runs a step, and returns its logs or predictions.
            data: A batch.
            signature: Its specification.
            size: The number of replicas.
        """
        model = self._model
        self._replicas = {}

        def traced(data: Any) -> Any:
            # A name that is refused at the top of a program is none inside a scope.
            scope = tf.name_scope("first_step")
            with scope, without_updates(model, self._here):
                logs = step(data)
            graph = tf.compat.v1.get_default_graph()
            self._replicas.setdefault(0, Recording(model)).logs(logs)
            return [
                {name: value for name, value in self._seen(replica).items() if value.graph is graph}
                for replica in range(size)
            ]

        with self._unchanged(), unchanged_objects(model), warnings.catch_warnings():
            # A gradient of a lookup is made dense.
            warnings.filterwarnings("ignore", "Converting sparse IndexedSlices")
            function = tf.function(traced, autograph=False)
            with eager_variable_scope():
                program = function.get_concrete_function(signature)
            with self._unchanged_outside(program.graph.variables):
                found = program(data)
            states = Recording(model)
            states.states(model)
            seen = [{name: value.numpy() for name, value in each.items()} for each in found]
        for recording in self._replicas.values():
            self.dtypes |= recording.dtypes
        return [seen[0] | states.sketches(), *seen[1:]]

    def _seen(self, replica: int) -> dict[str, Any]:
        recording = self._replicas.get(replica)
        return {} if recording is None else recording.seen

    def _here(self) -> Recording:
        # tensorflow/python/distribute/mirrored_run.py, _MirroredReplicaThread
        number = getattr(threading.current_thread(), "replica_id", 0)
        return self._replicas.setdefault(number, Recording(self._model))

    def _record(self, layer: Any, arguments: Any, outputs: Any) -> None:
        self._here().outputs(layer, keras.tree.map_structure(_dense, outputs))

    @contextmanager
    def _unchanged_outside(self, variables: Iterable[Any]) -> Iterator[None]:
        """Put back variables of TensorFlow that are not those of the model."""
        values = [stored_value(variable) for variable in mirrored_variables(self._model)]
        copies = [copy for value in values for copy in getattr(value, "values", [value])]
        own = {id(copy) for copy in copies}
        before = [(each, tf.identity(each)) for each in variables if id(each) not in own]
        try:
            yield
        finally:
            for variable, value in before:
                variable.assign(value)

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        model = self._model
        fixed: set[int] = set()
        if not self._is_custom:  # nothing is updated
            slots = [v for _, each in optimizers_of(model) for v in each.variables]
            fixed = {id(variable) for variable in [*model.trainable_variables, *slots]}
        variables = [*mirrored_variables(model), *shared_seeds()]
        before = [
            (variable, tf.identity(variable.value))
            for variable in variables
            if id(variable) not in fixed
        ]
        try:
            yield
        finally:
            for variable, value in before:
                variable.assign(value)


def rows_in(batch: Any) -> int | None:
    """Return the rows of a batch of dense tensors, `None` if its leaves have different ones."""
    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    if any(isinstance(leaf, tf.SparseTensor | tf.RaggedTensor) for leaf in leaves):
        return None
    rows = {int(leaf.shape[0]) for leaf in leaves if len(leaf.shape)}
    return rows.pop() if len(rows) == 1 else None


def signature_of(some: Any, spec: Any) -> Any:
    """Return the specification of some rows of a batch, with the open dims of that of the batch."""

    def of(leaf: Any, whole: Any) -> Any:
        if leaf is None:
            return None
        known = list(whole.shape)
        shape = [None if dim is None else size for dim, size in zip(known, leaf.shape, strict=True)]
        return tf.TensorSpec(shape, leaf.dtype)

    return keras.tree.map_structure(of, some, spec)


def again(batches: list[Any], spec: Any) -> Any:
    """Return an iterator over these batches whose programs are those of the iterator they are of.

    Args:
        batches: Batches that were drawn from an iterator of `tf.data`.
        spec: The specification of its elements.
    """

    def open_dims(*batch: Any) -> Any:
        def opened(leaf: Any, of: Any) -> Any:
            if not isinstance(leaf, tf.Tensor):
                return leaf
            return tf.compat.v1.placeholder_with_default(leaf, of.shape)

        (batch,) = batch if len(batch) == 1 and not isinstance(spec, tuple) else (batch,)
        return tf.nest.map_structure(opened, batch, spec)

    data = [tf.data.Dataset.from_tensors(batch).map(open_dims) for batch in batches]
    whole = data[0]
    for each in data[1:]:
        whole = whole.concatenate(each)
    return iter(whole)


def _dense(output: Any) -> Any:
    """Return a sparse output as a tensor, and `None` for rows of different lengths."""
    if isinstance(output, tf.SparseTensor):
        return tf.sparse.to_dense(tf.sparse.reorder(output))
    return None if isinstance(output, tf.RaggedTensor) else output
