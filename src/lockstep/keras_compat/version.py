"""The versions of Keras that were checked."""

import re

import keras

from lockstep.errors import UnsupportedKeras

OLDEST = "3.15.1"
FIRST_UNKNOWN = "3.17"
"""The bounds of `keras` in pyproject.toml."""
_REMEDY = f'Run pip install "keras>={OLDEST},<{FIRST_UNKNOWN}"'


def check_version(version: str) -> None:
    """Raise where this version of Keras was not checked.

    Args:
        version: As in `keras.__version__`; a nightly counts as the release it precedes.

    Raises:
        UnsupportedKeras: If it is older or newer than the versions that were checked.
    """
    if not _numbers(OLDEST) <= _numbers(version) < _numbers(FIRST_UNKNOWN):
        raise UnsupportedKeras(
            f"Keras {version} is installed, but lockstep needs "
            f"keras>={OLDEST},<{FIRST_UNKNOWN}:\nit uses private Keras functions, which were "
            f"tested only with these versions.\n{_REMEDY}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _missing(what: str) -> UnsupportedKeras:
    return UnsupportedKeras(
        f"Keras {keras.__version__} has no {what}, which lockstep needs:\nthis is private in "
        f"Keras {OLDEST}, and may change in any version.\n{_REMEDY}"
    )


def _name_in(error: ImportError) -> str:
    """What could not be imported, with its module."""
    name = re.search(r"cannot import name '(\w+)'", error.msg)
    return f"{error.name}.{name[1]}" if name else str(error.name)


check_version(keras.__version__)
