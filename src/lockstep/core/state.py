"""The one list of a model's variables, and their values as arrays on the host."""

import math
from typing import Any

import numpy as np

GROUPS = ("trainable", "non_trainable", "optimizer", "metrics")
"""The groups of variables in the state of a training step, in their order."""

Values = dict[str, np.ndarray]
"""Arrays by the name of their variable."""


def variables_of(model: Any) -> list[Any]:
    """Return every variable that a step of `model` reads or writes, each once.

    These are weights, random seeds, metrics, optimizer slots, and the states of stateful RNNs.

    Args:
        model: A Keras model, compiled or not.

    Returns:
        `keras.Variable` objects, in the order of Keras's groups.

    Example:
        >>> [variable.path for variable in variables_of(keras.Sequential([keras.Input((1,))]))]
        []
    """
    return unique([variable for group in _groups(model).values() for variable in group])


def named_variables(model: Any) -> dict[str, Any]:
    """Return the variables of `model`, each under a name of its own.

    The name is the group, one of `GROUPS`, and the path that Keras gives the variable. Paths
    need not be unique in Keras: a second variable of the same name gets an apostrophe.
    """
    named: dict[str, Any] = {}
    for group, variables in _groups(model).items():
        for variable in variables:
            _add(named, f"{group}/{variable.path}", variable)
    return named


def metric_variables(model: Any) -> list[Any]:
    """Return the variables of the metrics that the `metrics` property of a model names.

    A class may override the property and name metrics that its `compile` makes. Before
    `compile` there are none: reading the property then fails, and the result is empty.
    """
    try:
        return list(model.metrics_variables)
    except Exception:  # the property is the user's code, and may raise anything
        if getattr(model, "compiled", False):
            raise
        return []


def rnn_states(model: Any) -> list[Any]:
    """Return the state variables of the stateful RNN layers of `model`.

    Keras counts them among the variables of no layer.
    """
    import keras

    layers = stateful_layers(model)
    return [state for layer in layers for state in keras.tree.flatten(layer.states)]


def stateful_layers(model: Any) -> list[Any]:
    """Return the RNN layers of `model` that keep their state and are built."""
    import keras

    from lockstep.keras_compat import layers_in

    return [
        layer
        for layer in layers_in(model)
        if isinstance(layer, keras.layers.RNN) and layer.stateful and layer.states is not None
    ]


def snapshot(model: Any) -> Values:
    """Return the weights, seeds, RNN states and optimizer slots of `model`, on the host.

    Metrics are left out. Names are those of `Difference`: the path, with `optimizer/` before
    the path of a slot.
    """
    return {name: to_host(variable.value) for name, variable in _without_metrics(model).items()}


def restore(model: Any, values: Values) -> None:
    """Assign what `snapshot` returned.

    The slots of an optimizer that was built since then get the values that building gives them.
    """
    from lockstep.keras_compat import own_trainable_variables

    named = _without_metrics(model)
    names = {id(variable): name for name, variable in named.items()}
    for name, variable in named.items():
        if name in values:
            variable.assign(values[name])
    for _, optimizer in optimizers_of(model):
        if any(names[id(slot)] not in values for slot in optimizer.variables):
            fresh = type(optimizer).from_config(optimizer.get_config())
            # keras/src/optimizers/base_optimizer.py, BaseOptimizer.build
            fresh.build(own_trainable_variables(optimizer))
            for slot, first in zip(optimizer.variables, fresh.variables, strict=True):
                if names[id(slot)] not in values:
                    slot.assign(to_host(first.value))


def to_host(value: Any) -> np.ndarray:
    """Copy an array of any backend to the host, as floats, integers or booleans of NumPy.

    A type that NumPy has no name for, such as bfloat16, becomes float32, which holds it exactly.
    """
    import keras

    array = np.array(keras.ops.convert_to_numpy(value))
    return array if array.dtype.kind in "fiub" else array.astype("float32")


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest absolute difference; NaN equals NaN, and infinity equals infinity.

    It is infinite where shapes differ, or where integers or booleans are not equal.
    """
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape:
        return float("inf")
    if a.dtype.kind in "iub":
        return 0.0 if np.array_equal(a, b) else float("inf")
    a, b = a.astype("float64"), b.astype("float64")
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return float(np.max(np.where(same, 0.0, np.abs(a - b)), initial=0.0))


def bytes_of(variable: Any) -> int:
    """Return the bytes of the value of a variable."""
    return int(math.prod(variable.shape) * item_bytes(variable.dtype))


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element of a type."""
    if dtype.startswith("float8"):
        return 1
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def unique(items: list[Any]) -> list[Any]:
    """Return variables or layers without repetitions, in their order."""
    return list({id(item): item for item in items}.values())


def _groups(model: Any) -> dict[str, list[Any]]:
    optimizer = getattr(model, "optimizer", None)
    states = rnn_states(model)  # last, as not every engine has them among the variables
    known = {id(state) for state in states}
    others = [each for each in model.non_trainable_variables if id(each) not in known] + states
    slots = list(optimizer.variables) if optimizer is not None else []
    groups = (list(model.trainable_variables), others, slots, metric_variables(model))
    return dict(zip(GROUPS, groups, strict=True))


def _without_metrics(model: Any) -> dict[str, Any]:
    groups = _groups(model)
    named: dict[str, Any] = {}
    for variable in unique([*model.variables, *groups["non_trainable"]]):
        _add(named, variable.path, variable)
    for name, optimizer in optimizers_of(model):
        for variable in optimizer.variables:
            _add(named, f"{name}/{variable.path}", variable)
    return named


def optimizers_of(model: Any) -> list[tuple[str, Any]]:
    """Return the optimizer of a model, and others that are its attributes, as a GAN has them."""
    import keras

    kind = keras.optimizers.Optimizer
    own = getattr(model, "optimizer", None)
    others = [(name, value) for name, value in vars(model).items() if isinstance(value, kind)]
    found = [*others] if own is None else [("optimizer", own), *others]
    return list({id(each): (name, each) for name, each in reversed(found)}.values())[::-1]


def renew_normalization(model: Any) -> None:
    """Recompute the values that layers derive from their variables.

    `Normalization` computes with copies, which are constants in a traced program.
    """
    import keras

    from lockstep.keras_compat import layers_in

    # keras/src/layers/preprocessing/normalization.py, Normalization.finalize_state
    renewed = False
    for layer in layers_in(model):
        known = isinstance(layer, keras.layers.Normalization) and layer.built
        if known and layer.input_mean is None:
            before = [np.asarray(value) for value in (layer.mean, layer.variance)]
            layer.finalize_state()
            after = [np.asarray(value) for value in (layer.mean, layer.variance)]
            renewed |= not all(map(np.array_equal, before, after))
    if renewed:
        model.make_train_function(force=True)
        if model.test_function is not None:
            model.make_test_function(force=True)
        if model.predict_function is not None:
            model.make_predict_function(force=True)


def _add(named: dict[str, Any], name: str, variable: Any) -> None:
    while name in named:
        name += "'"
    named[name] = variable
