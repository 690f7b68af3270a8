"""Compare the outputs of a rescued model with expected ones, for `--check`."""

from __future__ import annotations

import os
import zipfile
from typing import Any

import keras
import numpy as np

from lockstep.errors import OutputMismatch, UnreadableFile, UnsuitableOutput, counted
from lockstep.keras_compat import serialized_objects_kept

TOLERANCE = 1e-5

UNFOLD_CAP = 256 * 2**20
"""Maximum unpacked bytes of an `.npz`, or 32 times the file size where that is more."""

_SAVEZ = "numpy.savez(path, x0=inputs, y0=outputs)."


def inputs_and_outputs(path: str) -> tuple[list[Any], list[Any]]:
    """Read arrays x0, x1, ... and y0, y1, ... of an `.npz`, without running code in it."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(one.file_size for one in archive.infolist())
            if size > max(UNFOLD_CAP, 32 * os.path.getsize(path)):
                raise ValueError(f"it decompresses to {size:,} bytes")
        with np.load(path, allow_pickle=False) as arrays:
            names = set(arrays.files)
            inputs, outputs = (
                [arrays[f"{kind}{n}"] for n in range(len(names)) if f"{kind}{n}" in names]
                for kind in "xy"
            )
    except Exception as error:  # NumPy's parser raises many kinds of errors
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise UnreadableFile(
            f"{path} cannot be read as an .npz of arrays: {reason}.\nWrite one with {_SAVEZ}"
        ) from error
    if not inputs or not outputs:
        raise UnreadableFile(
            f"{path} has the arrays {', '.join(sorted(names)) or 'none'}, but x0 (input) and y0 "
            f"(expected\noutput) are needed. Write the file with {_SAVEZ}"
        )
    for array in inputs + outputs:
        if array.dtype.kind not in "fiub":
            raise UnreadableFile(
                f"{path} holds an array of {array.dtype}, but numbers are needed.\n"
                f"Write numbers with {_SAVEZ}"
            )
    if not all(array.size and np.isfinite(array).any() for array in outputs):
        raise UnreadableFile(
            f"{path} has an expected output that is empty: there is nothing to compare.\n"
            f"Write the outputs of the old model with {_SAVEZ}"
        )
    return inputs, outputs


def difference(model: Any, inputs: list[Any], outputs: list[Any]) -> float:
    """Return the largest difference between the model's outputs and the expected ones.

    The difference is relative for outputs above 1, where float32 has no more digits.

    Raises:
        OutputMismatch: The difference exceeds TOLERANCE, or only one of two values is NaN.
    """
    if len(inputs) != len(model.inputs):
        raise UnsuitableOutput(
            f"The model takes {counted(len(model.inputs), 'input')}, but the file has "
            f"{len(inputs)} (x0, ...).\nProvide one array for each input, in the model's order."
        )
    given = [
        value.astype(tensor.dtype) if tensor.dtype != str(value.dtype) else value
        for value, tensor in zip(inputs, model.inputs, strict=True)
    ]
    try:
        found = model(given[0] if len(given) == 1 else given, training=False)
    except Exception as error:
        raise OutputMismatch(
            f"The rescued model fails: {' '.join(str(error).split())[:160]}\n"
            "Nothing was written. Check the inputs in the .npz, and your custom layers."
        ) from error
    arrays = [
        np.asarray(keras.ops.convert_to_numpy(each), dtype="float64")
        for each in keras.tree.flatten(found)
    ]
    if len(arrays) != len(outputs):
        raise OutputMismatch(
            f"The rescued model has {len(arrays)} outputs, but {len(outputs)} were given (y0, "
            "...).\n"
            "Nothing was written. Provide one array for each output, in the model's order."
        )
    worst = 0.0
    for position, (new, old) in enumerate(zip(arrays, outputs, strict=True)):
        if new.shape != old.shape:
            raise OutputMismatch(
                f"Output {position} has the shape {new.shape}, but {old.shape} was expected.\n"
                "Nothing was written. The inputs or the architecture do not match the file."
            )
        worst = max(worst, _apart(new, old.astype("float64")))
    if not worst <= TOLERANCE:
        raise OutputMismatch(
            f"The rescued model's outputs differ from the expected ones by {worst:.3g}, more "
            f"than {TOLERANCE:g}.\nNothing was written. If the expected outputs are right, the "
            "architecture is not the original one:\ncheck --model or --config and custom layers."
        )
    return worst


def _apart(new: Any, old: Any) -> float:
    with np.errstate(invalid="ignore"):
        each = np.abs(new - old) / np.maximum(1.0, np.abs(old))
    each[(new == old) | (np.isnan(new) & np.isnan(old))] = 0.0  # also for equal infinities
    return float("inf") if np.isnan(each).any() else float(np.max(each, initial=0.0))


def loaded_model(path: str, custom: Any) -> Any:
    """Return the model of a `.keras` file, loaded by Keras."""
    try:
        with serialized_objects_kept():
            return keras.models.load_model(path, custom_objects=custom, compile=False)
    except Exception as error:
        raise OutputMismatch(
            f"Keras {keras.__version__} cannot load the written file: "
            f"{' '.join(str(error).split())[:120]}\nNothing was written. Write a .weights.h5 and "
            "load it into a model that your code builds."
        ) from error
