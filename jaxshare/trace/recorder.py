"""Recording: how traces are made, of what a device has done or by hand.

The decode loop notes what it feeds and moves in a `PassLog`, which the host reads after every
dispatch into a `Recorder`. A program that makes traces of its own, for training say, tells a
`Recorder` the same:

    recorder = Recorder(num_blocks=3)                              # a history, and a block for each of two workers
    recorder.text(prompt, block=0)                                 # sees its own block alone
    recorder.feed([[5, 6], [7]], [[0, 2, 1], [0, 1, 2]])           # a pass: each row's tokens, and the blocks that it sees, its own last
    recorder.move(1, 0)                                            # the first worker's step is finished
    trace = recorder.trace()
"""

import dataclasses
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare.trace.trace import NO_ROW, STANDS, Trace


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PassLog:
    """What one dispatch of the decode loop has fed and moved. J passes at most, R rows, W tokens of
    a pass, B blocks.

    Attributes:
      first: int32[], passes before the dispatch.
      tokens: int32[J, R, W], what each pass fed; counts: int32[J, R], how many tokens of each row.
      lengths: int32[J, B], of the blocks after each pass.
      moved: bool[J + 1, R], the rows whose steps moved before each pass, and after the last. Lower
        rows move first.
    """

    first: Array
    tokens: Array
    counts: Array
    lengths: Array
    moved: Array

    @classmethod
    def empty(cls, passes: int, rows: int, width: int, num_blocks: int) -> Self:
        """Room for so many passes."""
        return cls(
            jnp.zeros((), jnp.int32),
            jnp.zeros((passes, rows, width), jnp.int32),
            jnp.zeros((passes, rows), jnp.int32),
            jnp.zeros((passes, num_blocks), jnp.int32),
            jnp.zeros((passes + 1, rows), bool),
        )

    @property
    def room(self) -> int:
        """J."""
        return self.tokens.shape[0]

    def begin(self, passes: Array) -> Self:
        """A dispatch begins: what the last one has left is forgotten."""
        return dataclasses.replace(self, first=passes, moved=jnp.zeros_like(self.moved))

    def fed(self, passes: Array, tokens: Array, counts: Array, lengths: Array) -> Self:
        """The pass after so many was run, with int32[R, width] tokens, int32[R] of them real, and
        left blocks of int32[B] lengths."""
        at = passes - self.first
        return dataclasses.replace(
            self,
            tokens=self.tokens.at[at, :, : tokens.shape[1]].set(tokens, mode="drop"),
            counts=self.counts.at[at].set(counts, mode="drop"),
            lengths=self.lengths.at[at].set(lengths, mode="drop"),
        )

    def ended(self, passes: Array, rows: Array) -> Self:
        """The blocks of bool[R] rows moved because their steps had ended, after so many passes."""
        return dataclasses.replace(
            self, moved=self.moved.at[passes - self.first].set(rows, mode="drop")
        )


class Recorder:
    """A trace that is being made. Tokens are numbered from 0 in the order in which they are fed."""

    def __init__(self, num_blocks: int, capacities: Sequence[int] | None = None):
        """Of empty blocks.

        Args:
          num_blocks: B.
          capacities: tokens that fit in each; default the most that each holds in the end of the
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
        # of each block its stays, as they lie
        self._held: list[list[int]] = [[] for _ in range(num_blocks)]
        self._tokens: list[int] = []
        self._views: list[int] = []
        self._of_views: list[tuple[int, int]] = []  # row and pass
        self._starts: list[np.ndarray] = []
        self._visible: list[np.ndarray] = []
        self._stays: list[list[int]] = []  # token, block, index, begin, end
        self._most = np.zeros(num_blocks, np.int32)
        self._passes = 0

    @classmethod
    def of(cls, trace: Trace, capacities: Sequence[int] | None = None) -> Self:
        """A recorder that goes on where a trace ends.

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
                f"block {int(over[0])} has {int(trace.lengths[over[0]])} tokens in the end of the "
                f"trace, but a capacity of {int(self._capacities[over[0]])}; give the recorder "
                "larger capacities"
            )
        self._tokens, self._views, self._passes = (
            trace.tokens.tolist(),
            trace.views.tolist(),
            trace.num_passes,
        )
        self._of_views = [*zip(trace.rows.tolist(), trace.passes.tolist(), strict=True)]
        self._starts, self._visible = [*trace.starts], [*trace.visible]
        columns = (
            trace.stay_tokens,
            trace.stay_blocks,
            trace.stay_indices,
            trace.stay_begins,
            trace.stay_ends,
        )
        self._stays = np.stack(columns, axis=1).tolist()
        left = np.flatnonzero(trace.stay_ends == STANDS)
        for stay in left[np.argsort(trace.stay_indices[left])].tolist():
            self._held[self._stays[stay][1]].append(stay)
        self._most = trace.capacities.copy()
        return self

    @property
    def lengths(self) -> np.ndarray:
        """int32[B], tokens in each block now."""
        return np.asarray([len(held) for held in self._held], np.int32)

    def text(self, tokens: Sequence[int], block: int) -> np.ndarray:
        """A pass that feeds a text that sees its own block alone; nothing for an empty one.

        Returns:
          int[count], the numbers of its tokens.

        Raises:
          ValueError: an unknown block, or one that has no room for it.
        """
        return self.feed([tokens], [[block]], rows=(NO_ROW,))[0]

    def feed(
        self,
        tokens: Sequence[Sequence[int]],
        layout: Sequence[Sequence[int]],
        *,
        rows: Sequence[int] | None = None,
    ) -> list[np.ndarray]:
        """A pass. What a row brings sees all of the blocks that it lists, what other rows bring in
        this pass too, and its own up to itself.

        Args:
          tokens: each row's new ones; none for a row that takes no part.
          layout: the blocks that each row sees, in its order; it writes to the last.
          rows: numbers of the rows, default from 0.

        Returns:
          For each row int[count], the numbers of its tokens.

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
            self._views += [len(self._of_views)] * len(tokens[r])
            self._of_views.append((r if rows is None else rows[r], self._passes))
            for number in numbers[r].tolist():
                self._stay(number, layout[r][-1])
        after = self.lengths
        for r in fed:
            listed, own = list(layout[r]), layout[r][-1]
            starts, visible = np.zeros_like(after), np.zeros_like(after)
            starts[listed] = np.cumsum(after[listed]) - after[listed]
            visible[listed] = after[listed]
            visible[own] = before[own] + 1
            self._starts.append(starts)
            self._visible.append(visible)
        self._most = np.maximum(self._most, after)
        self._passes += bool(fed)
        return numbers

    def move(self, source: int, target: int) -> None:
        """A block moves to the end of another, as in `KVCache.move`.

        Raises:
          ValueError: an unknown block, one that is moved onto itself, or no room.
        """
        self._check_blocks(source, target)
        if source == target:
            raise ValueError(f"block {source} cannot be moved onto itself")
        self._check_room(target, len(self._held[source]))
        moving = [self._stays[stay][0] for stay in self._held[source]]
        self.cut(source, 0)
        for token in moving:
            self._stay(token, target)
        self._most = np.maximum(self._most, self.lengths)

    def widen(self, block: int, capacity: int) -> None:
        """Gives a block room for so many tokens, if it has less."""
        self._check_blocks(block)
        if self._capacities is not None:
            self._capacities[block] = max(int(self._capacities[block]), capacity)

    def cut(self, block: int, length: int) -> None:
        """A block loses all behind its first tokens; with length 0 it is cleared.

        Raises:
          ValueError: an unknown block, or a length that it does not have.
        """
        self._check_blocks(block)
        if not 0 <= length <= len(self._held[block]):
            raise ValueError(
                f"block {block} has {len(self._held[block])} tokens; it cannot be cut to {length}"
            )
        for stay in self._held[block][length:]:
            self._stays[stay][4] = self._passes
        del self._held[block][length:]

    def read(
        self, record: PassLog, passes: int, layout: Sequence[Sequence[int]], targets: Sequence[int]
    ) -> None:
        """Takes over what a dispatch has recorded.

        Args:
          record: of it, on the host.
          passes: in all, when it had ended.
          layout: the blocks that each row saw in it.
          targets: the block that each row's steps moved to, or -1.
        """
        ran = passes - int(record.first)
        for at in range(ran + 1):
            for row in np.flatnonzero(record.moved[at]).tolist():
                self.move(layout[row][-1], targets[row])
            if at < ran:
                self.feed(
                    [
                        new[:count]
                        for new, count in zip(
                            record.tokens[at].tolist(), record.counts[at].tolist(), strict=True
                        )
                    ],
                    layout,
                )
                assert not record.counts[at].any() or (self.lengths == record.lengths[at]).all(), (
                    "the record misses what moved"
                )

    def trace(self, *, names: Sequence[str] = (), fingerprint: str = "", context: int = 0) -> Trace:
        """What has been recorded so far; recording can go on. The arguments are those of
        `Trace`."""
        rows, passes = np.asarray(self._of_views, np.int32).reshape(-1, 2).T
        starts, visible = (
            np.asarray(x, np.int32).reshape(-1, len(self._held))
            for x in (self._starts, self._visible)
        )
        stays = np.asarray(self._stays, np.int32).reshape(-1, 5)
        # what moved on before a pass had seen it was nowhere
        stays = stays[stays[:, 4] > stays[:, 3]]
        of, blocks, indices, begins, ends = stays[np.argsort(stays[:, 0], kind="stable")].T
        return Trace(
            tokens=np.asarray(self._tokens, np.int32),
            views=np.asarray(self._views, np.int32),
            rows=rows,
            passes=passes,
            starts=starts,
            visible=visible,
            stay_tokens=of,
            stay_blocks=blocks,
            stay_indices=indices,
            stay_begins=begins,
            stay_ends=ends,
            capacities=(self._most if self._capacities is None else self._capacities).copy(),
            names=tuple(names),
            fingerprint=fingerprint,
            context=context,
        )

    def _stay(self, token: int, block: int) -> None:
        self._stays.append([token, block, len(self._held[block]), self._passes, STANDS])
        self._held[block].append(len(self._stays) - 1)

    def _check(
        self, fed: Sequence[int], tokens: Sequence[Sequence[int]], layout: Sequence[Sequence[int]]
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
        if unknown := [block for block in blocks if not 0 <= block < len(self._held)]:
            raise ValueError(
                f"there is no block {unknown[0]}; the trace has blocks 0 to {len(self._held) - 1}"
            )

    def _check_room(self, block: int, count: int) -> None:
        if (
            self._capacities is not None
            and len(self._held[block]) + count > self._capacities[block]
        ):
            raise ValueError(
                f"block {block} has {len(self._held[block])} tokens of at most "
                f"{int(self._capacities[block])}, and {count} more do not fit; give the recorder "
                "larger capacities"
            )
