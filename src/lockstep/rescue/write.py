"""Write a rescued model: `.keras`, `.weights.h5`, Keras 2's `.h5`, or arrays only.

Keras serializes the configs and weights of Keras 3 formats. Every file is read back, and
each array is compared with the old one. A file is written whole or not at all.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

from lockstep.checkpoint import array_file
from lockstep.core import files
from lockstep.errors import UnsuitableOutput
from lockstep.rescue import hdf5, rebuild
from lockstep.rescue.exactness import as_dtype, is_exact, quiet, rounded
from lockstep.rescue.match import Matched
from lockstep.rescue.match_by_name import Pair
from lockstep.rescue.match_by_order import trainable_then_frozen
from lockstep.rescue.read import OldFile, Stored
from lockstep.rescue.rescue_report import Row
from lockstep.rescue.training_state import Entry
from lockstep.rescue.unwrap import entry_name

State = tuple[list[Entry], bool]
"""The variables of the optimizer, and whether they are the old ones."""


def write(
    old: OldFile, matched: Matched | None, suffix: str, state: State, path: str
) -> tuple[list[Row], str]:
    """Write a file of a model, or of arrays alone, and read it back.

    Returns:
        The table of weights, and the outcome for the optimizer state (`"carried"`,
        `"dropped"` or `"none"`).
    """
    entries, carried = state
    if suffix == ".safetensors" or matched is None:
        rows = _write_safetensors(_named(old), path)
    elif suffix == ".h5":
        rows, carried = _write_keras2(old, matched, path)
    elif suffix == ".keras":
        rows = _write_keras(matched, entries, path)
    else:
        places = _places(matched)
        _save_weights(matched, path)
        with h5py.File(path, "r") as handle:
            rows = _compare(matched, places, handle)
    return rows, "carried" if carried else "dropped" if old.optimizer else "none"


# ---------------------------------------------------------------- formats of Keras 3


def layout(model: Any) -> dict[int, str]:
    """Return where Keras saves each variable of a model: `{index: path in the file}`.

    Keras saves the model with every variable replaced by its index in `model.variables`, and
    the file is read back. The layout is therefore Keras's own, in every version.
    """
    positions = {id(variable): index for index, variable in enumerate(model.variables)}
    found: dict[int, str] = {}

    def visit(name: str, thing: Any) -> None:
        if isinstance(thing, h5py.Dataset):
            found[int(thing[()])] = name

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "layout.weights.h5")
        _save_values(model, path, lambda variable: np.int64(positions.get(id(variable), -1)))
        with h5py.File(path, "r") as handle:
            handle.visititems(visit)
    return found


def _save_values(model: Any, path: str, value: Callable[[Any], Any]) -> None:
    """Let Keras write a `.weights.h5` with values from a function."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        model.optimizer = None  # Keras creates variables while it saves an optimizer
    try:
        with quiet(), rebuild.values_from(value):
            model.save_weights(path)
    finally:
        if optimizer is not None:
            model.optimizer = optimizer


def _save_weights(matched: Matched, path: str) -> None:
    """Let Keras write the weights of a model, reading each from the old file on demand."""
    variables = matched.model.variables
    pairs = {id(variables[index]): pair for index, pair in matched.by_index().items()}

    def value(variable: Any) -> Any:
        pair = pairs.get(id(variable))
        if pair is None:
            return None
        return as_dtype(pair.values(), variable.dtype, pair.stored.path)

    _save_values(matched.model, path, value)


def _write_keras(matched: Matched, state: list[Entry], path: str) -> list[Row]:
    """Write a `.keras` archive with Keras's config and Keras's layout of weights.

    Keras cannot write the archive itself: it creates variables while it saves an optimizer,
    and a model without weights allows none. See keras/src/saving/saving_lib.py,
    get_attr_skipset.
    """
    places = _places(matched)
    with quiet():
        config = keras.saving.serialize_keras_object(matched.model)
    metadata = {
        "keras_version": keras.__version__,
        "date_saved": datetime.datetime.now().strftime("%Y-%m-%d@%H:%M:%S"),
    }
    with tempfile.TemporaryDirectory(dir=os.path.dirname(path), prefix=".rescue-") as folder:
        weights = os.path.join(folder, "model.weights.h5")
        _save_weights(matched, weights)
        with h5py.File(weights, "a") as handle:
            for index, entry in enumerate(state):
                handle[f"optimizer/vars/{index}"] = entry.value()
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("metadata.json", json.dumps(metadata))
            archive.writestr("config.json", json.dumps(config))
            archive.write(weights, "model.weights.h5")
    with hdf5.inside_archive(path) as handle:
        rows = _compare(matched, places, handle)
        for index, entry in enumerate(state):
            if not is_exact(handle[f"optimizer/vars/{index}"][()], entry.value()):
                raise _misread("the state of the optimizer", "that of the old file")
    return rows


def _places(matched: Matched) -> dict[int, str]:
    """Return the path where Keras saves each weight, by position in `model.variables`."""
    found = layout(matched.model)
    missing = set(matched.by_index()) - set(found)
    if missing:
        raise UnsuitableOutput(
            f"Keras does not save {matched.model.variables[min(missing)].path} of this model.\n"
            "Its layers use a custom save method. Export the arrays to a .safetensors file "
            "instead."
        )
    return found


def _compare(matched: Matched, places: dict[int, str], handle: Any) -> list[Row]:
    rows = []
    for index, pair in matched.by_index().items():
        values, found = pair.values(), handle[places[index]][()]
        other = pair.convert is not None or values.dtype != found.dtype
        rows.append(_row(pair.stored, pair.slot.path, values, found, places[index], other))
    matched.context.notes += rounded(rows)
    return rows


def _row(
    stored: Stored, target: str, wanted: Any, found: Any, place: str = "", converted: bool = False
) -> Row:
    """Return the row of an array that was read back; raise if it holds other numbers."""
    exact = is_exact(found, wanted)
    if exact is None:
        raise _misread(place or target, stored.path)
    return Row(stored.path.lstrip("/"), target, tuple(found.shape), exact, converted)


def _misread(place: str, source: str) -> UnsuitableOutput:
    return UnsuitableOutput(
        f"{place}, read back from the new file, differs from {source}.\nNothing was written. "
        "The disk may be failing. Try another disk, and report this as a bug."
    )


# ---------------------------------------------------------------- the format of Keras 2


def _write_keras2(old: OldFile, matched: Matched, path: str) -> tuple[list[Row], bool]:
    """Write Keras 2's layout: the old config, and one group per layer with the old names."""
    # Keras 2 cannot read the config of a live Keras 3 model, and the file's config names
    # other layers.
    config = None if matched.part is None else matched.config
    with h5py.File(path, "w") as handle:
        root = handle
        if config is not None:
            root = handle.create_group("model_weights")
            handle.attrs["model_config"] = json.dumps(config).encode()
        else:
            matched.context.add_note("weights only, under the names of the given model")
        for place in (handle, root):
            place.attrs["backend"] = (old.backend or "tensorflow").encode()
            place.attrs["keras_version"] = (old.version or "2.2.4").encode()
        places = _write_layers(matched, config, root)
        carried = config is not None and old.config is not None and old.training is not None
        if carried:
            handle.attrs["training_config"] = json.dumps(_training_config(old, matched)).encode()
            if old.optimizer:
                _write_group(handle, "optimizer_weights", old.optimizer)
    with h5py.File(path, "r") as handle:
        rows = [_row(p.stored, at, p.stored.read(), handle[at][()]) for at, p in places.items()]
    return rows, carried and bool(old.optimizer)


def _write_layers(matched: Matched, config: dict[str, Any] | None, root: Any) -> dict[str, Pair]:
    pairs = matched.by_index()
    tops = {child.name: child for child in matched.tree.children}
    names = list(tops)
    if config is not None:
        inner = config["config"]
        names = list(map(entry_name, inner["layers"] if isinstance(inner, dict) else inner))
    hdf5.write_names(root, "layer_names", names)
    places: dict[str, Pair] = {}
    for name in names:
        head, tail = trainable_then_frozen(tops[name], set()) if name in tops else ([], [])
        listed = [pairs[slot.index] for _, slot in head + tail]
        at = _write_group(root, name, [pair.stored for pair in listed])
        places.update(zip(at, listed, strict=True))
    if len(places) != len(pairs):
        raise UnsuitableOutput(
            f"There are {len(pairs)} weights, but the config has layers for only "
            f"{len(places)}.\nNothing was written: two layers share a name, or one is not "
            "listed. Write a .keras file."
        )
    return places


def _write_group(root: Any, name: str, arrays: tuple[Stored, ...] | list[Stored]) -> list[str]:
    """Write the arrays of one layer, and return their paths; nested layers may repeat names."""
    group = root.require_group(name)
    names: list[str] = []
    for stored in arrays:
        own, number = stored.name, 0
        stem, _, last = own.rpartition("/")
        while own in names:
            number += 1
            own = f"{stem}_{number}/{last}"
        names.append(own)
        group[own] = stored.read()
    hdf5.write_names(group, "weight_names", names)
    return [f"{group.name}/{own}".lstrip("/") for own in names]


def _training_config(old: OldFile, matched: Matched) -> dict[str, Any]:
    """Return the old settings of `compile`, under the names of the template's outputs."""
    settings = dict(old.training or {})
    merges = list(old.template.merges) if old.template else []
    for key in ("loss", "metrics", "loss_weights", "weighted_metrics"):
        value = settings.get(key)
        if isinstance(value, dict) and merges and set(value) <= set(merges):
            renamed = dict(zip(merges, matched.outputs(), strict=True))
            settings[key] = {renamed[name]: entry for name, entry in value.items()}
    return settings


# ---------------------------------------------------------------- arrays only


def _named(old: OldFile) -> dict[str, Stored]:
    """Return every array under a unique name.

    The name is that of the weight (`dense_1/kernel`). If two weights of a file share a
    name, the layer's group precedes all names.
    """
    old.require_whole()

    def bare(name: str) -> str:
        return name.rpartition(":")[0] if name.rpartition(":")[2].isdigit() else name

    found = {bare(stored.name): stored for stored in old.weights}
    if len(found) == len(old.weights):
        return found
    return {
        f"{group.name}/{bare(stored.name)}": stored
        for group in old.weighted
        for stored in group.weights
    }


def _write_safetensors(found: dict[str, Stored], path: str) -> list[Row]:
    """Write a `.safetensors` file, array by array."""

    def little_endian(stored: Stored) -> Any:
        values = stored.read()
        return values.astype(values.dtype.newbyteorder("<"), copy=False)

    entries = [
        array_file.Entry(name, stored.data.dtype.name, stored.shape)
        for name, stored in found.items()
    ]
    try:
        array_file.write_arrays(Path(path), entries, map(little_endian, found.values()))
    except ValueError as error:
        raise UnsuitableOutput(f"{error}.\nWrite a .keras or .weights.h5 file instead.") from error
    rows = []
    with open(path, "rb") as written:
        written.seek(8 + int.from_bytes(written.read(8), "little"))
        for name, stored in found.items():
            wanted = little_endian(stored)
            back = np.frombuffer(written.read(wanted.nbytes), wanted.dtype).reshape(wanted.shape)
            rows.append(_row(stored, name, wanted, back))
    return rows


# ---------------------------------------------------------------- whole or not at all


@contextlib.contextmanager
def replacing(output: str, source: str, size: int) -> Iterator[str]:
    """Yield a temporary path that replaces `output` when the body succeeds.

    `output` holds either its former contents or the finished file, also after a power cut.
    It must not be `source`. Its folder must have room for `size` bytes.
    """
    path = Path(os.path.abspath(output))
    if path.is_dir():
        raise UnsuitableOutput(f"{output} is a folder.\nGive the path of a file with -o.")
    if path.exists() and path.samefile(source):
        raise UnsuitableOutput(
            f"The output {output} is also the input file.\n"
            "The old file is never overwritten: give a different path with -o."
        )
    if not os.access(path.parent, os.W_OK | os.X_OK) or not path.parent.is_dir():
        why = "no permission, or a read-only disk" if path.parent.is_dir() else "no such folder"
        raise UnsuitableOutput(
            f"The folder {path.parent} cannot be written: {why}.\n"
            "Give a path in a different folder with -o."
        )
    free = shutil.disk_usage(path.parent).free  # HDF5 may abort the process on a full disk
    if free < size:
        raise UnsuitableOutput(
            f"The new file needs up to {size:,} bytes, but only {free:,} are free in "
            f"{path.parent}.\nFree disk space, or give a path on another disk with -o."
        )
    try:
        with files.replacing(path) as temporary:
            yield str(temporary)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, RuntimeError) and "write failed" not in reason:  # as HDF5 says it
            raise
        raise UnsuitableOutput(
            f"{output} could not be written: {reason[:160]}.\n"
            "Nothing was written. Free disk space, or give a path on another disk with -o."
        ) from error
