"""The configuration and compilation of a model, in a form that two processes can compare."""

import codecs
import json
import marshal
import zlib
from types import CodeType
from typing import Any

import keras

from lockstep.keras_compat import layers_in

UNKNOWN = (NotImplementedError, TypeError, ValueError, OSError)
"""Errors for a model without a configuration, or a lambda without source lines."""


def config_of(model: Any) -> Any:
    """Return the configuration that `model.save` writes, or `None`."""
    try:
        config = json.loads(json.dumps(keras.saving.serialize_keras_object(model)))
    except UNKNOWN:
        return None
    return _without_drawn_seeds(_comparable(config), _with_drawn_seeds(model))


def compiled_of(model: Any) -> Any:
    """Return the arguments of `compile` that change results, or `None` if they are unknown."""
    try:
        config = json.loads(json.dumps(model.get_compile_config()))
    except UNKNOWN:
        return None
    for name in ("steps_per_execution", "run_eagerly", "jit_compile"):  # no result depends on these
        config.pop(name, None)
    # The rate is a variable, and changes during a run.
    config["optimizer"] = _without_rate(config.get("optimizer"))
    return _comparable(config)


def _without_rate(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    kept = {
        name: value
        for name, value in config.items()
        if name != "learning_rate" or isinstance(value, dict)
    }
    return {name: _without_rate(value) for name, value in kept.items()}


def _comparable(config: Any) -> Any:
    """Return the configuration, with a hash of what each lambda does in place of its bytes.

    The bytes have the file and the lines of the lambda: without this, a lambda that has moved
    would be taken for another model. The two forms:
    keras/src/saving/serialization_lib.py, serialize_keras_object, and
    keras/src/layers/core/lambda_layer.py, Lambda._serialize_function_to_config.
    """
    if isinstance(config, list):
        return [_comparable(each) for each in config]
    if not isinstance(config, dict):
        return config
    found = {name: _comparable(each) for name, each in config.items()}
    if config.get("class_name") == "__lambda__":
        form = found["config"]
        where, key = (form["value"], 0) if "value" in form else (form, "code")
        # keras/src/utils/python_utils.py, func_dump, which has just written it
        where[key] = _does(marshal.loads(codecs.decode(where[key].encode(), "base64")))
    return found


def _does(code: CodeType) -> int:
    """Return a hash of what a function does, without the place of its lines."""
    constants = [
        _does(each) if isinstance(each, CodeType) else _ordered(each) for each in code.co_consts
    ]
    said = (code.co_code.hex(), constants, code.co_names, code.co_freevars)
    return zlib.crc32(repr(said).encode())


def _ordered(constant: Any) -> Any:
    return sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant


def _with_drawn_seeds(model: Any) -> set[str]:
    """Return the names of layers that write a drawn seed into their configuration."""
    # keras/src/layers/preprocessing/image_preprocessing/random_crop.py, RandomCrop.__init__; the
    # seed that it draws from is a variable.
    return {
        layer.name
        for layer in layers_in(model)
        if isinstance(layer, keras.layers.RandomCrop)
        and layer.generator.get_config()["seed"] is None
    }


def _without_drawn_seeds(config: Any, names: set[str]) -> Any:
    if isinstance(config, list):
        return [_without_drawn_seeds(each, names) for each in config]
    if not isinstance(config, dict):
        return config
    left_out = {"seed"} if config.get("name") in names else set()
    return {
        name: _without_drawn_seeds(each, names)
        for name, each in config.items()
        if name not in left_out
    }
