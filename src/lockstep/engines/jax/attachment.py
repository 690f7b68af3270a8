"""One model on one mesh: its variables, and the methods it has there."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import keras

from lockstep.announce import arguments_of, fit_line, wants_words
from lockstep.devices import names_in_words
from lockstep.engines import attachments
from lockstep.engines.engine import InputOptions
from lockstep.engines.holders import holders_of
from lockstep.engines.jax import devices as jax_devices
from lockstep.engines.jax import losses
from lockstep.engines.jax import states as jax_states
from lockstep.engines.jax.checkpoints.around import around_fit
from lockstep.engines.jax.checks import (
    check_class,
    check_instance,
    check_layout,
    check_mode,
    check_no_distribution,
    is_foreign,
    no_program,
)
from lockstep.engines.jax.fit.keep import Keeper, warn_of_own_loop
from lockstep.engines.jax.fit.loop import Loop
from lockstep.engines.jax.fit.on_batch import OnBatch
from lockstep.engines.jax.fit.own import is_keras
from lockstep.engines.jax.outside import (
    bring_home,
    every_variable,
    put_back,
    uncommit,
    unshare_arrays,
)
from lockstep.engines.jax.several import constants, gloo, processes
from lockstep.engines.jax.several.assigned import Assigned
from lockstep.engines.jax.several.together import together
from lockstep.engines.jax.steps.scan import AUTO, check_times
from lockstep.engines.jax.steps.step import State, StepFunction
from lockstep.engines.jax.steps.steps import Steps
from lockstep.engines.one_thread import OneThread
from lockstep.engines.whole_saves import whole_saves
from lockstep.errors import LayoutConflict, UnsupportedModel


class Attachment:
    """One model on one mesh.

    It stands in the model's `__dict__`, beside the methods of the instance that it
    replaces there, and nothing else of the model changes. Keras saves and tracks
    lists, dicts and its own objects; a plain object and functions are neither.

    Attributes:
        model: The model.
        devices: The names of its devices.
        keeper: Decides how the data of `fit` get to them.
    """

    def __init__(
        self, model: Any, devices: tuple[str, ...], options: InputOptions, times: Any
    ) -> None:
        self.model = model
        self._times = times
        self.devices = devices
        found = jax_devices.find(devices)
        self._several = processes.several()
        if self._several and found[0].platform == "cpu":
            gloo.let_computation_first()
        self._assigned = Assigned(model, self._held) if self._several else None
        self._steps = Steps(found)
        self._split: frozenset[int] = frozenset()
        self._hooks: dict[str, Callable[..., Any]] = {}
        self._instead_of: dict[str, Any] = {}
        self.keeper = Keeper(self._steps, options)
        self._loop = Loop(model, devices, self.keeper)
        self._own_loops: list[str] = []

    def _new_hooks(self) -> dict[str, Callable[..., Any]]:
        model = self.model
        hooks = {
            "make_train_function": self._make_train_function,
            "make_test_function": self._make_test_function,
            "make_predict_function": self._make_predict_function,
            "reset_states": self._reset_states,
            **self._loops(),
            **whole_saves(model),
            "call": self._calling(model.call),
            "stateless_call": _keeping_losses(model.stateless_call, model),
        }
        if is_keras(model, "jax_state_sync"):
            hooks["jax_state_sync"] = functools.partial(put_back, model)
        if hasattr(model, "get_state_tree"):  # a layer with Keras's Trainer has none
            hooks["get_state_tree"] = self._on_one_device(model.get_state_tree)
        if hasattr(model, "get_compile_config"):
            hooks["get_compile_config"] = _for_any_keras(model.get_compile_config)
        return hooks if self._assigned is None else together(model, hooks, self._assigned)

    # ------------------------------------------------------------ on and off the mesh

    def check(self) -> None:
        """Raise where this model cannot be attached to these devices."""
        check_mode()
        check_no_distribution()
        check_class(self.model)
        before = attachments.attachment_of(self.model)
        check_instance(self.model, {} if before is None else before._hooks)
        for variable in every_variable(self.model):
            if variable._layout is not None or not holders_of(variable):
                check_layout(self.model, variable)
            self._check_holders(variable)

    def take_over(self) -> None:
        """Move the variables to the mesh, and replace the step functions."""
        if self._times == AUTO:  # which the attachment before has taken away
            self.model.steps_per_execution = AUTO
        self._place_variables()
        attachments.mark(self.model, self)
        self._hooks = self._new_hooks()
        self.say_left_out(self.keeper.options, stacklevel=6)
        self._instead_of = attachments.put_on(self.model, self._hooks)
        self._remake_functions()

    def give_back(self) -> None:
        """Undo `take_over`, also where it broke off half way."""
        bring_home(self.model)
        self.keeper.leave()
        attachments.unmark(self.model)
        attachments.take_off(self.model, self._hooks, self._instead_of)
        variables = every_variable(self.model)
        for variable in variables:
            holders_of(variable).discard(self)
        if not any(holders_of(state) for state in jax_states.states_of(self.model)):
            jax_states.drop_states(self.model)
        if getattr(self.model, "steps_per_execution", None) == AUTO:  # of lockstep's loops alone
            self.model.steps_per_execution = 1
        uncommit([variable for variable in variables if not holders_of(variable)])
        self._remake_functions()

    def _place_variables(self) -> None:
        self._adopt(first=True)
        if self._several:  # outside of a step, each process has them whole
            return
        for variable in every_variable(self.model):  # one by one, so that each old array goes
            variable.assign(self._steps.moved(variable.value, self._steps.replicated))

    def _remake_functions(self) -> None:
        model = self.model
        for name in ("train", "test", "predict"):
            function = getattr(model, f"{name}_function", None)
            if function is not None and not is_foreign(function):
                getattr(model, f"make_{name}_function")(force=True)

    def _check_holders(self, variable: Any) -> None:
        for other in holders_of(variable):
            if other.model is not self.model and other.devices != self.devices:
                raise LayoutConflict(
                    f"{self.model.name!r} was asked onto {names_in_words(self.devices)}, and its "
                    f"variable {variable.path!r} is shared with {other.model.name!r} on "
                    f"{names_in_words(other.devices)}.\n"
                    "A variable has one layout. Distribute both to the same devices, or call\n"
                    "lockstep.release on the other one first."
                )

    # ------------------------------------------------------------- replaced methods

    def _make_train_function(self, force: bool = False) -> None:
        # keras/src/backend/jax/trainer.py, JAXTrainer.make_train_function
        model = self.model
        self._adopt(first=model.train_function is None)
        if model.train_function is None or force:
            gradients = sum(variable.value.nbytes for variable in model.trainable_variables)
            model.train_function = self._step_function(model.train_step, gradient_bytes=gradients)

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
        """`fit`, announced; and where the model has none of its own, what is faster."""
        loop = self._loop
        names = ("fit", "evaluate", "predict")
        loops = {name: getattr(loop, name) for name in names if loop.replaces(name)}
        self._own_loops = [name for name in names if name not in loops]
        loops["fit"] = self._fitting(loops.get("fit", self.model.fit))
        one = OneThread(self.model.name)
        batches = OnBatch(self.model).methods()
        return {
            **{name: one.loop(method) for name, method in loops.items()},
            **{name: one.batch(method) for name, method in batches.items()},
        }

    def say_left_out(self, options: InputOptions, stacklevel: int) -> None:
        """Say what a class's own loops do not do with their data."""
        if self._own_loops:
            own = f"{type(self.model).__name__} has its own {self._own_loops[0]}"
            warn_of_own_loop(options, own, stacklevel + 1)

    def _fitting(self, fit: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fit)
        def announced_fit(*args: Any, **kwargs: Any) -> Any:
            given = arguments_of(fit, args, kwargs)
            if processes.is_first() and wants_words(given):
                compiles = "fit" not in self._own_loops and self._loop.compiles()
                print(fit_line("jax", self.devices, given, compiles), flush=True)
            self._check_times()
            with around_fit(self.model, fit, given.get("callbacks")):
                return fit(*args, **kwargs)

        return announced_fit

    def _check_times(self) -> None:
        """Raise where `steps_per_execution` asks for what the loops of this model cannot do."""
        check_times(self.model.steps_per_execution)
        if self.model.steps_per_execution == AUTO and self._own_loops:
            name = type(self.model).__name__
            raise UnsupportedModel(
                f"compile(steps_per_execution='auto') was asked for, and {name} has its own "
                f"{self._own_loops[0]}, which\nKeras's loop serves: it knows whole numbers only. "
                "Give a number, 10 say."
            )

    def _calling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def call_on_mesh(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = keras.tree.map_structure(self._steps.on_mesh, (args, kwargs))
            return call(*args, **kwargs)

        return call_on_mesh

    def _on_one_device(self, get_state_tree: Callable[..., Any]) -> Callable[..., Any]:
        # keras.callbacks.OrbaxCheckpoint writes down the devices of what it gets here,
        # and its checkpoint would load on no others.
        @functools.wraps(get_state_tree)
        def undistributed_state_tree(*args: Any, **kwargs: Any) -> Any:
            return keras.tree.map_structure(_first_copy, get_state_tree(*args, **kwargs))

        return undistributed_state_tree

    def _step_function(
        self,
        step: Any,
        *,
        per_row_outputs: bool = False,
        gradient_bytes: int | None = None,
    ) -> StepFunction:
        make: Any = functools.partial(
            self._steps.compiled, gradient_bytes=gradient_bytes, complete=self._is_complete
        )
        if self.model.run_eagerly or not self.model.jit_compile:
            if self._several:
                raise no_program(self.model)
            make = self._steps.eager
        self._check_times()
        times = self.model.steps_per_execution
        made: StepFunction = make(step, self._splits, times=times, per_row_outputs=per_row_outputs)
        return dataclasses.replace(made, assigned=self._assigned)

    def _is_complete(self) -> bool:
        """Whether the metrics are built, as the first step of a model compiled anew does."""
        # keras/src/trainers/trainer.py, Trainer.compile
        parts = (getattr(self.model, f"_compile_{name}", None) for name in ("loss", "metrics"))
        return all(part is None or part.built for part in parts)

    def _adopt(self, first: bool) -> None:
        """Take in variables that appeared since, before a fit, evaluate or predict.

        Args:
            first: Whether a step function was not made yet. Where processes differ in what they
                have built, they find out there, also those that have built nothing.
        """
        check_no_distribution()
        bring_home(self.model)  # another call may be running, and not have been asked for it
        states = {id(state) for state in jax_states.carry_states(self.model)}
        variables = every_variable(self.model)
        if self._several:
            new = [v for v in variables if self not in holders_of(v)]
            if new or first:
                fixed = constants.constants_of(self.model) if new else []
                processes.share_variables([*new, *fixed])
        for variable in variables:
            holders_of(variable).add(self)
        unshare_arrays(variables)
        others = self.model.non_trainable_variables if states else []
        self._split = frozenset(
            position
            for position, variable in enumerate(others)
            if id(variable) in states and self._steps.divides(variable.shape[0])
        )

    def _held(self) -> list[Any]:
        return [v for v in every_variable(self.model) if self in holders_of(v)]

    def _splits(self) -> frozenset[int]:
        return self._split

    def _reset_states(self) -> None:
        """Set the states of every stateful RNN layer to zero, as Keras 2 did."""
        jax_states.reset(self.model, jax_states.states_of(self.model))


def _keeping_losses(stateless_call: Callable[..., Any], model: Any) -> Callable[..., Any]:
    @functools.wraps(stateless_call)
    def call_without_old_losses(*args: Any, **kwargs: Any) -> Any:
        losses.forget(model)
        return stateless_call(*args, **kwargs)

    return call_without_old_losses


def _for_any_keras(get_compile_config: Callable[[], Any]) -> Callable[[], Any]:
    # keras/src/trainers/trainer.py, Trainer.get_compile_config: what files keep. A Keras
    # that loads them knows whole numbers only.
    @functools.wraps(get_compile_config)
    def plain_compile_config() -> Any:
        config = get_compile_config()
        if config and config.get("steps_per_execution") == AUTO:
            return {**config, "steps_per_execution": 1}
        return config

    return plain_compile_config


def _first_copy(value: Any) -> Any:
    if not isinstance(value, jax.Array) or len(value.devices()) == 1:
        return value
    return value.addressable_data(0)
