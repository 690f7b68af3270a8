"""`lockstep run` with stand-ins for a training, which import no framework."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.core import status
from lockstep.core.status import Status
from lockstep.errors import ProcessesDisagree
from lockstep.launch import local_run
from lockstep.launch.progress_watch import ProgressWatch
from lockstep.launch.rank import Failure, Output, cause_of
from tests.processes.common import clean_environment
from tests.tiers import rest

SOURCE = Path(__file__).parents[2] / "src"
SOON = 60
"""Seconds after which a test gives up."""

HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
rank, size = int(os.environ.get("LOCKSTEP_PROCESS", 0)), int(os.environ["LOCKSTEP_PROCESSES"])
Path(f"pid-{rank}").write_text(str(os.getpid()))

def wait_for(*names):
    until = time.monotonic() + 60
    while not all(Path(name).exists() for name in names):
        assert time.monotonic() < until
        time.sleep(0.02)
"""


def launch(folder, body, *options, arguments=(), **environment):
    (folder / "script.py").write_text(HEAD + body)
    clean = clean_environment("XLA_")
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", "run", *options, "script.py", *arguments],
        cwd=folder,
        env={**clean, "PYTHONPATH": str(SOURCE), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(folder, body, *options, **more):
    """Run a script to its end; return the exit status and what was printed."""
    process = launch(folder, body, *options, **more)
    try:
        out, error = process.communicate(timeout=SOON)
    finally:
        process.kill()
    return process.returncode, out, error


def wait_until(condition, seconds=SOON):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.02)


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it may end between the two calls in there
        return False
    return state not in ("Z", "X")


def pids(folder):
    return [int(file.read_text()) for file in sorted(folder.glob("pid-*")) if file.read_text()]


def none_left(folder):
    found = pids(folder)
    wait_until(lambda: not any(map(is_running, found)))
    return found


def test_process_0_is_plain_and_lines_of_the_others_have_a_prefix(tmp_path):
    body = """
sys.stdout.write(f"out {rank} {size} {' '.join(sys.argv[1:])}\\n")  # whole: both write to one pipe
print("error", rank, os.environ.get("LOCKSTEP_REHEARSE"), file=sys.stderr)
sys.stdout.write(f"no end {rank}")
"""
    options = ("--processes", "2", "--devices-per-process", "3")
    status, out, error = run(tmp_path, body, *options, arguments=["--restarts", "x"])
    assert status == 0
    assert sorted(out.replace("no end 0", "no end 0\n").splitlines()) == sorted(
        ["out 0 2 --restarts x", "[1] out 1 2 --restarts x", "[1] no end 1", "no end 0"]
    )
    assert {"error 0 3", "[1] error 1 3"} <= set(error.splitlines())
    assert "rehearsal on 3 virtual CPU devices in each process" in error
    # It never called distribute, which is worth a note where several processes ran.
    assert "script.py never called lockstep.distribute, so 2 processes did the same work" in error
    none_left(tmp_path)


def test_one_process_without_distribute_is_no_note(tmp_path):
    status, out, error = run(tmp_path, "print(rank, size)")
    assert (status, out, error) == (0, "0 1\n", "")


def test_a_progress_bar_of_another_process_becomes_its_last_state(capsys):
    output = Output(1, sys.stdout)
    output.write(b"1/2\r2/2")
    output.write(b" done\r\nhalf")
    output.close()
    assert capsys.readouterr().out == "[1] 2/2 done\n[1] half\n"
    assert [*output.last] == ["2/2 done", "half"]


@pytest.mark.parametrize("failing", [0, 1])
def test_the_process_that_failed_first_gives_the_exit_status(tmp_path, failing):
    """The others fail because of it, and here even end before it."""
    body = f"""
import lockstep
if rank == {failing}:
    def hook(*_):
        Path("failed").touch()
        time.sleep(1)  # as JAX waits for the other processes at the end of Python
        os._exit(7)
    report, sys.excepthook = sys.excepthook, lambda *error: (report(*error), hook())
    raise OSError("the disk is full")
wait_for("failed")
error = lockstep.errors.ProcessesDisagree("Process {failing} left its fit by an error")
error.left_by = {failing}
raise error
"""
    status, _, error = run(tmp_path, body, "--processes", "2")
    assert status == 7
    assert f"lockstep run: process {failing} of 2 failed first: OSError: the disk is full" in error
    if failing:  # the lines of process 0 are there already
        *_, last = error.rpartition("its last lines:")
        assert "    OSError: the disk is full" in last
        assert "left its fit" not in last
    none_left(tmp_path)


def test_who_asks_for_a_process_group_is_told_to_leave_the_sampler_out(tmp_path):
    """PyTorch's own text says to call init_process_group, which lockstep refuses."""
    words = "Default process group has not been initialized, please make sure to call init_process"
    _, _, error = run(tmp_path, f"raise ValueError({words!r})", "--processes", "2")
    assert "lockstep run: a DistributedSampler needs a process group: remove the sampler." in error
    none_left(tmp_path)


@pytest.mark.parametrize("killed", [0, *rest(1)])
def test_a_killed_process_ends_the_run_and_what_the_others_have_started(tmp_path, killed):
    body = """
if rank == 0:  # a worker of the script, in the group of its process
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path("pid-worker").write_text(str(worker.pid))
time.sleep(600)
"""
    process = launch(tmp_path, body, "--processes", "2")
    try:
        wait_until(lambda: len(pids(tmp_path)) == 3)
        victim = int((tmp_path / f"pid-{killed}").read_text())
        os.kill(victim, signal.SIGKILL)
        _, error = process.communicate(timeout=SOON)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGKILL
    assert f"process {killed} of 2 failed first: ended by SIGKILL" in error
    assert len(none_left(tmp_path)) == 3


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_process_which_saves(tmp_path, how):
    body = """
def save(number, _):
    Path(f"saved-{rank}").write_text(str(number))
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
Path(f"ready-{rank}").touch()
while True:
    time.sleep(0.1)
"""
    process = launch(tmp_path, body, "--processes", "2")
    try:
        wait_until(lambda: len([*tmp_path.glob("ready-*")]) == 2)
        process.send_signal(how)
        _, error = process.communicate(timeout=SOON)
    finally:
        process.kill()
    assert process.returncode == 128 + how
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == ["15", "15"]
    assert "failed" not in error
    none_left(tmp_path)


def test_after_a_run_signals_do_what_they_did():
    before = [signal.getsignal(number) for number in local_run._STOPPING]
    with local_run._stop_signals() as asked:
        os.kill(os.getpid(), signal.SIGTERM)
    assert asked == [signal.SIGTERM]
    assert [signal.getsignal(number) for number in local_run._STOPPING] == before


def test_a_second_ctrl_c_ends_processes_that_do_not_stop(tmp_path):
    body = """
signal.signal(signal.SIGTERM, lambda *_: Path(f"told-{rank}").touch())
Path(f"ready-{rank}").touch()
while True:
    time.sleep(0.1)
"""
    process = launch(tmp_path, body, "--processes", "2", "--restarts", "3")
    try:
        wait_until(lambda: len([*tmp_path.glob("ready-*")]) == 2)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: len([*tmp_path.glob("told-*")]) == 2)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=SOON)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGINT
    assert "restart" not in error
    none_left(tmp_path)


def test_no_process_outlives_a_launcher_that_is_killed(tmp_path):
    """The processes are told to save first, and their own workers end as well."""
    body = """
def save(*_):
    Path(f"saved-{rank}").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path(f"pid-worker-{rank}").write_text(str(worker.pid))
while True:
    time.sleep(0.1)
"""
    process = launch(tmp_path, body, "--processes", "2", TMPDIR=str(tmp_path))
    try:
        wait_until(lambda: len(pids(tmp_path)) == 4)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=SOON)
    finally:
        process.kill()
    assert len(none_left(tmp_path)) == 4
    assert {file.name for file in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}
    wait_until(lambda: not [*tmp_path.glob("lockstep-run-*")])  # nor is a file left


def test_an_error_of_lockstep_is_told_to_its_end(tmp_path, monkeypatch):
    """Its message has lines, and the last sentence of the launcher ended with the first one."""
    monkeypatch.setattr(status, "STATUS_OF_PROCESS", status.Status())
    reporter = status._Reporter(tmp_path / "0.json")
    for error, said in (
        (ProcessesDisagree("They part, where a step\nneeds all."), "part, where a step needs all."),
        (ValueError("no\nmore"), "ValueError: no"),
    ):
        reporter.failed(error, type(error))
        assert status.read(tmp_path / "0.json").failure.endswith(said)


def test_all_processes_start_again_after_a_failure(tmp_path):
    body = """
with open(f"starts-{rank}", "a") as file:
    file.write(os.environ["LOCKSTEP_COORDINATOR"] + "\\n")
if len(Path("starts-1").read_text().split() if rank else "") == 1:
    sys.exit(3)
if len(Path(f"starts-{rank}").read_text().split()) == 1:
    time.sleep(600)
"""
    status, _, error = run(tmp_path, body, "--processes", "2", "--restarts", "2")
    assert status == 0
    assert "process 1 of 2 failed first: exit status 3" in error
    assert "restart 1 of 2" in error
    assert "restart 2 of 2" not in error
    starts = [(tmp_path / f"starts-{rank}").read_text().split() for rank in (0, 1)]
    assert starts[0] == starts[1]
    assert len(starts[0]) == 2


def test_restarts_come_to_an_end(tmp_path):
    status, _, error = run(tmp_path, "sys.exit(4)", "--restarts", "2")
    assert status == 4
    assert error.count("process 0 failed: exit status 4") == 3


@pytest.mark.parametrize("stops", [False, True], ids=["waits", "SIGSTOP"])
def test_a_process_that_stands_still_is_named_with_its_phase_and_stacks(tmp_path, stops):
    body = f"""
import lockstep
from lockstep.core.status import STATUS_OF_PROCESS, phase

def stands_still():
    while STATUS_OF_PROCESS.step:
        time.sleep(0.1)

STATUS_OF_PROCESS.detail = "epoch 3"
with phase("training", compiles=True):
    for _ in range(5 - rank):
        STATUS_OF_PROCESS.stepped()
    if {stops} and rank == 1:
        time.sleep(1.5)  # its status has been written
        os.kill(os.getpid(), signal.SIGSTOP)
    stands_still()
"""
    status, _, error = run(tmp_path, body, "--processes", "2", "--hang-timeout", "2")
    assert status == 124
    assert "process 0 has made no progress in training, epoch 3, after 5 steps for" in error
    assert (
        "process 1 of 2 failed first: made no progress in training, epoch 3, after 4 steps" in error
    )
    assert ("it was suspended by a signal" in error) is stops
    lines = error.splitlines()
    assert any("stands_still" in line and not line.startswith("[1]") for line in lines)
    assert any("[1]" in line and "stands_still" in line for line in lines) is not stops
    none_left(tmp_path)


def test_a_script_may_take_its_time_outside_of_the_calls_of_a_model(tmp_path):
    status, _, _ = run(tmp_path, "import lockstep; time.sleep(3)", "--hang-timeout", "0.5")
    assert status == 0


class Process:
    """A process of a run for `ProgressWatch`."""

    reports = False

    def __init__(self, number, **status):
        self.number = number
        self.now = Status(**status)

    def status(self):
        return replace(self.now)

    def has_ended(self):
        return False

    def is_stopped(self):
        return False


def test_a_run_without_progress_is_noted_each_five_minutes_and_goes_on(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    slow, fast = Process(0, phase="training", detail="epoch 3", step=4), Process(1, step=4)
    watch = ProgressWatch([slow, fast], None)

    def minutes(count):
        for _ in range(count * 60):
            clock[0] += 1.0
            assert not watch.look()
        return capsys.readouterr().err.splitlines()

    assert minutes(5) == []  # the clock begins with the first status
    slow.now.step += 1
    assert minutes(5) == []
    assert minutes(4) == [
        "lockstep run: no step for 5 minutes: process 0 in training, epoch 3, after 5 steps; "
        "process 1 in no call of a model"
    ]
    slow.now.phase = ""
    assert minutes(20) == []
    slow.now.phase = "training"
    watch = ProgressWatch([slow, fast], 100.0)
    clock[0] += 1.0
    assert not watch.look()
    clock[0] += 101.0
    assert watch.look()
    assert watch.hanging.exit_status == 124


CAUSES = {
    "the earlier one": ([Failure(0, 1, at=5.0), Failure(1, 1, at=4.0)], 1),
    "no abort that follows a kill": ([Failure(0, -6, at=10.0), Failure(1, -9, at=10.1)], 1),
    "an abort of long before": ([Failure(0, -6, at=10.0), Failure(1, -9, at=20.0)], 0),
    "no broken connection": (
        [
            Failure(0, 1, 10.0, Status(failure="JaxRuntimeError: Gloo all-reduce failed")),
            Failure(1, 1, 10.1, Status(failure="ValueError: no")),
        ],
        1,
    ),
    "the one that another one names": (
        [Failure(0, 1, 10.0, Status(failed_by=1)), Failure(1, 1, 90.0, Status(failed_by=1))],
        1,
    ),
}


@pytest.mark.parametrize("case", CAUSES)
def test_the_cause_of_several_failures(case):
    failures, rank = CAUSES[case]
    assert cause_of(failures).rank == rank


REFUSED = {
    "a script that is not there": (
        (),
        {},
        "There is no script none.py in",
    ),
    "more processes than GPUs": (
        ("--processes", "3"),
        {"CUDA_VISIBLE_DEVICES": "4,6"},
        "--processes=3 with 1 device each need 3 GPUs; 2 GPUs available: 4, 6.",
    ),
    "GPUs that cannot be divided": (
        ("--processes", "2"),
        {"CUDA_VISIBLE_DEVICES": "0,1,2"},
        "--processes=2 was requested, but 3 GPUs cannot be divided equally between them.",
    ),
    "more devices than GPUs": (
        ("--processes", "2", "--devices-per-process", "2"),
        {"CUDA_VISIBLE_DEVICES": "0,1,2"},
        "--processes=2 with 2 devices each need 4 GPUs; 3 GPUs available: 0, 1, 2.",
    ),
    "a launcher of the launcher": (
        (),
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        "lockstep run was itself started as process 1 of 2 (torchrun: RANK",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_started_is_refused_in_words(case, tmp_path, monkeypatch):
    from click.testing import CliRunner

    from lockstep.cli import main

    options, environment, text = REFUSED[case]
    (tmp_path / "script.py").write_text("print(1)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOCKSTEP_REHEARSE", raising=False)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    script = "none.py" if case == "a script that is not there" else "script.py"
    done = CliRunner().invoke(main, ["run", *options, script])
    assert done.exit_code == 1
    assert text in done.output
    assert len(done.output.strip().splitlines()) <= 3


def test_the_visible_gpus_are_divided(tmp_path):
    from lockstep.processes.shares import devices_of_each

    of = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    got = [devices_of_each(*asked, of, tmp_path) for asked in ((2, None), (2, 1), (1, None))]
    assert [[each["CUDA_VISIBLE_DEVICES"] for each in every] for every in got] == [
        ["4,5", "6,7"],
        ["4", "5"],
        ["4,5,6,7"],
    ]
    assert (
        devices_of_each(2, 3, {**of, "LOCKSTEP_REHEARSE": "8"}) == [{"LOCKSTEP_REHEARSE": "3"}] * 2
    )


def machine(folder, *, nvidia=0, amd=0):
    """A folder in the place of `/`, with the device files of so many GPUs."""
    for number in range(nvidia):
        file = folder / f"dev/nvidia{number}"
        file.parent.mkdir(exist_ok=True)
        file.touch()
    for number in range(amd + bool(amd)):  # the first node is the processor
        node = folder / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        simds, minor = ("0", "0") if number == 0 else ("304", str(127 + number))
        (node / "properties").write_text(f"simd_count {simds}\ndrm_render_minor {minor}\n")
        if number and number != 3:  # a container has no device file of this one
            file = folder / f"dev/dri/renderD{minor}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    return folder


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, ["0", "1", "2"]),
        ("", []),
        ("2,0", ["2", "0"]),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,7,2", ["1"]),  # CUDA ignores what follows a name that is not there
        ("GPU-8f2,MIG-1", ["GPU-8f2", "MIG-1"]),
    ],
)
def test_the_names_of_gpus_are_read_as_cuda_reads_them(tmp_path, visible, found):
    from lockstep.processes.shares import visible_gpus

    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_gpus(environ, machine(tmp_path, nvidia=3)) == found


def test_the_gpus_of_rocm_are_divided(tmp_path):
    """They have no /dev/nvidiaN: each process claimed all of them."""
    from lockstep.processes.shares import devices_of_each

    root = machine(tmp_path, amd=5)
    assert devices_of_each(2, None, {}, root) == [
        {"HIP_VISIBLE_DEVICES": "0,1"},
        {"HIP_VISIBLE_DEVICES": "2,3"},
    ]
    among = {"ROCR_VISIBLE_DEVICES": "1,3", "HIP_VISIBLE_DEVICES": "1,0,2"}
    assert devices_of_each(2, None, among, root) == [
        {"HIP_VISIBLE_DEVICES": "1"},
        {"HIP_VISIBLE_DEVICES": "0"},
    ]
