"""Data of which each of several processes has its own rows."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import GeneratorType
from typing import Any

from lockstep.errors import UnusableData, shown


class OwnRandomNumbers:
    """The random numbers of Python, NumPy and PyTorch that the data of this process draws.

    The model draws others, which are the same in every process. So data that draw a different
    number of times in each process do not let the processes of a model drift apart.
    """

    def __init__(self) -> None:
        self.states = self.taken()

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Let code inside the context draw them, in place of those of the process."""
        before = self.taken()
        self.put(self.states)
        try:
            yield
        finally:
            self.states = self.taken()
            self.put(before)

    @staticmethod
    def taken() -> tuple[Any, ...]:
        """Return the current states of this process."""
        import numpy as np  # lockstep is imported without it

        torch = sys.modules.get("torch")
        of_torch = None if torch is None else torch.get_rng_state()
        return random.getstate(), np.random.get_state(legacy=False), of_torch

    @staticmethod
    def put(states: tuple[Any, ...]) -> None:
        """Set the states of this process."""
        import numpy as np

        of_python, of_numpy, of_torch = states
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        if of_torch is not None:
            sys.modules["torch"].set_rng_state(of_torch)


class ProcessLocal:
    """Data whose batches are the rows of this process.

    Attributes:
        data: What was wrapped.
        random: The random numbers that it draws.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self.random = OwnRandomNumbers()

    def __repr__(self) -> str:
        return f"lockstep.process_local({type(self.data).__name__})"

    def __iter__(self) -> Any:
        raise self._elsewhere()

    def _elsewhere(self) -> UnusableData:
        return UnusableData(
            f"{self!r} was given where plain arrays or batches are expected. It is only valid "
            "as the first argument\nof fit, evaluate and predict, and as validation_data. "
            "Elsewhere, such as in adapt, pass\nthe data of all processes."
        )

    @property
    def parts(self) -> tuple[Any, Any, Any]:
        """The inputs, targets and sample weights, if the data are arrays."""
        if isinstance(self.data, tuple) and len(self.data) <= 3:
            x, y, sample_weight = (*self.data, None, None)[:3]
            return x, y, sample_weight
        return self.data, None, None

    @property
    def is_arrays(self) -> bool:
        """Whether the data are arrays, which Keras cuts into batches."""
        x, *_ = self.parts
        return hasattr(x, "shape") or isinstance(x, list | tuple | dict)

    @property
    def makes_batches(self) -> Callable[[], Any] | None:
        """A function that returns the batches of a pass, `None` for other data."""
        is_function = callable(self.data) and not hasattr(self.data, "__getitem__")
        return self.data if is_function and not hasattr(self.data, "__iter__") else None


class SplitReading(ProcessLocal):
    """Data that every process has, of which each reads its rows alone."""

    def __repr__(self) -> str:
        return f"lockstep.split_reading({type(self.data).__name__})"


def split_reading(data: Any) -> SplitReading:
    """Let each of several processes read its rows of the same data alone.

    Every process is given the same data. The rows of a batch and their order are those of one
    process, drawn from the same random numbers, and each process reads its part of them. Loss,
    metrics and weights are those of plain data wherever a row depends on its index alone: the first
    batch of a call is also read whole in each process, and compared. In one process the data are
    used as they are.

    Args:
        data: A `torch.utils.data.DataLoader` over a map-style data set; or HDF5 data sets, memory
            maps or other arrays: `x`, `(x, y)` or `(x, y, sample_weight)`, with the `batch_size`
            and `shuffle` of `fit`. Keras reads HDF5 data sets whole into memory, and here each
            process reads the rows of a batch when they are due.

    Returns:
        The first argument of `fit`, `evaluate`, `predict` and `lockstep.predict`, or
        `validation_data`. `predict` returns all rows, as for plain data.

    Raises:
        UnusableData: If the data cannot be read by row.

    Example:
        >>> import torch
        >>> rows = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
        >>> loader = torch.utils.data.DataLoader(rows, batch_size=32, shuffle=True)
        >>> _ = model.fit(lockstep.split_reading(loader), shuffle=False, verbose=0)
        >>> _ = model.fit(lockstep.split_reading((x, y)), batch_size=32, verbose=0)
    """
    kind = type(data)
    is_loader = (kind.__module__, kind.__name__) == ("torch.utils.data.dataloader", "DataLoader")
    what = f"a {kind.__name__}"
    if is_loader and not hasattr(data.dataset, "__getitem__"):
        what = f"a DataLoader over a {type(data.dataset).__name__}"
    elif is_loader and data.batch_sampler is None:
        what = "a DataLoader with batch_size=None"
    elif is_loader or _are_arrays(data):
        return SplitReading(data)
    raise UnusableData(
        f"split_reading was given {what}, whose rows cannot be read one by one.\nPass a "
        "DataLoader over a map-style data set, or arrays (x, y). Or give each process a shard "
        "of\nthe data, and use lockstep.process_local."
    )


def _are_arrays(data: Any) -> bool:
    """Return whether data are arrays, or nests of them, whose rows can be read by number."""
    if isinstance(data, dict | list | tuple):
        every = data.values() if isinstance(data, dict) else data
        parts = [part for part in every if part is not None]
        return bool(parts) and all(map(_are_arrays, parts))
    names = ("shape", "dtype", "__getitem__")
    # A table is read by its columns; a mask would get lost.
    is_other = hasattr(data, "iloc") or type(data).__name__ == "MaskedArray"
    return all(hasattr(data, name) for name in names) and not is_other


def process_local(data: Any) -> ProcessLocal:
    """Say that the batches of `data` in this process are its rows of the global batches.

    The global batch of step k has the rows of the k-th batch of every process, in the order of the
    ranks. Loss, metrics and weights are those of one device that was given these global batches.
    Processes may have batches of different sizes, and of different number: one whose data have
    ended takes part without rows until the data of all have ended, so that every row counts once.
    In one process the data are used as they are.

    Args:
        data: A `tf.data.Dataset`, a `DataLoader`, a `PyDataset`, a Grain data set, a generator, a
            function without arguments that returns the batches of one pass, an array, or a tuple
            `(x, y)` or `(x, y, sample_weight)` of arrays. With arrays, `batch_size` is that of
            the global batch; other data bring the batches of this process.

    Returns:
        The first argument of `fit`, `evaluate`, `predict` and `lockstep.predict`, or
        `validation_data`. `predict` returns the rows of this process.

    Raises:
        UnusableData: If the data are wrapped already, an iterator that is no generator, or none.

    Example:
        >>> rank, size = lockstep.initialize()
        >>> own = lockstep.process_local((x[rank::size], y[rank::size]))
        >>> _ = model.fit(own, batch_size=32, verbose=0)
    """
    if isinstance(data, Iterator) and not is_generator(data) and not hasattr(data, "__len__"):
        raise UnusableData(
            f"process_local was given a {type(data).__name__}, an iterator that is not a "
            "generator.\n"
            "Pass a generator, or a function that returns a new iterator for each pass."
        )
    if not _may_be_data(data):
        what = repr(data) if isinstance(data, ProcessLocal) else shown(data)
        raise UnusableData(
            f"process_local was given {what}, but the data of this process were expected.\n"
            "Pass a data set, a generator, an array or a tuple (x, y) of arrays."
        )
    return ProcessLocal(data)


def _may_be_data(data: Any) -> bool:
    """Return whether an object may hold rows: Keras checks its kind."""
    if isinstance(data, list | tuple | dict):
        parts = data.values() if isinstance(data, dict) else data
        return any(part is not None and not isinstance(part, ProcessLocal) for part in parts)
    if isinstance(data, ProcessLocal | str | bytes | set | frozenset) or hasattr(data, "fit"):
        return False
    return callable(data) or any(hasattr(data, name) for name in ("__iter__", "__getitem__"))


def check_beside(data: Any, given: dict[str, Any]) -> None:
    """Check that no argument stands beside `process_local` that belongs into it.

    Args:
        data: The first argument of `fit`, `evaluate` or `predict`.
        given: The other arguments by name.

    Raises:
        UnusableData: If one does.
    """
    for name, value in given.items():
        if isinstance(value, ProcessLocal) and name != "validation_data":
            raise UnusableData(
                f"{name}={value!r} was given, but all arrays of a process must be wrapped "
                "together.\nPass process_local((x, y, sample_weight)) as the first argument."
            )
    if not isinstance(data, ProcessLocal):
        return
    found = [name for name in ("y", "sample_weight") if given.get(name) is not None]
    found += ["validation_split"] if given.get("validation_split") else []
    if found:
        remedy = (
            "Split the rows of each process first, and pass validation_data=process_local(...)."
            if found == ["validation_split"]
            else "Wrap all of them: process_local((x, y, sample_weight))."
        )
        raise UnusableData(
            f"{', '.join(found)} was given together with {data!r}, but its rows would not "
            f"match.\n{remedy}"
        )


def check_wrapped_together(data: Any) -> None:
    """Check that the parts of the data are not wrapped one by one.

    Raises:
        UnusableData: If they are.
    """
    parts = list(data.values()) if isinstance(data, dict) else data
    if isinstance(parts, list | tuple) and any(isinstance(part, ProcessLocal) for part in parts):
        raise UnusableData(
            f"A {type(data).__name__} of process_local was given, but all arrays of a process "
            "must be wrapped together.\n"
            "Pass process_local((x, y, sample_weight)) as the first argument."
        )


def is_generator(data: Any) -> bool:
    """Return whether data end once."""
    return isinstance(data, GeneratorType)
