"""Scripts in processes of their own."""

import os
import subprocess
import sys


def python(script, **environment):
    """Run a script with a clean environment; returns what it printed."""
    return _run(["-W", "error::UserWarning", "-c", script], **environment)


def script(path, *arguments, cwd=None, **environment):
    """Run a Python file with arguments; returns what it printed."""
    return _run(["-W", "error::UserWarning", str(path), *arguments], cwd, **environment)


def without_lockstep(script, cwd):
    """Run a script in `cwd` on one device, where lockstep cannot be imported."""
    return _run(
        ["-c", f"import sys; sys.modules['lockstep'] = None\n{script}"],
        cwd=cwd,
        KERAS_BACKEND="jax",
        JAX_PLATFORMS="cpu",
    )


def _run(arguments, cwd=None, **environment):
    ours = ("LOCKSTEP", "JAX_", "XLA_", "PJRT_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
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
