"""The comparison in float64, which tells rounding from a fault, in a process of its own.

Keras and JAX cache types, so the process of the user cannot compute in float64 for a while.
"""

import os
import pickle
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import numpy as np

from lockstep.attach.model_pickle import ModelPickler, dumped, reason_of, trackers_mended
from lockstep.core.engine import Engine
from lockstep.core.layout import DataParallel
from lockstep.core.own_code import is_own
from lockstep.core.state import to_host
from lockstep.engines import current_engine
from lockstep.keras_compat import DTYPES, KerasSaveable, compute_in_float64, stored_value
from lockstep.tools.batches import Batch
from lockstep.tools.verify.verification import SameWeights, Verification

Result = tuple[Verification, SameWeights | None]

NEXT = "lockstep verify file.py:function --float64 builds the model in float64, and can decide."


GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
"""Whether TensorFlow takes the memory of a GPU as it needs it, and not all at its start."""

IN_FLOAT64 = " in float64 ..."
"""The end of the name of a run in float64, in a line that shows how far it is."""


def compare_in_float64(
    compare: Callable[..., Result],
    engine: Engine,
    model: Any,
    batches: list[Batch],
    layout: DataParallel,
) -> Result | str:
    """Do what `compare` does with a copy of the model that computes in float64.

    Args:
        compare: The function `compare` of `comparison.py`, which imports this file.
        engine: The engine of the model's backend.
        model: A compiled model that is built, has its values of the start, and is not attached.
        batches: The batches to train on, one for each step.
        layout: How the model is laid out on the devices that are compared with one.

    Returns:
        The result, or why there is none.
    """
    batches = keras.tree.map_structure(_widened, batches)
    settings = keras.config.image_data_format(), keras.config.epsilon()
    try:
        with _own_code_by_value():
            sent = compare, settings, model, batches, layout
            packed = dumped(sent, _Pickler).file.getvalue()
    except Exception as error:
        return (
            "for the float64 comparison, the model cannot be sent to another process "
            f"({reason_of(error)}). {NEXT}"
        )
    last: deque[str] = deque(maxlen=3)
    with tempfile.TemporaryDirectory(prefix="lockstep-float64-") as folder:
        given, found = Path(folder) / "given", Path(folder) / "found"
        given.write_bytes(packed)
        with subprocess.Popen(
            [sys.executable, "-m", __name__, str(given), str(found)],
            env=_environment(engine),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if sys.stderr.isatty() else subprocess.PIPE,  # the progress lines
            text=True,
            errors="replace",
        ) as process:
            try:
                for line in process.stderr or ():
                    last.append(line.strip())
                    if IN_FLOAT64 in line:
                        print(line.rstrip(), file=sys.stderr, flush=True)
                process.wait()
            except BaseException:
                process.kill()
                raise
        if not found.exists():
            why = f"the process of the float64 comparison ended with status {process.returncode}."
            return " ".join([why, " / ".join(last), _without_memory(engine)]).rstrip()
        result: Result | str = pickle.loads(found.read_bytes())
        return result


def _without_memory(engine: Engine) -> str:
    """Return what to do if this process may have left that of float64 no memory, or ""."""
    takes_all = engine.name == "tensorflow" and os.environ.get(GROWTH) != "true"
    if not takes_all or engine.devices()[0].platform == "cpu":
        return ""
    return f"TensorFlow reserves all memory of a GPU: set {GROWTH}=true before Python starts."


def _environment(engine: Engine) -> dict[str, str]:
    """Return the environment of a process with the same backend, devices and import path."""
    devices = engine.devices()
    rehearsal = {"LOCKSTEP_REHEARSE": str(len(devices))} if devices[0].kind == "cpu" else {}
    # On GPUs, JAX would take memory that this process holds.
    own = {"KERAS_BACKEND": engine.name, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", GROWTH: "true"}
    return {**os.environ, **own, **rehearsal, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class _Pickler(ModelPickler):
    """Pickles a model as one that computes in float64."""

    by_attributes = (KerasSaveable, keras.Variable, keras.KerasTensor)

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, keras.DTypePolicy):
            return keras.DTypePolicy, ("float64",)
        if keras.ops.is_tensor(item) and not isinstance(item, keras.Variable):
            # TensorFlow has variables of several types.
            variable = type(stored_value(keras.Variable(0.0)))
            kept = isinstance(item, variable) or hasattr(item, "assign")
            trained = getattr(item, "trainable", getattr(item, "requires_grad", False))
            return (_variable if kept else _tensor), (_widened(to_host(item)), trained)
        if type(item).__name__ == "_DefaultDistributionStrategy":  # of optimizers on TensorFlow
            return sys.modules[type(item).__module__].get_strategy, ()
        return super().reducer_override(item)

    def state(self, item: Any) -> dict[str, Any]:
        state = super().state(item)
        for name in DTYPES:
            if str(state.get(name)) in ("float16", "bfloat16", "float32"):
                state[name] = "float64"
        return state


def _variable(value: np.ndarray, trained: bool) -> Any:
    """Return what a Keras variable of this value holds: on PyTorch, for example, a parameter."""
    return stored_value(keras.Variable(value, trainable=trained, dtype=str(value.dtype)))


def _tensor(value: np.ndarray, _: bool) -> Any:
    return keras.ops.convert_to_tensor(value)


def _widened(value: Any) -> Any:
    return value.astype("float64") if getattr(value, "dtype", np.dtype("O")).kind == "f" else value


@contextmanager
def _own_code_by_value() -> Iterator[None]:
    """Pickle classes and functions of the user's files with the state that they have now."""
    before = cloudpickle.list_registry_pickle_by_value()
    # A set: multiprocessing keeps `__main__` under a second name. `None` marks what is not to be
    # imported.
    own: set[Any] = {sys.modules[name] for name in sys.modules.keys() - before} - {None}
    modules = [each for each in own if is_own(each) and sys.modules.get(each.__name__) is each]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def main(given: Path, found: Path) -> None:
    """Compare what `compare_in_float64` has written, and write the result or the reason."""
    compute_in_float64(whatever_is_asked=True)
    result: Result | str
    try:
        compare, settings, model, batches, layout = pickle.loads(given.read_bytes())
        keras.config.set_image_data_format(settings[0])
        keras.config.set_epsilon(settings[1])
        model = trackers_mended(model)
        result = compare(current_engine(), model, batches, layout, from_same_weights=True)
    except Exception as error:
        result = (
            f"the process of the float64 comparison ended with {type(error).__name__}: "
            f"{reason_of(error)}."
        )
    found.write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
