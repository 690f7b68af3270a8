# mypy: implicit-reexport
# ruff: noqa: F401
"""The imports, and the rows of a table of private names."""

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import keras

from lockstep.keras_compat.version import _missing, _name_in


def _base_of_model(module: str) -> Any:
    for base in keras.Model.__mro__:
        if base.__module__ == module:
            return base
    raise _missing(f"base class of keras.Model in {module}")


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
