"""What several processes have in common: variables, random numbers, the run that they resume."""

import math
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from lockstep.core.fit_arguments import callbacks_in
from lockstep.core.state import variables_of
from lockstep.errors import ProcessesDisagree, UnsupportedModel, counted
from lockstep.processes.call_scope import CALLS
from lockstep.processes.coordination import digest, once
from lockstep.processes.group import current
from lockstep.processes.normalization_constants import constants_of


def several() -> bool:
    """Return whether more than one process trains the model."""
    return current().size > 1


def is_first() -> bool:
    """Return whether this process writes files and prints."""
    return current().rank == 0


def from_first(values: list[Any]) -> list[np.ndarray]:
    """Return the arrays of the first process, in every process."""
    return [_unpacked(value, got) for value, got in zip(values, _broadcast(values), strict=True)]


def share_random_numbers() -> None:
    """Give every process the random state of the first one, which orders rows, for example."""
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
    current().share_random_state()


def share_variables(variables: list[Any]) -> None:
    """Give every process the values of the first one. One in parts has them already.

    Raises:
        ProcessesDisagree: If another process has other variables, or none.
    """
    variables = [each for each in variables if not current().has_part(each)]
    mine = [current().to_host(variable.value) for variable in variables]
    check_alike(mine)
    if variables:
        for variable, value in zip(variables, from_first(mine), strict=True):
            variable.assign(value)


def agreed_array(value: np.ndarray) -> np.ndarray:
    """Return the array of the first process. Every process calls this with an array.

    Raises:
        ProcessesDisagree: If an array of another process has another shape or type.
    """
    check_alike([value])
    least, greatest = once([digest([np.ascontiguousarray(value).reshape(-1).view("uint8").data])])
    return value if least == greatest else from_first([value])[0]


def check_alike(values: list[Any]) -> None:
    """Check that every process has arrays of the same shapes and types, or tensors.

    With lists that differ, a broadcast would wait forever or end Python inside gloo.

    Raises:
        ProcessesDisagree: If another process has others.
    """
    kinds = repr([(tuple(value.shape), str(value.dtype)) for value in values])
    numbers = sum(math.prod(value.shape) for value in values)
    word = [len(values), numbers, digest([kinds.encode()]), current().rank]
    least, greatest = once(word)
    if least[:3] != greatest[:3]:
        raise ProcessesDisagree(
            f"Process {greatest[3]} has {counted(greatest[0], 'variable')} with "
            f"{counted(greatest[1], 'number')}, but process {least[3]} has {least[0]} with "
            f"{least[1]}, or with different shapes or types:\nthey would not train the same "
            "model. Use the same layers, metrics and optimizer in every process."
        )


@contextmanager
def values_of_first(model: Any) -> Iterator[None]:
    """Give several processes the values of the first one's variables in this context.

    At the end, constants get their own values back. The caller restores the variables.
    """
    constants = constants_of(model)
    before = [constant.value for constant in constants]
    if several():
        with CALLS.call("verify"):
            share_variables([*variables_of(model), *constants])
    try:
        yield
    finally:
        for constant, value in zip(constants, before, strict=True):
            constant.assign(value)


def check_same_run(found: str | None) -> None:
    """Check that the processes resume from the same checkpoint.

    Args:
        found: The checkpoint that this process found; `None` if there is none.

    Raises:
        ProcessesDisagree: If the checkpoints differ.
    """
    (least,), (greatest,) = once([str(found)])
    _, (CALLS.steps,) = once([CALLS.steps])  # the counts may differ after an error
    if least != greatest:
        raise ProcessesDisagree(
            f"One process would resume from the checkpoint {least}, but another from "
            f"{greatest}:\nthey do not see the same folder. Pass a folder that all processes "
            "share to lockstep.Checkpoint."
        )


def recorded_signals() -> tuple[int, ...]:
    """Return the signals that a checkpoint records: SIGINT in a single process alone."""
    if not several():
        return signal.SIGTERM, signal.SIGINT
    return () if current().records_sigterm else (signal.SIGTERM,)


def agreed_to_stop(asked: bool) -> bool:
    """Return whether a process got a signal, and all processes agreed to stop at this step.

    Every process calls this function after the same steps.

    Args:
        asked: Whether this process has recorded a signal.
    """
    if not several():
        return asked
    CALLS.steps += 1
    return current().agreed_to_stop(CALLS.steps, asked)


def any_asked(asked: bool) -> bool:
    """Return whether any process has recorded a signal. Every process calls this function.

    Args:
        asked: Whether this process has recorded one.
    """
    return bool(once([asked])[1][0]) if several() else asked


def wait_for_all() -> None:
    """Return when every process has called this function."""
    if several():
        once([0])


def _broadcast(values: list[Any]) -> list[np.ndarray]:
    # As bytes: the broadcast is a sum, and would truncate 64 bits to 32 and lose the sign of zero.
    packed = [np.asarray(value).reshape(-1).view("uint8") for value in values]
    return current().broadcast(packed)


def _unpacked(value: Any, got: np.ndarray) -> np.ndarray:
    like = np.asarray(value)
    return np.frombuffer(got.tobytes(), like.dtype).reshape(like.shape)


def check_reads(given: Any) -> None:
    """Check that no callback of the first process alone reads variables in shards.

    Raises:
        UnsupportedModel: If one is given.
    """
    for each in callbacks_in(given):
        histograms = isinstance(each, keras.callbacks.TensorBoard) and each.histogram_freq
        if histograms or isinstance(each, keras.callbacks.BackupAndRestore):
            what = "TensorBoard with histograms" if histograms else "BackupAndRestore"
            remedy = "Leave histogram_freq out." if histograms else "Use lockstep.Checkpoint."
            raise UnsupportedModel(
                f"{what} was given, but the variables are sharded across several processes.\n"
                f"Only the first process runs it, so it cannot read all of them. {remedy}"
            )


def check_orbax(given: Any) -> None:
    """Check that no `OrbaxCheckpoint` is given to a loop of several processes.

    Raises:
        UnsupportedModel: If one is given.
    """
    orbax = getattr(keras.callbacks, "OrbaxCheckpoint", ())  # absent in older Keras
    if any(isinstance(each, orbax) for each in callbacks_in(given)):
        raise UnsupportedModel(
            "OrbaxCheckpoint was given, but several processes train the model, and between "
            "steps each holds its own\n"
            "arrays, which Orbax does not write. Use lockstep.Checkpoint instead."
        )
