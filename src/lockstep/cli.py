"""The command: what `lockstep ...` does."""

import os
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

import click

from lockstep import __version__
from lockstep.devices import rehearsed_devices
from lockstep.errors import DeviceError, LockstepError, UnsupportedBackend
from lockstep.rescue.commands import inspect_command, rescue_command

KERAS_BACKENDS = ("jax", "tensorflow", "torch", "numpy", "openvino")


class Commands(click.Group):
    """Shows a lockstep error as its text, without a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; exit with 1 and the text where lockstep refused."""
        try:
            return super().invoke(ctx)
        except LockstepError as error:
            click.secho(f"{type(error).__name__}: {error}", fg="red", err=True)
            sys.exit(1)


@click.group(cls=Commands)
@click.version_option(__version__, package_name="keras-lockstep")
def main() -> None:
    """Train Keras models on several devices, with the numbers and files of one."""
    # Not what keras.json says: Keras writes it by itself, with "tensorflow", when first imported.
    backend = os.environ.setdefault("KERAS_BACKEND", "jax")
    if backend not in KERAS_BACKENDS:
        raise UnsupportedBackend(
            f"KERAS_BACKEND={backend!r} was set, and Keras has {', '.join(KERAS_BACKENDS)}.\n"
            "Set KERAS_BACKEND=jax, or leave it out."
        )
    try:
        rehearsed_devices(os.environ)
    except DeviceError as error:
        raise _Misused(str(error)) from None


class _Misused(click.ClickException):
    """Bad input that is in no argument of a command."""

    exit_code = 2


@main.command()
@click.option("--devices", default=4, show_default=True, help="Virtual devices for the second run.")
@click.option("--epochs", default=8, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--output",
    default="lockstep-demo",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the model and the picture.",
)
def demo(devices: int, epochs: int, output: Path) -> None:
    """Train on real digits over rehearsed devices, and prove it equal to one."""
    missing = [name for name in ("sklearn", "matplotlib") if not _is_installed(name)]
    if missing:
        raise click.ClickException(
            f"The demo needs {' and '.join(missing)}, which is not installed here.\n"
            'Install what it needs with: pip install "keras-lockstep[demo]"'
        )
    from lockstep.demo import run_demo

    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.ClickException(
            f"--output={output} was asked for, and is no folder to be: {error.strerror}.\n"
            "Name a folder that can be made."
        ) from None
    result = run_demo(devices, epochs, output)
    _show_demo(result, devices)
    sys.exit(0 if result.holds else 1)


@main.command()
def devices() -> None:
    """What is here."""
    from rich.console import Console
    from rich.table import Table

    from lockstep.engines import current_engine

    table = Table("device", "kind", "memory")
    for device in current_engine().devices():
        memory = "" if device.memory is None else f"{device.memory / 2**30:.1f} GiB"
        table.add_row(device.name, device.kind, memory)
    Console().print(table)


@main.command()
@click.argument("target")
@click.option("--devices", default=None, help="How many, or which: 4, 0,2 or gpu:0,gpu:1.")
@click.option("--steps", default=20, show_default=True, type=click.IntRange(min=1))
@click.option("--batch-size", type=click.IntRange(min=1), help="Where the data is arrays.")
@click.option("--rehearse", is_flag=True, help="Make as many virtual CPU devices.")
@click.option("--json", "as_json_", is_flag=True, help="Print JSON instead of a table.")
def verify(
    target: str,
    devices: str | None,
    steps: int,
    batch_size: int | None,
    rehearse: bool,
    as_json_: bool,
) -> None:
    """Train on one device and on several, and compare every step.

    TARGET is file.py:function or package.module:function; the function returns
    (model, data), the model compiled. Exit code 0 says equal, 1 that they part.
    """
    import lockstep
    from lockstep.report.verification import as_json, show_verification
    from lockstep.targets import model_and_data

    asked = int(devices) if devices is not None and devices.strip().isdecimal() else devices
    if rehearse:
        if not isinstance(asked, int):
            raise click.UsageError("--rehearse needs --devices with a number.")
        lockstep.rehearse(asked)
    # What the user's code prints is no JSON.
    with redirect_stdout(sys.stderr) if as_json_ else nullcontext():
        model, data = model_and_data(target)
        found = lockstep.verify(model, data, asked, steps, batch_size=batch_size)
    if as_json_:
        click.echo(as_json(found))
    else:
        show_verification(found)
    sys.exit(0 if found.equal else 1)


@main.command()
@click.argument("target")
@click.option("--devices", default="1", show_default=True, help="Numbers of devices: 1,2,4.")
@click.option(
    "--steps", default=50, show_default=True, type=click.IntRange(min=1), help="Of a round."
)
@click.option(
    "--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="To be measured."
)
@click.option("--batch-size", type=click.IntRange(min=1), help="Where the data is arrays.")
@click.option("--rehearse", is_flag=True, help="Make as many virtual CPU devices each time.")
@click.option("--json", "as_json_", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write an HTML page with plots here.",
)
def bench(
    target: str,
    devices: str,
    steps: int,
    rounds: int,
    batch_size: int | None,
    rehearse: bool,
    as_json_: bool,
    output: Path | None,
) -> None:
    """Measure how fast a model trains on several numbers of devices.

    TARGET is file.py:function or package.module:function; the function returns
    (model, data), the model compiled. Each number of devices has its own process.
    """
    from lockstep.bench import run_bench
    from lockstep.report.scaling import as_json, show_scaling, write_page

    if output is not None and not _is_installed("matplotlib"):
        raise click.ClickException(
            "The page needs matplotlib, which is not installed here.\n"
            'Install it with: pip install "keras-lockstep[report]", or leave --output out.'
        )
    if output is not None and not os.access(output.parent, os.W_OK):
        what = "cannot be written to" if output.parent.is_dir() else "is not there"
        raise click.ClickException(
            f"--output={output} was asked for, and its folder {output.parent} {what}.\n"
            "Name a file in a folder that is there."
        )
    counts = [part.strip() for part in devices.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in counts):
        raise click.UsageError(
            f"--devices={devices} was asked for; write numbers of devices, such as 1,2,4."
        )
    found = run_bench(
        target,
        [int(part) for part in counts],
        steps=steps,
        rounds=rounds,
        batch_size=batch_size,
        rehearse=rehearse,
        say=lambda text: click.echo(text, err=True),
    )
    if as_json_:
        click.echo(as_json(found))
    else:
        show_scaling(found)
    if output is not None:
        write_page(found, output)
        click.echo(f"Written: {output}", err=True)


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="OUT.keras",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The plain .keras file to write.",
)
@click.option("--best", is_flag=True, help="The best checkpoint instead of the newest.")
@click.option("--model", metavar="FILE.PY:FUNCTION", help="Makes the model, where code is needed.")
def export(run: Path, output: Path, best: bool, model: str | None) -> None:
    """Write a plain .keras file out of the checkpoint or folder of checkpoints RUN."""
    from lockstep.export import export_model
    from lockstep.targets import model_alone

    made = model_alone(model) if model else None
    taken = export_model(run, output, made, best)
    click.echo(f"Written: {output}, of {taken.name}")


main.add_command(inspect_command)
main.add_command(rescue_command)


def _show_demo(result: object, devices: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from lockstep.demo import DemoResult

    assert isinstance(result, DemoResult)
    table = Table("", "one device", f"{devices} devices", "apart")
    loss, accuracy = result.losses, result.accuracies
    table.add_row("training loss", *(f"{v:.7f}" for v in loss), f"{abs(loss[0] - loss[1]):.1e}")
    table.add_row(
        "held-out accuracy",
        *(f"{v:.4f}" for v in accuracy),
        f"{abs(accuracy[0] - accuracy[1]):.1e}",
    )
    table.add_row("weights, at most", "", "", f"{result.weight_difference:.1e}")
    same = "same structure" if result.same_files else "they differ"
    table.add_row("files", "", "", same)
    table.add_row("the same, by plain Keras", "", f"{result.plain_accuracy:.4f}", "")
    console = Console()
    console.print()
    console.print(table)
    saved = f"Saved: {result.folder / 'digits.keras'}, {result.folder / 'digits.png'}"
    console.print(saved, markup=False)
    if result.holds:
        console.print(f"{devices} devices gave what one device gives.")
    else:
        console.print("[red]The runs differ. Please report this, with the table above.[/red]")


def _is_installed(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None
