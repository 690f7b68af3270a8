"""The cache of compiled programs for later starts."""

import os
import platform
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache


def keep_programs() -> None:
    """Make JAX store compiled programs in the user's cache folder.

    Nothing changes if the user has chosen a folder, has set `JAX_ENABLE_COMPILATION_CACHE=false`,
    or cannot write to the folder. JAX stores programs that took a second or more to compile. The
    key is the program's text, its options, the versions and the kind of device.
    """
    config: Any = jax.config  # its types omit the options
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if not os.access(folder, os.W_OK):
        return
    config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()  # JAX reads the folder once, at the first operation


def _folder() -> Path:
    """Return the cache folder. CPU programs have one for each host, as CPUs differ."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    host = f"cpu-{platform.node()}" if jax.default_backend() == "cpu" else "accelerators"
    return Path(home) / "lockstep" / "jax" / host
