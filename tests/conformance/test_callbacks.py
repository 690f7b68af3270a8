"""Every callback that comes with Keras does over several devices what it does on one."""

import contextlib
import csv
import io
import re

import keras
import numpy as np
import pytest

import lockstep
from tests.conformance.common import assert_same, devices_of, weights
from tests.conformance.side_by_side import (
    BATCH,
    ROWS,
    Run,
    assert_same_models,
    assert_same_runs,
    both,
    data,
    getting_worse,
    held_out,
    load,
    smooth,
    train,
)
from tests.processes.common import without_lockstep

# ------------------------------------------------------------------------ ModelCheckpoint


CHECKPOINTS = {
    "every epoch, with its loss": ("{epoch:02d}-{val_loss:.4f}.keras", {}),
    "a metric of the user's own": ("{epoch:02d}-{closeness:.3f}-{val_closeness:.3f}.keras", {}),
    "best only": ("best.keras", {"save_best_only": True}),
    "best only, of a metric of the user's own": (
        "best-{epoch:02d}-{val_closeness:.3f}.keras",
        {"save_best_only": True, "monitor": "val_closeness", "mode": "max"},
    ),
    "best only, from a threshold on": (
        "{epoch:02d}.keras",
        {"save_best_only": True, "monitor": "loss", "initial_value_threshold": 1.5},
    ),
    "weights only": ("{epoch:02d}-{val_loss:.4f}.weights.h5", {"save_weights_only": True}),
    "best weights only": (
        "best.weights.h5",
        {"save_best_only": True, "save_weights_only": True, "monitor": "val_mae"},
    ),
    "every third batch": ("{epoch:02d}-{batch:02d}-{loss:.4f}.keras", {"save_freq": 3}),
    "every fifth batch, over epochs": (
        "{epoch:02d}-{batch:02d}.weights.h5",
        {"save_freq": 5, "save_weights_only": True},
    ),
    "the old format": ("{epoch:02d}-{val_loss:.4f}.h5", {}),
}


@pytest.fixture(scope="module")
def checkpointed(tmp_path_factory):
    """One training with all of them, each in a folder of its own."""
    folders = {case: str(number) for number, case in enumerate(CHECKPOINTS)}

    def script(made, folder):
        callbacks = []
        for case, (name, options) in CHECKPOINTS.items():
            path = folder / folders[case]
            path.mkdir()
            callbacks.append(keras.callbacks.ModelCheckpoint(str(path / name), **options))
        return train(made, callbacks, epochs=3)

    one, many = both(script, tmp_path_factory.mktemp("runs"), metrics=["mae", "closeness"])
    assert_same_runs(one, many)
    return {
        case: [Run(run.model, run.folder / name, run.returned) for run in (one, many)]
        for case, name in folders.items()
    }


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_model_checkpoint_writes_the_same_files(case, checkpointed):
    one, many = checkpointed[case]
    assert_same_models(one, many)


def test_every_checkpoint_loads_where_lockstep_is_not_installed(checkpointed):
    _, many = checkpointed["every epoch, with its loss"]
    root = many.folder.parent
    x, _ = held_out()
    np.save(root / "x.npy", x)
    files = {
        str(path.relative_to(root)): np.asarray(load(path)(x)).tolist()
        for case in ("every epoch, with its loss", "every third batch", "the old format")
        for path in sorted(checkpointed[case][1].folder.iterdir())
    }
    without_lockstep(
        "import jax, keras, numpy as np\n"
        "assert len(jax.devices()) == 1, jax.devices()\n"
        "x = np.load('x.npy')\n"
        f"for name, truth in {files}.items():\n"
        "    model = keras.models.load_model(name, compile=False)\n"
        "    np.testing.assert_allclose(model(x), truth, rtol=0, atol=1e-5)\n",
        cwd=root,
    )


def test_best_only_keeps_the_best_while_validation_gets_worse(tmp_path):
    def script(made, folder):
        checkpoint = keras.callbacks.ModelCheckpoint(
            str(folder / "{epoch:02d}.keras"), save_best_only=True
        )
        return train(made, [checkpoint], validation_data=getting_worse(), epochs=3)

    one, many = both(script, tmp_path, devices=3)
    losses = many.returned["val_loss"]
    assert losses[-1] > min(losses)
    assert len(list(many.folder.iterdir())) < 3
    assert_same_models(one, many)


def test_the_parallel_model_checkpoint_that_people_wrote(tmp_path):
    """It saves the model it was given, whatever model `fit` was called on."""

    class ParallelModelCheckpoint(keras.callbacks.ModelCheckpoint):
        def __init__(self, single_model, *args, **kwargs):
            self.single_model = single_model
            super().__init__(*args, **kwargs)

        def set_model(self, model):
            super().set_model(self.single_model)

    def script(made, folder):
        path = str(folder / "{epoch:02d}-{val_loss:.4f}.keras")
        return train(made, [ParallelModelCheckpoint(made, path)])

    one, many = both(script, tmp_path)
    assert_same_runs(one, many)
    assert_same_models(one, many)


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")  # Orbax's own
def test_orbax_checkpoint_loads_on_one_device(tmp_path):
    """Orbax writes the devices of what it saves into its files; they must be those of one."""

    def script(made, folder):
        return train(made, [keras.callbacks.OrbaxCheckpoint(folder, max_to_keep=None)])

    one, many = both(script, tmp_path)
    assert_same_runs(one, many)
    assert _orbax_tree(many.folder) == _orbax_tree(one.folder)
    x, _ = held_out()
    loaded = smooth()
    loaded.load_weights(many.folder)
    assert_same(loaded(x), one.model(x))
    many.model.load_weights(one.folder)
    assert_same(train(many.model, epochs=1), train(one.model, epochs=1))
    assert devices_of(many.model) == {4}

    # Keras 3.15.1 finds a variable in such a checkpoint by its path, which a model out of
    # a file has not: only one built by the same code loads anything.
    np.save(tmp_path / "x.npy", x)
    without_lockstep(
        "import jax, keras, numpy as np\n"
        "from keras.layers import BatchNormalization, Dense, Dropout\n"
        "assert len(jax.devices()) == 1, jax.devices()\n"
        "layers = [Dense(6, 'tanh'), BatchNormalization(), Dropout(0.2), Dense(2)]\n"
        "model = keras.Sequential([keras.Input((4,)), *layers])\n"
        "model.compile(keras.optimizers.SGD(0.02, momentum=0.9), 'mse', metrics=['mae'])\n"
        "model.optimizer.build(model.trainable_variables)\n"
        f"model.load_weights({str(many.folder)!r})\n"
        f"truth = {np.asarray(loaded(x)).tolist()}\n"
        "np.testing.assert_allclose(model(np.load('x.npy')), truth, rtol=0, atol=1e-5)\n",
        cwd=tmp_path,
    )


def test_the_state_tree_has_the_arrays_of_the_variables():
    """Its arrays were on one device, and failed beside those of the variables."""
    made = lockstep.distribute(smooth(), 3)
    train(made, epochs=1)
    tree = made.get_state_tree()
    total, count = (tree["metrics_variables"]["loss"][name] for name in ("total", "count"))
    # As in Keras's models/model_test.py, test_get_state_tree, which mixes both in one operation.
    assert total == made.metrics_variables[0].value
    assert count == made.metrics_variables[1].value
    held = {id(v.value) for v in [*made.variables, *made.optimizer.variables]}
    held |= {id(v.value) for v in made.metrics_variables}
    assert {id(leaf) for leaf in keras.tree.flatten(tree)} <= held
    hosted = keras.tree.flatten(made.get_state_tree(value_format="numpy_array"))
    assert {type(leaf) for leaf in hosted} == {np.ndarray}
    made.set_state_tree(tree)
    assert devices_of(made) == {3}


def _orbax_tree(folder):
    """Every path but those named by a random number, and what is said of devices."""
    paths = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    shardings = [path.read_text() for path in sorted(folder.rglob("_sharding"))]
    assert shardings
    return {path for path in paths if not re.search(r"/d/\w{32}$", path)}, shardings


# --------------------------------------------------------- stopping, learning rates, NaN


@pytest.mark.each_value_once
@pytest.mark.parametrize("devices", [3, 4])
@pytest.mark.parametrize("restore", [True, False])
def test_early_stopping_stops_at_the_same_epoch_with_the_same_weights(devices, restore, tmp_path):
    stoppings = []

    def script(made, folder):
        stopping = keras.callbacks.EarlyStopping(
            patience=2, restore_best_weights=restore, start_from_epoch=1
        )
        stoppings.append(stopping)
        return train(made, [stopping], validation_data=getting_worse(), epochs=9)

    one, many = both(script, tmp_path, devices)
    assert len(many.returned["loss"]) < 9
    assert_same_runs(one, many)
    alone, distributed = stoppings
    assert distributed.stopped_epoch == alone.stopped_epoch > 0
    assert distributed.best_epoch == alone.best_epoch
    assert distributed.best == pytest.approx(alone.best, rel=0, abs=1e-5)
    assert_same(many.model.evaluate(*data(), verbose=0), one.model.evaluate(*data(), verbose=0))


def test_reduce_lr_on_plateau(tmp_path):
    def script(made, folder):
        plateau = keras.callbacks.ReduceLROnPlateau(factor=0.3, patience=1, min_lr=1e-3)
        return train(made, [plateau], validation_data=getting_worse(), epochs=5)

    one, many = both(script, tmp_path)
    assert many.returned["learning_rate"][-1] < many.returned["learning_rate"][0]
    assert_same_runs(one, many)


def test_learning_rate_scheduler(tmp_path):
    def script(made, folder):
        scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / (1 + epoch))
        return train(made, [scheduler], epochs=3)

    one, many = both(script, tmp_path)
    assert len(set(many.returned["learning_rate"])) == 3
    assert_same_runs(one, many)


def test_terminate_on_nan_stops_after_the_same_batch(tmp_path):
    def script(made, folder):
        batches = []
        x, y = data()
        x[3 * BATCH + 1, 2] = np.nan  # in batch 3
        history = made.fit(
            x,
            y,
            batch_size=BATCH,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=[
                keras.callbacks.TerminateOnNaN(),
                keras.callbacks.LambdaCallback(
                    on_train_batch_end=lambda batch, logs: batches.append(batch)
                ),
            ],
        ).history
        return history, batches

    one, many = both(script, tmp_path)
    assert many.returned[1] == one.returned[1] == [0, 1, 2, 3]
    assert_same_runs(one, many)


# -------------------------------------------------------------------------------- logging


@pytest.mark.parametrize("append", [False, True])
def test_csv_logger_writes_the_same_rows(append, tmp_path):
    def script(made, folder):
        for epochs in (2, 1):
            logger = keras.callbacks.CSVLogger(folder / "log.csv", append=append)
            train(made, [logger], epochs=epochs)

    one, many = both(script, tmp_path, metrics=["mae", "closeness"])
    theirs, mine = (_rows(run.folder / "log.csv") for run in (one, many))
    assert mine[0] == theirs[0]
    assert "val_closeness" in mine[0]
    assert len(mine) == (4 if append else 2)
    assert_same(*([[float(value) for value in row] for row in rows[1:]] for rows in (mine, theirs)))


def _rows(path):
    return list(csv.reader(path.read_text().splitlines()))


@pytest.mark.parametrize("every", ["epoch", "batch", 3])
def test_tensorboard_logs_the_same_scalars_and_histograms(every, tmp_path):
    def script(made, folder):
        board = keras.callbacks.TensorBoard(
            folder, histogram_freq=1, write_graph=True, update_freq=every
        )
        return train(made, [board])

    one, many = both(script, tmp_path)
    assert_same_runs(one, many)
    mine, theirs = _events(many.folder), _events(one.folder)
    assert mine.keys() == theirs.keys()
    written = {(part, tag) for part, tag, _ in mine}
    if every != 3:  # then Keras drops what does not fall on a third step
        assert ("train", "epoch_loss") in written
        assert ("validation", "epoch_mae") in written
    if every != "epoch":
        assert ("train", "batch_loss") in written
    histograms = 0
    for key in mine:
        if "/histogram" in key[1]:
            # Rounding may move a value to the next bucket: the edges, and how many in all.
            histograms += 1
            assert_same(mine[key][:, :2], theirs[key][:, :2])
            assert mine[key][:, 2].sum() == theirs[key][:, 2].sum()
        elif mine[key].dtype.kind == "f":
            assert_same(mine[key], theirs[key])
    if every != 3:
        assert histograms == 2 * len(many.model.weights)


def _events(folder):
    """What TensorBoard would show: arrays by writer, tag and step."""
    import tensorflow as tf

    found = {}
    for file in sorted(folder.rglob("events*")):
        for record in tf.data.TFRecordDataset(str(file)).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            for value in event.summary.value:
                key = (str(file.parent.relative_to(folder)), value.tag, event.step)
                assert key not in found
                found[key] = np.asarray(tf.make_ndarray(value.tensor))
    return found


@pytest.mark.parametrize("verbose", [1, 2])
def test_the_printed_lines_are_the_same_but_for_one_more(verbose, tmp_path):
    def script(made, folder):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            train(made, verbose=verbose)
        return printed.getvalue()

    one, many = both(script, tmp_path, devices=3)
    first, _, rest = many.returned.partition("\n")
    line, _, held = first.rpartition(", without optimizer slots")[0].rpartition(", ")
    assert held.endswith("B of state each")
    assert line == (
        "lockstep: jax, 3 devices (cpu:0 to cpu:2, rehearsed), "
        f"global batch {BATCH} = up to 3 per replica, compiling the training step"
    )
    mine, theirs = _ends_of_epochs(rest), _ends_of_epochs(one.returned)
    assert len(mine) == 2
    assert [_without_numbers(line) for line in mine] == [_without_numbers(line) for line in theirs]
    # What is printed is rounded to four digits.
    assert_same([_numbers(line) for line in mine], [_numbers(line) for line in theirs], atol=2e-4)


def _ends_of_epochs(printed):
    """The last line of each epoch, from the loss on: before it stand only times."""
    ends = [line.rpartition("\r")[2] for line in printed.splitlines() if "val_loss" in line]
    return [line[line.index(" loss: ") :] for line in ends]


def _numbers(line):
    return [float(number) for number in re.findall(r": (\d+\.\d+)", line)]


def _without_numbers(line):
    return re.sub(r"\d+\.\d+(e-\d+)?", "#", line)


def test_remote_monitor_sends_the_same(tmp_path, monkeypatch):
    import requests

    sent = []

    def post(url, **kwargs):
        sent.append((url, kwargs))

    monkeypatch.setattr(requests, "post", post)

    def script(made, folder):
        sent.clear()
        train(made, [keras.callbacks.RemoteMonitor("http://localhost:1", send_as_json=True)])
        return list(sent)

    one, many = both(script, tmp_path)
    assert [url for url, _ in many.returned] == [url for url, _ in one.returned]
    assert [call["json"].keys() for _, call in many.returned] == [
        call["json"].keys() for _, call in one.returned
    ]
    assert_same(
        [list(call["json"].values()) for _, call in many.returned],
        [list(call["json"].values()) for _, call in one.returned],
    )


# ---------------------------------------------------------------- interrupted and resumed


class Interrupted(Exception):
    pass


class Interrupt(keras.callbacks.Callback):
    """Raises where it is told to: at the start of an epoch, or after a batch of it."""

    def __init__(self, epoch, batch=None):
        super().__init__()
        self.place = epoch, batch

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        if self.place == (epoch, None):
            raise Interrupted

    def on_train_batch_end(self, batch, logs=None):
        if self.place == (self.epoch, batch):
            raise Interrupted


@pytest.mark.each_value_once
@pytest.mark.parametrize("resumed_on", [4, 3, None])
@pytest.mark.parametrize("batch", [None, 4], ids=["between epochs", "in an epoch"])
def test_backup_and_restore_resumes_as_if_never_interrupted(resumed_on, batch, tmp_path):
    # A weights file does not hold where the random numbers of a dropout layer stand.
    uninterrupted = smooth(dropout=0.0)
    history = train(uninterrupted, epochs=3)

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path / "backup")

    made = lockstep.distribute(smooth(dropout=0.0), 4)
    with pytest.raises(Interrupted):
        train(made, [backup(), Interrupt(2, batch)], epochs=3)

    resumed = smooth(dropout=0.0)
    if resumed_on:
        lockstep.distribute(resumed, resumed_on)
    last = train(resumed, [backup()], epochs=3)
    last_epoch = {key: values[-1:] for key, values in history.items()}
    assert_same_runs(Run(uninterrupted, tmp_path, last_epoch), Run(resumed, tmp_path, last))
    assert not (tmp_path / "backup").exists()


def test_backup_of_a_model_with_dropout_resumes_as_on_one_device(tmp_path):
    def script(made, folder):
        with pytest.raises(Interrupted):
            train(made, [keras.callbacks.BackupAndRestore(folder / "backup"), Interrupt(1, 4)])
        made.set_weights([0 * weight for weight in made.get_weights()])
        return train(made, [keras.callbacks.BackupAndRestore(folder / "backup")])

    assert_same_runs(*both(script, tmp_path, devices=3))


def test_backup_by_batches_is_that_of_one_device(tmp_path):
    def script(made, folder):
        options = {"save_freq": 3, "double_checkpoint": True, "delete_checkpoint": False}
        backup = keras.callbacks.BackupAndRestore(folder / "backup", **options)
        with pytest.raises(Interrupted):
            train(made, [backup, Interrupt(1, 5)])
        files = sorted(path.name for path in (folder / "backup").iterdir())
        metadata = (folder / "backup" / "training_metadata.json").read_text()
        made.set_weights([0 * weight for weight in made.get_weights()])
        history = train(made, [keras.callbacks.BackupAndRestore(folder / "backup", **options)])
        return files, metadata, history

    one, many = both(script, tmp_path)
    assert many.returned[:2] == one.returned[:2]
    assert_same(many.returned[2], one.returned[2])
    assert_same(weights(many.model), weights(one.model))


# ----------------------------------------------------------------------------- averages


@pytest.mark.each_value_once
@pytest.mark.parametrize("overwrite", [None, 3])
@pytest.mark.parametrize("on_epoch", [False, True])
def test_swap_ema_weights(overwrite, on_epoch, tmp_path):
    def script(made, folder):
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=on_epoch)
        checkpoint = keras.callbacks.ModelCheckpoint(
            str(folder / "{epoch:02d}-{val_loss:.4f}.keras")
        )
        return train(made, [swap, checkpoint])

    ema = {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": overwrite}
    one, many = both(script, tmp_path, **ema)
    assert_same_runs(one, many)
    assert_same_models(one, many)
    scores = [run.model.evaluate(*held_out(), verbose=0) for run in (one, many)]
    assert_same(scores[1], scores[0])


# ------------------------------------------------------------------------------ the rest


def test_lambda_callback_is_called_as_on_one_device(tmp_path):
    hooks = [
        "on_epoch_begin",
        "on_epoch_end",
        "on_train_begin",
        "on_train_end",
        "on_train_batch_begin",
        "on_train_batch_end",
    ]

    def script(made, folder):
        called = []

        def recorder(hook):
            # Keras passes on to as many arguments as it names, so both forms are there.
            if hook in ("on_train_begin", "on_train_end"):
                return lambda logs: called.append((hook, dict(logs or {})))
            return lambda number, logs: called.append((hook, number, dict(logs or {})))

        train(made, [keras.callbacks.LambdaCallback(**{h: recorder(h) for h in hooks})])
        return called

    one, many = both(script, tmp_path)
    assert [call[:-1] for call in many.returned] == [call[:-1] for call in one.returned]
    assert {call[0] for call in many.returned} == set(hooks)
    assert [call[-1].keys() for call in many.returned] == [c[-1].keys() for c in one.returned]
    assert_same([call[-1] for call in many.returned], [call[-1] for call in one.returned])


def test_callback_list_and_history_handed_over(tmp_path):
    def script(made, folder):
        history = keras.callbacks.History()
        callbacks = keras.callbacks.CallbackList(
            [history], model=made, epochs=2, steps=ROWS // BATCH
        )
        made.fit(*data(), batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        return history.history, history.epoch

    one, many = both(script, tmp_path)
    assert many.returned[1] == [0, 1]
    assert_same_runs(one, many)
