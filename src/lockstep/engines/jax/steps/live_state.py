"""The state of a model outside its variables, while a loop runs.

Between two steps of Keras's JAX loops the variables are empty, and an attribute of the model has
their values. A training step donates these arrays: only the outputs of its program then have the
weights. The loop therefore stores the returned state before an exception can be raised.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import jax

from lockstep.engines.held_signals import HeldSignals, handle_held, held
from lockstep.engines.jax.variable_sync import GROUPS
from lockstep.keras_compat import (
    JAX_STATE,
    JAX_STATE_SYNCED,
    empty_variables,
    take_jax_state,
    trainer_class,
)
from lockstep.launch.status import STATUS_OF_PROCESS

State = tuple[Any, ...]
Program = Callable[[State, Any], tuple[Any, State]]
Result = TypeVar("Result")

_WEIGHTS = ("trainable_variables", "non_trainable_variables")
GROUPS_OF = {"train": GROUPS, "test": (*_WEIGHTS, "metrics_variables"), "predict": _WEIGHTS}
"""The groups of variables that a step takes and returns, in order, by the kind of step."""


class LiveState:
    """Hold the state before or after a step, in the place where Keras syncs it from.

    Args:
        model: The model.
        names: The groups of variables in the state.
        state: The values of the groups, if they have been read.
    """

    def __init__(self, model: Any, names: tuple[str, ...], state: State = ()) -> None:
        self.names = names
        self._attributes = vars(model)  # bypasses tracking, which visits each array
        self._kept: list[tuple[Any, State]] = [(None, state)]

    @property
    def state(self) -> State:
        """The values of the groups."""
        return self._kept[-1][1]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the values of a group of variables, for JAXTrainer.jax_state_sync."""
        return self.state[self.names.index(name)] if name in self.names else default

    def run(self, program: Program, batch: Any) -> Any:
        """Run a program on the state and a batch, and store the state that it returns.

        After an exception the state is either the one before the program or the one after it.
        Signals are held back (`is_whole`) while the old arrays are donated and the new ones are not
        stored. Without `HeldSignals`, `extend` stores the new state before Python handles signals.
        That holds if JAX calls the program without Python, which is every call but the first.

        Returns:
            The outputs of the program.
        """
        kept = self._kept
        kept.extend(map(program, (kept[-1][1],), (batch,)))
        del kept[0]
        STATUS_OF_PROCESS.stepped()
        if held:
            handle_held()
        return kept[0][0]

    def read(self, state: State) -> None:
        """Set the state to values that were read from the variables."""
        self._kept[:] = [(None, state)]

    def stand(self) -> None:
        """Become the state that `jax_state_sync` writes into the variables."""
        self._attributes[JAX_STATE] = self
        self._attributes[JAX_STATE_SYNCED] = False

    def wait(self) -> None:
        """Wait for the last program."""
        jax.block_until_ready(self._kept)

    def is_whole(self) -> bool:
        """Return whether no array of the state has been donated."""
        return not any(value.is_deleted() for value in jax.tree.leaves(self.state))


def is_whole(model: Any) -> bool:
    """Return whether every value of the model is in its variables or in its state."""
    state = vars(model).get(JAX_STATE)
    if vars(model).get(_BUSY):
        return False
    return not isinstance(state, LiveState) or state.is_whole()


_BUSY = "_lockstep_busy"


@contextmanager
def uninterrupted(model: Any) -> Iterator[None]:
    """Hold signals back inside the context, within a loop of the model.

    Python code of JAX may run in a callback of the garbage collector, where Python drops the
    exception of a signal.
    """
    vars(model)[_BUSY] = True
    try:
        yield
    finally:
        del vars(model)[_BUSY]


def with_values_back(model: Any, body: Callable[[], Result], back: Callable[[], object]) -> Result:
    """Return the result of `body`, and put values back into the variables after any signal.

    Args:
        model: The model.
        body: Takes values out of the variables and runs steps.
        back: Puts the values back if the variables are empty.
    """
    return HeldSignals(partial(is_whole, model)).run(body, back)


def take_out(model: Any, purge_model_variables: bool = False, **groups: bool) -> State:
    """Take the state out as Keras does, and store it in the model if variables are emptied.

    Keras keeps the state in a local variable of `fit`, where an interrupt loses it.
    """
    state: State = take_jax_state(trainer_class(), model, **groups)
    if purge_model_variables:
        LiveState(model, tuple(name for name in GROUPS if groups.get(name)), state).stand()
        empty_variables(model, **groups)
    return state


def state_of_keras(model: Any, state: State) -> LiveState:
    """Return the holder of a state that a Keras loop passes to a step function."""
    standing = vars(model).get(JAX_STATE)
    if isinstance(standing, LiveState) and standing.state is state:
        return standing
    live = LiveState(model, GROUPS_BY_NUMBER[len(state)], state)
    if not getattr(model, JAX_STATE_SYNCED):  # else a custom loop, whose variables keep values
        live.stand()
    return live


GROUPS_BY_NUMBER = {len(names): names for names in GROUPS_OF.values()}
