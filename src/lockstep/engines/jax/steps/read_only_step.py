"""Steps that return only the part of the state that they change."""

from typing import Any

import jax

State = tuple[Any, ...]


class ReadOnlyStep:
    """Run a step that reads most of its state, such as evaluation or prediction.

    JAX handles every array that a program takes or returns. Returning unchanged weights would
    double that cost, and copy the weights where they are not donated.

    Args:
        program: A compiled function from state and batch to outputs and the changed groups of
            variables, by position. The state is not donated, as it is used again.

    Attributes:
        program: The compiled function.
    """

    def __init__(self, program: Any) -> None:
        self.program = program
        self.trace = program.trace
        self.lower = program.lower

    def __call__(self, state: State, batch: Any) -> tuple[Any, State]:
        """Return the outputs and the whole state."""
        outputs, changed = self.program(state, batch)
        return outputs, whole(state, changed)


def whole(before: State, changed: dict[int, Any]) -> State:
    """Return the state after a step: the changed groups, and all other groups of `before`."""
    if not changed:
        return before
    after = list(before)
    for position, group in changed.items():
        after[position] = group
    return tuple(after)


def changed(before: State, after: State) -> list[int]:
    """Return the positions of the groups that a step changes, while it is traced."""
    pairs = enumerate(zip(before, after, strict=True))
    return [position for position, (old, new) in pairs if not _is_same(old, new)]


def _is_same(old: Any, new: Any) -> bool:
    old, new = jax.tree.leaves(old), jax.tree.leaves(new)
    return len(old) == len(new) and all(map(_is, old, new))


def _is(old: Any, new: Any) -> bool:
    return old is new
