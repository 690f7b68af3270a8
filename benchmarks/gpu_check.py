"""Everything that waits for a GPU, in one command of at most eight minutes.

    pip install -e ".[benchmarks]"
    python benchmarks/gpu_check.py --json gpu-check.json

The parts run in order of value, each within its limit, and the JSON is written after each of them:
what was measured is kept when time runs out. At the end a table of Markdown is printed. One GPU is
shared by two and three ranks (`LOCKSTEP_SHARE_GPU`), which needs NCCL 2.30: that proves numbers,
and never speed. Several GPUs are used as they are, and the speed over 1, 2, 4 and 8 is measured.

`--small` tries the command with small models, where there is no GPU either.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from hardware import gpus
from peers import versions

ROOT = Path(__file__).parents[1]
HERE = Path(__file__).parent
ZOO = str(ROOT / "tests" / "every_backend" / "on_a_gpu.py")
SECONDS = {"experiments": 90, "numbers": 170, "speed": 140, "memory": 80}
LOW = "--xla_gpu_autotune_level=0"
"""Kernels that are not timed are not tuned either."""


@dataclass(frozen=True)
class Command:
    """One process, or the processes of one launcher.

    Attributes:
        name: What it shows, for the table.
        words: The command.
        environment: Its own variables.
        alone: Whether nothing runs beside it: it is timed, or looks at memory.
    """

    name: str
    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    alone: bool = False


@dataclass
class Outcome:
    """What a command left: its status, `None` where the limit ended it, and its last lines."""

    part: str
    name: str
    status: int | None
    seconds: float
    said: list[str]

    @property
    def word(self) -> str:
        return {0: "ok", None: "out of time"}.get(self.status, f"failed ({self.status})")


def commands(backends: list[str], cards: int, small: bool) -> dict[str, list[Command]]:
    """The commands of each part, for the backends and the number of GPUs that are here."""
    made: dict[str, list[Command]] = {part: [] for part in SECONDS}
    for backend in backends:
        for part, command in _commands_of(backend, cards, small):
            made[part].append(command)
    return made


def _commands_of(backend: str, cards: int, small: bool) -> Iterator[tuple[str, Command]]:
    own = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    own |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if backend == "jax" else {}
    quick = {**own, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {'' if small else LOW}"}
    models = ["--models", "mlp", "cnn"] if small else []
    python, lockstep = sys.executable, [sys.executable, "-m", "lockstep"]

    def named(words: str) -> str:
        return f"{backend}: {words}"

    experiments = {
        "torch": ["remat", "penalty", "killed", "tf32_rows"],
        "jax": ["h2d_race", "tf32_rows"],
        "tensorflow": ["logical", "tf32_rows"],
    }
    for each in experiments[backend]:
        shares = {"LOCKSTEP_SHARE_GPU": "2"} if backend == "torch" and cards == 1 else {}
        words = [python, str(HERE / "gpu_experiments.py"), each]
        yield "experiments", Command(named(each), words, {**quick, **shares})

    yield "numbers", Command(named("doctor"), [*lockstep, "doctor", "--devices", "--train"], quick)
    zoo = [python, ZOO, *models]
    yield "numbers", Command(named("one GPU, as stock Keras"), [*zoo, "--devices", "1"], quick)
    for count in (2, 3) if cards == 1 else (cards,):
        shares = {"LOCKSTEP_SHARE_GPU": str(count)} if cards == 1 else {}
        for state in ("replicated", "sharded"):
            if backend == "tensorflow" and (shares or state == "sharded"):
                continue
            options = ["--devices", str(count), "--state", state]
            words = [*zoo, *options]
            if backend == "jax" and (shares or count > 1):
                words = [*lockstep, "run", "--processes", str(count), ZOO, *models, *options]
            title = f"{count} {'ranks on one GPU' if shares else 'GPUs'}, {state}"
            yield "numbers", Command(named(title), words, {**quick, **shares})
    if backend == "torch":
        words = [*zoo, "--devices", "1", "--traced"]
        yield "numbers", Command(named("traced steps on one GPU"), words, quick)
    if backend != "tensorflow":
        parts = [*zoo, "--devices", "1", "--micro-batch-size", "2"]
        yield "numbers", Command(named("micro-batches on one GPU"), parts, quick)

    timed = ["mlp"] if small else ["resnet", "bert"]
    rounds = ["--rounds", "3", "--steps", "5" if small else "20"]
    if backend != "tensorflow":
        for model in timed:
            words = [python, str(HERE / "one_accelerator.py"), "--models", model, *rounds]
            yield "speed", Command(named(f"{model}, beside Keras"), words, own, alone=True)
            if backend == "torch":
                title = named(f"{model}, traced, beside Keras")
                yield "speed", Command(title, [*words, "--traced"], own, alone=True)
    if backend == "jax":
        words = [python, str(HERE / "steps_at_once.py"), "--rounds", "3"]
        yield "speed", Command(named("one by one and 20 at once"), words, own, alone=True)
    if cards > 1:
        counts = ",".join(str(n) for n in (1, 2, 4, 8) if n <= cards)
        words = [*lockstep, "bench", f"{HERE / 'gpu_memory.py'}:transformer", "--devices", counts]
        yield "speed", Command(named(f"{counts} GPUs"), [*words, "--json"], own, alone=True)
    if backend != "tensorflow":
        for part in (1, 4, 16):
            words = [python, str(HERE / "gpu_memory.py"), str(part), *["--small"] * small]
            yield "memory", Command(named(f"batch in {part} parts"), words, own, alone=True)


def run_part(part: str, given: list[Command], until: float, folder: Path) -> Iterator[Outcome]:
    """Run the commands of a part: three at a time, but for those that run alone."""
    waiting, running = list(given), {}
    while waiting or running:
        free = not any(command.alone for command, *_ in running.values())
        if waiting and free and len(running) < 3 and not (waiting[0].alone and running):
            command = waiting.pop(0)
            begun, log = time.monotonic(), folder / f"{part}-{len(waiting)}.log"
            if begun > until:
                yield Outcome(part, command.name, None, 0.0, [])
                continue
            with log.open("w") as file:
                process = subprocess.Popen(
                    command.words,
                    cwd=folder,
                    env={**os.environ, **_paths(), **command.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            running[process] = command, begun, log
            continue
        for process, (command, begun, log) in list(running.items()):
            is_over = time.monotonic() > until
            if process.poll() is None and not is_over:
                continue
            if is_over and process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                status = None
            else:
                status = process.returncode
            del running[process]
            said = log.read_text(errors="replace").splitlines()
            yield Outcome(part, command.name, status, time.monotonic() - begun, said[-60:])
        time.sleep(0.1)


def _paths() -> dict[str, str]:
    """Let processes import the tests."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def table(outcomes: list[Outcome]) -> str:
    """Return the outcomes in Markdown."""
    rows = ["| part | what | | seconds | last line |", "|---|---|---|---|---|"]
    for each in outcomes:
        last = next((line.strip() for line in reversed(each.said) if line.strip()), "")
        last = last.replace("|", "/")[:100]
        rows.append(f"| {each.part} | {each.name} | {each.word} | {each.seconds:.0f} | {last} |")
    return "\n".join(rows)


def main() -> None:
    """Run the parts; end with 1 if a command failed. A part without time is no failure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"), metavar="FILE")
    backends = [name for name in ("jax", "torch", "tensorflow") if find_spec(name)]
    parser.add_argument("--backends", nargs="+", default=backends, choices=backends)
    parser.add_argument("--parts", nargs="+", default=list(SECONDS), choices=SECONDS)
    parser.add_argument("--cards", type=int, default=max(1, len(gpus())))
    parser.add_argument("--small", action="store_true", help="small models, where no GPU is")
    arguments = parser.parse_args()
    made = commands(arguments.backends, arguments.cards, arguments.small)
    outcomes: list[Outcome] = []
    with TemporaryDirectory() as folder:
        for part in arguments.parts:
            until = time.monotonic() + SECONDS[part] * (1 + 2 * arguments.small)
            for outcome in run_part(part, made[part], until, Path(folder)):
                outcomes.append(outcome)
                print(f"{part}: {outcome.name}: {outcome.word}", flush=True)
                found = {"versions": versions(), "outcomes": [asdict(each) for each in outcomes]}
                arguments.json.write_text(json.dumps(found, indent=1))
    print("\n" + table(outcomes))
    sys.exit(any(each.status for each in outcomes))


if __name__ == "__main__":
    main()
