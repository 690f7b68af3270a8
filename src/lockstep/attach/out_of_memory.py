"""What lockstep adds to the error of a backend whose device has no memory left."""

from contextlib import suppress
from typing import Any

from lockstep.core.engine import Engine, Session
from lockstep.core.fit_arguments import Given, batch_size_of
from lockstep.core.micro_batches import BACKENDS
from lockstep.core.step_bytes import LayoutBytes, amount, layout_bytes
from lockstep.errors import UnsupportedBackend

_TYPES = {"OutOfMemoryError", "ResourceExhaustedError"}  # of PyTorch and TensorFlow
_WORDS = ("resource_exhausted", "out of memory", "can't allocate memory", "oom when allocating")
_END = "`lockstep plan` compares them."


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of a backend says that a device has no memory left."""
    # JAX, PyTorch on CPUs, and Keras for errors within a layer have types for errors of all kinds.
    named = any(each.__name__ in _TYPES for each in type(error).__mro__)
    return named or (
        isinstance(error, RuntimeError) and any(each in str(error).lower() for each in _WORDS)
    )


def has_note(error: BaseException) -> bool:
    """Return whether an inner call has added the note; a note on something else may be there."""
    return any(each.endswith(_END) for each in getattr(error, "__notes__", ()))


def note_of(engine: Engine, session: Session, name: str, given: Given) -> str:
    """Return what each device holds, and what to try next, in three lines.

    Args:
        engine: The engine that made the session.
        session: The model on its devices.
        name: The method that was called.
        given: Its arguments.
    """
    model, count = session.model, len(session.devices)

    def bytes_with(dims: Any) -> LayoutBytes:
        return layout_bytes(model, (), count, dims)

    held, sharded = bytes_with(None), None
    with suppress(UnsupportedBackend):
        sharded = bytes_with(engine.sharded_dims(model, count))
    if session.layout.is_sharded and sharded is not None:
        held = sharded
    rows = batch_size_of(given) if "on_batch" not in name else None
    tries = ["batches of fewer rows" if rows is None else f"batch_size={max(1, rows // 2)}"]
    if engine.name in BACKENDS and (size := _micro_batch(session, rows)):
        tries.insert(0, f"micro_batch_size={size} in distribute, with the same results")
    if sharded is not None and sharded.held < held.held:
        tries.append(f'state="sharded" in distribute (then {amount(sharded.held)} each)')
    tries.append("more devices")
    who = f"each of {count} devices" if count > 1 else "the device"
    return (
        f"lockstep: {who} holds {amount(held.weights)} of weights, "
        f"{amount(held.optimizer)} of optimizer slots and, in training, {amount(held.gradients)} "
        "of gradients.\nThe rest are activations, which grow with the rows of a device.\n"
        f"Try {', '.join(tries[:-1])}, or {tries[-1]}; {_END}"
    )


def _micro_batch(session: Session, rows: int | None) -> int:
    """Return half of the rows that a device runs at once; 0 if it is not known, or one row."""
    of_device = None if rows is None else -(-rows // len(session.devices))
    known = [each for each in (of_device, session.layout.micro_batch_size) if each is not None]
    return min(known, default=0) // 2
