"""Plants faults in the source, one at a time, and counts those that the tests catch.

python -m tests.mutations record                  which tests reach which line, quick tests
python -m tests.mutations record --thorough       the same of the thorough tests
python -m tests.mutations run --count 40          plants 40 faults, and prints what catches each

The draw is seeded, over all packages and kinds of faults. A fault runs the tests that reach its
line, in workers and other processes too, until the first failure. It needs `pip install coverage`.
Recording takes about twice as long as the tests; a run takes minutes for each fault.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "lockstep"
RECORD = ROOT / "build" / "reached.json"
BACKENDS = ("jax", "torch", "tensorflow")
MANY = re.compile("replica|rank|device|worker|process|other|part|shard", re.I)


class Fault:
    """One change of the source.

    Attributes:
        kind: What is wrong with the line.
        path: The file, from the root of the project.
        line: The line of the fault.
        text: The whole file with the fault.
        shown: The changed code.
    """

    def __init__(self, kind, path, node, source, new, line=None):
        self.kind, self.path = kind, path.relative_to(ROOT).as_posix()
        self.line = line or node.lineno
        old = ast.get_source_segment(source, node)
        start = _offset(source, node.lineno, node.col_offset)
        self.text = source[:start] + new + source[start + len(old) :]
        changed = [part.split() for part in (old, new)]
        self.shown = " -> ".join(" ".join(part)[:70] for part in changed)


def _offset(source, line, column):
    before = source.splitlines(keepends=True)[: line - 1]
    text = source.splitlines(keepends=True)[line - 1].encode()[:column].decode()
    return sum(map(len, before)) + len(text)


def faults_of(path):
    """Yield every fault that can be planted in a file."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        for change in _changes(node, lambda part: ast.get_source_segment(source, part) or ""):
            kind, place, new, line = change
            fault = Fault(kind, path, place, source, new, line)
            try:
                ast.parse(fault.text)
            except SyntaxError:
                continue
            yield fault


def _changes(node, of):
    """Yield faults: the kind, the node to replace, its new text, and the line of the fault."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        if not any(isinstance(e, ast.Constant | ast.JoinedStr) for e in (node.left, node.right)):
            yield "drops a term", node, of(node.left), None
    elif isinstance(node, ast.Call) and len(node.args) >= 2:
        one, two = map(of, node.args[:2])
        names = all(isinstance(each, ast.Name | ast.Attribute) for each in node.args[:2])
        if names and one != two and of(node.func) not in ("isinstance", "getattr", "zip"):
            rest = [of(each) for each in node.args[2:]]
            rest += [
                f"{e.arg}={of(e.value)}" if e.arg else f"**{of(e.value)}" for e in node.keywords
            ]
            new = f"{of(node.func)}({', '.join([two, one, *rest])})"
            yield "swaps two arguments", node, new, None
    elif isinstance(node, ast.Try) and node.finalbody:
        whole, first = of(node), node.finalbody[0]
        cut = whole.rindex("finally:") + len("finally:")
        yield "skips a finally", node, f"{whole[:cut]}\n{' ' * first.col_offset}pass", first.lineno
    elif isinstance(node, ast.FunctionDef) and len(node.body) >= 3:
        middle = node.body[len(node.body) // 2]
        whole, part = of(node), of(middle)
        returns_nothing = node.returns is not None and of(node.returns) == "None"
        if returns_nothing and whole.count(part) == 1 and not isinstance(middle, ast.FunctionDef):
            new = whole.replace(part, f"return\n{' ' * middle.col_offset}{part}")
            yield "returns early", node, new, middle.lineno
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        upper, lower = node.slice.upper, node.slice.lower
        if lower is not None and upper is None:
            yield "off by one row", node, f"{of(node.value)}[{of(lower)} + 1 :]", None
        elif upper is not None and lower is None:
            yield "off by one row", node, f"{of(node.value)}[: {of(upper)} - 1]", None
    elif isinstance(node, ast.For | ast.comprehension) and MANY.search(of(node.iter)):
        yield "forgets one", node.iter, f"list({of(node.iter)})[:-1]", None


def draw(count, seed):
    """Return faults, drawn over kinds and packages in turn."""
    pools = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        package = path.relative_to(SOURCE).parts[0]
        for fault in faults_of(path):
            pools[fault.kind, package].append(fault)
    rng = random.Random(seed)
    order = sorted(pools)
    rng.shuffle(order)
    found = []
    while len(found) < count and order:
        for key in [*order]:
            if not pools[key]:
                order.remove(key)
            elif len(found) < count:
                found.append(pools[key].pop(rng.randrange(len(pools[key]))))
    return found


# ---------------------------------------------------------------------------- what reaches a line

PLUGIN = """
import os, coverage, pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    os.environ["REACHED_BY"] = item.nodeid
    coverage.Coverage.current().switch_context(item.nodeid)
    return (yield)
"""
SETTINGS = """
[run]
source = {source}
parallel = true
data_file = {folder}/data
context = ${{REACHED_BY-}}
"""


def record(tier):
    """Write which tests reach which line of the source, of each backend."""
    import coverage

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "reached_plugin.py").write_text(PLUGIN)
        Path(folder, "sitecustomize.py").write_text("import coverage; coverage.process_startup()")
        settings = Path(folder, "settings")
        settings.write_text(SETTINGS.format(source=SOURCE, folder=folder))
        for backend in BACKENDS:
            environment = os.environ | {
                "KERAS_BACKEND": backend,
                "COVERAGE_PROCESS_START": str(settings),
                "PYTHONPATH": os.pathsep.join([folder, str(ROOT / "src")]),
            }
            options = [] if tier == "quick" else [f"--{tier}"]
            command = [sys.executable, "-m", "pytest", "-q", "-p", "reached_plugin", *options]
            subprocess.run(command, env=environment, cwd=ROOT, check=False)
            data = coverage.CoverageData(str(Path(folder, "data")))
            combined = coverage.Coverage(config_file=str(settings))
            combined.combine([folder], keep=False)
            data = combined.get_data()
            for file in data.measured_files():
                name = Path(file).relative_to(ROOT).as_posix()
                for line, tests in data.contexts_by_lineno(file).items():
                    key = f"{name}:{line}"
                    found.setdefault(key, {})[backend] = sorted(filter(None, tests))
            data.erase()
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(found))
    print(f"{len(found)} lines in {RECORD.relative_to(ROOT)}")


# ------------------------------------------------------------------------------------ the faults


def run(count, seed, most):
    """Plant each fault, and print whether a test fails."""
    reached = json.loads(RECORD.read_text())
    caught = 0
    for number, fault in enumerate(draw(count, seed), 1):
        tests = reached.get(f"{fault.path}:{fault.line}", {})
        failed = _fails(fault, tests, most)
        caught += failed is not None
        verdict = failed or "SURVIVED" if tests else "SURVIVED: no test reaches the line"
        print(
            f"{number:2} {fault.kind}: {fault.path}:{fault.line}: {fault.shown}\n   {verdict}",
            flush=True,
        )
    print(f"{caught} of {count} faults caught")


def _fails(fault, tests, most):
    """Return the first test that fails with the fault, `None` if none does."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "project")
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, copy, ignore=ignored)
        (copy / fault.path).write_text(fault.text)
        for backend in BACKENDS:
            here = tests.get(backend, [])[:most]
            if not here:
                continue
            environment = os.environ | {
                "KERAS_BACKEND": backend,
                "PYTHONPATH": str(copy / "src"),
                "PYTHONDONTWRITEBYTECODE": "1",
            }
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-x", "--thorough", *here],
                env=environment,
                cwd=copy,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                lines = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
                return lines[0] if lines else f"pytest ended with status {done.returncode}"
    return None


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=["record", "run", "list"])
    parser.add_argument("--thorough", action="store_true")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=400, help="tests of a backend for one fault")
    options = parser.parse_args()
    if options.what == "record":
        record("thorough" if options.thorough else "quick")
    elif options.what == "run":
        run(options.count, options.seed, options.most)
    else:
        for fault in draw(options.count, options.seed):
            print(f"{fault.kind}: {fault.path}:{fault.line}: {fault.shown}")


if __name__ == "__main__":
    main()
