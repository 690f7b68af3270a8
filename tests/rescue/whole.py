"""Rescue every file of a folder of genuine old files, and compare with the truth.

    python -m tests.rescue.whole FOLDER [--table docs/rescue-cases.md]

FOLDER has a `manifest.json` and one folder per case (see tests/files/legacy). The
truth is independent of what is tested: the bytes of the weights that the old
library itself saved for the single model, and that model's outputs for fixed inputs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
from safetensors.numpy import load_file

import lockstep
from lockstep.errors import IncompleteFile, OldFileError
from tests.rescue import old_layers

CUSTOM = {name: value for name, value in vars(old_layers).items() if not name.startswith("_")}
LOOKALIKE = ("lambda_1", "lambda_2")


@dataclass
class Outcome:
    case: str
    file: str
    library: str
    expected: str
    got: str
    right: bool
    rule: str = ""
    weights: int = 0
    difference: float | None = None


def bytes_of(path: Path) -> Counter:
    """All arrays of an HDF5 file, as bytes, wherever they lie; optimizer state left out."""
    found: Counter = Counter()

    def visit(name: str, thing: object) -> None:
        if isinstance(thing, h5py.Dataset) and "optimizer" not in name:
            found[(thing.shape, thing[()].tobytes())] += 1

    with h5py.File(path) as handle:
        handle.visititems(visit)
    return found


def bytes_in(output: Path) -> Counter:
    """The same of a `.keras` or `.safetensors` file that was written."""
    import zipfile

    if output.suffix == ".safetensors":
        arrays = load_file(output).values()
        return Counter((array.shape, array.tobytes()) for array in arrays)
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(output) as archive:
        return bytes_of(Path(archive.extract("model.weights.h5", folder)))


def custom_for(case: str) -> dict:
    """The user's code for a case; Lambdas only where the template itself has some."""
    return {k: v for k, v in CUSTOM.items() if "lookalike" in case or k not in LOOKALIKE}


def run(folder: Path, case: dict, file: dict, work: Path) -> Outcome:
    """Rescue one file and judge what happened."""
    path = folder / case["id"] / file["name"]
    config = path.parent / "template_config.json"
    truth = path.parent / "template_weights.h5"
    io = path.parent / "io.npz"
    earlier = "earlier epoch" in file["expected"]
    hopeless = file["expected"].startswith(("incomplete", "no weights"))
    shape = "keras" if file["has_model_config"] or config.exists() else "safetensors"
    output = work / f"out.{shape}"
    outcome = Outcome(
        case["id"],
        file["name"],
        f"{case['library']} {case['library_version']}",
        "an error" if hopeless else "rescued",
        "",
        False,
    )
    try:
        report = lockstep.rescue(
            path,
            output,
            config=config if config.exists() and not file["has_model_config"] else None,
            custom_objects=custom_for(case["id"]),
            check=io if shape == "keras" and io.exists() and not earlier else None,
        )
    except IncompleteFile as error:
        outcome.got = f"IncompleteFile: {str(error).splitlines()[0].rpartition('/')[2]}"
        outcome.right = hopeless
        return outcome
    except OldFileError as error:
        outcome.got = f"{type(error).__name__}: {error}"
        return outcome
    outcome.got = "rescued"
    outcome.rule = "; ".join(rule.split(":")[0].split(" (")[0] for rule in report.rules)
    outcome.weights, outcome.difference = len(report.rows), report.difference
    reference = path if earlier or not truth.exists() else truth
    wanted, found = bytes_of(reference), bytes_in(output)
    same = not (wanted - found) and (shape != "keras" or len(report.rows) == case["n_weights"])
    outcome.right = not hopeless and same and all(row.equal for row in report.rows)
    if not same:
        outcome.got = "rescued, but with other weights"
    return outcome


def run_all(folder: Path, only: str = "") -> list[Outcome]:
    """Every HDF5 file of the manifest."""
    cases = json.loads((folder / "manifest.json").read_text())["cases"]
    outcomes = []
    with tempfile.TemporaryDirectory() as work:
        for case in cases:
            for file in case["files"]:
                present = (folder / case["id"] / file["name"]).exists()
                if "expected" in file and only in case["id"] and present:
                    outcomes.append(run(folder, case, file, Path(work)))
    return outcomes


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as a Markdown table, with a summary on top."""
    rescued = [one for one in outcomes if one.got == "rescued"]
    refused = [one for one in outcomes if one.got.startswith("IncompleteFile")]
    checked = [one.difference for one in rescued if one.difference is not None]
    lines = [
        "# Old files, every case",
        "",
        "Generated by `python -m tests.rescue.whole FOLDER --table docs/rescue-cases.md`; "
        "do not edit.",
        "",
        f"{len(outcomes)} files: {len(rescued)} rescued with weights equal bit for bit, "
        f"{len(refused)} left behind by failed saves and refused with what is missing, "
        f"{len(outcomes) - sum(one.right for one in outcomes)} wrong. Outputs compared in "
        f"{len(checked)} cases; largest difference {max(checked, default=0):.1e}.",
        "",
        "| case | file | outcome | weights | decided by | outputs differ by |",
        "|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        said = one.got.replace("|", "/") if one.right else f"WRONG: {one.got}"
        worst = "" if one.difference is None else f"{one.difference:.1e}"
        lines.append(
            f"| {one.case} | {one.file} | {said} | {one.weights or ''} | {one.rule} | {worst} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    outcomes = run_all(given.folder, given.only)
    text = table(outcomes)
    if given.table:
        given.table.write_text(text)
    print(text)
    wrong = [one for one in outcomes if not one.right]
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    np.seterr(all="raise")
    main()
