"""The rules of the house that a machine can see."""

import ast
import graphlib
import inspect
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import lockstep
from lockstep import keras_compat
from lockstep.core import engine
from lockstep.core.tried_versions import TRIED
from tests.processes.common import python

SOURCE = Path(lockstep.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
COMPAT = sorted((SOURCE / "keras_compat").glob("*.py"))
FRAMEWORKS = {"jax", "tensorflow", "torch"}

LAYERS = [
    {"errors"},
    {"keras_compat"},
    {"core"},
    {"processes"},
    {"checkpoint"},
    {"training"},
    {"attach"},
    {"engines"},
    {"initialize", "ray_train", "rehearsal"},
    {"distribute"},
    {"branches"},
    {"launch"},
    {"tools"},
    {"rescue"},
    {"cli", "__init__", "__main__"},
]
"""What may import what: only from the same line or one above."""

ROOMS = {
    "jax": (
        "jax_compat devices processes rowtrace steps parts fit branches session introspection"
        " engine"
    ),
    "tensorflow": "tensorflow_compat devices exchange steps first_step branches session engine",
    "torch": (
        "torch_compat exchange sharded same_model steps first_step traced ranks session branches"
        " devices engine"
    ),
}
"""The folders and files on the first level of each engine, likewise."""


def test_importing_lockstep_imports_no_framework():
    script = (
        "import lockstep, sys\n"
        "print([m for m in ('keras', 'jax', 'tensorflow', 'torch', 'numpy', 'h5py', 'ray')"
        " if m in sys.modules])"
    )
    assert python(script) == "[]"
    assert python(script, LOCKSTEP_REHEARSE="4") == "[]"
    # `lockstep run` starts scripts on any machine.
    assert python(f"import lockstep.launch.run_command\n{script}") == "[]"


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
        "Profile",
        "bench",
        "devices",
        "distribute",
        "errors",
        "first_process",
        "initialize",
        "inspect",
        "is_first",
        "load_weights",
        "multi_gpu_model",
        "on",
        "place",
        "placement",
        "plan",
        "predict",
        "process_local",
        "rehearse",
        "release",
        "rescue",
        "rowwise",
        "sharded",
        "split_reading",
        "verify",
    }


def test_every_public_function_tells_the_whole_story():
    functions = [
        item
        for name, item in vars(lockstep).items()
        if inspect.isfunction(item) and not name.startswith("_")
    ]
    for function in functions:
        sections = ["Raises:", "Example:"]
        sections += ["Args:"] if inspect.signature(function).parameters else []
        sections += ["Returns:"] if function.__name__ != "rehearse" else []
        for section in sections:
            assert section in function.__doc__, (function.__name__, section)


def test_the_public_classes_tell_the_whole_story():
    for section in ("Args:", "Raises:", "Example:"):
        for public in (lockstep.Checkpoint, lockstep.Profile):
            assert section in public.__doc__, (public, section)
    with pytest.raises(AttributeError, match="has no attribute 'Checkpoints'"):
        _ = lockstep.Checkpoints


def test_only_engines_import_a_framework():
    for path in FILES:
        imported = set(_imports(path))
        place = path.relative_to(SOURCE).parts[0]
        if place != "engines":
            assert not {name.split(".")[0] for name in imported} & FRAMEWORKS, path


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


@pytest.mark.parametrize("name", ROOMS)
def test_the_rooms_of_an_engine_import_one_another_downwards_only(name):
    engine = SOURCE / "engines" / name
    rooms = ROOMS[name].split()
    assert {path.stem for path in engine.glob("*") if not path.stem.startswith("__")} == {*rooms}
    assert len(list(engine.glob("*.py"))) == 5, "with __init__.py"
    seen = set()
    for path in engine.rglob("*.py"):
        room = path.relative_to(engine).parts[0].removesuffix(".py")
        for imported in _imports(path):
            _, inside, rest = imported.partition(f"lockstep.engines.{name}.")
            target = rest.split(".")[0]
            if inside and target != room:
                seen.add((room, target))
                assert rooms.index(target) < rooms.index(room), f"{path}: {imported}"
    assert ("engine", "session") in seen, "imports are seen"


def test_no_module_imports_itself_through_others():
    """Imports within functions and for types count: they hide a circle, and do not open it."""
    modules = {_module(path): path for path in FILES}
    uses = {name: set(_modules_imported(path, modules)) for name, path in modules.items()}
    assert "lockstep.processes.process_group" in uses["lockstep.checkpoint.callback"]
    assert "lockstep.engines.jax.engine" in uses["lockstep.engines"], "in a function"
    graphlib.TopologicalSorter(uses).prepare()  # raises, and names the modules of a circle


def _module(path):
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def _modules_imported(path, modules):
    """Yield the modules of lockstep that a file names; one of a package stands for itself alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in inner]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name for name in names if name in modules)


def test_an_engine_answers_few_questions():
    """Each member is a question that every engine has to answer, and a reader has to learn."""
    asked = [
        name
        for kind in (engine.Engine, engine.Session, engine.Probe)
        for name in {**vars(kind), **vars(kind).get("__annotations__", {})}
        if not name.startswith("_")
    ]
    assert {"name", "session", "epoch", "recorded"} <= set(asked), "the members are seen"
    assert len(asked) <= 26, asked


@pytest.mark.parametrize("core", ["checkpoint", "processes", "training"])
def test_the_core_knows_no_engine(core):
    """It may use the files beside the engines, which know no framework."""
    beside = {f"lockstep.engines.{path.stem}" for path in (SOURCE / "engines").glob("*.py")}
    for path in sorted((SOURCE / core).rglob("*.py")):
        modules = {name for name in _imports(path) if name.startswith("lockstep.engines.")}
        assert all(".".join(name.split(".")[:3]) in beside for name in modules), path


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
        others -= {"replicas"}  # what two engines share
        assert not others or path == engines / "__init__.py", f"{path}: {others}"
    assert uses["jax/session"], "imports are seen"
    assert uses["tensorflow/steps"], "imports are seen"
    graphlib.TopologicalSorter(uses).prepare()  # raises where two parts import each other


def _part(path):
    """A folder of an engine, or a file beside one."""
    return "/".join(path.with_suffix("").parts[:2])


@pytest.mark.parametrize("engine", ["jax", "tensorflow", "torch"])
def test_an_engine_has_only_what_needs_its_framework(engine):
    """What needs none stands above the engines. A module may import it by another one."""
    folder = SOURCE / "engines" / engine
    uses = {}
    for path in sorted(folder.rglob("*.py")):
        if path.name != "__init__.py":
            module = "lockstep." + ".".join(path.relative_to(SOURCE).with_suffix("").parts)
            uses[module] = set(_imports(path))
    needs = {
        module for module, names in uses.items() if any(n.split(".")[0] == engine for n in names)
    }
    assert len(needs) > 5, "imports are seen"
    while more := {module for module, names in uses.items() if names & needs} - needs:
        needs |= more
    assert not uses.keys() - needs


NOT_OF_KERAS = {
    # os and sys; multiprocessing/pool.py
    *("_exit", "_getframe", "_cache", "_pool", "_set"),
    "_config",  # the end of the names of attributes in HDF5 files
    # cloudpickle
    *("_make_skeleton_class", "_make_skeleton_enum", "_make_typevar"),
    # parts of names, and names in files
    *(
        "_W",
        "_activation",
        "_batch_",
        "_batch_begin",
        "_batch_end",
        "_compile_",
        "_config",
        "_test_",
    ),
    *("_train_", "_layer_checkpoint_dependencies"),
}
"""Private names outside of Keras and of the frameworks, or no names at all."""

FRAMEWORK_TABLES = {
    name: SOURCE / "engines" / name / f"{name}_compat.py" for name in ("jax", "tensorflow", "torch")
}
"""The module with the private names of each framework."""
PRIVATE_MODULE = re.compile(
    r"\b((?:jax|jaxlib|torch)(?:\.[a-z]\w*)*\.(?:_(?!_)\w+|interpreters)|tensorflow\.python)\b"
)


def of_frameworks():
    """The private attributes that the tables name."""
    trees = [ast.parse(path.read_text()) for path in FRAMEWORK_TABLES.values()]
    words = {
        word
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for word in node.value.split()
    }
    return {word for word in words if re.fullmatch(r"_[a-zA-Z]\w*", word)}


def code_of(path):
    """The code of a file, without its comments and docstrings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = None
    return ast.unparse(tree)


def test_private_modules_of_a_framework_are_named_in_one_file_of_its_engine():
    """Two strings name modules of old scripts."""
    found = {
        (path.relative_to(SOURCE).as_posix(), name)
        for path in FILES
        if path not in FRAMEWORK_TABLES.values()
        for name in PRIVATE_MODULE.findall(code_of(path))
    }
    assert found == {
        ("distribute.py", "tensorflow.python"),
        ("rescue/old_script.py", "tensorflow.python"),
    }
    assert all(PRIVATE_MODULE.findall(code_of(path)) for path in FRAMEWORK_TABLES.values())


def test_parameters_of_operations_are_read_in_one_file():
    """JAX gives them other names in any version."""
    for path in sorted((SOURCE / "engines" / "jax").rglob("*.py")):
        if path != FRAMEWORK_TABLES["jax"]:
            owners = {
                ast.unparse(node.value)
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Attribute) and node.attr == "params"
            }
            assert owners <= {"operation"}, path


@pytest.mark.parametrize("framework", TRIED)
def test_the_bounds_of_the_frameworks_are_those_that_are_checked(framework):
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]
    extras = [each for extra in project["optional-dependencies"].values() for each in extra]
    bounds = [
        each.split(";")[0].strip()
        for each in [*project["dependencies"], *extras]
        if re.match(rf"{framework}(-cpu|\[[\w-]+\])?[<>=]", each)
    ]
    assert bounds
    assert all(f">={TRIED[framework].oldest}" in each for each in bounds), bounds


def test_private_parts_of_keras_are_named_in_one_folder():
    """Attributes of other objects and strings; a subclass names what it overrides itself."""
    assert {path for path in FILES if "keras.src" in path.read_text()} <= set(COMPAT)
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    compat = _joined([trees.pop(path) for path in COMPAT])
    of_keras = set(_private_names(compat))
    assert {"_flatten_layers", "_compile_loss", "_jax_state"} <= of_keras, "names are seen"
    others = NOT_OF_KERAS | of_frameworks()
    known = others | {name for tree in trees.values() for name in _defined(tree)}
    for path in FRAMEWORK_TABLES.values():
        del trees[path]
    for path, tree in trees.items():
        found = {name for name in _private_names(tree) if not name.startswith("_lockstep_")}
        assert found <= known, path
        assert found & of_keras <= {"_inputs"}, path  # those of a data set of tf.data
    assert not (others - {"_inputs"}) & of_keras


def test_each_private_part_of_keras_is_written_once_in_a_row_that_checks_it():
    tree = _joined([ast.parse(path.read_text()) for path in COMPAT])
    written = Counter(_private_names(tree))
    assert {name for name, times in written.items() if times > 1} == {"_get_iterator"}  # of two
    checked = {name for names in keras_compat.STATE_OF_CALLBACKS.values() for name in names}
    for row in ast.walk(tree):
        kinds = ("_named", "_held", "_call", "_read", "_read_and_write")
        if isinstance(row, ast.Call) and ast.unparse(row.func) in kinds:
            owner, *names = map(ast.unparse, row.args)
            checked |= {name.strip("'") for name in names} if owner != "None" else set()
    assert written.keys() - checked == {
        *("_keras_logits", "_parallel_update_step"),  # of a tensor; of some optimizers on PyTorch
        "_use_cached_eval_dataset",  # an argument
        "_lockstep_reports",
    }


def _joined(trees):
    return ast.Module([node for tree in trees for node in tree.body], [])


def _private_names(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            name = "" if owner in ("self", "cls", "super()") else node.attr
        else:
            name = node.value if isinstance(node, ast.Constant) else ""
        if isinstance(name, str) and re.fullmatch(r"_[a-zA-Z]\w*", name):
            yield name


def _defined(tree):
    """The private names that lockstep's own code gives to something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr if ast.unparse(node.value) == "self" else ""
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_the_private_parts_of_keras_need_no_framework_but_that_of_the_backend():
    imported = {name.split(".")[0] for path in COMPAT for name in _imports(path)}
    assert imported - sys.stdlib_module_names == {"keras", "lockstep"}
    script = (
        "import sys, lockstep.keras_compat\n"
        "print([m for m in ('jax', 'tensorflow', 'torch') if m in sys.modules])"
    )
    assert python(script, KERAS_BACKEND="jax") == "['jax']"


def test_the_bounds_of_keras_are_those_that_are_checked():
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())
    bounds = f"keras>={keras_compat.OLDEST},<{keras_compat.FIRST_UNKNOWN}"
    assert bounds in project["project"]["dependencies"]


def test_a_file_is_one_idea():
    length = {path: len(path.read_text().splitlines()) for path in FILES}
    assert not [path for path, lines in length.items() if lines > 600]
    assert max(length[path] for path in COMPAT) <= 300
    assert len([path for path in FILES if path.parent == SOURCE]) <= 8


def test_each_file_that_the_architecture_names_exists():
    text = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", text))
    assert len(named) > 80
    assert not [name for name in named if not (SOURCE / name).exists()]


def test_file_names_are_unique_but_those_that_engines_share():
    names = {}
    for path in FILES:
        place = path.relative_to(SOURCE)
        if path.stem not in ("__init__", "__main__"):
            owner = place.parts[1] if place.parts[0] == "engines" and len(place.parts) > 2 else ""
            names.setdefault(path.name, []).append(owner)
    assert {name: owners for name, owners in names.items() if len(set(owners)) < len(owners)} == {}


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
