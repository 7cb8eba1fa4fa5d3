"""The passes that feed a tree of texts and score tokens in it.

A pass takes the next tokens of the tree in depth-first order, some rows of a few tokens each. A row
sees the nodes above its own, and what rows before it bring of them in the same pass. Between passes
only the path to the next node stays in memory, so a tree of any size takes that of its longest text.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxshare import Sampler, Samplers
from jaxshare.arena import LARGE_TILE
from jaxshare.layout import bucket
from jaxshare.models import LoadedModel
from jaxshare.models.token_scores import CHUNK, ScoredPositions, score_positions
from jaxshare.serving.errors import NotANumberError
from jaxshare.serving.kvcache.pool import Extent, Pool
from jaxshare.serving.kvcache.view import ViewBuilder
from jaxshare.serving.scoring.text_tree import FedNode, TokenText

SHAPES = ((4, 64), (16, 16), (64, 4))
"""(rows, tokens of a row) of a pass. All have as many places; a pass takes the shape that holds the
most tokens."""
_PLACES = 256
_ASKED = 8
"""Tokens that are asked for at one place of the head; a position with more takes several."""
_LISTED = 16
"""Blocks that a row can list, at first."""
_IN_FLIGHT = 2
"""Passes that are started before the first one's results are read."""


class TokenScore(NamedTuple):
    """The score of one token of a text.

    Attributes:
      text: index of the text.
      index: of the token in the text.
      logprob: of the token, given all before it.
      greedy: True where it is the likeliest token; of several, the lowest.
      top: the likeliest tokens with their log-probabilities, descending.
    """

    text: int
    index: int
    logprob: float
    greedy: bool
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(eq=False)
class _Live:
    """A node on the path that is being fed.

    Attributes:
      node: of the tree.
      extents: with its tokens that are cached before the pass.
      run: the extent for those of the pass, or None.
      parts: `run` in pieces, one for each row.
    """

    node: FedNode
    extents: list[Extent] = dataclasses.field(default_factory=list)
    run: Extent | None = None
    parts: list[Extent] = dataclasses.field(default_factory=list)


class _Row(NamedTuple):
    """The tokens start to start + count of a node, and the nodes on its path."""

    path: tuple[_Live, ...]
    start: int
    count: int


@dataclasses.dataclass(frozen=True, eq=False)
class _Started:
    """A pass whose results are not read yet.

    Attributes:
      results: on the device.
      rows: with the nodes that it fed.
      asked: for each place and column of `results` the node, the index in it, and the token.
    """

    results: ScoredPositions
    rows: list[_Row]
    asked: list[tuple[int, int, FedNode, int, int]]


class TreePasses:
    """Feeds trees of texts to one model.

    Args:
      model: for the context of the texts.
      longest: tokens to feed of the longest text.
      num_top: likeliest tokens to return at each position.
      sampler: for the log-probabilities of the chances that it draws with; None for those of the
        model itself.
    """

    def __init__(
        self, model: LoadedModel, longest: int, num_top: int, sampler: Sampler | None = None
    ):
        self._model = model
        self._samplers = Samplers.stack([sampler] * CHUNK) if sampler else None
        self._num_top = min(num_top, model.config.vocab_size)
        # A path and the tokens of a pass; of few sizes, so that programs are few.
        needed = longest + _PLACES
        step = max(LARGE_TILE, bucket(needed) // 4)
        self._pool = Pool(model, needed + -needed % step)
        self._views = {shape: ViewBuilder(shape[0], width=_LISTED) for shape in SHAPES}
        self._live: list[_Live] = []
        self._closed: list[_Live] = []

    def run(
        self, nodes: Sequence[FedNode], texts: Sequence[TokenText]
    ) -> Iterator[list[TokenScore]]:
        """Feeds a tree, and yields the scores of each pass.

        Args:
          nodes: of the tree, in depth-first order.
          texts: that it was made of.

        Raises:
          NotANumberError: the model's states or logits for a text are not finite.
        """
        self._live, self._closed = [], []
        started: collections.deque[_Started] = collections.deque()
        cursor = 0, 0
        while cursor[0] < len(nodes):
            held = {shape: _pieces(nodes, cursor, shape) for shape in SHAPES}
            shape = max(SHAPES, key=lambda shape, held=held: sum(n for *_, n in held[shape]))
            rows, cursor = self._rows(nodes, cursor, shape)
            started.append(self._start(rows, shape))
            if len(started) > _IN_FLIGHT:
                yield self._read(started.popleft(), texts)
        for last in started:
            yield self._read(last, texts)
        self._closed += self._live
        self._free()

    def _rows(
        self, nodes: Sequence[FedNode], cursor: tuple[int, int], shape: tuple[int, int]
    ) -> tuple[list[_Row], tuple[int, int]]:
        """The rows of the next pass, and where the one after it goes on."""
        rows: list[_Row] = []
        for number, start, count in _pieces(nodes, cursor, shape):
            node = nodes[number]
            if not start:
                parent = nodes[node.parent] if node.parent >= 0 else None
                while self._live and self._live[-1].node is not parent:
                    self._closed.append(self._live.pop())
                self._live.append(_Live(node))
            rows.append(_Row(tuple(self._live), start, count))
            cursor = _after(nodes, number, start + count)
        return rows, cursor

    def _free(self) -> None:
        """Frees the memory of the nodes that have left the path."""
        for live in self._closed:
            for extent in live.extents:
                self._pool.give_back(extent)
        self._closed.clear()

    def _start(self, rows: Sequence[_Row], shape: tuple[int, int]) -> _Started:
        """Runs a pass; afterwards the tokens of its rows are cached."""
        self._place(rows)
        tokens, counts = np.zeros(shape, np.int32), np.zeros(shape[0], np.int32)
        seen: dict[int, list[Extent]] = {}
        for i, row in enumerate(rows):
            live = row.path[-1]
            tokens[i, : row.count] = live.node.tokens[row.start : row.start + row.count]
            counts[i] = row.count
            assert live.run is not None
            first = row.start - live.run.phase + live.node.position
            live.parts.append(
                Extent(live.run.offset + first, row.count, 0, live.node.position + row.start)
            )
            seen[i] = [extent for each in row.path for extent in (*each.extents, *each.parts)]
        at, asked, places = _asked(rows, shape[1])
        cache, layout = self._views[shape].build(seen).inputs(self._pool.cache)
        results, self._pool.cache = score_positions(
            self._model.module,
            self._model.variables,
            tokens,
            counts,
            cache,
            self._model.adapted(layout),
            at,
            asked,
            np.int32(len(places) and places[-1][0] + 1),
            self._num_top,
            self._samplers,
        )
        for live in {id(row.path[-1]): row.path[-1] for row in rows}.values():
            _settle(live)
        self._free()
        return _Started(results, [*rows], places)

    def _place(self, rows: Sequence[_Row]) -> None:
        """Takes an extent for what each node gets in a pass."""
        new: dict[int, tuple[_Live, int, int]] = {}
        for row in rows:
            live = row.path[-1]
            _, start, count = new.get(id(live), (live, row.start, 0))
            new[id(live)] = live, start, count + row.count
        for live, start, count in new.values():
            run = self._pool.take(count)
            if run is None:
                self._pool.compact(self._extents(live for live, _, _ in new.values()), count)
                run = self._pool.take(count)
            assert run is not None, "a path and a pass fit the pool"
            run.phase = live.node.position + start
            live.run = run

    def _extents(self, new: Iterable[_Live]) -> list[Extent]:
        every = {id(live): live for live in (*self._live, *self._closed, *new)}.values()
        return [
            extent
            for live in every
            for extent in (*live.extents, *([live.run] if live.run else []))
        ]

    def _read(self, started: _Started, texts: Sequence[TokenText]) -> list[TokenScore]:
        """The scores of a pass."""
        found = jax.device_get(started.results)
        for row, finite in zip(started.rows, found.finite, strict=False):
            if not finite:
                _fail(texts[row.path[-1].node.text], row.path[-1].node.position + row.start)
        scores = []
        for place, column, node, index, token in started.asked:
            position, logprob = node.position + index + 1, float(found.logprobs[place, column])
            greedy = int(found.likeliest[place]) == token
            pairs = zip(found.top[place].tolist(), found.top_logprobs[place].tolist(), strict=True)
            top = tuple(pair for pair in pairs if pair[1] > -math.inf or not self._samplers)
            for text in node.wanted[index][token]:
                # A sampler may give a token no chance.
                if not (math.isfinite(logprob) or (self._samplers and logprob == -math.inf)):
                    _fail(texts[text], position)
                scores.append(TokenScore(text, position, logprob, greedy, top))
        return scores


def _pieces(
    nodes: Sequence[FedNode], cursor: tuple[int, int], shape: tuple[int, int]
) -> Iterator[tuple[int, int, int]]:
    """The pieces that a pass of this shape takes: node, start in it, and number of tokens of each."""
    for _ in range(shape[0]):
        number, start = cursor
        if number == len(nodes):
            return
        count = min(shape[1], len(nodes[number].tokens) - start)
        yield number, start, count
        cursor = _after(nodes, number, start + count)


def _after(nodes: Sequence[FedNode], number: int, end: int) -> tuple[int, int]:
    """The node and the start of the piece after one that ends there."""
    return (number + 1, 0) if end == len(nodes[number].tokens) else (number, end)


def _settle(live: _Live) -> None:
    """Turns what a pass has brought of a node into cached tokens."""
    assert live.run is not None
    live.run.length = live.run.capacity
    if live.extents and live.extents[-1].precedes(live.run):
        live.extents[-1].capacity += live.run.capacity
        live.extents[-1].length += live.run.capacity
    else:
        live.extents.append(live.run)
    live.run = None
    live.parts = []


def _asked(
    rows: Sequence[_Row], width: int
) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int, FedNode, int, int]]]:
    """The places of a pass at which tokens are asked for.

    Returns:
      Their positions in the pass int32[N], the tokens int32[N, K], and for each token its place, its
      column, its node, the index after which it comes, and itself; in order of their places.
    """
    positions: list[int] = []
    found: list[tuple[int, int, FedNode, int, int]] = []
    for i, row in enumerate(rows):
        node = row.path[-1].node
        for index in range(row.start, row.start + row.count):
            for n, token in enumerate(node.wanted.get(index, ())):
                if n % _ASKED == 0:
                    positions.append(i * width + index - row.start)
                found.append((len(positions) - 1, n % _ASKED, node, index, token))
    places = max(_PLACES, CHUNK * bucket(-(-len(positions) // CHUNK)))
    at, asked = np.zeros(places, np.int32), np.zeros((places, _ASKED), np.int32)
    at[: len(positions)] = positions
    for place, column, _, _, token in found:
        asked[place, column] = token
    return at, asked, found


def _fail(text: TokenText, tokens: int) -> None:
    raise NotANumberError.of(text.name, f"{tokens} tokens")
