"""Keras's steps on one of several replicas; every process runs these.

Each replica runs the layers on its rows, and the outputs are gathered. Every replica
computes the loss of the global batch by Keras's own code, and sums its gradients with the
others. The optimizer of Keras then does the same on every replica. Metrics are computed on
rank 0 alone.
"""

import warnings
from typing import Any

import keras
import torch

from lockstep.engines.torch.layers import Plan
from lockstep.engines.torch.replica import Replica


def run_step(kind: str, model: Any, plan: Plan, replica: Replica, data: Any) -> Any:
    """Run one step on a global batch.

    Args:
        kind: `"train"`, `"test"` or `"predict"`.
        model: The model, with the same variables on every replica.
        plan: The plan for the model.
        replica: This replica of the batch.
        data: Inputs, targets and sample weights of the whole batch.

    Returns:
        The logs or predictions on rank 0, `None` on the others.
    """
    if kind == "train":
        return _train(model, plan, replica, data)
    with torch.no_grad():
        if kind == "test":
            return _test(model, plan, replica, data)
        outputs = _outputs(model, plan, replica, data[0], training=False)
        return outputs if replica.rank == 0 else None


def _train(model: Any, plan: Plan, replica: Replica, data: Any) -> Any:
    # keras/src/backend/torch/trainer.py, TorchTrainer.train_step
    x, y, sample_weight = data
    y_pred = _outputs(model, plan, replica, x, training=True)
    model.zero_grad()
    with replica.common_draws():
        loss = _loss(model, data, y_pred, training=True)
    weights = model.trainable_weights
    if weights:
        share = loss if model.optimizer is None else model.optimizer.scale_loss(loss)
        (share / replica.size).backward()
        parameters = [weight.value for weight in weights]
        replica.sum_gradients(parameters)
        with torch.no_grad():
            model.optimizer.apply([parameter.grad for parameter in parameters], weights)
    if replica.rank:
        return None
    if not weights:
        warnings.warn("The model does not have any trainable weights.", stacklevel=2)
    model._loss_tracker.update_state(loss, sample_weight=replica.rows)
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _test(model: Any, plan: Plan, replica: Replica, data: Any) -> Any:
    # keras/src/backend/torch/trainer.py, TorchTrainer.test_step
    x, y, sample_weight = data
    y_pred = _outputs(model, plan, replica, x, training=False)
    if replica.rank:
        return None
    loss = _loss(model, data, y_pred, training=False)
    model._loss_tracker.update_state(loss, sample_weight=replica.rows)
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _outputs(model: Any, plan: Plan, replica: Replica, x: Any, *, training: bool) -> Any:
    """Return the model's outputs for the global batch, with their masks."""
    own = keras.tree.map_structure(
        # A copy, because a layer may write into its input, and others read these rows too.
        lambda leaf: replica.take(leaf).clone() if leaf is not None and leaf.ndim else leaf,
        x,
    )
    with plan.in_force(replica):
        options = {"training": training} if model._call_has_training_arg else {}
        outputs = model(own, **options)
    name = f"An output of {model.name!r}"
    return keras.tree.map_structure(
        lambda output: replica.gather(output, name, for_loss=True), outputs
    )


def _loss(model: Any, data: Any, y_pred: Any, *, training: bool) -> Any:
    x, y, sample_weight = data
    # keras/src/trainers/trainer.py, Trainer._compute_loss
    return model._compute_loss(
        x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training
    )
