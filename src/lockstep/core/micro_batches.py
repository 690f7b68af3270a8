"""Micro-batches: the rows of a device in parts, and what is refused with them.

A device runs at most `micro_batch_size` rows through the layers at once. The loss, the metrics and
the optimizer see the whole batch. This file has the texts of the refusals, without a framework; the
sizes of the parts are in `lockstep.core.devices.micro_batches`.
"""

from typing import Any

import keras

from lockstep.core.state import stateful_layers
from lockstep.errors import UnsupportedBackend, UnsupportedModel

BACKENDS = ("jax", "torch")
"""Keras's backends on which a device can run its rows in parts."""


def no_micro_batches(backend: str, size: int) -> UnsupportedBackend:
    """Return the error for an engine that runs all rows of a device at once."""
    return UnsupportedBackend(
        f"micro_batch_size={size} was requested, but {backend!r} does not support "
        "micro-batches.\nOnly JAX and PyTorch do.\nSet KERAS_BACKEND=jax before Keras is "
        "imported, or remove micro_batch_size."
    )


def not_compiled(model: Any, size: int, layers: list[Any]) -> UnsupportedModel:
    """Return the error for a step that runs operation by operation."""
    if layers:
        names = ", ".join(f"{layer.name} ({type(layer).__name__})" for layer in layers)
        return UnsupportedModel(
            f"Keras cannot compile {names}, but micro_batch_size={size} needs a compiled step.\n"
            "Apply such layers to the data before fit, or remove micro_batch_size."
        )
    return UnsupportedModel(
        f"{model.name!r} was compiled with run_eagerly=True or jit_compile=False, but "
        f"micro_batch_size={size} needs a compiled step.\n"
        "Remove both from compile(), or remove micro_batch_size."
    )


def cuts_nothing(model: Any, step: str, size: int) -> UnsupportedModel:
    """Return the error for a step of the user's own that does not call the model as a whole."""
    return UnsupportedModel(
        f"The {step} of {model.name!r} does not call self.stateless_call, so "
        f"micro_batch_size={size} cannot split its rows:\nall rows of a device would run at "
        "once.\nCall self.stateless_call in the step, or remove micro_batch_size."
    )


def runs_alone(model: Any, why: str, size: int) -> UnsupportedModel:
    """Return the error for a step that one device would run by Keras's own code.

    Args:
        model: The model.
        why: Why it would, as the end of a sentence about the model.
        size: The micro-batch size.
    """
    return UnsupportedModel(
        f"{model.name!r} {why},\n"
        f"so its step would run all rows at once, but micro_batch_size={size} was requested.\n"
        "Use Keras's own step with layers that work row by row, or remove micro_batch_size."
    )


def needs_all_rows(layer: Any, size: int) -> UnsupportedModel:
    """Return the error for a batch norm that trains."""
    kind = type(layer).__name__
    return UnsupportedModel(
        f"{layer.name!r} ({kind}) needs all rows of the batch at once, but "
        f"micro_batch_size={size} splits them.\nUse GroupNormalization or LayerNormalization, "
        "freeze the layer (trainable=False),\nor remove micro_batch_size."
    )


def not_by_rows(what: str, why: str) -> UnsupportedModel:
    """Return the error for code that is not known to work row by row.

    Args:
        what: The layer, in quotes and with its class, or the model.
        why: The operation, with its place.
    """
    return UnsupportedModel(
        f"{what} is not known to work row by row, as micro_batch_size needs:\n{why}.\nChange it "
        "so that each row is computed independently, or remove micro_batch_size."
    )


def neither_sum_nor_mean(model: Any, why: str) -> UnsupportedModel:
    """Return the error for a term of `add_loss` that does not add up from parts."""
    return UnsupportedModel(
        f"{model.name!r} adds a loss that is neither the sum nor the mean over its rows:\n"
        f"{why}.\nCompute it in compute_loss or in a loss function, which receive all rows, or "
        "remove micro_batch_size."
    )


def adds_losses(layer: Any) -> UnsupportedModel:
    """Return the error for a term of `add_loss` whose rule of adding up parts is not known."""
    return UnsupportedModel(
        f"{in_words(layer)} adds a loss in its call, by add_loss or an activity regularizer.\n"
        "On PyTorch, lockstep cannot add up such losses over micro-batches.\nCompute it in "
        "compute_loss or in a loss function, set KERAS_BACKEND=jax, or remove micro_batch_size."
    )


def draws_for_all_rows(layer: Any) -> UnsupportedModel:
    """Return the error for a layer that draws the numbers of one device from all rows."""
    return UnsupportedModel(
        f"{in_words(layer)} draws random numbers in its call. For a part of the rows, it\n"
        "cannot draw the same numbers as one device. Remove same_random_numbers, set "
        "KERAS_BACKEND=jax,\nor remove micro_batch_size."
    )


def changes_by_rows(variable: Any) -> UnsupportedModel:
    """Return the error for a variable that changes in the call, by the rows of a batch."""
    return UnsupportedModel(
        f"{variable.path!r} is updated in the call of a layer from all rows of the batch, but\n"
        "micro_batch_size splits the rows. Remove micro_batch_size."
    )


def changes_in_parts(model: Any, path: str | None) -> UnsupportedModel:
    """Return the error for a variable that changes in the call, which each part runs.

    Args:
        model: The model.
        path: The path of the variable; `None` for a tensor that is none of the model's.
    """
    what = f"a variable or tensor outside of {model.name!r}" if path is None else repr(path)
    return UnsupportedModel(
        f"{what} changes in the call of a layer or loss. With micro_batch_size, this call runs "
        "once\nfor each micro-batch, so it would change several times. Change it in a callback "
        "or train_step,\nor remove micro_batch_size."
    )


def loss_keeps_state(name: str) -> UnsupportedModel:
    """Return the error for a row-wise loss that changes a variable, or draws with keras.random."""
    return UnsupportedModel(
        f"The loss {name!r} is declared row-wise, but changes a variable or draws random "
        "numbers.\nIt is called once for each micro-batch, and again in the backward pass.\n"
        "Remove lockstep.rowwise from it, or remove micro_batch_size."
    )


def check_rows(model: Any) -> None:
    """Raise if a model cannot have parts of its rows, whatever its code is."""
    for layer in stateful_layers(model):
        raise is_stateful(layer)
    shapes = getattr(model, "inputs", None) or ()
    if isinstance(model, keras.Sequential):  # a batch may have built it, with its number of rows
        return
    fixed = {each.shape[0] for each in keras.tree.flatten(shapes) if each.shape} - {None}
    for rows in fixed:
        raise has_fixed_rows(model, rows)


def is_stateful(layer: Any) -> UnsupportedModel:
    """Return the error for an RNN that keeps a state for each row."""
    return UnsupportedModel(
        f"{layer.name!r} is stateful: it keeps one state per row of a batch of fixed size,\n"
        "but micro_batch_size splits the rows. Make it stateless, or remove micro_batch_size."
    )


def has_fixed_rows(model: Any, rows: int) -> UnsupportedModel:
    """Return the error for a model that is built for one number of rows."""
    return UnsupportedModel(
        f"{model.name!r} is built for batches of {rows} rows, but micro_batch_size splits "
        "them.\nPass shape instead of batch_shape to Input, or remove micro_batch_size."
    )


def fails_with_fewer_rows(model: Any, rows: int, error: BaseException) -> UnsupportedModel:
    """Return the error for a model that runs with all rows, and not with those of a part."""
    said = (str(error).strip().splitlines() or [""])[0][:160]
    return UnsupportedModel(
        f"{model.name!r} works with a whole batch, but fails with the {rows} rows of a "
        f"micro-batch:\n{type(error).__name__}: {said}\nDo not hard-code the number of rows in "
        "a layer, or remove micro_batch_size."
    )


def cannot_draw(model: Any, why: str) -> UnsupportedModel:
    """Return the error for random numbers that a part of the rows cannot draw by itself."""
    return UnsupportedModel(
        f"{model.name!r}: {why},\nso a micro-batch cannot draw the random numbers of its rows.\n"
        "Draw with keras.random.normal, uniform or dropout, or remove micro_batch_size."
    )


def has_no_rows(model: Any, shape: tuple[int, ...], rows: int) -> UnsupportedModel:
    """Return the error for an output whose rows are not those of the batch."""
    return UnsupportedModel(
        f"{model.name!r} has an output of shape {shape} for {rows} rows: its first dim is not "
        "the rows.\nMake the rows the first dim of each output, or remove micro_batch_size."
    )


def rows_differ(model: Any, size: int, what: str, distance: float) -> UnsupportedModel:
    """Return the error for rows that give other results in parts than at once."""
    return UnsupportedModel(
        f"{model.name!r} gives different {what} if the first rows run in two parts "
        f"({distance:.1e} apart), so micro_batch_size={size} would not be exact.\nRemove "
        "micro_batch_size, and report this model: its operations seemed to work row by row."
    )


def training_batch_norm(model: Any, path: str) -> Any:
    """Return the batch norm in `path` that trains, `None` if there is none.

    Args:
        model: The model.
        path: The names of layers, from the outer ones to the inner ones, and "/" between them.
    """
    from lockstep.keras_compat import layers_in

    norms = [each for each in layers_in(model) if isinstance(each, keras.layers.BatchNormalization)]
    named = [each for each in norms if each.name in path.split("/")]
    return next((each for each in named if each.trainable), None)


def layer_in_words(model: Any, path: str) -> str:
    """Return the innermost layer of a path, in quotes and with its class; else the model."""
    from lockstep.keras_compat import layers_in

    by_name = {each.name: each for each in layers_in(model)}
    for name in reversed(path.split("/")):
        if name in by_name and name:
            return in_words(by_name[name])
    return repr(model.name)


def in_words(layer: Any) -> str:
    """Return the name of a layer or operation, in quotes and with its class."""
    return f"{layer.name!r} ({type(layer).__name__})"
