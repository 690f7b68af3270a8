"""Tells which modules are the user's own: those that are in no installed package."""

import os
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType

_NOT_OWN = sysconfig.get_path("stdlib"), str(Path(__file__).parents[1])
_FRAMEWORKS = {"keras", "numpy", "jax", "tensorflow", "torch"}
"""Packages that are not the user's own in a checkout either."""


def is_own(module: ModuleType) -> bool:
    """Return whether a module is in a file that is neither installed nor of Python or lockstep."""
    file = getattr(module, "__file__", None)
    if file is None:  # a package without __init__.py
        file = next(map(str, getattr(module, "__path__", ())), None)
    return isinstance(file, str) and _is_own_place(file, module.__name__.partition(".")[0])


@cache
def _is_own_place(place: str, package: str) -> bool:
    """Return whether a file or folder of a package is the user's own."""
    if package in _FRAMEWORKS or place.startswith(_NOT_OWN):
        return False
    parts = place.split(os.sep)
    if {"site-packages", "dist-packages"}.intersection(parts):
        return False
    folder = parts[: parts.index(package)] if package in parts else parts[:-1]
    return not _has_installed(os.sep.join(folder))


@cache
def _has_installed(folder: str) -> bool:
    """Return whether packages were installed into a folder, as by `pip install --target`."""
    return any(Path(folder or os.sep).glob("*.dist-info"))
