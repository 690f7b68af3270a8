"""The option that keeps what each row measured."""

from pathlib import Path


def pytest_addoption(parser):
    parser.addoption("--record", type=Path, help="the folder where each row leaves its figures")
