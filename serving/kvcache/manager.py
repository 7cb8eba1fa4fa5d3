"""The KV manager: allocates keys and values from the pool and the prefix tree, evicts what no
request uses, and builds the cache and the blocks of each pass."""

import collections
import contextlib
import dataclasses
import enum
import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Protocol

import jax
import numpy as np

from jaxshare import KVCache
from jaxshare.layout import bucket
from jaxshare.models import LoadedModel
from jaxshare.serving.kvcache.policy import Observation, Policy
from jaxshare.serving.kvcache.pool import Extent, Pool
from jaxshare.serving.kvcache.prefix_tree import MIN_SHARED_TOKENS, Match, Node, PrefixTree
from jaxshare.serving.kvcache.sharing_cost import PRIVATE_TILE, load_costs

GROWTH = 256
"""The most tokens by which a row is extended at a time."""
_MAX_MOVED = 16
"""A free run is made by moving at most this many times its size, as long as nodes can be evicted
instead."""
_MIN_FREE = 16
"""Evicting instead stops when one part in this many of the memory is free: then the free runs are
close to each other."""


class KVRequest(Protocol):
    """A request as the manager sees it; see `jaxshare.serving.engine.request`.

    Attributes:
      tokens: its prompt and output so far.
      remaining: tokens that may still come.
      agent, priority: for the policy.
    """

    @property
    def tokens(self) -> np.ndarray: ...
    @property
    def remaining(self) -> int: ...
    @property
    def agent(self) -> str: ...
    @property
    def priority(self) -> int: ...


class KVMetrics(Protocol):
    """Counters of tokens that leave the accelerator and come back.

    See `jaxshare.serving.engine.metrics`.
    """

    def swapped_in(self, tokens: int) -> None: ...
    def evicted(self, tokens: int, swapped: int) -> None: ...


class Wait(enum.Enum):
    """The reason why a request is not admitted yet."""

    MEMORY = "there is no memory for it"
    IN_FLIGHT = "another request is about to write its prefix"


class KVManager:
    """The keys and values of requests and sessions.

    Args:
      model: as loaded.
      tokens: the capacity of the accelerator; host_tokens: that of host memory.
      rows: requests that run at the same time.
      policy: the order of eviction.
      metrics: counters of evicted and fetched tokens.

    Attributes:
      pool, tree: the memory and the cached prefixes.
      leased, leased_tokens: the extents of sessions, and their tokens.
      width: the largest number of blocks that a row has listed, as a bucket.
      view_changed: whether the blocks differ from those of the last view.
      feed_seconds: measured seconds per prefilled token, 0 before the first; set by the scheduler.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        tokens: int,
        host_tokens: int,
        rows: int,
        policy: Policy,
        metrics: KVMetrics,
    ):
        self.view_changed, self.feed_seconds = True, 0.0
        self._copy_seconds = 0.0  # per token fetched from host memory
        self._model, self._tokens, self._host_tokens = model, tokens, host_tokens
        self._policy, self._metrics = policy, metrics
        self.reset()
        self._costs, self._layers = load_costs(model), model.config.num_layers
        self.width, self._slots = 8, 8 * rows

    def reset(self) -> None:
        """Empties pool and tree, and ends all leases."""
        self.pool = Pool(self._model, self._tokens)
        self.tree = PrefixTree(self.pool, self._policy, self._host_tokens)
        self.leased: set[Extent] = set()
        self.leased_tokens = 0
        self.view_changed = True

    # Requests.

    def allocate(self, request: KVRequest, running: int, *, afresh: bool = False) -> Node | Wait:
        """Gives a request a node for its uncached tokens and some new ones, or a reason to wait.

        Args:
          request: the request.
          running: running requests of its agent, this one included.
          afresh: ignore cached prefixes, which may themselves fill the memory.
        """
        tokens, tree = request.tokens, self.tree
        match = Match(tree.root, 0, 0, 0) if afresh else tree.match(tokens, len(tokens) - 1)
        if match.in_flight >= MIN_SHARED_TOKENS:
            return Wait.IN_FLIGHT
        parent = self._branch_at(match, request)
        path, num_cached = parent.path(), parent.segment.depth
        rest = tokens[num_cached:]
        extent = self._extent_after(path, len(rest), len(rest) + min(request.remaining, GROWTH))
        if extent is None:
            return Wait.MEMORY
        shared = collections.Counter[str]()
        for node in path:
            others = node.segment.owners.keys() - {request.agent}
            shared.update(dict.fromkeys(others, len(node.tokens)))
        self._policy.observe(
            Observation(request.agent, tree.now, len(tokens), num_cached, shared, running)
        )
        node = tree.add(parent, rest, extent)
        tree.use(node, request.agent, request.priority)
        self.view_changed = True
        return node

    def prepare(self, request: KVRequest) -> None:
        """Evicts what the next request would evict, where that needs no copy."""
        tokens = request.tokens
        match = self.tree.match(tokens, len(tokens) - 1)
        needed = len(tokens) - match.tokens + min(request.remaining, GROWTH)
        in_flight = match.in_flight >= MIN_SHARED_TOKENS
        if not self._host_tokens and not in_flight and self.pool.free < needed:
            with _pinned(match.node.path()):
                if self.pool.free + self.tree.unused_tokens() >= needed:
                    self._evict(needed)

    def _branch_at(self, match: Match, request: KVRequest) -> Node:
        """The parent of a request's own node.

        The matched node is split where the request parts from it, if that is worth it.
        """
        node, inside = match.node, match.node_tokens < len(match.node.tokens)
        if node is self.tree.root:
            return node
        assert node.parent is not None
        if inside and not self._worth_splitting(match.node_tokens, node, request):
            return node.parent
        return self.tree.split(node, match.node_tokens) if inside or node.writing else node

    def _worth_splitting(self, tokens: int, node: Node, request: KVRequest) -> bool:
        """Returns whether a node's first tokens are worth a block that all its requests read
        together.

        The cost rule of branches gives the cost in every pass that the request will need; the gain
        is that the tokens need not be prefilled again. Where no other request runs, a node is read
        as one block with the nodes before it, and costs nothing. A few tokens at the very beginning
        are common to all prompts, so they would soon be a block of all rows.
        """
        rows, costs = node.ref_count + 1, self._costs
        if rows < 2 or tokens < MIN_SHARED_TOKENS:
            at_root = node.parent is self.tree.root
            return rows < 2 and (not at_root or tokens >= MIN_SHARED_TOKENS)
        more = costs.shared(tokens, rows) - rows * (
            costs.private(PRIVATE_TILE + tokens) - costs.private(PRIVATE_TILE)
        )
        return (
            more * 1e-6 * self._layers * request.remaining <= tokens * self.feed_seconds
            or not self.feed_seconds
        )

    def _extent_after(self, path: list[Node], min_tokens: int, tokens: int) -> Extent | None:
        """An extent for tokens after these nodes, all of which are swapped in.

        None if `min_tokens` cannot be free, and then nothing is evicted in vain.
        """
        with _pinned(path):
            available = self.pool.free - sum(len(node.tokens) for node in path if node.copy)
            available += self.tree.unused_tokens() if available < tokens else 0
            if available >= min_tokens and all(self._swap_in(node) for node in path):
                return self._take(min(tokens, available)) or self._take(min_tokens)
        return None

    def _swap_in(self, node: Node) -> bool:
        """Fetches a node from host memory if it is there; False if there is no memory for it."""
        if not node.copy:
            return True
        extent = self._take(len(node.tokens))
        if extent is None:
            return False
        start = time.perf_counter()
        self.tree.swap_in(node, extent)
        jax.block_until_ready(self.pool.cache.keys[0])
        seconds = (time.perf_counter() - start) / len(node.tokens)
        self._copy_seconds = ema(self._copy_seconds, seconds)
        self._metrics.swapped_in(len(node.tokens))
        self.view_changed = True
        return True

    def extend_in_place(self, node: Node, tokens: int) -> None:
        """Extends a node being written by at most `tokens`, if the places after it are free."""
        assert node.extent is not None
        self.view_changed |= self.pool.extend(node.extent, min(tokens, GROWTH))

    def extend(self, node: Node, tokens: int) -> Node | None:
        """Extends a node being written by at most `tokens`, in place or by a successor.

        Returns:
          The node to write, or None if nothing can be evicted.
        """
        assert node.extent is not None
        tokens = min(tokens, GROWTH)
        while not self.pool.extend(node.extent, tokens):
            if extent := self.pool.take(tokens):
                node = self.tree.continue_in(node, extent)
                break
            if self._reclaim(tokens):
                continue
            if tokens == 1:
                return None
            tokens //= 2
        self.view_changed = True
        return node

    def release(self, node: Node) -> None:
        """Releases the node of a finished or preempted request; its tokens stay for reuse."""
        for each in node.path():
            each.ref_count -= 1
        self.tree.finish(node)
        self.view_changed = True

    # Sessions.

    def lease(self, tokens: int) -> Extent | None:
        """Leases an extent to a session; None if requests use the memory."""
        available = self.pool.free + self.tree.unused_tokens()
        extent = self._take(tokens) if available >= tokens else None
        if extent:
            self.leased.add(extent)
            self.leased_tokens += tokens
        return extent

    def end_lease(self, extent: Extent) -> None:
        """Frees the extent of a session."""
        if extent in self.leased:  # otherwise it was leased before a failure
            self.leased.remove(extent)
            self.leased_tokens -= extent.capacity
            self.pool.give_back(extent)

    # Memory.

    def _take(self, tokens: int) -> Extent | None:
        """Takes an extent from the pool, after evicting and compacting as far as needed."""
        while (extent := self.pool.take(tokens)) is None:
            if not self._reclaim(tokens):
                return None
        return extent

    def _reclaim(self, tokens: int) -> bool:
        """One step towards a free run of `tokens`; False if there is none left.

        Where compacting would move much, it evicts more instead.
        """
        return (
            self._compact(tokens, _MAX_MOVED * tokens)
            or self._evict(tokens)
            or self._evict(self.pool.tokens // _MIN_FREE)
            or self._compact(tokens)
        )

    def _compact(self, tokens: int, within: int | None = None) -> bool:
        """Merges free runs into one of `tokens`; see `Pool.compact`."""
        if self.pool.free < tokens:
            return False
        # A generator: the tree is walked only where extents have to move.
        cached = (node.extent for node in self.tree.root.subtree() if node.extent)
        compacted = self.pool.compact(itertools.chain(cached, self.leased), tokens, within)
        self.view_changed |= compacted
        return compacted

    def _evict(self, tokens: int) -> bool:
        """Evicts nodes until `tokens` are free; False if none was evicted."""
        evicted, swapped = self.tree.evicted, self.tree.swapped
        # Fetching a copy takes about as long as making it.
        any_evicted = self.tree.evict(
            tokens,
            worth_a_copy=2 * self._copy_seconds <= self.feed_seconds or not self.feed_seconds,
        )
        self._metrics.evicted(self.tree.evicted - evicted, self.tree.swapped - swapped)
        return any_evicted

    # Views for passes.

    def view(
        self, nodes: Mapping[int, Node], count: int
    ) -> tuple[KVCache, list[list[int]], dict[int, tuple[int, int]]]:
        """The cache of a pass of `count` rows, of which some write these nodes.

        Neighbouring extents are one block where the same rows see all of them.

        Returns:
          The cache with the rows' blocks; for each row the blocks that it sees; and for each of
            `nodes` (its own block, the tokens in that).
        """
        slots: dict[tuple[int, int, int], int] = {}
        spans: list[Extent] = []
        blocks: list[list[int]] = [[] for _ in range(count)]
        for row, node in nodes.items():
            for span in _merged_extents(node):
                key = span.offset, span.capacity, span.length
                if key not in slots:
                    slots[key] = len(spans)
                    spans.append(span)
                blocks[row].append(slots[key])
        self.width = max(self.width, bucket(max(map(len, blocks))))
        self._slots = max(self._slots, bucket(len(spans)))
        own = {row: (blocks[row][-1], spans[blocks[row][-1]].length) for row in nodes}
        return self.pool.view(spans, self._slots), blocks, own


@contextlib.contextmanager
def _pinned(path: list[Node]) -> Iterator[None]:
    """Keeps these nodes from being evicted."""
    for node in path:
        node.ref_count += 1
    yield
    for node in path:
        node.ref_count -= 1


def _merged_extents(node: Node) -> list[Extent]:
    """The blocks that a row sees which writes this node.

    Neighbours with equal `ref_count` are merged: all rows that see one of them see both.
    """
    spans: list[Extent] = []
    ref_count = -1
    for each in node.path():
        assert each.extent is not None
        if spans and ref_count == each.ref_count and spans[-1].precedes(each.extent):
            spans[-1].capacity += each.extent.capacity
            spans[-1].length += each.extent.length
        else:
            spans.append(dataclasses.replace(each.extent))
        ref_count = each.ref_count
    return spans


def ema(before: float, now: float) -> float:
    """Moving average with weight 0.1.

    A decrease replaces it, because the first sample includes compilation.
    """
    return now if not before else min(now, 0.9 * before + 0.1 * now)
