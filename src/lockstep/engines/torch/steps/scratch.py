"""What a followed layer computes without the batch, on PyTorch: recorded, and without effect."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lockstep.engines.rowwise import NotRowByRow, is_following
from lockstep.engines.torch.exchange.placement import flattened
from lockstep.engines.torch.torch_compat import TorchDispatchMode, tree_leaves

_READS = frozenset({"__array__", "__dlpack__", "data_ptr", "numpy", "tolist", "untyped_storage"})
"""Methods by which Python reads the values of a tensor without an operation of PyTorch."""

DRAWS = "random numbers of PyTorch"
"""The reason of code that draws them: they are those of one device in distribution alone."""

_TAGS = {
    torch.Tag.nondeterministic_seeded: DRAWS,
    torch.Tag.data_dependent_output: "Python reads the value of a tensor",
    torch.Tag.dynamic_output_shape: "a shape depends on the values of a tensor",
}


class Scratch:
    """Records what PyTorch computes while a layer is followed; see `rowwise.Scratch`.

    Python cannot branch on the value of a weight, and nothing is assigned.
    """

    kind, count_kind = torch.Tensor, int

    def __init__(self) -> None:
        self._done: list[Any] = []
        self._failure: str | None = None
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # keeps tensors alive, so that no identity is reused
        self._outside: set[int] = set()
        self._busy = False

    def dtype(self, name: str) -> Any:
        """Return the dtype of this name."""
        return getattr(torch, name)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Record inside the context, in this thread."""
        with _Reads(self), _Operations(self):
            yield

    def describe(self, tensor: Any) -> Any:
        """Return the number of a tensor made here, the identity of a weight, or values."""
        before, self._busy = self._busy, True
        try:
            return self._describe(tensor)
        finally:
            self._busy = before

    def _describe(self, tensor: Any) -> Any:
        if id(tensor) in self._numbers:
            return "made", self._numbers[id(tensor)]
        self._kept.append(tensor)
        self._outside.add(tensor.untyped_storage()._cdata)
        if isinstance(tensor, torch.nn.Parameter):
            return "weight", id(tensor)
        if tensor.is_meta:
            raise NotRowByRow("state outside of it")
        values = flattened(tensor.cpu()).view(torch.uint8)
        return str(tensor.dtype), tuple(tensor.shape), values.numpy().tobytes()

    def cut(self) -> tuple[Any, str | None]:
        """Return the operations since the last call, and why they may not be, if so."""
        done, failure = self._done, self._failure
        self._done, self._failure = [], None
        return done, failure

    # ---------------------------------------------------------------- for the modes below

    @property
    def is_active(self) -> bool:
        """Whether the code that runs now is followed, and is not that of this class."""
        return not self._busy and is_following()

    def refuse(self, reason: str) -> None:
        """Raise, and remember the reason in case that the followed code catches the error."""
        self._failure = self._failure or reason
        raise NotRowByRow(reason)

    def run(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and record it; an assignment is recorded alone."""
        for tag, reason in _TAGS.items():
            if tag in operation.tags:
                self.refuse(reason)
        self._busy = True
        try:
            leaves = tree_leaves((args, kwargs))
            described = [
                self.describe(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf)
                for leaf in leaves
            ]
            self._done.append((str(operation), described))
            if self._writes_outside(operation, args, kwargs):
                if operation is not torch.ops.aten.copy_.default:
                    self.refuse("it writes into a tensor from outside of it")
                return args[0]
            outputs = operation(*args, **kwargs)
            for output in tree_leaves(outputs):
                if isinstance(output, torch.Tensor) and id(output) not in self._numbers:
                    self._kept.append(output)
                    self._numbers[id(output)] = len(self._numbers)
            return outputs
        finally:
            self._busy = False

    def _writes_outside(self, operation: Any, args: Any, kwargs: Any) -> bool:
        for place, argument in enumerate(operation._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = args[place] if place < len(args) else kwargs.get(argument.name)
            for leaf in tree_leaves(written):
                is_tensor = isinstance(leaf, torch.Tensor)
                if is_tensor and leaf.untyped_storage()._cdata in self._outside:
                    return True
        return False


class _Operations(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self, scratch: Scratch) -> None:
        super().__init__()
        self._scratch = scratch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._scratch.is_active:
            return func(*args, **(kwargs or {}))
        return self._scratch.run(func, args, kwargs or {})


class _Reads(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, scratch: Scratch) -> None:
        super().__init__()
        self._scratch = scratch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._scratch.is_active and getattr(func, "__name__", "") in _READS:
            self._scratch.refuse(_TAGS[torch.Tag.data_dependent_output])
        return func(*args, **(kwargs or {}))
