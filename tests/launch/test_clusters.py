"""What `lockstep run --on` writes. The golden files are read by people, too.

`train_job.yaml` was compared with the schema of kubeflow/trainer at
8c0f5059bd51ec3ba6d6a6a7b2e1471de7bc13b3: manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lockstep.cli import main

GOLDEN = Path(__file__).with_name("golden")
SOURCE = Path(__file__).parents[2] / "src"

SLURM = "--on slurm --nodes 2 --gpus-per-node 4 --time 04:00:00 --dry-run"
KUBERNETES = "--on kubernetes --nodes 2 --gpus-per-node 4 --image registry/train:1 --name digits"


def run(options, *script):
    return CliRunner().invoke(main, ["run", *options.split(), *script])


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(STAND_IN)


GOLDEN_FILES = [
    (SLURM, "slurm.sh"),
    (KUBERNETES, "train_job.yaml"),
    (f"{KUBERNETES} --dry-run", "train_job.yaml"),
]


@pytest.mark.parametrize(("options", "file"), GOLDEN_FILES)
def test_the_golden_files(options, file):
    done = run(options, "train.py", "--lr", "0.1", "it's")
    assert done.exit_code == 0, done.output
    assert done.output == (GOLDEN / file).read_text()


STAND_IN = """
import os, sys
from lockstep.launch.environment import find_place
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
    SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=$task SLURM_LOCALID=0 SLURM_STEP_NODELIST=gpu[07-08] "$@"
    found=$?
    [ $found -gt $status ] && status=$found
done
exit $status
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then printf 'gpu07\\ngpu08\\n'; else echo "$@" >> asked; fi
"""


@pytest.mark.parametrize("status", [0, 1, 143])
def test_the_batch_script_gives_each_host_its_place_and_goes_on_after_a_time_limit(
    status, tmp_path
):
    text = run(SLURM, "train.py", "--lr", "0.1", "it's").output
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
        "PYTHONPATH": str(SOURCE),
        "SLURM_JOB_ID": "70001",
        "SLURM_JOB_NODELIST": "gpu[07-08]",
        "SLURM_JOB_NUM_NODES": "2",
        "EXIT": str(status),
    }
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    done = subprocess.run(
        ["bash"], input=text, text=True, check=False, env=environment, stdout=subprocess.PIPE
    )
    assert done.returncode == status
    assert done.stdout.splitlines() == [
        f"{rank} 2 gpu07:61809 lockstep --lr 0.1 it's" for rank in (0, 1)
    ]
    asked = Path("asked").read_text() if Path("asked").exists() else ""
    assert asked == ("requeue 70001\n" if status == 143 else "")


def test_a_job_is_handed_to_sbatch(tmp_path, monkeypatch):
    (tmp_path / "sbatch").write_text('#!/bin/bash\ncat > given; exit "${REFUSES:-0}"\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    options = SLURM.removesuffix(" --dry-run")
    assert run(options, "train.py", "--lr", "0.1", "it's").exit_code == 0
    assert Path("given").read_text() == (GOLDEN / "slurm.sh").read_text()
    monkeypatch.setenv("REFUSES", "1")
    done = run(options, "train.py")
    assert done.exit_code == 1
    assert "sbatch refused the batch script with exit status 1" in done.output


REFUSED = {
    "no sbatch": ("--on slurm", "there is no sbatch on this machine"),
    "no image": ("--on kubernetes", "and no --image"),
    "a name of Kubernetes": (
        "--on kubernetes --image a --name Digits",
        "--name=Digits was asked for",
    ),
    "an option of a cluster without one": ("--nodes 2", "--nodes was given, and it has no meaning"),
    "an option of this machine": ("--on slurm --restarts 2", "--restarts was given"),
    "another cluster": ("--on mesos", "'mesos' is none of slurm, kubernetes, ray, ray://HOST:PORT"),
    "a run of this machine": ("--dry-run", "--dry-run was given, and it has no meaning with proc"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_cluster_can_do_is_refused(case, monkeypatch):
    options, text = REFUSED[case]
    if case == "no sbatch":
        monkeypatch.setenv("PATH", "")
    done = run(options, "train.py")
    assert done.exit_code in (1, 2)
    assert text in done.output


def test_slurm_needs_the_script_and_kubernetes_has_it_in_the_image():
    assert "no such file" in run(SLURM, "none.py").output
    assert '"/app/none.py"' in run(KUBERNETES, "/app/none.py").output
