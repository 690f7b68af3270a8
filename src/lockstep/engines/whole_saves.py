"""Keras's `save` and `save_weights`, which write a file whole or not at all."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from lockstep.checkpoints.files import sync_file, sync_folder

_NAMES = ("save", "save_weights")


def whole_saves(model: Any) -> dict[str, Callable[..., Any]]:
    """Keras's own saving methods of a model, through a file aside that is renamed at the end.

    Keras writes into the very file that is to be replaced: a kill meanwhile leaves neither
    the old one nor the new one.
    """
    methods = {name: getattr(model, name) for name in _NAMES if hasattr(model, name)}
    return {
        name: _whole(method)
        for name, method in methods.items()
        if getattr(method, "__func__", None) is getattr(keras.Model, name)
    }


def _whole(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_whole(filepath: Any, overwrite: bool = True, *args: Any, **kwargs: Any) -> Any:
        path = None if args or kwargs or not overwrite else _local_file(filepath)
        if path is None:  # left to Keras, with what it asks about or refuses
            return save(filepath, overwrite, *args, **kwargs)
        aside = path.with_name(f".saving-{path.name}")
        try:
            done = save(aside)
            sync_file(aside)
            os.replace(aside, path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
        return done

    return save_whole


def _local_file(filepath: Any) -> Path | None:
    """The file that is to be replaced, `None` where it is no file of this machine."""
    if not isinstance(filepath, str | os.PathLike) or "://" in str(filepath):
        return None
    path = Path(os.path.realpath(filepath))
    known = path.name.endswith((".keras", ".weights.h5", ".h5", ".hdf5"))
    if not known or path.is_dir() or not os.access(path.parent, os.W_OK):
        return None
    return path
