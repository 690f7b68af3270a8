"""Trainers: keras/src/trainers/trainer.py, and keras/src/backend/*/trainer.py."""

import functools
import importlib
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any

import keras

from lockstep.keras_compat.rows import (
    EpochIterator,
    _base_of_model,
    _call,
    _CompileLoss,
    _data_adapter_utils,
    _held,
    _is_given,
    _named,
    _pythonify_logs,
    _read,
    _read_and_write,
)
from lockstep.keras_compat.version import _numbers


@functools.cache
def trainer_class() -> Any:
    """The class of the backend's `fit`, `evaluate` and `predict`, which `keras.Model` inherits."""
    return _base_of_model(trainer_module())


@functools.cache
def base_trainer_class() -> Any:
    """The class of `compile` and `compute_loss`, which the trainers of all backends inherit."""
    return _base_of_model("keras.src.trainers.trainer")


def trainer_module() -> str:
    """The module of the backend's trainer, by name."""
    return f"keras.src.backend.{keras.backend.backend()}.trainer"


def module_in_keras(thing: Any) -> str:
    """Where in Keras a function or class is defined, `"ops.nn"` for example; `""` elsewhere."""
    if isinstance(thing, FunctionType) and not is_code_of_keras(thing):
        return ""  # a wrapper has the module of what it wraps
    module = str(getattr(thing, "__module__", ""))
    return module.removeprefix("keras.src.") if module.startswith("keras.src.") else ""


def is_code_of_keras(function: Any) -> bool:
    """Whether a function is defined in a module of Keras, or is lockstep's in place of it."""
    # A wrapper may have the `__module__` of what it wraps. Its globals are its own.
    names = getattr(getattr(function, "__func__", function), "__globals__", {})
    return str(names.get("__name__", "")).partition(".")[0] in ("keras", "lockstep")


def class_is_of_keras(kind: Any) -> bool:
    """Whether every method of a class of layers is Keras's own: a script may replace it.

    The methods around steps do not count: tools that log runs replace them.
    """
    found = [kind.call, kind.__call__]
    for base in kind.__mro__[: kind.__mro__.index(keras.layers.Layer)]:
        members = [member for name, member in vars(base).items() if name not in _AROUND_STEPS]
        found += [member for member in members if isinstance(member, FunctionType)]
    return all(map(is_code_of_keras, found))


_AROUND_STEPS = ("fit", "evaluate", "predict", "save", "save_weights")


def runs_code_of_keras(layer: Any) -> bool:
    """Whether every method of a layer is Keras's own, those included that the layer itself has."""
    kind = type(layer)
    own = [x for name, x in vars(layer).items() if callable(x) and hasattr(kind, name)]
    return class_is_of_keras(kind) and all(map(is_code_of_keras, own))


# keras/src/trainers/trainer.py, and keras/src/backend/*/trainer.py

_FROM_3_16 = _numbers(keras.__version__) >= (3, 16)
_Trainer = base_trainer_class()
_JAX = trainer_class() if keras.backend.backend() == "jax" else None
_TF = trainer_class() if keras.backend.backend() == "tensorflow" else None
BUILD = _named(keras.Model, "_symbolic_build")
"""The method that builds a model, its metrics and its optimizer."""
check_compiled = _call(keras.Model, "_assert_compile_called")
"""Raise Keras's error if the method of this name is called before `compile`."""
compiled_loss = _read(_Trainer, "_compile_loss")
"""What `compile` has made of the losses, `None` without one."""
COMPILED_METRICS = _held(_Trainer, "_compile_metrics")
compiled_metrics = _read(_Trainer, COMPILED_METRICS)
"""What `compile` has made of the metrics, `None` without one."""
_entries_of_losses = _read(_CompileLoss, "_flat_losses")
loss_tracker = _read(_Trainer, "_loss_tracker")
"""The metric with the mean of the loss, to which Keras's steps add each batch."""
_own_metrics = _call(keras.Model, "_get_own_metrics")
UPDATE_METRICS = _held(_JAX, "_update_metrics_variables")
"""The method of a step on JAX that updates the metrics, after the gradient."""
loss_of = _call(keras.Model, "_compute_loss")
"""The loss of a batch, from the model's own `compute_loss`, whose arguments it takes."""
metric_results: Callable[..., dict[str, Any]] = _call(keras.Model, "_get_metrics_result_or_logs")
"""The logs of an epoch: the metrics, or the logs of the last step of the user's."""
values_in_order = _call(keras.Model, "_flatten_metrics_in_order")
"""The values of logs as `evaluate` returns them without `return_dict`."""
validates_after: Callable[..., bool] = _call(keras.Model, "_should_eval")
"""Whether `fit` evaluates the model after an epoch, with this `validation_freq`."""
XLA = _held(_Trainer, "_jit_compile")
"""The attribute behind `jit_compile`, whose setter checks more than it sets."""
_FIRST_EPOCH = _held(_Trainer, "_initial_epoch")
_first_epoch = _read(_Trainer, _FIRST_EPOCH)
WITHIN_FIT = "_use_cached_eval_dataset"
"""The argument of `evaluate` with which `fit` asks for the batches it has kept."""
_KEPT = _held(trainer_class(), "_eval_epoch_iterator")
kept_validation, keep_validation = _read_and_write(None, _KEPT, None)
"""The batches for `evaluate` that `fit` keeps for all its epochs, `None` if there are none."""
STRATEGY = _held(_TF, "_distribute_strategy")
"""The attribute of a model, and of a variable of TensorFlow, with its `tf.distribute` strategy."""
function_of_iterator: Callable[..., Callable[[Any], Any]] = _call(_TF, "_make_function")
"""TensorFlow's function that runs a step on `steps_per_execution` batches of an iterator."""
taking_optionals: Callable[..., Callable[[Any], Any]] = _call(_TF, "_autoconvert_optionals")
"""A step on TensorFlow that also takes a list of `tf.data` optionals."""
logits_of, set_logits = _read_and_write(None, "_keras_logits", None)
"""The logits of a TensorFlow tensor of probabilities, `None` without any.

keras/src/backend/tensorflow/nn.py, from 3.16 on ops/nn.py: losses look there.
"""
wrapped_by_keras = _read(None, "ddp_model", None, to=_is_given)
"""Whether Keras trains the model on PyTorch in a `DistributedDataParallel`, from 3.16 on."""
_unbuilt_parts = _call(keras.Model if _FROM_3_16 else None, "_get_unbuilt_components")
_BUILD_IF_NEEDED = _named(_JAX if _FROM_3_16 else None, "_maybe_symbolic_build")
_next_batches = _call(EpochIterator, "_get_iterator")
_named(
    EpochIterator, "_enumerate_iterator", "_interrupted_warning", "catch_stop_iteration", "reset"
)
_held(EpochIterator, "_current_iterator", "_epoch_iterator", "_num_batches", "_steps_seen")


def state_sync_name() -> str:
    """The method that a callback's `self.model` calls for weights that are up to date.

    keras/src/callbacks/callback.py, Callback.model: `jax_state_sync` up to 3.15; from 3.16
    on `state_sync`, which `jax_state_sync` calls.
    """
    return "state_sync" if hasattr(trainer_class(), "state_sync") else "jax_state_sync"


def build_on_first_batch(
    model: Any, batches: EpochIterator, typed: Callable[[Any], Any] = lambda batch: batch
) -> None:
    """Build what of the model is not built yet, as `fit` and `evaluate` do.

    Up to 3.15 an epoch begins, which gives the batch; from 3.16 on a pass over the data gives it.

    Args:
        model: The model.
        batches: The batches of the call.
        typed: Returns the batch as a device has it.
    """
    if not hasattr(model, _BUILD_IF_NEEDED):
        getattr(model, BUILD)(iterator=_typed_steps(batches, typed))
    elif any(_unbuilt_parts(model)):
        batch = next(iter(_next_batches(batches)), None)
        # Without a batch Keras refuses the data, in words of its own.
        batch = batch if batch is None else typed(batch)
        getattr(model, _BUILD_IF_NEEDED)(iterator=batches, data_batch=batch)


def _typed_steps(batches: EpochIterator, typed: Callable[[Any], Any]) -> Iterator[Any]:
    """Yield the executions of an epoch: a list, or an iterator over the batches of the steps."""
    for first, last, steps in batches:
        is_list = isinstance(steps, list | tuple)
        yield first, last, [typed(each) for each in steps] if is_list else map(typed, steps)


def build_from_batch(model: Any, batch: Any) -> None:
    """Build a model, its metrics and its optimizer from the shapes of a batch."""
    getattr(model, BUILD)(data_batch=batch)


def is_stacking(batches: Iterator[Any]) -> bool:
    """Whether Keras's own loop yields the batches of several steps as one, stacked.

    JAXEpochIterator._get_iterator, from 3.16 on, where `steps_per_execution` is more than 1.
    """
    return _FROM_3_16 and getattr(batches, "__qualname__", "").startswith("JAXEpochIterator.")


def unstacked(batches: Any) -> Iterator[Any]:
    """The batches of the steps that Keras has stacked, or put into a list at the end of the data.

    keras/src/trainers/data_adapters/data_adapter_utils.py, super_batch_iterator, from 3.16 on.
    """
    if isinstance(batches, _data_adapter_utils.PartialBatchList):
        return iter(batches)
    leaves = [leaf for leaf in keras.tree.flatten(batches) if leaf is not None]

    def batch(number: int) -> Any:
        return keras.tree.map_structure(lambda x: None if x is None else x[number], batches)

    return map(batch, range(len(leaves[0])))


def takes_batch_before_trace(model: Any) -> bool:
    """Whether TensorFlow's step takes its batch from the iterator, and is traced after that.

    Trainer._make_function, from 3.16 on, where `steps_per_execution` is 1. A trace that is
    given up would cost the batch.
    """
    return _FROM_3_16 and bool(model.steps_per_execution == 1)


def single_losses(compiled: Any) -> list[Any]:
    """The loss of each output, in what `compiled_loss` returns."""
    return [entry.loss for entry in _entries_of_losses(compiled)]


def first_epoch_of(model: Any, initial_epoch: int) -> int:
    """The first epoch of `fit`, which `BackupAndRestore` may have moved on."""
    return int(_first_epoch(model) or initial_epoch)


def forget_validation(model: Any) -> None:
    """Drop the batches for `evaluate` at the end of `fit`."""
    vars(model).pop(_KEPT, None)


def backend_iterator() -> Any:
    """The iterator of `fit` and `evaluate` on TensorFlow, and of `predict` too on PyTorch."""
    names = {"tensorflow": "TFEpochIterator", "torch": "TorchEpochIterator"}
    return getattr(importlib.import_module(trainer_module()), names[keras.backend.backend()])


def catches_interrupts(frame: FrameType | None) -> bool:
    """Whether a frame is within code of Keras that waits for values and drops every exception."""
    while frame is not None and frame.f_code is not _pythonify_logs.__code__:
        frame = frame.f_back
    return frame is not None


# keras/src/backend/jax/trainer.py: a loop takes the values out of the variables and empties
# these. `jax_state_sync`, which a callback's `self.model` calls, writes them back.

JAX_STATE = _held(_JAX, "_jax_state")
"""The attribute of a model with the values of its variables between two steps."""
JAX_STATE_SYNCED = _held(_JAX, "_jax_state_synced")
"""The attribute that says whether the variables have these values."""
TAKE_JAX_STATE = _named(_JAX, "_get_jax_state")
take_jax_state: Callable[..., tuple[Any, ...]] = _call(_JAX, TAKE_JAX_STATE)
"""The values of groups of variables, such as `trainable_variables=True`, of a model."""
empty_variables = _call(_JAX, "_purge_model_variables")
"""Take the values out of groups of variables of a model, so that a step may donate them."""
