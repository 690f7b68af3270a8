"""A picture of two training runs and some digits."""

from pathlib import Path
from typing import Any

from lockstep.files import replacing


def draw_digits(
    path: Path,
    losses: dict[str, list[float]],
    images: Any,
    truths: Any,
    guesses: Any,
) -> None:
    """Write a PNG with the loss curves of some runs, and digits with their labels.

    Args:
        path: Where to write it.
        losses: The loss after each epoch, by the name of the run.
        images: Grey images, shape (count, height, width, 1).
        truths: What each of them is, shape (count,).
        guesses: What the model takes each of them for, shape (count,).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subfigures(1, 2, squeeze=False)[0]
    axes = left.subplots()
    styles: list[dict[str, Any]] = [
        {"linewidth": 5, "alpha": 0.35},
        {"linewidth": 1.5, "marker": "o", "markersize": 3},
    ]
    for (name, values), style in zip(losses.items(), styles, strict=True):
        axes.plot(range(1, len(values) + 1), values, label=name, **style)
    axes.set(xlabel="epoch", ylabel="training loss", title="The same training, twice")
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
