# mypy: implicit-reexport
# ruff: noqa: F401
"""Every private name of TensorFlow that lockstep uses, and no other module imports one.

Checked with TensorFlow 2.21.0; `core/tried_versions.py` has the bounds.

Raises:
    UnsupportedFramework: If this TensorFlow is too old, is a mix of two packages, or lacks a name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from lockstep.core.tried_versions import TRIED, check_oldest, check_one_tensorflow
from lockstep.errors import UnsupportedFramework

check_one_tensorflow()
check_oldest("tensorflow", tf.__version__)
NEWEST = TRIED["tensorflow"].newest


def _lacking(what: object) -> UnsupportedFramework:
    return UnsupportedFramework(
        f"TensorFlow {tf.__version__} lacks an internal function that lockstep needs: {what}.\n"
        f"It exists up to TensorFlow {NEWEST}, but may change in any version.\n"
        f'Run pip install "tensorflow<={NEWEST}"'
    )


try:
    from tensorflow.python.distribute import distribute_lib, values
    from tensorflow.python.framework import ops
    from tensorflow.python.framework.auto_control_deps_utils import get_read_write_resource_inputs
    from tensorflow.python.framework.func_graph import FuncGraph
    from tensorflow.python.framework.function_def_to_graph import function_def_to_graph
    from tensorflow.python.ops import gen_stateless_random_ops, gen_stateless_random_ops_v2
    from tensorflow.python.ops.resource_variable_ops import (
        BaseResourceVariable as ResourceVariable,
    )
    from tensorflow.python.ops.resource_variable_ops import UninitializedVariable
    from tensorflow.python.ops.variable_scope import get_variable_scope
except ImportError as error:
    raise _lacking(error) from error

OWN_GRADIENTS = "tensorflow.python.ops.custom_gradient"
"""The module of `tf.custom_gradient`, whose closure has the gradient of the user."""
GRADIENTS_BY_ROWS = ("tensorflow.python.ops.nn_impl", "tensorflow.python.ops.ctc_ops")
"""Modules whose gradients are those of each row: swish, CTC."""

ATTRIBUTES: tuple[tuple[Any, str], ...] = (
    (distribute_lib, "_InReplicaThreadMode _get_default_replica_mode"),
    (distribute_lib, "_push_per_thread_mode _pop_per_thread_mode _DefaultDistributionStrategy"),
    (values.DistributedVariable, "_get_replica _update"),
    (FuncGraph, "_get_function _is_function"),
)
"""What has private attributes that other modules read or call, and their names."""

PARTS_OF_OBJECTS = frozenset(
    {
        *("_replica_id", "_unique_id", "_distributed_container", "_handle_data"),
        *("_gradient_op_type", "_seed2", "_forward_cls", "_caching_device", "_inputs"),
    }
)
"""Attributes that an instance gets: of variables, operations, data sets and scopes."""

for _owner, _names in ATTRIBUTES:
    for _name in _names.split():
        if not hasattr(_owner, _name):
            raise _lacking(f"{_owner!r} has no {_name}")


@contextmanager
def eager_variable_scope() -> Iterator[None]:
    """Keep a failed trace from spoiling the variable scope of the process.

    `tf.scan`, `tf.foldl` and `tf.foldr` set a caching device on this scope and leave it there if
    they raise. TensorFlow can then assign no mirrored variable: with eager execution there is no
    caching device.
    """
    _forget_caching_device()
    try:
        yield
    finally:
        _forget_caching_device()


def _forget_caching_device() -> None:
    # tensorflow/python/ops/variable_scope.py, VariableScope.set_caching_device
    if tf.executing_eagerly():
        get_variable_scope()._caching_device = None
