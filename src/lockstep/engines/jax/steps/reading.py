"""Steps that return only the state they change."""

from typing import Any

import jax

State = tuple[Any, ...]


class Reading:
    """The program of a step that reads most of its state, as evaluating and predicting do.

    JAX looks at each array that a program takes or returns. One that returned the weights as it
    got them would cost twice as much as they do, and copy them wherever they are not donated.

    Args:
        program: A compiled function from state and batch to outputs and the groups of variables
            that the step has changed, by position. The state is not donated, as it is used again.

    Attributes:
        program: The same.
    """

    def __init__(self, program: Any) -> None:
        self.program = program
        self.trace = program.trace
        self.lower = program.lower

    def __call__(self, state: State, batch: Any) -> tuple[Any, State]:
        """The outputs, and the whole state."""
        outputs, changed = self.program(state, batch)
        return outputs, whole(state, changed)


def whole(before: State, changed: dict[int, Any]) -> State:
    """The state after a step: what it has changed, and of all other groups those of before."""
    if not changed:
        return before
    after = list(before)
    for position, group in changed.items():
        after[position] = group
    return tuple(after)


def changed(before: State, after: State) -> list[int]:
    """While a step is traced: which groups of the state it has not left alone, by position."""
    pairs = enumerate(zip(before, after, strict=True))
    return [position for position, (old, new) in pairs if not _is_same(old, new)]


def _is_same(old: Any, new: Any) -> bool:
    old, new = jax.tree.leaves(old), jax.tree.leaves(new)
    return len(old) == len(new) and all(map(_is, old, new))


def _is(old: Any, new: Any) -> bool:
    return old is new
