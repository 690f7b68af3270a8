"""One accelerator: `fit` and `predict` under lockstep beside stock Keras, in time and memory.

    KERAS_BACKEND=jax python benchmarks/one_accelerator.py
    KERAS_BACKEND=torch python benchmarks/one_accelerator.py

ResNet-50 and a transformer of BERT-base's size, each library in a process of its own on the
first device, taking turns round after round. The clock on the wall is what counts here, from
the call to its return; memory is the most that the backend had in use on the device.
`--policy mixed_bfloat16` computes as large models are trained.
`--traced` lets steps of lockstep on PyTorch be traced, and compiled before they are measured.
`--models mlp --steps 50` tries the command where there is no accelerator.
"""

import argparse
import contextlib
import json
import os
import time
from typing import Any

from peers import ratio, spread, versions
from workers import Worker, answer, is_compiling

ROWS = {"resnet": 32, "bert": 32, "mlp": 32}
SIDES = ("keras", "lockstep")
CALLS = ("fit", "predict")


def worker(side: str, name: str, steps: int, policy: str, *, traced: bool) -> None:
    """One process: seconds of the call whose name comes in, and the device's memory."""
    import keras
    import models
    import numpy as np

    import lockstep

    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(0)
    model = getattr(models, name)()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss, metrics=["accuracy"])
    if side == "lockstep":
        lockstep.distribute(model, devices=1)
        model.jit_compile = traced or model.jit_compile
    rng = np.random.default_rng(0)
    rows, (width, *_) = ROWS[name] * steps, model.output_shape[1:]
    shape = model.input_shape[1:]
    if model.inputs[0].dtype == "int32":
        x = rng.integers(0, 1000, (rows, *shape)).astype("int32")
    else:
        x = rng.normal(size=(rows, *shape)).astype("float32")
    y = rng.integers(0, width, rows).astype("int32")
    options: dict[str, Any] = {"batch_size": ROWS[name], "verbose": 0}
    calls = {
        "fit": lambda: model.fit(x, y, **options),
        "predict": lambda: model.predict(x, **options),
    }
    memory, first = {}, {}
    for call, run in calls.items():  # compiles
        begun = time.perf_counter()
        run()
        first[call] = time.perf_counter() - begun
        while is_compiling():
            run()
        run()
        device, memory[call] = first_device()
    answer({"device": device, "memory": memory, "first": first})
    with contextlib.suppress(EOFError):
        while True:
            run = calls[input()]
            start = time.perf_counter()
            run()
            answer((time.perf_counter() - start) / steps)


def first_device() -> tuple[str, int | None]:
    """The kind of the device, and the most bytes that were in use on it."""
    if os.environ["KERAS_BACKEND"] == "torch":
        import torch

        if not torch.cuda.is_available():
            return "cpu", None
        return torch.cuda.get_device_name(0), torch.cuda.max_memory_allocated()
    import jax

    device = jax.devices()[0]
    return device.device_kind, (device.memory_stats() or {}).get("peak_bytes_in_use")


def measure(name: str, rounds: int, steps: int, policy: str, *, traced: bool) -> dict[str, Any]:
    """Milliseconds per step of each call and side, lockstep's over Keras's, and memory."""
    before = os.getloadavg()[0]
    workers = {}
    for side in SIDES:
        arguments = ["--worker", side, "--models", name, "--steps", steps, "--policy", policy]
        arguments += ["--traced"] * traced
        # Two processes share the device: neither takes more of its memory than it needs.
        workers[side] = Worker(__file__, *arguments, XLA_PYTHON_CLIENT_PREALLOCATE="false")
        workers[side].wait()
    turns = [(call, side) for call in CALLS for side in SIDES]
    times: dict[tuple[str, str], list[float]] = {turn: [] for turn in turns}
    for number in range(rounds):
        for call, side in turns if number % 2 else reversed(turns):
            workers[side].ask(call)
            times[call, side].append(workers[side].answer() * 1e3)
    for each in workers.values():
        each.end()
        each.wait_for_end()
    return {
        "model": name,
        "device": workers["keras"].said["device"],
        "policy": policy,
        "traced": traced,
        "rows per step": ROWS[name],
        "steps per round": steps,
        "rounds": rounds,
        "load average": [before, os.getloadavg()[0]],
        "milliseconds": {
            call: {side: spread(times[call, side]) for side in SIDES} for call in CALLS
        },
        "lockstep over keras": {
            call: ratio(times[call, "lockstep"], times[call, "keras"]) for call in CALLS
        },
        "seconds of the first call": {side: workers[side].said["first"] for side in SIDES},
        "peak bytes, fit and then predict": {side: workers[side].said["memory"] for side in SIDES},
    }


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=ROWS, default=["resnet", "bert"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=30, help="steps per round")
    parser.add_argument("--policy", default="float32", help="Keras's dtype policy")
    parser.add_argument("--traced", action="store_true", help="on PyTorch, jit_compile=True")
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        name, steps, policy = arguments.models[0], arguments.steps, arguments.policy
        worker(arguments.worker, name, steps, policy, traced=arguments.traced)
        return
    os.environ.setdefault("KERAS_BACKEND", "jax")
    options = arguments.rounds, arguments.steps, arguments.policy
    results = [measure(name, *options, traced=arguments.traced) for name in arguments.models]
    print(json.dumps({"results": results, "versions": versions()}, indent=1))


if __name__ == "__main__":
    main()
