"""State dicts of PyTorch and safetensors, and the prefixes that wrappers leave in them."""

from __future__ import annotations

import os
from typing import Any

from lockstep.errors import HostileFile, UnreadableFile
from lockstep.rescue.inspection import Entry, Inspection

PREFIXES = {
    "module.": "DataParallel or DistributedDataParallel",
    "_orig_mod.": "torch.compile",
    "_fsdp_wrapped_module.": "FullyShardedDataParallel",
}

_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
          "U8": 1, "U16": 2, "U32": 4, "U64": 8, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}  # fmt: skip


def prefix_of(names: list[str]) -> str:
    """The wrapper's prefix that every name has, which may be several in a row.

    Example:
        >>> prefix_of(["module._orig_mod.fc.weight", "module._orig_mod.fc.bias"])
        'module._orig_mod.'
    """
    found = ""
    while names:
        for prefix in PREFIXES:
            if all(name.startswith(found + prefix) for name in names):
                found += prefix
                break
        else:
            break
    return found


def look_torch(path: str) -> Inspection:
    """Inspect a PyTorch file; nothing in it is executed (`weights_only=True`)."""
    state = load_torch(path)
    tensors, where, optimizer = _state_dict(state, path)
    arrays = tuple(
        Entry(name, tuple(map(int, tensor.shape)), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    )
    notes = [f"the weights lie under the key {where!r}"] if where else []
    return _found(path, "torch", "PyTorch", arrays, optimizer, notes)


def look_safetensors(path: str) -> Inspection:
    """Inspect a safetensors file by its header alone."""
    from lockstep.rescue import kinds

    header = kinds.read_json_head(path)
    meta = header.pop("__metadata__", None) or {}
    entries = []
    with open(path, "rb") as file:
        room = os.path.getsize(path) - 8 - int.from_bytes(file.read(8), "little")
    for name, entry in header.items():
        try:
            shape = tuple(int(n) for n in entry["shape"])
            start, end = (int(n) for n in entry["data_offsets"])
            size = _SIZES[entry["dtype"]]
        except (KeyError, TypeError, ValueError) as error:
            raise UnreadableFile(
                f"{path}: the entry {name!r} of its header is not whole.\n"
                "Copy it again from where it was written."
            ) from error
        for length in shape:
            size *= length
        if not 0 <= start <= end <= room or end - start != size:
            raise HostileFile(
                f"{path}: {name!r} declares {size:,} bytes and lies on {end - start:,}.\n"
                "The file is cut short, damaged or made to harm."
            )
        entries.append(Entry(name, shape, entry["dtype"]))
    library = "safetensors" + (f" ({meta['format']})" if "format" in meta else "")
    return _found(path, "safetensors", library, tuple(entries), False, [])


def load_torch(path: str) -> Any:
    """A PyTorch file, memory-mapped where it can be, read by the safe loader only."""
    try:
        import torch
    except ImportError as error:
        raise UnreadableFile(
            f"{path} is a PyTorch file, and PyTorch is not installed.\n"
            "Install it: pip install torch (the CPU build is enough)."
        ) from error
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise UnreadableFile(
            f"{path} is a PyTorch file that the safe loader does not take: {reason}\n"
            "It holds code or is damaged; code in a file is never run here. Save its\n"
            "state_dict() where it was written, and inspect that."
        ) from error


def _state_dict(state: Any, path: str) -> tuple[dict[str, Any], str, bool]:
    """The tensors, the key under which they were, and whether optimizer state is there."""
    if isinstance(state, dict):
        optimizer = any("optimizer" in str(key) for key in state)
        tensors = {str(k): v for k, v in state.items() if hasattr(v, "dtype")}
        if tensors:
            return tensors, "", optimizer
        for key in ("state_dict", "model_state_dict", "model", "module", "net", "weights"):
            inner = state.get(key)
            if isinstance(inner, dict) and any(hasattr(v, "dtype") for v in inner.values()):
                found = {str(k): v for k, v in inner.items() if hasattr(v, "dtype")}
                return found, key, optimizer
    raise UnreadableFile(
        f"{path} is a PyTorch file without a state dict in it.\n"
        "Save model.state_dict() where it was written, and inspect that."
    )


def _found(
    path: str,
    kind: str,
    library: str,
    arrays: tuple[Entry, ...],
    optimizer: bool,
    notes: list[str],
) -> Inspection:
    prefix = prefix_of([entry.path for entry in arrays])
    wrappers = [PREFIXES[f"{part}."] for part in prefix.split(".") if part]
    if wrappers:
        notes.append(f"every name begins with {prefix!r}, left by {' and '.join(wrappers)}")
    parallel = any(part != "_orig_mod" for part in prefix.split(".") if part)
    strip = f"{{k.removeprefix('{prefix}'): v for k, v in state.items()}}" if prefix else "state"
    load = (
        f"torch.load({path!r}, weights_only=True)"
        if kind == "torch"
        else f"safetensors.torch.load_file({path!r})"
    )
    return Inspection(
        path=path,
        kind=kind,
        library=library,
        contents="weights" if arrays else "nothing",
        parallel=parallel,
        complete=bool(arrays),
        command=f"state = {load}; model.load_state_dict({strip})",
        optimizer=optimizer,
        arrays=tuple(Entry(entry.path, entry.shape, entry.dtype) for entry in arrays),
        notes=tuple(notes),
    )
