"""Looking inside a session of workers: its cache as a picture, and how each worker's attention is
shared out over time.

A `Snapshot` is what there is to look at, without a key or a value in it: a few kilobytes that are
saved and looked at elsewhere.

    recorder = Recorder(session)
    session.run(on_event=recorder)
    recorder.snapshot().save("run.json")  # then `jaxshare inspect run.json`
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console
from rich.table import Table

from jaxshare.cache import KVCache
from jaxshare.layout import Layout
from jaxshare.models.layers import Decoder
from jaxshare.paths import check_file, check_folder, whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jaxshare.serving.workers.layouts import WorkersLayout
    from jaxshare.serving.workers.session import Workers
    from jaxshare.serving.workers.transcript import Event

_FORMAT = "jaxshare snapshot 1"
# Okabe and Ito's colours, told apart by colour-blind readers too; a ninth block has the first
# one's, hatched.
_COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#0072B2", "#D55E00", "#999999")
_HATCHES = ("", "///", "...", "xxx")
_LEGEND_COLUMNS = 4
_WIDTH = 16
"""Tokens of a row in the pass that measures, in a multiple: a single token and what opens a step
share a program."""
_BAR, _LINE, _GAP = 0.34, 0.13, 0.16
"""Inches of a bar, a line of numbers above it, and what stays free below."""
_Bars = Sequence[Sequence[tuple[str, int, int, int]]]
"""For each bar its blocks: name, start, tokens, tokens that fit."""


@dataclasses.dataclass(frozen=True)
class BlockExtent:
    """A block where it lies: its place in the arena and its fill in tokens, and the bytes of all
    layers' keys and values in it."""

    name: str
    offset: int
    length: int
    capacity: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Listed:
    """A block as a row lists it: the position at which it starts in the row's order, and its
    tokens."""

    block: str
    start: int
    length: int


@dataclasses.dataclass(frozen=True)
class AttentionShare:
    """The share of its attention that a worker's newest token gave to each block, when there had
    been so many passes."""

    passes: int
    worker: str
    shares: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A session at one moment.

    Attributes:
      passes: forward passes so far.
      blocks: of the cache, in the order of their numbers; without those that have no room and that
        nobody sees.
      rows: for each worker the blocks that it sees, in its order; it writes to the last one.
      masses: measured so far, in the order of passes.
    """

    passes: int
    blocks: tuple[BlockExtent, ...]
    rows: Mapping[str, tuple[Listed, ...]]
    masses: tuple[AttentionShare, ...] = ()

    @classmethod
    def of(cls, session: "Workers", masses: Sequence[AttentionShare] = ()) -> "Snapshot":
        """The session as it stands, with masses that a `AttentionProbe` has found."""
        cache = session.cache
        offsets, lengths, capacities = (
            np.asarray(a).tolist() for a in (cache.offsets, cache.lengths, cache.capacities)
        )
        seen = {b for row in session.layout.sees.values() for b in row}
        blocks = tuple(
            BlockExtent(name, offset, length, capacity, length * cache.token_bytes)
            for name, offset, length, capacity in zip(
                session.blocks, offsets, lengths, capacities, strict=True
            )
            if capacity or name in seen
        )
        return cls(
            session.passes,
            blocks,
            _rows(session.layout, dict(zip(session.blocks, lengths, strict=True))),
            tuple(masses),
        )

    @classmethod
    def of_layout(cls, layout: "WorkersLayout", lengths: Mapping[str, int]) -> "Snapshot":
        """A layout on paper: what the workers would see if its blocks had these lengths, in tokens.
        They lie one behind the other.

        Raises:
          ValueError: a block without a length.
        """
        if missing := [b for b in layout.blocks if b not in lengths]:
            raise ValueError(
                f"lengths has no length for the block {missing[0]!r}; the layout's blocks are "
                f"{', '.join(layout.blocks)}"
            )
        offsets = itertools.accumulate((lengths[b] for b in layout.blocks), initial=0)
        blocks = tuple(
            BlockExtent(b, offset, lengths[b], lengths[b], 0)
            for b, offset in zip(layout.blocks, offsets, strict=False)
        )
        return cls(0, blocks, _rows(layout, lengths))

    @property
    def names(self) -> tuple[str, ...]:
        """Of the workers."""
        return tuple(self.rows)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"format": _FORMAT, **dataclasses.asdict(self)}

    def save(self, path: str | os.PathLike) -> None:
        """Writes JSON, the whole file or nothing.

        Raises:
          OSError: it cannot be written.
        """
        with whole_file(Path(path)) as file:
            json.dump(self.to_json(), file, ensure_ascii=False, indent=1)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Snapshot":
        """Reads what `save` wrote.

        Raises:
          ValueError: a file that cannot be read or is not a snapshot.
        """
        name, do = os.fspath(path), "give a file that Snapshot.save has written"
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"the snapshot {name} cannot be read ({error}); {do}") from error
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise ValueError(f"{name} is not a snapshot, which has {_FORMAT!r} as its format; {do}")
        try:
            blocks = tuple(
                BlockExtent(
                    str(b["name"]),
                    int(b["offset"]),
                    int(b["length"]),
                    int(b["capacity"]),
                    int(b["bytes"]),
                )
                for b in data["blocks"]
            )
            rows = {
                str(worker): tuple(
                    Listed(str(b["block"]), int(b["start"]), int(b["length"])) for b in row
                )
                for worker, row in data["rows"].items()
            }
            masses = tuple(
                AttentionShare(
                    int(m["passes"]),
                    str(m["worker"]),
                    {str(b): float(share) for b, share in m["shares"].items()},
                )
                for m in data["masses"]
            )
            snapshot = cls(int(data["passes"]), blocks, rows, masses)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"the snapshot {name} is damaged ({type(error).__name__}: {error}); {do}"
            ) from error
        if (
            not blocks
            or not rows
            or {b.block for row in rows.values() for b in row} - {b.name for b in blocks}
        ):
            raise ValueError(
                f"the snapshot {name} is damaged (blocks or workers are missing); {do}"
            )
        return snapshot


def _rows(layout: "WorkersLayout", lengths: Mapping[str, int]) -> dict[str, tuple[Listed, ...]]:
    rows = {}
    for worker, seen in layout.sees.items():
        starts = itertools.accumulate((lengths[b] for b in seen), initial=0)
        rows[worker] = tuple(
            Listed(b, start, lengths[b]) for b, start in zip(seen, starts, strict=False)
        )
    return rows


def attention_mass(session: "Workers") -> dict[str, dict[str, float]]:
    """The share of its attention that each worker's newest token gives to each block, the mean over
    layers and heads.

    One forward pass over what the session feeds next, whose cache is thrown away: the session is as
    before, and for a moment a second cache is held. A worker that feeds nothing is left out.

    Returns:
      {worker: {block: share}}, blocks in the worker's order; the shares of a worker sum to 1.
    """
    tokens, count = session.pending()
    tokens = np.pad(tokens, ((0, 0), (0, -tokens.shape[1] % _WIDTH)))
    masses = np.asarray(
        _masses(
            session.model.module, session.model.params, tokens, count, session.cache, session.rows
        )
    )
    return {
        name: dict(zip(session.layout.sees[name], masses[session.row(name)].tolist(), strict=False))
        for name in session.names
        if masses[session.row(name)].any()
    }


class AttentionProbe:
    """Measures while a session runs, without changing it: `session.run(on_event=recorder)`, or
    `recorder()` between events.

    Attributes:
      masses: found so far.
    """

    def __init__(self, session: "Workers", every: int = 16):
        """Watches a session.

        Args:
          session: about to run.
          every: forward passes between two measurements, at least; each costs as much as a pass
            that opens a step. How often there is an event at all depends on the session's
            `passes_at_once`.

        Raises:
          ValueError: `every` below 1.
        """
        if every < 1:
            raise ValueError(f"every is {every}; it must be at least 1 forward pass")
        self.masses: list[AttentionShare] = []
        self._session, self._every = session, every

    def __call__(self, event: "Event | None" = None) -> None:
        """Measures, if it is time."""
        passes = self._session.passes
        if not self.masses or passes >= self.masses[-1].passes + self._every:
            self.masses += [
                AttentionShare(passes, worker, shares)
                for worker, shares in attention_mass(self._session).items()
            ]

    def snapshot(self) -> Snapshot:
        """The session as it stands, with all masses so far."""
        return Snapshot.of(self._session, self.masses)


@functools.partial(jax.jit, static_argnames="module")
def _masses(
    module: Decoder, params: Any, tokens: Array, count: Array, cache: KVCache, layout: Layout
) -> Array:
    """float32[R, N]."""
    masses: Any = module.apply(params, tokens, count, cache, layout, method="attention_share")
    return jnp.mean(masses, axis=0)


def block_table(snapshot: Snapshot) -> Table:
    """Tokens, room and bytes of every block."""
    table = Table(title=f"blocks after {snapshot.passes} passes", title_justify="left")
    table.add_column("block")
    for column in ("offset", "tokens", "capacity", "KiB"):
        table.add_column(column, justify="right")
    for b in snapshot.blocks:
        table.add_row(
            b.name, str(b.offset), str(b.length), str(b.capacity), f"{b.bytes / 1024:.1f}"
        )
    table.add_section()
    tokens, capacity, size = (
        sum(getattr(b, field) for b in snapshot.blocks) for field in ("length", "capacity", "bytes")
    )
    table.add_row("all", "", str(tokens), str(capacity), f"{size / 1024:.1f}")
    return table


def row_table(snapshot: Snapshot) -> Table:
    """What each worker sees, in its order: blocks, the positions at which they start, and the
    shares of its attention measured last.

    Shares are left out where the worker saw other blocks then.
    """
    table = Table("worker", "block", title="what the workers see", title_justify="left")
    for column in ("starts at", "tokens", "attention"):
        table.add_column(column, justify="right")
    last = {m.worker: m for m in snapshot.masses}
    for name, row in snapshot.rows.items():
        shares = last[name].shares if name in last else {}
        for i, b in enumerate(row):
            share = f"{shares[b.block]:.1%}" if list(shares) == [b.block for b in row] else ""
            table.add_row(
                "" if i else name,
                b.block,
                str(b.start),
                str(b.length),
                share,
                end_section=i + 1 == len(row),
            )
    return table


def cache_picture(snapshot: Snapshot) -> "Figure":
    """Rows by positions, coloured by block, with the start of every block; below, the same blocks
    where they lie in the arena.

    Raises:
      ImportError: matplotlib is not installed.
    """
    looks = _looks(snapshot)
    seen = [[(b.block, b.start, b.length, b.length) for b in row] for row in snapshot.rows.values()]
    lies = [
        [
            (b.name, b.offset, b.length, b.capacity)
            for b in sorted(snapshot.blocks, key=lambda b: b.offset)
            if b.capacity
        ]
    ]
    heights = [_height(seen), _height(lies)]
    figure = _figure(sum(heights) + 1.9 + 0.2 * len(looks) / _LEGEND_COLUMNS)
    above, below = figure.subplots(2, 1, height_ratios=heights)
    _draw_bars(above, snapshot.names, seen, looks)
    after = f" after {snapshot.passes} passes" if snapshot.passes else ""
    above.set_title(
        f"What each worker sees{after}; numbers: where blocks start", loc="left", fontsize=10.5
    )
    above.set_xlabel("position in the worker's order (tokens)")
    _draw_bars(below, ["arena"], lies, looks)
    below.set_title(
        "Where the blocks lie, each once for all workers; pale: free", loc="left", fontsize=10.5
    )
    below.set_xlabel("place in the arena (tokens)")
    _draw_legend(figure, {f"{b.name} ({b.length} tokens)": looks[b.name] for b in snapshot.blocks})
    return figure


def mass_picture(snapshot: Snapshot) -> "Figure":
    """For each worker, which share of its attention fell on each block over time: history, each
    other worker, itself (on top).

    Raises:
      ValueError: a snapshot without masses.
      ImportError: matplotlib is not installed.
    """
    if not snapshot.masses:
        raise ValueError(
            "the snapshot has no attention masses to draw; let a Recorder watch the session while "
            "it runs"
        )
    workers = list(dict.fromkeys(m.worker for m in snapshot.masses))
    looks = _looks(snapshot)
    figure = _figure(1.2 + 1.9 * len(workers))
    axes = figure.subplots(len(workers), 1, sharex=True, squeeze=False)[:, 0]
    for ax, worker in zip(axes, workers, strict=True):
        own = [m for m in snapshot.masses if m.worker == worker]
        written = list(own[-1].shares)[-1]
        blocks = [*dict.fromkeys(b for m in own for b in m.shares if b != written), written]
        # An area needs two points, so a moment lasts until the next pass.
        passes = [*(m.passes for m in own), own[-1].passes + 1]
        shares = [[100 * m.shares.get(b, 0.0) for m in (*own, own[-1])] for b in blocks]
        ax.stackplot(
            passes,
            shares,
            colors=[looks[b]["color"] for b in blocks],
            hatch=[looks[b]["hatch"] for b in blocks],
            edgecolor="white",
            linewidth=0.4,
        )
        ax.set(ylabel="share of attention (%)", ylim=(0, 100))
        ax.set_title(f"What {worker} attends to, its own block on top", loc="left", fontsize=10.5)
    axes[-1].set(
        xlabel="forward passes so far",
        xlim=(snapshot.masses[0].passes, snapshot.masses[-1].passes + 1),
    )
    shown = {b for m in snapshot.masses for b in m.shares}
    _draw_legend(figure, {b: look for b, look in looks.items() if b in shown})
    return figure


def _figure(height: float) -> "Figure":
    try:
        from matplotlib.figure import Figure  # here, because only pictures need it
    except ImportError as error:
        raise ImportError(
            "pictures are drawn with matplotlib, which is not installed: pip install "
            "'jaxshare[plot]'"
        ) from error
    return Figure(figsize=(9.0, height), dpi=90, layout="constrained")


def _looks(snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    """A colour and a hatch for each block: the prompt's first, then those that workers write, so
    that pictures of one session agree."""
    names = dict.fromkeys(
        [
            snapshot.blocks[0].name,
            *(row[-1].block for row in snapshot.rows.values()),
            *(b.name for b in snapshot.blocks),
            # the last ones of workers that have left
            *(b for m in snapshot.masses for b in m.shares),
        ]
    )
    size = len(_COLOURS)
    return {
        name: {"color": _COLOURS[i % size], "hatch": _HATCHES[i // size % len(_HATCHES)]}
        for i, name in enumerate(names)
    }


def _end(bars: _Bars) -> int:
    return max(start + room for bar in bars for _, start, _, room in bar)


def _lines(bar: Sequence[tuple[str, int, int, int]], end: int) -> dict[int, int]:
    """For each start the line above the bar on which its number stands: no number runs into
    another, or into what leads to it."""
    found: dict[int, int] = {}
    for start in sorted({start for _, start, _, _ in bar}, reverse=True):
        width = 0.0085 * end * (1 + len(str(start)))
        found[start] = 1 + max(
            (line for right, line in found.items() if right < start + width), default=-1
        )
    return found


def _height(bars: _Bars) -> float:
    """Inches, which are also the units of the vertical axis."""
    return sum(_BAR + _GAP + _LINE * (1 + max(_lines(bar, _end(bars)).values())) for bar in bars)


def _draw_bars(
    ax: "Axes", names: Sequence[str], bars: _Bars, looks: Mapping[str, dict[str, Any]]
) -> None:
    end, y, middles = _end(bars), 0.0, []
    for bar in bars:
        lines = _lines(bar, end)
        y += _LINE * (1 + max(lines.values())) + _BAR / 2
        middles.append(y)
        for block, start, length, room in bar:
            ax.barh(
                y,
                room,
                _BAR,
                left=start,
                edgecolor="white",
                linewidth=0.6,
                alpha=0.3,
                **looks[block],
            )
            ax.barh(y, length, _BAR, left=start, edgecolor="white", linewidth=0.6, **looks[block])
        for start, line in lines.items():
            top = y - _BAR / 2 - _LINE * (line + 0.5)
            ax.plot([start, start], [y - _BAR / 2, top], color="#666666", linewidth=0.6)
            ax.text(start, top, f" {start}", fontsize=7.5, va="center")
        y += _BAR / 2 + _GAP
    ax.set_yticks(middles, names)
    ax.set(xlim=(0, end * 1.06), ylim=(y, 0))
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)


def _draw_legend(figure: "Figure", looks: Mapping[str, dict[str, Any]]) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(label=label, edgecolor="white", facecolor=look["color"], hatch=look["hatch"])
        for label, look in looks.items()
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=_LEGEND_COLUMNS,
        frameon=False,
        fontsize=9,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `jaxshare inspect`."""
    parser.add_argument(
        "snapshot", metavar="SNAPSHOT.json", help="what a session of workers has saved"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        default=".",
        help="folder for cache.png and mass.png (default: where you are)",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on stdout in place of the tables"
    )


def run(options: argparse.Namespace) -> int:
    """Prints what is in a snapshot, and writes its pictures.

    Raises:
      ValueError: a file that is not a snapshot, a folder that cannot be written, or pictures
        without matplotlib.
    """
    snapshot, folder = Snapshot.load(options.snapshot), Path(options.out)
    drawn = {"cache.png": cache_picture, **({"mass.png": mass_picture} if snapshot.masses else {})}
    check_folder("--out", folder)
    for name in drawn:
        check_file("--out", folder / name, makes_folder=True)
    try:
        figures = {name: picture(snapshot) for name, picture in drawn.items()}
    except ImportError as error:
        raise ValueError(str(error)) from error
    if not options.json:
        Console().print(block_table(snapshot), row_table(snapshot))
    pictures: list[str] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            figure.savefig(folder / name)
            pictures.append(str(folder / name))
    except OSError as error:
        raise ValueError(
            f"the pictures cannot be written to {folder} ({error}); give another folder to --out"
        ) from error
    finally:
        if options.json:
            print(json.dumps({**snapshot.to_json(), "pictures": pictures}))
        elif pictures:
            print(f"pictures: {', '.join(pictures)}")
    return 0
