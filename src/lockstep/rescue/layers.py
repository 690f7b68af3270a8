"""One old layer config into one Keras 3 layer.

Every argument of the old layer is accounted for: taken over, renamed, known to
mean nothing, or refused. An argument that is silently dropped would be a model
that silently computes something else.
"""

from __future__ import annotations

import inspect
from typing import Any

from lockstep.errors import NeedsCode, UntranslatableModel
from lockstep.rescue import settings
from lockstep.rescue.settings import Context

RENAMED = {
    "CuDNNLSTM": "LSTM",
    "CuDNNGRU": "GRU",
    "ThresholdedReLU": "ReLU",
    "BatchNormalizationV1": "BatchNormalization",
    "BatchNormalizationV2": "BatchNormalization",
    "SyncBatchNormalization": "BatchNormalization",
    "Convolution1D": "Conv1D",
    "Convolution2D": "Conv2D",
    "Convolution3D": "Conv3D",
    "LSTMV1": "LSTM",
    "LSTMV2": "LSTM",
    "GRUV1": "GRU",
    "GRUV2": "GRU",
}

_GONE = {
    "LocallyConnected1D": "locally connected layers were removed in Keras 3",
    "LocallyConnected2D": "locally connected layers were removed in Keras 3",
    "TensorFlowOpLayer": "it is a raw TensorFlow operation, not a layer",
    "TFOpLambda": "it is a raw TensorFlow operation, not a layer",
    "SlicingOpLambda": "it is a raw TensorFlow operation, not a layer",
    "Merge": "Keras 1's Merge carries code",
    "MaxoutDense": "it went with Keras 1",
    "Highway": "it went with Keras 1",
}

_MEANINGLESS: dict[str, tuple[Any, ...] | None] = {
    # argument: the values with which it changes nothing; None where no value does
    "batch_input_shape": None,
    "batch_shape": None,
    "input_shape": None,
    "input_dtype": None,
    "input_length": None,
    "input_dim": None,
    "implementation": None,
    "unroll": None,
    "fused": None,
    "swap_memory": None,
    "parallel_iterations": None,
    "output_shape": None,
    "query_shape": None,
    "key_shape": None,
    "value_shape": None,
    "kernel_initializer": None,  # separable and depthwise layers inherited these three
    "kernel_regularizer": None,
    "kernel_constraint": None,
    "bias_constraint": None,
    "activity_regularizer": (None,),
    "groups": (1,),
    "time_major": (False,),
    "ragged": (False,),
    "sparse": (False,),
    "dynamic": (False,),
    "stateful": (False,),
    "renorm": (False,),
    "renorm_clipping": (None,),
    "renorm_momentum": None,
    "virtual_batch_size": (None,),
    "adjustment": (None,),
    "noise_shape": (None,),
    "data_format": ("channels_last", None),
    "causal": (False,),
    "num_constants": (0, None),
    "experimental_autocast": None,
    "autocast": None,
    "shared_object_id": None,
    "synchronized": (False,),
    "dilation_rate": (1, [1], [1, 1], [1, 1, 1]),
    "return_sequences": (False,),
    "return_state": (False,),
}

_RECURRENT = ("LSTM", "GRU", "SimpleRNN", "ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D")
_CELLS = ("LSTMCell", "GRUCell", "SimpleRNNCell")


def known(class_name: str) -> bool:
    """Whether Keras 3 has this layer, under this name or a later one."""
    import keras

    return inspect.isclass(getattr(keras.layers, RENAMED.get(class_name, class_name), None))


def layer(class_name: str, config: dict[str, Any], context: Context) -> Any:
    """A Keras 3 layer that computes what the old one did.

    Raises:
        NeedsCode: The layer is the user's own.
        UntranslatableModel: Keras 3 has no such layer, or lost an argument of it.
    """
    import keras

    if class_name in context.custom:
        return _custom(class_name, config, context)
    if class_name in _GONE:
        raise UntranslatableModel(
            f"The layer {config.get('name')!r} is a {class_name}: {_GONE[class_name]}.\n"
            "Rebuild the template in code without it and use --model file.py:function, or\n"
            "take the arrays alone: -o weights.safetensors."
        )
    if not known(class_name):
        own = settings.bare(class_name)
        raise NeedsCode(
            f"The layer {config.get('name')!r} is a {class_name}, which is none of Keras's.\n"
            "Its code is never taken from the file: give the class with --custom file.py,\n"
            f"or in code with custom_objects={{{own!r}: {own}}}."
        )
    if class_name == "Softmax" and context.early and config.get("axis", -1) == -1:
        # The layer of that time knew no mask, like Activation and unlike Keras 3's Softmax.
        config = {key: value for key, value in config.items() if key != "axis"}
        class_name, config = "Activation", {**config, "activation": "softmax"}
    name = RENAMED.get(class_name, class_name)
    cls = getattr(keras.layers, name)
    given = {key: settings.plain(value) for key, value in config.items()}
    given = _renamed(class_name, name, given, context)
    taken = _arguments(cls)
    arguments: dict[str, Any] = {}
    for key, value in given.items():
        if key == "unroll":
            continue  # how it is computed, not what
        if key in taken:
            arguments[key] = _value(key, value, context)
        elif key not in _MEANINGLESS or (
            _MEANINGLESS[key] is not None and value not in (_MEANINGLESS[key] or ())
        ):
            raise UntranslatableModel(
                f"The {class_name} {config.get('name')!r} has {key}={str(value)[:60]}, "
                "which Keras 3 does not have.\n"
                "Rebuild the template in code and use --model file.py:function."
            )
    try:
        return cls(**arguments)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise UntranslatableModel(
            f"Keras {keras.__version__} does not take the {class_name} {config.get('name')!r}: "
            f"{(str(error).splitlines() or [''])[0][:120]}\n"
            "Rebuild the template in code and use --model file.py:function."
        ) from error


def _renamed(old: str, new: str, given: dict[str, Any], context: Context) -> dict[str, Any]:
    """Arguments under their present names, with old defaults written out."""
    given = dict(given)
    if old in ("CuDNNLSTM", "CuDNNGRU"):
        given.setdefault("activation", "tanh")
        given["recurrent_activation"] = "sigmoid"
        if new == "GRU":
            given["reset_after"] = True
    if new in _RECURRENT + _CELLS and "SimpleRNN" not in new:
        given.setdefault("recurrent_activation", "hard_sigmoid")
    if new in ("GRU", "GRUCell"):
        given.setdefault("reset_after", False)
    if new == "BatchNormalization":
        if isinstance(given.get("axis"), (list, tuple)):
            if len(given["axis"]) != 1:
                raise UntranslatableModel(
                    f"The BatchNormalization {given.get('name')!r} runs over axes "
                    f"{given['axis']}, and Keras 3's over one.\n"
                    "Rebuild the template in code and use --model file.py:function."
                )
            given["axis"] = given["axis"][0]
        if given.pop("mode", 0) != 0:
            raise UntranslatableModel(
                f"The BatchNormalization {given.get('name')!r} has a mode of Keras 1.\n"
                "Rebuild the template in code and use --model file.py:function."
            )
    if old == "LeakyReLU" and "alpha" in given:
        given["negative_slope"] = given.pop("alpha")
    if old == "ThresholdedReLU":
        given["threshold"] = given.pop("theta", 1.0)
    if new == "UpSampling2D" and given.get("interpolation") == "bilinear" and context.early:
        context.note(
            f"{given.get('name')} is bilinear: TensorFlow 1 sampled pixels at their corners and "
            "Keras 3 samples at their centres, so outputs may differ; prove them with --check"
        )
    if new == "Bidirectional" and given.get("backward_layer") is None:
        given.pop("backward_layer", None)
    return given


def _value(key: str, value: Any, context: Context) -> Any:
    if key == "dtype":
        return settings.dtype(value)
    if value is None:
        return None
    if key == "activation" or key.endswith("_activation"):
        return settings.activation(value, context)
    if key.endswith("_initializer"):
        made = settings.initializer(value, context)
        return "zeros" if made is None else made
    if key.endswith("_regularizer"):
        return settings.regularizer(value, context)
    if key.endswith("_constraint"):
        return settings.constraint(value, context)
    if key in ("layer", "backward_layer", "cell"):
        return inner(value, context)
    if key == "cells":
        return [inner(cell, context) for cell in value]
    return value


def inner(entry: Any, context: Context) -> Any:
    """The layer inside a wrapper; a whole model inside TimeDistributed included."""
    from lockstep.rescue import graph, parallel

    if not isinstance(entry, dict) or not {"class_name", "config"} <= set(entry):
        raise UntranslatableModel(
            f"A wrapper holds {str(entry)[:60]!r} where a layer should be.\n"
            "The file is damaged, or of a version that is not known here."
        )
    if parallel.is_model(entry):
        return graph.inner_model(entry, context)
    if entry["class_name"] == "Lambda":
        return graph.lambda_layer(str(entry["config"].get("name")), entry["config"], context)
    return layer(entry["class_name"], entry["config"], context)


def _arguments(cls: Any) -> set[str]:
    taken = {"name", "trainable", "dtype"}
    for base in cls.__mro__:
        if base.__name__ in ("Layer", "Operation", "object"):
            break
        parameters = inspect.signature(base.__init__).parameters
        taken |= set(parameters) - {"self", "args", "kwargs"}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            break
    if cls.__name__ in _RECURRENT:
        taken |= {"activity_regularizer"}
    return taken - {"input_shape", "batch_shape", "weights", "lora_rank", "cell_class"}


def _custom(class_name: str, config: dict[str, Any], context: Context) -> Any:
    cls = context.custom[class_name]
    given = {k: v for k, v in config.items() if k not in ("batch_input_shape", "shared_object_id")}
    given["dtype"] = settings.dtype(given.get("dtype"))
    if given["dtype"] is None:
        del given["dtype"]
    try:
        return cls.from_config(given) if hasattr(cls, "from_config") else cls(**given)
    except Exception as error:
        raise NeedsCode(
            f"Your class {class_name} did not accept the settings of {config.get('name')!r}: "
            f"{(str(error).splitlines() or [''])[0][:120]}\n"
            f"It is called with {', '.join(sorted(given))}: let it pass **kwargs on to\n"
            "keras.layers.Layer, as Keras 3 layers do."
        ) from error
