"""The page of the demo: one HTML file that loads nothing."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from lockstep.files import replacing

_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>lockstep demo</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; }}
body {{ margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; line-height: 1.25; }}
h2 {{ font-size: 1.2rem; margin-top: 2rem; }}
.found {{ border-left: .3rem solid {color}; font-size: 1.1rem; padding-left: .8rem; }}
.pictures {{ display: flex; flex-wrap: wrap; gap: 1rem; }}
.pictures img {{ flex: 1 1 22rem; height: auto; max-width: 100%; min-width: 0; }}
table {{ border-collapse: collapse; }}
th, td {{ border-bottom: 1px solid #ccc; padding: .3rem .6rem; }}
th, td {{ text-align: right; white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; white-space: normal; }}
pre {{ background: #f4f4f4; padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere; }}
@media (max-width: 40rem) {{
  table {{ font-size: 12px; }}
  th, td {{ padding: .3rem .25rem; }}
  th:first-child, td:first-child {{ padding-left: 0; }}
}}
</style>
<h1>The same training on one device and on several</h1>
<p class="found">{found}</p>
<table>{rows}</table>
<p>{batches} The files were loaded and evaluated by Keras alone, on one device.</p>
<div class="pictures">{pictures}</div>
<h2>Try it on your own model</h2>
<p>Write a function that returns your compiled model and its data, and compare. It needs no GPU:</p>
<pre># train.py
def build():
    model = ...
    model.compile("adam", "sparse_categorical_crossentropy")
    return model, (x, y)
</pre>
<pre>lockstep verify train.py:build --devices 4 --rehearse</pre>
<p>Then add two lines to your script:</p>
<pre>import lockstep

lockstep.distribute(model)  # all devices; then compile, fit and save as before
</pre>
<h2>What the Python model writes after "def "</h2>
<p>It has seen 1,500 short pieces of the standard library, character by character.</p>
<pre>{written}</pre>
</html>
"""


def write_page(
    path: Path,
    found: str,
    holds: bool,
    table: Sequence[Sequence[str]],
    pictures: Sequence[tuple[str, bytes]],
    batches: str,
    written: str,
) -> None:
    """Write the page.

    Args:
        path: Where to write it.
        found: What was found, in a sentence.
        holds: Whether several devices gave what one device gave.
        table: Rows of cells, the heads first.
        pictures: PNGs, which go into the page, each with its text.
        batches: A sentence about the batches.
        written: What the language model writes.
    """
    rows = [
        "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in row)
        for kind, row in zip(["th"] + ["td"] * (len(table) - 1), table, strict=True)
    ]
    page = _PAGE.format(
        found=html.escape(found),
        color="#2a7" if holds else "#b00",
        batches=html.escape(batches),
        pictures="".join(
            f'<img alt="{html.escape(words)}"\n src="data:image/png;base64,'
            f'{base64.b64encode(picture).decode()}">'
            for words, picture in pictures
        ),
        rows="".join(f"<tr>{row}</tr>" for row in rows),
        written=html.escape(written),
    )
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
