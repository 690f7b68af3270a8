"""Which array of an old file belongs to which variable.

Names decide where they are the template's own. Where they were renumbered, the
order of old files decides: all trainable weights in layer order, then all others.
Where two different assignments would both fit, nothing is guessed.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.errors import AmbiguousWeights, WeightsDoNotFit
from lockstep.rescue.cudnn import Convert
from lockstep.rescue.keras2 import Stored
from lockstep.rescue.leaves import Branch, Leaf, Slot, branches, keys, leaves

BY_NAME = "names"
BY_COPY = "names of a copy (the suffix that cpu_relocation added)"
BY_ORDER = "order: trainable weights in layer order, then the others"
BY_POSITION = "order of the layers"

_FREEZE_CAP = 8  # nested models whose frozen state is tried both ways


@dataclass(frozen=True)
class Pair:
    """One array, the variable it belongs to, and the conversion between them."""

    stored: Stored
    slot: Slot
    leaf: Leaf
    convert: Convert | None
    dialect: str = "plain"


@dataclass(frozen=True)
class Found:
    """An assignment, and the rule that decided it."""

    pairs: tuple[Pair, ...]
    rule: str

    @property
    def key(self) -> frozenset[tuple[int, int]]:
        """What is assigned to what, to compare two assignments."""
        return frozenset((id(pair.stored), pair.slot.index) for pair in self.pairs)


def assign(
    root: Branch, sources: Sequence[Stored], *, trusted: bool, flagged: bool = False
) -> Found:
    """Assign one flat list of weights to a whole model.

    Args:
        root: The model's tree.
        sources: All weights of one group, in file order.
        trusted: Whether the tree's frozen flags are those of the moment of saving
            (the config lies in the same file) or may be others.
        flagged: Whether freezing a nested model also marks its layers, as in tf.keras;
            in Keras 2 it does not, and no config tells.

    Raises:
        WeightsDoNotFit: No rule gives an assignment.
        AmbiguousWeights: Order alone would decide, and more than one fits.
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
    """Assign the weights of one layer to its slots: by their own names, else in order."""
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
        return None  # a known layer under other names is another layer
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
    """Every weight carries the name of exactly one layer, and every layer gets its weights."""
    every = list(leaves(root))
    if len({leaf.name for leaf in every}) != len(every):
        return None  # two layers of one name: names cannot decide
    owned: dict[str, list[Stored]] = {leaf.name: [] for leaf in every}
    for stored in sources:
        owner = _owner(stored.name, owned, copies=copies)
        if owner is None:
            return None
        owned[owner].append(stored)
    if copies and any(
        len({_prefix(stored.name, leaf) for stored in owned[leaf]}) > 1 for leaf in owned
    ):
        return None  # two layers of the file would share one of the model
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
    """Every different assignment in the order of old files that fits."""
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
            return None  # one layer's weights never carry the names of two
        for stored in ordered:
            before = stored.name.rpartition("/")[0]
            if prefixes.setdefault(before, leaf) is not leaf and before:
                return None  # two layers never share one name
            if before in chosen and before != leaf.name:
                return None  # a name that the user gave is no accident
        pairs += fitted
    return tuple(pairs)


def given_names(nodes: Iterable[Leaf | Branch]) -> set[str]:
    """Names of layers that look chosen by the user, not numbered by the library."""
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
    """The first name that Keras 3, and Keras 2, give to a layer of a class."""
    starts = {re.sub(rf"(.)([A-Z][a-z{more}]+)", r"\1_\2", kind) for more in ("", "0-9")}
    return {re.sub(r"([a-z])([A-Z])", r"\1_\2", start).lower() for start in starts}


def _names_agree(leaf: Leaf, ordered: list[Stored]) -> bool:
    """Whether kernel goes to kernel and gamma to gamma, where the layer is Keras's own."""
    last = [keys([stored.name])[0][-1] for stored in ordered]
    wanted = [slot.key[-1] for slot in leaf.slots]
    known = {"kernel", "bias", "gamma", "beta", "moving_mean", "moving_variance", "embeddings",
             "recurrent_kernel", "depthwise_kernel", "pointwise_kernel", "alpha"}  # fmt: skip
    if not set(wanted) <= known or not set(last) <= known:
        return True
    return last == wanted


def trained(root: Branch, pairs: Sequence[Pair], order: Sequence[Stored]) -> list[Pair]:
    """The pairs that were being trained, in the order in which old optimizers had them.

    Args:
        root: The model's tree.
        pairs: The whole assignment.
        order: The arrays in file order, which tells whether a nested model was frozen.
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
    """Which nested models may have been frozen as a whole, likeliest first."""
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
    """Whether there are more nested models than are tried frozen in every combination."""
    return len(list(branches(root))) > _FREEZE_CAP


def halves(
    node: Leaf | Branch, frozen: set[int]
) -> tuple[list[tuple[Leaf, Slot]], list[tuple[Leaf, Slot]]]:
    """Trainable and other weights of a node, in the order of old files."""
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
    """Raise AmbiguousWeights where equal layers might be exchanged and no number says not.

    A layer that was frozen when the file was saved, and is not in the model that the
    user supplied, lies elsewhere in the file. Layers of other shapes would then not
    fit; between equal ones only the numbers in their names can tell.
    """
    prefixes: dict[int, str] = {}
    for pair in found.pairs:
        prefixes.setdefault(id(pair.leaf), pair.stored.name.rpartition("/")[0].split("/")[0])
    every = {id(pair.leaf): pair.leaf for pair in found.pairs}
    # A name is the layer's own, or its own with a number added where another had it already.
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
    """Whether automatic names of one kind lie in the order in which they were given.

    Example:
        >>> ascending(["dense", "dense_2", "dense_10"]), ascending(["dense_2", "dense_1"])
        (True, False)
    """
    numbers = _numbers(names)
    return len(_stems(names)) == 1 and numbers == sorted(numbers)


def same_ranks(names: Sequence[str], others: Sequence[str]) -> bool | None:
    """Whether two lists of automatic names of one kind were numbered in one order.

    Layers of branches lie in another order than that in which they were made; the same
    code makes them in the same order again. None where the names do not tell.

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
        first = f"The file has {len(sources)} weights and the model {count}"
    else:
        first = f"File and model have {count} weights each, of other shapes"
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
