"""The public functions inspect, rescue and load_weights, and the order of their steps."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

from lockstep.errors import NotAModel, UnreadableFile, UnsuitableOutput, WeightsDoNotFit

if TYPE_CHECKING:
    from lockstep.checkpoint.run_report import RunReport
    from lockstep.old_script import ScriptInspection
    from lockstep.rescue.match import Matched
    from lockstep.rescue.old_layers import Context
    from lockstep.rescue.read import OldFile
    from lockstep.rescue.rescue_report import Inspection, Rescued, Row

Path = str | os.PathLike[str]


def inspect(path: Path) -> Inspection | RunReport | ScriptInspection:
    """Identify a checkpoint file, or the folder of a run, and the command that makes it usable.

    Of an old script it lists the lines that Keras 3 needs in another form.
    Nothing in the file is executed. No framework is imported, except PyTorch for PyTorch
    files (with `weights_only=True`).

    Args:
        path: A file of Keras 2, tf.keras or Keras 3 (`.h5`, `.hdf5`, `.keras`,
            `.weights.h5`), a PyTorch state dict, or safetensors; or a folder that
            `lockstep.Checkpoint` has written, or one checkpoint in it; or a `.py` script.

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

    if os.fspath(path).endswith(".py"):
        from lockstep.old_script import inspect_script

        return inspect_script(os.fspath(path))
    if os.path.isdir(path) and is_run(Folder(path)):
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
    from lockstep.rescue import detect, read

    source, goal = os.fspath(path), os.fspath(output)
    suffix = _suffix_of(goal)
    found = detect.inspect_file(source)  # most unsuitable files, before Keras is imported
    if found.kind != "keras2" or found.library.startswith("Keras 3"):
        raise UnreadableFile(
            f"{source} is a file of {found.library} for a single device: there is nothing to "
            f"rescue.\nIt is ready to use: {found.command}"
        )
    if config is not None and not isinstance(config, dict):
        config = read.parse_config(os.fspath(config))
    proof = None if check is None else os.fspath(check)
    if proof is not None and suffix == ".safetensors":
        raise UnsuitableOutput(
            f"check={proof!r} was asked for, and {goal} is to hold arrays alone: there is no model "
            "to ask.\nWrite a .keras file, or leave the check away."
        )

    from lockstep.rescue import rebuild
    from lockstep.rescue.old_layers import Context

    context = Context(_without_keras_own(custom_objects or {}))
    with rebuild.isolated(), read.opened(source) as old:
        return _rescue(old, goal, suffix, model, config, context, proof)


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

    from lockstep.rescue import detect, read

    if not isinstance(model, keras.Model):
        raise NotAModel(
            f"load_weights takes a Keras model and got a {type(model).__name__}.\n"
            "Write lockstep.load_weights(model, path)."
        )
    found = detect.inspect_file(os.fspath(path))
    if found.kind in ("keras", "weights.h5"):
        return _load_keras3(model, found)
    if found.kind not in ("keras2", "named arrays"):
        raise UnreadableFile(
            f"{found.path} is a file of {found.library}, which does not hold a Keras model.\n"
            f"Load it with {found.library.split()[0]}: {found.command}"
        )
    with read.opened(found.path) as old:
        return _load_old(model, old)


# ---------------------------------------------------------------- to a file


def _suffix_of(output: str) -> str:
    """Return the kind of file to write, from the ending of its name."""
    for suffix in (".keras", ".weights.h5", ".h5", ".hdf5", ".safetensors"):
        if output.endswith(suffix):
            return ".h5" if suffix == ".hdf5" else suffix
    raise UnsuitableOutput(
        f"The output {output} has no ending that says what to write.\n"
        "Name it .keras (a model), .weights.h5, .h5 (Keras 2's layout) or .safetensors."
    )


def _without_keras_own(objects: dict[str, Any]) -> dict[str, Any]:
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
    context: Context,
    proof: str | None,
) -> Rescued:
    """Unwrap, rebuild, match, write, check and report."""
    from lockstep.rescue import check, match, rebuild, unwrap, write

    matched: Matched | None = None
    difference = None
    # Arrays alone need no architecture; in an .h5, Keras 2 loads them by layer names and order.
    alone = suffix == ".safetensors" or (old.config is None and suffix == ".weights.h5")
    with rebuild.recursion_for(config or unwrap.template_config(old.config), context):
        if model is not None:
            matched = match.match_model(old, model, context)
        elif config is not None or not alone:
            matched = match.match_config(old, config, context)
        with write.replacing(output, old.path, _size(old, suffix)) as temporary:
            rows, optimizer = write.write(old, matched, suffix, temporary)
            if proof is not None:
                difference = _check(matched, suffix, temporary, proof)
    notes = context.notes
    if matched is None:
        notes.append("arrays alone, under their old names: no architecture was given")
        if suffix == ".weights.h5":
            notes.append(
                f"plain load_weights cannot read it: lockstep.load_weights(model, {output!r}) does"
            )
    else:
        notes += check.unrecorded_settings(old, matched) if matched.part is None else []
        if matched.name is None:
            notes.append("the file is of a single model: there was nothing to unwrap")
    return _report(
        matched,
        "names: every array keeps its own",
        unwrap.parallel_part(old),
        source=old.path,
        output=output,
        library=old.library,
        rows=tuple(rows),
        optimizer=optimizer,
        compiled=suffix == ".keras" and bool(matched and getattr(matched.model, "optimizer", None)),
        difference=difference,
        notes=tuple(notes),
    )


def _report(
    matched: Matched | None, rule: str, part: tuple[str, int | None] | None, **found: Any
) -> Rescued:
    from lockstep.rescue.rescue_report import Rescued

    if matched is None:
        name, devices = part or (None, None)
        return Rescued(template=name, devices=devices, rules=(rule,), **found)
    rules = matched.plan.rules
    return Rescued(template=matched.name, devices=matched.devices, rules=rules, **found)


def _size(old: OldFile, suffix: str) -> int:
    """Estimate the bytes of the new file, including its index."""
    arrays = [*old.weights, *(old.optimizer if suffix in (".keras", ".h5") else ())]
    size = 2**20 + sum(2**12 + int(stored.data.nbytes) for stored in arrays)
    return 2 * size if suffix == ".keras" else size  # weights and archive exist at once


def _check(matched: Matched | None, suffix: str, path: str, proof: str) -> float:
    """Load the written file, and compare its outputs with the expected ones."""
    import keras

    from lockstep.rescue import check, rebuild

    given, wanted = check.inputs_and_outputs(proof)
    if matched is None:
        raise UnsuitableOutput(
            "Outputs can only be checked where there is a model to ask.\n"
            "Give the template with --model or --config, or leave --check away."
        )
    if suffix == ".keras":
        model = check.loaded_model(path, matched.context.custom)
    elif matched.part is None:
        model = keras.models.clone_model(matched.model)
    else:
        model = rebuild.build(matched.config or {}, matched.context).layer
    if suffix == ".weights.h5":
        model.load_weights(path)
    elif suffix != ".keras":
        load_weights(model, path)
    return check.difference(model, given, wanted)


# ---------------------------------------------------------------- into a live model


def _load_old(model: Any, old: OldFile) -> Rescued:
    """Match, assign and compare all weights; a failure leaves the model unchanged."""
    from lockstep.rescue import check, match
    from lockstep.rescue.old_layers import Context
    from lockstep.state import renew_normalization

    matched = match.match_model(old, model, Context())
    variables = {pair.slot.index: model.variables[pair.slot.index] for pair in matched.plan.pairs}
    before = {index: check.numbers(variable).copy() for index, variable in variables.items()}
    rows = []
    try:
        for pair in matched.plan.pairs:
            variable, dtype = variables[pair.slot.index], before[pair.slot.index].dtype
            values = pair.values()
            variable.assign(check.as_dtype(values, dtype, pair.stored.path))
            other = pair.convert is not None or values.dtype != dtype
            source = pair.stored.path.lstrip("/")
            rows.append(_row(source, pair.slot.path, variable, values, other))
    except BaseException:
        for index, value in before.items():
            variables[index].assign(value)
        raise
    renew_normalization(model)
    return _loaded(model, old, rows, check.unrecorded_settings(old, matched), matched)


def _load_keras3(model: Any, found: Inspection) -> Rescued:
    """Load a Keras 3 file with Keras's own loader, then compare each array."""
    import numpy as np

    from lockstep.rescue import check, write
    from lockstep.state import renew_normalization

    before = [check.numbers(variable).copy() for variable in model.weights]
    shapes = sorted(entry.shape for entry in found.arrays)
    wanted = sorted(tuple(variable.shape) for variable in model.weights)
    try:
        if shapes != wanted:
            raise ValueError(f"{len(shapes)} arrays for {len(wanted)} weights, or other shapes")
        with write.quiet(), np.errstate(over="ignore", invalid="ignore"):
            model.load_weights(found.path)
        rows = _compared(model, found)
    except Exception as error:
        for variable, value in zip(model.weights, before, strict=True):
            variable.assign(value)
        renew_normalization(model)
        if isinstance(error, WeightsDoNotFit):
            raise
        raise WeightsDoNotFit(
            f"{found.path} does not fit the model {model.name!r}: "
            f"{' '.join(str(error).split())[:160]}\n"
            "Give the model that was saved: compare its summary() with lockstep inspect."
        ) from error
    return _loaded(model, found, rows, [], None)


def _compared(model: Any, found: Inspection) -> list[Row]:
    """Compare each weight of a model with its array in a Keras 3 file."""
    import h5py

    from lockstep.rescue import check, hdf5, write

    places = write.layout(model)
    whole = found.kind == "keras"
    weights = {id(variable) for variable in model.weights}
    rows = []
    with hdf5.inside_archive(found.path) if whole else h5py.File(found.path, "r") as handle:
        for index, variable in enumerate(model.variables):
            if id(variable) not in weights:
                continue
            path = places.get(index, "")
            if path not in handle:  # tf.keras 2.12 to 2.15 uses another first part
                path = path.replace("layers", "_layer_checkpoint_dependencies")
            if not path or path not in handle:
                raise ValueError(f"{variable.path} is not at the place where Keras saves it")
            values, dtype = handle[path][()], check.numbers(variable).dtype
            check.as_dtype(values, dtype, path)
            rows.append(_row(path, variable.path, variable, values, values.dtype != dtype))
    return rows


def _row(source: str, place: str, variable: Any, values: Any, other: bool) -> Row:
    """Compare a variable with its assigned numbers, and return the row of the report."""
    from lockstep.rescue import check
    from lockstep.rescue.rescue_report import Row

    exact = check.is_exact(check.numbers(variable), values)
    if exact is None:
        raise WeightsDoNotFit(
            f"{variable.path} does not hold the numbers that it was given.\n"
            "Nothing was changed. Load the file into a new model, and tell us."
        )
    return Row(source, place, tuple(values.shape), exact, other)


def _loaded(
    model: Any,
    found: OldFile | Inspection,
    rows: list[Row],
    notes: list[str],
    matched: Matched | None,
) -> Rescued:
    from lockstep.rescue import check

    notes = notes + check.rounded(rows)
    for note in notes:
        warnings.warn(note, stacklevel=4)
    return _report(
        matched,
        "the layout of Keras 3",
        None,
        source=found.path,
        output=f"the live model {model.name!r}",
        library=found.library,
        rows=tuple(rows),
        optimizer="dropped" if found.optimizer else "none",
        compiled=False,
        difference=None,
        notes=tuple(notes),
    )
