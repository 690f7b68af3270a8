"""Where JAX spends its time: compiling, computing, communicating."""

import gzip
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective", "nccl")


@dataclass
class Compiling:
    """What was compiled.

    Attributes:
        seconds: To trace, lower and compile, all programs together.
    """

    seconds: float = 0.0


@dataclass
class Trace:
    """What the busiest device did.

    Attributes:
        seen: Whether the profiler saw any operation of a device.
        compute: Seconds in operations that are no collectives.
        communication: Seconds in collectives, waiting for other devices included.
    """

    seen: bool = False
    compute: float = 0.0
    communication: float = 0.0


@contextmanager
def compiling() -> Iterator[Compiling]:
    """Count what is compiled while it lasts."""
    found, counting = Compiling(), True

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if counting and event.startswith("/jax/core/compile/"):
            found.seconds += duration_secs

    # JAX has no public way to take a listener away: this one turns deaf instead.
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        counting = False


@contextmanager
def tracing() -> Iterator[Trace]:
    """Profile the devices while it lasts; read afterwards."""
    found = Trace()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory(prefix="lockstep-trace-") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            yield found
        for file in Path(folder).rglob("*.trace.json.gz"):
            _read(file, found)


def _read(file: Path, found: Trace) -> None:
    with gzip.open(file, "rt") as opened:
        events = json.load(opened)["traceEvents"]
    compute: dict[Any, float] = defaultdict(float)
    communication: dict[Any, float] = defaultdict(float)
    for event in events:
        arguments = event.get("args", {})
        if event.get("ph") != "X" or "hlo_op" not in arguments:
            continue
        device = arguments.get("device_ordinal", event["pid"])
        name = str(arguments["hlo_op"]).lower()
        collective = name.startswith(_COLLECTIVES) or "nccl" in event["name"].lower()
        (communication if collective else compute)[device] += event.get("dur", 0.0) / 1e6
    if compute or communication:
        busiest = max({**compute, **communication}, key=lambda d: compute[d] + communication[d])
        found.seen = True
        found.compute, found.communication = compute[busiest], communication[busiest]
