"""Match the arrays of an old file with the variables of a model.

Names decide if they are those of the template. If the names were renumbered, the order
of old files decides. If two different assignments fit, an error is raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import (
    AmbiguousWeights,
    NeedsCode,
    OldFileError,
    UntranslatableModel,
    WeightsDoNotFit,
    counted,
)
from lockstep.rescue import unwrap, weight_tree
from lockstep.rescue.match_by_name import Pair, Plan, by_name, within_layer
from lockstep.rescue.match_by_order import (
    COMPARE,
    ascending,
    by_order,
    frozen_choices,
    given_names,
    numbered_in_same_order,
    trainable_then_frozen,
)
from lockstep.rescue.old_layers import RebuildContext
from lockstep.rescue.read import H5Group, OldFile, Stored, release
from lockstep.rescue.rebuild import Part
from lockstep.rescue.weight_tree import Branch, Leaf, leaves

BY_NAME = "names"
BY_COPY = "names of a copy (the suffix that cpu_relocation added)"
BY_POSITION = "order of the layers"


@dataclass(frozen=True)
class Matched:
    """A Keras 3 model, with the array of the old file for each of its weights."""

    model: Any
    tree: Branch
    plan: Plan
    context: RebuildContext
    config: dict[str, Any] | None
    """The old config of the model, if known."""
    name: str | None
    devices: int | None
    part: Part | None = None
    """The model with its parts under their old names; None for a model of the user."""

    def by_index(self) -> dict[int, Pair]:
        """Return the pairs by position in `model.variables`."""
        return {pair.slot.index: pair for pair in self.plan.pairs}

    def trained(self, old: OldFile) -> list[Pair]:
        """Return the pairs of trained weights, in the order of old optimizers.

        The order in the file shows whether a nested model was frozen.
        """
        by_slot = self.by_index()
        position = {id(stored): number for number, stored in enumerate(old.weights)}
        for frozen in frozen_choices(self.tree, False):
            head, tail = trainable_then_frozen(self.tree, frozen)
            numbers = [position[id(by_slot[slot.index].stored)] for _, slot in head + tail]
            if numbers == sorted(numbers):
                break
        else:
            head, _ = trainable_then_frozen(self.tree, set())
        return [by_slot[slot.index] for _, slot in head]

    def outputs(self) -> tuple[str, ...]:
        """Return the old names of the layers that give the outputs."""
        config = (self.config or {})["config"]
        if isinstance(config, dict) and "output_layers" in config:
            return tuple(ref[0] for ref in unwrap.references(config["output_layers"]))
        entries = config if isinstance(config, list) else config["layers"]
        return (unwrap.entry_name(entries[-1]),)


def match_part(
    old: OldFile, part: Part, config: dict[str, Any], context: RebuildContext
) -> Matched:
    """Match a file with the model that was built from its config, or from one of the user's."""
    tree = weight_tree.of_part(part)
    own = old.config is not None
    plan = make_plan(old, tree, parallel=_is_parallel(old), trusted=own)
    return _matched(old, part.layer, tree, plan, config, context, part)


def match_model(old: OldFile, model: Any, context: RebuildContext) -> Matched:
    """Assign the weights of an old file to a model that the user built."""
    require_readable(old)
    if not model.built:
        raise NeedsCode(
            f"The model {model.name!r} has no weights yet, so there is nothing to load into.\n"
            "Add an Input to the model, or call it once on a batch first."
        )
    tree = weight_tree.of_model(model)
    parallel = _is_parallel(old)
    try:
        plan = make_plan(old, tree, parallel=parallel, trusted=False)
    except WeightsDoNotFit:
        if parallel is not False:
            raise
        plan = make_plan(old, tree, parallel=None, trusted=False)
    return _matched(old, model, tree, plan, old.model_config, context)


def _matched(
    old: OldFile,
    model: Any,
    tree: Branch,
    plan: Plan,
    config: dict[str, Any] | None,
    context: RebuildContext,
    part: Part | None = None,
) -> Matched:
    name, devices = (old.part if plan.flat or old.template else None) or (None, None)
    return Matched(model, tree, plan, context, config, name, devices, part)


def _is_parallel(old: OldFile) -> bool | None:
    """Return whether the config is of a parallel model; None if the file has no config."""
    return None if old.config is None else old.template is not None


def make_plan(old: OldFile, root: Branch, *, parallel: bool | None, trusted: bool) -> Plan:
    """Assign every array of an old file to exactly one variable of a model, or raise.

    Args:
        old: The file.
        root: The tree of the template.
        parallel: Whether the only group with weights holds the whole template; None if unknown.
        trusted: Whether the frozen flags of the tree are those of the file.
    """
    groups = old.weighted
    flagged = freezing_marks_layers(old.version)
    problems: list[OldFileError] = []
    plans: list[Plan] = []
    if len(groups) == 1 and parallel is not False:
        try:
            plans.append(assign(root, groups[0].weights, trusted=trusted, flagged=flagged))
        except WeightsDoNotFit as error:
            problems.append(error)
    if parallel is not True:
        try:
            plans.append(_layerwise(groups, root, trusted, flagged))
        except WeightsDoNotFit as error:
            problems.append(error)
    if not plans:
        raise problems[0]
    if len({plan.key for plan in plans}) > 1:
        raise AmbiguousWeights(
            f"{old.path} can be read as the file of a parallel or of a single-device model. The "
            "two\nreadings assign the weights differently. Pass the model or config of the\n"
            "template itself, with the layer names of the file."
        )
    return plans[0]


def freezing_marks_layers(version: str | None) -> bool:
    """Return whether a `keras_version` marks the layers of a frozen nested model.

    tf.keras of TensorFlow 1.13 and later marks them; stand-alone Keras 2 never does.

    Example:
        >>> [freezing_marks_layers(version) for version in ("2.2.4-tf", "2.4.0", "2.2.4")]
        [True, True, False]
    """
    known = version or ""
    tf_keras = tuple(f"2.{minor}." for minor in range(4, 16))
    return known in ("2.2.4-tf", "2.3.0-tf") or known.startswith(tf_keras)


def assign(
    root: Branch, sources: Sequence[Stored], *, trusted: bool, flagged: bool = False
) -> Plan:
    """Assign a flat list of weights to a whole model.

    Args:
        root: The model's tree.
        sources: All weights of one group, in file order.
        trusted: Whether the frozen flags of the tree are those of the file.
        flagged: Whether freezing a nested model also marks its layers, as in tf.keras.
            Keras 2 does not mark them, and no config records the frozen model.

    Raises:
        WeightsDoNotFit: No rule gives an assignment.
        AmbiguousWeights: Only the order decides, and it does not exclude another assignment.
    """
    for rule in (BY_NAME, BY_COPY):
        named = by_name(root, sources, copies=rule == BY_COPY)
        if named:
            return Plan(named, (rule,))
    return by_order(root, sources, trusted=trusted, flagged=flagged)


def _layerwise(groups: Sequence[H5Group], root: Branch, trusted: bool, flagged: bool) -> Plan:
    """Plan the file of a single model: one group per layer, nested models flattened."""
    wanted = root.children
    if len(groups) != len(wanted):
        raise WeightsDoNotFit(
            f"The file has {counted(len(groups), 'layer')} with weights, but the model has "
            f"{len(wanted)}.\n{COMPARE}"
        )
    named = {group.name: group for group in groups}
    by_name = len(named) == len(groups) and set(named) == {child.name for child in wanted}
    if by_name:
        groups = [named[child.name] for child in wanted]
    pairs: list[Pair] = []
    rules = {BY_NAME if by_name else BY_POSITION}
    for child, group in zip(wanted, groups, strict=True):
        if isinstance(child, Leaf):
            pairs += _layer(child, group)
        else:
            found = assign(child, group.weights, trusted=trusted, flagged=flagged)
            pairs += found.pairs
            rules.update(set(found.rules) - {BY_NAME})
    if not by_name and not trusted:
        _require_numbers(groups, wanted)
    return Plan(tuple(pairs), tuple(sorted(rules)), flat=False)


def _layer(leaf: Leaf, group: H5Group) -> tuple[Pair, ...]:
    pairs = within_layer(leaf, group.weights)
    if pairs is None:
        shapes = ", ".join(str(stored.shape) for stored in group.weights)
        wanted = ", ".join(str(slot.shape) for slot in leaf.slots)
        hint = COMPARE
        if leaf.class_name == "GRU":
            hint = "A GRU of Keras 2 needs reset_after=False in the model (a bias of one row)."
        raise WeightsDoNotFit(
            f"The layer {group.name!r} of the file has {shapes}, but {leaf.name!r} of the model "
            f"has {wanted}.\n{hint}"
        )
    return pairs


def _require_numbers(groups: Sequence[H5Group], wanted: list[Leaf | Branch]) -> None:
    """Raise AmbiguousWeights if names contradict the assignment by position."""
    chosen = given_names(wanted)
    alike: dict[object, list[tuple[str, str]]] = {}
    for group, child in zip(groups, wanted, strict=True):
        if group.name in chosen and group.name != child.name:
            raise AmbiguousWeights(
                f"By layer order, the weights of {group.name!r} belong to {child.name!r}, but "
                f"the model also has\na layer {group.name!r}: order and names disagree.\nUse "
                "the layer names of the file in the model (lockstep inspect lists them)."
            )
        signature = tuple(leaf.signature for leaf in leaves(child))
        alike.setdefault(signature, []).append((group.name, child.name))
    for both in alike.values():
        names, own = [name for name, _ in both], [name for _, name in both]
        stems = {name.rstrip("0123456789").rstrip("_") for name in names}
        in_order = ascending(names) or numbered_in_same_order(names, own)
        if len(names) > 1 and len(stems) == 1 and not in_order:
            raise AmbiguousWeights(
                f"The layers {', '.join(names[:4])} have equal shapes, but their order differs\n"
                "from the numbers in their names: order and names disagree.\n"
                "Use the layer names of the file in the model (lockstep inspect lists them)."
            )


def require_readable(old: OldFile) -> None:
    """Refuse a file that is not whole, and files of Keras 1 or of another backend."""
    old.require_whole()
    known = release(old.version)
    named = any(stored.name.partition(":")[0].endswith("_W") for stored in old.weights)
    if old.backend in (None, "tensorflow") and known[:1] != (1,) and (known or not named):
        return
    raise UntranslatableModel(
        f"{old.path} was written by Keras 1 or with the backend {old.backend!r}, which store "
        "convolution kernels in a different order;\nmulti_gpu_model runs only on TensorFlow. "
        "Save the model in Keras 2 on TensorFlow, and rescue that file,\nor export only the "
        "arrays: -o arrays.safetensors."
    )
