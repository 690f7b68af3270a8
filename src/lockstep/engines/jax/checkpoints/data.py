"""What is known of data before and between passes: what it is, and what it changes."""

import json
import sys
import zlib
from itertools import islice
from typing import Any

import jax
import keras
import numpy as np
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter

from lockstep.engines import random_states
from lockstep.engines.jax.steps.input import HostIterator
from lockstep.errors import CheckpointError, CheckpointMismatch

# The adapters and their attributes: keras/src/trainers/data_adapters/*.py

STILL_POSSIBLE = (
    "Still possible: lockstep export RUN -o model.keras for the weights, or another folder to "
    "start anew."
)


def fingerprint(batches: HostIterator) -> Any:
    """What is known of the data without going through it, in JSON.

    Raises:
        CheckpointError: If something of it cannot be written down.
    """
    adapter = batches.data_adapter
    known: dict[str, Any] = {
        "kind": type(adapter).__name__,
        "batches per epoch": adapter.num_batches,
        "steps_per_epoch": batches.steps_per_epoch,
    }
    if isinstance(adapter, ArrayDataAdapter):
        parts = [part for part in keras.tree.flatten(adapter._inputs) if part is not None]
        known |= {
            "rows": adapter._num_samples,
            "batch size": adapter._batch_size,
            "shuffle": adapter._shuffle,
            "shapes": [list(part.shape[1:]) for part in parts],
            "types": [str(_type_of(part)) for part in parts],
            "content": [_check_of_rows(part) for part in parts],
        }
    elif isinstance(adapter, PyDatasetAdapter):
        known["shuffle"] = adapter.shuffle
    try:
        return json.loads(json.dumps(known, default=lambda number: number.item()))  # of NumPy
    except (TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"What fit was given cannot be written down: {known}.\nA checkpoint has whole numbers "
            "and words there. Let batch_size, steps_per_epoch and num_batches be ints."
        ) from error


def checksum(batch: Any) -> int:
    """One number for a batch: it differs where a value, type or shape does."""
    check = 0
    for leaf in keras.tree.flatten(batch):
        # A sparse array is one leaf of several arrays.
        for part in jax.tree.leaves(leaf):
            array = np.ascontiguousarray(np.asarray(part))
            check = zlib.crc32(f"{array.dtype.name} {array.shape}".encode(), check)
            check = zlib.crc32(array.reshape(-1).view("uint8").data, check)
    return check


def _check_of_rows(part: Any) -> int | None:
    """The checksum of 64 rows, evenly spaced."""
    rows = np.unique(np.linspace(0, part.shape[0] - 1, 64).astype("int64"))
    try:
        return checksum([_row(part, row) for row in rows.tolist()])
    except (TypeError, ValueError, LookupError):  # sparse, say
        return None


def _type_of(part: Any) -> Any:
    return part.dtype if hasattr(part, "dtype") else _row(part, 0).dtype  # of a table


def _row(part: Any, row: int) -> np.ndarray:
    """One row of an array; one of pandas may have other names for its rows than their numbers."""
    return np.asarray(part.iloc[row] if hasattr(part, "iloc") else part[row])


def check_batch(number: int, written: int | None, found: int | None) -> None:
    """Raise where a batch is not the one that a checkpoint was written after."""
    if written != found:
        raise CheckpointMismatch(
            f"Batch {number} of the pass over the data has checksum {found} now, and had {written} "
            "when the checkpoint was written:\nthe data has changed, is drawn in another order, or "
            f"draws random numbers of its own.\n{STILL_POSSIBLE}"
        )


def check_data(adapter: Any, steps_per_epoch: int | None) -> None:
    """Raise where a position in this data could not be found again."""
    if isinstance(adapter, TorchDataLoaderAdapter):
        _check_loader(adapter)
    if not isinstance(adapter, PyDatasetAdapter):
        return
    data = adapter.py_dataset
    if has_workers(adapter) and steps_per_epoch:
        raise CheckpointError(
            f"{type(data).__name__} has workers={data.workers}, and fit was given steps_per_epoch="
            f"{steps_per_epoch}: which batches are under way between two epochs is not known.\n"
            "Leave one of the two out."
        )
    if _has_state(data):
        return
    for hook in ("on_epoch_begin", "on_epoch_end"):
        if getattr(type(data), hook) is not getattr(keras.utils.PyDataset, hook):
            raise _unknown_change(data, f"changes itself in {hook}")
    if not (has_workers(adapter) and data.use_multiprocessing):
        _check_same_twice(data)


def _check_loader(adapter: Any) -> None:
    loader = adapter._dataloader
    if loader.persistent_workers:
        raise CheckpointError(
            f"The DataLoader has persistent_workers=True and num_workers={loader.num_workers}: the "
            "random numbers of a worker go on\nfrom one epoch to the next, and no checkpoint sees "
            "them. Say persistent_workers=False."
        )
    torch = sys.modules["torch"]
    if not loader.num_workers and not isinstance(loader.dataset, torch.utils.data.IterableDataset):
        _check_same_twice(loader.dataset)
    # torch/utils/data/dataloader.py, DataLoader.__init__: one of them is PyTorch's own, or both
    batches = loader.batch_sampler
    for sampler in (loader.sampler, batches, getattr(batches, "sampler", None)):
        if sampler is not None and not type(sampler).__module__.startswith("torch."):
            _check_same_order_twice(adapter, sampler)


def _check_same_order_twice(adapter: Any, sampler: Any) -> None:
    before = states_of(adapter)
    orders = []
    for _ in range(2):
        order = iter(sampler)
        if order is sampler:  # it can be gone through once
            return
        orders.append(list(islice(order, 64)))
        put_states(adapter, before)
    if repr(orders[0]) != repr(orders[1]):
        raise _unknown_change(sampler, "gives another order when it is asked again")


def _check_same_twice(data: Any) -> None:
    """Raise where data is not the same when it is asked for twice, from the same random states.

    Not for data that other processes are asked for: what it opens when it is asked here, they
    would inherit, and read through one position in one file.
    """
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        return
    before = random_states.take()
    checks = []
    for _ in range(2):
        random_states.put(before)
        try:
            checks.append(checksum(data[0]))
        except (TypeError, ValueError, LookupError):  # no array, or other keys than numbers
            checks.append(0)
    random_states.put(before)
    if checks[0] != checks[1]:
        raise _unknown_change(data, "gives another item 0 when it is asked again")


def _unknown_change(data: Any, how: str) -> CheckpointError:
    name = type(data).__name__
    if not isinstance(data, keras.utils.PyDataset):
        return CheckpointError(
            f"{name} {how}, and a checkpoint would not know of its random numbers.\n"
            "Let it draw from np.random, random or torch, whose states are in a checkpoint."
        )
    return CheckpointError(
        f"{name} {how}, and a checkpoint would not know how.\n"
        f"Give {name} a get_state() that returns what changes (its order, say), and a "
        "set_state(state)\nthat takes it: numbers, strings, arrays, lists, dicts."
    )


def has_workers(adapter: Any) -> bool:
    """Whether threads or processes make the batches ahead of time."""
    return isinstance(adapter, PyDatasetAdapter) and adapter.enqueuer is not None


def is_own(adapter: Any) -> bool:
    """Whether the adapter is a class of the user's."""
    return isinstance(adapter, DataAdapter) and not type(adapter).__module__.startswith("keras.")


def _has_state(data: Any) -> bool:
    return hasattr(data, "get_state") and hasattr(data, "set_state")


def _sources(adapter: Any) -> dict[str, Any]:
    """What has a state of its own in the data: get_state, set_state."""
    if isinstance(adapter, PyDatasetAdapter):
        return {"data": adapter.py_dataset} if _has_state(adapter.py_dataset) else {}
    if not isinstance(adapter, TorchDataLoaderAdapter):
        return {}
    loader = adapter._dataloader
    found = {
        "loader": loader,
        "sampler": getattr(loader, "sampler", None),
        "batch_sampler": getattr(getattr(loader, "batch_sampler", None), "sampler", None),
    }
    generators = {name: getattr(each, "generator", None) for name, each in found.items()}
    return {name: each for name, each in generators.items() if each is not None}


def states_of(adapter: Any) -> dict[str, Any]:
    """The random states of the process, and what this data has of its own."""
    return {**random_states.take(), **own_states(adapter)}


def own_states(adapter: Any) -> dict[str, Any]:
    """What this data has of its own: the state of a data set, or of a loader's generator."""
    states: dict[str, Any] = {}
    for name, source in _sources(adapter).items():
        state = source.get_state()
        of_torch = type(state).__module__ == "torch"
        states[name] = state.numpy().copy() if of_torch else _copied(state)
    return states


def _copied(state: Any) -> Any:
    """The same state; its owner may go on changing what it has given away."""
    if isinstance(state, dict):
        return {name: _copied(each) for name, each in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(_copied, state))
    return state.copy() if isinstance(state, np.ndarray) else state


def put_states(adapter: Any, states: dict[str, Any]) -> None:
    """Set what `states_of` gave."""
    random_states.put(states)
    put_own_states(adapter, states)


def put_own_states(adapter: Any, states: dict[str, Any]) -> None:
    """Set what `own_states` gave."""
    for name, source in _sources(adapter).items():
        if name not in states:
            continue
        state = states[name]
        if name != "data":
            state = sys.modules["torch"].from_numpy(state.copy())
        source.set_state(state)
