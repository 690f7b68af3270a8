"""The TensorFlow engine: a copy of the variables on every device, and replicas in lockstep.

Between steps a Keras variable holds a mirrored variable of `tf.distribute`, so that
whoever assigns to it reaches every device. While a step is traced each replica sees
its own copies as plain variables, and no strategy: with mirrored ones there, every
assignment would be a meeting of all replicas, which TensorFlow forbids under a
condition, and optimizers assign under conditions (accumulated gradients, scaled
losses, averages). Since the gradients are summed before the optimizer sees them, all
replicas do the same to their copies, and nothing but gradients travels for it.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from lockstep.announce import arguments_of, fit_line, wants_words
from lockstep.devices import Device, names_in_words
from lockstep.engines import attachments
from lockstep.engines.engine import DEFAULT_INPUT, InputOptions
from lockstep.engines.holders import holders_of
from lockstep.engines.tensorflow import devices as tensorflow_devices
from lockstep.engines.tensorflow.alike import NotAlike
from lockstep.engines.tensorflow.build import build
from lockstep.engines.tensorflow.probe import TensorFlowProbe
from lockstep.engines.tensorflow.steps import Steps
from lockstep.engines.tensorflow.unsplit import own_step
from lockstep.engines.tensorflow.variables import (
    Copies,
    devices_of,
    is_mirrored,
    variables_of,
)
from lockstep.errors import LayoutConflict, UnsupportedBackend, UnsupportedModel


class TensorFlowEngine:
    """Runs Keras models on TensorFlow devices; see `Engine` for the contract."""

    name = "tensorflow"

    def devices(self) -> tuple[Device, ...]:
        """The devices TensorFlow has, accelerators first."""
        return tensorflow_devices.list_devices()

    def rehearse(self, devices: int) -> None:
        """Make `devices` virtual CPU devices, and hide accelerators."""
        tensorflow_devices.make_virtual(devices)

    def attach(
        self, model: Any, devices: tuple[str, ...], options: InputOptions = DEFAULT_INPUT
    ) -> None:
        """Make `model` run on `devices`, in place; on failure leave it as it was."""
        if options.data_on_devices:
            raise UnsupportedBackend(
                "data_on_devices=True was asked for on 'tensorflow', and data stay on the devices "
                "on 'jax' so far.\nLeave it out, or set KERAS_BACKEND=jax before Keras is imported."
            )
        if options.prefetch:
            raise UnsupportedBackend(
                f"prefetch={options.prefetch} was asked for on 'tensorflow', and lockstep draws "
                "batches ahead on 'jax' so far.\nLeave it out: a tf.data.Dataset has .prefetch()."
            )
        if self.attached(model) != devices:
            attachments.attach(
                Attachment(model, devices), lambda old: Attachment(model, old.devices)
            )

    def detach(self, model: Any) -> None:
        """Make `model` run on one device again; does nothing where it does already."""
        attachments.detach(model)

    def attached(self, model: Any) -> tuple[str, ...] | None:
        """The devices `model` runs on, `None` where it is not attached."""
        return attachments.attached(model)

    def input_options(self, model: Any) -> InputOptions:
        """What `attach` was told of the data of an attached model: nothing, here."""
        return DEFAULT_INPUT

    def probe(self, model: Any) -> TensorFlowProbe:
        """A way to look inside the steps of `model`, attached or not."""

        def steps() -> Steps | None:
            attachment = attachments.attachment_of(model)
            return None if attachment is None else attachment.steps

        return TensorFlowProbe(model, steps)


class Attachment:
    """One model on several devices.

    It stands in the model's `__dict__`, beside the methods of the instance that it
    replaces there, and nothing else of the model changes but what its variables hold.

    Attributes:
        model: The model.
        devices: The names of its devices.
        steps: Its steps over them.
    """

    def __init__(self, model: Any, devices: tuple[str, ...]) -> None:
        self.model = model
        self.devices = devices
        strategy = strategy_of(devices)
        self._copies = Copies(strategy, self)
        self.steps = Steps(model, strategy, self._copies)
        self._alone = len(devices) == 1
        self._hooks: dict[str, Any] = {}
        self._instead_of: dict[str, Any] = {}

    def check(self) -> None:
        """Raise where this model cannot be attached to these devices."""
        _check_class(self.model)
        if tf.distribute.has_strategy() or self.model._distribute_strategy is not None:
            raise LayoutConflict(
                f"{self.model.name!r} was made in the scope of a tf.distribute strategy, and "
                "lockstep lays out the variables itself.\n"
                "Build it outside of any strategy.scope(), and distribute it there."
            )
        for variable in variables_of(self.model):
            self._check_layout(variable)

    def take_over(self) -> None:
        """Give every device a copy of the variables, and replace the step functions."""
        self._take_in()
        attachments.mark(self.model, self)
        self._hooks = {
            "make_train_function": self._make_train_function,
            "make_test_function": self._make_test_function,
            "make_predict_function": self._make_predict_function,
            "fit": self._fitting(self.model.fit),
        }
        self._instead_of = attachments.put_on(self.model, self._hooks)
        self._remake_functions()

    def give_back(self) -> None:
        """Undo `take_over`, also where it broke off half way."""
        attachments.unmark(self.model)
        attachments.take_off(self.model, self._hooks, self._instead_of)
        self._copies.let_go()
        self._remake_functions()

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
        self.steps.try_again("predict")
        step = self._predict_function()
        ready = False

        def predict(batches: list[Any]) -> Any:
            nonlocal ready, step
            if not ready:
                self._prepare("predict", batches[0])
                ready = True
            try:
                outputs = [step(batch) for batch in batches]
            except NotAlike as found:
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
        function: Callable[[Any], Any] = self.model._autoconvert_optionals(step)
        return function

    def _function(self, step: Callable[[Any], Any]) -> Callable[[Iterator[Any]], Any]:
        # keras/src/backend/tensorflow/trainer.py, TensorFlowTrainer._make_function: the
        # loop over `steps_per_execution` steps is Keras's own.
        with nullcontext() if self._alone else _without_xla(self.model):
            function: Callable[[Iterator[Any]], Any] = self.model._make_function(step)
        return function

    def _ready(self, name: str, step: Callable[[Any], Any]) -> Callable[[Iterator[Any]], Any]:
        """A step function, with everything made before its first trace."""
        self.steps.try_again(name)
        function = self._function(step)
        version: int | None = None

        def run(iterator: Any) -> Any:
            nonlocal function, version
            batches = None
            if not isinstance(iterator, tf.data.Iterator):
                batches = list(itertools.islice(iterator, self.model.steps_per_execution))
            if version is None:
                self._prepare(name, iterator.element_spec if batches is None else batches[0])
            elif version != self._copies.version and own_step(self.model, f"{name}_step"):
                # It may have made variables while it ran, which have copies by now.
                function = self._function(step)
            version = self._copies.version
            try:
                return function(iterator if batches is None else iter(batches))
            except NotAlike as found:  # while it was traced, before anything ran
                self.steps.give_up(name, str(found))
                function = self._function(step)
                return function(iterator if batches is None else iter(batches))

        return run

    def _fitting(self, fit: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fit)
        def announced_fit(*args: Any, **kwargs: Any) -> Any:
            given = arguments_of(fit, args, kwargs)
            if wants_words(given):
                line = fit_line("tensorflow", self.devices, given)
                without = "" if self._alone or not self.model.jit_compile else ", without XLA"
                print(line + without, flush=True)
            return fit(*args, **kwargs)

        return announced_fit

    # ------------------------------------------------------------------------ inside

    def _prepare(self, name: str, batch: Any) -> None:
        if own_step(self.model, f"{name}_step") is None:
            build(self.model, name, batch)
        self._take_in()

    def _take_in(self) -> None:
        """Take in variables that appeared since."""
        variables = variables_of(self.model)
        for variable in variables:
            self._check_layout(variable)
        self._copies.take_in(variables)

    def _remake_functions(self) -> None:
        model = self.model
        for name in ("train", "test", "predict"):
            if getattr(model, f"{name}_function", None) is not None:
                getattr(model, f"make_{name}_function")(force=True)

    def _check_layout(self, variable: Any) -> None:
        if variable._value is None:
            return
        others = [held for held in holders_of(variable) if held.model is not self.model]
        if others and others[0].devices != self.devices:
            raise LayoutConflict(
                f"{self.model.name!r} was asked onto {names_in_words(self.devices)}, and its "
                f"variable {variable.path!r} is shared with {others[0].model.name!r} on "
                f"{names_in_words(others[0].devices)}.\n"
                "A variable has one layout. Distribute both to the same devices, or call\n"
                "lockstep.release on the other one first."
            )
        if is_mirrored(variable._value) and not holders_of(variable):
            raise LayoutConflict(
                f"Variable {variable.path!r} of {self.model.name!r} is laid out by another tool on "
                f"{names_in_words(devices_of(variable))}, and lockstep wants to lay it out.\n"
                "Build the model outside of any strategy.scope(), and load its file."
            )


@functools.cache
def strategy_of(devices: tuple[str, ...]) -> Any:
    """TensorFlow's strategy for these devices.

    Between GPUs NCCL adds up gradients; virtual devices of one CPU hand them to the
    first, because collectives between them wait for threads that there are too few of.
    """
    if devices[0].startswith("gpu") and len(devices) > 1:
        across = tf.distribute.NcclAllReduce()
    else:
        across = tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy(list(devices), cross_device_ops=across)


@contextmanager
def _without_xla(model: Any) -> Iterator[None]:
    """While it lasts, `model` asks for no XLA, which compiles for one device only."""
    before = model._jit_compile
    model._jit_compile = False
    try:
        yield
    finally:
        model._jit_compile = before


def _check_class(model: Any) -> None:
    # keras/src/backend/tensorflow/trainer.py: the methods that make step functions.
    trainer = keras.src.backend.tensorflow.trainer.TensorFlowTrainer
    for name in ("make_train_function", "make_test_function", "make_predict_function"):
        if getattr(type(model), name) is not getattr(trainer, name):
            raise UnsupportedModel(
                f"{type(model).__name__} has its own {name}, and lockstep has to replace that "
                "method to run the step on several devices.\n"
                "Override train_step, test_step or predict_step instead."
            )
