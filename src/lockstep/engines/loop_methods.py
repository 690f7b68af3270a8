"""The methods of a model that run its steps, as the attachments of all engines replace them."""

import functools
from collections.abc import Callable, Collection
from typing import Any

from lockstep.checkpoint.callback import fit_scope
from lockstep.engines.call_guard import LOOPS, STEPPING, CallGuard
from lockstep.fit_lines import Given, arguments_of, wants_words
from lockstep.processes import process_group
from lockstep.training.inner_fit import lead_to_loop
from lockstep.training.input import check_times
from lockstep.training.loop import Loop
from lockstep.training.overrides import knows_arguments


def loop_methods(loop: Loop, names: Collection[str] = LOOPS) -> dict[str, Callable[..., Any]]:
    """Return the methods of a loop that can replace those of its model, by name.

    A `fit` that the class overrides stays. Lockstep's loop then replaces Keras's `fit` that it
    calls, if a checkpoint is given.
    """
    methods = {name: getattr(loop, name) for name in names if loop.replaces(name)}
    if "fit" not in methods and knows_arguments(Loop.fit, "fit"):
        lead_to_loop()
    return methods


def stepping_methods(
    loop: Loop,
    turns: CallGuard,
    line: Callable[[Given, bool], str],
    names: Collection[str] = LOOPS,
) -> dict[str, Callable[..., Any]]:
    """Return the methods of a model that run steps, guarded, by name.

    Args:
        loop: The loop of the model.
        turns: Lets one of the methods run at a time.
        line: Returns the line that `fit` prints; see `announced_fit`.
        names: The methods that the loop may replace.
    """
    methods = {name: getattr(loop.model, name) for name in STEPPING}
    methods |= loop_methods(loop, names)
    methods["fit"] = announced_fit(methods["fit"], loop, line)
    return {name: turns.guarded(name, method) for name, method in methods.items()}


def announced_fit(
    fit: Callable[..., Any], loop: Loop, line: Callable[[Given, bool], str]
) -> Callable[..., Any]:
    """Wrap `fit`: print a line first, check the call, and let a checkpoint see all of it.

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
        if process_group.is_first() and wants_words(given):
            print(line(given, not own_loop and loop.compiles()), flush=True)
        check_times(loop.model.steps_per_execution)
        if process_group.several():
            process_group.check_orbax(callbacks)
        with fit_scope(callbacks, own_loop=own_loop):
            return fit(*args, **kwargs)

    return fit_in_scope
