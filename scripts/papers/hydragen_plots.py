"""Pictures of the experiments of `scripts.papers.hydragen`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scripts.bench.parts.sharing.attention import NO_ATTENTION, SHARED, THEIRS, UNSHARED
from scripts.bench.parts.sharing.plots import COLORS, legend, make_figure, powers

_SIDES = {
    **{side: COLORS[side] for side in (SHARED, UNSHARED, NO_ATTENTION, THEIRS)},
    "vllm": "#009E73",
    "vllm-no-text": "#66c2a5",
    "sglang": "#CC79A7",
}
Pictures = Mapping[str, Callable[[], Any]]
"""By the name of its file what makes a figure."""


def throughput(results: Mapping[str, Any]) -> Pictures:
    """Tokens a second over the batch and over the length of the prefix (figure 3)."""
    points = results["points"]
    return {
        "throughput-batches.png": lambda: _rates(points, "batch", "prefix"),
        "throughput-prefixes.png": lambda: _rates(points, "prefix", "batch"),
    }


def _rates(points: Sequence[Mapping[str, Any]], over: str, each: str) -> Any:
    """Tokens a second over one size, a panel for each value of the other. A cross at the bottom is
    what did not fit."""
    values, marks = (sorted({p[name] for p in points}) for name in (each, over))
    figure, panels = make_figure(len(values))
    rates = [s["tokens_per_second"] for p in points for s in p["sides"].values()]
    for axes, value in zip(panels, values, strict=True):
        here = sorted((p for p in points if p[each] == value), key=lambda p: p[over])
        for side, color in _SIDES.items():
            found = [(p[over], p["sides"][side]) for p in here if side in p["sides"]]
            if found:
                middle = [side["tokens_per_second"] for _, side in found]
                spread = [
                    [m - side["lowest"] for m, (_, side) in zip(middle, found, strict=True)],
                    [side["highest"] - m for m, (_, side) in zip(middle, found, strict=True)],
                ]
                axes.errorbar(
                    [at for at, _ in found],
                    middle,
                    yerr=spread,
                    linestyle="--" if side == NO_ATTENTION else "-",
                    marker="o",
                    markersize=4,
                    capsize=2,
                    color=color,
                    label=side,
                )
            if lacking := [p[over] for p in here if side in p["left_out"]]:
                low = [min(rates) * 0.7] * len(lacking)
                axes.plot(lacking, low, "x", color=color, label=f"{side}, did not fit")
        unit = "prefix of {}" if each == "prefix" else "batch of {}"
        axes.set(title=unit.format(value), xscale="log", yscale="log")
        axes.set(xlabel="batch" if over == "batch" else "prefix, tokens")
        powers(axes.xaxis, marks)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("tokens a second")
    legend(figure, panels)
    return figure
