"""The configuration of a model and its compilation, and the first difference between two runs."""

import json
import re
from collections.abc import Iterator
from typing import Any

from lockstep.checkpoint.array_file import Entry
from lockstep.errors import CheckpointMismatch

_UNKNOWN = (NotImplementedError, TypeError, ValueError, OSError)
"""Errors for a model without a configuration, or a lambda without source lines."""
_COUNTED = re.compile(r"_\d+(?=$|/|_)")
_SCOPE = re.compile(r"^optimizer/.*/")
_NOT_COMPARED = {
    # how it was built, and how Keras finds a class: another script may name its module otherwise
    *("module", "registered_name", "build_config", "compile_config", "shared_object_id"),
    # a variable, which the checkpoint has; Keras may write a seed that was drawn
    "seed",
    # no result depends on these
    *("steps_per_execution", "run_eagerly", "jit_compile"),
}


def config_of(model: Any) -> Any:
    """Return the configuration that `model.save` writes, or `None`."""
    import keras

    try:
        return json.loads(json.dumps(keras.saving.serialize_keras_object(model)))
    except _UNKNOWN:
        return None


def compiled_of(model: Any) -> Any:
    """Return the arguments of `compile`, or `None` if they are unknown."""
    try:
        return json.loads(json.dumps(model.get_compile_config()))
    except _UNKNOWN:
        return None


def parts_of(config: Any) -> Iterator[dict[str, Any]]:
    """Yield every dict in a configuration, the outer ones first."""
    stack = [config]  # a file of unknown origin may nest deeper than Python calls
    while stack:
        here = stack.pop()
        if isinstance(here, dict):
            yield here
            here = list(here.values())
        if isinstance(here, list):
            stack += reversed(here)


def rates_of(config: Any) -> list[dict[str, Any]]:
    """Return the parts of a configuration that have a learning rate, a number or a schedule."""
    if isinstance(config, dict):
        if "learning_rate" in config:
            return [config]
        config = list(config.values())
    return [found for each in config for found in rates_of(each)] if type(config) is list else []


def changed_rate(written: Any, here: Any) -> tuple[Any, Any] | None:
    """Return the first learning rate that differs between two configurations of `compile`.

    Returns:
        The rate then and now; `None` if none differs, or if one of them is not known.
    """
    for there, mine in zip(rates_of(written), rates_of(here), strict=False):
        pair = there["learning_rate"], mine["learning_rate"]
        if first_difference(*pair) is not None:
            return pair
    return None


def is_rate(name: str) -> bool:
    """Return whether a variable of this name is the learning rate of an optimizer."""
    return name.startswith("optimizer/") and name.rpartition("/")[2] == "learning_rate"


def check_variables(path: str, written: list[Entry], here: list[Entry]) -> None:
    """Raise if the variables of a checkpoint are not those of this model and optimizer.

    The numbers that Keras appends to names are ignored: they count the earlier layers of a
    process. So are the scopes of an optimizer's variables, which depend on whether Keras builds it
    in its first update or before.

    Raises:
        CheckpointMismatch: With the first difference.
    """
    for number in range(max(len(written), len(here))):
        there = written[number] if number < len(written) else None
        mine = here[number] if number < len(here) else None
        if _said(there) != _said(mine):
            _refuse(path, "variables", f"variable {number}", _words(there), _words(mine))


def check_facts(path: str, written: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise if the model, its compilation or the data are not those of the checkpoint.

    What a lambda does is not compared, nor is a learning rate; see `changed_rate`.

    Args:
        path: The checkpoint, for the message.
        written: Its facts: `"model"`, `"compiled"` and `"data"`, each `None` if unknown.
        here: The same of this run; of a model alone, `"model"`.

    Raises:
        CheckpointMismatch: With the first difference.
    """
    for what in here:
        if written[what] is not None and here[what] is not None:
            different = first_difference(written[what], here[what])
            if different is not None:
                _refuse(path, what, *different)


def first_difference(written: Any, here: Any) -> tuple[str, str, str] | None:
    """Return the first difference between two configurations that changes results, or `None`.

    Args:
        written: One configuration, as `config_of` returns it.
        here: The other one.

    Returns:
        The place, and the values there.
    """
    return _difference(written, here, (), _names_in(written), _names_in(here))


def _names_in(config: Any) -> set[str]:
    """Return the names of layers and the like, which Keras counts."""
    names = (part.get("name") for part in parts_of(config))
    return {name for name in names if isinstance(name, str)}


def _difference(
    written: Any, here: Any, at: tuple[str, ...], theirs: set[str], mine: set[str]
) -> tuple[str, str, str] | None:
    if isinstance(written, dict) and isinstance(here, dict):
        if written.get("class_name") == here.get("class_name") == "__lambda__":
            return None
        keys = [*written, *(key for key in here if key not in written)]
        pairs = [
            (key, written.get(key), here.get(key))
            for key in keys
            if key not in _NOT_COMPARED and key != "learning_rate"
        ]
    elif isinstance(written, list) and isinstance(here, list) and len(written) == len(here):
        both = enumerate(zip(written, here, strict=True))
        pairs = [(str(number), *pair) for number, pair in both]
    else:
        is_same = written == here and type(written) is type(here)
        if not is_same and isinstance(written, str) and isinstance(here, str):
            are_names = written.split("/")[0] in theirs and here.split("/")[0] in mine
            is_same = are_names and _COUNTED.sub("", written) == _COUNTED.sub("", here)
        return None if is_same else (" ".join(at[-3:]), repr(written), repr(here))
    found = (_difference(a, b, (*at, key), theirs, mine) for key, a, b in pairs)
    return next(filter(None, found), None)


def _refuse(path: str, what: str, name: str, written: str, here: str) -> None:
    kind = {
        "variables": "a different model or optimizer",
        "model": "a different model",
        "compiled": "a different optimizer, loss or metric",
        "data": "different data",
    }[what]
    raise CheckpointMismatch(
        f"{path} was written with {kind}: {name[:60]} was {written[:90]}, but is now "
        f"{here[:90]}.\nYou can still export the weights (lockstep export RUN -o model.keras), "
        "or start again in a different folder."
    )


def _said(entry: Entry | None) -> Any:
    return entry and (
        _COUNTED.sub("", _SCOPE.sub("optimizer/", entry.name.rstrip("'"))),
        entry.dtype,
        entry.shape,
    )


def _words(entry: Entry | None) -> str:
    return "missing" if entry is None else f"{entry.name} {entry.dtype} {list(entry.shape)}"
