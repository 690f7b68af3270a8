"""Reports each test of one pytest to `python -m tests`, with its processor time."""

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest


def _seconds():
    """Processor time of this process, of all that it has waited for, and of its descendants.

    A worker of a pool runs steps of many tests, and is waited for in one of them.
    """
    return sum(os.times()[:4]) + sum(map(_seconds_of, _children("self")))


def _children(process):
    """The processes that each thread of a process has started, where the system tells them."""
    found = []
    with suppress(OSError):
        for file in Path(f"/proc/{process}/task").glob("*/children"):
            found += file.read_text().split()
    return found


def _seconds_of(process):
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0.0
    # proc(5): utime, stime, cutime and cstime are the fields 14 to 17, and here 11 to 14.
    ticks = sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK") + sum(map(_seconds_of, _children(process)))


class _Reports:
    def __init__(self, descriptor):
        os.set_inheritable(descriptor, False)  # a process of a test would hold the pipe open
        self._file = os.fdopen(descriptor, "w")
        self._seconds, self._text, self._failed = {}, "", False

    def write(self, **report):
        self._file.write(json.dumps(report) + "\n")
        self._file.flush()

    def pytest_collection_finish(self, session):
        self.write(collected=len(session.items))

    def pytest_collectreport(self, report):
        if report.failed:
            self.write(test=report.nodeid, failed=True, text=report.longreprtext, call=0.0, all=0.0)

    def pytest_runtest_logstart(self):
        self._seconds, self._text, self._failed = {}, "", False

    def _measured(self, phase):
        before = _seconds()
        try:
            return (yield)
        finally:
            self._seconds[phase] = _seconds() - before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self):
        return (yield from self._measured("setup"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self):
        return (yield from self._measured("call"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self):
        return (yield from self._measured("teardown"))

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._failed = True
            self._text += report.longreprtext + "".join(
                f"\n----- {name}\n{text}" for name, text in report.sections
            )

    def pytest_runtest_logfinish(self, nodeid):
        self.write(
            test=nodeid,
            failed=self._failed,
            text=self._text,
            call=round(self._seconds.get("call", 0.0), 2),
            all=round(sum(self._seconds.values()), 2),
        )


def pytest_configure(config):
    """Report to the descriptor that the environment names."""
    config.pluginmanager.register(_Reports(int(os.environ.pop("LANE_REPORTS"))))
