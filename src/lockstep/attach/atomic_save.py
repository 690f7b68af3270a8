"""Atomic versions of `save` and `save_weights`: a file is replaced completely or not at all."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from lockstep.core.files import replacing

SAVING = ("save", "save_weights")


def atomic_saves(model: Any) -> dict[str, Callable[..., Any]]:
    """Return the saving methods of a model that are Keras's own, each made atomic.

    Keras overwrites the file in place. If the process is killed meanwhile, both the old file
    and the new one are lost.
    """
    methods = {name: getattr(model, name) for name in SAVING if hasattr(model, name)}
    return {
        name: _atomic(method)
        for name, method in methods.items()
        if getattr(method, "__func__", None) is getattr(keras.Model, name)
    }


def _atomic(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_atomically(filepath: Any, overwrite: bool = True, *args: Any, **kwargs: Any) -> Any:
        path = None if args or kwargs or not overwrite else _local_file(filepath)
        if path is None:  # Keras saves, with its own prompts and errors
            return save(filepath, overwrite, *args, **kwargs)
        with replacing(path) as temporary:
            return save(temporary)

    return save_atomically


def _local_file(filepath: Any) -> Path | None:
    """Return the file to replace, `None` if it cannot be replaced atomically here."""
    if not isinstance(filepath, str | os.PathLike) or "://" in str(filepath):
        return None
    path = Path(os.path.realpath(filepath))
    known = path.name.endswith((".keras", ".weights.h5", ".h5", ".hdf5"))
    if not known or path.is_dir() or not os.access(path.parent, os.W_OK):
        return None
    return path
