"""The fingerprint of the training data, and its state before and between passes."""

import json
import pickle
import sys
import zlib
from typing import Any

import keras
import numpy as np

from lockstep.checkpoint.plain_state import (
    from_plain,
    put_random_states,
    take_random_states,
    to_plain,
)
from lockstep.errors import CheckpointError, CheckpointMismatch
from lockstep.keras_compat import (
    ArrayDataAdapter,
    DataAdapter,
    PyDatasetAdapter,
    TFDatasetAdapter,
    TorchDataLoaderAdapter,
    batch_size_of,
    epoch_of,
    has_workers,
    inputs_of,
    loader_of,
    number_of_rows,
    set_epoch,
    shuffle_of,
)
from lockstep.processes.group import current
from lockstep.processes.own_rows import OwnRows
from lockstep.processes.row_exchange import RowsHere

# The adapters and their attributes: keras/src/trainers/data_adapters/*.py

STILL_POSSIBLE = (
    "You can still export the weights (lockstep export RUN -o model.keras), or start again in a "
    "different folder."
)


OF_EACH = "rows of each process"
"""The kind of data in a fingerprint, if each of several processes has its own rows."""


def fingerprint(batches: Any) -> Any:
    """Return a JSON fingerprint of the data, without a pass over it.

    Args:
        batches: An iterator over epochs.

    Raises:
        CheckpointError: If a value has no JSON form.
    """
    adapter = batches.data_adapter
    if isinstance(adapter, OwnRows):  # another number of processes has other numbers of batches
        return {"kind": OF_EACH, "steps_per_epoch": batches.steps_per_epoch}
    known: dict[str, Any] = {
        "kind": type(adapter).__name__,
        "batches per epoch": adapter.num_batches,
        "steps_per_epoch": batches.steps_per_epoch,
    }
    if isinstance(adapter, ArrayDataAdapter):
        parts = [part for part in keras.tree.flatten(inputs_of(adapter)) if part is not None]
        known |= {
            "rows": number_of_rows(adapter),
            "batch size": batch_size_of(adapter),
            "shuffle": shuffle_of(adapter),
            "shapes": [list(part.shape[1:]) for part in parts],
            "types": [str(_type_of(part)) for part in parts],
            "content": [_check_of_rows(part) for part in parts],
        }
    elif isinstance(adapter, PyDatasetAdapter):
        known["shuffle"] = adapter.shuffle
    if known.get("shuffle") and epoch_of(adapter) is not None:
        known["order drawn"] = "by the number of the epoch, as from Keras 3.16 on"
    try:
        return json.loads(json.dumps(known, default=lambda number: number.item()))  # NumPy scalars
    except (TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"An argument of fit cannot be saved in a checkpoint: {known}.\n"
            "Pass batch_size, steps_per_epoch and num_batches as ints."
        ) from error


def checksum(batch: Any, check: int = 0) -> int:
    """Return a CRC-32 of the values, dtypes and shapes of a batch.

    Args:
        batch: The batch.
        check: That of the batches before it.
    """
    for leaf in keras.tree.flatten(batch):
        for part in _arrays_of(leaf):
            array = np.ascontiguousarray(np.asarray(part))
            check = zlib.crc32(f"{array.dtype.name} {array.shape}".encode(), check)
            is_text = array.dtype.hasobject
            data = pickle.dumps(array.tolist()) if is_text else array.reshape(-1).view("uint8").data
            check = zlib.crc32(data, check)
    return check


def _arrays_of(leaf: Any) -> list[Any]:
    """Return the arrays of a leaf: several for a sparse array, none for `None` (no weights)."""
    if leaf is None:
        return []
    if isinstance(leaf, RowsHere):
        return [leaf.whole()]
    if not hasattr(leaf, "indices"):
        return [leaf]
    return [getattr(leaf, name) for name in ("data", "values", "indices") if hasattr(leaf, name)]


def _check_of_rows(part: Any) -> int | None:
    """Return the checksum of up to 64 evenly spaced rows; `None` if rows cannot be read."""
    rows = np.unique(np.linspace(0, part.shape[0] - 1, 64).astype("int64"))
    try:
        return checksum([_row(part, row) for row in rows.tolist()])
    except (TypeError, ValueError, LookupError):  # a sparse array, for example
        return None


def _type_of(part: Any) -> Any:
    return part.dtype if hasattr(part, "dtype") else _row(part, 0).dtype  # a table


def _row(part: Any, row: int) -> np.ndarray:
    """Return one row by position; the labels of a pandas index may differ from positions."""
    return np.asarray(part.iloc[row] if hasattr(part, "iloc") else part[row])


def check_batch(number: int, written: int | None, found: int | None) -> None:
    """Raise if the checksum of a batch differs from the one in the checkpoint."""
    if written != found:
        raise CheckpointMismatch(
            f"Batch {number} of the data now has the checksum {found}, but it had {written} "
            "when the checkpoint was written:\nthe data or their order have changed, or the "
            f"data use random numbers that are not saved.\n{STILL_POSSIBLE}"
        )


def check_data(adapter: Any, steps_per_epoch: int | None) -> None:
    """Check that a position in this data can be restored.

    Data with its own random numbers passes this check. Its checksums differ on resume.

    Raises:
        CheckpointError: If the position cannot be restored; the message names the change to make.
    """
    adapter = adapter_here(adapter)
    if isinstance(adapter, TorchDataLoaderAdapter) and loader_of(adapter).persistent_workers:
        raise CheckpointError(
            "The DataLoader has persistent_workers=True: the random state of a worker carries "
            "over from one epoch\n"
            "to the next, and a checkpoint cannot save it. Set persistent_workers=False."
        )
    if not isinstance(adapter, PyDatasetAdapter):
        return
    data = adapter.py_dataset
    if has_workers(adapter) and steps_per_epoch:
        raise CheckpointError(
            f"{type(data).__name__} has workers={data.workers}, and fit was given "
            f"steps_per_epoch={steps_per_epoch}: the position in the data between two epochs is "
            "not known.\nRemove one of the two."
        )
    if _has_state(data):
        return
    for hook in ("on_epoch_begin", "on_epoch_end"):
        if getattr(type(data), hook) is not getattr(keras.utils.PyDataset, hook):
            name = type(data).__name__
            raise CheckpointError(
                f"{name} changes its state in {hook}, and a checkpoint cannot save that state.\n"
                f"Add get_state() to {name}, which returns the state (its order, for example), "
                "and set_state(state),\n"
                "which restores it: numbers, strings, arrays, lists, dicts."
            )


def adapter_here(adapter: Any) -> Any:
    """Return Keras's adapter of the data of this process."""
    return adapter.adapter if isinstance(adapter, OwnRows) else adapter


def is_own(adapter: Any) -> bool:
    """Whether the adapter is the user's own class."""
    return isinstance(adapter, DataAdapter) and not type(adapter).__module__.startswith("keras.")


def _has_state(data: Any) -> bool:
    return hasattr(data, "get_state") and hasattr(data, "set_state")


def _sources(adapter: Any) -> dict[str, Any]:
    """Return the objects in the data that have `get_state` and `set_state`."""
    if isinstance(adapter, PyDatasetAdapter):
        return {"data": adapter.py_dataset} if _has_state(adapter.py_dataset) else {}
    if not isinstance(adapter, TorchDataLoaderAdapter):
        return {}
    loader = loader_of(adapter)
    found = {
        "loader": loader,
        "sampler": getattr(loader, "sampler", None),
        "batch_sampler": getattr(getattr(loader, "batch_sampler", None), "sampler", None),
    }
    generators = {name: getattr(each, "generator", None) for name, each in found.items()}
    return {name: each for name, each in generators.items() if each is not None}


def states_of(adapter: Any) -> dict[str, Any]:
    """Return the random states of the process and the data's own states."""
    return {**take_random_states(), **own_states(adapter)}


def own_states(adapter: Any) -> dict[str, Any]:
    """Return the state of the data set or of a loader's generators.

    From Keras 3.16 on, this includes the epoch number that seeds Keras's shuffling. If each process
    has its own rows, all call this, and the result has the states of all.
    """
    if isinstance(adapter, OwnRows):
        return {_OF_ALL: adapter.of_all(_own_text(adapter))}
    epoch = epoch_of(adapter)
    states: dict[str, Any] = {} if epoch is None else {"epoch": epoch}
    for name, source in _sources(adapter).items():
        state = source.get_state()
        of_torch = type(state).__module__ == "torch"
        states[name] = state.numpy().copy() if of_torch else _copied(state)
    return states


_OF_ALL = "of all processes"


def is_of_as_many(adapter: Any, states: dict[str, Any]) -> bool:
    """Return whether states of data are of as many processes, if each has its own rows."""
    is_own = isinstance(adapter, OwnRows)
    return is_own == (_OF_ALL in states) and not (is_own and len(states[_OF_ALL]) != current().size)


def _own_text(adapter: OwnRows) -> bytes:
    """Return the states of the data of this process, and of the random numbers that they draw."""
    with adapter.random.drawn():
        states = {name: take_random_states().get(name) for name in ("numpy", "python", "torch")}
    arrays: dict[str, np.ndarray] = {}
    own = [states, own_states(adapter.adapter), adapter.epochs, adapter.is_used]
    plain = to_plain(own, "own", arrays)
    kept = {name: [a.dtype.str, a.shape, a.tobytes().hex()] for name, a in arrays.items()}
    return zlib.compress(json.dumps([plain, kept]).encode(), 1)


def _put_own_text(adapter: OwnRows, text: bytes) -> None:
    plain, kept = json.loads(zlib.decompress(text))
    arrays = {
        name: np.frombuffer(bytes.fromhex(data), kind).reshape(shape).copy()
        for name, (kind, shape, data) in kept.items()
    }
    states, own, adapter.epochs, adapter.is_used = from_plain(plain, arrays)
    with adapter.random.drawn():
        put_random_states({name: state for name, state in states.items() if state is not None})
    put_own_states(adapter.adapter, own)


def _copied(state: Any) -> Any:
    """Copy a state, because its owner may keep changing the object it returned."""
    if isinstance(state, dict):
        return {name: _copied(each) for name, each in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(_copied, state))
    return state.copy() if isinstance(state, np.ndarray) else state


def put_states(adapter: Any, states: dict[str, Any]) -> None:
    """Restore the result of `states_of`."""
    put_random_states(states)
    put_own_states(adapter, states)


def put_own_states(adapter: Any, states: dict[str, Any]) -> None:
    """Restore the result of `own_states`, if it is of as many processes."""
    if isinstance(adapter, OwnRows):
        if is_of_as_many(adapter, states):
            _put_own_text(adapter, bytes(states[_OF_ALL][current().rank]))
        return
    put_epoch(adapter, states)
    for name, source in _sources(adapter).items():
        if name not in states:
            continue
        state = states[name]
        if name != "data":
            state = sys.modules["torch"].from_numpy(state.copy())
        source.set_state(state)


def put_epoch(adapter: Any, states: dict[str, Any]) -> None:
    """Restore the epoch number that seeds Keras's shuffling, if the states have one."""
    if "epoch" in states:
        set_epoch(adapter, states["epoch"])


def unseeded_shuffle(adapter: Any) -> str | None:
    """Return a warning if the data is shuffled by `tf.data` without a seed, else `None`.

    A resumed run is refused then, which the user would otherwise learn after a crash.

    Args:
        adapter: Keras's adapter of the training data.
    """
    adapter = adapter_here(adapter)
    if not isinstance(adapter, TFDatasetAdapter):
        return None
    left = [adapter.get_tf_dataset()]
    while left:
        dataset = left.pop()
        # tensorflow/python/data/ops: _ShuffleDataset._seed and _seed2, both 0 without a seed, and
        # DatasetV2._inputs. A TensorFlow without these names gives no warning.
        seeds: list[Any] = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
        if None not in seeds and not any(int(seed) for seed in seeds):
            return (
                "The tf.data.Dataset is shuffled without a seed: a restarted run draws a "
                "different order,\nand cannot resume from its checkpoints. Pass a seed, such as "
                "shuffle(1000, seed=0), or call\nkeras.utils.set_random_seed before you create "
                "the data set."
            )
        left += getattr(dataset, "_inputs", list)()
    return None
