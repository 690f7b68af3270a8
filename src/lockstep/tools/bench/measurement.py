"""Measures one model on some devices, in this process."""

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.attach.attachment import session_of
from lockstep.core.engine import TRAIN
from lockstep.core.fit_lines import not_compiled_words
from lockstep.distribute import distribute
from lockstep.engines import current_engine
from lockstep.errors import LockstepError, UnsupportedBackend, UnusableData
from lockstep.keras_compat import layers_not_compiled
from lockstep.processes import process_group
from lockstep.tools.batches import Parts, for_fit, no_batch, rows_of
from lockstep.tools.bench.scaling import Measurement
from lockstep.tools.bench.step_clock import EXECUTIONS, StepClock
from lockstep.tools.targets import model_and_data


def measure(
    model: Any,
    data: Any,
    devices: int,
    *,
    steps: int,
    rounds: int,
    batch_size: int | None,
    micro_batch_size: int | None = None,
    at: Callable[[str], object] = lambda phase: None,
) -> Measurement:
    """Measure how fast `model` trains on `data` over a number of devices.

    Args:
        model: A compiled `keras.Model`; it is trained.
        data: As for `fit`: `(x, y)`, `(x, y, sample_weight)`, an array or dict as x alone,
            or a data set that can be read more than once.
        devices: The number of devices.
        steps: Steps of a round, at least 1. A round has at least four executions, and fewer
            if the data end.
        rounds: Measured rounds, at least 1. One round before them is not measured.
        batch_size: Rows of the global batch where `data` is arrays. Defaults to 32.
        micro_batch_size: The most rows that a device runs at once; `None` for all of its rows.
        at: Called with what begins now.

    Raises:
        DeviceError: If there are too few devices.
        NotAModel: If `model` is not a Keras model.
        UnusableData: If the data cannot be trained on more than once.
    """
    at("reading the data")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # Windows has none
    engine = current_engine()
    distribute(model, devices, micro_batch_size=micro_batch_size)
    if process_group.several() and engine.name == "torch":  # each process has one device
        raise UnsupportedBackend(
            f"bench was called in one of several processes, but on {engine.name!r} it can "
            "measure only a single process.\nStart it without a launcher."
        )
    x, y, sample_weight = given = for_fit(data, batch_size)
    room = (max(steps, EXECUTIONS * model.steps_per_execution) + 2 * model.steps_per_execution) + 1
    seconds, rows = draw(model, given, batch_size, room)
    if not rows:
        raise no_batch(data)
    options: dict[str, Any] = {"batch_size": batch_size} if batch_size is not None else {}

    def train(most: int = steps) -> StepClock:
        clock = StepClock(most, len(rows) if len(rows) < room else None)
        options.update(epochs=1, verbose=0, callbacks=[clock])
        model.fit(x, y, sample_weight=sample_weight, **options)
        return clock

    at("compiling, and a round that is not measured")
    with _profiled(engine.name, devices=False) as compiling:
        steps_taken = train().steps
    if not steps_taken:
        raise UnusableData(
            f"{type(model).__name__} has its own fit, which ran no training steps through "
            "Keras's fit,\nso there was nothing to measure. Call super().fit in it, or override "
            "train_step instead."
        )
    clocks = []
    for number in range(rounds):
        at(f"round {number + 1} of {rounds}")
        clocks.append(train())
    most = steps
    at("a round under the profiler" if engine.name == "jax" else "a last round")
    with _profiled(engine.name, devices=True) as profile:
        traced = train()
    while (
        profile is not None and profile.full and most > 1
    ):  # The profiler dropped events: profile fewer steps.
        most = max(1, most // 10)
        with _profiled(engine.name, devices=True) as profile:
            traced = train(most)
    rows = rows[: max(clock.done for clock in clocks)]
    every = [clock.wall / clock.steps for clock in clocks]
    # The inclusive method: the exclusive one extrapolates beyond the measured rounds.
    quartiles = statistics.quantiles(every, n=4, method="inclusive") if rounds > 1 else every * 3
    session = session_of(model)
    devices_used = () if session is None else session.devices
    # PyTorch computes on a CPU in the thread that starts a step.
    starts = engine.name != "torch" or not devices_used[0].startswith("cpu")
    return Measurement(
        devices=devices_used,
        rows=max(rows),
        rows_per_step=sum(rows) / len(rows),
        steps_per_execution=sum(c.steps for c in clocks) / sum(c.executions for c in clocks),
        step=statistics.median(every),
        spread=(quartiles[0], quartiles[2]),
        input=seconds,
        host=statistics.median(clock.host / clock.steps for clock in clocks) if starts else None,
        compute=_of_each(traced.done, profile and profile.compute),
        communication=_of_each(traced.done, profile and profile.communication),
        compile=compiling and compiling.compile,
        checkpoint=_seconds_to_save(model),
        load=load,
        backend=engine.name,
        not_compiled=_not_compiled(model) if engine.name == "jax" else "",
        as_graphs=getattr(session, "graphs_run", 0) > steps_taken,
    )


def draw(model: Any, data: Parts, batch_size: int | None, most: int) -> tuple[float, list[int]]:
    """Draw the batches of one epoch like `fit`, without training.

    Args:
        model: A distributed model.
        data: The data of the `fit`: x, y and sample weights.
        batch_size: As in `fit`.
        most: The maximum number of batches.

    Returns:
        The mean time of a batch in seconds, and the rows of each batch.
    """
    x, y, sample_weight = data
    session = session_of(model)
    assert session is not None
    batches = session.batches(
        TRAIN, x=x, y=y, sample_weight=sample_weight, batch_size=batch_size, shuffle=True
    )
    try:
        number, drawn = batches.num_batches or most, _epoch(batches)
        first = [rows_of(next(drawn))] if number > most else []
        start = time.perf_counter()  # The start of a long epoch serves all its batches.
        # Stop where a fit stops: after the last batch, the iterator waits for workers.
        rows = [rows_of(batch) for batch in itertools.islice(drawn, min(most, number))]
        seconds = time.perf_counter() - start
        return seconds / max(1, len(rows)), (first + rows)[:most]
    finally:
        batches.reset()  # ends the workers of a data set


def _epoch(batches: Any) -> Iterator[Any]:
    """Yield the batches of one epoch of Keras's iterator."""
    for _, _, iterator in batches:  # an iterator over the epoch, or a list of the next batches
        drawn = None
        for drawn in iterator:
            yield drawn
        if drawn is None:
            return


def _seconds_to_save(model: Any) -> float:
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        start = time.perf_counter()
        model.save_weights(Path(folder) / "model.weights.h5")
        return time.perf_counter() - start


def main() -> None:
    """Measure what the JSON in the first argument describes, and write the files that it names.

    An exception is written to the file too, for the parent process.
    """
    asked = json.loads(sys.argv[1])
    output, at = Path(asked.pop("output")), Path(asked.pop("phase")).write_text
    try:
        at("making the model")
        model, data = model_and_data(asked.pop("target"))
        found = {"measured": asdict(measure(model, data, **asked, at=at))}
    except Exception as error:
        kind = type(error)
        arguments = error.args if isinstance(error, LockstepError) else ()
        raised = [kind.__module__, kind.__name__, str(error), arguments]
        output.write_text(json.dumps({"raised": raised}))
        raise
    output.write_text(json.dumps(found))


def _profiled(backend: str, *, devices: bool) -> AbstractContextManager[Any]:
    """Measure compilation inside the context, and the work of the devices if asked.

    Only JAX has calls for that; the context gives `None` on other backends.
    """
    if backend != "jax":
        return nullcontext()
    from lockstep.engines.jax.introspection.measured_times import profiled

    return profiled(devices=devices)


def _of_each(steps: int, seconds: float | None) -> float | None:
    return None if seconds is None else seconds / steps


def _not_compiled(model: Any) -> str:
    """Return what keeps a step from being compiled on JAX, unless the user asked for that."""
    return not_compiled_words([] if model.run_eagerly else layers_not_compiled(model))


if __name__ == "__main__":
    main()
