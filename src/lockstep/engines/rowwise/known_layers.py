"""The layers of Keras that work row by row, and what an author has declared.

The names were checked against Keras 3.15.1. An option, an axis or a hook can make such a layer look
across rows.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from lockstep.core.patched import patched
from lockstep.engines.rowwise.rules import (
    ELEMENTWISE,
    RULES,
    is_tensor,
    operands_in,
    options_of,
    shape_of,
)
from lockstep.keras_compat import (
    GLOBAL_SEED_GENERATOR,
    Functional,
    calls_of,
    compute_output_spec,
    get_keras_mask,
    global_seed_generator,
    global_state,
    is_code_of_keras,
    layers_in,
    layers_of,
    module_in_keras,
    operations_of,
    reduction_axes,
    runs_code_of_keras,
    seed_generators,
    set_keras_mask,
)

_LAYERS = """
    Activation ActivityRegularization AdaptiveAveragePooling1D AdaptiveAveragePooling2D
    AdaptiveAveragePooling3D AdaptiveMaxPooling1D AdaptiveMaxPooling2D AdaptiveMaxPooling3D Add
    AdditiveAttention AlphaDropout Attention Average AveragePooling1D AveragePooling2D
    AveragePooling3D Bidirectional CategoryEncoding CenterCrop Concatenate Conv1D
    Conv1DTranspose Conv2D Conv2DTranspose Conv3D Conv3DTranspose ConvLSTM1D ConvLSTM2D
    ConvLSTM3D ConvLSTMCell Cropping1D Cropping2D Cropping3D Dense DepthwiseConv1D
    DepthwiseConv2D Discretization Dot Dropout ELU EinsumDense Embedding Flatten GRU GRUCell
    GaussianDropout GaussianNoise GlobalAveragePooling1D GlobalAveragePooling2D
    GlobalAveragePooling3D GlobalMaxPooling1D GlobalMaxPooling2D GlobalMaxPooling3D
    GroupNormalization GroupedQueryAttention Hashing Identity InputLayer IntegerLookup LSTM
    LSTMCell LayerNormalization LeakyReLU Masking MaxPooling1D MaxPooling2D MaxPooling3D Maximum
    Minimum MultiHeadAttention Multiply Normalization PReLU Permute RMSNormalization RNN
    RandomBrightness RandomContrast RandomFlip RandomRotation RandomTranslation RandomZoom ReLU
    RepeatVector Rescaling Reshape Resizing ReversibleEmbedding SeparableConv1D SeparableConv2D
    SimpleRNN SimpleRNNCell Softmax SpatialDropout1D SpatialDropout2D SpatialDropout3D
    SpectralNormalization StackedRNNCells StringLookup Subtract TextVectorization
    TimeDistributed UnitNormalization UpSampling1D UpSampling2D UpSampling3D ZeroPadding1D
    ZeroPadding2D ZeroPadding3D
"""
LAYERS_BY_ROWS = frozenset(_LAYERS.split())
"""Keras layers in which a row of the output depends on the same row of the input alone."""

_ANY_RANK = """
    Add Average Dropout Embedding Flatten Identity InputLayer Maximum Minimum Multiply Rescaling
    ReversibleEmbedding Subtract
"""
OF_ANY_RANK = frozenset(_ANY_RANK.split())
"""Those that take a batch of scalars. The others may take the last dim, the batch, for another."""

_OF_SEQUENCES = "AdditiveAttention Attention GroupedQueryAttention MultiHeadAttention"
_OF_IMAGES = """
    CenterCrop RandomBrightness RandomContrast RandomFlip RandomRotation RandomTranslation
    RandomZoom Resizing
"""
_LEAST_RANKS = dict.fromkeys(_OF_SEQUENCES.split(), 3) | dict.fromkeys(_OF_IMAGES.split(), 4)

_MASKED_ATTENTION = ("MultiHeadAttention", "GroupedQueryAttention")
MASKS_OF_ROWS = ("key_mask", "mask", "query_mask", "value_mask")
"""Arguments of Keras's layers that have one number for each step of a row."""


def is_container(layer: Any) -> bool:
    """Return whether a layer only calls its inner layers, as a graph or a sequence."""
    # keras/src/models/functional.py and sequential.py
    containers = (Functional.call, keras.Sequential.call)
    by_keras = type(layer).call in containers and is_code_of_keras(type(layer).call)
    return by_keras and _is_called_as_its_class(layer)


def is_batch_norm(layer: Any) -> bool:
    """Return whether a layer is Keras's own batch norm over the rows."""
    return (
        type(layer) is keras.layers.BatchNormalization
        and layer.built
        and 0 in reduction_axes(layer)
        and runs_code_of_keras(layer)
    )


def works_by_rows(layer: Any) -> bool:
    """Return whether one of Keras's own layers works row by row, wherever it is called.

    The calls that Keras has recorded of the layer count, as its options do. An operation of a graph
    is judged by its rule on the shapes of its recorded calls.
    """
    if not isinstance(layer, keras.layers.Layer):
        return _operates_by_rows(layer)
    if not is_known(layer):
        return False
    nodes = calls_of(layer)
    arrays = [array for node in nodes for array in arrays_in(node)]
    if not all(is_for_all_rows(layer, tuple(array.shape)) for array in arrays):
        return False
    ranks = [len(tensor.shape) for node in nodes for tensor in node.input_tensors]
    return all(rank >= least_rank(layer) for rank in ranks)


def _operates_by_rows(op: Any) -> bool:
    kind = type(op)
    if not (module_in_keras(kind) and module_in_keras(kind.call) and _is_called_as_its_class(op)):
        return False
    options = keras.tree.flatten([option for _, option in options_of(op)])
    if kind.__name__ not in RULES or any(map(shape_of, options)):
        return False
    nodes = calls_of(op)
    return bool(nodes) and all(_keeps_rows(op, node) for node in nodes)


def _keeps_rows(op: Any, node: Any) -> bool:
    """Return whether a recorded call keeps rows apart. Each tensor of a graph has one entry a row.

    A graph with a fixed number of rows is followed: its code may name that number.
    """
    if any(tensor.shape[:1] != (None,) for tensor in (*node.input_tensors, *node.output_tensors)):
        return False
    given = (*node.arguments.args, *node.arguments.kwargs.values())
    operands = operands_in(given, lambda leaf: 1 if keras.utils.is_keras_tensor(leaf) else None)
    return RULES[type(op).__name__](op, operands, given) == 1


def least_rank(layer: Any) -> int:
    """Return the smallest rank of inputs with which one of these layers works row by row.

    Attention takes a batch of vectors for one sequence, and a mask of rank 2 for that of all rows.
    A layer of images takes a batch of matrices for one image.
    """
    name = type(layer).__name__
    return 1 if name in OF_ANY_RANK else _LEAST_RANKS.get(name, 2)


def stateful_rnns(layer: Any) -> list[Any]:
    """Return the stateful RNNs of an RNN layer or of a `Bidirectional` one.

    Each row of their state belongs to one row of the batch. The list is empty for other
    layers, and if anything else prevents the layer from working row by row.
    """
    wraps = type(layer) is keras.layers.Bidirectional
    rnns = [layer.forward_layer, layer.backward_layer] if wraps else [layer]
    stateful = [rnn for rnn in rnns if isinstance(rnn, keras.layers.RNN) and rnn.stateful]
    if len(stateful) < len(rnns) or getattr(layer, "activity_regularizer", None) is not None:
        return []
    with patched([(each, "stateful", False) for each in {layer, *rnns}]):
        return stateful if works_by_rows(layer) else []


def drawing_layers(part: Any) -> list[Any]:
    """Return the layers inside `part` that draw random numbers and can run on a global batch."""
    if not isinstance(part, keras.layers.Layer):
        return []
    if type(part).__name__ in _MASKED_ATTENTION and works_by_rows(part):
        return [layer for layer in layers_in(part) if _draws(layer)]  # of its scores
    if seed_generators(part) or works_by_rows(part) or stateful_rnns(part):
        return [part] if any(map(_draws, layers_in(part))) else []
    return [layer for inner in layers_of(part) for layer in drawing_layers(inner)]


def _draws(layer: Any) -> bool:
    """Return whether a layer may draw: a cell of an RNN without dropout has a seed too."""
    rates = [getattr(layer, name, None) for name in ("dropout", "recurrent_dropout")]
    is_cell_without = rates == [0, 0] and bool(module_in_keras(type(layer)))
    return bool(seed_generators(layer)) and not is_cell_without


def is_known(layer: Any) -> bool:
    """Return whether the table has this layer, with options that leave the rows alone."""
    if not module_in_keras(type(layer)) or type(layer).__name__ not in LAYERS_BY_ROWS:
        return False
    if not _is_called_as_its_class(layer) or not runs_code_of_keras(layer):
        return False
    if is_in_float8(layer) or not _has_plain_options(layer):
        return False
    return all(_fits_inside(part) for part in layers_of(layer))


def is_for_all_rows(layer: Any, shape: tuple[int | None, ...]) -> bool:
    """Return whether an input of this shape is shared by all rows of the batch."""
    # The mask of an attention layer may have no dim for the rows.
    is_mask = type(layer).__name__ in _MASKED_ATTENTION and len(shape) == 2
    return is_mask or shape[:1] in ((), (1,))


def _is_called_as_its_class(layer: Any) -> bool:
    return bool(module_in_keras(type(layer).__call__)) and "call" not in vars(layer)


def call_name(layer: Any) -> str:
    """Return the name of the method that a call of a layer or operation runs."""
    # keras/src/ops/operation.py, Operation.__call__
    return "call" if getattr(layer, "quantization_mode", None) is None else "quantized_call"


def is_in_float8(layer: Any) -> bool:
    """Return whether a layer scales by the largest values of the whole batch and its gradient."""
    return getattr(layer, "quantization_mode", None) == "float8"


def arrays_in(node: Any) -> list[Any]:
    """Return the arrays among the arguments of a call in a functional model."""
    # keras/src/ops/node.py, Node.arguments
    leaves = keras.tree.flatten((node.arguments.args, node.arguments.kwargs))
    return [leaf for leaf in leaves if not keras.utils.is_keras_tensor(leaf) and shape_of(leaf)]


def _fits_inside(part: Any) -> bool:
    # A part of a wrapper or cell may run inside a loop, where replicas cannot synchronize.
    if is_container(part):
        inside = all(_fits_inside(inner) for inner in operations_of(part))
    else:
        inside = works_by_rows(part)
    return inside and getattr(part, "activity_regularizer", None) is None


def _has_plain_options(layer: Any) -> bool:
    options, name = vars(layer), type(layer).__name__
    if name == "Normalization":  # its other axes are those of the data that it adapted to
        return _leaves_rows(layer.axis)
    for option, value in options.items():
        if option.endswith("activation") and callable(value) and not _activates_by_rows(value):
            return False
        if option == "axis" and value is None:
            return False
        if option.lstrip("_").rpartition("_")[2] in ("axis", "axes") and not _leaves_rows(value):
            return False
    if options.get("noise_shape") is not None or options.get("stateful"):
        return False
    if options.get("sparse"):
        return False
    if name == "TextVectorization":
        options = layer.get_config()
        if not all(isinstance(options[part], str | None) for part in ("standardize", "split")):
            return False  # a function of the user's
        # Otherwise, rows have the length of the longest one of the batch.
        return options["output_mode"] != "int" or options["output_sequence_length"] is not None
    return name != "EinsumDense" or _keeps_first(layer.equation)


def _leaves_rows(axes: Any) -> bool:
    flat = [axis for axis in keras.tree.flatten(axes) if isinstance(axis, int)]
    return all(axis == -1 or axis > 0 for axis in flat)


def _keeps_first(equation: str) -> bool:
    inputs, _, outputs = equation.replace(" ", "").partition("->")
    return (inputs[:1] == outputs[:1] and inputs.partition(",")[2].find(inputs[:1]) < 0) or (
        inputs.startswith("...") and outputs.startswith("...")
    )


def _activates_by_rows(activation: Any) -> bool:
    if isinstance(activation, keras.layers.Layer):
        return works_by_rows(activation)
    name = str(getattr(activation, "__name__", "")).title().replace("_", "")
    module = module_in_keras(activation)
    return module.startswith("activations.") or (module.startswith("ops.") and name in ELEMENTWISE)


def is_declared(layer: Any) -> bool:
    """Return whether the author of a layer or function declared it by `lockstep.rowwise`."""
    return bool(getattr(layer, "_lockstep_rowwise", False))


@contextmanager
def untouched_random_numbers() -> Iterator[None]:
    """Make random numbers after the context independent of draws inside it."""

    def has_seeds() -> bool:
        return global_state.get_global_attribute(GLOBAL_SEED_GENERATOR) is not None

    python, numpy, had_seeds = random.getstate(), np.random.get_state(), has_seeds()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if has_seeds() and not had_seeds:
            # keras/src/random/seed_generator.py, global_seed_generator: created again, as
            # the step would. This draws from Python's random numbers.
            global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, None)
            global_seed_generator()


def spec_with_masks(layer: Any, args: Any, kwargs: Any) -> Any:
    """Return the shapes and dtypes of a layer's outputs, with those of their masks."""
    inputs = [leaf for leaf in keras.tree.flatten((args, kwargs)) if is_tensor(leaf)]
    # On JAX, Keras takes no `None` in a list.
    masks = {str(n): get_keras_mask(leaf) for n, leaf in enumerate(inputs)}
    masks = {n: mask for n, mask in masks.items() if mask is not None}
    has_mask: list[bool] = []

    def call(args: Any, kwargs: Any, masks: Any) -> Any:
        leaves = [leaf for leaf in keras.tree.flatten((args, kwargs)) if is_tensor(leaf)]
        for n, mask in masks.items():
            set_keras_mask(leaves[int(n)], mask)
        outputs = layer(*args, **kwargs)
        found = [get_keras_mask(leaf) for leaf in keras.tree.flatten(outputs)]
        has_mask[:] = [mask is not None for mask in found]
        # On PyTorch, Keras takes tensors alone.
        return outputs, [mask for mask in found if mask is not None]

    outputs, made = compute_output_spec(call, args, kwargs, masks)
    leaves = keras.tree.flatten(outputs)
    masked = [leaf for leaf, has in zip(leaves, has_mask, strict=True) if has]
    for leaf, mask in zip(masked, made, strict=True):
        set_keras_mask(leaf, mask)
    return outputs
