"""Refuse a rebuilt model whose masks differ from those of the library that saved it.

With the same weights, Keras 3 computes other numbers under some old masks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import keras

from lockstep.core.patched import patched
from lockstep.errors import UntranslatableModel
from lockstep.rescue.old_layers import REBUILD, RebuildContext
from lockstep.rescue.rebuild import Part

_MERGES = ("Add", "Subtract", "Multiply", "Average", "Maximum", "Minimum", "Concatenate")


def require_old_masks(part: Part, context: RebuildContext) -> None:
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
                f"The layer inside {one.name!r} creates its own mask, which Keras 2 passed to "
                "the next layer.\nTimeDistributed in Keras 3 drops the mask, so the outputs "
                f"differ.\n{REBUILD}"
            )
    if not any(_makes_mask(one.layer) for one in every):
        return
    for one, what in _changed_rules(part, every, context):
        if what == "bidirectional" and context.standalone:
            context.add_note(
                f"{one.name} uses a mask: at masked steps Keras 2 repeated the last output, but "
                "Keras 3 returns zeros; other steps are equal"
            )
        elif what == "softmax" and context.perhaps_early:
            raise UntranslatableModel(
                f"The Softmax layer {one.name!r} comes after a mask. Keras 3 applies the mask "
                "in this layer, but the\nlibrary that saved the file may not have done so. "
                "Rebuild the template in code with\nActivation('softmax') instead, and use "
                "--model file.py:function."
            )
        elif what == "merge":
            raise UntranslatableModel(
                f"The {one.class_name} {one.name!r} merges inputs with different masks, or only "
                "some inputs have one. Keras 2\nkept a step only if all masks keep it; Keras 3 "
                "uses a different rule, so the outputs differ. Rebuild the\ntemplate in code, "
                "pass mask= to the layer after the merge, and use --model file.py:function."
            )


def _changed_rules(
    part: Part, every: list[Part], context: RebuildContext
) -> list[tuple[Part, str]]:
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
    changes = [
        (each.layer, "compute_mask", watched(each, each.layer.compute_mask)) for each in marked
    ]
    wrappers = [each.layer for each in every if each.class_name == "TimeDistributed"]
    changes += [(layer, "call", one_step(layer)) for layer in wrappers]
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
        with warnings.catch_warnings(action="ignore"), patched(changes):
            keras.Operation.compute_output_spec(part.layer, given[0] if len(given) == 1 else given)
    except Exception as error:  # layers raise many kinds of errors
        reason = (str(error).splitlines() or [type(error).__name__])[0][:100]
        context.add_note(
            f"masks could not be analyzed ({reason}): compare the outputs with --check"
        )
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
