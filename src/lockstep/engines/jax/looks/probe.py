"""Looks inside one training step on JAX: what each layer gave, and each gradient."""

import itertools
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
import keras
import numpy as np

from lockstep.engines import attachments
from lockstep.engines.engine import Data
from lockstep.engines.jax import losses
from lockstep.engines.jax.fit.clock import Clock
from lockstep.engines.jax.looks import profile
from lockstep.engines.jax.outside import every_variable
from lockstep.engines.jax.several import processes
from lockstep.engines.jax.several.calls import CALLS
from lockstep.engines.jax.several.constants import constants_of
from lockstep.engines.jax.steps.input import HostIterator
from lockstep.engines.jax.steps.step import State
from lockstep.engines.looking import part_of, watched_layers
from lockstep.engines.replaced import replaced


class JaxProbe:
    """Looks at one model, attached or not; see `Probe` for the contract."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def compiling(self) -> AbstractContextManager[profile.Compiling]:
        """Count the seconds that are spent on compiling while it lasts."""
        return profile.compiling()

    def tracing(self) -> AbstractContextManager[profile.Trace]:
        """Profile the devices while it lasts."""
        return profile.tracing()

    def clock(self, most: int, *, settle: bool = False) -> Clock:
        """A callback for one `fit` that times its steps."""
        return Clock(most, settle=settle)

    def feed(self, data: Data, batch_size: int | None, most: int) -> tuple[float, int]:
        """Draw the batches of one epoch as `fit` draws them, and train on none."""
        x, y, sample_weight = data
        batches = HostIterator(
            x=x, y=y, sample_weight=sample_weight, batch_size=batch_size, shuffle=True
        )
        attachment = attachments.attachment_of(self._model)
        if attachment is not None:  # the data may stay on the devices
            attachment.keeper.keep(self._model, batches, keras.callbacks.CallbackList(), "train")
        try:
            _, _, iterator = next(iter(batches))
            number = batches.num_batches or most
            if number > most:  # what an epoch begins with is of all its batches
                next(iterator)
            start = time.perf_counter()
            # No further than a fit goes: after the last batch, workers are waited for.
            most = min(most, number)
            count = sum(1 for _ in itertools.islice(iterator, most))
            return time.perf_counter() - start, count
        finally:
            batches.reset()  # which ends the workers of a data set

    def precise(self) -> AbstractContextManager[object]:
        """Matrix products at full float32 precision, which GPUs do not take by default."""
        precise: AbstractContextManager[object] = jax.default_matmul_precision("highest")
        return precise

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Let several processes begin with the values of the first one."""
        constants = constants_of(self._model)
        before = [constant.value for constant in constants]
        if processes.several():
            with CALLS.call("verify"):
                processes.share_variables([*every_variable(self._model), *constants])
        try:
            yield
        finally:
            for constant, value in zip(constants, before, strict=True):
                constant.assign(value)

    def fresh(self) -> None:
        """Trace the model anew at its next step."""
        self._model.make_train_function(force=True)

    def train(self, batch: tuple[Any, Any, Any]) -> dict[str, Any]:
        """Train one step on `batch`; the logs it gives."""
        losses.forget(self._model)
        x, y, sample_weight = batch
        logs = self._model.train_on_batch(x, y, sample_weight=sample_weight, return_dict=True)
        return {name: np.asarray(value) for name, value in logs.items()}

    def look(self, batch: tuple[Any, Any, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What each layer gives for `batch`, in order, and the gradient of each variable.

        Nothing of the model changes. Layers are those of the model and of models
        inside it; a model with a `train_step` of its own has no gradients here.
        """
        model = self._model
        attributes = vars(model)
        before = attributes.get("train_step")
        attributes["train_step"] = self._looking_step
        try:
            model.make_train_function(force=True)
            seen = self.train(batch)
        finally:
            if before is None:
                del attributes["train_step"]
            else:
                attributes["train_step"] = before
            model.make_train_function(force=True)
        return part_of(seen, "activation"), part_of(seen, "gradient")

    def notes(self) -> list[str]:
        """Nothing: the compiler splits one program."""
        return []

    def _looking_step(self, state: State, data: Any) -> tuple[dict[str, Any], State]:
        # keras/src/backend/jax/trainer.py, JAXTrainer.train_step
        from keras.src.backend.jax.trainer import JAXTrainer

        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        trainable, non_trainable, optimizer, metrics = state

        def loss_of(trainable: Any) -> tuple[Any, dict[str, Any]]:
            with _recorded(model) as activations:
                loss, _ = model.compute_loss_and_updates(
                    trainable,
                    non_trainable,
                    metrics,
                    x,
                    y,
                    sample_weight,
                    training=True,
                    optimizer_variables=optimizer,
                )
            return loss, activations

        if type(model).train_step is JAXTrainer.train_step:
            gradients, activations = jax.grad(loss_of, has_aux=True)(trainable)
        else:
            gradients = []
            with _recorded(model) as activations:
                model.stateless_call(trainable, non_trainable, x, training=True)
        seen = {f"activation/{name}": value for name, value in activations.items()}
        for variable, gradient in zip(model.trainable_variables, gradients, strict=False):
            seen[f"gradient/{variable.path}"] = gradient
        return seen, state


@contextmanager
def _recorded(model: Any) -> Iterator[dict[str, Any]]:
    """Records what the layers of a model give, in the order in which they are called."""
    seen: dict[str, Any] = {}
    layers = [layer for layer in watched_layers(model) if "call" not in vars(layer)]

    def recording(layer: Any) -> Any:
        call = layer.call

        def record(*args: Any, **kwargs: Any) -> Any:
            outputs = call(*args, **kwargs)
            for output in keras.tree.flatten(outputs):
                if isinstance(output, jax.Array):
                    # JAX sorts the keys of a dict: the number keeps the order.
                    seen[f"{len(seen):05d}/{layer.path}"] = output
            return outputs

        return record

    with replaced([(layer, "call", recording(layer)) for layer in layers]):
        yield seen
