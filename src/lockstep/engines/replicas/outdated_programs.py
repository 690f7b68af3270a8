"""Steps of other models that were traced before a variable moved.

A program of TensorFlow keeps the `tf.Variable` that a Keras variable had when it was traced. If a
layer belongs to two models, or a loss reads another model, and one of them is laid out on devices,
the steps of the other one would go on with the old value.
"""

import gc
from typing import Any

import keras

from lockstep.attach.attachment import attachment_of, remake_functions
from lockstep.training.overrides import MAKERS


def trace_others_again(model: Any, moved: list[Any]) -> None:
    """Let every other model that has one of these variables trace its steps anew.

    Args:
        model: The model whose layout moved them.
        moved: Keras variables.
    """
    found = {id(variable) for variable in moved}
    # A variable does not know the models that have it.
    for other in _all_models() if moved else ():
        if other is model or not _has_steps(other):
            continue
        attachment = attachment_of(other)
        # What the steps of a model without an attachment read beside its own is not known.
        session: Any = None if attachment is None else attachment.session
        reads = session is None or session.uses_outdated()
        if reads or any(id(variable) in found for variable in other.variables):
            remake_functions(other)


def _all_models() -> list[Any]:
    """Return every Keras model of this process."""
    kinds = [keras.Model]
    for kind in kinds:  # the list grows by subclasses of subclasses
        kinds += kind.__subclasses__()
    # An instance refers to its class. This search in C visits each object once.
    return [each for each in gc.get_referrers(*kinds) if type(each) in kinds]


def _has_steps(model: Any) -> bool:
    names = [maker.removeprefix("make_") for maker in MAKERS]
    return any(vars(model).get(name) is not None for name in names)
