"""Assign the arrays of an old file to variables by their order in the file.

Old files list all trainable weights in layer order, then all others. If two different
assignments fit, an error is raised.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from lockstep.errors import AmbiguousWeights, WeightsDoNotFit, counted
from lockstep.rescue.match_by_name import Pair, Plan, fit
from lockstep.rescue.read import Stored
from lockstep.rescue.weight_tree import Branch, Leaf, Slot, branches, keys, leaves

BY_ORDER = "order: trainable weights in layer order, then the others"
COMPARE = "Use the model that was trained: compare its summary() with lockstep inspect."
_FREEZE_CAP = 8  # maximum nested models for trying all frozen states


def by_order(root: Branch, sources: Sequence[Stored], *, trusted: bool, flagged: bool) -> Plan:
    """Assign a flat list of weights to a whole model by their order.

    Args:
        root: The model's tree.
        sources: All weights of one group, in file order.
        trusted: As in `match.assign`.
        flagged: As in `match.assign`.

    Raises:
        WeightsDoNotFit: No order gives an assignment.
        AmbiguousWeights: The order does not exclude another assignment.
    """
    found: dict[frozenset[tuple[int, int]], Plan] = {}
    for frozen in frozen_choices(root, flagged):
        pairs = _in_order(root, sources, frozen)
        if pairs:
            plan = Plan(pairs, (BY_ORDER,))
            found.setdefault(plan.key, plan)
    if not found:
        raise _misfit(root, sources)
    first, *others = found.values()
    if others:
        raise _ambiguous(first, others[0])
    if not trusted or _too_many_nested(root):
        _require_evidence(first)
    return first


def _in_order(root: Branch, sources: Sequence[Stored], frozen: set[int]) -> tuple[Pair, ...] | None:
    head, tail = trainable_then_frozen(root, frozen)
    order = head + tail
    if len(order) != len(sources):
        return None
    given = {slot.index: stored for (_, slot), stored in zip(order, sources, strict=True)}
    prefixes: dict[str, Leaf] = {}
    pairs: list[Pair] = []
    chosen = given_names(leaves(root))
    for leaf in leaves(root):
        ordered = [given[slot.index] for slot in leaf.slots]
        fitted = fit(leaf, ordered)
        if fitted is None or not _names_agree(leaf, ordered):
            return None
        if len(set(map(_root, ordered))) > 1 and all("/" in stored.name for stored in ordered):
            return None  # the weights of one layer never have two layer names
        for stored in ordered:
            before = stored.name.rpartition("/")[0]
            if prefixes.setdefault(before, leaf) is not leaf and before:
                return None  # two layers never share one name
            if before in chosen and before != leaf.name:
                return None  # a name chosen by the user identifies its layer
        pairs += fitted
    return tuple(pairs)


def _root(stored: Stored) -> str:
    """Return the first part of a weight's name, without the name of the weight itself."""
    return stored.name.rpartition("/")[0].split("/")[0]


def given_names(nodes: Iterable[Leaf | Branch]) -> set[str]:
    """Return the layer names that look chosen by the user, not numbered by the library."""
    every = list(nodes)
    found = Counter(node.name for node in every)
    kinds = {"Model", "Functional", "Sequential"}
    kinds |= {node.class_name for node in every if isinstance(node, Leaf)}
    automatic = {name for kind in kinds for name in _automatic(kind)}
    return {
        name
        for name, count in found.items()
        if count == 1 and name[-1:].isalpha() and name not in automatic
    }


def _automatic(kind: str) -> set[str]:
    """Return the first automatic names of a layer class in Keras 3 and Keras 2."""
    starts = {re.sub(rf"(.)([A-Z][a-z{more}]+)", r"\1_\2", kind) for more in ("", "0-9")}
    return {re.sub(r"([a-z])([A-Z])", r"\1_\2", start).lower() for start in starts}


_KNOWN_WEIGHTS = frozenset(
    {"kernel", "bias", "gamma", "beta", "moving_mean", "moving_variance", "embeddings",
     "recurrent_kernel", "depthwise_kernel", "pointwise_kernel", "alpha"}
)  # fmt: skip


def _names_agree(leaf: Leaf, ordered: list[Stored]) -> bool:
    """Return whether known weight names, such as kernel or gamma, match; others always do."""
    last = [keys([stored.name])[0][-1] for stored in ordered]
    wanted = [slot.key[-1] for slot in leaf.slots]
    return last == wanted or not {*wanted, *last} <= _KNOWN_WEIGHTS


def frozen_choices(root: Branch, flagged: bool) -> list[set[int]]:
    """Return sets of nested models that may have been frozen as a whole, likeliest first."""
    nested = [] if flagged else [id(one) for one in branches(root)]
    sizes: Iterable[int] = range(len(nested) + 1)
    if len(nested) > _FREEZE_CAP:
        sizes = (0, 1, len(nested))
    return [set(some) for size in sizes for some in itertools.combinations(nested, size)]


def _too_many_nested(root: Branch) -> bool:
    """Return whether there are too many nested models to try every frozen combination."""
    return len(list(branches(root))) > _FREEZE_CAP


def trainable_then_frozen(
    node: Leaf | Branch, frozen: set[int]
) -> tuple[list[tuple[Leaf, Slot]], list[tuple[Leaf, Slot]]]:
    """Return the trainable and the other weights of a node, in the order of old files."""
    if isinstance(node, Leaf):
        trained = [(node, slot) for slot in node.slots if slot.trainable]
        others = [(node, slot) for slot in node.slots if not slot.trainable]
        return (trained, others) if node.trainable else ([], trained + others)
    head: list[tuple[Leaf, Slot]] = []
    tail: list[tuple[Leaf, Slot]] = []
    for below in node.children:
        first, second = trainable_then_frozen(below, frozen)
        head += first
        tail += second
    return ([], head + tail) if id(node) in frozen else (head, tail)


def _require_evidence(found: Plan) -> None:
    """Raise AmbiguousWeights if layers of equal shapes could be exchanged.

    A layer that was frozen at saving, but is not frozen in the user's model, has another
    position in the file. Layers of other shapes would then not fit. Between layers of
    equal shapes, only the numbers in their names can decide.
    """
    prefixes: dict[Leaf, str] = {}
    for pair in found.pairs:
        prefixes.setdefault(pair.leaf, _root(pair.stored))
    # A stored name is the layer's own, or has a number added to make it unique.
    own = all(
        re.fullmatch(rf"{re.escape(leaf.name)}(_\d+)?", name) for leaf, name in prefixes.items()
    )
    alike: dict[object, list[Leaf]] = {}
    for leaf in prefixes:
        alike.setdefault((leaf.signature, leaf.name if own else ""), []).append(leaf)
    for some in alike.values():
        names = [prefixes[leaf] for leaf in some]
        agree = numbered_in_same_order(names, [leaf.name for leaf in some])
        if len(names) > 1 and not (ascending(names) if agree is None else agree):
            raise AmbiguousWeights(
                f"The layers {', '.join(names[:4])} of the file have equal shapes, but not the "
                "names of the model:\ntheir order is ambiguous if one of them was frozen when "
                "the file was saved. Use the layer names\nof the file in the model (lockstep "
                "inspect lists them), or pass the original config: --config template.json."
            )


def ascending(names: Sequence[str]) -> bool:
    """Return whether automatic names of one kind are in ascending order.

    Example:
        >>> ascending(["dense", "dense_2", "dense_10"]), ascending(["dense_2", "dense_1"])
        (True, False)
    """
    numbers = _numbers(names)
    return len(_stems(names)) == 1 and numbers == sorted(numbers)


def numbered_in_same_order(names: Sequence[str], others: Sequence[str]) -> bool | None:
    """Return whether two lists of automatic names of one kind are numbered in one order.

    Layers of branches are not listed in their order of creation. The same code creates
    them in the same order again. The result is None if the names do not decide.

    Example:
        >>> numbered_in_same_order(["dense_2", "dense_1"], ["dense_9", "dense_8"])
        True
    """
    both = _numbers(names), _numbers(others)
    if len(_stems([*names, *others])) > 1 or any(len(set(some)) < len(some) for some in both):
        return None
    mine, theirs = (sorted(range(len(some)), key=some.__getitem__) for some in both)
    return mine == theirs


def _stems(names: Sequence[str]) -> set[str]:
    return {re.sub(r"(_\d+)+$", "", name) for name in names}


def _numbers(names: Sequence[str]) -> list[tuple[int, ...]]:
    return [tuple(int(n) for n in re.findall(r"_(\d+)(?=_|$)", name)) for name in names]


def _ambiguous(one: Plan, other: Plan) -> AmbiguousWeights:
    first = {id(pair.stored): pair.slot for pair in one.pairs}
    pair = next(p for p in other.pairs if first[id(p.stored)].index != p.slot.index)
    return AmbiguousWeights(
        f"{pair.stored.name} fits both {first[id(pair.stored)].path} and {pair.slot.path}: a "
        "nested model may or may not have been frozen.\n"
        "Pass a model with the layer names of the file (lockstep inspect lists them),\n"
        "so that names decide: --model file.py:function."
    )


def _misfit(root: Branch, sources: Sequence[Stored]) -> WeightsDoNotFit | AmbiguousWeights:
    slots = [slot for leaf in leaves(root) for slot in leaf.slots]
    if len(slots) != len(sources):
        first = f"The file has {counted(len(sources), 'weight')} but the model has {len(slots)}"
    else:
        first = (
            f"File and model have {counted(len(slots), 'weight')} each, but with different shapes"
        )
    stored, wanted = Counter(one.shape for one in sources), Counter(slot.shape for slot in slots)
    extra, lacking = next(iter(stored - wanted), None), next(iter(wanted - stored), None)
    detail = []
    if extra is not None:
        name = next(one.name for one in sources if one.shape == extra)
        detail.append(f"only in the file {extra}, as {name}")
    if lacking is not None:
        path = next(slot.path for slot in slots if slot.shape == lacking)
        detail.append(f"only in the model {lacking}, as {path}")
    hint = COMPARE
    if extra is not None and lacking is not None and (len(extra), len(lacking)) == (1, 2):
        hint = "An old GRU needs reset_after=False in the model (a bias of one row)."
    if not detail and _too_many_nested(root):
        return AmbiguousWeights(
            f"{first}, and any of its {len(list(branches(root)))} nested models may have been "
            f"frozen; all combinations\nare tried only for up to {_FREEZE_CAP}.\nPass a model "
            "with the layer names of the file: --model file.py:function."
        )
    if not detail:
        detail.append("in an order that no known rule of old files explains")
    return WeightsDoNotFit(f"{first}: {'; '.join(detail)}.\n{hint}")
