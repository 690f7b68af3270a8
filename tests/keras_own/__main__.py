"""Run Keras's own trainer and callback tests with every compiled model distributed.

    python -m tests.keras_own [pytest options]

The tests are those inside the installed Keras package.
"""

import subprocess
import sys
from pathlib import Path

import keras

from tests.keras_own.exceptions import CANNOT_APPLY


def main() -> int:
    source = Path(keras.__file__).parent / "src"
    files = [source / "trainers" / "trainer_test.py", *sorted(source.glob("callbacks/*_test.py"))]
    for name, reason in CANNOT_APPLY.items():
        print(f"left out: {name}: {reason}")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.keras_own.plugin",
        "-q",
        "-c",
        "/dev/null",
    ]
    return subprocess.call([*command, f"--rootdir={source}", *sys.argv[1:], *map(str, files)])


if __name__ == "__main__":
    sys.exit(main())
