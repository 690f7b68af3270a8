"""The data of the benchmarks: rows of random numbers, the same for all."""

import numpy as np

BATCH = 32


def data(width: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """As many rows of so many numbers as `steps` batches have, and their classes."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(steps * BATCH, width)).astype("float32")
    return x, rng.integers(0, 10, size=len(x)).astype("int32")


def texts(length: int, words: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """So many steps of token sequences, and the word that comes after each token."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, words, (steps * BATCH, length + 1)).astype("int32")
    return tokens[:, :-1], tokens[:, 1:]
