"""The TensorFlow engine: mirrored variables, and replicas that run each step together.

Between steps a Keras variable holds a mirrored variable of `tf.distribute`, so an
assignment reaches every device. While a step is traced, each replica sees its own
copies as plain variables, and no strategy is active. An assignment to a mirrored
variable synchronizes all replicas, and TensorFlow forbids this inside a condition.
Optimizers assign inside conditions (accumulated gradients, scaled losses, averages).
Gradients are summed before the optimizer runs, so all replicas update their copies
identically. The update itself needs no further communication.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from lockstep.devices import Device, names_in_words
from lockstep.engines import attachments
from lockstep.engines.atomic_save import atomic_saves
from lockstep.engines.base_engine import BaseEngine
from lockstep.engines.call_guard import CallGuard
from lockstep.engines.holders import check_shared, holders_of
from lockstep.engines.loop_methods import stepping_methods
from lockstep.engines.patched import patched
from lockstep.engines.replicas.first_step import (
    GRADIENT,
    LOG,
    Computed,
    Difference,
    FirstSteps,
    check_declared_losses,
    compare,
    distrusted_part,
    form_of,
    states_of,
)
from lockstep.engines.replicas.object_states import ObjectStates
from lockstep.engines.tensorflow import devices as tensorflow_devices
from lockstep.engines.tensorflow.branch_steps import BranchSteps
from lockstep.engines.tensorflow.first_step import RecordedSteps, again, rows_in, signature_of
from lockstep.engines.tensorflow.mirrored_variables import (
    MirroredVariables,
    devices_of,
    is_mirrored,
    mirrored_variables,
)
from lockstep.engines.tensorflow.placed_variables import PlacedVariables
from lockstep.engines.tensorflow.probe import TensorFlowProbe
from lockstep.engines.tensorflow.replica_consistency import (
    ReplicasDiffer,
    assertions_in_words,
)
from lockstep.engines.tensorflow.session import TensorFlowSession
from lockstep.engines.tensorflow.split_checks import why_custom
from lockstep.engines.tensorflow.steps import Steps
from lockstep.errors import LayoutConflict, UnsupportedBackend
from lockstep.fit_lines import Given, branches_line, fit_line
from lockstep.keras_compat import (
    STRATEGY,
    XLA,
    function_of_iterator,
    layers_in,
    stored_value,
    takes_batch_before_trace,
    taking_optionals,
)
from lockstep.launch.environment import Place
from lockstep.layout import Layout, both_layouts
from lockstep.training.build import build, is_ready_for_custom_step
from lockstep.training.loop import Loop
from lockstep.training.overrides import check_makers


class TensorFlowEngine(BaseEngine):
    """Runs Keras models on TensorFlow devices; see `Engine` for the contract."""

    name = "tensorflow"

    def devices(self) -> tuple[Device, ...]:
        """Return the devices of TensorFlow, accelerators first."""
        return tensorflow_devices.list_devices()

    def rehearse(self, devices: int) -> None:
        """Make `devices` virtual CPU devices and hide accelerators."""
        tensorflow_devices.make_virtual(devices)

    def join(self, place: Place) -> tuple[int, int]:
        """Return the place of a single process; this engine runs in one."""
        if place.size > 1:
            raise UnsupportedBackend(
                f"This is {place}, and on 'tensorflow' lockstep trains in one process so far.\n"
                "Set KERAS_BACKEND=jax, or LOCKSTEP_PROCESSES=1 for trainings that are apart."
            )
        return place.rank, place.size

    def attach(self, model: Any, devices: tuple[str, ...]) -> None:
        """Make `model` run on `devices`, in place; on failure leave it unchanged."""
        if self.layout(model) is not None:
            raise both_layouts(model, "distribute")
        if self.attached(model) != devices:
            with attachments.alone(model, "distribute"):
                attachments.attach(Attachment(model, devices), Attachment.again)

    def place(self, model: Any, layout: Layout) -> None:
        """Make the layers of `model` run on their devices. After a failure it is unchanged."""
        if self.attached(model) is not None and self.layout(model) is None:
            raise both_layouts(model, "place")
        with attachments.alone(model, "place"):
            attachments.attach(Attachment(model, layout.devices, layout), Attachment.again)

    def exchanged(self, values: Any, source: str, target: str) -> tuple[Any, Any]:
        """Copy integers from one device to another, and sum what both hold."""
        return tensorflow_devices.exchanged(values, source, target)

    def probe(self, model: Any) -> TensorFlowProbe:
        """Return a probe for the steps of `model`, attached or not."""
        return TensorFlowProbe(model)


class Attachment:
    """One model on several devices.

    The attachment and the methods it replaces are entries in the model's `__dict__`.
    Besides these entries, only the values that the variables hold change.

    Attributes:
        model: The model.
        devices: The names of its devices.
        steps: The steps of the model on these devices.
        session: The model on the devices, as the loop uses it.
        loop: The loop that replaces those of Keras.
    """

    def __init__(self, model: Any, devices: tuple[str, ...], layout: Layout | None = None) -> None:
        self.model = model
        self.devices = devices
        self._copies: MirroredVariables | PlacedVariables
        self.steps: Steps
        if layout is None:
            strategy = strategy_of(devices)
            self._copies = MirroredVariables(strategy, self)
            self.steps = Steps(model, strategy, self._copies)
        else:
            self.steps = BranchSteps(model, layout)
            self._copies = PlacedVariables(self.steps.home, self)
        self.session = TensorFlowSession(model, devices, self._build)
        self.loop = Loop(self.session)
        self._first_steps = FirstSteps(model)
        self._before_trace = ObjectStates(())
        self._alone = len(devices) == 1
        self._hooks: dict[str, Any] = {}
        self._instead_of: dict[str, Any] = {}
        self.turns = CallGuard(model, lambda: attachments.attachment_of(model) is self)

    @property
    def layout(self) -> Layout | None:
        """The devices of the layers, `None` if every device runs all layers."""
        return self.steps.layout

    def again(self) -> "Attachment":
        """Return an attachment like this one."""
        return Attachment(self.model, self.devices, self.layout)

    def home(self, variable: Any) -> tuple[str, ...]:
        """Return the devices that have a variable of the model."""
        home = self.steps.home(variable)
        return self.devices if home is None else (home,)

    def check(self) -> None:
        """Raise if this model cannot be attached to these devices."""
        check_makers(self.model)
        self.steps.adopt()
        if tf.distribute.has_strategy() or getattr(self.model, STRATEGY) is not None:
            raise LayoutConflict(
                f"{self.model.name!r} was made in the scope of a tf.distribute strategy, and "
                "lockstep lays out the variables itself.\n"
                "Build it outside of any strategy.scope(), and distribute it there."
            )
        for variable in mirrored_variables(self.model):
            self._check_layout(variable)

    def take_over(self) -> None:
        """Lay out the variables and replace the step functions."""
        self._take_in()
        self.steps.start()
        attachments.mark(self.model, self)
        self._hooks = {
            "make_train_function": self._make_train_function,
            "make_test_function": self._make_test_function,
            "make_predict_function": self._make_predict_function,
            **self._stepping(),
            **atomic_saves(self.model),
        }
        self._instead_of = attachments.put_on(self.model, self._hooks)
        attachments.remake_functions(self.model)

    def give_back(self) -> None:
        """Undo `take_over`, even if it failed half way."""
        attachments.unmark(self.model)
        attachments.take_off(self.model, self._hooks, self._instead_of)
        self.steps.stop()
        self._copies.let_go()
        attachments.remake_functions(self.model)

    # ------------------------------------------------------------- replaced methods

    def _make_train_function(self, force: bool = False) -> Any:
        # keras/src/backend/tensorflow/trainer.py, TensorFlowTrainer.make_train_function
        model = self.model
        if model.train_function is None or force:
            model.train_function = self._ready("train", self.steps.train)
        return model.train_function

    def _make_test_function(self, force: bool = False) -> Any:
        # keras/src/backend/tensorflow/trainer.py, TensorFlowTrainer.make_test_function
        model = self.model
        if model.test_function is None or force:
            model.test_function = self._ready("test", self.steps.test)
        return model.test_function

    def _make_predict_function(self, force: bool = False) -> Any:
        # keras/src/backend/tensorflow/trainer.py, TensorFlowTrainer.make_predict_function
        model = self.model
        if model.predict_function is not None and not force:
            return model.predict_function
        self.steps.check_mode()
        self.steps.try_again("predict")
        self._first_steps.forget("predict")
        step = self._predict_function()
        ready = False

        def predict(batches: list[Any]) -> Any:
            nonlocal ready, step
            if not ready:
                self._prepare("predict", batches[0])
                ready = True
            self._compare_first_step("predict", self.steps.predict, None, batches, batches[0])
            try:
                with assertions_in_words():
                    outputs = [step(batch) for batch in batches]
            except ReplicasDiffer as found:
                self.steps.give_up("predict", str(found))
                step = self._predict_function()
                outputs = [step(batch) for batch in batches]
            if len(outputs) == 1:
                return outputs[0]
            return keras.tree.map_structure(lambda *parts: tf.concat(parts, axis=0), *outputs)

        model.predict_function = predict
        return predict

    def _predict_function(self) -> Callable[[Any], Any]:
        step = tf.autograph.experimental.do_not_convert(self.steps.predict)
        if not self.model.run_eagerly:
            xla = self._alone and self.model.jit_compile
            step = tf.function(step, reduce_retracing=True, jit_compile=xla or None)
        return taking_optionals(self.model, step)

    def _function(self, name: str, step: Callable[[Any], Any]) -> Callable[[Iterator[Any]], Any]:
        # XLA compiles for one device only.
        with nullcontext() if self._alone else patched([(self.model, XLA, False)]):
            return function_of_iterator(self.model, step)

    def _ready(self, name: str, step: Callable[[Any], Any]) -> Callable[[Iterator[Any]], Any]:
        """Return a step function that builds everything before its first trace."""
        self.steps.check_mode()
        self.steps.try_again(name)
        self._first_steps.forget(name)
        function = self._function(name, step)
        version: int | None = None

        def run(iterator: Any) -> Any:
            nonlocal function, version
            batches, spec = None, getattr(iterator, "element_spec", None)
            if not isinstance(iterator, tf.data.Iterator):
                batches = list(itertools.islice(iterator, self.model.steps_per_execution))
                if not batches:
                    raise StopIteration
                spec = batches[0]
            elif takes_batch_before_trace(self.model):  # a second trace needs the batch again
                batches = [_next_batch(iterator)]
            if version is None:
                self._prepare(name, spec)
            elif why_custom(self.model, f"{name}_step") and (
                version != self._copies.version or self.steps.is_to_be_traced_again(name)
            ):
                self._take_in()  # the step may have created variables
                function = self._function(name, step)
            version = self._copies.version
            iterator, batches = self._compare_first_step(name, step, iterator, batches, spec)
            try:
                with assertions_in_words():
                    return function(iterator if batches is None else iter(batches))
            except ReplicasDiffer as found:  # raised by the trace, before anything runs
                self._before_trace.put_back()  # what the code has counted while it was traced
                self.steps.give_up(name, str(found))
                function = self._function(name, step)
                return function(iterator if batches is None else iter(batches))

        return run

    def _compare_first_step(
        self, name: str, step: Callable[[Any], Any], iterator: Any, batches: Any, spec: Any
    ) -> tuple[Any, Any]:
        """Compare a step of a new form with that of one device, before any update.

        Returns:
            The iterator and the batches to run, which are those given.
        """
        model, steps = self.model, self.steps
        is_custom = why_custom(model, f"{name}_step") is not None
        may_split = steps.is_split(name) and not model.run_eagerly
        if not may_split or (is_custom and not is_ready_for_custom_step(model, name)):
            return iterator, batches  # one device runs it
        if not self._first_steps.is_due(name, form_of(spec), steps.plan().candidates):
            return iterator, batches
        self._before_trace = states_of(model)
        if batches is None:
            drawn = list(itertools.islice(iterator, model.steps_per_execution))
            if not drawn:
                return iterator, batches
            iterator = again(drawn, spec)
        else:
            drawn = batches
        batch = drawn[0]
        rows = rows_in(batch)
        if rows is None:
            return iterator, batches

        def recorded(step: Callable[[Any], Any], some: Any, size: int) -> Computed:
            recorded = RecordedSteps(model, is_custom=is_custom)
            steps.watching = recorded.watching
            try:
                seen = recorded.run(step, some, signature_of(some, spec), size)
            finally:
                steps.watching = nullcontext
            return seen, recorded.dtypes

        def alone(some: Any) -> Computed:
            return recorded(partial(steps.on_first_device, name), some, 1)

        def together(some: Any, count: int) -> Computed:
            with assertions_in_words():
                return recorded(step, some, len(self.devices))

        def distrust(found: Difference) -> str | None:
            if is_custom:
                layers = layers_in(model)
                return distrusted_part(
                    found, model, layers, steps.distrusted_layers, is_custom=True
                )
            part = distrusted_part(
                found, model, steps.plan().parts, steps.distrusted, is_custom=False
            )
            if part is None and found.kind in (LOG, GRADIENT) and steps.losses_by_rows:
                check_declared_losses(found, model)
                steps.losses_by_rows = False
                return "its losses"
            return part

        try:
            self._first_steps.settle(
                name,
                lambda: compare(model, batch, rows, len(self.devices), alone, together),
                distrust,
            )
        except ReplicasDiffer:
            return iterator, batches  # the step finds it too
        if name in self._first_steps.alone:
            steps.give_up(name, self._first_steps.alone[name])
        return iterator, batches

    def _stepping(self) -> dict[str, Any]:
        """Return the methods that run steps, guarded: a trace swaps the values of variables."""
        return stepping_methods(self.loop, self.turns, self._fit_line, ("fit", "evaluate"))

    def _fit_line(self, given: Given, compiles: bool) -> str:
        if self.layout is None:
            line = fit_line("tensorflow", self.devices, given, compiles)
        else:
            line = branches_line("tensorflow", self.layout, given, compiles)
        return line + ("" if self._alone or not self.model.jit_compile else ", without XLA")

    # ------------------------------------------------------------------------ inside

    def _prepare(self, name: str, batch: Any) -> None:
        if why_custom(self.model, f"{name}_step") is None:
            self._build(name, batch)
        else:
            self._take_in()

    def _build(self, name: str, batch: Any) -> None:
        """Build what a step needs, and lay out its variables."""
        with self.steps.building():
            build(self.model, name, batch)
        self._take_in()

    def _take_in(self) -> None:
        """Lay out the variables that were created since the last call."""
        self.steps.adopt()
        variables = mirrored_variables(self.model)
        for variable in variables:
            self._check_layout(variable)
        self._copies.take_in(variables)

    def _check_layout(self, variable: Any) -> None:
        if stored_value(variable) is None:
            return
        check_shared(self, variable)
        if is_mirrored(stored_value(variable)) and not holders_of(variable):
            raise LayoutConflict(
                f"Variable {variable.path!r} of {self.model.name!r} is laid out by another tool on "
                f"{names_in_words(devices_of(variable))}, and lockstep wants to lay it out.\n"
                "Build the model outside of any strategy.scope(), and load its file."
            )


@functools.cache
def strategy_of(devices: tuple[str, ...]) -> Any:
    """Return TensorFlow's strategy for these devices.

    Several GPUs sum gradients by NCCL. Virtual CPU devices reduce on the first device,
    because collectives between them need more threads than there are.
    """
    if devices[0].startswith("gpu") and len(devices) > 1:
        across = tf.distribute.NcclAllReduce()
    else:
        across = tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy(list(devices), cross_device_ops=across)


def _next_batch(iterator: Any) -> Any:
    batch = iterator.get_next_as_optional()
    if not batch.has_value():
        raise StopIteration
    return batch.get_value()
