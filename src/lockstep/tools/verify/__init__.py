"""Compare training on several devices with training on one, for the user's model and data."""

from itertools import cycle, islice
from typing import Any

from lockstep.core.devices import REPLICATED, SHARDED, parse_devices
from lockstep.core.process_local import ProcessLocal
from lockstep.distribute import Devices, check_micro_batch_size, check_model, check_state
from lockstep.engines import current_engine
from lockstep.errors import DeviceError, UnsupportedBackend, UnusableData
from lockstep.tools.verify.verification import Verification


def verify(
    model: Any,
    data: Any,
    devices: Devices | None = None,
    steps: int = 20,
    *,
    batch_size: int | None = None,
    state: str = REPLICATED,
    micro_batch_size: int | None = None,
) -> Verification:
    """Train on one device and on several from the same start, and compare every step.

    The result compares loss, metrics, every weight and every optimizer slot after each
    step. Batches reach the training step as in `fit`, and a model that is not built is built
    as in `fit`. If the runs differ, the result names the first step, the first layer and the
    likely cause. If the loss becomes infinite or NaN, that step and later ones are not
    compared, and the verdict is `"cannot tell"`. It is the same if no weight moved.

    Afterwards the model has its weights, optimizer state and devices again. Metrics are
    reset, and a model or optimizer that was not built stays built.

    Runs that are further apart than 1e-5 (of the largest value, where that is above 1) are
    compared again in float64, in a process of its own: rounding shrinks to 1e-10 there, and a
    fault does not. A variable whose gradient is zero up to rounding is named apart: an optimizer
    such as Adam makes steps of what rounding leaves. Then each step is compared from the weights
    of one device. Mixed precision and casts of `keras.ops` mean float64 there; other casts to
    float32 make the bound that of float32. If that process cannot have the model, or under a
    launcher, the verdict is `"cannot tell"`; the command `lockstep verify --float64` builds the
    model in float64 instead.

    Args:
        model: A compiled `keras.Model`.
        data: `(x, y)` or `(x, y, sample_weight)` of arrays, or a data set that `fit` takes.
            If it holds fewer than `steps` batches, it starts again. Of `lockstep.process_local`
            the global batches are verified.
        devices: As in `lockstep.distribute`, at least 2; `None` for all. One device is compared
            with itself if `micro_batch_size` is given.
        steps: Training steps, at least 1. The weights and optimizer slots after each step are
            on disk until the end of the call.
        batch_size: Rows of the global batch where `data` is arrays. Defaults to 32.
        state: How weights and optimizer slots are laid out, as in `lockstep.distribute`.
        micro_batch_size: The most rows that a device runs at once, as in `lockstep.distribute`.

    Returns:
        The result. `.verdict` is `"equal"`, `"different"` or `"cannot tell"`. `.equal` is true
        if the verdict is `"equal"`.

    Raises:
        DeviceError: If a device is not available, `devices` is one device, `state` is unknown, or
            `micro_batch_size` is no number of rows.
        NotAModel: If `model` is not a Keras model.
        UnsupportedBackend: If the state is sharded, and several processes run; or if the engine
            runs all rows of a device at once.
        UnusableData: If the model is not compiled or cannot be built, or the data cannot be
            trained on.

    Example:
        >>> model.compile("adam", "mse")
        >>> lockstep.verify(model, (x, y), devices=4).equal
        True
    """
    # These import NumPy, which `import lockstep` does not.
    from lockstep.core.layout import DataParallel
    from lockstep.processes.process_group import several
    from lockstep.tools.batches import count_from_one
    from lockstep.tools.verify.comparison import compare

    check_model(model)
    check_state(state)
    rows = check_micro_batch_size(micro_batch_size)
    engine = current_engine()
    names = parse_devices(devices, engine.devices())
    if len(names) < 2 and rows is None:
        raise DeviceError(
            f"{'The only device is' if devices is None else f'devices={devices!r} is only'} "
            f"{names[0]}, but verify needs at least 2 devices.",
            rehearse=2,
        )
    from lockstep.attach.attachment import session_of  # which imports Keras

    session = session_of(model)
    if several() and (state == SHARDED or (session and session.layout.is_sharded)):
        raise UnsupportedBackend(
            f"{model.name!r} cannot be verified with sharded state across several processes:\n"
            "verify needs the whole variables.\n"
            "Verify it in one process with the same number of devices."
        )
    if not getattr(model, "compiled", False):
        raise UnusableData(
            f"A compiled model was expected, but {model.name!r} is not compiled.\n"
            "Call model.compile(optimizer, loss) first: verify trains it."
        )
    number = count_from_one(steps)
    if number is None:
        raise UnusableData(
            f"steps={steps} was requested, but a whole number of at least 1 was expected."
        )
    layout = DataParallel(names, state, micro_batch_size=rows)
    return compare(engine, model, _batches_of_all(data, number, batch_size), layout)[0]


def _batches_of_all(data: Any, number: int, batch_size: int | None) -> list[Any]:
    """Return the first global batches, which every process has whole."""
    from lockstep.processes.call_scope import CALLS
    from lockstep.processes.process_group import several
    from lockstep.tools.batches import first_batches
    from lockstep.training.global_data import global_data

    if not several():
        return first_batches(data, number, batch_size)
    with CALLS.call("verify"):
        given = global_data({"x": data, "batch_size": batch_size, "shuffle": False})
        if not isinstance(data, ProcessLocal):
            return first_batches(data, number, batch_size)
        every = list(islice(given["x"].get_numpy_iterator(), number))
        given["x"].on_epoch_end()
    return list(islice(cycle(every), number))
