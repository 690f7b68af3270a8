"""Match the arrays of an old file with the variables of a model.

Names decide if they are those of the template. If the names were renumbered, the order
of old files decides: all trainable weights in layer order, then all others. If two
different assignments fit, an error is raised.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.counted import counted
from lockstep.errors import AmbiguousWeights, OldFileError, UntranslatableModel, WeightsDoNotFit
from lockstep.rescue.keras2 import Group, OldFile, Stored
from lockstep.rescue.weight_tree import Branch, Convert, Leaf, Slot, branches, keys, leaves

BY_NAME = "names"
BY_COPY = "names of a copy (the suffix that cpu_relocation added)"
BY_ORDER = "order: trainable weights in layer order, then the others"
BY_POSITION = "order of the layers"

_FREEZE_CAP = 8  # maximum nested models for trying all frozen states


@dataclass(frozen=True)
class Pair:
    """One array, its variable, and the conversion between them."""

    stored: Stored
    slot: Slot
    leaf: Leaf
    convert: Convert | None
    dialect: str = "plain"


@dataclass(frozen=True)
class Found:
    """An assignment and the rule that decided it."""

    pairs: tuple[Pair, ...]
    rule: str

    @property
    def key(self) -> frozenset[tuple[int, int]]:
        """The assignment as a set, for comparisons."""
        return frozenset((id(pair.stored), pair.slot.index) for pair in self.pairs)


def assign(
    root: Branch, sources: Sequence[Stored], *, trusted: bool, flagged: bool = False
) -> Found:
    """Assign a flat list of weights to a whole model.

    Args:
        root: The model's tree.
        sources: All weights of one group, in file order.
        trusted: Whether the frozen flags of the tree are those at the time of saving,
            because the config is in the same file.
        flagged: Whether freezing a nested model also marks its layers, as in tf.keras.
            Keras 2 does not mark them, and no config records the frozen model.

    Raises:
        WeightsDoNotFit: No rule gives an assignment.
        AmbiguousWeights: Only the order decides, and it does not exclude another assignment.
    """
    named = _by_name(root, sources, copies=False)
    if named:
        return Found(named, BY_NAME)
    copied = _by_name(root, sources, copies=True)
    if copied:
        return Found(copied, BY_COPY)
    found = _by_order(root, sources, _choices(root, flagged))
    if not found:
        raise _misfit(root, sources)
    if len(found) > 1:
        raise _ambiguous(found[0], found[1], "a nested model may or may not have been frozen")
    if not trusted or _are_too_many(root):
        _require_evidence(found[0])
    return found[0]


def within(leaf: Leaf, sources: Sequence[Stored]) -> tuple[Pair, ...] | None:
    """Assign the weights of one layer to its slots, by their names or else in order."""
    if len(sources) != len(leaf.slots):
        return None
    own = keys([stored.name for stored in sources])
    wanted = [slot.key for slot in leaf.slots]
    if sorted(own) == sorted(wanted) and len(set(own)) == len(own):
        order = [own.index(key) for key in wanted]
        return _fit(leaf, [sources[position] for position in order])
    last = [key[-1] for key in keys([f"x/{stored.name}" for stored in sources])]
    if len(set(wanted)) == len(wanted) and Counter(last) == Counter(k[-1] for k in wanted):
        if [k[-1] for k in wanted] == last:
            return _fit(leaf, list(sources))
        return None
    if leaf.class_name in _OWN_NAMES and last != [key[-1] for key in wanted]:
        return None  # other weight names belong to another kind of layer
    return _fit(leaf, list(sources))


_OWN_NAMES = frozenset({"BatchNormalization", "LSTM", "GRU", "CuDNNLSTM", "CuDNNGRU", "SimpleRNN"})


def _fit(leaf: Leaf, ordered: list[Stored]) -> tuple[Pair, ...] | None:
    shapes = tuple(stored.shape for stored in ordered)
    for dialect in leaf.dialects:
        if shapes == dialect.shapes:
            return tuple(
                Pair(stored, slot, leaf, convert, dialect.name)
                for stored, slot, convert in zip(ordered, leaf.slots, dialect.converts, strict=True)
            )
    return None


def _by_name(root: Branch, sources: Sequence[Stored], *, copies: bool) -> tuple[Pair, ...] | None:
    """Assign each weight to the layer in its name, or return None if that fails."""
    every = list(leaves(root))
    if len({leaf.name for leaf in every}) != len(every):
        return None  # two layers share a name, so names cannot decide
    owned: dict[str, list[Stored]] = {leaf.name: [] for leaf in every}
    for stored in sources:
        owner = _owner(stored.name, owned, copies=copies)
        if owner is None:
            return None
        owned[owner].append(stored)
    if copies and any(
        len({_prefix(stored.name, leaf) for stored in owned[leaf]}) > 1 for leaf in owned
    ):
        return None  # two layers of the file would map to one of the model
    pairs: list[Pair] = []
    for leaf in every:
        found = within(leaf, owned[leaf.name])
        if found is None:
            return None
        pairs += found
    return tuple(pairs)


def _owner(name: str, names: dict[str, list[Stored]], *, copies: bool) -> str | None:
    suffix = r"_\d+" if copies else ""
    best: tuple[int, int, str] | None = None
    for candidate in names:
        found = re.search(rf"(?:^|/){re.escape(candidate)}{suffix}(?=/)", name)
        if found:
            rank = (-found.start(), len(candidate), candidate)
            best = rank if best is None or rank > best else best
    return best[2] if best else None


def _prefix(name: str, leaf: str) -> str:
    found = re.search(rf"(?:^|/){re.escape(leaf)}(_\d+)?(?=/)", name)
    return found.group(0) if found else name


def _by_order(root: Branch, sources: Sequence[Stored], choices: Sequence[set[int]]) -> list[Found]:
    """Return every different assignment that fits, by the order of old files."""
    found: dict[frozenset[tuple[int, int]], Found] = {}
    for frozen in choices:
        pairs = _in_order(root, sources, frozen)
        if pairs:
            one = Found(pairs, BY_ORDER)
            found.setdefault(one.key, one)
    return list(found.values())


def _in_order(root: Branch, sources: Sequence[Stored], frozen: set[int]) -> tuple[Pair, ...] | None:
    head, tail = halves(root, frozen)
    order = head + tail
    if len(order) != len(sources):
        return None
    owned: dict[int, list[tuple[Slot, Stored]]] = {}
    for (leaf, slot), stored in zip(order, sources, strict=True):
        owned.setdefault(id(leaf), []).append((slot, stored))
    prefixes: dict[str, Leaf] = {}
    pairs: list[Pair] = []
    chosen = given_names(leaves(root))
    for leaf in leaves(root):
        given = {slot.index: stored for slot, stored in owned[id(leaf)]}
        ordered = [given[slot.index] for slot in leaf.slots]
        fitted = _fit(leaf, ordered)
        if fitted is None or not _names_agree(leaf, ordered):
            return None
        roots = {stored.name.rpartition("/")[0].split("/")[0] for stored in ordered}
        if len(roots) > 1 and all("/" in stored.name for stored in ordered):
            return None  # the weights of one layer never have two layer names
        for stored in ordered:
            before = stored.name.rpartition("/")[0]
            if prefixes.setdefault(before, leaf) is not leaf and before:
                return None  # two layers never share one name
            if before in chosen and before != leaf.name:
                return None  # a name chosen by the user identifies its layer
        pairs += fitted
    return tuple(pairs)


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


def _names_agree(leaf: Leaf, ordered: list[Stored]) -> bool:
    """Return whether known weight names, such as kernel or gamma, match; others always do."""
    last = [keys([stored.name])[0][-1] for stored in ordered]
    wanted = [slot.key[-1] for slot in leaf.slots]
    known = {"kernel", "bias", "gamma", "beta", "moving_mean", "moving_variance", "embeddings",
             "recurrent_kernel", "depthwise_kernel", "pointwise_kernel", "alpha"}  # fmt: skip
    if not set(wanted) <= known or not set(last) <= known:
        return True
    return last == wanted


def trained(root: Branch, pairs: Sequence[Pair], order: Sequence[Stored]) -> list[Pair]:
    """Return the pairs of trained weights, in the order of old optimizers.

    Args:
        root: The model's tree.
        pairs: The whole assignment.
        order: The arrays in file order, which shows whether a nested model was frozen.
    """
    by_slot = {pair.slot.index: pair for pair in pairs}
    position = {id(stored): number for number, stored in enumerate(order)}
    for frozen in _choices(root, False):
        head, tail = halves(root, frozen)
        found = [by_slot[slot.index] for _, slot in head]
        numbers = [position[id(by_slot[slot.index].stored)] for _, slot in head + tail]
        if numbers == sorted(numbers):
            return found
    head, _ = halves(root, set())
    return [by_slot[slot.index] for _, slot in head]


def _choices(root: Branch, flagged: bool) -> list[set[int]]:
    """Return sets of nested models that may have been frozen as a whole, likeliest first."""
    if flagged:
        return [set()]
    nested = list(branches(root))
    chosen: list[set[int]] = [set()]
    if not _are_too_many(root):
        for size in range(1, len(nested) + 1):
            chosen += [{id(one) for one in some} for some in itertools.combinations(nested, size)]
    else:
        chosen += [{id(one)} for one in nested] + [{id(one) for one in nested}]
    return chosen


def _are_too_many(root: Branch) -> bool:
    """Return whether there are too many nested models to try every frozen combination."""
    return len(list(branches(root))) > _FREEZE_CAP


def halves(
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
        first, second = halves(below, frozen)
        head += first
        tail += second
    return ([], head + tail) if id(node) in frozen else (head, tail)


def _require_evidence(found: Found) -> None:
    """Raise AmbiguousWeights if layers of equal shapes could be exchanged.

    A layer that was frozen at saving, but is not frozen in the user's model, has another
    position in the file. Layers of other shapes would then not fit. Between layers of
    equal shapes, only the numbers in their names can decide.
    """
    prefixes: dict[int, str] = {}
    for pair in found.pairs:
        prefixes.setdefault(id(pair.leaf), pair.stored.name.rpartition("/")[0].split("/")[0])
    every = {id(pair.leaf): pair.leaf for pair in found.pairs}
    # A stored name is the layer's own, or has a number added to make it unique.
    own = all(
        re.fullmatch(rf"{re.escape(leaf.name)}(_\d+)?", prefixes[one])
        for one, leaf in every.items()
    )
    alike: dict[object, list[int]] = {}
    for one, leaf in every.items():
        alike.setdefault((leaf.signature, leaf.name if own else ""), []).append(one)
    for some in alike.values():
        names = [prefixes[one] for one in some]
        agree = same_ranks(names, [every[one].name for one in some])
        if len(names) > 1 and not (ascending(names) if agree is None else agree):
            raise AmbiguousWeights(
                f"The layers {', '.join(names[:4])} of the file have equal shapes, and their names "
                "are not\nthe model's: which is which cannot be told if one was frozen then. "
                "Name the model's\nlayers as in the file (lockstep inspect lists them), or give "
                "--config template.json of that time."
            )


def ascending(names: Sequence[str]) -> bool:
    """Return whether automatic names of one kind are in ascending order.

    Example:
        >>> ascending(["dense", "dense_2", "dense_10"]), ascending(["dense_2", "dense_1"])
        (True, False)
    """
    numbers = _numbers(names)
    return len(_stems(names)) == 1 and numbers == sorted(numbers)


def same_ranks(names: Sequence[str], others: Sequence[str]) -> bool | None:
    """Return whether two lists of automatic names of one kind are numbered in one order.

    Layers of branches are not listed in their order of creation. The same code creates
    them in the same order again. The result is None if the names do not decide.

    Example:
        >>> same_ranks(["dense_2", "dense_1"], ["dense_9", "dense_8"])
        True
    """
    mine, theirs = _numbers(names), _numbers(others)
    if len(_stems([*names, *others])) > 1 or len(set(mine)) < len(mine):
        return None
    if len(set(theirs)) < len(theirs):
        return None
    places = range(len(mine))
    return sorted(places, key=mine.__getitem__) == sorted(places, key=theirs.__getitem__)


def _stems(names: Sequence[str]) -> set[str]:
    return {re.sub(r"(_\d+)+$", "", name) for name in names}


def _numbers(names: Sequence[str]) -> list[tuple[int, ...]]:
    return [tuple(int(n) for n in re.findall(r"_(\d+)(?=_|$)", name)) for name in names]


def _ambiguous(one: Found, other: Found, why: str) -> AmbiguousWeights:
    first = {id(pair.stored): pair for pair in one.pairs}
    for pair in other.pairs:
        if first[id(pair.stored)].slot.index != pair.slot.index:
            return AmbiguousWeights(
                f"{pair.stored.name} fits both {first[id(pair.stored)].slot.path} and "
                f"{pair.slot.path}: {why}.\nGive a model whose layers are named as in the file "
                "(lockstep inspect lists them),\nso that names decide: --model file.py:function."
            )
    raise AssertionError("two equal assignments")


def _misfit(root: Branch, sources: Sequence[Stored]) -> WeightsDoNotFit | AmbiguousWeights:
    wanted = Counter(slot.shape for leaf in leaves(root) for slot in leaf.slots)
    count = sum(wanted.values())
    if count != len(sources):
        first = f"The file has {counted(len(sources), 'weight')} and the model {count}"
    else:
        first = f"File and model have {counted(count, 'weight')} each, of other shapes"
    stored = Counter(one.shape for one in sources)
    extra = next(iter((stored - wanted).items()), None)
    lacking = next(iter((wanted - stored).items()), None)
    detail = []
    if extra:
        name = next(one.name for one in sources if one.shape == extra[0])
        detail.append(f"only in the file {extra[0]}, as {name}")
    if lacking:
        path = next(s.path for le in leaves(root) for s in le.slots if s.shape == lacking[0])
        detail.append(f"only in the model {lacking[0]}, as {path}")
    hint = "Give the model that was trained: compare its summary() with lockstep inspect."
    if (extra and lacking) and len(extra[0]) == 1 and len(lacking[0]) == 2:
        hint = "A GRU of that time needs reset_after=False in the model (a bias of one row)."
    if not detail and _are_too_many(root):
        return AmbiguousWeights(
            f"{first}, and of {len(list(branches(root)))} nested models any may have been frozen: "
            f"all combinations\nof at most {_FREEZE_CAP} are tried.\n"
            "Give a model whose layers are named as in the file: --model file.py:function."
        )
    if not detail:
        detail.append("in an order that no rule of old files gives")
    return WeightsDoNotFit(f"{first}: {'; '.join(detail)}.\n{hint}")


@dataclass(frozen=True)
class Plan:
    """The array of the file for every weight of a model."""

    pairs: tuple[Pair, ...]
    rules: tuple[str, ...]
    flat: bool


def make_plan(old: OldFile, root: Branch, *, parallel: bool | None, trusted: bool) -> Plan:
    """Assign all weights of an old file to a model.

    Every variable in the tree gets exactly one array, and every array of the file is used.
    Otherwise an error is raised.

    Args:
        old: The file.
        root: The tree of the template.
        parallel: Whether the only group with weights holds the whole template; None if
            unknown.
        trusted: Whether the frozen flags of the tree are those of the file.
    """
    old.require_whole()
    groups = old.weighted
    problems: list[OldFileError] = []
    plans: list[Plan] = []
    if len(groups) == 1 and parallel is not False:
        try:
            found = assign(
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
    """Return whether a `keras_version` marks the layers of a frozen nested model.

    tf.keras of TensorFlow 1.13 and later marks them; stand-alone Keras 2 never does.

    Example:
        >>> flags_spread("2.2.4-tf"), flags_spread("2.4.0"), flags_spread("2.2.4")
        (True, True, False)
    """
    known = version or ""
    return known in ("2.2.4-tf", "2.3.0-tf") or known[:2] == "3." or known.startswith(_TF_KERAS)


_TF_KERAS = tuple(f"2.{minor}." for minor in range(4, 16))


def _layerwise(old: OldFile, root: Branch, trusted: bool) -> Plan:
    """Plan the file of a single model: one group per layer, nested models flattened."""
    groups = old.weighted
    flagged = flags_spread(old.version)
    wanted = root.children
    if len(groups) != len(wanted):
        raise WeightsDoNotFit(
            f"The file has {counted(len(groups), 'layer')} with weights and the model "
            f"{len(wanted)}.\n"
            "Give the model that was trained: compare its summary() with lockstep inspect."
        )
    named = {group.name: group for group in groups}
    by_name = len(named) == len(groups) and set(named) == {child.name for child in wanted}
    pairs: list[Pair] = []
    rules = {BY_NAME if by_name else BY_POSITION}
    for position, child in enumerate(wanted):
        group = named[child.name] if by_name else groups[position]
        found = _child(child, group, trusted, flagged)
        pairs += found.pairs
        if found.rule != BY_NAME:
            rules.add(found.rule)
    plan = Plan(tuple(pairs), tuple(sorted(rules)), False)
    if not by_name and not trusted:
        _require_numbers(groups, wanted)
    return plan


def _child(child: Leaf | Branch, group: Group, trusted: bool, flagged: bool) -> Found:
    if isinstance(child, Branch):
        return assign(child, group.weights, trusted=trusted, flagged=flagged)
    pairs = within(child, group.weights)
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
    return Found(pairs, BY_NAME)


def _require_numbers(groups: tuple[Group, ...], wanted: list[Leaf | Branch]) -> None:
    """Raise AmbiguousWeights if names contradict the assignment by position."""
    chosen = given_names(wanted)
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
        in_order = ascending(names) or same_ranks(names, own)
        if len(names) > 1 and len(stems) == 1 and not in_order:
            raise AmbiguousWeights(
                f"The layers {', '.join(names[:4])} have equal shapes and lie in another "
                "order\nthan their numbers: order and names put their weights elsewhere.\n"
                "Name the model's layers as in the file (lockstep inspect lists them)."
            )


def _key(plan: Plan) -> frozenset[tuple[int, int]]:
    return frozenset((id(pair.stored), pair.slot.index) for pair in plan.pairs)


_CONVOLUTIONS = (
    *("Conv1D", "Conv2D", "Conv3D", "Conv2DTranspose", "ConvLSTM2D"),
    *("Convolution1D", "Convolution2D", "Convolution3D"),
    *("TimeDistributed", "Bidirectional"),  # wrappers of these layers
)


def require_known_layout(old: OldFile) -> None:
    """Refuse convolutions of Keras 1: their files do not record the order of the dims.

    Raises:
        UntranslatableModel: The file has such a kernel. The error names the first one.
    """
    for stored in (one for group in old.groups for one in group.weights):
        name = stored.name.partition(":")[0]
        if not old.version and name.endswith("_W") and len(stored.shape) > 2:
            raise UntranslatableModel(
                f"{name} {stored.shape} is a kernel of Keras 1, in the order of Theano or of "
                "TensorFlow: the file does not\ntell which, and the wrong one computes other "
                "numbers. Load it in Keras 2.0 to 2.2 with the model's\ncode, save it there, and "
                "rescue that file; or take the arrays alone: -o arrays.safetensors."
            )


def turned(old: OldFile, found: Plan) -> Plan:
    """Return the plan, with convolution kernels reversed if Theano saved the file."""
    if old.backend != "theano":
        return found
    return replace(
        found,
        pairs=tuple(
            replace(pair, convert=half_turn) if _convolves(pair) else pair for pair in found.pairs
        ),
    )


def half_turn(kernel: Any) -> Any:
    """Reverse a kernel in all dims but the last two, which are channels.

    Example:
        >>> import numpy as np
        >>> half_turn(np.arange(3).reshape(3, 1, 1)).ravel()
        array([2, 1, 0])
    """
    return kernel[(slice(None, None, -1),) * (kernel.ndim - 2)]


def _convolves(pair: Pair) -> bool:
    kind = pair.stored.name.partition(":")[0].rpartition("/")[2]
    kernel = kind in ("kernel", "recurrent_kernel") and len(pair.stored.shape) > 2
    return kernel and pair.leaf.class_name in _CONVOLUTIONS
