"""The picture of the demo: how far two runs are apart after each step, and some digits."""

from pathlib import Path
from typing import Any

from lockstep.core.files import replacing

_LEAST = 1e-9
"""The lower edge of the picture. Losses that are the same lie on it."""


def draw_demo(
    path: Path,
    apart: dict[str, list[float]],
    bound: float,
    images: Any,
    truths: Any,
    guesses: Any,
) -> None:
    """Write a PNG with the differences of the losses, and digits with their labels.

    Args:
        path: Where to write it.
        apart: The difference of the losses after each step, by the name of the task.
        bound: The largest difference that is rounding.
        images: Grey images, shape (count, height, width, 1).
        truths: The label of each image, shape (count,).
        guesses: The prediction for each image, shape (count,).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    whole = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(whole)
    left, right = whole.subfigures(1, 2, squeeze=False, width_ratios=(3, 2))[0]
    _draw_differences(left, apart, bound)
    _draw_digits(right, images, truths, guesses)
    with replacing(path) as temporary:
        whole.savefig(temporary, format="png", dpi=130)


def _draw_differences(figure: Any, apart: dict[str, list[float]], bound: float) -> None:
    axes = figure.subplots()
    for (task, values), marker in zip(apart.items(), "o^", strict=True):
        shown = [max(value, _LEAST) for value in values]
        axes.plot(range(1, len(shown) + 1), shown, marker, markersize=3, label=task)
    axes.axhline(bound, color="red", linestyle="--", label=f"bound {bound:.0e}")
    axes.set(
        xlabel="training step",
        ylabel="loss difference",
        yscale="log",
        ylim=(_LEAST / 1.5, 1e-3),
        title="Difference between one device and several",
    )
    ticks = [10.0**power for power in range(-9, -2)]
    axes.set_yticks(ticks, ["none", *(f"1e{power}" for power in range(-8, -2))])
    axes.legend(loc="upper right", ncols=3, fontsize=9)


def _draw_digits(figure: Any, images: Any, truths: Any, guesses: Any) -> None:
    columns = 6
    grid = figure.subplots(-(-len(images) // columns), columns)
    for position, cell in enumerate(grid.flat):
        cell.set_axis_off()
        if position < len(images):
            right_guess = truths[position] == guesses[position]
            cell.imshow(images[position, :, :, 0], cmap="gray_r")
            cell.set_title(
                f"{guesses[position]}", color="black" if right_guess else "red", fontsize=10
            )
    figure.suptitle("Held-out digits and their predicted labels", fontsize=11)
