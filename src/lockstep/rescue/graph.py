"""Old model configs, bare-list Sequential to nested functional, built in Keras 3.

The graph is rebuilt call by call, as the user's own code once did, so that node
numbers, shared layers and nested models mean what they meant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import NeedsCode, OldFileError, UntranslatableModel
from lockstep.rescue import layers, parallel, settings
from lockstep.rescue.settings import Context, dtype

LAYERS_CAP = 20_000
"""Layers that one model may have; the largest known has about 3,000."""


@dataclass
class Part:
    """A layer, or a model with its parts, under the name it has in the old file."""

    name: str
    layer: Any
    class_name: str
    parts: list[Part] = field(default_factory=list)
    is_model: bool = False
    trainable: bool = True


def build(model: dict[str, Any], context: Context) -> Part:
    """Build an old model config in Keras 3, all weights trainable as by nature.

    Args:
        model: `{"class_name": ..., "config": ...}` as `to_json` or a file has it.
        context: The user's own classes; gets the notes.

    Raises:
        NeedsCode: Custom or Lambda layers are in it that `context` does not have; the
            error names all of them.
        UntranslatableModel: Keras 3 cannot express it.
    """
    _require_code(model, context)
    try:
        return _model(model, context)
    except OldFileError:
        raise
    except RecursionError as error:
        raise UntranslatableModel(
            "The model is nested deeper than any known one.\nThe file is damaged or made to harm."
        ) from error
    except Exception as error:  # Keras raises all kinds; the user needs one
        raise UntranslatableModel(
            f"Keras 3 does not build this old model: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:160]}\n"
            "Rebuild the template in code and use --model file.py:function."
        ) from error


def inner_model(entry: dict[str, Any], context: Context) -> Any:
    """A model inside a wrapper layer."""
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
    """A layer or nested model of a config, as a part."""
    name = str(entry.get("name") or entry_name(entry))
    if parallel.is_model(entry):
        part = _model({**entry, "name": name}, context)
        part.name = name
        return part
    config = {**entry["config"], "name": _clean(name)}
    trainable = bool(config.pop("trainable", True))
    class_name = entry["class_name"]
    if class_name == "Lambda":
        return Part(name, lambda_layer(name, entry["config"], context), class_name)
    part = Part(name, layers.layer(class_name, config, context), class_name, trainable=trainable)
    if class_name == "TimeDistributed" and parallel.is_model(config["layer"]):
        # The parts must be those of the very layer that was built.
        wrapped = _described(config["layer"], part.layer.layer)
        wrapped.trainable = trainable
        part.parts, part.is_model = [wrapped], True
    elif class_name in ("TimeDistributed", "Bidirectional"):
        part.trainable = trainable and bool(config["layer"]["config"].get("trainable", True))
    return part


def _described(entry: dict[str, Any], model: Any) -> Part:
    """The parts of a model that was built already."""
    config = entry["config"]
    entries = config if isinstance(config, list) else config["layers"]
    built = {layer.name: layer for layer in model.layers}
    part = Part(str(entry_name(entry) or model.name), model, entry["class_name"], is_model=True)
    for one in entries:
        name = str(one.get("name") or entry_name(one))
        if one["class_name"] == "InputLayer":
            continue
        layer = built[_clean(name)]
        if parallel.is_model(one):
            part.parts.append(_described({**one, "name": name}, layer))
        else:
            trainable = bool(one["config"].get("trainable", True))
            part.parts.append(Part(name, layer, one["class_name"], trainable=trainable))
    return part


def _sequential(name: str, entries: Any, build_shape: Any, context: Context) -> Part:
    import keras

    _count(entries)
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
    _count(config["layers"])
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
    """Whether calls of this nested model are numbered from 1 (0 was its own graph)."""
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
    """References `[layer, node, tensor]` in any nesting, as a flat list."""
    if _is_reference(listed):
        return [listed]
    values = listed.values() if isinstance(listed, dict) else listed
    return [ref for value in values for ref in references(value)]


def _tensor(ref: list[Any], outputs: dict[tuple[str, int], list[Any]]) -> Any:
    return outputs[ref[0], ref[1]][ref[2]]


def _resolve(
    call: Any, parts: dict[str, Part], outputs: dict[tuple[str, int], list[Any]]
) -> tuple[Any, dict[str, Any]] | None:
    """Positional input and keyword arguments of one old call, or None while it must wait."""
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
    """A Lambda with the user's function, given under the layer's name or the function's."""
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
    """An argument of a Lambda; Keras 2 wrote arrays as `{"type": "ndarray", "value": [...]}`."""
    import keras
    import numpy as np

    if settings.plain(value) is value:
        return value
    found = np.asarray(settings.plain(value))
    return found.astype(keras.config.floatx()) if found.dtype == "float64" else found


def _require_code(model: dict[str, Any], context: Context) -> None:
    """Raise NeedsCode naming every layer whose code only the user has."""
    wanted: dict[str, str] = {}
    stack: list[Any] = [model]
    seen = 0
    while stack:
        here = stack.pop()
        if isinstance(here, list):
            stack += here
        elif isinstance(here, dict):
            seen += 1
            if seen > 100 * LAYERS_CAP:
                _count([None] * (LAYERS_CAP + 1))
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
                and not parallel.is_model(here)
                and not layers.known(name)
                and name not in layers._GONE
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
    """The name of a layer in a config, wherever that version put it."""
    config = entry.get("config")
    return config.get("name") if isinstance(config, dict) else entry.get("name")


def _clean(name: str) -> str:
    """Keras 3 allows no slash in a name."""
    return name.replace("/", "_")


def _count(entries: Any) -> None:
    if not isinstance(entries, list) or len(entries) > LAYERS_CAP:
        raise UntranslatableModel(
            f"A model of more than {LAYERS_CAP:,} layers, or of none, is no model known here.\n"
            "The file is damaged or made to harm."
        )
