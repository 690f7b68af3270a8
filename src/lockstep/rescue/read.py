"""Read HDF5 files of Keras 2 and tf.keras.

The root (or `model_weights` of a full model) has `layer_names` and one group per layer.
Each group has `weight_names`; each weight is at `<layer>/<weight name>`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import HostileFile, IncompleteFile, UnreadableFile
from lockstep.rescue import hdf5, unwrap


@dataclass(frozen=True)
class Stored:
    """One array in an old file, read on demand."""

    name: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    data: Any = field(repr=False, compare=False)

    def read(self) -> Any:
        """Return the numbers as a NumPy array."""
        with hdf5.reading(self.data.file.filename):
            return self.data[()]


@dataclass(frozen=True)
class H5Group:
    """The group of one layer: its weights, and the names of missing weights."""

    name: str
    weights: tuple[Stored, ...]
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class OldFile:
    """The contents of a Keras 2 or tf.keras HDF5 file."""

    path: str
    version: str | None
    groups: tuple[H5Group, ...]
    backend: str | None = None
    config: dict[str, Any] | None = None
    template: unwrap.Template | None = None
    training: dict[str, Any] | None = None
    optimizer: tuple[Stored, ...] = ()
    flaws: tuple[str, ...] = ()

    @property
    def weighted(self) -> tuple[H5Group, ...]:
        """The groups that list weights, in file order."""
        return tuple(group for group in self.groups if group.weights or group.missing)

    @property
    def weights(self) -> tuple[Stored, ...]:
        """All weights that are present, in file order."""
        return tuple(stored for group in self.groups for stored in group.weights)

    @property
    def model_config(self) -> dict[str, Any] | None:
        """The config of the template; that of the whole model if it is not parallel."""
        return self.template.config if self.template else self.config

    @property
    def part(self) -> tuple[str, int | None] | None:
        """The name of the template and the number of devices; None for a single model."""
        if self.template:
            return self.template.name, self.template.devices
        return _template_in_groups(self) if self.config is None else None

    @property
    def library(self) -> str:
        """The library that wrote the file, such as `Keras 2.2.4`."""
        return library(self.version)

    @property
    def flaw(self) -> str | None:
        """The most important flaw: a missing weight before a missing group."""
        return min(self.flaws, key=lambda said: "weights of" not in said, default=None)

    def require_whole(self) -> None:
        """Raise IncompleteFile if the save that wrote this file failed."""
        count = len(self.weights)
        if not self.flaws and count:
            return
        what = f"{self.flaw or 'no weights'}. {self.library} failed while it wrote the file."
        if not count:
            raise IncompleteFile(
                f"{self.path} holds no weights at all: {what}\n"
                "Nothing can be recovered from it; look for a file of save_weights() or an\n"
                "earlier checkpoint of the same run, and rescue that."
            )
        listed = count + sum(len(group.missing) for group in self.groups)
        raise IncompleteFile(
            f"{self.path} holds {count} of {listed} weights: {what}\n"
            "The missing weights are not in the file. Look for a file of template.save(),\n"
            "save_weights() or an earlier checkpoint of the same run, and rescue that."
        )


_TF_KERAS = {
    "2.1.2-tf": "1.5 or 1.6",
    "2.1.3-tf": "1.6",
    "2.1.4-tf": "1.7",
    "2.1.5-tf": "1.8",
    "2.1.6-tf": "1.9 to 1.12",
    "2.2.4-tf": "1.13 to 2.1",
    "2.3.0-tf": "2.2",
}


def library(version: str | None) -> str:
    """Return the library that wrote a file with this `keras_version`.

    Example:
        >>> library("2.2.4"), library("2.4.0")
        ('Keras 2.2.4', 'tf.keras 2.3 or 2.4 (keras_version 2.4.0)')
    """
    if not version:
        return "an unknown version of Keras"
    numbers = release(version)
    if version.endswith("-tf"):
        series = _TF_KERAS.get(version, "")
    elif numbers >= (2, 4) and not version.startswith("3."):
        series = "2.3 or 2.4" if numbers[1] == 4 else f"2.{numbers[1]}"
    else:
        return f"Keras {version}"
    return f"tf.keras {series} (keras_version {version})".replace("  ", " ")


def release(version: str | None) -> tuple[int, ...]:
    """Return a `keras_version` as a tuple of numbers, empty if it is unknown.

    Example:
        >>> release("2.2.4-tf"), release("2.10.0") > release("2.4.0"), release(None)
        ((2, 2, 4), True, ())
    """
    numbers = (version or "").partition("-")[0]
    if not re.fullmatch(r"[0-9]{1,4}([.][0-9]{1,4})*", numbers):
        return ()
    return tuple(int(number) for number in numbers.split("."))


JSON_CAP = 32 * 2**20
"""Maximum size of a JSON text; the largest known config has 3 MB."""

JSON_PARTS_CAP = 500_000
"""Maximum objects and lists in one JSON text; each takes at least 64 bytes in memory."""


def parse_json(raw: str, what: str, path: str) -> dict[str, Any]:
    """Parse a JSON object of unknown origin; raise OldFileError for anything else."""
    parts = raw.count("{") + raw.count("[")
    if len(raw) > JSON_CAP or parts > JSON_PARTS_CAP:
        raise HostileFile(
            f"{path}: the {what} has {len(raw):,} characters and {parts:,} objects and lists.\n"
            f"At most {JSON_CAP:,} and {JSON_PARTS_CAP:,} are read; no model needs as many."
        )
    try:
        found = json.loads(raw)
        flaw = f"a {type(found).__name__}, not an object"
    except RecursionError as error:
        raise HostileFile(
            f"{path}: the {what} is nested deeper than in any model.\n"
            "The file is damaged or malicious; it is not read."
        ) from error
    except ValueError as error:
        found, flaw = None, f"not valid JSON ({error})"
    if not isinstance(found, dict):
        raise UnreadableFile(
            f"{path}: the {what} is {flaw}.\n"
            "The file is damaged; copy it again from the original location."
        )
    return found


def parse_config(path: str) -> dict[str, Any]:
    """Read a file in which `to_json()` of a model was written."""
    try:
        with open(path, encoding="utf-8") as file:
            return parse_json(file.read(), "config", path)
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or "it is not a text file"
        raise UnreadableFile(
            f"The config {path} cannot be read: {said}.\n"
            "Pass the file that contains the output of the template's to_json()."
        ) from error


def old_file(path: str, handle: Any) -> OldFile:
    """Return the contents of an open HDF5 file with layer groups."""
    root = hdf5.child(handle, "model_weights") or handle
    json_of = {name: hdf5.text(handle, name) for name in ("model_config", "training_config")}
    config, training = (parse_json(v, k, path) if v else None for k, v in json_of.items())
    flaws: list[str] = []
    layers = hdf5.names(root, "layer_names")
    if layers is None:
        flaws.append("it has no list of layers (layer_names)")
        layers = []
    groups = [_group(root, name, flaws) for name in layers]
    extra = "top_level_model_weights"
    if extra not in layers and hdf5.child(root, extra) is not None:
        own = _group(root, extra, flaws)
        groups += [own] if own.weights else []
    state = hdf5.child(handle, "optimizer_weights")
    optimizer = _group(handle, "optimizer_weights", []) if state is not None else None
    old = OldFile(
        path=path,
        version=hdf5.text(handle, "keras_version") or hdf5.text(root, "keras_version"),
        groups=tuple(groups),
        backend=hdf5.text(handle, "backend") or hdf5.text(root, "backend"),
        config=config,
        template=unwrap.in_config(config),
        training=training,
        # Incomplete state is useless.
        optimizer=optimizer.weights if optimizer and not optimizer.missing else (),
        flaws=tuple(flaws),
    )
    hdf5.require_modest(path, (int(one.data.nbytes) for one in (*old.weights, *old.optimizer)))
    return old


def _group(root: Any, name: str, flaws: list[str]) -> H5Group:
    group = hdf5.child(root, name)
    if group is None:
        flaws.append(f"the group {name!r} is listed but missing")
        return H5Group(name, ())
    listed = hdf5.names(group, "weight_names")
    if listed is None:
        flaws.append(f"the group {name!r} has no list of weights (weight_names)")
        return H5Group(name, ())
    present: dict[str, Stored] = {}
    missing: list[str] = []
    for weight in listed:
        data = None if weight in present else hdf5.array(group, weight)
        if data is None:
            missing.append(weight)
        else:
            present[weight] = _stored(weight, data)
    if missing:
        flaws.append(
            f"{len(missing)} of {len(listed)} weights of {name!r} are missing (the first is "
            f"{missing[0]!r})"
        )
    return H5Group(name, tuple(present.values()), tuple(missing))


def _stored(name: str, data: Any) -> Stored:
    """Return an array of an open file under its name, without reading its data."""
    return Stored(name, str(data.name), tuple(int(n) for n in data.shape), str(data.dtype), data)


def _template_in_groups(old: OldFile) -> tuple[str, int | None] | None:
    """Return the inner group's name and the number of devices, from a file of weights.

    One group has all the weights; the groups of inputs, slices and merges are empty. A
    single model whose only layer with weights is a nested model can look the same. Such
    a file is read the same way.
    """
    if len(old.weighted) != 1 or len(old.groups) < 4:
        return None
    inner, names = old.weighted[0], [group.name for group in old.groups]
    position = names.index(inner.name)
    slices = [name for name in names[:position] if re.search("lambda|slice", name, re.IGNORECASE)]
    inputs = position - len(slices)
    if not inputs or len(slices) < 2 or position == len(names) - 1:
        return None
    if any("/" not in weight.name for weight in inner.weights):
        return None
    return inner.name, len(slices) // inputs if len(slices) % inputs == 0 else None
