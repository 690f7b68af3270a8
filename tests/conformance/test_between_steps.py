"""Between two steps, callbacks and data act on the model as under Keras."""

import keras
import numpy as np
import pytest

import lockstep
from tests.conformance import common
from tests.conformance.common import assert_same, weights
from tests.conformance.side_by_side import BATCH, both, smooth, train


def rows(batches):
    x, y = common.data(batches * BATCH)
    return [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, batches * BATCH, BATCH)]


class Notes(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.batches = []

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.on_train_batch_end = lambda batch, logs=None: self.batches.append(batch)


def test_a_hook_that_comes_between_two_epochs_is_called_for_every_batch(tmp_path):
    def script(made, folder):
        notes = Notes()
        train(made, [notes], validation_data=None)
        return notes.batches

    one, many = both(script, tmp_path, devices=1)
    assert many.returned == sorted(one.returned) == list(range(7))  # Keras's come from a thread


class Every(keras.callbacks.CallbackList):
    """Keeps the numbers of batches."""

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        self.batches = [*getattr(self, "batches", []), batch]


@pytest.mark.parametrize("kind", ["list", "list's instance", "checkpoint", "bar"])
def test_hooks_of_an_instance_or_of_a_list_are_called_for_every_batch(kind, tmp_path):
    def script(made, folder):
        batches = []
        callbacks = hooked = Every([], add_history=True, model=made)
        if kind == "list":
            batches = None
        elif kind == "list's instance":
            callbacks = hooked = keras.callbacks.CallbackList([], add_history=True, model=made)
        else:
            checkpoint = keras.callbacks.ModelCheckpoint(folder / "kept.keras")
            hooked = checkpoint if kind == "checkpoint" else keras.callbacks.ProgbarLogger()
            hooked.verbose = 0
            callbacks = [hooked]
        if batches is not None:
            hooked.on_train_batch_end = lambda batch, logs=None: batches.append(batch)
        x, y = common.data(7 * BATCH)
        made.fit(x, y, batch_size=BATCH, callbacks=callbacks, verbose=0, shuffle=False)
        return callbacks.batches if batches is None else batches

    one, many = both(script, tmp_path, devices=1)
    assert many.returned == sorted(one.returned) == list(range(7))  # Keras's come from a thread


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize("devices", [1, 3])
def test_data_that_ask_for_the_model_get_that_of_the_step_before(devices):
    """Keras alone loses the weights there; a callback may ask."""
    asked = []

    class Asks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            asked.append(weights(self.model))

    smooth().fit((batch for batch in rows(7)), verbose=0, shuffle=False, callbacks=[Asks()])
    made, found = lockstep.distribute(smooth(), devices), []

    def batches():
        for batch in rows(7):
            made.jax_state_sync()
            found.append(weights(made))
            yield batch

    made.fit(batches(), verbose=0, shuffle=False)
    assert len(found) == len(asked) == 7  # two were drawn to look at them
    assert_same([*found[2:], weights(made)], asked[1:], atol=0 if devices == 1 else 1e-6)


@pytest.mark.each_value_once
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_data_that_stop_it_end_it_after_the_same_step(call, devices, tmp_path):
    def script(made, folder):
        stop = {"fit": "training", "evaluate": "evaluating", "predict": "predicting"}[call]
        drawn = []

        def batches():
            for batch in rows(9):
                drawn.append(1)
                if len(drawn) == 5:
                    setattr(made, f"stop_{stop}", True)
                yield (batch[0],) if call == "predict" else batch

        options = {"shuffle": False} if call == "fit" else {}
        found = getattr(made, call)(batches(), verbose=0, **options)
        found = found.history if call == "fit" else found
        return len(drawn), int(made.optimizer.iterations), found

    one, many = both(script, tmp_path, devices)
    assert many.returned[:2] == one.returned[:2]
    assert many.returned[0] == 5
    assert_same(many.returned[2], one.returned[2])


def longer_than_it_says():
    from torch.utils.data import DataLoader, IterableDataset

    class Longer(IterableDataset):
        def __len__(self):
            return 7

        def __iter__(self):
            return iter(rows(9))

    return DataLoader(Longer(), batch_size=None)


@pytest.mark.each_value_once
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.filterwarnings("ignore:Length of IterableDataset:UserWarning")
@pytest.mark.parametrize(
    "source", ["arrays", "generator", "dataset", "endless dataset", "longer than it says"]
)
@pytest.mark.parametrize("steps", [None, 3, 12])
def test_epochs_that_share_a_pass_or_find_it_too_short(source, steps, tmp_path):
    import tensorflow as tf

    if source == "endless dataset" and steps is None:
        steps = 7

    def script(made, folder):
        x, y = common.data(7 * BATCH)
        data, options = (x, y), {"batch_size": BATCH}
        if source == "generator":
            data, options = ((batch for batch in rows(7) * 2),), {}
        elif "dataset" in source:
            data, options = (tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH),), {}
        if source == "endless dataset":
            data = (data[0].repeat(),)
        elif source == "longer than it says":
            data, options = (longer_than_it_says(),), {}
        history = made.fit(
            *data, **options, steps_per_epoch=steps, epochs=4, verbose=0, shuffle=False
        )
        return int(made.optimizer.iterations), history.epoch, history.history

    one, many = both(script, tmp_path, devices=1)
    assert many.returned[:2] == one.returned[:2]
    assert_same(many.returned[2], one.returned[2], atol=0)
    assert_same(weights(many.model), weights(one.model), atol=0)


class Starts(keras.callbacks.Callback):
    """Goes on with training after an epoch that the data have ended."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def on_epoch_end(self, epoch, logs=None):
        self.steps.append(int(self.model.optimizer.iterations))
        self.model.stop_training = False


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_an_epoch_that_the_data_have_ended_counts_its_steps(tmp_path):
    from torch.utils.data import DataLoader, Dataset

    def script(made, folder):
        class Stopping(Dataset):
            drawn = 0

            def __len__(self):
                return 9

            def __getitem__(self, index):
                self.drawn += 1
                made.stop_training = self.drawn == 5
                return rows(9)[index]

        starts = Starts()
        data = DataLoader(Stopping(), batch_size=None)
        history = made.fit(
            data, steps_per_epoch=5, epochs=4, verbose=0, shuffle=False, callbacks=[starts]
        )
        return starts.steps, history.history

    one, many = both(script, tmp_path, devices=1)
    assert many.returned[0] == one.returned[0]
    assert len(set(many.returned[0])) == 4
    assert_same(many.returned[1], one.returned[1], atol=0)


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_data_that_stop_it_at_their_end_begin_anew_in_the_next_epoch():
    from torch.utils.data import DataLoader, IterableDataset

    def steps(made):
        class Stopping(IterableDataset):
            def __iter__(self):
                yield from rows(50)
                made.stop_training = True

        starts = Starts()
        data = DataLoader(Stopping(), batch_size=None)
        made.fit(data, steps_per_epoch=80, epochs=4, verbose=0, shuffle=False, callbacks=[starts])
        return starts.steps

    expected = steps(smooth())
    made = lockstep.distribute(smooth(), 1)
    assert steps(made) == expected == [50, 100, 150, 200]


# ------------------------------------------------------------------ arrays of the user's


class Wide(keras.Model):
    """Takes its time, and answers what it has learned of the rows in variables alone."""

    def __init__(self, tracked):
        super().__init__()
        self.tracked = tracked
        self.wide = [keras.layers.Dense(1024, activation="tanh") for _ in range(3)]
        self.out = keras.layers.Dense(2)
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs):
        for layer in self.wide:
            inputs = layer(inputs)
        self.seen.assign_add(keras.ops.sum(keras.ops.abs(inputs)))
        return self.out(inputs)

    @property
    def metrics(self):
        return super().metrics if self.tracked else []

    def get_metrics_result(self):
        return {"nothing": 0.0}


@pytest.mark.parametrize("tracked", [True, False], ids=["with a metric", "without one"])
def test_rows_that_are_written_to_after_an_evaluation_were_read_before(tracked):
    x = np.random.default_rng(1).normal(size=(8 * 512, 1024)).astype("float32")
    y = np.zeros((len(x), 2), "float32")

    def run(made, written):
        given = x.copy()
        made.seen.assign(0.0)
        made.evaluate(given, y, batch_size=512, verbose=0)
        given[:] = written
        return [np.asarray(made._loss_tracker.total), np.asarray(made.seen)]

    def build():
        keras.utils.set_random_seed(3)
        made = Wide(tracked)
        made.compile("sgd", "mse")
        return made

    expected = run(build(), x)
    made = lockstep.distribute(build(), 1)
    for _ in range(3):
        found = run(made, 100.0)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


class Writes(keras.callbacks.Callback):
    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def on_predict_end(self, logs=None):
        self.rows[:] = 100.0


def test_rows_that_a_callback_writes_to_after_the_last_prediction_were_read_before():
    keras.utils.set_random_seed(3)
    made = Wide(tracked=True)
    made.compile("sgd", "mse")
    x = np.random.default_rng(1).normal(size=(8 * 512, 1024)).astype("float32")
    expected = made.predict(x, batch_size=512, verbose=0)
    lockstep.distribute(made, 1)
    for _ in range(3):
        given = x.copy()
        found = made.predict(given, batch_size=512, verbose=0, callbacks=[Writes(given)])
        assert_same(found, expected)
