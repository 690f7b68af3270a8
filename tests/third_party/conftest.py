"""The option that keeps what each row measured, and the tests of one backend."""

from pathlib import Path

import keras

collect_ignore = [] if keras.backend.backend() == "jax" else ["test_sharded_presets.py"]


def pytest_addoption(parser):
    parser.addoption("--record", type=Path, help="the folder where each row leaves its figures")
