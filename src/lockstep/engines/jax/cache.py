"""Compiled programs, kept for the next start."""

import os
import platform
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache


def keep_programs() -> None:
    """Let JAX keep what it compiles in the user's cache folder.

    A choice that the user has made is left alone: a folder of their own, or
    `JAX_ENABLE_COMPILATION_CACHE=false`. So is a folder that cannot be written. JAX keeps
    what took it a second or more, and knows a program by its text, its options, the
    versions and the kind of device.
    """
    config: Any = jax.config  # whose types leave its options out
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
    compilation_cache.reset_cache()  # it looks for its folder once, at the first operation


def _folder() -> Path:
    """One for each host where programs are for its CPU, which another need not have."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    host = f"cpu-{platform.node()}" if jax.default_backend() == "cpu" else "accelerators"
    return Path(home) / "lockstep" / "jax" / host
