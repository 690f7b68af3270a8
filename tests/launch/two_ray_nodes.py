"""A Ray cluster of two nodes on this machine, in a process of its own: Ray leaves pipes open.

Each has one CPU and two GPUs, which are not there: a run on virtual CPU devices takes the CPU.
"""

import os
import subprocess
import sys
from pathlib import Path

NODE = {"num_cpus": 1, "num_gpus": 2, "object_store_memory": 100 * 2**20}
SOURCE = Path(__file__).parents[2] / "src"
SOON = 400
"""Seconds after which a test gives up."""


def clean_environment():
    ours = ("LOCKSTEP", "JAX_", "XLA_", "PJRT_", "RAY_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**clean, "PYTHONPATH": str(SOURCE), "RAY_USAGE_STATS_ENABLED": "0"}


class Cluster:
    """The cluster, for tests."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=clean_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.address = self._process.stdout.readline().strip()

    def remove_node(self):
        self._tell("remove")

    def add_node(self):
        self._tell("add")

    def _tell(self, word):
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def end(self):
        self._process.communicate(timeout=SOON)


def main():
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    second = cluster.add_node(**NODE)
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line == "remove\n":
            cluster.remove_node(second, allow_graceful=False)
        else:
            second = cluster.add_node(**NODE)
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
