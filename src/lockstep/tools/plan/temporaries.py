"""Activations, gradients and other temporaries of a step, by number of devices and layout."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from math import inf
from typing import Any

from lockstep.core.devices import REPLICATED, micro_batches, shard_rows
from lockstep.core.engine import Engine
from lockstep.core.micro_batches import BACKENDS
from lockstep.core.step_bytes import LayoutBytes
from lockstep.errors import (
    LockstepError,
    UnsupportedBackend,
    UnsupportedModel,
    UnusableData,
    counted,
    first_line,
)
from lockstep.keras_compat import layers_in
from lockstep.tools.batches import rows_of
from lockstep.tools.plan.abstract_model import resized
from lockstep.tools.plan.liveness import MEDIAN_ERROR, WORST_ERROR, TracedProgram
from lockstep.tools.plan.memory_plan import FULL

ESTIMATE = (
    "The peak includes activations and temporaries. On test models, its median error against "
    f"steps that XLA compiled for GPUs is {MEDIAN_ERROR:.0%}, and the worst errors are "
    f"{WORST_ERROR[0]:+.0%} and {WORST_ERROR[1]:+.0%}. The memory of the backend itself is not "
    "included."
)
COMPILED = (
    "The peak is measured on the step that XLA compiles for the GPU. Not included: workspaces "
    "of tuned kernels, buffers of collectives, the CUDA context and fragmentation. So a peak "
    f"above {FULL:.0%} of the memory may not fit."
)
NO_ESTIMATE = (
    "Not included: activations and temporaries, which grow with the rows per device, and the "
    "memory of the backend itself."
)
_NOT_TRACED = "The step could not be traced without data. "

Dims = Mapping[int, int | None] | None
"""The dim along which each variable is sharded, by its `id`; `None` if the state is replicated."""

Layouts = Sequence[tuple[LayoutBytes, Dims]]


@dataclass(frozen=True)
class Request:
    """What a plan was asked for, of one dtype policy.

    Attributes:
        counts: The numbers of devices.
        batch_size: The rows of a global batch; `None` for those of the data.
        micro_batch_size: The most rows that a device runs at once; `None` for all.
        memory: Bytes of memory of a device; `None` where not given.
        gpu: The GPU for which steps are compiled, from `gpu_named`; `None` for an estimate.
        find_largest_batch: Whether to look for the largest batch.
        say: Called with a line about each compilation.
        policy: The dtype policy; see `LayoutBytes`.
    """

    counts: list[int]
    batch_size: int | None = None
    micro_batch_size: int | None = None
    memory: int | None = None
    gpu: dict[str, Any] | None = None
    find_largest_batch: bool = False
    say: Callable[[str], object] = lambda text: None
    policy: str = ""

    @property
    def limit(self) -> float:
        """The most bytes of a peak that fits."""
        memory = inf if self.memory is None else self.memory
        return memory if self.gpu is None else FULL * memory


class StepTraces:
    """The traces of a training step on shapes, and its temporaries.

    Args:
        engine: The engine.
        model: The model, whose variables may have no values.
        batch: The shapes of a global batch.

    Raises:
        UnsupportedBackend: If the backend traces no step.
        UnusableData: If the step runs eagerly.
    """

    def __init__(self, engine: Engine, model: Any, batch: Any) -> None:
        _check_compiles(model)
        self._trace = _ahead_of_time(engine.name).traced_step
        self._model, self._batch = model, batch
        self._has_lora = any(getattr(each, "lora_enabled", False) for each in layers_in(model))
        self._known: dict[tuple[int, int], tuple[TracedProgram, Any, int]] = {}

    def temporaries(self, layout: LayoutBytes, dims: Dims, parts: int = 1) -> int:
        """Return about the bytes of temporaries of a device.

        Args:
            layout: The number of devices, and how the variables are laid out.
            dims: The dim along which each variable is sharded.
            parts: The number of micro-batches into which a device cuts its rows.
        """
        # Without LoRA, the step is the same program for any number of devices.
        form = parts, min(layout.devices, 2) if self._has_lora else 1
        if form not in self._known:
            self._known[form] = self._traced(*form)
        program, variables, traced_rows = self._known[form]
        devices, again = layout.devices, layout.gathers_again and parts == 1
        is_split = [(dims or {}).get(id(each)) is not None for each in variables]
        shards = [devices if split else 1 for split in is_split]
        share = len(shard_rows(rows_of(self._batch), devices)[0]) / traced_rows
        early = devices == 1
        return round(program.peak(share, shards, updates_early=early, gathers_again=again))

    def _traced(self, parts: int, devices: int) -> tuple[TracedProgram, Any, int]:
        """Return the program for a number of parts, its variables and the rows of its batch."""
        each = max(-(-rows_of(self._batch) // parts), 2)  # JAX traces other operations for one row
        sizes = (None, None) if parts == 1 else (each, 2 * each)
        (program, variables), (longer, _) = (
            self._trace(self._model, resized(self._batch, factor * each * parts), size, devices)
            for factor, size in zip((1, 2), sizes, strict=True)
        )
        return TracedProgram(program, longer, len(variables)), variables, each * parts


def estimated_temporaries(
    engine: Engine,
    model: Any,
    batch: Any,
    layouts: Layouts,
    target: Any,
    asked: Request,
) -> tuple[list[LayoutBytes], list[str]]:
    """Return layouts with the bytes of temporaries of a device, and what to say of them.

    Args:
        engine: The engine.
        model: The model, whose variables may have no values.
        batch: The shapes of a batch.
        layouts: The layouts.
        target: What made the model: a function, or its name.
        asked: What the plan was asked for.
    """
    plain = [layout for layout, _ in layouts]
    try:
        try:
            steps = StepTraces(engine, model, batch)
        except UnsupportedBackend:
            _check_portable(model, engine.name)
            label = (
                f"Activations are those of a step compiled by JAX. {engine.name} may need more "
                "memory."
            )
            if asked.micro_batch_size or (asked.memory and engine.name in BACKENDS):
                label += " With micro-batches it keeps the outputs of all rows of a device."
            return _on_jax(engine.name, target, plain, asked), [ESTIMATE, label]
        found = []
        for layout, dims in layouts:
            parts = parts_of(batch, layout.devices, asked.micro_batch_size)
            size = steps.temporaries(layout, dims, parts)
            found.append(replace(layout, temporaries=size))
    except Exception as error:  # the step is code of the user, which runs on shapes
        return plain, [NO_ESTIMATE, f"{_NOT_TRACED}{_words(error)}"]
    return found, [ESTIMATE]


def compiled_temporaries(
    engine: Engine, model: Any, batch: Any, layouts: Layouts, asked: Request
) -> tuple[list[LayoutBytes], list[str]]:
    """Return the same from the step that XLA compiles for the GPU that is asked for."""
    _check_compiles(model)
    notes, found = [COMPILED], list[LayoutBytes]()
    for each, _ in layouts:
        try:
            used = _compiled_peak(engine, model, batch, each, asked, asked.micro_batch_size)
            found.append(replace(each, temporaries=used - each.held + each.gradients))
        except LockstepError:
            raise
        except Exception as error:  # the step is code of the user, and XLA refuses some programs
            notes.append(f"{each.devices} {each.state}: XLA did not compile it. {_words(error)}")
            found.append(each)
    return found, notes


def with_micro_batches(
    engine: Engine, model: Any, batch: Any, layouts: Layouts, asked: Request
) -> tuple[list[LayoutBytes], list[str]]:
    """Return layouts with the largest micro-batch that fits where all rows at once do not.

    Args:
        engine: The engine.
        model: The model, whose variables may have no values.
        batch: The shapes of a batch.
        layouts: The layouts, with their peak.
        asked: What the plan was asked for, with a memory.

    Returns:
        The layouts, and why there is none where the model cannot run its rows in parts.
    """
    plain = [layout for layout, _ in layouts]
    if not any(_may_fit_in_parts(each, asked) for each in plain):
        return plain, []
    try:
        steps = StepTraces(engine, model, batch)
        return [
            _with_micro_batch(steps, partial(_compiled_peak, engine, model, batch), batch, *pair)
            for pair in ((layout, dims, asked) for layout, dims in layouts)
        ], []
    except UnsupportedBackend:
        return plain, []
    except Exception as error:  # the code of the user, and what micro-batches refuse
        said = str(error) if isinstance(error, UnsupportedModel) else _words(error)
        return plain, [f"No smaller micro-batch can be planned: {said}"]


def _may_fit_in_parts(layout: LayoutBytes, asked: Request) -> bool:
    peak, memory = layout.peak, asked.limit
    return peak is not None and peak > memory >= layout.held - layout.gradients


def _with_micro_batch(
    steps: StepTraces,
    compiled_peak: Callable[..., int],
    batch: Any,
    layout: LayoutBytes,
    dims: Dims,
    asked: Request,
) -> LayoutBytes:
    """Return a layout with the largest micro-batch that fits, 0 if none does.

    The number of parts is doubled until the peak fits. For a GPU, XLA then compiles the step.
    """
    if not _may_fit_in_parts(layout, asked):
        return layout
    rows = len(shard_rows(rows_of(batch), layout.devices)[0])
    parts = parts_of(batch, layout.devices, asked.micro_batch_size)
    while parts < rows:
        parts = min(2 * parts, rows)
        size = -(-rows // parts)
        about = replace(layout, temporaries=steps.temporaries(layout, dims, parts)).peak or 0
        if about > asked.limit:
            continue
        peak = compiled_peak(layout, asked, size) if asked.gpu else about
        if peak <= asked.limit:
            return replace(layout, largest_micro_batch=size, micro_batch_peak=peak)
    return replace(layout, largest_micro_batch=0)


def parts_of(batch: Any, devices: int, micro_batch_size: int | None) -> int:
    """Return into how many micro-batches a device cuts its rows of a batch."""
    rows = rows_of(batch)
    return 1 if micro_batch_size is None else micro_batches(rows, devices, micro_batch_size)[0]


def largest_batch(
    engine: Engine,
    model: Any,
    batch: Any,
    layout: LayoutBytes,
    asked: Request,
) -> int:
    """Return the rows of the largest global batch whose step fits, to a sixteenth.

    The peak of the batch itself is that of the layout, if it is there.

    The step is compiled again for each number of rows: temporaries do not grow evenly with them.
    The search ends where XLA compiles no step. 0 means that not even a row on each device fits.
    """
    step, size = layout.devices, asked.micro_batch_size
    fits, too_many = 0, 0
    tried = max(step, rows_of(batch) // step * step)
    while tried not in (fits, too_many):
        known = layout.peak if tried == rows_of(batch) else None
        try:
            wide = resized(batch, tried)
            peak = known or _compiled_peak(engine, model, wide, layout, asked, size)
        except Exception as error:
            asked.say(_words(error))
            return fits
        if peak <= asked.limit:
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
    asked: Request,
    micro_batch_size: int | None,
) -> int:
    began, devices = time.monotonic(), counted(layout.devices, "device")
    words = "" if micro_batch_size is None else f", {micro_batch_size} at once"
    asked.say(
        f"XLA compiles the step of {devices}, {layout.state}, {rows_of(batch)} rows{words} ..."
    )
    compiled = _ahead_of_time(engine.name).compiled_bytes
    used = compiled(model, batch, layout, asked.gpu, micro_batch_size)
    asked.say(f"    {time.monotonic() - began:.0f} s")
    return sum(used)


def _check_compiles(model: Any) -> None:
    if model.run_eagerly:
        raise UnusableData(
            f"{model.name!r} runs eagerly, but plan needs a compiled step.\n"
            "Compile it without run_eagerly."
        )


def _check_portable(model: Any, backend: str) -> None:
    import keras

    if type(model).train_step is not keras.Model.train_step:
        raise UnusableData(
            f"{model.name!r} has a train_step for {backend}, but activations can be traced only "
            "on JAX."
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
            f"gpu= was given, but {backend} cannot compile a step for a GPU that is not "
            "installed.\nSet KERAS_BACKEND=jax."
        )
    from lockstep.engines.jax.introspection import ahead_of_time

    return ahead_of_time


def _on_jax(
    backend: str, target: Any, layouts: Sequence[LayoutBytes], asked: Request
) -> list[LayoutBytes]:
    """Return layouts with the bytes of the same model with replicated state on JAX."""
    if not isinstance(target, str):
        raise UnusableData(
            'JAX needs a separate process: pass the name of the function, such as "train.py:build".'
        )
    if find_spec("jax") is None:
        raise UnusableData("JAX is not installed.")
    words = [sys.executable, "-m", "lockstep", "plan", target, "--json"]
    words += ["--devices", ",".join(sorted({str(each.devices) for each in layouts}))]
    words += [] if asked.batch_size is None else ["--batch-size", str(asked.batch_size)]
    size = asked.micro_batch_size
    words += [] if size is None else ["--micro-batch-size", str(size)]
    words += [] if asked.memory is None else ["--memory", f"{asked.memory / 1e3}kB"]
    words += ["--mixed-precision"] * bool(asked.policy)
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
    rows = [each for each in found["layouts"] if bool(each["policy"]) == bool(asked.policy)]
    known = {each["devices"]: each for each in rows if each["state"] == REPLICATED}
    if None in (each["temporaries"] for each in known.values()):
        raise UnusableData(found["notes"][2].removeprefix(_NOT_TRACED))
    in_parts = ("largest_micro_batch", "micro_batch_peak") if backend in BACKENDS else ()
    result = []
    for each in layouts:
        names = ("temporaries", *(in_parts if each.state == REPLICATED else ()))
        result.append(replace(each, **{name: known[each.devices][name] for name in names}))
    return result
