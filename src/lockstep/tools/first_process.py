"""What one of several processes does for all: a logger, for example, that opens one run."""

from collections.abc import Callable
from typing import Any

from lockstep.errors import NotACallback
from lockstep.initialize import initialize


def is_first() -> bool:
    """Return whether this process is the first of those that train one model together.

    A single process is the first. The call joins the processes of a launcher, as `initialize` does.

    Returns:
        Whether to open the run of a logger, or to print.

    Raises:
        ProcessesDisagree: As `lockstep.initialize`.
        UnsupportedBackend: As `lockstep.initialize`.

    Example:
        >>> lockstep.is_first()
        True
    """
    return initialize()[0] == 0


def first_process(callback: Any | Callable[[], Any]) -> Any:
    """Return a callback that the first of several processes calls, and no other one.

    Use it for a callback that writes, such as a logger: each process would write. Lockstep does so
    by itself for the callbacks of wandb, mlflow, comet_ml, clearml, neptune, aim and swanlab, and
    for those of Keras. The callback must not stop the training or change the model, which all
    processes have to do alike.

    Args:
        callback: A Keras callback; or a function without arguments that makes one, which only the
            first process calls.

    Returns:
        The callback in the first process, and one that does nothing in the others.

    Raises:
        NotACallback: If it is something else, or a `lockstep.Checkpoint`, which all processes need.
        ProcessesDisagree: As `lockstep.initialize`.
        UnsupportedBackend: As `lockstep.initialize`.

    Example:
        >>> callbacks = [lockstep.first_process(keras.callbacks.CSVLogger("log.csv"))]
    """
    import keras

    from lockstep.checkpoint import Checkpoint

    made = callback
    if not isinstance(callback, keras.callbacks.Callback):
        if not callable(callback) or isinstance(callback, keras.layers.Layer):
            raise _refused(callback)
        made = callback() if callback is not Checkpoint and is_first() else None
    if callback is Checkpoint or isinstance(made, Checkpoint):
        raise NotACallback(
            "first_process was given a lockstep.Checkpoint, which must run in every process.\n"
            "Pass the Checkpoint to fit without first_process."
        )
    if not is_first():
        return keras.callbacks.Callback()
    if not isinstance(made, keras.callbacks.Callback):
        raise _refused(made)
    return made


def _refused(given: Any) -> NotACallback:
    return NotACallback(
        f"first_process was given {given!r:.80}, but a Keras callback, or a function that "
        "returns one, was expected.\n"
        "Pass the callback, or its class if the class needs no arguments."
    )
