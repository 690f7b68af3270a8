"""Keras's steps on one of several replicas; every process runs these.

Each replica runs the layers on its rows. Every replica computes the loss of the global batch by
Keras's own code, from the values of all rows or, where that is needed, from all outputs. It sums
its gradients with the others, and Keras's optimizer and metrics do the same on every replica.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import torch

from lockstep.core.held_signals import HeldSignals
from lockstep.engines.torch.exchange.placement import copies_on
from lockstep.engines.torch.sharded.sharded_updates import update
from lockstep.engines.torch.sharded.sharded_variables import STEP, is_sharded
from lockstep.engines.torch.steps.layers import ReplicaPlan, copied_states
from lockstep.engines.torch.steps.loss_sharding import LossSharding, Outputs
from lockstep.engines.torch.steps.micro_batches import call_in_parts
from lockstep.engines.torch.steps.replica import Replica
from lockstep.engines.torch.steps.rows import gathered, leave
from lockstep.keras_compat import stored_value, takes_training


def run_step(
    kind: str, model: Any, plan: ReplicaPlan, losses: LossSharding, replica: Replica, data: Any
) -> Any:
    """Run one step on a global batch.

    Args:
        kind: `"train"`, `"test"` or `"predict"`.
        model: The model, with the same variables on every replica.
        plan: The plan for the model.
        losses: How its losses and metrics are computed.
        replica: This replica of the batch.
        data: Inputs, targets and sample weights of the whole batch.

    Returns:
        The logs or predictions, the same on every replica.
    """
    if kind == "train":
        return _train(model, plan, losses, replica, data)
    with torch.no_grad():
        if kind == "test":
            return _test(model, plan, losses, replica, data)
        with replica.shards.read_by(STEP):
            own = _forward(model, plan, replica, data[0], training=False)
        name = _name(model)
        return keras.tree.map_structure(lambda each: gathered(leave(each, replica, name)), own)


def _train(model: Any, plan: ReplicaPlan, losses: LossSharding, replica: Replica, data: Any) -> Any:
    # keras/src/backend/torch/trainer.py, TorchTrainer.train_step
    weights = model.trainable_weights
    with replica.shards.read_by(STEP):
        outputs = _outputs(model, plan, replica, data, training=True)
        loss = _global_loss(model, losses, outputs, data)
        mean = replica.start_mean(loss) if outputs.has_share else None
        if weights:
            share = loss if model.optimizer is None else model.optimizer.scale_loss(loss)
            gradients = _backward(weights, replica, share)
            with torch.no_grad():
                replica.check()
                _update(model, replica, gradients, weights)
        loss = loss if mean is None else mean()
    if not weights:
        warnings.warn("The model does not have any trainable weights.", stacklevel=2)
    return losses.metrics(outputs, data, loss)


def _update(model: Any, replica: Replica, gradients: list[Any], weights: list[Any]) -> None:
    """Let the optimizer change the weights; signals wait for the end of it."""

    def run() -> None:
        replica.has_updated = True
        with replica.drawing_as_one():
            update(replica.shards, model.optimizer, gradients, weights)

    if replica.shards.variables:  # signals wait for the end of the step already
        run()
    else:
        with HeldSignals():
            run()


def _global_loss(model: Any, losses: LossSharding, outputs: Outputs, data: Any) -> Any:
    """Return the loss of the global batch, or what has this loss as its mean over the replicas."""
    model.zero_grad()
    for variable in outputs.replica.shards.variables:
        stored_value(variable).grad = None
    with outputs.replica.streams.common():
        return losses.loss(outputs, data, training=True)


def _backward(weights: list[Any], replica: Replica, loss: Any) -> list[Any]:
    """Return the gradients of the global loss; those of sharded weights are parts."""
    parameters = [stored_value(weight) for weight in weights if not is_sharded(weight)]
    with replica.summed_gradients(parameters):
        (loss / replica.size).backward()
    return [stored_value(weight).grad for weight in weights]


@contextmanager
def watching(layers: list[Any], record: Callable[[Any, Any, Any], None]) -> Iterator[None]:
    """Call `record` with each of these layers, its arguments and its outputs, in this context."""
    hooks = [layer.register_forward_hook(record) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _test(model: Any, plan: ReplicaPlan, losses: LossSharding, replica: Replica, data: Any) -> Any:
    # keras/src/backend/torch/trainer.py, TorchTrainer.test_step
    with replica.shards.read_by(STEP):
        outputs = _outputs(model, plan, replica, data, training=False)
        with replica.streams.common():
            loss = losses.loss(outputs, data, training=False)
    return losses.metrics(outputs, data, loss)


def _outputs(
    model: Any, plan: ReplicaPlan, replica: Replica, data: Any, *, training: bool
) -> Outputs:
    own = _forward(model, plan, replica, data[0], training=training)
    return Outputs(replica, own, _name(model), plan.micro_batch_size)


def _forward(model: Any, plan: ReplicaPlan, replica: Replica, x: Any, *, training: bool) -> Any:
    """Return the model's outputs for the rows of this replica, with their masks."""
    options = {"training": training} if takes_training(model) else {}
    outputs = None
    if plan.micro_batch_size is not None:
        outputs = call_in_parts(model, plan, replica, x, options)
    if outputs is None:
        outputs = _call_at_once(model, plan, replica, x, options)
    plan.called(model, outputs)
    return outputs


def _call_at_once(model: Any, plan: ReplicaPlan, replica: Replica, x: Any, options: Any) -> Any:
    own = keras.tree.map_structure(
        # A copy, because a layer may write into its input, and others read these rows too.
        lambda leaf: copies_on(replica.device, replica.take(leaf) if _has_rows(leaf) else leaf),
        x,
    )
    with plan.in_force(replica), copied_states(model):
        return model(own, **options)


def _name(model: Any) -> str:
    return f"An output of {model.name!r}"


def _has_rows(leaf: Any) -> bool:
    return leaf is not None and bool(leaf.ndim)
