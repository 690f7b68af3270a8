"""Assign the weights of an old file to the model that takes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import NeedsCode, WeightsDoNotFit, printable
from lockstep.rescue import abstract_model, assumptions, keras2, match, rebuild, unwrap, weight_tree
from lockstep.rescue.keras2 import OldFile
from lockstep.rescue.match import Pair, Plan, trained
from lockstep.rescue.old_settings import Context
from lockstep.rescue.rebuild import Part
from lockstep.rescue.unwrap import Template
from lockstep.rescue.weight_tree import Branch


@dataclass
class Target:
    """A Keras 3 model, with the array of the old file for each of its weights."""

    model: Any
    tree: Branch
    plan: Plan
    template: Template | None
    name: str | None
    devices: int | None
    config: dict[str, Any] | None
    """The old config of the template, if known."""
    live: bool
    context: Context
    outputs: tuple[str, ...] = field(default=())
    part: Part | None = None
    """The model with its parts under their old names, if it was built from a config."""

    def by_index(self) -> dict[int, Pair]:
        """Return the pairs by position in `model.variables`."""
        return {pair.slot.index: pair for pair in self.plan.pairs}

    def trained(self, old: OldFile) -> list[tuple[Any, Any]]:
        """Return the trained arrays and their variables, in the optimizer's order."""
        order = [stored for group in old.weighted for stored in group.weights]
        variables = self.model.variables
        found = trained(self.tree, self.plan.pairs, order)
        return [(pair.stored, variables[pair.slot.index]) for pair in found]


def from_config(old: OldFile, config: dict[str, Any] | None, context: Context) -> Target:
    """Build the template from its old config without weights, and assign its weights.

    Args:
        old: The open file.
        config: The template's config, if the file has none.
        context: The user's classes; receives the notes.

    Raises:
        NeedsCode: Neither the file nor the caller has a config.
    """
    old.require_whole()
    match.require_known_layout(old)
    context.version = old.version
    inside = unwrap.in_config(old.config)
    own = inside.config if inside else old.config
    given = own or _unwrapped(config)
    if given is None:
        raise NeedsCode(
            f"{old.path} holds weights and no architecture.\n"
            "Give the template with --model file.py:function or --config template.json, or take\n"
            "the arrays alone into a .safetensors file or a .weights.h5 of named arrays."
        )
    with abstract_model.weightless():
        part = rebuild.build(given, context)
        if not getattr(part.layer, "built", True) or not part.layer.inputs:
            raise NeedsCode(
                f"The model {part.name!r} was saved without its input shape.\n"
                "Rebuild it in code with an Input and use --model file.py:function."
            )
    tree = weight_tree.of_part(part)
    known = True if inside else False if own else None
    found = match.make_plan(old, tree, parallel=known, trusted=own is not None)
    grouped = unwrap.in_groups(old) if inside is None and found.flat and not own else None
    _freeze(part)
    target = Target(
        model=part.layer,
        tree=tree,
        plan=match.turned(old, found),
        template=inside,
        name=inside.name if inside else grouped[0] if grouped else None,
        devices=inside.devices if inside else grouped[1] if grouped else None,
        config=given,
        live=False,
        context=context,
        outputs=_outputs(given),
        part=part,
    )
    order = [stored for group in old.weighted for stored in group.weights]
    still = {pair.slot.index for pair in trained(tree, found.pairs, order)}
    for leaf in weight_tree.leaves(tree):
        natural = {slot.index for slot in leaf.slots if slot.trainable}
        if leaf.trainable and natural and not natural & still:
            _layer_of(part, leaf.slots[0].index).trainable = False
    return target


def from_model(old: OldFile, model: Any, context: Context) -> Target:
    """Assign the weights of an old file to a model that the user built."""
    old.require_whole()
    match.require_known_layout(old)
    if not model.built:
        raise NeedsCode(
            f"The model {model.name!r} has no weights yet, so there is nothing to fill.\n"
            "Give it an Input, or call it once on a batch before."
        )
    tree = weight_tree.of_model(model)
    inside = unwrap.in_config(old.config)
    known = True if inside else False if old.config else None
    try:
        found = match.make_plan(old, tree, parallel=known, trusted=False)
    except WeightsDoNotFit:
        if known is None or inside:
            raise
        found = match.make_plan(old, tree, parallel=None, trusted=False)
    grouped = unwrap.in_groups(old) if inside is None and found.flat else None
    return Target(
        model=model,
        tree=tree,
        plan=match.turned(old, found),
        template=inside,
        name=inside.name if inside else grouped[0] if grouped else None,
        devices=inside.devices if inside else grouped[1] if grouped else None,
        config=inside.config if inside else old.config,
        live=True,
        context=context,
    )


def _unwrapped(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the template's config if the model is parallel, and the same config otherwise."""
    inside = unwrap.in_config(config)
    return inside.config if inside else config


def _outputs(model: dict[str, Any]) -> tuple[str, ...]:
    config = model["config"]
    if isinstance(config, dict) and "output_layers" in config:
        return tuple(ref[0] for ref in rebuild.references(config["output_layers"]))
    entries = config if isinstance(config, list) else config["layers"]
    return (str(rebuild.entry_name(entries[-1])),)


def _freeze(part: Part) -> None:
    """Set the frozen flags of the old config; the tree must be made before."""
    for inner in part.parts:
        _freeze(inner)
    if not part.is_model and not part.trainable:
        part.layer.trainable = False


def _layer_of(part: Part, index: int) -> Any:
    root = part.layer
    wanted = id(root.variables[index])

    def search(one: Part) -> Any:
        for inner in one.parts:
            found = search(inner)
            if found is not None:
                return found
        if not one.is_model and any(id(v) == wanted for v in one.layer.weights):
            return one.layer
        return None

    return search(part)


def doubts(old: OldFile, target: Target) -> list[str]:
    """Return notes on settings that weights do not record, for a model that the user built."""
    version = old.version or ""
    early = (2,) <= keras2.release(version) < (2, 3) or version.endswith("-tf")
    found = assumptions.doubts(old, target.config, target.model, target.plan.pairs, early)
    return list(dict.fromkeys(map(printable, found)))
