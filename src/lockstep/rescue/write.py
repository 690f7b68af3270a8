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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.errors import UnsuitableOutput
from lockstep.files import sync_file, sync_folder
from lockstep.rescue import abstract_model, hdf5, masks, training_state
from lockstep.rescue.exact_values import as_dtype, converted, is_exact, rounded
from lockstep.rescue.keras2 import OldFile, Stored
from lockstep.rescue.match import Pair, halves
from lockstep.rescue.rebuild import entry_name
from lockstep.rescue.rescue_report import Row
from lockstep.rescue.target import Target
from lockstep.rescue.weight_tree import Branch, Leaf

Config = dict[str, Any] | None

_SUFFIXES = (".keras", ".weights.h5", ".h5", ".hdf5", ".safetensors")


def suffix_of(output: str) -> str:
    """Return the kind of file to write, from the ending of its name."""
    for suffix in _SUFFIXES:
        if output.endswith(suffix):
            return ".h5" if suffix == ".hdf5" else suffix
    raise UnsuitableOutput(
        f"The output {output} has no ending that says what to write.\n"
        "Name it .keras (a model), .weights.h5, .h5 (Keras 2's layout) or .safetensors."
    )


def write(old: OldFile, target: Target | None, suffix: str, path: str) -> tuple[list[Row], str]:
    """Write one file and read it back.

    Args:
        old: The open old file.
        target: The model and its weights; None for arrays only.
        suffix: A result of `suffix_of`.
        path: The path to write.

    Returns:
        The table of weights, and the outcome for the optimizer state (`"carried"`,
        `"dropped"` or `"none"`).
    """
    dropped = "dropped" if old.optimizer else "none"
    if suffix == ".safetensors":
        return _write_safetensors(_named(old), path), dropped
    if target is None:
        return _write_named(_named(old), old, path), dropped
    if suffix == ".h5":
        return _write_keras2(old, target, path)
    if suffix == ".keras":
        return _write_keras(old, target, path)
    places = _places(target)
    _save_weights(target, path)
    import h5py

    with h5py.File(path, "r") as handle:
        return _compare(target, places, handle), dropped


def _save_weights(target: Target, path: str) -> None:
    """Let Keras write the weights of a model, reading each from the old file on demand."""
    variables = target.model.variables
    pairs = {id(variables[index]): pair for index, pair in target.by_index().items()}

    def value(variable: Any) -> Any:
        pair = pairs.get(id(variable))
        if pair is None:
            return None
        found = converted(pair.stored, pair.convert)
        return as_dtype(found, variable.dtype, pair.stored.path)

    abstract_model.save_weights(target.model, path, value)


def _write_keras(old: OldFile, target: Target, path: str) -> tuple[list[Row], str]:
    """Write a `.keras` archive with Keras's config and Keras's layout of weights.

    Keras cannot write the archive itself: it creates variables while it saves an optimizer,
    and a model without weights allows none. See keras/src/saving/saving_lib.py,
    get_attr_skipset.
    """
    import h5py
    import keras

    if target.part is not None:
        with abstract_model.weightless():
            masks.require_old(target.part, target.context)
    places = _places(target)
    if not target.live:
        merges = target.template.merges if target.template else target.outputs
        training_state.carry(old, target.model, merges, target.outputs, target.context)
    state: training_state.State | None = None
    with abstract_model.quiet():
        if getattr(target.model, "optimizer", None) is not None:
            plain = not target.live and all(pair.convert is None for pair in target.plan.pairs)
            order = target.trained(old) if plain and old.optimizer else None
            state = training_state.state(old, target.model, order, target.context)
        config = keras.saving.serialize_keras_object(target.model)
    metadata = {
        "keras_version": keras.__version__,
        "date_saved": datetime.datetime.now().strftime("%Y-%m-%d@%H:%M:%S"),
    }
    with tempfile.TemporaryDirectory(dir=os.path.dirname(path), prefix=".rescue-") as folder:
        weights = os.path.join(folder, "model.weights.h5")
        _save_weights(target, weights)
        if state:
            with h5py.File(weights, "a") as handle:
                state.write(handle)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("metadata.json", json.dumps(metadata))
            archive.writestr("config.json", json.dumps(config))
            archive.write(weights, "model.weights.h5")
    with hdf5.inside_archive(path) as handle:
        rows = _compare(target, places, handle)
        if state and not state.read_back(handle):
            raise _misread("the state of the optimizer", "that of the old file")
    optimizer = "none"
    if old.optimizer:
        optimizer = "carried" if state and state.carried else "dropped"
    return rows, optimizer


def _places(target: Target) -> dict[int, str]:
    """Return the path where Keras saves each weight, by position in `model.variables`."""
    found = {index: path for path, index in abstract_model.layout(target.model).items()}
    missing = set(target.by_index()) - set(found)
    if missing:
        raise UnsuitableOutput(
            f"Keras does not save {target.model.variables[min(missing)].path} of this model.\n"
            "Its layers save themselves in a way of their own; take a .safetensors of the arrays."
        )
    return found


def _compare(target: Target, places: dict[int, str], handle: Any) -> list[Row]:
    rows = []
    for index, pair in target.by_index().items():
        values, found = converted(pair.stored, pair.convert), handle[places[index]][()]
        exact = _is_exact(pair.stored.path, places[index], values, found)
        other = pair.convert is not None or values.dtype != found.dtype
        source = pair.stored.path.lstrip("/")
        rows.append(Row(source, pair.slot.path, pair.slot.shape, exact, other))
    target.context.notes += rounded(rows)
    return rows


def _is_exact(source: str, place: str, wanted: Any, found: Any) -> bool:
    """Return True for an exact array and False for a rounded one; raise for any other."""
    exact = is_exact(found, wanted)
    if exact is None:
        raise _misread(place, source)
    return exact


def _misread(place: str, source: str) -> UnsuitableOutput:
    return UnsuitableOutput(
        f"{place} was read back from the new file and is not {source}.\n"
        "Nothing was written. The disk may be failing; try another, and tell us."
    )


def _write_keras2(old: OldFile, target: Target, path: str) -> tuple[list[Row], str]:
    """Write Keras 2's layout: the old config, and one group per layer with the old names."""
    import h5py

    # Keras 2 cannot read the config of a live Keras 3 model, and the file's config names
    # other layers.
    config = None if target.live else target.config
    with h5py.File(path, "w") as handle:
        root = handle
        if config is not None:
            root = handle.create_group("model_weights")
            handle.attrs["model_config"] = json.dumps(config).encode()
        else:
            target.context.note("weights alone, under the names of the model that was given")
        for place in (handle, root):
            place.attrs["backend"] = (old.backend or "tensorflow").encode()
            place.attrs["keras_version"] = (old.version or "2.2.4").encode()
        places = _write_layers(target, config, root)
        optimizer = _write_training(old, target, config, handle)
    with h5py.File(path, "r") as handle:
        return [_read_back(pair.stored, place, handle) for place, pair in places.items()], optimizer


def _read_back(stored: Stored, place: str, handle: Any) -> Row:
    exact = _is_exact(stored.path, place, stored.read(), handle[place][()])
    return Row(stored.path.lstrip("/"), place, stored.shape, exact)


def _write_layers(target: Target, config: Config, root: Any) -> dict[str, Pair]:
    pairs = target.by_index()
    tops = {child.name: child for child in target.tree.children}
    names = _layer_names(config, tops)
    hdf5.write_names(root, "layer_names", names)
    places: dict[str, Pair] = {}
    for name in names:
        group = root.require_group(name)
        listed: list[str] = []
        if name in tops:
            head, tail = halves(tops[name], set())
            for _, slot in head + tail:
                pair = pairs[slot.index]
                own = _unique(pair.stored.name, listed)
                listed.append(own)
                group[own] = pair.stored.read()
                places[f"{group.name}/{own}".lstrip("/")] = pair
        hdf5.write_names(group, "weight_names", listed)
    if len(places) != len(pairs):
        raise UnsuitableOutput(
            f"{len(pairs)} weights were to be written, and the config names layers for "
            f"{len(places)}.\nNothing was written: two layers share a name, or one is in no "
            "list. Write a .keras file."
        )
    return places


def _layer_names(config: Config, tops: dict[str, Leaf | Branch]) -> list[str]:
    if config is None:
        return list(tops)
    inner = config["config"]
    entries = inner["layers"] if isinstance(inner, dict) else inner
    return [str(entry.get("name") or entry_name(entry)) for entry in entries]


def _write_training(old: OldFile, target: Target, config: Config, handle: Any) -> str:
    if config is None or old.training is None or old.config is None:
        return "dropped" if old.optimizer else "none"
    settings = dict(old.training)
    merges = list(target.template.merges) if target.template else []
    for key in ("loss", "metrics", "loss_weights", "weighted_metrics"):
        value = settings.get(key)
        if isinstance(value, dict) and merges and set(value) <= set(merges):
            renamed = dict(zip(merges, target.outputs, strict=True))
            settings[key] = {renamed[name]: entry for name, entry in value.items()}
    handle.attrs["training_config"] = json.dumps(settings).encode()
    if not old.optimizer:
        return "none"
    group = handle.create_group("optimizer_weights")
    listed: list[str] = []
    for stored in old.optimizer:
        own = _unique(stored.name, listed)
        listed.append(own)
        group[own] = stored.read()
    hdf5.write_names(group, "weight_names", listed)
    return "carried"


def _unique(name: str, taken: list[str]) -> str:
    """Return a unique name in a group; names of nested layers may repeat."""
    if name not in taken:
        return name
    stem, _, last = name.rpartition("/")
    number = 1
    while f"{stem}_{number}/{last}" in taken:
        number += 1
    return f"{stem}_{number}/{last}"


def _named(old: OldFile) -> dict[str, Stored]:
    """Return every array under a unique name.

    The name is that of the weight (`dense_1/kernel`). If two weights of a file share a
    name, the layer's group precedes all names.
    """
    old.require_whole()
    groups = old.weighted
    plain = [_bare(stored.name) for group in groups for stored in group.weights]
    unique = len(set(plain)) == len(plain)
    return {
        _bare(stored.name) if unique else f"{group.name}/{_bare(stored.name)}": stored
        for group in groups
        for stored in group.weights
    }


def _bare(name: str) -> str:
    return name.rpartition(":")[0] if name.rpartition(":")[2].isdigit() else name


def _write_named(found: dict[str, Stored], old: OldFile, path: str) -> list[Row]:
    """Write an HDF5 file of named arrays, for weights without an architecture."""
    import h5py

    with h5py.File(path, "w") as handle:
        handle.attrs["format"] = "named arrays"
        handle.attrs["keras_version"] = (old.version or "").encode()
        hdf5.write_names(handle, "array_names", list(found))
        for name, stored in found.items():
            handle[name] = stored.read()
    with h5py.File(path, "r") as handle:
        return [_read_back(stored, name, handle) for name, stored in found.items()]


_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32",
    "uint64": "U64", "bool": "BOOL",
}  # fmt: skip


def _write_safetensors(found: dict[str, Stored], path: str) -> list[Row]:
    """Write a `.safetensors` file: a header in JSON, then the arrays one by one."""
    import numpy as np

    header: dict[str, Any] = {"__metadata__": {"format": "np"}}
    offset = 0
    for name, stored in found.items():
        kind = _DTYPES.get(stored.data.dtype.name)
        if kind is None:
            raise UnsuitableOutput(
                f"{name} is {stored.dtype}, which safetensors does not hold.\n"
                "Write a .weights.h5 instead."
            )
        end = offset + int(stored.data.nbytes)
        header[name] = {"dtype": kind, "shape": list(stored.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for stored in found.values():
            file.write(_little_endian(stored.read()).tobytes())
    rows = []
    with open(path, "rb") as file:
        file.seek(8 + len(text))
        for name, stored in found.items():
            wanted = _little_endian(stored.read())
            back = np.frombuffer(file.read(wanted.nbytes), wanted.dtype).reshape(wanted.shape)
            exact = _is_exact(stored.path, name, wanted, back)
            rows.append(Row(stored.path.lstrip("/"), name, stored.shape, exact))
    return rows


def _little_endian(values: Any) -> Any:
    return values.astype(values.dtype.newbyteorder("<"), copy=False)


@contextlib.contextmanager
def replacing(output: str, source: str, suffix: str, size: int = 0) -> Iterator[str]:
    """Yield a temporary path that replaces `output` when the body succeeds.

    `output` holds either its former contents or the finished file, also after a power cut.
    The file and its folder are synced before this returns.

    Args:
        output: Path of the new file. An existing file is replaced.
        source: The old file, which must not be `output`.
        suffix: Ending of the temporary file.
        size: Maximum bytes of the new file.

    Raises:
        UnsuitableOutput: `output` is a folder or is `source`, or its folder is missing,
            full or not writable.
    """
    folder = os.path.dirname(os.path.abspath(output))
    if os.path.isdir(output):
        raise UnsuitableOutput(f"{output} is a folder.\nGive the path of a file with -o.")
    if os.path.exists(output) and os.path.samefile(output, source):
        raise UnsuitableOutput(
            f"The output {output} is the file that is read.\n"
            "An old file is never overwritten by its rescue: give another path with -o."
        )
    # HDF5 may abort the process on a full disk.
    free = shutil.disk_usage(folder).free if os.path.isdir(folder) else size
    if free < size:
        raise UnsuitableOutput(
            f"The new file needs up to {size:,} bytes, and {folder} has {free:,} left.\n"
            "Make room, or give a path on another disk with -o."
        )
    try:
        handle, path = tempfile.mkstemp(dir=folder, prefix=".rescue-", suffix=suffix)
    except OSError as error:
        raise UnsuitableOutput(
            f"The folder {folder} cannot be written: {error.strerror}.\n"
            "Give a path in a folder that is there and yours with -o."
        ) from error
    os.close(handle)
    try:
        yield path
        os.chmod(path, 0o666 & ~_umask())
        sync_file(Path(path))
        os.replace(path, output)
        sync_folder(Path(folder))
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        reason = " ".join(str(error).split())
        if isinstance(error, OSError) or (
            isinstance(error, RuntimeError) and "write failed" in reason  # from HDF5
        ):
            raise UnsuitableOutput(
                f"{output} could not be written: {reason[:160]}.\n"
                "Nothing was written. Make room, or give a path on another disk with -o."
            ) from error
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
