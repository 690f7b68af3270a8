"""Python processes that have Keras already, by a fork of one process that has imported it.

JAX and Keras are imported, which takes most of the time of a new process, and nothing of them
has started. A test of imports, or of a start from nothing, starts Python itself.
"""

import atexit
import json
import os
import subprocess
import sys
import time
from functools import lru_cache

READ = {
    "KERAS_BACKEND": "jax",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "JAX_PLATFORMS": "cpu",
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
"""What JAX, Keras and NumPy have read from the environment at their import."""

READ_AT_IMPORT = ("JAX_", "KERAS_", "OMP_", "PYTHONUTF8", "PYTHONIOENCODING")


class Script:
    """A process with the arguments of Python, as `subprocess.Popen` has it.

    Args:
        arguments: `-c` and a script, `-m` and a module, or a file; and what they are given.
            Before them may stand `-W error::UserWarning`.
        folder: The working directory.
        environment: The whole environment.
        output: Two files, for what is printed and for what is said on stderr.
    """

    def __init__(self, arguments, folder, environment, output):
        read = {**os.environ, **READ}
        asked = {k: v for k, v in environment.items() if k.startswith(READ_AT_IMPORT)}
        assert asked.items() <= read.items(), f"read at the import, as {READ}: {asked}"
        self._output = output
        self._server = _server()
        files = [str(path) for path in output]
        self.pid = self._server.ask(["start", arguments, str(folder), environment, files])
        self.returncode = None

    def poll(self):
        """Return the status, `None` while it runs."""
        if self.returncode is None:
            self.returncode = self._server.ask(["poll", self.pid])
        return self.returncode

    def communicate(self, timeout):
        """Wait for the end; return what was printed, and what was said on stderr."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a warm script", timeout)
            time.sleep(0.02)
        return tuple(path.read_text(errors="replace") for path in self._output)

    def kill(self):
        """End it, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, 9)
            self.communicate(60)


class _Server:
    def __init__(self):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("LOCKSTEP", "JAX_"))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.processes.warm"],
            env={**kept, **READ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._end)

    def ask(self, question):
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def _end(self):
        self._process.communicate()


@lru_cache(maxsize=1)
def _server():
    return _Server()


# ------------------------------------------------------------------- in the warm process


def _serve():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed meanwhile does not mix with the answers
    sys.modules["pandas"] = None  # Keras imports it if it is there; PyArrow then starts threads
    import keras  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1, "a fork has one thread of several"
    for line in sys.stdin:
        what, *given = json.loads(line)
        answer = _fork(answers, *given) if what == "start" else _status_of(*given)
        print(json.dumps(answer), file=answers, flush=True)


def _status_of(child):
    ended, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _fork(answers, arguments, folder, environment, files):
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        for number, path in enumerate([os.devnull, *files]):
            opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(opened, number)
            os.close(opened)
        answers.close()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        status = _run(*arguments)
    finally:
        os._exit(status)


def _run(first, *arguments):
    """Run what follows `python`, as Python does; return the status."""
    import random
    import runpy
    import threading
    import traceback
    import types
    import warnings

    import numpy as np

    if [first, *arguments[:1]] == ["-W", "error::UserWarning"]:
        warnings.filterwarnings("error", category=UserWarning)
        _, first, *arguments = arguments
    random.seed()
    np.random.seed()
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, path), *sys.path[1:]]
    status = 0
    try:
        if first == "-m":
            module, *arguments = arguments
            sys.argv = [module, *arguments]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            if first == "-c":
                text, *arguments = arguments
                file, folder = "<string>", ""
            else:
                with open(first) as opened:
                    text = opened.read()
                file, folder = first, os.path.dirname(os.path.abspath(first))
            sys.argv = [first, *arguments]
            sys.path.insert(0, folder)
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            if first != "-c":
                main.__file__ = file
            exec(compile(text, file, "exec"), main.__dict__)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # which waits for the threads of the script
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    _serve()
