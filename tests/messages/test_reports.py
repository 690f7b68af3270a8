"""Reports of verify, bench, inspect and rescue: printed, in a notebook, as JSON."""

import io
import json
import sys

import pytest
from click.testing import CliRunner
from rich.console import Console

import lockstep
from lockstep.cli import main
from lockstep.core.report import print_report
from lockstep.rescue.rescue_report import Rescued
from lockstep.tools.bench.scaling import Measurement, Scaling
from lockstep.tools.verify.verification import Difference, Verification
from tests.conformance.common import data, model

OLD = "tests/files/legacy/keras-2.2.4__mlp4-g2/parallel_full.h5"


def measurement(count, step):
    return Measurement(
        devices=tuple(f"gpu:{number}" for number in range(count)),
        rows=64,
        rows_per_step=64.0,
        steps_per_execution=1.0,
        step=step,
        spread=(step, step),
        input=0.0001,
        host=0.0001,
        compute=0.9 * step,
        communication=0.0,
        compile=2.5,
        checkpoint=0.1,
        load=0.3,
    )


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    return {
        "verify": lockstep.verify(model(), data(), devices=2, steps=2),
        "bench": Scaling(
            "train.py:build", False, 2, {}, (measurement(1, 0.010), measurement(4, 0.004))
        ),
        "inspect": lockstep.inspect(OLD),
        "rescue": lockstep.rescue(OLD, folder / "single.keras"),
    }


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "verify",
            "2 devices give the same results as one device. Compared: 2 steps of 21 to 32 rows, "
            "on one device and on 2 devices.",
        ),
        (
            "bench",
            "4 devices are 2.50 times as fast as 1, an efficiency of 62%. The bottleneck is the "
            "computation itself.",
        ),
        (
            "inspect",
            f"{OLD}: full model, parallel over 2 devices, Keras 2.2.4; complete. "
            f"Next: lockstep rescue {OLD} -o ",
        ),
        ("rescue", "single.keras: 8 of 8 weights read back, equal; "),
    ],
)
def test_a_report_is_short_as_text(reports, name, said):
    assert said in str(reports[name])
    assert len(str(reports[name])) < 400


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("verify", "largest difference"),
        ("bench", "efficiency"),
        ("inspect", "kernel:0"),
        ("rescue", "in the old file"),
    ],
)
def test_a_report_is_a_table_in_a_notebook(reports, name, cell):
    shown = reports[name]._repr_html_()
    assert shown.startswith("<pre")
    assert shown.endswith("</pre>")
    assert cell in shown


@pytest.mark.parametrize("name", ["verify", "bench", "inspect", "rescue"])
def test_a_notebook_shows_a_report_once(reports, name, monkeypatch):
    """In a notebook, rich shows what it prints, and Jupyter shows the HTML besides."""
    shown = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *parts: shown.append(parts))
    assert reports[name]._repr_html_()
    assert shown == []


@pytest.mark.parametrize("name", ["verify", "bench", "inspect", "rescue"])
def test_a_narrow_terminal_cuts_nothing(reports, name):
    console = Console(file=io.StringIO(), width=40, force_terminal=True)
    reports[name].show(console)
    assert "\u2026" not in console.file.getvalue()


def test_in_a_pipe_names_and_paths_stay_whole(capsys):
    name, path = f"model/{'block/' * 30}kernel", f"/home/{'folder/' * 30}multi.h5"
    found = Verification("jax", ("cpu:0", "cpu:1"), 2, (3, 3), (Difference(name, 0.0, 1e-5),))
    print_report(found, False)
    print_report(Rescued(path, path, "", None, 2, (), (), "none", False, None, (path,)), False)
    lines = capsys.readouterr().out.splitlines()
    assert sum(name in line for line in lines) == 1
    assert sum(path in line for line in lines) == 3


@pytest.mark.parametrize("name", ["verify", "bench", "inspect", "rescue"])
def test_a_report_has_pythons_own_numbers(reports, name):
    """The bounds of verify were NumPy's floats, which print as np.float64(1e-05)."""

    def check(value):
        if isinstance(value, dict):
            value = [*value, *value.values()]
        if isinstance(value, list | tuple):
            for each in value:
                check(each)
        else:
            assert type(value) in (int, float, bool, str, type(None)), repr(value)

    check(reports[name].as_dict())
    assert json.loads(reports[name].as_json())


def test_names_are_no_html():
    """A layer may have any name, and a notebook runs what it is shown."""
    found = Verification("jax", ("cpu:0", "cpu:1"), 2, (3, 3), (Difference("<script>", 0.0, 1e-5),))
    assert "<script>" not in found._repr_html_()
    assert "&lt;script&gt;" in found._repr_html_()


def test_rescue_as_json(tmp_path):
    """What the user's code prints is no JSON, and goes to stderr."""
    (tmp_path / "layers.py").write_text("print('loading')\n")
    words = ["rescue", OLD, "-o", str(tmp_path / "single.keras"), "--json"]
    done = CliRunner().invoke(main, [*words, "--custom", str(tmp_path / "layers.py")])
    sys.modules.pop("layers", None)
    report = json.loads(done.stdout)
    assert done.stderr == "loading\n"
    assert done.exit_code == 0
    assert report["template"] == "sequential_1"
    assert [row["equal"] for row in report["rows"]] == [True] * 8


def test_a_table_in_a_notebook_is_shown_once(monkeypatch):
    """In a notebook, rich displays what a console prints, and the notebook the result again."""
    displayed = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *given: displayed.append(given))
    found = Verification("jax", ("cpu:0", "cpu:1"), 2, (3, 3), (Difference("loss", 0.0, 1e-5),))
    assert "loss" in found._repr_html_()
    assert displayed == []


@pytest.mark.parametrize("width", [40, 60, 80])
def test_no_name_is_cut(width):
    name = "optimizer/adam/a_model_with_a_long_name_block_12_dense_1_kernel_momentum"
    found = Verification("jax", ("cpu:0", "cpu:1"), 2, (3, 3), (Difference(name, 1e-7, 1e-5),))
    console = Console(width=width, file=io.StringIO())
    found.show(console)
    printed = console.file.getvalue()
    assert "…" not in printed
    if width < 80:
        assert f"{name}: largest difference 1.0e-07, bound 1.0e-05\n" in printed
    else:
        assert (
            "".join(line.split("│")[1].strip() for line in printed.splitlines() if "│" in line)
            == name
        )


def test_a_path_is_never_broken(tmp_path):
    folder = tmp_path / ("a" * 60) / ("b" * 60)
    folder.mkdir(parents=True)
    report = lockstep.rescue(OLD, folder / "single.keras")
    console = Console(width=60, file=io.StringIO())
    report.show(console)
    lockstep.inspect(folder / "single.keras").show(console)
    assert console.file.getvalue().count(str(folder / "single.keras")) == 3


def test_rehearsed_devices_have_no_speed_up():
    found = Scaling("t:build", True, 2, {}, (measurement(1, 0.010), measurement(4, 0.004)))
    console = Console(width=100, file=io.StringIO())
    found.show(console)
    assert "rows/s" in console.file.getvalue()
    for word in ("speed-up", "efficiency"):
        assert word not in console.file.getvalue()
    assert found.as_dict()["measurements"][1]["speedup"] is None
