"""The commands `lockstep inspect` and `lockstep rescue`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import click

from lockstep.core.report import print_report, stdout_for
from lockstep.rescue import api


@click.command("inspect")
@click.argument("file", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def inspect_command(file: str, as_json: bool) -> None:
    """Show what a saved file is, and the command to run next.

    FILE may be the folder of a lockstep.Checkpoint: its checkpoints are listed.
    For a Keras 2 script (.py), the lines that must change are listed.

    Example: lockstep inspect multi.h5
    """
    print_report(api.inspect(file), as_json)


@click.command("rescue")
@click.argument("file", type=click.Path())
@click.option("-o", "output", required=True, type=click.Path(), metavar="OUT",
              help="Output file: .keras, .weights.h5, .h5 (Keras 2) or .safetensors.")  # fmt: skip
@click.option(
    "--model",
    metavar="FILE.PY:FUNCTION",
    help="Function of yours that builds the single-device model.",
)
@click.option(
    "--config", metavar="TEMPLATE.JSON", help="Old to_json() output of the single-device model."
)
@click.option("--custom", metavar="FILE.PY", help="Your custom layers and Lambda functions.")
@click.option(
    "--check",
    metavar="INPUTS.NPZ",
    help="Inputs x0.. and the outputs y0.. that the model must give.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def rescue_command(
    file: str,
    output: str,
    model: str | None,
    config: str | None,
    custom: str | None,
    check: str | None,
    as_json: bool,
) -> None:
    """Write a single-device file from an old multi-GPU file.

    Every array of the new file is compared with the old one.

    Example: lockstep rescue multi.h5 -o single.keras
    """
    from lockstep.tools import targets

    with stdout_for(as_json):
        objects = _public_names(targets.load_module(custom)) if custom else None
        built = targets.model_alone(model) if model else None
        done = api.rescue(
            file, output, model=built, config=config, custom_objects=objects, check=check
        )
    print_report(done, as_json)


_LIBRARIES = ("keras", "tf_keras", "tensorflow", "numpy")


def _public_names(module: Any) -> dict[str, Any]:
    """Return the public names that a file defines, without its imports from libraries.

    An imported LSTM would replace the translation of old LSTMs, with Keras 3's gates.
    """

    def imported(value: Any) -> bool:
        made_in = str(getattr(value, "__module__", "")).partition(".")[0]
        return hasattr(value, "__name__") and made_in in _LIBRARIES

    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and not imported(value)
    }
