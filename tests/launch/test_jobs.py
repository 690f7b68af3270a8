"""The job files of the examples: a batch script for Slurm, and a TrainJob for Kubernetes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs.blocks import blocks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

STAND_IN = """
import os, sys
from lockstep.core.environment import find_place
place = find_place(os.environ)
print(place.rank, place.size, place.coordinator, place.launcher, *sys.argv[1:])
sys.exit(int(os.environ.get("EXIT", "0")))
"""

# As Slurm does it: the variables of a step, and the greatest exit status of the tasks.
SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] || exit 99
shift
status=0
for task in 0 1; do
    SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=$task SLURM_LOCALID=0 \\
        SLURM_STEP_NODELIST=gpu[07-08] "$@"
    found=$?
    [ $found -gt $status ] && status=$found
done
exit $status
"""
SCONTROL = """#!/bin/bash
echo "$@" >> asked
"""


@pytest.mark.parametrize("status", [0, 1, 143])
def test_the_batch_script_starts_each_process_and_goes_on_after_a_time_limit(
    status, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("anywhere.py").write_text(STAND_IN)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, body in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(body)
        (commands / name).chmod(0o755)
    ours = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP")}
    environment = {
        **ours,
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "KERAS_BACKEND": "numpy",  # for which lockstep imports no framework
        "PYTHONPATH": str(ROOT / "src"),
        "SLURM_JOB_ID": "70001",
        "EXIT": str(status),
    }
    command = ["bash", str(EXAMPLES / "slurm.sh")]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == status
    assert done.stdout.splitlines() == [
        f"{rank} 2 gpu07:61809 Slurm --folder runs/anywhere" for rank in (0, 1)
    ]
    asked = Path("asked").read_text() if Path("asked").exists() else ""
    assert asked == ("requeue 70001\n" if status == 143 else "")


def test_the_train_job_is_one_of_kubeflow():
    from kubeflow_trainer_api import models

    written = yaml.safe_load((EXAMPLES / "train_job.yaml").read_text())
    job = models.TrainerV1alpha1TrainJob.from_dict(written)
    assert job.spec.runtime_ref.name == "jax-distributed"
    assert job.spec.trainer.command[:2] == ["python", "anywhere.py"]
    # The models leave unknown names out: all that is written has been read.
    assert job.to_dict() == written


@pytest.mark.parametrize("file", ["slurm.sh", "train_job.yaml"])
def test_the_page_has_the_job_files_of_the_examples(file):
    page = ROOT / "docs" / "several-machines.md"
    assert (EXAMPLES / file).read_text() in [block.text for block in blocks(page)]
