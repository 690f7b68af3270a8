"""The written model, loaded and asked: does it give the outputs it should?"""

from __future__ import annotations

from typing import Any

from lockstep.errors import OutputMismatch, UnreadableFile, UnsuitableOutput

TOLERANCE = 1e-5


def inputs_and_outputs(path: str) -> tuple[list[Any], list[Any]]:
    """Arrays x0, x1, ... and y0, y1, ... of an `.npz`, read without running anything."""
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as arrays:
            names = set(arrays.files)
            found = [
                [arrays[f"{kind}{n}"] for n in range(len(names)) if f"{kind}{n}" in names]
                for kind in "xy"
            ]
    except (OSError, ValueError, EOFError) as error:
        raise UnreadableFile(
            f"{path} cannot be read as an .npz of arrays: {error}.\n"
            "Write one with numpy.savez(path, x0=inputs, y0=outputs)."
        ) from error
    if not found[0] or not found[1]:
        raise UnreadableFile(
            f"{path} has the arrays {', '.join(sorted(names)) or 'none'}, and x0 (input) and "
            "y0 (expected\noutput) are needed. Write one with "
            "numpy.savez(path, x0=inputs, y0=outputs)."
        )
    return found[0], found[1]


def difference(model: Any, inputs: list[Any], outputs: list[Any]) -> float:
    """Largest absolute difference between the model's outputs and the expected ones.

    Raises:
        OutputMismatch: It is larger than TOLERANCE, or not a number.
    """
    import keras
    import numpy as np

    if len(inputs) != len(model.inputs):
        raise UnsuitableOutput(
            f"The model takes {len(model.inputs)} inputs, and {len(inputs)} were given (x0, ...).\n"
            "Give one array for each input, in the model's order."
        )
    given = [
        value.astype(tensor.dtype) if tensor.dtype != str(value.dtype) else value
        for value, tensor in zip(inputs, model.inputs, strict=True)
    ]
    try:
        found = model(given[0] if len(given) == 1 else given, training=False)
    except Exception as error:
        raise OutputMismatch(
            f"The rescued model does not run: {' '.join(str(error).split())[:160]}\n"
            "Nothing was written. Check the inputs in the .npz, and your custom layers."
        ) from error
    listed = list(found) if isinstance(found, (list, tuple)) else [found]
    arrays = [np.asarray(keras.ops.convert_to_numpy(one), dtype="float64") for one in listed]
    worst = 0.0
    for position, (new, old) in enumerate(zip(arrays, outputs, strict=False)):
        if new.shape != old.shape:
            raise OutputMismatch(
                f"Output {position} has the shape {new.shape}, and {old.shape} is expected.\n"
                "Nothing was written. The inputs or the architecture are not those of the file."
            )
        worst = max(worst, float(np.max(np.abs(new - old), initial=0.0)))
        if np.isnan(new).any() != np.isnan(old).any():
            worst = float("nan")
    if not worst <= TOLERANCE or len(arrays) != len(outputs):
        raise OutputMismatch(
            f"The rescued model's outputs differ from the expected ones by {worst:.3g}, more than "
            f"{TOLERANCE:g}.\nNothing was written. If the expected outputs are right, "
            "the architecture is another one:\ncheck --model or --config and custom layers."
        )
    return worst
