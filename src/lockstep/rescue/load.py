"""Load the weights of a file into a live model."""

from __future__ import annotations

import warnings
from typing import Any

from lockstep.errors import UnreadableFile, WeightsDoNotFit
from lockstep.rescue import abstract_model, detect, hdf5, keras2, target, weight_tree
from lockstep.rescue.exact_values import as_dtype, converted, is_exact, rounded
from lockstep.rescue.keras2 import Group, OldFile
from lockstep.rescue.old_settings import Context
from lockstep.rescue.rescue_report import Inspection, Rescued, Row


def load(model: Any, path: str) -> Rescued:
    """Set every weight of a built model from a file, or none."""
    found = detect.inspect_file(path)
    if found.kind in ("keras", "weights.h5"):
        return _load_keras3(model, found)
    if found.kind == "named arrays":
        with hdf5.opened(path) as handle:
            with hdf5.reading(path):
                old = _named(path, handle, found)
            return _set(model, old)
    if found.kind != "keras2":
        raise UnreadableFile(
            f"{path} is a file of {found.library}, which does not hold a Keras model.\n"
            f"Load it with {found.library.split()[0]}: {found.command}"
        )
    with keras2.opened(path) as old:
        return _set(model, old)


def _set(model: Any, old: OldFile) -> Rescued:
    """Plan, assign and compare all weights; a failure leaves the model unchanged."""
    found = target.from_model(old, model, Context())
    variables = model.variables
    before = {
        pair.slot.index: abstract_model.numbers(variables[pair.slot.index]).copy()
        for pair in found.plan.pairs
    }
    rows = []
    try:
        for pair in found.plan.pairs:
            variable = variables[pair.slot.index]
            values = converted(pair.stored, pair.convert)
            dtype = before[pair.slot.index].dtype
            variable.assign(as_dtype(values, dtype, pair.stored.path))
            other = pair.convert is not None or values.dtype != dtype
            source = pair.stored.path.lstrip("/")
            rows.append(_row(source, pair.slot.path, variable, values, other))
    except BaseException:
        for index, value in before.items():
            variables[index].assign(value)
        raise
    _renew(model)
    notes = target.doubts(old, found) + rounded(rows)
    return _report(old.path, model, old.library, rows, notes, bool(old.optimizer), found)


def _row(source: str, place: str, variable: Any, values: Any, other: bool) -> Row:
    """Compare a variable with its assigned numbers, and return the row of the report."""
    exact = is_exact(abstract_model.numbers(variable), values)
    if exact is None:
        raise WeightsDoNotFit(
            f"{variable.path} does not hold the numbers that it was given.\n"
            "Nothing was changed. Load the file into a new model, and tell us."
        )
    return Row(source, place, tuple(values.shape), exact, other)


def _report(
    path: str,
    model: Any,
    library: str,
    rows: list[Row],
    notes: list[str],
    optimizer: bool,
    found: target.Target | None = None,
) -> Rescued:
    for note in notes:
        warnings.warn(note, stacklevel=5)
    return Rescued(
        source=path,
        output=f"the live model {model.name!r}",
        library=library,
        template=found.name if found else None,
        devices=found.devices if found else None,
        rules=found.plan.rules if found else ("the layout of Keras 3",),
        rows=tuple(rows),
        optimizer="dropped" if optimizer else "none",
        compiled=False,
        difference=None,
        notes=tuple(notes),
    )


def _renew(model: Any) -> None:
    """Update the copies of weights that layers such as Normalization compute with."""
    copying = [one for one in weight_tree.every_layer(model) if hasattr(one, "finalize_state")]
    copying = [one for one in copying if one.built and one.weights]
    for one in copying:
        one.finalize_state()
    if copying:  # compiled functions hold the copies as constants
        for kind in ("train", "test", "predict"):
            if getattr(model, f"{kind}_function", None) is not None:
                getattr(model, f"make_{kind}_function")(force=True)


def _load_keras3(model: Any, found: Inspection) -> Rescued:
    """Load a Keras 3 file with Keras's own loader, then compare each array."""
    import numpy as np

    before = [abstract_model.numbers(variable).copy() for variable in model.weights]
    shapes = sorted(entry.shape for entry in found.arrays)
    wanted = sorted(tuple(variable.shape) for variable in model.weights)
    try:
        if shapes != wanted:
            raise ValueError(f"{len(shapes)} arrays for {len(wanted)} weights, or other shapes")
        with abstract_model.quiet(), np.errstate(over="ignore", invalid="ignore"):
            model.load_weights(found.path)
        rows = _compared(model, found)
    except Exception as error:
        for variable, value in zip(model.weights, before, strict=True):
            variable.assign(value)
        _renew(model)
        if isinstance(error, WeightsDoNotFit):
            raise
        raise WeightsDoNotFit(
            f"{found.path} does not fit the model {model.name!r}: "
            f"{' '.join(str(error).split())[:160]}\n"
            "Give the model that was saved: compare its summary() with lockstep inspect."
        ) from error
    return _report(found.path, model, found.library, rows, rounded(rows), found.optimizer)


def _compared(model: Any, found: Inspection) -> list[Row]:
    """Compare each weight of a model with its array in a Keras 3 file."""
    import h5py

    places = {index: path for path, index in abstract_model.layout(model).items()}
    whole = found.kind == "keras"
    opened = hdf5.inside_archive(found.path) if whole else h5py.File(found.path, "r")
    weights = {id(variable) for variable in model.weights}
    rows = []
    with opened as handle:
        for index, variable in enumerate(model.variables):
            if id(variable) not in weights:
                continue
            path = places.get(index, "")
            if path not in handle:  # tf.keras 2.12 to 2.15 uses another first part
                path = path.replace("layers", "_layer_checkpoint_dependencies")
            if not path or path not in handle:
                raise ValueError(f"{variable.path} is not at the place where Keras saves it")
            values, dtype = handle[path][()], abstract_model.numbers(variable).dtype
            as_dtype(values, dtype, path)
            rows.append(_row(path, variable.path, variable, values, values.dtype != dtype))
    return rows


def _named(path: str, handle: Any, found: Inspection) -> OldFile:
    """Return a file of named arrays as one flat group, in the order of writing."""
    stored = []
    names = hdf5.names(handle, "array_names") or [entry.path for entry in found.arrays]
    for name in names:
        data = hdf5.array(handle, name)
        if data is None:
            raise UnreadableFile(
                f"{path} lists the array {name!r} and does not hold it.\n"
                "It is damaged; rescue the old file again."
            )
        stored.append(keras2.stored(name, data))
    version = hdf5.text(handle, "keras_version")
    groups = (Group("arrays", tuple(stored)),)
    return OldFile(path, version, None, None, None, groups, (), ())
