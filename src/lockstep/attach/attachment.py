"""Puts a model on several devices in place, and takes it off again.

What an attachment does is the same on every backend. What only one framework needs is in the
`Session` of its engine.
"""

import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np

from lockstep.attach.atomic_save import SAVING, atomic_saves
from lockstep.attach.out_of_memory import has_note, is_out_of_memory, note_of
from lockstep.checkpoint.callback import checkpoint_among
from lockstep.core import micro_batches
from lockstep.core.devices import Device
from lockstep.core.engine import KINDS, Engine, Kind, Methods, Session
from lockstep.core.fit_arguments import Given, arguments_of, wants_words
from lockstep.core.fit_lines import fit_line, kinds_words, replicated_words
from lockstep.core.layout import Branches, DataParallel, Layout, both_layouts
from lockstep.core.process_local import ProcessLocal
from lockstep.core.state import named_variables, optimizers_of, rnn_states
from lockstep.core.step_bytes import size_of
from lockstep.errors import UnsupportedBackend, UnsupportedModel, counted
from lockstep.keras_compat import is_built, trainer_module
from lockstep.processes import process_group
from lockstep.processes.agreement import check_course
from lockstep.processes.call_scope import CALLS
from lockstep.processes.group import current
from lockstep.training.call_guard import LOOPS, STEPPING, CallGuard
from lockstep.training.global_data import joining_rows
from lockstep.training.inner_fit import lead_to_loop
from lockstep.training.input import check_times
from lockstep.training.loop import Loop
from lockstep.training.overrides import MAKERS, check_makers, knows_arguments, own_maker
from lockstep.training.profile import observed_fit

ATTACHMENT = "_lockstep"
"""The attribute of a model that holds its attachment."""

_OF_CLASS = (*STEPPING, *SAVING)
"""The methods of a class that tools replace, and lockstep on the instance."""


class Attachment:
    """One model on several devices.

    The attachment is stored in the model's `__dict__`, beside the instance methods that it
    replaces. Nothing else of the model changes but where its variables are. Keras saves and tracks
    lists, dicts and its own objects, so it ignores a plain object and functions.

    Args:
        session: The model on the devices.
        engine: The engine that made the session.

    Attributes:
        model: The model.
        session: The model on the devices, as the loop uses it.
        loop: The loop that replaces those of Keras.
        turns: The guard of the calls of the model.
        hooks: The methods that are replaced on the instance.
        replaced: The attributes of the instance that they replace.
    """

    def __init__(self, session: Session, engine: Engine) -> None:
        self.model = session.model
        self.session = session
        self._engine = engine
        self.loop = Loop(session)
        self.turns = CallGuard(self.model, lambda: attachment_of(self.model) is self)
        self.hooks: Methods = {}
        self.replaced: Methods = {}
        self._inner: Methods = {}
        self._of_class: list[Any] = []

    def check(self) -> None:
        """Raise if this model cannot be attached to these devices."""
        before = attachment_of(self.model)
        check_makers(self.model)
        _check_instance(self.model, {} if before is None else before.hooks)

    def take_over(self) -> None:
        """Lay out the variables, and replace the methods that run steps."""
        self.session.open()
        vars(self.model)[ATTACHMENT] = self
        self._of_class = self._methods_of_class()
        self._inner = self._made_methods()
        self.hooks = {name: self._newest(name, method) for name, method in self._inner.items()}
        self.replaced = _put_on(self.model, self.hooks)
        remake_functions(self.model)

    def give_back(self) -> None:
        """Undo `take_over`, even if it failed halfway."""
        try:
            self.session.close()
        finally:
            vars(self.model).pop(ATTACHMENT, None)
            _take_off(self.model, self.hooks, self.replaced)
        remake_functions(self.model)

    def _methods_of_class(self) -> list[Any]:
        return [getattr(type(self.model), name, None) for name in _OF_CLASS]

    def _newest(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook that takes up a method that a tool has replaced on the class since.

        Tools that log runs replace `keras.Model.fit`. Plain Keras then calls theirs.
        """
        if name not in _OF_CLASS:
            return method

        @functools.wraps(method)
        def newest_method(*args: Any, **kwargs: Any) -> Any:
            if self._of_class != self._methods_of_class():
                with self.turns.turn(name):
                    self._take_up_class()
            return self._inner[name](*args, **kwargs)

        return newest_method

    def _take_up_class(self) -> None:
        """Make the methods anew, over those that the class has now."""
        attributes, of_class = vars(self.model), self._methods_of_class()
        now = {name: attributes.pop(name) for name in self.hooks if name in attributes}
        attributes.update(self.replaced)
        try:
            made = self._made_methods()
            names = [name for name in _OF_CLASS if name in self.hooks]
            self._inner |= {name: made.get(name) or getattr(self.model, name) for name in names}
            self._of_class = of_class
        finally:
            for name in self.hooks:
                attributes.pop(name, None)
            attributes.update(now)

    def _made_methods(self) -> Methods:
        made = self.session.methods(self._methods(), self._guarded)
        of_batches = [name for name in STEPPING if name not in LOOPS]
        return made | {name: joining_rows(name, made[name]) for name in of_batches}

    def _methods(self) -> Methods:
        model = self.model
        stepping = {name: getattr(model, name) for name in STEPPING}
        stepping |= _loop_methods(self.loop)
        stepping["fit"] = _announced_fit(stepping["fit"], self.loop, self._fit_line)
        return {
            **{f"make_{kind.function}": functools.partial(self._make, kind) for kind in KINDS},
            "reset_states": self._reset_states,
            **{name: self._guarded(name, method) for name, method in stepping.items()},
            **atomic_saves(model),
        }

    def _guarded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method that calls the model: one thread at a time does."""
        return self.turns.guarded(name, self._called(name, method) if name in STEPPING else method)

    def _called(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method that runs steps: variables have values at its end.

        An error of a device without memory gets a note on what holds it.
        """

        @functools.wraps(method)
        def method_in_call(*args: Any, **kwargs: Any) -> Any:
            try:
                with self.session.call(name):
                    return method(*args, **kwargs)
            except Exception as error:
                is_data_parallel = isinstance(self.session.layout, DataParallel)
                if is_out_of_memory(error) and is_data_parallel and not has_note(error):
                    given = arguments_of(method, args, kwargs)
                    error.add_note(note_of(self._engine, self.session, name, given))
                raise

        return method_in_call

    def _make(self, kind: Kind, force: bool = False) -> Any:
        # keras/src/backend/*/trainer.py, make_train_function and the like
        function = vars(self.model)[kind.function] = self.session.step_function(kind, force)
        return function

    def _reset_states(self) -> None:
        """Set the states of every stateful RNN layer to zero, as in Keras 2."""
        for state in rnn_states(self.model):
            state.assign(np.zeros(state.shape, state.dtype))

    def _fit_line(self, given: Given, compiles: bool) -> str:
        session = self.session
        own = given.get("x")
        if isinstance(own, ProcessLocal):
            given = {**given, "x": own.parts[0] if own.is_arrays else None}
        line = fit_line(keras.backend.backend(), session.layout, given, compiles)
        if isinstance(own, ProcessLocal):
            line += f", rows of {counted(current().size, 'process')}"
            if keras.backend.backend() == "torch" and current().size > 1:
                line += ", gathered in each"
        ours = [each for each in self._engine.devices() if each.name in session.devices]
        line += session.remarks() + self._held_words(ours)
        one_step = isinstance(session.layout, DataParallel)
        return line + (kinds_words(each.kind for each in ours) if one_step else "")

    def _held_words(self, ours: list[Device]) -> str:
        """Return the bytes that each device holds, if the state is replicated and built."""
        session, model = self.session, self.model
        is_replicated = isinstance(session.layout, DataParallel) and not session.layout.is_sharded
        if not is_replicated or not is_built(model):
            return ""
        named = named_variables(model)
        held = sum(size_of(each) for each in {id(each): each for each in named.values()}.values())
        has_slots = all(each.built for _, each in optimizers_of(model))
        known = [each.memory for each in ours if each.memory is not None]
        return replicated_words(held, has_slots, min(known) if known else None)


def attachment_of(model: Any) -> Attachment | None:
    """Return the attachment of a model, `None` if it is not attached."""
    attachment: Attachment | None = vars(model).get(ATTACHMENT)
    return attachment


def session_of(model: Any) -> Session | None:
    """Return the session of a model on its devices, `None` if it is not attached."""
    attachment = attachment_of(model)
    return None if attachment is None else attachment.session


def attach(engine: Engine, model: Any, layout: Layout) -> None:
    """Lay out `model` on devices, in place; on failure leave it unchanged.

    Args:
        engine: The engine.
        model: A Keras model.
        layout: How it is to be laid out.

    Raises:
        LayoutConflict: If the model is laid out in another way.
        UnsupportedBackend: If the engine cannot, or layers are placed in several processes.
    """
    several = process_group.several()
    if isinstance(layout, Branches) and several:
        raise UnsupportedBackend(
            f"{model.name!r} has branches on different devices, which works only in one "
            "process, but several processes are running.\nStart one process."
        )
    size = layout.micro_batch_size
    if size is not None and engine.name not in micro_batches.BACKENDS:
        raise micro_batches.no_micro_batches(engine.name, size)
    before, name = session_of(model), layout.made_by
    if before is not None and type(before.layout) is not type(layout):
        raise both_layouts(model, name)
    is_there = isinstance(layout, DataParallel) and before is not None and before.layout == layout
    if is_there and not several:
        return
    with (
        CALLS.call(name) if several else nullcontext(),
        nullcontext() if is_there else _alone(model, name),
    ):
        session = engine.session(model, layout)  # processes compare their devices
        if not is_there:
            _replace(Attachment(session, engine), engine)


def detach(model: Any) -> None:
    """Make a model run on one device again; do nothing if it is not attached."""
    with _alone(model, "release"):
        _give_back(model)


def _alone(model: Any, name: str) -> AbstractContextManager[None]:
    """Keep an attached model out of all calls inside the context.

    Args:
        model: The model.
        name: The name of the operation in the context, for the message.

    Raises:
        BusyModel: If this thread is in a call of the model, or another one in its `fit`.
    """
    attachment = attachment_of(model)
    return nullcontext() if attachment is None else attachment.turns.alone(name)


def _replace(new: Attachment, engine: Engine) -> None:
    """Replace the attachment of a model; on failure restore the old one."""
    before = session_of(new.model)
    new.check()
    _give_back(new.model)
    try:
        new.take_over()
    except BaseException:
        new.give_back()
        if before is not None:
            again = engine.session(before.model, before.layout)
            with warnings.catch_warnings(action="ignore"):  # the first attach has warned
                Attachment(again, engine).take_over()
        raise


def _give_back(model: Any) -> None:
    attachment = attachment_of(model)
    if attachment is not None:
        attachment.give_back()


def remake_functions(model: Any) -> None:
    """Make the step functions that a model has anew."""
    for kind in KINDS:
        if getattr(model, kind.function, None) is not None:
            getattr(model, f"make_{kind.function}")(force=True)


def _check_instance(model: Any, standing: Methods) -> None:
    """Raise if an instance has its own step functions, or its own methods that make them.

    Args:
        model: The model.
        standing: The methods that lockstep has put on the instance.
    """
    attributes = vars(model)
    for name in MAKERS:
        if name in attributes and attributes[name] is not standing.get(name):
            raise own_maker(repr(model.name), name)
    for name in (kind.function for kind in KINDS):
        if _is_foreign(attributes.get(name)):
            raise UnsupportedModel(
                f"{model.name!r} already has a custom {name}, but lockstep must create this "
                "function to run the step on several devices.\n"
                f"Set model.{name} = None first, or override {name.replace('function', 'step')}."
            )


def _is_foreign(function: Any) -> bool:
    """Return whether neither Keras nor lockstep made this step function."""
    module = str(getattr(function, "__module__", ""))
    made = module == trainer_module() or module.startswith("lockstep.")
    return function is not None and not made


def _put_on(model: Any, methods: Methods) -> Methods:
    """Set methods on an instance, and return the attributes of the instance they replace."""
    attributes = vars(model)
    own = {name: attributes[name] for name in methods if name in attributes}
    attributes.update(methods)
    return own


def _take_off(model: Any, methods: Methods, own: Methods) -> None:
    """Undo `_put_on`, except for methods that were replaced again since."""
    attributes = vars(model)
    for name, method in methods.items():
        if attributes.get(name) is not method:
            continue
        if name in own:
            attributes[name] = own[name]
        else:
            del attributes[name]


def _loop_methods(loop: Loop) -> dict[str, Callable[..., Any]]:
    """Return the methods of a loop that can replace those of its model, by name.

    A `fit` that the class overrides stays. Lockstep's loop then replaces Keras's `fit` that it
    calls, if a checkpoint or a profile is given.
    """
    methods = {name: getattr(loop, name) for name in LOOPS if loop.replaces(name)}
    if "fit" not in methods and knows_arguments(Loop.fit, "fit"):
        lead_to_loop(_loop_of)
    return methods


def _loop_of(model: Any) -> Loop | None:
    attachment = attachment_of(model)
    return None if attachment is None else attachment.loop


def _announced_fit(
    fit: Callable[..., Any], loop: Loop, line: Callable[[Given, bool], str]
) -> Callable[..., Any]:
    """Wrap `fit`: print a line first, check the call, and let a checkpoint or a profile see all.

    Args:
        fit: The method.
        loop: The loop of the model.
        line: Returns the line, given the arguments of the call, and whether a step is compiled
            first.
    """
    own_loop = not loop.replaces("fit")

    @functools.wraps(fit)
    def fit_in_scope(*args: Any, **kwargs: Any) -> Any:
        given = arguments_of(fit, args, kwargs)
        callbacks = given.get("callbacks")
        prints, several = process_group.is_first() and wants_words(given), process_group.several()
        if several:
            check_course(given, saves=checkpoint_among(callbacks) is not None)
        if prints or several:  # the line may need optimizer slots of all processes
            said = line(given, not own_loop and loop.compiles())
        if prints:
            print(said, flush=True)
        check_times(loop.model.steps_per_execution)
        if several:
            process_group.check_orbax(callbacks)
        with observed_fit(callbacks, own_loop=own_loop):
            return fit(*args, **kwargs)

    return fit_in_scope
