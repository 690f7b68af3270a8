"""By hand: whether the pages of bench and of the demo fit a phone, in headless Chromium.

    apt-get install chromium
    python -m tests.docs.page_width FOLDER

It writes the pages and their screenshots into the folder. The exit status is 1 if the content of
a page is wider than the page.
"""

import html
import re
import subprocess
import sys
from pathlib import Path

from lockstep.bench.bench_page import write_page as write_bench_page
from lockstep.bench.scaling import Scaling
from lockstep.demo_page import write_page as write_demo_page
from tests.messages.test_reports import measurement

WIDTHS = (360, 1200)

FRAME = """\
<!doctype html>
<html><title></title><body style="margin: 0">
<iframe style="border: 0; width: {width}px; height: 1400px" srcdoc="{page}"></iframe>
<script>
const frame = document.querySelector("iframe");
frame.onload = () => {{
  document.title = frame.contentDocument.documentElement.scrollWidth;
}};
</script></body></html>
"""
"""A window of Chromium is at least 500 wide; a frame may be narrower."""


def main(folder):
    """Write the pages, take the screenshots and compare the widths."""
    folder.mkdir(parents=True, exist_ok=True)
    scaling = Scaling(
        "a/long/path/of/a/package/train_the_whole_model.py:build_model_and_data",
        False,
        2,
        {"keras": "3.15.1"},
        tuple(measurement(count, 0.01 / count) for count in (1, 2, 4, 8)),
    )
    write_bench_page(scaling, folder / "bench.html")
    heads = ("", "one device", "4 devices", "apart")
    row = ("Python: file, by plain Keras", "2.0246480", "2.0246480", "same structure")
    picture = Path(__file__).parents[2] / "docs" / "images" / "demo.png"
    written = "def " + "a_long_line_of_code, " * 10
    found = "4 devices gave what one device gave: the losses were at most 1.2e-07 apart."
    pictures = [("", picture.read_bytes())] * 2
    table = [heads, *[row] * 8]
    write_demo_page(folder / "demo.html", found, True, table, pictures, "Of batches.", written)
    wide = [
        f"{name} at {width}"
        for name in ("bench", "demo")
        for width in WIDTHS
        if content_width(folder / f"{name}.html", width) > width
    ]
    print(f"too wide: {', '.join(wide)}" if wide else "every page fits")
    return 1 if wide else 0


def content_width(page, width):
    """The width of the content of a page that is so many pixels wide."""
    frame = page.with_name(f"{page.stem}-{width}.html")
    frame.write_text(FRAME.format(width=width, page=html.escape(page.read_text())))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1300,1400"]
    picture = frame.with_suffix(".png")
    for wanted in (f"--screenshot={picture}", "--dump-dom"):
        done = subprocess.run(
            [*command, wanted, frame.resolve().as_uri()], capture_output=True, text=True, check=True
        )
    return int(re.search(r"<title>(\d+)</title>", done.stdout)[1])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
