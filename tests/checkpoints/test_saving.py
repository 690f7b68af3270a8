"""When a checkpoint is written, by whom, and what happens where the disk does not take it."""

import errno
import os
import signal
import threading

import keras
import numpy as np
import pytest

import lockstep
from lockstep import errors
from lockstep.checkpoint import background
from lockstep.checkpoint.run_folder import RunFolder
from lockstep.engines.jax import session
from lockstep.engines.jax.fit.snapshot_buffers import SnapshotBuffers
from tests.checkpoints.data import arrays
from tests.checkpoints.runs import assert_same_end, small, train
from tests.conformance.side_by_side import held_out


def names(folder):
    return sorted(path.name[9:] for path in RunFolder(folder).checkpoints())


ALL = {"keep": 99, "background": False}


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        ({}, ["epoch-0001-step-000000", "epoch-0002-step-000000", "epoch-0003-step-000000"]),
        (
            {"steps": 5},
            [
                "epoch-0000-step-000005",
                "epoch-0001-step-000003",
                "epoch-0002-step-000001",
                "epoch-0002-step-000006",
                "epoch-0003-step-000000",
            ],
        ),
        ({"seconds": 1e6}, ["epoch-0003-step-000000"]),
        ({"seconds": 1e-9, "keep": 2}, ["epoch-0002-step-000007", "epoch-0003-step-000000"]),
    ],
)
def test_when_a_checkpoint_is_written(checkpoint, expected, tmp_path):
    train(arrays, tmp_path, checkpoint={**ALL, **checkpoint})
    assert names(tmp_path) == expected


def test_the_best_stays_and_is_saved_when_it_comes(tmp_path):
    """The loss on data that the model does not learn gets worse after the second epoch."""
    x, y = held_out()
    source = {**arrays(), "validation_data": (x, y)}
    losses = iter([3.0, 1.0, 2.0, 2.5])

    class Told(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["told"] = next(losses)

        def get_state(self):
            return None

        def set_state(self, state):
            pass

    options = {"seconds": 1e6, "keep": 1, "monitor": "told", "mode": "min"}
    train(lambda: source, tmp_path, epochs=4, callbacks=[Told], checkpoint=options)
    assert names(tmp_path) == ["epoch-0002-step-000000", "epoch-0004-step-000000"]


@pytest.mark.whole
def test_auto_asks_the_metric(tmp_path):
    def make():
        made = small()
        made.compile("sgd", "mse", metrics=["cosine_similarity", "mae"])
        return made

    for monitor, mode in (("cosine_similarity", "max"), ("mae", "min"), ("loss", "min")):
        folder = tmp_path / monitor
        train(arrays, folder, make=make, epochs=1, checkpoint={"monitor": monitor})
        found = RunFolder(folder).newest(pytest.fail)
        assert found.state["monitor"]["mode"] == mode


def test_a_monitor_that_is_not_in_the_logs_is_told(tmp_path):
    with pytest.warns(errors.CheckpointWarning, match="'val_loss' was requested, but the logs of"):
        train(arrays, tmp_path, checkpoint={"monitor": "val_loss"}, epochs=1)


# ----------------------------------------------------------------------- in background


def test_a_copy_on_the_devices_is_as_good(tmp_path, monkeypatch):
    """As on accelerators: ordered there, and fetched by the thread."""
    monkeypatch.setattr(session, "SnapshotBuffers", lambda on_host: SnapshotBuffers(on_host=False))
    options = {"devices": 2, "checkpoint": {"steps": 1}}
    train(arrays, tmp_path, cut=12, **options)
    assert_same_end(train(arrays, tmp_path, **options), train(arrays, devices=2))


def test_training_goes_on_while_a_thread_writes_and_never_two(tmp_path, monkeypatch):
    """A save that comes due meanwhile is left out within an epoch, and waits at its end."""
    at_work, may_end, together = threading.Event(), threading.Event(), []
    save = RunFolder.save

    def slow(self, name, *args):
        together.append(name)
        if len(together) == 1:
            at_work.set()
            assert may_end.wait(60)
        return save(self, name, *args)

    monkeypatch.setattr(RunFolder, "save", slow)
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if len(seen) == 1:
                assert at_work.wait(60)
            seen.append(len(together))
            if len(seen) == 6:
                may_end.set()

        def get_state(self):
            return None

        def set_state(self, state):
            pass

    train(arrays, tmp_path, epochs=1, callbacks=[Look], checkpoint={"steps": 1, "keep": 99})
    assert seen[1:6] == [1] * 5
    assert together[0] == "epoch-0000-step-000001"
    assert together[-1] == "epoch-0001-step-000000"
    assert names(tmp_path) == sorted(together)


@pytest.mark.parametrize("cut", [0, 5])
def test_the_last_save_is_done_when_fit_is_left(cut, tmp_path, monkeypatch):
    started = threading.Event()
    save = RunFolder.save

    def slow(self, *args):
        started.set()
        return save(self, *args)

    monkeypatch.setattr(RunFolder, "save", slow)
    train(arrays, tmp_path, cut=cut, checkpoint={"steps": 1})
    assert started.is_set()
    assert not [t for t in threading.enumerate() if t.name == "lockstep checkpoint"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    RunFolder(tmp_path).newest(pytest.fail)


def test_what_is_saved_is_the_state_of_its_step_and_not_a_later_one(tmp_path, monkeypatch):
    """The thread fetches the values when the model has long been trained further."""
    wait, weights = threading.Event(), []
    fetch = background.Background._guarded

    def late(self, work):
        assert wait.wait(60)
        fetch(self, work)

    monkeypatch.setattr(background.Background, "_guarded", late)

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            weights.append(self.model.get_weights())
            if batch == 6:
                wait.set()

        def get_state(self):
            return None

        def set_state(self, state):
            pass

    train(arrays, tmp_path, epochs=1, callbacks=[Look], checkpoint={"steps": 1, "keep": 99})
    folder = RunFolder(tmp_path)
    (first,) = (path for path in folder.checkpoints() if path.name.endswith("step-000001"))
    found = list(folder.read(first).arrays.values())
    np.testing.assert_array_equal(found[0], weights[0][0])
    assert not np.array_equal(found[0], weights[1][0])


# -------------------------------------------------------------------- disks that refuse


@pytest.mark.parametrize("beside", [True, pytest.param(False, marks=pytest.mark.whole)])
def test_a_full_disk_warns_and_training_goes_on(beside, tmp_path, monkeypatch):
    train(arrays, tmp_path, epochs=1, checkpoint={})
    (good,) = names(tmp_path)

    def full(self, *args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RunFolder, "save", full)
    with pytest.warns(errors.CheckpointWarning) as told:
        mine = train(arrays, tmp_path, checkpoint={"background": beside})
    assert_same_end(mine, train(arrays))
    words = [str(each.message) for each in told if each.category is errors.CheckpointWarning]
    assert "No space left on device" in words[0]
    assert "Training continues" in words[0]
    assert names(tmp_path) == [good]


@pytest.mark.whole
def test_unless_the_warning_is_made_an_error(tmp_path, monkeypatch):
    def full(self, *args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RunFolder, "save", full)
    with pytest.raises(errors.CheckpointWarning):  # warnings are errors in these tests
        train(arrays, tmp_path, checkpoint={"background": False})


@pytest.mark.whole
def test_a_damaged_newest_one_is_told_and_the_one_before_goes_on(tmp_path):
    train(arrays, tmp_path, cut=10, checkpoint={"steps": 2, "background": False})
    newest, *_ = RunFolder(tmp_path).checkpoints()
    (newest / "arrays.safetensors").write_bytes(b"")
    with pytest.warns(errors.CheckpointWarning, match="was skipped"):
        mine = train(arrays, tmp_path)
    assert_same_end(mine, train(arrays))


# -------------------------------------------------------------------------- signals


class Send(keras.callbacks.Callback):
    def __init__(self, number, times=1):
        super().__init__()
        self.number, self.times = number, times

    def on_train_batch_end(self, batch, logs=None):
        if self.number and batch == 4:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)

    def get_state(self):
        return None

    def set_state(self, state):
        pass


@pytest.mark.parametrize(
    ("number", "left_by"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_ends_the_step_saves_and_leaves_fit(number, left_by, tmp_path):
    before = signal.getsignal(number)
    with pytest.raises(left_by) as left:
        train(arrays, tmp_path, callbacks=[lambda: Send(number)], checkpoint={})
    assert left_by is not SystemExit or left.value.code == 143
    assert names(tmp_path) == ["epoch-0000-step-000005"]
    assert signal.getsignal(number) is before
    assert_same_end(train(arrays, tmp_path, callbacks=[lambda: Send(0)]), train(arrays))


def test_a_signal_after_the_last_epoch_is_not_lost(tmp_path):
    def late():
        return keras.callbacks.LambdaCallback(
            on_train_end=lambda logs: os.kill(os.getpid(), signal.SIGTERM)
        )

    with pytest.raises(SystemExit):
        train(arrays, tmp_path, epochs=1, callbacks=[late], checkpoint={})
    assert names(tmp_path) == ["epoch-0001-step-000000"]


@pytest.mark.whole
def test_a_second_interrupt_does_not_wait(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(arrays, tmp_path, callbacks=[lambda: Send(signal.SIGINT, 2)], checkpoint={})
    assert names(tmp_path) == []


def test_a_handler_that_the_script_has_is_called_after_the_save(tmp_path):
    called = []
    before = signal.signal(signal.SIGTERM, lambda *_: called.append(names(tmp_path)))
    try:
        with pytest.raises(SystemExit):
            train(arrays, tmp_path, callbacks=[lambda: Send(signal.SIGTERM)], checkpoint={})
    finally:
        signal.signal(signal.SIGTERM, before)
    assert called == [["epoch-0000-step-000005"]]


@pytest.mark.whole
def test_an_ignored_signal_stays_ignored_and_a_thread_has_none(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        train(arrays, tmp_path / "a", callbacks=[lambda: Send(signal.SIGINT)], checkpoint={})
    finally:
        signal.signal(signal.SIGINT, before)
    failed = []

    def run():
        try:
            train(arrays, tmp_path / "b", epochs=1, checkpoint={})
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failed
    assert names(tmp_path / "b") == ["epoch-0001-step-000000"]


# ---------------------------------------------------------------------- words, files


def test_one_line_says_from_where(tmp_path, capsys):
    train(arrays, tmp_path, cut=11, devices=4, checkpoint={"steps": 3, "background": False})
    capsys.readouterr()
    train(arrays, tmp_path, devices=2, verbose=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if "resumes from" in line]
    (newest,) = [line for line in lines if "epoch-0001-step-000002" in line]
    assert newest.endswith("epoch 2, after step 2; 4 devices then, 2 now")
    train(arrays, tmp_path, devices=2, verbose=2)
    assert "nothing left to do; 2 devices then, 2 now" in capsys.readouterr().out


def test_evaluate_and_predict_take_no_notice(tmp_path):
    made = lockstep.distribute(small(), 1)
    x, y = held_out()
    made.evaluate(x, y, verbose=0, callbacks=[lockstep.Checkpoint(tmp_path / "run")])
    made.predict(x, verbose=0, callbacks=[lockstep.Checkpoint(tmp_path / "run")])
    assert not (tmp_path / "run").exists()
