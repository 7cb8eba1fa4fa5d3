"""Prefill: feeding tokens to blocks in passes of one shape.

A pass has a few rows of a few tokens each. Short texts are fed side by side, one a row. A long one
takes several rows of the same pass: each has a block of its own and sees those of the rows before
it, with what they bring in this pass. So one program serves texts of any length.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare import KVCache
from jaxshare.models import LoadedModel
from jaxshare.serving.engine.running_request import RunningRequest
from jaxshare.serving.kvcache.manager import KVManager
from jaxshare.serving.kvcache.pool import Extent
from jaxshare.serving.kvcache.prefix_tree import Node
from jaxshare.serving.kvcache.view import ViewBuilder, spans

ROWS, WIDTH = 4, 64
"""Rows of a pass, and tokens of a row."""
_LISTED = 16
"""Blocks that a row can list, at first: those of a long text that come before it, and a prefix."""


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
            seen = *seen, _part(extent, start, len(tokens))
            pieces.append(Piece(node, tokens, seen))
            start += len(tokens)
        if start < len(node.tokens):
            break
    return pieces


def with_adapters(
    batch: Sequence[tuple[RunningRequest, Piece]],
) -> tuple[list[Piece], list[int]]:
    """Returns the pieces of requests, and the places of their adapters."""
    return [piece for _, piece in batch], [row.request.adapter_place for row, _ in batch]


def _part(extent: Extent, start: int, tokens: int) -> Extent:
    """Places of an extent for some tokens that it does not hold yet, as a block of their own."""
    return Extent(extent.offset + start, tokens, 0, extent.phase + start)


def _packed(texts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens int32[ROWS, WIDTH] and counts int32[ROWS] of a pass that feeds these texts."""
    tokens, counts = np.zeros((ROWS, WIDTH), np.int32), np.zeros(ROWS, np.int32)
    for i, text in enumerate(texts):
        tokens[i, : len(text)], counts[i] = text, len(text)
    return tokens, counts


class PrefillPasses:
    """Runs passes over pieces.

    Args:
      model: as loaded.
      kv: whose blocks are written.
    """

    def __init__(self, model: LoadedModel, kv: KVManager):
        self._model, self._kv, self._views = model, kv, ViewBuilder(ROWS, width=_LISTED)

    def use(self, model: LoadedModel) -> None:
        """Goes on with other weights of the same model."""
        self._model = model

    def run(
        self, pieces: Sequence[Piece], adapters: Sequence[int] | None = None
    ) -> tuple[Array, np.ndarray]:
        """Feeds pieces, at most `ROWS` of them; returns their logits [R, V], and bool[R] whether
        these are finite. `adapters` has the places of their adapters, by default the model's own."""
        kv, (tokens, counts) = self._kv, _packed([piece.tokens for piece in pieces])
        view = self._views.build({i: piece.seen for i, piece in enumerate(pieces)})
        with kv.speeds.feeding(max(1, int(counts.sum()))):
            cache = view.over(kv.pool.cache)
            layout = self._model.adapted(view.layout, adapters)
            logits, kv.pool.cache = self._model.forward(tokens, counts, cache, layout)
            finite = np.asarray(jnp.isfinite(logits).all(axis=-1))
        kv.view_changed = True
        for piece in pieces:
            assert piece.node.extent is not None
            piece.node.extent.length += len(piece.tokens)
        return logits, finite


def feed_node(model: LoadedModel, kv: KVManager, node: Node) -> bool:
    """Feeds all tokens of a node, after those of its path, and keeps the logits at its end.

    Returns:
      True if all logits are finite.
    """
    passes, all_finite = PrefillPasses(model, kv), True
    while pieces := next_pieces(node.path(), ROWS):
        logits, finite = passes.run(pieces)
        all_finite &= bool(finite[: len(pieces)].all())
        node.logits = logits[len(pieces) - 1]
    kv.tree.complete(node)
    return all_finite


def prefill(
    model: LoadedModel, tokens: Sequence[int], cache: KVCache, block: int
) -> tuple[bool, KVCache]:
    """Feeds tokens to one block of a cache, which sees nothing else.

    With no tokens one pass runs that writes nothing.

    Returns:
      True if all logits are finite, and the cache.
    """
    table = jax.device_get((cache.offsets, cache.capacities, cache.lengths, cache.phases))
    extent = Extent(*(int(array[block]) for array in table))
    if extent.length + len(tokens) > extent.capacity:
        raise ValueError(
            f"{len(tokens)} tokens do not fit block {block}, which has {extent.length} and room "
            f"for {extent.capacity}; create the cache with a larger one"
        )
    views, finite = ViewBuilder(ROWS, width=_LISTED), []
    for first in range(0, max(len(tokens), 1), ROWS * WIDTH):
        texts, seen = list[np.ndarray](), list[Extent]()
        if extent.length:
            seen = [dataclasses.replace(extent, capacity=extent.length)]
        listed: dict[int, list[Extent]] = {}
        for start in range(first, min(first + ROWS * WIDTH, len(tokens)), WIDTH):
            texts.append(np.asarray(tokens[start : start + WIDTH], np.int32))
            seen.append(_part(extent, extent.length + start - first, len(texts[-1])))
            listed[len(listed)] = [*seen]
        view = views.build(listed)
        logits, fed = model.forward(*_packed(texts), view.over(cache), view.layout)
        cache = dataclasses.replace(cache, keys=fed.keys, values=fed.values, faults=fed.faults)
        finite.append(jnp.isfinite(logits).all())
        extent.length += sum(map(len, texts))
    cache = dataclasses.replace(cache, lengths=cache.lengths.at[block].set(extent.length))
    return bool(np.all(jax.device_get(finite))), cache
