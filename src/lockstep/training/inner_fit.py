"""Keras's `fit`, called from the `fit` of a subclass or from a tool's wrapper.

A class may override `fit` and call `super().fit`. A tool such as MLflow's autologging replaces
`fit` of the class by a function that calls the original. Both end in Keras's `fit`, whose loop
gives a checkpoint too little information. If the callbacks have a checkpoint, lockstep's loop runs
instead. It behaves like Keras's loop for the code around it.
"""

import functools
from collections.abc import Callable
from types import CellType
from typing import Any

from lockstep.checkpoint.callback import checkpoint_among, fit_scope
from lockstep.core.fit_lines import arguments_of
from lockstep.keras_compat import trainer_class

_DONE = "_lockstep_inner_fit"


def lead_to_loop(loop_of: Callable[[Any], Any]) -> None:
    """Make Keras's `fit` of an attached model run lockstep's loop if a checkpoint is given.

    A tool keeps the function that was `keras.Model.fit` when the tool was enabled, so replacing the
    class attribute would not reach it. The function therefore stays, and the function that it wraps
    is replaced. If this version of Keras has another structure, nothing is replaced, and
    `lockstep.Checkpoint` raises when its training begins.

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
        given = arguments_of(trainer_class().fit, (self, *args), kwargs)
        if loop is None or checkpoint_among(given.get("callbacks")) is None:
            return keras_fit(self, *args, **kwargs)
        with fit_scope(given.get("callbacks")):
            return loop.fit(*args, **kwargs)

    setattr(fit, _DONE, True)
    cell.cell_contents = fit


def _wrapped() -> CellType | None:
    """Return the closure cell in which Keras's `fit` keeps its undecorated function."""
    # keras/src/utils/traceback_utils.py, filter_traceback: the wrapper calls its variable `fn`
    fit = trainer_class().fit
    names = getattr(getattr(fit, "__code__", None), "co_freevars", ())
    return dict(zip(names, fit.__closure__ or (), strict=True)).get("fn")
