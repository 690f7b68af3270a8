"""`python benchmarks/everything.py`: the benchmarks of loops and GPUs in docs/performance.md.

Runs each benchmark in a process of its own and prints what it prints; nothing runs beside
anything. What a benchmark needs beyond the package is in the extras `benchmarks` and `plan`;
one that lacks it fails and is named at the end, and the others run all the same.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from hardware import gpus

ON_BATCH = "train_on_batch test_on_batch predict_on_batch"
FIGURES = (
    "JAX_PLATFORMS=cpu trainer_tax.py",
    "JAX_PLATFORMS=cpu trainer_tax.py --calls evaluate predict",
    "LOCKSTEP_REHEARSE=4 trainer_tax.py --devices 4 --calls fit evaluate predict "
    "--rounds 9 --steps 100",
    f"JAX_PLATFORMS=cpu trainer_tax.py --calls {ON_BATCH}",
    "LOCKSTEP_REHEARSE=4 trainer_tax.py --devices 4 --models mlp many cnn --rounds 9 --steps 50 "
    f"--calls {ON_BATCH}",
    "peers.py",
    "two_processes.py",
    "two_processes.py --rows 128 --steps 12 --rounds 7",
    "ahead_of_time.py",
    "ahead_of_time.py --target a100 --devices 8",
    "ahead_of_time.py --models bert resnet --devices 8 64 512",
)
ON_ONE_GPU = (
    "peers.py --platform gpu",
    "JAX_PLATFORMS=cuda one_accelerator.py",
    "plan_on_a_gpu.py",
)
ON_TWO_GPUS = ("two_processes.py --platform gpu --steps 400",)


def main() -> None:
    """Run them, and end with 1 if any of them failed."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    failed = []
    here = len(gpus())
    figures = FIGURES + (ON_ONE_GPU if here else ()) + (ON_TWO_GPUS if here > 1 else ())
    for figure in figures:
        words = figure.split()
        first = next(number for number, word in enumerate(words) if word.endswith(".py"))
        shown = [*words[:first], "python", f"benchmarks/{words[first]}", *words[first + 1 :]]
        print("\n==", *shown, flush=True)
        environment = os.environ | dict(word.split("=") for word in words[:first])
        path = Path(__file__).with_name(words[first])
        command = [sys.executable, str(path), *words[first + 1 :]]
        if subprocess.run(command, env=environment, check=False).returncode:
            failed.append(" ".join(shown))
    if failed:
        sys.exit("\nfailed: " + "; ".join(failed))


if __name__ == "__main__":
    main()
