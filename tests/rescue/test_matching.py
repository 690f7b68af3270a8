"""Which array goes where: never wrong, and refused where nothing decides.

The trees are drawn at random and the file's order is written down by the rules of old
files, apart from the code under test: `old_order` below is this test's own.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import AmbiguousWeights, OldFileError, WeightsDoNotFit
from lockstep.rescue import match, match_by_order
from lockstep.rescue.read import Stored
from lockstep.rescue.weight_tree import Branch, Dialect, Leaf, Slot, leaves


class Counter:
    def __init__(self):
        self.count = 0

    def next(self):
        self.count += 1
        return self.count - 1


def leaf(name, kind, width, numbers, trainable=True):
    """A dense layer or a batch normalization."""
    if kind == "dense":
        kinds = [("kernel", (width, width), True), ("bias", (width,), True)]
    else:
        trained = [(key, (width,), True) for key in ("gamma", "beta")]
        kinds = [*trained, *((f"moving_{key}", (width,), False) for key in ("mean", "variance"))]
    slots = tuple(
        Slot(numbers.next(), f"{name}/{key}", shape, trained, (key,))
        for key, shape, trained in kinds
    )
    plain = Dialect("plain", tuple(s.shape for s in slots), (None,) * len(slots))
    class_name = "Dense" if kind == "dense" else "BatchNormalization"
    return Leaf(name, class_name, slots, trainable, (plain,))


def old_order(node, frozen):
    """(leaf, slot) in file order: trainable in layer order, then the rest; by the catalogue."""
    if isinstance(node, Leaf):
        if not node.trainable:
            return [], [(node, slot) for slot in node.slots]
        return (
            [(node, s) for s in node.slots if s.trainable],
            [(node, s) for s in node.slots if not s.trainable],
        )
    head, tail = [], []
    for child in node.children:
        first, second = old_order(child, frozen)
        head, tail = head + first, tail + second
    return ([], head + tail) if node.name in frozen else (head, tail)


def file_of(root, rename, frozen=()):
    """The file's arrays in order, and where each belongs."""
    head, tail = old_order(root, frozen)
    stored, truth = [], {}
    for one, slot in head + tail:
        array = Stored(f"{rename(one)}/{slot.key[-1]}:0", "", slot.shape, "float32", None)
        stored.append(array)
        truth[id(array)] = slot.index
    return stored, truth


def right(found, truth):
    return all(truth[id(pair.stored)] == pair.slot.index for pair in found.pairs)


@st.composite
def trees(draw):
    numbers = Counter()
    count = {"dense": 0, "batch_normalization": 0}

    def grow(depth, name):
        children = []
        for _ in range(draw(st.integers(1, 4))):
            kind = draw(st.sampled_from(["dense", "batch_normalization", "model"]))
            if kind == "model" and depth < 2:
                children.append(grow(depth + 1, f"{name}_{len(children)}"))
                continue
            kind = "dense" if kind == "model" else kind
            count[kind] += 1
            width = draw(st.sampled_from([3, 3, 4]))
            trainable = draw(st.sampled_from([True, True, True, False]))
            children.append(leaf(f"{kind}_{count[kind]}", kind, width, numbers, trainable))
        return Branch(name, children)

    return grow(0, "m")


def own(one):
    return one.name


def later(one):
    """Names of a session in which other models were built before."""
    stem, _, number = one.name.rpartition("_")
    return f"{stem}_{int(number) + 20}"


@settings(max_examples=200, deadline=None)
@given(trees(), st.booleans())
def test_own_names_always_decide(root, trusted):
    stored, truth = file_of(root, own)
    found = match.assign(root, stored, trusted=trusted)
    assert right(found, truth)
    assert found.rules == (match.BY_NAME,)


@settings(max_examples=200, deadline=None)
@given(trees())
def test_names_of_a_copy_always_decide(root):
    stored, truth = file_of(root, lambda one: f"{one.name}_1")
    assert right(match.assign(root, stored, trusted=False), truth)


@settings(max_examples=300, deadline=None)
@given(trees(), st.booleans())
def test_renumbered_names_are_matched_by_order_or_refused_never_wrong(root, trusted):
    stored, truth = file_of(root, later)
    try:
        found = match.assign(root, stored, trusted=trusted)
    except AmbiguousWeights:
        return
    assert right(found, truth)


@settings(max_examples=300, deadline=None)
@given(trees(), st.data())
def test_a_frozen_nested_model_is_found_or_refused_never_wrong(root, data):
    nested = [b.name for b in root.children if isinstance(b, Branch)]
    frozen = data.draw(st.sets(st.sampled_from(nested))) if nested else set()
    stored, truth = file_of(root, later, frozen)
    try:
        found = match.assign(root, stored, trusted=True)
    except AmbiguousWeights:
        return
    assert right(found, truth)


def test_of_more_nested_models_than_are_tried_none_is_misread():
    """Of nine, each was tried alone and all together, and what fitted by its shapes was taken."""
    numbers = Counter()

    def nested(name, *inner):
        return Branch(name, [*inner, leaf(f"dense_{numbers.count}", "dense", 3, numbers)])

    three = [
        nested(name, nested(f"{name}_0"), nested(f"{name}_1")) for name in ("m_0", "m_1", "m_2")
    ]
    root = Branch("m", [*three, leaf("dense_99", "dense", 4, numbers)])
    stored, _ = file_of(root, later, {"m_0", "m_1", "m_2"})
    with pytest.raises(AmbiguousWeights):
        match.assign(root, stored, trusted=True)
    stored, _ = file_of(root, later, {"m_0", "m_2"})
    with pytest.raises(AmbiguousWeights):
        match.assign(root, stored, trusted=True)


@settings(max_examples=300, deadline=None)
@given(trees(), st.data())
def test_layers_frozen_when_saved_and_not_in_the_model_are_never_misread(root, data):
    """The user's model is as in the code; the file was saved with some layers frozen."""
    every = list(leaves(root))
    chosen = data.draw(st.sets(st.sampled_from(range(len(every)))))
    flags = [one.trainable for one in every]
    for position in chosen:
        every[position].trainable = False
    stored, truth = file_of(root, later)
    for one, flag in zip(every, flags, strict=True):
        one.trainable = flag
    try:
        found = match.assign(root, stored, trusted=False)
    except OldFileError:
        return
    assert right(found, truth)


def test_equal_layers_under_strange_names_are_refused():
    numbers = Counter()
    root = Branch("m", [leaf("a", "dense", 3, numbers), leaf("b", "dense", 3, numbers)])
    stored, _ = file_of(root, lambda one: {"a": "left", "b": "right"}[one.name])
    with pytest.raises(AmbiguousWeights, match="left, right"):
        match.assign(root, stored, trusted=False)


def towers(numbers, *more):
    """Two nested models whose inner layers have equal names (Keras numbers the variables)."""
    branches = [
        Branch(name, [leaf(f"dense_{n}", "dense", 3, numbers) for n in (1, 2)]) for name in "ab"
    ]
    root = Branch("m", [*branches, *more])
    names, seen = {}, set()
    for one in leaves(root):
        names[id(one)] = f"{one.name}_1" if one.name in seen else one.name
        seen.add(one.name)
    return root, lambda one: names[id(one)]


def test_two_layers_with_one_name_are_told_apart_by_order():
    numbers = Counter()
    root, in_graph = towers(numbers, leaf("out", "dense", 3, numbers))
    stored, truth = file_of(root, in_graph)
    found = match.assign(root, stored, trusted=False)
    assert right(found, truth)
    assert found.rules == (match_by_order.BY_ORDER,)


def test_equal_nested_models_are_refused_where_either_may_have_been_frozen():
    root, in_graph = towers(Counter())
    stored, truth = file_of(root, in_graph)
    with pytest.raises(AmbiguousWeights, match="fits both"):
        match.assign(root, stored, trusted=True)
    # tf.keras marks the layers of a frozen model, so there the config tells.
    assert right(match.assign(root, stored, trusted=True, flagged=True), truth)


def test_other_shapes_say_what_is_only_here_and_only_there():
    numbers = Counter()
    root = Branch("m", [leaf("dense_1", "dense", 3, numbers)])
    stored = [Stored("dense_1/kernel:0", "", (4, 4), "float32", None),
              Stored("dense_1/bias:0", "", (3,), "float32", None)]  # fmt: skip
    with pytest.raises(WeightsDoNotFit, match=r"only in the file \(4, 4\)"):
        match.assign(root, stored, trusted=True)


@settings(max_examples=300, deadline=None)
@given(trees(), st.data())
def test_layers_made_in_another_order_than_they_lie_in(root, data):
    """Branches: same code, other numbers. Loaded where nothing was frozen, else never misread."""
    every = list(leaves(root))
    made = data.draw(st.permutations(range(len(every))))
    for one, number in zip(every, made, strict=True):
        one.name = f"{'dense' if one.class_name == 'Dense' else 'batch_normalization'}_{number}"
    flags = [one.trainable for one in every]
    frozen = data.draw(st.sets(st.sampled_from(range(len(every)))))
    for position in frozen:
        every[position].trainable = False
    stored, truth = file_of(root, later)
    for one, flag in zip(every, flags, strict=True):
        one.trainable = flag
    try:
        found = match.assign(root, stored, trusted=False)
    except OldFileError:
        unchanged = all(not flags[position] for position in frozen)
        nested = any(isinstance(child, Branch) for child in root.children)
        assert nested or not unchanged
        return
    assert right(found, truth)
