"""Proves of layers that they work row by row, by the operations they are made of.

A model is traced on a batch of unknown size. Of each part that is not Keras's own, the
operations are followed from its inputs, whose rows are those of the batch, to what it
gives: proven is a part all of whose outputs have a row for each row of the batch, made
from that row alone, and that changes no variable but in a way all replicas do alike.
Keras's own layers inside of it count as what they are known to be.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from lockstep.engines.tensorflow.proof.program import program_of
from lockstep.engines.tensorflow.proof.rows import is_batch_norm, is_for_all_rows, works_by_rows
from lockstep.engines.tensorflow.proof.states import Rows, Same, Seed, State, Unknown
from lockstep.engines.tensorflow.proof.walk import Walk
from lockstep.engines.tensorflow.variables import shared_seeds

Reasons = dict[int, str]
"""Why a part is not proven, in words, by its identity."""


def unproven(model: Any, parts: list[Any], inputs: Any, *, training: bool) -> Reasons:
    """Those of `parts` that are not proven to work row by row, and why.

    Args:
        model: A built model; it is traced, and no value of it changes.
        parts: Layers and operations of it, or itself, of which nothing is known.
        inputs: Its inputs, or their specification.
        training: Whether it is called to be trained.
    """
    reasons = {id(part): _LOOPS for part in parts if _meets_in_a_loop(part)}
    try:
        with untouched_random_numbers():
            made = bool(shared_seeds())
            traced = partial(_Trace, model, parts, inputs, training=training)
            trace = traced()
            if shared_seeds() and not made:  # the first who draws from them makes them
                trace = traced()
            again = traced()
    except Exception as error:  # whatever it is, it is not a proof
        return {id(part): f"{type(error).__name__} while it was traced" for part in parts}
    finally:
        model._clear_losses()
    for call in trace.calls:
        reason = trace.why_not(call)
        if reason is not None:
            reasons.setdefault(id(call.part), reason)
    for one, other in zip(trace.calls, again.calls, strict=False):
        if trace.program(one) != again.program(other):
            reasons.setdefault(id(one.part), "another program at each trace")
    for part in parts:
        if all(call.part is not part for call in trace.calls):
            reasons.setdefault(id(part), "not called while it was traced")
    return reasons


_LOOPS = "batch norm in a loop"


def _meets_in_a_loop(part: Any) -> bool:
    """Whether there is batch norm where replicas could not meet: inside a wrapper's loop."""
    if not isinstance(part, keras.layers.Layer):
        return False
    wrappers = (keras.layers.RNN, keras.layers.Wrapper, keras.layers.StackedRNNCells)
    return any(
        isinstance(layer, wrappers) and any(is_batch_norm(i) for i in layer._flatten_layers())
        for layer in part._flatten_layers()
    )


@dataclass
class _Call:
    """One call of a part, or of a layer inside of it, in a traced graph."""

    part: Any
    inputs: list[Any]
    first: int
    last: int = 0
    outputs: list[Any] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)
    inside: list["_Call"] = field(default_factory=list)


class _Trace:
    """A model traced once, with the calls of some of its parts."""

    def __init__(self, model: Any, parts: list[Any], inputs: Any, *, training: bool) -> None:
        self.calls: list[_Call] = []
        self._graph = FuncGraph("lockstep_proof")
        self._told: dict[int, State] = {}
        self._kept: list[Any] = []
        self._open: _Call | None = None
        self._in_known_layer = False
        model._clear_losses()
        with ExitStack() as stack:
            self._hook(parts, stack)
            stack.enter_context(self._graph.as_default())
            x = keras.tree.map_structure(_placeholder, inputs)
            if model._call_has_training_arg:
                model(x, training=training)
            else:
                model(x)
        self._captures = {id(inner): outer for outer, inner in self._graph.captures}
        self._seeds = {id(seeds.value.handle) for seeds in shared_seeds()}

    def why_not(self, call: _Call) -> str | None:
        """Why a call is not proven to work row by row; `None` where it is."""
        operations = self._graph.get_operations()
        walk = Walk(self._outside, self._told)
        for tensor in call.inputs:
            if not isinstance(tensor, tf.Tensor):
                return f"a {type(tensor).__name__}"
            walk.set(tensor, _of_input(tensor))
        start = call.first
        for inner in call.inside:
            walk.through(operations[start : inner.first])
            state = _of_known_layer(inner, [walk.of(tensor) for tensor in inner.inputs])
            for output in inner.outputs:
                walk.set(output, state)
            start = inner.last
        walk.through(operations[start : call.last])
        for tensor in (*call.outputs, *call.losses):
            state = walk.of(tensor) if isinstance(tensor, tf.Tensor) else Unknown("an output")
            if isinstance(state, Unknown):
                return state.why
        for tensor in call.outputs:
            if walk.of(tensor) != (Same() if tensor.shape.rank == 0 else Rows()):
                merged = isinstance(walk.of(tensor), Rows)
                return "rows merged with another dim" if merged else "an output without rows"
        if any(walk.of(loss) != Same() for loss in call.losses):  # which Keras would add up
            return "a loss of rows"
        return walk.failure

    def program(self, call: _Call) -> list[Any]:
        """What a call does, comparable with another trace of it."""
        return program_of(
            self._graph.get_operations()[call.first : call.last],
            {inner: id(outer) for inner, outer in self._captures.items() if _is_resource(outer)},
        )

    # ------------------------------------------------------------------- while tracing

    def _hook(self, parts: list[Any], stack: ExitStack) -> None:
        for part in parts:
            self._replace(part, "call", self._recording(part, part.call), stack)
            if not isinstance(part, keras.layers.Layer):
                continue
            self._replace(part, "compute_mask", self._recording(part, part.compute_mask), stack)
            for layer in part._flatten_layers():
                for seeds in layer._seed_generators:
                    self._replace(seeds, "next", self._marking(seeds.next), stack)
                if layer.activity_regularizer is not None:  # replicas reckon with it together
                    self._replace(layer, "activity_regularizer", None, stack)
                known = is_batch_norm(layer) or works_by_rows(layer)
                if known and layer is not part:
                    for name in ("call", "compute_mask"):
                        known_call = self._knowing(layer, getattr(layer, name))
                        self._replace(layer, name, known_call, stack)

    def _replace(self, item: Any, name: str, value: Any, stack: ExitStack) -> None:
        attributes = vars(item)
        if name in attributes:
            stack.callback(attributes.__setitem__, name, attributes[name])
        else:
            stack.callback(attributes.pop, name, None)
        attributes[name] = value

    def _recording(self, part: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            if self._open is not None or not self._here():
                return call(*args, **kwargs)
            made = self._open = _Call(part, _tensors((args, kwargs), masks=True), self._now())
            losses = set(map(id, _losses(part)))
            try:
                outputs = call(*args, **kwargs)
            finally:
                self._open = None
            made.last = self._now()
            made.outputs = _tensors(outputs, masks=True)
            made.losses = [loss for loss in _losses(part) if id(loss) not in losses]
            self.calls.append(made)
            # What comes out is in rows, or the step fails: the rest is traced as if it were.
            return keras.tree.map_structure(_with_unknown_rows, outputs)

        return record

    def _knowing(self, layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        def know(*args: Any, **kwargs: Any) -> Any:
            if self._open is None or self._in_known_layer:
                return call(*args, **kwargs)
            if not self._here():
                if is_batch_norm(layer):
                    raise NotImplementedError("Replicas cannot meet in a loop or a branch.")
                return call(*args, **kwargs)
            made = _Call(layer, _tensors((args, kwargs)), self._now())
            self._in_known_layer = True
            try:
                outputs = call(*args, **kwargs)
            finally:
                self._in_known_layer = False
            outputs = keras.tree.map_structure(_same_tensor, outputs)
            made.last, made.outputs = self._now(), _tensors(outputs, masks=True)
            self._open.inside.append(made)
            return outputs

        return know

    def _marking(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        def mark(*args: Any, **kwargs: Any) -> Any:
            seed = tf.identity(draw(*args, **kwargs))
            self._told[id(seed)] = Seed()
            self._kept.append(seed)
            return seed

        return mark

    def _here(self) -> bool:
        return tf.compat.v1.get_default_graph() is self._graph

    def _now(self) -> int:
        return len(self._graph.get_operations())

    # --------------------------------------------------------------------- afterwards

    def _outside(self, tensor: Any) -> State:
        """Of a tensor that the layer was not given, and has not made."""
        outer = self._captures.get(id(tensor))
        if outer is not None:
            return Seed() if id(outer) in self._seeds else Same()
        op = getattr(tensor, "op", None)
        return Same() if op is None or op.type == "Const" else Unknown("a tensor of another layer")


def _is_resource(tensor: Any) -> bool:
    return bool(tensor.dtype == tf.resource)


def _of_input(tensor: Any) -> State:
    if not hasattr(tensor, "op"):  # known before tracing
        return Same()
    if tensor.shape.rank == 0:
        return Same()
    has_rows = tensor.shape.rank is not None and tensor.shape[0] is None
    return Rows() if has_rows else Unknown("an input without the batch as first dim")


def _of_known_layer(call: _Call, states: list[State]) -> State:
    """What one of Keras's own layers, or batch norm, makes of its inputs."""
    layer = call.part
    unknown = next((state for state in states if isinstance(state, Unknown)), None)
    if unknown is not None:
        return unknown
    rows = {state for state in states if isinstance(state, Rows)}
    together = [layer for layer in layer._flatten_layers() if _works_together(layer)]
    draws = any(inner._seed_generators for inner in layer._flatten_layers())
    if not rows and all(isinstance(state, Same) for state in states):
        return Unknown(type(layer).__name__) if together or draws else Same()
    for tensor, state in zip(call.inputs, states, strict=True):
        known = tensor.shape.rank is not None
        one = is_for_all_rows(layer, tensor.shape.as_list() if known else None)
        if not isinstance(state, Rows) and not (isinstance(state, Same) and one):
            return Unknown(type(layer).__name__)
    if any(
        isinstance(s, Rows) and t.shape.rank == 1 for t, s in zip(call.inputs, states, strict=True)
    ):
        return Unknown(type(layer).__name__)  # of one dim, the last one is the batch
    if len(rows) != 1 or (together and rows != {Rows()}):
        return Unknown(type(layer).__name__)
    return rows.pop()


def _works_together(layer: Any) -> bool:
    return is_batch_norm(layer) or layer.activity_regularizer is not None


def _tensors(tree: Any, *, masks: bool = False) -> list[Any]:
    found = []
    for leaf in keras.tree.flatten(tree):
        if tf.is_tensor(leaf) or isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
            found.append(leaf)
            mask = keras.src.backend.get_keras_mask(leaf) if masks else None
            found += [] if mask is None else [mask]
    return found


def _losses(part: Any) -> list[Any]:
    # keras/src/layers/layer.py, Layer.add_loss
    if not isinstance(part, keras.layers.Layer):
        return []
    return [loss for layer in part._flatten_layers() for loss in layer._losses]


def _placeholder(leaf: Any) -> Any:
    if leaf is None or not hasattr(leaf, "dtype"):
        return leaf
    if isinstance(
        leaf, tf.RaggedTensor | tf.SparseTensor | tf.RaggedTensorSpec | tf.SparseTensorSpec
    ):
        raise TypeError("ragged or sparse inputs")
    shape = tuple(leaf.shape)
    return tf.compat.v1.placeholder(tf.as_dtype(leaf.dtype), (None, *shape[1:]) if shape else ())


def _with_unknown_rows(leaf: Any) -> Any:
    if not isinstance(leaf, tf.Tensor) or leaf.shape.rank in (None, 0):
        return leaf
    shape = (None, *leaf.shape[1:])
    return _with_mask_of(leaf, tf.compat.v1.placeholder_with_default(leaf, shape))


def _same_tensor(leaf: Any) -> Any:
    return _with_mask_of(leaf, tf.identity(leaf)) if isinstance(leaf, tf.Tensor) else leaf


def _with_mask_of(leaf: Any, other: Any) -> Any:
    mask = keras.src.backend.get_keras_mask(leaf)
    if mask is not None:
        keras.src.backend.set_keras_mask(other, mask)
    return other


@contextmanager
def untouched_random_numbers() -> Iterator[None]:
    """Whatever is drawn inside, what is drawn afterwards is as if it had not been."""
    python, numpy, had_seeds = random.getstate(), np.random.get_state(), bool(shared_seeds())
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if shared_seeds() and not had_seeds:
            # keras/src/random/seed_generator.py, global_seed_generator: made anew, as the
            # step would make it, which draws from Python's random numbers.
            keras.src.backend.common.global_state.set_global_attribute(
                "global_seed_generator", None
            )
            keras.src.random.seed_generator.global_seed_generator()
