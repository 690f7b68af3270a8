"""When JAX joins the processes of a launcher, and when it is too late."""

import socket

from tests.processes.common import warm_script

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
}
LATE = """
import keras
import lockstep

def build():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

model = build()
try:
    lockstep.distribute(model)
except lockstep.errors.ProcessesDisagree as error:
    print(error)
"""


def test_the_line_that_started_jax_before_the_processes_joined_is_named(tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    said = warm_script(tmp_path / "late.py", KERAS_BACKEND="jax", JAX_PLATFORMS="cpu", **SLURM)
    assert said.startswith("This is process 1 of 2 (Slurm: SLURM_STEP_NUM_TASKS, SLURM_PROCID, ")
    line = "return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])"
    assert f"before the processes were connected, at late.py line 6: {line[:60]}.\n" in said
    assert len(said.splitlines()) == 3


BY_HAND = """
import sys, os
import lockstep
import jax
jax.distributed.initialize(sys.argv[1], 1, 0)
import jax.numpy as jnp
jnp.zeros(3)
assert os.environ["LOCKSTEP_JOINED"] == str(os.getpid())
print(lockstep.initialize(), jax.process_count())
"""


def test_a_script_that_has_joined_by_itself_is_left_alone(tmp_path):
    """Here it has joined one process, where the launcher has started two."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "by_hand.py").write_text(BY_HAND)
    launcher = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    environment = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", **launcher}
    said = warm_script(tmp_path / "by_hand.py", f"127.0.0.1:{port}", **environment)
    assert said == "(0, 1) 1"
