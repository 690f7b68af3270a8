"""Genuine old files, against the weights and outputs of the libraries that wrote them."""

import hashlib
import json
from pathlib import Path

import pytest

from tests.rescue import whole

FOLDER = Path(__file__).parents[1] / "files" / "legacy"
CASES = json.loads((FOLDER / "manifest.json").read_text())["cases"]
FILES = [(case, file) for case in CASES for file in case["files"] if "expected" in file]


@pytest.mark.parametrize(
    ("case", "file"), FILES, ids=[f"{case['id']}/{file['name']}" for case, file in FILES]
)
def test_every_file_is_rescued_as_the_old_library_had_it_or_refused(case, file, tmp_path):
    outcome = whole.run(FOLDER, case, file, tmp_path)
    assert outcome.right, outcome


def test_fixtures_are_the_genuine_ones():
    for case in CASES:
        for file in case["files"]:
            content = (FOLDER / case["id"] / file["name"]).read_bytes()
            assert hashlib.sha256(content).hexdigest() == file["sha256"], file["name"]
