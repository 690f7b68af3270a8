"""For `verify`: trains and records steps of one model on TensorFlow."""

import itertools
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from lockstep.attach.attachment import attachment_of
from lockstep.engines.replicas.sketches import Sketches
from lockstep.engines.tensorflow.first_step.first_step import RecordedSteps, signature_of
from lockstep.engines.tensorflow.steps.split_checks import why_custom
from lockstep.errors import UnsupportedModel
from lockstep.training.build import build, is_ready
from lockstep.training.probe_helpers import (
    SHORT_FLOATS,
    not_built,
    shortest_cast,
    tensors,
    trained_once,
)


class TensorFlowProbe:
    """Probes one model, attached or not; see `Probe` for the contract."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @contextmanager
    def precise(self) -> Iterator[list[str]]:
        """Use full-precision matrix products and no XLA, as several devices run without XLA."""
        model, config = self._model, tf.config.experimental
        before = config.tensor_float_32_execution_enabled(), model.jit_compile
        config.enable_tensor_float_32_execution(False)
        model.jit_compile = False
        try:
            yield []
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

    def train(self, batch: Any, *, restart: bool = False) -> dict[str, Any]:
        """Train one step on a batch in the structure of `fit`, and return the logs."""
        if restart:
            self._model.make_train_function(force=True)
        return trained_once(self._model, batch)

    def recorded(
        self, batches: Iterable[Any], *, layers: bool = True
    ) -> Generator[list[Sketches], None, None]:
        """Yield the sketches of each replica; see `Probe`."""
        model = self._model
        for batch in batches:
            attachment, data = attachment_of(model), tensors(batch)
            if attachment is None:
                one = RecordedSteps(model, is_custom=why_custom(model, "train_step") is not None)

                def step(data: Any, one: RecordedSteps = one) -> Any:
                    with one.watching():
                        return model.train_step(data)

                yield one.run(step, data, signature_of(data, data), 1)
            else:
                session: Any = attachment.session
                yield session.recorded(data)
