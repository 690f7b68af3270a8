"""The conditions of the source that depend on the kind of a device or on the place of a process.

The syntax tree tells them. A process of the tests imports the source with each of them wrapped, and
notes in the file `NOTED_CONDITIONS` which values they had.
"""

import ast
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src" / "lockstep"
GPU, TPU = "gpu", "tpu"
NAMES = {GPU: {"gpu", "cuda", "mps", "xpu"}, TPU: {"tpu"}}
"""Texts that name a kind of device, by the kind that is pretended."""
KINDS = {"cpu"}.union(*NAMES.values())

OF_DEVICES = {
    GPU: {"is_cuda": True, "draws_ahead": True, "_on_host": False},
    TPU: {"is_cuda": False, "draws_ahead": True, "_on_host": False},
}
"""Attributes that depend on the kind of device, and what they are on a pretended device."""

OF_PLACES = {"process_index", "is_fully_addressable", "local_rank", "divides_devices"}
"""Names that tell which process has a device."""

FUNCTIONS = {"is_gpu": True, "keras_uses_gpus": True, "exchanges_by_nccl": True}
"""Functions of the engines that tell the kind of device, and what they return on GPUs."""

NOTE = "__noted_condition__"


def conditions(source: str, name: str, kind: str = GPU) -> dict[str, set[bool]]:
    """Return the conditions of a file, and the values that pretended devices must give them."""
    finder = _Finder(name, kind=kind)
    finder.visit(ast.parse(source))
    return finder.found


def noted(source: str, name: str) -> ast.Module:
    """Return the tree of a file in which each condition calls `__noted_condition__`."""
    tree = _Finder(name, wraps=True).visit(ast.parse(source))
    return ast.fix_missing_locations(tree)


def of_source(kind: str = GPU) -> dict[str, set[bool]]:
    """Return the conditions of all files."""
    found: dict[str, set[bool]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        found |= conditions(path.read_text(), str(path.relative_to(SOURCE)), kind)
    return found


def unseen(
    notes: Path,
    elsewhere: Collection[str],
    within: str = "",
    but: Collection[str] = (),
    kind: str = GPU,
) -> dict[str, set[bool]]:
    """Return the conditions that did not have the values of pretended devices, and these values.

    Args:
        notes: What processes have noted.
        elsewhere: How the conditions begin that no program reaches. Each of them has to be there.
        within: How the conditions begin that count.
        but: How others of them begin, of which other tests tell.
        kind: The kind of device that is pretended.
    """
    every = of_source(kind)
    unused = [each for each in elsewhere if not any(c.startswith(each) for c in every)]
    assert not unused, unused
    had, left_out = read(notes), (*elsewhere, *but)
    counts = {c: v for c, v in every.items() if c.startswith(within) and not c.startswith(left_out)}
    return {c: v - had.get(c, set()) for c, v in counts.items() if v - had.get(c, set())}


def note_into(path: str) -> Callable[[str, Any], Any]:
    """Return a function that notes the truth of a condition, once, and returns its value."""
    seen = set()

    def note(condition: str, value: Any) -> Any:
        said = f"{condition}\t{bool(value)}\n"
        if said not in seen:
            seen.add(said)
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(handle, said.encode())
            os.close(handle)
        return value

    return note


def read(path: Path) -> dict[str, set[bool]]:
    """Return which values conditions had, from what processes noted."""
    found: dict[str, set[bool]] = {}
    for line in path.read_text().splitlines():
        condition, _, value = line.partition("\t")
        found.setdefault(condition, set()).add(value == "True")
    return found


class _Finder(ast.NodeTransformer):
    def __init__(self, name: str, wraps: bool = False, kind: str = GPU) -> None:
        self._name = name
        self._kind = kind
        self._wraps = wraps
        self._within: list[str] = []
        self.found: dict[str, set[bool]] = {}

    def _scope(self, node: Any) -> Any:
        self._within.append(node.name)
        self.generic_visit(node)
        self._within.pop()
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _scope

    def visit_Compare(self, node: ast.Compare) -> Any:
        names = set(_names(node))
        kinds = [each for each in _texts(node) if each in KINDS]
        if isinstance(node.ops[0], ast.Eq | ast.NotEq) and kinds:
            is_other = isinstance(node.ops[0], ast.NotEq)
            is_named = not NAMES[self._kind].isdisjoint(kinds)
            return self._noted(node, {is_named != is_other})
        if names & OF_PLACES or ("platform" in names and "sys" not in names):
            return self._noted(node, {True, False})
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        function = node.func
        if isinstance(function, ast.Name) and function.id in FUNCTIONS:
            return self._noted(node, {FUNCTIONS[function.id]})
        if isinstance(function, ast.Attribute):
            if function.attr == "startswith" and _texts(node) and "cpu" in _texts(node)[0]:
                return self._noted(node, {False})
            if "cuda" in _names(function.value) and function.attr.startswith("is_"):
                return self._noted(node, {True})
        return self.generic_visit(node)

    def _tested(self, node: Any) -> Any:
        """Visit what has a test: a name alone may be a condition there."""
        for field in ("test", "operand"):
            if hasattr(node, field):
                setattr(node, field, self._name_alone(getattr(node, field)))
        if isinstance(node, ast.BoolOp):
            node.values = [self._name_alone(each) for each in node.values]
        return self.generic_visit(node)

    visit_If = visit_IfExp = visit_While = visit_BoolOp = visit_UnaryOp = _tested

    def _name_alone(self, node: Any) -> Any:
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in OF_DEVICES[self._kind]:
                return self._noted(node, {OF_DEVICES[self._kind][name]})
            if name in OF_PLACES:
                return self._noted(node, {True, False})
        return node

    def _noted(self, node: ast.expr, needed: set[bool]) -> ast.expr:
        condition = f"{self._name} {'.'.join(self._within)}: {ast.unparse(node)}"
        self.found.setdefault(condition, set()).update(needed)
        if not self._wraps:
            return node
        called = ast.Name(NOTE, ast.Load())
        return ast.copy_location(ast.Call(called, [ast.Constant(condition), node], []), node)


def _names(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Attribute):
            yield each.attr


def _texts(node: ast.AST) -> list[str]:
    every = (each for each in ast.walk(node) if isinstance(each, ast.Constant))
    return [each.value for each in every if isinstance(each.value, str)]
