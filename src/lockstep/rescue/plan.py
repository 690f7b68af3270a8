"""From an old file and a model to one assignment of every weight."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import AmbiguousWeights, OldFileError, WeightsDoNotFit
from lockstep.rescue import match
from lockstep.rescue.keras2 import Group, OldFile
from lockstep.rescue.leaves import Branch, Leaf, leaves
from lockstep.rescue.match import Found, Pair


@dataclass(frozen=True)
class Plan:
    """Every weight of a model, and the array of the file that it takes."""

    pairs: tuple[Pair, ...]
    rules: tuple[str, ...]
    flat: bool


def make(old: OldFile, root: Branch, *, parallel: bool | None, trusted: bool) -> Plan:
    """Assign all weights of an old file to a model.

    Guarantees that every variable that the tree lists gets exactly one array and
    every array of the file is used; raises instead of anything less.

    Args:
        old: The file.
        root: The tree of the template.
        parallel: Whether the one group with weights holds the whole template; None
            where the file does not say.
        trusted: Whether the tree's frozen flags are those of the file.
    """
    old.require_whole()
    groups = old.weighted
    problems: list[OldFileError] = []
    plans: list[Plan] = []
    if len(groups) == 1 and parallel is not False:
        try:
            found = match.assign(
                root, groups[0].weights, trusted=trusted, flagged=flags_spread(old.version)
            )
            plans.append(Plan(found.pairs, (found.rule,), True))
        except WeightsDoNotFit as error:
            problems.append(error)
    if parallel is not True:
        try:
            plans.append(_layerwise(old, root, trusted))
        except WeightsDoNotFit as error:
            problems.append(error)
    if not plans:
        raise problems[0]
    if len(plans) == 2 and _key(plans[0]) != _key(plans[1]):
        raise AmbiguousWeights(
            f"{old.path} can be read as a parallel file or as one of a single model, and the two\n"
            "put the weights in different places. Give the model or config that belongs to the\n"
            "template itself, with its layers named as in the file."
        )
    return plans[0]


def flags_spread(version: str | None) -> bool:
    """Whether the library that wrote a file marks the layers of a frozen nested model.

    tf.keras of TensorFlow 1.13 and later does, stand-alone Keras 2 never did.

    Example:
        >>> flags_spread("2.2.4-tf"), flags_spread("2.4.0"), flags_spread("2.2.4")
        (True, True, False)
    """
    known = version or ""
    return known in ("2.2.4-tf", "2.3.0-tf") or known[:2] == "3." or known.startswith(_TF_KERAS)


_TF_KERAS = tuple(f"2.{minor}." for minor in range(4, 16))


def _layerwise(old: OldFile, root: Branch, trusted: bool) -> Plan:
    """A file of a single model: one group per layer, nested models flattened."""
    groups = old.weighted
    flagged = flags_spread(old.version)
    wanted = root.children
    if len(groups) != len(wanted):
        raise WeightsDoNotFit(
            f"The file has {len(groups)} layers with weights and the model {len(wanted)}.\n"
            "Give the model that was trained: compare its summary() with lockstep inspect."
        )
    named = {group.name: group for group in groups}
    by_name = len(named) == len(groups) and set(named) == {child.name for child in wanted}
    pairs: list[Pair] = []
    rules = {match.BY_NAME if by_name else match.BY_POSITION}
    for position, child in enumerate(wanted):
        group = named[child.name] if by_name else groups[position]
        found = _child(child, group, trusted, flagged)
        pairs += found.pairs
        if found.rule != match.BY_NAME:
            rules.add(found.rule)
    plan = Plan(tuple(pairs), tuple(sorted(rules)), False)
    if not by_name and not trusted:
        _require_numbers(groups, wanted)
    return plan


def _child(child: Leaf | Branch, group: Group, trusted: bool, flagged: bool) -> Found:
    if isinstance(child, Branch):
        return match.assign(child, group.weights, trusted=trusted, flagged=flagged)
    pairs = match.within(child, group.weights)
    if pairs is None:
        shapes = ", ".join(str(stored.shape) for stored in group.weights)
        wanted = ", ".join(str(slot.shape) for slot in child.slots)
        hint = "Give the model that was trained: compare its summary() with lockstep inspect."
        if child.class_name == "GRU":
            hint = "A GRU of Keras 2 needs reset_after=False in the model (a bias of one row)."
        raise WeightsDoNotFit(
            f"The layer {group.name!r} of the file has {shapes}; {child.name!r} of the model has "
            f"{wanted}.\n{hint}"
        )
    return Found(pairs, match.BY_NAME)


def _require_numbers(groups: tuple[Group, ...], wanted: list[Leaf | Branch]) -> None:
    """Groups lie in layer order, so position decides; equal layers must be numbered so too."""
    chosen = match.given_names(wanted)
    for group, child in zip(groups, wanted, strict=True):
        if group.name in chosen and group.name != child.name:
            raise AmbiguousWeights(
                f"By the order of layers the weights of {group.name!r} would go to "
                f"{child.name!r}, and the model has\na layer {group.name!r} of its own: order "
                "and names disagree.\nName the model's layers as in the file (lockstep inspect "
                "lists them)."
            )
    alike: dict[object, list[tuple[str, str]]] = {}
    for group, child in zip(groups, wanted, strict=True):
        signature = tuple(leaf.signature for leaf in leaves(child))
        alike.setdefault(signature, []).append((group.name, child.name))
    for both in alike.values():
        names, own = [name for name, _ in both], [name for _, name in both]
        stems = {name.rstrip("0123456789").rstrip("_") for name in names}
        in_order = match.ascending(names) or match.same_ranks(names, own)
        if len(names) > 1 and len(stems) == 1 and not in_order:
            raise AmbiguousWeights(
                f"The layers {', '.join(names[:4])} have equal shapes and lie in another "
                "order\nthan their numbers: order and names put their weights elsewhere.\n"
                "Name the model's layers as in the file (lockstep inspect lists them)."
            )


def _key(plan: Plan) -> frozenset[tuple[int, int]]:
    return frozenset((id(pair.stored), pair.slot.index) for pair in plan.pairs)
