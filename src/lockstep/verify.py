"""N devices against one, on a model and data of the user's."""

from typing import Any

from lockstep.devices import parse_devices
from lockstep.distribute import Devices, check_model
from lockstep.engines import current_engine
from lockstep.errors import UnusableData
from lockstep.verification import Verification


def verify(
    model: Any,
    data: Any,
    devices: Devices | None = None,
    steps: int = 20,
    *,
    batch_size: int | None = None,
) -> Verification:
    """Train on one device and on several from the same start, and compare every step.

    Loss, metrics, every weight and every optimizer slot are compared after each
    step. Weights, optimizer state and devices are afterwards what they were; metrics are
    reset, and a model or optimizer that was not built is. Where the runs part, the first
    step, the first layer and the likely cause are named. How far rounding alone takes a
    model from itself is measured on one device, by turning round the rows of each batch
    (or, where their order counts, as for a model that draws random numbers, by moving each
    weight by the last bit of the type that layers compute in).

    Args:
        model: A compiled `keras.Model`.
        data: `(x, y)` or `(x, y, sample_weight)` of arrays, or a data set that gives
            such batches. Where it holds fewer than `steps` batches it starts again.
        devices: As in `lockstep.distribute`; `None` for all.
        steps: Training steps, at least 1. Each one is kept on disk while it runs:
            the size of the weights and optimizer slots times `steps`.
        batch_size: Rows of the global batch where `data` is arrays. Defaults to 32.

    Returns:
        What was found; `.equal` says whether the promise holds.

    Raises:
        DeviceError: If `devices` cannot be followed.
        NotAModel: If `model` is no Keras model.
        UnusableData: If the model is not compiled, or the data cannot be trained on.

    Example:
        >>> model.compile("adam", "mse")
        >>> lockstep.verify(model, (x, y), devices=4).equal
        True
    """
    check_model(model)
    engine = current_engine()
    names = parse_devices(devices, engine.devices())
    if not getattr(model, "compiled", False):
        raise UnusableData(
            f"A compiled model was expected, and {model.name!r} is not compiled.\n"
            "Call model.compile(optimizer, loss) first: verify trains it."
        )
    from lockstep.batches import count_from_one, first_batches, rows_of

    number = count_from_one(steps)
    if number is None:
        raise UnusableData(
            f"steps={steps} was asked for, and a whole number of at least 1 was expected."
        )
    # These import NumPy, which `import lockstep` does without.
    from lockstep.comparison import compare

    batches = first_batches(data, number, batch_size)
    rows = [rows_of(batch) for batch in batches]
    return compare(engine, model, batches, names, (min(rows), max(rows)))
