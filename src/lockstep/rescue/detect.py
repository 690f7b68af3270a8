"""Detect the kind of a file by its first bytes and list its contents, without loading a model."""

from __future__ import annotations

import os
import shlex
import zipfile
from pathlib import Path
from typing import Any

from lockstep.checkpoint.run_report import is_run, runs_within
from lockstep.errors import HostileFile, UnreadableFile
from lockstep.rescue import hdf5, keras2, unwrap
from lockstep.rescue.keras2 import OldFile
from lockstep.rescue.rescue_report import Entry, Inspection


def inspect_file(path: str) -> Inspection:
    """Inspect a file of any known kind."""
    kind = kind_of(path)
    if kind == "hdf5":
        with hdf5.opened(path) as handle, hdf5.reading(path):
            layered = any(
                key in handle.attrs
                for key in ("layer_names", "layer_names0", "keras_version", "model_config")
            )
            named = "array_names" in handle.attrs or "array_names0" in handle.attrs
            if named or not (layered or "model_weights" in handle):
                return _modern_weights(path, handle)
        with keras2.opened(path) as old:
            return _old(old)
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


def _old(old: OldFile) -> Inspection:
    inside = unwrap.in_config(old.config)
    grouped = unwrap.in_groups(old) if old.config is None else None
    name = inside.name if inside else grouped[0] if grouped else None
    devices = inside.devices if inside else grouped[1] if grouped else None
    is_parallel: bool | None = inside is not None
    notes: list[str] = []
    if old.config is None and grouped:
        is_parallel = True
        notes.append(
            "told by its groups alone; a single model whose only layer with weights is a "
            "nested one after Lambdas looks the same, and is read the same way"
        )
    elif old.config is None and len(old.weighted) == 1 and not old.flaws:
        is_parallel = None if len(old.groups) > 1 else False
    if old.backend not in (None, "tensorflow"):
        turned = ": kernels of convolutions are turned" if old.backend == "theano" else ""
        notes.append(f"the {old.backend} backend of Keras saved it{turned}")
    complete = not old.flaws and old.count > 0
    template = inside.config if inside else old.config
    return Inspection(
        path=old.path,
        kind="keras2",
        library=old.library,
        contents="nothing" if not old.count else "full model" if old.config else "weights",
        parallel=is_parallel,
        complete=complete,
        command=_old_command(old, template),
        devices=devices,
        template=name,
        flaw=None if complete else old.flaw or "it holds no weights",
        optimizer=bool(old.optimizer),
        compiled=old.training is not None,
        arrays=tuple(
            Entry(one.path.removeprefix("/model_weights").lstrip("/"), one.shape, one.dtype)
            for group in old.groups
            for one in group.weights
        ),
        needs=tuple(code_needed(template)) if template else (),
        notes=tuple(notes),
    )


def code_needed(model: Any) -> list[str]:
    """Return the Lambda layers in a config, without importing Keras."""
    found: dict[str, None] = {}
    stack = [model]
    while stack and len(found) < 100:
        here = stack.pop()
        if isinstance(here, list):
            stack += here
        elif isinstance(here, dict):
            if here.get("class_name") == "Lambda" and isinstance(here.get("config"), dict):
                found[f"Lambda {here['config'].get('name')!r}"] = None
            stack += [value for key, value in here.items() if key != "inbound_nodes"]
    return sorted(found)


def _old_command(old: OldFile, template: Any) -> str:
    here = shlex.quote(old.path)
    stem = shlex.quote(os.path.splitext(os.path.basename(old.path))[0] + "-single")
    if not old.count or old.flaws:
        return "look for another file of the same run: this one cannot be completed"
    if (old.version or "").startswith("3."):
        return f"python -c \"import keras; keras.models.load_model('{old.path}')\""
    if old.config is None:
        return f"lockstep rescue {here} -o {stem}.keras --model your_file.py:your_function"
    custom = " --custom your_layers.py" if code_needed(template) else ""
    return f"lockstep rescue {here} -o {stem}.keras{custom}"


def _modern_weights(path: str, handle: Any) -> Inspection:
    import h5py

    entries: list[Entry] = []
    size = 0
    stack = [""]
    while stack:
        here = stack.pop()
        thing = hdf5.child(handle, here) if here else handle
        if isinstance(thing, h5py.Dataset):
            hdf5.check_array(thing)
            entries.append(Entry(here, tuple(map(int, thing.shape)), str(thing.dtype)))
            size += int(thing.nbytes)
        elif isinstance(thing, h5py.Group) and here.count("/") < 64:
            stack += [f"{here}/{name}".lstrip("/") for name in reversed(hdf5.children(thing))]
    hdf5.require_modest(path, [size])
    named = hdf5.text(handle, "format") == "named arrays"
    known = named or any(e.path.split("/")[0] in ("layers", "vars", "optimizer") for e in entries)
    known = known or any("/vars/" in e.path for e in entries)
    if not known:
        raise UnreadableFile(
            f"{path} is HDF5 and holds no Keras model: neither layer_names nor vars are in it.\n"
            "If a training run wrote it, the save failed before the first weight."
        )
    optimizer = any(e.path.startswith(("optimizer", "_optimizer")) for e in entries)
    old = "_layer_checkpoint_dependencies" in {e.path.split("/")[0] for e in entries}
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


def _bounded(archive: zipfile.ZipFile, name: str) -> str:
    """Read at most JSON_CAP bytes of a text in an archive: its declared size may be wrong."""
    with archive.open(name) as part:
        return part.read(keras2.JSON_CAP).decode()


def _archive(path: str) -> Inspection:
    with _zip(path) as opened:
        try:
            sizes = {info.filename: info.file_size for info in opened.infolist()}
            for name in ("config.json", "metadata.json"):
                if sizes.get(name, 0) > keras2.JSON_CAP:
                    raise HostileFile(
                        f"{path}: {name} unfolds to {sizes[name]:,} bytes.\n"
                        "No model is described in so many; it is not read."
                    )
            config = keras2.parse_json(_bounded(opened, "config.json"), "config.json", path)
            version = "an unknown version"
            if "metadata.json" in sizes:
                meta = keras2.parse_json(_bounded(opened, "metadata.json"), "metadata", path)
                version = str(meta.get("keras_version", version))
        except (zipfile.BadZipFile, KeyError, UnicodeDecodeError, NotImplementedError,
                RuntimeError, EOFError, OSError) as error:  # fmt: skip
            raise UnreadableFile(
                f"{path} is a .keras archive that is damaged inside: {error}.\n"
                "Copy it again from where it was written, or use an earlier checkpoint."
            ) from error
    flaw = None
    entries: tuple[Entry, ...] = ()
    optimizer = False
    hdf5.require_survival(path)
    try:
        with hdf5.inside_archive(path) as handle, hdf5.reading(path):
            inner = _modern_weights(path, handle)
            entries, optimizer = inner.arrays, inner.optimizer
    except (UnreadableFile, KeyError, ValueError, OSError, RuntimeError) as error:
        flaw = f"its weights cannot be read ({(str(error).splitlines() or [''])[0][:100]})"
    return Inspection(
        path=path,
        kind="keras",
        library=f"Keras {version}",
        contents="full model",
        parallel=False,
        complete=flaw is None,
        command=f"python -c \"import keras; keras.models.load_model('{path}')\"",
        flaw=flaw,
        optimizer=optimizer,
        compiled=bool(config.get("compile_config")),
        arrays=entries,
        needs=tuple(code_needed(config)),
    )


def _safetensors_header(path: str) -> dict[str, Any]:
    """Read the header of a safetensors file."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > keras2.JSON_CAP:
            raise HostileFile(
                f"{path}: its header declares {length:,} bytes.\n"
                f"At most {keras2.JSON_CAP:,} are read; the file is damaged or made to harm."
            )
        raw = file.read(length)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise UnreadableFile(
            f"{path}: its header is no text.\nCopy it again from where it was written."
        ) from error
    return keras2.parse_json(text, "header", path)


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
        for prefix in PREFIXES:
            if all(name.startswith(found + prefix) for name in names):
                found += prefix
                break
        else:
            break
    return found


def _torch(path: str) -> Inspection:
    """Inspect a PyTorch file; nothing in it is executed (`weights_only=True`)."""
    state = _load_torch(path)
    tensors, where, optimizer = _state_dict(state, path)
    arrays = tuple(
        Entry(name, tuple(map(int, tensor.shape)), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    )
    notes = [f"the weights lie under the key {where!r}"] if where else []
    return _found(path, "torch", "PyTorch", arrays, optimizer, notes)


def _safetensors(path: str) -> Inspection:
    """Inspect a safetensors file by its header alone."""
    header = _safetensors_header(path)
    meta = header.pop("__metadata__", None)
    if not isinstance(meta, dict):
        meta = {}
    entries = []
    with open(path, "rb") as file:
        room = os.path.getsize(path) - 8 - int.from_bytes(file.read(8), "little")
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
        for length in shape:
            size = min(size * length, 2**63)
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
    library = "safetensors" + (f" ({meta['format']})" if "format" in meta else "")
    return _found(path, "safetensors", library, tuple(entries), False, [])


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


def _state_dict(state: Any, path: str) -> tuple[dict[str, Any], str, bool]:
    """Return the tensors, the key that held them, and whether there is optimizer state."""
    if isinstance(state, dict):
        optimizer = any("optimizer" in str(key) for key in state)
        tensors = {str(k): v for k, v in state.items() if hasattr(v, "dtype")}
        if tensors:
            return tensors, "", optimizer
        for key in ("state_dict", "model_state_dict", "model", "module", "net", "weights"):
            inner = state.get(key)
            if isinstance(inner, dict) and any(hasattr(v, "dtype") for v in inner.values()):
                found = {str(k): v for k, v in inner.items() if hasattr(v, "dtype")}
                return found, key, optimizer
    raise UnreadableFile(
        f"{path} is a PyTorch file without a state dict in it.\n"
        "Save model.state_dict() where it was written, and inspect that."
    )


def _found(
    path: str,
    kind: str,
    library: str,
    arrays: tuple[Entry, ...],
    optimizer: bool,
    notes: list[str],
) -> Inspection:
    prefix = prefix_of([entry.path for entry in arrays])
    wrappers = [PREFIXES[f"{part}."] for part in prefix.split(".") if part]
    if wrappers:
        notes.append(f"every name begins with {prefix!r}, left by {' and '.join(wrappers)}")
    parallel = any(part != "_orig_mod" for part in prefix.split(".") if part)
    strip = f"{{k.removeprefix('{prefix}'): v for k, v in state.items()}}" if prefix else "state"
    load = (
        f"torch.load({path!r}, weights_only=True)"
        if kind == "torch"
        else f"safetensors.torch.load_file({path!r})"
    )
    return Inspection(
        path=path,
        kind=kind,
        library=library,
        contents="weights" if arrays else "nothing",
        parallel=parallel,
        complete=bool(arrays),
        command=f"state = {load}; model.load_state_dict({strip})",
        optimizer=optimizer,
        arrays=tuple(Entry(entry.path, entry.shape, entry.dtype) for entry in arrays),
        notes=tuple(notes),
    )
