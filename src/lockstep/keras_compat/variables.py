"""Private attributes and methods of Keras's variables and optimizers."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from lockstep.keras_compat.foreign_patches import replaced
from lockstep.keras_compat.rows import (
    _BaseOptimizer,
    _call,
    _held,
    _is_given,
    _named,
    _read,
    _read_and_write,
    _Variable,
    get_stateless_scope,
    global_state,
    in_stateless_scope,
)
from lockstep.keras_compat.version import _missing

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
