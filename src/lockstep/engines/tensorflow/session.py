"""One model on TensorFlow devices: its variables, its step functions, and what the loop needs.

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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from lockstep.attach.holders import check_shared, holders_of
from lockstep.checkpoint.data_position import recorded_type
from lockstep.core.devices import names_in_words
from lockstep.core.engine import (
    PREDICT,
    TRAIN,
    Execute,
    Guard,
    Home,
    Kind,
    Methods,
    Session,
    Snapshot,
)
from lockstep.core.layout import Branches, Layout
from lockstep.core.patched import patched
from lockstep.core.state import named_variables, optimizers_of
from lockstep.core.status import STATUS_OF_PROCESS
from lockstep.engines.replicas.first_step import (
    Computed,
    FirstSteps,
    check_declared_losses,
    compare,
    distrusted_part,
    form_of,
    is_checked,
    is_guessed,
    states_of,
)
from lockstep.engines.replicas.object_states import ObjectStates
from lockstep.engines.replicas.outdated_programs import trace_others_again
from lockstep.engines.replicas.sketches import GRADIENT, LOG, Mismatch, Sketches
from lockstep.engines.tensorflow.branches.branch_steps import BranchSteps
from lockstep.engines.tensorflow.branches.placed_variables import PlacedVariables
from lockstep.engines.tensorflow.exchange.mirrored_variables import (
    MirroredVariables,
    devices_of,
    is_left_by_a_model,
    is_mirrored,
    make_plain,
    mirrored_variables,
)
from lockstep.engines.tensorflow.exchange.replica_consistency import (
    ReplicasDiffer,
    assertions_in_words,
)
from lockstep.engines.tensorflow.first_step.first_step import (
    RecordedSteps,
    again,
    rows_in,
    signature_of,
)
from lockstep.engines.tensorflow.steps.split_checks import why_custom
from lockstep.engines.tensorflow.steps.steps import Steps
from lockstep.engines.tensorflow.tensorflow_compat import eager_variable_scope
from lockstep.errors import LayoutConflict, UnsupportedModel, UnusableData
from lockstep.keras_compat import (
    STRATEGY,
    XLA,
    TFDatasetAdapter,
    function_of_iterator,
    layers_in,
    stored_value,
    takes_batch_before_trace,
    taking_optionals,
)
from lockstep.training.build import build
from lockstep.training.call_guard import LOOPS
from lockstep.training.input import HostIterator, drawn, iterator_of_keras


class TensorFlowSession(Session):
    """One model on TensorFlow devices; see `Session`.

    Without a checkpoint, the batches are those of Keras's own iterator: `tf.data` draws the order
    of the rows, as on one device. `tf.data` does not tell its position. Under a checkpoint NumPy
    draws the order, as on other backends, and batches come from the host.

    Attributes:
        steps: The steps of the model on these devices.
    """

    def __init__(self, model: Any, layout: Layout) -> None:
        super().__init__(model, layout)
        self._copies: MirroredVariables | PlacedVariables
        self.steps: Steps
        if isinstance(layout, Branches):
            self.steps = BranchSteps(model, layout)
            self._copies = PlacedVariables(self.steps.home, self)
        else:
            strategy = strategy_of(self.devices)
            self._copies = MirroredVariables(strategy, self)
            self.steps = Steps(model, strategy, self._copies)
        self._first_steps = FirstSteps(model)
        self._before_trace = ObjectStates(())
        self._alone = len(self.devices) == 1
        self._check()

    # ------------------------------------------------------------ on and off the devices

    @eager_variable_scope()
    def _check(self) -> None:
        """Raise if the model cannot be on these devices."""
        self.steps.adopt()
        if tf.distribute.has_strategy() or getattr(self.model, STRATEGY) is not None:
            raise LayoutConflict(
                f"{self.model.name!r} was made in the scope of a tf.distribute strategy, but "
                "lockstep lays out the variables itself.\n"
                "Build and distribute the model outside of any strategy.scope()."
            )
        self._check_layouts(mirrored_variables(self.model))

    def open(self) -> None:
        """Lay out the variables."""
        self._take_in()
        self.steps.start()

    def close(self) -> None:
        """Undo `open`, even if it failed halfway."""
        self.steps.stop()
        self._copies.let_go()

    def home(self, variable: Any) -> Home:
        """Return the devices that have a variable of the model."""
        home = self.steps.home(variable)
        return Home(self.devices if home is None else (home,))

    def uses_outdated(self) -> bool:
        """Return whether a step was traced with a variable that has moved since."""
        return self.steps.uses_outdated()

    def remarks(self) -> str:
        """Return the end of the line that `fit` prints."""
        return "" if self._alone or not self.model.jit_compile else ", without XLA"

    def step_function(self, kind: Kind, force: bool) -> Callable[[Any], Any]:
        """Return the step function of the model, or a new one that builds all before its trace."""
        known: Callable[[Any], Any] | None = getattr(self.model, kind.function)
        if known is not None and not force:
            return known
        # keras/src/backend/tensorflow/trainer.py, TensorFlowTrainer.make_train_function and the
        # like
        if kind is PREDICT:
            return self._predicting()
        return self._ready(kind.name, self.steps.train if kind is TRAIN else self.steps.test)

    def _predicting(self) -> Callable[[Iterable[Any]], Any]:
        self.steps.check_mode()
        self.steps.try_again("predict")
        self._first_steps.forget("predict")
        step = self._predict_function()
        ready = False

        @eager_variable_scope()
        def predict(drawn: Iterable[Any]) -> Any:
            nonlocal ready, step
            batches = list(drawn)
            if not ready:
                self._prepare("predict", batches[0])
                ready = True
            self._compare_first_step("predict", self.steps.predict, None, batches, batches[0])
            try:
                with assertions_in_words():
                    outputs = [step(batch) for batch in batches]
            except ReplicasDiffer as found:
                self.steps.run_alone_as_replicas_differ("predict", str(found))
                step = self._predict_function()
                outputs = [step(batch) for batch in batches]
            if len(outputs) == 1:
                return outputs[0]
            return keras.tree.map_structure(lambda *parts: tf.concat(parts, axis=0), *outputs)

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

        @eager_variable_scope()
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
                    outputs = function(iterator if batches is None else iter(batches))
            except ReplicasDiffer as found:  # raised by the trace, before anything runs
                self._before_trace.put_back()  # what the code has counted while it was traced
                self.steps.run_alone_as_replicas_differ(name, str(found))
                function = self._function(name, step)
                outputs = function(iterator if batches is None else iter(batches))
            STATUS_OF_PROCESS.stepped()
            return outputs

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
        if not may_split or (is_custom and steps.makes_variables(name)):
            return iterator, batches  # one device runs it
        guessed = partial(is_guessed, self.model, name)
        if not self._first_steps.is_due(
            name, form_of(spec), lambda: guessed(steps.plan().candidates)
        ):
            if name in self._first_steps.alone:
                steps.run_alone(name, self._first_steps.alone[name])
            return iterator, batches
        steps.unknown = self._first_steps.unknown
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

        def alone(some: Any) -> Computed:
            return self._recorded(partial(steps.on_first_device, name), some, spec, 1, is_custom)

        def together(some: Any, count: int) -> Computed:
            with assertions_in_words():
                return self._recorded(step, some, spec, len(self.devices), is_custom)

        def distrust(found: Mismatch) -> str | None:
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
            steps.run_alone(name, self._first_steps.alone[name])
        return iterator, batches

    def recorded(self, batch: Any) -> list[Sketches]:
        """Return the sketches of each replica of a training step without an update."""
        is_custom = why_custom(self.model, "train_step") is not None
        self._take_in()  # what was built since
        try:
            size = len(self.devices)
            return self._recorded(self.steps.train, batch, batch, size, is_custom)[0]
        except ReplicasDiffer as found:
            self.steps.run_alone_as_replicas_differ("train", str(found))
            return self._recorded(self.steps.train, batch, batch, 1, is_custom)[0]

    def _recorded(
        self, step: Callable[[Any], Any], some: Any, spec: Any, size: int, is_custom: bool
    ) -> Computed:
        recorded = RecordedSteps(self.model, is_custom=is_custom)
        self.steps.watching = recorded.watching
        try:
            return recorded.run(step, some, signature_of(some, spec), size), recorded.dtypes
        finally:
            self.steps.watching = nullcontext

    def _prepare(self, name: str, batch: Any) -> None:
        if why_custom(self.model, f"{name}_step") is None:
            self._build(name, batch)
        else:
            self._take_in()

    @eager_variable_scope()
    def _build(self, name: str, batch: Any) -> None:
        """Build what a step needs, and lay out its variables."""
        with self.steps.building():
            build(self.model, name, batch)
        self._take_in()

    def _take_in(self) -> None:
        """Lay out the variables that were created since the last call."""
        self.steps.adopt()
        variables = mirrored_variables(self.model)
        self._check_layouts(variables)
        self._copies.take_in(variables)

    def _check_layouts(self, variables: list[Any]) -> None:
        made = [each for each in variables if stored_value(each) is not None]
        for variable in made:
            check_shared(self, variable)
        left = [v for v in made if is_left_by_a_model(v)]
        for variable in left:
            make_plain(variable)
        trace_others_again(self.model, left)
        for variable in made:
            self._check_layout(variable)

    def _check_layout(self, variable: Any) -> None:
        if is_mirrored(stored_value(variable)) and not holders_of(variable):
            raise LayoutConflict(
                f"Variable {variable.path!r} of {self.model.name!r} is laid out by another tool "
                f"on {names_in_words(devices_of(variable))}, but lockstep must lay it out.\n"
                "Build the model outside of any strategy.scope(), and load the saved file."
            )

    def methods(self, methods: Methods, guarded: Guard) -> Methods:
        """Return the methods of all engines, which refuse data that `tf.distribute` has split."""
        return methods | {name: self._on_whole_batches(name, methods[name]) for name in LOOPS}

    def _on_whole_batches(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def method_on_whole_batches(*args: Any, **kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                if isinstance(value, _SPLIT):
                    raise _is_split(self.model, name, value)
            return method(*args, **kwargs)

        return method_on_whole_batches

    # ------------------------------------------------------------ in a loop

    def first_work(self, kind: Kind, steps: int) -> str | None:
        """Return what the next step waits for: after one that made variables, another trace."""
        if steps and not self.steps.made_variables(kind.name):
            return None
        if len(self.devices) == 1 or self.model.run_eagerly or not is_checked():
            return super().first_work(kind, 0)
        return (
            "reading its batch, comparing the step with one device (LOCKSTEP_CHECK=0 skips "
            "this) and compiling it"
        )

    def batches(self, kind: Kind, *, recorded: bool = False, **data: Any) -> Any:
        """Return Keras's iterator over a `tf.data.Dataset`, or a recorded one over host batches."""
        if recorded:
            return recorded_type(kind, RecordableIterator)(**data)
        return iterator_of_keras()(distribute_strategy=tf.distribute.get_strategy(), **data)

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

    @contextmanager
    def epoch(self, kind: Kind, batches: Any, callbacks: Any) -> Iterator[Execute]:
        """Run the steps of one epoch; variables hold their values between two steps."""
        yield partial(self._execute, kind, isinstance(batches, HostIterator))

    def _execute(self, kind: Kind, on_host: bool, iterator: Iterator[Any], times: int) -> Any:
        return kind.function_of(self.model)(drawn(iterator, times) if on_host else iterator)

    def snapshot(self, logs: dict[str, Any], *, writes: bool) -> Snapshot | None:
        """Read every variable and the logs of the last step.

        A tensor that was read from a variable keeps its value: later steps write elsewhere.
        """
        named = {name: v.value for name, v in named_variables(self.model).items()}
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


_SPLIT = (tf.distribute.DistributedDataset, tf.distribute.DistributedIterator)


def _is_split(model: Any, name: str, data: Any) -> UnusableData:
    """Return the error for data whose batches a strategy has split."""
    return UnusableData(
        f"{name} of {model.name!r} was given a {type(data).__name__} of tf.distribute, whose "
        "batches are already split.\nPass the original tf.data.Dataset, batched to the global "
        "batch size:\nlockstep splits the rows across the devices."
    )


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


def _check_state(model: Any) -> None:
    """Raise if a step may change what a checkpoint does not save."""
    others = []
    for layer in layers_in(model):
        names = [name for name, _ in optimizers_of(layer) if name != "optimizer"]
        names += [name for name, value in vars(layer).items() if isinstance(value, tf.Variable)]
        others += [f"{name} of {layer.name!r}" for name in names]
    if others:
        raise UnsupportedModel(
            f"A step may change {', '.join(others)}, but lockstep.Checkpoint saves only the "
            "variables\nof layers and the optimizer of compile. Create variables with "
            "add_weight. With several optimizers,\nuse keras.callbacks.BackupAndRestore."
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
