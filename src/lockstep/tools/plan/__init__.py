"""What each device holds and sends in a training step, before there are devices."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lockstep.engines import current_engine
from lockstep.errors import (
    DeviceError,
    TargetNotFound,
    UnusableData,
    shown,
)

if TYPE_CHECKING:
    from lockstep.tools.plan.memory_plan import MemoryPlan

MIXED, MIXED_FLOAT16 = "mixed_bfloat16", "mixed_float16"
"""The policy of the rows that `mixed_precision` adds, and that on a GPU without bfloat16."""


def plan(
    model: Any,
    data: Any = None,
    devices: int | Sequence[int] = (1, 2, 4, 8),
    *,
    batch_size: int | None = None,
    micro_batch_size: int | None = None,
    memory: str | int | None = None,
    gpu: str | None = None,
    find_largest_batch: bool = False,
    mixed_precision: bool = False,
    say: Callable[[str], object] = lambda text: None,
) -> "MemoryPlan":
    """Compute what each device holds and sends in a training step, before there are devices.

    The bytes of weights, optimizer slots, gradients, metrics and the batch are those that
    `distribute` then allocates. Those at the peak of a step, with activations, are an estimate.
    Large variables of a model that a function builds get a shape and no value, so such a model may
    be larger than the memory here. A model that is there keeps its values. If it or its optimizer
    was not built, it stays built.

    Args:
        model: A compiled model. Or a function that returns one, or `(model, data)`; or its name,
            such as `"train.py:build"`.
        data: What `fit` takes; a few rows are enough. Defaults to the data of the function. A
            model without data needs an input shape.
        devices: Numbers of devices.
        batch_size: Rows of the global batch. Defaults to those of a data set, and to 32 for arrays.
        micro_batch_size: The most rows that a device runs at once, as in `lockstep.distribute`.
            Defaults to all of its rows. Where they do not fit the memory, the largest size that
            fits is looked for.
        memory: The memory of one device, such as `"24GB"` (24e9 bytes) or `"80GiB"`. Defaults to
            that of `gpu`.
        gpu: A GPU for which XLA compiles the step, such as `"h100"`. None has to be here. Needs
            `keras-lockstep[plan]` and JAX. For `"v100"` and `"p100"`, which are too old to compile
            for, the peak is an estimate.
        find_largest_batch: Whether to compile for `gpu` with other numbers of rows too, until the
            largest global batch is found whose peak is 85 % of the memory at most.
        mixed_precision: Whether to add the same rows for a function under Keras's global policy
            `mixed_bfloat16`, which layers with a policy of their own do not follow; under
            `mixed_float16` for a `gpu` without bfloat16.
        say: Called with a line about the compilation that begins.

    Returns:
        The result. `.layouts` has the bytes of a device for each number of devices, and for
        replicated and sharded state. `str()` of it is a short text.

    Raises:
        DeviceError: If `devices` or `memory` cannot be read, or `gpu` is not known or missing.
        TargetNotFound: If the function is not found, trains the model, or returns no model.
        UnusableData: If the model is not compiled, or its shapes are not known without data; or
            if `mixed_precision` is asked for of a model that is there.
        UnsupportedBackend: If there is no engine for Keras's backend, or no compiler for `gpu`.

    Example:
        >>> def build():
        ...     model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(512)])
        ...     model.compile("adam", "mse")
        ...     return model
        >>> lockstep.plan(build, devices=4, memory="24GB").layouts[0].weights
        133120
    """
    # These import NumPy and Keras, which `import lockstep` does not.
    import keras

    from lockstep.core import micro_batches
    from lockstep.distribute import check_micro_batch_size
    from lockstep.tools.batches import count_from_one
    from lockstep.tools.plan.gpus import COMPILED_FROM, capability_of, gpu_named, has_bfloat16
    from lockstep.tools.plan.memory_plan import parse_memory
    from lockstep.tools.plan.policy_plan import plan_of_policy
    from lockstep.tools.plan.temporaries import Request

    is_there = isinstance(model, keras.Model)
    if not (is_there or isinstance(model, str) or callable(model)) or (
        isinstance(model, keras.layers.Layer) and not is_there
    ):
        raise TargetNotFound(
            f"model={shown(model)} was given, but a compiled model, or a function that returns "
            "one, was expected.\n"
            'Pass one of them, or the name of the function, such as "train.py:build".'
        )
    if isinstance(data, int | range) or (isinstance(data, tuple | list) and _are_numbers(data)):
        raise UnusableData(
            f"data={shown(data)} was given, but arrays or a data set were expected.\n"
            f"For numbers of devices, write devices={shown(data)}."
        )
    if mixed_precision and is_there:
        raise UnusableData(
            f"mixed_precision=True was given, but {model.name!r} is already built with the "
            f"policy {model.dtype_policy.name!r}.\n"
            "Pass a function that builds the model: plan calls it under both policies."
        )
    if not callable(say):
        raise TargetNotFound(
            f"say={shown(say)} was given, but a function that takes a string was expected.\n"
            "Pass a function, such as print, or remove the argument."
        )
    several = isinstance(devices, Iterable) and not isinstance(devices, str | bytes)
    asked: Any = devices if several else [devices]
    read = [count_from_one(count) for count in asked]
    counts = sorted({count for count in read if count is not None})
    if not counts or None in read:
        raise DeviceError(
            f"devices={shown(devices)} was given, but numbers of devices of at least 1 were "
            "expected.\nPass a number, or several, such as (1, 2, 4)."
        )
    if batch_size is not None and count_from_one(batch_size) is None:
        raise UnusableData(
            f"batch_size={shown(batch_size)} was given, but a whole number of at least 1 was "
            "expected.\nRemove batch_size to use the batch size of the data."
        )
    if find_largest_batch and gpu is None:
        raise DeviceError(
            "The largest batch was requested, but no GPU to compile the step for.\n"
            'Name one, such as gpu="h100".'
        )
    size = check_micro_batch_size(micro_batch_size)
    backend = current_engine().name
    if size is not None and backend not in micro_batches.BACKENDS:
        raise micro_batches.no_micro_batches(backend, size)
    target = None if gpu is None else gpu_named(gpu)
    bytes_of_memory = None if memory is None else parse_memory(memory)
    if target and bytes_of_memory is None:
        bytes_of_memory = target["gpu_device_info"]["device_memory_size"]
    mixed_policy, remarks = MIXED, list[str]()
    if target and not has_bfloat16(target):
        remarks.append(f"{target['device_description_str']} has no bfloat16: use float16.")
        mixed_policy = MIXED_FLOAT16
    if target and capability_of(target) < COMPILED_FROM:
        if find_largest_batch:
            raise DeviceError(
                "The largest batch was requested, but XLA cannot compile a step for "
                f"gpu={gpu!r}.\n"
                "Remove largest_batch: the peak is then estimated for one batch size."
            )
        remarks.append("XLA cannot compile a step for it yet: the peak is an estimate.")
        target = None
    asked = Request(counts, batch_size, size, bytes_of_memory, target, find_largest_batch, say)
    found = plan_of_policy(model, data, asked)
    if mixed_precision:
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(mixed_policy)
        try:
            mixed = plan_of_policy(model, data, replace(asked, policy=mixed_policy))
        finally:
            keras.config.set_dtype_policy(before)
        found = found.with_rows_of(mixed)
    return replace(found, notes=(*found.notes, *remarks))


def _are_numbers(data: Sequence[Any]) -> bool:
    return bool(data) and all(isinstance(each, int) for each in data)
