"""How fast, and in how much memory, a large parallel file is rescued.

    python benchmarks/rescue_speed.py [--gigabytes 1.0] [--rounds 3] [--folder FOLDER]

Every round copies the file (read, write, fsync) and rescues it, each in a process of its
own; what counts is the ratio of the two within a round. Memory is the peak of resident
memory above what it was after all imports, without pages of mapped files.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.rescue import old_files

LARGEST = 64 * 2**20


def make(path: Path, size: int) -> None:
    """A parallel model of Dense layers of 64 MB each."""
    width = 4096
    count = max(size // (width * width * 4), 1)
    layers = [old_files.dense(width, name=f"dense_{n + 1}") for n in range(count)]
    template = old_files.sequential(layers, (None, width))
    rng = np.random.default_rng(0)
    weights = []
    for n in range(count):
        weights.append((f"dense_{n + 1}/kernel:0", rng.random((width, width), dtype="float32")))
        weights.append((f"dense_{n + 1}/bias:0", rng.random(width, dtype="float32")))
    old_files.parallel_full(path, template, weights, shapes=((None, width),))


COPY = """
import os, sys, time
start = time.perf_counter()
with open(sys.argv[1], "rb") as source, open(sys.argv[2], "wb") as target:
    while piece := source.read(16 * 2**20):
        target.write(piece)
    target.flush()
    os.fsync(target.fileno())
print(time.perf_counter() - start)
"""

RESCUE = """
import json, os, sys, threading, time
import keras, h5py, numpy, lockstep
from lockstep.rescue import api, detect, match, read, write
# Keras imports the rest of itself (and TensorFlow, where it is installed) at first use.
small = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
keras.saving.serialize_keras_object(small)

def resident():
    with open("/proc/self/status") as lines:
        return 1024 * sum(
            int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))
        )

peak, base, going = [0], resident(), [True]

def watch():
    while going[0]:
        peak[0] = max(peak[0], resident())
        time.sleep(0.005)

thread = threading.Thread(target=watch)
thread.start()
start = time.perf_counter()
lockstep.rescue(sys.argv[1], sys.argv[2])
took = time.perf_counter() - start
going[0] = False
thread.join()
print(json.dumps([took, peak[0] - base]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=None)
    given = parser.parse_args()
    ratios, memories, copies, rescues = [], [], [], []
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        old, copy, new = (Path(folder, name) for name in ("old.h5", "copy.h5", "new.keras"))
        make(old, int(given.gigabytes * 2**30))
        for _ in range(given.rounds):
            copied = float(_run(COPY, old, copy))
            copy.unlink()
            took, memory = json.loads(_run(RESCUE, old, new))
            new.unlink()
            copies.append(copied)
            rescues.append(took)
            ratios.append(copied / took)
            memories.append(memory)
        size = os.path.getsize(old)
        with h5py.File(old) as handle:
            assert "model_weights" in handle
    megabyte = 2**20
    print(f"file {size / megabyte:.0f} MB, largest array {LARGEST / megabyte:.0f} MB, "
          f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")  # fmt: skip
    print(f"copy with fsync {spread(copies)} s; rescue with proof {spread(rescues)} s")
    print(f"speed against the copy {spread(ratios)}")
    wanted = 100 * megabyte + 4 * LARGEST
    print(f"memory above imports {max(memories) / megabyte:.0f} MB "
          f"(less than {wanted / megabyte:.0f} wanted)")  # fmt: skip
    raise SystemExit(0 if max(memories) < wanted else 1)


def spread(values: list[float]) -> str:
    """Median, and the range in brackets."""
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def _run(code: str, *paths: Path) -> str:
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, paths)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"after {time.perf_counter() - begin:.0f} s: {done.stderr[-2000:]}")
    return done.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    main()
