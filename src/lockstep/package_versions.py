"""The versions of installed packages."""

from importlib.metadata import PackageNotFoundError, version


def package_version(package: str) -> str | None:
    """Return the installed version of a package, or `None`.

    The nightly build of Keras is the package keras-nightly.
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
