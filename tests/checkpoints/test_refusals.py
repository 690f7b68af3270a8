"""What does not fit is refused in words: both values, why, the one thing to do next."""

import contextlib
import errno
import gc
import os
import tempfile
import threading
from pathlib import Path

import jax
import keras
import numpy as np
import pytest
from keras import layers

import lockstep
from lockstep import errors
from tests.checkpoints.data import (
    Batches,
    arrays,
    grain_dataset,
    py_dataset,
    some_rows,
    torch_loader,
)
from tests.checkpoints.runs import assert_same_end, small, train
from tests.conformance.side_by_side import BATCH

ONWARDS = "You can still export the weights"


def told(kind, call):
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert len(text.splitlines()) <= 3, text
    assert max(map(len, text.splitlines())) <= 330, text
    return text


def untouched(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def other_model():
    made = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(2)])
    made.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return made


def other_activation():
    made = keras.Sequential(
        [keras.Input((4,)), layers.Dropout(0.3), layers.Dense(2, activation="tanh")]
    )
    made.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    return made


def compiled(optimizer, loss="mse"):
    def make():
        made = small()
        made.compile(optimizer(), loss, metrics=["mae"])
        return made

    return make


def other_rows():
    given = arrays()
    return {**given, "x": given["x"] + 1}


def fewer_rows():
    given = arrays()
    return {**given, "x": given["x"][:-1], "y": given["y"][:-1]}


DIFFERENT = {
    "model": ({"make": other_model}, "a different model or optimizer: variable 0 was trainable/"),
    "activation": ({"make": other_activation}, "a different model: "),
    "optimizer": (
        {"make": compiled(keras.optimizers.Adam)},
        "a different model or optimizer: variable ",
    ),
    "momentum": (
        {"make": compiled(lambda: keras.optimizers.SGD(0.05, momentum=0.8))},
        "a different optimizer, loss or metric: optimizer config momentum was 0.9, but is now 0.8",
    ),
    "loss": (
        {"make": compiled(lambda: keras.optimizers.SGD(0.05, momentum=0.9), "mae")},
        "a different optimizer, loss or metric: loss was 'mse', but is now 'mae'",
    ),
    "rows": ({"source": fewer_rows}, "different data: rows was 49, but is now 48"),
    "content": ({"source": other_rows}, "different data: content 0 was "),
    "batch size": ({"batch_size": 10}, "different data: batches per epoch was 7, but is now 5"),
    "order": ({"shuffle": False}, "different data: shuffle was True, but is now False"),
    "steps": ({"steps_per_epoch": 3}, "different data: steps_per_epoch was None, but is now 3"),
    "kind of data": (
        {"source": lambda: {"x": Batches(), "shuffle": True}},
        "different data: kind was 'ArrayDataAdapter', but is now 'PyDatasetAdapter'",
    ),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train(arrays, folder, cut=10)
    return folder


@pytest.mark.parametrize("what", DIFFERENT)
def test_another_run_is_refused_and_nothing_is_overwritten(what, run):
    options, words = DIFFERENT[what]
    before = untouched(run)
    text = told(
        errors.CheckpointMismatch, lambda: train(**{"source": arrays, **options}, folder=run)
    )
    assert words in text
    assert ONWARDS in text.splitlines()[-1]
    assert untouched(run) == before


def test_a_folder_of_something_else(tmp_path):
    (tmp_path / "latest.weights.h5").write_text("Keras's")
    text = told(errors.NotARun, lambda: train(arrays, tmp_path))
    assert "contains 'latest.weights.h5', but no lockstep run. Nothing in it was changed" in text
    assert list(untouched(tmp_path).values()) == [b"Keras's"]


# ------------------------------------------------------------- a folder that refuses

NEXT = "Name a folder that you can read and write, on a disk with enough space."


def refusing(monkeypatch, name, number, only="lockstep.lock"):
    """Let a call of the operating system fail for paths or handles of one file."""
    call = getattr(os, name)

    def refused(first, *args, **kwargs):
        path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
        if path.endswith(only):
            raise OSError(number, os.strerror(number))
        return call(first, *args, **kwargs)

    monkeypatch.setattr(os, name, refused)


@pytest.mark.parametrize(
    ("call", "number", "only"),
    [
        ("mkdir", errno.EROFS, "run"),  # a read-only file system
        ("mkdir", errno.EACCES, "run"),  # a parent of somebody else
        ("open", errno.EROFS, "lockstep.lock"),  # a run on a disk that is read-only by now
        ("open", errno.EACCES, "lockstep.lock"),  # somebody else's run
        ("listdir", errno.EACCES, "run"),
        ("open", errno.ENOSPC, "lockstep.lock"),
        ("pwrite", errno.ENOSPC, "lockstep.lock"),
    ],
)
def test_a_folder_that_the_system_refuses(call, number, only, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    if call != "mkdir":
        train(arrays, folder, epochs=1)
    before = untouched(tmp_path)
    with monkeypatch.context() as patch:
        refusing(patch, call, number, only)
        text = told(errors.CheckpointError, lambda: train(arrays, folder))
    assert text == f"The checkpoint folder {folder} cannot be used: {os.strerror(number)}.\n{NEXT}"
    assert untouched(tmp_path) == before


@contextlib.contextmanager
def another_user(folder):
    """Run as a user who may only read the folder; root has to become one."""
    root = os.geteuid() == 0
    folder.chmod(0o555)
    here = Path(tempfile.gettempdir())
    above = [each for each in folder.parents if root and here in each.parents]
    for parent in above:
        parent.chmod(0o711)
    # The cache of compiled programs belongs to root, too.
    cached = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        jax.config.update("jax_enable_compilation_cache", cached)
        for parent in (folder, *above):
            parent.chmod(0o700)


def test_somebody_else_s_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theirs")
    with another_user(folder):
        text = told(errors.CheckpointError, lambda: train(arrays, folder))
    assert text.endswith(f"cannot be used: Permission denied.\n{NEXT}")
    assert not untouched(folder)


def test_a_folder_that_is_a_file(tmp_path):
    file, link = tmp_path / "run", tmp_path / "link"
    file.write_text("theirs")
    link.symlink_to(tmp_path / "nowhere")
    for path in (file, link):
        text = told(errors.NotARun, lambda path=path: train(arrays, path))
        assert text.startswith(f"The checkpoint folder {path} is a file or a broken link")
    text = told(errors.CheckpointError, lambda: train(arrays, file / "run"))
    assert "cannot be used: Not a directory" in text
    assert list(untouched(tmp_path).values()) == [b"theirs"]


@pytest.mark.parametrize("threads", [False, True])
def test_two_checkpoints_of_one_process_in_one_folder(threads, tmp_path):
    """`lockf` locks for a process: both had the lock, and removed what the other wrote."""
    texts = []

    def another(epoch, logs):
        def fit():
            checkpoint = lockstep.Checkpoint(tmp_path / "run")
            other = lockstep.distribute(small(), 1)
            given = {"verbose": 0, "callbacks": [checkpoint]}
            texts.append(
                told(errors.CheckpointError, lambda: other.fit(**arrays(), **given)),
            )

        if not threads:
            fit()
        else:
            thread = threading.Thread(target=fit)
            thread.start()
            thread.join()

    def nesting():
        return keras.callbacks.LambdaCallback(on_epoch_end=another)

    options = {"epochs": 2, "callbacks": [nesting], "checkpoint": {}}
    assert_same_end(train(arrays, tmp_path / "run", **options), train(arrays, epochs=2))
    assert len(texts) == 2
    for text in texts:
        assert "is in use by another call of this process" in text
    train(arrays, tmp_path / "run")  # and the folder is free again


def test_a_model_that_is_not_distributed(tmp_path):
    made = small()
    checkpoint = lockstep.Checkpoint(tmp_path / "run")
    text = told(
        errors.UnsupportedModel,
        lambda: made.fit(**arrays(), verbose=0, callbacks=[checkpoint]),
    )
    assert "lockstep.distribute(model, devices=1) first; one device is enough" in text
    assert not (tmp_path / "run").exists()


def test_a_loop_of_a_class_of_its_own(tmp_path):
    class Own(keras.Sequential):
        def fit(self, x, y, callbacks):
            every = keras.callbacks.CallbackList(callbacks, model=self)
            every.on_train_begin()
            self.train_on_batch(x, y)

    made = Own([keras.Input((4,)), layers.Dense(2)])
    made.compile("sgd", "mse")
    lockstep.distribute(made, 1)
    text = told(
        errors.UnsupportedModel,
        lambda: made.fit(
            *(arrays()["x"], arrays()["y"]), callbacks=[lockstep.Checkpoint(tmp_path)]
        ),
    )
    assert "does not call Keras's fit" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (lambda path: [keras.callbacks.BackupAndRestore(path)], "BackupAndRestore and lockstep"),
        (
            lambda path: [lockstep.Checkpoint(path / "b")],
            "2 Checkpoint callbacks were passed to one fit",
        ),
    ],
)
def test_two_that_would_resume_one_run(others, words, tmp_path):
    made = lockstep.distribute(small(), 1)
    callbacks = [lockstep.Checkpoint(tmp_path / "a"), *others(tmp_path)]
    text = told(
        errors.CheckpointError, lambda: made.fit(**arrays(), verbose=0, callbacks=callbacks)
    )
    assert text.startswith(words)


class Changing(Batches):
    def on_epoch_end(self):
        np.random.shuffle(self.x)


def test_data_that_changes_itself_in_an_unknown_way(tmp_path):
    text = told(errors.CheckpointError, lambda: train(lambda: {"x": Changing()}, tmp_path))
    assert text.startswith("Changing changes its state in on_epoch_end")
    assert "get_state()" in text


def test_workers_with_steps_per_epoch(tmp_path):
    def source():
        return {"x": Batches(workers=2), "steps_per_epoch": 3}

    text = told(errors.CheckpointError, lambda: train(source, tmp_path))
    assert "workers=2, and fit was given steps_per_epoch=3" in text


class Moody(Batches):
    """Draws from random numbers of its own, which nobody knows of."""

    def __init__(self):
        super().__init__(noise=False)
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + self.rng.normal(size=(BATCH, 1)).astype("float32"), y


def refused_when_resumed(source, folder, **cut):
    """Train with data that no checkpoint knows all of, and go on."""
    train(source, folder, **cut)
    text = told(errors.CheckpointMismatch, lambda: train(source, folder))
    assert "random numbers that are not saved" in text
    assert ONWARDS in text


WHERE = [
    {"cut": 10, "checkpoint": {"steps": 1, "background": False}},  # within the second epoch
    {"epochs": 1, "checkpoint": {}},  # between the two
]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("where", WHERE)
def test_data_that_draws_from_random_numbers_of_its_own(where, tmp_path):
    refused_when_resumed(lambda: {"x": Moody()}, tmp_path, **where)


@pytest.mark.parametrize("where", WHERE)
def test_a_torch_data_set_that_does(where, tmp_path):
    import torch

    class MoodyToo(torch.utils.data.Dataset):
        def __init__(self):
            self.rng = np.random.default_rng(0)

        def __len__(self):
            return 49

        def __getitem__(self, index):
            return self.rng.normal(size=4).astype("float32"), np.zeros(2, "float32")

    def source():
        return {"x": torch.utils.data.DataLoader(MoodyToo(), 7)}

    refused_when_resumed(source, tmp_path, **where)


def loading(**options):
    import torch

    data = torch.utils.data.TensorDataset(*map(torch.from_numpy, (arrays()["x"], arrays()["y"])))
    return lambda: {"x": torch.utils.data.DataLoader(data, **options)}


def test_workers_that_keep_what_they_have_drawn(tmp_path):
    source = loading(batch_size=7, num_workers=1, persistent_workers=True)
    text = told(errors.CheckpointError, lambda: train(source, tmp_path))
    assert "Set persistent_workers=False" in text


class OwnOrder:
    """A sampler with random numbers of its own."""

    def __init__(self, rng=None):
        self.rng = rng or np.random.default_rng(3)

    def __len__(self):
        return 49

    def __iter__(self):
        return iter(self.rng.permutation(49).tolist())


@pytest.mark.parametrize("where", WHERE)
def test_a_sampler_with_random_numbers_of_its_own(where, tmp_path):
    import torch

    def in_batches():
        return torch.utils.data.BatchSampler(OwnOrder(), 7, False)

    sources = {
        "rows": lambda: loading(batch_size=7, sampler=OwnOrder())(),
        "batches": lambda: loading(batch_sampler=in_batches())(),
    }
    for name, source in sources.items():
        refused_when_resumed(source, tmp_path / name, **where)


def test_a_sampler_that_draws_from_numpy_s_goes_on(tmp_path):
    source = loading(batch_size=7, sampler=OwnOrder(np.random))
    truth = train(source)
    train(source, tmp_path, cut=16)
    assert_same_end(train(source, tmp_path), truth)


def test_batches_that_do_not_come_again_are_noticed(tmp_path):
    """Also where nothing could be known before."""

    def source(first):
        rng = np.random.default_rng(first)
        return lambda: {
            "x": ((rng.normal(size=(7, 4)), np.zeros((7, 2))) for _ in range(99)),
            "steps_per_epoch": 6,
        }

    train(source(1), tmp_path, cut=10)
    with pytest.warns(errors.CheckpointWarning, match="drawn again"):
        text = told(errors.CheckpointMismatch, lambda: train(source(2), tmp_path))
    assert "random numbers that are not saved" in text
    assert ONWARDS in text


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    "kind",
    [
        py_dataset,
        pytest.param(torch_loader, marks=pytest.mark.whole),
        pytest.param(grain_dataset, marks=pytest.mark.whole),
    ],
)
def test_other_rows_are_noticed_between_two_epochs_too(kind, tmp_path):
    def others():
        x, y = some_rows()
        return x + 1, y

    train(kind, tmp_path, epochs=1, checkpoint={})
    text = told(errors.CheckpointMismatch, lambda: train(lambda: kind(others), tmp_path))
    assert text.startswith("Batch 1 of the data now has the checksum")
    assert_same_end(train(kind, tmp_path), train(kind))
    gc.collect()  # the threads of Grain end with its iterators


def test_data_that_has_become_shorter(tmp_path):
    def source(batches):
        rows = [arrays()["x"][:BATCH], arrays()["y"][:BATCH]]
        return lambda: {"x": (tuple(rows) for _ in range(batches)), "steps_per_epoch": 6}

    train(source(18), tmp_path, cut=10)
    with pytest.warns(errors.CheckpointWarning, match="drawn again"):
        text = told(errors.CheckpointMismatch, lambda: train(source(5), tmp_path))
    assert "the data now end after batch 5" in text


def test_an_execution_that_does_not_begin_at_the_checkpoint(tmp_path):
    def make(times):
        def made():
            model = small()
            model.compile(keras.optimizers.SGD(0.05), "mse", steps_per_execution=times)
            return model

        return made

    train(arrays, tmp_path, cut=2, make=make(3), checkpoint={"steps": 1, "background": False})
    text = told(errors.CheckpointMismatch, lambda: train(arrays, tmp_path, make=make(2)))
    assert "after step 3 of its epoch, but with steps_per_execution=2" in text


def test_a_state_that_cannot_be_written_down(tmp_path):
    class Odd(keras.callbacks.Callback):
        def get_state(self):
            return {"file": object()}

        def set_state(self, state):
            raise AssertionError

    text = told(errors.CheckpointError, lambda: train(arrays, tmp_path, callbacks=[Odd]))
    assert "file is a object" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"every": "batch"}, "every='batch' was requested"),
        ({"steps": 0}, "steps=0 was requested"),
        ({"steps": 2.5}, "steps=2.5 was requested"),
        ({"seconds": -1}, "seconds=-1 was requested"),
        ({"steps": 5, "seconds": 5}, "steps=5 and seconds=5 were requested"),
        ({"keep": 0}, "keep=0 was requested"),
        ({"mode": "best"}, "mode='best' was requested"),
        ({"learning_rate": 0.1}, "learning_rate=0.1 was requested"),
    ],
)
def test_arguments_that_make_no_sense(arguments, words, tmp_path):
    text = told(errors.CheckpointError, lambda: lockstep.Checkpoint(tmp_path, **arguments))
    assert text.startswith(words)


def test_validation_data_that_goes_on_by_itself(tmp_path):
    def source():
        batches = ((arrays()["x"][:7], arrays()["y"][:7]) for _ in range(99))
        return {**arrays(), "validation_data": batches, "validation_steps": 2}

    text = told(errors.CheckpointError, lambda: train(source, tmp_path))
    assert text.startswith("A generator was given as validation data")


def test_a_list_of_callbacks_that_is_not_lockstep_s(tmp_path):
    made = lockstep.distribute(small(), 1)
    callbacks = keras.callbacks.CallbackList([lockstep.Checkpoint(tmp_path)], model=made)
    text = told(
        errors.CheckpointError, lambda: made.fit(**arrays(), verbose=0, callbacks=callbacks)
    )
    assert "Pass a plain list of callbacks" in text
