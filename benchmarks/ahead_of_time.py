"""Lockstep's training step, compiled for GPUs that are not here, and what it would do there.

    pip install -e ".[plan]"
    KERAS_BACKEND=jax python benchmarks/ahead_of_time.py

XLA compiles a program for GPUs on a machine without any. What comes out is the schedule
that a GPU would be given: this reads how often and how much the devices tell one another,
how much of the state is updated in place, and how much is computed between the start of
each all-reduce and the wait for its result. Nothing runs, and nothing is timed.

`--set NAME=VALUE` tries options of XLA. `--json` prints everything as one object.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"  # what is here; the compiler for GPUs is found all the same
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # it cannot read programs for other devices
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import argparse
import importlib.metadata
import json
import time
from typing import Any

import hlo
import jax
import keras
import models
import numpy as np
from jax.experimental import topologies

import lockstep
from lockstep.engines.jax.introspection.ahead_of_time import cuda_folder
from lockstep.engines.jax.steps.padded import PaddedArray
from lockstep.engines.jax.steps.programs import Programs

TARGET = """
platform_name: "CUDA"
device_description_str: "{name}"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 8 }}
gpu_device_info {{
  cuda_compute_capability {{ major: {capability} }}
  core_count: {cores}
  fpus_per_core: {lanes}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  memory_bandwidth: {bandwidth}
  l2_cache_size: {cache}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared}
  shared_memory_per_core: {shared_by_core}
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  threads_per_warp: 32
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
"""
"""What the compiler has to know of a device."""

TARGETS = {
    "h200": {
        "name": "NVIDIA H200",
        "capability": 9,
        "cores": 132,
        "lanes": 128,
        "clock": 1.98,
        "memory": 151397597184,
        "bandwidth": 4800000000000,
        "cache": 50 * 2**20,
        "shared": 227 * 2**10,
        "shared_by_core": 228 * 2**10,
    },
    "a100": {
        "name": "NVIDIA A100",
        "capability": 8,
        "cores": 108,
        "lanes": 64,
        "clock": 1.41,
        "memory": 80 * 2**30,
        "bandwidth": 2039000000000,
        "cache": 40 * 2**20,
        "shared": 163 * 2**10,
        "shared_by_core": 164 * 2**10,
    },
}
"""NVIDIA's figures."""

DEVICES_PER_HOST = 8
ROWS = {"pictures": 64, "wide": 64, "text": 32, "bert": 32, "resnet": 32}
"""Rows of a batch on each device."""


def training_step(name: str, devices: list[Any]) -> tuple[Any, Any, Any, int, int]:
    """The program that `fit` would run, what it takes, and bytes of gradients and of state."""
    keras.utils.set_random_seed(0)
    model = lockstep.distribute(getattr(models, name)(), devices=1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    steps = Programs(devices)
    vars(model)["_lockstep"].session._programs = steps  # the mesh of devices that are not here
    shape, dtype = model.input_shape[1:], model.inputs[0].dtype
    model._symbolic_build(data_batch=(np.ones((2, *shape), dtype), np.zeros(2, "int32")))
    model.make_train_function()
    state = model._get_jax_state(
        trainable_variables=True,
        non_trainable_variables=True,
        optimizer_variables=True,
        metrics_variables=True,
    )
    rows = ROWS[name] * len(devices)

    def described(value: Any) -> Any:
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=steps.replicated)

    def batch(shape: tuple[int, ...], dtype: str) -> PaddedArray:
        return PaddedArray(
            jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=steps.by_rows), rows
        )

    held = sum(value.nbytes for value in jax.tree.leaves(state))
    gradients = sum(variable.value.nbytes for variable in model.trainable_variables)
    taken = (jax.tree.map(described, state), (batch(shape, dtype), batch((), "int32")))
    return model.train_function.run, *taken, gradients, held


def compiled(name: str, target: str, count: int, extra: dict[str, Any]) -> dict[str, Any]:
    """What the program for so many devices says."""
    hosts = max(count // DEVICES_PER_HOST, 1)
    shape = f"1x{hosts}x{count // hosts}"
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name=target,
        topology=shape,
        target_config=TARGET.format(**TARGETS[target]),
    )
    run, state, batch, gradients, held = training_step(name, list(topology.devices))
    began = time.perf_counter()
    program = run.lower(state, batch).compile(compiler_options={**_tools(), **extra})
    took = time.perf_counter() - began
    memory = program.memory_analysis()
    told = hlo.read(program.as_text())
    reduced = told.nbytes("all-reduce")
    overlapped = [each for each in told.collectives if each.flops]
    buckets = [each for each in told.collectives if each.nbytes >= 2**14]
    return {
        "model": name,
        "devices": f"{count} {target}",
        "options": extra,
        "gradient bytes": gradients,
        "collectives": told.counts(),
        "bytes all-reduced over gradient bytes": reduced / gradients,
        "donated over state bytes": memory.alias_size_in_bytes / held,
        "operations": told.lines,
        "kernels": len(told.entry),
        "all-reduces of 16 KiB and more": len(buckets),
        "share of bytes with computation between start and wait": (
            sum(each.nbytes for each in overlapped) / reduced
        ),
        "share of the step's flops between them": (
            sum(each.flops for each in told.collectives) / told.flops
        ),
        "share of flops left at the first": max((each.after for each in buckets), default=0.0),
        "peak bytes of a device": memory.peak_memory_in_bytes,
        "seconds to compile": took,
        "buckets": [
            {"bytes": each.nbytes, "kernels": each.kernels, "flops": each.flops} for each in buckets
        ],
    }


def _tools() -> dict[str, Any]:
    """Where NVIDIA's assembler lies, and no measuring of kernels, for which a GPU is needed."""
    return {"xla_gpu_cuda_data_dir": cuda_folder(), "xla_gpu_autotune_level": 0}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def main() -> None:
    """Compile, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=ROWS, default=["pictures", "wide", "text"])
    parser.add_argument("--target", choices=TARGETS, default="h200")
    parser.add_argument("--devices", nargs="+", type=int, default=[8, 64, 512])
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    extra = {name: _value(value) for name, value in (each.split("=", 1) for each in arguments.set)}
    results = []
    for name in arguments.models:
        for count in arguments.devices:
            results.append(compiled(name, arguments.target, count, extra))
            if not arguments.json:
                show(results[-1])
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "keras")}
    if arguments.json:
        print(json.dumps({"results": results, "versions": versions}, indent=1))
    else:
        print(versions)


def show(result: dict[str, Any]) -> None:
    """A few lines for a person."""
    print(f"{result['model']}, {result['devices']}, options: {result['options']}")
    for key, value in result.items():
        if key not in ("model", "devices", "options", "buckets"):
            shown = f"{value:.5g}" if isinstance(value, float) else value
            print(f"  {key}: {shown}")
    print("", flush=True)


if __name__ == "__main__":
    main()
