"""Two nodes and a controller of Slurm, in namespaces of this machine (two_nodes.sh)."""

import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from tests.launch.two_ray_nodes import clean_environment

HERE = Path(__file__).parent
TRAIN = HERE / "train.py"
ROUNDING = 1e-10
SOURCE = HERE.parents[1] / "src"
SOON = 300
"""Seconds after which a command of a test is ended."""

COMMANDS = {
    "slurm-wlm": ("srun", "sbatch", "slurmctld", "slurmd"),
    "munge": ("munged",),
    "iproute2": ("ip",),
    "util-linux": ("unshare", "nsenter", "mount"),
}
_APART = ("--mount", "--propagation=private", "--pid", "--fork", "--net", "--uts", "--ipc")
_TRY = "ip link add br0 type bridge && ip link add a0 type veth peer b0 && mount -t tmpfs t /run"


def why_not() -> str:
    """Return why this machine cannot run the nodes, `""` if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "only root of Linux can make network namespaces"
    for package, commands in COMMANDS.items():
        missing = [name for name in commands if shutil.which(name) is None]
        if missing:
            return f"{missing[0]} is missing (apt-get install {package})"
    tried = ["unshare", *_APART, "sh", "-c", _TRY]
    done = subprocess.run(tried, capture_output=True, text=True, check=False, timeout=60)
    return f"no namespaces: {done.stderr.strip()[:200]}" if done.returncode else ""


class TwoNodes:
    """The hosts `controller`, `node1` and `node2`. All ends with `end`, or with this process.

    Args:
        folder: An empty folder, for the files of Slurm. All hosts see the files of this machine.
    """

    def __init__(self, folder):
        self._folder = folder
        command = ["unshare", *_APART, "--kill-child", "--mount-proc", HERE / "two_nodes.sh"]
        self._process = subprocess.Popen(
            [*map(str, command), str(folder)],
            stdin=subprocess.PIPE,  # the namespaces end when it is closed
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        ready, _, _ = select.select([self._process.stdout], [], [], 120)
        if not ready or self._process.stdout.readline() != "ready\n":
            self._process.kill()
            said = self._process.communicate()[1]
            raise RuntimeError(f"the nodes did not start: {said}\n{self.logs()}")
        pid = self._process.pid
        self._first = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]

    def start(self, *command, at="controller", cwd="/", most=SOON, **environment):
        """Start a command on a host, which is killed after `most` seconds; return its process."""
        enter = ["nsenter", "--target", self._first, "--mount", "--pid", "--net", "--uts", "--ipc"]
        if at != "controller":
            inside = 'exec nsenter --target "$(cat "/run/$0")" --net --uts -- "$@"'
            enter += ["sh", "-c", inside, at]
        limits = ["env", f"--chdir={cwd}", "timeout", "--kill-after=5", str(most)]
        return subprocess.Popen(
            [*enter, *limits, *map(str, command)],
            env={
                **clean_environment(),
                "JAX_ENABLE_COMPILATION_CACHE": "false",
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "PYTHONPATH": f"{SOURCE}:{SOURCE.parent}",
                "SLURM_CONF": str(self._folder / "slurm.conf"),
                "TMPDIR": str(self._folder),
                **environment,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command, **options):
        """As `start`, and return the exit status, what it printed, and what it said on stderr."""
        process = self.start(*command, **options)
        out, error = self.end_of(process, options.get("most", SOON) + 20)
        return process.returncode, out, error

    def end_of(self, process, most):
        """Return what a command printed and said on stderr, which ends within `most` seconds."""
        try:
            return process.communicate(timeout=most)
        except subprocess.TimeoutExpired:
            process.kill()
            out, error = process.communicate()
            raise AssertionError(f"not within {most} seconds:\n{out}{error}") from None

    def ask(self, *command):
        """Run a command of Slurm, and return what it printed."""
        status, out, error = self.run(*command)
        assert status == 0, out + error
        return out.strip()

    def state(self, job):
        """Return the state of a job, such as `RUNNING`, `REQUEUED` or `COMPLETED`."""
        words = self.ask("scontrol", "--oneliner", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith("JobState="))

    def logs(self):
        """Return the ends of the logs of Slurm."""
        files = sorted(self._folder.glob("*.log"))
        return "\n".join(f"{file.name}:\n{file.read_text()[-2000:]}" for file in files)

    def end(self):
        """End every process of the hosts, and with them the namespaces."""
        self._process.kill()  # unshare lets its child be killed with it
        self._process.communicate()
        until(lambda: not Path(f"/proc/{self._first}").exists(), most=20)


def until(condition, most=SOON):
    """Wait until a function returns something true, and return that."""
    end = time.monotonic() + most
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {most} seconds"
        time.sleep(0.3)
    return found


def read(folder, rank):
    """Return the values with which a process has ended its training (train.py)."""
    with np.load(folder / f"values-{rank}.npz") as file:
        return [file[name] for name in file.files]


def assert_equal(mine, expected):
    assert len(mine) == len(expected)
    for one, other in zip(mine, expected, strict=True):
        assert np.abs(one - other).max() <= ROUNDING
