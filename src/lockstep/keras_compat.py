# mypy: implicit-reexport
# ruff: noqa: F401
"""Every private name of Keras that lockstep uses, and no other module names one.

A private name stands in one row. The row has its place in Keras: an import, or the class
or module that has the name. The row checks the name when this module is imported, and gives
what reads, writes or calls it. All of them were checked against Keras 3.15.1 and Keras 3.16
(keras-nightly 3.16.0.dev2026102704). Public names come from `keras` itself, in the module
that needs them.

An engine imports this module, and the import fails in words where the installed
Keras is another one. Only `keras` is imported here; what another backend has is not
checked, as that backend may not be installed.

Raises:
    UnsupportedKeras: If this Keras is too old, too new, or lacks a name.
"""

import functools
import importlib
import inspect
import math
import operator
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType, FunctionType
from typing import Any

import keras

from lockstep.errors import UnsupportedKeras
from lockstep.foreign_patches import replaced

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
    from keras.src.backend import compute_output_spec
    from keras.src.backend.common import dtypes as _dtypes
    from keras.src.backend.common import global_state
    from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
    from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope
    from keras.src.backend.common.variables import Variable as _Variable
    from keras.src.backend.config import is_nnx_enabled
    from keras.src.layers import layer as _layer_module
    from keras.src.layers.preprocessing.index_lookup import IndexLookup
    from keras.src.losses.losses import LossFunctionWrapper
    from keras.src.models.functional import Functional
    from keras.src.models.model import inject_functional_model_class as _inject_functional
    from keras.src.ops.function import Function as _Function
    from keras.src.ops.node import Node as _Node
    from keras.src.optimizers.base_optimizer import BaseOptimizer as _BaseOptimizer
    from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator
    from keras.src.saving import serialization_lib as _serialization_lib
    from keras.src.saving.keras_saveable import KerasSaveable
    from keras.src.trainers.compile_utils import CompileLoss as _CompileLoss
    from keras.src.trainers.data_adapters import data_adapter_utils as _data_adapter_utils
    from keras.src.trainers.data_adapters import get_data_adapter
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
    from keras.src.trainers.data_adapters.array_slicing import (
        NumpySliceable,
        convert_to_sliceable,
        train_validation_split,
    )
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter
    from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights
    from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
    from keras.src.trainers.data_adapters.grain_dataset_adapter import GrainDatasetAdapter
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
    from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
    from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter
    from keras.src.trainers.epoch_iterator import EpochIterator
    from keras.src.utils import io_utils
    from keras.src.utils import tracking as _tracking
    from keras.src.utils.backend_utils import DynamicBackend
    from keras.src.utils.python_utils import is_default
    from keras.src.utils.python_utils import pythonify_logs as _pythonify_logs
    from keras.src.utils.traceback_utils import filter_traceback
except ImportError as error:
    raise _missing(_name_in(error)) from error


# ---------------------------------------------------------------- the rows of the table


@functools.cache
def _names_in(owner: type) -> set[str]:
    """The names of attributes in the code of the methods of a class."""
    members = (getattr(member, "fget", None) or member for member in vars(owner).values())
    functions = [inspect.unwrap(member) for member in members if callable(member)]
    return {name for f in functions if inspect.isfunction(f) for name in f.__code__.co_names}


def _named(owner: Any, *names: str) -> str:
    """Names that a class or module of Keras has: lockstep calls, overrides or replaces them.

    An override of a name that Keras no longer calls would change nothing, and say nothing.
    The owner is `None` where another backend or version of Keras has the name.

    Returns:
        The first name.
    """
    for name in names:
        if owner is not None and not hasattr(owner, name):
            raise _missing(f"{owner.__name__}.{name}")
    return names[0]


def _held(owner: Any, *names: str) -> str:
    """Names of attributes of instances, by the class whose code names them; as `_named`."""
    for name in names:
        if owner is not None and name not in _names_in(owner):
            raise _missing(f"{owner.__name__}.{name}")
    return names[0]


def _call(owner: Any, name: str) -> Callable[..., Any]:
    """What calls a private method: of its first argument, with the others."""
    _named(owner, name)

    def call(item: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(item, name)(*args, **kwargs)

    return call


def _read(owner: Any, name: str, *absent: Any, to: Any = None) -> Callable[[Any], Any]:
    """What reads a private attribute of an instance.

    Args:
        owner: The class whose code names it, or `None`.
        name: The name.
        absent: The value of an instance without the attribute. Left out, that is an error.
        to: Called with the value; its result is what the reader returns.
    """
    _held(owner, name)
    if to is None and not absent:
        return operator.attrgetter(name)
    to = to or (lambda value: value)
    return lambda item: to(getattr(item, name, *absent))


def _read_and_write(
    owner: Any, name: str, *absent: Any
) -> tuple[Callable[[Any], Any], Callable[[Any, Any], None]]:
    """What reads a private attribute of an instance, as `_read`, and what writes it."""
    return _read(owner, name, *absent), lambda item, value: setattr(item, name, value)


def _is_given(value: Any) -> bool:
    return value is not None


# ---------------------------------------------------------------- classes and their parts


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


# ---------------------------------------------------------------- what a trainer does
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

_named(EpochIterator, "_enumerate_iterator", "catch_stop_iteration", "reset")
_held(EpochIterator, "_current_iterator", "_epoch_iterator", "_num_batches", "_steps_seen")


def state_sync_name() -> str:
    """The method that a callback's `self.model` calls for weights that are up to date.

    keras/src/callbacks/callback.py, Callback.model: `jax_state_sync` up to 3.15; from 3.16
    on `state_sync`, which `jax_state_sync` calls.
    """
    return "state_sync" if hasattr(trainer_class(), "state_sync") else "jax_state_sync"


def build_on_first_batch(model: Any, batches: EpochIterator) -> None:
    """Build what of the model is not built yet, as `fit` and `evaluate` do.

    Up to 3.15 an epoch begins, which gives the batch; from 3.16 on a pass over the data gives it.
    """
    if not hasattr(model, _BUILD_IF_NEEDED):
        getattr(model, BUILD)(iterator=batches)
    elif any(_unbuilt_parts(model)):
        batch = next(iter(_next_batches(batches)), None)
        # Without a batch Keras refuses the data, in words of its own.
        getattr(model, _BUILD_IF_NEEDED)(iterator=batches, data_batch=batch)


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


def tracked_metrics(model: Any) -> list[Any]:
    """The metrics that Keras tracks for a model, those that its `metrics` may omit included."""
    inner = [metric for layer in layers_in(model)[1:] for metric in _metrics(layer)]
    return [*_own_metrics(model), *inner]


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


# ---------------------------------------------------------------- symbolic calls and draws

_named(keras.Operation, "symbolic_call")
_named(keras.layers.Layer, "symbolic_call")
_named(keras.random.SeedGenerator, "next")
_named(_layer_module, "Node")
_named(global_state, "GLOBAL_STATE_TRACKER", "get_global_attribute", "set_global_attribute")

_OPS_BY_SHAPE = ("shape", "full", "broadcast_to", "repeat", "tile")


@contextmanager
def symbolic_calls(hooks: Any) -> Iterator[None]:
    """Replace what Keras does with symbolic tensors inside the context, in all threads.

    keras/src/ops/operation.py, Operation.symbolic_call; keras/src/layers/layer.py,
    Layer.symbolic_call and Layer.__call__, which makes a `Node`. Keras's own layers take
    functions from `keras.src.ops` and `keras.src.random`, other code from the public modules.

    Args:
        hooks: Makes the replacement of each function. See `lockstep.engines.rowwise.follower`.
    """
    ops, draws = (keras.ops, keras.src.ops), (keras.random, keras.src.random)
    changes = [
        (keras.Operation, "symbolic_call", hooks.operation),
        (keras.layers.Layer, "symbolic_call", hooks.layer),
        (keras.layers.Layer, "__call__", hooks.layer_call),
        (keras.random.SeedGenerator, "next", hooks.next_seed),
        (_layer_module, "Node", hooks.node),
        *((module, name, getattr(hooks, name)) for module in ops for name in _OPS_BY_SHAPE),
        *((module, name, hooks.filled) for module in ops for name in ("ones", "zeros")),
        *((m, name, functools.partial(hooks.drawn, name)) for m in draws for name in hooks.random),
    ]
    if keras.backend.backend() == "torch":  # elsewhere it is no class
        changes.append((keras.src.backend.core.custom_gradient, "__call__", hooks.custom_gradient))
    with replaced([(owner, name, make(vars(owner)[name])) for owner, name, make in changes]):
        yield


_DRAWS_BY_SHAPE = ("normal", "randint", "truncated_normal", "uniform")
_ANY_SEED = 1


@contextmanager
def same_draws_for_all_rows() -> Iterator[None]:
    """Let Keras draw the same random numbers for every row of a batch inside the context.

    They do not depend on a seed, but seeds advance. So the rows of several devices have the
    numbers of one device.

    keras/src/backend/*/random.py, from 3.16 on ops/random.py
    """
    module = keras.src.backend.random
    draw_seed = keras.src.random.seed_generator.draw_seed
    plain_dropout = module.dropout

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

    @functools.wraps(plain_dropout)
    def dropout(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
        draw_seed(seed)
        one = keras.ops.ones_like(inputs[:1]) if len(inputs.shape) else keras.ops.ones_like(inputs)
        if noise_shape is not None:
            noise_shape = (1, *noise_shape[1:])
        return inputs * plain_dropout(one, rate, noise_shape=noise_shape, seed=_ANY_SEED)

    changes = [(module, name, by_shape(vars(module)[name])) for name in _DRAWS_BY_SHAPE]
    with replaced([*changes, (module, "dropout", dropout)]):
        yield


@contextmanager
def keys_replaced(replacement: Callable[[Any], Any]) -> Iterator[None]:
    """Let Keras draw on JAX with other keys inside the context.

    keras/src/backend/jax/random.py, from 3.16 on keras/src/backend/jax/ops/random.py:
    every random operation takes its key from `jax_draw_seed`.

    Args:
        replacement: Returns the key to draw with, from the one that Keras has.
    """
    module = sys.modules[keras.src.backend.random.normal.__module__]
    plain = vars(module)[_JAX_DRAW_SEED]

    def draw_seed(seed: Any) -> Any:
        return replacement(plain(seed))

    with replaced([(module, _JAX_DRAW_SEED, draw_seed)]):
        yield


_JAX_DRAW_SEED = "jax_draw_seed"


# ---------------------------------------------------------------- devices and classes


def torch_default_device() -> str:
    """The kind of device that Keras has chosen for PyTorch, `"cpu"` or `"cuda"` for example."""
    return str(_torch_core().DEFAULT_DEVICE)


def torch_current_device() -> str:
    """The device on which Keras makes its PyTorch tensors now, `"meta"` while it learns shapes."""
    return str(_torch_core().get_device())


def _torch_core() -> Any:
    """keras/src/backend/torch/core.py, from 3.16 on ops/core.py."""
    from keras.src.backend import torch

    return torch.core if hasattr(torch, "core") else torch.ops.core


def device_scope(name: str) -> AbstractContextManager[Any]:
    """Let Keras make its tensors on a device inside the context.

    keras/src/backend/torch/core.py, Variable._initialize: PyTorch has one CPU device, and for
    `"cpu:0"` Keras would make a copy of a new weight, which gets no gradient.
    """
    one_cpu = keras.backend.backend() == "torch" and name.startswith("cpu:")
    scope: AbstractContextManager[Any] = keras.device("cpu" if one_cpu else name)
    return scope


def tracked_collections() -> tuple[type, ...]:
    """The lists, dicts, ordered dicts and sets that Keras makes of attributes."""
    names = ("TrackedList", "TrackedDict", "TrackedOrderedDict", "TrackedSet")
    return tuple(getattr(_tracking, name) for name in names)


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

`TextVectorization` has such a layer inside.
"""


# ---------------------------------------------------------------- the state of a loop on JAX
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


# ---------------------------------------------------------------- double precision

_LOWERED = "float64"
"""The type that Keras lowers to float32 in results of several types, on JAX and PyTorch.

keras/src/backend/common/dtypes.py, BIT64_TO_BIT32_DTYPE, which `result_type` reads.
"""
_PARSE = _named(keras.DTypePolicy, "_parse_name")
_nn = keras.src.backend.ops.nn if _FROM_3_16 else keras.src.backend.nn
_ATTENTION = _named(_nn, "dot_product_attention")


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
        _dtypes.PYTHON_DTYPES_MAP.update(short)
        setattr(keras.DTypePolicy, _PARSE, _widened(getattr(keras.DTypePolicy, _PARSE)))
    _dtypes.BIT64_TO_BIT32_DTYPE[_LOWERED] = "float64"
    if keras.backend.backend() == "jax":
        importlib.import_module("jax").config.update("jax_enable_x64", True)
        # jax.nn.dot_product_attention computes the logits in float32 whatever it is given.
        setattr(_nn, _ATTENTION, _attention)


def _widened(parse: Callable[..., tuple[str, str]]) -> Callable[..., tuple[str, str]]:
    @functools.wraps(parse)
    def parsed(self: Any, name: str) -> Any:
        return tuple("float64" if "float" in each else each for each in parse(self, name))

    return parsed


def names_mean_float64() -> bool:
    """Whether the names of shorter floats mean float64 in this process."""
    return bool(_dtypes.PYTHON_DTYPES_MAP[float] == "float64")


def computes_in_float64() -> bool:
    """Whether `compute_in_float64` was called, or this backend needs no call."""
    return bool(_dtypes.BIT64_TO_BIT32_DTYPE[_LOWERED] == "float64")


def layers_not_in_float64(model: Any) -> list[Any]:
    """The layers of a model, itself included, that compute in another type."""
    return [layer for layer in layers_in(model) if layer.compute_dtype != "float64"]


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


# ---------------------------------------------------------------- what a variable has
# keras/src/backend/common/variables.py

stored_value, store_value = _read_and_write(_Variable, "_value")
"""The tensor of a variable, `None` before it has one. `value` and `assign` check and convert.

It is an array on JAX, a variable on TensorFlow, and a parameter on PyTorch.
"""
layout_of, set_layout = _read_and_write(_Variable, "_layout")
"""The layout that a variable has on JAX, to which each assigned value goes; `None` without one."""
_named(_Variable, "_convert_to_tensor")
autocast_value = _call(_Variable, "_maybe_autocast")
"""A value of a variable in the type in which the layer computes that reads it."""
_shape = _read(_Variable, "_shape")
_DTYPE = _held(_Variable, "_dtype")
_dtype = _read(None, _DTYPE)
DTYPES = ("dtype", _DTYPE)
"""The attributes of variables and symbolic tensors with their type, as text."""


_INITIALIZE = _named(_Variable, "_initialize")


@contextmanager
def variables_reported(report: Callable[[Any], None]) -> Iterator[None]:
    """Call `report` with each variable that gets its first value inside the context.

    keras/src/backend/*/core.py, JaxVariable._initialize and Variable._initialize
    """
    owner = next(base for base in keras.Variable.__mro__ if _INITIALIZE in vars(base))
    initialize = vars(owner)[_INITIALIZE]

    def initialize_and_report(variable: Any, value: Any) -> None:
        initialize(variable, value)
        report(variable)

    with replaced([(owner, _INITIALIZE, initialize_and_report)]):
        yield


_LARGE = 2**14
"""Elements of a variable from which it can have no value. Code reads counters and statistics."""

_MAKE = _named(_Variable, "_initialize_with_initializer")
_MAKE_LATER = _named(_Variable, "_deferred_initialize")
_, _set_initializer = _read_and_write(_Variable, "_initializer")
autocasts = _read(_Variable, "_autocast")
"""Whether layers read a variable in the type in which they compute."""


@contextmanager
def variables_without_values(
    empty: Callable[[Any], Any], refuse: Callable[..., Any]
) -> Iterator[None]:
    """Let large variables have a shape and a type, and no value, inside the context.

    keras/src/backend/common/variables.py, Variable.__init__: Keras makes such variables in a
    stateless scope. What is assigned to one is dropped.

    Args:
        empty: Returns what such a variable stores. For `None`, code that reads it gets zeros.
        refuse: Called instead of `fit` and the other methods that run a model.
    """
    kinds = (*[keras.Variable] * 3, *[keras.Model] * 4)
    names = (_MAKE, _MAKE_LATER, "assign", "fit", "evaluate", "predict", "train_on_batch")
    owners = [
        next(base for base in kind.__mro__ if name in vars(base))
        for kind, name in zip(kinds, names, strict=True)
    ]
    make, make_later, assign = (vars(owners[number])[names[number]] for number in range(3))
    absent: dict[int, Any] = {}
    zeros = keras.initializers.Zeros()

    def make_without_value(variable: Any, initializer: Any) -> None:
        if math.prod(_shape(variable)) < _LARGE:
            make(variable, initializer)
        else:
            absent[id(variable)] = variable
            store_value(variable, empty(variable))
            _set_initializer(variable, zeros)

    def make_without_value_later(variable: Any) -> None:
        make_later(variable)  # which forgets the initializer
        _set_initializer(variable, zeros if id(variable) in absent else None)

    def assign_to_values(variable: Any, value: Any) -> Any:
        drops = id(variable) in absent and not in_stateless_scope()
        return value if drops else assign(variable, value)

    changed = (make_without_value, make_without_value_later, assign_to_values, *[refuse] * 4)
    with replaced([*zip(owners, names, changed, strict=True)]):
        yield


def stores_as_it_is(variable: Any, shape: tuple[int, ...], dtype: str) -> bool:
    """Whether `assign` on JAX would store an array of this shape and type as it is.

    Variable.assign; keras/src/backend/jax/core.py, JaxVariable._direct_assign
    """
    plain = type(variable) is keras.Variable and layout_of(variable) is None
    return plain and shape == _shape(variable) and dtype == _dtype(variable)


_TORCH_LAYER = keras.layers.Layer if keras.backend.backend() == "torch" else None
REGISTERING = (
    _named(_TORCH_LAYER, "_track_variables"),
    _named(_TORCH_LAYER, "_post_track_variable"),
)
"""Methods that give a module of PyTorch the tensors of a layer's variables.

keras/src/backend/torch/layer.py, TorchLayer
"""


def wrap_methods_of_torch(wrapped: Callable[[str, Any], Any], names: tuple[str, ...]) -> None:
    """Replace methods that a Keras layer has as a module of PyTorch.

    Args:
        wrapped: Returns the new method, given its name and the old one.
        names: The names of the methods.
    """
    from keras.src.backend.torch.layer import TorchLayer

    for name in names:
        setattr(TorchLayer, name, wrapped(name, getattr(TorchLayer, name)))


def value_in_scope(variable: Any) -> Any:
    """The value of a variable in Keras's stateless scope, `None` without one."""
    return get_stateless_scope().get_current_value(variable) if in_stateless_scope() else None


_CALL_CONTEXT = "current_call_ctx"
"""The global attribute that Keras sets while a layer is called."""
_enter_call = getattr(keras.layers.Layer, _named(keras.layers.Layer, "_get_call_context"))
if _CALL_CONTEXT not in _enter_call.__code__.co_consts:
    raise _missing(f"global attribute {_CALL_CONTEXT}")


def in_layer_call() -> bool:
    """Whether a layer is called in this thread. An optimizer is not one."""
    return global_state.get_global_attribute(_CALL_CONTEXT) is not None


@contextmanager
def values_replaced(variables: list[Any], values: list[Any]) -> Iterator[list[tuple[Any, Any]]]:
    """Give variables other values inside the context.

    Yields:
        A list. After the context it has each variable that was assigned to, with its value.
    """
    before = list(map(stored_value, variables))
    changed: list[tuple[Any, Any]] = []
    try:
        for variable, value in zip(variables, values, strict=True):
            store_value(variable, value)
        yield changed
    finally:
        for variable, value, own in zip(variables, values, before, strict=True):
            if stored_value(variable) is not value:
                changed.append((variable, stored_value(variable)))
            store_value(variable, own)


# ---------------------------------------------------------------- what an optimizer does
# keras/src/optimizers/base_optimizer.py

ADD_SLOT = _named(keras.optimizers.Optimizer, "add_variable_from_reference")
CLIP = _named(keras.optimizers.Optimizer, "_clip_gradients")
DECAY = _named(keras.optimizers.Optimizer, "_apply_weight_decay")
ACCUMULATE = _named(keras.optimizers.Optimizer, "_backend_increment_gradient_accumulators")
UPDATE_ALL = _named(keras.optimizers.Optimizer, "_backend_update_step")
UPDATE_ONE = _named(keras.optimizers.Optimizer, "update_step")
FINITE = _named(keras.optimizers.LossScaleOptimizer, "check_finite")
_key = _call(keras.optimizers.Optimizer, "_var_key")
counted_steps = _read(_BaseOptimizer, "_iterations", to=lambda count: int(count.value))
"""The steps, those included that only accumulate gradients. `iterations` counts updates."""
updates_all_at_once = _read(None, "_parallel_update_step", None, to=_is_given)
"""Whether an optimizer on PyTorch updates all variables by one operation over lists."""
decays: Callable[..., bool] = _call(keras.optimizers.Optimizer, "_use_weight_decay")
"""Whether an optimizer applies its weight decay to a variable."""


def variable_key(kind: type, variable: Any) -> Any:
    """The key of a variable in the dicts of an optimizer of this class."""
    return _key(kind, None, variable)


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
"""The attributes that Keras's callbacks change during a run."""
for _callback, _names in STATE_OF_CALLBACKS.items():
    _held(getattr(keras.callbacks, _callback), *_names)

set_monitor_op = _call(keras.callbacks.EarlyStopping, "_set_monitor_op")
"""Let a callback find out whether less or more of what it monitors is better.

It raises `ValueError` if the mode is `"auto"` and no metric says it.
"""
is_bar_of_evaluation = _read(keras.callbacks.ProgbarLogger, "_called_in_fit", to=operator.not_)
"""Whether this `ProgbarLogger` shows an evaluation, and none within `fit`."""
_seen, _set_seen = _read_and_write(keras.utils.Progbar, "_seen_so_far")
_last_drawn = _read(keras.utils.Progbar, "_last_update")


def counted_without_drawing(bar: Any, batch: int) -> bool:
    """Count a batch for a `ProgbarLogger` that would not draw now.

    keras/src/callbacks/progbar_logger.py, ProgbarLogger._update_progbar, and
    keras/src/utils/progbar.py, Progbar.update: the first call starts its clock.

    Returns:
        Whether the batch was counted. Where it was not, the bar has to be called.
    """
    picture = bar.progbar
    if bar.verbose != 1 or picture is None or not _seen(picture):
        return False
    if time.time() - _last_drawn(picture) >= picture.interval:
        return False
    bar.seen = batch + 1
    _set_seen(picture, bar.seen)
    return True


EXPECTED_BATCH_SIZE = _held(keras.layers.RNN, "_expected_batch_size")
"""The attribute of a stateful RNN with the rows of its state."""


# ---------------------------------------------------------------- what a loss or a metric has

options_of = _read(keras.metrics.MeanMetricWrapper, "_fn_kwargs", {})
"""The keyword arguments with which a loss or a metric calls its function."""
METRIC_FUNCTION = _held(keras.metrics.MeanMetricWrapper, "_fn")
"""The attribute of a `MeanMetricWrapper` with its function."""
_named(LossFunctionWrapper, "call")


# ---------------------------------------------------------------- what an adapter does
# keras/src/trainers/data_adapters/*.py

inputs_of = _read(ArrayDataAdapter, "_inputs")
"""The arrays of an `ArrayDataAdapter`."""
number_of_rows = _read(ArrayDataAdapter, "_num_samples", None)
"""The rows of an `ArrayDataAdapter`; `None` for other data."""
batch_size_of: Callable[[Any], int] = _read(ArrayDataAdapter, "_batch_size")
"""The rows of a batch of an `ArrayDataAdapter`."""
shuffle_of = _read(ArrayDataAdapter, "_shuffle")
"""How an `ArrayDataAdapter` shuffles: `True`, `False` or `"batch"`."""
_pass_over = _call(ArrayDataAdapter, "_get_iterator")
loader_of = _read(TorchDataLoaderAdapter, "_dataloader")
"""The `DataLoader` of a `TorchDataLoaderAdapter`."""
standardized = _call(PyDatasetAdapter, "_standardize_batch")
"""A batch of a `PyDataset` in the structure of `fit`, with its class weights."""
epoch_of, set_epoch = _read_and_write(ArrayDataAdapter if _FROM_3_16 else None, "_epoch", None)
"""What an adapter seeds its shuffle with; `None` where it draws from the process, up to 3.15."""
_RECORD = _named(_serialization_lib, "record_object_after_serialization")


def row_indices(adapter: Any) -> Any:
    """The rows of each batch of one pass over arrays, in the order that Keras would take.

    Keras draws the order when the first batch is asked for.

    Returns:
        An iterator of slices, or of arrays of row numbers.
    """
    return _pass_over(adapter, lambda _, indices: indices, inputs=0)


@contextmanager
def serialized_objects_kept() -> Iterator[None]:
    """Let Keras load a `.keras` file without mistaking one layer for another.

    `Bidirectional` serializes its layer while a file is loaded. Keras identifies the layer by
    its `id`, and another layer gets the same `id` once the first one is freed. This context
    keeps every serialized object until the load ends. Source: `ObjectSharingScope` in
    keras/src/saving/serialization_lib.py.
    """
    kept: list[Any] = []
    record = getattr(_serialization_lib, _RECORD)

    def keep_and_record(obj: Any, config: dict[str, Any]) -> None:
        kept.append(obj)
        record(obj, config)

    with replaced([(_serialization_lib, _RECORD, keep_and_record)]):
        yield


# ---------------------------------------------------------------- the graph of a functional model
# keras/src/ops/function.py and operation.py

RUN_GRAPH = _named(Functional, "_run_through_graph")
"""The method that runs a functional graph."""
_inner_graph = _read(keras.Sequential, "_functional", None)
_operations = _read(_Function, "_operations", None)
_nodes_by_depth = _read(_Function, "_nodes_by_depth")
_structure_of_inputs = _read(_Function, "_inputs_struct")
_structure_of_outputs = _read(_Function, "_outputs_struct")
_history = _read(_Node, "_keras_history", None)
calls_of = _read(keras.Operation, "_inbound_nodes", to=list)
"""The nodes of all symbolic calls of an operation."""


def operations_of(container: Any) -> list[Any]:
    """The layers and other operations that a container calls."""
    operations = _operations(_inner_graph(container) or container)
    return list(container.layers if operations is None else operations)


def node_of(tensor: Any) -> Any:
    """The node of the call that made a symbolic tensor, `None` for other tensors."""
    history = _history(tensor)
    return None if history is None else calls_of(history.operation)[history.node_index]


def functional_of(layer: Any) -> Any:
    """The functional graph that a model runs, `None` where it has none.

    A `Sequential` that is built has one inside.
    """
    return layer if isinstance(layer, Functional) else _inner_graph(layer)


def inputs_and_outputs(function: Any) -> tuple[Any, Any]:
    """The symbolic inputs and outputs of a functional graph, in their structures."""
    return _structure_of_inputs(function), _structure_of_outputs(function)


def nodes_of(function: Any) -> list[Any]:
    """The calls of a functional graph, in the order in which Keras runs them."""
    by_depth = _nodes_by_depth(function)
    every = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
    return [node for node in every if node.operation and not node.is_input]


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
        _structure_of_outputs(function), [known[id(x)] for x in function.outputs]
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

    with replaced([(_Node, "__init__", make_and_report)]):
        yield


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
