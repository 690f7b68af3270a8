"""A model as bytes for the workers: its objects by value, its tensors by number."""

import io
import pickle
from typing import Any

import torch

from lockstep.engines.model_pickle import ModelPickler, dumped, reason_of, trackers_mended
from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import COMPILED_METRICS
from lockstep.training.overrides import is_keras


def dump(model: Any) -> tuple[bytes, list[Any]]:
    """Return the bytes of a model, and the tensors that they name by their number.

    The same model gives the same bytes, whatever the values of its tensors are.

    Raises:
        UnsupportedModel: If an attribute of the model cannot be pickled.
    """
    try:
        pickler = dumped(model, _Pickler)
    except Exception as error:
        raise UnsupportedModel(
            f"{model.name!r} cannot be sent to the processes of its devices: {reason_of(error)}\n"
            "Files, locks, data sets and the like are no attributes that a model of several "
            "processes can have.\nKeep them out of the model and its layers."
        ) from error
    return pickler.file.getvalue(), pickler.tensors


def load(data: bytes) -> tuple[Any, list[Any]]:
    """Return the model, and new tensors for the numbers in the bytes, not yet filled."""
    unpickler = _Unpickler(io.BytesIO(data))
    model = trackers_mended(unpickler.load())
    return model, [unpickler.tensors[number] for number in range(len(unpickler.tensors))]


class _Pickler(ModelPickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Any] = []
        self._storages: dict[int, int] = {}

    def dump(self, item: Any) -> None:
        self._model = item
        super().dump(item)

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return tensor_of, self._described(item)
        return super().reducer_override(item)

    def state(self, item: Any) -> dict[str, Any]:
        state = super().state(item)
        if item is self._model and COMPILED_METRICS in state and _has_keras_steps(item):
            state[COMPILED_METRICS] = None  # rank 0 alone computes metrics
        return state

    def _described(self, item: Any) -> tuple[Any, ...]:
        number = len(self.tensors)
        self.tensors.append(item)
        place = item.untyped_storage().data_ptr()
        first = self._storages.setdefault(place, number) if place else number
        if first != number and not _is_reshaped(item, self.tensors[first]):
            raise ValueError("two of its tensors share their memory.")
        parameter = isinstance(item, torch.nn.Parameter)
        # "cuda" is the current device of each process.
        device = item.device.type
        return number, first, tuple(item.shape), item.dtype, device, item.requires_grad, parameter


def _has_keras_steps(model: Any) -> bool:
    """Return whether no code of the user's own may read the metrics in a step."""
    return is_keras(model, "train_step") and is_keras(model, "test_step")


def _is_reshaped(tensor: Any, other: Any) -> bool:
    """Return whether two tensors of one memory have the same numbers, in another shape.

    An adapted `Normalization` has its mean as a variable, and in the shape of its inputs.
    """
    same = tensor.dtype == other.dtype and tensor.data_ptr() == other.data_ptr()
    both = tensor.is_contiguous() and other.is_contiguous()
    return bool(same and both and tensor.numel() == other.numel())


def tensor_of(*described: Any) -> Any:
    """Name a tensor in the bytes of a model: `_Unpickler` calls a method of its own instead."""
    raise pickle.UnpicklingError("the bytes of a model are read by `load` alone")


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.tensors: dict[int, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, tensor_of.__name__):
            return self._tensor
        return super().find_class(module, name)

    def _tensor(
        self,
        number: int,
        first: int,
        shape: Any,
        dtype: Any,
        device: str,
        requires_grad: bool,
        parameter: bool,
    ) -> Any:
        if first == number:
            tensor = torch.zeros(shape, dtype=dtype, device=device)
        else:  # in the memory of the first one
            tensor = self.tensors[first].detach().view(shape)
        if parameter:
            tensor = torch.nn.Parameter(tensor, requires_grad=requires_grad)
        self.tensors[number] = tensor
        return tensor
