"""Values that Python wrote down, as JSON with the arrays put aside."""

from typing import Any

import numpy as np


def to_plain(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    """The same value in JSON; every array in it goes to `arrays` under a name of its own.

    What comes back from `from_plain` has the same values and types: dicts, lists, tuples,
    strings, bytes, numbers of Python and of NumPy, arrays. A dict of another class comes back
    as a plain one.

    Raises:
        TypeError: If there is anything else in it.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, dict):
        # Logs are dicts of another class; and a key may look like one of ours.
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
    # It is written down later, when its owner may have changed it.
    arrays[name] = value.copy() if value.flags.writeable else value
    return {"$array": name}


def from_plain(plain: Any, arrays: dict[str, np.ndarray]) -> Any:
    """What `to_plain` was given."""
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
