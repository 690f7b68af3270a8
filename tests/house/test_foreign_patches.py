"""What lockstep replaces in other packages is in one list."""

import ast

import pytest

from lockstep.keras_compat.foreign_patches import PATCHES
from tests.house.test_house import FILES, SOURCE
from tests.processes.common import python

NO_PATCHES = {
    "engines/torch/same_model/model_copy.py: _fill",  # a cell of its own copy of a function
    # public settings, torch.backends
    *(
        "engines/torch/same_model/settings.py: apply_settings",
        "engines/torch/same_model/settings.py: _set_precision",
    ),
}


def test_every_replaced_attribute_of_another_package_is_in_the_list():
    found = {place for path in FILES for place in _replacing(path)}
    places = [patch.where for patch in PATCHES]
    assert len(places) == len(set(places))
    assert found - NO_PATCHES == set(places)
    assert found > NO_PATCHES


@pytest.mark.thorough
def test_what_is_replaced_exists_in_the_installed_packages():
    script = (
        "import importlib, operator\n"
        "from lockstep.keras_compat.foreign_patches import PATCHES\n"
        "def has(module, name):\n"
        "    try: return bool(operator.attrgetter(name)(importlib.import_module(module)))\n"
        "    except AttributeError: return False\n"
        "for patch in PATCHES:\n"
        "    for modules, _, names in (each.partition(': ') for each in patch.what):\n"
        "        for module in modules.replace('/', '.').split():\n"
        "            for name in names.split():\n"
        "                if not any(has(module, one) for one in name.split('|')):\n"
        "                    print(patch.where, module, name)\n"
        "print('looked up')"
    )
    assert python(script, KERAS_BACKEND="jax") == "looked up"


def _replacing(path):
    """Yield the functions that set an attribute of something that the file imports.

    Names for it in the file are followed, arguments of functions are not.
    """
    tree = ast.parse(path.read_text())
    foreign = set(_imported(tree))

    def is_foreign(node):
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in foreign

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and is_foreign(node.value):
            foreign |= {target.id for target in node.targets if isinstance(target, ast.Name)}

    def replaces(node):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            return node.attr == "cell_contents" or is_foreign(node.value)
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if called == "patched":
            pairs = (each for each in ast.walk(node) if isinstance(each, ast.Tuple))
            return any(is_foreign(pair.elts[0]) for pair in pairs)
        return called == "replaced" or (called == "setattr" and is_foreign(node.args[0]))

    def walk(node, place):
        for child in ast.iter_child_nodes(node):
            inner = place
            outer_ends = not place or isinstance(node, ast.ClassDef)
            if isinstance(child, ast.ClassDef | ast.FunctionDef) and outer_ends:
                inner = f"{place}.{child.name}".strip(".")
            if replaces(child):
                yield f"{path.relative_to(SOURCE)}: {inner}"
            yield from walk(child, inner)

    yield from walk(tree, "")


def _imported(tree):
    """Yield the names that stand for parts of other packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.asname or alias.name).split(".")[0] for alias in node.names]
            yield from (name for name in names if name != "lockstep")
        elif isinstance(node, ast.ImportFrom):
            of_others = node.module.startswith("lockstep.") and "_compat" in node.module
            names = [alias.asname or alias.name for alias in node.names]
            yield from names if of_others or not node.module.startswith("lockstep") else []
