"""Pictures of the experiments of `scripts.papers.hydragen`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scripts.bench.parts.sharing.attention import (
    NO_ATTENTION,
    SDPA,
    SHARED,
    THEIRS,
    UNSHARED,
)
from scripts.bench.parts.sharing.generate import MORE, ONE, TWO
from scripts.bench.parts.sharing.plots import COLORS, legend, make_figure, plain_numbers, powers
from scripts.papers.hydragen_peers import ABSENT

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
    if not any(point["sides"] for point in points):
        return {}
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
            # A side that is not installed needs no marks.
            whys = [(p[over], p["left_out"].get(side, ABSENT)) for p in here]
            if lacking := [at for at, why in whys if not why.startswith(ABSENT)]:
                low = [min(rates) * 0.7] * len(lacking)
                axes.plot(lacking, low, "x", color=color, label=f"{side}, did not fit")
        unit = "prefix of {}" if each == "prefix" else "batch of {}"
        axes.set(title=unit.format(value), xscale="log", yscale="log")
        axes.set(xlabel="batch" if over == "batch" else "prefix, tokens")
        powers(axes.xaxis, marks)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("tokens a second")
    legend(figure, panels, columns=2 if len(panels) == 1 else 4)
    return figure


def attention(results: Mapping[str, Any]) -> Pictures:
    """Speedups of shared attention over the batch (figure 4)."""
    if not any(point["slower_than_shared"] for point in results["points"]):
        return {}
    return {"attention.png": lambda: _speedups(results["points"])}


def _speedups(points: Sequence[Mapping[str, Any]]) -> Any:
    """How many times slower than shared the others are, a panel for each length of suffix, a line
    for each of prefix; those of PyTorch are dotted."""
    suffixes, rows = (sorted({p[name] for p in points}) for name in ("suffix", "rows"))
    prefixes = sorted({p["prefix"] for p in points})
    figure, panels = make_figure(len(suffixes))
    for axes, suffix in zip(panels, suffixes, strict=True):
        for number, prefix in enumerate(prefixes):
            color = _PREFIXES[number % len(_PREFIXES)]
            for side, line in ((UNSHARED, "-"), (SDPA, ":")):
                found = [
                    (p["rows"], p["slower_than_shared"][side]["median"])
                    for p in sorted(points, key=lambda p: p["rows"])
                    if (p["suffix"], p["prefix"]) == (suffix, prefix)
                    and side in p["slower_than_shared"]
                ]
                if found:
                    name = f"{side}, prefix {prefix}"
                    axes.plot(*zip(*found, strict=True), line, marker="o", color=color, label=name)
        axes.axhline(1, color="#888888", linewidth=1)
        axes.set(title=f"suffix of {suffix}", xscale="log", yscale="log", xlabel="rows")
        powers(axes.xaxis, rows)
        plain_numbers(axes.yaxis)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("times as long as shared")
    legend(figure, panels, columns=2 if len(panels) == 1 else 4)
    return figure


_PREFIXES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def needles(results: Mapping[str, Any]) -> Pictures:
    """Seconds over the number of questions (figure 5)."""
    if not any(point["seconds"] for point in results["points"]):
        return {}
    return {"needles.png": lambda: _seconds(results["points"])}


def _seconds(points: Sequence[Mapping[str, Any]]) -> Any:
    """Seconds of all questions, a panel for each document; a cross is what did not fit."""
    documents, counts = (sorted({p[name] for p in points}) for name in ("document", "questions"))
    figure, panels = make_figure(len(documents))
    least = min(t for p in points for t in p["seconds"].values())
    for axes, document in zip(panels, documents, strict=True):
        here = sorted(
            (p for p in points if p["document"] == document), key=lambda p: p["questions"]
        )
        for side in (UNSHARED, SHARED, NO_ATTENTION):
            color, line = _SIDES[side], "--" if side == NO_ATTENTION else "-"
            found = [(p["questions"], p["seconds"][side]) for p in here if side in p["seconds"]]
            if found:
                axes.plot(*zip(*found, strict=True), line, marker="o", color=color, label=side)
            if lacking := [p["questions"] for p in here if side in p["left_out"]]:
                low = [least * 0.7] * len(lacking)
                axes.plot(lacking, low, "x", color=color, label=f"{side}, did not fit")
        axes.set(title=f"{here[0]['document_tokens']} tokens", xscale="log", yscale="log")
        axes.set(xlabel="questions")
        powers(axes.xaxis, counts)
        plain_numbers(axes.yaxis)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("seconds")
    legend(figure, panels, columns=2 if len(panels) == 1 else 4)
    return figure


def apps(results: Mapping[str, Any]) -> Pictures:
    """Seconds of all problems and pass@k by side (figure 6)."""
    return {"apps.png": lambda: _levels(results)} if results["sides"] else {}


def _levels(results: Mapping[str, Any]) -> Any:
    """Bars of seconds, with the number of problems at a time; and pass@k beside them."""
    sides = [*results["sides"]]
    figure, (left, right) = make_figure(2, 3.0, one_scale=False)
    colors = [_LEVELS.get(side, "#888888") for side in sides]
    bars = left.barh(sides, [results["sides"][s]["seconds"] for s in sides], color=colors)
    labels = [f"{results['sides'][s]['problems_at_a_time']} at a time" for s in sides]
    left.bar_label(bars, labels, padding=4)
    left.margins(x=0.8)
    left.invert_yaxis()
    left.set(title="all problems", xlabel="seconds")
    for number, (side, color) in enumerate(zip(sides, colors, strict=True)):
        found = results["pass_at"][side]
        shares, size = [100 * share for share in found.values()], 12 - 3 * number
        right.plot([*found], shares, "o-", color=color, markersize=size)  # often all are the same
    right.set(title="pass@k", xlabel="k", ylabel="problems, %", ylim=(-3, 103))
    right.grid(alpha=0.3)
    return figure


_LEVELS = {"no sharing": "#d95f02", **{side: COLORS[side] for side in (ONE, TWO, MORE)}}
