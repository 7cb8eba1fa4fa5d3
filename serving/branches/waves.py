"""Waves: the rows that run at a time, and the blocks of the tree that are in memory for them."""

import collections
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

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
    """The blocks of the tree that are in the arena, and the number of samples that need each."""

    def __init__(
        self,
        arena: Arena,
        *,
        model: LoadedModel,
        sharing: SharingPlan,
        samples: Sequence[Sample],
        prefix: Prefix | None,
        width: int,
        max_new_tokens: int,
    ):
        """Starts with no blocks.

        Args:
          arena: where blocks are taken from.
          model: prefills them.
          sharing: the tree.
          samples: those of it that are to run.
          prefix: comes before the tree.
          width: the maximum number of blocks that a row lists.
          max_new_tokens: capacity of each row after its prompt.
        """
        self.sampled = 0
        self._arena, self._model, self._sharing, self._prefix = arena, model, sharing, prefix
        self._width, self._max_new_tokens = width, max_new_tokens
        self._block: dict[int, int] = {}  # of the tree -> of the arena
        self._own: set[int] = set()
        self._logits: dict[int, Array] = {}  # of the tree's blocks at whose end rows sample
        self._feeds: list[Feed] = []
        self._ref_counts = collections.Counter(b for s in samples for b in sharing.path(s.block))
        self._ends = {s.block for s in samples if not s.suffix}
        # rows that have ended, and whose blocks stay until their memory is needed
        self._done: list[tuple[Sample, int]] = []
        self._prefix_path = prefix.path if prefix else ()

    def path(self, sample: Sample, own: int) -> list[int]:
        """The arena's blocks that a row lists."""
        return [
            *self._prefix_path,
            *(self._block[b] for b in self._sharing.path(sample.block)),
            own,
        ]

    def admit(
        self, queue: "collections.deque[Sample]", rows: Sequence[int], idle: bool
    ) -> list[tuple[int, Sample, int]]:
        """Takes samples from the queue as long as there are rows and memory.

        Args:
          queue: samples to come, in order.
          rows: the free ones.
          idle: no row runs.

        Returns:
          (row, sample, its own block) of each.
        """
        admitted = []
        if queue and rows:
            self._release()
        for row in rows:
            if not queue:
                break
            own = self._take(queue[0])
            if own is None and not admitted and idle:
                # Blocks that are kept fragment the memory: they are dropped, and fed again.
                for block in [*self._block]:
                    self._evict(block)
                own = self._take(queue[0])
                if own is None:
                    raise ValueError(
                        f"the memory has {self._arena.free} tokens free, but not in pieces that "
                        f"hold prompt {queue[0].prompt} and a completion; make more room"
                    )
            if own is None:
                break
            admitted.append((row, queue.popleft(), own))
        return admitted

    def _take(self, sample: Sample) -> int | None:
        """Takes a sample's own block, and the blocks that it sees and that are not resident.

        Returns:
          its own block, or None with nothing taken where memory is short.
        """
        own = self._arena.take(len(sample.suffix) + self._max_new_tokens, high=True)
        if own is None:
            return None
        taken, feeds, path = [own], [], [*self._prefix_path]
        for b in self._sharing.path(sample.block):
            if b not in self._block:
                block = self._arena.take(len(self._sharing.blocks[b].tokens))
                if block is None:
                    for t in taken:
                        self._arena.give_back(t)
                    for feed in feeds:
                        del self._block[feed[0]]
                    return None
                taken.append(block)
                feeds.append((b, Feed(block, tuple(path), self._sharing.blocks[b].tokens)))
                self._block[b] = block
            path.append(self._block[b])
        self._feeds += [feed for _, feed in feeds]
        if sample.suffix:
            self._feeds.append(Feed(own, tuple(path), sample.suffix))
        self._own.add(own)
        return own

    def feed(self) -> tuple[KVCache, dict[int, Array], int]:
        """Prefills the blocks that were taken.

        Returns:
          the cache, the logits at the end of each block that was fed, and the number of passes.
        """
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
        self, samples: Sequence[Sample], blocks: Sequence[int], fed: dict[int, Array]
    ) -> Array:
        """float32[A, V]: the logits from which each sample draws its first token."""
        after_prefix = self._prefix and self._prefix.logits
        found: list[Any] = [
            fed[own] if s.suffix else self._logits[s.block] if s.block >= 0 else after_prefix
            for s, own in zip(samples, blocks, strict=True)
        ]
        different = list({id(x): x for x in found}.values())
        index = {id(x): i for i, x in enumerate(different)}
        return jnp.stack(different)[np.asarray([index[id(x)] for x in found])]

    def end(self, sample: Sample, own: int, sampled: int) -> None:
        """Notes that a sample has ended, with this many tokens."""
        self.sampled += sampled
        self._done.append((sample, own))

    def cached(self, lengths: np.ndarray) -> int:
        """The number of tokens of the prefix, and of the blocks of this run."""
        return int(
            sum(lengths[block] for block in (*self._prefix_path, *self._block.values(), *self._own))
        )

    def _release(self) -> None:
        """Gives back the blocks of ended rows, and blocks of the tree without rows to come."""
        for sample, own in self._done:
            self._own.discard(own)
            self._arena.give_back(own)
            for b in self._sharing.path(sample.block):
                self._ref_counts[b] -= 1
                if not self._ref_counts[b]:
                    self._evict(b)
        self._done.clear()

    def _evict(self, block: int) -> None:
        self._arena.give_back(self._block.pop(block))
        self._logits.pop(block, None)

    def clear(self) -> None:
        """Gives back everything."""
        for block in (*self._own, *self._block.values()):
            self._arena.give_back(block)


@dataclasses.dataclass(frozen=True)
class Wave:
    """The maximum of what runs at a time.

    Attributes:
      rows: the number of rows.
      blocks: the number of blocks of the tree.
      tokens: capacity of all blocks, those of the rows included.
      max_sample_tokens: capacity that the largest sample needs alone.
      largest_prompt: the number of its prompt.
    """

    rows: int
    blocks: int
    tokens: int
    max_sample_tokens: int
    largest_prompt: int


def widest_wave(
    sharing: SharingPlan,
    samples: Sequence[Sample],
    max_new_tokens: int,
    max_rows: int,
    budget: RowBudget,
) -> Wave:
    """The maximum that neighbouring samples need together, within the rows and the memory."""
    shared = footprints([len(block.tokens) for block in sharing.blocks])
    ref_counts: collections.Counter[int] = collections.Counter()
    rows = tokens = first = 0
    wave = Wave(1, 0, 0, 0, 0)
    own = footprints([len(s.suffix) + max_new_tokens for s in samples])
    # A window of neighbours slides over the samples, as wide as it fits.
    for last, sample in enumerate(samples):
        path = sharing.path(sample.block)
        if (alone := own[last] + sum(shared[b] for b in path)) > wave.max_sample_tokens:
            wave = dataclasses.replace(wave, max_sample_tokens=alone, largest_prompt=sample.prompt)
        rows += 1
        tokens += own[last] + sum(shared[b] for b in path if not ref_counts[b])
        ref_counts.update(path)
        while rows > 1 and (
            rows > max_rows or not budget.fits(rows, tokens, rows + len(ref_counts))
        ):
            left = sharing.path(samples[first].block)
            ref_counts.subtract(left)
            rows -= 1
            tokens -= own[first] + sum(shared[b] for b in left if not ref_counts[b])
            ref_counts -= collections.Counter()  # drops entries of 0
            first += 1
        wave = dataclasses.replace(
            wave,
            rows=max(wave.rows, rows),
            blocks=max(wave.blocks, len(ref_counts)),
            tokens=max(wave.tokens, tokens),
        )
    return wave


def group_sizes(fan_ins: Sequence[int], num_rows: int) -> tuple[int, ...]:
    """The sizes of groups for these fan-ins.

    One holds the largest that is well below all rows, and one those far below that.
    """
    few = [fan_in for fan_in in fan_ins if 1 < fan_in <= num_rows // 2]
    if not few:
        return ()
    largest = bucket(max(few))
    small = [fan_in for fan_in in few if fan_in <= largest // 4]
    return tuple(sorted({largest, *([bucket(statistics.median_high(small))] if small else [])}))
