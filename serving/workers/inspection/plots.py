"""Pictures of snapshots of sessions, drawn with matplotlib."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxshare.extras import figure_class
from jaxshare.serving.workers.inspection.probe import Snapshot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart; a ninth block has the first
# one's, hatched.
_COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#0072B2", "#D55E00", "#999999")
_HATCHES = ("", "///", "...", "xxx")
_LEGEND_COLUMNS = 4
_BAR, _LINE, _GAP = 0.34, 0.13, 0.16
"""Inches of a bar, of a line of numbers above it, and of the space below."""
_Bars = Sequence[Sequence[tuple[str, int, int, int]]]
"""For each bar its blocks: name, start, tokens, capacity."""


def cache_picture(snapshot: Snapshot) -> "Figure":
    """Draws rows by positions, coloured by block, with the start of every block; below, the arena.

    Raises:
      TypeError: something else than a snapshot.
      ImportError: matplotlib is not installed.
    """
    if not isinstance(snapshot, Snapshot):
        raise TypeError(
            f"a {type(snapshot).__name__} is no snapshot; give Snapshot.of(session) or "
            "Snapshot.of_branches(run)"
        )
    styles = _styles(snapshot)
    seen = [[(b.block, b.start, b.length, b.length) for b in row] for row in snapshot.rows.values()]
    arena = [
        [
            (b.name, b.offset, b.length, b.capacity)
            for b in sorted(snapshot.blocks, key=lambda b: b.offset)
            if b.capacity
        ]
    ]
    heights = [_height(seen), _height(arena)]
    figure = _figure(sum(heights) + 1.9 + 0.2 * len(styles) / _LEGEND_COLUMNS)
    above, below = figure.subplots(2, 1, height_ratios=heights)
    _draw_bars(above, snapshot.names, seen, styles)
    after = f" after {snapshot.passes} passes" if snapshot.passes else ""
    above.set_title(
        f"What each row sees{after}; numbers: where blocks start", loc="left", fontsize=10.5
    )
    above.set_xlabel("position in the row's order (tokens)")
    _draw_bars(below, ["arena"], arena, styles)
    below.set_title(
        "Where the blocks lie, each once for all rows; pale: free", loc="left", fontsize=10.5
    )
    below.set_xlabel("place in the arena (tokens)")
    _draw_legend(figure, {f"{b.name} ({b.length} tokens)": styles[b.name] for b in snapshot.blocks})
    return figure


def attention_picture(snapshot: Snapshot) -> "Figure":
    """Draws the shares of each worker's attention to the blocks over time, its own block on top.

    Raises:
      ValueError: a snapshot without measured attention.
      ImportError: matplotlib is not installed.
    """
    if not snapshot.attention:
        raise ValueError(
            "the snapshot has no attention masses to draw; run the session with an AttentionProbe"
        )
    workers = list(dict.fromkeys(share.worker for share in snapshot.attention))
    styles = _styles(snapshot)
    figure = _figure(1.2 + 1.9 * len(workers))
    axes = figure.subplots(len(workers), 1, sharex=True, squeeze=False)[:, 0]
    for ax, worker in zip(axes, workers, strict=True):
        own = [share for share in snapshot.attention if share.worker == worker]
        written = list(own[-1].shares)[-1]
        blocks = [*dict.fromkeys(b for share in own for b in share.shares if b != written), written]
        # An area needs two points, so a measurement lasts until the next pass.
        passes = [*(share.passes for share in own), own[-1].passes + 1]
        percents = [[100 * share.shares.get(b, 0.0) for share in (*own, own[-1])] for b in blocks]
        ax.stackplot(
            passes,
            percents,
            colors=[styles[b]["color"] for b in blocks],
            hatch=[styles[b]["hatch"] for b in blocks],
            edgecolor="white",
            linewidth=0.4,
        )
        ax.set(ylabel="share of attention (%)", ylim=(0, 100))
        ax.set_title(f"What {worker} attends to, its own block on top", loc="left", fontsize=10.5)
    axes[-1].set(
        xlabel="forward passes so far",
        xlim=(snapshot.attention[0].passes, snapshot.attention[-1].passes + 1),
    )
    shown = {b for share in snapshot.attention for b in share.shares}
    _draw_legend(figure, {b: style for b, style in styles.items() if b in shown})
    return figure


def _figure(height: float) -> "Figure":
    return figure_class()(figsize=(9.0, height), dpi=90, layout="constrained")


def _styles(snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    """A colour and a hatch for each block.

    The prompt's comes first, then those that workers write, so that pictures of one session agree.
    """
    names = dict.fromkeys(
        [
            snapshot.blocks[0].name,
            *(row[-1].block for row in snapshot.rows.values()),
            *(b.name for b in snapshot.blocks),
            # blocks of workers that have left
            *(b for share in snapshot.attention for b in share.shares),
        ]
    )
    size = len(_COLOURS)
    return {
        name: {"color": _COLOURS[i % size], "hatch": _HATCHES[i // size % len(_HATCHES)]}
        for i, name in enumerate(names)
    }


def _end(bars: _Bars) -> int:
    return max(start + capacity for bar in bars for _, start, _, capacity in bar)


def _lines(bar: Sequence[tuple[str, int, int, int]], end: int) -> dict[int, int]:
    """For each start the line above the bar for its number.

    No number overlaps another, or the mark that leads to it.
    """
    lines: dict[int, int] = {}
    for start in sorted({start for _, start, _, _ in bar}, reverse=True):
        width = 0.0085 * end * (1 + len(str(start)))
        lines[start] = 1 + max(
            (line for right, line in lines.items() if right < start + width), default=-1
        )
    return lines


def _height(bars: _Bars) -> float:
    """The height of bars in inches, which are also the units of the vertical axis."""
    return sum(_BAR + _GAP + _LINE * (1 + max(_lines(bar, _end(bars)).values())) for bar in bars)


def _draw_bars(
    ax: "Axes", names: Sequence[str], bars: _Bars, styles: Mapping[str, dict[str, Any]]
) -> None:
    end, y, middles = _end(bars), 0.0, []
    for bar in bars:
        lines = _lines(bar, end)
        y += _LINE * (1 + max(lines.values())) + _BAR / 2
        middles.append(y)
        for block, start, length, capacity in bar:
            ax.barh(
                y,
                capacity,
                _BAR,
                left=start,
                edgecolor="white",
                linewidth=0.6,
                alpha=0.3,
                **styles[block],
            )
            ax.barh(y, length, _BAR, left=start, edgecolor="white", linewidth=0.6, **styles[block])
        for start, line in lines.items():
            top = y - _BAR / 2 - _LINE * (line + 0.5)
            ax.plot([start, start], [y - _BAR / 2, top], color="#666666", linewidth=0.6)
            ax.text(start, top, f" {start}", fontsize=7.5, va="center")
        y += _BAR / 2 + _GAP
    ax.set_yticks(middles, names)
    ax.set(xlim=(0, end * 1.06), ylim=(y, 0))
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)


def _draw_legend(figure: "Figure", styles: Mapping[str, dict[str, Any]]) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(label=label, edgecolor="white", facecolor=style["color"], hatch=style["hatch"])
        for label, style in styles.items()
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=_LEGEND_COLUMNS,
        frameon=False,
        fontsize=9,
    )
