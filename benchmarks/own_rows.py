"""`python benchmarks/own_rows.py`: what rows of each process save, in two processes on two cores.

Each process is pinned to a core of its own. They fit the same model to the same global batches, in
turns: as plain data, of which every process makes all rows, and by `lockstep.process_local`, of
which each makes its half. A row takes `--row-us` microseconds of one core to make. The ratio is the
epoch by `process_local` over the epoch with plain data in the same round, by the clock: below 1
where the input is the limit, and about 1 where it is not (`--row-us 0`). The rows that each process
makes are counted.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

ROWS, STEPS = 64, 40
"""Rows of a global batch, and batches of an epoch."""


def worker(options):
    import keras
    import numpy as np

    import lockstep

    rank, size = lockstep.initialize()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    keras.utils.set_random_seed(0)
    width = options.width
    made = [keras.Input((width,))]
    made += [keras.layers.Dense(width, activation="relu") for _ in range(options.layers)]
    model = keras.Sequential([*made, keras.layers.Dense(10)])
    lockstep.distribute(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    count = 0

    class Rows(keras.utils.PyDataset):
        """The rows of a range of a batch, each of which takes a while to make."""

        def __init__(self, first, last):
            super().__init__()
            self.rows = first, last

        def __len__(self):
            return STEPS

        def __getitem__(self, index):
            nonlocal count
            first, last = self.rows
            x = np.empty((last - first, width), "float32")
            for row in range(first, last):
                count += 1
                until = time.perf_counter() + options.row_us / 1e6
                x[row - first] = np.sin(np.arange(width) + index + row)
                while time.perf_counter() < until:
                    pass
            return x, np.arange(first, last) % 10

    share = ROWS // size
    kinds = {
        "plain": Rows(0, ROWS),
        "own": lockstep.process_local(Rows(share * rank, share * (rank + 1))),
    }
    for turn in range(options.rounds + 1):
        for kind in sorted(kinds, reverse=turn % 2 == 0):
            count, begin = 0, time.perf_counter()
            model.fit(kinds[kind], shuffle=False, verbose=0)
            seconds = time.perf_counter() - begin
            if rank == 0 and turn:  # the first one compiles
                print("ROUND", kind, seconds, count, flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="jax", choices=["jax", "torch"])
    parser.add_argument("--row-us", type=float, default=500.0)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    if "LOCKSTEP_PROCESSES" in os.environ:
        return worker(options)
    started = [sys.executable, "-m", "lockstep", "run", "--processes", "2", *sys.argv]
    done = subprocess.run(
        started,
        env={**os.environ, "KERAS_BACKEND": options.backend, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rounds = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("ROUND")]
    seconds = {k: [float(s) for kind, s, _ in rounds if kind == k] for k in ("plain", "own")}
    rows = {k: int(next(n for kind, _, n in rounds if kind == k)) for k in ("plain", "own")}
    ratios = [own / plain for own, plain in zip(seconds["own"], seconds["plain"], strict=True)]
    middle = {kind: statistics.median(each) for kind, each in seconds.items()}
    print(
        f"{options.backend}, {options.row_us:g} us a row: process_local takes "
        f"{statistics.median(ratios):.3f} of plain data ({min(ratios):.3f} to {max(ratios):.3f}); "
        f"{1000 * middle['plain'] / STEPS:.2f} and {1000 * middle['own'] / STEPS:.2f} ms a step; "
        f"rows made in a process: {rows['plain']} and {rows['own']}"
    )
    return None


if __name__ == "__main__":
    main()
