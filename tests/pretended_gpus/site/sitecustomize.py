"""Make the processes of a test pretend, child processes too: Python imports this file at its start.

`PRETENDED_GPUS=jax` imports `tests.pretended_gpus.of_jax` after the start of Python. The dict
`AFTER` there has a function for each module that it changes, which runs when that module has been
imported.
"""

import importlib
import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs `after[name]()` when the module `name` has been imported."""

    def __init__(self, after):
        self._after = dict(after)
        self._looking = False

    def find_spec(self, name, path=None, target=None):
        if name not in self._after or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            change = self._after.pop(name, None)
            if change is not None:
                change()

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("PRETENDED_GPUS"):
    _root = str(Path(__file__).resolve().parents[3])
    sys.path.append(_root)
    _module = importlib.import_module(f"tests.pretended_gpus.of_{os.environ['PRETENDED_GPUS']}")
    sys.path.remove(_root)
    sys.meta_path.insert(0, _AfterImport(_module.AFTER))
