"""The attachment of one model to one mesh: its variables and its replaced methods."""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import keras
from jax.sharding import Sharding

from lockstep.engines import attachments
from lockstep.engines.atomic_save import atomic_saves
from lockstep.engines.call_guard import STEPPING, CallGuard
from lockstep.engines.holders import check_shared, holders_of
from lockstep.engines.jax import devices as jax_devices
from lockstep.engines.jax import states as jax_states
from lockstep.engines.jax.checks import (
    check_instance,
    check_layout,
    check_mode,
    check_no_distribution,
    is_foreign,
    no_program,
)
from lockstep.engines.jax.fit.on_batch import OnBatch
from lockstep.engines.jax.jax_group import GROUP
from lockstep.engines.jax.session import JaxSession
from lockstep.engines.jax.steps.live_state import State, take_out, with_values_back
from lockstep.engines.jax.steps.step import StepFunction
from lockstep.engines.jax.steps.steps import Steps
from lockstep.engines.jax.variable_sync import (
    GROUPS,
    sync_to_variables,
    to_default_device,
    unshare_arrays,
    write_state,
)
from lockstep.engines.loop_methods import announced_fit, loop_methods
from lockstep.fit_lines import branches_line, fit_line
from lockstep.keras_compat import (
    JAX_STATE,
    JAX_STATE_SYNCED,
    TAKE_JAX_STATE,
    forget_loss_ids,
    in_stateless_scope,
    layers_in,
    layout_of,
    state_sync_name,
)
from lockstep.layout import Layout
from lockstep.processes import constants, process_group
from lockstep.processes.first_process_io import methods_of_all_processes
from lockstep.processes.variable_drift import VariableDrift
from lockstep.state import rnn_states, variables_of
from lockstep.training.input import check_times
from lockstep.training.loop import Loop
from lockstep.training.overrides import check_makers, is_keras


class Attachment:
    """Hold one model on one mesh.

    The attachment is stored in the model's `__dict__`, beside the instance methods that it
    replaces. Nothing else of the model changes. Keras saves and tracks lists, dicts and its own
    objects, so it ignores a plain object and functions.

    Attributes:
        model: The model.
        devices: The names of the devices.
        session: The model on the devices, as the loop uses it.
        loop: The loop that replaces those of Keras.
        turns: The guard of the calls of the model.
    """

    def __init__(
        self,
        model: Any,
        devices: tuple[str, ...],
        steps: Steps | None = None,
    ) -> None:
        self.model = model
        self.devices = devices
        self._several = process_group.several()
        self._assigned = VariableDrift(model, self._held) if self._several else None
        self._steps = steps or Steps(jax_devices.find(devices))
        self._split: frozenset[int] = frozenset()
        self._hooks: dict[str, Callable[..., Any]] = {}
        self._instead_of: dict[str, Any] = {}
        self.session = JaxSession(model, devices)
        self.loop = Loop(self.session)
        self.turns = CallGuard(model, lambda: attachments.attachment_of(model) is self)

    def _new_hooks(self) -> dict[str, Callable[..., Any]]:
        model = self.model
        hooks: dict[str, Callable[..., Any]] = {
            "make_train_function": self._make_train_function,
            "make_test_function": self._make_test_function,
            "make_predict_function": self._make_predict_function,
            "reset_states": self._reset_states,
            **self._loops(),
            **atomic_saves(model),
            "call": self._calling(model.call),
            TAKE_JAX_STATE: functools.partial(take_out, model),
            "stateless_call": _keeping_losses(model.stateless_call, model),
        }
        if is_keras(model, state_sync_name()):
            hooks[state_sync_name()] = functools.partial(write_state, model)
        if hasattr(model, "get_state_tree"):  # a layer with Keras's Trainer has none
            hooks["get_state_tree"] = _on_one_device_for_orbax(model.get_state_tree)
        if self._assigned is None:
            return hooks
        sync_name = state_sync_name()
        sync = hooks.get(sync_name, getattr(model, sync_name))
        hooks[sync_name] = _synced_here(model, sync, self._assigned)
        hooks[TAKE_JAX_STATE] = _noting(hooks[TAKE_JAX_STATE], self._assigned)
        return methods_of_all_processes(model, hooks, self._assigned)

    @property
    def layout(self) -> Layout | None:
        """The devices of the layers, `None` if every device runs all layers."""
        return self._steps.layout

    def again(self) -> "Attachment":
        """Return an attachment like this one."""
        return Attachment(self.model, self.devices, self._steps)

    # ------------------------------------------------------------ on and off the mesh

    def check(self) -> None:
        """Raise if this model cannot be attached to these devices."""
        check_mode()
        check_no_distribution()
        check_makers(self.model)
        self._steps.adopt()
        before = attachments.attachment_of(self.model)
        check_instance(self.model, {} if before is None else before._hooks)
        for variable in variables_of(self.model):
            if layout_of(variable) is not None or not holders_of(variable):
                check_layout(self.model, variable)
            check_shared(self, variable)

    def take_over(self) -> None:
        """Move the variables to the mesh, and replace the step functions."""
        self._place_variables()
        self._steps.start()
        attachments.mark(self.model, self)
        self._hooks = self._new_hooks()
        self._instead_of = attachments.put_on(self.model, self._hooks)
        self._remake_functions()

    def give_back(self) -> None:
        """Undo `take_over`, including a `take_over` that failed halfway."""
        sync_to_variables(self.model)
        self._steps.stop()
        attachments.unmark(self.model)
        attachments.take_off(self.model, self._hooks, self._instead_of)
        variables = variables_of(self.model)
        for variable in variables:
            holders_of(variable).discard(self)
        if not any(holders_of(state) for state in rnn_states(self.model)):
            jax_states.drop_states(self.model)
        to_default_device([variable for variable in variables if not holders_of(variable)])
        self._remake_functions()

    def _place_variables(self) -> None:
        self._adopt(first=True)
        if self._several:  # outside a step, each process has them whole
            return
        for variable in variables_of(self.model):  # one by one, so that each old array is freed
            variable.assign(self._steps.moved(variable.value, self._steps.home(variable)))

    def _remake_functions(self) -> None:
        model = self.model
        for name in ("train", "test", "predict"):
            function = getattr(model, f"{name}_function", None)
            if function is not None and not is_foreign(function):
                getattr(model, f"make_{name}_function")(force=True)

    def home(self, variable: Any) -> Sharding:
        """Return the layout of a variable of the model."""
        return self._steps.home(variable)

    # ------------------------------------------------------------- replaced methods

    def _make_train_function(self, force: bool = False) -> None:
        # keras/src/backend/jax/trainer.py, JAXTrainer.make_train_function
        model = self.model
        self._adopt(first=model.train_function is None)
        if model.train_function is None or force:
            model.train_function = self._step_function(model.train_step, trains=True)

    def _make_test_function(self, force: bool = False) -> None:
        # keras/src/backend/jax/trainer.py, JAXTrainer.make_test_function
        model = self.model
        self._adopt(first=model.test_function is None)
        if model.test_function is None or force:
            model.test_function = self._step_function(model.test_step)

    def _make_predict_function(self, force: bool = False) -> None:
        # keras/src/backend/jax/trainer.py, JAXTrainer.make_predict_function
        model = self.model
        self._adopt(first=model.predict_function is None)
        if model.predict_function is None or force:

            def predict_step(state: State, data: Any) -> tuple[Any, State]:
                outputs, non_trainable_variables = model.predict_step(state, data)
                return outputs, (state[0], non_trainable_variables)

            model.predict_function = self._step_function(predict_step, per_row_outputs=True)

    def _loops(self) -> dict[str, Callable[..., Any]]:
        """Return the methods that run steps: lockstep's loops, or the overrides of the class."""
        methods = {**loop_methods(self.loop), **OnBatch(self.model).methods()}
        for name in STEPPING:
            if name not in methods:
                methods[name] = self._with_values_back(getattr(self.model, name))
        methods["fit"] = announced_fit(methods["fit"], self.loop, self._fit_line)
        return {name: self.turns.guarded(name, method) for name, method in methods.items()}

    def _with_values_back(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method so that variables have values after an interrupt in a Keras loop."""
        model = self.model

        @functools.wraps(method)
        def method_with_values_back(*args: Any, **kwargs: Any) -> Any:
            def body() -> Any:
                sync_to_variables(model)  # the state of a loop that calls this method
                vars(model)[JAX_STATE] = None  # an earlier call may have left a state
                return method(*args, **kwargs)

            return with_values_back(model, body, model.jax_state_sync)

        return method_with_values_back

    def _fit_line(self, given: dict[str, Any], compiles: bool) -> str:
        if self.layout is None:
            return fit_line("jax", self.devices, given, compiles)
        return branches_line("jax", self.layout, given, compiles)

    def _calling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def call_on_mesh(*args: Any, **kwargs: Any) -> Any:
            return self._steps.call(call, args, kwargs)

        in_turn = self.turns.guarded("call", call_on_mesh)

        @functools.wraps(call)
        def call_model(*args: Any, **kwargs: Any) -> Any:
            # A step or a stateless call reads no variable.
            return (call_on_mesh if in_stateless_scope() else in_turn)(*args, **kwargs)

        return call_model

    def _step_function(
        self,
        step: Any,
        *,
        per_row_outputs: bool = False,
        trains: bool = False,
    ) -> StepFunction:
        make: Any = functools.partial(
            self._steps.compiled, trains=trains, complete=self._is_complete
        )
        if self.model.run_eagerly or not self.model.jit_compile:
            if self._several:
                raise no_program(self.model)
            make = self._steps.eager
        times = self.model.steps_per_execution
        check_times(times)
        made: StepFunction = make(step, self._splits, times=times, per_row_outputs=per_row_outputs)
        return dataclasses.replace(made, assigned=self._assigned, model=self.model)

    def _is_complete(self) -> bool:
        """Return whether the metrics are built. The first step after `compile` builds them."""
        # keras/src/trainers/trainer.py, Trainer.compile
        parts = (getattr(self.model, f"_compile_{name}", None) for name in ("loss", "metrics"))
        return all(part is None or part.built for part in parts)

    def _adopt(self, first: bool) -> None:
        """Take over variables created since the last call, before a fit, evaluate or predict.

        Args:
            first: Whether no step function exists yet. All processes then compare what they have
                built, including a process that has built nothing.
        """
        check_no_distribution()
        sync_to_variables(self.model)  # a running call may not have been synced
        states = {id(state) for state in jax_states.carry_states(self.model)}
        variables = variables_of(self.model)
        if self._several:
            new = [v for v in variables if self not in holders_of(v)]
            if new or first:
                fixed = constants.constants_of(self.model) if new else []
                process_group.share_variables([*new, *fixed])
        for variable in variables:
            holders_of(variable).add(self)
        unshare_arrays(variables)
        self._steps.adopt()
        others = self.model.non_trainable_variables if states else []
        self._split = frozenset(
            position
            for position, variable in enumerate(others)
            if id(variable) in states and self._steps.divides(variable.shape[0])
        )

    def _held(self) -> list[Any]:
        return [v for v in variables_of(self.model) if self in holders_of(v)]

    def _splits(self) -> frozenset[int]:
        return self._split

    def _reset_states(self) -> None:
        """Set the states of every stateful RNN layer to zero, as in Keras 2."""
        jax_states.reset(self.model, rnn_states(self.model))


def _synced_here(
    model: Any, sync: Callable[[], None], assigned: VariableDrift
) -> Callable[[], None]:
    def jax_state_sync() -> None:
        state = getattr(model, JAX_STATE, None)
        if not state or getattr(model, JAX_STATE_SYNCED):
            return
        groups = {name: state.get(name, None) for name in GROUPS}
        here = {
            name: [GROUP.local(value) for value in group]
            for name, group in groups.items()
            if group is not None
        }
        vars(model)[JAX_STATE] = here
        sync()
        assigned.left([value for group in here.values() for value in group])

    return jax_state_sync


def _noting(get_state: Callable[..., Any], assigned: VariableDrift) -> Callable[..., Any]:
    @functools.wraps(get_state)
    def get_jax_state(*args: Any, **kwargs: Any) -> Any:
        assigned.note()
        return get_state(*args, **kwargs)

    return get_jax_state


def forget_losses(model: Any) -> None:
    """Clear the ids of the losses that the layers of `model` added in earlier traces.

    A layer stores the `id` of each loss that it adds, and drops the losses with those ids before it
    runs. The arrays of an earlier trace no longer exist then. A new loss of another layer may have
    one of their ids, and Keras then drops it, at random. Measured with Keras alone on one device:
    of 63 models with `add_loss` and an activity regularizer, evaluated with five batch sizes each,
    18 gave a wrong loss.
    """
    for layer in layers_in(model):
        forget_loss_ids(layer)


def _keeping_losses(stateless_call: Callable[..., Any], model: Any) -> Callable[..., Any]:
    @functools.wraps(stateless_call)
    def call_without_old_losses(*args: Any, **kwargs: Any) -> Any:
        forget_losses(model)
        return stateless_call(*args, **kwargs)

    return call_without_old_losses


def _on_one_device_for_orbax(get_state_tree: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that `keras.callbacks.OrbaxCheckpoint` gets arrays on one device.

    Every other caller gets the arrays that the variables hold, as in Keras. Orbax writes the
    devices of an array into its file, and the file then loads on these devices only.
    """

    @functools.wraps(get_state_tree)
    def state_tree(*args: Any, **kwargs: Any) -> Any:
        tree = get_state_tree(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__")
        # keras/src/callbacks/orbax_checkpoint.py, _get_state_tree: the one caller of the callback
        if caller != keras.callbacks.OrbaxCheckpoint.__module__:
            return tree
        return keras.tree.map_structure(_first_copy, tree)

    return state_tree


def _first_copy(value: Any) -> Any:
    if not isinstance(value, jax.Array) or len(value.devices()) == 1:
        return value
    return value.addressable_data(0)
