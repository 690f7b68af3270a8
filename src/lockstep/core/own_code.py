"""Which modules are the user's own: they are in no package that was installed."""

import os
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

_NOT_OWN = sysconfig.get_path("stdlib"), str(Path(__file__).parents[1])
_FRAMEWORKS = {"keras", "numpy", "jax", "tensorflow", "torch"}
"""Packages that are not the user's own in a checkout either."""


def is_own(module: ModuleType) -> bool:
    """Return whether a module is in a file that is neither installed nor of Python or lockstep."""
    place = next(_places_of(module), None)
    package = module.__name__.partition(".")[0]
    if place is None or package in _FRAMEWORKS or place.startswith(_NOT_OWN):
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


def _places_of(module: ModuleType) -> Iterator[str]:
    file = getattr(module, "__file__", None)
    if isinstance(file, str):
        yield file
    elif file is None:  # a package without __init__.py
        yield from map(str, getattr(module, "__path__", ()))
