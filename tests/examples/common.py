"""Examples as users run them, on rehearsed devices and with small sizes."""

import re
from pathlib import Path

from tests.processes.common import warm_script

FOLDER = Path(__file__).parents[2] / "examples"


def run_example(name, devices, options, folder):
    """Run an example whose files go to `folder`; returns what it printed.

    It compares its file, loaded by plain Keras on one device, with the model it
    trained; here that difference is held to the bound of the other tests.
    """
    arguments = options.format(folder=folder).split()
    printed = warm_script(
        FOLDER / name, *arguments, KERAS_BACKEND="jax", LOCKSTEP_REHEARSE=str(devices)
    )
    assert f"lockstep: jax, {devices} devices" in printed
    ((file, difference),) = re.findall(
        r"(\S+) by plain Keras on one device: largest difference (\S+)", printed
    )
    assert float(difference) <= 1e-5
    assert list(folder.rglob(file))
    return printed
