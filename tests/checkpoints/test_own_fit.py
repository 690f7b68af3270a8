"""A checkpoint works where `fit` is the class's own, or a tool has wrapped that of the class."""

import functools

import keras
import pytest
from keras import layers

from tests.checkpoints.data import arrays
from tests.checkpoints.runs import EPOCHS, STEPS, assert_same_end, train


def compiled(cls):
    made = cls([keras.Input((4,)), layers.Dropout(0.3), layers.Dense(2)])
    made.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    made.optimizer.build(made.trainable_variables)
    return made


class OneMoreArgument(keras.Sequential):
    def fit(self, *args, greeting="hello", **kwargs):
        assert greeting == "good day"
        return super().fit(*args, **kwargs)


class Seen(keras.callbacks.Callback):
    """What a tool adds to the callbacks; it has no state of its own."""

    epochs = 0

    def on_epoch_end(self, epoch, logs=None):
        Seen.epochs += 1

    def get_state(self):
        return None

    def set_state(self, state):
        assert state is None


@pytest.fixture
def logged(monkeypatch):
    """As MLflow's autologging: the class gets another `fit`, which keeps the original."""
    original = keras.Model.fit
    results = []

    @functools.wraps(original)
    def fit_and_log(self, *args, callbacks=None, **kwargs):
        result = original(self, *args, callbacks=[*(callbacks or ()), Seen()], **kwargs)
        results.append(result)
        return result

    monkeypatch.setattr(keras.Model, "fit", fit_and_log)
    monkeypatch.setattr(Seen, "epochs", 0)
    return results


def cut_and_gone_on(folder, make, **options):
    cut = STEPS + 3  # within the second epoch
    train(arrays, folder, cut=cut, make=make, **options)
    return train(arrays, folder, make=make, **options)


def test_a_class_whose_fit_has_one_more_argument(tmp_path):
    """It was refused: "has a fit of its own, and lockstep.Checkpoint can see into ..."."""
    make = functools.partial(compiled, OneMoreArgument)
    whole = train(arrays, make=make, greeting="good day")
    again = cut_and_gone_on(tmp_path / "run", make, greeting="good day")
    assert_same_end(again, whole)


def test_a_fit_that_a_tool_has_wrapped(tmp_path, logged):
    """It was refused as a fit of the class's own, which it is not."""
    make = functools.partial(compiled, keras.Sequential)
    whole = train(arrays, make=make)
    assert (Seen.epochs, len(logged)) == (EPOCHS, 1)
    again = cut_and_gone_on(tmp_path / "run", make)
    assert_same_end(again, whole)
    # The epoch that the cut was in, and those after it; and the tool got the history.
    assert (Seen.epochs, len(logged)) == (2 * EPOCHS, 2)
