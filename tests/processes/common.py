"""Scripts in processes of their own."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.processes.warm import Script


def clean_environment(*beginnings, **more):
    """The environment of a script: without what these tests have set for themselves.

    Args:
        beginnings: What further variables begin with that are left out.
        more: Variables that are set.
    """
    ours = ("LOCKSTEP", "JAX_", "PJRT_", *beginnings)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return kept | more


def python(script, **environment):
    """Run a script with a clean environment; returns what it printed."""
    return _run(["-W", "error::UserWarning", "-c", script], **environment)


def warm_python(script, **environment):
    """As `python`, where JAX and Keras are imported before the script begins."""
    return warm(["-W", "error::UserWarning", "-c", script], **environment)


def warm_script(path, *arguments, cwd=None, **environment):
    """As `script`, where JAX and Keras are imported before the file begins."""
    return warm(["-W", "error::UserWarning", path, *arguments], cwd, **environment)


def script(path, *arguments, cwd=None, **environment):
    """Run a Python file with arguments; returns what it printed."""
    return _run(["-W", "error::UserWarning", str(path), *arguments], cwd, **environment)


def without_lockstep(script, cwd):
    """Run a script in `cwd` on one device, where lockstep cannot be imported."""
    return warm(["-c", f"import sys; sys.modules['lockstep'] = None\n{script}"], cwd)


def _run(arguments, cwd=None, **environment):
    clean = clean_environment("XLA_")
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**clean, "JAX_ENABLE_COMPILATION_CACHE": "false", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def warm(arguments, cwd=None, **environment):
    """Run what follows `python` by a fork of a process with Keras; returns what it printed."""
    code, out, error = warm_end(arguments, cwd, **environment)
    assert code == 0, out + error
    return out.strip()


def warm_end(arguments, cwd=None, **environment):
    """As `warm`, whatever the status is: the status, what it printed, what it said on stderr."""
    clean = clean_environment("KERAS_")  # XLA compiles as in the other tests
    with tempfile.TemporaryDirectory() as folder:
        output = [Path(folder, name) for name in ("out", "error")]
        given = {**clean, "KERAS_BACKEND": "jax", **environment}
        running = Script([*map(str, arguments)], cwd or Path.cwd(), given, output)
        try:
            out, error = running.communicate(timeout=300)
        finally:
            running.kill()
    return running.returncode, out, error
