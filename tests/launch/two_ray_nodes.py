"""A Ray cluster of two nodes on this machine, in a process of its own. Ray leaves pipes open.

Each has one CPU and two GPUs, which are not there: a run on virtual CPU devices takes the CPU.

Prints the address. A line of the input takes the second node away (`remove`) or adds one (`add`);
the end of the input ends the cluster.
"""

import sys

from ray.cluster_utils import Cluster

SMALL = {"num_cpus": 1, "num_gpus": 2, "object_store_memory": 100 * 2**20}


def main():
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**SMALL, "include_dashboard": False},
    )
    second = cluster.add_node(**SMALL)
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line == "remove\n":
            cluster.remove_node(second, allow_graceful=False)
        else:
            second = cluster.add_node(**SMALL)
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
