"""The first difference between a checkpoint and the current model and data."""

import re
from typing import Any

from lockstep.checkpoint.array_file import Entry
from lockstep.errors import CheckpointMismatch

_COUNTED = re.compile(r"_\d+(?=$|/|_)")


def check_variables(path: str, written: list[Entry], here: list[Entry]) -> None:
    """Raise if the variables of a checkpoint are not those of this model and optimizer.

    The numbers that Keras appends to names are ignored: they count the earlier layers of a
    process.

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

    Raises:
        CheckpointMismatch: With the first difference.
    """
    for what in ("model", "compiled", "data"):
        if written[what] is not None and here[what] is not None:
            _compare(path, what, (), written[what], here[what])


def check_model(path: str, written: Any, here: Any) -> None:
    """Raise if the configuration of a model is not that of the checkpoint.

    The modules of its classes and the shapes that it was built for are ignored.

    Raises:
        CheckpointMismatch: With the first difference.
    """
    if written is not None and here is not None:
        _compare(path, "model", (), _architecture(written), _architecture(here))


def _architecture(config: Any) -> Any:
    if isinstance(config, list):
        return [_architecture(each) for each in config]
    if not isinstance(config, dict):
        return config
    aside = ("module", "registered_name", "build_config", "compile_config", "shared_object_id")
    return {name: _architecture(each) for name, each in config.items() if name not in aside}


def _compare(path: str, what: str, at: tuple[str, ...], written: Any, here: Any) -> None:
    if isinstance(written, dict) and isinstance(here, dict):
        for key in [*written, *(key for key in here if key not in written)]:
            if not (what == "model" and key == "compile_config" and not at):
                _compare(path, what, (*at, key), written.get(key), here.get(key))
        return
    if isinstance(written, list) and isinstance(here, list) and len(written) == len(here):
        for number, pair in enumerate(zip(written, here, strict=True)):
            _compare(path, what, (*at, str(number)), *pair)
        return
    if isinstance(written, str) and isinstance(here, str):
        if _COUNTED.sub("", written) == _COUNTED.sub("", here):
            return
    elif written == here and type(written) is type(here):
        return
    _refuse(path, what, " ".join(at[-3:]), repr(written), repr(here))


def _refuse(path: str, what: str, name: str, written: str, here: str) -> None:
    kind = {
        "variables": "another model or optimizer",
        "model": "another model",
        "compiled": "another optimizer, loss or metric",
        "data": "other data",
    }[what]
    raise CheckpointMismatch(
        f"{path} was written with {kind}: {name[:60]} was {written[:90]}, and is {here[:90]}.\n"
        "Still possible: the weights alone, by lockstep export RUN -o model.keras; or start anew, "
        "in another folder."
    )


def _said(entry: Entry | None) -> Any:
    return entry and (_COUNTED.sub("", entry.name.rstrip("'")), entry.dtype, entry.shape)


def _words(entry: Entry | None) -> str:
    return "missing" if entry is None else f"{entry.name} {entry.dtype} {list(entry.shape)}"
