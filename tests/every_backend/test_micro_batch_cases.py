"""The promise with `micro_batch_size`: rows in parts leave what all rows at once leave, to 1e-10.

`python -m pytest tests/every_backend/test_micro_batch_cases.py --thorough` runs every case on JAX,
and `--whole` on PyTorch, whose quick cases are in `test_micro_batches.py`.
"""

import pytest

from tests.conformance.cases import FAMILIES
from tests.conformance.cases.in_parts import IN_PARTS
from tests.conftest import BACKEND
from tests.every_backend.test_cases import EXCLUDED
from tests.tiers import further, rest

REFUSED = {
    **dict.fromkeys(
        [
            *("cnn, sgd", "cnn, adamw", "bias before norm, sgd", "subclassed, sgd"),
            *("subclassed, adamw", "batch norm", "batch norm, small momentum, no scale"),
            "batch norm, frozen",  # it trains first
        ],
        "needs all rows of the batch at once",
    ),
    **dict.fromkeys(
        [
            *("minibatch deviation", "flipped batch", "cumulative sum over the batch"),
            *("rolled batch", "halves of the batch swapped", "softmax over the batch"),
            *("attention over the batch", "counters, running maximum and mean"),
        ],
        "is not known to work row by row|fails with the",
    ),
    # On several devices the state is looked at first.
    "last row handed to the next batch": "is not known to work row by row|changes in the call",
    "add_loss over the batch": "neither the sum nor the mean over its rows",
    "fixed batch_shape": "is built for batches of",
    "reshape with the batch size in it": "is built for batches of",
    "jit_compile=False": "needs a compiled step",
    "run_eagerly=True": "needs a compiled step",
}
"""The cases that are refused, by a part of the text. A new refusal fails."""

if BACKEND == "torch":
    del REFUSED["jit_compile=False"], REFUSED["run_eagerly=True"]
    added = ("added losses, sgd", "added losses, adamw", "add_loss over the batch")
    REFUSED |= dict.fromkeys([*added, "nested and shared"], "adds a loss in its call")
    followed = ("draws of every kind", "draws with rows second", "an autoencoder")
    REFUSED |= dict.fromkeys([*followed, "rows as an attribute"], "not known to work row by row")
    REFUSED["an output without rows"] = "its first dim is not the rows|Keep the batch dim"
    REFUSED["spectral normalization"] = "changes in the call of a layer"

OF_JAX = {"keys of the user's", "an own step", "a gradient penalty", "two calls in a step"}
"""Cases with code of JAX."""

LEFT_OUT = EXCLUDED.get(BACKEND, set()) | (
    # Parts draw for themselves, and Keras takes no missing target on PyTorch.
    OF_JAX | {"two directions", "a missing target"} if BACKEND == "torch" else set()
)

SAMPLE = {
    "attention, adamw": (3, "replicated"),
    "masked lstm, sgd": (3, "sharded"),
    "in-batch contrastive loss": (3, "replicated"),
    "AUC, F1, IoU, precision, recall": (1, "replicated"),
    "gradient accumulation over 3 steps": (3, "sharded"),
    "steps_per_execution=3": (3, "replicated"),
    "mixed_float16, loss scaled": (1, "replicated"),
    "spectral normalization": (3, "replicated"),
    "batch norm": (3, "replicated"),
}
"""The quick cases of other tests, each with devices and a layout."""


SLOW = ("two directions", "an own step", "keys of the user's", "nested and shared")
"""Cases of which others have most; they are thorough."""

OF_ONE_ROW = ["words", *further("draws of every kind", "group norm", "two directions")]
if BACKEND == "torch":
    OF_ONE_ROW = rest("words", "group norm")


def _runs():
    families = {**FAMILIES, "In parts": IN_PARTS}
    cases = [(family, name) for family, named in families.items() for name in named]
    for position, (family, name) in enumerate(cases):
        if name in LEFT_OUT:
            continue
        for devices, state in ((1, "replicated"), (3, "replicated"), (3, "sharded")):
            quick = SAMPLE.get(name) == (devices, state)
            if family == "In parts" and state == "replicated" and name not in SLOW:
                quick = devices == (1, 3)[position % 2]
            marks = [] if quick else [pytest.mark.thorough]
            marks = [pytest.mark.whole] if BACKEND == "torch" else marks
            yield pytest.param(family, name, devices, state, marks=marks)


@pytest.mark.parametrize(("family", "name", "devices", "state"), list(_runs()))
def test_parts_of_two_rows_equal_the_batch(worker, family, name, devices, state):
    far = worker.difference(family, name, devices, state=state, micro_batch_size=2)
    if name in REFUSED:
        assert set(far) == {"refused"}, f"not refused: {far}"
        assert any(part in far["refused"] for part in REFUSED[name].split("|")), far["refused"]
    else:
        assert not far, f"beyond the bound: {far}"


@pytest.mark.parametrize("name", OF_ONE_ROW)
def test_parts_of_one_row_equal_the_batch(worker, name):
    far = worker.difference("In parts", name, 1, micro_batch_size=1)
    assert not far, f"beyond the bound: {far}"
