"""The versions of installed packages."""

from importlib.metadata import PackageNotFoundError, version


def package_version(package: str) -> str | None:
    """The installed version of a package, `None` without it.

    The nightly build of Keras is a package of its own name, keras-nightly.
    """
    if package == "keras-lockstep":
        from lockstep import __version__

        return __version__
    for name in (package, f"{package}-nightly"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
