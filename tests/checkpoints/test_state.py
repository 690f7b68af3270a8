"""Whatever a run changes is in its checkpoint: models, optimizers, callbacks, stops."""

import csv
import random

import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep.checkpoint.checkpoint_run import _rate
from lockstep.checkpoint.fingerprint import check_facts, compiled_of, config_of
from lockstep.checkpoint.plain_state import from_plain, to_plain
from lockstep.errors import CheckpointWarning
from tests.checkpoints.data import arrays, py_dataset
from tests.checkpoints.models import accumulating, everything, recurrent, sequences, with_validation
from tests.checkpoints.runs import assert_same_end, small, train
from tests.conformance import common
from tests.conformance.side_by_side import BATCH, ROWS, held_out, smooth


def cut_and_go_on(source, folder, cut, then=1, **options):
    """Cut a run on four devices after a batch; go on with it on `then` devices."""
    saving = {"checkpoint": {"steps": 1, "background": False}}
    train(source, folder, cut=cut, devices=4, **{**saving, **options})
    return train(source, folder, devices=then, **options)


MODELS = {
    "everything": (everything, with_validation, 11),
    "accumulating": (accumulating, arrays, 11),
    "recurrent": (recurrent, sequences, 11),
}


SAMPLE = [("everything", 4), ("recurrent", 1)]


@pytest.mark.parametrize(
    ("name", "then"),
    [
        pytest.param(name, then, marks=[] if (name, then) in SAMPLE else [pytest.mark.whole])
        for name in MODELS
        for then in (1, 2, 4)
    ],
)
def test_every_variable_goes_on(name, then, tmp_path):
    make, source, cut = MODELS[name]
    truth = train(source, devices=4, make=make)
    mine = cut_and_go_on(source, tmp_path, cut, then, make=make)
    assert_same_end(mine, truth, atol=0.0 if then == 4 else 1e-5)


@pytest.mark.whole
def test_on_more_devices_than_before(tmp_path):
    train(arrays, tmp_path, cut=9, devices=1, make=smooth, checkpoint={"steps": 2})
    mine = train(arrays, tmp_path, devices=8, make=smooth)
    assert_same_end(mine, train(arrays, devices=8, make=smooth), atol=1e-5)


@pytest.mark.parametrize("cut", [2, pytest.param(4, marks=pytest.mark.whole)])
def test_several_steps_in_one_execution(cut, tmp_path):
    def make():
        made = small()
        made.compile(keras.optimizers.SGD(0.05), "mse", steps_per_execution=3)
        return made

    truth = train(arrays, make=make)
    train(arrays, tmp_path, cut=cut, make=make, checkpoint={"steps": 1, "background": False})
    assert_same_end(train(arrays, tmp_path, make=make), truth)


class Odd(keras.Sequential):
    """Its logs are not its metrics."""

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return {**logs, "twice": 2 * logs["loss"]}, state


@pytest.mark.whole
def test_after_the_last_batch_of_an_epoch_its_logs_are_kept(tmp_path):
    def make():
        keras.utils.set_random_seed(5)
        made = Odd([keras.Input((4,)), layers.Dense(2)])
        made.compile("sgd", "mse")
        return made

    truth = train(arrays, make=make)
    assert "twice" in truth[0]
    train(arrays, tmp_path, cut=8, make=make, checkpoint={"steps": 1, "background": False})
    (*_, newest) = sorted(tmp_path.glob("0*"))
    assert newest.name.endswith("step-000007")
    assert_same_end(train(arrays, tmp_path, make=make), truth)


# --------------------------------------------------------------------------- callbacks


def getting_worse():
    x, y = common.data(ROWS)
    return {**arrays(), "validation_data": (x[: 2 * BATCH], -y[: 2 * BATCH]), "epochs": 6}


@pytest.mark.parametrize("cut", [16, pytest.param(23, marks=pytest.mark.whole)])
def test_early_stopping_stops_where_it_would_and_restores_the_best(cut, tmp_path):
    def stopping():
        return keras.callbacks.EarlyStopping(
            "val_loss", min_delta=10.0, patience=3, restore_best_weights=True
        )

    truth = train(getting_worse, callbacks=[stopping])
    assert len(truth[0]["loss"]) == 4
    train(getting_worse, tmp_path, cut=cut, callbacks=[stopping])
    assert_same_end(train(getting_worse, tmp_path, callbacks=[stopping]), truth)
    # Stopped, it stays stopped.
    assert_same_end(train(getting_worse, tmp_path, callbacks=[stopping]), truth)


@pytest.mark.whole
def test_the_learning_rate_of_a_plateau_and_of_a_schedule_by_itself(tmp_path):
    """The schedule takes the rate that is there: to begin an epoch twice would lower it twice."""
    callbacks = [
        lambda: keras.callbacks.ReduceLROnPlateau(
            "val_loss", factor=0.5, patience=1, cooldown=1, min_delta=10.0
        ),
        lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
    ]
    truth = train(getting_worse, callbacks=callbacks)
    assert len(set(truth[0]["learning_rate"])) == 6
    train(getting_worse, tmp_path, cut=25, callbacks=callbacks)
    assert_same_end(train(getting_worse, tmp_path, callbacks=callbacks), truth)


def test_the_best_file_is_not_replaced_by_a_worse_one(tmp_path):
    for name in ("truth", "mine"):
        (tmp_path / name).mkdir()

    def callbacks(name):
        return [
            lambda: keras.callbacks.ModelCheckpoint(
                tmp_path / name / "best.weights.h5", "val_loss", 0, True, True, mode="min"
            ),
            lambda: keras.callbacks.ModelCheckpoint(
                tmp_path / name / "{epoch}-{batch}.weights.h5", save_weights_only=True, save_freq=5
            ),
        ]

    folder = tmp_path / "run"
    truth = train(getting_worse, callbacks=callbacks("truth"))
    train(getting_worse, folder, cut=12, callbacks=callbacks("mine"))
    assert_same_end(train(getting_worse, folder, callbacks=callbacks("mine")), truth)
    files = [{path.name for path in (tmp_path / n).iterdir()} for n in ("truth", "mine")]
    assert files[0] == files[1]
    for file in files[0]:
        mine, theirs = small(), small()
        mine.load_weights(tmp_path / "mine" / file)
        theirs.load_weights(tmp_path / "truth" / file)
        for a, b in zip(mine.get_weights(), theirs.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("append", [False, pytest.param(True, marks=pytest.mark.whole)])
def test_a_log_in_a_file_is_appended_to(append, tmp_path):
    loggers = []

    def logging(name):
        def make():
            loggers.append(keras.callbacks.CSVLogger(tmp_path / name, append=append))
            return loggers[-1]

        return [make]

    def resumed(name, steps):
        run, callbacks = tmp_path / f"run-{name}", logging(name)
        saving = {"steps": steps, "background": False}
        train(arrays, run, callbacks=callbacks, cut=16, checkpoint=saving)
        loggers[-1].csv_file.close()  # which Keras leaves open
        before = (tmp_path / name).read_text()
        train(arrays, run, callbacks=callbacks)
        assert (tmp_path / name).read_text().startswith(before)
        return rows(tmp_path / name)

    train(arrays, callbacks=logging("truth.csv"))
    truth = rows(tmp_path / "truth.csv")
    assert resumed("within.csv", steps=1) == truth
    # The file has two epochs when the run is cut, and the newest checkpoint is in the second.
    assert resumed("before.csv", steps=13) == [*truth[:2], *truth[1:]]
    assert loggers[-1].append is append


def rows(path):
    return list(csv.DictReader(path.read_text().splitlines()))


class Slowing(keras.callbacks.Callback):
    """A user's own callback, with a state: lowers the rate at every third batch."""

    def __init__(self):
        super().__init__()
        self.seen, self.losses = 0, np.zeros(3)

    def on_train_batch_end(self, batch, logs=None):
        self.losses[self.seen % 3] = logs["loss"]
        self.seen += 1
        if self.seen % 3 == 0:
            self.model.optimizer.learning_rate = 0.05 / (1 + self.losses.mean())

    def get_state(self):
        return {"seen": self.seen, "losses": self.losses.copy()}

    def set_state(self, state):
        self.seen, self.losses = state["seen"], state["losses"].copy()


def test_a_callback_of_ones_own_goes_on_by_two_methods(tmp_path):
    truth = train(arrays, callbacks=[Slowing])
    train(arrays, tmp_path, cut=11, callbacks=[Slowing])
    assert_same_end(train(arrays, tmp_path, callbacks=[Slowing]), truth)


class Perturbing(keras.callbacks.Callback):
    """Draws from the random numbers that Keras has for calls without a seed."""

    def on_epoch_end(self, epoch, logs=None):
        weights = self.model.get_weights()
        self.model.set_weights([w + keras.random.normal(w.shape, 0, 0.1) for w in weights])

    def get_state(self):
        return None

    def set_state(self, state):
        assert state is None


def test_a_callback_that_draws_from_keras_s_random_numbers(tmp_path):
    truth = train(arrays, callbacks=[Perturbing])
    train(arrays, tmp_path, cut=16, callbacks=[Perturbing])
    assert_same_end(train(arrays, tmp_path, callbacks=[Perturbing]), truth)


def test_a_word_that_a_callback_puts_into_the_logs_of_a_batch(tmp_path):
    def telling():
        return keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: logs.update(phase="warm")
        )

    train(arrays, tmp_path, cut=8, callbacks=[telling])
    assert_same_end(train(arrays, tmp_path, callbacks=[telling]), train(arrays))


class Careless(keras.callbacks.Callback):
    """Gives its own lists and arrays away, and keeps those that it is given."""

    def __init__(self):
        super().__init__()
        self.began, self.seen = [], np.zeros(1)

    def on_epoch_begin(self, epoch, logs=None):
        self.began.append(epoch)

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1

    def get_state(self):
        return {"began": self.began, "seen": self.seen}

    def set_state(self, state):
        self.began, self.seen = state["began"], state["seen"]


def test_a_state_may_be_given_and_taken_without_a_copy(tmp_path):
    callbacks = []

    def careless():
        callbacks.append(Careless())
        return callbacks[-1]

    saving = {"steps": 1, "background": False}
    train(arrays, tmp_path, cut=10, callbacks=[careless], checkpoint=saving)
    train(arrays, tmp_path, callbacks=[careless])
    assert callbacks[-1].began == [0, 1, 2]
    assert callbacks[-1].seen == 21


def test_a_state_is_written_down_as_it_was():
    seen = np.zeros(1)
    given = {"loss/train": np.ones(1), "loss": {"train": seen}, "seen": seen}
    arrays_of_it = {}
    plain = to_plain(given, "state", arrays_of_it)
    seen += 7
    assert from_plain(plain, arrays_of_it) == {
        "loss/train": np.ones(1),
        "loss": {"train": np.zeros(1)},
        "seen": np.zeros(1),
    }


def test_a_callback_without_them_is_named(tmp_path):
    class Silent(keras.callbacks.Callback):
        pass

    train(arrays, tmp_path, cut=3, callbacks=[Silent])
    said = r"not restored from .*: Silent has no get_state and set_state, and starts"
    with pytest.warns(CheckpointWarning, match=said):
        train(arrays, tmp_path, callbacks=[Silent])


@pytest.mark.whole
def test_other_callbacks_than_before_are_named(tmp_path):
    train(arrays, tmp_path, cut=3, callbacks=[Slowing])
    with pytest.warns(CheckpointWarning, match="Slowing is in the checkpoint, but not in this fit"):
        train(arrays, tmp_path)


# -------------------------------------------------------------------- the same model


@pytest.mark.filterwarnings("ignore:The object being serialized includes a `lambda`")
def test_a_lambda_and_a_drawn_seed_are_not_compared():
    """Keras writes where a lambda stands, and a seed that it has drawn."""

    def facts(double, crop):
        crops = layers.RandomCrop(crop, 4, seed=None), layers.Flatten()
        made = keras.Sequential([keras.Input((6, 6, 1)), *crops, layers.Lambda(double)])
        made.compile("sgd", lambda a, b: keras.ops.mean((a - b) ** 2))
        return {"model": config_of(made), "compiled": compiled_of(made), "data": None}

    random.seed(1)
    first = facts(lambda v: v * 2, 4)
    random.seed(2)
    check_facts("run", first, facts(lambda v: 2.0 * v, 4))
    with pytest.raises(lockstep.errors.CheckpointMismatch, match="height was 4, but is now 3"):
        check_facts("run", first, facts(lambda v: v * 2, 3))


# ------------------------------------------------------------------- the learning rate


def slowed():
    return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)


def test_a_run_keeps_its_own_rate(tmp_path):
    """It is a variable. A rate that was edited in the script was not used, without a word."""
    truth = train(arrays, callbacks=[slowed])
    train(arrays, tmp_path, cut=10, callbacks=[slowed])
    options = {"make": lambda: small(0.0005), "callbacks": [slowed]}
    said = (
        r"rate 0.0005 of compile is ignored: .* with 0.05, and the run continues with 0.0(125|25)"
    )
    for cut in (1, 0):  # as long as the script has it
        with pytest.warns(lockstep.errors.CheckpointWarning, match=said) as warned:
            mine = train(arrays, tmp_path, cut=cut, **options)
        text = next(str(each.message) for each in warned if "of compile" in str(each.message))
        assert text.endswith(
            'learning rate of compile, pass Checkpoint(..., learning_rate="compile").'
        )
    assert_same_end(mine, truth)


def decaying():
    made = small()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.5)
    made.compile(keras.optimizers.SGD(schedule, momentum=0.9), "mse", metrics=["mae"])
    return made


OF_COMPILE = {"steps": 1, "learning_rate": "compile"}


def test_a_run_takes_the_rate_of_compile_where_it_is_asked_to(tmp_path):
    def lower(epoch, rate):
        return 0.0005 if epoch > 0 else rate

    truth = train(arrays, callbacks=[lambda: keras.callbacks.LearningRateScheduler(lower)])
    train(arrays, tmp_path, epochs=1, checkpoint={})
    new = {"make": lambda: small(0.0005), "checkpoint": OF_COMPILE}
    train(arrays, tmp_path, cut=3, **new)
    again = train(arrays, tmp_path, **new)
    assert_same_end(({}, again[1]), ({}, truth[1]))
    rate = [value for path, value in again[1].items() if "learning_rate" in path]
    assert rate == [np.float32(0.0005)]


def test_a_rate_that_a_callback_has_lowered_is_kept_where_the_script_is_the_same(tmp_path):
    truth = train(arrays, callbacks=[slowed])
    train(arrays, tmp_path, cut=10, callbacks=[slowed], checkpoint=OF_COMPILE)
    mine = train(arrays, tmp_path, callbacks=[slowed], checkpoint=OF_COMPILE)
    assert_same_end(mine, truth)


@pytest.mark.parametrize(("before", "after"), [(small, decaying), (decaying, small)])
def test_a_schedule_instead_of_a_rate_is_taken_or_refused(before, after, tmp_path):
    train(arrays, tmp_path, cut=8, make=before)
    with pytest.raises(lockstep.errors.CheckpointMismatch) as refused:
        train(arrays, tmp_path, make=after)
    assert "ExponentialDecay(initial_learning_rate=0.05, decay_steps=5" in str(refused.value)
    assert str(refused.value).endswith('pass Checkpoint(..., learning_rate="compile").')
    mine = train(arrays, tmp_path, make=after, checkpoint=OF_COMPILE)
    truth = train(arrays, make=before)
    kernel = next(path for path in mine[1] if path.endswith("kernel"))
    assert mine[0].keys() == truth[0].keys()
    assert not np.array_equal(mine[1][kernel], truth[1][kernel])


def test_of_two_schedules_of_one_kind_a_message_names_what_differs():
    """Both were cut before the argument that differed."""
    then, now = (
        keras.saving.serialize_keras_object(
            keras.optimizers.schedules.CosineDecay(0.0, 400, warmup_target=0.1, warmup_steps=steps)
        )
        for steps in (10, 20)
    )
    assert _rate(then, now) == "CosineDecay(warmup_steps=10)"
    assert _rate(now, then) == "CosineDecay(warmup_steps=20)"


class WithoutOptimizer(keras.Sequential):
    def train_step(self, state, data):
        return {"loss": keras.ops.mean(data[0])}, state


def test_a_rate_of_compile_needs_one(tmp_path):
    def build():
        made = WithoutOptimizer([keras.Input((4,)), keras.layers.Dense(2)])
        made.compile(optimizer=None, loss="mse")
        return made

    with pytest.raises(lockstep.errors.CheckpointError, match="is compiled without an optimizer"):
        lockstep.distribute(made := build(), 1).fit(
            **arrays(), verbose=0, callbacks=[lockstep.Checkpoint(tmp_path, **OF_COMPILE)]
        )
    assert made.optimizer is None


# ------------------------------------------------------------------- the ends of a run


def test_a_finished_run_is_not_trained_again_and_can_be_made_longer(tmp_path):
    short = train(arrays, tmp_path, epochs=2, checkpoint={})
    assert_same_end(train(arrays, tmp_path, epochs=2, checkpoint={}), short)
    assert_same_end(train(arrays, tmp_path, epochs=3, checkpoint={}), train(arrays))


def test_after_a_finished_run_a_script_goes_on_with_its_random_numbers(tmp_path):
    drawn = []
    for folder in (None, tmp_path, tmp_path):
        train(py_dataset, folder, epochs=1, checkpoint={})
        drawn.append((np.random.rand(), random.random()))
    assert drawn[0] == drawn[1] == drawn[2]


@pytest.mark.whole
def test_an_initial_epoch(tmp_path):
    truth = train(arrays, initial_epoch=1)
    train(arrays, tmp_path, cut=5, initial_epoch=1)
    assert_same_end(train(arrays, tmp_path, initial_epoch=1), truth)


def test_an_initial_epoch_after_the_checkpoint_is_refused(tmp_path):
    train(arrays, tmp_path, cut=5)
    with pytest.raises(lockstep.errors.CheckpointError, match="initial_epoch=2 was requested"):
        train(arrays, tmp_path, initial_epoch=2)


@pytest.mark.whole
def test_a_run_that_is_cut_again_and_again_ends_as_one(tmp_path):
    for cut in (1, 1, 3, 2, 5, 1):
        train(arrays, tmp_path, cut=cut, checkpoint={"steps": 1, "background": False})
    assert_same_end(train(arrays, tmp_path), train(arrays))


@pytest.mark.whole
def test_where_nothing_is_cut_a_checkpoint_changes_nothing(tmp_path):
    mine = train(with_validation, tmp_path, make=everything, devices=4)
    assert_same_end(mine, train(with_validation, make=everything, devices=4))


# ---------------------------------------------------------------------- validation data


def of_tf_data():
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(held_out()).shuffle(14, seed=2).batch(3)
    return {**arrays(), "validation_data": data, "validation_steps": 2}


def of_a_torch_loader():
    import torch

    data = torch.utils.data.TensorDataset(*map(torch.from_numpy, held_out()))
    generator = torch.Generator().manual_seed(4)
    loader = torch.utils.data.DataLoader(data, 3, shuffle=True, generator=generator)
    return {**arrays(), "validation_data": loader, "validation_steps": 2}


@pytest.mark.parametrize(
    "source", [of_tf_data, pytest.param(of_a_torch_loader, marks=pytest.mark.whole)]
)
def test_validation_goes_on_with_the_rows_it_would_have_had(source, tmp_path):
    truth = train(source)
    train(source, tmp_path, cut=10, checkpoint={"steps": 1, "background": False})
    assert_same_end(train(source, tmp_path), truth)
