"""The texts people meet, word for word where they carry both values and the next step."""

from pathlib import Path

import pytest

import lockstep
from lockstep import errors
from tests.rescue.old_files import LEGACY

DOCS = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


@pytest.mark.parametrize(
    "classic",
    [
        "You are trying to load a weight file containing 1 layers into a model with 4 layers.",
        "axes don't match array",
        "can't pickle",
        "list index out of range",
        "bad marshal data",
        "Could not locate class",
    ],
)
def test_the_classic_errors_are_found_by_searching_the_docs(classic):
    assert classic in DOCS.read_text()


def message(kind, call):
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert len(text.splitlines()) <= 3
    return text.replace(f"{LEGACY}/", "")


def test_a_husk(tmp_path):
    file = LEGACY / "keras-2.0.9__mlp_act-g2" / "parallel_full.h5"
    assert message(errors.IncompleteFile, lambda: lockstep.rescue(file, tmp_path / "n.keras")) == (
        "keras-2.0.9__mlp_act-g2/parallel_full.h5 holds no weights at all: it has no list of "
        "layers (layer_names). Keras 2.0.9 failed while it wrote the file.\n"
        "Nothing can be recovered from it; look for a file of save_weights() or an\n"
        "earlier checkpoint of the same run, and rescue that."
    )


def test_a_save_that_stopped_half_way(tmp_path):
    file = LEGACY / "tfkeras-2.3.4__collide-g2" / "parallel_full.h5"
    text = message(errors.IncompleteFile, lambda: lockstep.rescue(file, tmp_path / "n.keras"))
    assert text.startswith(
        "tfkeras-2.3.4__collide-g2/parallel_full.h5 holds 6 of 18 weights: 12 of 18 weights of "
        "'functional_1' are missing (the first is 'dense/kernel:0')."
    )


def test_weights_without_an_architecture(tmp_path):
    file = LEGACY / "keras-2.2.4__mlp4-g2" / "parallel_weights.h5"
    assert message(errors.NeedsCode, lambda: lockstep.rescue(file, tmp_path / "n.keras")) == (
        "keras-2.2.4__mlp4-g2/parallel_weights.h5 holds weights but no architecture.\n"
        "Pass the template with --model file.py:function or --config template.json, or export\n"
        "only the arrays into a .safetensors file."
    )


def test_lambdas_of_the_template(tmp_path):
    file = LEGACY / "keras-2.2.4__lookalike-single" / "template_full.h5"
    text = message(errors.NeedsCode, lambda: lockstep.rescue(file, tmp_path / "n.keras"))
    assert "the Lambda 'lambda_1'" in text
    assert "the Lambda 'lambda_2'" in text
    assert "Code in the file is never run." in text
    assert "--custom file.py" in text


def test_every_error_of_rescue_is_one_of_ours_and_a_value_error():
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.OldFileError)
    ]
    assert len(kinds) == 10
    for kind in kinds:
        assert issubclass(kind, errors.LockstepError)
        assert issubclass(kind, ValueError)
        assert kind.__doc__
        assert kind.__name__ in errors.__doc__


def test_the_public_names():
    for name in ("inspect", "rescue", "load_weights"):
        assert callable(getattr(lockstep, name))
        assert getattr(lockstep, name).__doc__
