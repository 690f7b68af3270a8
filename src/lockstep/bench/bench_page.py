"""The page of what bench found."""

import html
import io
from datetime import date
from pathlib import Path
from typing import Any

from lockstep.bench.scaling import PARTS, Scaling
from lockstep.devices import names_in_words
from lockstep.files import replacing


def write_page(found: Scaling, path: Path) -> None:
    """Write one HTML file with the table, the verdict and two plots. It loads no other file."""
    rows = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in found.cells(measured))}</tr>"
        for measured in found.measurements
    )
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    loads = ", ".join(f"{measured.load:.1f}" for measured in found.measurements)
    page = _PAGE.format(
        target=html.escape(found.target),
        when=date.today().isoformat(),
        devices=html.escape(_devices_in_words(found)),
        verdict=html.escape(found.verdict),
        kind="loud" if found.rehearsed else "",
        advice="".join(f"<p>{html.escape(advice)}</p>" for advice in found.advice),
        heads="".join(f"<th>{head}</th>" for head in found.heads),
        rows=rows,
        plots=_plots(found),
        profiled=html.escape(found.profiled),
        machine=html.escape(
            f"{found.cores} cores; load before each measurement: {loads}; {versions}"
        ),
    )
    with replacing(path) as temporary:
        # The name of a target may have bytes that are not UTF-8.
        temporary.write_text(page, encoding="utf-8", errors="backslashreplace")


def _devices_in_words(found: Scaling) -> str:
    """Return a phrase with the devices of each measurement."""
    return "; ".join(names_in_words(measured.devices) for measured in found.measurements)


def _plots(found: Scaling) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    FigureCanvasSVG(figure)
    speed, parts = figure.subplots(1, 2)
    counts = [len(measured.devices) for measured in found.measurements]
    rates = [measured.rows_per_second for measured in found.measurements]
    speed.plot(counts, rates, marker="o", label="measured")
    if not found.rehearsed:
        ideal = [rates[0] * count / counts[0] for count in counts]
        speed.plot(counts, ideal, linestyle="--", color="grey", label="perfect")
    speed.set(xlabel="devices", ylabel="rows per second", xticks=counts, ylim=(0, None))
    speed.legend()
    places = range(len(counts))
    width = 0.8 / len(PARTS)
    for number, part in enumerate(PARTS):
        heights = [(getattr(m, part) or 0) * 1e3 for m in found.measurements]
        parts.bar([place + number * width for place in places], heights, width, label=part)
    steps: Any = [m.step * 1e3 for m in found.measurements]
    parts.plot([place + 1.5 * width for place in places], steps, "k_", markersize=40, label="step")
    parts.set(xlabel="devices", ylabel="ms per step")
    parts.set_xticks([place + 1.5 * width for place in places], [str(c) for c in counts])
    parts.legend()
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    return drawn.getvalue().partition("<svg")[1] + drawn.getvalue().partition("<svg")[2]


_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>lockstep bench: {target}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; }}
body {{ margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; overflow-wrap: anywhere; }}
svg {{ max-width: 100%; height: auto; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }}
th, td {{ border-bottom: 1px solid #ccc; padding: .3rem .6rem; }}
th, td {{ text-align: right; white-space: nowrap; }}
.loud {{ color: #b00; font-weight: bold; }}
small {{ color: #555; }}
</style>
<h1>How fast {target} trains, by number of devices</h1>
<p>{when}: {devices}</p>
<p class="{kind}">{verdict}</p>
{advice}
{plots}
<div class="wide"><table><tr>{heads}</tr>{rows}</table></div>
<p><small>A step is the median of the rounds, with its quartiles. Input, host, compute and
communication overlap, so they do not add up to a step: the longest of them limits it. Input is
what it takes to prepare a batch as fit does, with nothing else running; host is the processor time
of the main thread. {profiled}
{machine}.</small></p>
</html>
"""
