"""The whole values that a training step gathers, and gathers again in its backward pass.

PyTorch saves tensors of the forward pass for the backward pass. Of a gathered value and its views,
it saves their forms alone. Every process gathers again in the same order: PyTorch runs a backward
pass on one thread of a device, in the reverse order of the operations.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lockstep.errors import UnsupportedModel

_HELD = 2
"""How many values stay for the next read: a loop may read two weights in turn."""


class _View(NamedTuple):
    """A view of a gathered value, to be made again."""

    variable: Any
    dtype: Any
    size: Any
    stride: Any
    offset: int


class GatheredValues:
    """The whole values of one training step.

    Args:
        gather: Returns the whole value of a variable in a type; its gradient goes to the parts.
            Every process has to call this.
    """

    def __init__(self, gather: Callable[[Any, Any], Any]) -> None:
        self._gather = gather
        self._has_ended = False
        self._held: dict[tuple[int, Any], Any] = {}
        # A weak reference keeps the number of a storage from being that of another one.
        self._storages: dict[int, tuple[StorageWeakRef, Any, Any]] = {}
        self._versions: list[tuple[Any, Any, int]] = []

    def value(self, variable: Any, dtype: Any) -> Any:
        """Return the whole value of a variable in a type, gathered if it is not held."""
        key = id(variable), dtype
        whole = self._held.pop(key, None)
        if whole is None:
            with torch.inference_mode(mode=False):  # which enables gradients
                whole = self._gather(variable, dtype)
                counter = whole.detach()  # counts the changes of the value
                counter.data = whole.new_empty(0)  # keeps no memory, and still counts
            self._versions.append((variable, counter, counter._version))
            storage = StorageWeakRef(whole.untyped_storage())
            self._storages[storage.cdata] = storage, variable, dtype
        self._held[key] = whole
        if len(self._held) > _HELD:
            del self._held[next(iter(self._held))]
        return whole

    @contextmanager
    def saved_by_form(self) -> Iterator[None]:
        """Let PyTorch save the forms of views of gathered values inside the context.

        Raises:
            UnsupportedModel: If code in it uses what PyTorch cannot combine with that.
        """
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            raise UnsupportedModel(
                "A layer or loss computes derivatives with torch.func, but the state is "
                "sharded.\nPyTorch cannot gather the weights again for them in the backward "
                'pass.\nUse torch.autograd.grad instead, or remove state="sharded".'
            ) from error

    def end(self) -> list[Any]:
        """Free the values, and return the variables into whose values code has written."""
        versions = self._versions
        self._has_ended = True
        self._held, self._storages, self._versions = {}, {}, []
        return [variable for variable, counter, before in versions if counter._version != before]

    def _pack(self, tensor: Any) -> Any:
        if tensor.layout == torch.strided:
            _, variable, dtype = self._storages.get(tensor.untyped_storage()._cdata, (None,) * 3)
            if tensor.dtype == dtype and not tensor.is_neg():
                form = tensor.size(), tensor.stride(), tensor.storage_offset()
                return _View(variable, dtype, *form)
        return tensor.detach(), tensor._version

    def _unpack(self, saved: Any) -> Any:
        if not isinstance(saved, _View):
            tensor, version = saved
            if tensor._version != version:  # PyTorch checks it where there are no hooks
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: a tensor of shape {tuple(tensor.shape)}"
                )
            return tensor
        variable, dtype, *form = saved
        if self._has_ended:
            raise backward_of_own(variable.path)
        return self.value(variable, dtype).detach().as_strided(*form)


def backward_of_own(path: str) -> UnsupportedModel:
    """Return the error of a backward pass in one process alone, which needs a sharded variable."""
    return UnsupportedModel(
        f"A custom backward pass reaches {path!r}, whose state is sharded.\nThe other processes "
        'do not take part in it.\nTrain with fit or train_on_batch, or remove state="sharded".'
    )
