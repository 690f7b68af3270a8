"""Activations, gradients and other temporaries of a step, by number of devices and layout."""

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from lockstep.core.devices import REPLICATED, shard_rows
from lockstep.core.engine import Engine
from lockstep.core.step_bytes import LayoutBytes
from lockstep.errors import LockstepError, UnsupportedBackend, UnusableData, counted, first_line
from lockstep.keras_compat import layers_in
from lockstep.tools.batches import rows_of
from lockstep.tools.plan.abstract_model import resized
from lockstep.tools.plan.liveness import MEDIAN_ERROR, WORST_ERROR, TracedProgram
from lockstep.tools.plan.memory_plan import FULL

ESTIMATE = (
    f"The peak has activations and temporaries too. On other models it is {MEDIAN_ERROR:.0%} off "
    f"what XLA compiles for GPUs in the median, and {WORST_ERROR[0]:+.0%} to {WORST_ERROR[1]:+.0%} "
    "at worst. The backend itself is not included."
)
COMPILED = (
    "The peak is that of the step that XLA compiles for the GPU. Not included: workspaces of tuned "
    "kernels, buffers of collectives, the CUDA context and fragmentation. So a peak above "
    f"{FULL:.0%} of the memory may not fit."
)
NO_ESTIMATE = (
    "Not included: activations and temporaries, which grow with the rows of a device, and the "
    "backend itself."
)
_NOT_TRACED = "The step could not be traced without data. "

Layouts = Sequence[tuple[LayoutBytes, Mapping[int, int | None] | None]]
"""Layouts, and the dim along which each variable is sharded, by its `id`."""


def estimated_temporaries(
    engine: Engine,
    model: Any,
    batch: Any,
    layouts: Layouts,
    target: Any,
    batch_size: int | None,
    policy: str = "",
) -> tuple[Sequence[int | None], list[str]]:
    """Return the bytes of temporaries of a device for each layout, and what to say of them.

    Args:
        engine: The engine.
        model: The model, whose variables may have no values.
        batch: The shapes of a batch.
        layouts: The layouts.
        target: What made the model: a function, or its name.
        batch_size: The rows of a global batch that were asked for.
        policy: The dtype policy under which the model was made; see `LayoutBytes`.
    """
    try:
        _check_compiles(model)
        with suppress(UnsupportedBackend):
            return _traced(engine, model, batch, layouts), [ESTIMATE]
        _check_portable(model, engine.name)
        counts = [layout.devices for layout, _ in layouts]
        label = f"Activations are as compiled by JAX. {engine.name} may need more."
        return _on_jax(target, counts, batch_size, policy), [ESTIMATE, label]
    except Exception as error:  # the step is code of the user, which runs on shapes
        return [None] * len(layouts), [
            NO_ESTIMATE,
            f"{_NOT_TRACED}{_words(error)}",
        ]


def compiled_temporaries(
    engine: Engine,
    model: Any,
    batch: Any,
    layouts: Sequence[LayoutBytes],
    gpu: dict[str, Any],
    say: Callable[[str], object],
) -> tuple[Sequence[int | None], list[str]]:
    """Return the same from the step that XLA compiles for a GPU.

    Args:
        engine: The engine.
        model: The model, whose variables may have no values.
        batch: The shapes of a batch.
        layouts: The layouts.
        gpu: The GPU, from `gpu_named`.
        say: Called with a line about each compilation.
    """
    _check_compiles(model)
    notes, found = [COMPILED], list[int | None]()
    for each in layouts:
        try:
            used = _compiled_peak(engine, model, batch, each, gpu, say)
            found.append(used - each.held + each.gradients)
        except LockstepError:
            raise
        except Exception as error:  # the step is code of the user, and XLA refuses some programs
            notes.append(f"{each.devices} {each.state}: XLA did not compile it. {_words(error)}")
            found.append(None)
    return found, notes


def largest_batch(
    engine: Engine,
    model: Any,
    batch: Any,
    layout: LayoutBytes,
    gpu: dict[str, Any],
    memory: int,
    say: Callable[[str], object],
) -> int:
    """Return the rows of the largest global batch whose step fits, to a sixteenth.

    The peak of the batch itself is that of the layout, if it is there.

    The step is compiled again for each number of rows: temporaries do not grow evenly with them.
    The search ends where XLA compiles no step. 0 means that not even a row on each device fits.
    """
    step, limit = layout.devices, FULL * memory
    fits, too_many = 0, 0
    tried = max(step, rows_of(batch) // step * step)
    while tried not in (fits, too_many):
        known = layout.peak if tried == rows_of(batch) else None
        try:
            peak = known or _compiled_peak(engine, model, resized(batch, tried), layout, gpu, say)
        except Exception as error:
            say(_words(error))
            return fits
        if peak <= limit:
            fits = tried
        else:
            too_many = tried
        if too_many and too_many - fits <= fits // 16:
            break
        tried = (fits + too_many) // 2 // step * step if too_many else 4 * fits
    return fits


def _compiled_peak(
    engine: Engine,
    model: Any,
    batch: Any,
    layout: LayoutBytes,
    gpu: dict[str, Any],
    say: Callable[[str], object],
) -> int:
    began, devices = time.monotonic(), counted(layout.devices, "device")
    say(f"XLA compiles the step of {devices}, {layout.state}, {rows_of(batch)} rows ...")
    used = _ahead_of_time(engine.name).compiled_bytes(model, batch, layout, gpu)
    say(f"    {time.monotonic() - began:.0f} s")
    return sum(used)


def _check_compiles(model: Any) -> None:
    if model.run_eagerly:
        raise UnusableData(
            f"{model.name!r} runs eagerly, and the memory of a compiled step was asked for.\n"
            "Compile it without run_eagerly."
        )


def _check_portable(model: Any, backend: str) -> None:
    import keras

    if type(model).train_step is not keras.Model.train_step:
        raise UnusableData(
            f"{model.name!r} has a train_step for {backend}, and JAX alone traces activations."
        )


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _ahead_of_time(backend: str) -> Any:
    """Return the module that traces and compiles a step on shapes, which JAX alone can.

    Raises:
        UnsupportedBackend: If the backend is another one.
    """
    if backend != "jax":
        raise UnsupportedBackend(
            f"gpu= was given, and {backend} compiles no step for a GPU that is not here.\n"
            "Set KERAS_BACKEND=jax."
        )
    from lockstep.engines.jax.introspection import ahead_of_time

    return ahead_of_time


def _traced(engine: Engine, model: Any, batch: Any, layouts: Layouts) -> list[int]:
    rows = rows_of(batch)
    traced_rows = max(rows, 2)  # JAX traces other operations for one row
    traced_step = _ahead_of_time(engine.name).traced_step
    has_lora = any(getattr(layer, "lora_enabled", False) for layer in layers_in(model))

    @functools.cache
    def traced_for(devices: int) -> tuple[TracedProgram, list[Any]]:
        program, variables = traced_step(model, resized(batch, traced_rows), devices)
        other, _ = traced_step(model, resized(batch, 2 * traced_rows), devices)
        return TracedProgram(program, other, len(variables)), variables

    found = []
    for layout, dims in layouts:
        devices, again = layout.devices, layout.gathers_again
        # Without LoRA, the step is the same program for any number of devices.
        traced, variables = traced_for(min(devices, 2) if has_lora else 1)
        is_split = [(dims or {}).get(id(each)) is not None for each in variables]
        shards = [devices if split else 1 for split in is_split]
        share = len(shard_rows(rows, devices)[0]) / traced_rows
        found.append(
            round(traced.peak(share, shards, updates_early=devices == 1, gathers_again=again))
        )
    return found


def _on_jax(target: Any, counts: Sequence[int], batch_size: int | None, policy: str) -> list[int]:
    """Return the bytes of temporaries of the same model with replicated state on JAX."""
    if not isinstance(target, str):
        raise UnusableData(
            'JAX needs a process of its own: name the function, as "train.py:build".'
        )
    if find_spec("jax") is None:
        raise UnusableData("JAX is not installed.")
    words = [sys.executable, "-m", "lockstep", "plan", target, "--json"]
    words += ["--devices", ",".join(map(str, counts))]
    words += [] if batch_size is None else ["--batch-size", str(batch_size)]
    words += ["--mixed-precision"] * bool(policy)
    done = subprocess.run(
        words,
        env=os.environ | {"KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UnusableData(next(iter(done.stderr.strip().splitlines()), "JAX gave no plan."))
    found = json.loads(done.stdout)
    rows = [each for each in found["layouts"] if each["policy"] == policy]
    known = {e["devices"]: e["temporaries"] for e in rows if e["state"] == REPLICATED}
    if None in known.values():
        raise UnusableData(found["notes"][2].removeprefix(_NOT_TRACED))
    return [known[devices] for devices in counts]
