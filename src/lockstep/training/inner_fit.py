"""Keras's `fit`, called from the `fit` of a subclass or from a tool's wrapper.

A class may override `fit` and call `super().fit`. A tool such as MLflow's autologging replaces
`fit` of the class by a function that calls the original. Both end in Keras's `fit`, whose loop
gives a checkpoint or a profile too little information, and does not know `process_local`. Where one
of them is given, lockstep's loop runs instead. It behaves like Keras's loop for the code around it.
"""

import functools
from collections.abc import Callable
from types import CellType
from typing import Any

from lockstep.checkpoint.callback import checkpoint_among
from lockstep.core.fit_arguments import arguments_of
from lockstep.core.process_local import ProcessLocal
from lockstep.keras_compat import trainer_class
from lockstep.training.profile import observed_fit, profile_among

_DONE = "_lockstep_inner_fit"


def lead_to_loop(loop_of: Callable[[Any], Any]) -> None:
    """Make Keras's `fit` of an attached model run lockstep's loop for a checkpoint or a profile.

    A tool keeps the function that was `keras.Model.fit` when the tool was enabled, so replacing the
    class attribute would not reach it. The function therefore stays, and the function that it wraps
    is replaced. If this version of Keras has another structure, nothing is replaced, and
    `lockstep.Checkpoint` and `lockstep.Profile` raise when training begins.

    Args:
        loop_of: Returns the loop of a model, `None` if it is not attached.
    """
    cell = _wrapped()
    if cell is None or hasattr(cell.cell_contents, _DONE):
        return
    keras_fit = cell.cell_contents

    @functools.wraps(keras_fit)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        loop = loop_of(self)
        arguments = arguments_of(trainer_class().fit, (self, *args), kwargs)
        given = arguments.get("callbacks")
        observed = checkpoint_among(given) is not None or profile_among(given) is not None
        of_process = (arguments.get("x"), arguments.get("validation_data"))
        observed |= any(isinstance(each, ProcessLocal) for each in of_process)
        if loop is None or not observed:
            return keras_fit(self, *args, **kwargs)
        with observed_fit(given):
            return loop.fit(*args, **kwargs)

    setattr(fit, _DONE, True)
    cell.cell_contents = fit


def _wrapped() -> CellType | None:
    """Return the closure cell in which Keras's `fit` keeps its undecorated function."""
    # keras/src/utils/traceback_utils.py, filter_traceback: the wrapper calls its variable `fn`
    fit = trainer_class().fit
    names = getattr(getattr(fit, "__code__", None), "co_freevars", ())
    return dict(zip(names, fit.__closure__ or (), strict=True)).get("fn")
