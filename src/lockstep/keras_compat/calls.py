"""Private parts of Keras around a call: symbolic calls, random numbers, devices, classes."""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras

from lockstep.keras_compat.foreign_patches import replaced
from lockstep.keras_compat.rows import (
    Functional,
    _inject_functional,
    _layer_module,
    _named,
    _tracking,
    global_state,
)

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


@contextmanager
def traced_by_torch(generator: Callable[[Any], Any], cond: Callable[..., Any]) -> Iterator[None]:
    """Let Keras on PyTorch read no value in this thread inside the context.

    keras/src/backend/torch/random.py, torch_seed_generator: it gives the number of a seed to a
    generator. keras/src/backend/torch/core.py, cond: it is an `if`.

    Args:
        generator: Returns a generator, given the two numbers of a seed in one tensor.
        cond: Runs both branches, given a tensor and these.
    """
    random, core = sys.modules[keras.src.backend.random.normal.__module__], _torch_core()
    draw_seed = keras.src.random.seed_generator.draw_seed
    plain, plain_cond = vars(random)[_TORCH_GENERATOR], core.cond
    thread = threading.get_ident()

    def seeded(seed: Any) -> Any:
        if threading.get_ident() != thread or torch_current_device() == "meta":
            return plain(seed)
        return generator(draw_seed(seed))

    def both(pred: Any, true_fn: Any, false_fn: Any) -> Any:
        own = threading.get_ident() == thread and torch_current_device() != "meta"
        if not own or isinstance(pred, bool):
            return plain_cond(pred, true_fn, false_fn)
        return cond(pred, true_fn, false_fn)

    with replaced([(random, _TORCH_GENERATOR, seeded), (core, "cond", both)]):
        yield


_TORCH_GENERATOR = "torch_seed_generator"


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
