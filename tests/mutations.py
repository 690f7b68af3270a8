"""Plants faults in the source, one at a time, and counts those that the tests catch.

python -m tests.mutations list                    the faults of the draw
python -m tests.mutations record                  which quick tests reach the code of which fault
python -m tests.mutations run                     plants each fault, and prints what catches it
python -m tests.mutations run --thorough --only 3,17

The draw is seeded, over all packages and kinds of faults. A record runs the tests once for each
backend, on a copy of the project in which the code of each fault writes down the test of the
moment, in workers and other processes too. It takes as long as the tests. A run takes a minute
or two for each fault: the tests that reach it, the fastest first, until one fails.
"""

import argparse
import ast
import compileall
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from tests.__main__ import LANES, adopt_orphans, end_descendants, reap_orphans

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "lockstep"
RECORDS = ROOT / "build" / "mutations"
BACKENDS = [*sum(LANES, ())]
SPARE = 3
"""Faults of a record for each fault of a run, for those that change no behaviour."""

MANY = re.compile("replica|rank|device|worker|process|other|part|shard", re.I)
MARK = "getattr(__import__('builtins'), 'FAULT_REACHED', int)({number})"


class Fault:
    """One change of the source.

    Attributes:
        kind: What is wrong with the code.
        path: The file, from the root of the project.
        line: The line of the fault.
        start, end: The place in the file of what is replaced.
        new: The code in its place.
        marked: Places in the file and what a record writes there, with `{number}` of the fault.
    """

    def __init__(self, kind, path, source, node, new, at=None):
        self.kind, self.path, self.new = kind, path.relative_to(ROOT).as_posix(), new
        self.line = (at or node).lineno
        self.start, self.end = _place(source, node)
        if at is None:  # an expression
            self.marked = [(self.start, f"({MARK}, ("), (self.end, "))[1]")]
        else:  # a statement begins here
            start, _ = _place(source, at)
            self.marked = [(start, f"{MARK}\n{' ' * at.col_offset}")]
        changed = [part.split() for part in (source[self.start : self.end], new)]
        self.shown = " -> ".join(_shortened(" ".join(part)) for part in changed)
        if at is not None:
            self.shown = _shortened(" ".join((ast.get_source_segment(source, at) or "").split()))

    def __str__(self):
        return f"{self.kind}: {self.path}:{self.line}: {self.shown}"

    def planted(self, source):
        """Return the text of the file with the fault."""
        return source[: self.start] + self.new + source[self.end :]


def _shortened(text):
    return text if len(text) < 80 else f"{text[:77]}..."


def _place(source, node):
    lines = source.splitlines(keepends=True)

    def offset(line, column):
        before = sum(map(len, lines[: line - 1]))
        return before + len(lines[line - 1].encode()[:column].decode())

    return offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)


def faults_of(path):
    """Yield the faults that could be planted in a file; a few are no Python."""
    source = path.read_text()
    tree = ast.parse(source)
    texts = {id(part) for node in ast.walk(tree) if _is_text(node) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in texts:
            continue
        for kind, place, new, at in _changes(node, source):
            yield Fault(kind, path, source, place, new, at)


def _is_code(fault):
    source = (ROOT / fault.path).read_text()
    try:
        ast.parse(fault.planted(source))
        ast.parse(_marked(source, {0: fault}))
    except SyntaxError:
        return False
    return True


def _is_text(node):
    return isinstance(node, ast.JoinedStr)  # the places in it are wrong before Python 3.12


def _changes(node, source):
    """Yield faults: the kind, what is replaced, the new code, the statement that is left out."""

    def of(part):
        return ast.get_source_segment(source, part) or ""

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
        new = f"{whole[:cut]}\n{' ' * first.col_offset}pass"
        yield "skips a finally", node, new, first
    elif isinstance(node, ast.FunctionDef) and len(node.body) >= 3:
        middle = node.body[len(node.body) // 2]
        whole, part = of(node), of(middle)
        returns_nothing = node.returns is not None and of(node.returns) == "None"
        if returns_nothing and whole.count(part) == 1 and not isinstance(middle, ast.FunctionDef):
            new = whole.replace(part, f"return\n{' ' * middle.col_offset}{part}")
            yield "returns early", node, new, middle
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        upper, lower = node.slice.upper, node.slice.lower
        if lower is not None and upper is None:
            yield "off by one row", lower, f"({of(lower)}) + 1", None
        elif upper is not None and lower is None:
            yield "off by one row", upper, f"({of(upper)}) - 1", None
    elif isinstance(node, ast.For | ast.comprehension) and MANY.search(of(node.iter)):
        yield "forgets one", node.iter, f"list({of(node.iter)})[:-1]", None


def draw(count, seed):
    """Return faults, drawn over kinds and packages in turn."""
    pools = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for fault in faults_of(path):
            pools[fault.kind, path.parent.relative_to(SOURCE)].append(fault)
    rng = random.Random(seed)
    order = sorted(pools)
    rng.shuffle(order)
    found = []
    while len(found) < count and order:
        for key in [*order]:
            if not pools[key]:
                order.remove(key)
                continue
            fault = pools[key].pop(rng.randrange(len(pools[key])))
            if _is_code(fault):
                found.append(fault)
    return found[:count]


# ------------------------------------------------------------------------------------ the copy

MARKS = """
import builtins, mmap
from os import O_APPEND, O_CREAT, O_WRONLY, close, open as opened, write  # a test may replace them

folder, here, seen = {folder!r}, None, set()


def reached(number):
    global here
    if here is None:
        with open(folder + "/now", "rb") as file:
            here = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
    key = number, int.from_bytes(here[:8], "little")
    if key not in seen:
        seen.add(key)
        out = opened(folder + "/reached", O_WRONLY | O_APPEND | O_CREAT)
        write(out, b"%d %d\\n" % key)
        close(out)


builtins.FAULT_REACHED = reached
"""
"""Runs at the start of each process of the copy."""

PLUGIN = """
import json, mmap, time
import pytest

folder = {folder!r}
with open(folder + "/now", "r+b") as now:
    here = mmap.mmap(now.fileno(), 8)
tests, seconds, failed = {{}}, {{}}, set()


def place(name):
    here[:8] = tests.setdefault(name, len(tests) + 1).to_bytes(8, "little")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    place(item.nodeid.split("::")[0])  # a fixture may be that of the whole file
    begin = time.monotonic()
    try:
        return (yield)
    finally:
        seconds[item.nodeid] = round(time.monotonic() - begin, 2)
        here[:8] = bytes(8)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    place(item.nodeid)
    try:
        return (yield)
    finally:
        place(item.nodeid.split("::")[0])


def pytest_runtest_logreport(report):
    if report.failed:
        failed.add(report.nodeid)


def pytest_sessionfinish():
    with open(folder + "/tests.json", "w") as file:
        json.dump([[*tests], seconds, sorted(failed)], file)
"""


@contextmanager
def _copy():
    """A copy of the project, and a Python that imports it in every process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, folder / "project", ignore=ignored)
        venv.create(folder / "python", symlinks=True)
        python = folder / "python" / "bin" / "python"
        (packages,) = (folder / "python" / "lib").glob("*/site-packages")
        rest = [path for path in sys.path if "site-packages" in path]
        paths = [str(folder / "project" / "src"), *rest]
        (packages / "project.pth").write_text("\n".join(paths))
        (packages / "sitecustomize.py").write_text(MARKS.format(folder=str(folder)))
        (packages / "reached_plugin.py").write_text(PLUGIN.format(folder=str(folder)))
        (folder / "now").write_bytes(bytes(8))
        yield folder / "project", python


def _pytest(project, python, backend, arguments, seconds=None):
    """Run tests of the copy; return the status, `None` after too long a time, and the output."""
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
            env=os.environ | {"KERAS_BACKEND": backend, "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=project,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        end = time.monotonic() + (seconds or 1e9)
        while process.poll() is None and time.monotonic() < end:
            reap_orphans([SimpleNamespace(process=process)])
            time.sleep(0.05)
        status = process.poll()
        end_descendants()
        out.seek(0)
        return status, out.read()


# ---------------------------------------------------------------------------- what reaches a fault


def _marked(source, faults):
    """Return the text of a file in which the code of each fault writes down its number."""
    places = []
    for number, fault in faults.items():
        width = fault.end - fault.start
        for place, text in fault.marked:
            # Of two that begin at one place, the wider one is the outer one; of two ends too.
            opens = place == fault.start or len(fault.marked) == 1
            order = (place, opens, -width if opens else width)
            places.append((order, place, text.replace("{number}", str(number))))
    for _, place, text in sorted(places, reverse=True):
        source = source[:place] + text + source[place:]
    return source


def record(options):
    """Write which tests reach which fault."""
    faults = dict(enumerate(draw(SPARE * options.count, options.seed), 1))
    for backend in options.backend or BACKENDS:
        with _copy() as (project, python):
            by_file = defaultdict(dict)
            for number, fault in faults.items():
                by_file[fault.path][number] = fault
            for path, here in by_file.items():
                (project / path).write_text(_marked((ROOT / path).read_text(), here))
            compileall.compile_dir(project / "src", quiet=1)
            words = ["-p", "reached_plugin", *_tier(options)]
            _, printed = _pytest(project, python, backend, words)
            print(printed[-2000:])
            tests, seconds, failed = json.loads((project.parent / "tests.json").read_text())
            names = ["", *tests]
            reached = defaultdict(list)
            for line in sorted(set((project.parent / "reached").read_text().splitlines())):
                number, test = map(int, line.split())
                reached[str(faults[number])].append(names[test])
        RECORDS.mkdir(parents=True, exist_ok=True)
        file = RECORDS / f"{options.tier}-{backend}.json"
        file.write_text(json.dumps({"reached": reached, "seconds": seconds, "failed": failed}))
        print(f"{backend}: {len(reached)} of {len(faults)} faults are reached", flush=True)


def _known(project, python, options):
    """What the record of each backend says, without tests that are gone or that failed."""
    known = {}
    for backend in options.backend or BACKENDS:
        file = RECORDS / f"{options.tier}-{backend}.json"
        if not file.exists():
            sys.exit(f"{file.relative_to(ROOT)} is missing: python -m tests.mutations record")
        known[backend] = json.loads(file.read_text())
        words = ["--collect-only", *_tier(options)]
        _, printed = _pytest(project, python, backend, words)
        here = set(printed.splitlines()) - {*known[backend]["failed"]}
        seconds = known[backend]["seconds"].items()
        known[backend]["seconds"] = {test: took for test, took in seconds if test in here}
    return known


def _candidates(fault, known, most):
    """Return the tests that reach a fault, the fastest first, in `most` seconds; and their time."""
    reached = set(known["reached"].get(str(fault), []))
    everywhere = reached == {""}  # an import has it
    tests = [
        (test not in reached, took, test)  # a fixture may be that of the whole file
        for test, took in known["seconds"].items()
        if test in reached or test.split("::")[0] in reached or everywhere
    ]
    total, kept = 0.0, []
    for _, took, test in sorted(tests):
        if total + took < most or not kept:
            total += took
            kept.append(test)
    return kept, total, len(tests)


# ------------------------------------------------------------------------------------ the faults


def run(options):
    """Plant each fault, and print whether a test fails."""
    caught, numbers = 0, options.only or range(1, options.count + 1)
    faults = dict(enumerate(draw(max(numbers), options.seed), 1))
    with _copy() as (project, python):
        compileall.compile_dir(project / "src", quiet=1)
        known = _known(project, python, options)
        for number in numbers:
            fault, begin = faults[number], time.monotonic()
            failed, verdict = _verdict(fault, known, project, python, options)
            caught += failed
            took = time.monotonic() - begin
            print(f"{number:2} {fault}\n   {verdict} ({took:.0f} s)", flush=True)
    print(f"{caught} of {len(numbers)} faults caught")


def _verdict(fault, known, project, python, options):
    """Whether a test fails with the fault, and which; or how many have passed."""
    file, passed = project / fault.path, []
    original, times = (ROOT / fault.path).read_text(), file.stat()
    file.write_text(fault.planted(original))
    try:
        for backend, here in known.items():
            tests, seconds, reaching = _candidates(fault, here, options.most)
            if not tests:
                continue
            words = ["-x", *_tier(options), *tests]
            status, printed = _pytest(project, python, backend, words, 180 + 5 * seconds)
            if status is None:
                return True, f"caught: {backend}: the tests hang"
            if status:
                lines = re.findall(r"^(?:FAILED|ERROR) (\S+)", printed, re.M)
                return True, f"caught: {backend}: {(lines or [printed[-300:]])[0]}"
            passed.append(f"{len(tests)} of {reaching} tests of {backend}")
    finally:
        file.write_text(original)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    return False, f"SURVIVED: {', '.join(passed) or 'no test reaches it'}"


def _tier(options):
    return [] if options.tier == "quick" else [f"--{options.tier}"]


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=["record", "run", "list"])
    parser.add_argument("--thorough", action="store_const", const="thorough", default="quick")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="only this")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=lambda text: [*map(int, text.split(","))], metavar="1,2")
    most = "seconds that the tests of a backend take for one fault, as recorded"
    parser.add_argument("--most", type=float, default=240.0, help=most)
    options = parser.parse_args()
    options.tier = options.thorough
    adopt_orphans()
    if options.what == "list":
        for number, fault in enumerate(draw(options.count, options.seed), 1):
            print(f"{number:3} {fault}")
    else:
        {"record": record, "run": run}[options.what](options)


if __name__ == "__main__":
    main()
