"""Recording: makes traces of a device's passes, or call by call.

The decode loop logs what it feeds and moves in a `PassLog`, which the host reads into a `Recorder`
after every dispatch. A program that makes traces of its own, for training say, calls a `Recorder`
directly:

    recorder = Recorder(num_blocks=3)  # a history, and a block for each of two workers
    recorder.text(prompt, block=0)  # sees its own block alone
    # a pass: each row's tokens, and the blocks that it sees, its own last
    recorder.feed([[5, 6], [7]], [[0, 2, 1], [0, 1, 2]])
    recorder.move(1, 0)  # the first worker's step is finished
    trace = recorder.trace()
"""

import dataclasses
from collections.abc import Sequence
from typing import Self, SupportsInt

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int, Int32

from jaxshare.decoding.array_rows import placed
from jaxshare.trace.trace import NO_ROW, NOT_ENDED, Trace


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PassLog:
    """The tokens that one dispatch of the decode loop has fed, and the blocks that it has moved. J
    passes at most, R rows, W tokens of a pass, B blocks.

    Attributes:
      first: passes before the dispatch.
      tokens: what each pass fed; counts: how many tokens of each row. A pass may be logged in parts,
        of different rows.
      lengths: of the blocks after each pass.
      moved: the rows whose steps moved before each pass, and after the last. Lower rows move first.
    """

    first: Int32[Array, ""]
    tokens: Int32[Array, "J R W"]
    counts: Int32[Array, "J R"]
    lengths: Int32[Array, "J B"]
    moved: Bool[Array, "J+1 R"]

    @classmethod
    def empty(cls, passes: int, rows: int, width: int, num_blocks: int) -> "PassLog":
        """A log with capacity for this many passes."""
        none = (
            np.zeros((), np.int32),
            np.zeros((passes, rows, width), np.int32),
            np.zeros((passes, rows), np.int32),
            np.zeros((passes, num_blocks), np.int32),
            np.zeros((passes + 1, rows), bool),
        )
        return cls(*placed(none))

    @property
    def capacity(self) -> int:
        """J."""
        return self.tokens.shape[0]

    def start(self, passes: Int32[Array, ""]) -> "PassLog":
        """The log at the start of a dispatch, without the entries of the last one."""
        return dataclasses.replace(
            self,
            first=passes,
            counts=jnp.zeros_like(self.counts),
            moved=jnp.zeros_like(self.moved),
        )

    def log_pass(
        self,
        passes: Int32[Array, ""],
        tokens: Int32[Array, "R width"],
        counts: Int32[Array, " R"],
        lengths: Int32[Array, " B"],
    ) -> "PassLog":
        """Logs a pass, or a part of it.

        Args:
          passes: how many were run before it.
          tokens: what it fed.
          counts: real tokens of each row; 0 for the rows of another part.
          lengths: of the blocks after it.
        """
        if not self.capacity:
            return self
        entry, width = passes - self.first, tokens.shape[1]
        old = jax.lax.dynamic_index_in_dim(self.tokens, entry, keepdims=False)[:, :width]
        new = jnp.where((counts > 0)[:, None], tokens, old)
        return dataclasses.replace(
            self,
            tokens=self.tokens.at[entry, :, :width].set(new, mode="drop"),
            counts=self.counts.at[entry].add(counts, mode="drop"),
            lengths=self.lengths.at[entry].set(lengths, mode="drop"),
        )

    def log_moves(self, passes: Int32[Array, ""], rows: Bool[Array, " R"]) -> "PassLog":
        """Logs the rows whose steps ended, and whose blocks moved, after this many passes."""
        if not self.capacity:
            return self
        return dataclasses.replace(
            self, moved=self.moved.at[passes - self.first].set(rows, mode="drop")
        )


@dataclasses.dataclass
class _Placement:
    """A key at an index of a block, from the pass `start` to the pass `end`."""

    token: int
    block: int
    index: int
    start: int
    end: int = NOT_ENDED


class Recorder:
    """A trace in progress. Tokens are numbered from 0 in the order in which they are fed."""

    def __init__(self, num_blocks: int, capacities: Sequence[int] | None = None):
        """Starts with empty blocks.

        Args:
          num_blocks: B.
          capacities: tokens that fit in each; default the most that each has held by the end of the
            recording.

        Raises:
          ValueError: no blocks, or another number of capacities.
        """
        if num_blocks < 1 or (capacities is not None and len(capacities) != num_blocks):
            raise ValueError(
                f"a trace needs at least 1 block, and a capacity for each; got {num_blocks} blocks "
                f"and {'no' if capacities is None else len(capacities)} capacities"
            )
        self._capacities = None if capacities is None else np.array(capacities, np.int32)
        self._tokens: list[int] = []
        self._row_pass: list[int] = []  # of each token
        self._row_passes: list[tuple[int, int]] = []  # row and pass of each
        self._starts: list[np.ndarray] = []
        self._visible: list[np.ndarray] = []
        self._placements: list[_Placement] = []
        # for each block the placements in it now, in order
        self._contents: list[list[_Placement]] = [[] for _ in range(num_blocks)]
        self._max_lengths = np.zeros(num_blocks, np.int32)
        self._passes = 0

    @classmethod
    def of(cls, trace: Trace, capacities: Sequence[int] | None = None) -> Self:
        """A recorder that continues a trace.

        Args:
          trace: what has been recorded so far.
          capacities: as in `Recorder`; `trace.capacities` are those that it was recorded with.

        Raises:
          ValueError: another number of capacities, or a block that holds more.
        """
        self = cls(trace.num_blocks, capacities)
        if (
            self._capacities is not None
            and (over := np.flatnonzero(trace.lengths > self._capacities)).size
        ):
            raise ValueError(
                f"block {int(over[0])} has {int(trace.lengths[over[0]])} tokens at the end of the "
                f"trace, but a capacity of {int(self._capacities[over[0]])}; give the recorder "
                "larger capacities"
            )
        self._tokens, self._row_pass = trace.tokens.tolist(), trace.row_pass.tolist()
        self._row_passes = [*zip(trace.rows.tolist(), trace.passes.tolist(), strict=True)]
        self._passes = trace.num_passes
        self._starts, self._visible = [*trace.starts], [*trace.visible]
        columns = (
            trace.placement_tokens,
            trace.placement_blocks,
            trace.placement_indices,
            trace.placement_starts,
            trace.placement_ends,
        )
        self._placements = [_Placement(*row) for row in np.stack(columns, axis=1).tolist()]
        final = [placement for placement in self._placements if placement.end == NOT_ENDED]
        for placement in sorted(final, key=lambda placement: placement.index):
            self._contents[placement.block].append(placement)
        self._max_lengths = trace.capacities.copy()
        return self

    @property
    def lengths(self) -> Int32[np.ndarray, " B"]:
        """The number of tokens in each block now."""
        return np.asarray([len(content) for content in self._contents], np.int32)

    def text(
        self, tokens: Sequence[SupportsInt] | Int[np.ndarray, " count"], block: int
    ) -> Int[np.ndarray, " count"]:
        """Records a pass that feeds a text that sees its own block alone; nothing for an empty one.

        Returns:
          The numbers of its tokens.

        Raises:
          ValueError: an unknown block, or one that is too full for it.
        """
        return self.feed([tokens], [[block]], rows=(NO_ROW,))[0]

    def feed(
        self,
        tokens: Sequence[Sequence[SupportsInt] | Int[np.ndarray, " _"]],
        layout: Sequence[Sequence[int]],
        *,
        rows: Sequence[int] | None = None,
    ) -> list[Int[np.ndarray, " _"]]:
        """Records a pass. A row's tokens see all of the blocks that it lists, including what other
        rows bring in this pass, and its own block up to themselves.

        Args:
          tokens: each row's new ones; none for a row that takes no part.
          layout: the blocks that each row sees, in its order; it writes to the last.
          rows: numbers of the rows, default from 0.

        Returns:
          For each row the numbers of its tokens.

        Raises:
          ValueError: tokens and layout that do not agree, an unknown or repeated block, two rows
            that write one block, or a full block.
        """
        if not len(tokens) == len(layout) == len(layout if rows is None else rows):
            raise ValueError(
                f"tokens are given for {len(tokens)} rows, and blocks for {len(layout)}; give both "
                "for every row"
            )
        fed = [r for r, new in enumerate(tokens) if len(new)]
        self._check(fed, tokens, layout)
        before, numbers = self.lengths, [np.zeros(0, np.int64) for _ in tokens]
        for r in fed:
            numbers[r] = np.arange(len(self._tokens), len(self._tokens) + len(tokens[r]))
            self._tokens += [int(token) for token in tokens[r]]
            self._row_pass += [len(self._row_passes)] * len(tokens[r])
            self._row_passes.append((r if rows is None else rows[r], self._passes))
            for number in numbers[r].tolist():
                self._place(number, layout[r][-1])
        after = self.lengths
        for r in fed:
            listed, own = list(layout[r]), layout[r][-1]
            starts, visible = np.zeros_like(after), np.zeros_like(after)
            starts[listed] = np.cumsum(after[listed]) - after[listed]
            visible[listed] = after[listed]
            visible[own] = before[own] + 1
            self._starts.append(starts)
            self._visible.append(visible)
        self._max_lengths = np.maximum(self._max_lengths, after)
        self._passes += bool(fed)
        return numbers

    def move(self, source: int, target: int) -> None:
        """Records the move of a block to the end of another, as in `KVCache.move`.

        Raises:
          ValueError: an unknown block, one that is moved onto itself, or a target that is too full.
        """
        self._check_blocks(source, target)
        if source == target:
            raise ValueError(f"block {source} cannot be moved onto itself")
        self._check_room(target, len(self._contents[source]))
        moving = [placement.token for placement in self._contents[source]]
        self.cut(source, 0)
        for token in moving:
            self._place(token, target)
        self._max_lengths = np.maximum(self._max_lengths, self.lengths)

    def widen(self, block: int, capacity: int) -> None:
        """Raises the capacity of a block to this, if it has less."""
        self._check_blocks(block)
        if self._capacities is not None:
            self._capacities[block] = max(int(self._capacities[block]), capacity)

    def cut(self, block: int, length: int) -> None:
        """Removes all but the first `length` tokens of a block; with length 0 it is cleared.

        Raises:
          ValueError: an unknown block, or a length that it does not have.
        """
        self._check_blocks(block)
        if not 0 <= length <= len(self._contents[block]):
            raise ValueError(
                f"block {block} has {len(self._contents[block])} tokens; it cannot be cut to "
                f"{length}"
            )
        for placement in self._contents[block][length:]:
            placement.end = self._passes
        del self._contents[block][length:]

    def read(
        self, log: PassLog, passes: int, layout: Sequence[Sequence[int]], targets: Sequence[int]
    ) -> None:
        """Records a dispatch.

        Args:
          log: of the dispatch, on the host.
          passes: in all, at the end of it.
          layout: the blocks that each row saw in it.
          targets: the block that each row's steps moved to, or -1.
        """
        ran = passes - int(log.first)
        for entry in range(ran + 1):
            for row in np.flatnonzero(log.moved[entry]).tolist():
                self.move(layout[row][-1], targets[row])
            if entry < ran:
                new, counts = log.tokens[entry].tolist(), log.counts[entry].tolist()
                self.feed([row[:n] for row, n in zip(new, counts, strict=True)], layout)
                assert not any(counts) or (self.lengths == log.lengths[entry]).all(), (
                    "the log misses what moved"
                )

    def trace(self, *, names: Sequence[str] = (), fingerprint: str = "", context: int = 0) -> Trace:
        """The trace so far; recording can continue. The arguments are those of `Trace`."""
        rows, passes = np.asarray(self._row_passes, np.int32).reshape(-1, 2).T
        starts, visible = (
            np.asarray(x, np.int32).reshape(-1, len(self._contents))
            for x in (self._starts, self._visible)
        )
        # A placement that ended before a pass had seen it is left out.
        seen = [
            (each.token, each.block, each.index, each.start, each.end)
            for each in self._placements
            if each.end > each.start
        ]
        placements = np.asarray(seen, np.int32).reshape(-1, 5)
        columns = placements[np.argsort(placements[:, 0], kind="stable")].T
        placement_tokens, placement_blocks, placement_indices, first_passes, ends = columns
        return Trace(
            tokens=np.asarray(self._tokens, np.int32),
            row_pass=np.asarray(self._row_pass, np.int32),
            rows=rows,
            passes=passes,
            starts=starts,
            visible=visible,
            placement_tokens=placement_tokens,
            placement_blocks=placement_blocks,
            placement_indices=placement_indices,
            placement_starts=first_passes,
            placement_ends=ends,
            capacities=(self._max_lengths if self._capacities is None else self._capacities).copy(),
            names=tuple(names),
            fingerprint=fingerprint,
            context=context,
        )

    def _place(self, token: int, block: int) -> None:
        content = self._contents[block]
        placement = _Placement(token, block, len(content), self._passes)
        self._placements.append(placement)
        content.append(placement)

    def _check(
        self,
        fed: Sequence[int],
        tokens: Sequence[Sequence[SupportsInt] | np.ndarray],
        layout: Sequence[Sequence[int]],
    ) -> None:
        for r in fed:
            if not layout[r]:
                raise ValueError(
                    f"row {r} brings {len(tokens[r])} tokens but lists no block to write them to"
                )
            self._check_blocks(*layout[r])
            if len(set(layout[r])) < len(layout[r]):
                raise ValueError(
                    f"row {r} lists a block twice: {list(layout[r])}; list every block once"
                )
            self._check_room(layout[r][-1], len(tokens[r]))
        if len({layout[r][-1] for r in fed}) < len(fed):
            raise ValueError(
                "two rows write one block in the same pass; the last block that a row lists must "
                "be its own"
            )

    def _check_blocks(self, *blocks: int) -> None:
        if unknown := [block for block in blocks if not 0 <= block < len(self._contents)]:
            raise ValueError(
                f"there is no block {unknown[0]}; the trace has blocks 0 to "
                f"{len(self._contents) - 1}"
            )

    def _check_room(self, block: int, count: int) -> None:
        if (
            self._capacities is not None
            and len(self._contents[block]) + count > self._capacities[block]
        ):
            raise ValueError(
                f"block {block} has {len(self._contents[block])} tokens of at most "
                f"{int(self._capacities[block])}, and {count} more do not fit; give the recorder "
                "larger capacities"
            )
