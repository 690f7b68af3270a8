"""Weights of a file into a live model."""

from __future__ import annotations

import warnings
from typing import Any

from lockstep.errors import UnreadableFile, WeightsDoNotFit
from lockstep.rescue import blank, hdf5, inspection, keras2, kinds, leaves, stream, template
from lockstep.rescue.keras2 import Group, OldFile
from lockstep.rescue.report import Rescued, Row
from lockstep.rescue.settings import Context


def load(model: Any, path: str) -> Rescued:
    """Set every weight of a built model from a file, or none."""
    found = kinds.look(path)
    if found.kind in ("keras", "weights.h5"):
        return _todays(model, found)
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
    """Plan first, then assign, then compare: a plan that fails leaves the model untouched."""
    target = template.from_model(old, model, Context())
    variables = model.variables
    before = {
        pair.slot.index: blank.numbers(variables[pair.slot.index]).copy()
        for pair in target.plan.pairs
    }
    rows = []
    try:
        for pair in target.plan.pairs:
            variables[pair.slot.index].assign(stream.value(pair.stored, pair.convert))
        for pair in target.plan.pairs:
            same = stream.holds(variables[pair.slot.index], pair.stored, pair.convert)
            rows.append(
                Row(
                    pair.stored.path.lstrip("/"),
                    pair.slot.path,
                    pair.slot.shape,
                    same,
                    pair.convert is not None,
                )
            )
    except BaseException:
        for index, value in before.items():
            variables[index].assign(value)
        raise
    _renew(model)
    notes = template.doubts(old, target)
    for note in notes:
        warnings.warn(note, stacklevel=4)
    return Rescued(
        source=old.path,
        output=f"the live model {model.name!r}",
        library=old.library,
        template=target.name,
        devices=target.devices,
        rules=target.plan.rules,
        rows=tuple(rows),
        optimizer="dropped" if old.optimizer else "none",
        compiled=False,
        difference=None,
        notes=tuple(notes),
    )


def _renew(model: Any) -> None:
    """Let layers that compute with a copy of their weights, as Normalization does, copy again."""
    copying = [one for one in leaves.every_layer(model) if hasattr(one, "finalize_state")]
    copying = [one for one in copying if one.built and one.weights]
    for one in copying:
        one.finalize_state()
    if copying:  # the copies are constants in functions that are compiled already
        for kind in ("train", "test", "predict"):
            if getattr(model, f"{kind}_function", None) is not None:
                getattr(model, f"make_{kind}_function")(force=True)


def _todays(model: Any, found: inspection.Inspection) -> Rescued:
    """A file of Keras 3: Keras's own loader places it, and raises where it does not fit."""
    import numpy as np

    before = [blank.numbers(variable).copy() for variable in model.weights]
    shapes = sorted(entry.shape for entry in found.arrays)
    wanted = sorted(tuple(variable.shape) for variable in model.weights)
    try:
        if shapes != wanted:
            raise ValueError(f"{len(shapes)} arrays for {len(wanted)} weights, or other shapes")
        with blank.quiet():
            model.load_weights(found.path)
    except Exception as error:
        for variable, value in zip(model.weights, before, strict=True):
            variable.assign(value)
        _renew(model)
        raise WeightsDoNotFit(
            f"{found.path} does not fit the model {model.name!r}: "
            f"{' '.join(str(error).split())[:160]}\n"
            "Give the model that was saved: compare its summary() with lockstep inspect."
        ) from error
    rows = tuple(
        Row("", variable.path, tuple(np.shape(value)), True)
        for variable, value in zip(model.weights, before, strict=True)
    )
    return Rescued(
        source=found.path,
        output=f"the live model {model.name!r}",
        library=found.library,
        template=None,
        devices=None,
        rules=("the layout of Keras 3",),
        rows=rows,
        optimizer="dropped" if found.optimizer else "none",
        compiled=False,
        difference=None,
        notes=(),
    )


def _named(path: str, handle: Any, found: inspection.Inspection) -> OldFile:
    """Named arrays, as one flat group in the order in which they were written."""
    stored = []
    names = hdf5.names(handle, "array_names") or [entry.path for entry in found.arrays]
    for name in names:
        data = hdf5.child(handle, name)
        if data is None:
            raise UnreadableFile(
                f"{path} lists the array {name!r} and does not hold it.\n"
                "It is damaged; rescue the old file again."
            )
        hdf5.check_array(data)
        stored.append(keras2.stored(name, data))
    version = hdf5.text(handle, "keras_version")
    groups = (Group("arrays", tuple(stored)),)
    return OldFile(path, version, None, None, None, groups, (), ())
