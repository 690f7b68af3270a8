"""A plain `.keras` file out of a checkpoint."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.checkpoints.files import sync_file, sync_folder
from lockstep.checkpoints.folder import Found, RunFolder
from lockstep.checkpoints.manifest import FILE, read_manifest
from lockstep.checkpoints.retention import Retention
from lockstep.engines.named_variables import named_variables
from lockstep.errors import CheckpointError, CheckpointMismatch


def export_model(run: Path, output: Path, model: Any = None, best: bool = False) -> Path:
    """Write what a checkpoint has of a model into a plain `.keras` file.

    The file is what `model.save` would have written then: architecture, weights, compilation
    and optimizer; plain Keras reads it. Where the model has classes of its own, their code is
    needed.

    Args:
        run: The folder of a run, of which the newest whole checkpoint is taken, or of one
            checkpoint.
        output: The file; its name ends in `.keras`. One that is there is replaced, at the end.
        model: A model to take the values, where the checkpoint alone cannot make one.
        best: Whether the best checkpoint by what was monitored is taken instead.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: If there is no checkpoint, or none that is whole, or the model cannot be
            made from it, or is another one than was handed over.
    """
    if output.suffix != ".keras":
        raise CheckpointError(
            f"{output} was named to be written, and what is written is a .keras file.\n"
            f"Name it {output.with_suffix('.keras')}."
        )
    found = _found(run, best)
    made = _made(found) if model is None else model
    _fill(made, found)
    aside = output.with_name(f".saving-{output.name}")
    made.save(aside)
    sync_file(aside)
    os.replace(aside, output)
    sync_folder(output.parent)
    return found.path


def _found(run: Path, best: bool) -> Found:
    folder = RunFolder(run)
    if (run / FILE).exists():
        return folder.read(run)
    if not run.is_dir() or not folder.check() or not folder.checkpoints():
        raise CheckpointError(
            f"{run} was named, and has no checkpoint.\n"
            "Name the folder that lockstep.Checkpoint was given, or one checkpoint in it."
        )
    if not best:
        found = folder.newest(print)
        assert found is not None
        return found
    retention = Retention(1, True, {})
    for path in folder.checkpoints():
        retention.note(path, read_manifest(path).state)
    chosen = retention.best_of(folder.checkpoints())
    if chosen is None:
        raise CheckpointError(
            f"The best checkpoint of {run} was asked for, and nothing was monitored there.\n"
            "Leave --best out for the newest, or name one checkpoint."
        )
    return folder.read(chosen)


def _made(found: Found) -> Any:
    import keras

    config = found.state["model"]
    why = "it has no configuration"
    if config is not None:
        try:
            return keras.saving.deserialize_keras_object(config)
        except Exception as error:  # whatever the constructor of a class raises
            why = str(error).strip().splitlines()[0][:120]
    raise CheckpointError(
        f"The model of {found.path} cannot be made from the checkpoint alone: {why}.\n"
        "Say with --model FILE.PY:FUNCTION which function of yours makes it."
    )


def _fill(model: Any, found: Found) -> None:
    values = _of_variables(found)
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    variables = [
        (name, variable)
        for name, variable in named_variables(model)
        if not name.startswith("metrics/")
    ]
    for name, variable in variables:
        value = values.pop(name, None)
        if value is None or value.shape != tuple(variable.shape):
            raise _other(found, name, "nothing" if value is None else list(value.shape), variable)
        variable.assign(value)
    # Left are metrics and the states of stateful RNNs, which no file of Keras has; and the
    # optimizer, where the model that was handed over is not compiled.
    left = [name for name in values if name.startswith("trainable/")]
    if left:
        raise _other(found, left[0], list(values[left[0]].shape), None)


def _of_variables(found: Found) -> dict[str, np.ndarray]:
    return dict(list(found.arrays.items())[: found.state["variables"]])


def _other(found: Found, name: str, there: Any, variable: Any) -> CheckpointMismatch:
    here = "nothing" if variable is None else list(variable.shape)
    return CheckpointMismatch(
        f"{found.path} is of another model: for {name} it has {there}, and the model has {here}.\n"
        "Name the function that makes the model it was written with."
    )
