"""Prefill: feeding known tokens to blocks in wide passes, several blocks a pass where they are
short."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jax import Array

from jaxshare import KVCache, Layout
from jaxshare.models import LoadedModel

SHAPES = ((16, 16), (4, 64), (1, 256))
"""(rows, tokens of a row) of a pass: short texts are fed side by side, and few programs serve all
lengths."""


@dataclasses.dataclass(frozen=True)
class Feed:
    """Tokens for an empty block, and the blocks before it in its rows' order."""

    block: int
    path: tuple[int, ...]
    tokens: Sequence[int]


def feed_all(
    model: LoadedModel, cache: KVCache, feeds: Sequence[Feed], width: int
) -> tuple[dict[int, Array], KVCache, int]:
    """Feeds every block, those that it sees before it first.

    Args:
      model: as loaded.
      cache: with room in the blocks; it is donated.
      feeds: one a block, each with at least one token; a block that another one sees may itself be
        among them.
      width: most blocks that a row lists, the same for all calls that are to share programs.

    Returns:
      For each block the logits after its last token, float32[V]; the cache; and the number of
        forward passes.
    """
    left = {feed.block: feed for feed in feeds}
    done = dict.fromkeys(left, 0)
    logits: dict[int, Array] = {}
    passes = 0
    while left:
        ready = [feed for feed in left.values() if not any(block in left for block in feed.path)]
        rows, most = shape(len(ready[0].tokens) - done[ready[0].block])
        now = ready[:rows]
        tokens, count = np.zeros((rows, most), np.int32), np.zeros(rows, np.int32)
        for r, feed in enumerate(now):
            piece = feed.tokens[done[feed.block] : done[feed.block] + most]
            tokens[r, : len(piece)], count[r] = piece, len(piece)
        layout = Layout.from_blocks(
            [[*feed.path, feed.block] for feed in now], num_rows=rows, width=width
        )
        found, cache = model.forward(tokens, count, cache, layout)
        passes += 1
        for r, feed in enumerate(now):
            done[feed.block] += int(count[r])
            if done[feed.block] == len(feed.tokens):
                logits[feed.block] = found[r]
                del left[feed.block]
    return logits, cache, passes


def warm_up(model: LoadedModel, cache: KVCache, lengths: Sequence[int], width: int) -> KVCache:
    """Compiles what `feed_all` needs for texts of these lengths, by passes that bring nothing."""
    shapes = {shape(left) for n in lengths for left in (n, n % SHAPES[-1][1]) if left}
    if len(set(lengths)) > 1:  # what is left of one text may be fed beside another
        widest = max(most for _, most in shapes)
        shapes = {each for each in SHAPES if each[1] <= widest}
    for rows, most in shapes:
        _, cache = model.forward(
            np.zeros((rows, most), np.int32),
            np.zeros(rows, np.int32),
            cache,
            Layout.from_blocks([], num_rows=rows, width=width),
        )
    return cache


def prefill(
    model: LoadedModel, tokens: Sequence[int], cache: KVCache, block: int
) -> tuple[Array, KVCache]:
    """Feeds tokens to a block in wide passes; float32[1, V] logits after the last. With no tokens
    one pass runs that writes nothing."""
    layout = Layout.from_blocks([[block]])
    _, width = SHAPES[-1]
    for first in range(0, max(len(tokens), 1), width):
        piece = list(tokens[first : first + width])
        padded = np.zeros((1, width), np.int32)
        padded[0, : len(piece)] = piece
        logits, cache = model.forward(padded, np.asarray([len(piece)]), cache, layout)
    return logits, cache


def shape(left: int) -> tuple[int, int]:
    """(rows, tokens of a row) of a pass whose first row has so many tokens left."""
    return next((each for each in SHAPES if left <= each[1]), SHAPES[-1])
