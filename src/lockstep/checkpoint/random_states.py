"""The random states of a process that training uses, besides those of the model."""

import random
import sys
from typing import Any

import keras
import numpy as np

from lockstep.keras_compat import GLOBAL_SEED_GENERATOR, global_seed_generator, global_state


def take() -> dict[str, Any]:
    """Return the random states of NumPy and Python, and those of Keras and PyTorch, if any."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "numpy": np.random.get_state(legacy=False),
        "python": {"version": version, "words": np.array(words, "uint32"), "gauss": gauss},
    }
    torch = sys.modules.get("torch")
    if torch is not None:  # a DataLoader draws from it
        states["torch"] = torch.get_rng_state().numpy().copy()
    # keras/src/random/seed_generator.py: what keras.random.normal() draws from without a seed
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    if generator is not None:  # somebody has drawn from it
        states["keras"] = np.array(keras.ops.convert_to_numpy(generator.state.value))
    return states


def put(states: dict[str, Any]) -> None:
    """Restore the result of `take`."""
    if "keras" in states:  # first, because a new generator draws from Python's
        global_seed_generator().state.assign(states["keras"])
    np.random.set_state(states["numpy"])
    python = states["python"]
    words = tuple(int(word) for word in python["words"])
    random.setstate((python["version"], words, python["gauss"]))
    torch = sys.modules.get("torch")
    if torch is not None and "torch" in states:
        torch.set_rng_state(torch.from_numpy(states["torch"].copy()))
