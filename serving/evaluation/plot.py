"""Plots of accuracy over the budget of forward passes, as in figure 3 of Hogwild! Inference."""

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxshare.serving.evaluation.scoring import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which are distinct for colour-blind readers too; but for their yellow,
# which cannot be read on white and is an ochre here.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_COLUMNS = 3
_LINES_BESIDE_LEGEND = 4
"""With more lines the legend is below the axes."""
_APART = 0.006
"""How far many lines are from each other, as a part of the axis."""
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
    """A figure with so many axes, up to three side by side, each of the size of a picture of its
    own."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(count, _COLUMNS)
    rows = -(-count // columns)
    figure = Figure(figsize=(6.4 * columns, 4.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [*figure.subplots(rows, columns, squeeze=False).flat]
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A colour and a marker for each name; both together are of one name alone, up to 64."""
    size = len(_COLORS)
    return {
        name: {"color": _COLORS[i % size], "marker": _MARKERS[(i + i // size) % size]}
        for i, name in enumerate(names)
    }


def draw_accuracy(
    axes: "Axes",
    lines: Mapping[str, Sequence[Point]],
    title: str,
    seconds: Mapping[str, Mapping[int, float]] | None = None,
    looks: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Draws a line for each name, with its interval: as a band, or as a bar at each point where bands
    of many lines would lie over each other. Such lines are a little apart.

    Args:
      axes: to draw on.
      lines: points in ascending order of their budgets, by their label in the legend.
      title: of the axes.
      seconds: for each line the seconds that its budgets take, which are the horizontal axis then;
        by default that has the budgets.
      looks: a style for each line, as `styles` makes them, for axes that have lines in common.
    """
    looks, many = looks or styles(lines), len(lines) > _LINES_BESIDE_LEGEND
    budgets = sorted({point.budget for line in lines.values() for point in line})
    is_log = not seconds and len(budgets) <= _MAX_TICKS
    for number, (name, line) in enumerate(lines.items()):
        places = [seconds[name][point.budget] if seconds else point.budget for point in line]
        low, middle, high = (
            [100 * getattr(point, field) for point in line] for field in ("low", "accuracy", "high")
        )
        if many:
            if not seconds:  # which differ by themselves
                part = _APART * (number - (len(lines) - 1) / 2)
                places = _moved(places, part, budgets[0], budgets[-1], is_log)
            axes.vlines(places, low, high, color=looks[name]["color"], alpha=0.4, linewidth=1)
        else:
            axes.fill_between(
                places, low, high, color=looks[name]["color"], alpha=0.15, linewidth=0
            )
        axes.plot(places, middle, **looks[name], markersize=5, label=name)
    label = "seconds" if seconds else "forward passes"
    axes.set(title=title, xlabel=label, ylabel="accuracy, %", ylim=(-3, 103))
    if is_log:
        axes.set_xscale("log")
        axes.set_xticks(budgets, labels=[str(budget) for budget in budgets])
        axes.minorticks_off()
    axes.grid(alpha=0.3)
    if many:
        place = (0.5, -0.15)
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=place, ncols=2, fontsize=9)
    else:
        axes.legend(frameon=False, loc="lower right")


def _moved(
    places: Sequence[float], part: float, first: float, last: float, is_log: bool
) -> list[float]:
    """Places that are moved along an axis, from `first` to `last`, by a part of it."""
    if is_log:
        return [place * (last / first) ** part for place in places]
    return [place + (last - first) * part for place in places]
