"""Which modules are the user's own: they are in no package that was installed."""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

_NOT_OWN = sysconfig.get_path("stdlib"), str(Path(__file__).parents[1])


def is_own(module: ModuleType) -> bool:
    """Return whether a module is in a file that is neither installed nor of Python or lockstep."""
    place = next(_places_of(module), None)
    if place is None:
        return False
    installed = {"site-packages", "dist-packages"}.intersection(place.split(os.sep))
    return not installed and not place.startswith(_NOT_OWN)


def _places_of(module: ModuleType) -> Iterator[str]:
    file = getattr(module, "__file__", None)
    if isinstance(file, str):
        yield file
    elif file is None:  # a package without __init__.py
        yield from map(str, getattr(module, "__path__", ()))
