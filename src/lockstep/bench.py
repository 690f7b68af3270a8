"""Speed by number of devices, each in its own process."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from lockstep.errors import BenchFailed
from lockstep.scaling import Measurement, Scaling


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
        rounds: Rounds to measure, at least 1, after one that is not.
        batch_size: Rows of the global batch where the data is arrays. Defaults to 32.
        rehearse: Whether to make as many virtual CPU devices each time.
        say: Told what is being measured.

    Raises:
        BenchFailed: If one of the processes failed, with its last lines.
    """
    found = []
    for count in sorted(set(counts)):
        say(f"{count} device{'s' if count > 1 else ''} ...")
        found.append(_in_own_process(target, count, steps, rounds, batch_size, rehearse))
    return Scaling(
        target=target,
        rehearsed=all(name.startswith("cpu") for m in found for name in m.devices),
        cores=os.cpu_count() or 1,
        versions={name: metadata.version(name) for name in ("keras-lockstep", "keras", "jax")},
        measurements=tuple(found),
    )


def _in_own_process(
    target: str, count: int, steps: int, rounds: int, batch_size: int | None, rehearse: bool
) -> Measurement:
    environment = {**os.environ, **({"LOCKSTEP_REHEARSE": str(count)} if rehearse else {})}
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
        command = [sys.executable, "-m", "lockstep.measurement", json.dumps(asked)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode != 0 or not output.exists():
            raise BenchFailed(
                f"The process that measured {count} devices ended with {done.returncode}:\n"
                f"{_what_it_said(done.stderr)}\n"
                f"Train the model of {target} under lockstep.distribute(model, {count}) to see all."
            )
        measured = json.loads(output.read_text())
    for name in ("devices", "spread"):
        measured[name] = tuple(measured[name])
    return Measurement(**measured)


def _what_it_said(stderr: str) -> str:
    """The error of a traceback, or else the last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [
        line for line in lines if re.match(r"[\w.]+(Error|Exception|Found|Interrupt)\b", line)
    ]
    return (errors or lines or ["It said nothing."])[-1][:180]


_AN_ERROR = re.compile(r"[\w.]+(Error|Exception|Found|Interrupt)\b")
