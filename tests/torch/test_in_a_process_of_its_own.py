"""The tests of the PyTorch engine, in a process where Keras runs on PyTorch."""

import os
import subprocess
import sys
from pathlib import Path

ENVIRONMENT = {"KERAS_BACKEND": "torch", "LOCKSTEP_REHEARSE": "4"}


def test_the_torch_engine(request):
    whole = ["--whole"] if request.config.getoption("--whole") else []
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(Path(__file__).parent), *whole],
        cwd=request.config.rootpath,
        env={**clean, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
