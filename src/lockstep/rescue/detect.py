"""Detect the kind of a file by its first bytes and list its contents, without loading a model."""

from __future__ import annotations

import json
import os
import shlex
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py

from lockstep.checkpoint.run_report import is_run, own_classes, runs_within
from lockstep.errors import HostileFile, UnreadableFile
from lockstep.rescue import hdf5, read, unwrap
from lockstep.rescue.read import OldFile
from lockstep.rescue.rescue_report import Entry, Inspection


def inspect_file(path: str) -> Inspection:
    """Inspect a file of any known kind."""
    with _read(path) as found:
        return found if isinstance(found, Inspection) else _keras2(found)


@contextmanager
def opened(path: str) -> Iterator[OldFile]:
    """Open a file of Keras 2 or tf.keras; its arrays can be read inside the body.

    Raises:
        UnreadableFile: The file is one of Keras 3. The error has the command that loads it.
    """
    with _read(path) as found:
        if isinstance(found, OldFile) and not (found.version or "").startswith("3."):
            yield found
            return
        seen = found if isinstance(found, Inspection) else _keras2(found)
        raise UnreadableFile(
            f"{path} is a single-device file of {seen.library}: there is nothing to rescue.\n"
            f"Use it directly: {seen.command}"
        )


@contextmanager
def _read(path: str) -> Iterator[OldFile | Inspection]:
    """Yield a file with layer groups open, and the findings about a file of another kind."""
    if kind_of(path) == "keras":
        yield _archive(path)
        return
    with hdf5.opened(path) as handle:
        with hdf5.reading(path):
            grouped = {"layer_names", "layer_names0", "keras_version", "model_config"}
            old = grouped & set(handle.attrs) or "model_weights" in handle
            found = read.old_file(path, handle) if old else _keras3_weights(path, handle)
        yield found


def kind_of(path: str) -> str:
    """Return the kind of a file by its first bytes: `"hdf5"` or `"keras"`."""
    if os.path.isdir(path):
        what, remedy = "a folder", "Give one of the files in it."
        if not os.listdir(path):
            what, remedy = "an empty folder", "Give a file, or the folder of a lockstep.Checkpoint."
        if os.path.exists(os.path.join(path, "saved_model.pb")):
            what = "a TensorFlow SavedModel"
            remedy = (
                "Load it with keras.layers.TFSMLayer, or save it as HDF5 in the program that "
                "wrote it."
            )
        elif is_run(Path(path)):
            what = "a run of lockstep.Checkpoint"
            remedy = f"Export a file from it: lockstep export {shlex.quote(path)} -o model.keras"
        elif runs := runs_within(Path(path)):
            what, remedy = "a folder of runs", f"Give one of the runs in it: {runs[0]}"
        raise UnreadableFile(f"{path} is {what}, but a single file was expected.\n{remedy}")
    if not os.path.exists(path) and os.path.exists(f"{path}.index"):  # how TensorFlow names it
        raise _of_tensorflow(path, "the name of")
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
    name = os.path.basename(path)
    if name.endswith(".index") or ".data-0" in name or name == "checkpoint":
        raise _of_tensorflow(path, "part of")
    what = "empty" if not size else f"of an unknown kind (it begins with {head[:8]!r})"
    raise UnreadableFile(
        f"{path} is {what}: neither HDF5 nor .keras.\n"
        "If it should be one of these, it is damaged. Copy it again from the original location."
    )


def _of_tensorflow(path: str, part: str) -> UnreadableFile:
    return UnreadableFile(
        f"{path} is {part} a TensorFlow checkpoint, which only the code of its model can read.\n"
        "In the TensorFlow version that wrote it, call model.load_weights(...), then "
        "save_weights('x.h5')."
    )


def _zip(path: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise UnreadableFile(
            f"{path} begins like a zip archive but is not one: {error}.\n"
            "It is truncated; copy it again from the original location."
        ) from error


def _keras2(old: OldFile) -> Inspection:
    part = old.part
    name, devices = part or (None, None)
    parallel: bool | None = part is not None
    notes: list[str] = []
    if part and old.config is None:
        notes.append(
            "recognized only by its HDF5 groups; a single-device model whose only layer with "
            "weights is a nested model after Lambda layers looks the same, and is read the same "
            "way"
        )
    elif old.config is None and len(old.weighted) == 1 and not old.flaws and len(old.groups) > 1:
        parallel = None
    if old.backend not in (None, "tensorflow"):
        notes.append(
            f"it was saved with the {old.backend} backend of Keras, which is not supported"
        )
    complete = bool(old.weights) and not old.flaws
    needs = code_needed(old.model_config)
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


def _load_command(path: str, classes: Sequence[str] = ()) -> str:
    """Return a command for a shell that loads a model; any name of a file is quoted."""
    code, given = "import keras", json.dumps(path, ensure_ascii=False)
    if classes:
        code += f"; from your_file import {', '.join(classes)}"
        given += f", custom_objects={{{', '.join(f'{name!r}: {name}' for name in classes)}}}"
    return f"python -c {shlex.quote(f'{code}; keras.models.load_model({given})')}"


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
    tops = {entry.path.split("/")[0] for entry in entries}
    keras3 = {"layers", "vars", "optimizer"} & tops or any("/vars/" in e.path for e in entries)
    if not keras3:
        raise UnreadableFile(
            f"{path} is HDF5 and holds no Keras model: neither layer_names nor vars are in it.\n"
            "If a training run wrote it, the save failed before the first weight."
        )
    optimizer = any(e.path.startswith(("optimizer", "_optimizer")) for e in entries)
    old = "_layer_checkpoint_dependencies" in tops
    return Inspection(
        path=path,
        kind="weights.h5",
        library="tf.keras 2.12 to 2.15" if old else "Keras 3",
        contents="weights",
        parallel=False,
        complete=bool(entries),
        command=f"model.load_weights({path!r})",
        optimizer=optimizer,
        arrays=tuple(e for e in entries if not e.path.startswith("optimizer")),
    )


def _archive(path: str) -> Inspection:
    def parse(archive: zipfile.ZipFile, name: str) -> dict[str, Any]:
        size = archive.getinfo(name).file_size
        if size > read.JSON_CAP:
            raise HostileFile(
                f"{path}: {name} decompresses to {size:,} bytes.\n"
                "No model description is that large, so it is not read."
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
                f"{path} is a .keras archive with damaged contents: {error}.\n"
                "Copy it again from the original location, or use an earlier checkpoint."
            ) from error
    flaw = None
    inner = None
    classes = [name for name in own_classes(config) if name.isidentifier()][:100]
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
        command=_load_command(path, classes),
        flaw=flaw,
        optimizer=inner is not None and inner.optimizer,
        compiled=bool(config.get("compile_config")),
        arrays=inner.arrays if inner else (),
        needs=(*code_needed(config), *classes),
    )
