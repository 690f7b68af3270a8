"""Measures one model on some devices, in this process."""

import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.batches import for_fit, no_batch
from lockstep.bench.scaling import Measurement
from lockstep.distribute import distribute
from lockstep.engines import current_engine
from lockstep.engines.engine import Clock
from lockstep.errors import LockstepError, UnusableData
from lockstep.targets import model_and_data


def measure(
    model: Any, data: Any, devices: int, *, steps: int, rounds: int, batch_size: int | None
) -> Measurement:
    """Measure how fast `model` trains on `data` over a number of devices.

    Args:
        model: A compiled `keras.Model`; it is trained. Input options of an earlier
            `distribute` stay.
        data: As for `fit`: `(x, y)`, `(x, y, sample_weight)`, an array or dict as x alone,
            or a data set that can be read more than once.
        devices: The number of devices.
        steps: Steps of a round, at least 1. A round has at least four executions, and fewer
            if the data end.
        rounds: Measured rounds, at least 1. One round before them is not measured.
        batch_size: Rows of the global batch where `data` is arrays. Defaults to 32.

    Raises:
        DeviceError: If there are too few devices.
        NotAModel: If `model` is not a Keras model.
        UnusableData: If the data cannot be trained on more than once.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # Windows has none
    engine = current_engine()
    distribute(model, devices)
    x, y, sample_weight = given = for_fit(data, batch_size)
    probe = engine.probe(model)
    if not probe.feed(given, batch_size, 1)[1]:
        raise no_batch(data)
    options: dict[str, Any] = {"batch_size": batch_size} if batch_size is not None else {}

    def train(most: int = steps) -> Clock:
        clock = probe.clock(most)
        options.update(epochs=1, verbose=0, callbacks=[clock])
        model.fit(x, y, sample_weight=sample_weight, **options)
        return clock

    with probe.compiling() as compiling:
        steps_taken = train().steps
    if not steps_taken:
        raise UnusableData(
            f"Training steps were expected, and the fit of {type(model).__name__}, which is its "
            "own, took none that\nKeras's fit would take. Let it call super().fit, or give the "
            "model a train_step instead."
        )
    seconds, batches = probe.feed(given, batch_size, steps)
    clocks = [train() for _ in range(rounds)]
    most = steps
    with probe.tracing() as trace:
        traced = train()
    while trace.full and most > 1:  # The profiler dropped events: profile fewer steps.
        most = max(1, most // 10)
        with probe.tracing() as trace:
            traced = train(most)
    timed = sum(clock.steps for clock in clocks)
    every = [clock.wall / clock.steps for clock in clocks]
    # The inclusive method: the exclusive one extrapolates beyond the measured rounds.
    quartiles = statistics.quantiles(every, n=4, method="inclusive") if rounds > 1 else every * 3
    return Measurement(
        devices=engine.attached(model) or (),
        rows=max(clock.batch for clock in clocks),
        rows_per_step=sum(clock.rows for clock in clocks) / timed,
        steps_per_execution=timed / sum(clock.executions for clock in clocks),
        step=statistics.median(every),
        spread=(quartiles[0], quartiles[2]),
        input=seconds / batches,
        host=statistics.median(clock.host / clock.steps for clock in clocks),
        compute=trace.compute / traced.done if trace.seen else None,
        communication=trace.communication / traced.done if trace.seen else None,
        compile=compiling.seconds,
        checkpoint=_seconds_to_save(model),
        load=load,
        backend=engine.name,
    )


def _seconds_to_save(model: Any) -> float:
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        start = time.perf_counter()
        model.save_weights(Path(folder) / "model.weights.h5")
        return time.perf_counter() - start


def main() -> None:
    """Measure what the JSON in the first argument describes, and write the file that it names.

    An exception is written to the file too, for the parent process.
    """
    asked = json.loads(sys.argv[1])
    output = Path(asked.pop("output"))
    try:
        model, data = model_and_data(asked.pop("target"))
        found = {"measured": asdict(measure(model, data, **asked))}
    except Exception as error:
        kind = type(error)
        arguments = error.args if isinstance(error, LockstepError) else ()
        raised = [kind.__module__, kind.__name__, str(error), arguments]
        output.write_text(json.dumps({"raised": raised}))
        raise
    output.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
