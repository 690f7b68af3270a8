"""The command `lockstep`."""

import difflib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep import __version__
from lockstep.core.devices import REPLICATED, SHARDED, rehearsed_devices
from lockstep.core.package_versions import install_command
from lockstep.core.report import console, print_report, print_table, stdout_for, table
from lockstep.errors import DeviceError, LockstepError, UnsupportedBackend
from lockstep.launch.run_command import run_command
from lockstep.rescue.commands import inspect_command, rescue_command

if TYPE_CHECKING:
    from lockstep.tools.demo import DemoResult

KERAS_BACKENDS = ("jax", "tensorflow", "torch", "numpy", "openvino")

COULD_NOT_RUN = 2
VERDICTS = {"equal": 0, "different": 1, "cannot tell": 3}
EXIT_STATUS = """\b
Exit status:
  0  equal: every step was compared, and all agree
  1  different
  2  could not run: wrong arguments, one device, or an error in your code
  3  cannot tell: the loss is not finite, no weight changed, or float64 cannot decide
"""
"""The exit status of `lockstep verify`. The first character prevents click from wrapping."""


class Commands(click.Group):
    """Shows a lockstep error as its text, without a traceback."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command. For an unknown name, the error suggests a similar one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            meant = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            if not meant:
                raise
            said = f"{error.message} Did you mean {meant[0]}?"
            raise click.UsageError(said, ctx) from None

    def invoke(self, ctx: click.Context) -> object:
        """Run the command. For an error of lockstep, print its text and exit with 1.

        `verify` exits with 2 in that case, because its 1 is a result.
        """
        try:
            return super().invoke(ctx)
        except LockstepError as error:
            click.secho(f"{type(error).__name__}: {error}", fg="red", err=True)
            sys.exit(COULD_NOT_RUN if ctx.invoked_subcommand == "verify" else 1)
        except ModuleNotFoundError as error:
            if error.name != os.environ["KERAS_BACKEND"]:
                raise
            raise _Misused(
                f"KERAS_BACKEND={error.name} is set, but {error.name} is not installed.\n"
                "Run lockstep doctor: it says what to change."
            ) from None


@click.group(cls=Commands)
@click.version_option(__version__, package_name="keras-lockstep")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Train Keras models on several devices, with the same results and files as on one."""
    ctx.obj = os.environ.get("KERAS_BACKEND")
    # Not the backend in keras.json: Keras writes "tensorflow" there at its first import.
    backend = os.environ.setdefault("KERAS_BACKEND", "jax")
    if backend not in KERAS_BACKENDS:
        raise UnsupportedBackend(
            f"KERAS_BACKEND={backend!r} is set, but Keras only has "
            f"{', '.join(KERAS_BACKENDS)}.\nSet KERAS_BACKEND=jax, or unset it."
        )
    try:
        rehearsed_devices(os.environ)
    except DeviceError as error:
        raise _Misused(str(error)) from None


class _Misused(click.ClickException):
    """Check input that is no argument of a command."""

    exit_code = 2


@main.command()
@click.option(
    "--devices",
    default=4,
    show_default=True,
    type=click.IntRange(min=1),
    help="Virtual devices for the second run.",
)
@click.option(
    "--epochs",
    default=8,
    show_default=True,
    type=click.IntRange(min=1),
    help="Passes over the training data, 1,500 rows in each task.",
)
@click.option(
    "--output",
    default="lockstep-demo",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the models and the picture.",
)
def demo(devices: int, epochs: int, output: Path) -> None:
    """Train two models on one device and on several, and compare.

    The models are a digit classifier and a language model of Python source code. The demo takes
    one to two minutes and needs no GPU. The exit status is 0 if the runs agree, else 1.

    Example: lockstep demo --devices 8
    """
    missing = [name for name in ("sklearn", "matplotlib") if not _is_installed(name)]
    if missing:
        raise click.ClickException(
            f"The demo needs {' and '.join(missing)}, which is not installed.\n"
            f"Install it with: {install_command('demo')}"
        )
    from lockstep.tools.demo import run_demo

    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.ClickException(
            f"--output={output}: the folder cannot be created: {error.strerror}.\n"
            "Name a different folder."
        ) from None
    result = run_demo(devices, epochs, output)
    _show_demo(result)
    sys.exit(0 if result.holds else 1)


@main.command()
def devices() -> None:
    """List the available devices and their names.

    Example: LOCKSTEP_REHEARSE=4 lockstep devices
    """
    from lockstep.engines import current_engine

    shown = table("device", "kind", "memory")
    for device in current_engine().devices():
        memory = "" if device.memory is None else f"{device.memory / 2**30:.1f} GiB"
        shown.add_row(device.name, device.kind, memory)
    print_table(console(), shown)


@main.command()
@click.option(
    "--devices",
    "test_devices",
    is_flag=True,
    help="Also copy and sum test patterns between every pair of devices.",
)
@click.option(
    "--train",
    is_flag=True,
    help="Also train three small models in float64, on all devices and on one.",
)
@click.pass_obj
def doctor(chosen_backend: str | None, test_devices: bool, train: bool) -> None:
    """Check the installation, and say what to change.

    Run it first on a new machine, with both options. The exit status is 0 if a script can train,
    every pair of devices works, and training on all devices equals one device. Else it is 1.

    Example: lockstep doctor
    """
    from lockstep.tools.doctor import examine, script_environment

    found = examine(script_environment(chosen_backend))
    for label, value in found.rows():
        click.echo(f"{label:10} {value}")
    click.echo(f"\n{found.advice()}")
    if found.works:
        os.environ["KERAS_BACKEND"] = found.backend
    wrong = found.works and test_devices and _wrong_devices()
    wrong |= found.works and train and _wrong_training()
    sys.exit(0 if found.works and not wrong else 1)


def _wrong_training() -> bool:
    """Print how small models train on all devices; return whether one is not known to be right."""
    from lockstep.engines import current_engine
    from lockstep.tools.training_check import summary, train_on_all

    click.echo()
    engine, every = current_engine(), []
    for each in train_on_all(engine):
        click.echo(str(each))
        every.append(each)
    click.echo(summary(every, engine))
    return not all(each.is_equal for each in every)


def _wrong_devices() -> bool:
    """Print which pairs of devices of a backend are wrong; return whether there are any."""
    from lockstep.engines import current_engine
    from lockstep.tools.doctor import CAUSE_OF_WRONG_PAIRS, check_devices

    wrong, said = check_devices(current_engine(), rehearsed=bool(rehearsed_devices(os.environ)))
    click.echo("\n" + "\n".join([*wrong, *[CAUSE_OF_WRONG_PAIRS] * bool(wrong), said]))
    return bool(wrong)


_rehearse = click.option(
    "--rehearse", is_flag=True, help="Rehearse on this number of virtual CPU devices."
)
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
_micro_batch_size = click.option(
    "--micro-batch-size",
    type=click.IntRange(min=1),
    help="The most rows that a device runs at once.",
)


@main.command(epilog=EXIT_STATUS)
@click.argument("target")
@click.option("--devices", default=None, help="Number or names of devices: 4, 0,2 or gpu:0,gpu:1.")
@click.option(
    "--steps",
    default=20,
    show_default=True,
    type=click.IntRange(min=1),
    help="Training steps to compare.",
)
@click.option(
    "--batch-size", type=click.IntRange(min=1), help="Rows of a batch, if the data are arrays."
)
@_micro_batch_size
@_rehearse
@click.option(
    "--float64", is_flag=True, help="Build the model in float64. Equal means at most 1e-10 apart."
)
@click.option(
    "--state",
    default=REPLICATED,
    show_default=True,
    type=click.Choice([REPLICATED, SHARDED]),
    help="How weights and optimizer slots are laid out.",
)
@_as_json
def verify(
    target: str,
    devices: str | None,
    steps: int,
    batch_size: int | None,
    micro_batch_size: int | None,
    rehearse: bool,
    float64: bool,
    state: str,
    as_json: bool,
) -> None:
    """Train on one device and on several, and compare every step.

    TARGET is file.py:function or package.module:function. The function returns
    (model, data), with a compiled model.

    Example: lockstep verify train.py:build --devices 4 --rehearse
    """
    import lockstep
    from lockstep.tools.targets import float64_model_and_data, model_and_data

    # TensorFlow in this process would leave that of float64 no memory on a GPU.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    asked = int(devices) if devices is not None and devices.strip().isdecimal() else devices
    if rehearse:
        if not isinstance(asked, int):
            raise click.UsageError("--rehearse needs --devices with a number, such as 4.")
        lockstep.rehearse(asked)
    with stdout_for(as_json), _rehearsal_by_option(), _could_not_run():
        model, data = (float64_model_and_data if float64 else model_and_data)(target)
        found = lockstep.verify(
            model,
            data,
            asked,
            steps,
            batch_size=batch_size,
            state=state,
            micro_batch_size=micro_batch_size,
        )
    print_report(found, as_json)
    sys.exit(VERDICTS[found.verdict])


@contextmanager
def _could_not_run() -> Iterator[None]:
    """Exit with `COULD_NOT_RUN` if the user's code fails; Python would exit with 1."""
    try:
        yield
    except LockstepError:
        raise
    except (Exception, KeyboardInterrupt):
        traceback.print_exc()
        sys.exit(COULD_NOT_RUN)


@contextmanager
def _rehearsal_by_option(devices: str | None = None) -> Iterator[None]:
    """Name the options of the command where an error advises a script to rehearse.

    Args:
        devices: The value of `--devices` to advise, `None` for the number in the error.
    """
    try:
        yield
    except DeviceError as error:
        if error.rehearse is None:
            raise
        options = f"--devices {devices or error.rehearse} --rehearse"
        raise type(error)(
            f"{error.problem}\nTo rehearse on virtual CPU devices, give {options}."
        ) from None


@main.command()
@click.argument("target")
@click.option("--devices", default="1", show_default=True, help="Numbers of devices: 1,2,4.")
@click.option(
    "--steps", default=50, show_default=True, type=click.IntRange(min=1), help="Steps in a round."
)
@click.option(
    "--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Rounds to measure."
)
@click.option(
    "--batch-size", type=click.IntRange(min=1), help="Rows of a batch, if the data are arrays."
)
@_micro_batch_size
@_rehearse
@_as_json
def bench(
    target: str,
    devices: str,
    steps: int,
    rounds: int,
    batch_size: int | None,
    micro_batch_size: int | None,
    rehearse: bool,
    as_json: bool,
) -> None:
    """Measure how fast a model trains on several numbers of devices.

    TARGET is file.py:function or package.module:function. The function returns
    (model, data), with a compiled model. Each number of devices runs in a
    separate process.

    Example: lockstep bench train.py:build --devices 1,2,4
    """
    from lockstep.tools.bench import run_bench

    counts = _counts(devices)
    with _rehearsal_by_option(",".join(map(str, counts))):
        found = run_bench(
            target,
            counts,
            steps=steps,
            rounds=rounds,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            rehearse=rehearse,
            say=lambda text: click.echo(text, err=True),
        )
    print_report(found, as_json)


def _counts(devices: str) -> list[int]:
    parts = [part.strip() for part in devices.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise click.UsageError(
            f"--devices={devices} is not a list of numbers. Write numbers of devices, such as "
            "1,2,4."
        )
    return [int(part) for part in parts]


@main.command()
@click.argument("target")
@click.option("--devices", default="1,2,4,8", show_default=True, help="Numbers of devices.")
@click.option("--memory", help="Memory of one device: 24GB, or 80GiB.")
@click.option("--gpu", help="Compile the step for this GPU, such as h100. No GPU is needed.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Rows of the global batch.")
@click.option(
    "--micro-batch-size",
    type=click.IntRange(min=1),
    help="The most rows that a device runs at once.",
)
@click.option(
    "--largest-batch", is_flag=True, help="Search for the largest batch that fits. Takes longer."
)
@click.option("--mixed-precision", is_flag=True, help="Add table rows for mixed_bfloat16.")
@_as_json
def plan(
    target: str,
    devices: str,
    memory: str | None,
    gpu: str | None,
    batch_size: int | None,
    micro_batch_size: int | None,
    largest_batch: bool,
    mixed_precision: bool,
    as_json: bool,
) -> None:
    """Compute the memory and communication of each device.

    TARGET is file.py:function or package.module:function. The function returns a
    compiled model, or (model, data). The weights are not allocated, and no GPU is needed.

    Example: lockstep plan train.py:build --devices 1,2,4 --memory 24GB
    """
    import lockstep

    if largest_batch and gpu is None:
        raise click.UsageError(
            "--largest-batch compiles the step for a GPU, but --gpu was not given. Add it, for "
            "example --gpu h100."
        )
    counts = _counts(devices)
    if not rehearsed_devices(os.environ):
        lockstep.rehearse(1)  # GPUs that are here have other work
    with stdout_for(as_json):
        found = lockstep.plan(
            target,
            devices=counts,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            memory=memory,
            gpu=gpu,
            find_largest_batch=largest_batch,
            mixed_precision=mixed_precision,
            say=lambda text: click.echo(text, err=True),
        )
    print_report(found, as_json)


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
@click.option(
    "--model",
    metavar="FILE.PY:FUNCTION",
    help="Function that builds the model, if it has custom code.",
)
def export(run: Path, output: Path, best: bool, model: str | None) -> None:
    """Write a plain .keras file of a checkpoint.

    RUN is the folder of a lockstep.Checkpoint, or one checkpoint in it.

    Example: lockstep export runs/digits -o model.keras
    """
    from lockstep.checkpoint.export import export_model
    from lockstep.tools.targets import model_alone

    made = model_alone(model) if model else None
    taken = export_model(run, output, made, best)
    click.echo(f"Written: {output}, from {taken.name}")


main.add_command(inspect_command)
main.add_command(run_command)
main.add_command(rescue_command)


def _show_demo(result: "DemoResult") -> None:
    shown = table("", "one device", f"{result.devices} devices", "apart")
    for row in result.table():
        shown.add_row(*row)
    print_table(console(), shown)
    files = ", ".join(f"{task.name.lower()}.keras" for task in result.tasks)
    saved = f"Saved in {result.folder}: {files}, demo.png."
    console().print(saved, markup=False, soft_wrap=True)
    console().print(result.sentence(), style="" if result.holds else "red", markup=False)


def _is_installed(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None
