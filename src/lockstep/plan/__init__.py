"""What each device holds and sends in a training step, before there are devices."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lockstep.engines import current_engine
from lockstep.errors import DeviceError, UnsupportedBackend, UnusableData

if TYPE_CHECKING:
    from lockstep.plan.memory_plan import MemoryPlan

EXACT = (
    "These bytes are exact. Not included: activations and temporaries, which grow with the rows of "
    "a device, and the backend itself."
)
SENT = (
    "Sent: gradients and weights, by a ring. Statistics of batch norm, the loss and metrics are "
    "not included."
)


def plan(
    build: Callable[[], Any] | str,
    devices: int | Sequence[int] = (1, 2, 4, 8),
    *,
    batch_size: int | None = None,
    memory: str | int | None = None,
) -> "MemoryPlan":
    """Compute what each device holds and sends in a training step, before there are devices.

    The bytes of weights, optimizer slots, gradients, metrics and the batch are those that
    `distribute` then allocates. Activations and temporaries are not included. Large variables
    of the model get a shape and no value, so a model may be larger than the memory here.

    Args:
        build: A function that returns a compiled model, or `(model, data)` with data that `fit`
            takes; or its name, such as `"train.py:build"`. A few rows of data are enough. A model
            without data needs an input shape.
        devices: Numbers of devices.
        batch_size: Rows of the global batch. Defaults to those of a data set, and to 32 for arrays.
        memory: The memory of one device, such as `"24GB"` (24e9 bytes) or `"80GiB"`.

    Returns:
        The result. `.layouts` has the bytes of a device for each number of devices, and for
        replicated and sharded state. `str()` of it is a short text.

    Raises:
        DeviceError: If `devices` or `memory` cannot be read.
        TargetNotFound: If `build` is not found, trains the model, or returns no model.
        UnusableData: If the model is not compiled, or its shapes are not known without data.
        UnsupportedBackend: If there is no engine for Keras's backend.

    Example:
        >>> def build():
        ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(512)])
        ...     model.compile("adam", "mse")
        ...     return model
        >>> lockstep.plan(build, devices=4, memory="24GB").layouts[0].weights
        133120
    """
    # These import NumPy and Keras, which `import lockstep` does not.
    from lockstep.batches import count_from_one
    from lockstep.plan.abstract_model import abstract_model
    from lockstep.plan.memory_plan import MemoryPlan, parse_memory
    from lockstep.state import optimizers_of
    from lockstep.step_bytes import amount, layout_bytes
    from lockstep.targets import call_target

    counts = [devices] if isinstance(devices, int) else list(devices)
    if not counts or any(count_from_one(count) is None for count in counts):
        raise DeviceError(
            f"devices={devices!r} was given, and numbers of devices of at least 1 were expected.\n"
            "Give a number, or several, such as (1, 2, 4)."
        )
    if batch_size is not None and count_from_one(batch_size) is None:
        raise UnusableData(
            f"batch_size={batch_size!r} was given, and a whole number of at least 1 was expected.\n"
            "Leave batch_size out for that of the data."
        )
    bytes_of_memory = None if memory is None else parse_memory(memory)
    engine = current_engine()
    name = build if isinstance(build, str) else getattr(build, "__name__", "build")
    function = partial(call_target, build) if isinstance(build, str) else build
    model, batch, has_targets = abstract_model(function, name, batch_size, engine.empty_value)
    if engine.attached(model) is not None:
        raise UnusableData(
            f"{name} distributes {model.name!r}, and a plan needs the model on one device.\n"
            "Return it before lockstep.distribute."
        )
    notes = [EXACT, SENT]
    if not has_targets:
        notes.append(f"{name} returns no data: the batch is that of the inputs, without targets.")
    others = [each for each, optimizer in optimizers_of(model) if optimizer is not model.optimizer]
    if others:
        notes.append(f"The slots of {', '.join(others)} are not counted: a step makes them.")
    counts = sorted(set(counts))
    layouts: list[tuple[int, Any]] = [(count, None) for count in counts]
    try:
        engine.check_shards()
        layouts += [(n, engine.sharded_dims(model, n)) for n in counts if n > 1]
    except UnsupportedBackend as error:
        notes.append(f"{engine.name} has no sharded state. {str(error).splitlines()[1]}")
    in_compute_type = engine.reduces_in_compute_type
    found = [
        layout_bytes(model, batch, count, dims, in_compute_type)
        for count, dims in sorted(layouts, key=lambda each: each[0])
    ]
    gathered = max(layout.gathered for layout in found)
    if gathered:
        notes.append(f"Sharded weights are gathered: {amount(gathered)} of temporaries.")
    return MemoryPlan(
        name=model.name,
        backend=engine.name,
        parameters=model.count_params(),
        batch_size=max((shape[0] for shape, _ in batch if shape), default=0),
        layouts=tuple(found),
        memory=bytes_of_memory,
        notes=tuple(notes),
    )
