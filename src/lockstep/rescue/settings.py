"""Old values of layer arguments, as Keras 3 objects.

Activations, initializers, regularizers, constraints, dtypes and numbers that old
libraries wrote as small objects.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import NeedsCode, UntranslatableModel
from lockstep.rescue.keras2 import release


class Own(dict[str, Any]):
    """The user's objects; `package>name`, as tf.keras registered them, is found by its name too.

    Example:
        >>> "Custom>Scale" in Own(Scale=1), Own(Scale=1)["Custom>Scale"]
        (True, 1)
    """

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and super().__contains__(self._key(name))

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(self._key(name))

    def get(self, name: str, default: Any = None) -> Any:
        """The object of that name, registered or not."""
        return super().get(self._key(name), default)

    def _key(self, name: str) -> str:
        return name if super().__contains__(name) else bare(name)


def bare(name: str) -> str:
    """A name without the package under which it was registered."""
    return name.rpartition(">")[2]


@dataclass
class Context:
    """What the user supplied, and what was done that the user should know."""

    custom: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    version: str | None = None
    """`keras_version` of the old file."""

    def __post_init__(self) -> None:
        self.custom = Own(self.custom)

    @property
    def early(self) -> bool:
        """Whether the file is of Keras 2.0 to 2.3, or of tf.keras up to TensorFlow 2.2."""
        return (2,) <= release(self.version) < (2, 4)

    @property
    def perhaps_early(self) -> bool:
        """Whether it may be of TensorFlow 2.3 or before: 2.3 and 2.4 wrote one version."""
        return self.early or release(self.version) == (2, 4, 0)

    @property
    def standalone(self) -> bool:
        """Whether it is of stand-alone Keras 2, or of its copy in TensorFlow up to 1.12."""
        return self.early and self.version not in ("2.2.4-tf", "2.3.0-tf")

    def note(self, said: str) -> None:
        """Remember something the user should read, once."""
        if said not in self.notes:
            self.notes.append(said)


def plain(value: Any) -> Any:
    """Numbers as numbers: some versions wrote `{"type": "ndarray", "value": 0.3}`."""
    if isinstance(value, dict):
        if set(value) == {"type", "value"}:
            return value["value"]
        if set(value) == {"class_name", "config"} and value["class_name"] == "TensorShape":
            return value["config"]
        if set(value) == {"class_name", "items"} and value["class_name"] == "__tuple__":
            return tuple(plain(item) for item in value["items"])
    return value


def dtype(value: Any) -> Any:
    """A dtype or mixed-precision policy by its name."""
    if isinstance(value, dict):
        return value.get("config", {}).get("name")
    return value


def old_hard_sigmoid() -> Any:
    """Keras 2's hard sigmoid, clip(0.2 x + 0.5, 0, 1), from layers of plain Keras 3.

    Keras 3's own `hard_sigmoid` is clip(x / 6 + 0.5, 0, 1), another function. This
    one loads without lockstep, because it is made of Keras's layers.
    """
    import keras

    return keras.Sequential(
        [
            keras.layers.Rescaling(0.2, offset=0.5, name="slope"),
            keras.layers.ReLU(max_value=1.0, name="clip"),
        ],
        name="keras2_hard_sigmoid",
    )


def activation(value: Any, context: Context) -> Any:
    """An old activation; the user's own ones come from `custom`."""
    import keras

    if value is None or callable(value):
        return value
    if isinstance(value, str):
        if value in context.custom:
            return context.custom[value]
        if value == "hard_sigmoid":
            context.note(
                "hard_sigmoid is kept as Keras 2 defined it, clip(0.2x + 0.5, 0, 1); "
                "Keras 3's is another function"
            )
            return old_hard_sigmoid()
        if value in _ACTIVATIONS and not (context.perhaps_early and value in _LATER):
            return keras.activations.get(value)
        raise NeedsCode(
            f"The activation {value!r} was none of Keras's up to TensorFlow 2.3: its code may be "
            "yours.\n"
            "Give it with --custom file.py (a function of that name in it), or in code with\n"
            f"custom_objects={{{bare(value)!r}: function}}."
        )
    if isinstance(value, dict) and isinstance(value.get("class_name"), str):
        from lockstep.rescue.layers import layer

        if value["class_name"] == "function" and isinstance(value.get("config"), str):
            return activation(value["config"], context)
        if isinstance(value.get("config"), dict):
            return layer(value["class_name"], value["config"], context)
    raise UntranslatableModel(
        f"An activation is written as {str(value)[:80]!r}, a form no Keras version is known for.\n"
        "Rebuild the template in code and use --model file.py:function."
    )


def initializer(value: Any, context: Context) -> Any:
    """An old initializer; only its record matters, the weights are replaced."""
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
        config = {**config, "distribution": "truncated_normal"}  # what it always meant
    return _made(cls, config)


def regularizer(value: Any, context: Context) -> Any:
    """An old regularizer, or None with a note where its code is not here."""
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
    """An old weight constraint, or None with a note where its code is not here."""
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
    """An instance with those settings that the class still takes."""
    if not inspect.isclass(cls):
        return cls
    taken = inspect.signature(cls).parameters
    if any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        return cls(**config)
    return cls(**{key: plain(value) for key, value in config.items() if key in taken})


_ACTIVATIONS = frozenset(
    {
        *("linear", "relu", "relu6", "elu", "selu", "leaky_relu", "gelu", "mish", "swish", "silu"),
        *("softmax", "log_softmax", "sigmoid", "tanh", "softplus", "softsign", "exponential"),
    }
)

_LATER = frozenset({"gelu", "mish", "silu", "leaky_relu", "relu6", "log_softmax"})
"""Not in Keras up to TensorFlow 2.3: such a name was the user's own function, maybe another."""
