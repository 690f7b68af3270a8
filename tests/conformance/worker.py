"""A process that runs conformance cases in float64 on one backend, one after another.

`Worker` starts it. A test asks it for one case on a number of devices, so that each case
is a test of its own on every backend, and Python and the backend start once.
"""

import json
import os
import subprocess
import sys
import traceback
import warnings
from contextlib import nullcontext
from functools import lru_cache, partial

DEVICES = {"jax": 8, "tensorflow": 4, "torch": 4}


OF_UNKNOWN_LENGTH = {
    *("tf.data, unknown cardinality", "Grain MapDataset", "Grain IterDataset", "Grain DataLoader"),
    *("generator that ends", "generator of changing batch sizes"),
}
"""Keras 3.15.1 without XLA counts a step too many at the end of these data, on one TensorFlow
device. A model with branches counts as one device with XLA, which is the default on GPUs."""


class Worker:
    """A warm process with Keras on this backend."""

    def __init__(self, backend):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "PYTEST_"))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.conformance.worker"],
            env={
                **kept,
                "KERAS_BACKEND": backend,
                "LOCKSTEP_REHEARSE": str(DEVICES[backend]),
                "JAX_ENABLE_X64": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def difference(
        self,
        family,
        name,
        devices,
        *,
        by_layer=False,
        state="replicated",
        micro_batch_size=None,
        traced=False,
    ):
        """Return the largest difference of a case from one device, by quantity.

        Only quantities beyond the bound of the case are in it. `by_layer=True` places layers on
        the devices instead of distributing the model. With `state="sharded"` variables of any size
        are sharded. A case that `micro_batch_size` refuses returns `{"refused": the text}`. With
        `traced`, steps run as graphs on PyTorch, with the random numbers of one device; one that
        is not traced adds `{"not traced": the reason}`.
        """
        try:
            call = json.dumps([family, name, devices, by_layer, state, micro_batch_size, traced])
            print(call, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        assert answer, f"the worker ended with status {self._process.wait()}"
        found = json.loads(answer)
        assert "error" not in found, found["error"]
        return found

    def close(self):
        """End the process."""
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def _differences(family, name, devices, by_layer, state, micro_batch_size, traced):
    import lockstep
    from lockstep.errors import (
        NotTracedWarning,
        SerialBranchesWarning,
        UnsplitBatchWarning,
        UnsupportedModel,
    )
    from tests.conformance.cases.case import gaps, play

    draws = by_layer or traced or _backend() != "torch"  # the random numbers of one device
    xla = by_layer and _backend() == "tensorflow" and name in OF_UNKNOWN_LENGTH
    case, one = case_of(family, name, draws), _on_one_device(family, name, draws, xla)
    machine = nullcontext()
    if _backend() == "torch" and by_layer:
        from tests.torch.simulated_gpus import simulated_gpus

        machine = simulated_gpus(devices)  # PyTorch cannot tell its CPU devices apart
    elif _backend() == "torch":
        keep_processes_warm(devices)
    shard_small_variables()
    lay_out = partial(spread if by_layer else lockstep.distribute, devices=devices)
    laid_out = []
    if state == "sharded":
        lay_out = partial(lay_out, state=state)
    if micro_batch_size is not None:
        lay_out = partial(lay_out, micro_batch_size=micro_batch_size)
    if traced:
        plain = partial(lay_out, same_random_numbers=devices > 1)
        lay_out = partial(laid_out_and_traced, plain)
    with machine, warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always", UnsplitBatchWarning)
        warnings.simplefilter("always", NotTracedWarning)
        warnings.simplefilter("ignore", SerialBranchesWarning)
        try:
            many = play(case, lambda model: laid_out.append(lay_out(model)))
        except UnsupportedModel as refusal:
            if micro_batch_size is None:
                raise
            return {"refused": str(refusal)}
    if state == "sharded":
        check_shards(laid_out[0], devices)
    if _backend() == "jax" and not by_layer:
        assert not given
    found = {key: gap for key, gap in gaps(one, many).items() if not gap <= case.bound}
    reasons = [str(each.message) for each in given if each.category is NotTracedWarning]
    return found | ({"not traced": reasons} if reasons else {})


def laid_out_and_traced(lay_out, model):
    """Lay a model out, and let its steps be traced."""
    model = lay_out(model)
    model.jit_compile = True
    return model


def shard_small_variables():
    """Let `state="sharded"` shard variables of any size, as the models of the cases are small."""
    # `lockstep.devices` is a function; its module has the same name.
    sys.modules["lockstep.core.devices"].SHARDED_FROM = 0


def check_shards(model, devices):
    """Tell whether a variable is in shards; raise if none is, and one could be.

    The variables of RNNs are whole on each device, as documented.
    """
    import keras

    from lockstep.attach.attachment import session_of
    from lockstep.core.devices import sharded_dim
    from lockstep.keras_compat import layers_in

    session, variables = session_of(model), model.variables
    rnns = [layer for layer in layers_in(model) if isinstance(layer, keras.layers.RNN)]
    whole = {id(each) for layer in rnns for each in layer.variables}
    forms = [(tuple(each.shape), 8, devices) for each in variables if id(each) not in whole]
    can = _backend() == "torch" or any(sharded_dim(*form) is not None for form in forms)
    found = any(session.home(each).shards > 1 for each in variables)
    assert found or not can, "nothing in shards"
    return found


def spread(model, devices):
    """Give the layers of a model to the devices in turn, which is as many transfers as can be."""
    import lockstep
    from lockstep.keras_compat import sublayers_of

    layers = enumerate(sublayers_of(model))
    return lockstep.place(model, {layer.name: number % devices for number, layer in layers})


@lru_cache
def keep_processes_warm(devices):
    """Return a model that holds the processes of so many devices from one case to the next."""
    import keras
    import numpy as np

    import lockstep

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    lockstep.distribute(model, devices).predict(np.ones((devices, 1)), verbose=0)
    return model


@lru_cache(maxsize=2)
def _on_one_device(family, name, draws, xla):
    """What one device leaves, by Keras alone."""
    import numpy as np

    from tests.conformance.cases.case import play

    one = play(case_of(family, name, draws), _with_xla if xla else None)
    assert all(np.all(np.isfinite(value.astype("float64"))) for value in one.values())
    return one


def _with_xla(model):
    model.jit_compile = True


def case_of(family, name, draws):
    """The case, without random numbers unless `draws`."""
    from dataclasses import replace

    from tests.conformance.cases import FAMILIES
    from tests.conformance.cases.in_parts import IN_PARTS

    case = {**FAMILIES, "In parts": IN_PARTS}[family][name]
    if case.make_plain is None or draws:
        return case
    return replace(case, make=case.make_plain)


def _backend():
    return os.environ["KERAS_BACKEND"]


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Keras prints does not mix with the answers
    import lockstep  # noqa: F401  (follows LOCKSTEP_REHEARSE before anything runs)
    from lockstep.keras_compat import compute_in_float64

    compute_in_float64()
    warnings.simplefilter("error")
    for action, message in IGNORED:
        warnings.filterwarnings(action, message)
    for line in sys.stdin:
        try:
            answer = _differences(*json.loads(line))
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # to free all memory first takes up to a minute


IGNORED = [
    # keras.Variable under NumPy 2, keras/src/backend/common/variables.py (Keras 3.15.1)
    ("ignore", "__array__ implementation doesn't accept a copy keyword"),
    # A recurrent layer that is given a mask, keras/src/layers/layer.py (Keras 3.16)
    ("ignore", "Layer .* was passed an input with a mask attached to it"),
    # Every source that does not tell its length, keras/src/trainers/epoch_iterator.py
    ("ignore", "Your input ran out of data"),
]

if __name__ == "__main__":
    main()
