"""A user's own callback may read and write the model in every hook, as on one device."""

import keras
import numpy as np
import pytest

from tests.conformance.common import assert_same, devices_of, weights
from tests.conformance.side_by_side import (
    BATCH,
    ROWS,
    assert_same_runs,
    both,
    held_out,
    train,
)

HOOKS = [
    "on_train_begin",
    "on_epoch_begin",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_test_begin",
    "on_test_batch_begin",
    "on_test_batch_end",
    "on_test_end",
    "on_epoch_end",
    "on_train_end",
    "on_predict_begin",
    "on_predict_batch_begin",
    "on_predict_batch_end",
    "on_predict_end",
]


class InEveryHook(keras.callbacks.Callback):
    """Calls `act(model, number)` in every hook, and keeps what it gives."""

    def __init__(self, act):
        super().__init__()
        self.act = act
        self.kept = []

    def _hook(self, name, logs):
        self.kept.append((name, self.act(self.model, len(self.kept)), _numbers(logs)))


def _make(name):
    with_number = "batch" in name or "epoch" in name
    if with_number:
        return lambda self, number, logs=None: self._hook(f"{name} {number}", logs)
    return lambda self, logs=None: self._hook(name, logs)


for _name in HOOKS:
    setattr(InEveryHook, _name, _make(_name))


def _numbers(logs):
    return {name: np.asarray(value) for name, value in (logs or {}).items()}


def everything(made):
    """Every number of the model that a callback can reach; of sums over rows, what one row adds."""
    optimizer = [np.asarray(variable.value) for variable in made.optimizer.variables]
    metrics = [np.asarray(variable.value) / ROWS for variable in made.metrics_variables]
    return [*weights(made), *optimizer, *metrics, *made.get_weights()]


def run_in_every_hook(act, folder, devices=4):
    def script(made, folder):
        callback = InEveryHook(lambda model, number: act(model, number, folder))
        history = train(made, [callback])
        evaluated = made.evaluate(*held_out(), batch_size=BATCH, verbose=0, callbacks=[callback])
        predicted = made.predict(held_out()[0], batch_size=BATCH, verbose=0, callbacks=[callback])
        return {"kept": callback.kept, "after": (history, evaluated, predicted)}

    one, many = both(script, folder, devices)
    names = [name for name, _, _ in one.returned["kept"]]
    assert {name.split()[0] for name in names} == set(HOOKS)
    assert [name for name, _, _ in many.returned["kept"]] == names
    for (name, *theirs), (_, *mine) in zip(
        one.returned["kept"], many.returned["kept"], strict=True
    ):
        try:
            assert_same(mine, theirs)
        except AssertionError as error:
            raise AssertionError(f"in {name}: {error}") from None
    assert_same(many.returned["after"], one.returned["after"])
    assert_same(everything(many.model), everything(one.model))
    return many.model


@pytest.mark.parametrize("devices", [3, 4])
def test_reading_in_every_hook(devices, tmp_path):
    run_in_every_hook(lambda model, number, _: everything(model), tmp_path, devices)


def _assign(model, number, folder):
    for weight in model.trainable_weights:
        weight.assign(weight * (1 - 0.001 * (number % 7)))


def _set_weights(model, number, folder):
    model.set_weights([value * (1 - 0.001 * (number % 7)) for value in model.get_weights()])


def _optimizer(model, number, folder):
    model.optimizer.learning_rate = 0.02 / (1 + number % 5)
    for variable in model.optimizer.variables:
        if "momentum" in variable.path:
            variable.assign(variable * 0.9)


def _statistics_and_metrics(model, number, folder):
    for variable in [*model.non_trainable_weights, *model.metrics_variables]:
        variable.assign(variable * 0.9)


def _save_and_load(model, number, folder):
    path = folder / "kept.weights.h5"
    if number % 9 == 4:
        model.save_weights(path)
    if number % 9 == 7:
        model.load_weights(path)


def _share_an_array(model, number, folder):
    """Two variables with one array between them, on which Keras alone fails (3.15.1)."""
    mean, variance = model.layers[1].moving_mean, model.layers[1].moving_variance
    alone = max(devices_of(model)) == 1
    mean.assign(np.asarray(variance.value) if alone else variance.value)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "act",
    [
        _assign,
        _set_weights,
        _optimizer,
        _statistics_and_metrics,
        _save_and_load,
        _share_an_array,
    ],
    ids=lambda act: act.__name__.strip("_"),
)
def test_writing_in_every_hook(act, tmp_path):
    def write_and_read(model, number, folder):
        act(model, number, folder)
        return everything(model)

    made = run_in_every_hook(write_and_read, tmp_path)
    train(made, epochs=1)
    assert devices_of(made) == {4}


def test_calling_the_model_in_every_hook(tmp_path):
    x, _ = held_out()
    run_in_every_hook(lambda model, number, _: np.asarray(model(x[:5])), tmp_path)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_epoch_end", "on_train_end"])
def test_predicting_and_evaluating_within_fit(hook, tmp_path):
    """As people do who look at samples after each epoch."""
    x, y = held_out()

    class Look(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.seen = []
            setattr(self, hook, self._look)

        def _look(self, *_, **__):
            self.seen.append(self.model.predict(x, batch_size=5, verbose=0))
            if hook != "on_train_batch_end":
                # Within an epoch Keras would go on with the metrics of this call.
                self.seen.append(self.model.evaluate(x, y, batch_size=5, verbose=0))

    def script(made, folder):
        look = Look()
        return train(made, [look]), look.seen

    assert_same_runs(*both(script, tmp_path))


@pytest.mark.whole
def test_saving_in_every_hook(tmp_path):
    def save(model, number, folder):
        model.save(folder / f"{number:03d}.keras")
        loaded = keras.models.load_model(folder / f"{number:03d}.keras")
        return [*loaded.get_weights(), *(np.asarray(v.value) for v in loaded.optimizer.variables)]

    run_in_every_hook(save, tmp_path)


def test_stopping_in_a_batch(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 2

        def on_test_batch_end(self, batch, logs=None):
            self.model.stop_evaluating = True

        def on_predict_batch_end(self, batch, logs=None):
            self.model.stop_predicting = True

    def script(made, folder):
        history = train(made, [Stop()])
        evaluated = made.evaluate(*held_out(), batch_size=5, verbose=0, callbacks=[Stop()])
        predicted = made.predict(held_out()[0], batch_size=5, verbose=0, callbacks=[Stop()])
        assert predicted.shape == (5, 2)
        return history, evaluated, predicted

    assert_same_runs(*both(script, tmp_path, devices=3))


def test_a_callback_that_trains_on_a_batch_of_its_own(tmp_path):
    x, y = held_out()

    class Extra(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.train_on_batch(x, y)

    assert_same_runs(*both(lambda made, folder: train(made, [Extra()]), tmp_path))


def test_a_callback_that_raises_leaves_the_model_as_on_one_device(tmp_path):
    class Raises(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                raise KeyError("of the user's own")

    def script(made, folder):
        with pytest.raises(KeyError, match="of the user's own"):
            train(made, [Raises()])
        stopped = everything(made)
        return stopped, train(made, epochs=1)

    assert_same_runs(*both(script, tmp_path))
