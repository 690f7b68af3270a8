"""For `verify`: records the layer outputs and the gradients of one training step on TensorFlow."""

import itertools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from lockstep.attach.attachment import attachment_of
from lockstep.engines.tensorflow.exchange.mirrored_variables import mirrored_variables
from lockstep.engines.tensorflow.exchange.replica_consistency import ReplicasDiffer
from lockstep.engines.tensorflow.steps.split_checks import why_custom
from lockstep.engines.tensorflow.steps.steps import Steps
from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import loss_of, takes_training
from lockstep.training.build import build, is_ready
from lockstep.training.probe_helpers import (
    SHORT_FLOATS,
    calls_watched,
    not_built,
    part_of,
    shortest_cast,
    tensors,
    trained_once,
    watched_layers,
)


class TensorFlowProbe:
    """Probes one model, attached or not; see `Probe` for the contract."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @contextmanager
    def precise(self) -> Iterator[None]:
        """Use full-precision matrix products and no XLA, as several devices run without XLA."""
        model, config = self._model, tf.config.experimental
        before = config.tensor_float_32_execution_enabled(), model.jit_compile
        config.enable_tensor_float_32_execution(False)
        model.jit_compile = False
        try:
            yield
        finally:
            config.enable_tensor_float_32_execution(before[0])
            model.jit_compile = before[1]

    def build(self, batch: Any) -> str | None:
        """Build the model as `fit` does in its first step; return its casts from float64."""
        model = self._model
        if why_custom(model, "train_step") is None or model.run_eagerly:
            try:
                build(model, "train", batch)
            except UnsupportedModel as error:
                raise not_built(model, error) from error
        elif not is_ready(model, "train"):
            step = tf.function(model.train_step, autograph=False)
            step.get_concrete_function(tensors(batch))

        def casts() -> set[str]:
            step = tf.function(model.train_step, autograph=False)
            graph = step.get_concrete_function(tensors(batch)).graph.as_graph_def()
            functions = [function.node_def for function in graph.library.function]
            found = {
                tf.as_dtype(node.attr["DstT"].type).name
                for node in itertools.chain(graph.node, *functions)
                if node.op == "Cast" and node.attr["SrcT"].type == tf.float64.as_datatype_enum
            }
            return found.intersection(SHORT_FLOATS)

        return shortest_cast(model, casts)

    def as_compiled(self) -> AbstractContextManager[object]:
        """Change nothing: several devices do not read `jit_compile`."""
        return nullcontext()

    def train(self, batch: Any, *, restart: bool = False) -> dict[str, Any]:
        """Train one step on a batch in the structure of `fit`, and return the logs."""
        if restart:
            self._model.make_train_function(force=True)
        return trained_once(self._model, batch)

    def remark(self) -> None:
        """Return `None`: every step runs as a graph."""

    def inspect(
        self, batches: Iterable[Any], *, layers: bool = True
    ) -> Generator[tuple[dict[str, Any], dict[str, Any]], None, None]:
        """Yield the output of each layer, in order, and the gradient of each variable.

        Layers inside nested models are included. A model with its own `train_step` has no
        gradients here.
        """
        step = self._inspecting(layers)
        for batch in batches:
            variables = mirrored_variables(self._model)
            before = [keras.ops.convert_to_numpy(variable) for variable in variables]
            data = tensors(batch)
            try:
                try:
                    seen = step(data)
                except ReplicasDiffer as found:
                    steps = self._steps()
                    assert steps is not None
                    steps.run_alone_as_replicas_differ("train", str(found))
                    step = self._inspecting(layers)
                    seen = step(data)
            finally:
                for variable, value in zip(variables, before, strict=True):
                    variable.assign(value)
            yield part_of(seen, "activation"), part_of(seen, "gradient")

    def _inspecting(self, layers: bool) -> Any:
        return tf.function(partial(self._inspected_step, layers), autograph=False)

    def _steps(self) -> Steps | None:
        """Return the steps of the model, `None` if it is not attached."""
        attachment = attachment_of(self._model)
        session: Any = None if attachment is None else attachment.session
        return None if session is None else session.steps

    def _inspected_step(self, layers: bool, data: Any) -> dict[str, Any]:
        steps = self._steps()
        if steps is None:
            seen, gradients = self._alone(data)
        else:
            watch = partial(_recorded, self._model)
            seen, gradients = steps.inspect(data, watch, self._alone)
        found = {f"activation/{name}": value for name, value in seen.items() if layers}
        for variable, gradient in zip(self._model.trainable_variables, gradients, strict=False):
            if gradient is not None:
                found[f"gradient/{variable.path}"] = tf.convert_to_tensor(gradient)
        return found

    def _alone(self, data: Any) -> tuple[dict[str, Any], list[Any]]:
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with _recorded(model, lambda output: output) as seen, tf.GradientTape() as tape:
            if why_custom(model, "train_step") is not None:
                # Such a model may call its layers in any way, and leave `call` undefined.
                with suppress(Exception):
                    self._forward(x)
                return seen(), []
            y_pred = self._forward(x)
            loss = loss_of(model, x, y, y_pred, sample_weight, training=True)
        return seen(), tape.gradient(loss, model.trainable_weights)

    def _forward(self, x: Any) -> Any:
        model = self._model
        return model(x, training=True) if takes_training(model) else model(x)


@contextmanager
def _recorded(model: Any, whole: Callable[[Any], Any]) -> Iterator[Callable[[], dict[str, Any]]]:
    """Record the layer outputs of a model, in the order of the calls.

    Args:
        model: The model.
        whole: Gathers an output over all replicas.

    Yields:
        A function that returns the outputs recorded in the calling thread. Each replica
        has its own thread.
    """
    threads: dict[int, dict[str, Any]] = {}

    def seen() -> dict[str, Any]:
        return threads.setdefault(threading.get_ident(), {})

    def record(layer: Any, arguments: Any, outputs: Any) -> None:
        for output in keras.tree.flatten(outputs):
            if isinstance(output, tf.Tensor):
                seen()[f"{len(seen()):05d}/{layer.path}"] = whole(output)

    with calls_watched(watched_layers(model), record):
        yield seen
