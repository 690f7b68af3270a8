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
body {{ font: 15px/1.5 system-ui, sans-serif; }}
body {{ margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }}
img {{ max-width: 100%; height: auto; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }}
th, td {{ border-bottom: 1px solid #ccc; padding: .3rem .6rem; text-align: right; }}
th:first-child, td:first-child {{ text-align: left; }}
pre {{ background: #f4f4f4; overflow-x: auto; padding: .6rem; }}
</style>
<h1>The same training on one device and on several</h1>
<p>{batches}</p>
<img alt="Loss curves of both tasks, and digits with predicted labels"
 src="data:image/png;base64,{picture}">
<div class="wide"><table>{rows}</table></div>
<p>The files were loaded and evaluated by Keras alone, on one device.</p>
<h2>What the Python model writes after "def "</h2>
<p>It has seen 1,500 short pieces of the standard library, character by character.</p>
<pre>{written}</pre>
</html>
"""


def write_page(
    path: Path, picture: Path, table: Sequence[Sequence[str]], batches: str, written: str
) -> None:
    """Write the page.

    Args:
        path: Where to write it.
        picture: A PNG, which goes into the page.
        table: Rows of cells, the heads first.
        batches: A sentence about the batches.
        written: What the language model writes.
    """
    rows = [
        "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in row)
        for kind, row in zip(["th"] + ["td"] * (len(table) - 1), table, strict=True)
    ]
    page = _PAGE.format(
        batches=html.escape(batches),
        picture=base64.b64encode(picture.read_bytes()).decode(),
        rows="".join(f"<tr>{row}</tr>" for row in rows),
        written=html.escape(written),
    )
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
