"""Which kind a file is, by its first bytes, and what is in it."""

from __future__ import annotations

import json
import os
import shlex
import zipfile
from typing import Any

from lockstep.errors import HostileFile, UnreadableFile
from lockstep.rescue import hdf5, keras2, parallel, probe
from lockstep.rescue.inspection import Entry, Inspection
from lockstep.rescue.keras2 import OldFile

_CONFIG_CAP = 256 * 2**20


def look(path: str) -> Inspection:
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
    from lockstep.rescue import states

    return states.look_torch(path) if kind == "torch" else states.look_safetensors(path)


def kind_of(path: str) -> str:
    """`"hdf5"`, `"keras"`, `"torch"` or `"safetensors"`."""
    if os.path.isdir(path):
        saved = os.path.exists(os.path.join(path, "saved_model.pb"))
        what = "a TensorFlow SavedModel" if saved else "a folder"
        raise UnreadableFile(
            f"{path} is {what}, and inspect reads single files.\n"
            + (
                "Load it with keras.layers.TFSMLayer, or save HDF5 where it was written."
                if saved
                else "Give one of the files in it."
            )
        )
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
    inside = parallel.in_config(old.config)
    grouped = parallel.in_groups(old) if old.config is None else None
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
        command=_old_command(old, is_parallel, template),
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
    """Lambdas and classes in a config that are none of Keras's, without importing Keras."""
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


def _old_command(old: OldFile, is_parallel: bool | None, template: Any) -> str:
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
    entries: list[Entry] = []
    stack = [""]
    while stack:
        here = stack.pop()
        thing = hdf5.child(handle, here) if here else handle
        if hasattr(thing, "dtype"):
            hdf5.check_array(thing)
            entries.append(Entry(here, tuple(map(int, thing.shape)), str(thing.dtype)))
            if len(entries) > hdf5.NAMES_CAP:
                break
        elif here.count("/") < 64:
            stack += [f"{here}/{name}".lstrip("/") for name in reversed(hdf5.children(thing))]
    named = handle.attrs.get("format") == "named arrays"
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


def _archive(path: str) -> Inspection:
    from lockstep.rescue import archive

    with _zip(path) as opened:
        try:
            sizes = {info.filename: info.file_size for info in opened.infolist()}
            for name in ("config.json", "metadata.json"):
                if sizes.get(name, 0) > _CONFIG_CAP:
                    raise HostileFile(
                        f"{path}: {name} unfolds to {sizes[name]:,} bytes.\n"
                        "No model is described in so many; it is not read."
                    )
            config = keras2.parse_json(opened.read("config.json").decode(), "config.json", path)
            version = "an unknown version"
            if "metadata.json" in sizes:
                meta = keras2.parse_json(opened.read("metadata.json").decode(), "metadata", path)
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
    probe.require_survival(path)
    try:
        with archive.reading(path) as handle, hdf5.reading(path):
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


def read_json_head(path: str) -> dict[str, Any]:
    """The header of a safetensors file."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > 100 * 2**20:
            raise HostileFile(
                f"{path}: its header declares {length:,} bytes.\n"
                "At most 100 MB are read; the file is damaged or made to harm."
            )
        raw = file.read(length)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise UnreadableFile(
            f"{path}: its header is no text.\nCopy it again from where it was written."
        ) from error
    return keras2.parse_json(text, "header", path)


def dumps(found: Inspection) -> str:
    """The findings as JSON."""
    return json.dumps(found.to_dict(), indent=2)
