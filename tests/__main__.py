"""Runs the tests once for each backend: `python -m tests [arguments of pytest]`.

`KERAS_BACKEND=torch python -m pytest` runs those of one.
"""

import os
import subprocess
import sys

BACKENDS = ("jax", "torch", "tensorflow")
ARGUMENTS = ("-q", "-n", "2", "--dist", "loadgroup", "--durations=40")
NO_TESTS = 5  # pytest.ExitCode.NO_TESTS_COLLECTED


def main() -> int:
    """Return the status of the first run that failed; a run may have no test of that name."""
    statuses = []
    for backend in BACKENDS:
        print(f"KERAS_BACKEND={backend}", flush=True)
        command = [sys.executable, "-m", "pytest", *ARGUMENTS, *sys.argv[1:]]
        environment = os.environ | {"KERAS_BACKEND": backend}
        done = subprocess.run(command, env=environment, check=False)
        statuses.append(done.returncode)
    return next((status for status in statuses if status not in (0, NO_TESTS)), min(statuses))


if __name__ == "__main__":
    sys.exit(main())
