"""Processes in which CPU devices pretend to be GPUs."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from lockstep.processes.shares import free_address
from tests.processes.common import clean_environment

ROOT = Path(__file__).parents[2]
SITE = ROOT / "tests" / "pretended_gpus" / "site"
LIMIT = 400
"""Seconds after which a process is ended: a fault of this kind may hang for ever."""


def environment(engine, devices, **more):
    """The environment of a process with so many pretended GPUs of its own."""
    clean = clean_environment("KERAS_", "PRETENDED_", "CUDA_")
    own = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(devices)))}
    path = [str(SITE), str(ROOT / "src"), *filter(None, [clean.get("PYTHONPATH")])]
    return {
        **clean,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONFAULTHANDLER": "1",
        "PRETENDED_GPUS": engine,
        "KERAS_BACKEND": engine,
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        **({} if more.get("PRETENDED_TPUS") else own),
        **more,
    }


def run(*arguments, engine, devices=4, processes=1, cwd=None, **more):
    """Run Python with these arguments in pretending processes; returns what the first printed.

    With several processes, each has `devices` GPUs, and lockstep knows its place in the job.
    """
    address = free_address("127.0.0.1")
    with ExitStack() as stack:
        started = []
        for rank in range(processes):
            place = {}
            if processes > 1:
                place = {
                    "LOCKSTEP_PROCESSES": str(processes),
                    "LOCKSTEP_PROCESS": str(rank),
                    "LOCKSTEP_LOCAL_PROCESSES": str(processes),
                    "LOCKSTEP_LOCAL_PROCESS": str(rank),
                    "LOCKSTEP_COORDINATOR": address,
                }
            running = subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                cwd=cwd or ROOT,
                env=environment(engine, devices, **place, **more),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            started.append(stack.enter_context(running))
            stack.callback(running.kill)
        said = [_said(each) for each in started]
    codes = [each.returncode for each in started]
    assert not any(codes), (codes, "\n".join(said))
    return said[0]


def _said(running):
    """What a process printed; one that hangs prints where."""
    try:
        return running.communicate(timeout=LIMIT)[0]
    except subprocess.TimeoutExpired:
        running.send_signal(signal.SIGABRT)
        return running.communicate()[0]
