"""Waves: which blocks of a tree are in memory while its rows come and go, and how many rows there
can be at a time."""

import collections
import dataclasses
import statistics
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare import KVCache
from jaxshare.layout import bucket
from jaxshare.models import LoadedModel
from jaxshare.serving.branches.arena import Arena, footprints
from jaxshare.serving.branches.prefix import Prefix
from jaxshare.serving.branches.row_budget import RowBudget
from jaxshare.serving.branches.sharing_plan import Sample, SharingPlan
from jaxshare.serving.engine import prefill
from jaxshare.serving.engine.prefill import Feed


class Residents:
    """Which blocks of the tree are in the arena, and who still needs them."""

    def __init__(
        self,
        arena: Arena,
        *,
        model: LoadedModel,
        arrangement: SharingPlan,
        streams: Sequence[Sample],
        prefix: Prefix | None,
        width: int,
        max_new_tokens: int,
    ):
        """Nothing is there yet.

        Args:
          arena: where blocks are taken from.
          model: what feeds them.
          arrangement: the tree, of which `streams` are to run.
          prefix: what stands before it.
          width: most blocks that a row lists.
          max_new_tokens: room of each row behind its prompt.
        """
        self.sampled = 0
        self._arena, self._model, self._arrangement, self._prefix = (
            arena,
            model,
            arrangement,
            prefix,
        )
        self._width, self._max_new_tokens = width, max_new_tokens
        self._block: dict[int, int] = {}  # of the tree -> of the arena
        self._own: set[int] = set()
        self._logits: dict[int, Array] = {}  # of the tree's blocks at whose end rows sample
        self._feeds: list[Feed] = []
        self._users = collections.Counter(b for s in streams for b in arrangement.path(s.block))
        self._ends = {s.block for s in streams if not s.own}
        # rows that have ended, and whose blocks stay until the room is wanted
        self._done: list[tuple[Sample, int]] = []
        self._before = prefix.path if prefix else ()

    def path(self, stream: Sample, own: int) -> list[int]:
        """The arena's blocks that a row lists."""
        return [*self._before, *(self._block[b] for b in self._arrangement.path(stream.block)), own]

    def admit(
        self, waiting: "collections.deque[Sample]", rows: Sequence[int], idle: bool
    ) -> list[tuple[int, Sample, int]]:
        """Takes streams from the queue as long as there are rows and room: (row, stream, its own
        block). `idle`: no row runs."""
        admitted = []
        if waiting and rows:
            self._release()
        for row in rows:
            if not waiting:
                break
            own = self._take(waiting[0])
            if own is None and not admitted and idle:
                for block in [*self._block]:  # what is kept lies in the way: it is fed again
                    self._forget(block)
                own = self._take(waiting[0])
                if own is None:
                    raise ValueError(
                        f"the memory has {self._arena.free} tokens free, but not in pieces that "
                        f"hold prompt {waiting[0].prompt} and a completion; make more room"
                    )
            if own is None:
                break
            admitted.append((row, waiting.popleft(), own))
        return admitted

    def _take(self, stream: Sample) -> int | None:
        """Room for a stream's own block and for what it sees that is not there; the own block, or
        None and nothing taken."""
        own = self._arena.take(len(stream.own) + self._max_new_tokens, high=True)
        if own is None:
            return None
        taken, feeds, path = [own], [], [*self._before]
        for b in self._arrangement.path(stream.block):
            if b not in self._block:
                block = self._arena.take(len(self._arrangement.blocks[b].tokens))
                if block is None:
                    for t in taken:
                        self._arena.give_back(t)
                    for feed in feeds:
                        del self._block[feed[0]]
                    return None
                taken.append(block)
                feeds.append((b, Feed(block, tuple(path), self._arrangement.blocks[b].tokens)))
                self._block[b] = block
            path.append(self._block[b])
        self._feeds += [feed for _, feed in feeds]
        if stream.own:
            self._feeds.append(Feed(own, tuple(path), stream.own))
        self._own.add(own)
        return own

    def feed(self) -> tuple[KVCache, dict[int, Array], int]:
        """Prefills what was taken: the cache, the logits at the end of each block that was fed, and
        the number of passes."""
        cache = self._arena.settle()
        if not self._feeds:
            return cache, {}, 0
        logits, cache, passes = prefill.feed_all(self._model, cache, self._feeds, self._width)
        jax.block_until_ready(cache.lengths)
        self._arena.cache, self._feeds = cache, []
        self._logits |= {
            b: logits[block]
            for b, block in self._block.items()
            if block in logits and b in self._ends
        }
        return cache, logits, passes

    def logits(
        self, streams: Sequence[Sample], blocks: Sequence[int], fed: dict[int, Array]
    ) -> Array:
        """float32[A, V]: what each stream samples its first token from."""
        prefix = self._prefix
        found = [
            fed[own] if s.own else self._logits[s.block] if s.block >= 0 else prefix.logits  # pyright: ignore[reportOptionalMemberAccess]
            for s, own in zip(streams, blocks, strict=True)
        ]
        different = list({id(x): x for x in found}.values())
        place = {id(x): i for i, x in enumerate(different)}
        return jnp.stack(different)[np.asarray([place[id(x)] for x in found])]

    def end(self, stream: Sample, own: int, sampled: int) -> None:
        """A stream has ended."""
        self.sampled += sampled
        self._done.append((stream, own))

    def cached(self, lengths: np.ndarray) -> int:
        """Tokens of the prefix, and of the blocks of this run."""
        return int(
            sum(lengths[block] for block in (*self._before, *self._block.values(), *self._own))
        )

    def _release(self) -> None:
        """Gives back the blocks of rows that have ended, and those of the tree that no row below
        needs any more."""
        for stream, own in self._done:
            self._own.discard(own)
            self._arena.give_back(own)
            for b in self._arrangement.path(stream.block):
                self._users[b] -= 1
                if not self._users[b]:
                    self._forget(b)
        self._done.clear()

    def _forget(self, block: int) -> None:
        self._arena.give_back(self._block.pop(block))
        self._logits.pop(block, None)

    def clear(self) -> None:
        """Gives back everything."""
        for block in (*self._own, *self._block.values()):
            self._arena.give_back(block)


@dataclasses.dataclass(frozen=True)
class Wave:
    """What runs at a time: rows, blocks of the tree, and tokens of all blocks; and the most that
    one stream needs, and whose that is."""

    rows: int
    blocks: int
    tokens: int
    most: int
    worst: int


def widest_wave(
    arrangement: SharingPlan,
    streams: Sequence[Sample],
    max_new_tokens: int,
    max_rows: int,
    room: RowBudget,
) -> Wave:
    """The most that neighbouring streams need together, as many of them as the rows and the memory
    allow."""
    shared = footprints([len(block.tokens) for block in arrangement.blocks])
    users: collections.Counter[int] = collections.Counter()
    rows = tokens = first = 0
    wave = Wave(1, 0, 0, 0, 0)
    owns = footprints([len(s.own) + max_new_tokens for s in streams])
    for last, stream in enumerate(streams):
        path = arrangement.path(stream.block)
        if (alone := owns[last] + sum(shared[b] for b in path)) > wave.most:
            wave = dataclasses.replace(wave, most=alone, worst=stream.prompt)
        rows, tokens = rows + 1, tokens + owns[last] + sum(shared[b] for b in path if not users[b])
        users.update(path)
        while rows > 1 and (rows > max_rows or not room.fits(rows, tokens, rows + len(users))):
            gone = arrangement.path(streams[first].block)
            users.subtract(gone)
            rows, tokens = (
                rows - 1,
                tokens - owns[first] - sum(shared[b] for b in gone if not users[b]),
            )
            users -= collections.Counter()  # drops what is at 0
            first += 1
        wave = dataclasses.replace(
            wave,
            rows=max(wave.rows, rows),
            blocks=max(wave.blocks, len(users)),
            tokens=max(wave.tokens, tokens),
        )
    return wave


def groups(fan_ins: Sequence[int], rows: int) -> tuple[int, ...]:
    """Sizes of groups for these fan-ins: one that holds the largest that is well below all rows,
    and one for those far below that."""
    few = [fan_in for fan_in in fan_ins if 1 < fan_in <= rows // 2]
    if not few:
        return ()
    largest = bucket(max(few))
    small = [fan_in for fan_in in few if fan_in <= largest // 4]
    return tuple(sorted({largest, *([bucket(statistics.median_high(small))] if small else [])}))
