"""Speed by number of devices, each in its own process."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep import errors
from lockstep.core.package_versions import package_version
from lockstep.distribute import check_model
from lockstep.engines import current_engine
from lockstep.errors import BenchFailed, DeviceError, UnusableData, counted
from lockstep.tools.bench.scaling import Measurement, Scaling
from lockstep.tools.progress import SILENT, Advance, progress

PHASES_BESIDES = 3
"""What a measurement does besides its rounds."""


def bench(
    model: Any,
    data: Any,
    devices: int | Sequence[int] | None = None,
    *,
    steps: int = 50,
    rounds: int = 5,
    batch_size: int | None = None,
    micro_batch_size: int | None = None,
) -> Scaling:
    """Measure how fast a model trains on several numbers of devices, in this process.

    The model trains by `fit`. Afterwards it has its weights, optimizer state and devices again,
    and its metrics are reset. The command `lockstep bench` gives each number of devices a process
    of its own, and measures compilation too.

    Args:
        model: A compiled `keras.Model`.
        data: `(x, y)` or `(x, y, sample_weight)` of arrays, or a data set that `fit` takes and
            that can be read more than once.
        devices: Numbers of devices; `None` for 1 and all.
        steps: Steps of a round, at least 1.
        rounds: Measured rounds, at least 1. One round before them is not measured.
        batch_size: Rows of the global batch where `data` is arrays. Defaults to 32.
        micro_batch_size: The most rows that a device runs at once, as in `lockstep.distribute`.

    Returns:
        The result. `.verdict` is a sentence, and `.measurements` has the times in seconds.

    Raises:
        DeviceError: If `devices` are no numbers of devices, there are too few, or
            `micro_batch_size` is no number of rows.
        NotAModel: If `model` is not a Keras model.
        UnsupportedBackend: If several processes run, and the engine measures in one.
        UnusableData: If the model is not compiled, the data cannot be trained on, or a number is
            not at least 1.

    Example:
        >>> found = lockstep.bench(model, (x, y), devices=[1, 4], steps=5, rounds=1)
        >>> len(found.measurements)
        2
    """
    # These import NumPy and Keras, which `import lockstep` does not.
    from lockstep.attach.attachment import detach
    from lockstep.core.devices import parse_devices
    from lockstep.core.state import restore, snapshot
    from lockstep.tools.batches import count_from_one, first_batches
    from lockstep.tools.bench.measurement import measure
    from lockstep.tools.verify.comparison import untouched

    check_model(model)
    engine = current_engine()
    if devices is None:
        devices = (1, len(parse_devices(None, engine.devices())))
    given = list(devices) if isinstance(devices, list | tuple | range) else [devices]
    counts = [number for each in given if (number := count_from_one(each)) is not None]
    if not counts or len(counts) < len(given):
        raise DeviceError(
            f"devices={devices!r} was given, but numbers of devices of at least 1 were "
            "expected.\nPass a number, or several, such as (1, 2, 4)."
        )
    for name, number in (("steps", steps), ("rounds", rounds)):
        if count_from_one(number) is None:
            raise UnusableData(
                f"{name}={number!r} was given, but a whole number of at least 1 was expected.\n"
                f"Remove {name} to use the default."
            )
    if not getattr(model, "compiled", False):
        raise UnusableData(
            f"A compiled model was expected, but {model.name!r} is not compiled.\n"
            "Call model.compile(optimizer, loss) first: bench trains it."
        )
    batch = first_batches(data, 1, batch_size)[0]
    found: list[Measurement] = []
    phases = len(set(counts)) * (rounds + PHASES_BESIDES)
    with (
        untouched(engine, model, engine.probe(model), batch),
        progress(phases, lines=True, of="phases") as advance,
    ):
        start = snapshot(model)
        for count in sorted(set(counts), reverse=True):
            measured = measure(
                model,
                data,
                count,
                steps=steps,
                rounds=rounds,
                batch_size=batch_size,
                micro_batch_size=micro_batch_size,
                at=partial(_advanced, advance, counted(count, "device")),
            )
            # A program of before, or of JAX's cache, is not compiled.
            found.insert(0, replace(measured, compile=None))
            detach(model)
            restore(model, start)
    return _scaling(model.name, found)


def _advanced(advance: Advance, words: str, phase: str) -> None:
    """Show that the next phase of a measurement begins."""
    advance(words, 1)


def _scaling(target: str, found: list[Measurement]) -> Scaling:
    packages = ("keras-lockstep", "keras", found[0].backend)
    return Scaling(
        target=target,
        rehearsed=any(len(m.devices) > 1 and m.devices[0].startswith("cpu") for m in found),
        cores=os.cpu_count() or 1,
        versions={name: package_version(name) or "" for name in packages},
        measurements=tuple(found),
    )


def run_bench(
    target: str,
    counts: Sequence[int],
    *,
    steps: int = 50,
    rounds: int = 5,
    batch_size: int | None = None,
    micro_batch_size: int | None = None,
    rehearse: bool = False,
    say: Callable[[str], object] = lambda text: None,
) -> Scaling:
    """Measure the model of `target` on each number of devices.

    Args:
        target: `file.py:function`; the function returns (model, data).
        counts: Numbers of devices, each at least 1.
        steps: Steps of a round, at least 1.
        rounds: Measured rounds, at least 1. One round before them is not measured.
        batch_size: Rows of the global batch where the data is arrays. Defaults to 32.
        micro_batch_size: The most rows that a device runs at once.
        rehearse: Whether each process makes that number of virtual CPU devices.
        say: Called with a line about the measurement that begins, and where it is now and then.

    Raises:
        LockstepError: If lockstep raises it in one of the processes.
        BenchFailed: If one of the processes failed, with its error.
    """
    found: list[Measurement] = []
    asked = {
        "target": target,
        "steps": steps,
        "rounds": rounds,
        "batch_size": batch_size,
        "micro_batch_size": micro_batch_size,
    }
    # The largest number first: if there are too few devices, no measurement is wasted.
    for count in sorted(set(counts), reverse=True):
        say(f"{counted(count, 'device')} ...")
        found.insert(0, _in_own_process(asked, count, rehearse, say))
    return _scaling(target, found)


def _in_own_process(
    asked: dict[str, Any], count: int, rehearse: bool, say: Callable[[str], object]
) -> Measurement:
    # With the compilation cache of an earlier start, compilation would take no time.
    environment = {"JAX_ENABLE_COMPILATION_CACHE": "false", **os.environ}
    environment |= {"LOCKSTEP_REHEARSE": str(count)} if rehearse else {}
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        output = Path(folder) / "measurement.json"
        phase = Path(folder) / "phase"
        asked = asked | {"devices": count, "output": str(output), "phase": str(phase)}
        command = [sys.executable, "-m", "lockstep.tools.bench.measurement", json.dumps(asked)]
        stderr, code = _waited_for(command, environment, phase, say)
        told = json.loads(output.read_text()) if output.exists() else {}
    if code != 0 or "measured" not in told:
        module, kind, text, arguments = told.get("raised", ("", "", "", ()))
        if module == errors.__name__:
            raise getattr(errors, kind)(*arguments)
        said = f"{kind}: {text}" if kind else _last_line(stderr)
        raise BenchFailed(
            f"The process that measured {counted(count, 'device')} ended with {code}:\n"
            f"{said.splitlines()[0][:180]}\nTrain the model of {asked['target']} under "
            f"lockstep.distribute(model, {count}) to see the whole error."
        )
    measured = told["measured"]
    for name in ("devices", "spread"):
        measured[name] = tuple(measured[name])
    return Measurement(**measured)


def _waited_for(
    command: list[str], environment: dict[str, str], phase: Path, say: Callable[[str], object]
) -> tuple[str, int]:
    """Run a command, say now and then what it does, and return its errors and its status."""
    start = time.monotonic()
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        try:
            while True:
                try:
                    _, stderr = process.communicate(timeout=SILENT)
                    return stderr, process.returncode
                except subprocess.TimeoutExpired:
                    now = phase.read_text() if phase.exists() else "starting"
                    say(f"    {now}, after {time.monotonic() - start:.0f} s ...")
        except BaseException:
            process.kill()
            raise


def _last_line(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else "It printed nothing."
