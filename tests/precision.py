"""The type of floats that a test computes with, whatever tests before it have left behind."""

from collections.abc import Iterator
from contextlib import contextmanager

import keras


@contextmanager
def floats(dtype: str, policy: str | None = None) -> Iterator[None]:
    """Compute with this type of floats, and with this policy, inside the context.

    Keras keeps the policy of the first layer of a process, so both are set.
    """
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(policy or dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])
