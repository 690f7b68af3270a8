"""Cut the program of a step into stages, each of which runs on one device.

JAX traces the whole step: forward pass, loss, backward pass, optimizer and metrics. Layers run in
a `jax.named_scope` that names their device, and JAX keeps the scope of an operation in its
derivative. So each equation of the traced program tells its device, and the operations are those of
one device. An equation without a scope, as in a loss or an optimizer, follows its largest input.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from lockstep.engines.jax.jax_compat import dce_jaxpr, names_of_arguments, parameters

_DEVICE = re.compile(r"lockstep_device_([a-z]+)_(\d+)")

_CALLS = ("jit", "pjit", "closed_call", "core_call")
"""Equations that only call another program."""

_SMALL = 1024
"""The most bytes of a value that every stage computes for itself, such as a learning rate."""


def device_scope(device: str) -> Any:
    """Return the scope of operations that run on the device with this name."""
    return jax.named_scope(f"lockstep_device_{device.replace(':', '_')}")


@dataclass(frozen=True)
class Stage:
    """A part of the program that runs on one device without a break.

    Attributes:
        device: The number of the device.
        program: The part, as a program of its own.
        inputs: The variables of the whole program that it takes, in order.
        outputs: The variables of the whole program that it returns, in order.
    """

    device: int
    program: ClosedJaxpr
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]


@dataclass(frozen=True)
class Cut:
    """A program in stages.

    Attributes:
        inputs: The inputs of the program.
        constants: The values of its constants.
        outputs: The outputs of the program: variables or constants.
        stages: The stages. Each one comes after those that it needs.
        devices: The number of the device that computes each variable, inputs excluded.
    """

    inputs: tuple[Var, ...]
    constants: dict[Var, Any]
    outputs: tuple[Any, ...]
    stages: tuple[Stage, ...]
    devices: dict[Var, int]


@dataclass
class _Equation:
    """An equation of the program without inner calls.

    Attributes:
        equation: The equation.
        device: The number of its device, `None` if it has no scope.
    """

    equation: JaxprEqn
    device: int | None

    @property
    def inputs(self) -> list[Var]:
        return [atom for atom in self.equation.invars if isinstance(atom, Var)]

    @property
    def outputs(self) -> list[Var]:
        return self.equation.outvars


def cut(
    program: ClosedJaxpr,
    names: Sequence[str],
    input_devices: Sequence[int | None],
    output_devices: Sequence[int | None],
    main: int,
) -> Cut:
    """Cut a program into stages.

    Each equation runs once, in one stage, except small ones without a scope, such as those of a
    learning rate: a stage that needs one computes it itself.

    Args:
        program: The traced program.
        names: The names of the devices, by their number.
        input_devices: The device of each input; `None` for data that are sent to where they are
            needed.
        output_devices: The device where each output is kept; `None` for where it is computed.
        main: The device of what depends on no device.
    """
    constants: dict[Var, Any] = {}
    atoms: dict[Var, Any] = {var: var for var in program.jaxpr.invars}
    numbers = {name: number for number, name in enumerate(names)}
    equations = list(_without_calls(program, atoms, constants, numbers, None))
    inputs = tuple(program.jaxpr.invars)
    outputs = tuple(_atom(atoms, out) for out in program.jaxpr.outvars)

    kept = {
        out: main if device is None else device
        for out, device in zip(outputs, output_devices, strict=True)
        if isinstance(out, Var)
    }
    homes = {
        var: device for var, device in zip(inputs, input_devices, strict=True) if device is not None
    }
    equations, everywhere, devices = _assign(equations, homes, set(constants), kept, main)
    data = set(inputs) - homes.keys()
    unnamed = names_of_arguments(program)
    stages = _stages(_group(equations, data), equations, everywhere, outputs, unnamed)
    return Cut(inputs, constants, outputs, stages, devices)


# -------------------------------------------------------------------- one flat list of equations


def _without_calls(
    program: ClosedJaxpr,
    atoms: dict[Var, Any],
    constants: dict[Var, Any],
    numbers: dict[str, int],
    device: int | None,
) -> Iterator[_Equation]:
    """Yield the equations of a program, with those of the programs that it calls in their place.

    Args:
        program: The program.
        atoms: What the variables of `program` are in the flat list. Its inputs are given.
        constants: Gets the values of constants.
        numbers: The numbers of the devices.
        device: The device of an equation that has no scope of its own.
    """
    for var, value in zip(program.jaxpr.constvars, program.consts, strict=True):
        atoms[var] = Var(var.aval)
        constants[atoms[var]] = value
    for equation in program.jaxpr.eqns:
        scopes = str(equation.source_info.name_stack)
        here = _last_device(scopes, numbers, device)
        given = [_atom(atoms, atom) for atom in equation.invars]
        if equation.primitive.name in _CALLS:
            params = parameters(equation)
            called = params["call_jaxpr" if "call_jaxpr" in params else "jaxpr"]
            inner = dict(zip(called.jaxpr.invars, given, strict=True))
            yield from _without_calls(called, inner, constants, numbers, here)
            made = [_atom(inner, out) for out in called.jaxpr.outvars]
            atoms.update(zip(equation.outvars, made, strict=True))
            continue
        fresh = [Var(var.aval) for var in equation.outvars]
        atoms.update(zip(equation.outvars, fresh, strict=True))
        yield _Equation(equation.replace(invars=given, outvars=fresh), here)


def _atom(atoms: dict[Var, Any], atom: Any) -> Any:
    return atom if isinstance(atom, Literal) else atoms[atom]


def _last_device(scopes: str, numbers: dict[str, int], default: int | None) -> int | None:
    found = _DEVICE.findall(scopes)
    return numbers[":".join(found[-1])] if found else default


def devices_in_loops(program: ClosedJaxpr) -> set[str]:
    """Return the devices of layers inside a loop that runs on another device.

    A loop of JAX, such as the scan of an RNN, is one equation and runs on one device.
    """
    found: set[str] = set()
    for equation in program.jaxpr.eqns:
        inner = [part for value in parameters(equation).values() for part in _programs_in(value)]
        if equation.primitive.name in _CALLS:
            found |= set().union(*map(devices_in_loops, inner))
        elif equation.primitive.name in ("scan", "while"):
            here = _DEVICE.findall(str(equation.source_info.name_stack))
            there = set().union(*map(_devices_in, inner))
            found |= {":".join(device) for device in there - set(here[-1:])}
    return found


def _devices_in(program: ClosedJaxpr) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for equation in program.jaxpr.eqns:
        found.update(_DEVICE.findall(str(equation.source_info.name_stack))[-1:])
        for value in parameters(equation).values():
            found |= set().union(*map(_devices_in, _programs_in(value)))
    return found


def _programs_in(value: Any) -> list[ClosedJaxpr]:
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, ClosedJaxpr)]


# ------------------------------------------------------------------- the device of each equation


def _assign(
    equations: list[_Equation],
    homes: dict[Var, int],
    constants: set[Var],
    kept: dict[Var, int],
    main: int,
) -> tuple[list[_Equation], dict[Var, _Equation], dict[Var, int]]:
    """Give every equation a device.

    Returns:
        The equations that one stage runs, the small ones that every stage may run (by the
        variables that they compute), and the device that computes each variable.
    """
    devices = dict(homes)
    small = {var for var in homes if _bytes(var) <= _SMALL} | constants
    everywhere: dict[Var, _Equation] = {}
    placed: list[_Equation] = []
    unknown: list[_Equation] = []
    for each in (part for whole in equations for part in _split_branches(whole, devices)):
        if each.device is None and _is_small(each, small):
            small.update(each.outputs)
            everywhere.update(dict.fromkeys(each.outputs, each))
            continue
        if each.device is None:
            each.device = _largest(each.inputs, devices)
        placed.append(each)
        if each.device is None:
            unknown.append(each)
        else:
            devices.update(dict.fromkeys(each.outputs, each.device))

    users: dict[Var, list[_Equation]] = {}
    for each in placed:
        for var in each.inputs:
            users.setdefault(var, []).append(each)
    for each in reversed(unknown):
        found = [user.device for var in each.outputs for user in users.get(var, [])]
        at_home = [kept[var] for var in each.outputs if var in kept]
        each.device = next((d for d in [*at_home, *found] if d is not None), main)
        devices.update(dict.fromkeys(each.outputs, each.device))

    for var, home in kept.items():  # a small value that is an output: one stage returns it
        if var in everywhere and var not in devices:
            each = everywhere[var]
            placed.append(_Equation(each.equation, home))
            devices.update(dict.fromkeys(each.outputs, home))
    return placed, everywhere, {var: d for var, d in devices.items() if var not in homes}


def _is_small(each: _Equation, small: set[Var]) -> bool:
    equation = each.equation
    if equation.effects or any(map(_is_program, parameters(equation).values())):
        return False
    inputs = each.inputs
    size = sum(map(_bytes, each.outputs))
    return all(var in small for var in inputs) and (not inputs or size <= _SMALL)


def _is_program(value: Any) -> bool:
    values = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(each, Jaxpr | ClosedJaxpr) or callable(each) for each in values)


def _largest(variables: Iterable[Var], devices: dict[Var, int]) -> int | None:
    known = [var for var in variables if var in devices]
    return devices[max(known, key=_bytes)] if known else None


def _bytes(var: Var) -> int:
    aval: Any = var.aval
    return math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "shape") else 0


def _split_branches(each: _Equation, devices: dict[Var, int]) -> list[_Equation]:
    """Split a conditional whose outputs belong to several devices, one for each device.

    An optimizer that skips a step, as one that scales the loss, updates all variables in one
    conditional. Each of the new ones computes the outputs of one device, and what they need.
    """
    equation = each.equation
    if each.device is not None or equation.primitive.name != "cond":
        return [each]
    branches = parameters(equation)["branches"]
    groups: dict[int | None, list[int]] = {}
    for number in range(len(equation.outvars)):
        _, used = _reduced(branches, [number])
        given = [atom for atom, use in zip(equation.invars[1:], used, strict=True) if use]
        device = _largest([atom for atom in given if isinstance(atom, Var)], devices)
        groups.setdefault(device, []).append(number)
    if len(groups) < 2:
        return [each]
    split = []
    for device, numbers in groups.items():
        reduced, used = _reduced(branches, numbers)
        given = [atom for atom, use in zip(equation.invars[1:], used, strict=True) if use]
        part = equation.replace(
            invars=[equation.invars[0], *given],
            outvars=[equation.outvars[number] for number in numbers],
            params={**parameters(equation), "branches": reduced},
        )
        split.append(_Equation(part, device))
    return split


def _reduced(branches: Any, numbers: list[int]) -> tuple[tuple[ClosedJaxpr, ...], list[bool]]:
    """Return branches that compute only these outputs, and which inputs they need."""
    count = len(branches[0].jaxpr.outvars)
    wanted = [number in numbers for number in range(count)]
    used = [False] * len(branches[0].jaxpr.invars)
    for branch in branches:
        _, needs = dce_jaxpr(branch.jaxpr, wanted)
        used = [a or b for a, b in zip(used, needs, strict=True)]
    reduced = tuple(
        ClosedJaxpr(dce_jaxpr(branch.jaxpr, wanted, instantiate=used)[0], branch.consts)
        for branch in branches
    )
    return reduced, used


# --------------------------------------------------------------------------------------- stages

_Key = tuple[int, int]
"""The depth and the device of a stage."""


def _group(equations: list[_Equation], data: set[Var]) -> dict[_Key, list[int]]:
    """Group equations into stages without a cycle between stages.

    The depth of an equation is the largest number of changes of device on a way to it. Equations
    of one device and one depth are a stage. So a stage needs only stages of a smaller depth.
    """
    keys: dict[Var, _Key] = {}
    found: list[_Key] = []
    for each in equations:
        device = each.device or 0
        before = [keys[var] for var in each.inputs if var in keys]
        depth = max((d + (other != device) for d, other in before), default=0)
        found.append((depth, device))
        keys.update(dict.fromkeys(each.outputs, found[-1]))
    groups: dict[_Key, list[int]] = {}
    for number, key in enumerate(_as_late_as_needed(equations, found, data)):
        groups.setdefault(key, []).append(number)
    return groups


def _as_late_as_needed(equations: list[_Equation], keys: list[_Key], data: set[Var]) -> list[_Key]:
    """Move equations that need no data to the first stage of the same device that needs them.

    Those of the weights of a later layer would otherwise be in a small stage of their own.
    """
    of_data = set(data)
    users: dict[Var, list[_Key]] = {}
    late = list(keys)
    for each in equations:
        if any(var in of_data for var in each.inputs):
            of_data.update(each.outputs)
    for number in reversed(range(len(equations))):
        each, (_, device) = equations[number], keys[number]
        after = [key for var in each.outputs for key in users.get(var, [])]
        free = not any(var in of_data for var in each.outputs)
        if free and after and all(key[1] == device for key in after):
            late[number] = min(after)
        for var in each.inputs:
            users.setdefault(var, []).append(late[number])
    return late


def _stages(
    groups: dict[_Key, list[int]],
    equations: list[_Equation],
    everywhere: dict[Var, _Equation],
    outputs: tuple[Any, ...],
    names: Any,
) -> tuple[Stage, ...]:
    maker = {
        var: key for key, group in groups.items() for n in group for var in equations[n].outputs
    }
    bodies = {key: _body(group, equations, everywhere) for key, group in groups.items()}
    needs = {key: _inputs(body) for key, body in bodies.items()}
    wanted = {var for var in outputs if isinstance(var, Var)}
    for key, inputs in needs.items():
        wanted.update(var for var in inputs if maker.get(var, key) != key)

    stages = []
    # A stage needs only stages of a smaller depth.
    for key in sorted(groups, key=lambda key: (key[0], groups[key][0])):
        returned = [var for n in groups[key] for var in equations[n].outputs if var in wanted]
        inputs = needs[key]
        body = [each.equation for each in bodies[key]]
        effects = frozenset().union(*(equation.effects for equation in body))
        program = Jaxpr([], inputs, returned, body, effects, names)
        stages.append(Stage(key[1], ClosedJaxpr(program, ()), tuple(inputs), tuple(returned)))
    return tuple(stages)


def _body(
    group: list[int], equations: list[_Equation], everywhere: dict[Var, _Equation]
) -> list[_Equation]:
    """Return the equations of a stage, and before them the small ones that it needs."""
    small: dict[int, _Equation] = {}

    def add(var: Var) -> None:
        each = everywhere.get(var)
        if each is None or id(each) in small:
            return
        for needed in each.inputs:
            add(needed)
        small[id(each)] = each

    own = []
    for each in (equations[number] for number in group):
        for var in [*each.inputs, *each.outputs]:
            add(var)
        if not any(var in everywhere for var in each.outputs):
            own.append(each)
    return [*small.values(), *own]


def _inputs(body: list[_Equation]) -> list[Var]:
    made = {var for each in body for var in each.outputs}
    return list(dict.fromkeys(var for each in body for var in each.inputs if var not in made))
