"""Every private name of Keras that lockstep uses, and no other module names one.

The place of each name in Keras is its import. All of them were checked against
Keras 3.15.1 and Keras 3.16 (keras-nightly 3.16.0.dev2026102704). Public names come
from `keras` itself, in the module that needs them.

An engine imports this module, and the import fails in words where the installed
Keras is another one. Only `keras` is imported here; what a backend has is looked up
in functions, as the other backend may not be installed.

Raises:
    UnsupportedKeras: If this Keras is too old, too new, or lacks a name.
"""

import functools
import importlib
import inspect
import re
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType
from typing import Any

import keras

from lockstep.errors import UnsupportedKeras

OLDEST = "3.15.1"
FIRST_UNKNOWN = "3.17"
"""The bounds of `keras` in pyproject.toml."""

_REMEDY = f'Run pip install "keras>={OLDEST},<{FIRST_UNKNOWN}"'


def check_version(version: str) -> None:
    """Raise where this version of Keras was not checked.

    Args:
        version: As in `keras.__version__`; a nightly counts as the release it precedes.

    Raises:
        UnsupportedKeras: If it is older or newer than the versions that were checked.
    """
    if not _numbers(OLDEST) <= _numbers(version) < _numbers(FIRST_UNKNOWN):
        raise UnsupportedKeras(
            f"Keras {version} is installed, and lockstep needs keras>={OLDEST},<{FIRST_UNKNOWN}:\n"
            f"it uses private parts of Keras, which were checked in these versions.\n{_REMEDY}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _missing(what: str) -> UnsupportedKeras:
    return UnsupportedKeras(
        f"Keras {keras.__version__} has no {what}, which lockstep needs:\n"
        f"it is a private part of Keras {OLDEST}, and may change in any version.\n{_REMEDY}"
    )


def _name_in(error: ImportError) -> str:
    """What could not be imported, with its module."""
    name = re.search(r"cannot import name '(\w+)'", error.msg)
    return f"{error.name}.{name[1]}" if name else str(error.name)


def _base_of_model(module: str) -> Any:
    for base in keras.Model.__mro__:
        if base.__module__ == module:
            return base
    raise _missing(f"base class of keras.Model in {module}")


check_version(keras.__version__)

try:
    from keras.src.backend.common import global_state as global_state
    from keras.src.backend.common.masking import get_keras_mask as get_keras_mask
    from keras.src.backend.common.masking import set_keras_mask as set_keras_mask
    from keras.src.backend.common.stateless_scope import in_stateless_scope as in_stateless_scope
    from keras.src.backend.common.variables import Variable as _Variable
    from keras.src.backend.config import is_nnx_enabled as is_nnx_enabled
    from keras.src.layers import layer as _layer_module
    from keras.src.layers.preprocessing.index_lookup import IndexLookup as IndexLookup
    from keras.src.losses.losses import LossFunctionWrapper as LossFunctionWrapper
    from keras.src.models.functional import Functional as Functional
    from keras.src.models.model import inject_functional_model_class as _inject_functional
    from keras.src.ops.node import Node as _Node
    from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR as GLOBAL_SEED_GENERATOR
    from keras.src.random.seed_generator import global_seed_generator as global_seed_generator
    from keras.src.saving import serialization_lib as _serialization_lib
    from keras.src.saving.keras_saveable import KerasSaveable as KerasSaveable
    from keras.src.trainers.data_adapters import data_adapter_utils as _data_adapter_utils
    from keras.src.trainers.data_adapters import get_data_adapter as get_data_adapter
    from keras.src.trainers.data_adapters.array_data_adapter import (
        ArrayDataAdapter as ArrayDataAdapter,
    )
    from keras.src.trainers.data_adapters.array_slicing import NumpySliceable as NumpySliceable
    from keras.src.trainers.data_adapters.array_slicing import (
        convert_to_sliceable as convert_to_sliceable,
    )
    from keras.src.trainers.data_adapters.array_slicing import (
        train_validation_split as train_validation_split,
    )
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter as DataAdapter
    from keras.src.trainers.data_adapters.data_adapter_utils import (
        class_weight_to_sample_weights as class_weight_to_sample_weights,
    )
    from keras.src.trainers.data_adapters.generator_data_adapter import (
        GeneratorDataAdapter as GeneratorDataAdapter,
    )
    from keras.src.trainers.data_adapters.grain_dataset_adapter import (
        GrainDatasetAdapter as GrainDatasetAdapter,
    )
    from keras.src.trainers.data_adapters.py_dataset_adapter import (
        PyDatasetAdapter as PyDatasetAdapter,
    )
    from keras.src.trainers.data_adapters.tf_dataset_adapter import (
        TFDatasetAdapter as TFDatasetAdapter,
    )
    from keras.src.trainers.data_adapters.torch_data_loader_adapter import (
        TorchDataLoaderAdapter as TorchDataLoaderAdapter,
    )
    from keras.src.trainers.epoch_iterator import EpochIterator as EpochIterator
    from keras.src.utils import io_utils as io_utils
    from keras.src.utils.backend_utils import DynamicBackend as DynamicBackend
    from keras.src.utils.python_utils import is_default as is_default
    from keras.src.utils.python_utils import pythonify_logs as pythonify_logs
    from keras.src.utils.traceback_utils import filter_traceback as filter_traceback
except ImportError as error:
    raise _missing(_name_in(error)) from error

_ATTRIBUTES = {
    ArrayDataAdapter: ("_get_iterator",),
    EpochIterator: ("_enumerate_iterator", "_get_iterator", "catch_stop_iteration", "reset"),
    Functional: ("_run_through_graph",),
    LossFunctionWrapper: ("call",),
    PyDatasetAdapter: ("_standardize_batch",),
    keras.Model: (
        *("_assert_compile_called", "_clear_losses", "_compute_loss", "_flatten_layers"),
        *("_flatten_metrics_in_order", "_get_metrics_result_or_logs", "_get_own_metrics"),
        *("_should_eval", "_symbolic_build"),
    ),
    keras.Operation: ("symbolic_call",),
    keras.callbacks.EarlyStopping: ("_set_monitor_op",),
    keras.layers.BatchNormalization: ("_moments",),
    keras.layers.Layer: ("symbolic_call",),
    keras.optimizers.Optimizer: (
        *("_apply_weight_decay", "_backend_increment_gradient_accumulators"),
        *("_backend_update_step", "_clip_gradients", "_use_weight_decay"),
        *("_var_key", "add_variable_from_reference", "update_step"),
    ),
    keras.random.SeedGenerator: ("next",),
    _layer_module: ("Node",),
    _serialization_lib: ("record_object_after_serialization",),
    global_state: ("GLOBAL_STATE_TRACKER", "get_global_attribute", "set_global_attribute"),
}
"""What lockstep calls or overrides: an override of a name that Keras no longer calls
would change nothing, and say nothing."""

_SET_BY_CODE = {
    ArrayDataAdapter: ("_batch_size", "_inputs", "_num_samples", "_shuffle"),
    EpochIterator: ("_current_iterator", "_epoch_iterator", "_num_batches", "_steps_seen"),
    TorchDataLoaderAdapter: ("_dataloader",),
    _base_of_model("keras.src.trainers.trainer"): (
        "_compile_loss",
        "_compile_metrics",
        "_jit_compile",
        "_loss_tracker",
    ),
    _Variable: ("_layout", "_value"),
    keras.Operation: ("_inbound_nodes",),
    keras.callbacks.ProgbarLogger: ("_called_in_fit",),
    keras.layers.BatchNormalization: ("_reduction_axes",),
    keras.layers.Layer: (
        *("_call_has_training_arg", "_layers", "_loss_ids", "_losses", "_metrics"),
        *("_seed_generators", "_tracker", "_trainable_variables"),
    ),
    keras.utils.Progbar: ("_last_update", "_seen_so_far"),
}
"""What lockstep reads or writes on an instance, by the class whose code names it."""


def _names_in(owner: type) -> set[str]:
    """The names of attributes in the code of the methods of a class."""
    members = (getattr(member, "fget", None) or member for member in vars(owner).values())
    functions = [inspect.unwrap(member) for member in members if callable(member)]
    return {name for f in functions if inspect.isfunction(f) for name in f.__code__.co_names}


for _owner, _names in _ATTRIBUTES.items():
    for _name in _names:
        if not hasattr(_owner, _name):
            raise _missing(f"{_owner.__name__}.{_name}")
for _owner, _names in _SET_BY_CODE.items():
    for _name in sorted(set(_names) - _names_in(_owner)):
        raise _missing(f"{_owner.__name__}.{_name}")


# ---------------------------------------------------------------- classes and their parts


@functools.cache
def trainer_class() -> Any:
    """The class of the backend's `fit`, `evaluate` and `predict`, which `keras.Model` inherits.

    keras/src/backend/jax/trainer.py: `JAXTrainer` up to 3.15, `Trainer` from 3.16 on; the
    same in keras/src/backend/tensorflow/trainer.py.
    """
    return _base_of_model(trainer_module())


@functools.cache
def base_trainer_class() -> Any:
    """The class of `compile` and `compute_loss`, which the trainers of all backends inherit.

    keras/src/trainers/trainer.py: `Trainer` up to 3.15, `BaseTrainer` from 3.16 on.
    """
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
    """Whether every method of a class of layers is Keras's own: a script may replace it."""
    found = [kind.call, kind.__call__]
    for base in kind.__mro__[: kind.__mro__.index(keras.layers.Layer)]:
        found += [member for member in vars(base).values() if isinstance(member, FunctionType)]
    return all(map(is_code_of_keras, found))


def runs_code_of_keras(layer: Any) -> bool:
    """Whether every method of a layer is Keras's own, those included that the layer itself has."""
    kind = type(layer)
    own = [x for name, x in vars(layer).items() if callable(x) and hasattr(kind, name)]
    return class_is_of_keras(kind) and all(map(is_code_of_keras, own))


# ---------------------------------------------------------------- what a trainer does


def state_sync_name() -> str:
    """The method that a callback's `self.model` calls for weights that are up to date.

    keras/src/callbacks/callback.py, Callback.model: `jax_state_sync` up to 3.15; from 3.16
    on `state_sync`, which `jax_state_sync` calls.
    """
    return "state_sync" if hasattr(trainer_class(), "state_sync") else "jax_state_sync"


def build_on_first_batch(model: Any, batches: EpochIterator) -> None:
    """Build what of the model is not built yet, as `fit` and `evaluate` do.

    keras/src/backend/jax/trainer.py: up to 3.15 an epoch begins, which gives the batch; from
    3.16 on a pass over the data gives it, as in `Trainer._maybe_symbolic_build`.
    """
    if not hasattr(model, "_maybe_symbolic_build"):
        model._symbolic_build(iterator=batches)
    elif any(model._get_unbuilt_components()):
        batch = next(iter(batches._get_iterator()), None)
        # Without a batch Keras refuses the data, in words of its own.
        model._maybe_symbolic_build(iterator=batches, data_batch=batch)


def is_stacking(batches: Iterator[Any]) -> bool:
    """Whether Keras's own loop yields the batches of several steps as one, stacked.

    keras/src/backend/jax/trainer.py, JAXEpochIterator._get_iterator: from 3.16 on, where
    `steps_per_execution` is more than 1.
    """
    made_by = getattr(batches, "__qualname__", "")
    return _numbers(keras.__version__) >= (3, 16) and made_by.startswith("JAXEpochIterator.")


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

    keras/src/backend/tensorflow/trainer.py, Trainer._make_function: from 3.16 on, where
    `steps_per_execution` is 1. A trace that is given up would cost the batch.
    """
    return _numbers(keras.__version__) >= (3, 16) and model.steps_per_execution == 1


def build_from_batch(model: Any, batch: Any) -> None:
    """Build a model, its metrics and its optimizer from the shapes of a batch.

    keras/src/trainers/trainer.py, Trainer._symbolic_build
    """
    model._symbolic_build(data_batch=batch)


BUILD = "_symbolic_build"
"""The name of the method behind `build_from_batch`."""


def check_compiled(model: Any, method: str) -> None:
    """Raise Keras's error if `method` is called before `compile`.

    keras/src/trainers/trainer.py, Trainer._assert_compile_called
    """
    model._assert_compile_called(method)


def compiled_loss(model: Any) -> Any:
    """What `compile` has made of the losses, `None` without one.

    keras/src/trainers/trainer.py, Trainer.compile; keras/src/trainers/compile_utils.py, CompileLoss
    """
    return model._compile_loss


def compiled_metrics(model: Any) -> Any:
    """What `compile` has made of the metrics, `None` without one.

    keras/src/trainers/trainer.py, Trainer.compile
    """
    return model._compile_metrics


COMPILED_METRICS = "_compile_metrics"
"""The attribute of a model that `compiled_metrics` returns."""


def single_losses(compiled: Any) -> list[Any]:
    """The loss of each output, in what `compiled_loss` returns.

    keras/src/trainers/compile_utils.py, CompileLoss._flat_losses
    """
    return [entry.loss for entry in compiled._flat_losses]


def loss_tracker(model: Any) -> Any:
    """The metric with the mean of the loss, to which Keras's steps add each batch.

    keras/src/trainers/trainer.py, Trainer._loss_tracker
    """
    return model._loss_tracker


def tracked_metrics(model: Any) -> list[Any]:
    """The metrics that Keras tracks for a model, those that its `metrics` may omit included.

    keras/src/trainers/trainer.py, Trainer._get_own_metrics; keras/src/layers/layer.py,
    Layer._metrics: the metrics among the attributes of a layer
    """
    inner = [metric for layer in layers_in(model)[1:] for metric in layer._metrics]
    return [*model._get_own_metrics(), *inner]


def loss_of(model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any, *, training: bool) -> Any:
    """The loss of a batch, from the model's own `compute_loss`.

    keras/src/trainers/trainer.py, Trainer._compute_loss
    """
    return model._compute_loss(
        x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training
    )


def metric_results(model: Any, logs: dict[str, Any]) -> dict[str, Any]:
    """The logs of an epoch: the metrics, or what a step of the user's returned.

    keras/src/trainers/trainer.py, Trainer._get_metrics_result_or_logs
    """
    results: dict[str, Any] = model._get_metrics_result_or_logs(logs)
    return results


def values_in_order(model: Any, logs: dict[str, Any]) -> Any:
    """The values of logs as `evaluate` returns them without `return_dict`.

    keras/src/trainers/trainer.py, Trainer._flatten_metrics_in_order
    """
    return model._flatten_metrics_in_order(logs)


def validates_after(model: Any, epoch: int, validation_freq: Any) -> bool:
    """Whether `fit` evaluates the model after an epoch.

    keras/src/trainers/trainer.py, Trainer._should_eval
    """
    return bool(model._should_eval(epoch, validation_freq))


def first_epoch_of(model: Any, initial_epoch: int) -> int:
    """The first epoch of `fit`, which `BackupAndRestore` may have moved on.

    keras/src/backend/*/trainer.py, `_initial_epoch`
    """
    return int(model._initial_epoch or initial_epoch)


WITHIN_FIT = "_use_cached_eval_dataset"
"""The argument of `evaluate` with which `fit` asks for the batches it has kept.

keras/src/backend/*/trainer.py
"""


def kept_validation(model: Any) -> Any:
    """The batches for `evaluate` that `fit` keeps for all its epochs, `None` if there are none.

    keras/src/backend/*/trainer.py, `_eval_epoch_iterator`
    """
    return getattr(model, "_eval_epoch_iterator", None)


def keep_validation(model: Any, batches: Any) -> None:
    """Keep the batches for `evaluate`, as `fit` does."""
    model._eval_epoch_iterator = batches


def forget_validation(model: Any) -> None:
    """Drop the batches for `evaluate` at the end of `fit`."""
    vars(model).pop("_eval_epoch_iterator", None)


ATTRIBUTES_OF_RUNS: dict[str, Any] = {
    "train_function": None,
    "test_function": None,
    "predict_function": None,
    "stop_training": False,
    "stop_evaluating": False,
    "stop_predicting": False,
    "history": None,
    "training": True,
    "_called": True,  # a proof of rows calls a copy, and a functional model may not be called yet
    "_eval_epoch_iterator": None,
    "_initial_epoch": None,
    "_compile_config": None,
    "_compiled_trainable_state": {},
    "_losses": [],
    "_loss_ids": set(),
}
"""Attributes of models and layers that change in a run, and what a copy in a worker has for them.

keras/src/trainers/trainer.py, keras/src/backend/*/trainer.py, keras/src/layers/layer.py
"""


def tensorflow_iterator() -> Any:
    """The iterator of `fit` and `evaluate` on TensorFlow, which yields iterators of `tf.data`.

    keras/src/backend/tensorflow/trainer.py, TFEpochIterator
    """
    return importlib.import_module(trainer_module()).TFEpochIterator


STRATEGY = "_distribute_strategy"
"""The attribute of a model, and of a variable of TensorFlow, with its `tf.distribute` strategy."""


def has_strategy(model: Any) -> bool:
    """Whether a TensorFlow model was made in the scope of a `tf.distribute` strategy.

    keras/src/backend/tensorflow/trainer.py, TensorFlowTrainer.__init__
    """
    return getattr(model, STRATEGY) is not None


def function_of_iterator(model: Any, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """TensorFlow's function that runs `step` on `steps_per_execution` batches of an iterator.

    keras/src/backend/tensorflow/trainer.py, TensorFlowTrainer._make_function
    """
    function: Callable[[Any], Any] = model._make_function(step)
    return function


def taking_optionals(model: Any, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A step on TensorFlow that also takes a list of `tf.data` optionals.

    keras/src/backend/tensorflow/trainer.py, TensorFlowTrainer._autoconvert_optionals
    """
    function: Callable[[Any], Any] = model._autoconvert_optionals(step)
    return function


@contextmanager
def without_xla(model: Any) -> Iterator[None]:
    """Turn XLA off for a model inside the context.

    keras/src/trainers/trainer.py, Trainer.jit_compile, whose setter checks more than it sets
    """
    before = model._jit_compile
    model._jit_compile = False
    try:
        yield
    finally:
        model._jit_compile = before


def logits_of(tensor: Any) -> Any:
    """The logits that a TensorFlow tensor of probabilities was computed from, `None` without any.

    keras/src/backend/tensorflow/nn.py, _get_logits
    """
    return getattr(tensor, "_keras_logits", None)


def set_logits(tensor: Any, logits: Any) -> None:
    """Let Keras find the logits of a tensor."""
    tensor._keras_logits = logits


def torch_iterator() -> Any:
    """The iterator of `fit`, `evaluate` and `predict` on PyTorch, over a `DataLoader`.

    keras/src/backend/torch/trainer.py, TorchEpochIterator
    """
    return importlib.import_module(trainer_module()).TorchEpochIterator


def compute_output_spec(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The shapes and types that a call of the model returns.

    keras/src/backend/tensorflow/core.py; from 3.16 on keras/src/backend/tensorflow/ops/core.py.
    """
    return keras.src.backend.compute_output_spec(model, *args, **kwargs)


@contextmanager
def symbolic_calls(hooks: Any) -> Iterator[None]:
    """Replace what Keras does with symbolic tensors inside the context, in all threads.

    keras/src/ops/operation.py, Operation.symbolic_call; keras/src/layers/layer.py,
    Layer.symbolic_call and Layer.__call__, which makes a `Node`. Keras's own layers take
    functions from `keras.src.ops` and `keras.src.random`, other code from the public modules.

    Args:
        hooks: Makes the replacement of each function. See `lockstep.engines.rowwise`.
    """
    ops, draws = (keras.ops, keras.src.ops), (keras.random, keras.src.random)
    changes = [
        (keras.Operation, "symbolic_call", hooks.operation),
        (keras.layers.Layer, "symbolic_call", hooks.layer),
        (keras.layers.Layer, "__call__", hooks.layer_call),
        (keras.random.SeedGenerator, "next", hooks.next_seed),
        (_layer_module, "Node", hooks.node),
        *((module, "shape", hooks.shape) for module in ops),
        *((module, "full", hooks.full) for module in ops),
        *((module, "broadcast_to", hooks.broadcast_to) for module in ops),
        *((module, "repeat", hooks.repeat) for module in ops),
        *((module, "tile", hooks.tile) for module in ops),
        *((module, name, hooks.filled) for module in ops for name in ("ones", "zeros")),
        *((m, name, functools.partial(hooks.drawn, name)) for m in draws for name in hooks.random),
    ]
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in changes]
    try:
        for (owner, name, make), (_, _, plain) in zip(changes, before, strict=True):
            setattr(owner, name, make(plain))
        yield
    finally:
        for owner, name, plain in before:
            setattr(owner, name, plain)


_DRAWS_BY_SHAPE = ("normal", "randint", "truncated_normal", "uniform")


@contextmanager
def same_draws_for_all_rows() -> Iterator[None]:
    """Let Keras draw the same random numbers for every row of a batch inside the context.

    They do not depend on a seed, but seeds advance. So the rows of several devices have the
    numbers of one device.

    keras/src/backend/*/random.py, from 3.16 on ops/random.py
    """
    module = keras.src.backend.random
    draw_seed = keras.src.random.seed_generator.draw_seed
    before = {name: vars(module)[name] for name in (*_DRAWS_BY_SHAPE, "dropout")}

    def by_shape(plain: Any) -> Any:
        @functools.wraps(plain)
        def draw(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(plain).bind(*args, **kwargs).arguments
            draw_seed(given.get("seed"))
            shape = given["shape"]
            shape = list(keras.ops.unstack(shape) if hasattr(shape, "dtype") else shape)
            one = plain(**{**given, "shape": (1, *shape[1:]), "seed": _ANY_SEED})
            return keras.ops.copy(keras.ops.broadcast_to(one, shape)) if shape else one[0]

        return draw

    @functools.wraps(before["dropout"])
    def dropout(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
        draw_seed(seed)
        one = keras.ops.ones_like(inputs[:1]) if len(inputs.shape) else keras.ops.ones_like(inputs)
        if noise_shape is not None:
            noise_shape = (1, *noise_shape[1:])
        return inputs * before["dropout"](one, rate, noise_shape=noise_shape, seed=_ANY_SEED)

    try:
        for name in _DRAWS_BY_SHAPE:
            setattr(module, name, by_shape(before[name]))
        module.dropout = dropout
        yield
    finally:
        for name, plain in before.items():
            setattr(module, name, plain)


_ANY_SEED = 1


def wrapped_by_keras(model: Any) -> bool:
    """Whether Keras trains the model on PyTorch in a `DistributedDataParallel` of its own.

    keras/src/backend/torch/trainer.py, Trainer._initialize_ddp, from 3.16 on
    """
    return getattr(model, "ddp_model", None) is not None


def torch_default_device() -> str:
    """The kind of device that Keras has chosen for PyTorch, `"cpu"` or `"cuda"` for example.

    keras/src/backend/torch/core.py, from 3.16 on ops/core.py
    """
    return str(_torch_core().DEFAULT_DEVICE)


def device_scope(name: str) -> AbstractContextManager[Any]:
    """Let Keras make its tensors on a device inside the context.

    keras/src/backend/torch/core.py, Variable._initialize: PyTorch has one CPU device, and for
    `"cpu:0"` Keras would make a copy of a new weight, which gets no gradient.
    """
    one_cpu = keras.backend.backend() == "torch" and name.startswith("cpu:")
    scope: AbstractContextManager[Any] = keras.device("cpu" if one_cpu else name)
    return scope


def torch_current_device() -> str:
    """The device on which Keras makes its PyTorch tensors now, `"meta"` while it learns shapes.

    keras/src/backend/torch/core.py, get_device, from 3.16 on ops/core.py
    """
    return str(_torch_core().get_device())


def _torch_core() -> Any:
    from keras.src.backend import torch

    return torch.core if hasattr(torch, "core") else torch.ops.core


def tracked_collections() -> tuple[type, ...]:
    """The lists, dicts, ordered dicts and sets that Keras makes of attributes.

    keras/src/utils/tracking.py
    """
    from keras.src.utils import tracking

    names = ("TrackedList", "TrackedDict", "TrackedOrderedDict", "TrackedSet")
    return tuple(getattr(tracking, name) for name in names)


def as_functional(owner: type) -> type:
    """A class of the user's whose instances are functional models, as Keras makes it.

    keras/src/models/model.py, Model.__new__: the first functional instance puts `Functional` into
    the bases of its class. A process that imports the class anew has made none.
    """
    if not issubclass(owner, Functional):
        _inject_functional(owner)
    return owner


LOOKUP_TABLES = ("lookup_table", "token_counts", "token_document_counts")
"""The attributes of an `IndexLookup` that are tables of TensorFlow.

keras/src/layers/preprocessing/index_lookup.py; `TextVectorization` has such a layer inside.
"""


def is_built(model: Any) -> bool:
    """Whether the model and every layer in it has its variables.

    keras/src/layers/layer.py, Layer._flatten_layers
    """
    return all(layer.built for layer in layers_in(model))


# ---------------------------------------------------------------- the state of a loop on JAX

JAX_STATE = "_jax_state"
"""The attribute of a model with the values of its variables between two steps."""
JAX_STATE_SYNCED = "_jax_state_synced"
"""The attribute that says whether the variables have these values."""
TAKE_JAX_STATE = "_get_jax_state"
"""The name of the method behind `take_jax_state`.

keras/src/backend/jax/trainer.py, JAXTrainer: a loop takes the values out of the variables and
empties these. `jax_state_sync`, which a callback's `self.model` calls, writes them back.
"""


def take_jax_state(owner: Any, *model: Any, **groups: bool) -> tuple[Any, ...]:
    """The values of groups of variables.

    keras/src/backend/jax/trainer.py, JAXTrainer._get_jax_state

    Args:
        owner: The model, or the trainer class, whose method is called.
        model: The model, if `owner` is a class.
        groups: The groups of variables, such as `trainable_variables=True`.
    """
    state: tuple[Any, ...] = owner._get_jax_state(*model, **groups)
    return state


def empty_variables(model: Any, **groups: bool) -> None:
    """Take the values out of groups of variables, so that a step may donate them.

    keras/src/backend/jax/trainer.py, JAXTrainer._purge_model_variables
    """
    model._purge_model_variables(**groups)


# ---------------------------------------------------------------- double precision

_LOWERED = "float64"
"""The type that Keras lowers to float32 in results of several types, on JAX and PyTorch.

keras/src/backend/common/dtypes.py, BIT64_TO_BIT32_DTYPE, which `result_type` reads.
"""


def compute_in_float64(*, whatever_is_asked: bool = False) -> None:
    """Make Keras compute in float64 in this process, from now on.

    Keras and JAX cache types, so the process cannot go back. Models that exist keep their types.

    Args:
        whatever_is_asked: Whether the names of shorter floats mean float64 as well, in policies
            such as mixed_bfloat16 and in `keras.ops.cast(x, "float32")`.
    """
    keras.config.set_floatx("float64")
    if whatever_is_asked and not names_mean_float64():
        # keras/src/backend/common/variables.py, standardize_dtype: the table has names, and types
        # of Python. The type of an array is another key, and stays what it is.
        short = dict.fromkeys((float, "float16", "bfloat16", "float32"), "float64")
        _table_of_names().update(short)
        # keras/src/dtype_policies/dtype_policy.py
        keras.DTypePolicy._parse_name = _widened(keras.DTypePolicy._parse_name)
    _table_of_types()[_LOWERED] = "float64"
    if keras.backend.backend() == "jax":
        importlib.import_module("jax").config.update("jax_enable_x64", True)
        # jax.nn.dot_product_attention computes the logits in float32 whatever it is given.
        keras.src.backend.nn.dot_product_attention = _attention


def _widened(parse: Callable[..., tuple[str, str]]) -> Callable[..., tuple[str, str]]:
    @functools.wraps(parse)
    def parsed(self: Any, name: str) -> Any:
        return tuple("float64" if "float" in each else each for each in parse(self, name))

    return parsed


def names_mean_float64() -> bool:
    """Whether the names of shorter floats mean float64 in this process."""
    return bool(_table_of_names()[float] == "float64")


def computes_in_float64() -> bool:
    """Whether `compute_in_float64` was called, or this backend needs no call."""
    return bool(_table_of_types()[_LOWERED] == "float64")


def layers_not_in_float64(model: Any) -> list[Any]:
    """The layers of a model, itself included, that compute in another type."""
    return [layer for layer in layers_in(model) if layer.compute_dtype != "float64"]


def _table_of_names() -> Any:
    from keras.src.backend.common import dtypes

    return dtypes.PYTHON_DTYPES_MAP


def _table_of_types() -> Any:
    from keras.src.backend.common import dtypes

    return dtypes.BIT64_TO_BIT32_DTYPE


def _attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
    flash_attention: bool | None = None,
    attn_logits_soft_cap: float | None = None,
) -> Any:
    """Attention in the type of its inputs; see keras/src/backend/jax/nn.py."""
    ops = keras.ops
    logits = ops.einsum("btnh,bsnh->bnts", query, key)
    logits = logits * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        logits = logits + ops.cast(bias, logits.dtype)
    if attn_logits_soft_cap is not None:
        logits = attn_logits_soft_cap * ops.tanh(logits / attn_logits_soft_cap)
    rows, columns = logits.shape[-2:]
    seen = ops.tri(rows, columns, dtype="bool") if is_causal else True
    if mask is not None:
        seen = ops.logical_and(seen, mask)
    logits = ops.where(seen, logits, -1e30)
    return ops.einsum("bnts,bsnh->btnh", ops.softmax(logits, axis=-1), value)


# ---------------------------------------------------------------- what a layer has


def layers_in(part: Any) -> list[Any]:
    """A layer and the layers inside it, each once; none for an operation that is not a layer.

    keras/src/layers/layer.py, Layer._flatten_layers
    """
    return list(part._flatten_layers()) if isinstance(part, keras.layers.Layer) else []


def layers_of(layer: Any) -> list[Any]:
    """The layers among the attributes of a layer.

    keras/src/layers/layer.py, Layer._layers
    """
    return list(layer._layers)


def seed_generators(layer: Any) -> list[Any]:
    """The list of the seed generators among the attributes of a layer; a change to it counts.

    keras/src/layers/layer.py, Layer._seed_generators, which `Layer.variables` reads
    """
    found: list[Any] = layer._seed_generators
    return found


def own_trainable_variables(owner: Any) -> list[Any]:
    """The variables that a layer made with `trainable=True`, or that an optimizer updates.

    keras/src/layers/layer.py, Layer._trainable_variables; keras/src/optimizers/base_optimizer.py
    """
    return list(owner._trainable_variables)


def takes_training(layer: Any) -> bool:
    """Whether the `call` of a layer has the argument `training`.

    keras/src/layers/layer.py, Layer._call_has_training_arg
    """
    return bool(layer._call_has_training_arg)


def is_rematerialized(layer: Any) -> bool:
    """Whether the layer was made in a `RematScope`, and is computed again in the backward pass.

    keras/src/ops/operation.py, Operation._remat_mode
    """
    return layer._remat_mode is not None


def reduction_axes(norm: Any) -> Any:
    """The axes over which a batch norm takes its mean.

    keras/src/layers/normalization/batch_normalization.py, BatchNormalization.build
    """
    return norm._reduction_axes


MOMENTS = "_moments"
"""The method of `BatchNormalization` that takes mean and variance of a batch."""


def added_losses(layer: Any) -> list[Any]:
    """The losses that a layer has added in its last call.

    keras/src/layers/layer.py, Layer.add_loss
    """
    return list(layer._losses)


def change_added_losses(layer: Any, losses: list[Any]) -> None:
    """Replace the losses that a layer has added in its last call."""
    layer._losses[:] = losses


def clear_losses(layer: Any) -> None:
    """Drop the losses that a layer and those inside it have added.

    keras/src/layers/layer.py, Layer._clear_losses
    """
    layer._clear_losses()


def losses_with_ids(layer: Any) -> tuple[list[Any], set[int]]:
    """The losses that a layer has added, and the ids by which it drops them at its next call.

    keras/src/layers/layer.py, Layer.add_loss and Layer._clear_losses
    """
    return list(layer._losses), set(layer._loss_ids)


def put_losses_with_ids(layer: Any, losses: list[Any], ids: set[int]) -> None:
    """Undo what a layer has added since `losses_with_ids`."""
    layer._losses[:] = losses
    layer._loss_ids.clear()
    layer._loss_ids.update(ids)


def forget_loss_ids(layer: Any) -> None:
    """Let a layer drop no loss of another layer that has an id of an earlier trace."""
    layer._loss_ids.clear()


def renew_tracker(layer: Any) -> None:
    """Let a copy of a layer find the items of its lists, which have other identities.

    keras/src/utils/tracking.py, Tracker.stored_ids
    """
    tracker = layer._tracker
    tracker.stored_ids = {
        name: {id(item) for item in items} for name, (_, items) in tracker.config.items()
    }


# ---------------------------------------------------------------- what a variable has


def stored_value(variable: Any) -> Any:
    """The tensor of a variable, `None` before it has one.

    It is an array on JAX, a variable on TensorFlow, and a parameter on PyTorch.

    keras/src/backend/common/variables.py, Variable._value: `value` checks scopes and casts.
    """
    return variable._value


def store_value(variable: Any, value: Any) -> None:
    """Replace the tensor of a variable without converting it."""
    variable._value = value


def stores_as_it_is(variable: Any, shape: tuple[int, ...], dtype: str) -> bool:
    """Whether `assign` on JAX would store an array of this shape and type as it is.

    keras/src/backend/common/variables.py, Variable.assign; keras/src/backend/jax/core.py,
    JaxVariable._direct_assign
    """
    plain = type(variable) is keras.Variable and variable._layout is None
    return plain and shape == variable._shape and dtype == variable._dtype


def layout_of(variable: Any) -> Any:
    """The layout that a `keras.distribution` gave to a variable on JAX, `None` without one.

    keras/src/backend/jax/core.py, JaxVariable._initialize_layout
    """
    return variable._layout


DTYPES = ("dtype", "_dtype")
"""The attributes of variables and symbolic tensors with their type, as text.

keras/src/backend/common/variables.py, keras/src/backend/common/keras_tensor.py
"""


# ---------------------------------------------------------------- what an optimizer does

ADD_SLOT = "add_variable_from_reference"
CLIP, DECAY = "_clip_gradients", "_apply_weight_decay"
ACCUMULATE = "_backend_increment_gradient_accumulators"
UPDATE_ALL, UPDATE_ONE = "_backend_update_step", "update_step"
"""Methods in keras/src/optimizers/base_optimizer.py, BaseOptimizer."""


def variable_key(kind: type, variable: Any) -> Any:
    """The key of a variable in the dicts of an optimizer of this class.

    keras/src/optimizers/base_optimizer.py, BaseOptimizer._var_key
    """
    return kind._var_key(None, variable)  # type: ignore[attr-defined]


def counted_steps(optimizer: Any) -> int:
    """The steps of an optimizer, those included that only accumulate gradients.

    keras/src/optimizers/base_optimizer.py, BaseOptimizer._iterations: `iterations` counts updates.
    """
    return int(optimizer._iterations.value)


def updates_all_at_once(optimizer: Any) -> bool:
    """Whether an optimizer on PyTorch updates all variables by one operation over lists.

    keras/src/backend/torch/optimizers/torch_parallel_optimizer.py
    """
    return hasattr(optimizer, "_parallel_update_step")


def decays(optimizer: Any, variable: Any) -> bool:
    """Whether an optimizer applies its weight decay to a variable.

    keras/src/optimizers/base_optimizer.py, BaseOptimizer._use_weight_decay
    """
    return bool(optimizer._use_weight_decay(variable))


# ---------------------------------------------------------------- what a callback does

STATE_OF_CALLBACKS: dict[str, tuple[str, ...]] = {
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_weights", "best_epoch"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "ModelCheckpoint": (
        "best",
        "_current_epoch",
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
    ),
    # Whether the weights and their averages are swapped, as they are between two epochs.
    "SwapEMAWeights": ("_ema_weights_in_model",),
    "TensorBoard": ("_global_train_batch", "_global_test_batch", "_previous_epoch_iterations"),
    "CSVLogger": ("keys",),
    "History": ("history", "epoch"),
}
"""The attributes that Keras's callbacks change during a run. keras/src/callbacks/*.py"""


def set_monitor_op(callback: Any) -> None:
    """Let a callback find out whether less or more of what it monitors is better.

    keras/src/callbacks/monitor_callback.py, MonitorCallback._set_monitor_op

    Raises:
        ValueError: If the mode is `"auto"` and no metric says it.
    """
    callback._set_monitor_op()


def is_bar_of_evaluation(bar: Any) -> bool:
    """Whether this `ProgbarLogger` shows an evaluation, and none within `fit`.

    keras/src/callbacks/progbar_logger.py, ProgbarLogger._called_in_fit
    """
    return not bar._called_in_fit


def counted_without_drawing(bar: Any, batch: int) -> bool:
    """Count a batch for a `ProgbarLogger` that would not draw now.

    keras/src/callbacks/progbar_logger.py, ProgbarLogger._update_progbar, and
    keras/src/utils/progbar.py, Progbar.update: the first call starts its clock.

    Returns:
        Whether the batch was counted. Where it was not, the bar has to be called.
    """
    picture = bar.progbar
    if bar.verbose != 1 or picture is None or not picture._seen_so_far:
        return False
    if time.time() - picture._last_update >= picture.interval:
        return False
    bar.seen = picture._seen_so_far = batch + 1
    return True


# ---------------------------------------------------------------- what a loss or a metric has


def options_of(wrapper: Any) -> dict[str, Any]:
    """The keyword arguments with which a loss or a metric calls its function.

    keras/src/metrics/reduction_metrics.py, MeanMetricWrapper; keras/src/losses/losses.py
    """
    found: dict[str, Any] = getattr(wrapper, "_fn_kwargs", {})
    return found


METRIC_FUNCTION = "_fn"
"""The attribute of a `MeanMetricWrapper` with its function."""


# ---------------------------------------------------------------- what an adapter does


def inputs_of(adapter: Any) -> Any:
    """The arrays of an `ArrayDataAdapter`.

    keras/src/trainers/data_adapters/array_data_adapter.py, ArrayDataAdapter.__init__
    """
    return adapter._inputs


def number_of_rows(adapter: Any) -> Any:
    """The rows of an `ArrayDataAdapter`; `None` for other data."""
    return getattr(adapter, "_num_samples", None)


def batch_size_of(adapter: Any) -> int:
    """The rows of a batch of an `ArrayDataAdapter`."""
    return int(adapter._batch_size)


def shuffle_of(adapter: Any) -> Any:
    """How an `ArrayDataAdapter` shuffles: `True`, `False` or `"batch"`."""
    return adapter._shuffle


def loader_of(adapter: Any) -> Any:
    """The `DataLoader` of a `TorchDataLoaderAdapter`.

    keras/src/trainers/data_adapters/torch_data_loader_adapter.py
    """
    return adapter._dataloader


def standardized(adapter: Any, batch: Any) -> Any:
    """A batch of a `PyDataset` in the structure of `fit`, with its class weights.

    keras/src/trainers/data_adapters/py_dataset_adapter.py, PyDatasetAdapter._standardize_batch
    """
    return adapter._standardize_batch(batch)


def row_indices(adapter: Any) -> Any:
    """The rows of each batch of one pass over arrays, in the order that Keras would take.

    keras/src/trainers/data_adapters/array_data_adapter.py, ArrayDataAdapter._get_iterator,
    which draws when the first is asked for.

    Returns:
        An iterator of slices, or of arrays of row numbers.
    """
    return adapter._get_iterator(lambda _, indices: indices, inputs=0)


def epoch_of(adapter: Any) -> int | None:
    """What the adapter seeds its shuffle with; `None` where it draws from the process.

    `_epoch` of keras/src/trainers/data_adapters/*.py, from 3.16 on.
    """
    return getattr(adapter, "_epoch", None)


def set_epoch(adapter: Any, epoch: int) -> None:
    """Let the adapter shuffle as in this epoch."""
    adapter._epoch = epoch


@contextmanager
def serialized_objects_kept() -> Iterator[None]:
    """Let Keras load a `.keras` file without mistaking one layer for another.

    `Bidirectional` serializes its layer while a file is loaded. Keras identifies the layer by
    its `id`, and another layer gets the same `id` once the first one is freed. This context
    keeps every serialized object until the load ends. Source: `ObjectSharingScope` in
    keras/src/saving/serialization_lib.py.
    """
    kept: list[Any] = []
    record = _serialization_lib.record_object_after_serialization

    def keep_and_record(obj: Any, config: dict[str, Any]) -> None:
        kept.append(obj)
        record(obj, config)

    _serialization_lib.record_object_after_serialization = keep_and_record
    try:
        yield
    finally:
        _serialization_lib.record_object_after_serialization = record


@contextmanager
def values_replaced(variables: list[Any], values: list[Any]) -> Iterator[list[tuple[Any, Any]]]:
    """Give variables other values inside the context.

    keras/src/backend/common/variables.py, Variable._value

    Yields:
        A list. After the context it has each variable that was assigned to, with its value.
    """
    before = [variable._value for variable in variables]
    changed: list[tuple[Any, Any]] = []
    try:
        for variable, value in zip(variables, values, strict=True):
            variable._value = value
        yield changed
    finally:
        for variable, value, own in zip(variables, values, before, strict=True):
            if variable._value is not value:
                changed.append((variable, variable._value))
            variable._value = own


# ---------------------------------------------------------------- the graph of a functional model


RUN_GRAPH = "_run_through_graph"
"""The method that runs a functional graph. keras/src/ops/function.py, Function"""


def operations_of(container: Any) -> list[Any]:
    """The layers and other operations that a container calls.

    keras/src/ops/function.py, Function._operations
    """
    functional = getattr(container, "_functional", None) or container
    operations = getattr(functional, "_operations", None)
    return list(container.layers if operations is None else operations)


def calls_of(operation: Any) -> list[Any]:
    """The nodes of all symbolic calls of an operation.

    keras/src/ops/operation.py, Operation._inbound_nodes; keras/src/ops/node.py, Node
    """
    return list(operation._inbound_nodes)


def node_of(tensor: Any) -> Any:
    """The node of the call that made a symbolic tensor, `None` for other tensors.

    keras/src/ops/node.py, KerasHistory
    """
    history = getattr(tensor, "_keras_history", None)
    return None if history is None else history.operation._inbound_nodes[history.node_index]


def functional_of(layer: Any) -> Any:
    """The functional graph that a model runs, `None` where it has none.

    keras/src/models/sequential.py: a `Sequential` that is built has one in `_functional`.
    """
    return layer if isinstance(layer, Functional) else getattr(layer, "_functional", None)


def nodes_of(function: Any) -> list[Any]:
    """The calls of a functional graph, in the order in which Keras runs them.

    keras/src/ops/function.py, Function._run_through_graph
    """
    by_depth = function._nodes_by_depth
    every = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
    return [node for node in every if node.operation and not node.is_input]


def sublayers_of(layer: Any) -> list[Any]:
    """The layers that a layer holds itself, in order, without those inside them.

    keras/src/layers/layer.py, Layer._flatten_layers. The graph of a `Sequential` holds its layers
    once more.
    """
    inner = layer._flatten_layers(recursive=False, include_self=False)
    own = getattr(layer, "_functional", None)
    return [each for each in inner if each is not own]


def run_graph(
    function: Any, around: Callable[[Any], Any], inputs: Any, operation_fn: Any, call_fn: Any
) -> Any:
    """Run a functional graph, with each call inside a context of its own.

    keras/src/ops/function.py, Function._run_through_graph, which does the same without contexts.

    Args:
        function: The functional model.
        around: Makes the context of a call from its node.
        inputs: The inputs of the model.
        operation_fn: Makes the function to call from an operation.
        call_fn: Calls that function; `None` to call it directly.
    """
    known = dict(zip(map(id, function.inputs), keras.tree.flatten(inputs), strict=False))
    for node in nodes_of(function):
        if any(id(x) not in known for x in node.input_tensors):
            continue
        args, kwargs = node.arguments.fill_in(known)
        call = operation_fn(node.operation)
        with around(node):
            outputs = call(*args, **kwargs) if call_fn is None else call_fn(call, *args, **kwargs)
        known.update(zip(map(id, node.outputs), keras.tree.flatten(outputs), strict=False))
    # Keras refuses a graph that is not connected when it makes the model.
    return keras.tree.pack_sequence_as(
        function._outputs_struct, [known[id(x)] for x in function.outputs]
    )


def _is_in_sequential() -> bool:
    """Whether a `Sequential` makes its functional graph now.

    keras/src/models/sequential.py, Sequential.build
    """
    build = keras.Sequential.build.__code__
    return any(frame.f_code is build for frame, _ in traceback.walk_stack(None))


@contextmanager
def nodes_reported(report: Callable[[Any], None]) -> Iterator[None]:
    """Call `report` with each node of a functional graph that is made inside the context.

    keras/src/ops/node.py, Node, which a call on symbolic tensors makes. The nodes of the graph that
    a `Sequential` makes of itself are left out (keras/src/models/sequential.py, Sequential.build).
    """
    make = _Node.__init__

    @functools.wraps(make)
    def make_and_report(node: Any, *args: Any, **kwargs: Any) -> None:
        make(node, *args, **kwargs)
        if not _is_in_sequential():
            report(node)

    _Node.__init__ = make_and_report
    try:
        yield
    finally:
        _Node.__init__ = make


_REPORTS = "_lockstep_reports"


def report_functional_models(report: Callable[[Any], None]) -> None:
    """Call `report` with each functional model that is made from now on.

    keras/src/models/functional.py, Functional.__init__. A second call changes nothing.
    """
    make = Functional.__init__
    if hasattr(make, _REPORTS):
        return

    @functools.wraps(make)
    def make_and_report(model: Any, *args: Any, **kwargs: Any) -> None:
        make(model, *args, **kwargs)
        if not _is_in_sequential():
            report(model)

    setattr(make_and_report, _REPORTS, True)
    # Keras compares the arguments of constructors when it loads a model.
    vars(make_and_report)["__signature__"] = inspect.signature(make)
    Functional.__init__ = make_and_report
