"""The generated tables were written by the generators that exist."""

from pathlib import Path

from tests.conformance import table
from tests.rescue import whole
from tests.third_party import __main__ as third_party

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_cases_is_what_its_generator_writes():
    versions, rows = table.read()
    known = {(family, name) for family, names in table.all_names().items() for name in names}
    assert rows.keys() <= known, "a row is of a case that is no longer there"
    for (family, name), cells in rows.items():
        assert all(name in table.names(backend)[family] for backend in cells), name
    assert table.PAGE.read_text() == table.render(versions, rows)


def test_the_page_of_other_libraries_is_what_its_generator_writes():
    page = (DOCS / "third-party.md").read_text()
    versions, rows = third_party.read(page)
    assert page == third_party.render(rows, versions)


def test_the_page_of_old_files_has_the_head_of_its_generator():
    page = (DOCS / "rescue-cases.md").read_text()
    written = whole.table([]).splitlines()
    assert page.splitlines()[:3] == written[:3]
    assert [line for line in page.splitlines() if line.startswith("| case")] == written[-2:-1]


def test_the_picture_of_the_benchmarks_is_drawn_of_their_table(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(DOCS.parent / "benchmarks")
    import peers

    ratios = peers.ratios_on((DOCS / "performance.md").read_text())
    assert list(ratios) == list(peers.WIDTH)
    assert {len(sides) for sides in ratios.values()} == {10}
    assert ratios["mlp"]["tf.distribute.MirroredStrategy"][1] > 1
    peers.draw(ratios, tmp_path / "peers.png")
    heads = [path.read_bytes()[:8] for path in (tmp_path / "peers.png", peers.PICTURE)]
    assert heads == [b"\x89PNG\r\n\x1a\n"] * 2
