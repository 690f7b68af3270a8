"""Generators of random numbers that a model or its code holds: by number, like tensors.

Data may draw from the same object between two steps. So its state is compared at each step, and
sent when it has moved.
"""

import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def made_by(generator: Any) -> Any:
    """Return what makes a generator anew, without its state; `None` for any other object."""
    kind = type(generator)
    if kind is np.random.Generator:
        bits = generator.bit_generator
        return _numpy, (type(bits), bits.seed_seq)
    if kind is np.random.RandomState:
        return _old_numpy, ()
    if kind is random.Random:
        return kind, ()
    if kind is torch.Generator:
        return kind, (generator.device.type,)
    return None


GLOBAL = (random, np.random)
"""The modules of Python and NumPy that draw from a state of the process."""

KINDS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)


def state_of(generator: Any) -> bytes:
    """Return the state of a generator, or of one of the modules in `GLOBAL`."""
    state: Any
    if generator is random:
        state = random.getstate()
    elif generator is np.random:
        state = np.random.get_state()
    elif isinstance(generator, np.random.Generator):
        state = generator.bit_generator.state
    elif isinstance(generator, np.random.RandomState):
        state = generator.get_state(legacy=False)
    elif isinstance(generator, random.Random):
        state = generator.getstate()
    else:
        state = generator.get_state().numpy().tobytes()
    return pickle.dumps(state)


def set_state(generator: Any, data: bytes) -> None:
    """Give a generator the state that `state_of` has returned in another process."""
    state = pickle.loads(data)
    if generator is random:
        random.setstate(state)
    elif generator is np.random:
        np.random.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _numpy(bits: Callable[[Any], Any], seeds: Any) -> np.random.Generator:
    return np.random.Generator(bits(seeds))


def _old_numpy() -> np.random.RandomState:
    return np.random.RandomState(0)
