"""Steps that return only the state they change."""

from typing import Any

import jax

State = tuple[Any, ...]


class Reading:
    """The program of a step that reads most of its state, as evaluating and predicting do.

    JAX looks at each array that a program takes or returns. One that returned the weights as it
    got them would cost twice as much as they do, and copy them wherever they are not donated.

    Args:
        program: A compiled function from state and batch to outputs and state, with `None` in
            place of each group of variables that the step has left as it was. The state is not
            donated, as it is used again.
    """

    def __init__(self, program: Any) -> None:
        self._program = program
        self.trace = program.trace
        self.lower = program.lower

    def __call__(self, state: State, batch: Any) -> tuple[Any, State]:
        """The outputs, and the whole state."""
        outputs, changed = self._program(state, batch)
        return outputs, whole(state, changed)


def whole(before: State, changed: State) -> State:
    """The groups that a step has changed, and for each `None` the one of before."""
    return tuple([old if new is None else new for old, new in zip(before, changed, strict=True)])


def changed(before: State, after: State) -> State:
    """While a step is traced: the groups of the state after it, `None` for those it left alone."""
    pairs = zip(before, after, strict=True)
    return tuple([None if _is_same(old, new) else new for old, new in pairs])


def _is_same(old: Any, new: Any) -> bool:
    old, new = jax.tree.leaves(old), jax.tree.leaves(new)
    return len(old) == len(new) and all(map(_is, old, new))


def _is(old: Any, new: Any) -> bool:
    return old is new
