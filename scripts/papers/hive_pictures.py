"""The pictures of scripts.papers.hive; contributions over time are drawn as by `jaxshare agents`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxshare.serving.agents.search_log import empty_figure
from scripts.bench.parts.logits_cache.report import BASELINE, HOTSPOT, SIDES, STEPWISE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {BASELINE: "#888888", STEPWISE: "#0072B2", HOTSPOT: "#D55E00"}
_TREES, _CHAINS = "#D55E00", "#0072B2"


def searches_picture(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """The share of solved puzzles by the calls of the model for each (Yao et al., 2023, figure 3).

    Args:
      rows: of the report; those with "chains" are a line, the others points with names.
    """
    figure = empty_figure(6.4, 4.2)
    ax = figure.add_subplot()
    chains = [row for row in rows if "chains" in row]
    trees = [row for row in rows if "chains" not in row]
    for some, color, style, label in (
        (chains, _CHAINS, "o-", "best of 1, 2, 4, ... chains"),
        (trees, _TREES, "D", "Tree of Thoughts"),
    ):
        if not some:
            continue
        some = sorted(some, key=lambda row: row["calls"])
        calls, solved = [row["calls"] for row in some], [100 * row["solved"] for row in some]
        low, high = ([100 * row["interval"][end] for row in some] for end in (0, 1))
        errors = [
            [max(0.0, middle - end) for middle, end in zip(solved, low, strict=True)],
            [max(0.0, end - middle) for middle, end in zip(solved, high, strict=True)],
        ]
        ax.errorbar(
            calls,
            solved,
            yerr=errors,
            fmt=style,
            color=color,
            capsize=2,
            elinewidth=0.8,
            label=label,
        )
    for row in trees:
        ax.annotate(
            row["search"].removeprefix("ToT, "),
            (row["calls"], 100 * row["solved"]),
            xytext=(7, -3),
            textcoords="offset points",
            fontsize=8,
        )
    ax.set_xscale("log")
    ax.margins(x=0.15)
    ax.set(
        xlabel="model calls a puzzle",
        ylabel="solved, %",
        ylim=(-3, 103),
        title=f"Game of 24, {rows[0]['puzzles']} puzzles",
    )
    _finish(ax)
    ax.legend(frameon=False, fontsize=9, loc="lower center", bbox_to_anchor=(0.5, -0.32), ncols=2)
    return figure


def replay_picture(points: Sequence[Mapping[str, Any]]) -> "Figure":
    """Tokens a second and speed-ups by temperature (figure 8 of Hive): a row for each way to sample
    again, with its hit ratio over its bars.

    Args:
      points: of the report, in the order of temperatures.
    """
    figure = empty_figure(10.0, 5.6)
    panels = figure.subplots(2, 3)
    places, labels = range(len(points)), [f"{point['temperature']:g}" for point in points]
    for row, side in zip(panels, (STEPWISE, HOTSPOT), strict=True):
        for ax, kind in zip(row, ("mean", "median"), strict=False):
            for name, offset in ((BASELINE, -0.2), (side, 0.2)):
                rates = [
                    point["sides"][name][f"{kind}_tokens_per_second"] or 0.0 for point in points
                ]
                at = [place + offset for place in places]
                ax.bar(at, rates, 0.38, color=COLORS[name], label=name)
            ax.set(title=f"{side}, {kind}", ylabel="tokens a second")
            ax.set_ylim(0, 1.35 * ax.get_ylim()[1])  # room for the legend
        for kind, style in (("speedup", "-"), ("median_speedup", "--")):
            speedups = [point["sides"][side][kind] for point in points]
            known = [(place, each) for place, each in enumerate(speedups) if each is not None]
            if known:
                label = {"speedup": "mean", "median_speedup": "median"}[kind]
                row[2].plot(
                    *zip(*known, strict=True), style, color=COLORS[side], marker="o", label=label
                )
        _hit_ratios(row[2], [point["sides"][side] for point in points])
        row[2].axhline(1.0, color="#888888", linewidth=0.8)
        row[2].set(title=f"{side}, speed-up", ylabel="times the baseline")
        for ax in row:
            ax.set_xticks(places, labels)
            ax.set_xlabel("temperature")
            _finish(ax)
            ax.legend(frameon=False, fontsize=8)
    return figure


def _hit_ratios(ax: "Axes", sides: Sequence[Mapping[str, Any]]) -> None:
    """Writes the hit ratios of the points over them."""
    ax.margins(x=0.2, y=0.3)
    for place, side in enumerate(sides):
        if side["speedup"] is not None:
            ax.annotate(
                f"{side['hit_ratio']:.0%}",
                (place, max(side["speedup"], side["median_speedup"])),
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )


def supervisor_picture(searches: Sequence[Mapping[str, Any]]) -> "Figure":
    """The speed-ups of searches by temperature, for each supervisor."""
    names = list(dict.fromkeys(point["supervisor"] for point in searches))
    figure = empty_figure(max(4.5, 2.9 * len(names)), 3.4)
    for ax, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        points = sorted(
            (point for point in searches if point["supervisor"] == name),
            key=lambda point: point["temperature"],
        )
        for side in SIDES[1:]:
            ax.plot(
                [point["temperature"] for point in points],
                [point["speedup"][side] for point in points],
                color=COLORS[side],
                marker="o",
                label=side,
            )
        ax.axhline(1.0, color="#888888", linewidth=0.8)
        ax.set(title=name, xlabel="temperature", ylim=(0, None))
        if name == names[0]:
            ax.set_ylabel("times the baseline")
            ax.legend(frameon=False, fontsize=8)
        _finish(ax)
    return figure


def residency_picture(tables: Sequence[Mapping[str, Any]]) -> "Figure":
    """Hit rates of hot and cold agents and evicted tokens by policy (table 1 of Hive), a row for each
    number of rounds."""
    figure = empty_figure(10.0, 2.9 * len(tables))
    measures = (
        ("hot_hit_rate", "hit rate of hot agents"),
        ("cold_hit_rate", "hit rate of others"),
        ("evicted_tokens", "evicted tokens"),
    )
    for row, each in zip(figure.subplots(len(tables), 3, squeeze=False), tables, strict=True):
        policies = each["policies"]
        names = [
            "memory for all" if one["policy"] == "ample" else one["policy"] for one in policies
        ]
        colors = [_TREES if one["policy"] == "contribution" else "#888888" for one in policies]
        for ax, (measure, title) in zip(row, measures, strict=True):
            bars = ax.barh(range(len(names)), [one[measure] for one in policies], color=colors)
            form = "{:.0f}" if measure == "evicted_tokens" else "{:.3f}"
            ax.bar_label(bars, fmt=form, fontsize=8, padding=2)
            ax.margins(x=0.22)
            ax.set_yticks(range(len(names)), names if ax is row[0] else [""] * len(names))
            ax.invert_yaxis()
            ax.set_title(f"{each['rounds']} rounds: {title}", fontsize=10)
            _finish(ax)
    return figure


def _finish(ax: "Axes") -> None:
    ax.spines[["top", "right"]].set_visible(False)
