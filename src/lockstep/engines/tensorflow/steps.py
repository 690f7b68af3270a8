"""Keras's TensorFlow steps over several replicas.

Replicas run the layers on their rows. What the layers give is gathered, and the loss
and the metrics are computed of the global batch, alike on every replica, by the very
code that computes them on one device. The gradients of the weights are summed, and
every replica applies them to its own copies by the optimizer's own code. So there is
no form of loss, metric, clipping or accumulation of which this engine knows.
"""

import warnings
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from lockstep.engines.tensorflow.alike import NotAlike, looks_up_weights
from lockstep.engines.tensorflow.layers import Plan
from lockstep.engines.tensorflow.proof.proof import Reasons, unproven
from lockstep.engines.tensorflow.replicas import Replica, Shards, Team
from lockstep.engines.tensorflow.unsplit import own_step, unsplit_reason
from lockstep.engines.tensorflow.values import Values
from lockstep.engines.tensorflow.variables import Copies
from lockstep.errors import UnsplitBatchWarning, UnsupportedModel


class Steps:
    """The steps of one model over the devices of one strategy.

    Attributes:
        draws_together: Whether every device draws the random numbers of the whole batch,
            as one device does, instead of some of its own.
        choices: How the losses and metrics of the step that was traced last come by their
            values; see `Values`.
    """

    def __init__(self, model: Any, strategy: Any, copies: Copies) -> None:
        self._model = model
        self._strategy = strategy
        self._copies = copies
        self.draws_together = False
        self.choices: dict[str, str | None] = {}
        self._said: set[str] = set()
        self._not_alike: dict[str, str] = {}

    def give_up(self, step: str, reason: str) -> None:
        """Let the first device run this step alone from now on, for a reason in words."""
        # keras/src/utils/traceback_utils.py, inject_argument_info_in_traceback, wraps the
        # words of an error inside of a layer's call in bold, once for each layer around.
        reason = reason.split("\x1b[1m")[-1].split("\x1b[0m")[0]
        self._not_alike[f"{step}_step"] = f"is not the same on every device: {reason}"

    def try_again(self, step: str) -> None:
        """Forget that a step was given up: what is compiled may be another by now."""
        self._not_alike.pop(f"{step}_step", None)

    def train(self, data: Any) -> Any:
        """One training step on a global batch; the logs."""
        return self._step("train_step", data, self._train)

    def test(self, data: Any) -> Any:
        """One evaluating step on a global batch; the logs."""
        return self._step("test_step", data, self._test)

    def predict(self, data: Any) -> Any:
        """The predictions for a global batch."""
        return self._step("predict_step", data, self._predict)

    def look(self, data: Any, watch: Any, alone: Any) -> Any:
        """What `watch` saw in a training step that trains nothing, and the gradients.

        Args:
            data: A batch.
            watch: A context that is told how to make whole what it sees, and gives it.
            alone: What to do instead where the first device runs every batch alone.
        """
        return self._step("train_step", data, partial(self._look, watch=watch), alone)

    def _step(self, name: str, data: Any, split: Any, whole: Any = None) -> Any:
        model = self._model
        whole = whole or getattr(model, name)
        if self._strategy.num_replicas_in_sync == 1:
            return self._whole(whole, data)
        reason = self._not_alike.get(name) or own_step(model, name)
        if reason is None:
            plan, reasons = self._plan(data, training=name == "train_step")
            reason = unsplit_reason(model, plan, reasons, data)
        if reason is not None:
            self._say(f"{model.name!r} {reason}, so the first device runs every batch alone")
            return self._whole(whole, data)
        team = Team(self._strategy, self._copies, model._flatten_layers())
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        values = Values(model, team, x, y)
        with plan.in_force(team), values.in_force():
            outputs = split(team, values, data)
        self.choices = values.choices
        self._check_strangers()
        if plan.whole:
            names = ", ".join(f"{p.name!r} ({reasons.get(id(p), _DRAWS)})" for p in plan.whole)
            self._say(f"every device runs {names} of {model.name!r} on the whole batch")
        return outputs

    def _plan(self, data: Any, *, training: bool) -> tuple[Plan, Reasons]:
        """How each layer runs, and why some are not split, for the step that is being traced."""
        parts = Plan(self._model).whole
        reasons: Reasons = {}
        if parts:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
            self._copies.put_on(0)
            try:
                with tf.init_scope():
                    reasons = unproven(self._model, parts, x, training=training)
            finally:
                self._copies.take_off()
        proven = [part for part in parts if id(part) not in reasons]
        return Plan(self._model, proven, draws_together=self.draws_together), reasons

    def _whole(self, step: Any, data: Any) -> Any:
        """Keras's own step on one device; the others then copy what it left."""
        self._copies.put_on(0)
        try:
            outputs = step(data)
        finally:
            self._copies.take_off()
        self._copies.spread()
        return outputs

    # ------------------------------------------------------------------- split steps

    def _train(self, team: Team, values: Values, data: Any) -> Any:
        # keras/src/backend/tensorflow/trainer.py, TensorFlowTrainer.train_step
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        shards, rows_of = _split(x, team.size)

        def step(replica: Replica) -> Any:
            with tf.GradientTape() as tape:
                y_pred = self._outputs(replica, values, rows_of[replica.index], training=True)
                loss = self._loss(replica, x, y, y_pred, sample_weight, training=True)
                share = loss
                if model.optimizer is not None:
                    share = model.optimizer.scale_loss(loss)
                share = share / team.size
            weights = model.trainable_weights
            if weights:
                gradients = replica.sum_gradients(tape.gradient(share, weights))
                with replica.globally("its optimizer", gradients, last=True):
                    model.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            else:
                warnings.warn("The model does not have any trainable weights.", stacklevel=2)
            with replica.globally("one of its metrics", y_pred, last=True):
                return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

        return team.run(step, shards)[0]

    def _test(self, team: Team, values: Values, data: Any) -> Any:
        # keras/src/backend/tensorflow/trainer.py, TensorFlowTrainer.test_step
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        shards, rows_of = _split(x, team.size)

        def step(replica: Replica) -> Any:
            y_pred = self._outputs(replica, values, rows_of[replica.index], training=False)
            self._loss(replica, x, y, y_pred, sample_weight, training=False)
            with replica.globally("one of its metrics", y_pred, last=True):
                return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

        return team.run(step, shards)[0]

    def _predict(self, team: Team, values: Values, data: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        shards, rows_of = _split(x, team.size)

        def step(replica: Replica) -> Any:
            outputs = self._forward(rows_of[replica.index], training=False)
            return keras.tree.map_structure(
                lambda value: replica.true_rows(value, self._told_output()), outputs
            )

        parts = team.run(step, shards)
        return keras.tree.map_structure(lambda *shards: tf.concat(shards, axis=0), *parts)

    def _look(self, team: Team, values: Values, data: Any, *, watch: Any) -> Any:
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        shards, rows_of = _split(x, team.size)

        def whole(output: Any) -> Any:
            replica = team.current()
            if replica is None or output.shape.rank == 0 or output.shape[0] is not None:
                return output
            return tf.concat(replica.exchange(replica.true_rows(output, "a layer's output")), 0)

        with watch(whole) as seen:

            def step(replica: Replica) -> Any:
                with tf.GradientTape() as tape:
                    y_pred = self._outputs(replica, values, rows_of[replica.index], training=True)
                    loss = self._loss(replica, x, y, y_pred, sample_weight, training=True)
                    share = loss / team.size
                gradients = tape.gradient(share, model.trainable_weights)
                return seen(), replica.sum_gradients(gradients)

            return team.run(step, shards)[0]

    def _forward(self, x: Any, *, training: bool) -> Any:
        if self._model._call_has_training_arg:
            return self._model(x, training=training)
        return self._model(x)

    def _outputs(self, replica: Replica, values: Values, x: Any, *, training: bool) -> Any:
        """The model's outputs for the global batch, with their masks."""
        told = self._told_output()
        outputs = self._forward(x, training=training)
        return keras.tree.map_structure(lambda own: values.gather(replica, own, told), outputs)

    def _loss(
        self, replica: Replica, x: Any, y: Any, y_pred: Any, sample_weight: Any, *, training: bool
    ) -> Any:
        model = self._model
        losses = [loss for layer in model._flatten_layers() for loss in layer._losses]
        with replica.globally("its loss", (y_pred, losses, replica.shards.rows)) as part:
            # keras/src/trainers/trainer.py, Trainer._compute_loss
            loss = model._compute_loss(
                x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training
            )
            model._loss_tracker.update_state(loss, sample_weight=replica.shards.rows)
        if training and looks_up_weights(part.done):  # of which every replica would have a share
            raise NotAlike("its loss looks up rows of a weight")
        return loss

    def _told_output(self) -> str:
        return f"what {self._model.name!r} gives"

    # ------------------------------------------------------------------------ checks

    def _check_strangers(self) -> None:
        graph = tf.compat.v1.get_default_graph()
        strangers = [] if tf.executing_eagerly() else self._copies.strangers(graph)
        if strangers:
            raise UnsupportedModel(
                f"The step of {self._model.name!r} uses variables that no layer of it has, and "
                f"that every device would change for itself: {', '.join(strangers)}.\n"
                "Make them by add_weight in a layer, or as a keras.Variable that is its attribute."
            )

    def _say(self, what: str) -> None:
        if what in self._said:
            return
        self._said.add(what)
        warnings.warn(
            f"On TensorFlow {what}.\nThe result is exact. Set KERAS_BACKEND=jax to have it split.",
            UnsplitBatchWarning,
            stacklevel=2,
        )


_DRAWS = "its random numbers"


def _split(x: Any, replicas: int) -> tuple[Shards, list[Any]]:
    """Who has which rows of these inputs, and the inputs of each replica."""
    # On the host, where the batch is: only its rows go to a device.
    with tf.device("CPU:0"):
        x = keras.tree.map_structure(lambda leaf: leaf if leaf is None else _tensor(leaf), x)
        leaves = [leaf for leaf in keras.tree.flatten(x) if _has_rows(leaf)]
        rows = tf.shape(leaves[0])[0]
        same = [
            tf.debugging.assert_equal(
                tf.shape(leaf)[0],
                rows,
                "lockstep: the inputs of one batch have different numbers of rows.",
            )
            for leaf in leaves[1:]
        ]
        with tf.control_dependencies([check for check in same if check is not None]):
            # What hides the number from the tracer: a tensor of rows then has an unknown
            # first dim, and is so told from any other.
            hidden = tf.compat.v1.placeholder_with_default(tf.identity(rows), shape=())
            shards = Shards(hidden, replicas)

        def of(replica: int) -> Any:
            return keras.tree.map_structure(
                lambda leaf: shards.of(leaf, replica) if _has_rows(leaf) else leaf, x
            )

        return shards, [of(replica) for replica in range(replicas)]


def _tensor(leaf: Any) -> Any:
    return tf.convert_to_tensor(leaf)


def _has_rows(leaf: Any) -> bool:
    return leaf is not None and leaf.shape.rank != 0
