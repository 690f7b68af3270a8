"""The batches of the next execution, drawn and under way to the devices while this one runs."""

import contextlib
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import jax

from lockstep.engines.jax.steps.step import Program, State, StepFunction


def looks_ahead(devices: list[jax.Device]) -> bool:
    """Whether batches are drawn before the callbacks of the step before them.

    Keras draws one batch ahead on an accelerator, which would be idle while a callback waits
    for a loss and the next batch is read. On a CPU it draws each batch in its turn.
    """
    # keras/src/backend/jax/trainer.py, JAXEpochIterator._get_iterator
    platform: str = devices[0].platform
    return platform != "cpu"


class Ahead:
    """What was drawn ahead of its turn, if anything: batches, or the end of the data."""

    def __init__(self) -> None:
        self._iterator: Any = None
        self._step: StepFunction | None = None
        self._drawn: list[Any] | Exception = []
        self._programs: Iterable[tuple[Program, Any]] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been drawn ahead."""
        return self._iterator is None

    def look(self, step: StepFunction, state: State, iterator: Iterator[Any], times: int) -> None:
        """Draw the batches of so many steps, and send the first of them off.

        Whatever goes wrong is told in its turn.
        """
        self._iterator, self._step, self._programs = iterator, step, None
        try:
            self._drawn = step.pull(iterator, times)
        except Exception as error:
            self._drawn = error
            return
        with contextlib.suppress(Exception):  # then they are placed in their turn
            programs = iter(step.programs(state, self._drawn))
            self._programs = chain([next(programs)], programs)

    def drawn(self, iterator: Iterator[Any]) -> list[Any]:
        """The batches that were drawn ahead from this iterator, once.

        Raises:
            Exception: What was met when they were drawn, `StopIteration` for example.
        """
        if self._iterator is not iterator:  # an epoch that was stopped has left something
            self._drawn, self._programs = [], None
        drawn, self._drawn, self._iterator = self._drawn, [], None
        if isinstance(drawn, Exception):
            raise drawn
        return drawn

    def programs(self, step: StepFunction) -> Iterable[tuple[Program, Any]] | None:
        """What runs the batches that `drawn` gave, where this step was to; once."""
        programs, self._programs = self._programs, None
        return programs if self._step is step else None
