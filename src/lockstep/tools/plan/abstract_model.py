"""A compiled model with shapes and without values, and the shapes of its batches."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from lockstep.core.state import item_bytes
from lockstep.core.step_bytes import Leaf
from lockstep.errors import LockstepError, TargetNotFound, UnsupportedModel, UnusableData
from lockstep.keras_compat import functional_of, inputs_and_outputs, variables_without_values
from lockstep.tools.batches import first_batches, rows_of
from lockstep.training.build import build as build_parts

DEFAULT_ROWS = 32
"""Rows of a batch where nothing is said, as in Keras."""

NO_VALUES = (
    "In a plan, large variables have no values. If your function calls the model on a batch, "
    "use model.build(shape) instead, or return (model, data)."
)


def abstract_model(
    build: Callable[[], Any],
    name: str,
    batch_size: int | None,
    data: Any = None,
) -> tuple[Any, Any, bool]:
    """Call a function that returns a model, and build the model without values.

    Args:
        build: Returns a compiled model, or `(model, data)`.
        name: The name of the function.
        batch_size: Rows of the global batch; `None` for those that the data give.
        data: The data; `None` for those that the function returns.

    Returns:
        The model, the shapes of a global batch in the structure of a training step, and whether
        data tell its targets. Otherwise they are some that the loss takes.

    Raises:
        TargetNotFound: If the function trains, or returns anything else.
        UnusableData: If the model is not compiled, or cannot be built from shapes.
    """

    def refuse(model: Any, *args: Any, **kwargs: Any) -> None:
        raise TargetNotFound(
            f"{name} trains or runs {model.name!r}, but in a plan the model has no weights.\n"
            "Return only the compiled model from it, and call fit elsewhere."
        )

    with variables_without_values(_empty_value, refuse):
        try:
            result = build()
        except LockstepError:
            raise
        except Exception as error:
            error.add_note(NO_VALUES)
            raise
        model, own = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        data = own if data is None else data
        batch = built_model(model, data, name, batch_size)
    return model, batch, data is not None


def built_model(model: Any, data: Any, name: str, batch_size: int | None) -> Any:
    """Build what a training step of a model needs, and return the shapes of a global batch.

    Args:
        model: The model.
        data: Its data; `None` if there are none.
        name: The name of the model, or of the function that returned it.
        batch_size: Rows of the global batch; `None` for those that the data give.

    Raises:
        TargetNotFound: If it is no model.
        UnusableData: If the model is not compiled, or cannot be built from shapes.
    """
    _check(model, name)
    if data is None:
        return _build_from_inputs(model, name, batch_size or DEFAULT_ROWS)
    batch = _batch_of(data, batch_size)
    _build(model, batch, name)
    return batch


def _empty_value(variable: Any) -> Any:
    """Return what a variable without a value stores; it takes no memory."""
    backend = keras.backend.backend()
    if backend == "torch":
        from lockstep.engines.torch.exchange.placement import empty_parameter

        return empty_parameter(variable)
    if backend == "tensorflow":
        from lockstep.engines.tensorflow.exchange.mirrored_variables import empty_variable

        return empty_variable(variable)
    return None


def arrays_of(batch: Any) -> list[Leaf]:
    """Return the shapes of the arrays of a batch. JAX stores 32 bits for 64."""
    stored = [
        (tuple(leaf.shape), keras.ops.convert_to_tensor(np.zeros(1, leaf.dtype)).dtype)
        for leaf in keras.tree.flatten(batch)
        if leaf is not None
    ]
    standard = keras.backend.standardize_dtype
    return [(shape, item_bytes(standard(dtype))) for shape, dtype in stored]


def _check(model: Any, name: str) -> None:
    if not isinstance(model, keras.Model):
        raise TargetNotFound(
            f"{name} returned a {type(model).__name__}, but a compiled model was expected.\n"
            "Return the model, or (model, data)."
        )
    if not getattr(model, "compiled", False):
        raise UnusableData(
            f"A compiled model was expected, but {model.name!r} is not compiled.\n"
            "Call model.compile(optimizer, loss) first: the optimizer needs memory too."
        )


def _batch_of(data: Any, batch_size: int | None) -> Any:
    """Return the shapes of a batch of the data, with as many rows as asked."""
    (batch,) = first_batches(data, 1, None)
    return resized(batch, batch_size or rows_of(batch))


def resized(batch: Any, rows: int) -> Any:
    """Return the shapes of a batch with another number of rows."""
    before = rows_of(batch)

    def with_rows(leaf: Any) -> Any:
        if leaf is None:
            return None
        has_rows = leaf.ndim > 0 and leaf.shape[0] == before
        shape = (rows, *leaf.shape[1:]) if has_rows else leaf.shape
        return keras.KerasTensor(shape, keras.backend.standardize_dtype(leaf.dtype))

    return keras.tree.map_structure(with_rows, batch)


def _build(model: Any, batch: Any, name: str) -> None:
    try:
        build_parts(model, "train", batch)
    except UnsupportedModel as error:
        raise UnusableData(
            f"{model.name!r} is not built, and Keras cannot build it from the shapes of a "
            f"batch.\nBuild it in {name}: add an Input, or call model.build(shape)."
        ) from error


def _build_from_inputs(model: Any, name: str, rows: int) -> tuple[Any, Any]:
    """Build the metrics and the optimizer of a model without data, and return a batch.

    The targets are class numbers, or like the outputs.
    """
    function = functional_of(model)
    if function is None:
        raise UnusableData(
            f"{name} returned {model.name!r} without data, but the model has no input shape.\n"
            "Return (model, data), or begin the model with keras.Input(shape)."
        )
    inputs, outputs = (
        keras.tree.map_structure(lambda leaf: _with_rows(leaf, rows), each)
        for each in inputs_and_outputs(function)
    )
    numbers = keras.tree.map_structure(
        lambda leaf: keras.KerasTensor(leaf.shape[:-1], "int32"), outputs
    )
    losses = [getattr(each, "name", None) or str(each) for each in keras.tree.flatten(model.loss)]
    is_sparse = any("sparse" in each for each in losses)
    targets, others = (numbers, outputs) if is_sparse else (outputs, numbers)
    try:
        build_parts(model, "train", (inputs, targets))
        return inputs, targets
    except LockstepError:
        raise
    except Exception:
        try:
            build_parts(model, "train", (inputs, others))
            return inputs, others
        except Exception as error:
            raise UnusableData(
                f"{name} returned {model.name!r} without data, so the shape of its targets is "
                "unknown.\nReturn (model, data): a few rows are enough."
            ) from error


def _with_rows(leaf: Any, rows: int) -> Any:
    shape = tuple(leaf.shape)
    if None in shape[1:]:
        raise UnusableData(
            f"{leaf.name!r} has the shape {shape}, but plan needs every size.\n"
            "Return (model, data) with a batch of the usual size."
        )
    return keras.KerasTensor((shape[0] or rows, *shape[1:]), leaf.dtype)
