"""Which layers work row by row, so that each replica can run its own rows."""

from typing import Any

import keras

from lockstep.engines.replaced import replaced

_LAYERS = """
    Activation ActivityRegularization AdaptiveAveragePooling1D AdaptiveAveragePooling2D
    AdaptiveAveragePooling3D AdaptiveMaxPooling1D AdaptiveMaxPooling2D AdaptiveMaxPooling3D
    Add AdditiveAttention AlphaDropout Attention Average AveragePooling1D AveragePooling2D
    AveragePooling3D Bidirectional CenterCrop Concatenate Conv1D Conv1DTranspose Conv2D
    Conv2DTranspose Conv3D Conv3DTranspose ConvLSTM1D ConvLSTM2D ConvLSTM3D ConvLSTMCell Cropping1D
    Cropping2D Cropping3D Dense DepthwiseConv1D DepthwiseConv2D Dropout ELU EinsumDense
    Embedding Flatten GRU GRUCell GaussianDropout GaussianNoise GlobalAveragePooling1D
    GlobalAveragePooling2D GlobalAveragePooling3D GlobalMaxPooling1D GlobalMaxPooling2D
    GlobalMaxPooling3D GroupNormalization GroupedQueryAttention Identity InputLayer LSTM
    LSTMCell LayerNormalization LeakyReLU Masking MaxPooling1D MaxPooling2D MaxPooling3D
    Maximum Minimum MultiHeadAttention Multiply PReLU Permute RMSNormalization RNN
    RandomBrightness RandomContrast RandomFlip RandomRotation RandomTranslation RandomZoom ReLU
    RepeatVector Rescaling Reshape Resizing ReversibleEmbedding SeparableConv1D SeparableConv2D
    SimpleRNN SimpleRNNCell Softmax SpatialDropout1D SpatialDropout2D SpatialDropout3D
    SpectralNormalization StackedRNNCells Subtract TimeDistributed UnitNormalization UpSampling1D
    UpSampling2D UpSampling3D ZeroPadding1D ZeroPadding2D ZeroPadding3D
"""
BY_ROWS = frozenset(_LAYERS.split())
"""Keras's own layers of which a row of the output depends on that row of the input alone."""

_OPERATIONS = """
    Absolute Add Cast Clip Divide Elu Exp Gelu LeakyRelu Log Log1p Maximum Minimum Multiply
    Negative NotEqual Power Relu Relu6 Selu Sigmoid Silu Softplus Softsign Sqrt Square Subtract
    Tanh TrueDivide
"""
OPERATIONS_BY_ROWS = frozenset(_OPERATIONS.split())
"""Keras's own operations, in a functional model, that are as those layers are."""

REDUCTIONS = frozenset({"All", "Any", "Max", "Mean", "Min", "Std", "Sum", "Var"})
"""Those that are so along any axis but the first."""


_MASKED_ATTENTION = ("MultiHeadAttention", "GroupedQueryAttention")


def is_for_all_rows(layer: Any, shape: list[int | None] | None) -> bool:
    """Whether a tensor of this shape, given to a layer, is one for all rows of the batch."""
    if shape is None:
        return False
    # The mask of an attention may be without a dim for the rows.
    is_mask = type(layer).__name__ in _MASKED_ATTENTION and len(shape) == 2
    return is_mask or shape[:1] in ([], [1])


def is_container(layer: Any) -> bool:
    """Whether a layer does nothing but call its layers, as a graph or one by one."""
    return _is_called_as_its_class(layer) and type(layer).call in (
        # keras/src/models/functional.py and sequential.py
        keras.src.models.functional.Functional.call,
        keras.Sequential.call,
    )


def parts_of(container: Any) -> list[Any]:
    """What a container calls: layers and other operations."""
    functional = getattr(container, "_functional", None) or container
    # keras/src/ops/function.py, Function._operations
    operations = getattr(functional, "_operations", None)
    return list(container.layers if operations is None else operations)


def is_batch_norm(layer: Any) -> bool:
    """Whether a layer is batch norm over the rows, by Keras's own code."""
    return (
        type(layer) is keras.layers.BatchNormalization
        and layer.built
        and 0 in layer._reduction_axes
    )


def works_by_rows(layer: Any) -> bool:
    """Whether a row of the output is known to depend on that row of the input alone.

    Known are Keras's own layers with options that say so. Anything else may look
    across the batch.
    """
    if not isinstance(layer, keras.layers.Layer):
        return _operates_by_rows(layer)
    if not (_is_in_keras(type(layer)) and type(layer).__name__ in BY_ROWS):
        return False
    if not _is_called_as_its_class(layer) or _takes_one_dim(layer) or _is_given_rows(layer):
        return False
    return _has_plain_options(layer) and all(_fits_inside(part) for part in _inner_layers(layer))


def stateful_rnns(layer: Any) -> list[Any]:
    """The RNNs with a state of their own that a layer is, or runs in two directions.

    Empty for any other layer, and where something else keeps it from working row by row: each
    row of such a state belongs to one row of the batch.
    """
    wraps = type(layer) is keras.layers.Bidirectional
    rnns = [layer.forward_layer, layer.backward_layer] if wraps else [layer]
    stateful = [rnn for rnn in rnns if isinstance(rnn, keras.layers.RNN) and rnn.stateful]
    if len(stateful) < len(rnns) or getattr(layer, "activity_regularizer", None) is not None:
        return []
    with replaced([(each, "stateful", False) for each in {layer, *rnns}]):
        return stateful if works_by_rows(layer) else []


def _is_called_as_its_class(layer: Any) -> bool:
    return type(layer).__call__ is keras.layers.Layer.__call__ and "call" not in vars(layer)


def _operates_by_rows(operation: Any) -> bool:
    """Whether an operation of a functional model keeps rows beside each other."""
    name, options = type(operation).__name__, vars(operation)
    if not _is_in_keras(type(operation)):
        return False
    if name in REDUCTIONS:
        along = options.get("axis") is not None and _leaves_rows(options["axis"])
        return along and not _takes_one_dim(operation)
    return name in OPERATIONS_BY_ROWS and _is_aligned(operation)


def _takes_one_dim(layer: Any) -> bool:
    """Whether it is given tensors whose only dim is the batch, so that -1 means the batch."""
    # keras/src/ops/operation.py, Operation._inbound_nodes
    tensors = [tensor for node in layer._inbound_nodes for tensor in node.input_tensors]
    return any(len(tensor.shape) < 2 for tensor in tensors)


def _is_aligned(operation: Any) -> bool:
    """Whether broadcasting leaves the rows of all that it is given beside each other.

    A tensor of a lower rank would lay its rows along another dim.
    """
    nodes = operation._inbound_nodes
    tensors = [tensor for node in nodes for tensor in node.input_tensors]
    ranks = {len(tensor.shape) for tensor in tensors} - {0}
    if len(ranks) != 1:
        return False
    (rank,) = ranks
    arrays = [array.shape for node in nodes for array in _arrays_in(node)]
    return all(len(shape) < rank or (len(shape) == rank and shape[0] == 1) for shape in arrays)


def _is_given_rows(layer: Any) -> bool:
    """Whether it is given numbers for rows, beside the tensors of a functional model."""
    arrays = [array for node in layer._inbound_nodes for array in _arrays_in(node)]
    return not all(is_for_all_rows(layer, list(array.shape)) for array in arrays)


def _arrays_in(node: Any) -> list[Any]:
    # keras/src/ops/node.py, Node.arguments
    leaves = keras.tree.flatten((node.arguments.args, node.arguments.kwargs))
    return [leaf for leaf in leaves if not keras.utils.is_keras_tensor(leaf) and _has_dims(leaf)]


def _has_dims(leaf: Any) -> bool:
    return bool(len(getattr(leaf, "shape", ())))


def _fits_inside(part: Any) -> bool:
    # A part of a wrapper or cell may run inside a loop, where replicas cannot meet.
    if is_container(part):
        inside = all(_fits_inside(inner) for inner in parts_of(part))
    else:
        inside = works_by_rows(part)
    return inside and getattr(part, "activity_regularizer", None) is None


def _inner_layers(layer: Any) -> list[Any]:
    return list(layer._layers)


def _has_plain_options(layer: Any) -> bool:
    options = vars(layer)
    for name, value in options.items():
        if name.endswith("activation") and callable(value) and not _activates_by_rows(value):
            return False
        if name == "axis" and value is None:
            return False
        if name.lstrip("_").rpartition("_")[2] in ("axis", "axes") and not _leaves_rows(value):
            return False
    if options.get("noise_shape") is not None or options.get("stateful"):
        return False
    return type(layer).__name__ != "EinsumDense" or _keeps_first(layer.equation)


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
    module = str(getattr(activation, "__module__", ""))
    elementwise = module.startswith("keras.src.ops.") and name in OPERATIONS_BY_ROWS
    return elementwise or module.startswith("keras.src.activations.")


def _is_in_keras(thing: type) -> bool:
    return thing.__module__.startswith("keras.src.")
