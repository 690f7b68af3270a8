"""Every code block of the README and of the site runs, and every link leads somewhere."""

import ast
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import keras
import numpy as np
import pytest

import lockstep
from lockstep import errors
from lockstep.cli import main
from lockstep.tools.demo import DemoResult, TaskResult
from tests.docs import commands
from tests.docs.blocks import blocks, same_lines
from tests.processes.common import clean_environment

ROOT = Path(__file__).parents[2]
LEGACY = ROOT / "tests" / "files" / "legacy" / "keras-2.2.4__mlp4-g2"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
CHINESE = {
    ROOT / "README.zh-CN.md": ROOT / "README.md",
    **{page: ROOT / "docs" / page.name for page in sorted((ROOT / "docs" / "zh").glob("*.md"))},
}
"""Each Chinese page, with the English page whose code blocks it has."""

NOT_CODE = {"text", "yaml", "json", "toml"}
INSTALLS = ("pip ", "python3 -m venv", "export ", ".ci/", "git ", "module ")
RUN_ELSEWHERE = {
    "lockstep demo": "tests/unit/test_demo.py",
    "lockstep doctor": "tests/messages/test_doctor.py",
    "python -m pytest": "these tests",
    "python benchmarks/": "a measurement",
    "python -m tests.": "a measurement, or the tests of others",
    "sphinx-build": ".ci/run",
    "lockstep run": "tests of the launcher",
    "torchrun": "a launcher that is not installed for the tests",
    "mpirun": "a launcher that is not installed for the tests",
    "sbatch": "a launcher that is not installed for the tests",
}
"""What commands begin with that are not run here, and what runs them."""

IN_EVERY_RUN = ("README.md",)

FEW = {"lockstep bench": ["--steps", "2", "--rounds", "1"]}


def has_code(page):
    return any(block.language not in NOT_CODE for block in blocks(page))


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def pages_with_code():
    """Every page; some of them run with `--whole` alone."""
    for page in PAGES:
        if has_code(page):
            marks = [] if name_of(page) in IN_EVERY_RUN else [pytest.mark.whole]
            yield pytest.param(page, id=name_of(page), marks=marks)


@pytest.mark.thorough
@pytest.mark.parametrize("page", [*pages_with_code()])
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    shutil.copytree(ROOT / "examples", "examples")
    shutil.copy(LEGACY / "parallel_full.h5", "multi.h5")
    shutil.copy(LEGACY / "parallel_weights.h5", "multi_weights.h5")
    shutil.copy(LEGACY / "template_full.h5", "old.h5")
    shutil.copy(LEGACY / "template_config.json", "template.json")
    shutil.copy(ROOT / "tests" / "docs" / "train.py", "train.py")
    keras.utils.clear_session()
    names = namespace()
    for block in blocks(page):
        place = f"{name_of(page)}:{block.line}"
        if block.language in NOT_CODE:
            continue
        if block.file:
            Path(block.file).parent.mkdir(exist_ok=True)
            Path(block.file).write_text(block.text)
        elif block.language in ("python", "diff"):
            exec(compile(block.python, place, "exec"), names)
        elif block.text.startswith("#!"):
            subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
        else:
            assert block.language in ("bash", "console"), f"{place}: {block.language!r}"
            for command, expected in block.commands():
                run(command, expected, place)
    keras.utils.clear_session()


def namespace():
    """What a page may use without making it: a model, its data, and the imports."""
    rng = np.random.default_rng(0)
    rows = {
        name: rng.normal(size=(n, 64)).astype("float32") for name, n in (("x", 203), ("xv", 50))
    }
    labels = {"y": rows["x"][:, :10].argmax(axis=1), "yv": rows["xv"][:, :10].argmax(axis=1)}

    def build_model():
        return keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(10, activation="softmax")], name="digits"
        )

    def template():
        """The model of the old files, in Keras 3."""
        dense = keras.layers.Dense
        return keras.Sequential(
            [
                keras.Input((6,)),
                dense(8, activation="relu"),
                dense(8, activation="relu"),
                keras.layers.Dropout(0.1),
                dense(6, activation="tanh"),
                dense(3, activation="softmax"),
            ]
        )

    def endless():
        while True:
            yield rows["x"][:50], labels["y"][:50]

    return {
        "__name__": "__main__",
        "generator": endless(),
        "keras": keras,
        "np": np,
        "lockstep": lockstep,
        "build_model": build_model,
        "template": template,
        **rows,
        **labels,
    }


def run(command, expected, place):
    """Run a command of a page in the working directory."""
    if command.startswith(INSTALLS):
        return check_extras(command)
    environment, words = _environment(shlex.split(command, comments=True))
    started = " ".join(words)
    if started.startswith(tuple(RUN_ELSEWHERE)):
        assert words[0] != "lockstep" or words[1] in main.commands, place
        return None
    processes = [{}]
    if words[0] == "srun":
        words, processes = words[1:], slurm(2)
    for start, few in FEW.items():
        words += few if started.startswith(start) else []
    programs = {
        "lockstep": [sys.executable, "-m", "lockstep"],
        "python": [sys.executable, "-W", "error::UserWarning"],
    }
    assert words[0] in programs, f"{place}: {command}"
    clean = clean_environment()
    clean |= {"JAX_ENABLE_COMPILATION_CACHE": "false", "KERAS_BACKEND": "jax", "COLUMNS": "80"}
    clean |= {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}
    started = [
        subprocess.Popen(
            [*programs[words[0]], *words[1:]],
            env={**clean, **environment, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for own in processes
    ]
    for process in started:
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 0, f"{place}: {command}\n{printed}"
        same_lines(expected or "", printed)
    return None


def _environment(words):
    """Split `NAME=value python train.py` into the variables and the command."""
    count = next(i for i, word in enumerate(words) if not re.match(r"\w+=", word))
    return dict(word.split("=", 1) for word in words[:count]), words[count:]


def slurm(processes):
    """The variables that Slurm gives each process of a job."""
    job = str(random.randrange(10**6))
    return [
        {
            "SLURM_JOB_ID": job,
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_STEP_NUM_TASKS": str(processes),
            "SLURM_PROCID": str(number),
            "SLURM_LOCALID": str(number),
            "SLURM_STEP_NUM_NODES": "1",
            "JAX_PLATFORMS": "cpu",
        }
        for number in range(processes)
    ]


def check_extras(command):
    """Each extra that a page installs is one of the package's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for found in re.findall(r"(?:\.|keras-lockstep)\[([\w,]+)\]", command):
        assert set(found.split(",")) <= project["optional-dependencies"].keys(), command


def installs():
    """The two lines of the README that make an environment and install lockstep into it."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    of_python = re.search(r"^python3 -m venv .*pip install \.(?=   #)", page, re.M)
    of_uv = re.search(r"`(uv venv && [^`]*)`", page)
    return of_python[0], of_uv[1]


def test_the_lines_that_install_differ_in_the_tool_alone():
    """Debian and macOS have no `python` outside of an environment, and Debian no `ensurepip`."""
    of_python, of_uv = installs()
    assert of_uv == of_python.replace("python3 -m venv .venv", "uv venv").replace("pip ", "uv pip ")
    for page in (*PAGES, *CHINESE):
        assert not re.search(r"(?<!\S)python -m venv", page.read_text(encoding="utf-8")), page


@pytest.mark.thorough
def test_the_lines_that_install_work_with_python_and_with_uv(tmp_path):
    """As a stranger in a fresh clone. It takes two minutes, and downloads JAX and uv."""
    of_python, of_uv = installs()
    ours = ("LOCKSTEP", "PYTHON", "KERAS_", "VIRTUAL_ENV", "UV_")
    clean = {name: each for name, each in os.environ.items() if not name.startswith(ours)}
    tools = tmp_path / "tools"
    for name, line in (("python", of_python), ("uv", of_uv)):
        clone = tmp_path / name
        clone.mkdir()
        for each in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / each, clone)
        shutil.copytree(ROOT / "src", clone / "src")
        if name == "uv":
            subprocess.run([sys.executable, "-m", "venv", tools], check=True)
            subprocess.run([tools / "bin" / "pip", "install", "--quiet", "uv"], check=True)
            clean["PATH"] = os.pathsep.join([clean["PATH"], str(tools / "bin")])
        done = subprocess.run(
            ["bash", "-c", f"{line} && export KERAS_BACKEND=jax && lockstep doctor"],
            cwd=clone,
            env=clean,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Nothing to change." in done.stdout
        assert (clone / ".venv" / "bin" / "lockstep").exists()


def test_the_two_commands_of_the_readme():
    page = (ROOT / "README.md").read_text()
    fresh = "python3 -m venv .venv && . .venv/bin/activate && "
    tests = "python -m tests"
    assert f'\n{fresh}pip install ".[demo]" && lockstep demo\n' in page
    assert f'\n{fresh}pip install -e ".[test]" && {tests}\n' in page
    assert f"\n{tests}\n" in (ROOT / ".ci" / "run").read_text()
    assert len(page.splitlines()) <= 150


def test_the_table_of_the_demo_in_the_readme(capsys):
    """Its numbers are those of a run; its form is that of today."""
    from lockstep.cli import _show_demo

    digits = TaskResult("Digits", "accuracy", ([0.04], [0.04]), (0.9, 0.9), 3e-7, True, 0.9)
    python = TaskResult("Python", "loss", ([1.4], [1.4]), (2.0, 2.0), 3e-7, True, 2.0)
    _show_demo(DemoResult(4, (digits, python), ROOT))
    (shown,) = [b.text for b in blocks(ROOT / "README.md") if "held-out accuracy" in b.text]
    same_lines(shown, capsys.readouterr().out)


def test_the_page_of_commands_is_that_of_the_program():
    assert commands.PAGE.read_text() == commands.page()


def test_the_page_of_environment_variables_has_those_of_the_program():
    page = (ROOT / "docs" / "environment-variables.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`([A-Z][A-Z_]+[A-Z])`", page))
    files = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    own = {name for text in files for name in re.findall(r"\bLOCKSTEP_[A-Z_]*[A-Z]", text)}
    assert {name for name in listed if name.startswith("LOCKSTEP_")} == own
    read = re.compile(r'(?<!\*os\.)environ(?:\.get\(|\[|, )"([A-Z_]+)"')
    others = {name for text in files for name in read.findall(text)}
    assert {"KERAS_BACKEND", "SLURM_LOCALID"} <= others, "names are seen"
    assert others <= listed


def test_troubleshooting_quotes_messages_as_they_are():
    """Every error is named, and headings with a hole (`…`) are texts of the program."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    named = {name for name, item in vars(errors).items() if isinstance(item, type)}
    assert [name for name in named - {"LockstepError", "LockstepWarning"} if name not in page] == []
    program = "\n".join(_texts_of_the_program())
    quoted = [text for text in re.findall(r"^### `([^`]+)`", page, re.M) if "…" in text]
    assert len(quoted) > 20
    for text in quoted:
        if not text.startswith(OTHERS):
            parts = [re.escape(part) for part in re.split("…", text)]
            assert re.search("[^\n]*".join(parts), program), text


OTHERS = ("Array has been deleted", "cpu_merge=")
"""Messages of other libraries, and one whose first word is a variable."""


def _texts_of_the_program():
    """The strings of the source, with `…` for the values in them, each on a line."""
    for file in Path(lockstep.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
                yield "".join(parts).replace("\n", " ")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value.replace("\n", " ")


@pytest.mark.parametrize("page", CHINESE, ids=name_of)
def test_the_code_of_a_chinese_page_is_that_of_the_english_one(page):
    """Comments and shown text may be translated; code and commands may not differ."""
    mine, english = ([code(block) for block in blocks(p)] for p in (page, CHINESE[page]))
    assert mine == english


def test_both_pages_of_troubleshooting_have_the_same_messages():
    def quoted(page):
        headings = re.findall(r"^### .*$", page.read_text(encoding="utf-8"), re.M)
        return [re.findall(r"``.+?`` ?|`[^`]+`", heading) for heading in headings]

    name = "troubleshooting.md"
    english, chinese = quoted(ROOT / "docs" / name), quoted(ROOT / "docs" / "zh" / name)
    assert len(english) == len(chinese)
    # Prose around a message may quote a name more or less: the first quotation is the message.
    assert [each[:1] for each in english] == [each[:1] for each in chinese]


def code(block):
    """The language and the lines of a block, without comments at the end of a line."""
    lines = (re.sub(r"(^|\s)#(?!!).*", "", line).rstrip() for line in block.text.splitlines())
    return block.language, [line for line in lines if line]


@pytest.mark.parametrize("page", [*PAGES, *CHINESE], ids=name_of)
def test_the_links_of_a_page_lead_somewhere(page):
    """Links to other sites are not followed here: tests need no network."""
    text = re.sub(r"^(```+).*?^\1\s*$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    links = re.findall(r"\]\((?!https?://|mailto:)([^)\s]*)\)", text)
    for link in links:
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), link
        if anchor:
            assert anchor in anchors(file), link


def anchors(page):
    """The anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}
