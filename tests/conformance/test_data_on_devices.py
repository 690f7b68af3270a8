"""Data that stay on the devices: the numbers, the order and the row counts of stock Keras."""

import warnings

import jax
import keras
import numpy as np
import pytest
from keras import layers
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

import lockstep
from lockstep.engines.attachments import attachment_of
from lockstep.engines.jax import session
from lockstep.engines.jax.on_devices import device_dataset
from lockstep.errors import DataOnHostWarning, UnusableData
from lockstep.training import prefetch_queue
from lockstep.training.arrays import plain_arrays, row_numbers
from tests.conformance import common
from tests.conformance.common import assert_same, weights
from tests.conformance.side_by_side import Closeness, assert_same_runs, both, smooth


@pytest.fixture
def gathered(monkeypatch):
    """How many rows each gathered batch had."""
    counted = []
    original = device_dataset.DeviceDataset.batch

    def counting(self, rows):
        counted.append(rows.shape)
        return original(self, rows)

    monkeypatch.setattr(device_dataset.DeviceDataset, "batch", counting)
    return counted


def on(made, devices, wanted=True):
    return lockstep.distribute(made, devices, data_on_devices=wanted)


def pair(fit, devices, wanted=True, **options):
    """What `fit` gives on one device by Keras, and with the data on several."""
    found = []
    for distributed in (False, True):
        made = smooth(**options)
        if distributed:
            on(made, devices, wanted)
        keras.utils.set_random_seed(11)
        found.append([fit(made).history, weights(made)])
    return found


@pytest.mark.parametrize(
    ("devices", "shuffle"), [(1, True), (3, True), (4, "batch"), (1, "batch"), (3, False)]
)
def test_each_order_of_rows(devices, shuffle, gathered):
    x, y = common.data(46)

    def fit(made):
        return made.fit(
            x, y, batch_size=7, epochs=3, shuffle=shuffle, validation_split=0.2, verbose=0
        )

    one, many = pair(fit, devices)
    assert_same(many, one, atol=0 if devices == 1 else 1e-5)
    # 36 rows to train on and 10 to validate with, in each of three epochs
    assert gathered == ([(7,)] * 5 + [(1,)] + [(7,), (3,)]) * 3


@pytest.mark.parametrize("types", [("uint8", "int64"), ("bool", "float64")])
def test_types(types, gathered):
    x, y = common.data(40)
    x, y = abs(x * 2).astype(types[0]), (y * 2).astype(types[1])
    one, many = pair(lambda made: made.fit(x, y, batch_size=9, epochs=2, verbose=0), 3)
    assert_same(many, one)
    assert len(gathered) == 10


def test_weights_of_samples_and_classes(gathered):
    rng = np.random.default_rng(3)
    x, labels, weight = rng.normal(size=(40, 4)), rng.integers(0, 2, 40), rng.random(40)
    from_logits = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    found = []
    for distributed in (False, True):
        for options in ({"sample_weight": weight}, {"class_weight": {0: 1.0, 1: 5.0}}):
            made = smooth()
            made.compile("sgd", from_logits, weighted_metrics=["accuracy"])
            if distributed:
                on(made, 3)
            keras.utils.set_random_seed(1)
            history = made.fit(x, labels, batch_size=9, epochs=2, verbose=0, **options).history
            found.append([history, weights(made)])
    assert_same(found[2:], found[:2])
    assert len(gathered) == 20


def test_several_steps_in_one_program(gathered):
    x, y = common.data(150)
    found = []
    for distributed in (False, True):
        made = smooth()
        steps = 3 if distributed else 1
        made.compile(made.optimizer, "mse", metrics=["mae"], steps_per_execution=steps)
        if distributed:
            on(made, 3)
        keras.utils.set_random_seed(4)
        found.append([made.fit(x, y, batch_size=7, epochs=3, verbose=0).history, weights(made)])
    assert_same(found[1], found[0])
    assert any(len(shape) == 2 for shape in gathered)


def test_the_bits_are_those_of_batches_from_the_host(gathered):
    x, y = common.data(46)
    found = []
    for wanted in (False, True):
        made = on(smooth(), 3, wanted)
        keras.utils.set_random_seed(11)
        found.append([made.fit(x, y, batch_size=7, epochs=2, verbose=0).history, weights(made)])
    assert_same(found[1], found[0], atol=0)
    assert len(gathered) == 14


class Rewriting(keras.callbacks.Callback):
    """Augments the data in place, which the next epoch of Keras trains on."""

    def __init__(self, x, hook="on_epoch_end"):
        super().__init__()
        self.x = x
        setattr(self, hook, self.rewrite)

    def rewrite(self, *_, **__):
        self.x[:] = self.x[::-1] * 0.5


@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize("hook", ["on_train_begin", "on_epoch_begin", "on_epoch_end"])
def test_data_that_a_callback_rewrites_between_epochs(hook, kind, gathered):
    """Also before the first one; and of a type of which Keras trains on a copy."""
    x, y = common.data(40)

    def fit(made):
        mine = x.astype(kind)
        rewriting = Rewriting(mine, hook)
        return made.fit(mine, y, batch_size=8, epochs=3, verbose=0, callbacks=[rewriting])

    one, many = pair(fit, 2)
    assert_same(many, one)
    assert len(gathered) == 15


def test_data_that_a_hook_of_one_instance_rewrites(gathered):
    """A plain `Callback` that was given a method is as free as a class of one's own."""
    x, y = common.data(40)

    def fit(made):
        mine = x.copy()
        rewriting = keras.callbacks.Callback()
        rewriting.on_epoch_end = Rewriting(mine).rewrite
        return made.fit(mine, y, batch_size=8, epochs=3, verbose=0, callbacks=[rewriting])

    one, many = pair(fit, 2)
    assert_same(many, one)
    assert len(gathered) == 15


def test_validation_data_that_a_callback_rewrites(gathered):
    x, y = common.data(40)

    def fit(made):
        held_out = common.data(16, seed=4)
        return made.fit(
            *(x, y, 8, 3),
            verbose=0,
            validation_data=held_out,
            callbacks=[Rewriting(held_out[0], "on_test_begin")],
        )

    one, many = pair(fit, 2)
    assert_same(many, one)
    assert len(gathered) == 3 * (5 + 2)


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_data_rewritten_in_the_middle_of_a_pass(kind, gathered):
    """Keras makes its copy of another type once for a pass, which here has two epochs."""
    x, y = common.data(80)

    def fit(made):
        mine = x.astype(kind)
        options = {"batch_size": 8, "steps_per_epoch": 5, "epochs": 5, "verbose": 0}
        return made.fit(mine, y, **options, callbacks=[Rewriting(mine)])

    one, many = pair(fit, 2)
    assert_same(many, one)
    assert len(gathered) == 25


@pytest.mark.parametrize("in_a_list", [False, True])
def test_a_callback_that_could_write_between_steps_keeps_the_data_on_the_host(in_a_list, gathered):
    x, y = common.data(40)

    def fit(made):
        mine = x.copy()

        def rewrite(batch, logs):
            mine[:] = mine[::-1] * 0.9

        halving = keras.callbacks.LambdaCallback(on_train_batch_end=rewrite)
        callbacks = [keras.callbacks.CallbackList([halving]) if in_a_list else halving]
        return made.fit(mine, y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)

    with pytest.warns(DataOnHostWarning, match="could write into the data between two steps"):
        one, many = pair(fit, 2)
    assert_same(many, one)
    assert not gathered


def test_a_hook_that_comes_later_takes_the_data_back(gathered):
    """Put in place between two epochs; as if the rows had gone from the host all along."""
    x, y = common.data(40)

    class Late(keras.callbacks.Callback):
        def __init__(self, mine):
            super().__init__()
            self.mine = mine

        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                self.on_train_batch_end = self._rewrite

        def _rewrite(self, batch, logs=None):
            rows = slice((batch + 1) * 8, (batch + 2) * 8)
            self.mine[rows] *= 0.5

    found = []
    for wanted in (False, True):
        mine = x.copy()
        made = on(smooth(), 2, wanted)
        options = {"batch_size": 8, "epochs": 3, "shuffle": False, "verbose": 0}
        history = made.fit(mine, y, **options, callbacks=[Late(mine)]).history
        found.append([history, weights(made)])
    assert_same(found[1], found[0], atol=0)
    assert gathered == [(8,)] * 5


def test_callbacks_of_keras_are_no_reason(gathered, tmp_path):
    def script(made, folder):
        saves = keras.callbacks.ModelCheckpoint(folder / "{epoch}-{batch}.keras", save_freq=2)
        stops = [keras.callbacks.TerminateOnNaN(), keras.callbacks.EarlyStopping("loss")]
        if "_lockstep" in vars(made):
            on(made, 3)
        keras.utils.set_random_seed(2)
        return made.fit(
            *common.data(40), batch_size=8, epochs=3, verbose=0, callbacks=[saves, *stops]
        ).history

    one, many = both(script, tmp_path, devices=3)
    assert_same_runs(one, many)
    assert gathered


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_unasked_batches_go_from_the_host_in_their_turn(platform, gathered, monkeypatch):
    monkeypatch.setattr(prefetch_queue, "_Maker", None)  # no thread
    x, y = common.data(16)
    made = lockstep.distribute(smooth(), 2)
    monkeypatch.setattr(attachment_of(made)._steps, "platform", platform)
    made.fit(x, y, verbose=0)
    assert not gathered


def test_asking_again_moves_nothing_and_is_followed(gathered):
    x, y = common.data(16)
    made = on(smooth(), 2, False)
    on(made, 2, True).fit(x, y, batch_size=8, verbose=0)
    assert len(gathered) == 2
    on(made, 2, False).fit(x, y, batch_size=8, verbose=0)
    assert len(gathered) == 2


def test_an_array_that_the_device_has_no_room_for_goes_from_the_host(gathered, monkeypatch):
    def full(*args, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")

    monkeypatch.setattr(session, "DeviceDataset", type("DeviceDataset", (), {"__new__": full}))
    x, y = common.data(40)
    with pytest.warns(DataOnHostWarning, match="0 MiB do not fit on a device"):
        one, many = pair(lambda made: made.fit(x, y, batch_size=9, verbose=0), 3)
    assert_same(many, one)
    assert not gathered


def several_inputs(data):
    """A model of two inputs and two outputs, trained on them as dicts or lists."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(4)
    left, right = keras.Input((4,), name="left"), keras.Input((2,), name="right")
    both = layers.Dense(5, "tanh")(layers.Concatenate()([left, right]))
    outputs = {"one": layers.Dense(2, name="one")(both), "two": layers.Dense(1, name="two")(both)}
    inputs = {"left": left, "right": right}
    made = keras.Model(
        *((inputs, outputs) if data is dict else ([left, right], [*outputs.values()]))
    )
    made.compile("sgd", "mse")
    return made


STRUCTURES = [
    lambda a, b: (a, b),
    lambda a, b: ({"a": a}, b),
    lambda a, b: ([a], {"b": b}),
    lambda a, b: ({"b": b, "a": a}, [a, (b,)]),
    lambda a, b: (a,),
    lambda a, b: a,
]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_have_the_structure_of_the_data(structure, shuffle):
    a, b = common.data(5)
    adapter = ArrayDataAdapter(structure(a, b), batch_size=2, shuffle=shuffle)
    adapter._inputs = structure(a, b)  # of x alone it makes a tuple
    np.random.seed(1)
    theirs = [*adapter.get_jax_iterator()]
    np.random.seed(1)
    mine = [*map(plain_arrays(adapter).batch, row_numbers(adapter, 0))]
    assert len(mine) == 3
    for one, other in zip(mine, theirs, strict=True):
        assert jax.tree.structure(one) == jax.tree.structure(other)
        assert_same(one, other, atol=0)
        assert repr(keras.tree.map_structure(np.shape, one)) == repr(
            keras.tree.map_structure(np.shape, other)
        )


@pytest.mark.parametrize("kind", [dict, list])
@pytest.mark.parametrize("devices", [1, 3])
def test_data_of_several_inputs_stay_too(kind, devices, gathered):
    (x, y), (z, _) = common.data(46), common.data(46, seed=8)
    inputs, outputs = {"right": z[:, :2], "left": x}, {"one": y, "two": z[:, :1]}
    if kind is list:
        inputs, outputs = [x, z[:, :2]], [y, z[:, :1]]
    found = []
    for distributed in (False, True):
        made = several_inputs(kind)
        if distributed:
            on(made, devices)
        np.random.seed(11)
        history = made.fit(inputs, outputs, batch_size=7, epochs=2, verbose=0).history
        predicted = made.predict(inputs, batch_size=7, verbose=0)
        found.append([history, weights(made), predicted])
    assert_same(found[1], found[0])
    assert len(gathered) == 14


@pytest.mark.parametrize("stay", [True, False])
@pytest.mark.parametrize("devices", [1, 3])
def test_bytes_in_the_other_order(devices, stay, gathered):
    """Which stock Keras refuses on JAX."""
    x, y = common.data(40)
    found = []
    for order in ("=", ">"):
        made = smooth() if order == "=" else on(smooth(), devices, stay)
        keras.utils.set_random_seed(11)
        made.fit(x.astype(f"{order}f4"), y.astype(f"{order}f4"), batch_size=9, verbose=0)
        found.append([weights(made), made.predict(x.astype(f"{order}f4"), verbose=0)])
    assert_same(found[1], found[0])
    assert bool(gathered) is stay


@pytest.mark.parametrize("wanted", [0, 1, "never", np.True_, None])
def test_an_answer_that_is_none_is_refused(wanted):
    made = smooth()
    with pytest.raises(UnusableData, match=r"data_on_devices=.* was given"):
        on(made, 2, wanted)
    assert "fit" not in vars(made)


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return 4

    def __getitem__(self, batch):
        return self.x[batch * 10 : batch * 10 + 10], self.y[batch * 10 : batch * 10 + 10]


@pytest.mark.parametrize(
    "reason", ["not NumPy arrays of numbers", "runs operation by operation"], ids=["data", "eager"]
)
def test_other_reasons(reason, gathered):
    x, y = common.data(40)
    made = on(smooth(metrics=[Closeness()]), 2)
    if "operation" in reason:
        made.compile("sgd", "mse", run_eagerly=True)
    data = (Batches(x, y),) if "NumPy" in reason else (x, y)
    with pytest.warns(DataOnHostWarning, match=reason):
        made.fit(*data, verbose=0, shuffle=False)
    assert not gathered


def test_a_masked_array_is_refused_as_on_one_device(gathered):
    x, y = common.data(40)
    x = np.ma.masked_greater(x, 1.0)
    with pytest.raises(ValueError, match="masked arrays are not supported"):
        smooth().fit(x, y, verbose=0)
    with (
        pytest.warns(DataOnHostWarning, match="not NumPy arrays of numbers"),
        pytest.raises(ValueError, match="masked arrays are not supported"),
    ):
        on(smooth(), 2).fit(x, y, verbose=0)
    assert not gathered


def test_one_pass_over_the_data_keeps_nothing(gathered):
    made = on(smooth(), 2)
    x, y = common.data(20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.evaluate(x, y, verbose=0)
        made.predict(x, verbose=0)
    assert not gathered
