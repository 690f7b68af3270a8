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
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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


check_version(keras.__version__)

try:
    from keras.src.backend.common import global_state as global_state
    from keras.src.backend.common.masking import get_keras_mask as get_keras_mask
    from keras.src.backend.common.masking import set_keras_mask as set_keras_mask
    from keras.src.backend.common.stateless_scope import in_stateless_scope as in_stateless_scope
    from keras.src.backend.config import is_nnx_enabled as is_nnx_enabled
    from keras.src.layers import layer as _layer_module
    from keras.src.losses.losses import LossFunctionWrapper as LossFunctionWrapper
    from keras.src.models.functional import Functional as Functional
    from keras.src.ops.node import Node as _Node
    from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR as GLOBAL_SEED_GENERATOR
    from keras.src.random.seed_generator import global_seed_generator as global_seed_generator
    from keras.src.saving import serialization_lib as _serialization_lib
    from keras.src.saving.keras_saveable import KerasSaveable as KerasSaveable
    from keras.src.trainers.data_adapters import data_adapter_utils as _data_adapter_utils
    from keras.src.trainers.data_adapters import get_data_adapter as get_data_adapter
    from keras.src.trainers.data_adapters import py_dataset_adapter as _py_dataset_adapter
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
    keras.Model: ("_assert_compile_called", "_clear_losses", "_flatten_layers", "_symbolic_build"),
    Functional: ("_run_through_graph",),
    keras.Operation: ("symbolic_call",),
    keras.layers.Layer: ("symbolic_call",),
    keras.optimizers.Optimizer: (
        *("_apply_weight_decay", "_backend_increment_gradient_accumulators"),
        *("_backend_update_step", "_clip_gradients", "_use_weight_decay"),
        *("add_variable_from_reference", "update_step"),
    ),
    keras.random.SeedGenerator: ("next",),
    _layer_module: ("Node",),
    _py_dataset_adapter: ("_DATA_POOLS",),
    _serialization_lib: ("record_object_after_serialization",),
    global_state: ("GLOBAL_STATE_TRACKER", "get_global_attribute", "set_global_attribute"),
}
"""What lockstep calls or overrides: an override of a name that Keras no longer calls
would change nothing, and say nothing."""

for _owner, _names in _ATTRIBUTES.items():
    for _name in _names:
        if not hasattr(_owner, _name):
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


def _base_of_model(module: str) -> Any:
    for base in keras.Model.__mro__:
        if base.__module__ == module:
            return base
    raise _missing(f"base class of keras.Model in {module}")


def module_in_keras(thing: Any) -> str:
    """Where in Keras a function or class is defined, `"ops.nn"` for example; `""` elsewhere."""
    module = str(getattr(thing, "__module__", ""))
    return module.removeprefix("keras.src.") if module.startswith("keras.src.") else ""


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


def tensorflow_iterator() -> Any:
    """The iterator of `fit` and `evaluate` on TensorFlow, which yields iterators of `tf.data`.

    keras/src/backend/tensorflow/trainer.py, TFEpochIterator
    """
    return importlib.import_module(trainer_module()).TFEpochIterator


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


def is_built(model: Any) -> bool:
    """Whether the model and every layer in it has its variables.

    keras/src/layers/layer.py, Layer._flatten_layers
    """
    return all(layer.built for layer in model._flatten_layers())


def stored(variable: Any) -> Any:
    """What a variable holds: an array on JAX, a variable on TensorFlow, a parameter on PyTorch.

    keras/src/backend/common/variables.py
    """
    return variable._value


# ---------------------------------------------------------------- double precision

_LOWERED = "float64"
"""The type that Keras lowers to float32 in results of several types, on JAX and PyTorch.

keras/src/backend/common/dtypes.py, BIT64_TO_BIT32_DTYPE, which `result_type` reads.
"""


def compute_in_float64() -> None:
    """Make Keras compute in float64 in this process, from now on.

    Keras and JAX cache types, so the process cannot go back. Models that exist keep their types.
    """
    keras.config.set_floatx("float64")
    _table_of_types()[_LOWERED] = "float64"
    if keras.backend.backend() == "jax":
        importlib.import_module("jax").config.update("jax_enable_x64", True)
        # jax.nn.dot_product_attention computes the logits in float32 whatever it is given.
        keras.src.backend.nn.dot_product_attention = _attention


def computes_in_float64() -> bool:
    """Whether `compute_in_float64` was called, or this backend needs no call."""
    return bool(_table_of_types()[_LOWERED] == "float64")


def layers_not_in_float64(model: Any) -> list[Any]:
    """The layers of a model, itself included, that compute in another type.

    keras/src/layers/layer.py, Layer._flatten_layers
    """
    return [layer for layer in model._flatten_layers() if layer.compute_dtype != "float64"]


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


# ---------------------------------------------------------------- what an adapter does


def worker_pools() -> list[Any]:
    """The pools of `multiprocessing` that make the items of each `PyDataset`.

    keras/src/trainers/data_adapters/py_dataset_adapter.py, which holds them weakly.
    """
    return list(_py_dataset_adapter._DATA_POOLS)


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


def added_losses(layer: Any) -> list[Any]:
    """The losses that a layer has added in its last call.

    keras/src/layers/layer.py, Layer.add_loss
    """
    return list(layer._losses)


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
