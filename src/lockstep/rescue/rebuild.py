"""Build old model configs in Keras 3.

The graph is rebuilt by calling layers, as the original code did. Node numbers, shared
layers and nested models therefore keep their meaning.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import NeedsCode, OldFileError, UntranslatableModel
from lockstep.rescue import old_settings as settings
from lockstep.rescue.old_settings import Context, dtype
from lockstep.rescue.unwrap import is_model

CALLS_CAP = 20_000
"""Maximum number of layer calls in one model; the largest known model has about 3,000."""

NESTING_CAP = 40
"""Maximum depth of nested models; the deepest known model has four levels."""


@dataclass
class Part:
    """A layer, or a model with its parts, under its name in the old file."""

    name: str
    layer: Any
    class_name: str
    parts: list[Part] = field(default_factory=list)
    is_model: bool = False
    trainable: bool = True


def build(model: dict[str, Any], context: Context) -> Part:
    """Build an old model config in Keras 3, without frozen flags; only wrapped layers keep theirs.

    Args:
        model: `{"class_name": ..., "config": ...}`, as in `to_json()` or a file.
        context: The user's classes; receives the notes.

    Raises:
        NeedsCode: `context` lacks custom or Lambda layers of the model. The error names
            all of them.
        UntranslatableModel: Keras 3 cannot express the model.
    """
    require_modest(model)
    _require_code(model, context)
    try:
        return _model(model, context)
    except OldFileError:
        raise
    except RecursionError as error:
        raise UntranslatableModel(
            "The model is nested deeper than any known one.\nThe file is damaged or made to harm."
        ) from error
    except Exception as error:  # Keras raises many kinds of errors
        raise UntranslatableModel(
            f"Keras 3 does not build this old model: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:160]}\n"
            "Rebuild the template in code and use --model file.py:function."
        ) from error


def require_modest(model: Any) -> int:
    """Refuse a config whose model would take hours to build.

    A model that calls a nested model twice runs all layers of the nested model twice.

    Returns:
        The number of layer calls; layers of nested models count once for each call.
    """

    def calls(entry: Any, depth: int) -> int:
        config = entry.get("config") if isinstance(entry, dict) else None
        inside = config.get("layers") if isinstance(config, dict) else config
        if isinstance(config, dict) and isinstance(config.get("layer"), dict):
            inside = [config["layer"]]
        if not isinstance(inside, list):
            return 1
        if depth > NESTING_CAP:
            raise UntranslatableModel(
                f"The model has more than {NESTING_CAP} models within models.\n"
                "The file is damaged or made to harm."
            )
        total = 0
        for one in inside:
            listed = one.get("inbound_nodes") if isinstance(one, dict) else None
            times = max(len(listed), 1) if isinstance(listed, list) else 1
            total += times * calls(one, depth + 1)
            if total > CALLS_CAP:
                raise UntranslatableModel(
                    f"The model calls more than {CALLS_CAP:,} layers, and no known one as many.\n"
                    "The file is damaged or made to harm."
                )
        return total

    return calls(model, 0)


@contextlib.contextmanager
def recursion_for(model: Any, context: Context) -> Iterator[None]:
    """Raise the recursion limit in the body: Keras recurses once for each layer of a chain."""
    before = sys.getrecursionlimit()
    needed = 600 + 2 * require_modest(model)
    if needed > before:
        context.note(
            "Keras follows a model layer by layer: where this one is loaded, call "
            f"sys.setrecursionlimit({needed}) first"
        )
    sys.setrecursionlimit(max(needed, before))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def inner_model(entry: dict[str, Any], context: Context) -> Any:
    """Build a model inside a wrapper layer."""
    return _model(entry, context).layer


def _model(entry: dict[str, Any], context: Context) -> Part:
    config = entry["config"]
    if isinstance(config, list):
        return _sequential(entry.get("name") or "sequential", config, None, context)
    if "input_layers" in config:
        return _functional(entry, context)
    if "layers" in config:
        name = config.get("name") or entry.get("name") or "sequential"
        return _sequential(name, config["layers"], config.get("build_input_shape"), context)
    raise UntranslatableModel(
        f"The model {config.get('name')!r} is a {entry.get('class_name')} with code of its own "
        "(a subclassed model).\n"
        "Rebuild it in code and use --model file.py:function."
    )


def part_of(entry: dict[str, Any], context: Context) -> Part:
    """Build a layer or nested model of a config, as a part."""
    name = str(entry.get("name") or entry_name(entry))
    if is_model(entry):
        part = _model({**entry, "name": name}, context)
        part.name = name
        return part
    config = {**entry["config"], "name": _clean(name)}
    trainable = bool(config.pop("trainable", True))
    class_name = entry["class_name"]
    if class_name == "Lambda":
        return Part(name, lambda_layer(name, entry["config"], context), class_name)
    part = Part(name, layer(class_name, config, context), class_name, trainable=trainable)
    if class_name == "TimeDistributed" and is_model(config["layer"]):
        # The parts must refer to the layer object that was built.
        wrapped = _described(config["layer"], part.layer.layer)
        wrapped.trainable = trainable
        part.parts, part.is_model = [wrapped], True
    elif class_name in ("TimeDistributed", "Bidirectional"):
        part.trainable = trainable and bool(config["layer"]["config"].get("trainable", True))
    return part


def _described(entry: dict[str, Any], model: Any) -> Part:
    """Return a model that is already built as a part."""
    config = entry["config"]
    entries = config if isinstance(config, list) else config["layers"]
    built = {layer.name: layer for layer in model.layers}
    part = Part(str(entry_name(entry) or model.name), model, entry["class_name"], is_model=True)
    for one in entries:
        name = str(one.get("name") or entry_name(one))
        if one["class_name"] == "InputLayer":
            continue
        layer = built[_clean(name)]
        if is_model(one):
            part.parts.append(_described({**one, "name": name}, layer))
        else:
            trainable = bool(one["config"].get("trainable", True))
            part.parts.append(Part(name, layer, one["class_name"], trainable=trainable))
    return part


def _sequential(name: str, entries: Any, build_shape: Any, context: Context) -> Part:
    import keras

    _require_list(entries)
    parts = [part_of(entry, context) for entry in entries if entry["class_name"] != "InputLayer"]
    first = next(iter(entries), None)
    if first is None or not parts:
        raise UntranslatableModel(
            f"The Sequential {name!r} has no layers.\nThere is nothing in it to rescue."
        )
    shape = first["config"].get("batch_input_shape") if isinstance(first["config"], dict) else None
    kind = dtype(first["config"].get("dtype")) if isinstance(first["config"], dict) else None
    if shape is None and first["class_name"] == "InputLayer":
        shape = first["config"].get("batch_shape")
    if shape is None and parts[0].is_model and hasattr(parts[0].layer, "input_shape"):
        shape = parts[0].layer.input_shape
        kind = parts[0].layer.inputs[0].dtype if parts[0].layer.inputs else None
    if shape is None:
        shape, kind = build_shape, None
    stacked = [part.layer for part in parts]
    if shape is not None:
        if isinstance(kind, str) and kind.startswith("mixed"):
            kind = None
        stacked.insert(
            0, keras.Input(batch_shape=tuple(shape), dtype=kind, name=f"{_clean(name)}_input")
        )
    else:
        context.note(f"the Sequential {name!r} has no input shape: its parent gives it")
    return Part(name, keras.Sequential(stacked, name=_clean(name)), "Sequential", parts, True)


def _functional(entry: dict[str, Any], context: Context) -> Part:
    import keras

    config = entry["config"]
    _require_list(config["layers"])
    parts: dict[str, Part] = {}
    outputs: dict[tuple[str, int], list[Any]] = {}
    waiting: list[tuple[str, int, Any]] = []
    inputs: dict[str, Any] = {}
    for one in config["layers"]:
        name = str(one.get("name") or entry_name(one))
        if one["class_name"] == "InputLayer":
            inputs[name] = _input(name, one["config"])
            outputs[name, 0] = [inputs[name]]
            continue
        parts[name] = part_of({**one, "name": name}, context)
        start = 1 if parts[name].is_model and _from_one(config, name) else 0
        for position, call in enumerate(one["inbound_nodes"]):
            waiting.append((name, position + start, call))
    while waiting:
        stuck = []
        for name, number, call in waiting:
            arguments = _resolve(call, parts, outputs)
            if arguments is None:
                stuck.append((name, number, call))
            else:
                result = _call(parts[name].layer, *arguments)
                outputs[name, number] = (
                    list(result) if isinstance(result, (list, tuple)) else [result]
                )
        if len(stuck) == len(waiting):
            raise UntranslatableModel(
                f"The graph of {config.get('name')!r} has no order: {stuck[0][0]!r} waits for "
                "a layer that is never called.\nThe file is damaged."
            )
        waiting = stuck
    taken = [_tensor(ref, outputs) for ref in references(config["input_layers"])]
    given = [_tensor(ref, outputs) for ref in references(config["output_layers"])]
    name = str(config.get("name") or entry.get("name") or "model")
    model = keras.Model(
        taken[0] if len(taken) == 1 else taken,
        given[0] if len(given) == 1 else given,
        name=_clean(name),
    )
    return Part(name, model, "Functional", list(parts.values()), True)


def _input(name: str, config: dict[str, Any]) -> Any:
    import keras

    shape = config.get("batch_input_shape", config.get("batch_shape"))
    if config.get("ragged"):
        raise UntranslatableModel(
            f"The input {name!r} is ragged, which Keras 3 does not have everywhere.\n"
            "Rebuild the template in code and use --model file.py:function."
        )
    return keras.Input(
        batch_shape=tuple(shape or ()),
        dtype=dtype(config.get("dtype")),
        sparse=bool(config.get("sparse", False)),
        name=_clean(name),
    )


def _from_one(config: dict[str, Any], name: str) -> bool:
    """Return whether calls of a nested model are numbered from 1; node 0 is its own graph."""
    used = [ref[1] for ref in _walk(config) if ref[0] == name]
    return 0 not in used


def _walk(config: dict[str, Any]) -> list[list[Any]]:
    found: list[list[Any]] = references(config["output_layers"])
    stack: list[Any] = [one["inbound_nodes"] for one in config["layers"]]
    while stack:
        here = stack.pop()
        if _is_reference(here):
            found.append(here)
            stack += here[3:]
        elif isinstance(here, list):
            stack += here
        elif isinstance(here, dict):
            stack += here.values()
    return found


def _is_reference(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) in (3, 4)
        and isinstance(value[0], str)
        and type(value[1]) is int
        and type(value[2]) is int
    )


def references(listed: Any) -> list[list[Any]]:
    """Return references `[layer, node, tensor]` in any nesting as a flat list."""
    if _is_reference(listed):
        return [listed]
    values = listed.values() if isinstance(listed, dict) else listed
    return [ref for value in values for ref in references(value)]


def _tensor(ref: list[Any], outputs: dict[tuple[str, int], list[Any]]) -> Any:
    return outputs[ref[0], ref[1]][ref[2]]


def _resolve(
    call: Any, parts: dict[str, Part], outputs: dict[tuple[str, int], list[Any]]
) -> tuple[Any, dict[str, Any]] | None:
    """Return the positional input and the keywords of an old call, or None if it must wait."""
    refs = references(call)
    keywords = refs[0][3] if refs and len(refs[0]) > 3 and isinstance(refs[0][3], dict) else {}
    nested = _walk({"output_layers": [], "layers": [{"inbound_nodes": [keywords]}]})
    if any((ref[0], ref[1]) not in outputs for ref in [*refs, *nested]):
        return None

    def real(value: Any) -> Any:
        if _is_reference(value) and (value[0], value[1]) in outputs:
            return _tensor(value, outputs)
        if isinstance(value, list):
            return [real(item) for item in value]
        return value

    tensors = [_tensor(ref, outputs) for ref in refs]
    positional: Any = tensors[0] if _is_reference(call) or len(tensors) == 1 else tensors
    if isinstance(call, dict):
        positional = {key: _tensor(references(ref)[0], outputs) for key, ref in call.items()}
    return positional, {key: real(value) for key, value in keywords.items() if value is not None}


def _call(layer: Any, positional: Any, keywords: dict[str, Any]) -> Any:
    import keras

    recurrent = isinstance(layer, (keras.layers.RNN, keras.layers.Bidirectional))
    if recurrent and isinstance(positional, list):
        return layer(positional[0], initial_state=positional[1:], **keywords)
    if isinstance(layer, keras.layers.Concatenate | keras.layers.Add) and not isinstance(
        positional, list
    ):
        positional = [positional]
    return layer(positional, **keywords)


def lambda_layer(name: str, config: dict[str, Any], context: Context) -> Any:
    """Return a Lambda with the user's function, found by the layer's or function's name."""
    import keras

    given = context.custom.get(name)
    if given is None and config.get("function_type") == "function":
        given = context.custom.get(str(config.get("function")))
    if isinstance(given, keras.layers.Layer):
        return given
    shape = config.get("output_shape") if config.get("output_shape_type") == "raw" else None
    return keras.layers.Lambda(
        given,
        output_shape=tuple(shape) if shape else None,
        arguments={key: _array(value) for key, value in (config.get("arguments") or {}).items()},
        name=_clean(name),
    )


def _array(value: Any) -> Any:
    """Return a Lambda's argument; Keras 2 has arrays as `{"type": "ndarray", "value": [...]}`."""
    import keras
    import numpy as np

    if settings.plain(value) is value:
        return value
    found = np.asarray(settings.plain(value))
    return found.astype(keras.config.floatx()) if found.dtype == "float64" else found


def _require_code(model: dict[str, Any], context: Context) -> None:
    """Raise NeedsCode with the names of all layers that need the user's code."""
    wanted: dict[str, str] = {}
    stack: list[Any] = [model]
    while stack:
        here = stack.pop()
        if isinstance(here, list):
            stack += here
        elif isinstance(here, dict):
            name, config = here.get("class_name"), here.get("config")
            if name == "Lambda" and isinstance(config, dict):
                label = str(config.get("name"))
                function = (
                    str(config.get("function")) if config.get("function_type") == "function" else ""
                )
                if label not in context.custom and function not in context.custom:
                    wanted[label] = f"the Lambda {label!r}" + (
                        f" (function {function!r})" if function.isidentifier() else ""
                    )
            elif (
                "inbound_nodes" in here
                and isinstance(name, str)
                and name not in context.custom
                and not is_model(here)
                and not known(name)
                and name not in _GONE
            ):
                wanted[name] = f"the layer class {settings.bare(name)}"
            stack += [value for key, value in here.items() if key != "inbound_nodes"]
    if wanted:
        listed = ", ".join(wanted.values())
        raise NeedsCode(
            f"The template needs code that is yours: {listed[:300]}.\n"
            "Code in the file is never run. Give a file that defines each under its name with\n"
            "--custom file.py (a Lambda: a function under the layer's name), or custom_objects=."
        )


def entry_name(entry: dict[str, Any]) -> str | None:
    """Return the name of a layer in a config; its place depends on the Keras version."""
    config = entry.get("config")
    return config.get("name") if isinstance(config, dict) else entry.get("name")


def _clean(name: str) -> str:
    """Replace slashes in a name, because Keras 3 does not allow them."""
    return name.replace("/", "_")


def _require_list(entries: Any) -> None:
    if not isinstance(entries, list):
        raise UntranslatableModel(
            "A model of the file has no list of layers.\nThe file is damaged or made to harm."
        )


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
    # argument: the values that have no effect; None if no value has an effect
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
    """Return whether Keras 3 has this layer, under this name or a later one."""
    import keras

    return inspect.isclass(getattr(keras.layers, RENAMED.get(class_name, class_name), None))


def layer(class_name: str, config: dict[str, Any], context: Context) -> Any:
    """Return a Keras 3 layer that computes the same as the old layer.

    Raises:
        NeedsCode: The layer is a custom layer that `context` lacks or that rejects its config.
        UntranslatableModel: Keras 3 lacks the layer or one of its arguments.
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
        # The old Softmax layer ignores masks, as Activation does; Keras 3's applies them.
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
            continue  # does not change the result
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
    """Return arguments under their present names, with old defaults made explicit."""
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
        return activation(value, context)
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
    """Return the layer or model inside a wrapper."""
    if not isinstance(entry, dict) or not {"class_name", "config"} <= set(entry):
        raise UntranslatableModel(
            f"A wrapper holds {str(entry)[:60]!r} where a layer should be.\n"
            "The file is damaged, or of a version that is not known here."
        )
    if is_model(entry):
        return inner_model(entry, context)
    if entry["class_name"] == "Lambda":
        return lambda_layer(str(entry["config"].get("name")), entry["config"], context)
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


def activation(value: Any, context: Context) -> Any:
    """Return an old activation; custom activations come from `context.custom`."""
    import keras

    if value is None or callable(value):
        return value
    if isinstance(value, str):
        if value in context.custom:
            return context.custom[value]
        if value == "hard_sigmoid":
            context.note(
                "hard_sigmoid is kept as Keras 2 defined it, clip(0.2x + 0.5, 0, 1); "
                "Keras 3's is another function"
            )
            return settings.old_hard_sigmoid()
        if value in _ACTIVATIONS and not (context.perhaps_early and value in _LATER):
            return keras.activations.get(value)
        raise NeedsCode(
            f"The activation {value!r} was none of Keras's up to TensorFlow 2.3: its code may be "
            "yours.\n"
            "Give it with --custom file.py (a function of that name in it), or in code with\n"
            f"custom_objects={{{settings.bare(value)!r}: function}}."
        )
    if isinstance(value, dict) and isinstance(value.get("class_name"), str):
        if value["class_name"] == "function" and isinstance(value.get("config"), str):
            return activation(value["config"], context)
        if isinstance(value.get("config"), dict):
            return layer(value["class_name"], value["config"], context)
    raise UntranslatableModel(
        f"An activation is written as {str(value)[:80]!r}, a form no Keras version is known for.\n"
        "Rebuild the template in code and use --model file.py:function."
    )


_ACTIVATIONS = frozenset(
    {
        *("linear", "relu", "relu6", "elu", "selu", "leaky_relu", "gelu", "mish", "swish", "silu"),
        *("softmax", "log_softmax", "sigmoid", "tanh", "softplus", "softsign", "exponential"),
    }
)

_LATER = frozenset({"gelu", "mish", "silu", "leaky_relu", "relu6", "log_softmax"})
"""Not in Keras up to TensorFlow 2.3, where such a name is a function of the user."""
