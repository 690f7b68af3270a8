"""What is installed, and the command that installs more."""

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution, version
from typing import Any
from urllib.parse import unquote, urlsplit

__version__ = "0.1.0"
DISTRIBUTION = "keras-lockstep"


def package_version(package: str) -> str | None:
    """Return the installed version of a package, or `None`.

    The nightly build of Keras is the package keras-nightly.
    """
    if package == DISTRIBUTION:
        return __version__
    for name in (package, f"{package}-nightly"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def install_command(extra: str) -> str:
    """Return the command that installs an extra of lockstep from where lockstep came from.

    A name alone works only if lockstep came from a package index. Otherwise pip has noted the
    folder, archive or repository.

    Args:
        extra: The name of the extra, such as `"demo"`.

    Returns:
        A command for a shell.
    """
    name = f"{DISTRIBUTION}[{extra}]"
    try:
        noted = distribution(DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:
        noted = None
    if noted is None:
        return f"pip install {shlex.quote(name)}"
    # https://packaging.python.org/en/latest/specifications/direct-url/
    source: dict[str, Any] = json.loads(noted)
    url = source["url"]
    if "dir_info" in source:
        editable = "-e " if source["dir_info"].get("editable") else ""
        return f"pip install {editable}{shlex.quote(f'{unquote(urlsplit(url).path)}[{extra}]')}"
    if "vcs_info" in source:
        url = f"{source['vcs_info']['vcs']}+{url}@{source['vcs_info']['commit_id']}"
    return f"pip install {shlex.quote(f'{name} @ {url}')}"
