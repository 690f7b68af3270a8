"""Convert old values of layer arguments to Keras 3 objects.

The values are initializers, regularizers, constraints, dtypes, and numbers in JSON objects.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import printable
from lockstep.rescue.keras2 import release


class Own(dict[str, Any]):
    """The user's objects by name, also found under a registered name `package>name`.

    Example:
        >>> "Custom>Scale" in Own(Scale=1), Own(Scale=1)["Custom>Scale"]
        (True, 1)
    """

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and super().__contains__(self._key(name))

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(self._key(name))

    def get(self, name: str, default: Any = None) -> Any:
        """Return the object of that name, registered or not."""
        return super().get(self._key(name), default)

    def _key(self, name: str) -> str:
        return name if super().__contains__(name) else bare(name)


def bare(name: str) -> str:
    """Return a name without its registration package."""
    return name.rpartition(">")[2]


@dataclass
class Context:
    """The objects of the user, and the notes for the user."""

    custom: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    version: str | None = None
    """`keras_version` of the old file."""

    def __post_init__(self) -> None:
        self.custom = Own(self.custom)

    @property
    def early(self) -> bool:
        """Whether the file is from Keras 2.0 to 2.3, or from tf.keras up to TensorFlow 2.2."""
        return (2,) <= release(self.version) < (2, 4)

    @property
    def perhaps_early(self) -> bool:
        """Whether it may be from TensorFlow 2.3 or earlier: 2.3 and 2.4 write one version."""
        return self.early or release(self.version) == (2, 4, 0)

    @property
    def standalone(self) -> bool:
        """Whether it is from stand-alone Keras 2, or from its copy in TensorFlow up to 1.12."""
        return self.early and self.version not in ("2.2.4-tf", "2.3.0-tf")

    def note(self, said: str) -> None:
        """Add a note for the user, once."""
        said = printable(said)
        if said not in self.notes:
            self.notes.append(said)


def plain(value: Any) -> Any:
    """Return the value in a JSON object such as `{"type": "ndarray", "value": 0.3}`."""
    if isinstance(value, dict):
        if set(value) == {"type", "value"}:
            return value["value"]
        if set(value) == {"class_name", "config"} and value["class_name"] == "TensorShape":
            return value["config"]
        if set(value) == {"class_name", "items"} and value["class_name"] == "__tuple__":
            return tuple(plain(item) for item in value["items"])
    return value


def dtype(value: Any) -> Any:
    """Return the name of a dtype or mixed-precision policy."""
    if isinstance(value, dict):
        return value.get("config", {}).get("name")
    return value


def old_hard_sigmoid() -> Any:
    """Build Keras 2's hard sigmoid, clip(0.2 x + 0.5, 0, 1), from Keras 3 layers.

    Keras 3's own `hard_sigmoid` is another function, clip(x / 6 + 0.5, 0, 1). A model made
    of Keras's layers loads without lockstep.
    """
    import keras

    return keras.Sequential(
        [
            keras.layers.Rescaling(0.2, offset=0.5, name="slope"),
            keras.layers.ReLU(max_value=1.0, name="clip"),
        ],
        name="keras2_hard_sigmoid",
    )


def initializer(value: Any, context: Context) -> Any:
    """Return an old initializer for the config; the initial weights are replaced."""
    import keras

    name, config = _named(value)
    if name is None:
        return value
    if name in context.custom:
        return _made(context.custom[name], config)
    cls = getattr(keras.initializers, name, None)
    if not inspect.isclass(cls):
        context.note(f"the initializer {name} is left out (it only matters before training)")
        return None
    if name == "VarianceScaling" and config.get("distribution") == "normal":
        config = {**config, "distribution": "truncated_normal"}  # the old meaning
    return _made(cls, config)


def regularizer(value: Any, context: Context) -> Any:
    """Return an old regularizer, or None with a note if its code is missing."""
    import keras

    name, config = _named(value)
    if name is None:
        return value
    if name in context.custom:
        return _made(context.custom[name], config)
    if name in ("L1L2", "L1", "L2"):
        return getattr(keras.regularizers, name)(**{k: float(plain(v)) for k, v in config.items()})
    if inspect.isclass(cls := getattr(keras.regularizers, name, None)):
        return _made(cls, config)
    context.note(f"the regularizer {name} is left out: its code is not here (see --custom)")
    return None


def constraint(value: Any, context: Context) -> Any:
    """Return an old weight constraint, or None with a note if its code is missing."""
    import keras

    name, config = _named(value)
    if name is None:
        return value
    if name in context.custom:
        return _made(context.custom[name], config)
    if inspect.isclass(cls := getattr(keras.constraints, name, None)):
        return _made(cls, config)
    context.note(f"the constraint {name} is left out: its code is not here (see --custom)")
    return None


def _named(value: Any) -> tuple[str | None, dict[str, Any]]:
    if isinstance(value, dict) and isinstance(value.get("class_name"), str):
        config = value.get("config")
        return value["class_name"], dict(config) if isinstance(config, dict) else {}
    if isinstance(value, str):
        return "".join(part.capitalize() for part in value.split("_")), {}
    return None, {}


def _made(cls: Any, config: dict[str, Any]) -> Any:
    """Return an instance with the settings that the class still takes."""
    if not inspect.isclass(cls):
        return cls
    taken = inspect.signature(cls).parameters
    if any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        return cls(**config)
    return cls(**{key: plain(value) for key, value in config.items() if key in taken})
