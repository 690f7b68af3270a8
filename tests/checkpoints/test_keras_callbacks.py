"""Keras's own callbacks that write files leave a good one behind a kill at any moment."""

import contextlib
import os

import h5py
import keras
import numpy as np
import pytest

import lockstep
from tests.checkpoints.cutting import Cut
from tests.checkpoints.runs import small


@contextlib.contextmanager
def cut_while_writing(at):
    """Cut in the middle of an HDF5 file, of which Keras has written a part."""
    left = [at]

    def cutting(call):
        def until_then(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                raise Cut
            return call(*args, **kwargs)

        return until_then

    with pytest.MonkeyPatch.context() as patch:
        for name in ("__setitem__", "create_dataset"):
            patch.setattr(h5py.Group, name, cutting(getattr(h5py.Group, name)))
        with pytest.raises(Cut):
            yield


def good(path):
    """The one number that every weight of the model in a file has."""
    if path.suffix == ".keras":
        made = keras.models.load_model(path)
    else:
        made = small()
        made.load_weights(path)
    (value,) = {float(number) for array in made.get_weights() for number in array.ravel()}
    return value


def filled(made, value):
    made.set_weights([np.full_like(array, value) for array in made.get_weights()])
    return made


@pytest.mark.parametrize("name", ["last.weights.h5", "last.keras"])
def test_model_checkpoint_keeps_the_last_good_file(name, tmp_path):
    def save(made, value):
        callback = keras.callbacks.ModelCheckpoint(
            tmp_path / name, save_weights_only=name.endswith("h5")
        )
        callback.set_model(filled(made, value))
        callback.on_epoch_end(0, {})

    made = lockstep.distribute(small(), devices=2)
    save(made, 1.0)
    for at in (1, 2):
        with cut_while_writing(at):
            save(made, 2.0)
        assert good(tmp_path / name) == 1.0
    save(made, 3.0)
    assert good(tmp_path / name) == 3.0
    assert os.listdir(tmp_path) == [name]


def test_what_keras_asks_about_or_refuses_stays_with_keras(tmp_path):
    made = lockstep.distribute(small(), devices=1)
    with pytest.raises(ValueError, match=r"must end in `.weights.h5`"):
        made.save_weights(tmp_path / "a.txt")
    with pytest.raises(ValueError, match="Invalid filepath extension"):
        made.save(tmp_path / "a.txt")
    made.save(tmp_path / "folder", zipped=False)
    assert (tmp_path / "folder" / "config.json").exists()
    link = tmp_path / "link.keras"
    link.symlink_to(tmp_path / "file.keras")
    filled(made, 2.0).save(link)
    assert link.is_symlink()
    assert good(tmp_path / "file.keras") == 2.0


def test_nothing_is_left_of_it_when_released():
    made = lockstep.release(lockstep.distribute(small(), devices=2))
    assert not {"save", "save_weights"} & set(vars(made))


def test_a_class_with_its_own_save_keeps_it(tmp_path):
    class Own(keras.Sequential):
        def save(self, filepath, **kwargs):
            (tmp_path / "said").write_text(str(filepath))

    made = lockstep.distribute(Own([keras.Input((2,)), keras.layers.Dense(1)]), devices=1)
    made.save(tmp_path / "a.keras")
    assert (tmp_path / "said").read_text() == str(tmp_path / "a.keras")


def test_a_backup_of_keras_has_whole_weights(tmp_path):
    """`BackupAndRestore` is Keras's own; its weights go through `save_weights` of the model."""

    def backup():
        callback = keras.callbacks.BackupAndRestore(tmp_path)
        callback.set_model(lockstep.distribute(small(), devices=2))
        return callback

    callback = backup()
    for epoch in (0, 1):
        filled(callback.model, epoch + 1.0)
        callback.on_epoch_end(epoch)
    filled(callback.model, 3.0)
    with cut_while_writing(1):
        callback.on_epoch_end(2)
    again = backup()
    again.on_train_begin()
    assert again.model._initial_epoch == 2
    assert {float(number) for array in again.model.get_weights() for number in array.ravel()} == {2}
