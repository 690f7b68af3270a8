"""Predictions of any number of rows, into a file or to a function."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.core.files import path_text
from lockstep.distribute import check_model, distribute, release
from lockstep.errors import (
    LockstepWarning,
    PredictionFileError,
    UnsupportedModel,
    UnusableData,
    counted,
    shown,
)


def predict(
    model: Any,
    data: Any,
    to: "str | os.PathLike[str] | Callable[[Any], object]",
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    verbose: Any = "auto",
    callbacks: Any = None,
) -> Path | None:
    """Write the predictions of a model into a file, with the memory of a few batches.

    The file has the rows of `model.predict`, each once and in order, on any number of devices and
    processes. It is complete or absent: until the last row, rows and position are in
    `scores.npy.partial/`. After a kill, the same call goes on where it was, on any devices, if
    the weights are the same and the data begin with the same batches: it reads those again and
    compares them, and does not compute them. A complete file is computed anew and replaced whole. A
    model whose state goes from batch to batch (a stateful RNN, dropout at prediction) begins anew.
    With `lockstep.process_local` each of several processes writes its rows, into
    `scores-00000-of-00004.npy` and so on; after a kill, as many processes go on where all were.

    Args:
        model: A `keras.Model`, distributed or not. One that is not runs on the first device.
        data: What `model.predict` takes: arrays, a generator, a `PyDataset`, a data set.
        to: A path that ends with `.npy`, for a model with one output; a folder, which gets a
            `.npy` file for each of several outputs; or a function, which is called with the rows
            of one or more batches, as NumPy arrays in the structure of the output, in order, and
            keeps no position.
        batch_size: Rows of a global batch where `data` is arrays. Defaults to 32.
        steps: The number of batches; `None` for all.
        verbose: As in `model.predict`.
        callbacks: As in `model.predict`.

    Returns:
        The path, for `numpy.load(path, mmap_mode="r")`; `None` for a function. Rows in bfloat16
        are in float32 in the file. With `lockstep.process_local`, the path of this process.

    Raises:
        NotAModel: If `model` is not a Keras model.
        PredictionFileError: If the path does not fit the model; if the folder of an unfinished
            call was written with another model or other data; or if rows have no fixed shape.
        UnsupportedModel: If the class of the model overrides `predict`; or if it is not
            distributed and several processes run.
        UnusableData: If the data have no batch, or `batch_size` or `steps` is no whole number.

    Example:
        >>> path = lockstep.predict(model, x, "scores.npy", batch_size=1024)
        >>> numpy.load(path, mmap_mode="r").shape
        (64, 1)
    """
    check_model(model)
    # These import Keras, which `import lockstep` does not.
    import keras

    from lockstep.attach.attachment import attachment_of
    from lockstep.checkpoint.prediction_folder import PredictionFolder
    from lockstep.core.fit_arguments import callbacks_in
    from lockstep.core.process_local import ProcessLocal
    from lockstep.keras_compat import trainer_class
    from lockstep.processes.process_group import several
    from lockstep.tools.batches import count_from_one
    from lockstep.training.predictions import RowsIntoFiles, RowsToFunction

    for name, number in (("batch_size", batch_size), ("steps", steps)):
        if number is not None and count_from_one(number) is None:
            raise UnusableData(
                f"{name}={shown(number)} was given, but a whole number of at least 1 was expected."
            )
    if type(model).predict is not trainer_class().predict:
        raise UnsupportedModel(
            f"{type(model).__name__} has its own predict, but lockstep.predict uses the loop of "
            "Keras's predict.\nOverride predict_step instead, or call model.predict."
        )
    is_attached = attachment_of(model) is not None
    if not is_attached and several():
        raise UnsupportedModel(
            f"{model.name!r} is not distributed, but several processes are running: each would "
            "predict all rows.\nCall lockstep.distribute(model) first."
        )
    path: Path | None = None
    if callable(to) and not isinstance(to, keras.layers.Layer):
        rows = RowsToFunction(to)
    else:
        given = os.path.expanduser(path_text(to, "to", PredictionFileError))
        path = Path(os.path.realpath(given))  # a link stays one
        if type(data) is ProcessLocal and several():
            path = _path_here(path)
            folder = PredictionFolder(path, notes=_NOTES)
        else:
            folder = PredictionFolder(path)
        rows = RowsIntoFiles(folder)
    if not is_attached:
        distribute(model, devices=1)
    try:
        arguments = {"batch_size": batch_size, "steps": steps, "verbose": verbose}
        model.predict(data, callbacks=[*callbacks_in(callbacks), rows], **arguments)
    finally:
        if not is_attached:
            release(model)
    return path


_NOTES = 3
"""Positions that a process keeps: the newest one may be missing in another process, and the note
of an error follows it."""


def _path_here(path: Path) -> Path:
    """Return the path of this process; warn if another number of processes has begun there."""
    from lockstep.checkpoint.prediction_folder import path_of_process, unfinished_of_others
    from lockstep.processes.group import current

    rank, size = current().rank, current().size
    others = unfinished_of_others(path, size) if rank == 0 else []
    if others:
        warnings.warn(
            f"{others[0]} is unfinished, but with {size} processes the rows are split "
            "differently: these predictions start again.\nTo continue it, start as many "
            f"processes as before. Or remove the {counted(len(others), 'unfinished folder')}.",
            LockstepWarning,
            stacklevel=3,
        )
    return path_of_process(path, rank, size)
