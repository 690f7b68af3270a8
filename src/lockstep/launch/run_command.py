"""The command `lockstep run`."""

import os
import sys
from pathlib import Path

import click

from lockstep.core.environment import find_place
from lockstep.errors import LaunchError
from lockstep.launch.rank import print_line
from lockstep.processes.shares import devices_of_each

_WHOLE = click.IntRange(min=1)


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option(
    "--processes", default=1, show_default=True, type=_WHOLE, help="Number of processes to start."
)
@click.option(
    "--devices-per-process",
    type=_WHOLE,
    help=(
        "Devices of each process. The default is an equal share of the GPUs. Without a GPU: "
        "virtual CPU devices."
    ),
)
@click.option(
    "--restarts",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help=(
        "Number of restarts after a failure. A script with lockstep.Checkpoint resumes where it "
        "was."
    ),
)
@click.option(
    "--hang-timeout",
    type=click.FloatRange(min=0, min_open=True),
    help="A process that makes no progress in a call such as fit for this many seconds counts "
    "as failed.  [default: never]",
)
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_command(
    processes: int,
    devices_per_process: int | None,
    restarts: int,
    hang_timeout: float | None,
    script: Path,
    arguments: tuple[str, ...],
) -> None:
    """Run a script in several processes of this machine.

    In the script, lockstep.distribute connects the processes. Process 0
    prints the same as without a launcher. The exit status is that of the process that failed first.

    Slurm, Kubernetes, Ray Train and torchrun start the script directly, without
    this command.

    Example: lockstep run --processes 4 --restarts 3 train.py --epochs 20
    """
    if not script.is_file():
        raise LaunchError(
            f"There is no script {script} in {Path.cwd()}.\nName an existing Python script."
        )
    place = find_place(os.environ)
    if place.size > 1:
        raise LaunchError(
            f"lockstep run was itself started as {place}, but it must start all processes of a "
            "machine.\nStart the script without lockstep run. If no other launcher is used, "
            f"unset {', '.join(place.variables)}."
        )
    if os.name == "nt":
        raise LaunchError(
            "lockstep run supports Linux and macOS, but not Windows.\n"
            "Use it under WSL, or start the script directly."
        )
    from lockstep.launch.local_run import run_here

    devices = devices_of_each(processes, devices_per_process, os.environ)
    if devices_per_process and "CUDA_VISIBLE_DEVICES" not in devices[0]:
        print_line(f"rehearsal on {devices_per_process} virtual CPU devices in each process")
    command = [sys.executable, str(script), *arguments]
    sys.exit(run_here(command, devices, restarts, hang_timeout))
