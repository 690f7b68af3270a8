"""What `bench` says about measurements, and how it comes to them."""

import io
import json
import re
import subprocess
import sys

import pytest
from rich.console import Console

import lockstep
from lockstep.errors import BenchFailed, DeviceError, DeviceNotFound, TargetNotFound, UnusableData
from lockstep.tools import bench
from lockstep.tools.bench import run_bench
from lockstep.tools.bench.scaling import Measurement, Scaling
from tests.conformance.common import data, devices_of, distances, model, snapshot


def measured(count, step, platform="gpu", together=1.0, **parts):
    base = {"input": 1e-4, "host": 1e-4, "compute": step * 0.7, "communication": 0.0}
    return Measurement(
        devices=tuple(f"{platform}:{n}" for n in range(count)),
        rows=64,
        rows_per_step=64.0,
        steps_per_execution=together,
        step=step,
        spread=(step * 0.9, step * 1.1),
        **{**base, **parts},
        compile=2.5,
        checkpoint=0.1,
        load=0.3,
    )


def scaling(*measurements, rehearsed=False):
    return Scaling("train.py:build", rehearsed, 2, {"keras": "3"}, measurements)


def test_speedup_and_efficiency_are_those_of_rows_per_second():
    found = scaling(measured(1, 0.010), measured(4, 0.004))
    last = found.measurements[1]
    assert last.rows_per_second == pytest.approx(16_000)
    assert found.speedup(last) == pytest.approx(2.5)
    assert found.efficiency(last) == pytest.approx(0.625)
    assert "4 devices are 2.50 times as fast as 1, an efficiency of 62%" in found.verdict
    assert "the computation itself" in found.verdict


def test_more_devices_help_only_beyond_the_spread_of_the_rounds():
    found = scaling(measured(1, 0.0100), measured(4, 0.0099))
    assert (
        "1 device is as fast as the others, within the spread. The bottleneck with 4"
        in found.verdict
    )


def test_the_most_devices_are_named_where_fewer_are_the_fastest():
    found = scaling(measured(1, 0.010), measured(2, 0.006), measured(4, 0.008))
    assert "2 devices are 1.67 times as fast as 1" in found.verdict
    assert found.verdict.endswith("; 4 devices are no faster.")


def test_a_report_without_a_profile_says_so():
    found = scaling(measured(1, 0.01, compute=None, communication=None))
    console = Console(file=io.StringIO(), width=80)
    found.show(console)
    for text in (console.file.getvalue(), found.as_json()):
        assert "Compute and communication were not measured here" in " ".join(text.split())
        assert "come from a profile" not in " ".join(text.split())


@pytest.mark.parametrize(
    ("parts", "limit", "advice"),
    [
        ({"input": 0.02}, "input", "more data workers will help"),
        ({"host": 0.02, "compute": 0.004}, "host", r"steps_per_execution=64\b"),
        ({"communication": 0.012, "compute": 0.004}, "communication", r"batch_size=2048\b"),
    ],
)
def test_what_limits_is_the_longest_part(parts, limit, advice):
    found = scaling(measured(1, 0.010), measured(4, 0.020, **parts))
    assert found.measurements[1].limit == limit
    assert "More devices do not help" in found.verdict
    assert re.search(advice, " ".join(found.advice))


def test_without_a_profile_what_limits_is_known_only_where_it_is_measured():
    """Of a step of 50 ms, 0.2 ms of Python were said to limit it."""
    unseen = {"compute": None, "communication": None}
    found = scaling(measured(1, 0.05, **unseen), measured(4, 0.1, **unseen))
    assert found.measurements[0].limit == "unknown"
    assert "1 device is the fastest. The bottleneck with 4 is unknown" in found.verdict
    assert measured(1, 0.05, **unseen, host=0.045).limit == "host"
    assert measured(1, 0.05, **unseen, input=0.045).limit == "input"
    # What takes 28% of a step does not limit it, whatever else is less.
    assert measured(1, 0.05, compute=0.01, host=0.014).limit == "unknown"


def test_steps_that_go_together_are_not_advised_to():
    slow = {"host": 0.02, "compute": 0.004}
    assert scaling(measured(1, 0.02, **slow)).advice
    assert not scaling(measured(1, 0.02, together=20.0, **slow)).advice


def test_rehearsed_devices_prove_no_speed():
    found = scaling(measured(1, 0.01, "cpu"), measured(2, 0.005, "cpu"), rehearsed=True)
    assert "say nothing about speed" in found.verdict
    assert found.advice == ()
    console = Console(file=io.StringIO(), width=80)
    found.show(console)
    assert "speed-up" not in console.file.getvalue()
    assert "efficiency" not in console.file.getvalue()
    assert found.as_dict()["measurements"][1]["speedup"] is None
    assert all(len(found.cells(each)) == len(found.heads) for each in found.measurements)


def test_the_report_names_every_number():
    found = scaling(measured(1, 0.010), measured(2, 0.006, communication=None, compute=None))
    console = Console(file=io.StringIO(), width=80)
    found.show(console)
    shown = console.file.getvalue()
    for word in ("rows/s", "6,400", "10,667", "1.67", "83%", "9 ms to 11 ms", "2.5 s"):
        assert word in shown
    again = json.loads(found.as_json())
    assert again["measurements"][1]["efficiency"] == pytest.approx(0.8333, abs=1e-3)
    assert again["measurements"][1]["compute"] is None
    assert "which slows down small steps" in " ".join(shown.split())
    assert "which slows down small steps" in again["profiled"]
    odd = scaling(measured(1, float("nan")), measured(4, float("inf")))
    assert json.loads(odd.as_json(), parse_constant=pytest.fail)["measurements"][1]["step"] == "inf"


SCRIPT = """
import keras, numpy as np
def build():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(64), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model, (np.ones((35, 3), "float32"), np.ones((35, 1), "float32"))
"""


@pytest.mark.thorough
def test_the_command_measures_each_count_in_its_own_process(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "lockstep", "bench", "train.py:build", "--devices", "3"]
    command += ["--rehearse", "--steps", "4", "--rounds", "2", "--batch-size", "10", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["rehearsed"]
    (found,) = told["measurements"]
    assert found["devices"] == ["cpu:0", "cpu:1", "cpu:2"]
    assert (found["rows"], found["rows_per_step"]) == (10, 8.75)
    for part in ("step", "host", "compute", "communication", "compile", "checkpoint"):
        assert found[part] > 0, part


@pytest.mark.whole
def test_a_process_that_fails_is_told_with_its_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("def build():\n    raise ValueError('no such data')\n")
    with pytest.raises(BenchFailed, match=r"(?s)2 devices ended with 1:\nValueError: no such data"):
        run_bench("train.py:build", [2])


@pytest.mark.whole
def test_what_lockstep_refuses_is_told_as_it_is(tmp_path, monkeypatch):
    """Its second line, at least, was lost on the way between the processes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("def build():\n    return 1\n")
    with pytest.raises(TargetNotFound) as error:
        run_bench("train.py:build", [1])
    assert str(error.value) == (
        "train.py:build returned a int, but (model, data) was expected.\n"
        "Return a compiled model and (x, y), or a data set of such batches."
    )


def test_devices_that_are_not_here_are_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCKSTEP_REHEARSE", "2")
    (tmp_path / "train.py").write_text(SCRIPT)
    said = []
    with pytest.raises(DeviceNotFound, match="devices=64 was requested, but only 2 are available"):
        run_bench("train.py:build", [1, 64], say=said.append)
    assert said[0] == "64 devices ..."


def test_a_measurement_that_takes_long_is_not_silent(tmp_path, monkeypatch):
    """In a pipe, a minute passed without a word."""
    monkeypatch.setattr(bench, "SILENT", 0.3)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import time\ndef build():\n    time.sleep(2)\n")
    said = []
    with pytest.raises(TargetNotFound):
        run_bench("train.py:build", [1], say=said.append)
    assert said[0] == "1 device ..."
    assert re.fullmatch(r"    making the model, after \d+ s \.\.\.", said[-1])


@pytest.mark.whole
def test_nothing_that_was_compiled_before_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAX_ENABLE_COMPILATION_CACHE", raising=False)
    (tmp_path / "train.py").write_text(
        "import os\ndef build():\n"
        "    raise ValueError(os.environ['JAX_ENABLE_COMPILATION_CACHE'])\n"
    )
    with pytest.raises(BenchFailed, match="ValueError: false"):
        run_bench("train.py:build", [1])
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "true")  # the user's own choice
    with pytest.raises(BenchFailed, match="ValueError: true"):
        run_bench("train.py:build", [1])


def test_counts_have_to_be_numbers(tmp_path):
    command = [sys.executable, "-m", "lockstep", "bench", "train.py:build", "--devices", "1,x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--devices=1,x is not a list of numbers" in done.stderr


def test_layers_that_keep_a_step_from_being_compiled_are_named():
    why = "the step is not compiled because of cut (RandomCrop)"
    found = scaling(measured(1, 0.1, not_compiled=why), rehearsed=True)
    assert found.advice == (f"On JAX {why}: apply such layers to the data instead, before fit.",)


def test_bench_in_python_leaves_the_model_as_it_was():
    made = lockstep.distribute(model(), 2)
    made.optimizer.build(made.trainable_variables)
    before = snapshot(made)
    found = lockstep.bench(made, data(), steps=2, rounds=1, batch_size=20, devices=(3, 1, 3))
    assert [len(each.devices) for each in found.measurements] == [1, 3]
    assert all(each.step > 0 and each.rows == 20 for each in found.measurements)
    assert (found.rehearsed, found.target) == (True, made.name)
    assert set(distances(before, snapshot(made)).values()) == {0.0}
    assert devices_of(made) == {2}


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"devices": 0}, DeviceError, "devices=0 was given, but numbers of devices of at least 1"),
        ({"devices": ["gpu:0"]}, DeviceError, "devices=['gpu:0'] was given"),
        ({"devices": 99}, DeviceNotFound, "devices=99 was requested"),
        ({"steps": 0}, UnusableData, "steps=0 was given, but a whole number of at least 1"),
        ({"rounds": 1.5}, UnusableData, "rounds=1.5 was given, but a whole number of at least 1"),
        ({"batch_size": -1}, UnusableData, "batch_size=-1 was given"),
        ({"compiled": False}, UnusableData, "A compiled model was expected, but 'sequential"),
    ],
)
def test_bench_in_python_refuses_what_it_cannot_measure(options, error, said):
    made = model(compiled=options.pop("compiled", True))
    with pytest.raises(error, match=re.escape(said)) as caught:
        lockstep.bench(made, data(), **options)
    assert len(str(caught.value).splitlines()) <= 3
