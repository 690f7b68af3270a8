"""The time that JAX spends on compiling, computing and communicating."""

import gzip
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective", "nccl")

_MOST_EVENTS = 1_000_000
"""The limit of the profiler's JSON, which drops further events silently:
xla/tsl/profiler/convert/trace_container.h and xplane_to_trace_events.cc (kMaxEvents), OpenXLA."""

_Span = tuple[float, float, Any]
"""The begin and the end of an operation, and what it was."""


@dataclass
class MeasuredTimes:
    """Seconds that JAX measures of its own work; `None` for what was not measured.

    Attributes:
        compile: Tracing and compilation.
        compute: Computation of the busiest device.
        communication: Its collectives, including waits for other devices.
        full: Whether the profiler dropped events, so that nothing is known of the devices.
    """

    compile: float | None = None
    compute: float | None = None
    communication: float | None = None
    full: bool = False


@contextmanager
def profiled(*, devices: bool) -> Iterator[MeasuredTimes]:
    """Measure compilation inside the context; the result is filled in at its end.

    Args:
        devices: Whether to profile the work of the devices too.
    """
    found, counting = MeasuredTimes(compile=0.0), True

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if counting and event.startswith("/jax/core/compile/"):
            found.compile = (found.compile or 0.0) + duration_secs

    # JAX has no public way to remove a listener. This one ignores later events instead.
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with _traced(found) if devices else nullcontext():
            yield found
    finally:
        counting = False


@contextmanager
def _traced(found: MeasuredTimes) -> Iterator[None]:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory(prefix="lockstep-trace-") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            yield
        for file in Path(folder).rglob("*.trace.json.gz"):
            _read(file, found)
        if found.full:
            found.compute = found.communication = None


def _read(file: Path, found: MeasuredTimes) -> None:
    with gzip.open(file, "rt") as opened:
        events = json.load(opened)["traceEvents"]
    if len(events) >= _MOST_EVENTS:
        found.full = True
        return
    threads: dict[Any, list[_Span]] = defaultdict(list)
    for event in events:
        arguments = event.get("args", {})
        if event.get("ph") != "X" or "hlo_op" not in arguments:
            continue
        device = arguments.get("device_ordinal", event["pid"])
        name = str(arguments["hlo_op"]).lower()
        collective = name.startswith(_COLLECTIVES) or "nccl" in event["name"].lower()
        begin, seconds = event["ts"] / 1e6, event.get("dur", 0.0) / 1e6
        span = (begin, begin + seconds, (device, collective))
        threads[event["pid"], event.get("tid")].append(span)
    parts: dict[Any, list[_Span]] = defaultdict(list)
    for spans in threads.values():
        for part in _innermost(spans):
            parts[part[2]].append(part)
    busy = {of: _covered(spans) for of, spans in parts.items()}
    if busy:
        of = {
            device: (busy.get((device, False), 0.0), busy.get((device, True), 0.0))
            for device, _ in busy
        }
        found.compute, found.communication = max(of.values(), key=sum)


def _innermost(spans: list[_Span]) -> Iterator[_Span]:
    """Yield the spans of the innermost operations of one thread, where operations may nest."""
    under_way: list[_Span] = []
    at = 0.0

    def until(moment: float) -> Iterator[_Span]:
        nonlocal at
        while under_way and at < moment:
            _, end, of = under_way[-1]
            if at < end:
                yield at, min(end, moment), of
                at = min(end, moment)
            if end <= moment:
                under_way.pop()

    for begin, end, of in sorted(spans, key=lambda span: (span[0], -span[1])):
        yield from until(begin)
        at = begin
        under_way.append((begin, end, of))
    yield from until(float("inf"))


def _covered(spans: list[_Span]) -> float:
    """Return the time in which at least one span lasts."""
    total, reached = 0.0, 0.0
    for begin, end, _ in sorted(spans, key=lambda span: span[0]):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
