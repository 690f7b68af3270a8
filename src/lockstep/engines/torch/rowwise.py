"""Decides which of Keras's layers work row by row, so that each replica can run its own rows."""

from typing import Any

import keras

from lockstep.keras_compat import Functional, module_in_keras

_LAYERS = """
    Activation ActivityRegularization Add AlphaDropout Attention Average AveragePooling1D
    AveragePooling2D AveragePooling3D Bidirectional Concatenate Conv1D Conv1DTranspose Conv2D
    Conv2DTranspose Conv3D Conv3DTranspose Cropping1D Cropping2D Cropping3D Dense DepthwiseConv1D
    DepthwiseConv2D Dropout ELU EinsumDense Embedding Flatten GRU GRUCell GaussianDropout
    GaussianNoise GlobalAveragePooling1D GlobalAveragePooling2D GlobalAveragePooling3D
    GlobalMaxPooling1D GlobalMaxPooling2D GlobalMaxPooling3D GroupNormalization Identity
    InputLayer LSTM LSTMCell LayerNormalization LeakyReLU Masking MaxPooling1D MaxPooling2D
    MaxPooling3D Maximum Minimum MultiHeadAttention Multiply PReLU Permute RMSNormalization RNN
    ReLU RepeatVector Rescaling Reshape SeparableConv1D SeparableConv2D SimpleRNN SimpleRNNCell
    Softmax SpatialDropout1D SpatialDropout2D SpatialDropout3D StackedRNNCells Subtract
    TimeDistributed UnitNormalization UpSampling1D UpSampling2D UpSampling3D ZeroPadding1D
    ZeroPadding2D ZeroPadding3D
"""
_ROWWISE = frozenset(_LAYERS.split())
"""Keras layers in which a row of the output depends on the same row of the input alone."""


def is_container(layer: Any) -> bool:
    """Return whether a layer only calls its inner layers, as a graph or a sequence."""
    # keras/src/models/functional.py and sequential.py
    calls = (Functional.call, keras.Sequential.call)
    return _has_call_of_its_class(layer) and getattr(type(layer), "call", None) in calls


def parts_of(container: Any) -> list[Any]:
    """Return the layers and other operations that a container calls."""
    functional = getattr(container, "_functional", None) or container
    # keras/src/ops/function.py, Function._operations
    operations = getattr(functional, "_operations", None)
    return list(container.layers if operations is None else operations)


def is_batch_norm(layer: Any) -> bool:
    """Return whether a layer is Keras's own batch norm over the rows."""
    return (
        type(layer) is keras.layers.BatchNormalization
        and layer.built
        and 0 in layer._reduction_axes
    )


def is_rowwise(layer: Any) -> bool:
    """Return whether each row of the output depends on the same row of the input alone.

    This is known only for Keras's own layers, with suitable options. Any other layer or
    operation may combine rows of the batch.
    """
    if not isinstance(layer, keras.layers.Layer) or not module_in_keras(type(layer)):
        return False
    if type(layer).__name__ not in _ROWWISE or not _has_call_of_its_class(layer):
        return False
    # keras/src/ops/operation.py, Operation._inbound_nodes
    inputs = [tensor for node in layer._inbound_nodes for tensor in node.input_tensors]
    if any(len(tensor.shape) < 2 for tensor in inputs):  # axis -1 is the batch
        return False
    if any(constants_in(node) for node in layer._inbound_nodes):  # it may have rows
        return False
    return _has_rowwise_options(layer) and all(is_rowwise(part) for part in layer._layers)


def constants_in(node: Any) -> list[Any]:
    """Return the arrays among the arguments of a call in a functional model."""
    # keras/src/ops/node.py, Node.arguments
    leaves = keras.tree.flatten((node.arguments.args, node.arguments.kwargs))
    return [
        leaf
        for leaf in leaves
        if not keras.utils.is_keras_tensor(leaf) and len(getattr(leaf, "shape", ()))
    ]


def _has_call_of_its_class(layer: Any) -> bool:
    return type(layer).__call__ is keras.layers.Layer.__call__ and "call" not in vars(layer)


def _has_rowwise_options(layer: Any) -> bool:
    options = vars(layer)
    for name, value in options.items():
        if name.endswith("activation") and callable(value) and not _activates_rowwise(value):
            return False
        if name == "axis" and value is None:
            return False
        if name.lstrip("_").rpartition("_")[2] in ("axis", "axes") and not _leaves_rows(value):
            return False
    if options.get("noise_shape") is not None or options.get("stateful"):
        return False
    return type(layer).__name__ != "EinsumDense" or _keeps_rows(layer.equation)


def _activates_rowwise(activation: Any) -> bool:
    if isinstance(activation, keras.layers.Layer):
        return is_rowwise(activation)
    return module_in_keras(activation).startswith("activations.")


def _leaves_rows(axes: Any) -> bool:
    flat = [axis for axis in keras.tree.flatten(axes) if isinstance(axis, int)]
    return all(axis == -1 or axis > 0 for axis in flat)


def _keeps_rows(equation: str) -> bool:
    inputs, _, outputs = equation.replace(" ", "").partition("->")
    return (inputs[:1] == outputs[:1] and inputs.partition(",")[2].find(inputs[:1]) < 0) or (
        inputs.startswith("...") and outputs.startswith("...")
    )
