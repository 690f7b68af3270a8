"""A picture of pairs of training runs, and of some digits."""

from pathlib import Path
from typing import Any

from lockstep.files import replacing

_STYLES: list[dict[str, Any]] = [
    {"linewidth": 5, "alpha": 0.35},
    {"linewidth": 1.5, "marker": "o", "markersize": 3},
]
"""A wide line, and a thin one that lies on it."""


def draw_demo(
    path: Path,
    losses: dict[str, dict[str, list[float]]],
    images: Any,
    truths: Any,
    guesses: Any,
) -> None:
    """Write a PNG with the loss curves of some runs, and digits with their labels.

    Args:
        path: Where to write it.
        losses: The loss after each epoch, by the name of the task, and then of the run.
        images: Grey images, shape (count, height, width, 1).
        truths: The label of each image, shape (count,).
        guesses: The prediction for each image, shape (count,).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(3, 2))[0]
    left.suptitle("The same training, twice", fontsize=11)
    for axes, (task, runs) in zip(
        left.subplots(1, len(losses), squeeze=False)[0], losses.items(), strict=True
    ):
        for (name, values), style in zip(runs.items(), _STYLES, strict=True):
            axes.plot(range(1, len(values) + 1), values, label=name, **style)
        axes.set(xlabel="epoch", ylabel="training loss", title=task)
        axes.legend()
    columns = 6
    grid = right.subplots(-(-len(images) // columns), columns)
    for position, cell in enumerate(grid.flat):
        cell.set_axis_off()
        if position < len(images):
            right_guess = truths[position] == guesses[position]
            cell.imshow(images[position, :, :, 0], cmap="gray_r")
            cell.set_title(
                f"{guesses[position]}", color="black" if right_guess else "red", fontsize=10
            )
    right.suptitle("Held-out digits and what the model takes them for", fontsize=11)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110)
