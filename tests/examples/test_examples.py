"""Each example runs to its end: it trains over several devices, and its file is plain Keras."""

import json
import re

import pytest

from tests.examples.common import FOLDER, run_example
from tests.processes.common import warm_script

# No batch divides by the number of devices; all of a run have one size, to compile once.
EXAMPLES = {
    "anywhere.py": (4, "--samples 53 --epochs 1 --batch 10 --folder {folder}"),
    "own_rows.py": (2, "--rows 900 --epochs 1 --batch 100 --folder {folder}"),
    "minimal.py": (4, "--epochs 1 --file {folder}/minimal.keras"),
    "tf_data.py": (
        4,
        "--samples 63 --epochs 2 --batch 10 --file {folder}/two_inputs.keras",
    ),
    "checkpoint.py": (
        4,
        "--samples 50 --epochs 2 --batch 10 --steps 2 --folder {folder}/run",
    ),
    "xception_random_images.py": (
        2,
        "--gpus 2 --samples 3 --size 71 --classes 5 --epochs 1 --batch 3 --file {folder}/x.keras",
    ),
    "vgg_two_gpus.py": (
        2,
        "--samples 15 --size 32 --epochs 1 --batch 3 --file {folder}/vgg.keras",
    ),
    "unet_iou.py": (
        4,
        "--samples 50 --size 16 --filters 3 --epochs 2 --batch 10 --folder {folder}",
    ),
    "bert_classification.py": (
        4,
        "--samples 50 --length 10 --vocabulary 40 --layers 1 --heads 2 --width 8 --epochs 2 "
        "--batch 5 --folder {folder}",
    ),
    "generator_steps.py": (
        4,
        "--steps 8 --validation-steps 2 --epochs 3 --batch 30 --logs {folder}/logs "
        "--file {folder}/spirals.keras",
    ),
}

FILES = {
    "unet_iou.py": r"unet-0[12]-\d\.\d{3}\.keras",
    "bert_classification.py": r"bert-0[12]-\d\.\d{4}\.keras",
    "generator_steps.py": r"logs/validation/events\..*",
    "checkpoint.py": r"run/\d+-epoch-.*/manifest\.json",
}
"""Files that tell of what an example is about."""


LONG = {
    "anywhere.py",
    "generator_steps.py",
    "bert_classification.py",
    "xception_random_images.py",
    "vgg_two_gpus.py",
    "unet_iou.py",
}
"""Not in the fixed sample."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.whole] if n in LONG else []) for n in EXAMPLES],
)
def test_it_runs_and_plain_keras_reads_its_file(name, tmp_path):
    devices, options = EXAMPLES[name]
    run_example(name, devices, options, tmp_path)
    if name in FILES:
        written = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")]
        assert any(re.fullmatch(FILES[name], file) for file in written), written


def test_the_notebook_runs_cell_after_cell(tmp_path):
    """In one process, as a kernel runs them; what shows a plot on a screen is not tested."""
    cells = json.loads((FOLDER / "notebook.ipynb").read_text())["cells"]
    code = ["import matplotlib; matplotlib.use('agg')"]
    code += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in cells), "outputs are made by the reader"
    ends = "print(report.verdict, largest)"
    (tmp_path / "notebook.py").write_text("\n".join([*code, ends]))
    printed = warm_script("notebook.py", cwd=tmp_path)
    verdict, largest = printed.splitlines()[-1].split()
    assert verdict == "equal"
    assert float(largest) <= 1e-5
