"""Prefill: feeding tokens to blocks in passes of a few shapes.

A pass has a few rows of a few tokens each. Short texts are fed side by side, one a row. A long one
takes several rows of the same pass: each has a block of its own and sees those of the rows before
it, with what they bring in this pass. So one program serves texts of any length. Where enough
tokens wait, a second one of longer rows reads the weights less often. On a CPU, where a pass takes
as long as its places do, filled or not, a third one of a single row serves a short text.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare import KVCache
from jaxshare.models import LoadedModel
from jaxshare.serving.kvcache.manager import KVManager
from jaxshare.serving.kvcache.pool import Extent
from jaxshare.serving.kvcache.prefix_tree import Node
from jaxshare.serving.kvcache.view import Prefilled, ViewBuilder, spans


@dataclasses.dataclass(frozen=True)
class PassShape:
    """The shape of a pass: rows, and tokens of a row."""

    rows: int
    width: int

    @property
    def size(self) -> int:
        """The tokens that a pass has places for."""
        return self.rows * self.width


SMALL = PassShape(1, 64)
"""For a short text alone, on a CPU."""
_SMALL_PASSES = 2
"""Small passes that are made in place of a short one, at most: each takes a quarter of its time."""
SHORT = PassShape(4, 64)
"""For few tokens, and where others wait for their next token meanwhile."""
_LONG, _LONG_ON_GPU = PassShape(8, 128), PassShape(8, 256)
"""For many. On a GPU products of fewer tokens than about a thousand are bound by reading weights; a
pass takes less time there than its users would notice."""
_FILLED = 7 / 8
"""The part of a long pass that must be filled: one costs at least 0.85 of short ones for as many
tokens as it has places for."""
_LISTED = 16
"""Blocks that a row can list, at first: those of a long text that come before it, and a prefix."""


class PrefillSource(Protocol):
    """A request or a text of a session, whose tokens are prefilled."""

    @property
    def adapter_place(self) -> int:
        """The place of its adapter, 0 for none."""
        ...

    def path(self) -> Sequence[Prefilled]:
        """Its tokens, and those before them."""
        ...


@dataclasses.dataclass(frozen=True)
class Piece:
    """The tokens that one row of a pass feeds.

    Attributes:
      node: that they belong to.
      tokens: at most as many as a row of the pass takes.
      seen: the extents that the row sees, in order; the last one is empty, and takes the tokens.
    """

    node: Prefilled
    tokens: np.ndarray
    seen: tuple[Extent, ...]


def next_pieces(path: Sequence[Prefilled], max_rows: int, width: int = SHORT.width) -> list[Piece]:
    """The next tokens to feed of the nodes on a path, as many as a pass can take.

    Args:
      path: from the root's child on. Of the nodes after the first that is not full nothing is
        cached.
      max_rows: rows that the pass has left.
      width: tokens of a row.
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
            tokens = node.tokens[start : min(start + width, end)]
            seen = *seen, _part(extent, start, len(tokens))
            pieces.append(Piece(node, tokens, seen))
            start += len(tokens)
        if start < len(node.tokens):
            break
    return pieces


def _part(extent: Extent, start: int, tokens: int) -> Extent:
    """Places of an extent for some tokens that it does not hold yet, as a block of their own."""
    return Extent(extent.offset + start, tokens, 0, extent.phase + start)


def long_shape() -> PassShape:
    """The shape of passes for many tokens on the default backend."""
    return _LONG if jax.default_backend() == "cpu" else _LONG_ON_GPU


def small_shape() -> PassShape:
    """The shape of passes for a short text alone on the default backend."""
    return SMALL if jax.default_backend() == "cpu" else SHORT


def _packed(texts: Sequence[np.ndarray], shape: PassShape) -> tuple[np.ndarray, np.ndarray]:
    """The tokens int32[R, T] and counts int32[R] of a pass that feeds these texts."""
    tokens, counts = np.zeros((shape.rows, shape.width), np.int32), np.zeros(shape.rows, np.int32)
    for i, text in enumerate(texts):
        tokens[i, : len(text)], counts[i] = text, len(text)
    return tokens, counts


@jax.jit
def _row_of(logits: Array, row: int) -> Array:
    """Row by row, indexing takes JAX more than ten times as long outside of a program."""
    return logits[row]


@dataclasses.dataclass(frozen=True)
class FedPass:
    """A pass that is dispatched.

    Attributes:
      logits: of its rows, [R, V].
      is_finite: bool[R], whether these are finite.
      arrived: to be called when they have arrived.
    """

    logits: Array
    is_finite: Array
    arrived: Callable[[], None]

    def logits_of(self, row: int) -> Array:
        """The logits of a row, [V]."""
        return _row_of(self.logits, row)

    def finite(self) -> np.ndarray:
        """Waits for the pass; returns for each row whether its logits are finite."""
        found = np.asarray(self.is_finite)
        self.arrived()
        return found


class PrefillPasses:
    """Runs passes over pieces.

    Args:
      model: as loaded.
      kv: whose blocks are written.
    """

    def __init__(self, model: LoadedModel, kv: KVManager):
        self._model, self._kv, self._long = model, kv, long_shape()
        self._views = {
            shape: ViewBuilder(shape.rows, width=_LISTED)
            for shape in (small_shape(), SHORT, self._long)
        }

    def use(self, model: LoadedModel) -> None:
        """Goes on with other weights of the same model."""
        self._model = model

    def next_pieces(
        self, paths: Sequence[Sequence[Prefilled]], *, streaming: bool
    ) -> list[tuple[int, Piece]]:
        """The next tokens to feed on some paths, as many as a pass can take.

        Args:
          paths: as `next_pieces` takes them; the first ones come first.
          streaming: others wait for their next token. On a CPU they do not wait for long passes.

        Returns:
          Each piece, with the number of its path.
        """
        if not streaming or jax.default_backend() != "cpu":
            pieces = self._of_shape(paths, self._long)
            if sum(len(p.tokens) for _, p in pieces) >= _FILLED * self._long.size:
                return pieces
        pieces = self._of_shape(paths, SHORT)
        return pieces[: small_shape().rows] if len(pieces) <= _SMALL_PASSES else pieces

    @staticmethod
    def _of_shape(
        paths: Sequence[Sequence[Prefilled]], shape: PassShape
    ) -> list[tuple[int, Piece]]:
        pieces: list[tuple[int, Piece]] = []
        for number, path in enumerate(paths):
            found = next_pieces(path, shape.rows - len(pieces), shape.width)
            pieces += [(number, piece) for piece in found]
        return pieces

    def feed[S: PrefillSource](
        self, sources: Sequence[S], *, streaming: bool
    ) -> tuple[list[tuple[S, Piece]], FedPass]:
        """Feeds the next tokens of the first sources, as many as a pass can take.

        Args:
          sources, streaming: see `next_pieces`.

        Returns:
          Each piece after its source, and the pass, which is not waited for.
        """
        paths = [each.path() for each in sources]
        found = self.next_pieces(paths, streaming=streaming)
        batch = [(sources[number], piece) for number, piece in found]
        places = [source.adapter_place for source, _ in batch]
        return batch, self.run([piece for _, piece in batch], places)

    def run(self, pieces: Sequence[Piece], adapters: Sequence[int] | None = None) -> FedPass:
        """Feeds pieces, as many as a pass has rows. `adapters` has the places of their adapters, by
        default the model's own."""
        longest = max((len(piece.tokens) for piece in pieces), default=0)
        fitting = (s for s in self._views if longest <= s.width and len(pieces) <= s.rows)
        return self._run(pieces, next(fitting), adapters)

    def warm_up(self) -> None:
        """Compiles the passes that texts can need which fit the memory."""
        for shape in self._views:
            if shape != self._long or self._kv.pool.tokens >= shape.size:
                fed = self._run([], shape)
                fed.logits_of(0)
                fed.finite()

    def _run(
        self, pieces: Sequence[Piece], shape: PassShape, adapters: Sequence[int] | None = None
    ) -> FedPass:
        kv, (tokens, counts) = self._kv, _packed([piece.tokens for piece in pieces], shape)
        view = self._views[shape].build({i: piece.seen for i, piece in enumerate(pieces)})
        arrived = kv.speeds.feeding(max(1, int(counts.sum())))
        cache, layout = view.inputs(kv.pool.cache)
        layout = self._model.adapted(layout, adapters)
        # Of blocks that the manager has: to check them would wait for the dispatch under way.
        logits, kv.pool.cache = self._model.forward(tokens, counts, cache, layout, checked=False)
        fed = FedPass(logits, jnp.isfinite(logits).all(axis=-1), arrived)
        kv.view_changed = True
        for piece in pieces:
            assert piece.node.extent is not None
            piece.node.extent.length += len(piece.tokens)
        return fed


def feed_node(model: LoadedModel, kv: KVManager, node: Node) -> bool:
    """Feeds all tokens of a node, after those of its path, and keeps the logits at its end.

    Returns:
      True if all logits are finite.
    """
    passes, all_finite = PrefillPasses(model, kv), True
    while found := passes.next_pieces([node.path()], streaming=False):
        pieces = [piece for _, piece in found]
        fed = passes.run(pieces)
        all_finite &= bool(fed.finite()[: len(pieces)].all())
        node.logits = fed.logits_of(len(pieces) - 1)
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
    finite, first, long = [], 0, long_shape()
    while not finite or first < len(tokens):
        left, small = len(tokens) - first, small_shape()
        shape = small if left <= _SMALL_PASSES * small.size else SHORT
        shape = long if left >= _FILLED * long.size else shape
        texts, seen = list[np.ndarray](), list[Extent]()
        if extent.length:
            seen = [dataclasses.replace(extent, capacity=extent.length)]
        listed: dict[int, list[Extent]] = {}
        for start in range(first, min(first + shape.size, len(tokens)), shape.width):
            texts.append(np.asarray(tokens[start : start + shape.width], np.int32))
            seen.append(_part(extent, extent.length + start - first, len(texts[-1])))
            listed[len(listed)] = [*seen]
        view = ViewBuilder(shape.rows, width=_LISTED).build(listed)
        given = *_packed(texts, shape), *view.inputs(cache)
        logits, fed = model.forward(*given, checked=False)
        cache = dataclasses.replace(cache, keys=fed.keys, values=fed.values, faults=fed.faults)
        finite.append(jnp.isfinite(logits).all())
        extent.length += sum(map(len, texts))
        first += shape.size
    cache = dataclasses.replace(cache, lengths=cache.lengths.at[block].set(extent.length))
    return bool(np.all(jax.device_get(finite))), cache
