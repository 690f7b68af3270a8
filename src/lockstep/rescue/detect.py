"""Detect the kind of a file by its first bytes and list its contents, without loading a model."""

from __future__ import annotations

import json
import os
import shlex
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py

from lockstep.checkpoint.run_report import is_run, runs_within
from lockstep.errors import HostileFile, UnreadableFile
from lockstep.rescue import hdf5, read, unwrap
from lockstep.rescue.read import OldFile
from lockstep.rescue.rescue_report import Entry, Inspection


def inspect_file(path: str) -> Inspection:
    """Inspect a file of any known kind."""
    kind = kind_of(path)
    if kind == "hdf5":
        with hdf5.opened(path) as handle, hdf5.reading(path):
            keras2 = {"layer_names", "layer_names0", "keras_version", "model_config"}
            named = {"array_names", "array_names0"} & set(handle.attrs)
            if named or not (keras2 & set(handle.attrs) or "model_weights" in handle):
                return _keras3_weights(path, handle)
        with read.opened(path) as old:
            return _keras2(old)
    if kind == "keras":
        return _archive(path)
    return _torch(path) if kind == "torch" else _safetensors(path)


def kind_of(path: str) -> str:
    """Return the kind of a file: `"hdf5"`, `"keras"`, `"torch"` or `"safetensors"`."""
    if os.path.isdir(path):
        what, remedy = "a folder", "Give one of the files in it."
        if os.path.exists(os.path.join(path, "saved_model.pb")):
            what = "a TensorFlow SavedModel"
            remedy = "Load it with keras.layers.TFSMLayer, or save HDF5 where it was written."
        elif is_run(Path(path)):
            what = "a run of lockstep.Checkpoint"
            remedy = f"Make a file of it: lockstep export {shlex.quote(path)} -o model.keras"
        elif runs := runs_within(Path(path)):
            what, remedy = "a folder of runs", f"Give one of the runs in it: {runs[0]}"
        raise UnreadableFile(f"{path} is {what}, and a single file was expected.\n{remedy}")
    try:
        with open(path, "rb") as file:
            head = file.read(16)
            size = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise UnreadableFile(
            f"{path} cannot be opened: {error.strerror}.\nGive the path of the file to read."
        ) from error
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        return "hdf5"
    if head.startswith(b"PK\x03\x04"):
        with _zip(path) as archive:
            names = archive.namelist()
        if "config.json" in names:
            return "keras"
        if any(name.endswith("data.pkl") for name in names):
            return "torch"
    length = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{" and 2 <= length <= size - 8:
        return "safetensors"
    if head[:1] == b"\x80" and path.endswith((".pt", ".pth", ".bin", ".ckpt")):
        return "torch"
    name = os.path.basename(path)
    if name.endswith(".index") or ".data-0" in name or name == "checkpoint":
        raise UnreadableFile(
            f"{path} is part of a TensorFlow checkpoint, which only its code can read.\n"
            "In the TensorFlow that wrote it: model.load_weights(...), then save_weights('x.h5')."
        )
    what = "empty" if not size else f"of no known kind (it begins with {head[:8]!r})"
    raise UnreadableFile(
        f"{path} is {what}: neither HDF5, .keras, PyTorch nor safetensors.\n"
        "If it was one of these it is damaged; copy it again from where it was written."
    )


def _zip(path: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise UnreadableFile(
            f"{path} begins as a zip archive and is none: {error}.\n"
            "It is cut short; copy it again from where it was written."
        ) from error


def _keras2(old: OldFile) -> Inspection:
    part = unwrap.parallel_part(old)
    name, devices = part or (None, None)
    parallel: bool | None = part is not None
    notes: list[str] = []
    if part and old.config is None:
        notes.append(
            "told by its groups alone; a single model whose only layer with weights is a "
            "nested one after Lambdas looks the same, and is read the same way"
        )
    elif old.config is None and len(old.weighted) == 1 and not old.flaws and len(old.groups) > 1:
        parallel = None
    if old.backend not in (None, "tensorflow"):
        turned = ": kernels of convolutions are turned" if old.backend == "theano" else ""
        notes.append(f"the {old.backend} backend of Keras saved it{turned}")
    complete = bool(old.weights) and not old.flaws
    needs = code_needed(unwrap.template_config(old.config))
    contents = "full model" if old.config else "weights"
    return Inspection(
        path=old.path,
        kind="keras2",
        library=old.library,
        contents=contents if old.weights else "nothing",
        parallel=parallel,
        complete=complete,
        command=_keras2_command(old, bool(needs)),
        devices=devices,
        template=name,
        flaw=None if complete else old.flaw or "it holds no weights",
        optimizer=bool(old.optimizer),
        compiled=old.training is not None,
        arrays=tuple(
            Entry(one.path.removeprefix("/model_weights").lstrip("/"), one.shape, one.dtype)
            for one in old.weights
        ),
        needs=needs,
        notes=tuple(notes),
    )


def code_needed(model: Any) -> tuple[str, ...]:
    """Return the Lambda layers in a config, without importing Keras."""
    found = {
        f"Lambda {here['config'].get('name')!r}"
        for here in unwrap.entries(model)
        if here.get("class_name") == "Lambda" and isinstance(here.get("config"), dict)
    }
    return tuple(sorted(found)[:100])


def _keras2_command(old: OldFile, needs_code: bool) -> str:
    if not old.weights or old.flaws:
        return "look for another file of the same run: this one cannot be completed"
    if (old.version or "").startswith("3."):
        return _load_command(old.path)
    stem = shlex.quote(os.path.splitext(os.path.basename(old.path))[0] + "-single")
    code = " --custom your_layers.py" if needs_code else ""
    if old.config is None:
        code = " --model your_file.py:your_function"
    return f"lockstep rescue {shlex.quote(old.path)} -o {stem}.keras{code}"


def _load_command(path: str) -> str:
    """Return a command for a shell that loads a model; any name of a file is quoted."""
    name = json.dumps(path, ensure_ascii=False)
    return f"python -c {shlex.quote(f'import keras; keras.models.load_model({name})')}"


def _keras3_weights(path: str, handle: Any) -> Inspection:
    entries: list[Entry] = []
    size = 0
    stack = [""]
    while stack:
        here = stack.pop()
        thing = hdf5.child(handle, here)
        if isinstance(thing, h5py.Dataset):
            hdf5.check_array(thing)
            entries.append(Entry(here, tuple(map(int, thing.shape)), str(thing.dtype)))
            size += int(thing.nbytes)
        elif isinstance(thing, h5py.Group) and here.count("/") < 64:
            hdf5.require_few_names(thing, len(thing))
            stack += [f"{here}/{name}".lstrip("/") for name in reversed(list(thing))]
    hdf5.require_modest(path, [size])
    named = hdf5.text(handle, "format") == "named arrays"
    tops = {entry.path.split("/")[0] for entry in entries}
    keras3 = {"layers", "vars", "optimizer"} & tops or any("/vars/" in e.path for e in entries)
    if not (named or keras3):
        raise UnreadableFile(
            f"{path} is HDF5 and holds no Keras model: neither layer_names nor vars are in it.\n"
            "If a training run wrote it, the save failed before the first weight."
        )
    optimizer = any(e.path.startswith(("optimizer", "_optimizer")) for e in entries)
    old = "_layer_checkpoint_dependencies" in tops
    return Inspection(
        path=path,
        kind="named arrays" if named else "weights.h5",
        library="lockstep" if named else "tf.keras 2.12 to 2.15" if old else "Keras 3",
        contents="weights",
        parallel=False,
        complete=bool(entries),
        command=(
            f"lockstep.load_weights(model, {path!r})" if named else f"model.load_weights({path!r})"
        ),
        optimizer=optimizer,
        arrays=tuple(e for e in entries if not e.path.startswith("optimizer")),
    )


def _archive(path: str) -> Inspection:
    def parse(archive: zipfile.ZipFile, name: str) -> dict[str, Any]:
        size = archive.getinfo(name).file_size
        if size > read.JSON_CAP:
            raise HostileFile(
                f"{path}: {name} unfolds to {size:,} bytes.\n"
                "No model is described in so many; it is not read."
            )
        with archive.open(name) as part:  # its declared size may be wrong
            return read.parse_json(part.read(read.JSON_CAP).decode(), name, path)

    with _zip(path) as archive:
        try:
            config, meta = parse(archive, "config.json"), {}
            if "metadata.json" in archive.namelist():
                meta = parse(archive, "metadata.json")
        except (zipfile.BadZipFile, KeyError, UnicodeDecodeError, NotImplementedError,
                RuntimeError, EOFError, OSError) as error:  # fmt: skip
            raise UnreadableFile(
                f"{path} is a .keras archive that is damaged inside: {error}.\n"
                "Copy it again from where it was written, or use an earlier checkpoint."
            ) from error
    flaw = None
    inner = None
    hdf5.require_survival(path)
    try:
        with hdf5.inside_archive(path) as handle, hdf5.reading(path):
            inner = _keras3_weights(path, handle)
    except (UnreadableFile, KeyError, ValueError, OSError, RuntimeError) as error:
        flaw = f"its weights cannot be read ({(str(error).splitlines() or [''])[0][:100]})"
    return Inspection(
        path=path,
        kind="keras",
        library=f"Keras {meta.get('keras_version', 'an unknown version')}",
        contents="full model",
        parallel=False,
        complete=flaw is None,
        command=_load_command(path),
        flaw=flaw,
        optimizer=inner is not None and inner.optimizer,
        compiled=bool(config.get("compile_config")),
        arrays=inner.arrays if inner else (),
        needs=code_needed(config),
    )


PREFIXES = {
    "module.": "DataParallel or DistributedDataParallel",
    "_orig_mod.": "torch.compile",
    "_fsdp_wrapped_module.": "FullyShardedDataParallel",
}

_RANK_CAP = 64
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
          "U8": 1, "U16": 2, "U32": 4, "U64": 8, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}  # fmt: skip


def prefix_of(names: list[str]) -> str:
    """Return the prefix that one or more wrappers put before every name.

    Example:
        >>> prefix_of(["module._orig_mod.fc.weight", "module._orig_mod.fc.bias"])
        'module._orig_mod.'
    """
    found = ""
    while names:
        known = (p for p in PREFIXES if all(name.startswith(found + p) for name in names))
        if (prefix := next(known, None)) is None:
            break
        found += prefix
    return found


def _safetensors(path: str) -> Inspection:
    """Inspect a safetensors file by its header alone."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > read.JSON_CAP:
            raise HostileFile(
                f"{path}: its header declares {length:,} bytes.\n"
                f"At most {read.JSON_CAP:,} are read; the file is damaged or made to harm."
            )
        raw = file.read(length)
    try:
        header = read.parse_json(raw.decode(), "header", path)
    except UnicodeDecodeError as error:
        raise UnreadableFile(
            f"{path}: its header is no text.\nCopy it again from where it was written."
        ) from error
    meta = header.pop("__metadata__", None)
    room = os.path.getsize(path) - 8 - length
    entries = []
    for name, entry in header.items():
        try:
            shape = tuple(int(n) for n in entry["shape"][:_RANK_CAP])
            rank = len(entry["shape"])
            start, end = (int(n) for n in entry["data_offsets"])
            size = _SIZES[entry["dtype"]]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UnreadableFile(
                f"{path}: the entry {name!r} of its header is not whole.\n"
                "Copy it again from where it was written."
            ) from error
        for dim in shape:
            size = min(size * dim, 2**63)
        if rank > _RANK_CAP:
            raise HostileFile(
                f"{path}: {name!r} declares {rank:,} dims, and NumPy has at most {_RANK_CAP}.\n"
                "The file is damaged or made to harm."
            )
        if min(shape, default=0) < 0 or not 0 <= start <= end <= room or end - start != size:
            raise HostileFile(
                f"{path}: {name!r} declares {size:,} bytes and lies on {min(end - start, 2**63):,}."
                "\n"
                "The file is cut short, damaged or made to harm."
            )
        entries.append(Entry(name, shape, entry["dtype"]))
    writer = f" ({meta['format']})" if isinstance(meta, dict) and "format" in meta else ""
    load = f"safetensors.torch.load_file({path!r})"
    return _state_dict(path, "safetensors", f"safetensors{writer}", load, tuple(entries))


def _torch(path: str) -> Inspection:
    """Inspect a PyTorch file; nothing in it is executed (`weights_only=True`)."""
    state = _load_torch(path)
    places = ("", "state_dict", "model_state_dict", "model", "module", "net", "weights")
    for key in places if isinstance(state, dict) else ():
        inner = state.get(key) if key else state
        items = inner.items() if isinstance(inner, dict) else ()
        if tensors := {name: value for name, value in items if hasattr(value, "dtype")}:
            break
    else:
        raise UnreadableFile(
            f"{path} is a PyTorch file without a state dict in it.\n"
            "Save model.state_dict() where it was written, and inspect that."
        )
    arrays = tuple(
        Entry(str(name), tuple(map(int, one.shape)), str(one.dtype).removeprefix("torch."))
        for name, one in tensors.items()
    )
    return _state_dict(
        path, "torch", "PyTorch", f"torch.load({path!r}, weights_only=True)", arrays,
        optimizer=any("optimizer" in str(key) for key in state),
        notes=[f"the weights lie under the key {key!r}"] if key else [],
    )  # fmt: skip


def _load_torch(path: str) -> Any:
    """Load a PyTorch file with the safe loader, memory-mapped if it is a zip archive."""
    try:
        import torch
    except ImportError as error:
        raise UnreadableFile(
            f"{path} is a PyTorch file, and PyTorch is not installed.\n"
            "Install it: pip install torch (the CPU build is enough)."
        ) from error
    try:
        zipped = zipfile.is_zipfile(path)
        if zipped:
            with zipfile.ZipFile(path) as archive:
                packed = [one for one in archive.infolist() if one.compress_type]
            if packed:
                raise HostileFile(
                    f"{path}: {packed[0].filename!r} is packed, {packed[0].file_size:,} bytes in "
                    f"{packed[0].compress_size:,}.\nPyTorch never packs; the file was made by "
                    "other means and is not read."
                )
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except HostileFile:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise UnreadableFile(
            f"{path} is a PyTorch file that the safe loader does not take: {reason}\n"
            "It holds code or is damaged; code in a file is never run here. Save its\n"
            "state_dict() where it was written, and inspect that."
        ) from error


def _state_dict(
    path: str,
    kind: str,
    library: str,
    load: str,
    arrays: tuple[Entry, ...],
    optimizer: bool = False,
    notes: Sequence[str] = (),
) -> Inspection:
    prefix = prefix_of([entry.path for entry in arrays])
    parts = [f"{part}." for part in prefix.split(".") if part]
    if parts:
        wrappers = " and ".join(PREFIXES[part] for part in parts)
        notes = [*notes, f"every name begins with {prefix!r}, left by {wrappers}"]
    strip = f"{{k.removeprefix('{prefix}'): v for k, v in state.items()}}" if prefix else "state"
    return Inspection(
        path=path,
        kind=kind,
        library=library,
        contents="weights" if arrays else "nothing",
        parallel=any(part != "_orig_mod." for part in parts),
        complete=bool(arrays),
        command=f"state = {load}; model.load_state_dict({strip})",
        optimizer=optimizer,
        arrays=arrays,
        notes=tuple(notes),
    )
