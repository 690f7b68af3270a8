"""Build old model configs in Keras 3.

The graph is rebuilt by calling layers, as the original code did. Node numbers, shared
layers and nested models therefore keep their meaning.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras

from lockstep.errors import NeedsCode, OldFileError, UntranslatableModel
from lockstep.keras_compat import global_state
from lockstep.rescue import old_layers
from lockstep.rescue.old_layers import REBUILD, RebuildContext, bare, clean, dtype
from lockstep.rescue.unwrap import entries, entry_name, is_model, is_reference, references, shape_of

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


def template(path: str, config: dict[str, Any] | None, context: RebuildContext) -> Part:
    """Build the template of a file without weights, from its config.

    Raises:
        NeedsCode: There is no config, or it has no input shape, or the user's code is missing.
        UntranslatableModel: Keras 3 cannot express the model.
    """
    if config is None:
        raise NeedsCode(
            f"{path} holds weights but no architecture.\nPass the template with --model "
            "file.py:function or --config template.json, or export\nonly the arrays into a "
            ".safetensors file."
        )
    with weightless():
        part = build(config, context)
        if not getattr(part.layer, "built", True) or not part.layer.inputs:
            raise NeedsCode(
                f"The model {part.name!r} was saved without its input shape.\n"
                "Rebuild it in code with an Input and use --model file.py:function."
            )
    return part


def build(model: dict[str, Any], context: RebuildContext) -> Part:
    """Build an old model config in Keras 3, without frozen flags; only wrapped layers keep theirs.

    Raises:
        NeedsCode: The user gave no code for custom or Lambda layers. The error names all.
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
            "The model is nested deeper than any known one.\nThe file is damaged or malicious."
        ) from error
    except Exception as error:  # Keras raises many kinds of errors
        raise UntranslatableModel(
            f"Keras 3 cannot build this old model: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:160]}\n{REBUILD}"
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
                f"The model has more than {NESTING_CAP} nested models.\n"
                "The file is damaged or malicious."
            )
        total = 0
        for one in inside:
            listed = one.get("inbound_nodes") if isinstance(one, dict) else None
            times = max(len(listed), 1) if isinstance(listed, list) else 1
            total += times * calls(one, depth + 1)
            if total > CALLS_CAP:
                raise UntranslatableModel(
                    f"The model calls more than {CALLS_CAP:,} layers, more than any known "
                    "model.\nThe file is damaged or malicious."
                )
        return total

    return calls(model, 0)


@contextmanager
def recursion_for(model: Any, context: RebuildContext) -> Iterator[None]:
    """Raise the recursion limit in the body: Keras recurses once for each layer of a chain."""
    before = sys.getrecursionlimit()
    needed = 600 + 2 * require_modest(model)
    if needed > before:
        context.add_note(
            f"this model is deeply nested: call sys.setrecursionlimit({needed}) before you load it"
        )
    sys.setrecursionlimit(max(needed, before))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def _model(entry: dict[str, Any], context: RebuildContext) -> Part:
    config = entry["config"]
    if isinstance(config, list):
        return _sequential(entry.get("name") or "sequential", config, None, context)
    if "input_layers" in config:
        return _functional(entry, context)
    if "layers" in config:
        name = config.get("name") or entry.get("name") or "sequential"
        return _sequential(name, config["layers"], config.get("build_input_shape"), context)
    raise UntranslatableModel(
        f"The model {config.get('name')!r} is a {entry.get('class_name')} with custom code (a "
        f"subclassed model).\n{REBUILD}"
    )


def _part(entry: dict[str, Any], context: RebuildContext) -> Part:
    """Build a layer or nested model of a config, as a part."""
    name = entry_name(entry)
    if is_model(entry):
        part = _model({**entry, "name": name}, context)
        part.name = name
        return part
    class_name, config = entry["class_name"], {**entry["config"], "name": name}
    trainable = bool(config.pop("trainable", True))
    inner = config.get("layer")
    if class_name == "TimeDistributed" and isinstance(inner, dict) and is_model(inner):
        wrapped = _model(inner, context)
        wrapped.trainable = trainable
        built = old_layers.layer(class_name, {**config, "layer": wrapped.layer}, context)
        return Part(name, built, class_name, [wrapped], True, trainable)
    built = old_layers.layer(class_name, _models_built(config, context), context)
    if class_name in ("TimeDistributed", "Bidirectional"):
        trainable = trainable and bool(config["layer"]["config"].get("trainable", True))
    return Part(name, built, class_name, trainable=trainable)


def _models_built(config: dict[str, Any], context: RebuildContext) -> dict[str, Any]:
    """Return the config of a layer, with the models inside wrappers built."""
    built = dict(config)
    for key in ("layer", "backward_layer", "cell"):
        entry = config.get(key)
        if isinstance(entry, dict) and is_model(entry):
            built[key] = _model(entry, context).layer
        elif isinstance(entry, dict) and isinstance(entry.get("config"), dict):
            built[key] = {**entry, "config": _models_built(entry["config"], context)}
    return built


def _sequential(name: str, layers: Any, build_shape: Any, context: RebuildContext) -> Part:
    _require_list(layers)
    parts = [_part(entry, context) for entry in layers if entry["class_name"] != "InputLayer"]
    if not parts:
        raise UntranslatableModel(
            f"The Sequential {name!r} has no layers.\nThere is nothing in it to rescue."
        )
    first = layers[0]["config"]
    shape, kind = None, None
    if isinstance(first, dict):
        shape, kind = shape_of(first), dtype(first.get("dtype"))
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
            0, keras.Input(batch_shape=tuple(shape), dtype=kind, name=f"{clean(name)}_input")
        )
    else:
        context.add_note(
            f"the Sequential {name!r} has no input shape; it is taken from the parent model"
        )
    return Part(name, keras.Sequential(stacked, name=clean(name)), "Sequential", parts, True)


def _functional(entry: dict[str, Any], context: RebuildContext) -> Part:
    config = entry["config"]
    _require_list(config["layers"])
    parts: dict[str, Part] = {}
    outputs: dict[tuple[str, int], list[Any]] = {}
    waiting: list[tuple[str, int, Any]] = []
    used = _used(config)
    for one in config["layers"]:
        name = entry_name(one)
        if one["class_name"] == "InputLayer":
            outputs[name, 0] = [_input(name, one["config"])]
            continue
        parts[name] = _part(one, context)
        # Node 0 of a nested model is its own graph; some versions number its calls from 1.
        start = 1 if parts[name].is_model and (name, 0) not in used else 0
        waiting += [(name, node, call) for node, call in enumerate(one["inbound_nodes"], start)]
    while waiting:
        stuck = []
        for name, number, call in waiting:
            arguments = _resolve(call, outputs)
            if arguments is None:
                stuck.append((name, number, call))
            else:
                result = _call(parts[name].layer, *arguments)
                several = isinstance(result, (list, tuple))
                outputs[name, number] = list(result) if several else [result]
        if len(stuck) == len(waiting):
            raise UntranslatableModel(
                f"The graph of {config.get('name')!r} is not a valid graph: {stuck[0][0]!r} "
                "depends on a layer that is never called.\nThe file is damaged."
            )
        waiting = stuck
    ends = [
        [_tensor(ref, outputs) for ref in references(config[key])]
        for key in ("input_layers", "output_layers")
    ]
    taken, given = (end[0] if len(end) == 1 else end for end in ends)
    name = str(config.get("name") or entry.get("name") or "model")
    model = keras.Model(taken, given, name=clean(name))
    return Part(name, model, "Functional", list(parts.values()), True)


def _input(name: str, config: dict[str, Any]) -> Any:
    if config.get("ragged"):
        raise UntranslatableModel(
            f"The input {name!r} is ragged, which Keras 3 does not fully support.\n{REBUILD}"
        )
    return keras.Input(
        batch_shape=tuple(shape_of(config) or ()),
        dtype=dtype(config.get("dtype")),
        sparse=bool(config.get("sparse", False)),
        name=clean(name),
    )


def _used(config: dict[str, Any]) -> set[tuple[str, int]]:
    """Return the layers and nodes to which a graph refers."""
    return {
        (ref[0], ref[1])
        for listed in (config["output_layers"], *(one["inbound_nodes"] for one in config["layers"]))
        for ref in _references_anywhere(listed)
    }


def _references_anywhere(thing: Any) -> Iterator[list[Any]]:
    """Yield references in any nesting, also those in the keywords of a call."""
    if is_reference(thing):
        yield thing
        thing = thing[3:]
    if isinstance(thing, dict):
        thing = list(thing.values())
    for value in thing if isinstance(thing, list) else ():
        yield from _references_anywhere(value)


def _tensor(ref: list[Any], outputs: dict[tuple[str, int], list[Any]]) -> Any:
    return outputs[ref[0], ref[1]][ref[2]]


def _resolve(
    call: Any, outputs: dict[tuple[str, int], list[Any]]
) -> tuple[Any, dict[str, Any]] | None:
    """Return the positional input and the keywords of an old call, or None if it must wait."""
    refs = references(call)
    keywords = refs[0][3] if refs and len(refs[0]) > 3 and isinstance(refs[0][3], dict) else {}
    if any((ref[0], ref[1]) not in outputs for ref in [*refs, *_references_anywhere(keywords)]):
        return None

    def real(value: Any) -> Any:
        if is_reference(value):
            return _tensor(value, outputs)
        return [real(item) for item in value] if isinstance(value, list) else value

    tensors = [_tensor(ref, outputs) for ref in refs]
    positional: Any = tensors[0] if is_reference(call) or len(tensors) == 1 else tensors
    if isinstance(call, dict):
        positional = {key: _tensor(references(ref)[0], outputs) for key, ref in call.items()}
    return positional, {key: real(value) for key, value in keywords.items() if value is not None}


def _call(layer: Any, positional: Any, keywords: dict[str, Any]) -> Any:
    recurrent = isinstance(layer, (keras.layers.RNN, keras.layers.Bidirectional))
    if recurrent and isinstance(positional, list):
        return layer(positional[0], initial_state=positional[1:], **keywords)
    if isinstance(layer, keras.layers.Concatenate | keras.layers.Add) and not isinstance(
        positional, list
    ):
        positional = [positional]
    return layer(positional, **keywords)


def _require_code(model: dict[str, Any], context: RebuildContext) -> None:
    """Raise NeedsCode with the names of all layers that need the user's code."""
    wanted: dict[str, str] = {}
    for here in entries(model):
        name, config = here.get("class_name"), here.get("config")
        if name == "Lambda" and isinstance(config, dict):
            if old_layers.lambda_function(config, context) is None:
                label, function = str(config.get("name")), str(config.get("function"))
                wanted[label] = f"the Lambda {label!r}"
                if config.get("function_type") == "function" and function.isidentifier():
                    wanted[label] += f" (function {function!r})"
        elif (
            "inbound_nodes" in here
            and isinstance(name, str)
            and context.custom_object(name) is None
            and not is_model(here)
            and not old_layers.is_keras_own(name)
        ):
            wanted[name] = f"the layer class {bare(name)}"
    if wanted:
        listed = ", ".join(wanted.values())
        raise NeedsCode(
            f"The template needs your own code: {listed[:300]}.\nCode in the file is never run. "
            "Pass a file that defines these names with\n--custom file.py (for a Lambda: a "
            "function with the name of the layer), or custom_objects=."
        )


def _require_list(layers: Any) -> None:
    if not isinstance(layers, list):
        raise UntranslatableModel(
            "A model in the file has no list of layers.\nThe file is damaged or malicious."
        )


_GLOBAL_NAMES = ("uninitialized_variables", "object_name_uids")


@contextmanager
def isolated() -> Iterator[None]:
    """Restore Keras's global state after the body has built models.

    Keras keeps a list of variables without values. It allocates all of them when it next
    leaves a stateless scope, which can take gigabytes long after the rescue. Keras also
    counts the names that it gives to layers.
    """
    before = {name: global_state.get_global_attribute(name) for name in _GLOBAL_NAMES}
    for name, value in before.items():
        global_state.set_global_attribute(name, value.copy() if value is not None else None)
    try:
        yield
    finally:
        for name, value in before.items():
            global_state.set_global_attribute(name, value)


def weightless() -> Any:
    """Build variables without values in the body: a large model takes no memory."""
    return values_from(lambda variable: None)


def values_from(value: Callable[[Any], Any]) -> Any:
    """Let every variable of Keras read its value from a function in the body."""

    class Scope(keras.StatelessScope):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(initialize_variables=False)

        def get_current_value(self, variable: Any) -> Any:
            return value(variable)

    return Scope()
