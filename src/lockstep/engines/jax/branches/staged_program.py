"""Run a program in stages on several devices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Var, jaxpr_as_fun

from lockstep.engines.jax.branches.program_cut import Cut, Stage

_Place = tuple[Var, int]
"""A variable of the program on one device. The host has the number -1."""

HOST = -1


@dataclass(frozen=True)
class _Run:
    """A compiled stage, and what moves before and after it.

    Attributes:
        device: The number of its device.
        program: The compiled stage.
        moves: What is copied to the device first, and from where.
        arguments: What the stage takes.
        results: What the stage returns.
        last: What no later stage needs.
    """

    device: int
    program: Callable[..., Any]
    moves: tuple[_Place, ...]
    arguments: tuple[_Place, ...]
    results: tuple[_Place, ...]
    last: tuple[_Place, ...]


class StagedProgram:
    """A program in stages, each compiled for its device.

    Starting a stage does not wait for it, so stages that need one another's results in no order
    run side by side. An intermediate value is freed after the last stage that needs it.

    Args:
        cut: The stages.
        devices: The devices, by their number.
        input_devices: Where each input is; `None` for the host.
        output_devices: Where each output is to be; `None` for where it is computed.
        donate: Whether the inputs on devices may be overwritten.
    """

    def __init__(
        self,
        cut: Cut,
        devices: Sequence[jax.Device],
        input_devices: Sequence[int | None],
        output_devices: Sequence[int | None],
        *,
        donate: bool,
    ) -> None:
        self._devices = devices
        self._inputs = [
            (var, HOST if device is None else device)
            for var, device in zip(cut.inputs, input_devices, strict=True)
        ]
        self._constants = {(var, HOST): value for var, value in cut.constants.items()}
        where = dict([*self._inputs, *self._constants, *cut.devices.items()])
        self._outputs = [(out, where[out]) if isinstance(out, Var) else out for out in cut.outputs]
        self._output_devices = output_devices
        kept = {out for out in self._outputs if isinstance(out, tuple)} | set(self._constants)
        freed = {place for place in self._inputs if donate and place[1] != HOST} - kept
        self._runs = _runs(cut.stages, where, kept, freed, set(self._inputs))

    def __call__(self, *arguments: Any) -> list[Any]:
        """Start all stages, and return the outputs."""
        values = dict(zip(self._inputs, arguments, strict=True)) | self._constants
        for run in self._runs:
            if run.moves:
                device = self._devices[run.device]
                moved = jax.device_put([values[place] for place in run.moves], device)
                for (var, _), value in zip(run.moves, moved, strict=True):
                    values[var, run.device] = value
            results = run.program(*[values[place] for place in run.arguments])
            values.update(zip(run.results, results, strict=True))
            for place in run.last:
                del values[place]
        return [
            self._at_home(values[out] if isinstance(out, tuple) else out.val, out, device)
            for out, device in zip(self._outputs, self._output_devices, strict=True)
        ]

    def _at_home(self, value: Any, out: Any, device: int | None) -> Any:
        if isinstance(out, Literal):
            aval: Any = out.aval
            value = jnp.asarray(value, aval.dtype)
        if device is None or (isinstance(out, tuple) and out[1] == device):
            return value
        return jax.device_put(value, self._devices[device])


def _runs(
    stages: tuple[Stage, ...],
    where: dict[Var, int],
    kept: set[_Place],
    freed: set[_Place],
    inputs: set[_Place],
) -> list[_Run]:
    """Decide when what is copied, overwritten and freed.

    Args:
        stages: The stages in the order in which they start.
        where: The device that has each variable first.
        kept: The places that are needed after the last stage.
        freed: The inputs that may be overwritten.
        inputs: The inputs.
    """
    plans: list[tuple[Stage, list[_Place], list[_Place], list[_Place]]] = []
    copied: set[_Place] = set()
    last_use: dict[_Place, int] = {}
    for number, stage in enumerate(stages):
        moves = []
        for var in stage.inputs:
            if where[var] == stage.device:
                continue
            if (var, stage.device) not in copied:
                copied.add((var, stage.device))
                moves.append((var, where[var]))
                last_use[var, where[var]] = number
        arguments = [(var, stage.device) for var in stage.inputs]
        results = [(var, stage.device) for var in stage.outputs]
        last_use.update(dict.fromkeys([*arguments, *results], number))
        plans.append((stage, moves, arguments, results))

    made = []
    for number, (stage, moves, arguments, results) in enumerate(plans):
        places = dict.fromkeys([*moves, *arguments, *results])
        last = [place for place in places if last_use[place] == number and place not in kept]
        # A copy may share its memory with what it was copied from.
        owned = [
            place in last
            and where[place[0]] == place[1]
            and (place not in inputs or place in freed)
            for place in arguments
        ]
        donated = _reusable(arguments, owned, results)
        program = jax.jit(jaxpr_as_fun(stage.program), donate_argnums=donated)
        made.append(_Run(stage.device, program, *map(tuple, (moves, arguments, results, last))))
    return made


def _reusable(arguments: list[_Place], owned: list[bool], results: list[_Place]) -> tuple[int, ...]:
    """Return the numbers of the arguments whose memory can hold a result."""

    def form(place: _Place) -> Any:
        aval: Any = place[0].aval
        return aval.shape, aval.dtype

    free = [form(place) for place in results]
    numbers = []
    for number, (place, own) in enumerate(zip(arguments, owned, strict=True)):
        if own and form(place) in free:
            free.remove(form(place))
            numbers.append(number)
    return tuple(numbers)
