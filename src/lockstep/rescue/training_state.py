"""Carry the loss, metrics and optimizer of an old file to the new model.

Settings and state that cannot be carried are left out, with a note.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from lockstep.errors import counted
from lockstep.rescue.exactness import numbers, quiet
from lockstep.rescue.match import Matched
from lockstep.rescue.match_by_name import Pair
from lockstep.rescue.old_layers import RebuildContext, dtype, plain
from lockstep.rescue.read import OldFile, Stored, release
from lockstep.rescue.weight_tree import leaves

_SLOTS: dict[str, tuple[str, ...]] = {
    # optimizer: its state per variable, in the order of old files, by Keras 3's names
    "SGD": ("momentum",),
    "RMSprop": ("velocity",),
    "Adagrad": ("accumulator",),
    "Adadelta": ("accumulated_grad", "accumulated_delta_var"),
    "Adam": ("momentum", "velocity"),
    "Adamax": ("momentum", "norm"),
}

_SLOT_NAMES = {
    # name of an array in tf.keras optimizers: name in Keras 3
    "m": "momentum",
    "v": "velocity",
    "u": "norm",
    "accum_grad": "accumulated_grad",
    "accum_var": "accumulated_delta_var",
    "accumulated_grad": "accumulated_grad",
    "accumulated_delta_var": "accumulated_delta_var",
}

_SETTINGS = frozenset(
    {
        *("momentum", "nesterov", "rho", "epsilon", "centered", "beta_1", "beta_2", "amsgrad"),
        *("clipnorm", "clipvalue", "global_clipnorm", "initial_accumulator_value"),
        *("learning_rate_power", "l1_regularization_strength", "l2_regularization_strength"),
    }
)


@dataclass(frozen=True)
class Entry:
    """One variable of the new optimizer: an array of the file, or one repeated number."""

    stored: Stored | None
    number: Any
    shape: tuple[int, ...]

    def value(self) -> Any:
        """The variable's value as a NumPy array."""
        if self.stored is None:
            return np.full(self.shape, self.number)
        return self.stored.read() if self.shape else self.number.dtype.type(self.stored.read())


def freeze(old: OldFile, matched: Matched) -> None:
    """Freeze the layers of a rebuilt model that were frozen when the file was saved."""
    trained = {pair.slot.index for pair in matched.trained(old)}
    for leaf in leaves(matched.tree):  # the tree, made before, has the layers as they were saved
        natural = {slot.index for slot in leaf.slots if slot.trainable}
        if not leaf.trainable or (natural and not natural & trained):
            leaf.layer.trainable = False


def state(old: OldFile, matched: Matched) -> tuple[list[Entry], bool]:
    """Return the variables of a model's optimizer, if any, and whether they are the old ones.

    They are in the order in which Keras saves them. A note tells when the old state is
    dropped. That of a model of the user, or of converted weights, cannot be carried.
    """
    model, context = matched.model, matched.context
    if getattr(model, "optimizer", None) is None:
        return [], False
    kind = type(model.optimizer).__name__
    names = _SLOTS.get(kind, ())
    index = {id(one): number for number, one in enumerate(model.trainable_variables)}
    found: list[tuple[int, list[Stored]]] | None = None
    plain_layout = all(pair.convert is None for pair in matched.plan.pairs)
    if names and old.optimizer and matched.part is not None and plain_layout:
        trained = matched.trained(old)
        places = [index.get(id(model.variables[pair.slot.index]), -1) for pair in trained]
        if set(places) == set(index.values()):  # else, file and model train different weights
            found = _slots(old, kind, trained, places)
    values = {
        (place, name): stored
        for place, arrays in found or ()
        for name, stored in zip(names, arrays, strict=True)
    }
    step = old.optimizer[0] if found and old.optimizer[0].shape == () else None
    entries: list[Entry] = []
    for name, slot, number in _layout(model.optimizer, len(index)):
        if slot is not None:
            shape = tuple(int(n) for n in model.trainable_variables[slot[0]].shape)
            entries.append(Entry(values.pop(slot, None), number, shape))
        else:
            entries.append(Entry(step if name == "iteration" else None, number, ()))
    lacking = any(entry.stored is None and entry.shape for entry in entries)
    # Keras 2's SGD saves arrays of zeros if it has no momentum.
    carried = found is not None and not lacking and (not values or kind == "SGD")
    if old.optimizer and not carried:
        context.add_note(
            f"the optimizer's state is discarded: {_why(old, kind, len(index))} (training "
            "continues with a new state)"
        )
        entries = [Entry(None, entry.number, entry.shape) for entry in entries]
    elif carried and step is None:
        context.add_note("the optimizer's step count is not in the file and starts at 0")
    return entries, carried


def _why(old: OldFile, kind: str, trainable: int) -> str:
    """Return the reason why an optimizer's state cannot be carried."""
    arrays = [one.shape for one in old.optimizer if one.shape]
    if kind == "Adam" and set(arrays[2 * len(arrays) // 3 :]) == {(1,)}:
        arrays = arrays[: 2 * len(arrays) // 3]
    there = len(arrays) // len(_SLOTS.get(kind, ("",)))
    if 0 < there < trainable:
        return (
            f"it covers {counted(there, 'weight')}, but the model trains {trainable}, so some "
            "were frozen; the file does not record that a nested model was frozen as a whole, "
            "so set its trainable=False"
        )
    return f"its variables in the file differ from those of {kind} in Keras 3"


def _layout(optimizer: Any, count: int) -> list[tuple[str, tuple[int, str] | None, Any]]:
    """Return name, slot (trainable variable, kind) and initial number of optimizer variables.

    A copy of the optimizer is built on scalars in place of the weights. No arrays of the
    weights' size are allocated. The order is Keras's own.
    """
    copy = type(optimizer).from_config(optimizer.get_config())
    found: list[tuple[str, tuple[int, str] | None, Any]] = []
    with quiet():
        copy.build([keras.Variable(0.0, name=f"slot{index}") for index in range(count)])
        for variable in copy.variables:
            slot = re.fullmatch(r"slot(\d+)_(\w+)", variable.name)
            place = (int(slot[1]), slot[2]) if slot else None
            found.append((variable.name, place, numbers(variable)))
    return found


def _slots(
    old: OldFile, kind: str, trained: list[Pair], places: list[int]
) -> list[tuple[int, list[Stored]]] | None:
    """Return the state arrays of each trained variable, or None for a list of another form."""
    slots, rest = _SLOTS[kind], list(old.optimizer)
    if rest[0].shape == ():
        rest = rest[1:]
    count = len(trained)
    if len(slots) == 2 and len(rest) == 3 * count:
        if any(one.shape != (1,) for one in rest[2 * count :]):
            return None
        rest = rest[: 2 * count]  # Keras 2's Adam without amsgrad saves a zero for each variable
    if not count or len(rest) != count * len(slots):
        return None
    if len(slots) > 1:
        told = [_slot_of(one.name, slots) for one in rest]
        if None not in told:
            rest.sort(key=lambda one: slots.index(_slot_of(one.name, slots) or ""))
        elif release(old.version) >= (2, 11):
            return None  # these arrays are in the order of variables, and only names identify slots
    found = [(place, rest[number::count]) for number, place in enumerate(places)]
    fits = all(
        array.shape == pair.stored.shape
        for pair, (_, arrays) in zip(trained, found, strict=True)
        for array in arrays
    )
    return found if fits else None


def _slot_of(name: str, slots: Sequence[str]) -> str | None:
    """Return the slot in a name: `Adam/dense/kernel/m:0`, or `Adam/m/dense/kernel:0` since 2.11."""
    parts = name.partition(":")[0].split("/")
    found = (_SLOT_NAMES.get(part) for part in (parts[-1], *parts[1:2]))
    return next((slot for slot in found if slot in slots), None)


def carry(old: OldFile, matched: Matched) -> None:
    """Compile a rebuilt model like the old one, or add a note with the reason why not."""
    settings, model, context = old.training, matched.model, matched.context
    if not settings:
        return
    outputs = matched.outputs()
    merges = old.template.merges if old.template else outputs
    try:
        optimizer = _optimizer(settings.get("optimizer_config") or {}, context)
        names = (list(merges), list(outputs))
        loss = _loss(_per_output(settings.get("loss"), names), context)
        if optimizer is None or loss is None:
            context.add_note("the model is not compiled: its optimizer or loss is not Keras's own")
            return
        model.compile(
            optimizer=optimizer,
            loss=loss,
            loss_weights=_per_output(settings.get("loss_weights"), names) or None,
            metrics=_metrics(settings.get("metrics"), names, context),
            weighted_metrics=_metrics(settings.get("weighted_metrics"), names, context),
        )
    except Exception as error:  # old compile calls may fail in many ways
        reason = (str(error).splitlines() or [""])[0][:100]
        context.add_note(f"the model is not compiled: Keras 3 rejects its settings ({reason})")
        model.optimizer = None
        return
    if settings.get("sample_weight_mode"):
        context.add_note(
            "sample_weight_mode is omitted: Keras 3 does not have it; pass one weight per time step"
        )


def _optimizer(entry: dict[str, Any], context: RebuildContext) -> Any:
    name, config = entry.get("class_name"), dict(entry.get("config") or {})
    if (own := context.custom_object(name)) is not None:
        return own.from_config(config)
    if not isinstance(name, str) or name not in (*_SLOTS, "Nadam", "Ftrl"):
        context.add_note(f"the optimizer {name} is omitted: it is not a Keras optimizer")
        return None
    rate = config.pop("lr", config.pop("learning_rate", 0.001))
    decay = float(plain(config.pop("decay", 0.0)) or 0.0)
    if isinstance(rate, dict):
        rate = keras.optimizers.schedules.deserialize(rate)
    elif decay:
        rate = keras.optimizers.schedules.InverseTimeDecay(float(rate), 1, decay)
    if context.standalone and "clipnorm" in config:
        config["global_clipnorm"] = config.pop("clipnorm")  # Keras 2 clips by the global norm
    if config.get("epsilon", 0) is None:
        config["epsilon"] = 1e-7
    if name == "RMSprop":
        context.add_note("in Keras 3, RMSprop adds epsilon inside the square root")
    kept = {key: plain(value) for key, value in config.items() if key in _SETTINGS}
    return getattr(keras.optimizers, name)(learning_rate=rate, **kept)


def _per_output(value: Any, names: tuple[list[str], list[str]]) -> Any:
    """Convert settings by output name to settings by position; old names may be the merges'."""
    if not isinstance(value, dict) or {"class_name", "config"} <= set(value):
        return value
    merges, outputs = names
    for known in (merges, outputs):
        if set(value) <= set(known):
            listed = [value.get(name) for name in known]
            return listed[0] if len(listed) == 1 else listed
    raise ValueError(f"settings for outputs {sorted(value)}, but the outputs are {outputs}")


def _loss(value: Any, context: RebuildContext) -> Any:
    if isinstance(value, list):
        found = [_loss(one, context) for one in value]
        return None if None in found else found
    if isinstance(value, str):
        if (own := context.custom_object(value)) is not None:
            return own
        try:
            keras.losses.get(value)
        except ValueError:
            context.add_note(f"the loss {value!r} is not a Keras loss: pass it with --custom")
            return None
        return value
    if isinstance(value, dict):
        name, config = value.get("class_name"), dict(value.get("config") or {})
        cls = context.custom_object(name) or getattr(keras.losses, str(name), None)
        if cls is None:
            context.add_note(f"the loss {name} is not a Keras loss: pass it with --custom")
            return None
        if config.get("reduction") in ("auto", None):
            config["reduction"] = "sum_over_batch_size"
        return cls(**config)
    return None


def _metrics(value: Any, names: tuple[list[str], list[str]], context: RebuildContext) -> Any:
    """Return metrics in the form of Keras 3: a list, or one list for each of several outputs."""
    count = len(names[1])
    listed = _per_output(value, names)
    listed = listed if isinstance(listed, (list, tuple)) else [listed]
    nested = [list(one) if isinstance(one, (list, tuple)) else [one] for one in listed]
    if count == 1:
        nested = [[one for some in nested for one in some]]
    elif not isinstance(value, dict) and not any(isinstance(o, (list, tuple)) for o in listed):
        nested = [list(listed)] * count  # Keras 2 applies all of them to each output
    made = [[_metric(one, context) for one in some] for some in nested]
    found = [[one for one in some if one is not None] for some in made]
    if not any(found):
        return None
    return found[0] if count == 1 else found


def _metric(value: Any, context: RebuildContext) -> Any:
    name = None
    if isinstance(value, dict):
        config = dict(value.get("config") or {})
        name = config.get("name")
        kind = str(value.get("class_name"))
        cls = context.custom_object(kind) or getattr(keras.metrics, kind, None)
        if "fn" not in config and inspect.isclass(cls):
            config["dtype"] = dtype(config.get("dtype"))
            try:
                return cls(**{key: plain(one) for key, one in config.items()})
            except Exception as error:  # a metric must not fail the rescue
                reason = (str(error).splitlines() or [""])[0][:80]
                context.add_note(f"the metric {name!r} is omitted: Keras 3 rejects it ({reason})")
                return None
        value = config.get("fn") or name or value.get("class_name")
    if value is None:
        return None
    own = context.custom_object(value)
    if own is None:
        if value in ("accuracy", "acc"):
            return value
        try:
            found = keras.metrics.get(value)
        except ValueError:
            context.add_note(
                f"the metric {value!r} is omitted: it is not a Keras metric (see --custom)"
            )
            return None
    if name is None or name == value:
        return value if own is None else own
    found = found if own is None else own
    if isinstance(found, keras.metrics.Metric):
        return type(found).from_config({**found.get_config(), "name": name})
    return keras.metrics.MeanMetricWrapper(found, name=name)
