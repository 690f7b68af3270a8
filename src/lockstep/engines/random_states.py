"""The random states of a process that training draws from, outside of the model."""

import random
import sys
from typing import Any

import numpy as np


def take() -> dict[str, Any]:
    """The states of NumPy's and Python's own random numbers, and PyTorch's where it is here."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "numpy": np.random.get_state(legacy=False),
        "python": {"version": version, "words": np.array(words, "uint32"), "gauss": gauss},
    }
    torch = sys.modules.get("torch")
    if torch is not None:  # a DataLoader draws from it
        states["torch"] = torch.get_rng_state().numpy().copy()
    return states


def put(states: dict[str, Any]) -> None:
    """Set what `take` gave."""
    np.random.set_state(states["numpy"])
    python = states["python"]
    words = tuple(int(word) for word in python["words"])
    random.setstate((python["version"], words, python["gauss"]))
    torch = sys.modules.get("torch")
    if torch is not None and "torch" in states:
        torch.set_rng_state(torch.from_numpy(states["torch"].copy()))
