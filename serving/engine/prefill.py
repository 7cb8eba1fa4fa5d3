"""Prefill: feeding tokens to blocks in passes of one shape.

A pass has a few rows of a few tokens each. Short texts are fed side by side, one a row. A long one
takes several rows of the same pass: each has a block of its own and sees those of the rows before
it, with what they bring in this pass. So one program serves texts of any length.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jax import Array

from jaxshare import KVCache, Layout
from jaxshare.models import LoadedModel
from jaxshare.serving.kvcache.manager import spans
from jaxshare.serving.kvcache.pool import Extent
from jaxshare.serving.kvcache.prefix_tree import Node

ROWS, WIDTH = 8, 32
"""Rows of a pass, and tokens of a row."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """The tokens that one row of a pass feeds.

    Attributes:
      node: that they belong to.
      tokens: at most `WIDTH`.
      seen: the extents that the row sees, in order; the last one is empty, and takes the tokens.
    """

    node: Node
    tokens: np.ndarray
    seen: tuple[Extent, ...]


def next_pieces(path: Sequence[Node], max_rows: int) -> list[Piece]:
    """The next tokens to feed of the nodes on a path, as many as a pass can take.

    Args:
      path: from the root's child on. Of the nodes after the first that is not full nothing is
        cached.
      max_rows: rows that the pass has left.
    """
    full = next((i for i, n in enumerate(path) if n.num_cached < len(n.tokens)), len(path))
    pieces: list[Piece] = []
    seen = tuple(spans(path[:full]))
    for node in path[full:]:
        extent, start = node.extent, node.num_cached
        assert extent is not None
        end = min(len(node.tokens), extent.capacity)
        if start:
            seen = *seen, Extent(extent.offset, start, start, extent.phase)
        while start < end and len(pieces) < max_rows:
            tokens = node.tokens[start : min(start + WIDTH, end)]
            own = Extent(extent.offset + start, len(tokens), 0, extent.phase + start)
            seen = *seen, own
            pieces.append(Piece(node, tokens, seen))
            start += len(tokens)
        if start < len(node.tokens):
            break
    return pieces


@dataclasses.dataclass(frozen=True)
class Feed:
    """Tokens for an empty block, and the blocks before it in its rows' order."""

    block: int
    path: tuple[int, ...]
    tokens: Sequence[int]


def feed_all(
    model: LoadedModel, cache: KVCache, feeds: Sequence[Feed], width: int
) -> tuple[dict[int, Array], KVCache, int]:
    """Feeds every block, after the blocks that it sees.

    Args:
      model: as loaded.
      cache: with free capacity in the blocks; it is donated.
      feeds: one for each block, with at least one token; their paths may name each other's blocks.
      width: the largest number of blocks that a row lists, the same for all calls that are to share
        programs.

    Returns:
      The logits after the last token of each block, float32[V]; the cache; and the number of
        forward passes.
    """
    remaining = {feed.block: feed for feed in feeds}
    num_fed = dict.fromkeys(remaining, 0)
    logits: dict[int, Array] = {}
    passes = 0
    while remaining:
        ready = [f for f in remaining.values() if not any(b in remaining for b in f.path)]
        rows, max_tokens = shape(len(ready[0].tokens) - num_fed[ready[0].block])
        batch = ready[:rows]
        tokens, count = np.zeros((rows, max_tokens), np.int32), np.zeros(rows, np.int32)
        for r, feed in enumerate(batch):
            chunk = feed.tokens[num_fed[feed.block] : num_fed[feed.block] + max_tokens]
            tokens[r, : len(chunk)], count[r] = chunk, len(chunk)
        layout = Layout.from_blocks(
            [[*feed.path, feed.block] for feed in batch], num_rows=rows, width=width
        )
        row_logits, cache = model.forward(tokens, count, cache, layout)
        passes += 1
        for r, feed in enumerate(batch):
            num_fed[feed.block] += int(count[r])
            if num_fed[feed.block] == len(feed.tokens):
                logits[feed.block] = row_logits[r]
                del remaining[feed.block]
    return logits, cache, passes


def warm_up(model: LoadedModel, cache: KVCache, lengths: Sequence[int], width: int) -> KVCache:
    """Compiles what `feed_all` needs for texts of these lengths, by passes without tokens."""
    shapes = {shape(rest) for n in lengths for rest in (n, n % SHAPES[-1][1]) if rest}
    if len(set(lengths)) > 1:  # the rest of one text may be fed beside another text
        widest = max(max_tokens for _, max_tokens in shapes)
        shapes = {each for each in SHAPES if each[1] <= widest}
    for rows, max_tokens in shapes:
        _, cache = model.forward(
            np.zeros((rows, max_tokens), np.int32),
            np.zeros(rows, np.int32),
            cache,
            Layout.from_blocks([], num_rows=rows, width=width),
        )
    return cache


def prefill(
    model: LoadedModel, tokens: Sequence[int], cache: KVCache, block: int
) -> tuple[Array, KVCache]:
    """Feeds tokens to one block in wide passes.

    With no tokens one pass runs that writes nothing.

    Returns:
      The logits after the last token, float32[1, V], and the cache.
    """
    layout = Layout.from_blocks([[block]])
    _, width = SHAPES[-1]
    for start in range(0, max(len(tokens), 1), width):
        chunk = list(tokens[start : start + width])
        padded = np.zeros((1, width), np.int32)
        padded[0, : len(chunk)] = chunk
        logits, cache = model.forward(padded, np.asarray([len(chunk)]), cache, layout)
    return logits, cache


SHAPES = ((16, 16), (4, 64), (1, 256))
"""(rows, tokens of a row) of passes of `feed_all`."""


def shape(remaining: int) -> tuple[int, int]:
    """(rows, tokens of a row) of a pass whose first row has `remaining` tokens to feed."""
    return next((each for each in SHAPES if remaining <= each[1]), SHAPES[-1])
