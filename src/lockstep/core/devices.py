"""The values of `devices=`, the devices that they mean, and the rows that each of them gets."""

import difflib
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lockstep.errors import DeviceError, DeviceNotFound, DuplicateDevice, counted

_NAME = re.compile(r"^/?(?:device:)?(?P<platform>[a-z]+):(?P<number>\d+)$")
REHEARSE = "LOCKSTEP_REHEARSE"
"""The environment variable that asks for virtual CPU devices."""

_ALIASES = {"cuda": "gpu", "rocm": "gpu"}
_PLATFORMS = ("cpu", "gpu", "tpu")


@dataclass(frozen=True)
class Device:
    """Describe one device of an engine.

    Attributes:
        name: The name in `devices=`, for example `"gpu:0"`.
        kind: The name of the hardware, for example `"NVIDIA H200"`.
        memory: Bytes of memory that a program may use, `None` where unknown. JAX tells those of the
            devices of its own process alone.
    """

    name: str
    kind: str
    memory: int | None = None

    @property
    def platform(self) -> str:
        """The part of the name before the colon: `"cpu"`, `"gpu"` or `"tpu"`."""
        return self.name.split(":")[0]


def parse_devices(asked: object, here: Sequence[Device]) -> tuple[str, ...]:
    """Return the names of the available devices that a value of `devices=` means.

    Args:
        asked: `None` for every device of the default platform; a count; a device
            number or name; several of these in a sequence; or one string with commas, as
            in `CUDA_VISIBLE_DEVICES`. A string with one number is ambiguous, and is refused.
            Old spellings such as `"/gpu:0"`, `"/device:GPU:0"` and `"cuda:0"` are accepted.
        here: The available devices, those of the default platform first.

    Returns:
        At least one name, in the order of `asked`.

    Raises:
        DeviceNotFound: If a device is not available.
        DuplicateDevice: If a device is named twice.
        DeviceError: If `asked` has another form.

    Example:
        >>> here = [Device("gpu:0", ""), Device("gpu:1", ""), Device("cpu:0", "")]
        >>> parse_devices(None, here)
        ('gpu:0', 'gpu:1')
        >>> parse_devices("/device:GPU:1", here)
        ('gpu:1',)
    """
    default = [device for device in here if device.platform == here[0].platform]
    if asked is None:
        return tuple(device.name for device in default)
    count = _as_int(asked)
    if count is not None:
        return _first(count, default)
    names = tuple(_name(item, asked, here) for item in _items(asked))
    _check_names(names, asked, here)
    return names


def names_in_words(names: Sequence[str]) -> str:
    """Return device names for a sentence. Consecutive devices are shortened.

    Example:
        >>> names_in_words(["cpu:0", "cpu:1", "cpu:2"])
        'cpu:0 to cpu:2'
        >>> names_in_words(["gpu:0", "gpu:2"])
        'gpu:0, gpu:2'
    """
    platform, _, first = names[0].partition(":")
    run = [f"{platform}:{int(first) + offset}" for offset in range(len(names))]
    if len(names) > 2 and list(names) == run:
        return f"{names[0]} to {names[-1]}"
    return ", ".join(names)


def shard_rows(rows: int, replicas: int) -> tuple[range, ...]:
    """Split the rows of one global batch into contiguous shards, one per replica.

    Every row is in exactly one shard and order is kept. The shards before the last
    rows all have `ceil(rows / replicas)` rows, which is also the most any has; the
    last ones may be shorter or empty.

    Args:
        rows: Rows in the global batch, at least 0.
        replicas: Replicas in the mesh, at least 1.

    Returns:
        `replicas` ranges of row numbers, ascending.

    Example:
        >>> [len(shard) for shard in shard_rows(11, 4)]
        [3, 3, 3, 2]
        >>> [len(shard) for shard in shard_rows(5, 4)]
        [2, 2, 1, 0]
    """
    size = -(-rows // replicas)
    starts = [min(rows, replica * size) for replica in range(replicas + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


def micro_batches(rows: int, devices: int, size: int) -> tuple[int, int]:
    """Return into how many parts the rows of a device are cut, and the rows of a part.

    No part has more than `size` rows of a device. Parts have as many rows as each other, but for
    the last one, which may have fewer.

    Args:
        rows: Rows in the global batch, at least 1.
        devices: Devices over which they are split, at least 1.
        size: The most rows of a part on a device, at least 1.

    Example:
        >>> micro_batches(256, 2, 32)
        (4, 32)
        >>> micro_batches(75, 1, 32)
        (3, 25)
        >>> micro_batches(11, 1, 32)
        (1, 11)
    """
    largest = -(-rows // devices)
    number = -(-largest // size)
    return number, -(-largest // number)


def missing_rows(rows: int, replicas: int) -> int:
    """Rows to add so that every replica gets the same number.

    Example:
        >>> missing_rows(103, 8)
        1
    """
    return -rows % replicas


def check_visible(here: Sequence[Device], environ: Mapping[str, str]) -> None:
    """Raise if `CUDA_VISIBLE_DEVICES` was set too late to have an effect.

    CUDA reads the variable once, when it starts. A script that sets it later would train on
    devices that it excludes.

    Args:
        here: The available devices.
        environ: The environment, usually `os.environ`.

    Raises:
        DeviceError: If there are more GPUs than the variable names.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return
    named = [item for item in visible.split(",") if item.strip() not in ("", "-1")]
    gpus = [device.name for device in here if device.platform == "gpu"]
    if len(gpus) > len(named):
        raise DeviceError(
            f'CUDA_VISIBLE_DEVICES="{visible}" names {counted(len(named), "device")}, but '
            f"{len(gpus)} {'is' if len(gpus) == 1 else 'are'} in use: {names_in_words(gpus)}.\n"
            "It was set after the backend had started. The backend reads it only once.\n"
            "Set it before Python starts, or before the first Keras operation."
        )


def rehearsed_devices(environ: Mapping[str, str]) -> int | None:
    """Return the number of virtual devices in the environment, or `None` for no rehearsal.

    Raises:
        DeviceError: If the variable is not a whole number of at least 1.
    """
    asked = environ.get(REHEARSE, "").strip()
    return count_to_rehearse(asked, f"{REHEARSE}={asked}") if asked else None


def count_to_rehearse(value: object, said: str) -> int:
    """Return a number of virtual devices; see `count_of_devices`."""
    return count_of_devices(value, said, "a rehearsal")


def count_of_devices(value: object, said: str, what: str) -> int:
    """Return a number of devices.

    Args:
        value: The number, or its text.
        said: How it was given, such as `"LOCKSTEP_REHEARSE=4"`.
        what: What needs it, such as `"a rehearsal"`.

    Raises:
        DeviceError: If it is not a whole number of at least 1.
    """
    try:
        count = int(str(value))
    except ValueError:
        count = 0
    if count < 1 or isinstance(value, bool):
        raise DeviceError(
            f"{said} was requested, but {what} needs a whole number of at least 1.\n"
            "Pass a number of devices, such as 4."
        )
    return count


def _as_int(value: object) -> int | None:
    if isinstance(value, bool):
        raise DeviceError(
            f"devices={value} was requested, but True and False are not numbers of devices.\n"
            "Pass a number (4), a list ([0, 2] or 'gpu:0,gpu:1'), or None for all devices."
        )
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _first(count: int, default: Sequence[Device]) -> tuple[str, ...]:
    if count < 1:
        raise DeviceError(
            f"devices={count} was requested, but at least one device is needed.\n"
            f"Pass {'1' if len(default) == 1 else f'1 to {len(default)}'}, or None for all "
            f"available devices: {names_in_words([device.name for device in default])}."
        )
    if count > len(default):
        verb = "is" if len(default) == 1 else "are"
        raise DeviceNotFound(
            f"devices={count} was requested, but only {len(default)} {verb} available: "
            f"{names_in_words([device.name for device in default])}.",
            rehearse=count,
        )
    return tuple(device.name for device in default[:count])


def _items(asked: object) -> list[Any]:
    if isinstance(asked, str) and asked.strip().isdecimal():
        number = int(asked)
        raise DeviceError(
            f"devices={asked!r} is ambiguous: {number} devices, or only device number "
            f"{number}?\nPass devices={number} for {number} devices, or devices=[{number}] for "
            f"device number {number}."
        )
    if isinstance(asked, str):
        items: list[Any] = [item.strip() for item in asked.split(",")]
        items = [int(item) if item.isdecimal() else item for item in items]
    elif isinstance(asked, Iterable) and not isinstance(asked, bytes):
        items = list(asked)
    else:
        items = [asked]
    if not items or items == [""]:
        raise DeviceError(
            f"devices={asked!r} names no device, but at least one is needed.\n"
            "Pass a number (4), a list ([0, 2] or 'gpu:0,gpu:1'), or None for all devices."
        )
    return items


def _name(item: object, asked: object, here: Sequence[Device]) -> str:
    number = _as_int(item)
    if number is not None:
        return f"{here[0].platform}:{number}"
    match = _NAME.match(str(item).strip().lower()) if isinstance(item, str) else None
    if match is None:
        known = [device.name for device in here]
        # "gpu0" is as near to "cpu:0" as a cutoff of 0.7 allows, and means another device.
        meant = difflib.get_close_matches(str(item).lower(), known, n=1, cutoff=0.75)
        raise DeviceError(
            f"devices={asked!r} was requested, but {item!r} is not a device name.\n"
            + (f"Did you mean {meant[0]}? " if meant else "")
            + (
                "Names look like 'gpu:0'. A number such as 0 is an index into the devices of "
                "the default platform."
            )
        )
    found = match["platform"]
    return f"{_ALIASES.get(found, found)}:{int(match['number'])}"


def _check_names(names: tuple[str, ...], asked: object, here: Sequence[Device]) -> None:
    known = [device.name for device in here]
    for position, name in enumerate(names):
        if name not in known:
            remedy = _remedy(name, known)
            problem = (
                f"devices={asked!r} was requested, but {name} is not among the {len(known)} "
                f"available: {names_in_words(known)}."
            )
            if remedy is None:
                raise DeviceNotFound(problem, 1 + max(int(each.split(":")[1]) for each in names))
            raise DeviceNotFound(f"{problem}\n{remedy}")
        if name in names[:position]:
            raise DuplicateDevice(
                f"devices={asked!r} names {name} twice, but a device holds only one replica.\n"
                f"Name each device once. {len(known)} {'is' if len(known) == 1 else 'are'} "
                f"available: {names_in_words(known)}."
            )
    platforms = sorted({name.split(":")[0] for name in names})
    if len(platforms) > 1:
        raise DeviceError(
            f"devices={asked!r} mixes {' and '.join(platforms)}, but all devices must be of the "
            "same kind.\nName devices of one kind."
        )


def _remedy(missing: str, known: Sequence[str]) -> str | None:
    """Return the remedy for a device that is not available, `None` for a rehearsal.

    In a rehearsal a GPU is a CPU device of the same number: the remedy is that name.
    """
    platform, _, number = missing.partition(":")
    platforms = {*_PLATFORMS, *(name.partition(":")[0] for name in known)}
    if platform not in platforms:
        meant = difflib.get_close_matches(platform, sorted({*platforms, *_ALIASES}), n=1)
        if not meant:
            return f"Name available devices, such as {known[0]}."
        name = f"{_ALIASES.get(meant[0], meant[0])}:{number}"
        return f"Did you mean {name}?" if name in known else _remedy(name, known)
    virtual = f"cpu:{number}"
    if platform != "cpu" and virtual in known and len(known) > 1 and known[0] == "cpu:0":
        return f"Did you mean {virtual}? The virtual devices of a rehearsal are CPU devices."
    return None


REPLICATED, SHARDED = "replicated", "sharded"
"""The values of `state=`: each device has every variable whole, or a shard of each."""

SHARDED_FROM = 64 * 1024
"""The size of a variable, in bytes, from which it is sharded. A smaller one saves little memory,
and costs a gather in every step."""


def is_large(shape: Sequence[int], item_bytes: int, devices: int) -> bool:
    """Return whether a variable is large enough to be sharded over so many devices."""
    return devices > 1 and 0 < math.prod(shape) * item_bytes >= SHARDED_FROM


def sharded_dim(shape: Sequence[int], item_bytes: int, devices: int) -> int | None:
    """Return the dim along which a variable is sharded, `None` if it is replicated.

    It is the largest dim that the number of devices divides, the first of equal ones.

    Args:
        shape: The shape of the variable.
        item_bytes: The bytes of one element.
        devices: The number of devices.

    Example:
        >>> sharded_dim((1000, 4096), 4, 8), sharded_dim((1000, 4096), 4, 3)
        (1, None)
    """
    if not is_large(shape, item_bytes, devices):
        return None
    fitting = [dim for dim, size in enumerate(shape) if size and size % devices == 0]
    return max(fitting, key=lambda dim: shape[dim], default=None)
