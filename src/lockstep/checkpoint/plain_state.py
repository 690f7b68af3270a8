"""The state of a process in a checkpoint: values of Python as JSON, and random states."""

import random
import sys
from typing import Any

import keras
import numpy as np

from lockstep.keras_compat import GLOBAL_SEED_GENERATOR, global_seed_generator, global_state


def to_plain(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    """Return a value in JSON form. Each array in it goes to `arrays` under a unique name.

    `from_plain` returns the same values and types: dicts, lists, tuples, strings, bytes, arrays,
    and numbers of Python and NumPy. A dict of another class becomes a plain dict.

    Raises:
        TypeError: If the value has any other type in it.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, dict):
        # Logs are dicts of another class. A key may look like a key of this format.
        if all(isinstance(key, str) for key in value) and not any("$" in key for key in value):
            return {key: to_plain(each, f"{name}/{key}", arrays) for key, each in value.items()}
        pairs = [[key, each] for key, each in value.items()]
        return {"$dict": to_plain(pairs, name, arrays)}
    if type(value) in (list, tuple):
        parts = [to_plain(each, f"{name}/{n}", arrays) for n, each in enumerate(value)]
        return parts if type(value) is list else {"$tuple": parts}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {"$number": [value.dtype.name, value.item()]}
    if not isinstance(value, np.ndarray) and hasattr(value, "__array__"):
        value = np.asarray(value)  # of a framework
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufV":
        raise TypeError(f"{name} is a {type(value).__name__}")
    while name in arrays:  # "a/b" beside "b" in "a"
        name += "'"
    # It is written later, when its owner may have changed it.
    arrays[name] = value.copy() if value.flags.writeable else value
    return {"$array": name}


def from_plain(plain: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Return the argument of `to_plain`."""
    if isinstance(plain, list):
        return [from_plain(each, arrays) for each in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) == 1:
        ((key, content),) = plain.items()
        if key == "$array":
            return arrays[content]
        if key == "$number":
            return np.dtype(content[0]).type(content[1])
        if key == "$bytes":
            return bytes.fromhex(content)
        if key == "$tuple":
            return tuple(from_plain(each, arrays) for each in content)
        if key == "$dict":
            return {each[0]: each[1] for each in from_plain(content, arrays)}
    return {key: from_plain(each, arrays) for key, each in plain.items()}


def take_random_states() -> dict[str, Any]:
    """Return the random states of NumPy and Python, and those of Keras and PyTorch, if any."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {
        "numpy": np.random.get_state(legacy=False),
        "python": {"version": version, "words": np.array(words, "uint32"), "gauss": gauss},
    }
    torch = sys.modules.get("torch")
    if torch is not None:  # a DataLoader draws from it
        states["torch"] = torch.get_rng_state().numpy().copy()
        if torch.cuda.is_initialized():  # dropout without a seed draws on the GPU
            states["torch_gpus"] = [each.numpy() for each in torch.cuda.get_rng_state_all()]
    # keras/src/random/seed_generator.py: what keras.random.normal() draws from without a seed
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    if generator is not None:  # somebody has drawn from it
        states["keras"] = np.array(keras.ops.convert_to_numpy(generator.state.value))
    return states


def put_random_states(states: dict[str, Any]) -> None:
    """Restore the result of `take_random_states`."""
    if "keras" in states:  # first, because a new generator draws from Python's
        global_seed_generator().state.assign(states["keras"])
    np.random.set_state(states["numpy"])
    python = states["python"]
    words = tuple(int(word) for word in python["words"])
    random.setstate((python["version"], words, python["gauss"]))
    torch = sys.modules.get("torch")
    if torch is not None and "torch" in states:
        torch.set_rng_state(torch.from_numpy(states["torch"].copy()))
        if torch.cuda.is_available():
            of_gpus = states.get("torch_gpus", [])[: torch.cuda.device_count()]
            for gpu, state in enumerate(of_gpus):
                torch.cuda.set_rng_state(torch.from_numpy(state.copy()), gpu)
