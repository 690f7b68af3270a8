"""One model on JAX devices: its variables, its step functions, and what the loop needs of it."""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

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
from lockstep.core.fit_arguments import arguments_of
from lockstep.core.fit_lines import not_compiled_words, sharded_words
from lockstep.core.layout import Branches, Layout
from lockstep.core.state import named_variables, rnn_states, variables_of
from lockstep.engines.jax import devices as jax_devices
from lockstep.engines.jax.branches.branch_programs import BranchPrograms
from lockstep.engines.jax.fit.first_build import build_on_first_batch
from lockstep.engines.jax.fit.generation import HOOK, generating_by_rows
from lockstep.engines.jax.fit.mesh_batches import MeshIterator, call_on_first_batch
from lockstep.engines.jax.fit.on_batch import OnBatch
from lockstep.engines.jax.fit.snapshot_buffers import SnapshotBuffers
from lockstep.engines.jax.parts.micro_batches import MicroBatches
from lockstep.engines.jax.processes import jax_group
from lockstep.engines.jax.processes.jax_group import GROUP
from lockstep.engines.jax.steps import states as jax_states
from lockstep.engines.jax.steps.execution import (
    GROUPS_OF,
    Execution,
    ModelCall,
    State,
    StepFunction,
    take_out,
)
from lockstep.engines.jax.steps.gather_again import (
    compiler_options,
    gathering_again,
    room_for_gathered,
)
from lockstep.engines.jax.steps.lora import TracedAnew, with_lora_by_factors
from lockstep.engines.jax.steps.programs import Programs
from lockstep.engines.jax.steps.state_layout import (
    Replicated,
    SavedShards,
    Sharded,
    ShardedVariable,
    drop_shards,
    is_held_in_shards,
    on_host,
    read_as_stored,
)
from lockstep.engines.jax.steps.variable_sync import (
    GROUPS,
    group_of,
    sync_to_variables,
    to_default_device,
    unshare_arrays,
    write_state,
)
from lockstep.errors import LayoutConflict, UnsupportedBackend, UnsupportedModel
from lockstep.keras_compat import (
    JAX_STATE,
    JAX_STATE_SYNCED,
    TAKE_JAX_STATE,
    forget_loss_ids,
    in_stateless_scope,
    is_built,
    is_compiled_on_jax,
    is_nnx_enabled,
    layers_in,
    layers_not_compiled,
    layout_of,
    state_sync_name,
)
from lockstep.processes import process_group
from lockstep.processes.first_process_io import methods_of_all_processes
from lockstep.processes.normalization_constants import constants_of
from lockstep.processes.own_rows import brings_own_rows
from lockstep.processes.variable_drift import VariableDrift
from lockstep.training.call_guard import STEPPING
from lockstep.training.input import check_times
from lockstep.training.overrides import is_keras

_ASKED = "_lockstep_jit_compile"
"""The attribute of a model that holds what `compile` was given as `jit_compile`."""


class JaxSession(Session):
    """One model on a mesh, or with its layers on several devices; see `Session`."""

    def __init__(self, model: Any, layout: Layout) -> None:
        super().__init__(model, layout)
        self._several = process_group.several()
        self._many = len(self.devices) > 1 and not self._several
        self._assigned = VariableDrift(model, self._held) if self._several else None
        if isinstance(layout, Branches):
            self._programs: Programs = BranchPrograms(model, layout)
        else:
            made = functools.partial(Sharded, model) if layout.is_sharded else Replicated
            self._programs = Programs(jax_devices.find(self.devices), made)
        size = layout.micro_batch_size
        self._parts = None if size is None else MicroBatches(model, self._programs, size)
        self._split: frozenset[int] = frozenset()
        self._room_for_gathered = math.inf
        self._buffers: SnapshotBuffers | None = None
        self._check()

    # ------------------------------------------------------------ on and off the devices

    def _check(self) -> None:
        """Raise if the model cannot be on these devices."""
        _check_mode()
        _check_no_distribution()
        self._programs.adopt()
        for variable in variables_of(self.model):
            if layout_of(variable) is not None or not holders_of(variable):
                _check_layout(self.model, variable)
            check_shared(self, variable)

    def open(self) -> None:
        """Move the variables to the devices."""
        self._adopt(first=True)
        if not self._several:  # outside a step, each process has them whole
            for variable in variables_of(self.model):  # one by one: each old array is freed
                if layout_of(variable) is None:
                    variable.assign(
                        self._programs.moved(variable.value, self._programs.home(variable))
                    )
        self._programs.start()
        if self.layout.is_sharded:
            self._room_for_gathered = room_for_gathered(self._programs.devices)

    def close(self) -> None:
        """Undo `open`, even if it failed halfway."""
        sync_to_variables(self.model)
        self._programs.stop()
        variables = variables_of(self.model)
        for variable in variables:
            holders_of(variable).discard(self)
        if not any(holders_of(state) for state in rnn_states(self.model)):
            jax_states.drop_states(self.model)
        free = [variable for variable in variables if not holders_of(variable)]
        for variable in free:
            drop_shards(variable)
        to_default_device(free)

    def _adopt(self, first: bool) -> None:
        """Take over variables created since the last call, before a fit, evaluate or predict.

        Without a step function, all processes compare what they have built, including a process
        that has built nothing.
        """
        _check_no_distribution()
        sync_to_variables(self.model)  # a running call may not have been synced
        states = {id(state) for state in jax_states.carry_states(self.model)}
        variables = variables_of(self.model)
        if self._several:
            new = [v for v in variables if self not in holders_of(v)]
            if new or first:
                fixed = constants_of(self.model) if new else []
                process_group.share_variables([*new, *fixed])
        for variable in variables:
            holders_of(variable).add(self)
        unshare_arrays(variables)
        self._programs.adopt()
        self._programs.hold(variables)
        others = self.model.non_trainable_variables if states else []
        self._split = frozenset(
            position
            for position, variable in enumerate(others)
            if id(variable) in states and self._programs.divides(variable.shape[0])
        )

    def _held(self) -> list[Any]:
        return [v for v in variables_of(self.model) if self in holders_of(v)]

    def home(self, variable: Any) -> Home:
        """Return where a variable of the model is."""
        shards = len(self.devices) if isinstance(variable, ShardedVariable) else 1
        return Home(self._programs.home(variable), shards)

    def remarks(self) -> str:
        """Return the state that each device holds, and what keeps a step from being compiled."""
        words = "" if self._asked is not None else not_compiled_words(self._not_compiled())
        return (words and f", {words}") + self._sharded_words()

    def _not_compiled(self) -> list[Any]:
        """Return the layers that keep a step from being compiled."""
        return [] if self.model.run_eagerly else layers_not_compiled(self.model)

    def _sharded_words(self) -> str:
        if not self.layout.is_sharded:
            return ""
        model = self.model
        if is_built(model):
            self._adopt(first=False)
            if model.optimizer is not None and not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)  # as `fit` would now
                self._adopt(first=False)
        sizes = [(v.path, v.value.nbytes, self.home(v).shards) for v in variables_of(model)]
        return sharded_words(sizes, len(self.devices))

    def step_function(self, kind: Kind, force: bool) -> Any:
        """Return the step function of the model, or a new one; variables are laid out before."""
        known = getattr(self.model, kind.function)
        self._adopt(first=known is None)
        return self._made(kind) if force or known is None else known

    def _made(self, kind: Kind) -> StepFunction:
        """Make a step function over the devices."""
        # keras/src/backend/jax/trainer.py, JAXTrainer.make_train_function and the like
        model = self.model
        step = getattr(model, f"{kind.name}_step")
        if kind is TRAIN and len(self.devices) > 1 and not isinstance(self.layout, Branches):
            step = with_lora_by_factors(model, step)

        def predict_step(state: State, data: Any) -> tuple[Any, State]:
            outputs, non_trainable_variables = model.predict_step(state, data)
            return outputs, (state[0], non_trainable_variables)

        if self._parts is not None:
            self._parts.check(compiled=self.is_compiled(), layers=self._not_compiled())
            step, predict_step = self._parts.step(step), self._parts.step(predict_step)
        options = None
        if kind is TRAIN and self.layout.is_sharded:
            options = compiler_options(model, self._programs.devices, self._room_for_gathered)
        make: Any = functools.partial(
            self._programs.compiled,
            trains=kind is TRAIN,
            complete=self._is_complete,
            options=options,
        )
        if not self.is_compiled():
            if self._several:
                raise _no_program(model)
            make = self._programs.eager
        times = model.steps_per_execution
        check_times(times)
        made: StepFunction = make(
            predict_step if kind is PREDICT else step,
            lambda: self._split,
            times=times,
            per_row_outputs=kind is PREDICT,
        )
        if self._parts is not None:
            made = self._parts.checked(made, kind)
        return dataclasses.replace(made, assigned=self._assigned, model=model)

    def _is_complete(self) -> bool:
        """Return whether the metrics are built. The first step after `compile` builds them."""
        # keras/src/trainers/trainer.py, Trainer.compile
        parts = (getattr(self.model, f"_compile_{name}", None) for name in ("loss", "metrics"))
        return all(part is None or part.built for part in parts)

    def call(self, name: str) -> AbstractContextManager[object]:
        """Run a method of the model inside the context; the variables have values at its end."""
        return ModelCall(self.model, self._drop_buffers)

    def all_rows_at_once(self) -> AbstractContextManager[None]:
        """Let the steps that are traced inside the context run all rows of a device at once."""
        return nullcontext() if self._parts is None else self._parts.all_rows_at_once()

    def _drop_buffers(self) -> None:
        self._buffers = None

    def methods(self, methods: Methods, guarded: Guard) -> Methods:
        """Return the methods of all engines, and those that move the state of a loop."""
        model = self.model
        methods |= {
            "call": TracedAnew(self._calling(model.call, guarded)),
            "reset_states": lambda: jax_states.reset(model, rnn_states(model)),
            **{name: guarded(name, each) for name, each in OnBatch(model).methods().items()},
            TAKE_JAX_STATE: functools.partial(take_out, model),
            "compile": self._noting_choice(model.compile),
            "stateless_call": _keeping_losses(model.stateless_call, model),
        }
        if self._parts is not None:
            methods |= self._parts.methods(methods["stateless_call"])
        methods |= {name: self._naming_models(methods[name]) for name in STEPPING}
        if is_keras(model, state_sync_name()):
            methods[state_sync_name()] = functools.partial(write_state, model)
        if hasattr(model, "get_state_tree"):  # a layer with Keras's Trainer has none
            methods["get_state_tree"] = _on_one_device_for_orbax(model.get_state_tree)
        if self._many and not isinstance(self.layout, Branches) and hasattr(model, HOOK):
            methods[HOOK] = generating_by_rows(model, self._programs)
        if self.layout.is_sharded and hasattr(model, "export"):
            methods["export"] = self._exporting(model.export)
        if self.layout.is_sharded and self._parts is None:  # a part gathers again as it is
            methods["compute_loss_and_updates"] = gathering_again(model, self._room_for_gathered)
        if self._assigned is None:
            return methods
        sync_name = state_sync_name()
        sync = methods.get(sync_name, getattr(model, sync_name))
        methods[sync_name] = _synced_here(model, sync, self._assigned)
        methods[TAKE_JAX_STATE] = _noting(methods[TAKE_JAX_STATE], self._assigned)
        shards = SavedShards(model) if self._several and self.layout.is_sharded else None
        return methods_of_all_processes(model, methods, self._assigned, shards)

    def _naming_models(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method: JAX's error for arrays of two models names the models."""

        @functools.wraps(method)
        def method_that_names_models(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except ValueError as error:
                if found := self._two_models(error):
                    raise found from error
                raise

        return method_that_names_models

    def _two_models(self, error: ValueError) -> LayoutConflict | None:
        """Return the error for arithmetic between variables of models on different devices."""
        trace = error.__traceback__
        while trace is not None and "incompatible devices" in str(error):
            for value in trace.tb_frame.f_locals.values():
                for other in holders_of(value) if isinstance(value, keras.Variable) else ():
                    if other.model is not self.model and other.devices != self.devices:
                        return LayoutConflict(
                            f"{self.model.name!r} is on {names_in_words(self.devices)}, but one "
                            "of its callbacks combines its variables with those of "
                            f"{other.model.name!r}\non {names_in_words(other.devices)}: JAX "
                            "needs the same devices. Distribute both models to the same "
                            "devices, or\nread the values first: variable.numpy()."
                        )
            trace = trace.tb_next
        return None

    def _exporting(self, export: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(export)
        def export_plainly(*args: Any, **kwargs: Any) -> Any:
            if self._several:
                raise _no_export(self.model)
            with read_as_stored(self.model):  # the program is for one device
                return export(*args, **kwargs)

        return export_plainly

    def _calling(self, call: Callable[..., Any], guarded: Guard) -> Callable[..., Any]:
        @functools.wraps(call)
        def call_on_mesh(*args: Any, **kwargs: Any) -> Any:
            return self._programs.call(call, args, kwargs)

        in_turn = guarded("call", call_on_mesh)

        @functools.wraps(call)
        def call_model(*args: Any, **kwargs: Any) -> Any:
            # A step or a stateless call reads no variable.
            return (call_on_mesh if in_stateless_scope() else in_turn)(*args, **kwargs)

        return call_model

    # ------------------------------------------------------------ in a loop

    def batches(self, kind: Kind, *, recorded: bool = False, **data: Any) -> Any:
        """Return an iterator over host batches."""
        iterator = (recorded_type(kind, MeshIterator) if recorded else MeshIterator)(**data)
        iterator.draws_ahead = self._programs.draws_ahead
        # A model that was never called is called on a whole batch; a file of predictions of rows
        # that all processes have sums all.
        sums_all = recorded and not brings_own_rows(iterator.data_adapter)
        is_known = kind is not PREDICT or (is_built(self.model) and not sums_all)
        if is_known and self._parts is None:
            iterator.let_rows_stay(self._programs.rows_stay)
        if self.is_compiled():
            iterator.ahead = self._programs.ahead
        return iterator

    def build(self, batches: Any, kind: Kind) -> None:
        """Build what is not built yet on the first batch, and reset the iterator."""
        model = self.model
        if kind is not PREDICT:
            batches.build(lambda: build_on_first_batch(model, batches))
        elif not is_built(model):
            batches.build(lambda: call_on_first_batch(model, batches))

    def is_compiled(self) -> bool:
        """Return whether a step is one program."""
        return is_compiled_on_jax(self.model, self._asked)

    @property
    def _asked(self) -> bool | None:
        """What `compile` was given as `jit_compile`; `None` if Keras chose, or is not known."""
        asked: bool | None = vars(self.model).get(_ASKED)
        return asked

    def _noting_choice(self, compile: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `compile`: Keras does not keep who has chosen `jit_compile=False`."""

        @functools.wraps(compile)
        def compile_and_note(*args: Any, **kwargs: Any) -> Any:
            given = arguments_of(compile, args, kwargs).get("jit_compile", "auto")
            compile(*args, **kwargs)
            vars(self.model)[_ASKED] = None if given in ("auto", None) else bool(given)

        return compile_and_note

    def epoch(self, kind: Kind, batches: Any, callbacks: Any) -> AbstractContextManager[Execute]:
        """Run the steps of one epoch inside the context, with the state out of the variables."""
        return Execution(self.model, kind, batches, gathers_metrics=self._many)

    def sync(self) -> None:
        """Write the state of a running epoch into the variables."""
        self.model.jax_state_sync()

    def snapshot(self, logs: dict[str, Any], *, writes: bool) -> Snapshot | None:
        """Copy every variable and the logs of the last step; see `snapshot_buffers.py`."""
        values = self._values()
        if not writes:
            for value in values:
                jax_group.whole(value)
            return None
        names = list(named_variables(self.model))
        variables = len(values)
        # `dict.items` bypasses the fetch of `LazyLogs`. A step does not donate its logs.
        for name, value in dict.items(logs):
            if isinstance(value, (str, bytes)) or value is None:  # added by a callback
                continue
            names.append(f"logs/{name}")
            values.append(jnp.asarray(value))
        arrays = [
            (name, str(value.dtype), tuple(value.shape))
            for name, value in zip(names, values, strict=True)
        ]
        if self._buffers is None:
            self._buffers = SnapshotBuffers(on_host=self.devices[0].startswith("cpu"))
        return Snapshot(variables, arrays, self._buffers.of(names, map(_on_one_device, values)))

    def _values(self) -> list[Any]:
        # Within an epoch the state is outside the variables, unless a callback has synced it.
        attributes = vars(self.model)
        state = attributes.get(JAX_STATE)
        variables = named_variables(self.model).values()
        if not state or attributes.get(JAX_STATE_SYNCED, True):
            return [variable.value for variable in variables]
        groups = ((group_of(self.model, name), state.get(name)) for name in GROUPS_OF["train"])
        held = {id(v): value for group in groups for v, value in zip(*group, strict=True)}
        return [held[id(variable)] for variable in variables]


def _on_one_device(value: Any) -> Any:
    if GROUP.is_spread(value):  # at once: the next step may be a program of all processes
        return np.asarray(jax_group.whole(value))
    value = GROUP.local(value)
    return value.addressable_data(0) if value.is_fully_replicated else value


def _synced_here(
    model: Any, sync: Callable[[], None], assigned: VariableDrift
) -> Callable[[], None]:
    def jax_state_sync() -> None:
        state = getattr(model, JAX_STATE, None)
        if not state or getattr(model, JAX_STATE_SYNCED):
            return
        groups = {name: state.get(name, None) for name in GROUPS}
        here = {
            name: [value if GROUP.is_spread(value) else GROUP.local(value) for value in group]
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
    return value.addressable_data(0) if value.is_fully_replicated else on_host(value)


def _check_mode() -> None:
    """Raise if Keras's variables are not plain JAX variables."""
    # keras/src/backend/config.py: in this mode variables are Flax NNX objects.
    if is_nnx_enabled():
        raise UnsupportedBackend(
            "Keras runs with KERAS_NNX_ENABLED, but lockstep supports only plain JAX "
            "variables.\nUnset KERAS_NNX_ENABLED before Keras is imported."
        )


def _check_no_distribution() -> None:
    """Raise if Keras lays out variables itself."""
    distribution = keras.distribution.distribution()
    if distribution is not None:
        raise LayoutConflict(
            f"A global keras.distribution is set ({type(distribution).__name__}), but only one "
            "of it and lockstep can lay out variables.\n"
            "Call keras.distribution.set_distribution(None) first, and build the model after it."
        )


def _check_layout(model: Any, variable: Any) -> None:
    """Raise if a variable already has a layout."""
    # keras/src/backend/jax/core.py, JaxVariable._initialize_layout
    layout = layout_of(variable)
    if layout is None and variable.value.sharding.is_fully_replicated:
        return
    if is_held_in_shards(variable):
        return
    raise LayoutConflict(
        f"Variable {variable.path!r} of {model.name!r} is laid out by another tool "
        f"({type(layout or variable.value.sharding).__name__}), but lockstep must lay it out.\n"
        "Use only one tool: build a new model without the other one, and load the saved file."
    )


def _no_export(model: Any) -> UnsupportedModel:
    """Return the error for an export by one process, which has a part of each variable."""
    return UnsupportedModel(
        f"{model.name!r} cannot be exported, because its variables are sharded across several "
        "processes.\n"
        "An exported program needs all of them. Save the model, and export it in one process."
    )


def _no_program(model: Any) -> UnsupportedModel:
    """Return the error for a step that cannot be one program, as several processes need."""
    layers = layers_not_compiled(model)
    if layers and not model.run_eagerly:
        names = ", ".join(f"{layer.name} ({type(layer).__name__})" for layer in layers)
        return UnsupportedModel(
            f"Keras cannot compile {names}, but with several processes on JAX, a step\n"
            "must be one compiled program. Apply such layers to the data instead, before fit."
        )
    return UnsupportedModel(
        "run_eagerly or jit_compile=False was requested, but with several processes on JAX, a "
        "step\nmust be one compiled program. Remove both from compile()."
    )
