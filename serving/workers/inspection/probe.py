"""Snapshots of a session of workers: its blocks, and each worker's attention over time.

A `Snapshot` has no keys and values: it is a few kilobytes that are saved and looked at elsewhere.

    probe = AttentionProbe(session)
    session.run(on_event=probe)
    probe.snapshot().save("run.json")  # then `jaxshare inspect run.json`
"""

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
from rich.table import Table

from jaxshare.cache import KVCache
from jaxshare.layout import Layout
from jaxshare.models.config_fields import first_line
from jaxshare.models.layers import Decoder
from jaxshare.paths import whole_file
from jaxshare.serving import checksums
from jaxshare.serving.inputs import token_bytes
from jaxshare.trace.trace import Trace

if TYPE_CHECKING:
    from jaxshare.serving.workers.layouts import WorkersLayout
    from jaxshare.serving.workers.session import Workers
    from jaxshare.serving.workers.text.transcript import Event

_FORMAT = "jaxshare snapshot 1"
_WIDTH = 16
"""The measuring pass is a multiple of this wide: one token and an opening share a program."""
_KEYS = {"attention": "masses"}
"""The keys in files of fields that have other names here."""


@dataclasses.dataclass(frozen=True)
class BlockExtent:
    """The extent of a block in the arena and its length, in tokens.

    `bytes` are those of its keys and values in all layers.
    """

    name: str
    offset: int
    length: int
    capacity: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Listed:
    """A block in the list of a row: its first position in the row's order, and its length."""

    block: str
    start: int
    length: int


@dataclasses.dataclass(frozen=True)
class AttentionShare:
    """The shares of attention of a worker's newest token to the blocks, after `passes` passes."""

    passes: int
    worker: str
    shares: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A session at one moment.

    Attributes:
      passes: forward passes so far.
      blocks: of the cache, in the order of their numbers; without those of no capacity that no
        worker sees.
      rows: for each worker the blocks that it sees, in its order; it writes the last one.
      attention: shares measured so far, in the order of passes.
    """

    passes: int
    blocks: tuple[BlockExtent, ...]
    rows: Mapping[str, tuple[Listed, ...]]
    attention: tuple[AttentionShare, ...] = ()

    @classmethod
    def of(cls, session: "Workers", attention: Sequence[AttentionShare] = ()) -> "Snapshot":
        """The session as it is now, with the shares that an `AttentionProbe` has measured."""
        if not hasattr(session, "layout"):
            raise TypeError(
                f"a {type(session).__name__} is no session of workers; of a run of branches make "
                "Snapshot.of_branches(run), of a layout Snapshot.of_layout(layout, lengths)"
            )
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
            _rows(session.layout.sees, dict(zip(session.blocks, lengths, strict=True))),
            tuple(attention),
        )

    @classmethod
    def of_layout(cls, layout: "WorkersLayout", lengths: Mapping[str, int]) -> "Snapshot":
        """The snapshot of a layout alone, as if its blocks had these lengths, in tokens.

        They follow each other in the arena.

        Raises:
          ValueError: a block without a length.
        """
        if missing := [b for b in layout.blocks if b not in lengths]:
            raise ValueError(
                f"lengths has no length for the block {missing[0]!r}; the layout's blocks are "
                f"{', '.join(layout.blocks)}"
            )
        return cls(0, _in_line({b: lengths[b] for b in layout.blocks}), _rows(layout.sees, lengths))

    @classmethod
    def of_branches(cls, run: Any) -> "Snapshot":
        """The blocks of a run of `Branches` as it was planned: common prefixes, then for each
        completion what its prompt has beside them, after which it writes. They follow each other in
        the arena."""
        plan, sees = run.sharing_plan, dict[str, list[str]]()
        lengths = {f"prefix {i}": len(each.tokens) for i, each in enumerate(plan.blocks, 1)}
        for sample in plan.samples:
            name = f"prompt {sample.prompt}, no. {sample.index}"
            sees[name] = [f"prefix {1 + block}" for block in plan.path(sample.block)]
            if sample.suffix:
                lengths[name] = len(sample.suffix)
                sees[name].append(name)
        return cls(0, _in_line(lengths, token_bytes(run.model)), _rows(sees, lengths))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the workers, or of the rows of branches."""
        return tuple(self.rows)

    def to_json(self) -> dict[str, Any]:
        """Plain data, which JSON can hold."""
        plain = {_KEYS.get(name, name): value for name, value in dataclasses.asdict(self).items()}
        return {"format": _FORMAT, **plain}

    def save(self, path: str | os.PathLike) -> None:
        """Writes JSON, the whole file or nothing.

        Raises:
          WriteError: it cannot be written; what was there before stays.
        """
        with whole_file(Path(path)) as file:
            json.dump(checksums.sealed(self.to_json()), file, ensure_ascii=False, indent=1)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Snapshot":
        """Reads a file that `save` has written.

        Raises:
          ValueError: a file that cannot be read or is not a snapshot.
        """
        name = os.fspath(path)
        do = "give a file that `jaxshare workers --save` or Snapshot.save has written"
        try:
            data = checksums.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            if _is_trace(name):
                raise ValueError(
                    f"{name} is a trace, of `jaxshare workers --trace`, and no snapshot; {do}"
                ) from None
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
            attention = tuple(
                AttentionShare(
                    int(m["passes"]),
                    str(m["worker"]),
                    {str(b): float(share) for b, share in m["shares"].items()},
                )
                for m in data["masses"]
            )
            snapshot = cls(int(data["passes"]), blocks, rows, attention)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ValueError(
                f"the snapshot {name} is damaged ({type(error).__name__}: {first_line(error)}); {do}"
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


def _is_trace(file: str) -> bool:
    try:
        Trace.load(file)
    except (OSError, ValueError):
        return False
    return True


def _in_line(lengths: Mapping[str, int], bytes_per_token: int = 0) -> tuple[BlockExtent, ...]:
    """Blocks of these lengths that follow each other in the arena."""
    offsets = itertools.accumulate(lengths.values(), initial=0)
    return tuple(
        BlockExtent(name, offset, length, length, length * bytes_per_token)
        for (name, length), offset in zip(lengths.items(), offsets, strict=False)
    )


def _rows(
    sees: Mapping[str, Sequence[str]], lengths: Mapping[str, int]
) -> dict[str, tuple[Listed, ...]]:
    rows = {}
    for worker, seen in sees.items():
        starts = itertools.accumulate((lengths[b] for b in seen), initial=0)
        rows[worker] = tuple(
            Listed(b, start, lengths[b]) for b, start in zip(seen, starts, strict=False)
        )
    return rows


def attention_shares(session: "Workers") -> dict[str, dict[str, float]]:
    """The shares of its attention that each worker's newest token gives to the blocks.

    They are means over layers and heads, from one forward pass over the tokens that the session
    feeds next. Its cache is dropped: the session is as before, and for a moment there is a second
    cache. A worker that feeds nothing is left out.

    Returns:
      {worker: {block: share}}, blocks in the worker's order; the shares of a worker sum to 1.
    """
    tokens, count = session.pending()
    tokens = np.pad(tokens, ((0, 0), (0, -tokens.shape[1] % _WIDTH)))
    shares = np.asarray(
        _mean_shares(
            session.model.module,
            session.model.variables,
            tokens,
            count,
            session.cache,
            session.rows,
        )
    )
    return {
        name: dict(zip(session.layout.sees[name], shares[session.row(name)].tolist(), strict=False))
        for name in session.names
        if shares[session.row(name)].any()
    }


class AttentionProbe:
    """Measures attention while a session runs, without changing it.

    Use it as `session.run(on_event=probe)`, or call `probe()` between events.

    Attributes:
      attention: shares measured so far.
    """

    def __init__(self, session: "Workers", every: int = 16):
        """Makes a probe of a session.

        Args:
          session: about to run.
          every: forward passes between two measurements, at least; each costs as much as a pass
            that opens a step. Events are no more frequent than the session's `passes_at_once`
            allows.

        Raises:
          ValueError: `every` below 1.
        """
        if every < 1:
            raise ValueError(f"every is {every}; it must be at least 1 forward pass")
        self.attention: list[AttentionShare] = []
        self._session, self._every = session, every

    def __call__(self, event: "Event | None" = None) -> None:
        """Measures, if it is time."""
        passes = self._session.passes
        if not self.attention or passes >= self.attention[-1].passes + self._every:
            self.attention += [
                AttentionShare(passes, worker, shares)
                for worker, shares in attention_shares(self._session).items()
            ]

    def snapshot(self) -> Snapshot:
        """The session as it is now, with all shares so far."""
        return Snapshot.of(self._session, self.attention)


@functools.partial(jax.jit, static_argnames="module")
def _mean_shares(
    module: Decoder, params: Any, tokens: Array, count: Array, cache: KVCache, layout: Layout
) -> Array:
    """The shares float32[R, N] of N listed blocks, means over the layers."""
    shares: Any = module.apply(params, tokens, count, cache, layout, method="attention_share")
    return jnp.mean(shares, axis=0)


def block_table(snapshot: Snapshot) -> Table:
    """A table of the tokens, capacity and bytes of every block."""
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
    """A table of the blocks that each worker sees, in its order.

    It has their first positions, and the shares of the worker's attention measured last; none where
    it saw other blocks then.
    """
    table = Table("worker", "block", title="what the workers see", title_justify="left")
    for column in ("starts at", "tokens", "attention"):
        table.add_column(column, justify="right")
    last = {share.worker: share for share in snapshot.attention}
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
