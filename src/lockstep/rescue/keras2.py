"""HDF5 files of Keras 2 and tf.keras, taken apart.

Layout: `layer_names` at the root (or in `model_weights` of a full model), one
group per layer with `weight_names`, each weight at `<layer>/<weight name>`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import HostileFile, IncompleteFile, UnreadableFile
from lockstep.rescue import hdf5


@dataclass(frozen=True)
class Stored:
    """One array in an old file, not read yet."""

    name: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    data: Any = field(repr=False, compare=False)

    def read(self) -> Any:
        """The numbers, as a NumPy array."""
        with hdf5.reading(self.data.file.filename):
            return self.data[()]


@dataclass(frozen=True)
class Group:
    """One layer's group: the weights that are there, and the names of those that are not."""

    name: str
    weights: tuple[Stored, ...]
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class OldFile:
    """A Keras 2 or tf.keras HDF5 file, as it lies."""

    path: str
    version: str | None
    backend: str | None
    config: dict[str, Any] | None
    training: dict[str, Any] | None
    groups: tuple[Group, ...]
    optimizer: tuple[Stored, ...]
    flaws: tuple[str, ...]

    @property
    def weighted(self) -> tuple[Group, ...]:
        """The groups that have weights, in file order."""
        return tuple(group for group in self.groups if group.weights or group.missing)

    @property
    def count(self) -> int:
        """Weights that are there."""
        return sum(len(group.weights) for group in self.groups)

    @property
    def library(self) -> str:
        """`Keras 2.2.4`, `tf.keras 2.3 (2.4.0)` and the like, as far as the file tells."""
        return library(self.version)

    @property
    def flaw(self) -> str | None:
        """The flaw that matters most: a missing weight before a missing group."""
        return min(self.flaws, key=lambda said: "weights of" not in said, default=None)

    def require_whole(self) -> None:
        """Raise IncompleteFile where the save that wrote this file had failed."""
        if not self.flaws and self.count:
            return
        said = self.flaw or "no weights"
        what = f"{said}. {self.library} wrote it and failed half way."
        if not self.count:
            raise IncompleteFile(
                f"{self.path} holds no weights at all: {what}\n"
                "Nothing can be recovered from it; look for a file of save_weights() or an\n"
                "earlier checkpoint of the same run, and rescue that."
            )
        listed = self.count + sum(len(group.missing) for group in self.groups)
        raise IncompleteFile(
            f"{self.path} holds {self.count} of {listed} weights: {what}\n"
            "The missing numbers are nowhere in it; look for a file of template.save(),\n"
            "save_weights() or an earlier checkpoint of the same run, and rescue that."
        )


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[OldFile]:
    """Open a Keras 2 file; its arrays can be read inside the `with` block."""
    with hdf5.opened(path) as handle:
        with hdf5.reading(os.fspath(path)):
            old = _parse(os.fspath(path), handle)
        yield old


def library(version: str | None) -> str:
    """Which library wrote a file that carries this `keras_version`.

    Example:
        >>> library("2.2.4"), library("2.4.0")
        ('Keras 2.2.4', 'tf.keras 2.3 or 2.4 (keras_version 2.4.0)')
    """
    if not version:
        return "an unknown version of Keras"
    if version.startswith("3."):
        return f"Keras {version}"
    if version.endswith("-tf"):
        known = {
            "2.1.2-tf": "1.5 or 1.6",
            "2.1.3-tf": "1.6",
            "2.1.4-tf": "1.7",
            "2.1.5-tf": "1.8",
            "2.1.6-tf": "1.9 to 1.12",
            "2.2.4-tf": "1.13 to 2.1",
            "2.3.0-tf": "2.2",
        }
        return f"tf.keras {known.get(version, '')} (keras_version {version})".replace("  ", " ")
    major, _, rest = version.partition(".")
    minor = rest.split(".")[0]
    if major == "2" and minor.isdigit() and int(minor) >= 4:
        series = "2.3 or 2.4" if minor == "4" else f"2.{minor}"
        return f"tf.keras {series} (keras_version {version})"
    return f"Keras {version}"


def release(version: str | None) -> tuple[int, ...]:
    """A `keras_version` as numbers, which compare as text does not; none where it is unknown.

    Example:
        >>> release("2.2.4-tf"), release("2.10.0") > release("2.4.0"), release(None)
        ((2, 2, 4), True, ())
    """
    numbers = (version or "").partition("-")[0].split(".")
    return tuple(int(n) for n in numbers) if all(n.isdecimal() for n in numbers) else ()


def parse_json(raw: str, what: str, path: str) -> dict[str, Any]:
    """JSON from a stranger: an object, or an UnreadableFile."""
    try:
        found = json.loads(raw)
    except RecursionError as error:
        raise HostileFile(
            f"{path}: the {what} is nested deeper than any model.\n"
            "The file is damaged or made to harm; it is not read."
        ) from error
    except ValueError as error:
        raise UnreadableFile(
            f"{path}: the {what} is no JSON ({error}).\n"
            "The file is damaged; copy it again from where it was written."
        ) from error
    if not isinstance(found, dict):
        raise UnreadableFile(
            f"{path}: the {what} is a {type(found).__name__}, not an object.\n"
            "The file is damaged; copy it again from where it was written."
        )
    return found


def _parse(path: str, handle: Any) -> OldFile:
    root = hdf5.child(handle, "model_weights") or handle
    config = hdf5.text(handle, "model_config")
    training = hdf5.text(handle, "training_config")
    version = hdf5.text(handle, "keras_version") or hdf5.text(root, "keras_version")
    backend = hdf5.text(handle, "backend") or hdf5.text(root, "backend")
    flaws: list[str] = []
    layers = hdf5.names(root, "layer_names")
    if layers is None:
        flaws.append("it has no list of layers (layer_names)")
        layers = []
    groups = [_group(root, name, flaws) for name in layers]
    extra = hdf5.child(root, "top_level_model_weights")
    if extra is not None and "top_level_model_weights" not in layers:
        own = _group(root, "top_level_model_weights", flaws)
        if own.weights:
            groups.append(own)
    return OldFile(
        path=path,
        version=version,
        backend=backend,
        config=parse_json(config, "model_config", path) if config else None,
        training=parse_json(training, "training_config", path) if training else None,
        groups=tuple(groups),
        optimizer=_optimizer(handle),
        flaws=tuple(flaws),
    )


def _group(root: Any, name: str, flaws: list[str]) -> Group:
    group = hdf5.child(root, name)
    if group is None:
        flaws.append(f"the group {name!r} is listed and not there")
        return Group(name, ())
    listed = hdf5.names(group, "weight_names")
    if listed is None:
        flaws.append(f"the group {name!r} has no list of weights (weight_names)")
        return Group(name, ())
    present: list[Stored] = []
    missing: list[str] = []
    seen: set[str] = set()
    for weight in listed:
        data = hdf5.child(group, weight)
        if data is None or not hasattr(data, "dtype") or weight in seen:
            missing.append(weight)
            continue
        seen.add(weight)
        hdf5.check_array(data)
        present.append(stored(weight, data))
    if missing:
        flaws.append(
            f"{len(missing)} of {len(listed)} weights of {name!r} are not there "
            f"(the first is {missing[0]!r})"
        )
    return Group(name, tuple(present), tuple(missing))


def _optimizer(handle: Any) -> tuple[Stored, ...]:
    group = hdf5.child(handle, "optimizer_weights")
    if group is None:
        return ()
    found: list[Stored] = []
    for name in hdf5.names(group, "weight_names") or []:
        data = hdf5.child(group, name)
        if data is None or not hasattr(data, "dtype"):
            return ()  # half written: as good as none
        hdf5.check_array(data)
        found.append(stored(name, data))
    return tuple(found)


def stored(name: str, data: Any) -> Stored:
    """An array of an open file, under its name."""
    return Stored(name, str(data.name), tuple(int(n) for n in data.shape), str(data.dtype), data)
