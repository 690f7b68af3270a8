"""What is read in a profile of the devices, against events whose lengths are known."""

import gzip
import json
import random

import numpy as np
import pytest

import lockstep
from lockstep.engines.jax.introspection import measured_times
from lockstep.engines.jax.introspection.measured_times import MeasuredTimes
from lockstep.tools.bench.step_clock import StepClock


def trace_of(folder, *events):
    """What is read in a trace of these: thread, device, operation, begin and length in s."""
    told = [
        {
            "ph": "X",
            "pid": 1,
            "tid": thread,
            "name": name,
            "ts": begin * 1e6,
            "dur": length * 1e6,
            "args": {"hlo_op": name, "device_ordinal": device},
        }
        for thread, device, name, begin, length in events
    ]
    random.Random(0).shuffle(told)
    file = folder / "some.trace.json.gz"
    with gzip.open(file, "wt") as opened:
        json.dump({"traceEvents": [*told, {"ph": "M", "name": "no operation"}]}, opened)
    found = MeasuredTimes()
    measured_times._read(file, found)
    return found


def test_an_operation_within_another_counts_once(tmp_path):
    """A loop counted beside all that runs in it: an LSTM computed for longer than it took."""
    loop = [(1, 0, "while.3", 10, 8), (1, 0, "dot.1", 11, 2), (1, 0, "add", 13, 1)]
    found = trace_of(tmp_path, *loop, (1, 0, "dot.2", 20, 1))
    assert found == MeasuredTimes(compute=pytest.approx(9), communication=0)


def test_a_collective_within_a_loop_is_no_computation(tmp_path):
    loop = [(1, 0, "while", 10, 8), (1, 0, "while", 11, 6), (1, 0, "all-reduce.2", 12, 3)]
    found = trace_of(tmp_path, *loop, (1, 0, "dot", 16, 1))
    assert (found.compute, found.communication) == (pytest.approx(5), pytest.approx(3))


def test_what_runs_at_the_same_time_counts_once_in_each_of_the_two(tmp_path):
    dots = [(1, 0, "dot", 10, 4), (2, 0, "dot", 12, 4), (3, 0, "dot", 13, 1)]
    found = trace_of(tmp_path, *dots, (4, 0, "all-reduce", 11, 3), (5, 1, "dot", 10, 8))
    assert (found.compute, found.communication) == (pytest.approx(6), pytest.approx(3))


def test_of_a_profile_that_is_full_nothing_is_told(tmp_path, monkeypatch):
    """It holds a million events and drops the rest: what was left was taken for all."""
    monkeypatch.setattr(measured_times, "_MOST_EVENTS", 3)
    dots = [(1, 0, "dot", 10, 4), (1, 0, "dot", 20, 4)]
    assert trace_of(tmp_path, *dots) == MeasuredTimes(full=True)
    assert trace_of(tmp_path, *dots[:1]).compute


def test_a_device_does_not_compute_for_longer_than_the_profile_lasted(keras):
    made = keras.Sequential([keras.Input((30, 3)), keras.layers.LSTM(8), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    lockstep.distribute(made, 2)
    data = np.ones((64, 30, 3), "float32"), np.ones((64, 1), "float32")
    made.fit(*data, verbose=0)
    with measured_times.profiled(devices=True) as trace:
        clock = StepClock(10)
        made.fit(*data, verbose=0, callbacks=[clock])
    assert 0 < trace.compute <= clock.wall
    assert 0 < trace.communication <= clock.wall
