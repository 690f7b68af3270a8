"""A view into one training step on JAX: the layer outputs and the gradients."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from lockstep.attach.attachment import session_of
from lockstep.core.patched import patched
from lockstep.core.state import GROUPS
from lockstep.engines.jax.fit.first_build import as_on_device
from lockstep.engines.jax.fit.on_batch import OnBatch
from lockstep.engines.jax.jax_compat import programs_of
from lockstep.engines.jax.session import forget_losses
from lockstep.engines.jax.steps.cache import keep_programs
from lockstep.engines.jax.steps.execution import State
from lockstep.engines.replicas.sketches import GRADIENT, OUTPUT, Sketches, sketch_on_host
from lockstep.keras_compat import is_rematerialized, take_jax_state, trainer_class
from lockstep.processes import process_group
from lockstep.processes.call_scope import CALLS
from lockstep.training.probe_helpers import (
    SHORT_FLOATS,
    build_symbolically,
    calls_watched,
    shortest_cast,
    tensors,
    watched_layers,
)


class JaxProbe:
    """Inspect one model, attached or not; see `Probe` for the contract."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @contextmanager
    def precise(self) -> Iterator[list[str]]:
        """Use full float32 precision in matrix products, which GPUs do not by default.

        A step that is traced again is not compiled again, where its program is the same.
        """
        keep_programs()
        with jax.default_matmul_precision("highest"):
            yield []

    def build(self, batch: Any) -> str | None:
        """Build the model as `fit` does before its first step; return its casts from float64."""
        build_symbolically(self._model, as_on_device(batch))

        def casts() -> Iterator[str]:
            state = take_jax_state(self._model, **{f"{name}_variables": True for name in GROUPS})
            yield from _casts(jax.make_jaxpr(self._model.train_step)(state, tensors(batch)).jaxpr)

        return shortest_cast(self._model, casts)

    def train(self, batch: Any, *, restart: bool = False) -> dict[str, Any]:
        """Run one training step on a batch in the structure of `fit`, and return the logs."""
        if restart:
            self._model.make_train_function(force=True)
        forget_losses(self._model)
        with CALLS.call("verify") if process_group.several() else nullcontext():
            logs = OnBatch(self._model).train(batch)
        return {name: np.asarray(value) for name, value in logs.items()}

    def recorded(
        self, batches: Iterable[Any], *, layers: bool = True
    ) -> Generator[list[Sketches], None, None]:
        """Yield the sketches of the global batch; a `train_step` of its own has no gradients."""
        model = self._model
        try:
            step = patched([(model, "train_step", partial(self._recorded_step, layers))])
            session: Any = session_of(model)
            # The outputs of layers cannot leave the loop over micro-batches.
            at_once = nullcontext() if session is None else session.all_rows_at_once()
            with step, at_once:
                model.make_train_function(force=True)
                for batch in batches:
                    seen = sorted(self.train(batch).items())
                    yield [{name: sketch_on_host(value) for name, value in seen if value.size}]
        finally:
            model.make_train_function(force=True)

    def _recorded_step(self, layers: bool, state: State, data: Any) -> tuple[dict[str, Any], State]:
        # keras/src/backend/jax/trainer.py, JAXTrainer.train_step
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

        if type(model).train_step is trainer_class().train_step:
            gradients, activations = jax.grad(loss_of, has_aux=True)(trainable)
        else:
            gradients = []
            # A custom train_step may use the layers in any way and leave `call` undefined.
            with _recorded(model) as activations, suppress(Exception):
                model.stateless_call(trainable, non_trainable, x, training=True)
        seen = activations if layers else {}
        for variable, gradient in zip(model.trainable_variables, gradients, strict=False):
            count = sum(name.endswith(f"/{variable.path}") for name in seen)
            seen[f"{GRADIENT}/{count:03d}/{variable.path}"] = jnp.reshape(gradient, (1, -1))
        return seen, state


def _casts(program: Any) -> Iterator[str]:
    """Yield the short float types that equations of a program give for values of float64."""
    for equation in program.eqns:
        for part in programs_of(equation):
            yield from _casts(part)
        if any(_type(value) == "float64" for value in equation.invars):
            found = {_type(value) for value in equation.outvars}
            yield from found.intersection(SHORT_FLOATS)


def _type(value: Any) -> str:
    return str(getattr(value.aval, "dtype", ""))


@contextmanager
def _recorded(model: Any) -> Iterator[dict[str, Any]]:
    """Record the outputs of a model's layers in this context, in the order of the calls."""
    seen: dict[str, Any] = {}

    def record(layer: Any, arguments: Any, outputs: Any) -> None:
        for output in keras.tree.flatten(outputs):
            if isinstance(output, jax.Array):
                # JAX sorts the keys of a dict: the number keeps the order.
                seen[f"{OUTPUT}/{len(seen):05d}/{numbers[id(layer)]}/{layer.path}"] = output

    # What is computed again in the backward pass cannot leave it.
    numbers = {id(layer): number for number, layer in enumerate(watched_layers(model))}
    layers = [layer for layer in watched_layers(model) if not is_rematerialized(layer)]
    with calls_watched(layers, record):
        yield seen
