"""`lockstep doctor --train`: small models in float64 on all devices of this machine, beside one."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.core.devices import SHARDED, names_in_words, parse_devices
from lockstep.errors import UnsupportedBackend, counted

if TYPE_CHECKING:
    from lockstep.core.engine import Engine
    from lockstep.tools.verify.verification import Verification

STEPS = 4
ROWS = 22
"""Rows of a batch. Few numbers of devices divide it."""


@dataclass(frozen=True)
class Trained:
    """How one model trained on all devices.

    Attributes:
        name: What the model is.
        seconds: The time of both trainings and their comparison.
        found: The comparison, `None` where it could not be made.
        failure: The error then.
    """

    name: str
    seconds: float
    found: "Verification | None"
    failure: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether the devices gave what one device gives."""
        return self.found is not None and self.found.equal

    def __str__(self) -> str:
        """Return one line of the report."""
        words = self.failure
        if self.found is not None:
            largest = max((each.largest for each in self.found.differences), default=0.0)
            words = f"{self.found.verdict}, {counted(self.found.steps, 'step')}, {largest:.1e}"
            words += f": {self.found.cause}" if self.found.cause else ""
        return f"{self.name:24} {self.seconds:5.1f} s  {words}"


def train_on_all(engine: "Engine") -> Iterator[Trained]:
    """Train three small models on all devices of the default platform, and on one.

    The process computes in float64 from then on. There the two agree to 1e-10, unless a device, a
    library or lockstep is wrong. One device alone trains in micro-batches, where the engine can.

    Args:
        engine: The engine of the backend.
    """
    from lockstep.keras_compat import compute_in_float64
    from lockstep.tools.verify import verify

    compute_in_float64(whatever_is_asked=True)
    in_parts = {"micro_batch_size": ROWS // 2}
    runs: list[tuple[Callable[[], Any], dict[str, Any]]]
    runs = [(pictures, {}), (sequences, {}), (wide, {"state": SHARDED})]
    if len(parse_devices(None, engine.devices())) < 2:
        runs = [(sequences, in_parts), (wide, in_parts)]  # batch normalization has no parts
    for build, options in runs:
        try:
            yield _trained(build, verify, options)
        except UnsupportedBackend:  # TensorFlow has neither shards nor parts
            if options == in_parts:
                return
            yield _trained(build, verify, {})


def _trained(
    build: Callable[[], tuple[Any, Any]],
    verify: Callable[..., "Verification"],
    options: dict[str, Any],
) -> Trained:
    label = build.__name__ + "".join(f", {key}={value}" for key, value in options.items())
    begun = time.monotonic()
    found, failure = None, ""
    try:
        model, data = build()
        found = verify(model, data, steps=STEPS, batch_size=ROWS, **options)
    except UnsupportedBackend:
        raise
    except Exception as error:  # of a library or a driver: the command looks for them
        failure = f"{type(error).__name__}: {str(error)[:500]}"
    return Trained(label, time.monotonic() - begun, found, failure)


def summary(every: list[Trained], engine: "Engine") -> str:
    """Return the last sentence of the report."""
    names = parse_devices(None, engine.devices())
    if not every:
        return f"{names[0]} is the only device, so there is nothing to compare it with."
    if all(each.is_equal for each in every):
        return f"{names_in_words(names)}: training gives the same results as on one device."
    wrong = [each.name.partition(",")[0] for each in every if not each.is_equal]
    return (
        f"{names_in_words(names)}: training may be wrong: {', '.join(wrong)}.\n"
        "Paste this report into an issue; lockstep doctor --devices tests only the connections."
    )


def pictures() -> tuple[Any, Any]:
    """Return convolutions with batch normalization, and data."""
    import keras
    import numpy as np
    from keras import layers

    keras.utils.set_random_seed(1)
    inputs = keras.Input((16, 16, 3))
    hidden = layers.Conv2D(8, 3, use_bias=False)(inputs)
    hidden = layers.ReLU()(layers.BatchNormalization()(hidden))
    hidden = layers.GlobalAveragePooling2D()(layers.Conv2D(16, 3, strides=2)(hidden))
    model = keras.Model(inputs, layers.Dense(10)(hidden), name="pictures")
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), _loss(keras))
    rng = np.random.default_rng(1)
    return model, (rng.normal(size=(3 * ROWS, 16, 16, 3)), rng.integers(0, 10, 3 * ROWS))


def sequences() -> tuple[Any, Any]:
    """Return a recurrent layer and attention over masked words, and data."""
    import keras
    import numpy as np
    from keras import layers

    keras.utils.set_random_seed(2)
    inputs = keras.Input((12,), dtype="int32")
    hidden = layers.LSTM(16, return_sequences=True)(
        layers.Embedding(50, 16, mask_zero=True)(inputs)
    )
    hidden = layers.LayerNormalization()(hidden + layers.MultiHeadAttention(2, 8)(hidden, hidden))
    model = keras.Model(inputs, layers.Dense(10)(hidden[:, 0]), name="sequences")
    model.compile(keras.optimizers.Adam(0.005), _loss(keras))
    rng = np.random.default_rng(2)
    return model, (
        rng.integers(0, 50, (3 * ROWS, 12)).astype("int32"),
        rng.integers(0, 10, 3 * ROWS),
    )


def wide() -> tuple[Any, Any]:
    """Return dense layers that are large enough to be in shards, and data."""
    import keras
    import numpy as np
    from keras import layers

    keras.utils.set_random_seed(3)
    hidden = [layers.Dense(256, activation="tanh") for _ in range(3)]
    model = keras.Sequential([keras.Input((256,)), *hidden, layers.Dense(10)], name="wide")
    model.compile(keras.optimizers.Adam(0.005), _loss(keras))
    rng = np.random.default_rng(3)
    return model, (rng.normal(size=(3 * ROWS, 256)), rng.integers(0, 10, 3 * ROWS))


def _loss(keras: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
