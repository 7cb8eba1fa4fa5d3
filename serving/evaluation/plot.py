"""Plots of accuracy over the budget of forward passes, as in figure 3 of Hogwild! Inference."""

import importlib.util
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from jaxshare.serving.evaluation.scoring import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which are distinct for colour-blind readers too.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_MAX_TICKS = 10
"""At most this many budgets have a tick each, on a logarithmic axis; more get a linear axis."""


def available() -> bool:
    """True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def accuracy_picture(lines: Mapping[str, Sequence[Point]], title: str) -> "Figure":
    """Draws a line for each name, with its interval as a band.

    Args:
      lines: points in ascending order of their budgets, by their label in the legend.
      title: of the picture.
    """
    figure, [axes] = panels(1)
    draw_accuracy(axes, lines, title)
    return figure


def panels(count: int) -> "tuple[Figure, Sequence[Axes]]":
    """A figure with axes side by side, each of the size of a picture of its own."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * count, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, count, squeeze=False)[0]


def styles(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """A colour and a marker for each name."""
    return {
        name: {"color": color, "marker": marker}
        for name, color, marker in zip(
            names, itertools.cycle(_COLORS), itertools.cycle(_MARKERS), strict=False
        )
    }


def draw_accuracy(
    axes: "Axes",
    lines: Mapping[str, Sequence[Point]],
    title: str,
    seconds: Mapping[str, Mapping[int, float]] | None = None,
) -> None:
    """Draws a line for each name, with its interval as a band.

    Args:
      axes: to draw on.
      lines: points in ascending order of their budgets, by their label in the legend.
      title: of the axes.
      seconds: for each line the seconds that its budgets take, which are the horizontal axis then;
        by default that has the budgets.
    """
    for (name, line), style in zip(lines.items(), styles(lines).values(), strict=True):
        places = [seconds[name][point.budget] if seconds else point.budget for point in line]
        axes.fill_between(
            places,
            [100 * point.low for point in line],
            [100 * point.high for point in line],
            color=style["color"],
            alpha=0.15,
            linewidth=0,
        )
        axes.plot(
            places,
            [100 * point.accuracy for point in line],
            **style,
            markersize=5,
            label=name,
        )
    budgets = sorted({point.budget for line in lines.values() for point in line})
    along = "seconds" if seconds else "forward passes"
    axes.set(title=title, xlabel=along, ylabel="accuracy, %", ylim=(-3, 103))
    if not seconds and len(budgets) <= _MAX_TICKS:
        axes.set_xscale("log")
        axes.set_xticks(budgets, labels=[str(budget) for budget in budgets])
        axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
