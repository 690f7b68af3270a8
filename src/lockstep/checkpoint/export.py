"""A plain `.keras` file out of a checkpoint."""

import contextlib
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.checkpoint.fingerprint import check_facts, config_of
from lockstep.checkpoint.manifest import FILE, read_manifest
from lockstep.checkpoint.run_folder import Found, Retention, RunFolder
from lockstep.checkpoint.run_report import runs_within
from lockstep.core.files import replacing
from lockstep.core.state import GROUPS, named_variables
from lockstep.errors import CheckpointError, CheckpointMismatch, DamagedCheckpoint, first_line

_ITS_OWN = "Name the function that builds the model of the checkpoint."


def export_model(run: Path, output: Path, model: Any = None, best: bool = False) -> Path:
    """Write the model of a checkpoint into a plain `.keras` file.

    The file is what `model.save` would have written at that time: architecture, weights,
    compilation and optimizer. Plain Keras loads it. Custom classes of the model need their code.

    Args:
        run: The folder of a run or of one checkpoint. Of a run, the newest complete checkpoint
            is used.
        output: The file; its name ends in `.keras`. An existing file is replaced at the end.
        model: A model that takes the values, if the checkpoint alone cannot make one.
        best: Whether to use the best checkpoint by the monitored value instead.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: If there is no complete checkpoint, if the model cannot be made from it
            or is another one than `model`, or if the file cannot be written.
    """
    if output.suffix != ".keras":
        raise CheckpointError(
            f"The output is {output}, but export writes a .keras file.\n"
            f"Name it {output.with_suffix('.keras')}."
        )
    if not output.parent.is_dir():
        raise CheckpointError(
            f"The output is {output}, but there is no folder {output.parent}.\n"
            f"Create it first: mkdir -p {output.parent}"
        )
    found = _found(run, best)
    made = _made(found) if model is None else model
    if model is not None:
        try:
            check_facts(str(found.path), found.state, {"model": config_of(model)})
        except CheckpointMismatch as error:  # its advice is that of a run that is resumed
            raise CheckpointMismatch(f"{first_line(error)}\n{_ITS_OWN}") from error
    _fill(made, found)
    try:
        with replacing(output) as temporary:
            made.save(temporary)
    except OSError as error:
        raise CheckpointError(
            f"{output} cannot be written: {error.strerror or error}.\n"
            "Name a file in a writable folder with enough space."
        ) from error
    return found.path


def _found(run: Path, best: bool) -> Found:
    folder = RunFolder(run)
    if (run / FILE).exists():
        return folder.read(run)
    if not folder.marked() or not folder.check() or not folder.checkpoints():
        runs = runs_within(run)
        wanted = "the folder of a lockstep.Checkpoint, or one checkpoint in it."
        if runs:
            wanted = f"one of the runs in it: {runs[0]}"
        raise CheckpointError(f"{run} contains no checkpoint.\nName {wanted}")
    if not best:
        found = folder.newest(print)
        assert found is not None
        return found
    retention = Retention(1, True)
    for path in folder.checkpoints():
        with contextlib.suppress(DamagedCheckpoint):  # or removed by now, in a run that continues
            retention.note(path, read_manifest(path).state)
    found = retention.read_best(folder, print)
    if found is None:
        raise CheckpointError(
            f"The best checkpoint of {run} was requested, but the run monitored nothing.\n"
            "Remove --best to export the newest checkpoint, or name one checkpoint."
        )
    return found


def _made(found: Found) -> Any:
    import keras

    config = found.state["model"]
    why = "it has no configuration"
    if config is not None:
        try:
            return keras.saving.deserialize_keras_object(config)
        except Exception as error:  # a constructor of the user may raise anything
            why = first_line(error, 200).split(". ")[0].rstrip(".")
    raise CheckpointError(
        f"The model of {found.path} cannot be built from the checkpoint alone: {why}.\n"
        "Name the function that builds it: --model FILE.PY:FUNCTION."
    )


def _fill(model: Any, found: Found) -> None:
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    here, there = _by_group(named_variables(model).items()), _by_group(_of_variables(found).items())
    groups = ("trainable", "non_trainable", "optimizer")
    for group in groups if model.optimizer is not None else groups[:2]:
        for mine, theirs in itertools.zip_longest(here[group], there[group]):
            if not (mine and theirs and tuple(mine[1].shape) == theirs[1].shape):
                raise _other(found, group, theirs, mine)
            mine[1].assign(theirs[1])


def _by_group(named: Iterable[tuple[str, Any]]) -> dict[str, list[tuple[str, Any]]]:
    groups: dict[str, list[tuple[str, Any]]] = {group: [] for group in GROUPS}
    for name, value in named:
        groups[name.split("/")[0]].append((name, value))
    return groups


def _of_variables(found: Found) -> dict[str, np.ndarray]:
    return dict(list(found.arrays.items())[: found.state["variables"]])


def _other(found: Found, group: str, theirs: Any, mine: Any) -> CheckpointMismatch:
    there, here = (
        f"{each[0]} {list(each[1].shape)}" if each else "no more" for each in (theirs, mine)
    )
    return CheckpointMismatch(
        f"{found.path} was saved from a different model: its {group} variables are {there}, but "
        f"the model has {here}.\n{_ITS_OWN}"
    )
