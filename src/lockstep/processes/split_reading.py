"""The same `DataLoader` in all processes, of which each reads its rows alone."""

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from lockstep.core.devices import shard_rows
from lockstep.core.process_local import OwnRandomNumbers, ProcessLocal
from lockstep.errors import UnusableData
from lockstep.keras_compat import TorchDataLoaderAdapter
from lockstep.processes.coordination import digest
from lockstep.processes.group import current
from lockstep.processes.own_rows import OwnRows, check_class_weight


class SplitRows(OwnRows):
    """Global batches of one data set, of which each process reads a part."""

    is_split = True

    def _random_of(self, own: ProcessLocal) -> OwnRandomNumbers:
        return OwnRandomNumbers()

    def _adapter_of(self, own: ProcessLocal, given: dict[str, Any]) -> Any:
        check_class_weight(given)
        self._whole, self._is_checked = own.data, False
        self._share = _Share(own.data.batch_sampler)
        return TorchDataLoaderAdapter(_loader_of(own.data, self._share))

    def _new_pass(self) -> Iterator[tuple[Any, str]]:
        return self._in_order(iter(self._loader))

    def _begin_pass(self) -> None:
        # The order is drawn from the random numbers of the process, which are the same in all.
        self._share.look_ahead()

    def get_torch_dataloader(self) -> Iterator[Any]:
        """Begin a pass, which draws a seed at once, as a `DataLoader` does."""
        return self._joined(self._new_pass())

    @property
    def _loader(self) -> Any:
        return self.adapter.get_torch_dataloader()

    def _in_order(self, batches: Iterator[Any]) -> Iterator[tuple[Any, str]]:
        """Yield the rows of this process in each global batch, `None` where it has none."""
        for batch in batches:
            rows = None if batch is None else tuple(keras.tree.map_structure(_as_array, batch))
            yield rows, self._share.seen.popleft()

    def _check(self, batch: Any) -> None:
        """Compare the first global batch with one that this process reads whole.

        Raises:
            UnusableData: If it is another one.
        """
        if self._is_checked:
            return
        self._is_checked = True
        pairs = [keras.tree.flatten(each) for each in (batch, self._first_whole())]
        same = len(pairs[0]) == len(pairs[1]) and all(map(_is_same, *pairs))
        if not same:
            raise UnusableData(
                "The first batch that the processes read together differs from the batch that "
                f"process {current().rank} reads alone:\n{self._why_other}"
            )

    _why_other = (
        "a row depends on more than its index, such as on random numbers or on the other rows "
        "of its batch.\nPass the DataLoader to fit without split_reading."
    )

    def _first_whole(self) -> Any:
        """Return the first global batch of this pass, which this process reads alone."""
        loader, before = self._whole, OwnRandomNumbers.taken()
        try:
            whole = loader.collate_fn([loader.dataset[row] for row in self._share.first])
        finally:
            OwnRandomNumbers.put(before)
        return tuple(keras.tree.map_structure(_as_array, whole))


class _Share:
    """A batch sampler that yields the rows of this process of each global batch.

    Args:
        batches: The batch sampler of the `DataLoader`.

    Attributes:
        sampler: What draws the rows.
        seen: Checks of the global batches that have been drawn, and not been read.
        first: The rows of the first one of the last pass.
    """

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self.sampler = getattr(batches, "sampler", None)
        self.seen: deque[str] = deque()
        self.first: list[Any] = []
        self._order: Iterator[Any] = iter(())
        self._ahead: list[Any] = []

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Any]]:
        self._order, self._ahead = iter(self._batches), []
        self.seen.clear()
        self.first = []
        return self._shares()

    def look_ahead(self) -> None:
        """Draw the first batch, if a worker has not: the sampler draws a seed then."""
        if not self.first and not self._ahead:
            self._ahead = list(itertools.islice(self._order, 1))

    def _shares(self) -> Iterator[list[Any]]:
        rank, size = current().rank, current().size
        while True:
            drawn = self._ahead or list(itertools.islice(self._order, 1))
            self._ahead = []
            if not drawn:
                return
            rows = [*drawn[0]]
            self.first = self.first or rows
            part = shard_rows(len(rows), size)[rank]
            self.seen.append(digest([repr(rows).encode()]))
            yield rows[part.start : part.stop]


class _Collate:
    """Makes a batch of rows; `None` where this process has none.

    So each process draws the same number of batches from the sampler.

    Args:
        collate: That of the `DataLoader`.
    """

    def __init__(self, collate: Any) -> None:
        self._collate = collate

    def __call__(self, rows: Any) -> Any:
        return self._collate(rows) if len(rows) else None


def _loader_of(loader: Any, share: _Share) -> Any:
    """Return a `DataLoader` like another one, of other rows."""
    more = {"prefetch_factor": loader.prefetch_factor} if loader.num_workers else {}
    return type(loader)(
        loader.dataset,
        batch_sampler=share,
        num_workers=loader.num_workers,
        collate_fn=_Collate(loader.collate_fn),
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        persistent_workers=loader.persistent_workers,
        **more,
    )


def _as_array(leaf: Any) -> Any:
    return np.asarray(leaf.cpu()) if hasattr(leaf, "cpu") else leaf


def _is_same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    kinds = [(each.dtype, each.shape, each.tobytes()) for each in (one, other)]
    return bool(kinds[0] == kinds[1])
