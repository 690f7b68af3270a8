"""A training that is cut and goes on, and one that is not cut."""

import contextlib

import keras
import numpy as np
from keras import layers

import lockstep

EPOCHS = 3
STEPS = 7


def small(rate=0.05):
    """A compiled model that draws random numbers and compiles fast."""
    made = keras.Sequential([keras.Input((4,)), layers.Dropout(0.3), layers.Dense(2)])
    made.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse", metrics=["mae"])
    made.optimizer.build(made.trainable_variables)
    return made


class Cut(BaseException):
    """Where a run was cut."""


class CutAfter(keras.callbacks.Callback):
    """Cuts a run after so many batches; it has no state of its own."""

    def __init__(self, batches):
        super().__init__()
        self.left = batches

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise Cut

    def get_state(self):
        return None

    def set_state(self, state):
        assert state is None


def train(source, folder=None, cut=0, devices=1, make=None, callbacks=(), **options):
    """Train as a script would that is started anew: everything is made afresh and seeded.

    Returns:
        The history, and every variable of the model and its optimizer.
    """
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)
    made = (make or small)()
    lockstep.distribute(made, devices)
    keras.utils.set_random_seed(9)
    more = [CutAfter(cut), *(callback() for callback in callbacks)]
    saving = options.pop("checkpoint", {"steps": 1})
    if folder is not None:
        more.append(lockstep.Checkpoint(folder, **saving))
    given = {"epochs": EPOCHS, "shuffle": False, **source(), "verbose": 0, **options}
    history = None
    with contextlib.suppress(Cut):
        history = made.fit(**given, callbacks=more).history
    assert (history is None) == bool(cut)
    return history, variables(made)


def variables(made):
    named = [(v.path, v) for v in [*made.variables, *made.optimizer.variables]]
    return {path: np.array(keras.ops.convert_to_numpy(v.value)) for path, v in named}


def assert_same_end(mine, theirs, atol=0.0):
    """The same history and the same variables; bit for bit where `atol` is zero."""
    (my_history, my_variables), (their_history, their_variables) = mine, theirs
    assert my_history.keys() == their_history.keys()
    for name, values in their_history.items():
        np.testing.assert_allclose(my_history[name], values, rtol=0, atol=atol)
    assert my_variables.keys() == their_variables.keys()
    for path, value in their_variables.items():
        np.testing.assert_allclose(my_variables[path], value, rtol=0, atol=atol)
