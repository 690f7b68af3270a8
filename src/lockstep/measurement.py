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

import keras

from lockstep.batches import first_batches, rows_of
from lockstep.distribute import distribute
from lockstep.engines import current_engine
from lockstep.scaling import Measurement
from lockstep.targets import model_and_data


def measure(
    model: Any, data: Any, devices: int, *, steps: int, rounds: int, batch_size: int | None
) -> Measurement:
    """How fast `model` trains on `data` over so many devices.

    Args:
        model: A compiled `keras.Model`; it is trained.
        data: As for `fit`: `(x, y)`, or `(x, y, sample_weight)`, or a data set.
        devices: How many.
        steps: Steps of a round, at least 1; fewer where the data ends before.
        rounds: Rounds to measure, at least 1, after one that is not.
        batch_size: Rows of the global batch where `data` is arrays. Defaults to 32.
    """
    load = os.getloadavg()[0]
    start = time.perf_counter()
    batches = first_batches(data, steps, batch_size)
    prepared = (time.perf_counter() - start) / len(batches)
    distribute(model, devices)
    probe = current_engine().probe(model)
    options = {"batch_size": batch_size} if batch_size is not None else {}
    x, y, sample_weight = [*data, None, None][:3] if _is_arrays(data) else (data, None, None)

    def train() -> "_Clock":
        clock = _Clock(steps)
        model.fit(x, y, sample_weight=sample_weight, verbose=0, callbacks=[clock], **options)
        return clock

    with probe.compiling() as compiling:
        train()
    clocks = [train() for _ in range(rounds)]
    with probe.tracing() as trace:
        traced = train()
    every = [clock.wall / clock.steps for clock in clocks]
    quartiles = statistics.quantiles(every, n=4) if len(every) > 1 else [every[0]] * 3
    return Measurement(
        devices=current_engine().attached(model) or (),
        rows=rows_of(batches[0]),
        step=statistics.median(every),
        spread=(quartiles[0], quartiles[2]),
        input=prepared,
        host=statistics.median(clock.host / clock.steps for clock in clocks),
        compute=trace.compute / traced.steps if trace.seen else None,
        communication=trace.communication / traced.steps if trace.seen else None,
        compile=compiling.seconds,
        checkpoint=_seconds_to_save(model),
        load=load,
    )


class _Clock(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Times the steps of one epoch, and ends it after so many.

    It asks for no value of a log before the epoch ends, and so waits for no device.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self.steps = 0
        self.wall = self.host = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            self.wall, self.host = -time.perf_counter(), -time.thread_time()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps = batch + 1
        if self.steps >= self._most:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        dict(logs or {})  # their values: every step has ended
        self.wall += time.perf_counter()
        self.host += time.thread_time()


def _is_arrays(data: Any) -> bool:
    return isinstance(data, tuple | list)


def _seconds_to_save(model: Any) -> float:
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        start = time.perf_counter()
        model.save_weights(Path(folder) / "model.weights.h5")
        return time.perf_counter() - start


def main() -> None:
    """Measure as the first argument says, in JSON, and write into the file it names."""
    asked = json.loads(sys.argv[1])
    model, data = model_and_data(asked.pop("target"))
    output = Path(asked.pop("output"))
    output.write_text(json.dumps(asdict(measure(model, data, **asked))))


if __name__ == "__main__":
    main()
