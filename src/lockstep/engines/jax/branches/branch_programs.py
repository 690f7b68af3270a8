"""Keras's JAX steps, cut into stages on the devices of a model's layers."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import keras
from jax.sharding import SingleDeviceSharding

from lockstep.core.branch_homes import output_device, slots_made_at_home, variable_homes
from lockstep.core.call_scopes import CallScopes
from lockstep.core.layout import Branches
from lockstep.core.state import variables_of
from lockstep.core.status import STATUS_OF_PROCESS
from lockstep.engines.jax import devices as jax_devices
from lockstep.engines.jax.branches.program_cut import (
    cut,
    device_scope,
    devices_in_loops,
)
from lockstep.engines.jax.branches.staged_program import StagedProgram
from lockstep.engines.jax.steps.execution import Program, State, StepFunction, uninterrupted
from lockstep.engines.jax.steps.programs import Programs
from lockstep.engines.jax.steps.state_layout import layouts_of_state
from lockstep.errors import SerialBranchesWarning, UnsupportedModel
from lockstep.keras_compat import BUILD, in_stateless_scope, is_built, values_replaced
from lockstep.training.arrays import host_array


class BranchPrograms(Programs):
    """Turn Keras's steps into programs in stages; see `Programs`.

    Every variable is on the device of its layer, an optimizer slot on the device of its variable,
    and all others on the device of the first output.

    Attributes:
        layout: Where the layers run.
    """

    layout: Branches

    def __init__(self, model: Any, layout: Branches) -> None:
        super().__init__(jax_devices.find(layout.devices))
        self.ahead = None
        self.layout = layout
        self._model = model
        self._homes: dict[int, str] = {}
        self._scopes = CallScopes(model, layout, lambda device, _: device_scope(device))
        self._main = layout.devices.index(output_device(model, layout))

    def start(self) -> None:
        """Run the calls of layers in the scopes of their devices."""
        self._scopes.put_on()
        vars(self._model)[BUILD] = self._build

    def stop(self) -> None:
        """Undo `start`."""
        self._scopes.take_off()
        vars(self._model).pop(BUILD, None)

    def adopt(self) -> None:
        """Decide where variables are that were created since the last call."""
        self._homes = variable_homes(self._model, self.layout)

    def home(self, variable: Any) -> SingleDeviceSharding:
        """Return the layout of a variable: the one device that has it."""
        return SingleDeviceSharding(self.devices[self.layout.devices.index(self._home(variable))])

    def _home(self, variable: Any) -> str:
        return self._homes.get(id(variable), self.layout.devices[self._main])

    def compiled(
        self,
        step: Program,
        split: Callable[[], frozenset[int]],
        *,
        times: int,
        per_row_outputs: bool,
        trains: bool = False,
        complete: Callable[[], bool] = lambda: True,
        options: dict[str, str] | None = None,
    ) -> StepFunction:
        """Return a step function whose program runs in stages; see `Programs.compiled`."""
        programs: dict[Any, tuple[StagedProgram, Any]] = {}

        def run(state: State, batch: Any) -> tuple[Any, Any]:
            leaves, structure = jax.tree.flatten((state, batch))
            form = (structure, tuple([(leaf.shape, leaf.dtype) for leaf in leaves]))
            is_new = form not in programs
            if is_new:
                STATUS_OF_PROCESS.compiles = True
                programs[form] = self._program(step, state, batch, trains)
            program, returned = programs[form]
            # An interrupt may end the first call, in which the stages are compiled.
            with nullcontext() if is_new else uninterrupted(self._model):
                outputs: tuple[Any, Any] = jax.tree.unflatten(returned, program(*leaves))
            return outputs

        return StepFunction(
            place=_on_host,
            settle=self.settled,
            run=run,
            finish=(lambda outputs: outputs) if per_row_outputs else None,
            times=times,
        )

    def eager(self, *args: Any, **kwargs: Any) -> StepFunction:
        """Raise: operations outside a program have no scopes of devices."""
        raise UnsupportedModel(
            f"{self._model.name!r} has branches on several devices, which need a compiled step, "
            "but\nrun_eagerly or jit_compile=False was requested.\nRemove both from compile(), "
            "or call lockstep.release(model) first."
        )

    def divides(self, rows: int) -> bool:
        """Return whether states of RNNs are split by rows: they never are."""
        return False

    def call(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the model on the device of its first output, with copies of its variables there."""
        symbolic = any(map(keras.utils.is_keras_tensor, keras.tree.flatten((args, kwargs))))
        if in_stateless_scope() or symbolic or not is_built(self._model):
            return call(*args, **kwargs)
        device = self.devices[self._main]
        variables = variables_of(self._model)
        copies = [jax.device_put(variable.value, device) for variable in variables]
        # A stateless scope would drop the losses that layers add.
        with values_replaced(variables, copies) as changed:
            outputs = call(*args, **kwargs)
        for variable, value in changed:
            variable.assign(jax.device_put(value, self.home(variable)))
        return outputs

    def _build(self, *args: Any, **kwargs: Any) -> Any:
        """Build what a step needs, and first the slots of the optimizer on their devices."""
        model = self._model
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and not optimizer.built and is_built(model):
            self.adopt()
            with slots_made_at_home(optimizer, self._home):
                optimizer.build(model.trainable_variables)
        return getattr(type(model), BUILD)(model, *args, **kwargs)

    def _layouts(self, state: State, split: frozenset[int] = frozenset()) -> list[list[Any]]:
        main = SingleDeviceSharding(self.devices[self._main])
        return layouts_of_state(self._model, state, self.home, main)

    def _program(
        self, step: Program, state: State, batch: Any, trains: bool
    ) -> tuple[StagedProgram, Any]:
        form = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (state, batch)
        )
        # JAX keeps the trace of a function, and a method of the model is the same one after
        # `compile`, and on other devices.
        traced = jax.jit(lambda *given: step(*given)).trace(*form)
        outputs, after = traced.out_info
        given = [*self._numbers(state), *[None] * len(jax.tree.leaves(batch))]
        returned = [*[None] * len(jax.tree.leaves(outputs)), *self._numbers(after)]
        if loops := devices_in_loops(traced.jaxpr):
            warnings.warn(_in_a_loop(self._model, loops), SerialBranchesWarning, stacklevel=3)
        stages = cut(traced.jaxpr, self.layout.devices, given, returned, self._main)
        program = StagedProgram(stages, self.devices, given, returned, donate=trains)
        return program, jax.tree.structure((outputs, after))

    def _numbers(self, state: Any) -> list[int]:
        layouts = [layout for group in self._layouts(state) for layout in group]
        return [self.devices.index(next(iter(layout.device_set))) for layout in layouts]


def _in_a_loop(model: Any, devices: set[str]) -> str:
    return (
        f"{model.name!r} calls layers on {', '.join(sorted(devices))} inside a loop of JAX "
        "(scan or while), which runs on one device.\n"
        "The results are exact, but these layers do not run on their devices.\n"
        "Call the layers outside the loop, or place the loop as a whole."
    )


def _on_host(batch: Any) -> Any:
    def placed(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, jax.Array):
            return leaf
        return host_array(leaf)

    return keras.tree.map_structure(placed, batch)
