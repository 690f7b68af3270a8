"""The public functions: inspect, rescue, load_weights."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from lockstep.errors import UnreadableFile, UnsuitableOutput

if TYPE_CHECKING:
    from lockstep.checkpoint.run_report import RunReport
    from lockstep.rescue.keras2 import OldFile
    from lockstep.rescue.rescue_report import Inspection, Rescued
    from lockstep.rescue.target import Target

Path = str | os.PathLike[str]


def inspect(path: Path) -> Inspection | RunReport:
    """Identify a checkpoint file, or the folder of a run, and the command that makes it usable.

    Nothing in the file is executed. No framework is imported, except PyTorch for PyTorch
    files (with `weights_only=True`).

    Args:
        path: A file of Keras 2, tf.keras or Keras 3 (`.h5`, `.hdf5`, `.keras`,
            `.weights.h5`), a PyTorch state dict, or safetensors; or a folder that
            `lockstep.Checkpoint` has written, or one checkpoint in it.

    Returns:
        The findings, or the list of checkpoints; `command` is the next command to run.

    Raises:
        UnreadableFile: The file is of no known kind, or is damaged.
        HostileFile: The file declares absurd sizes or has links that are not hard links.
        CheckpointError: The folder is a run without a checkpoint, or of a newer lockstep.

    Example:
        >>> found = lockstep.inspect("tests/files/legacy/keras-2.2.4__mlp4-g2/parallel_full.h5")
        >>> found.parallel, found.devices, found.template, found.library
        (True, 2, 'sequential_1', 'Keras 2.2.4')
    """
    from pathlib import Path as Folder

    from lockstep.rescue import detect

    if os.path.isdir(path):
        from lockstep.checkpoint.run_report import is_run, report_run

        if is_run(Folder(path)):
            return report_run(Folder(path))
    return detect.inspect_file(os.fspath(path))


def rescue(
    path: Path,
    output: Path,
    *,
    model: Any = None,
    config: Path | dict[str, Any] | None = None,
    custom_objects: dict[str, Any] | None = None,
    check: Path | None = None,
) -> Rescued:
    """Write a single-device file from an old multi-GPU file.

    Every array of the new file is read back and compared with the old array in the new
    layout. No code from the old file runs. The output is written whole or not at all.
    A row of the report is `equal` only if both arrays hold exactly the same numbers.

    Args:
        path: A file that `parallel_model.save()`, `save_weights()` or `ModelCheckpoint`
            wrote with Keras 2.0.9 to 2.3.1 or tf.keras 1.8 to 2.15. Files of single models
            are converted the same way.
        output: `.keras`, `.weights.h5`, `.h5` (the layout of Keras 2; weights only if
            `model` is given), or `.safetensors` (arrays only). An existing file is replaced.
        model: The template as a built Keras 3 model, for files of weights. It is not changed.
        config: The template's old `to_json()`, as a path or a dict, for files of weights.
        custom_objects: The user's layers and functions by name. The key of a Lambda's
            function is the name of its layer. Custom code is never taken from the file.
        check: An `.npz` with inputs x0, x1, ... and expected outputs y0, y1, .... The
            written file is loaded, and its outputs must agree to 1e-5 (relative above 1).
            `difference` in the report is the difference of that one load.

    Returns:
        The table of all weights, the rules that assigned them, and notes.

    Raises:
        IncompleteFile: The save that wrote the file failed. The error names a missing part.
        NeedsCode: The code of a custom or Lambda layer, or the architecture, is missing.
        AmbiguousWeights: More than one assignment fits. The error names a remedy.
        OldFileError: The base class of these errors and of all others about old files.

    Example:
        >>> report = lockstep.rescue("tests/files/legacy/keras-2.2.4__mlp4-g2/parallel_full.h5",
        ...                          "single.keras")
        >>> report.template, report.devices, len(report.rows)
        ('sequential_1', 2, 8)
    """
    from lockstep.rescue import abstract_model, write

    source, goal = os.fspath(path), os.fspath(output)
    suffix = write.suffix_of(goal)
    objects = _own(custom_objects or {})
    proof = None if check is None else os.fspath(check)
    _require_old(source)  # refuses most unsuitable files before Keras is imported
    with abstract_model.isolated():
        return _rescue(source, goal, suffix, model, config, objects, proof)


def load_weights(model: Any, path: Path) -> Rescued:
    """Load the weights of an old file into a live model.

    Every weight of the model is set from the file, or an error is raised and none is set.

    Args:
        model: The template as a built Keras 3 model.
        path: Any file that `rescue` takes.

    Returns:
        The table of all weights, the rules that assigned them, and notes. A row is `equal`
        only if the variable holds exactly the numbers of the file. Warnings cover rounded
        arrays and settings that weights do not record, such as the old hard_sigmoid.

    Raises:
        WeightsDoNotFit: The file is of another model, or holds numbers that the dtype of
            the model cannot represent.
        AmbiguousWeights: More than one assignment fits. The error names a remedy.
        OldFileError: The base class of these errors and of all others about old files.

    Example:
        >>> import keras
        >>> old = "tests/files/legacy/keras-2.2.4__mlp4-g2/parallel_full.h5"
        >>> report = lockstep.rescue(old, "single.keras")
        >>> model = keras.models.load_model("single.keras")
        >>> lockstep.load_weights(model, old).rules
        ('names',)
    """
    import keras

    from lockstep.errors import NotAModel
    from lockstep.rescue import load

    if not isinstance(model, keras.Model):
        raise NotAModel(
            f"load_weights takes a Keras model and got a {type(model).__name__}.\n"
            "Write lockstep.load_weights(model, path)."
        )
    return load.load(model, os.fspath(path))


def _own(objects: dict[str, Any]) -> dict[str, Any]:
    """Remove Keras's own classes under their own names: they would bypass the translation."""
    return {
        name: given
        for name, given in objects.items()
        if not isinstance(given, type)
        or (given.__module__.partition(".")[0], given.__name__) != ("keras", name)
    }


def _rescue(
    source: str,
    goal: str,
    suffix: str,
    model: Any,
    config: Any,
    objects: dict[str, Any],
    check: str | None,
) -> Rescued:
    """Read, unwrap, match, write, check and report."""
    from lockstep.rescue import keras2, rebuild, target, unwrap, write
    from lockstep.rescue.old_settings import Context
    from lockstep.rescue.rescue_report import Rescued

    context = Context(objects)
    with keras2.opened(source) as old:
        given = _given(config)
        inside = unwrap.in_config(old.config)
        built = given or (inside.config if inside else old.config)
        worst = None
        with rebuild.recursion_for(built, context):
            found = _target(old, model, given, context, suffix)
            with write.replacing(goal, source, suffix, _size(old, suffix)) as temporary:
                rows, state = write.write(old, found, suffix, temporary)
                if check is not None:
                    worst = _check(found, suffix, temporary, check, context)
        notes = list(context.notes)
        if found is None:
            notes.append("arrays alone, under their old names: no architecture was given")
        elif found.live:
            notes += target.doubts(old, found)
        if found is not None and found.template is None and found.name is None:
            notes.append("the file is of a single model: there was nothing to unwrap")
        compiled = suffix == ".keras" and getattr(getattr(found, "model", None), "optimizer", None)
        return Rescued(
            source=source,
            output=goal,
            library=old.library,
            template=found.name if found else None,
            devices=found.devices if found else None,
            rules=found.plan.rules if found else ("names: every array keeps its own",),
            rows=tuple(rows),
            optimizer=state,
            compiled=bool(compiled),
            difference=worst,
            notes=tuple(notes),
        )


def _size(old: OldFile, suffix: str) -> int:
    """Estimate the bytes of the new file, including its index."""
    arrays = [stored for group in old.weighted for stored in group.weights]
    arrays += old.optimizer if suffix in (".keras", ".h5") else ()
    size = 2**20 + sum(2**12 + int(stored.data.nbytes) for stored in arrays)
    return 2 * size if suffix == ".keras" else size  # weights and archive exist at once


def _require_old(path: str) -> None:
    """Raise for a file that needs no rescue."""
    from lockstep.rescue import detect

    found = detect.inspect_file(path)
    if found.kind != "keras2" or found.library.startswith("Keras 3"):
        raise UnreadableFile(
            f"{path} is a file of {found.library} for a single device: there is nothing to "
            f"rescue.\nIt is ready to use: {found.command}"
        )


def _given(config: Any) -> dict[str, Any] | None:
    """Return the caller's config, read from its file if it is a path."""
    from lockstep.rescue import keras2

    if config is None or isinstance(config, dict):
        return config
    return keras2.parse_json(_text(os.fspath(config)), "config", os.fspath(config))


def _target(
    old: OldFile, model: Any, given: dict[str, Any] | None, context: Any, suffix: str
) -> Target | None:
    from lockstep.rescue import target

    if model is not None:
        return target.from_model(old, model, context)
    bare = suffix == ".safetensors" or (old.config is None and suffix == ".weights.h5")
    if given is None and bare:
        return None  # not for .h5: Keras 2 loads it by layer names and order
    return target.from_config(old, given, context)


def _text(config: str) -> str:
    try:
        with open(config, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or "it is no text"
        raise UnreadableFile(
            f"The config {config} cannot be read: {said}.\n"
            "Give the file in which the template's to_json() was written."
        ) from error


def _check(found: Target | None, suffix: str, path: str, inputs: str, context: Any) -> float:
    import keras

    from lockstep.rescue import check_outputs, load, rebuild

    given, wanted = check_outputs.inputs_and_outputs(inputs)
    if found is None:
        raise UnsuitableOutput(
            "Outputs can only be checked where there is a model to ask.\n"
            "Give the template with --model or --config, or leave --check away."
        )
    if suffix == ".keras":
        return check_outputs.difference_when_loaded(path, context.custom, given, wanted)
    if found.live:
        model = keras.models.clone_model(found.model)
    else:
        model = rebuild.build(found.config or {}, context).layer
    if suffix == ".weights.h5":
        model.load_weights(path)
    else:
        load.load(model, path)
    return check_outputs.difference(model, given, wanted)
