"""Branches of one model on different devices: on, place, placement."""

import difflib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.core.devices import names_in_words, parse_devices
from lockstep.core.report import Report, console, print_table, table
from lockstep.distribute import check_model
from lockstep.engines import current_engine
from lockstep.errors import DeviceError, SerialBranchesWarning, UnsupportedModel, shown

if TYPE_CHECKING:
    from rich.console import Console

    from lockstep.branches.transfers import PlacedLayer, Transfer

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

    Returns:
        A context manager.

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
    from lockstep.core.layout import mark_node
    from lockstep.keras_compat import device_scope, nodes_reported, report_functional_models

    name = _one_device(device)
    calls = 0

    def mark(node: Any) -> None:
        nonlocal calls
        calls += 1
        mark_node(node, name)

    report_functional_models(_place_new)
    with nodes_reported(mark), device_scope(name):  # weights are made on the device
        yield
    if not calls:
        raise UnsupportedModel(
            f"lockstep.on({device!r}) contains no call of a layer on symbolic inputs. It is for "
            "building functional models.\nFor a Sequential or subclassed model, call "
            f'lockstep.place(model, {{"layer_name": {name!r}}}).'
        )


def place(model: Model, layers: Mapping[str, str | int] | None = None) -> Model:
    """Make the layers of a model run on different devices, in place.

    Training gives the numbers of one device. Weights, gradients and optimizer slots of a layer are
    on its device alone, so a model can be larger than the memory of one device. Layers that do not
    need one another run side by side. What the model saves is a plain single-device file.

    Args:
        model: A `keras.Model`, of any kind.
        layers: The devices by layer name. A name may be a path (`"encoder/dense"`), and may have
            `*` for any characters. Other layers are where another model has placed them, or follow
            their inputs. `None`: as `lockstep.on` says.

    Returns:
        The same `model`.

    Raises:
        DeviceError: If a device is unknown.
        LayoutConflict: If the model is distributed, or shares a variable with a model that is laid
            out in another way.
        NotAModel: If `model` is no Keras model.
        UnsupportedBackend: If the engine of Keras's backend has no branches.
        UnsupportedModel: If a name matches no layer, or two names with different devices match one;
            or if no layer gets a device.

    Example:
        >>> lockstep.place(model, {"image_*": "cpu:0", "text_*": "cpu:1"}) is model
        True
    """
    check_model(model)
    if not (layers is None or isinstance(layers, Mapping)):
        raise DeviceError(
            f"layers={shown(layers)} was given, but a dict of layer names and devices was "
            'expected.\nPass one, as in lockstep.place(model, {"dense_*": "gpu:1"}).'
        )
    from lockstep.core.layout import marked

    chosen = _known(model) | _choose(model, layers or {})
    if not chosen and not marked(model):
        raise UnsupportedModel(
            f"No device was given for any layer of {_name(model)}.\n"
            'Name the layers, as in lockstep.place(model, {"dense_*": "gpu:1"}).'
        )
    _place(model, chosen)
    return model


@dataclass(frozen=True)
class Placement(Report):
    """What runs where, of one model.

    Attributes:
        name: The name of the model.
        devices: The names of its devices.
        layout: How the model is on them, in words.
        weights: The bytes of weights on each device.
        optimizer: The bytes of optimizer slots on each device. Those of layers on several devices
            are with their layers, and not counted.
        layers: The layers on several devices, with their transfers; none where each device runs
            every layer.
    """

    name: str
    devices: tuple[str, ...]
    layout: str
    weights: dict[str, int]
    optimizer: dict[str, int]
    layers: tuple["PlacedLayer", ...] = ()

    def __str__(self) -> str:
        """The whole table."""
        from rich.console import Console

        shown = Console(file=StringIO(), width=console().width, highlight=False)
        self.show(shown)
        return str(shown.file.getvalue()).rstrip()  # type: ignore[attr-defined]

    def show(self, console: "Console") -> None:
        """Print a table: a line for each layer, or for each device."""
        heads = ["device", "weights (bytes)", "optimizer (bytes)"]
        if self.layers:
            heads = ["layer", "device", "weights (bytes)", "outputs (bytes a row)", "receives"]
        made = table(*heads)
        made.title = f"{self.name!r} on {names_in_words(self.devices)}: {self.layout}"
        for column in made.columns:
            column.justify = "right" if "bytes" in str(column.header) else "left"
        for line in self.layers:
            received = [
                f"{_number(each.row_bytes)} from {each.from_device} ({each.source})"
                for each in line.receives
            ]
            numbers = _number(line.weight_bytes), _number(line.row_bytes)
            made.add_row(line.layer, line.device, *numbers, "\n".join(received))
        for device, count in self.weights.items():
            if self.layers:
                made.add_row("all layers", device, _number(count))
            else:
                made.add_row(device, _number(count), _number(self.optimizer[device]))
        print_table(console, made)


def placement(model: Any) -> Placement:
    """Return what runs where: the devices of a model, its layout, and its bytes on each device.

    `print` shows it as a table, and so does a notebook. For layers on several devices, each layer
    has a line with its device, its bytes, and the transfers between devices. The bytes of outputs
    and transfers are those of one row of a batch.

    Args:
        model: A `keras.Model`, distributed or not.

    Returns:
        The report.

    Raises:
        NotAModel: If `model` is no Keras model.

    Example:
        >>> lockstep.place(model, {"dense*": "cpu:1"})
        >>> print(lockstep.placement(model))
    """
    check_model(model)
    from lockstep.attach.attachment import session_of
    from lockstep.branches.transfers import placed_layers
    from lockstep.core.layout import Branches
    from lockstep.core.state import bytes_of, named_variables

    name = getattr(model, "name", type(model).__name__)
    session = session_of(model)
    layout = None if session is None else session.layout
    if isinstance(layout, Branches):
        lines = tuple(placed_layers(model, layout))
        weights = dict.fromkeys(layout.devices, 0)
        for line in lines:
            weights[line.device.split(", ")[0]] += line.weight_bytes
        return Placement(name, layout.devices, "layers on devices", weights, {}, lines)
    names = (current_engine().devices()[0].name,) if session is None else session.devices
    words = "one device"
    if layout is not None and len(names) > 1:
        where = "variables in shards" if layout.is_sharded else "every variable on every device"
        words = f"data parallel, {where}"
    held = slots = 0
    for path, variable in named_variables(model).items():
        size = bytes_of(variable) // (1 if session is None else session.home(variable).shards)
        if path.startswith(("trainable/", "non_trainable/")):
            held += size
        elif path.startswith("optimizer/"):
            slots += size
    return Placement(name, names, words, dict.fromkeys(names, held), dict.fromkeys(names, slots))


def _place_new(model: Any) -> None:
    """Place the layers of a new functional model, if any of them has a device.

    `lockstep.on` has given it, or the layer is one of a model that is placed.
    """
    from lockstep.core.layout import marked

    chosen = _known(model)
    if chosen or marked(model):
        _place(model, chosen)


def _known(model: Any) -> dict[str, str]:
    """Return the devices of layers that another model has placed, by their path."""
    from lockstep.attach.holders import holders_of
    from lockstep.core.layout import Branches, layers_by_path

    found = {}
    for path, layer in layers_by_path(model).items():
        for variable in layer.weights:
            for holder in holders_of(variable):
                if holder.model is not model and isinstance(holder.layout, Branches):
                    found[path] = holder.layout.home(layer)
    return found


def _place(model: Any, chosen: dict[str, str]) -> None:
    from lockstep.attach.attachment import attach
    from lockstep.branches.transfers import cycle, transfers
    from lockstep.core.layout import lay_out, marked
    from lockstep.keras_compat import report_functional_models

    engine = current_engine()
    order = [each.name for each in engine.devices()]
    default = min([*marked(model), *chosen.values()], key=order.index)
    layout = lay_out(model, chosen, default)
    both = cycle(transfers(model, layout))
    attach(engine, model, layout)
    report_functional_models(_place_new)
    if both is not None:
        warnings.warn(_in_turns(*both), SerialBranchesWarning, stacklevel=3)


def _choose(model: Any, layers: Mapping[str, str | int]) -> dict[str, str]:
    """Return the device of each layer that a pattern names, by the path of the layer."""
    from lockstep.core.layout import layers_by_path, matches

    paths = list(layers_by_path(model))
    found: dict[str, tuple[str, str]] = {}
    for pattern, device in layers.items():
        name = _one_device(device)
        matched = [path for path in paths if matches(str(pattern), path)]
        if not matched:
            close = difflib.get_close_matches(str(pattern), paths, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Its layers: {_listed(paths)}."
            raise UnsupportedModel(f"{pattern!r} matches no layer of {_name(model)}.\n{hint}")
        for path in matched:
            other, there = found.setdefault(path, (pattern, name))
            if there != name:
                raise UnsupportedModel(
                    f"Layer {path!r} was given two devices: {there} by {other!r}, and {name} by "
                    f"{pattern!r}.\nName each layer only once."
                )
    return {path: device for path, (_, device) in found.items()}


def _in_turns(first: "Transfer", second: "Transfer") -> str:
    return (
        f"{first.target!r} on {first.to_device} needs {first.source!r} on {first.from_device}, and "
        f"{second.target!r} on {second.to_device} needs {second.source!r}.\n"
        "The results are exact, but the two devices wait for each other.\n"
        "Put layers that follow each other on one device."
    )


def _number(count: int | None) -> str:
    return "unknown" if count is None else f"{count:,}"


def _listed(paths: list[str]) -> str:
    return ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")


def _name(model: Any) -> str:
    return repr(getattr(model, "name", type(model).__name__))


def _one_device(device: str | int) -> str:
    # A number is that of a device here, and not how many.
    asked = device if isinstance(device, str) else [device]
    names = parse_devices(asked, current_engine().devices())
    if len(names) != 1:
        raise DeviceError(
            f"{shown(device)} names {len(names)} devices, but a layer runs on only one.\n"
            "Name one device, such as 'gpu:1'."
        )
    return names[0]
