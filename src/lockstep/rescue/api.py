"""The public functions inspect, rescue and load_weights, and the order of their steps."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

from lockstep.core.files import path_text
from lockstep.errors import (
    NotAModel,
    OldFileError,
    UnreadableFile,
    UnsuitableOutput,
    WeightsDoNotFit,
    shown,
)

if TYPE_CHECKING:
    from lockstep.checkpoint.run_report import RunReport
    from lockstep.rescue.match import Matched
    from lockstep.rescue.old_layers import RebuildContext
    from lockstep.rescue.old_script import ScriptInspection
    from lockstep.rescue.read import OldFile
    from lockstep.rescue.rescue_report import Inspection, Rescued, Row

Path = str | os.PathLike[str]


def inspect(path: Path) -> Inspection | RunReport | ScriptInspection:
    """Identify a checkpoint file, or the folder of a run, and the command that makes it usable.

    Of an old script it lists the lines that Keras 3 needs in another form.
    Nothing in the file is executed. No framework is imported.

    Args:
        path: A file of Keras 2, tf.keras or Keras 3 (`.h5`, `.hdf5`, `.keras`,
            `.weights.h5`); or a folder that `lockstep.Checkpoint` has written, or one
            checkpoint in it; or a `.py` script.

    Returns:
        The findings, or the list of checkpoints; `command` is the next command to run.
        For a script, `changes` has the lines and what to write there.

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

    from lockstep.checkpoint.run_report import is_run, report_run
    from lockstep.rescue import detect

    source = path_text(path, "path", UnreadableFile)
    if source.endswith(".py"):
        from lockstep.rescue.old_script import inspect_script

        return inspect_script(source)
    if os.path.isdir(source) and is_run(Folder(source)):
        return report_run(Folder(source))
    return detect.inspect_file(source)


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
    from lockstep.rescue import detect, read

    source = path_text(path, "path", UnreadableFile)
    goal = path_text(output, "output", UnsuitableOutput)
    suffix = _suffix_of(goal)
    if custom_objects is not None and not isinstance(custom_objects, dict):
        raise OldFileError(
            f"custom_objects={shown(custom_objects)} was given, but a dict was expected.\n"
            'Pass the classes and functions by name, such as {"Scale": Scale}.'
        )
    if model is not None:
        _check_model("rescue", model)
    if config is not None and not isinstance(config, dict):
        config = read.parse_config(path_text(config, "config", UnreadableFile))
    proof = None if check is None else path_text(check, "check", UnreadableFile)
    if proof is not None and suffix == ".safetensors":
        raise UnsuitableOutput(
            f"check={proof!r} was requested, but {goal} holds only arrays, so there is no model "
            "to check.\nWrite a .keras file, or remove the check."
        )

    with detect.opened(source) as old:
        # Most unsuitable files are refused before Keras is imported.
        from lockstep.rescue import rebuild
        from lockstep.rescue.old_layers import RebuildContext

        context = RebuildContext(
            _without_classes_of_keras(custom_objects or {}), version=old.version
        )
        with rebuild.isolated():
            return _rescue(old, goal, suffix, model, config, context, proof)


def load_weights(model: Any, path: Path) -> Rescued:
    """Load the weights of an old file into a live model.

    Every weight of the model is set from the file, or an error is raised and none is set.

    Args:
        model: The template as a built Keras 3 model.
        path: Any file that `rescue` takes. Keras's `model.load_weights` loads files of Keras 3.

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
    from lockstep.rescue import detect

    _check_model("load_weights", model)
    with detect.opened(path_text(path, "path", UnreadableFile)) as old:
        return _load(model, old)


def _check_model(function: str, model: Any) -> None:
    import keras

    if not isinstance(model, keras.Model):
        example = {
            "load_weights": "lockstep.load_weights(model, path)",
            "rescue": "lockstep.rescue(path, output, model=model)",
        }
        raise NotAModel(
            f"{function} needs a Keras model, but got a {type(model).__name__}.\n"
            f"Call {example[function]}."
        )


# ---------------------------------------------------------------- to a file


def _suffix_of(output: str) -> str:
    """Return the kind of file to write, from the ending of its name."""
    for suffix in (".keras", ".weights.h5", ".h5", ".hdf5", ".safetensors"):
        if output.endswith(suffix):
            return ".h5" if suffix == ".hdf5" else suffix
    raise UnsuitableOutput(
        f"The file extension of the output {output} does not tell its format.\n"
        "Use .keras (a model), .weights.h5, .h5 (Keras 2's layout) or .safetensors."
    )


def _without_classes_of_keras(objects: dict[str, Any]) -> dict[str, Any]:
    """Remove Keras's own classes under their own names: they would bypass the translation."""
    return {
        name: given
        for name, given in objects.items()
        if not isinstance(given, type)
        or (given.__module__.partition(".")[0], given.__name__) != ("keras", name)
    }


def _rescue(
    old: OldFile,
    output: str,
    suffix: str,
    model: Any,
    config: dict[str, Any] | None,
    context: RebuildContext,
    proof: str | None,
) -> Rescued:
    """Rebuild, match, write, check and report. `old` has been detected, read and unwrapped."""
    from lockstep.rescue import match, old_masks, rebuild, training_state, unwrap, write

    matched: Matched | None = None
    difference = None
    state: write.State = [], False
    given = old.model_config or unwrap.template_config(config)
    with rebuild.recursion_for(given, context):
        if model is not None:
            matched = match.match_model(old, model, context)
        elif config is not None or suffix != ".safetensors":  # which needs no architecture
            match.require_readable(old)
            part = rebuild.template(old.path, given, context)
            matched = match.match_part(old, part, given or {}, context)
            training_state.freeze(old, matched)
        with write.replacing(output, old.path, _size(old, suffix)) as temporary:
            if matched is not None and suffix == ".keras":
                if matched.part is not None:
                    with rebuild.weightless():
                        old_masks.require_old_masks(matched.part, context)
                    training_state.carry(old, matched)
                state = training_state.state(old, matched)
            rows, optimizer = write.write(old, matched, suffix, state, temporary)
            if proof is not None:
                difference = _check(matched, suffix, temporary, proof)
    notes = context.notes
    if matched is None:
        notes.append("arrays only, under their old names: no architecture was given")
    else:
        notes += _unrecorded(old, matched) if matched.part is None else []
        if matched.name is None:
            notes.append("the file is from a single-device model: there was nothing to unwrap")
    return _report(
        old,
        matched,
        output=output,
        rows=tuple(rows),
        optimizer=optimizer,
        compiled=suffix == ".keras" and bool(matched and getattr(matched.model, "optimizer", None)),
        difference=difference,
        notes=tuple(notes),
    )


def _report(old: OldFile, matched: Matched | None, **found: Any) -> Rescued:
    from lockstep.rescue.rescue_report import Rescued

    name, devices = (matched.name, matched.devices) if matched else old.part or (None, None)
    rules = matched.plan.rules if matched else ("names: every array keeps its own",)
    return Rescued(
        source=old.path, library=old.library, template=name, devices=devices, rules=rules, **found
    )


def _unrecorded(old: OldFile, matched: Matched) -> list[str]:
    from lockstep.rescue import old_layers, weight_tree

    # Weights of CuDNN tell the settings of their layer.
    known = [pair.leaf.layer for pair in matched.plan.pairs if pair.dialect != "plain"]
    told = {id(each) for layer in known for each in weight_tree.every_layer(layer)}
    every = weight_tree.every_layer(matched.model)
    return old_layers.unrecorded_settings(old, [each for each in every if id(each) not in told])


def _size(old: OldFile, suffix: str) -> int:
    """Estimate the bytes of the new file, including its index."""
    arrays = [*old.weights, *(old.optimizer if suffix in (".keras", ".h5") else ())]
    size = 2**20 + sum(2**12 + int(stored.data.nbytes) for stored in arrays)
    return 2 * size if suffix == ".keras" else size  # weights and archive exist at once


def _check(matched: Matched | None, suffix: str, path: str, proof: str) -> float:
    """Load the written file, and compare its outputs with the expected ones."""
    import keras

    from lockstep.rescue import outputs_check, rebuild

    given, wanted = outputs_check.inputs_and_outputs(proof)
    if matched is None:
        raise UnsuitableOutput(
            "Outputs can only be checked if the model is known.\n"
            "Pass the template with --model or --config, or remove --check."
        )
    if suffix == ".keras":
        model = outputs_check.loaded_model(path, matched.context.custom)
    elif matched.part is None:
        model = keras.models.clone_model(matched.model)
    else:
        model = rebuild.build(matched.config or {}, matched.context).layer
    if suffix == ".weights.h5":
        model.load_weights(path)
    elif suffix != ".keras":
        load_weights(model, path)
    return outputs_check.difference(model, given, wanted)


# ---------------------------------------------------------------- into a live model


def _load(model: Any, old: OldFile) -> Rescued:
    """Match, assign and compare all weights; a failure leaves the model unchanged."""
    from lockstep.core.state import renew_normalization
    from lockstep.rescue import exactness, match
    from lockstep.rescue.old_layers import RebuildContext

    matched = match.match_model(old, model, RebuildContext(version=old.version))
    variables = {pair.slot.index: model.variables[pair.slot.index] for pair in matched.plan.pairs}
    before = {index: exactness.numbers(each).copy() for index, each in variables.items()}
    rows = []
    try:
        for pair in matched.plan.pairs:
            variable, dtype = variables[pair.slot.index], before[pair.slot.index].dtype
            values = pair.values()
            variable.assign(exactness.as_dtype(values, dtype, pair.stored.path))
            other = pair.convert is not None or values.dtype != dtype
            source = pair.stored.path.lstrip("/")
            rows.append(_row(source, pair.slot.path, variable, values, other))
    except BaseException:
        for index, value in before.items():
            variables[index].assign(value)
        raise
    renew_normalization(model)
    notes = _unrecorded(old, matched) + exactness.rounded(rows)
    for note in notes:
        warnings.warn(note, stacklevel=3)
    return _report(
        old,
        matched,
        output=f"the live model {model.name!r}",
        rows=tuple(rows),
        optimizer="dropped" if old.optimizer else "none",
        compiled=False,
        difference=None,
        notes=tuple(notes),
    )


def _row(source: str, place: str, variable: Any, values: Any, other: bool) -> Row:
    """Compare a variable with its assigned numbers, and return the row of the report."""
    from lockstep.rescue import exactness
    from lockstep.rescue.rescue_report import Row

    exact = exactness.is_exact(exactness.numbers(variable), values)
    if exact is None:
        raise WeightsDoNotFit(
            f"{variable.path} does not hold the values that were assigned to it.\n"
            "Nothing was changed. Load the file into a new model, and report this as a bug."
        )
    return Row(source, place, tuple(values.shape), exact, other)
