"""The jobs of `lockstep run` for clusters: a batch script for Slurm, a TrainJob for Kubernetes."""

import json
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import LaunchError


@dataclass(frozen=True)
class Job:
    """A script on the hosts of a cluster, with one process on each.

    Attributes:
        command: The script and its arguments.
        nodes: The number of hosts.
        gpus_per_node: The number of GPUs of each host, 0 for none.
        time: Slurm's time limit, such as "04:00:00"; `None` for that of the partition.
        image: The container image, for Kubernetes.
        name: The name of the job.
    """

    command: Sequence[str]
    nodes: int = 1
    gpus_per_node: int = 0
    time: str | None = None
    image: str | None = None
    name: str = "lockstep"


def slurm_script(job: Job) -> str:
    """Return the batch script, for `sbatch`.

    Slurm sends SIGTERM two minutes ahead of the time limit. `lockstep.Checkpoint` then saves, and
    the script asks Slurm to queue the job again.

    Raises:
        LaunchError: If an option has several lines.
    """
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        *([f"--time={job.time}"] if job.time else []),
        "--signal=TERM@120",
        "--requeue",
        "--open-mode=append",
    ]
    for option in options:
        if "\n" in option:
            raise LaunchError(
                f"{option!r} was asked for, and an option of Slurm is one line.\n"
                "Leave the line break out."
            )
    header = "\n".join(f"#SBATCH {option}" for option in options)
    return _SLURM.format(header=header, command=shlex.join(["python", *job.command]))


_SLURM = """\
#!/bin/bash
{header}

# One process on each host. They meet at the first host, on a port of this job.
export KERAS_BACKEND="${{KERAS_BACKEND:-jax}}"
export LOCKSTEP_PROCESSES="$SLURM_JOB_NUM_NODES"
hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
export LOCKSTEP_COORDINATOR="${{hosts%%$'\\n'*}}:$((61440 + SLURM_JOB_ID % 4096))"

status=0
srun --kill-on-bad-exit=1 bash -c 'export LOCKSTEP_PROCESS="$SLURM_PROCID"; exec "$@"' lockstep \\
    {command} || status=$?

# 143 (128 + SIGTERM): lockstep.Checkpoint has saved ahead of the time limit. The job goes on later.
if [ "$status" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


def submit(script: str) -> None:
    """Hand a batch script to Slurm, which prints the number of the job.

    Raises:
        LaunchError: If there is no `sbatch`, or it refuses the script.
    """
    try:
        done = subprocess.run(["sbatch"], input=script, text=True, check=False)
    except FileNotFoundError:
        raise LaunchError(
            "--on slurm was asked for, and there is no sbatch on this machine.\n"
            "Run this where Slurm is, or print the batch script with --dry-run."
        ) from None
    if done.returncode:
        raise LaunchError(
            f"sbatch refused the batch script with exit status {done.returncode}; see above.\n"
            "Print the script with --dry-run."
        )


def train_job(job: Job) -> str:
    """Return the TrainJob of Kubeflow Trainer v2, for `kubectl apply -f -`.

    The runtime `jax-distributed` sets the three variables of JAX, which `find_place` reads.

    Raises:
        LaunchError: If there is no image, or the name is none for Kubernetes.
    """
    if not job.image:
        raise LaunchError(
            "--on kubernetes was asked for, and no --image: the hosts run the script in a container"
            ".\nBuild an image with the script and lockstep, and name it by --image."
        )
    if re.fullmatch("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", job.name) is None:
        raise LaunchError(
            f"--name={job.name} was asked for, and Kubernetes takes lower-case letters, digits and "
            "dashes,\nwith a letter first and no dash last, at most 63. Choose another name."
        )
    command = "".join(f"\n      - {_quoted(part)}" for part in ["python", *job.command])
    resources = (
        f"""
    resourcesPerNode:
      requests:
        nvidia.com/gpu: {job.gpus_per_node}
      limits:
        nvidia.com/gpu: {job.gpus_per_node}"""
        if job.gpus_per_node
        else ""
    )
    return f"""\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {job.name}
spec:
  runtimeRef:
    apiGroup: trainer.kubeflow.org
    kind: ClusterTrainingRuntime
    name: jax-distributed
  trainer:
    numNodes: {job.nodes}
    image: {_quoted(job.image)}
    command:{command}
    env:
      - name: KERAS_BACKEND
        value: jax{resources}
"""


def _quoted(text: str) -> str:
    """Return a text as a double-quoted scalar of YAML."""
    return json.dumps(text)
