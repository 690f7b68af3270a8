"""The variables of a training step, each under a name of its own."""

from typing import Any

GROUPS = ("trainable", "non_trainable", "optimizer", "metrics")


def named_variables(model: Any) -> list[tuple[str, Any]]:
    """Every variable of a training step, in its order, under a name of its own.

    The name is the group, one of `GROUPS`, and the path that Keras gives the variable.
    """
    optimizer = model.optimizer.variables if model.optimizer is not None else []
    groups = (model.trainable_variables, model.non_trainable_variables, optimizer)
    named: dict[str, Any] = {}
    for group, variables in zip(GROUPS, (*groups, model.metrics_variables), strict=True):
        for variable in variables:
            name = f"{group}/{variable.path}"
            while name in named:  # paths are not always unique
                name += "'"
            named[name] = variable
    return list(named.items())
