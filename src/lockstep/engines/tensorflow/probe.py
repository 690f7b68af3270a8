"""Looks inside one training step on TensorFlow: what each layer gave, and each gradient."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lockstep.engines.engine import Clock, Compiling, Data, Trace
from lockstep.engines.looking import part_of, watched_layers
from lockstep.engines.replaced import replaced
from lockstep.engines.tensorflow.alike import NotAlike
from lockstep.engines.tensorflow.steps import Steps
from lockstep.engines.tensorflow.unsplit import own_step
from lockstep.engines.tensorflow.variables import variables_of
from lockstep.errors import UnsupportedBackend


class TensorFlowProbe:
    """Looks at one model, attached or not; see `Probe` for the contract.

    Replicas draw random numbers of their own, and would not be comparable with one
    device. While they are looked at, every device draws those of the whole batch.
    """

    def __init__(self, model: Any, steps: Callable[[], Steps | None]) -> None:
        """`steps` gives the steps of the model where it is attached."""
        self._model = model
        self._steps = steps

    def compiling(self) -> AbstractContextManager[Compiling]:
        """Not here yet."""
        raise UnsupportedBackend(_BENCH)

    def tracing(self) -> AbstractContextManager[Trace]:
        """Not here yet."""
        raise UnsupportedBackend(_BENCH)

    def clock(self, most: int, *, settle: bool = False) -> Clock:
        """Not here yet."""
        raise UnsupportedBackend(_BENCH)

    def feed(self, data: Data, batch_size: int | None, most: int) -> tuple[float, int]:
        """Not here yet."""
        raise UnsupportedBackend(_BENCH)

    @contextmanager
    def precise(self) -> Iterator[None]:
        """Matrix products at full precision, and no XLA, which several devices do without."""
        model, config = self._model, tf.config.experimental
        before = config.tensor_float_32_execution_enabled(), model.jit_compile
        config.enable_tensor_float_32_execution(False)
        model.jit_compile = False
        try:
            yield
        finally:
            config.enable_tensor_float_32_execution(before[0])
            model.jit_compile = before[1]

    def alike(self) -> AbstractContextManager[None]:
        """Nothing: there is one process."""
        return nullcontext()

    def fresh(self) -> None:
        """Trace the model anew at its next step."""
        self._together()
        self._model.make_train_function(force=True)

    def train(self, batch: tuple[Any, Any, Any]) -> dict[str, Any]:
        """Train one step on `batch`; the logs it gives."""
        self._together()
        x, y, sample_weight = batch
        logs = self._model.train_on_batch(x, y, sample_weight=sample_weight, return_dict=True)
        return {name: np.asarray(value) for name, value in logs.items()}

    def look(self, batch: tuple[Any, Any, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What each layer gives for `batch`, in order, and the gradient of each variable.

        Nothing of the model changes. Layers are those of the model and of models
        inside it; a model with a `train_step` of its own has no gradients here.
        """
        variables = variables_of(self._model)
        before = [keras.ops.convert_to_numpy(variable) for variable in variables]
        data = keras.tree.map_structure(
            lambda leaf: leaf if leaf is None else tf.convert_to_tensor(leaf), batch
        )
        steps = self._together()
        try:
            try:
                seen = tf.function(self._looking_step, autograph=False)(data)
            except NotAlike as found:
                assert steps is not None
                steps.give_up("train", str(found))
                seen = tf.function(self._looking_step, autograph=False)(data)
        finally:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
        return part_of(seen, "activation"), part_of(seen, "gradient")

    def notes(self) -> list[str]:
        """How the losses and metrics come by their values, where several devices run."""
        steps = self._steps()
        choices = {} if steps is None else steps.choices
        own = [repr(name) for name, why in choices.items() if why is None]
        whole = [f"{name!r} ({why})" for name, why in choices.items() if why is not None]
        notes = [f"Each device takes its own rows for {', '.join(own)}."] if own else []
        if whole:
            notes.append(
                f"Every device takes the outputs of the whole batch for {', '.join(whole)}."
            )
        return notes

    def _together(self) -> Steps | None:
        steps = self._steps()
        if steps is not None:
            steps.draws_together = True
        return steps

    def _looking_step(self, data: Any) -> dict[str, Any]:
        steps = self._steps()
        if steps is None:
            seen, gradients = self._alone(data)
        else:
            watch = partial(_recorded, self._model)
            seen, gradients = steps.look(data, watch, self._alone)
        found = {f"activation/{name}": value for name, value in seen.items()}
        for variable, gradient in zip(self._model.trainable_variables, gradients, strict=False):
            if gradient is not None:
                found[f"gradient/{variable.path}"] = tf.convert_to_tensor(gradient)
        return found

    def _alone(self, data: Any) -> tuple[dict[str, Any], list[Any]]:
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with _recorded(model, lambda output: output) as seen, tf.GradientTape() as tape:
            y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
            if own_step(model, "train_step") is not None:
                return seen(), []
            # keras/src/trainers/trainer.py, Trainer._compute_loss
            loss = model._compute_loss(
                x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True
            )
        return seen(), tape.gradient(loss, model.trainable_weights)


_BENCH = (
    "bench was asked for on 'tensorflow', and measures training steps on 'jax' so far.\n"
    "Set KERAS_BACKEND=jax in the environment before Keras is imported."
)


@contextmanager
def _recorded(model: Any, whole: Callable[[Any], Any]) -> Iterator[Callable[[], dict[str, Any]]]:
    """Records what the layers of a model give, in the order in which they are called.

    What it yields gives what was recorded in the thread that asks: each replica has one.

    Args:
        model: The model.
        whole: Makes a tensor of the global batch of an output.
    """
    threads: dict[int, dict[str, Any]] = {}
    layers = watched_layers(model)

    def seen() -> dict[str, Any]:
        return threads.setdefault(threading.get_ident(), {})

    def recording(layer: Any) -> Any:
        call = layer.call

        def record(*args: Any, **kwargs: Any) -> Any:
            outputs = call(*args, **kwargs)
            for output in keras.tree.flatten(outputs):
                if isinstance(output, tf.Tensor):
                    seen()[f"{len(seen()):05d}/{layer.path}"] = whole(output)
            return outputs

        return record

    with replaced([(layer, "call", recording(layer)) for layer in layers]):
        yield seen
