"""`python benchmarks/gathering.py`: from which size on a thread is worth it that gathers rows.

Batches of 32 shuffled rows of one array, gathered in their turn or by the thread that makes two
of them ready, while the caller waits (sleeps for 2 ms between two batches, as beside a device that
computes) and while it does nothing else than ask for the next one. What is measured is the
wall time until the caller has its batch, by the mean of a pass over at most 256 MiB. The two take
turns, every other round backwards.
"""

import argparse
import os
import statistics
import time

os.environ["KERAS_BACKEND"] = "jax"

import numpy as np
from peers import spread, versions
from rows import BATCH

from lockstep.training.prefetch_queue import of_rows

SIZES = (64, 256, 1024, 4096, 16384)
AHEAD = 2
WAIT = 0.002


def microseconds(x, ahead, pause):
    """Until the next batch is there, of one pass over the rows."""
    order = np.random.permutation(len(x))
    rows = (order[start : start + BATCH] for start in range(0, len(x), BATCH))
    batches = of_rows(rows, lambda chosen: x.take(chosen, axis=0))
    batches.begin_epoch(ahead, None)
    waited = []
    while True:
        start = time.perf_counter()
        if next(batches, None) is None:
            return statistics.mean(waited) * 1e6
        waited.append(time.perf_counter() - start)
        if pause:
            time.sleep(pause)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    rng = np.random.default_rng(0)
    for size in SIZES:
        steps = min(500, 2**18 // size)
        x = rng.random((steps * BATCH, size * 1024 // 4 // BATCH), dtype="float32")
        sides = [(ahead, pause) for pause in (WAIT, 0) for ahead in (0, AHEAD)]
        found = {side: [] for side in sides}
        for number in range(options.rounds):
            for side in sides if number % 2 else reversed(sides):
                found[side].append(microseconds(x, *side))
        for (ahead, pause), values in found.items():
            who = "a thread" if ahead else "in their turn"
            beside = "the caller waits" if pause else "the caller asks at once"
            middle, low, high = spread(values)
            print(f"{size} KiB, {beside}, {who}: {middle:.0f} [{low:.0f}, {high:.0f}] µs")
    print(f"load: {load:.2f} to {os.getloadavg()[0]:.2f}; {versions()}")


if __name__ == "__main__":
    main()
