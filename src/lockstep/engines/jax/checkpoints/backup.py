"""Keras's `BackupAndRestore`, whose two files change together or not at all."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.checkpoints.files import sync_file, sync_folder, write_file
from lockstep.engines.jax.several.calls import CALLS

_NEXT = "next-"


@contextmanager
def made_safe(callback: Any) -> Iterator[None]:
    """While it lasts, a kill at any moment leaves a backup that can be restored.

    Keras writes the weights over the last good ones, and then the epoch that they are of into
    another file: a kill between the two, or within one of them, restores another epoch than
    the weights are of, or nothing. Here both are written aside first, and then renamed, the
    weights before the epoch; a kill between the two renamings leaves the second file aside,
    and it is renamed when the backup is restored.
    """
    own = type(callback)._save_model.__module__ != "keras.src.callbacks.backup_and_restore"
    if own or "://" in str(callback._weights_path):  # a store that knows no renaming
        yield
        return
    files = _Files(callback)
    files.finish()
    callback._save_model = files.save
    try:
        yield
    finally:
        del callback._save_model


class _Files:
    """The two files of a backup, and where they stand while they are written."""

    # keras/src/callbacks/backup_and_restore.py, BackupAndRestore._save_model

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._files = [Path(callback._weights_path), Path(callback._training_metadata_path)]
        self._copies = [
            Path(callback._prev_weights_path),
            Path(callback._prev_training_metadata_path),
        ]
        self._aside = [file.with_name(_NEXT + file.name) for file in self._files]

    def finish(self) -> None:
        """Finish a renaming that a kill has cut in two, and forget what was half written."""
        weights, epoch = self._aside
        if epoch.exists() and not weights.exists():
            os.replace(epoch, self._files[1])
        for file in reversed(self._aside):  # the epoch never stands alone by this
            file.unlink(missing_ok=True)

    def save(self) -> None:
        """What `_save_model` does."""
        callback, (weights, epoch) = self._callback, self._aside
        weights.parent.mkdir(parents=True, exist_ok=True)
        self.finish()
        if callback.double_checkpoint:
            for file, copy in zip(self._files, self._copies, strict=True):
                if file.exists():
                    copying = copy.with_name(_NEXT + copy.name)
                    shutil.copyfile(file, copying)
                    os.replace(copying, copy)
        with CALLS.alone():  # the other processes have no backup to wait for
            callback.model.save_weights(filepath=str(weights), overwrite=True)
        said = {"epoch": callback._current_epoch, "batch": callback._last_batch_seen}
        sync_file(weights)
        write_file(epoch, [json.dumps(said).encode()])
        sync_folder(weights.parent)
        os.replace(weights, self._files[0])
        os.replace(epoch, self._files[1])
        sync_folder(weights.parent)
