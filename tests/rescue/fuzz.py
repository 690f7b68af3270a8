"""Damage genuine files at random: every one ends in an error of ours or a proven rescue.

python -m tests.rescue.fuzz [COUNT] [SEED]
"""

from __future__ import annotations

import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import lockstep
from lockstep.errors import OldFileError
from tests.rescue.old_files import LEGACY

FILES = (
    "keras-2.2.4__mlp4-g2/parallel_full.h5",
    "keras-2.2.4__mlp4-g2/parallel_weights.h5",
    "tfkeras-2.3.4__cnn_bn-g2/parallel_full.h5",
    "keras-2.2.4__lookalike-single/template_full.h5",
    "keras-2.1.5__longattr-g2/parallel_weights.h5",
)


def damaged(content: bytes, rng: random.Random) -> bytes:
    """One kind of damage: cut short, bits flipped, a hole of zeros, a piece doubled."""
    data = bytearray(content)
    kind = rng.choice(["cut", "flip", "flips", "hole", "double"])
    if kind == "cut":
        return bytes(data[: rng.randrange(len(data))])
    if kind in ("flip", "flips"):
        for _ in range(1 if kind == "flip" else 8):
            end = len(data) if rng.random() < 0.5 else min(len(data), 4096)
            data[rng.randrange(end)] ^= 1 << rng.randrange(8)
    elif kind == "hole":
        length = rng.choice([8, 64, 512])
        start = rng.randrange(len(data) - length)
        data[start : start + length] = bytes(length)
    else:
        start, other = (rng.randrange(len(data) - 64) for _ in range(2))
        data[other : other + 64] = data[start : start + 64]
    return bytes(data)


def run(rng: random.Random, count: int, folder: Path) -> Counter:
    """Rescue `count` damaged files in an empty folder; anything unexpected raises."""
    outcome: Counter = Counter()
    old, new = folder / "damaged.h5", folder / "new.safetensors"
    for _ in range(count):
        old.write_bytes(damaged((LEGACY / rng.choice(FILES)).read_bytes(), rng))
        try:
            report = lockstep.rescue(old, new if rng.random() < 0.5 else folder / "new.keras")
            assert all(row.equal for row in report.rows)
            outcome["rescued"] += 1
            os.unlink(report.output)
        except OldFileError as error:
            outcome["refused"] += 1
            outcome[type(error).__name__] += 1
            outcome["too long"] += len(str(error).splitlines()) > 3
        assert os.listdir(folder) == ["damaged.h5"], os.listdir(folder)
    assert not outcome.pop("too long", 0)
    return outcome


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(random.Random(seed), count, Path(folder))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{count} files in {time.monotonic() - start:.0f} s: {dict(outcome)}; peak {peak} MB")


if __name__ == "__main__":
    main()
