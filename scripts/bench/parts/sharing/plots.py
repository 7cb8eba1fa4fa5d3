"""Plots of what scripts.bench.sharing has measured."""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.parts.sharing.attention import NO_ATTENTION, SDPA, SHARED, THEIRS, UNSHARED
from scripts.bench.parts.sharing.generate import MORE, ONE, TWO

# Ours in blues, others in orange and green, ceilings in gray.
COLORS = {
    SHARED: "#08519c",
    UNSHARED: "#6baed6",
    NO_ATTENTION: "#888888",
    THEIRS: "#d95f02",
    SDPA: "#d95f02",
    ONE: "#9ecae1",
    TWO: "#4292c6",
    MORE: "#08519c",
}
_CEILING = {"color": "#888888", "linestyle": "--"}


def available() -> bool:
    """True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draws every part that was measured; the files written."""
    parts = {
        "attention": _attention,
        "end-to-end": _end_to_end,
        "needles": _needles,
        "levels": _levels,
        "rule": _rule,
    }
    written = []
    for part, plot in parts.items():
        if results.get(part):
            figure = plot(results[part])
            written.append(folder / f"sharing-{part}.png")
            figure.savefig(written[-1], dpi=110, metadata={"Software": None})
    return written


def make_figure(
    panels: int, height: float = 3.4, *, one_scale: bool = True
) -> tuple[Any, Sequence[Any]]:
    """A figure, and its panels side by side, which have one scale or each its own."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(5.5, 3.0 * panels), height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, panels, sharey=one_scale, squeeze=False)[0]


def powers(axis: Any, values: Sequence[int]) -> None:
    """Gives a logarithmic axis the values that were measured as its marks."""
    axis.set_ticks(values, labels=[f"{v // 1024}K" if v % 1024 == 0 else str(v) for v in values])
    axis.minorticks_off()


def plain_numbers(axis: Any) -> None:
    """Gives a logarithmic axis numbers such as 2 and 0.5 as its marks, in place of powers of ten."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        """Chooses marks as LogFormatter does, which writes 0.9 as 9e-01."""

        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:.6g}" if super().__call__(x, pos) else ""

    axis.set_major_formatter(Plain())
    axis.set_minor_formatter(Plain(minor_thresholds=(1.5, 0.5)))


def _attention(points: Sequence[Mapping[str, Any]]) -> Any:
    """GFLOP/s over the length of the prefix, a panel for each number of rows; long suffixes
    dotted."""
    rows, suffixes = (sorted({p[name] for p in points}) for name in ("rows", "suffix"))
    figure, panels = make_figure(len(rows))
    for axes, count in zip(panels, rows, strict=True):
        here = [p for p in points if p["rows"] == count]
        for suffix, line in zip(suffixes, ("-", ":"), strict=False):
            for name in (SHARED, UNSHARED, SDPA):
                found = [
                    (p["prefix"], p["sides"][name]["gflops"])
                    for p in here
                    if p["suffix"] == suffix and name in p["sides"]
                ]
                if found:
                    axes.plot(
                        *zip(*found, strict=True),
                        line,
                        marker="o",
                        markersize=4,
                        color=COLORS[name],
                        label=f"{name}, suffix {suffix}",
                    )
        product = {p["prefix"]: p["product_gflops"] for p in here}
        axes.plot(product.keys(), product.values(), **_CEILING, label="large products")
        axes.set(title=f"{count} rows", xscale="log", yscale="log", xlabel="prefix, tokens")
        powers(axes.xaxis, sorted(product))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("GFLOP/s of one layer's attention")
    legend(figure, panels)
    return figure


def _end_to_end(points: Sequence[Mapping[str, Any]]) -> Any:
    """Tokens a second over the batch, a panel for each length of the prefix."""
    prefixes = sorted({p["prefix"] for p in points})
    figure, panels = make_figure(len(prefixes))
    for axes, prefix in zip(panels, prefixes, strict=True):
        here = [p for p in points if p["prefix"] == prefix]
        for name in (NO_ATTENTION, SHARED, UNSHARED, THEIRS):
            found = [
                (p["batch"], p["sides"][name]["tokens_per_second"])
                for p in here
                if name in p["sides"]
            ]
            if found:
                axes.plot(
                    *zip(*found, strict=True),
                    "--" if name == NO_ATTENTION else "-",
                    marker="o",
                    markersize=4,
                    color=COLORS[name],
                    label=name,
                )
        axes.set(title=f"prefix of {prefix}", xscale="log", yscale="log", xlabel="batch")
        powers(axes.xaxis, sorted({p["batch"] for p in here}))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("tokens a second")
    legend(figure, panels)
    return figure


def _needles(found: Mapping[str, Any]) -> Any:
    """Seconds over the number of questions."""
    figure, (axes,) = make_figure(1)
    for name in (UNSHARED, SHARED, NO_ATTENTION):
        if seconds := found["seconds"].get(name):
            axes.plot(
                [int(n) for n in seconds],
                list(seconds.values()),
                "--" if name == NO_ATTENTION else "-",
                marker="o",
                color=COLORS[name],
                label=name,
            )
    axes.set(
        title=f"a document of {found['document_tokens']} tokens",
        xscale="log",
        yscale="log",
        xlabel="questions",
        ylabel="seconds",
    )
    powers(axes.xaxis, found["questions"])
    plain_numbers(axes.yaxis)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def _levels(found: Mapping[str, Any]) -> Any:
    """Seconds of all completions."""
    figure, (axes,) = make_figure(1, 2.4)
    names = list(found["sides"])
    bars = axes.barh(
        names,
        [found["sides"][name]["seconds"] for name in names],
        color=[COLORS[name] for name in names],
    )
    axes.bar_label(
        bars, [f"{found['sides'][name]['rows']} rows at a time" for name in names], padding=4
    )
    axes.margins(x=0.5)
    axes.invert_yaxis()
    axes.set(
        title=f"{found['problems']} problems, {found['samples']} samples each", xlabel="seconds"
    )
    return figure


def _rule(points: Sequence[Mapping[str, Any]]) -> Any:
    """The speed-up of sharing at every point, and the rule's choice there."""
    rows, prefixes = (sorted({p[name] for p in points}) for name in ("rows", "prefix"))
    gain = {
        (p["rows"], p["prefix"]): p["milliseconds"][UNSHARED] / p["milliseconds"][SHARED]
        for p in points
    }
    rule = list(points[0]["chosen"])[-1]
    figure, (axes,) = make_figure(1, 3.8)
    # On a logarithmic scale, so that twice as fast and half as fast are as far from white.
    grid = [[math.log2(gain.get((r, p), math.nan)) for p in prefixes] for r in rows]
    limit = max(0.5, *(abs(math.log2(g)) for g in gain.values()))
    axes.imshow(grid, origin="lower", cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
    for p in points:
        where, found = (
            (prefixes.index(p["prefix"]), rows.index(p["rows"])),
            gain[p["rows"], p["prefix"]],
        )
        color = "white" if abs(math.log2(found)) > 0.6 * limit else "black"
        axes.annotate(
            f"{found:.2f}\n{p['chosen'][rule]}",
            where,
            ha="center",
            va="center",
            fontsize=8,
            color=color,
        )
    axes.set_xticks(range(len(prefixes)), prefixes)
    axes.set_yticks(range(len(rows)), rows)
    axes.set(
        title=f"times as fast with sharing, and what {rule} costs choose",
        xlabel="prefix, tokens",
        ylabel="rows",
    )
    return figure


def legend(figure: Any, panels: Sequence[Any], columns: int = 4) -> None:
    """One legend for all panels, under them, in so many columns."""
    entries = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        entries.values(),
        entries.keys(),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=8,
    )
