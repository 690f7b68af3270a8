"""The versions of the frameworks that lockstep was tried with."""

import re
from typing import NamedTuple

from lockstep.core.package_versions import package_version
from lockstep.errors import UnsupportedFramework


class Tried(NamedTuple):
    """The versions of one framework, and the module of its private names.

    Attributes:
        oldest: The lower bound in pyproject.toml. An older one is refused.
        newest: The newest one whose tests have passed. A newer one runs, and a line says so.
    """

    oldest: str
    newest: str


TRIED = {
    "jax": Tried("0.7", "0.12.0.1"),
    "tensorflow": Tried("2.20", "2.21.0"),
    "torch": Tried("2.6", "2.15.0"),
}
_TENSORFLOWS = ("tensorflow", "tensorflow-cpu")


def check_oldest(framework: str, version: str) -> None:
    """Raise where a framework is too old.

    Args:
        framework: The name of its module.
        version: As in its `__version__`.

    Raises:
        UnsupportedFramework: If it is older than the oldest that was tried.
    """
    oldest = TRIED[framework].oldest
    if _numbers(version) < _numbers(oldest):
        raise UnsupportedFramework(
            f"{framework} {version} is installed, but lockstep needs {framework}>={oldest}:\n"
            "older versions lack internal functions that it uses.\n"
            f'Run pip install --upgrade "{framework}>={oldest}"'
        )


def untried(framework: str, version: str) -> str | None:
    """Return the line on a framework that is newer than any that was tried, `None` without any.

    Example:
        >>> untried("jax", "99.1")
        'jax 99.1 is newer than any that lockstep was tried with (0.12.0.1); lockstep verify checks your model'
        >>> untried("jax", "0.10.2")
    """  # noqa: E501
    known = TRIED.get(framework)
    if known is None or _numbers(version) <= _numbers(known.newest):
        return None
    return (
        f"{framework} {version} is newer than the versions lockstep was tested with (up to "
        f"{known.newest}); lockstep verify checks your model"
    )


def check_one_tensorflow() -> None:
    """Raise where two packages of TensorFlow have written over each other's files.

    Raises:
        UnsupportedFramework: If both are installed, in different versions.
    """
    if problem := mixed_tensorflow():
        raise UnsupportedFramework(problem)


def mixed_tensorflow() -> str | None:
    """Return what is wrong with the packages of TensorFlow, and the command that mends it."""
    found = {name: version for name in _TENSORFLOWS if (version := package_version(name))}
    if len(set(found.values())) < 2:
        return None
    both = " and ".join(f"{name} {version}" for name, version in found.items())
    newest = max(found.values(), key=_numbers)
    return (
        f"{both} are both installed, and overwrite each other's files.\n"
        f"Run pip uninstall -y tensorflow tensorflow-cpu && pip install tensorflow=={newest}"
    )


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found[0].split(".")) if found else ()
