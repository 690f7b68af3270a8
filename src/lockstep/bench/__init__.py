"""Speed by number of devices, each in its own process."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep import errors
from lockstep.bench.scaling import Measurement, Scaling
from lockstep.errors import BenchFailed, counted
from lockstep.package_versions import package_version


def run_bench(
    target: str,
    counts: Sequence[int],
    *,
    steps: int = 50,
    rounds: int = 5,
    batch_size: int | None = None,
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
        rehearse: Whether each process makes that number of virtual CPU devices.
        say: Called with a line about the measurement that begins.

    Raises:
        LockstepError: If lockstep raises it in one of the processes.
        BenchFailed: If one of the processes failed, with its error.
    """
    found: list[Measurement] = []
    # The largest number first: if there are too few devices, no measurement is wasted.
    for count in sorted(set(counts), reverse=True):
        say(f"{counted(count, 'device')} ...")
        found.insert(0, _in_own_process(target, count, steps, rounds, batch_size, rehearse))
    packages = ("keras-lockstep", "keras", found[0].backend)
    return Scaling(
        target=target,
        rehearsed=any(len(m.devices) > 1 and m.devices[0].startswith("cpu") for m in found),
        cores=os.cpu_count() or 1,
        versions={name: package_version(name) or "" for name in packages},
        measurements=tuple(found),
    )


def _in_own_process(
    target: str, count: int, steps: int, rounds: int, batch_size: int | None, rehearse: bool
) -> Measurement:
    # With the compilation cache of an earlier start, compilation would take no time.
    environment = {"JAX_ENABLE_COMPILATION_CACHE": "false", **os.environ}
    environment |= {"LOCKSTEP_REHEARSE": str(count)} if rehearse else {}
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        output = Path(folder) / "measurement.json"
        asked = {
            "target": target,
            "devices": count,
            "steps": steps,
            "rounds": rounds,
            "batch_size": batch_size,
            "output": str(output),
        }
        command = [sys.executable, "-m", "lockstep.bench.measurement", json.dumps(asked)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", check=False
        )
        told = json.loads(output.read_text()) if output.exists() else {}
    if done.returncode != 0 or "measured" not in told:
        module, kind, text, arguments = told.get("raised", ("", "", "", ()))
        if module == errors.__name__:
            raise getattr(errors, kind)(*arguments)
        said = f"{kind}: {text}" if kind else _last_line(done.stderr)
        raise BenchFailed(
            f"The process that measured {counted(count, 'device')} ended with {done.returncode}:\n"
            f"{said.splitlines()[0][:180]}\n"
            f"Train the model of {target} under lockstep.distribute(model, {count}) to see all."
        )
    measured = told["measured"]
    for name in ("devices", "spread"):
        measured[name] = tuple(measured[name])
    return Measurement(**measured)


def _last_line(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else "It said nothing."
