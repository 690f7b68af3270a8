"""The nodes on which the tests of this folder run, and what they have to train."""

import shutil

import pytest

from tests.launchers.two_nodes import TRAIN, TwoNodes, read, why_not


@pytest.fixture(scope="package")
def nodes(tmp_path_factory):
    missing = why_not()
    if missing:
        pytest.skip(f"Slurm does not run here: {missing}")
    folder = tmp_path_factory.mktemp("slurm")
    made = TwoNodes(folder)
    yield made
    made.end()
    shutil.rmtree(folder)


@pytest.fixture(scope="package")
def alone(nodes, tmp_path_factory):
    """A function that returns the values of stock Keras on one device."""
    found = {}

    def values(backend, *more):
        if (backend, more) not in found:
            folder = tmp_path_factory.mktemp("alone")
            given = ("python", TRAIN, "--alone", "--folder", folder, *more)
            status, out, error = nodes.run(*given, KERAS_BACKEND=backend)
            assert status == 0, out + error
            found[backend, more] = read(folder, 0)
        return found[backend, more]

    return values
