"""Runs the tests in two lanes at once: JAX in one, PyTorch and then TensorFlow in the other.

`KERAS_BACKEND=torch python -m pytest` runs those of one backend, and prints as pytest does.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

LANES = (("jax",), ("torch", "tensorflow"))
"""The backends of each lane. A backend is one process, so that it compiles a program once."""

BUDGETS = {"quick": 1200, "thorough": 2400}
"""Seconds of processor time that a lane should take, with all processes that its tests start."""

NOISE = 2.0
"""How many times as long a lane may take before that is a failure. The same tests have taken 1.4
times as long on the same kind of machine, which others share."""

LONG = 5.0
"""Seconds of processor time above which the call of one test is named."""

FAILED, OVER_BUDGET, NO_TESTS, NO_BACKEND = 1, 3, 5, 6
_EVERY = 20.0
"""Seconds between two lines about a lane, where no terminal shows them in place."""

USAGE = """\
python -m tests              quick: each behaviour once on each backend; about 25 minutes on 2 cores
python -m tests --thorough   further values, layers, kills and clusters; longer
python -m tests --whole      everything, compiled as users do: hours, before a release
python -m tests -k NAME      tests by name, in all backends and in quick and thorough
python -m tests PATH ...     files or folders, also with the arguments of pytest
"""
STATUS = (
    f"Status: 0 if all pass, {FAILED} after a failure, {OVER_BUDGET} if a lane takes more "
    f"processor time than twice its budget, {NO_TESTS} without a test of the name, {NO_BACKEND} "
    "without a backend."
)


class Lane:
    """The backends of one lane, one process after another.

    Attributes:
        process: The pytest that runs now, `None` before and after.
        failures: The ids and the texts of the tests that failed.
    """

    def __init__(self, backends, arguments):
        self.backends = [*backends]
        self.process = None
        self.started = time.monotonic()
        self.statuses = []
        self.passed, self.left, self.used = 0, 0, 0.0
        self.failures, self.tests = [], []
        self._arguments = arguments
        self._backend, self._pipe, self._rest = "", None, b""

    def start(self):
        """Start the next backend; return the pipe of its reports, `None` after the last one."""
        self._backend = self.backends.pop(0) if self.backends else None
        if self._backend is None:
            return None
        self._pipe, write = os.pipe()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.lane_reports"]
        self.process = subprocess.Popen(
            [*command, *self._arguments],
            env=os.environ | {"KERAS_BACKEND": self._backend, "LANE_REPORTS": str(write)},
            pass_fds=[write],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        os.close(write)
        os.set_blocking(self.process.stdout.fileno(), False)
        self._output = b""
        return self._pipe

    def read(self):
        """Read reports; return whether the process goes on."""
        with suppress(BlockingIOError):
            self._output += os.read(self.process.stdout.fileno(), 1 << 20)
        data = os.read(self._pipe, 1 << 20)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(json.loads(line))
        return bool(data)

    def _take(self, report):
        if "collected" in report:
            self.left = report["collected"]
            return
        self.left -= 1
        self.tests.append({"backend": self._backend, **report})
        if report["failed"]:
            if not self.failures:
                print(f"\n{report['text']}\n", flush=True)
            self.failures.append((f"{self._backend}: {report['test']}", report["text"]))
        else:
            self.passed += 1

    def end(self):
        """Take the status and the processor time of the process that has ended."""
        os.close(self._pipe)
        out, _ = self.process.stdout.read() or b"", self.process.stdout.close()
        self._output += out
        _, status, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.used += usage.ru_utime + usage.ru_stime
        code = self.process.returncode
        self.statuses.append(code)
        if code not in (0, 1, NO_TESTS):  # no report says what was wrong
            text = self._output.decode(errors="replace")[-8000:]
            self.failures.append((f"{self._backend}: pytest ended with status {code}", text))
        self.process = None

    def __str__(self):
        name = self._backend or "done"
        minutes = (time.monotonic() - self.started) / 60
        rest = f", about {self.left} left" if self.process else ""
        more = f", then {', '.join(self.backends)}" if self.backends else ""
        return (
            f"{name}: {self.passed} passed, {len(self.failures)} failed, "
            f"{minutes:.1f} min{rest}{more}"
        )


def main():
    """Run the lanes, print what they report, and return the status."""
    tier, arguments, backends = _parsed(sys.argv[1:])
    missing = [name for name in backends if importlib.util.find_spec(name) is None]
    for name in missing:
        print(f"{name} is not installed, so none of its tests runs: pip install -e '.[test]'")
    lanes = [
        Lane(here, arguments)
        for lane in LANES
        if (here := [name for name in lane if name in backends and name not in missing])
    ]
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        _run(lanes)
    except KeyboardInterrupt:
        print("\nended by Ctrl-C")
        return 128 + signal.SIGINT
    finally:
        end_descendants()
    return _summary(lanes, tier, bool(missing))


def _parsed(given):
    parser = argparse.ArgumentParser(
        prog="python -m tests",
        description=USAGE,
        epilog=STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=True,
        allow_abbrev=False,
    )
    parser.add_argument("--thorough", action="store_true", help="quick tests, and more")
    parser.add_argument("--whole", action="store_true", help="all tests")
    parser.add_argument("--backend", action="append", choices=[*sum(LANES, ())], help="only this")
    options, rest = parser.parse_known_args(given)
    tier = "whole" if options.whole else "thorough" if options.thorough or rest else "quick"
    arguments = rest if tier == "quick" else [f"--{tier}", *rest]
    named = bool(rest)
    return (None if named else tier), arguments, options.backend or [*sum(LANES, ())]


def _run(lanes):
    """Run the lanes to their end, and print a line about each from time to time."""
    pipes = selectors.DefaultSelector()
    for lane in lanes:
        pipes.register(lane.start(), selectors.EVENT_READ, lane)
    in_place = sys.stdout.isatty()
    printed = time.monotonic()
    while pipes.get_map():
        reap_orphans(lanes)
        for key, _ in pipes.select(1.0):
            lane = key.data
            if lane.read():
                continue
            pipes.unregister(key.fd)
            lane.end()
            following = lane.start()
            if following is not None:
                pipes.register(following, selectors.EVENT_READ, lane)
        now = time.monotonic()
        if now > printed + (1.0 if in_place else _EVERY):
            printed = now
            text = " | ".join(map(str, lanes))
            print(f"\r\033[K{text}" if in_place else text, end="" if in_place else "\n", flush=True)
    if in_place:
        print()


def _summary(lanes, tier, incomplete):
    """Print failures, seconds by folder and slow tests; return the status."""
    failures = [failure for lane in lanes for failure in lane.failures]
    for name, text in failures:
        print(f"\n{'_' * 20} {name}\n{text}")
    tests = [test for lane in lanes for test in lane.tests]
    _print_folders(tests)
    over = failed = False
    for lane in lanes:
        names = sorted({test["backend"] for test in lane.tests})
        budget = BUDGETS.get(tier)
        text = f"lane of {', '.join(names)}: {lane.used:.0f} s of processor time"
        if budget is not None:
            text += f" of {budget}"
            over |= lane.used > budget
            failed |= lane.used > NOISE * budget
        print(text)
    if tier is not None:
        _print_slow(tests, over)
    for name, _ in failures:
        print(f"FAILED {name}")
    print(f"{sum(lane.passed for lane in lanes)} passed, {len(failures)} failed", flush=True)
    if failures:
        return FAILED
    if not tests:
        print("No test has this name.")
        return NO_TESTS
    if incomplete:
        return NO_BACKEND
    return OVER_BUDGET if failed else 0


def _print_folders(tests):
    """Print the seconds of processor time of each folder, by backend."""
    seconds = defaultdict(lambda: defaultdict(float))
    for test in tests:
        folder = "/".join(test["test"].split("::")[0].split("/")[1:-1])
        seconds[folder or "."][test["backend"]] += test["all"]
    backends = [*sum(LANES, ())]
    if tests:
        print(f"\n{'seconds of processor time':28}" + "".join(f"{name:>12}" for name in backends))
    for folder, by in sorted(seconds.items(), key=lambda item: -sum(item[1].values())):
        print(f"{folder:28}" + "".join(f"{by[name]:12.0f}" for name in backends))


def _print_slow(tests, over):
    """Name the tests whose call takes long; the slowest ten if a lane is over its budget."""
    slow = sorted(tests, key=lambda test: -test["call"])
    named = slow[:10] if over else [test for test in slow if test["call"] > LONG]
    for test in named:
        print(f"{test['call']:6.1f} s  {test['backend']}: {test['test']}")


# ------------------------------------------------------------------- nothing stays behind


def adopt_orphans():
    """Let processes whose parent ends become children of this one, where the system can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def reap_orphans(lanes):
    """Take the status of adopted processes that have ended: a test waits until they are gone."""
    if sys.platform != "linux":  # none was adopted
        return
    pytests = {lane.process.pid for lane in lanes if lane.process is not None}
    with suppress(ChildProcessError):
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if found.si_pid in pytests:  # `Lane.end` takes that
                return
            os.waitpid(found.si_pid, 0)


def end_descendants():
    """Kill every process that this one has started, directly or not."""
    while found := _descendants():
        for process in found:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)


def _descendants():
    children = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z" or int(parent) == os.getpid():
                children[int(parent)].append(int(stat.parent.name))
    found, todo = [], [os.getpid()]
    while todo:
        more = children[todo.pop()]
        found += more
        todo += more
    return found


if __name__ == "__main__":
    sys.exit(main())
