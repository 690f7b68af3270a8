"""Everything a step needs is made before the step is traced."""

from typing import Any

import keras

from lockstep.errors import UnsupportedModel


def build(model: Any, step: str, batch: Any) -> None:
    """Build what `step` of `model` needs and is not built yet.

    Keras on one device builds while it traces the first step; what replicas made
    there, each would make for itself.

    Args:
        model: The model.
        step: `"train"`, `"test"` or `"predict"`.
        batch: A batch, or the specification of one.

    Raises:
        UnsupportedModel: If Keras cannot build it from shapes.
    """
    if _is_built(model, step):
        return
    batch = keras.tree.map_structure(_symbol, batch)
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    try:
        if step == "predict":
            keras.src.backend.compute_output_spec(model, x, training=False)
            return
        attributes, optimizer = vars(model), model.optimizer
        attributes["optimizer"] = None  # evaluating builds none
        try:
            # keras/src/trainers/trainer.py, Trainer._symbolic_build
            model._symbolic_build(data_batch=batch)
        finally:
            attributes["optimizer"] = optimizer
    except RuntimeError as error:
        raise UnsupportedModel(
            f"{model.name!r} is not built, and Keras cannot build it from the shapes of a batch.\n"
            "Call the model on one batch, model(x), and distribute it then."
        ) from error
    if step == "train" and optimizer is not None and not optimizer.built:
        # The names that its variables get in keras/src/optimizers/base_optimizer.py,
        # BaseOptimizer.apply, where one device builds it.
        with keras.src.backend.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(model.trainable_variables)


def _is_built(model: Any, step: str) -> bool:
    if not all(layer.built for layer in model._flatten_layers()):
        return False
    if step == "predict":
        return True
    parts = [model._compile_metrics, model._compile_loss]
    parts += [model.optimizer] if step == "train" else []
    return all(part is None or part.built for part in parts)


def _symbol(leaf: Any) -> Any:
    if leaf is None or not hasattr(leaf, "dtype"):
        return leaf
    return keras.KerasTensor(tuple(leaf.shape), keras.backend.standardize_dtype(leaf.dtype))
