"""One GPU under lockstep and one under stock Keras, where there is a GPU."""

import os
import subprocess
import sys

import pytest

from tests.conftest import FOR_GPUS


@pytest.mark.needs_gpu(1)
def test_one_gpu_leaves_what_stock_keras_leaves_on_it(request):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.every_backend.on_a_gpu"],
        cwd=request.config.rootpath,
        env={**FOR_GPUS, "KERAS_BACKEND": os.environ["KERAS_BACKEND"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
