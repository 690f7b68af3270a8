"""The rules of the house that a machine can see."""

import ast
import graphlib
import inspect
from pathlib import Path

import pytest

import lockstep
from tests.processes.common import python

SOURCE = Path(lockstep.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
FRAMEWORKS = {"jax", "tensorflow", "torch"}
FILES_OF = {"rescue/states.py": {"torch"}}
"""Who may import a framework to read a file that only it can read."""

LAYERS = [
    {"errors"},
    {"checkpoints", "devices", "shards", "layout", "scaling", "values", "verification"},
    {"announce"},
    {"engines"},
    {"batches", "comparison", "launch", "targets"},
    {"distribute", "rehearsal", "checkpoint", "export", "branches", "verify", "plan", "rescue"},
    {"measurement"},
    {"bench"},
    {"demo", "report"},
    {"cli", "__init__", "__main__"},
]
"""What may import what: only from the same line or one above."""


def test_importing_lockstep_imports_no_framework():
    script = (
        "import lockstep, sys\n"
        "print([m for m in ('keras', 'jax', 'tensorflow', 'torch', 'numpy', 'h5py')"
        " if m in sys.modules])"
    )
    assert python(script) == "[]"
    assert python(script, LOCKSTEP_REHEARSE="4") == "[]"


def test_the_public_names():
    public = {
        name
        for name in dir(lockstep)
        if not name.startswith("_")
        and (not inspect.ismodule(getattr(lockstep, name)) or name == "errors")
    }
    star = {}
    exec("from lockstep import *", star)
    assert star.keys() - {"__builtins__"} == public
    assert public == {
        "Checkpoint",
        "devices",
        "distribute",
        "errors",
        "inspect",
        "load_weights",
        "multi_gpu_model",
        "rehearse",
        "release",
        "rescue",
        "verify",
    }


def test_every_public_function_tells_the_whole_story():
    functions = [
        item
        for name, item in vars(lockstep).items()
        if inspect.isfunction(item) and not name.startswith("__")
    ]
    for function in functions:
        if function.__name__.startswith("rehearse_from"):
            continue
        sections = ["Raises:", "Example:"]
        sections += ["Args:"] if inspect.signature(function).parameters else []
        sections += ["Returns:"] if function.__name__ != "rehearse" else []
        for section in sections:
            assert section in function.__doc__, (function.__name__, section)


def test_the_public_class_tells_the_whole_story():
    for section in ("Args:", "Raises:", "Example:"):
        assert section in lockstep.Checkpoint.__doc__, section
    with pytest.raises(AttributeError, match="has no attribute 'Checkpoints'"):
        _ = lockstep.Checkpoints


def test_only_engines_import_a_framework_or_a_private_part_of_keras():
    for path in FILES:
        imported = set(_imports(path))
        outside = path.relative_to(SOURCE).parts[0] != "engines"
        if outside:
            frameworks = {name.split(".")[0] for name in imported} & FRAMEWORKS
            assert frameworks <= FILES_OF.get(path.relative_to(SOURCE).as_posix(), set()), path
            assert not {name for name in imported if name.startswith("keras.src")}, path


def test_imports_go_down_only():
    modules = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in FILES}
    assert modules <= set().union(*LAYERS), "every module has its place in LAYERS"
    height = {name: level for level, names in enumerate(LAYERS) for name in names}
    for path in FILES:
        place = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for name in _imports(path):
            if name.startswith("lockstep."):
                target = name.split(".")[1]
                if target in height:  # a module, and no name out of the package itself
                    assert height[target] <= height[place], f"{path}: {name}"


def test_no_engine_knows_another_and_its_parts_import_one_another_in_one_direction():
    engines = SOURCE / "engines"
    uses = {}
    for path in sorted(engines.rglob("*.py")):
        imported = {
            name.removeprefix("lockstep.engines.").replace(".", "/")
            for name in _imports(path)
            if name.startswith("lockstep.engines.")
        }
        files = [engines / f"{name}.py" for name in imported]
        part = _part(path.relative_to(engines))
        known = {_part(file.relative_to(engines)) for file in files if file.exists()} - {part}
        uses.setdefault(part, set()).update(known)
        others = {name.split("/")[0] for name in known if "/" in name} - {part.split("/")[0]}
        assert not others or path == engines / "__init__.py", f"{path}: {others}"
    assert uses["jax/fit"], "imports are seen"
    assert uses["tensorflow/steps"], "imports are seen"
    graphlib.TopologicalSorter(uses).prepare()  # raises where two parts import each other


def _part(path):
    """A folder of an engine, or a file beside one."""
    return "/".join(path.with_suffix("").parts[:2])


def test_no_file_is_two_ideas():
    long = {
        str(path): lines for path in FILES if (lines := len(path.read_text().splitlines())) > 400
    }
    assert not long


def test_private_parts_of_keras_are_told_with_their_place():
    for path in FILES:
        text = path.read_text()
        if "keras.src" in text:
            assert "keras/src/" in text, f"{path}: say where in Keras it stands"


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
