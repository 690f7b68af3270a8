"""Keras's TensorFlow steps on several replicas.

Each replica runs the layers on its shard, and the outputs are all-gathered. Every
replica computes the loss and the metrics of the global batch, by the same code as on
one device. The gradients of the weights are all-reduced, and the optimizer of Keras
applies them to the copies of each replica. So this engine needs no code for single
losses, metrics, clipping or accumulation.
"""

import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from lockstep.engines.replicas.first_step import PARTED, UNTRIED, known_of_alone
from lockstep.engines.replicas.layer_plan import advice_for
from lockstep.engines.rowwise import Reasons, refused
from lockstep.engines.tensorflow.exchange.mirrored_variables import MirroredVariables, outdated
from lockstep.engines.tensorflow.exchange.replica_consistency import (
    ReplicasDiffer,
    looks_up_weights,
)
from lockstep.engines.tensorflow.exchange.replicas import ReplicaGroup, RowShards, TracedReplica
from lockstep.engines.tensorflow.exchange.tensor_metadata import known_rows
from lockstep.engines.tensorflow.steps.custom_steps import CustomStep
from lockstep.engines.tensorflow.steps.layers import ReplicaPlan
from lockstep.engines.tensorflow.steps.loss_sharding import LossSharding
from lockstep.engines.tensorflow.steps.scratch_graph import ScratchGraph
from lockstep.engines.tensorflow.steps.split_checks import unsplit_reason, why_custom
from lockstep.errors import UnsplitBatchWarning, UnsupportedModel
from lockstep.keras_compat import added_losses, layers_in, loss_of, loss_tracker, takes_training
from lockstep.training.build import is_ready_for_custom_step


class Steps:
    """The steps of one model on the devices of one strategy.

    Attributes:
        choices: `LossSharding.choices` of the step that was traced last.
        distrusted: Why parts of the model run on the global batch although they were proven, by
            their number in `ReplicaPlan.parts`: they gave other numbers in a first step.
        distrusted_layers: The same for layers in steps of the user's own, by their number in
            `layers_in`.
        losses_by_rows: Whether a loss or metric that works row by row takes its own rows.
        watching: Makes a context that records what the layers give, while a step is traced.
        unknown: See `FirstSteps`.
    """

    def __init__(self, model: Any, strategy: Any, copies: MirroredVariables) -> None:
        self._model = model
        self._strategy = strategy
        self._copies = copies
        self.choices: dict[str, str | None] = {}
        self.distrusted: dict[int, str] = {}
        self.distrusted_layers: dict[int, str] = {}
        self.losses_by_rows = True
        self.watching: Callable[[], AbstractContextManager[None]] = nullcontext
        self._began: dict[str, bool] = {}
        self._said: set[str] = set()
        self.unknown = ""
        self._not_alike: dict[str, str] = {}
        self._handles: list[weakref.ref[Any]] = []

    def start(self) -> None:
        """Begin to run the layers on their devices."""

    def stop(self) -> None:
        """Undo `start`."""

    def adopt(self) -> None:
        """Decide where variables are that were created since the last call."""

    def home(self, variable: Any) -> str | None:
        """Return the one device of a variable, `None` if every device has a copy."""
        return None

    def check_mode(self) -> None:
        """Raise if these steps cannot run as the model is compiled."""

    def building(self) -> AbstractContextManager[None]:
        """Make optimizer slots on their devices inside the context."""
        return nullcontext()

    def run_alone(self, step: str, reason: str) -> None:
        """Run this step on the first device alone from now on; `reason` goes into a warning."""
        self._not_alike[f"{step}_step"] = reason

    def run_alone_as_replicas_differ(self, step: str, found: str) -> None:
        """Run this step alone, as the replicas would not do the same; `found` says where."""
        # keras/src/utils/traceback_utils.py, inject_argument_info_in_traceback, wraps an
        # error message from a layer's call in bold, once for each enclosing layer.
        found = found.split("\x1b[1m")[-1].split("\x1b[0m")[0]
        self.run_alone(step, f"{PARTED}: {found}")

    def try_again(self, step: str) -> None:
        """Undo `run_alone_as_replicas_differ`: the model may be compiled differently by now."""
        self._not_alike.pop(f"{step}_step", None)

    def makes_variables(self, step: str) -> bool:
        """Return whether the first device runs the next step of the user's own alone.

        That is so once: such a step may never build a loss of `compile` that it does not use.
        """
        is_ready = is_ready_for_custom_step(self._model, step)
        return self._began.get(f"{step}_step", not is_ready)

    def made_variables(self, step: str) -> bool:
        """Return whether the first device ran the last step, and the next one is traced."""
        return self._began.get(f"{step}_step", False)

    def is_to_be_traced_again(self, step: str) -> bool:
        """Return whether the first device ran this step to make variables; once."""
        again = self._began.get(f"{step}_step", False)
        if again:
            self._began[f"{step}_step"] = False
        return again

    def plan(self) -> ReplicaPlan:
        """Return a plan with the parts of the model in their order."""
        return ReplicaPlan(self._model)

    def on_first_device(self, step: str, data: Any) -> Any:
        """Run Keras's own step on the first device, and return its logs or predictions."""
        return self._whole(getattr(self._model, f"{step}_step"), data)

    def is_split(self, step: str) -> bool:
        """Return whether several devices run this step, as far as is known."""
        return self._strategy.num_replicas_in_sync > 1 and f"{step}_step" not in self._not_alike

    def train(self, data: Any) -> Any:
        """Train on a global batch and return the logs."""
        return self._step("train_step", data, self._train)

    def test(self, data: Any) -> Any:
        """Evaluate a global batch and return the logs."""
        return self._step("test_step", data, self._test)

    def predict(self, data: Any) -> Any:
        """Return the predictions for a global batch."""
        return self._step("predict_step", data, self._predict)

    def _step(self, name: str, data: Any, split: Any) -> Any:
        model = self._model
        whole = getattr(model, name)
        if self._strategy.num_replicas_in_sync == 1:
            return self._whole(whole, data)
        if isinstance(whole, tf.types.experimental.PolymorphicFunction):
            # Its programs keep the variables of before, such as slots that are mirrored by now.
            whole = tf.function(whole.python_function)
        reason = self._not_alike.get(name) or why_custom(model, name)
        if reason is None:
            plan, reasons = self._plan(data, training=name == "train_step")
            reason = unsplit_reason(model, plan, reasons, data)
        ready = is_ready_for_custom_step(model, name.removesuffix("_step"))
        if reason is not None and not (name in self._not_alike or model.run_eagerly):
            if name == "predict_step":
                makes_variables = False
            else:  # the first batch makes them, and TensorFlow traces it twice
                makes_variables = self._began.setdefault(name, not ready)
            if makes_variables:
                return self._whole(whole, data)
            if ready or name != "predict_step":
                return self._run_custom_step(name, whole, data)
        if reason is not None:
            self._warn(f"{model.name!r} {reason}, so only the first device runs every batch")
            return self._whole(whole, data)
        team = ReplicaGroup(self._strategy, self._copies, layers_in(model))
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        values = LossSharding(model, team, x, y)
        by_rows = values.in_force() if self.losses_by_rows else nullcontext()
        with plan.in_force(team, known_rows(x)), by_rows, self.watching():
            outputs = split(team, values, data)
        self.choices = values.choices
        self._check_strangers()
        if plan.whole:
            self._warn_of_whole({part.name: reasons[id(part)] for part in plan.whole})
        return outputs

    def _run_custom_step(self, name: str, step: Any, data: Any) -> Any:
        """Run a step of the user's own, or of a model that looks across the batch."""
        model = self._model
        team = ReplicaGroup(self._strategy, self._copies, layers_in(model))
        own = CustomStep(
            model,
            team,
            f"its {name}",
            distrusted=self.distrusted_layers,
            watching=self.watching,
        )
        outputs = own.run(step, data)
        self._check_strangers()
        if own.whole:
            self._warn_of_whole(own.whole)
        return outputs

    def _plan(self, data: Any, *, training: bool) -> tuple[ReplicaPlan, Reasons]:
        """Return the plan of the step being traced, and why some layers are not split."""
        parts = ReplicaPlan(self._model).candidates
        reasons: Reasons = {}
        if parts:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
            self._copies.put_on(0)
            try:
                with tf.init_scope():
                    reasons = refused(
                        self._model, parts, x, training=training, scratch=ScratchGraph
                    )
            finally:
                self._copies.take_off()
        proven = [number for number, part in enumerate(parts) if id(part) not in reasons]
        plan = ReplicaPlan(self._model, proven, distrusted=self.distrusted)
        found = {id(plan.parts[number]): reason for number, reason in self.distrusted.items()}
        return plan, found | reasons

    def _whole(self, step: Any, data: Any) -> Any:
        """Run Keras's own step on the first device, then copy its variables to the others."""
        self._copies.put_on(0)
        try:
            with self.watching():
                outputs = step(data)
        finally:
            self._copies.take_off()
        self._check_outdated()
        self._copies.spread()
        return outputs

    # ------------------------------------------------------------------- split steps

    def _train(self, team: ReplicaGroup, values: LossSharding, data: Any) -> Any:
        # keras/src/backend/tensorflow/trainer.py, TensorFlowTrainer.train_step
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        shards, rows_of = _split(x, team.size)

        def step(replica: TracedReplica) -> Any:
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

    def _test(self, team: ReplicaGroup, values: LossSharding, data: Any) -> Any:
        # keras/src/backend/tensorflow/trainer.py, TensorFlowTrainer.test_step
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        shards, rows_of = _split(x, team.size)

        def step(replica: TracedReplica) -> Any:
            y_pred = self._outputs(replica, values, rows_of[replica.index], training=False)
            self._loss(replica, x, y, y_pred, sample_weight, training=False)
            with replica.globally("one of its metrics", y_pred, last=True):
                return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

        return team.run(step, shards)[0]

    def _predict(self, team: ReplicaGroup, values: LossSharding, data: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        shards, rows_of = _split(x, team.size)

        def step(replica: TracedReplica) -> Any:
            outputs = self._forward(rows_of[replica.index], training=False)
            return keras.tree.map_structure(
                lambda value: replica.true_rows(value, self._output_name()), outputs
            )

        parts = team.run(step, shards)
        return keras.tree.map_structure(lambda *shards: tf.concat(shards, axis=0), *parts)

    def _forward(self, x: Any, *, training: bool) -> Any:
        if takes_training(self._model):
            return self._model(x, training=training)
        return self._model(x)

    def _outputs(
        self, replica: TracedReplica, values: LossSharding, x: Any, *, training: bool
    ) -> Any:
        """Return the model's outputs for the global batch, with their masks."""
        what = self._output_name()
        outputs = self._forward(x, training=training)
        return keras.tree.map_structure(lambda own: values.gather(replica, own, what), outputs)

    def _loss(
        self,
        replica: TracedReplica,
        x: Any,
        y: Any,
        y_pred: Any,
        sample_weight: Any,
        *,
        training: bool,
    ) -> Any:
        model = self._model
        losses = [loss for layer in layers_in(model) for loss in added_losses(layer)]
        given = (y_pred, losses, replica.shards.rows)
        with replica.globally("its loss", given, shares=True) as part:
            loss = loss_of(model, x, y, y_pred, sample_weight, training=training)
            loss_tracker(model).update_state(loss, sample_weight=replica.shards.rows)
        if training and looks_up_weights(part.done):  # each replica would add its own entries
            raise ReplicasDiffer("its loss looks up rows of a weight")
        return loss

    def _output_name(self) -> str:
        return f"the output of {self._model.name!r}"

    # ------------------------------------------------------------------------ checks

    def uses_outdated(self) -> bool:
        """Return whether a program of this model uses a variable that was replaced since; once."""
        alive = [ref for ref in self._handles if ref() is not None]
        found = bool(outdated(ref() for ref in alive))
        self._handles = [] if found else alive
        return found

    def _check_outdated(self) -> None:
        if tf.executing_eagerly():
            return
        captures = tf.compat.v1.get_default_graph().captures
        handles = [outside for outside, _ in captures if outside.dtype == tf.resource]
        self._handles += map(weakref.ref, handles)
        if found := outdated(handles):
            raise UnsupportedModel(
                f"A tf.function that {self._model.name!r} calls has captured {len(found)} "
                f"variables, such as {found[0]!r}, before they were copied to every device.\n"
                "Remove tf.function, or build the optimizer before the call:\n"
                "model.optimizer.build(model.trainable_variables)."
            )

    def _check_strangers(self) -> None:
        self._check_outdated()
        if tf.executing_eagerly():
            return
        if changed := self._copies.strangers(tf.compat.v1.get_default_graph()):
            names = ", ".join(changed)
            raise ReplicasDiffer(f"it changes variables that belong to none of its layers: {names}")

    def _warn_of_whole(self, layers: dict[str, str]) -> None:
        names = ", ".join(f"{name!r} ({reason})" for name, reason in layers.items())
        what = f"every device runs {names} of {self._model.name!r} on the whole batch"
        self._warn(what, advice_for(layers.values()))

    def _warn(self, what: str, remedy: str = "") -> None:
        if what in self._said:
            return
        self._said.add(what)
        # A trace makes a constant of what it draws, and building the model has drawn before it.
        remedy += "Set KERAS_BACKEND=jax to have it split."
        untold = UNTRIED in what or bool(self.unknown)
        known = remedy if untold else known_of_alone(what, remedy)
        warnings.warn(
            f"On TensorFlow {what}.\n{known}",
            UnsplitBatchWarning,
            stacklevel=2,
        )


def _split(x: Any, replicas: int) -> tuple[RowShards, list[Any]]:
    """Return the shards of these inputs, and the inputs of each replica."""
    # The split runs on the host, so that a device receives only its shard.
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
            # The placeholder hides the number of rows from the tracer. Then only tensors of
            # rows have an unknown first dim.
            hidden = tf.compat.v1.placeholder_with_default(tf.identity(rows), shape=())
            shards = RowShards(hidden, replicas)

        def of(replica: int) -> Any:
            return keras.tree.map_structure(
                lambda leaf: shards.of(leaf, replica) if _has_rows(leaf) else leaf, x
            )

        return shards, [of(replica) for replica in range(replicas)]


def _tensor(leaf: Any) -> Any:
    return tf.convert_to_tensor(leaf)


def _has_rows(leaf: Any) -> bool:
    return leaf is not None and leaf.shape.rank != 0
