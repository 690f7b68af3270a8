"""A training step on shapes, before there are devices or values."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import keras
from jax.experimental import topologies
from jax.sharding import Sharding

from lockstep.core.devices import SHARDED, missing_rows
from lockstep.core.patched import patched
from lockstep.core.state import variables_of
from lockstep.core.step_bytes import LayoutBytes
from lockstep.engines.jax.devices import any_device
from lockstep.engines.jax.parts.micro_batches import MicroBatches
from lockstep.engines.jax.steps.gather_again import ONE_BY_ONE, gathering_again
from lockstep.engines.jax.steps.lora import with_lora_by_factors
from lockstep.engines.jax.steps.padded import PaddedArray
from lockstep.engines.jax.steps.programs import Programs
from lockstep.engines.jax.steps.state_layout import (
    Replicated,
    Sharded,
    drop_shards,
    hold_in_shards,
)
from lockstep.engines.jax.steps.variable_sync import GROUPS, group_of
from lockstep.errors import UnsupportedBackend
from lockstep.keras_compat import store_value, stored_value


def traced_step(
    model: Any, batch: Any, micro_batch_size: int | None = None, devices: int = 1
) -> tuple[Any, list[Any]]:
    """Return the jaxpr of the training step of `model`, and the variables that it takes first.

    Args:
        model: A model that is built.
        batch: The shapes of a batch.
        micro_batch_size: The most rows that run through the layers at once; `None` for all.
        devices: The number of devices that the step is for.

    Raises:
        UnsupportedModel: If the model cannot run its rows in parts.
    """
    groups = [group_of(model, name) for name in GROUPS]
    state = tuple([_shape(variable) for variable in group] for group in groups)
    steps = Programs([any_device()])
    with _train_step(model, steps, micro_batch_size, devices) as step:
        program = jax.make_jaxpr(step)(state, keras.tree.map_structure(_shape, batch))
    return program.jaxpr, [variable for group in groups for variable in group]


@contextmanager
def _train_step(
    model: Any, steps: Programs, micro_batch_size: int | None, devices: int
) -> Iterator[Any]:
    """Yield the training step of a model, in parts of the rows if a size is given."""
    step = with_lora_by_factors(model, model.train_step) if devices > 1 else model.train_step
    if micro_batch_size is None:
        yield step
        return
    parts = MicroBatches(model, steps, micro_batch_size)
    methods = parts.methods(model.stateless_call)
    with patched([(model, name, method) for name, method in methods.items()]):
        yield parts.step(step)


def compiled_bytes(
    model: Any,
    batch: Any,
    layout: LayoutBytes,
    gpu: dict[str, Any],
    micro_batch_size: int | None = None,
) -> tuple[int, int]:
    """Compile the training step for GPUs that are not here.

    Args:
        model: A model that is built.
        batch: The shapes of a global batch.
        layout: The number of GPUs, and how the variables are laid out.
        gpu: What XLA has to know of the GPU.
        micro_batch_size: The most rows that a device runs through the layers at once.

    Returns:
        The bytes of arguments of a device, and of temporaries.

    Raises:
        UnsupportedBackend: If the compiler is not installed.
    """
    options = {"xla_gpu_cuda_data_dir": cuda_folder()}
    options |= ONE_BY_ONE if layout.gathers_again else {}
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="gpu",
        topology=f"1x1x{layout.devices}",
        target_config=_text(gpu),
    )
    is_sharded = layout.state == SHARDED
    steps = Programs(list(topology.devices), partial(Sharded, model) if is_sharded else Replicated)
    config: Any = jax.config
    cached = config.jax_enable_compilation_cache
    config.update("jax_enable_compilation_cache", False)  # it holds programs for this machine
    try:
        again = layout.gathers_again and micro_batch_size is None  # a part gathers again as it is
        with (
            _in_shards(model, steps),
            _gathering(model, again=again),
            _train_step(model, steps, micro_batch_size, layout.devices) as step,
        ):
            program = _lowered(model, step, batch, steps)
        memory = program.compile(
            compiler_options={**options, "xla_gpu_autotune_level": 0}
        ).memory_analysis()
    finally:
        config.update("jax_enable_compilation_cache", cached)
    return memory.argument_size_in_bytes, memory.temp_size_in_bytes


def cuda_folder() -> str:
    """Return the folder of CUDA, with the assembler and the library that XLA compiles with.

    Raises:
        UnsupportedBackend: If JAX has no plugin for NVIDIA GPUs, or CUDA is not installed.
    """
    folders = [os.environ.get("CUDA_ROOT"), *_folders_of("cu13"), *_folders_of("cuda_nvcc")]
    folders += [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    of_cuda_13 = find_spec("jax_cuda13_plugin")
    if of_cuda_13 or find_spec("jax_cuda12_plugin"):
        for folder in filter(None, folders):
            if Path(folder, "bin/ptxas").exists() and Path(folder, "nvvm/libdevice").exists():
                return folder
    package = "jax[cuda13]" if of_cuda_13 else "keras-lockstep[plan]"
    raise UnsupportedBackend(
        "To compile a step for a GPU, the compiler for NVIDIA GPUs is needed, but it is not "
        f'installed.\nInstall it: pip install "{package}". It needs no GPU.'
    )


def _folders_of(package: str) -> list[str]:
    found = find_spec("nvidia") and find_spec(f"nvidia.{package}")
    return list(found.submodule_search_locations or ()) if found else []


def _lowered(model: Any, train_step: Any, batch: Any, steps: Programs) -> Any:
    many = len(steps.devices) > 1

    def placed(leaf: Any) -> Any:
        if leaf is None:
            return None
        if not leaf.shape or not many:
            return _shape(leaf, steps.replicated)
        rows, *others = leaf.shape
        padded = (rows + missing_rows(rows, len(steps.devices)), *others)
        shape = _shape(keras.KerasTensor(padded, leaf.dtype), steps.by_rows)
        return PaddedArray(shape, rows)

    groups = [group_of(model, name) for name in GROUPS]
    state = tuple([_shape(each, steps.home(each)) for each in group] for group in groups)
    step = steps.compiled(train_step, frozenset, times=1, per_row_outputs=False, trains=True)
    run: Any = step.run
    return run.lower(state, keras.tree.map_structure(placed, batch))


def _gathering(model: Any, *, again: bool) -> AbstractContextManager[Any]:
    """Let a step gather weights again inside the context, as in a fit."""
    name = "compute_loss_and_updates"
    return patched([(model, name, gathering_again(model, 0.0))] if again else [])


@contextmanager
def _in_shards(model: Any, steps: Programs) -> Any:
    """Let the layers of a model gather variables inside the context, as in a fit."""
    steps.adopt()
    before = []
    for variable in variables_of(model):
        home = steps.home(variable)
        if not home.is_fully_replicated:
            before.append((variable, stored_value(variable)))
            hold_in_shards(variable, _shape(variable, home))
    try:
        yield
    finally:
        for variable, value in before:
            drop_shards(variable)
            store_value(variable, value)


def _shape(leaf: Any, layout: Sharding | None = None) -> Any:
    """Return the shape of an array, with the type in which JAX stores it."""
    if leaf is None:
        return None
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=layout)


def _text(fields: dict[str, Any]) -> str:
    """Return fields in the text format of protocol buffers."""
    parts = [
        f"{name} {{ {_text(value)} }}" if isinstance(value, dict) else f"{name}: {_quoted(value)}"
        for name, value in fields.items()
    ]
    return " ".join(parts)


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
