"""Writing what Keras 3 reads: `.keras` and `.weights.h5`."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import tempfile
from collections.abc import Iterator
from typing import Any

from lockstep.errors import UnsuitableOutput
from lockstep.rescue import archive, blank, masks, stream, training
from lockstep.rescue.keras2 import OldFile
from lockstep.rescue.report import Row
from lockstep.rescue.template import Target


def write_keras(old: OldFile, target: Target, path: str) -> tuple[list[Row], str]:
    """Write a `.keras` archive and read every array of it back.

    Returns:
        The table of weights, and what became of the optimizer's state.
    """
    import keras

    if target.part is not None:
        with blank.weightless():
            masks.require_old(target.part, target.context)
    places = _places(target)
    if not target.live:
        merges = target.template.merges if target.template else target.outputs
        training.carry(old, target.model, merges, target.outputs, target.context)
    state: training.State | None = None
    if getattr(target.model, "optimizer", None) is not None:
        plain = not target.live and all(pair.convert is None for pair in target.plan.pairs)
        with blank.quiet():
            order = target.trained(old) if plain and old.optimizer else None
            state = training.state(old, target.model, order, target.context)
    optimizer = "none"
    if old.optimizer:
        optimizer = "carried" if state and state.carried else "dropped"
    with blank.quiet():
        described = keras.saving.serialize_keras_object(target.model)
    texts = {
        "metadata.json": json.dumps(
            {
                "keras_version": keras.__version__,
                "date_saved": datetime.datetime.now().strftime("%Y-%m-%d@%H:%M:%S"),
            }
        ),
        "config.json": json.dumps(described),
    }
    with archive.writing(path, texts) as handle:
        _write(target, places, handle)
        if state:
            _write_state(state, handle)
    with archive.reading(path) as handle:
        rows = _compare(target, places, handle)
        if state:
            _compare_state(state, handle)
    return rows, optimizer


def write_weights(old: OldFile, target: Target, path: str) -> tuple[list[Row], str]:
    """Write a `.weights.h5` and read every array of it back."""
    import h5py

    places = _places(target)
    with h5py.File(path, "w") as handle:
        _write(target, places, handle)
    with h5py.File(path, "r") as handle:
        rows = _compare(target, places, handle)
    return rows, "dropped" if old.optimizer else "none"


def _places(target: Target) -> dict[str, int]:
    """Paths in the file and positions of variables, as Keras itself lays them out."""
    with tempfile.TemporaryDirectory() as folder:
        found = blank.layout(target.model, folder)
    missing = set(target.by_index()) - set(found.values())
    if missing:
        index = min(missing)
        raise UnsuitableOutput(
            f"Keras does not save {target.model.variables[index].path} of this model.\n"
            "Its layers save themselves in a way of their own; take a .safetensors of the arrays."
        )
    return found


def _write(target: Target, places: dict[str, int], handle: Any) -> None:
    pairs = target.by_index()
    variables = target.model.variables
    for path, index in places.items():
        _group(handle, path)
        if index in pairs:
            stream.copy(pairs[index].stored, pairs[index].convert, handle, path)
        elif index >= 0:
            with _placeholder(target):
                handle[path] = blank.numbers(variables[index])


def _write_state(state: training.State, handle: Any) -> None:
    import numpy as np

    group = handle.require_group("optimizer/vars")
    for index, entry in enumerate(state.entries):
        if entry.stored is None:
            stream.fill(entry.shape, entry.number, group, str(index))
        elif entry.shape == ():
            group[str(index)] = np.asarray(entry.stored.read(), dtype=entry.number.dtype)
        else:
            stream.copy(entry.stored, None, group, str(index))


@contextlib.contextmanager
def _placeholder(target: Target) -> Iterator[None]:
    """Where a weightless model's few other variables take their initial value."""
    if target.live:
        yield
    else:
        with blank.weightless():
            yield


def _compare(target: Target, places: dict[str, int], handle: Any) -> list[Row]:
    pairs = target.by_index()
    paths = {index: path for path, index in places.items()}
    rows = []
    for index, pair in pairs.items():
        same = stream.equal(pair.stored, pair.convert, handle[paths[index]])
        rows.append(
            Row(
                pair.stored.path.lstrip("/"),
                pair.slot.path,
                pair.slot.shape,
                same,
                pair.convert is not None,
            )
        )
    require_equal(rows)
    return rows


def require_equal(rows: list[Row]) -> None:
    """Raise where an array that was read back is not the one that was to be written."""
    for row in rows:
        if not row.equal:
            raise UnsuitableOutput(
                f"{row.target} was read back from the new file and is not {row.source}.\n"
                "Nothing was written. The disk may be failing; try another, and tell us."
            )


def _compare_state(state: training.State, handle: Any) -> None:
    rows = []
    for index, entry in enumerate(state.entries):
        if entry.stored is not None and entry.shape:
            place = f"optimizer/vars/{index}"
            same = stream.equal(entry.stored, None, handle[place])
            rows.append(Row(entry.stored.path, place, entry.shape, same))
    require_equal(rows)


def _group(handle: Any, path: str) -> None:
    handle.require_group(os.path.dirname(path))
