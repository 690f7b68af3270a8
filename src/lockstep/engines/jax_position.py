"""The position of a run in its data: where it is, and how to get there again."""

import sys
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import keras
import numpy as np
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter

from lockstep.engines import random_states
from lockstep.engines.jax_input import HostIterator
from lockstep.errors import CheckpointError, CheckpointMismatch, CheckpointWarning

# The adapters and their attributes: keras/src/trainers/data_adapters/*.py


class Pass:
    """One pass over the data, which counts the batches that it gives.

    Attributes:
        random: The random states when its first batch was asked for.
        drawn: How many batches it has given.
        first: The checksum of the first one, where batches are compared.
        last: The last one, where batches are compared.
    """

    def __init__(self, batches: Iterator[Any], adapter: Any, verified: bool) -> None:
        self._batches = batches
        self._adapter = adapter
        self._verified = verified
        self.random: dict[str, Any] | None = None
        self.drawn = 0
        self.first: int | None = None
        self.last: Any = None

    def __iter__(self) -> "Pass":
        return self

    def __next__(self) -> Any:
        if self.random is None:
            self.random = _random_states(self._adapter)
        batch = next(self._batches)
        self.drawn += 1
        if self._verified:
            self.last = batch
            if self.drawn == 1:
                self.first = checksum(batch)
        return batch


class RecordedIterator(HostIterator):
    """An iterator over epochs that knows its position, and can begin at another one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._verified = not isinstance(self.data_adapter, ArrayDataAdapter)
        self._forget()
        _check_data(self.data_adapter, self.steps_per_epoch)

    def _forget(self) -> None:
        self._pass: Pass | None = None
        self._passes: list[int] = []
        self._first: int | None = None
        self._before: dict[str, Any] | None = None
        self._wanted: dict[str, Any] | None = None
        self._first_step = 0

    def reset(self) -> None:
        """Forget every pass; Keras has looked at a batch to build the model."""
        super().reset()
        self._forget()
        if _enqueuer(self.data_adapter):
            # What workers had ready for that look Keras gives before the first batches of the
            # first epoch, which then has some rows twice and some not, by chance.
            with self.data_adapter.enqueuer.ready_queue.mutex:
                self.data_adapter.enqueuer.ready_queue.queue.clear()

    def position(self, step: int) -> dict[str, Any]:
        """Where the run is, after `step` steps of an epoch, or between two where that is 0."""
        current = self._pass
        goes_on = current is not None and current.drawn > 0
        if step == 0:  # the next epoch makes an iterator of its own, but for steps_per_epoch
            goes_on = goes_on and bool(self.steps_per_epoch) and self._current_iterator is current
        passes = [*self._passes]
        if current is not None and current.drawn and not goes_on:
            passes.append(current.drawn)
        return {
            "step": step,
            "passes": passes,
            "drawn": current.drawn if goes_on and current else 0,
            "random": current.random if goes_on and current else None,
            "before": self._before if goes_on and _enqueuer(self.data_adapter) else None,
            "first": current.first if current and current.drawn else self._first,
            "last": checksum(current.last) if goes_on and current and self._verified else None,
            "steps_seen": self._steps_seen,
            "batches": self._num_batches,
            "now": _random_states(self.data_adapter),
        }

    def begin_at(self, position: dict[str, Any]) -> None:
        """Let the next epoch begin at a position of another run over the same data.

        Raises:
            CheckpointMismatch: If the data gives other batches now.
        """
        self._forget()
        self._num_batches = position["batches"]
        self._first_step = position["step"]
        self._go_over_again(position)
        self._passes = list(position["passes"])
        if not position["drawn"]:
            _put_random_states(self.data_adapter, position["now"])
        elif self.steps_per_epoch:
            self._current_iterator = self._advanced(position)
            self._steps_seen = position["steps_seen"] - position["step"]
        else:
            self._wanted = position

    def _enumerate_iterator(self) -> Iterator[Any]:
        first_step, self._first_step = self._first_step, 0
        if _enqueuer(self.data_adapter):  # its thread draws the order as soon as it starts
            if self._wanted is not None:
                _put_random_states(self.data_adapter, self._wanted["before"])
            self._before = _random_states(self.data_adapter)
        for first, last, iterator in super()._enumerate_iterator():
            if first < first_step <= last:
                raise CheckpointMismatch(
                    f"The checkpoint is after step {first_step} of its epoch, and with "
                    f"steps_per_execution={self.steps_per_execution} no execution begins there.\n"
                    "Compile with the value that the run had until then."
                )
            if first >= first_step:
                yield first, last, iterator

    def _get_iterator(self) -> Iterator[Any]:
        wanted, self._wanted = self._wanted, None
        return self._new_pass() if wanted is None else self._advanced(wanted)

    def _new_pass(self) -> Pass:
        if self._pass is not None and self._pass.drawn:
            self._passes.append(self._pass.drawn)
            self._first = self._pass.first
        self._pass = Pass(super()._get_iterator(), self.data_adapter, self._verified)
        return self._pass

    def _advanced(self, position: dict[str, Any]) -> Pass:
        """A pass that has given as many batches as the one of the checkpoint had."""
        drawn = position["drawn"]
        if isinstance(self.data_adapter, GeneratorDataAdapter):
            warnings.warn(
                f"{drawn} batches of a generator are made once more to go on after them, which "
                "takes the time that they took. Arrays or a PyDataset go on at once.",
                CheckpointWarning,
                stacklevel=2,
            )
        if not _enqueuer(self.data_adapter):
            _put_random_states(self.data_adapter, position["random"])
        # Of arrays only the last batch is made, from which the next one follows.
        self.skip = 0 if self._verified else drawn - 1
        current = self._new_pass()
        self.skip, jumped = 0, self.skip
        for _ in range(drawn - jumped):
            if next(current, None) is None:
                raise CheckpointMismatch(
                    f"The checkpoint is after batch {drawn}, and the data ends after "
                    f"{current.drawn} now: it has changed.\n{STILL_POSSIBLE}"
                )
        current.drawn = drawn
        if self._verified:
            _check_same(1, position["first"], current.first)
            _check_same(drawn, position["last"], checksum(current.last))
        _put_random_states(self.data_adapter, position["now"])
        return current

    def _go_over_again(self, position: dict[str, Any]) -> None:
        """Ask data for the passes it has given before, where the next one depends on them."""
        adapter, passes = self.data_adapter, position["passes"]
        if isinstance(adapter, GeneratorDataAdapter) and passes:
            raise CheckpointMismatch(
                "The checkpoint is behind the end of a generator, which ends once.\n"
                "Call fit with steps_per_epoch, and a generator that has batches for all epochs."
            )
        if not passes or not (isinstance(adapter, TFDatasetAdapter) or _is_own(adapter)):
            return
        for _ in passes if position["drawn"] else passes[:-1]:
            if _is_own(adapter):
                next(iter(adapter.get_jax_iterator()), None)
            else:  # a tf.data.Dataset draws the seed of a pass when its iterator is made
                iter(adapter.get_tf_dataset())
        if not position["drawn"]:
            _check_same(1, position["first"], checksum(next(super()._get_iterator(), None)))


STILL_POSSIBLE = (
    "Still possible: lockstep export RUN -o model.keras for the weights, or another folder to "
    "start anew."
)


def fingerprint(batches: HostIterator) -> dict[str, Any]:
    """What is known of the data without going through it."""
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
            "types": [str(part.dtype) for part in parts],
            "content": [_check_of_rows(part) for part in parts],
        }
    elif isinstance(adapter, PyDatasetAdapter):
        known["shuffle"] = adapter.shuffle
    return known


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
        return checksum([np.asarray(part[row]) for row in rows.tolist()])
    except (TypeError, ValueError, IndexError):  # sparse, say
        return None


def _check_same(number: int, written: int | None, found: int | None) -> None:
    if written != found:
        raise CheckpointMismatch(
            f"Batch {number} of the pass over the data has checksum {found} now, and had {written} "
            "when the checkpoint was written:\nthe data has changed, is drawn in another order, or "
            f"draws random numbers of its own.\n{STILL_POSSIBLE}"
        )


def _check_data(adapter: Any, steps_per_epoch: int | None) -> None:
    """Raise where a position in this data could not be found again."""
    if isinstance(adapter, TorchDataLoaderAdapter):
        _check_same_twice(adapter._dataloader.dataset)
    if not isinstance(adapter, PyDatasetAdapter):
        return
    data = adapter.py_dataset
    if _enqueuer(adapter) and steps_per_epoch:
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
    _check_same_twice(data)


def _check_same_twice(data: Any) -> None:
    """Raise where data is not the same when it is asked for twice, from the same random states."""
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        return
    before = random_states.take()
    checks = []
    for _ in range(2):
        random_states.put(before)
        try:
            checks.append(checksum(data[0]))
        except (TypeError, ValueError):  # nothing that an array can be made of
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


def _enqueuer(adapter: Any) -> bool:
    return isinstance(adapter, PyDatasetAdapter) and adapter.enqueuer is not None


def _is_own(adapter: Any) -> bool:
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


def _random_states(adapter: Any) -> dict[str, Any]:
    states = random_states.take()
    for name, source in _sources(adapter).items():
        state = source.get_state()
        states[name] = state.numpy().copy() if type(state).__module__ == "torch" else state
    return states


def _put_random_states(adapter: Any, states: dict[str, Any]) -> None:
    random_states.put(states)
    for name, source in _sources(adapter).items():
        if name not in states:
            continue
        state = states[name]
        if name != "data":
            state = sys.modules["torch"].from_numpy(state.copy())
        source.set_state(state)
