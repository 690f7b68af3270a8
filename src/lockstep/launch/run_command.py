"""The command `lockstep run`."""

import os
import shlex
import sys
from pathlib import Path

import click

from lockstep.errors import LaunchError
from lockstep.launch.clusters import Job, slurm_script, submit, train_job
from lockstep.launch.environment import find_place
from lockstep.launch.rank import print_line
from lockstep.launch.shares import devices_of_each
from lockstep.launch.supervision import HangTimeout

_WHOLE = click.IntRange(min=1)


def _cluster(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    """Check what runs the hosts: a word, or the address of Ray."""
    if value in (None, "slurm", "kubernetes", "ray") or str(value).startswith("ray://"):
        return value
    raise click.BadParameter(f"{value!r} is none of slurm, kubernetes, ray, ray://HOST:PORT.")


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option("--processes", default=1, show_default=True, type=_WHOLE, help="Of the script.")
@click.option(
    "--devices-per-process",
    type=_WHOLE,
    help="An equal share of the GPUs if left out. Without a GPU: virtual CPU devices.",
)
@click.option(
    "--restarts",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="After a failure. A script with lockstep.Checkpoint goes on where it was.",
)
@click.option(
    "--hang-timeout",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds that a process may stand still in a call of a model.  "
    "[default: 600 while it compiles, 120 otherwise]",
)
@click.option(
    "--on",
    "cluster",
    metavar="CLUSTER",
    callback=_cluster,
    help="slurm: submit a job with one process per host. kubernetes: print its TrainJob, for "
    "kubectl apply -f -. ray or ray://HOST:PORT: run one process per node of a Ray cluster.",
)
@click.option("--nodes", default=1, show_default=True, type=_WHOLE, help="Hosts, with --on.")
@click.option("--gpus-per-node", type=click.IntRange(min=0), help="Of each host, with --on.")
@click.option("--time", help="Time limit of Slurm, such as 04:00:00.")
@click.option("--image", help="Container image of Kubernetes.")
@click.option(
    "--working-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder that Ray copies to the nodes; without it they share the current one.",
)
@click.option("--name", help="Of the job, with --on.  [default: lockstep]")
@click.option("--dry-run", is_flag=True, help="With --on: print what would run, and start nothing.")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_command(
    processes: int,
    devices_per_process: int | None,
    restarts: int,
    hang_timeout: float | None,
    cluster: str | None,
    nodes: int,
    gpus_per_node: int | None,
    time: str | None,
    image: str | None,
    working_dir: Path | None,
    name: str | None,
    dry_run: bool,
    script: Path,
    arguments: tuple[str, ...],
) -> None:
    """Run a script in one process or several that train one model.

    They run on this machine, or on a cluster with --on.

    In the script, lockstep.distribute joins the processes by itself. Process 0 prints as without
    a launcher. The exit status is that of the process that failed first; 124 if one stood still.

    Example: lockstep run --processes 4 --restarts 3 train.py --epochs 20
    """
    _check_options(cluster)
    if cluster == "kubernetes":  # the script is in the image
        command = [str(script), *arguments]
        job = Job(command, nodes, gpus_per_node or 0, None, image, name or "lockstep")
        click.echo(train_job(job), nl=False)
        return
    if not script.is_file():
        raise LaunchError(
            f"{script} was to be run, and there is no such file in {Path.cwd()}.\n"
            "Name a Python script."
        )
    if cluster == "slurm":
        command = [str(script), *arguments]
        job = Job(command, nodes, gpus_per_node or 0, time, None, name or "lockstep")
        text = slurm_script(job)
        click.echo(text, nl=False) if dry_run else submit(text)
        return
    place = find_place(os.environ)
    if place.size > 1:
        raise LaunchError(
            f"lockstep run was itself started as {place}, and it starts all processes of a "
            "machine.\nStart the script without lockstep run, or lockstep run once."
        )
    limits = HangTimeout.of(hang_timeout)
    if cluster is not None:
        address = None if cluster == "ray" else cluster
        words = (script, arguments, working_dir)
        sys.exit(_run_on_ray(address, *words, nodes, gpus_per_node, restarts, limits, dry_run))
    if os.name == "nt":
        raise LaunchError(
            "lockstep run starts processes on Linux and macOS so far, and this is Windows.\n"
            "Use it under WSL, or start the script itself."
        )
    from lockstep.launch.local_run import run_here

    devices = devices_of_each(processes, devices_per_process, os.environ)
    if devices_per_process and "CUDA_VISIBLE_DEVICES" not in devices[0]:
        print_line(f"rehearsal on {devices_per_process} virtual CPU devices in each process")
    sys.exit(run_here([sys.executable, str(script), *arguments], devices, restarts, limits))


def _run_on_ray(
    address: str | None,
    script: Path,
    arguments: tuple[str, ...],
    working_dir: Path | None,
    nodes: int,
    gpus_per_node: int | None,
    restarts: int,
    limits: HangTimeout,
    dry_run: bool,
) -> int:
    """Run the script on a Ray cluster, and return the exit status."""
    from lockstep.launch.ray_run import Work, connected, run_on_ray, share_of
    from lockstep.launch.supervision import stop_signals

    there = str(script)
    if working_dir is not None:
        if not script.resolve().is_relative_to(working_dir.resolve()):
            raise LaunchError(
                f"--working-dir={working_dir} is copied to the nodes, and {script} is not in it.\n"
                "Name the folder of the script."
            )
        there = str(script.resolve().relative_to(working_dir.resolve()))
    folder = str(Path.cwd()) if working_dir is None else None
    work = Work(str(script), (there, *arguments), folder)
    copied = None if working_dir is None else str(working_dir)
    # After the connection: Ray takes SIGTERM for itself.
    with connected(address, copied) as ray, stop_signals() as stops:
        share = share_of(ray, nodes, gpus_per_node, os.environ)
        if dry_run:
            print_line(f"Ray, {share}, would run: python {shlex.join(work.command)}")
            return 0
        try:
            done = run_on_ray(ray, work, share, restarts, limits, stops)
        except KeyboardInterrupt:
            return 128 + stops[0]
    return done.status


_HERE = {"processes", "devices_per_process", "restarts", "hang_timeout"}
_SLURM = {"nodes", "gpus_per_node", "time", "name", "dry_run"}
_KUBERNETES = {"nodes", "gpus_per_node", "image", "name", "dry_run"}
_RAY = {"nodes", "gpus_per_node", "restarts", "hang_timeout", "working_dir", "dry_run"}


def _check_options(cluster: str | None) -> None:
    """Check that no option was given that has no meaning there."""
    context = click.get_current_context()
    given = {
        name
        for name in _HERE | _SLURM | _KUBERNETES | _RAY
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    }
    known = {None: _HERE, "slurm": _SLURM, "kubernetes": _KUBERNETES}.get(cluster, _RAY)
    if given - known:
        option = "--" + min(given - known).replace("_", "-")
        where = f"--on {cluster}" if cluster else "processes on this machine"
        raise click.UsageError(f"{option} was given, and it has no meaning with {where}.")
