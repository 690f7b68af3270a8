"""Branches of one model on different devices: on, place, placement."""

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from lockstep.devices import parse_devices
from lockstep.distribute import check_model
from lockstep.engines import current_engine
from lockstep.errors import DeviceError, UnsupportedModel

Model = TypeVar("Model")


@contextmanager
def on(device: str | int) -> Iterator[None]:
    """Run the layers that are called in this context on one device.

    The calls are those of a functional model: `layer(x)` on symbolic inputs. The model that is
    made of them trains, evaluates and predicts with each of these calls on its device, and with
    the numbers of one device. A layer without a device follows its first input. What the model
    saves is a plain single-device file.

    A layer that is called on two devices has its weights on the first one, and copies of them go
    to the second one in each step. An inner context replaces the outer one.

    Args:
        device: A name such as `"gpu:1"`, or a number of the default platform.

    Yields:
        Nothing.

    Raises:
        DeviceError: If the device is unknown, or is more than one.
        UnsupportedBackend: If the engine of Keras's backend has no branches.
        UnsupportedModel: If no layer of a functional model is called in the context.

    Example:
        >>> with lockstep.on("cpu:0"):
        ...     a = keras.layers.Dense(4)(input_a)
        >>> with lockstep.on("cpu:1"):
        ...     b = keras.layers.Dense(4)(input_b)
        >>> model = keras.Model([input_a, input_b], keras.layers.concatenate([a, b]))
    """
    from lockstep.keras_compat import nodes_reported, report_functional_models
    from lockstep.layout import mark_node

    name = _one_device(device)
    calls = 0

    def mark(node: Any) -> None:
        nonlocal calls
        calls += 1
        mark_node(node, name)

    report_functional_models(_place_marked)
    with nodes_reported(mark):
        yield
    if not calls:
        raise UnsupportedModel(
            f"lockstep.on({device!r}) contains no call of a layer on symbolic inputs, as a "
            "functional model is made.\n"
            "For a Sequential or subclassed model, call lockstep.place(model, "
            f'{{"layer_name": {name!r}}}).'
        )


def place(
    model: Model,
    layers: Mapping[str, str | int] | None = None,
    *,
    parts: int = 1,
) -> Model:
    """Make the layers of a model run on different devices, in place.

    Training gives the numbers of one device. Weights, gradients and optimizer slots of a layer are
    on its device alone, so a model can be larger than the memory of one device. Layers that do not
    need one another run side by side. What the model saves is a plain single-device file.

    Args:
        model: A `keras.Model`, of any kind.
        layers: The devices by layer name. A name may be a path (`"encoder/dense"`), and may have
            `*` for any characters. Other layers follow their inputs. `None`: as `lockstep.on` says.
        parts: Into how many parts the rows of each batch are split, one after the other. The layers
            of a chain on several devices then work at the same time, each on another part.

    Returns:
        The same `model`.

    Raises:
        DeviceError: If a device is unknown.
        LayoutConflict: If the model is distributed, or shares a variable with a model that is laid
            out in another way.
        NotAModel: If `model` is no Keras model.
        UnsupportedBackend: If the engine of Keras's backend has no branches.
        UnsupportedModel: If a name matches no layer, or two names with different devices match one;
            if no layer gets a device; or if the layers do not work on each part by itself.

    Example:
        >>> lockstep.place(model, {"image_*": "cpu:0", "text_*": "cpu:1"}) is model
        True
    """
    check_model(model)
    from lockstep.layout import lay_out, marked

    engine = current_engine()
    chosen = _choose(model, layers or {})
    devices = [*marked(model), *chosen.values()]
    if not devices:
        raise UnsupportedModel(
            f"No layer of {_name(model)} was given a device.\n"
            'Name layers, as in lockstep.place(model, {"dense_*": "gpu:1"}).'
        )
    default = min(devices, key=[each.name for each in engine.devices()].index)
    layout = lay_out(model, chosen, default, _checked_parts(parts))
    engine.place(model, layout)
    return model


def _place_marked(model: Any) -> None:
    """Place the layers of a new functional model, if `lockstep.on` has given devices to any."""
    from lockstep.layout import marked

    if marked(model):
        place(model)


def _choose(model: Any, layers: Mapping[str, str | int]) -> dict[str, str]:
    """Return the device of each layer that a pattern names, by the path of the layer."""
    from lockstep.layout import layers_by_path, matches

    paths = list(layers_by_path(model))
    found: dict[str, tuple[str, str]] = {}
    for pattern, device in layers.items():
        name = _one_device(device)
        matched = [path for path in paths if matches(pattern, path)]
        if not matched:
            close = difflib.get_close_matches(pattern, paths, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Its layers: {_listed(paths)}."
            raise UnsupportedModel(f"{pattern!r} names no layer of {_name(model)}.\n{hint}")
        for path in matched:
            other, there = found.setdefault(path, (pattern, name))
            if there != name:
                raise UnsupportedModel(
                    f"Layer {path!r} was given two devices: {there} by {other!r}, and {name} by "
                    f"{pattern!r}.\nName it once."
                )
    return {path: device for path, (_, device) in found.items()}


def _listed(paths: list[str]) -> str:
    return ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")


def _name(model: Any) -> str:
    return repr(getattr(model, "name", type(model).__name__))


def _one_device(device: str | int) -> str:
    asked = [device] if isinstance(device, int) else device
    names = parse_devices(asked, current_engine().devices())
    if len(names) != 1:
        raise DeviceError(
            f"{device!r} names {len(names)} devices, and a layer runs on one.\n"
            "Name one, such as 'gpu:1'."
        )
    return names[0]


def _checked_parts(parts: Any) -> int:
    if isinstance(parts, int) and not isinstance(parts, bool) and parts >= 1:
        return parts
    raise UnsupportedModel(
        f"parts={parts!r} was given, and it is a number of parts of a batch: 1 or more."
    )
