"""Plots of accuracy over the budget of forward passes, as in figure 3 of Hogwild! Inference."""

import importlib.util
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxshare.serving.evaluation.scoring import Point

if TYPE_CHECKING:
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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for (name, line), color, marker in zip(
        lines.items(), itertools.cycle(_COLORS), itertools.cycle(_MARKERS), strict=False
    ):
        budgets = [point.budget for point in line]
        axes.fill_between(
            budgets,
            [100 * point.low for point in line],
            [100 * point.high for point in line],
            color=color,
            alpha=0.15,
            linewidth=0,
        )
        axes.plot(
            budgets,
            [100 * point.accuracy for point in line],
            color=color,
            marker=marker,
            markersize=5,
            label=name,
        )
    budgets = sorted({point.budget for line in lines.values() for point in line})
    axes.set(title=title, xlabel="forward passes", ylabel="accuracy, %", ylim=(-3, 103))
    if len(budgets) <= _MAX_TICKS:
        axes.set_xscale("log")
        axes.set_xticks(budgets, labels=[str(budget) for budget in budgets])
        axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    return figure
