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

from lockstep.errors import (
    AmbiguousWeights,
    NeedsCode,
    OldFileError,
    UntranslatableModel,
    WeightsDoNotFit,
    counted,
)
from lockstep.rescue import rebuild, unwrap, weight_tree
from lockstep.rescue.old_layers import Context
from lockstep.rescue.read import Group, OldFile, Stored
from lockstep.rescue.rebuild import Part
from lockstep.rescue.unwrap import Template
from lockstep.rescue.weight_tree import Branch, Convert, Leaf, Slot, branches, keys, leaves

BY_NAME = "names"
BY_COPY = "names of a copy (the suffix that cpu_relocation added)"
BY_ORDER = "order: trainable weights in layer order, then the others"
BY_POSITION = "order of the layers"

_FREEZE_CAP = 8  # maximum nested models for trying all frozen states
_COMPARE = "Give the model that was trained: compare its summary() with lockstep inspect."


@dataclass(frozen=True)
class Pair:
    """One array, its variable, and the conversion between them."""

    stored: Stored
    slot: Slot
    leaf: Leaf
    convert: Convert | None
    dialect: str = "plain"

    def values(self) -> Any:
        """Return the numbers of the array, in the layout of the new layer."""
        found = self.stored.read()
        return found if self.convert is None else self.convert(found)


@dataclass(frozen=True)
class Plan:
    """The array of the file for every weight of a model, and the rules that decided it."""

    pairs: tuple[Pair, ...]
    rules: tuple[str, ...]
    flat: bool = True
    """Whether one list of the file holds the whole model."""

    @property
    def key(self) -> frozenset[tuple[int, int]]:
        """The assignment as a set, for comparisons."""
        return frozenset((id(pair.stored), pair.slot.index) for pair in self.pairs)


@dataclass(frozen=True)
class Matched:
    """A Keras 3 model, with the array of the old file for each of its weights."""

    model: Any
    tree: Branch
    plan: Plan
    context: Context
    config: dict[str, Any] | None
    """The old config of the model, if known."""
    template: Template | None
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
        for frozen in _choices(self.tree, False):
            head, tail = halves(self.tree, frozen)
            numbers = [position[id(by_slot[slot.index].stored)] for _, slot in head + tail]
            if numbers == sorted(numbers):
                break
        else:
            head, _ = halves(self.tree, set())
        return [by_slot[slot.index] for _, slot in head]

    def outputs(self) -> tuple[str, ...]:
        """Return the old names of the layers that give the outputs."""
        config = (self.config or {})["config"]
        if isinstance(config, dict) and "output_layers" in config:
            return tuple(ref[0] for ref in unwrap.references(config["output_layers"]))
        entries = config if isinstance(config, list) else config["layers"]
        return (unwrap.entry_name(entries[-1]),)


def match_config(old: OldFile, config: dict[str, Any] | None, context: Context) -> Matched:
    """Build the template without weights from the config in the file or this one, and match it."""
    _require_readable(old)
    context.version = old.version
    own = unwrap.template_config(old.config)
    given = own or unwrap.template_config(config)
    if given is None:
        raise NeedsCode(
            f"{old.path} holds weights and no architecture.\n"
            "Give the template with --model file.py:function or --config template.json, or take\n"
            "the arrays alone into a .safetensors file or a .weights.h5 of named arrays."
        )
    with rebuild.weightless():
        part = rebuild.build(given, context)
        if not getattr(part.layer, "built", True) or not part.layer.inputs:
            raise NeedsCode(
                f"The model {part.name!r} was saved without its input shape.\n"
                "Rebuild it in code with an Input and use --model file.py:function."
            )
    tree = weight_tree.of_part(part)
    plan = make_plan(old, tree, parallel=_is_parallel(old), trusted=own is not None)
    matched = _matched(old, part.layer, tree, plan, given, context, part)
    trained = {pair.slot.index for pair in matched.trained(old)}
    for leaf in leaves(tree):  # the tree, made before, has the layers as they were saved
        natural = {slot.index for slot in leaf.slots if slot.trainable}
        if not leaf.trainable or (natural and not natural & trained):
            leaf.layer.trainable = False
    return matched


def match_model(old: OldFile, model: Any, context: Context) -> Matched:
    """Assign the weights of an old file to a model that the user built."""
    _require_readable(old)
    if not model.built:
        raise NeedsCode(
            f"The model {model.name!r} has no weights yet, so there is nothing to fill.\n"
            "Give it an Input, or call it once on a batch before."
        )
    tree = weight_tree.of_model(model)
    parallel = _is_parallel(old)
    try:
        plan = make_plan(old, tree, parallel=parallel, trusted=False)
    except WeightsDoNotFit:
        if parallel is not False:
            raise
        plan = make_plan(old, tree, parallel=None, trusted=False)
    return _matched(old, model, tree, plan, unwrap.template_config(old.config), context)


def _matched(
    old: OldFile,
    model: Any,
    tree: Branch,
    plan: Plan,
    config: dict[str, Any] | None,
    context: Context,
    part: Part | None = None,
) -> Matched:
    template = unwrap.in_config(old.config)
    grouped = unwrap.in_groups(old) if template is None and plan.flat else None
    name, devices = (template.name, template.devices) if template else grouped or (None, None)
    if old.backend == "theano":  # it stores kernels of convolutions reversed
        pairs = [replace(p, convert=half_turn) if _convolves(p) else p for p in plan.pairs]
        plan = replace(plan, pairs=tuple(pairs))
    return Matched(model, tree, plan, context, config, template, name, devices, part)


def _is_parallel(old: OldFile) -> bool | None:
    """Return whether the config is of a parallel model; None if the file has no config."""
    return None if old.config is None else unwrap.in_config(old.config) is not None


def make_plan(old: OldFile, root: Branch, *, parallel: bool | None, trusted: bool) -> Plan:
    """Assign every array of an old file to exactly one variable of a model, or raise.

    Args:
        old: The file.
        root: The tree of the template.
        parallel: Whether the only group with weights holds the whole template; None if unknown.
        trusted: Whether the frozen flags of the tree are those of the file.
    """
    groups = old.weighted
    flagged = flags_spread(old.version)
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
    tf_keras = tuple(f"2.{minor}." for minor in range(4, 16))
    return known in ("2.2.4-tf", "2.3.0-tf") or known[:2] == "3." or known.startswith(tf_keras)


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
        named = _by_name(root, sources, copies=rule == BY_COPY)
        if named:
            return Plan(named, (rule,))
    found: dict[frozenset[tuple[int, int]], Plan] = {}
    for frozen in _choices(root, flagged):
        pairs = _in_order(root, sources, frozen)
        if pairs:
            plan = Plan(pairs, (BY_ORDER,))
            found.setdefault(plan.key, plan)
    if not found:
        raise _misfit(root, sources)
    first, *others = found.values()
    if others:
        raise _ambiguous(first, others[0])
    if not trusted or _are_too_many(root):
        _require_evidence(first)
    return first


def _by_name(root: Branch, sources: Sequence[Stored], *, copies: bool) -> tuple[Pair, ...] | None:
    """Assign each weight to the layer in its name, or return None if that fails."""
    every = list(leaves(root))
    owned: dict[str, list[Stored]] = {leaf.name: [] for leaf in every}
    if len(owned) != len(every):
        return None  # two layers share a name, so names cannot decide
    prefixes: dict[str, str] = {}
    for stored in sources:
        owner = _owner(stored.name, owned, r"_\d+" if copies else "")
        if owner is None:
            return None
        name, prefix = owner
        if copies and prefixes.setdefault(name, prefix) != prefix:
            return None  # two layers of the file would map to one of the model
        owned[name].append(stored)
    pairs: list[Pair] = []
    for leaf in every:
        found = _within(leaf, owned[leaf.name])
        if found is None:
            return None
        pairs += found
    return tuple(pairs)


def _owner(name: str, layers: Iterable[str], suffix: str) -> tuple[str, str] | None:
    """Return the layer that comes first in the name of a weight, and how it stands there."""
    found = {
        layer: match
        for layer in layers
        if (match := re.search(rf"(?:^|/){re.escape(layer)}{suffix}(?=/)", name))
    }
    if not found:
        return None
    best = max(found, key=lambda layer: (-found[layer].start(), len(layer), layer))
    return best, found[best].group()


_OWN_NAMES = frozenset({"BatchNormalization", "LSTM", "GRU", "CuDNNLSTM", "CuDNNGRU", "SimpleRNN"})


def _within(leaf: Leaf, sources: Sequence[Stored]) -> tuple[Pair, ...] | None:
    """Assign the weights of one layer to its slots, by their names or else in order."""
    if len(sources) != len(leaf.slots):
        return None
    own = keys([stored.name for stored in sources])
    wanted = [slot.key for slot in leaf.slots]
    if sorted(own) == sorted(wanted) and len(set(own)) == len(own):
        return _fit(leaf, [sources[own.index(key)] for key in wanted])
    last = [key[-1] for key in keys([f"x/{stored.name}" for stored in sources])]
    kinds = [key[-1] for key in wanted]
    named = len(set(wanted)) == len(wanted) and Counter(last) == Counter(kinds)
    if last != kinds and (named or leaf.class_name in _OWN_NAMES):
        return None  # other weight names belong to another kind of layer
    return _fit(leaf, sources)


def _fit(leaf: Leaf, ordered: Sequence[Stored]) -> tuple[Pair, ...] | None:
    shapes = tuple(stored.shape for stored in ordered)
    for dialect in leaf.dialects:
        if shapes == dialect.shapes:
            return tuple(
                Pair(stored, slot, leaf, convert, dialect.name)
                for stored, slot, convert in zip(ordered, leaf.slots, dialect.converts, strict=True)
            )
    return None


def _in_order(root: Branch, sources: Sequence[Stored], frozen: set[int]) -> tuple[Pair, ...] | None:
    head, tail = halves(root, frozen)
    order = head + tail
    if len(order) != len(sources):
        return None
    given = {slot.index: stored for (_, slot), stored in zip(order, sources, strict=True)}
    prefixes: dict[str, Leaf] = {}
    pairs: list[Pair] = []
    chosen = given_names(leaves(root))
    for leaf in leaves(root):
        ordered = [given[slot.index] for slot in leaf.slots]
        fitted = _fit(leaf, ordered)
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


def _choices(root: Branch, flagged: bool) -> list[set[int]]:
    """Return sets of nested models that may have been frozen as a whole, likeliest first."""
    nested = [] if flagged else [id(one) for one in branches(root)]
    sizes: Iterable[int] = range(len(nested) + 1)
    if len(nested) > _FREEZE_CAP:
        sizes = (0, 1, len(nested))
    return [set(some) for size in sizes for some in itertools.combinations(nested, size)]


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
        agree = same_ranks(names, [leaf.name for leaf in some])
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
        f"{pair.stored.name} fits both {first[id(pair.stored)].path} and {pair.slot.path}: "
        "a nested model may or may not have been frozen.\n"
        "Give a model whose layers are named as in the file "
        "(lockstep inspect lists them),\nso that names decide: --model file.py:function."
    )


def _misfit(root: Branch, sources: Sequence[Stored]) -> WeightsDoNotFit | AmbiguousWeights:
    slots = [slot for leaf in leaves(root) for slot in leaf.slots]
    if len(slots) != len(sources):
        first = f"The file has {counted(len(sources), 'weight')} and the model {len(slots)}"
    else:
        first = f"File and model have {counted(len(slots), 'weight')} each, of other shapes"
    stored, wanted = Counter(one.shape for one in sources), Counter(slot.shape for slot in slots)
    extra, lacking = next(iter(stored - wanted), None), next(iter(wanted - stored), None)
    detail = []
    if extra is not None:
        name = next(one.name for one in sources if one.shape == extra)
        detail.append(f"only in the file {extra}, as {name}")
    if lacking is not None:
        path = next(slot.path for slot in slots if slot.shape == lacking)
        detail.append(f"only in the model {lacking}, as {path}")
    hint = _COMPARE
    if extra is not None and lacking is not None and (len(extra), len(lacking)) == (1, 2):
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


def _layerwise(groups: Sequence[Group], root: Branch, trusted: bool, flagged: bool) -> Plan:
    """Plan the file of a single model: one group per layer, nested models flattened."""
    wanted = root.children
    if len(groups) != len(wanted):
        raise WeightsDoNotFit(
            f"The file has {counted(len(groups), 'layer')} with weights and the model "
            f"{len(wanted)}.\n{_COMPARE}"
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


def _layer(leaf: Leaf, group: Group) -> tuple[Pair, ...]:
    pairs = _within(leaf, group.weights)
    if pairs is None:
        shapes = ", ".join(str(stored.shape) for stored in group.weights)
        wanted = ", ".join(str(slot.shape) for slot in leaf.slots)
        hint = _COMPARE
        if leaf.class_name == "GRU":
            hint = "A GRU of Keras 2 needs reset_after=False in the model (a bias of one row)."
        raise WeightsDoNotFit(
            f"The layer {group.name!r} of the file has {shapes}; {leaf.name!r} of the model has "
            f"{wanted}.\n{hint}"
        )
    return pairs


def _require_numbers(groups: Sequence[Group], wanted: list[Leaf | Branch]) -> None:
    """Raise AmbiguousWeights if names contradict the assignment by position."""
    chosen = given_names(wanted)
    alike: dict[object, list[tuple[str, str]]] = {}
    for group, child in zip(groups, wanted, strict=True):
        if group.name in chosen and group.name != child.name:
            raise AmbiguousWeights(
                f"By the order of layers the weights of {group.name!r} would go to "
                f"{child.name!r}, and the model has\na layer {group.name!r} of its own: order "
                "and names disagree.\nName the model's layers as in the file (lockstep inspect "
                "lists them)."
            )
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


def _require_readable(old: OldFile) -> None:
    """Refuse a file that is not whole, and convolutions of Keras 1.

    Files of Keras 1 do not record the order of the dims of a kernel.
    """
    old.require_whole()
    for stored in () if old.version else old.weights:
        name = stored.name.partition(":")[0]
        if name.endswith("_W") and len(stored.shape) > 2:
            raise UntranslatableModel(
                f"{name} {stored.shape} is a kernel of Keras 1, in the order of Theano or of "
                "TensorFlow: the file does not\ntell which, and the wrong one computes other "
                "numbers. Load it in Keras 2.0 to 2.2 with the model's\ncode, save it there, and "
                "rescue that file; or take the arrays alone: -o arrays.safetensors."
            )


_CONVOLUTIONS = (
    *("Conv1D", "Conv2D", "Conv3D", "Conv2DTranspose", "ConvLSTM2D"),
    *("Convolution1D", "Convolution2D", "Convolution3D"),
    *("TimeDistributed", "Bidirectional"),  # wrappers of these layers
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
