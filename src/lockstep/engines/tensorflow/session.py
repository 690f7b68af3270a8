"""One model on TensorFlow devices, as the loop of `fit` and `evaluate` uses it."""

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from lockstep.checkpoint.fit_run import Snapshot
from lockstep.errors import UnsupportedModel
from lockstep.keras_compat import EpochIterator, TFDatasetAdapter, backend_iterator, layers_in
from lockstep.state import named_variables, optimizers_of
from lockstep.training.input import HostIterator
from lockstep.training.session import TRAIN, Kind, Session, recorded_type


class TensorFlowSession(Session):
    """Give the loop one model on TensorFlow devices; see `Session`.

    Without a checkpoint, the batches are those of Keras's own iterator: `tf.data` draws the order
    of the rows, as on one device. `tf.data` does not tell its position. Under a checkpoint NumPy
    draws the order, as on other backends, and batches come from the host.

    Args:
        model: The model.
        devices: The names of its devices.
        build: Builds what a step needs for a batch, and lays out its variables.
    """

    array_type = tf.Tensor
    iterator_type = EpochIterator

    def __init__(
        self, model: Any, devices: tuple[str, ...], build: Callable[[str, Any], None]
    ) -> None:
        super().__init__(model, devices)
        self._build = build

    def batches(self, kind: Kind, *, recorded: bool = False, **data: Any) -> Any:
        """Return Keras's iterator over a `tf.data.Dataset`, or a recorded one over host batches."""
        if recorded:
            return recorded_type(kind, RecordableIterator)(**data)
        return backend_iterator()(distribute_strategy=tf.distribute.get_strategy(), **data)

    def build(self, batches: Any, kind: Kind) -> None:
        """Reset the iterator, as Keras does, and build what a checkpoint has to name.

        Without a checkpoint the first step builds the model, before its trace.
        """
        if kind is TRAIN and isinstance(batches, HostIterator):
            _check_state(self.model)
            for _, _, iterator in batches:
                self._build("train", next(iterator))
                break
        batches.reset()

    def fit_state(self) -> "TensorFlowFitState":
        """Return access to the variables, for a checkpoint of one `fit`."""
        return TensorFlowFitState(self.model)


class RecordableIterator(HostIterator):
    """Iterate over host batches; a `tf.data.Dataset` gives its own tensors."""

    def _source(self) -> Any:
        adapter = self.data_adapter
        if isinstance(adapter, TFDatasetAdapter):
            return _lazily(adapter.get_tf_dataset())
        return adapter.get_numpy_iterator()


def _lazily(dataset: Any) -> Iterator[Any]:
    """Begin a pass at its first batch: a new iterator draws the seed of the next order."""
    yield from dataset


class TensorFlowFitState:
    """Give access to the variables in a `fit`; see `lockstep.checkpoint.fit_run.FitState`."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def snapshot(self, logs: dict[str, Any]) -> Snapshot:
        """Read every variable and the logs of the last step.

        A tensor that was read from a variable keeps its value: later steps write elsewhere.
        """
        named = {name: v.value for name, v in named_variables(self._model).items()}
        variables = len(named)
        # `dict.items` bypasses the fetch of `LazyLogs`.
        for name, value in dict.items(logs):
            if value is not None and not isinstance(value, str | bytes):  # added by a callback
                named[f"logs/{name}"] = value
        tensors = [tf.convert_to_tensor(value) for value in named.values()]
        arrays = [
            (name, tensor.dtype.name, tuple(tensor.shape))
            for name, tensor in zip(named, tensors, strict=True)
        ]
        return Snapshot(variables, arrays, (tensor.numpy() for tensor in tensors))

    def sync(self) -> None:
        """Do nothing: variables hold their values between two steps."""


def _check_state(model: Any) -> None:
    """Raise if a step may change what a checkpoint does not save."""
    others = []
    for layer in layers_in(model):
        names = [name for name, _ in optimizers_of(layer) if name != "optimizer"]
        names += [name for name, value in vars(layer).items() if isinstance(value, tf.Variable)]
        others += [f"{name} of {layer.name!r}" for name in names]
    if others:
        raise UnsupportedModel(
            f"A step may change {', '.join(others)}, and lockstep.Checkpoint saves the variables\n"
            "of layers and the optimizer of compile. Make variables by add_weight; with several "
            "optimizers,\nuse keras.callbacks.BackupAndRestore."
        )
