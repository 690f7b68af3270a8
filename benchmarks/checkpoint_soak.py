"""`python benchmarks/checkpoint_soak.py`: at least 100 runs killed with SIGKILL, and resumed.

Run in a clone, with the packages for tests. What it does is told in tests/checkpoints/kills.py;
figures are in docs/performance.md.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"KERAS_BACKEND": "jax", "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
sys.path.insert(0, str(Path(__file__).parents[1]))


def main():
    from tests.checkpoints import kills

    with tempfile.TemporaryDirectory() as programs:
        # Each attempt is a process of its own, and would compile the same programs again.
        os.environ |= {
            "JAX_COMPILATION_CACHE_DIR": programs,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        kills.main()


if __name__ == "__main__":
    main()
