"""Check a rescued model: its masks and settings, its arrays, and its outputs.

With the same weights, Keras 3 computes other numbers under some old defaults, names and
masks. A rebuilt model with such masks is refused. For a live model, notes name the layers.
"""

from __future__ import annotations

import os
import re
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from lockstep.errors import (
    OutputMismatch,
    UnreadableFile,
    UnsuitableOutput,
    UntranslatableModel,
    WeightsDoNotFit,
    counted,
    printable,
)
from lockstep.keras_compat import serialized_objects_kept
from lockstep.rescue import unwrap, weight_tree
from lockstep.rescue.match import Matched
from lockstep.rescue.old_layers import REBUILD, RENAMED, Context
from lockstep.rescue.read import OldFile, release
from lockstep.rescue.rebuild import Part
from lockstep.rescue.rescue_report import Row

# ---------------------------------------------------------------- arrays


def numbers(variable: Any) -> Any:
    """Return the value of a variable as a NumPy array, or its initial value if it has none."""
    return np.asarray(keras.ops.convert_to_numpy(variable.value))


def as_dtype(values: Any, dtype: Any, name: str) -> Any:
    """Cast an array of a file to the dtype of a variable.

    Rounding a float to a shorter float is allowed; `is_exact` detects it.

    Raises:
        WeightsDoNotFit: A finite float becomes infinite, or a cast from or to integers
            changes a number.
    """
    if values.dtype == dtype:
        return values
    cast = _cast(values, dtype)
    floats = all("float" in one.name for one in (values.dtype, cast.dtype))
    lost = (np.isfinite(values) & ~np.isfinite(cast)) if floats else ~_unchanged(values, cast)
    if np.any(lost):
        raise WeightsDoNotFit(
            f"{name} holds {values[lost].flat[0]} as {values.dtype}, and the model's variable is "
            f"{cast.dtype}, which cannot hold it.\n"
            "Nothing was changed. Give a model whose layers have the dtype of the file."
        )
    return cast


def is_exact(found: Any, values: Any) -> bool | None:
    """Return True if an array holds these numbers, False for rounded and None for other ones."""
    found, cast = np.asarray(found), np.asarray(_cast(values, found.dtype))
    # Bit by bit: NaN equals itself, -0.0 is not 0.0.
    one, other = (np.ascontiguousarray(each).reshape(-1).view("u1") for each in (found, cast))
    if found.shape != cast.shape or not np.array_equal(one, other):
        return None
    return found.dtype == values.dtype or bool(_unchanged(values, found).all())


def rounded(rows: Sequence[Row]) -> list[str]:
    """Return a note on rounded arrays, if there are any."""
    some = [row.target for row in rows if not row.equal]
    return [
        f"{len(some)} of {counted(len(rows), 'array')} rounded: the file has more digits than the "
        f"model's dtype (the first is {name!r})"
        for name in some[:1]
    ]


def _cast(values: Any, dtype: Any) -> Any:
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(dtype, copy=False)


def _unchanged(values: Any, cast: Any) -> Any:
    """Return where a cast keeps the number: casting back restores it."""
    back = _cast(cast, values.dtype)
    return (back == values) | ((back != back) & (values != values))


# ---------------------------------------------------------------- outputs

TOLERANCE = 1e-5

UNFOLD_CAP = 256 * 2**20
"""Maximum unpacked bytes of an `.npz`, or 32 times the file size where that is more."""

_SAVEZ = "numpy.savez(path, x0=inputs, y0=outputs)."


def inputs_and_outputs(path: str) -> tuple[list[Any], list[Any]]:
    """Read arrays x0, x1, ... and y0, y1, ... of an `.npz`, without running code in it."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(one.file_size for one in archive.infolist())
            if size > max(UNFOLD_CAP, 32 * os.path.getsize(path)):
                raise ValueError(f"it unfolds to {size:,} bytes")
        with np.load(path, allow_pickle=False) as arrays:
            names = set(arrays.files)
            inputs, outputs = (
                [arrays[f"{kind}{n}"] for n in range(len(names)) if f"{kind}{n}" in names]
                for kind in "xy"
            )
    except Exception as error:  # NumPy's parser raises many kinds of errors
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise UnreadableFile(
            f"{path} cannot be read as an .npz of arrays: {reason}.\nWrite one with {_SAVEZ}"
        ) from error
    if not inputs or not outputs:
        raise UnreadableFile(
            f"{path} has the arrays {', '.join(sorted(names)) or 'none'}, and x0 (input) and "
            f"y0 (expected\noutput) are needed. Write one with {_SAVEZ}"
        )
    for array in inputs + outputs:
        if array.dtype.kind not in "fiub":
            raise UnreadableFile(
                f"{path} holds an array of {array.dtype}, and numbers are needed.\n"
                f"Write numbers with {_SAVEZ}"
            )
    if not all(array.size and np.isfinite(array).any() for array in outputs):
        raise UnreadableFile(
            f"{path} has an expected output without a number in it: there is nothing to compare.\n"
            f"Write the outputs of the old model with {_SAVEZ}"
        )
    return inputs, outputs


def difference(model: Any, inputs: list[Any], outputs: list[Any]) -> float:
    """Return the largest difference between the model's outputs and the expected ones.

    The difference is relative for outputs above 1, where float32 has no more digits.

    Raises:
        OutputMismatch: The difference exceeds TOLERANCE, or only one of two values is NaN.
    """
    if len(inputs) != len(model.inputs):
        raise UnsuitableOutput(
            f"The model takes {counted(len(model.inputs), 'input')}, and the file has "
            f"{len(inputs)} (x0, ...).\n"
            "Give one array for each input, in the model's order."
        )
    given = [
        value.astype(tensor.dtype) if tensor.dtype != str(value.dtype) else value
        for value, tensor in zip(inputs, model.inputs, strict=True)
    ]
    try:
        found = model(given[0] if len(given) == 1 else given, training=False)
    except Exception as error:
        raise OutputMismatch(
            f"The rescued model does not run: {' '.join(str(error).split())[:160]}\n"
            "Nothing was written. Check the inputs in the .npz, and your custom layers."
        ) from error
    arrays = [
        np.asarray(keras.ops.convert_to_numpy(each), dtype="float64")
        for each in keras.tree.flatten(found)
    ]
    if len(arrays) != len(outputs):
        raise OutputMismatch(
            f"The rescued model has {len(arrays)} outputs, and {len(outputs)} were given "
            "(y0, ...).\nNothing was written. Give one array for each output, in the model's order."
        )
    worst = 0.0
    for position, (new, old) in enumerate(zip(arrays, outputs, strict=True)):
        if new.shape != old.shape:
            raise OutputMismatch(
                f"Output {position} has the shape {new.shape}, and {old.shape} is expected.\n"
                "Nothing was written. The inputs or the architecture are not those of the file."
            )
        worst = max(worst, _apart(new, old.astype("float64")))
    if not worst <= TOLERANCE:
        raise OutputMismatch(
            f"The rescued model's outputs differ from the expected ones by {worst:.3g}, more than "
            f"{TOLERANCE:g}.\nNothing was written. If the expected outputs are right, "
            "the architecture is another one:\ncheck --model or --config and custom layers."
        )
    return worst


def _apart(new: Any, old: Any) -> float:
    with np.errstate(invalid="ignore"):
        each = np.abs(new - old) / np.maximum(1.0, np.abs(old))
    each[(new == old) | (np.isnan(new) & np.isnan(old))] = 0.0  # also for equal infinities
    return float("inf") if np.isnan(each).any() else float(np.max(each, initial=0.0))


def loaded_model(path: str, custom: Any) -> Any:
    """Return the model of a `.keras` file, loaded by Keras."""
    try:
        with serialized_objects_kept():
            return keras.models.load_model(path, custom_objects=custom, compile=False)
    except Exception as error:
        raise OutputMismatch(
            f"Keras {keras.__version__} cannot load the written file: "
            f"{' '.join(str(error).split())[:120]}\nNothing was written. Write a .weights.h5 and "
            "load it into a model that your code builds."
        ) from error


# ---------------------------------------------------------------- masks of a rebuilt model

_MERGES = ("Add", "Subtract", "Multiply", "Average", "Maximum", "Minimum", "Concatenate")


def require_old_masks(part: Part, context: Context) -> None:
    """Raise if the masks of a rebuilt model differ from those of the library that saved it.

    Keras 3 passes masks from layer to layer while the model runs, also through nested
    models. The model therefore runs once on shapes only, with hooks on the layers whose mask
    rule changed. A note tells if only masked-out steps differ.

    Raises:
        UntranslatableModel: A layer would compute other numbers. The error names the layer.
    """
    every = list(_layers(part))
    for one in every:
        if one.class_name == "TimeDistributed" and _outputs_mask(one.layer.layer):
            raise UntranslatableModel(
                f"The layer inside {one.name!r} makes a mask of its own, which Keras 2 handed on "
                "to the next layer;\nKeras 3's TimeDistributed loses it, and computes other "
                f"numbers.\n{REBUILD}"
            )
    if not any(_makes_mask(one.layer) for one in every):
        return
    for one, what in _changed_rules(part, every, context):
        if what == "bidirectional" and context.standalone:
            context.note(
                f"{one.name} runs over a mask: at steps that are masked out Keras 2 repeated "
                "its last output, and Keras 3 gives zeros; other steps are equal"
            )
        elif what == "softmax" and context.perhaps_early:
            raise UntranslatableModel(
                f"The Softmax layer {one.name!r} comes after a mask: Keras 3 applies the mask in "
                "it, and the\nlibrary that saved the file may not have. Rebuild the template in "
                "code with\nActivation('softmax') in its place and use --model file.py:function."
            )
        elif what == "merge":
            raise UntranslatableModel(
                f"The {one.class_name} {one.name!r} joins inputs with different masks, or with "
                "and without: Keras 2\nkept a step where all masks keep it, Keras 3 has another "
                "rule and computes other numbers. Rebuild the\ntemplate in code, give mask= to "
                "the layer after the merge, and use --model file.py:function."
            )


def _changed_rules(part: Part, every: list[Part], context: Context) -> list[tuple[Part, str]]:
    """Run the model on shapes only, and return the layers where a changed mask rule applies."""
    found: list[tuple[Part, str]] = []
    masks: dict[tuple[int, Any], Any] = {}  # by input: embeddings of one input share its mask

    def watched(one: Part, own: Any) -> Any:
        def compute_mask(inputs: Any, mask: Any = None) -> Any:
            if isinstance(one.layer, keras.layers.Embedding):
                key = (id(inputs), one.layer.mask_zero)
                # Keeping a reference to the input keeps its id unique.
                return masks.setdefault(key, (own(inputs, mask), inputs))[0]
            if one.class_name in _MERGES:
                there = [each for each in mask or () if each is not None]
                axis = getattr(one.layer, "axis", -1)
                if there and axis in (-1, len(inputs[0].shape) - 1):
                    # A mask that all inputs share is the result under both rules.
                    if len(there) < len(mask) or any(each is not there[0] for each in there):
                        found.append((one, "merge"))
                    return there[0]
            elif isinstance(one.layer, keras.layers.Softmax):
                if mask is not None:
                    found.append((one, "softmax"))
            elif mask is not None and one.layer.forward_layer.return_sequences:
                found.append((one, "bidirectional"))
            return own(inputs, mask)

        return compute_mask

    def one_step(layer: Any) -> Any:
        """Return a `call` for TimeDistributed that runs one step and repeats its output."""

        def call(inputs: Any, training: Any = None, mask: Any = None) -> Any:
            step = keras.ops.expand_dims(layer.layer.call(inputs[:, 0]), 1)
            return keras.ops.repeat(step, inputs.shape[1], axis=1)

        return call

    kinds = (keras.layers.Embedding, keras.layers.Softmax, keras.layers.Bidirectional)
    marked = [one for one in every if one.class_name in _MERGES or isinstance(one.layer, kinds)]
    for one in marked:
        one.layer.compute_mask = watched(one, one.layer.compute_mask)
    wrappers = [one.layer for one in every if one.class_name == "TimeDistributed"]
    for layer in wrappers:
        layer.call = one_step(layer)
    try:
        # Two rows; 32 for other unknown lengths.
        shapes = [
            [length or (32 if dim else 2) for dim, length in enumerate(x.shape)]
            for x in part.layer.inputs
        ]
        given = [
            keras.KerasTensor(shape, x.dtype)
            for shape, x in zip(shapes, part.layer.inputs, strict=True)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            keras.Operation.compute_output_spec(part.layer, given[0] if len(given) == 1 else given)
    except Exception as error:  # layers raise many kinds of errors
        reason = (str(error).splitlines() or [type(error).__name__])[0][:100]
        context.note(f"masks could not be followed ({reason}): prove the outputs with --check")
    finally:
        for one in marked:
            del one.layer.compute_mask
        for layer in wrappers:
            del layer.call
    return found


def _makes_mask(layer: Any) -> bool:
    """Return whether a layer makes masks from its input."""
    if getattr(layer, "mask_zero", False) or isinstance(layer, keras.layers.Masking):
        return True
    cls = type(layer)
    own = not cls.__module__.startswith("keras.")
    return own and cls.compute_mask is not keras.layers.Layer.compute_mask


def _outputs_mask(layer: Any) -> bool:
    """Return whether the layer or model inside a TimeDistributed outputs a mask."""
    if not isinstance(layer, keras.Model):
        return _makes_mask(layer)
    seen: list[Any] = []
    asks = keras.layers.Activation("linear")
    asks.compute_mask = lambda inputs, mask: seen.append(mask)
    for output in layer.outputs:
        asks(output)
    return any(mask is not None for mask in seen)


def _layers(part: Part) -> Iterator[Part]:
    """Yield all layers of a model, including those of nested models."""
    for one in part.parts:
        yield from _layers(one)
        if not one.is_model or one.class_name == "TimeDistributed":
            yield one


# ---------------------------------------------------------------- settings of a live model

_EARLY = ("LSTM", "GRU")
"""Layers with hard_sigmoid gates in early Keras; ConvLSTM has them in all of Keras 2."""


def unrecorded_settings(old: OldFile, matched: Matched) -> list[str]:
    """Return notes on settings that weights do not record, for a model that the user built.

    The old config decides if the file has one. Otherwise the default of the old library is
    assumed.
    """
    if (old.version or "").startswith("3."):
        return []
    return list(dict.fromkeys(map(printable, _unrecorded(old, matched))))


def _unrecorded(old: OldFile, matched: Matched) -> Iterator[str]:
    entries = dict(_entries(matched.config))
    every = weight_tree.every_layer(matched.model)
    # Inner layers come after outer layers, so the innermost owner of a weight remains.
    owners = {id(v): one for one in every if not isinstance(one, keras.Model) for v in one.weights}
    for pair in matched.plan.pairs:
        layer = owners.get(id(matched.model.variables[pair.slot.index]))
        if layer is None or pair.dialect != "plain":
            continue
        path = reversed(pair.stored.path.split("/"))
        kind, config = next((entries[name] for name in path if name in entries), ("", {}))
        if kind == _kind(type(layer).__name__):
            yield from _differences(config, layer, pair.leaf.name)
        else:
            yield from _changed_defaults(old, layer, pair.leaf.name)
    cells = {
        id(one.cell)
        for one in every
        if hasattr(one, "recurrent_activation") and hasattr(one, "cell")
    }
    for layer in every:
        used = [getattr(layer, key, None) for key in ("activation", "recurrent_activation")]
        if keras.activations.hard_sigmoid in used and id(layer) not in cells:
            yield (
                f"{layer.name} uses Keras 3's hard_sigmoid, clip(x / 6 + 0.5, 0, 1); "
                f"{old.library} had clip(0.2x + 0.5, 0, 1) under that name. Give that "
                "function, or rescue the full model."
            )


def _changed_defaults(old: OldFile, layer: Any, name: str) -> Iterator[str]:
    """Yield notes on changed defaults, for layers and cells whose old config is unknown."""
    version = old.version or ""
    early = (2,) <= release(version) < (2, 3) or version.endswith("-tf")
    kind = _kind(type(layer).__name__)
    usual = kind == "ConvLSTM" or (early and kind in _EARLY)
    if usual and layer.recurrent_activation is keras.activations.sigmoid:
        yield (
            f"{name} uses sigmoid gates; {old.library} used hard_sigmoid unless told "
            "otherwise, and weights do not tell. Check outputs, or rescue the full model."
        )
    if early and getattr(layer, "reset_after", False) and not layer.use_bias:
        yield (
            f"{name} has reset_after=True; {old.library} had False unless told otherwise, and "
            "without a bias weights do not tell. Check outputs, or rescue the full model."
        )


def _differences(config: dict[str, Any], layer: Any, name: str) -> Iterator[str]:
    """Yield notes on differences between the file's config and the model."""
    if hasattr(layer, "recurrent_activation"):
        config = {"recurrent_activation": "hard_sigmoid", "reset_after": False, **config}
    for key in ("activation", "recurrent_activation", "reset_after", "epsilon"):
        mine, theirs = getattr(layer, key, None), config.get(key)
        if callable(mine):
            own = str(getattr(mine, "__name__", ""))
            if getattr(keras.activations, own, None) is not mine or not isinstance(theirs, str):
                continue  # a custom function cannot be compared
            mine, theirs = own, "silu" if theirs == "swish" else theirs
        if None not in (mine, theirs) and mine != theirs:
            yield f"{name} has {key}={mine}, and the file's config says {theirs}."


def _entries(config: Any) -> Iterator[tuple[str, tuple[str, dict[str, Any]]]]:
    """Yield the name of each layer of an old config, with the kind and settings inside it."""
    for entry in unwrap.entries(config):
        if isinstance(entry.get("config"), dict) and not unwrap.is_model(entry):
            inner = entry
            while (inside := _wrapped(inner["config"])) is not None:
                inner = inside
            kind = _kind(str(inner.get("class_name")))
            yield unwrap.entry_name(entry), (kind, inner["config"])


def _wrapped(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the entry of the layer or cell inside a wrapper, or None."""
    inner = config.get("layer", config.get("cell"))
    return inner if isinstance(inner, dict) and isinstance(inner.get("config"), dict) else None


def _kind(class_name: str) -> str:
    """Return the kind of a layer class; cells and their layers are of one kind."""
    return re.sub(r"(Cell|\dD)$", "", RENAMED.get(class_name, class_name))
