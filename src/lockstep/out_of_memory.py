"""What lockstep adds to the error of a backend whose device has no memory left."""

from lockstep.devices import REPLICATED, SHARDED
from lockstep.errors import UnsupportedBackend, counted
from lockstep.fit_lines import Given, batch_size_of
from lockstep.training.session import Session

_TYPES = {"OutOfMemoryError", "ResourceExhaustedError"}  # of PyTorch and TensorFlow
_WORDS = ("resource_exhausted", "out of memory", "can't allocate memory", "oom when allocating")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of a backend says that a device has no memory left."""
    # JAX, PyTorch on CPUs, and Keras for errors within a layer have types for errors of all kinds.
    named = any(each.__name__ in _TYPES for each in type(error).__mro__)
    return named or (
        isinstance(error, RuntimeError) and any(each in str(error).lower() for each in _WORDS)
    )


def note_of(session: Session, name: str, given: Given) -> str:
    """Return what each device holds, and what to try next, in three lines.

    Args:
        session: The model on its devices.
        name: The method that was called.
        given: Its arguments.
    """
    # They import Keras, which `import lockstep` does not.
    from lockstep.engines import current_engine
    from lockstep.plan.memory_plan import amount
    from lockstep.plan.step_bytes import layout_bytes

    engine, model, count = current_engine(), session.model, len(session.devices)
    shards = {}
    try:
        engine.check_shards()
        shards[SHARDED] = layout_bytes(model, (), count, engine.sharded_dims(model, count))
    except UnsupportedBackend:
        pass
    held = shards.get(session.state) or layout_bytes(model, (), count)
    rows = batch_size_of(given) if "on_batch" not in name else None
    tries = ["batches of fewer rows" if rows is None else f"batch_size={max(1, rows // 2)}"]
    if session.state == REPLICATED and SHARDED in shards and count > 1:
        of_state = amount(shards[SHARDED].held)
        tries.append(f'state="sharded" in distribute (it leaves {of_state} on each)')
    tries.append("more devices")
    return (
        f"lockstep: each of {counted(count, 'device')} holds {amount(held.weights)} of weights, "
        f"{amount(held.optimizer)} of optimizer slots and, in training, {amount(held.gradients)} "
        "of gradients.\nThe rest are activations, which grow with the rows of a device.\n"
        f"Try {', '.join(tries[:-1])}, or {tries[-1]}; `lockstep plan` compares them."
    )
