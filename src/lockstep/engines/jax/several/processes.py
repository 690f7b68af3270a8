"""Several JAX processes that train one model together.

Every process runs the same script. Between calls each of them has the whole model on a
device of its own, so that whatever a script or a callback does with it is local; within
a step the same arrays are one array over all devices of all processes.
"""

import os
import random
import warnings
import zlib
from collections import Counter
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from lockstep.engines.jax.several.calls import CALLS
from lockstep.engines.jax.several.exchange import once
from lockstep.errors import LockstepWarning, ProcessesDisagree, UnsupportedModel


def several() -> bool:
    """Whether JAX runs in more than one process."""
    count: int = jax.process_count()
    return count > 1


def is_first() -> bool:
    """Whether this is the process that writes files and prints."""
    index: int = jax.process_index()
    return index == 0


_STARTED = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Where Slurm, Open MPI and MPICH say how many processes they started, to whatever end."""


def check_started() -> None:
    """Say where a launcher has started several processes and JAX knows of one.

    Each of them would train alone, on all rows. WORLD_SIZE is that of processes which are to
    train together; other launchers may have started a sweep, which is warned about and no more.

    Raises:
        ProcessesDisagree: If WORLD_SIZE is more than 1.
    """
    if several():
        return
    if (asked := _number("WORLD_SIZE")) > 1:
        raise ProcessesDisagree(
            f"WORLD_SIZE={asked} processes were started, and JAX knows of one: each would train "
            "alone.\nCall jax.distributed.initialize(...) before the first Keras operation, "
            "with the address,\nWORLD_SIZE and RANK, or unset WORLD_SIZE to train in one process."
        )
    for name in _STARTED:
        if (asked := _number(name)) > 1:
            warnings.warn(
                f"{name}={asked} processes were started, and JAX knows of one: each trains alone, "
                "on all rows.\nTo train together, call jax.distributed.initialize(...) before the "
                f"first Keras operation.\nFor trainings that are meant to be apart, unset {name}.",
                LockstepWarning,
                stacklevel=4,
            )
            return


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def check_devices(devices: list[jax.Device]) -> None:
    """Raise where the processes could not run one program on these devices.

    Raises:
        ProcessesDisagree: If `devices` leaves out one of those that are here, or has them in
            another order than another process; or if some process has more than another.
    """
    if not several():
        return
    if set(devices) != set(jax.devices(devices[0].platform)):
        raise ProcessesDisagree(
            f"{len(devices)} devices were asked for, and {jax.device_count()} are in "
            f"{jax.process_count()} processes, all of which have to take part.\n"
            "Leave devices out, or start fewer processes."
        )
    found = Counter(device.process_index for device in devices)
    counts = [found[process] for process in range(jax.process_count())]
    if max(counts) != min(counts):
        most, least = counts.index(max(counts)), counts.index(min(counts))
        raise ProcessesDisagree(
            f"Process {most} has {counts[most]} devices, and process {least} has {counts[least]}: "
            "JAX shares variables among processes that have as many each.\n"
            "Let every process see as many devices (CUDA_VISIBLE_DEVICES, LOCKSTEP_REHEARSE)."
        )
    order = ", ".join(f"{device.platform}:{device.id}" for device in devices)
    lowest, highest = once([zlib.crc32(order.encode()), jax.process_index()])
    if lowest[0] != highest[0]:
        first, other = sorted([lowest[1], highest[1]])
        raise ProcessesDisagree(
            f"Process {other} has the devices in another order than process {first}; in "
            f"process {jax.process_index()} it is {order}.\n"
            "Give devices= in the same order in every process, or leave it out."
        )


def put(value: Any, layout: NamedSharding) -> jax.Array:
    """An array that every process has whole, laid out over the devices of all."""
    value = local(value)
    if not layout.is_fully_replicated:
        host = local_array(value)
        return jax.make_array_from_callback(host.shape, layout, lambda rows: host[rows])
    mine = [device for device in layout.mesh.devices.flat if device in layout.addressable_devices]
    copies = [jax.device_put(value, device) for device in mine]
    return jax.make_array_from_single_device_arrays(np.shape(value), layout, copies)


def local(value: Any) -> Any:
    """The copy that is on the first device of this process, of an array that every device has."""
    if not isinstance(value, jax.Array) or value.is_fully_addressable:
        return value
    if not value.is_fully_replicated:
        raise ProcessesDisagree(
            f"An array of shape {value.shape} is spread over processes, none of which has it whole."
            "\nHand over host arrays with all rows; each process places those of its own devices."
        )
    return value.addressable_data(0)


def local_array(value: Any) -> np.ndarray:
    """The array as this process has it."""
    value = local(value)
    if isinstance(value, np.ma.MaskedArray):
        jax.device_put(value)  # which JAX refuses in words; without its mask, all would count
    return np.asarray(value)


def from_first(values: list[Any]) -> list[np.ndarray]:
    """The arrays of the first process, in every process."""
    return [_unpacked(value, got) for value, got in zip(values, _broadcast(values), strict=True)]


def share_random_numbers() -> None:
    """Let every process draw what the first one draws: the order of rows, say."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = np.random.get_state(legacy=False)
    none = float("nan")
    mine = [
        np.array(words, "uint32"),
        np.asarray(state["state"]["key"], "uint32"),
        np.array([state["state"]["pos"], state["has_gauss"]], "int64"),
        np.array([state["gauss"], none if gauss is None else gauss], "float64"),
    ]
    first_words, key, counts, cached = from_first(mine)
    gauss = None if np.isnan(cached[1]) else float(cached[1])
    random.setstate((version, tuple(int(word) for word in first_words), gauss))
    np.random.set_state(("MT19937", key, int(counts[0]), int(counts[1]), float(cached[0])))


def share_variables(variables: list[Any]) -> None:
    """Give every process the values that the first one has.

    Raises:
        ProcessesDisagree: If another process has other variables, or none.
    """
    mine = [np.asarray(variable.value) for variable in variables]
    _check_alike(mine)
    if variables:
        for variable, value in zip(variables, from_first(mine), strict=True):
            variable.assign(value)


def _check_alike(values: list[np.ndarray]) -> None:
    # Between lists that differ the broadcast would wait for ever, or end Python inside of gloo.
    kinds = repr([(value.shape, str(value.dtype)) for value in values])
    numbers = sum(value.size for value in values)
    word = [len(values), numbers, zlib.crc32(kinds.encode()), jax.process_index()]
    least, greatest = once(word)
    if least[:3] != greatest[:3]:
        raise ProcessesDisagree(
            f"Process {greatest[3]} brings {greatest[0]} variables with {greatest[1]} numbers, and "
            f"process {least[3]} brings {least[0]} with {least[1]}, or of other shapes or types:\n"
            "they would not train one model. Give every process the same layers, metrics and "
            "optimizer."
        )


def check_same_run(found: str | None) -> None:
    """Raise where the processes would go on from different checkpoints.

    Args:
        found: The one that this process has found, `None` where there is none.

    Raises:
        ProcessesDisagree: If that is so.
    """
    least, greatest = once([zlib.crc32(repr(found).encode())])
    _, (CALLS.steps,) = once([CALLS.steps])  # which an error in one of them may have parted
    if least != greatest:
        raise ProcessesDisagree(
            f"Process {jax.process_index()} would go on from {found}, and another one from another "
            "checkpoint:\nthey do not see the same folder. Give lockstep.Checkpoint one that all "
            "of them share."
        )


def is_told_to_leave() -> bool:
    """Whether one of several processes was sent SIGTERM, and this is the step they agreed on.

    JAX takes the signal from `jax.distributed.initialize` on, and lets the processes agree on a
    number of calls; every process calls this after the same steps.
    """
    config: Any = jax.config  # whose types leave its options out
    if not several() or not config.jax_enable_preemption_service:
        return False
    CALLS.steps += 1
    reached: bool = multihost_utils.reached_preemption_sync_point(CALLS.steps)
    return reached


def wait_for_all() -> None:
    """Return when every process has come here."""
    if several():
        once([0])


def _broadcast(values: list[Any]) -> list[np.ndarray]:
    # As bytes: the broadcast is a sum, which would cut 64 bits to 32 and lose the sign of zero.
    packed = [np.asarray(value).reshape(-1).view("uint8") for value in values]
    got = multihost_utils.broadcast_one_to_all(packed)
    return [np.asarray(part) for part in got]


def _unpacked(value: Any, got: np.ndarray) -> np.ndarray:
    like = np.asarray(value)
    return np.frombuffer(got.tobytes(), like.dtype).reshape(like.shape)


def check_orbax(given: Any) -> None:
    """Raise where a loop of several processes is given an `OrbaxCheckpoint`.

    Raises:
        UnsupportedModel: If that is so.
    """
    orbax = getattr(keras.callbacks, "OrbaxCheckpoint", ())  # which an older Keras has not
    if any(isinstance(each, orbax) for each in flat(given)):
        raise UnsupportedModel(
            "OrbaxCheckpoint was given, and JAX runs in several processes, each of which has the "
            "model\nfor itself between steps: Orbax does not write such arrays. Use "
            "lockstep.Checkpoint instead."
        )


def flat(given: Any) -> list[Any]:
    """The callbacks that a loop is given: one, a list, a `CallbackList`, or `None`."""
    if isinstance(given, keras.callbacks.CallbackList):
        given = given.callbacks
    return keras.tree.flatten(given) if given else []
