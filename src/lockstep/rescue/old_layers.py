"""Build one layer of an old config in Keras 3, with its old defaults made explicit."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from lockstep.errors import NeedsCode, UntranslatableModel, printable
from lockstep.rescue.read import OldFile, release

REBUILD = (
    "Rebuild the single-device model (the template) in code, and use --model file.py:function."
)


def bare(name: str) -> str:
    """Return a name without its registration package."""
    return name.rpartition(">")[2]


@dataclass
class RebuildContext:
    """The objects of the user, and the notes for the user."""

    custom: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    version: str | None = None
    """`keras_version` of the old file."""

    def custom_object(self, name: Any) -> Any:
        """Return the user's object of a name, registered as `package>name` or not, or None.

        Example:
            >>> RebuildContext({"Scale": 1}).custom_object("Custom>Scale")
            1
        """
        if not isinstance(name, str):
            return None
        return self.custom.get(name, self.custom.get(bare(name)))

    @property
    def early(self) -> bool:
        """Whether the file is from Keras 2.0 to 2.3, or from tf.keras up to TensorFlow 2.2."""
        return (2,) <= release(self.version) < (2, 4)

    @property
    def perhaps_early(self) -> bool:
        """Whether it may be from TensorFlow 2.3 or earlier: 2.3 and 2.4 write one version."""
        return self.early or release(self.version) == (2, 4, 0)

    @property
    def standalone(self) -> bool:
        """Whether it is from stand-alone Keras 2, or from its copy in TensorFlow up to 1.12."""
        return self.early and self.version not in ("2.2.4-tf", "2.3.0-tf")

    def add_note(self, text: str) -> None:
        """Add a note for the user, once."""
        text = printable(text)
        if text not in self.notes:
            self.notes.append(text)


# ---------------------------------------------------------------- layers

RENAMED = {
    **dict.fromkeys(("CuDNNLSTM", "LSTMV1", "LSTMV2"), "LSTM"),
    **dict.fromkeys(("CuDNNGRU", "GRUV1", "GRUV2"), "GRU"),
    **dict.fromkeys(
        ("BatchNormalizationV1", "BatchNormalizationV2", "SyncBatchNormalization"),
        "BatchNormalization",
    ),
    **{f"Convolution{dims}D": f"Conv{dims}D" for dims in (1, 2, 3)},
    "ThresholdedReLU": "ReLU",
}

_GONE = {
    **dict.fromkeys(
        ("LocallyConnected1D", "LocallyConnected2D"),
        "locally connected layers were removed in Keras 3",
    ),
    **dict.fromkeys(
        ("TensorFlowOpLayer", "TFOpLambda", "SlicingOpLambda"),
        "it is a raw TensorFlow operation, not a layer",
    ),
}

_NO_EFFECT = frozenset(
    {
        *("batch_input_shape", "batch_shape", "input_shape", "input_dtype", "input_length"),
        *("input_dim", "output_shape", "query_shape", "key_shape", "value_shape"),
        *("implementation", "unroll", "fused", "swap_memory", "parallel_iterations"),
        *("renorm_momentum", "experimental_autocast", "autocast", "shared_object_id"),
        # separable and depthwise layers inherited these
        *("kernel_initializer", "kernel_regularizer", "kernel_constraint", "bias_constraint"),
    }
)
"""Arguments that Keras 3 lacks and that do not change a layer that is built."""

_DEFAULTS: dict[str, tuple[Any, ...]] = {
    # argument that Keras 3 lacks: the values that have no effect
    **dict.fromkeys(
        ("time_major", "ragged", "sparse", "dynamic", "stateful", "renorm", "causal",
         "synchronized", "return_sequences", "return_state"), (False,)),
    **dict.fromkeys(
        ("activity_regularizer", "renorm_clipping", "virtual_batch_size", "adjustment",
         "noise_shape"), (None,)),
    "groups": (1,),
    "mode": (0,),
    "data_format": ("channels_last", None),
    "num_constants": (0, None),
    "dilation_rate": (1, [1], [1, 1], [1, 1, 1]),
}  # fmt: skip

_RECURRENT = ("LSTM", "GRU", "SimpleRNN", "ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D")
_GATED = ("LSTM", "GRU", "ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D", "LSTMCell", "GRUCell")


def is_keras_own(class_name: str) -> bool:
    """Return whether Keras 3 has this layer, or Keras 2 had it."""
    name = RENAMED.get(class_name, class_name)
    return name in _GONE or inspect.isclass(getattr(keras.layers, name, None))


def layer(class_name: str, config: dict[str, Any], context: RebuildContext) -> Any:
    """Return a Keras 3 layer that computes the same as the old layer.

    Raises:
        NeedsCode: The layer is a custom layer that `context` lacks or that rejects its config.
        UntranslatableModel: Keras 3 lacks the layer or one of its arguments.
    """
    if class_name == "Lambda":
        return _lambda(config, context)
    if "name" in config:
        config = {**config, "name": clean(str(config["name"]))}
    named = f"{class_name} {config.get('name')!r}"
    if (own := context.custom_object(class_name)) is not None:
        return _custom(own, class_name, config)
    if class_name in _GONE:
        raise UntranslatableModel(
            f"The layer {config.get('name')!r} is a {class_name}: {_GONE[class_name]}.\n"
            "Rebuild the template in code without it and use --model file.py:function, or\n"
            "export only the arrays: -o weights.safetensors."
        )
    if not is_keras_own(class_name):
        name = bare(class_name)
        raise NeedsCode(
            f"The layer {config.get('name')!r} is a {class_name}, which is not a Keras layer.\n"
            "Code is never loaded from the file: pass the class with --custom file.py,\n"
            f"or in code with custom_objects={{{name!r}: {name}}}."
        )
    if class_name == "Softmax" and context.early and config.get("axis", -1) == -1:
        # The old Softmax layer ignores masks, as Activation does; Keras 3's applies them.
        config = {key: value for key, value in config.items() if key != "axis"}
        class_name, config = "Activation", {**config, "activation": "softmax"}
    name = RENAMED.get(class_name, class_name)
    cls = getattr(keras.layers, name)
    given = {key: plain(value) for key, value in config.items()}
    given = _arguments_of_today(class_name, name, given, context)
    taken = _taken(cls)
    arguments: dict[str, Any] = {}
    for key, value in given.items():
        if key == "unroll":
            continue  # does not change the result
        if key in taken:
            arguments[key] = _value(key, value, context)
        elif key not in _NO_EFFECT and value not in _DEFAULTS.get(key, ()):
            raise UntranslatableModel(
                f"The {named} has {key}={str(value)[:60]}, which Keras 3 does not support.\n"
                f"{REBUILD}"
            )
    try:
        return cls(**arguments)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise UntranslatableModel(
            f"Keras {keras.__version__} rejects the {named}: "
            f"{(str(error).splitlines() or [''])[0][:120]}\n{REBUILD}"
        ) from error


def _arguments_of_today(
    old: str, new: str, given: dict[str, Any], context: RebuildContext
) -> dict[str, Any]:
    """Return arguments under their present names, with old defaults made explicit."""
    if old in ("CuDNNLSTM", "CuDNNGRU"):
        given = {"activation": "tanh", **given, "recurrent_activation": "sigmoid"}
    if new in _GATED:
        given.setdefault("recurrent_activation", "hard_sigmoid")
    if new in ("GRU", "GRUCell"):
        given.setdefault("reset_after", old == "CuDNNGRU")
    if new == "BatchNormalization":
        axes = given.get("axis")
        if isinstance(axes, (list, tuple)):
            if len(axes) != 1:
                raise UntranslatableModel(
                    f"The BatchNormalization {given.get('name')!r} normalizes over axes {axes}, "
                    f"but Keras 3 supports only one axis.\n{REBUILD}"
                )
            given["axis"] = axes[0]
    if old == "LeakyReLU" and "alpha" in given:
        given["negative_slope"] = given.pop("alpha")
    if old == "ThresholdedReLU":
        given["threshold"] = given.pop("theta", 1.0)
    if new == "UpSampling2D" and given.get("interpolation") == "bilinear" and context.early:
        context.add_note(
            f"{given.get('name')} is bilinear: TensorFlow 1 sampled pixels at their corners and "
            "Keras 3 samples at their centres, so outputs may differ; compare them with --check"
        )
    if new == "Bidirectional" and given.get("backward_layer") is None:
        given.pop("backward_layer", None)
    return given


def _taken(cls: Any) -> set[str]:
    """Return the names of the arguments that a layer class takes."""
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


def _custom(cls: Any, class_name: str, config: dict[str, Any]) -> Any:
    given = {k: v for k, v in config.items() if k not in ("batch_input_shape", "shared_object_id")}
    if (kind := dtype(given.pop("dtype", None))) is not None:
        given["dtype"] = kind
    try:
        return cls.from_config(given) if hasattr(cls, "from_config") else cls(**given)
    except Exception as error:
        raise NeedsCode(
            f"Your class {class_name} did not accept the settings of {config.get('name')!r}: "
            f"{(str(error).splitlines() or [''])[0][:120]}\n"
            f"It is called with {', '.join(sorted(given))}. Pass **kwargs on to\n"
            "keras.layers.Layer, as Keras 3 layers do."
        ) from error


def lambda_function(config: dict[str, Any], context: RebuildContext) -> Any:
    """Return the user's function of a Lambda, by the layer's or function's name, or None."""
    given = context.custom_object(config.get("name"))
    if given is None and config.get("function_type") == "function":
        given = context.custom_object(config.get("function"))
    return given


def _lambda(config: dict[str, Any], context: RebuildContext) -> Any:
    given = lambda_function(config, context)
    if isinstance(given, keras.layers.Layer):
        return given
    shape = config.get("output_shape") if config.get("output_shape_type") == "raw" else None
    return keras.layers.Lambda(
        given,
        output_shape=tuple(shape) if shape else None,
        arguments={key: _array(value) for key, value in (config.get("arguments") or {}).items()},
        name=clean(str(config.get("name"))),
    )


def _array(value: Any) -> Any:
    """Return a Lambda's argument; Keras 2 has arrays as `{"type": "ndarray", "value": [...]}`."""
    if plain(value) is value:
        return value
    found = np.asarray(plain(value))
    return found.astype(keras.config.floatx()) if found.dtype == "float64" else found


def clean(name: str) -> str:
    """Replace slashes in a name, because Keras 3 does not allow them."""
    return name.replace("/", "_")


# ---------------------------------------------------------------- arguments


def _value(key: str, value: Any, context: RebuildContext) -> Any:
    if key == "dtype":
        return dtype(value)
    if value is None:
        return None
    if key == "activation" or key.endswith("_activation"):
        return activation(value, context)
    for kind in ("initializer", "regularizer", "constraint"):
        if key.endswith(f"_{kind}"):
            return _named_object(kind, value, context)
    if key in ("layer", "backward_layer", "cell"):
        return _inner(value, context)
    if key == "cells":
        return [_inner(cell, context) for cell in value]
    return value


def _inner(entry: Any, context: RebuildContext) -> Any:
    """Return the layer inside a wrapper; a model in it is built before."""
    if isinstance(entry, keras.layers.Layer):
        return entry
    if not isinstance(entry, dict) or not {"class_name", "config"} <= set(entry):
        raise UntranslatableModel(
            f"A wrapper holds {str(entry)[:60]!r} where a layer should be.\n"
            "The file is damaged, or of an unknown version."
        )
    return layer(entry["class_name"], entry["config"], context)


def plain(value: Any) -> Any:
    """Return the value in a JSON object such as `{"type": "ndarray", "value": 0.3}`."""
    if isinstance(value, dict):
        if set(value) == {"type", "value"}:
            return value["value"]
        if set(value) == {"class_name", "config"} and value["class_name"] == "TensorShape":
            return value["config"]
        if set(value) == {"class_name", "items"} and value["class_name"] == "__tuple__":
            return tuple(plain(item) for item in value["items"])
    return value


def dtype(value: Any) -> Any:
    """Return the name of a dtype or mixed-precision policy."""
    return value.get("config", {}).get("name") if isinstance(value, dict) else value


def _named_object(kind: str, value: Any, context: RebuildContext) -> Any:
    """Return an old initializer, regularizer or constraint; a note tells if its code is missing."""
    config: dict[str, Any] = {}
    if isinstance(value, dict) and isinstance(value.get("class_name"), str):
        name = value["class_name"]
        config = dict(value["config"]) if isinstance(value.get("config"), dict) else {}
    elif isinstance(value, str):
        name = "".join(part.capitalize() for part in value.split("_"))
    else:
        return value
    if name == "VarianceScaling" and config.get("distribution") == "normal":
        config["distribution"] = "truncated_normal"  # the old meaning
    own = context.custom_object(name)
    cls = getattr(getattr(keras, f"{kind}s"), name, None) if own is None else own
    if own is not None and not inspect.isclass(own):
        return own
    if inspect.isclass(cls):
        taken = inspect.signature(cls).parameters
        if any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            return cls(**config)
        return cls(**{key: plain(value) for key, value in config.items() if key in taken})
    if kind == "initializer":
        context.add_note(f"the initializer {name} is omitted (it is only used before training)")
        return "zeros"
    context.add_note(f"the {kind} {name} is omitted, because its code was not given (see --custom)")
    return None


_ACTIVATIONS = frozenset(
    {
        *("linear", "relu", "relu6", "elu", "selu", "leaky_relu", "gelu", "mish", "swish", "silu"),
        *("softmax", "log_softmax", "sigmoid", "tanh", "softplus", "softsign", "exponential"),
    }
)

_LATER = frozenset({"gelu", "mish", "silu", "leaky_relu", "relu6", "log_softmax"})
"""Not in Keras up to TensorFlow 2.3, where such a name is a function of the user."""


def activation(value: Any, context: RebuildContext) -> Any:
    """Return an old activation; custom activations come from the user."""
    if callable(value):
        return value
    if isinstance(value, str):
        if (own := context.custom_object(value)) is not None:
            return own
        if value == "hard_sigmoid":
            context.add_note(
                "hard_sigmoid is kept as Keras 2 defined it, clip(0.2x + 0.5, 0, 1); Keras 3 "
                "defines it differently"
            )
            return _old_hard_sigmoid()
        if value in _ACTIVATIONS and not (context.perhaps_early and value in _LATER):
            return keras.activations.get(value)
        raise NeedsCode(
            f"The activation {value!r} was not part of Keras up to TensorFlow 2.3, so it may be "
            "your own code.\nPass it with --custom file.py (a function of that name in it), or "
            f"in code with\ncustom_objects={{{bare(value)!r}: function}}."
        )
    if isinstance(value, dict) and isinstance(value.get("class_name"), str):
        if value["class_name"] == "function" and isinstance(value.get("config"), str):
            return activation(value["config"], context)
        if isinstance(value.get("config"), dict):
            return layer(value["class_name"], value["config"], context)
    raise UntranslatableModel(
        f"An activation is written as {str(value)[:80]!r}, which no known Keras version does.\n"
        f"{REBUILD}"
    )


def _old_hard_sigmoid() -> Any:
    """Build Keras 2's hard sigmoid, clip(0.2 x + 0.5, 0, 1), from Keras 3 layers.

    Keras 3's own `hard_sigmoid` is another function, clip(x / 6 + 0.5, 0, 1). A model made
    of Keras's layers loads without lockstep.
    """
    slope = keras.layers.Rescaling(0.2, offset=0.5, name="slope")
    clip = keras.layers.ReLU(max_value=1.0, name="clip")
    return keras.Sequential([slope, clip], name="keras2_hard_sigmoid")


# ---------------------------------------------------------------- settings of a live model


def unrecorded_settings(old: OldFile, layers: Iterable[Any]) -> list[str]:
    """Return a note on settings that weights do not record and whose defaults have changed.

    Args:
        old: The file of the weights.
        layers: The layers of a model that the user built, wrapped layers and cells included.
    """
    early = release(old.version) < (2, 4)
    kinds = []
    for layer in layers:
        kind = type(layer).__name__.removesuffix("Cell")
        gates = getattr(layer, "recurrent_activation", None)
        used = (gates, getattr(layer, "activation", None))
        changed = (early or kind.startswith("ConvLSTM")) and gates is keras.activations.sigmoid
        resets = early and getattr(layer, "reset_after", False) and not layer.use_bias
        if changed or resets or keras.activations.hard_sigmoid in used:
            kinds.append(kind)
    if not kinds:
        return []
    return [
        "the weights do not record recurrent_activation, reset_after and hard_sigmoid, which "
        f"had other defaults in {old.library} (here: {', '.join(dict.fromkeys(kinds))}): "
        "compare the outputs with lockstep rescue --check"
    ]
