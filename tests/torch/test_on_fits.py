"""What a user does with a model: N devices leave what Keras alone leaves on one."""

import warnings

import keras
import numpy as np
import pytest
import torch
from keras import layers

import lockstep
from lockstep.engines.torch.same_model.code_state import SetCode, patches
from lockstep.engines.torch.same_model.model_pickle import dump, load
from tests.agreement import assert_equal, both, values

QUIET = {"verbose": 0, "shuffle": False}


def regression(rows=23, seed=4):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 4)), rng.normal(size=(rows, 2))


def network():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(6, activation="tanh", kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Dense(2, activity_regularizer="l1"),
        ],
        name="network",
    )
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return model


def test_a_model_that_is_not_built_is_built_by_its_first_batch():
    def unbuilt():
        model = keras.Sequential([layers.Dense(5, activation="relu"), layers.Dense(2)])
        model.compile("adam", "mse")
        return model

    one, many = both(unbuilt)
    x, y = regression()
    assert_equal(one.predict(x, batch_size=9, verbose=0), many.predict(x, batch_size=9, verbose=0))
    assert_equal(one.fit(x, y, **QUIET).history, many.fit(x, y, **QUIET).history)
    assert_equal(one, many)


class Changes(keras.callbacks.Callback):
    """Assigns values, and changes attributes, between batches and between epochs."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 1:
            self.model.layers[-1].bias.assign([1.0, -1.0])
        self.model.layers[0].kernel_regularizer.l2 = 0.01 * (batch + 1)

    def on_epoch_begin(self, epoch, logs=None):
        self.model.layers[0].trainable = epoch != 1
        self.model.layers[1].momentum = 0.9 - 0.1 * epoch
        self.model.optimizer.learning_rate = 0.05 / (epoch + 1)


def test_what_a_callback_changes_reaches_every_device():
    one, many = both(network)
    x, y = regression()
    logs = [
        m.fit(x, y, batch_size=5, epochs=3, callbacks=[Changes()], **QUIET) for m in (one, many)
    ]
    assert_equal(logs[0].history, logs[1].history)
    assert_equal(one, many)


def test_what_is_written_through_data_reaches_every_device():
    """PyTorch counts no such change."""
    one, many = both(network)
    x, y = regression()
    for model in (one, many):
        model.fit(x, y, **QUIET)
        model.layers[0].kernel.value.data.mul_(3)
        model.train_on_batch(x, y)
    assert_equal(one, many)


def test_a_weight_whose_data_is_assigned_between_two_steps():
    """By code of data, after which the versions of tensors are compared, and not their values."""
    one, many = both(network)

    def batches(model):
        while True:
            yield regression()
            kernel = model.layers[0].kernel.value
            kernel.data = kernel.data * 2

    for model in (one, many):
        model.fit(batches(model), steps_per_epoch=4, verbose=0, shuffle=False)
    assert_equal(one, many)


def test_every_callback_of_keras(tmp_path):
    """Each sees the model, and the files that callbacks write are those of one device."""
    pytest.importorskip("tensorboard")
    one, many = both(network)
    x, y = regression()
    histories = []
    for model, folder in ((one, tmp_path / "one"), (many, tmp_path / "many")):
        folder.mkdir()
        callbacks = [
            keras.callbacks.BackupAndRestore(folder / "backup"),
            keras.callbacks.CSVLogger(folder / "log.csv"),
            keras.callbacks.EarlyStopping(
                monitor="loss", patience=1, min_delta=10, restore_best_weights=True
            ),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
            keras.callbacks.ModelCheckpoint(folder / "epoch.keras", monitor="val_loss"),
            keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=10),
            keras.callbacks.SwapEMAWeights(),
            keras.callbacks.TerminateOnNaN(),
        ]
        model.compile(keras.optimizers.SGD(0.05, use_ema=True), "mse", metrics=["mae"])
        done = model.fit(
            x, y, epochs=4, validation_data=(x[:5], y[:5]), callbacks=callbacks, **QUIET
        )
        histories.append(done.history)
    assert_equal(*histories)
    assert len(histories[0]["loss"]) == 2  # stopped early
    assert_equal(one, many)
    rows = [np.genfromtxt(tmp_path / name / "log.csv", delimiter=",") for name in ("one", "many")]
    assert_equal(*rows)
    saved = [keras.models.load_model(tmp_path / name / "epoch.keras") for name in ("one", "many")]
    assert_equal(*saved)


class Rows(keras.utils.PyDataset):
    """Batches of seven rows."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        x, y = regression()
        return x[7 * index : 7 * index + 7], y[7 * index : 7 * index + 7]


def loader():
    data = torch.utils.data.TensorDataset(*map(torch.as_tensor, regression()))
    return torch.utils.data.DataLoader(data, batch_size=7)


def batches():
    dataset = Rows()
    return (dataset[index] for index in range(4))


# keras/src/trainers/epoch_iterator.py, of every source that does not tell its length
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize("source", [loader, Rows, batches])
def test_every_source_of_data_gives_what_arrays_give(source):
    one, many = both(network)
    x, y = regression()
    history = one.fit(x, y, batch_size=7, **QUIET).history
    assert_equal(many.fit(source(), verbose=0, shuffle=False).history, history)
    assert_equal(one, many)
    assert_equal(many.evaluate(source(), verbose=0), one.evaluate(x, y, batch_size=7, verbose=0))


def test_rows_are_shuffled_as_on_one_device():
    one, many = both(network)
    x, y = regression()
    for model in (one, many):
        keras.utils.set_random_seed(3)
        model.fit(x, y, batch_size=6, epochs=3, verbose=0)
    assert_equal(one, many)


def test_the_same_model_gives_the_same_bytes_and_a_changed_one_others():
    """The bytes are compared where code of the user's own runs between steps."""
    _, many = both(network)
    many.train_on_batch(*regression())
    before = dump(many).data
    many.train_on_batch(*regression())
    assert dump(many).data == before
    many.layers[0].kernel_regularizer.l2 = 0.5
    changed = dump(many).data
    assert changed != before
    copy, *_ = load(changed, SetCode())
    assert copy.layers[0].kernel_regularizer.l2 == 0.5
    assert vars(copy.layers[0].build).keys() == vars(many.layers[0].build).keys()


def test_an_overflow_in_the_rows_of_one_device_skips_the_step_on_all():
    """As on one device: no weight changes, and the scale of the loss is halved."""

    def scaled():
        model = network()
        inner = keras.optimizers.SGD(0.05, momentum=0.9)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, 1024.0, dynamic_growth_steps=2)
        model.compile(optimizer, "mse", metrics=["mae"])
        return model

    one, many = both(scaled)
    x, y = regression(24)
    y[-1] = np.inf  # a row of the last device, in the last of three steps
    for model in (one, many):
        model.fit(x, y, batch_size=8, **QUIET)
    assert_equal(one, many)
    assert float(many.optimizer.dynamic_scale) == 1024.0  # doubled after two steps, then halved
    assert all(np.all(np.isfinite(weight)) for weight in many.get_weights())


def test_a_model_of_many_layers_is_sent():
    """Pickling goes from layer to layer, and Python's stack would not do."""

    def deep():
        tensor = start = keras.Input((4,))
        for _ in range(120):
            tensor = layers.Activation("tanh")(tensor)
        model = keras.Model(start, layers.Dense(1)(tensor))
        model.compile("sgd", "mse")
        return model

    one, many = both(deep)
    x, y = regression(6)
    assert_equal(one.fit(x, y[:, :1], **QUIET).history, many.fit(x, y[:, :1], **QUIET).history)
    assert_equal(values(one), values(many))


class Noise(layers.Layer):
    """Noise of Keras's own seed generator; in `across`, from code that looks across the batch."""

    def __init__(self, across=False):
        super().__init__()
        self.across = across

    def call(self, x):
        if self.across:
            x = x - keras.ops.mean(x, axis=0)
        return x * 0 + keras.random.normal(keras.ops.shape(x))


def test_noise_without_a_seed_differs_by_row_whichever_device_runs_it():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((5,)), Noise()])
    lockstep.distribute(model, devices=3)
    noise = model.predict(np.zeros((9, 5)), batch_size=9, verbose=0)
    assert len(np.unique(noise)) == noise.size


@pytest.mark.filterwarnings("ignore:.*whole batch:lockstep.errors.UnsplitBatchWarning")
def test_noise_on_the_whole_batch_is_the_same_on_every_device():
    """Each device takes its rows of it, and they are the rows that one device draws."""

    def build():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((5,)), layers.Dense(5), Noise(across=True)])
        model.compile("sgd", "mse")
        return model

    one = build().predict(np.zeros((9, 5)), batch_size=9, verbose=0)
    model = build()
    lockstep.distribute(model, devices=3)
    np.testing.assert_array_equal(model.predict(np.zeros((9, 5)), batch_size=9, verbose=0), one)


def test_layers_that_prepare_images_are_sent():
    """They hold a module of Keras, and adapted numbers in two shapes of one memory."""
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(8, 4, 4, 3)), rng.normal(size=(8, 1))

    def prepared():
        adapted = layers.Normalization()
        adapted.adapt(x)
        model = keras.Sequential(
            [keras.Input((4, 4, 3)), adapted, layers.Rescaling(0.5), layers.CenterCrop(2, 2)]
        )
        model.add(layers.Flatten())
        model.add(layers.Dense(1))
        model.compile("sgd", "mse")
        return model

    one, many = both(prepared)
    assert_equal(one.fit(x, y, **QUIET).history, many.fit(x, y, **QUIET).history)
    assert_equal(values(one), values(many))
    copy, *_ = load(dump(many).data, SetCode())
    adapted = copy.layers[0]
    assert adapted.mean.data_ptr() == adapted.adapt_mean.value.data_ptr()


@pytest.mark.parametrize("seed", [None, 3])
def test_dropout_differs_by_replica_and_is_reproducible(seed):
    outputs = []

    def see(y_true, y_pred):
        outputs.append(keras.ops.convert_to_numpy(y_pred))
        return keras.ops.mean(y_pred)

    def noisy():
        model = keras.Sequential(
            [keras.Input((500,)), layers.Dropout(0.5, seed=seed), layers.PReLU()]
        )
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[see])
        return model

    x = np.ones((6, 500))
    for _ in range(2):
        both(noisy)[1].fit(x, x, batch_size=6, epochs=2, **QUIET)
    built, *first = outputs[:3]  # Keras calls a metric once to build it
    _, *second = outputs[3:]
    assert np.all(built == built[0])
    np.testing.assert_array_equal(first, second)
    shards = [output[row] for output in first for row in (0, 2, 4)]
    for number, shard in enumerate(shards):
        assert 150 < np.count_nonzero(shard) < 350
        for other in shards[:number]:
            assert np.count_nonzero(shard != other) > 150


def test_no_warning_and_no_words_where_nothing_is_to_be_said(capfd):
    _, many = both(network)
    x, y = regression()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        many.fit(x, y, **QUIET)
    assert capfd.readouterr().out == ""
    many.fit(x, y, batch_size=8, verbose=2)
    said = capfd.readouterr().out
    assert "lockstep: torch, 3 devices (cpu:0 to cpu:2, rehearsed)" in said
    assert "random numbers" not in said


def test_the_first_line_says_if_random_numbers_are_others_than_on_one_device(capfd):
    """The losses of a model with dropout were others, and only the pages said so."""
    made = keras.Sequential([keras.Input((5,)), layers.Dropout(0.5), layers.Dense(1)])
    made.compile("sgd", "mse")
    for devices, same, said in ((1, False, ""), (2, False, "each"), (2, True, "one")):
        lockstep.distribute(made, devices, same_random_numbers=same)
        made.fit(np.ones((4, 5)), np.ones((4, 1)), verbose=2)
        line = capfd.readouterr().out.splitlines()[0]
        assert (f", with random numbers of {said} device" in line) == bool(said)


class Shuffled(keras.utils.PyDataset):
    """Rows in another order after each epoch."""

    def __init__(self):
        super().__init__()
        self.order, self.ends = np.arange(8), 0

    def __len__(self):
        return 2

    def __getitem__(self, number):
        return np.arange(32.0).reshape(8, 4)[self.order[4 * number : 4 * number + 4]]

    def on_epoch_end(self):
        self.ends += 1
        self.order = np.random.default_rng(self.ends).permutation(8)


@pytest.mark.parametrize("devices", [1, 3])
def test_predict_draws_data_that_count_epochs_as_keras_does(devices):
    one, many = both(network, devices)
    data = Shuffled(), Shuffled()
    assert_equal(one.predict(data[0], verbose=0), many.predict(data[1], verbose=0))
    assert data[0].ends == data[1].ends == 1


@pytest.mark.parametrize(
    ("owner", "name", "place"),
    [
        (keras.activations, "relu", ("keras.activations", "")),
        (keras.layers.ReLU, "call", ("keras.src.layers.activations.relu", "ReLU")),
        (keras.layers.ReLU, "another", ("keras.src.layers.activations.relu", "ReLU")),
    ],
)
def test_a_function_that_is_put_into_keras_is_found_at_each_look(monkeypatch, owner, name, place):
    def mine(x):
        return x

    for _ in range(2):
        assert patches(set()) == ({}, False)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, mine, raising=False)
            for _ in range(2):
                found, is_patched = patches(set())
                assert is_patched
                assert found[place] == {name: mine}
