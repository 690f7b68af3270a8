"""Private attributes and methods of Keras's layers."""

from collections.abc import Callable
from typing import Any

import keras

from lockstep.keras_compat.graph import _inner_graph
from lockstep.keras_compat.rows import _call, _held, _is_given, _named, _read
from lockstep.keras_compat.trainers import _FIRST_EPOCH, _KEPT, _own_metrics, _Trainer


def tracked_metrics(model: Any) -> list[Any]:
    """The metrics that Keras tracks for a model, those that its `metrics` may omit included."""
    inner = [metric for layer in layers_in(model)[1:] for metric in _metrics(layer)]
    return [*_own_metrics(model), *inner]


_layers = _call(keras.layers.Layer, "_flatten_layers")
layers_of = _read(keras.layers.Layer, "_layers")
"""The layers among the attributes of a layer."""
_metrics = _read(keras.layers.Layer, "_metrics")
seed_generators: Callable[[Any], list[Any]] = _read(keras.layers.Layer, "_seed_generators")
"""The list of the seed generators among the attributes of a layer; a change to it counts."""
own_trainable_variables = _read(keras.layers.Layer, "_trainable_variables", to=list)
"""The variables that a layer made with `trainable=True`, or that an optimizer updates."""
takes_training = _read(keras.layers.Layer, "_call_has_training_arg")
"""Whether the `call` of a layer has the argument `training`."""
is_rematerialized = _read(keras.Operation, "_remat_mode", to=_is_given)
"""Whether the layer was made in a `RematScope`, and is computed again in the backward pass."""
reduction_axes = _read(keras.layers.BatchNormalization, "_reduction_axes")
"""The axes over which a batch norm takes its mean."""
MOMENTS = _named(keras.layers.BatchNormalization, "_moments")
"""The method of `BatchNormalization` that takes mean and variance of a batch."""
KERNEL = _held(keras.layers.Dense, "_kernel")
"""The attribute of a `Dense` or `EinsumDense` with its kernel, without the factors of LoRA."""
_held(keras.layers.EinsumDense, KERNEL)
EMBEDDINGS = _held(keras.layers.Embedding, "_embeddings")
"""The attribute of an `Embedding` with its table, without the factors of LoRA."""
_LOSSES = _held(keras.layers.Layer, "_losses")
_losses = _read(None, _LOSSES)
added_losses = _read(None, _LOSSES, to=list)
"""The losses that a layer has added in its last call."""
_LOSS_IDS = _held(keras.layers.Layer, "_loss_ids")
_loss_ids = _read(None, _LOSS_IDS)
clear_losses = _call(keras.Model, "_clear_losses")
"""Drop the losses that a layer and those inside it have added."""
_tracker = _read(keras.layers.Layer, "_tracker")
ATTRIBUTES_OF_RUNS: dict[str, Any] = {
    "train_function": None,
    "test_function": None,
    "predict_function": None,
    "stop_training": False,
    "stop_evaluating": False,
    "stop_predicting": False,
    "history": None,
    "training": True,
    # A proof of rows calls a copy, and a functional model may not be called yet.
    _held(keras.layers.Layer, "_called"): True,
    _KEPT: None,
    _FIRST_EPOCH: None,
    _held(_Trainer, "_compile_config"): None,
    _held(_Trainer, "_compiled_trainable_state"): {},
    _LOSSES: [],
    _LOSS_IDS: set(),
}
"""Attributes of models and layers that change in a run, with those of a copy in a worker."""


def layers_in(part: Any) -> list[Any]:
    """A layer and the layers inside it, each once; none for an operation that is not a layer."""
    return list(_layers(part)) if isinstance(part, keras.layers.Layer) else []


def sublayers_of(layer: Any) -> list[Any]:
    """The layers that a layer holds itself, in order, without those inside them.

    The graph of a `Sequential` holds its layers once more.
    """
    own = _inner_graph(layer)
    inner = _layers(layer, recursive=False, include_self=False)
    return [each for each in inner if each is not own]


def is_built(model: Any) -> bool:
    """Whether the model and every layer in it has its variables."""
    return all(layer.built for layer in layers_in(model))


def change_added_losses(layer: Any, losses: list[Any]) -> None:
    """Replace the losses that a layer has added in its last call."""
    _losses(layer)[:] = losses


def losses_with_ids(layer: Any) -> tuple[list[Any], set[int]]:
    """The losses that a layer has added, and the ids by which it drops them at its next call."""
    return added_losses(layer), set(_loss_ids(layer))


def put_losses_with_ids(layer: Any, losses: list[Any], ids: set[int]) -> None:
    """Undo what a layer has added since `losses_with_ids`."""
    change_added_losses(layer, losses)
    forget_loss_ids(layer)
    _loss_ids(layer).update(ids)


def forget_loss_ids(layer: Any) -> None:
    """Let a layer drop no loss of another layer that has an id of an earlier trace."""
    _loss_ids(layer).clear()


def renew_tracker(layer: Any) -> None:
    """Let a copy of a layer find the items of its lists, which have other identities."""
    tracker = _tracker(layer)
    tracker.stored_ids = {
        name: {id(item) for item in items} for name, (_, items) in tracker.config.items()
    }


_COMPILE_ON_JAX = (
    keras.layers.RandomPerspective,
    keras.layers.RandomRotation,
    keras.layers.RandomShear,
    keras.layers.RandomTranslation,
    keras.layers.RandomZoom,
)
"""Layers with `supports_jit = False`. It is for XLA on TensorFlow: on JAX, a compiled step gives
the numbers of one that runs operation by operation."""
_TOO_MANY_OPERATIONS = (keras.layers.AugMix, keras.layers.RandAugment)
"""Layers of many such layers. XLA takes minutes to compile a step with one of them."""


def layers_not_compiled(model: Any) -> list[Any]:
    """The layers for which JAX compiles no step of a model, if Keras chooses."""
    # keras/src/trainers/trainer.py, model_supports_jit: jit_compile="auto" uses it.
    refused = [layer for layer in layers_in(model) if not layer.supports_jit]
    many = [layer for layer in layers_in(model) if type(layer) in _TOO_MANY_OPERATIONS]
    inside = {id(each) for layer in many for each in layers_in(layer)}
    return many + [
        layer for layer in refused if type(layer) not in _COMPILE_ON_JAX and id(layer) not in inside
    ]


def finalizes_after_errors() -> bool:
    """Whether Keras's `fit` on this backend finalizes the optimizer after an error too.

    keras/src/backend/jax/trainer.py, JAXTrainer.fit, does so in a `finally`.
    """
    return bool(keras.backend.backend() == "jax")


def keras_joins_predictions() -> bool:
    """Whether Keras's `predict` on this backend joins ragged rows, which only it can.

    keras/src/backend/tensorflow/trainer.py, TensorFlowTrainer.predict.
    """
    return bool(keras.backend.backend() == "tensorflow")


def is_compiled_on_jax(model: Any, asked: bool | None) -> bool:
    """Whether a step of a model is one program on JAX.

    Args:
        model: The model.
        asked: What `compile` was given as `jit_compile`; `None` if Keras chose.
    """
    if model.run_eagerly or model.jit_compile or asked is not None:
        return not model.run_eagerly and bool(model.jit_compile)
    is_choice = any(not layer.supports_jit for layer in layers_in(model))
    return is_choice and not layers_not_compiled(model)
