"""The public functions: inspect, rescue, load_weights."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from lockstep.errors import UnreadableFile, UnsuitableOutput

if TYPE_CHECKING:
    from lockstep.rescue.inspection import Inspection
    from lockstep.rescue.keras2 import OldFile
    from lockstep.rescue.report import Rescued, Row
    from lockstep.rescue.template import Target

Path = str | os.PathLike[str]


def inspect(path: Path) -> Inspection:
    """Say what a checkpoint file is, and what makes it usable.

    Guarantees that nothing in the file is executed and that no framework is imported
    (PyTorch for its own files apart, with `weights_only=True`).

    Args:
        path: A file of Keras 2, tf.keras or Keras 3 (`.h5`, `.hdf5`, `.keras`,
            `.weights.h5`), a PyTorch state dict, or safetensors.

    Returns:
        What it is; `command` is the next thing to type.

    Raises:
        UnreadableFile: It is none of these, or damaged beyond reading.
        HostileFile: It declares absurd sizes or links out of itself.

    Example:
        >>> found = lockstep.inspect("tests/files/legacy/keras-2.2.4__mlp4-g2/parallel_full.h5")
        >>> found.parallel, found.devices, found.template, found.library
        (True, 2, 'sequential_1', 'Keras 2.2.4')
    """
    from lockstep.rescue import kinds

    return kinds.look(os.fspath(path))


def rescue(
    path: Path,
    output: Path,
    *,
    model: Any = None,
    config: Path | dict[str, Any] | None = None,
    custom_objects: dict[str, Any] | None = None,
    check: Path | None = None,
) -> Rescued:
    """Write a single-device file from an old multi-GPU one, and prove that it did.

    Guarantees that every array in the new file was read back and is bit for bit the
    old one (CuDNN layers: the converted one), that no code from the old file ran,
    and that the output appears whole or not at all.

    Args:
        path: The old file: what `parallel_model.save()`, `save_weights()` or
            `ModelCheckpoint` wrote with Keras 2.0.9 to 2.3.1 or tf.keras 1.8 to 2.15.
            Files of single models are translated the same way.
        output: `.keras`, `.weights.h5`, `.h5` (Keras 2's own layout; with `model`, of its
            weights), or `.safetensors` (arrays alone). Replaced if it is there.
        model: The template as a live, built Keras 3 model, for files of weights.
            It is not changed.
        config: The template's old `to_json()`, as a path or a dict, for files of weights.
        custom_objects: The user's layers and functions by name; a Lambda's function
            by the name of its layer. Nothing of that kind is taken from the file.
        check: An `.npz` with inputs x0, x1, ... and expected outputs y0, y1, ...; the
            written model is loaded and must give them to 1e-5 (relative beyond 1).

    Returns:
        The proof: a table of all weights, the rule that decided, and notes.

    Raises:
        IncompleteFile: The save that wrote the file had failed; says what is missing.
        NeedsCode: A custom or Lambda layer's code, or the architecture, is needed.
        AmbiguousWeights: Two assignments fit; says what can settle it.
        OldFileError: The parent of all these, and of what else can be wrong.

    Example:
        >>> report = lockstep.rescue("tests/files/legacy/keras-2.2.4__mlp4-g2/parallel_full.h5",
        ...                          "single.keras")
        >>> report.template, report.devices, len(report.rows)
        ('sequential_1', 2, 8)
    """
    from lockstep.rescue import blank

    source, goal = os.fspath(path), os.fspath(output)
    objects = _yours(custom_objects or {})
    proof = None if check is None else os.fspath(check)
    return blank.apart(lambda: _rescue(source, goal, model, config, objects, proof))


def load_weights(model: Any, path: Path) -> Rescued:
    """Load an old file's weights into a live model, by content and not by luck.

    Guarantees that every weight of the model is set from the file, or none is: it
    raises rather than loading nothing or loading wrongly.

    Args:
        model: The template as a built Keras 3 model.
        path: Any file that `rescue` takes.

    Returns:
        A table of all weights, the rule that decided, and notes; warnings are given
        for what weights cannot tell, such as the old hard_sigmoid.

    Raises:
        WeightsDoNotFit: The file is of another model.
        AmbiguousWeights: Two assignments fit; says what can settle it.
        OldFileError: The parent of these and of what else can be wrong.

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
    from lockstep.rescue import live

    if not isinstance(model, keras.Model):
        raise NotAModel(
            f"load_weights takes a Keras model and got a {type(model).__name__}.\n"
            "Write lockstep.load_weights(model, path)."
        )
    return live.load(model, os.fspath(path))


def _yours(objects: dict[str, Any]) -> dict[str, Any]:
    """Without Keras's own classes under their own names, which old configs are translated to."""
    return {
        name: given
        for name, given in objects.items()
        if not isinstance(given, type)
        or (given.__module__.partition(".")[0], given.__name__) != ("keras", name)
    }


def _rescue(
    source: str, goal: str, model: Any, config: Any, objects: dict[str, Any], check: str | None
) -> Rescued:
    from lockstep.rescue import keras2, template, whole
    from lockstep.rescue.report import Rescued
    from lockstep.rescue.settings import Context

    suffix = _suffix(goal)
    _require_old(source)
    context = Context(objects)
    with keras2.opened(source) as old:
        target = _target(old, model, config, context, suffix)
        with whole.appearing(goal, source, suffix, _size(old, suffix)) as temporary:
            rows, state = _write(old, target, suffix, temporary)
            worst = None
            if check is not None:
                worst = _check(target, suffix, temporary, check, context)
        notes = list(context.notes)
        if target is not None and target.live:
            notes += template.doubts(old, target)
        if target is None:
            notes.append("arrays alone, under their old names: no architecture was given")
        elif target.template is None and target.name is None:
            notes.append("the file is of a single model: there was nothing to unwrap")
        return Rescued(
            source=source,
            output=goal,
            library=old.library,
            template=target.name if target else None,
            devices=target.devices if target else None,
            rules=target.plan.rules if target else ("names: every array keeps its own",),
            rows=tuple(rows),
            optimizer=state,
            compiled=suffix == ".keras" and getattr(target.model, "optimizer", None) is not None
            if target
            else False,
            difference=worst,
            notes=tuple(notes),
        )


def _size(old: OldFile, suffix: str) -> int:
    """Bytes of the new file, with room for its index."""
    arrays = [stored for group in old.weighted for stored in group.weights]
    arrays += old.optimizer if suffix in (".keras", ".h5") else ()
    return 2**20 + sum(2**12 + int(stored.data.nbytes) for stored in arrays)


def _suffix(output: str) -> str:
    for suffix in (".keras", ".weights.h5", ".h5", ".hdf5", ".safetensors"):
        if output.endswith(suffix):
            return ".h5" if suffix == ".hdf5" else suffix
    raise UnsuitableOutput(
        f"The output {output} has no ending that says what to write.\n"
        "Name it .keras (a model), .weights.h5, .h5 (Keras 2's layout) or .safetensors."
    )


def _require_old(path: str) -> None:
    """Raise for files of today, which need no rescue."""
    found = inspect(path)
    if found.kind != "keras2" or found.library.startswith("Keras 3"):
        raise UnreadableFile(
            f"{path} is a file of {found.library} for a single device: there is nothing to "
            f"rescue.\nIt is ready to use: {found.command}"
        )


def _target(old: OldFile, model: Any, config: Any, context: Any, suffix: str) -> Target | None:
    from lockstep.rescue import keras2, template

    if model is not None:
        return template.from_model(old, model, context)
    if isinstance(config, dict):
        given: dict[str, Any] | None = config
    elif config is not None:
        given = keras2.parse_json(_text(os.fspath(config)), "config", os.fspath(config))
    else:
        given = None
    bare = suffix == ".safetensors" or (old.config is None and suffix == ".weights.h5")
    if given is None and bare:
        return None  # .h5 among the others: Keras 2 loads it by layer names and their order
    return template.from_config(old, given, context)


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


def _write(old: OldFile, target: Target | None, suffix: str, path: str) -> tuple[list[Row], str]:
    from lockstep.rescue import keras2_writer, modern, named

    if target is None or suffix == ".safetensors":
        found = named.arrays(old)
        dropped = "dropped" if old.optimizer else "none"
        if suffix == ".safetensors":
            return named.write_safetensors(found, path), dropped
        return named.write_hdf5(found, old, path), dropped
    if suffix == ".keras":
        return modern.write_keras(old, target, path)
    if suffix == ".weights.h5":
        return modern.write_weights(old, target, path)
    return keras2_writer.write(old, target, path)


def _check_loaded(path: str, context: Any, given: Any, wanted: Any) -> float:
    """The largest difference of the outputs of a `.keras` file, loaded as a user would.

    Where a layer wraps another, Keras 3.15.1 now and then takes another object for it while
    it loads: keras/src/layers/rnn/bidirectional.py serializes its layer within the scope of
    keras/src/saving/serialization_lib.py, ObjectSharingScope, which goes by the `id` of
    objects that are gone. The file is right if it ever loads right.
    """
    import keras

    from lockstep.rescue import check

    for attempts_left in (2, 1, 0):
        try:
            model = keras.models.load_model(path, custom_objects=context.custom, compile=False)
            return check.difference(model, given, wanted)
        except Exception:
            if not attempts_left:
                raise
    raise AssertionError("the last attempt returns or raises")


def _check(target: Target | None, suffix: str, path: str, inputs: str, context: Any) -> float:
    import keras

    from lockstep.rescue import check, graph, live

    given, wanted = check.inputs_and_outputs(inputs)
    if target is None:
        raise UnsuitableOutput(
            "Outputs can only be checked where there is a model to ask.\n"
            "Give the template with --model or --config, or leave --check away."
        )
    if suffix == ".keras":
        return _check_loaded(path, context, given, wanted)
    if target.live:
        model = keras.models.clone_model(target.model)
    else:
        model = graph.build(target.config or {}, context).layer
    if suffix == ".weights.h5":
        model.load_weights(path)
    else:
        live.load(model, path)
    return check.difference(model, given, wanted)
