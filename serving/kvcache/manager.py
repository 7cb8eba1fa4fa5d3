"""The KV manager: allocates keys and values from the pool and the prefix tree, evicts what no
request uses, and builds the cache and the blocks of each pass."""

import collections
import contextlib
import enum
import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

import jax
import numpy as np

from jaxshare.models import LoadedModel
from jaxshare.serving.kvcache.policy import Observation, Policy, SearchPlace
from jaxshare.serving.kvcache.pool import Extent, Pool
from jaxshare.serving.kvcache.prefix_tree import MIN_SHARED_TOKENS, Match, Node, PrefixTree
from jaxshare.serving.kvcache.sharing_cost import PRIVATE_TILE, load_costs
from jaxshare.serving.kvcache.speeds import FixedSpeeds

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
      agent, priority, place: for the policy.
      adapter_key: the digest of its adapter, whose keys and values it alone reads; empty for none.
      waited: whether it has waited for another one to compute a prefix; set by the manager.
      cuts: the numbers of its first tokens at which blocks end that other requests read too,
        ascending, where that is planned; None where the manager decides. Planned requests share
        nothing else, and have memory for all that may come from the start.
    """

    waited: bool

    @property
    def tokens(self) -> np.ndarray: ...
    @property
    def remaining(self) -> int: ...
    @property
    def agent(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def place(self) -> SearchPlace | None: ...
    @property
    def adapter_key(self) -> bytes: ...
    @property
    def cuts(self) -> Sequence[int] | None: ...


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
      policy: the order of eviction.
      metrics: counters of evicted and fetched tokens.
      speeds: of prefill and of copies; whether to keep or to compute again follows from them.

    Attributes:
      pool, tree: the memory and the cached prefixes.
      leased, leased_tokens: the extents of sessions, and their tokens.
      speeds: as given.
      costs: by which it is decided whether to read tokens as a block of their own.
      view_changed: whether the blocks differ from those of the last view of decoding rows; the
        scheduler resets it.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        tokens: int,
        host_tokens: int,
        policy: Policy,
        metrics: KVMetrics,
        speeds: FixedSpeeds,
    ):
        self.view_changed, self.speeds = True, speeds
        self._model, self._tokens, self._host_tokens = model, tokens, host_tokens
        self._policy, self._metrics = policy, metrics
        self._start()
        self.costs, self._layers = load_costs(model), model.config.num_layers

    def reset(self) -> None:
        """Empties pool and tree, and ends all leases."""
        self.pool.free_arrays()  # first: a full device has no room for two arenas
        self._start()

    def _start(self) -> None:
        self.pool = Pool(self._model, self._tokens)
        self.tree = PrefixTree(self.pool, self._policy, self._host_tokens)
        self.leased: set[Extent] = set()
        self.leased_tokens = 0
        self._unattached: list[Extent] = []  # taken, but of no node yet
        self.view_changed = True

    # Requests.

    def allocate(self, request: KVRequest, running: int, *, afresh: bool = False) -> Node | Wait:
        """Gives a request a node for its uncached tokens and some new ones, or a reason to wait.

        The tokens between its cuts get nodes of their own before it.

        Args:
          request: the request.
          running: running requests of its agent, this one included.
          afresh: ignore cached prefixes, which may themselves fill the memory.
        """
        tokens, tree, planned = request.tokens, self.tree, request.cuts is not None
        cuts = [cut for cut in request.cuts or () if cut <= len(tokens)]
        max_matched = max(cuts, default=0) if planned else len(tokens) - 1
        adapter = request.adapter_key
        match = tree.match(tokens, 0 if afresh else max_matched, adapter)
        if match.tokens == len(tokens) and match.node.logits is None:
            match = tree.match(
                tokens, len(tokens) - 1, adapter
            )  # the last one is fed for its logits
        if match.in_flight >= (1 if planned else MIN_SHARED_TOKENS) and self._waits(match, request):
            request.waited = True
            return Wait.IN_FLIGHT
        parent = self._branch_at(match, request)
        path, num_cached = parent.path(), parent.segment.depth
        ends = [num_cached, *(cut for cut in cuts if cut > num_cached), len(tokens)]
        runs = [tokens[start:end] for start, end in itertools.pairwise(ends)]
        growth = request.remaining if planned else min(request.remaining, GROWTH)
        extents = self._extents_after(path, [*map(len, runs)], growth, private=planned)
        if extents is None:
            return Wait.MEMORY
        shared = collections.Counter[str]()
        for node in path:
            # In an order that is the same in every process, as policies add what they are told.
            others = [owner for owner in node.segment.owners if owner != request.agent]
            shared.update(dict.fromkeys(others, len(node.tokens)))
        self._policy.observe(
            Observation(
                request.agent, tree.now, len(tokens), num_cached, shared, running, request.place
            )
        )
        node = parent
        for run, extent in zip(runs, extents, strict=True):
            private = planned and extent is extents[-1]
            node = tree.add(node, run, extent, private=private, adapter=adapter)
        tree.use(node, request.agent, request.priority)
        self.view_changed = True
        return node

    def cached_prefix(self, request: KVRequest) -> int:
        """The number of a request's tokens that are on the accelerator or in host memory.

        0 for planned ones, which keep their order.
        """
        if request.cuts is not None:
            return 0
        tokens = request.tokens
        return self.tree.match(tokens, len(tokens), request.adapter_key).tokens

    def prepare(self, request: KVRequest) -> None:
        """Evicts what the next request would evict, where that needs no copy."""
        tokens = request.tokens
        match = self.tree.match(tokens, len(tokens) - 1, request.adapter_key)
        needed = len(tokens) - match.tokens + min(request.remaining, GROWTH)
        in_flight = match.in_flight >= MIN_SHARED_TOKENS
        if not self._host_tokens and not in_flight and self.pool.free < needed:
            with _pinned(match.node.path()):
                if self.tree.can_be_free(needed):
                    self._evict(needed)

    def _waits(self, match: Match, request: KVRequest) -> bool:
        """Returns whether a request waits for what another one is about to write.

        Not where that would not be worth a block of its own: it would be computed again anyway.
        """
        if request.cuts is not None or match.writer is None:
            return True
        return self._worth_splitting(match.common, match.writer, request)

    def _branch_at(self, match: Match, request: KVRequest) -> Node:
        """The parent of a request's own node.

        The matched node is split where the request parts from it, if that is worth it.
        """
        node, inside = match.node, match.node_tokens < len(match.node.tokens)
        if node is self.tree.root:
            return node
        assert node.parent is not None
        if (
            request.cuts is None
            and inside
            and not self._worth_splitting(match.node_tokens, node, request)
        ):
            return node.parent
        return self.tree.split(node, match.node_tokens) if inside or node.writing else node

    def _worth_splitting(self, tokens: int, node: Node, request: KVRequest) -> bool:
        """Returns whether a node's first tokens are worth a block that all its requests read
        together.

        The cost rule of branches gives the cost in every pass that the request will need; the gain
        is that the tokens need not be prefilled again. Where no other request runs, a node is read
        as one block with the nodes before it, and costs nothing. A request that has waited for them
        does not compute them again. A few tokens at the very beginning are common to all prompts,
        so they would soon be a block of all rows.
        """
        rows, costs = node.ref_count + 1, self.costs
        if rows < 2 or tokens < MIN_SHARED_TOKENS:
            at_root = node.parent is self.tree.root
            return rows < 2 and (not at_root or tokens >= MIN_SHARED_TOKENS)
        if request.waited:
            return True
        more = costs.shared(tokens, rows) - rows * (
            costs.private(PRIVATE_TILE + tokens) - costs.private(PRIVATE_TILE)
        )
        gain = tokens * self.speeds.feed_seconds  # 0 where it is not known
        return not gain or more * 1e-6 * self._layers * request.remaining <= gain

    def _extents_after(
        self, path: list[Node], sizes: Sequence[int], growth: int, *, private: bool
    ) -> list[Extent] | None:
        """Extents of these sizes after these nodes, all of which are swapped in.

        The last one is larger by `growth`; if it is not private, as far as there is memory. None if
        all of them cannot be free, and then nothing is evicted in vain.
        """
        sizes = [*sizes[:-1], sizes[-1] + growth] if private else sizes
        growth, needed = 0 if private else growth, sum(sizes)
        with _pinned(path):
            available = self.pool.free - sum(len(node.tokens) for node in path if node.copy)
            if available < needed + growth:
                available += self.tree.unused_tokens(needed + growth - available)
            if available < needed or not all(self._swap_in(node) for node in path):
                return None
            extents = self._unattached
            for i, size in enumerate(sizes):
                last = i == len(sizes) - 1
                more = min(growth, available - needed) if last else 0
                extent = self._take(size + more, high=private and last) or self._take(size)
                if extent is None:
                    for taken in extents:
                        self.pool.give_back(taken)
                    extents.clear()
                    return None
                extents.append(extent)
        self._unattached = []
        return extents

    def _swap_in(self, node: Node) -> bool:
        """Fetches a node from host memory if it is there; False if there is no memory for it."""
        if not node.copy:
            return True
        extent = self._take(len(node.tokens))
        if extent is None:
            return False
        with self.speeds.copying(len(node.tokens)):
            self.tree.swap_in(node, extent)
            jax.block_until_ready(self.pool.cache.keys[0])
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
        """Releases the node of a finished or preempted request; its tokens stay for reuse.

        Private nodes are dropped.
        """
        path = node.path()
        for each in path:
            each.ref_count -= 1
        for each in reversed(path):
            if each.private:
                # What other weights have computed may be of several requests.
                if not each.ref_count and not each.children:
                    self.tree.drop(each)
            elif each.writing:
                self.tree.finish(each)
        self.view_changed = True

    def forget(self, adapter: bytes | None = None) -> None:
        """Forgets cached tokens, also those in host memory; see `PrefixTree.forget`."""
        evicted = self.tree.evicted
        self.tree.forget(adapter)
        self._metrics.evicted(self.tree.evicted - evicted, 0)
        self.view_changed = True

    def use(self, model: LoadedModel) -> None:
        """Goes on with other weights of the same model."""
        self._model = model

    @property
    def cached_tokens(self) -> int:
        """Tokens on the accelerator, those that no request uses included."""
        nodes = self.tree.root.subtree()
        return sum(node.extent.length for node in nodes if node.extent)

    # Pinned prefixes.

    def pin(self, parent: Node | None, tokens: np.ndarray) -> Node | None:
        """A node for tokens after those of its parent, to be prefilled, that is never evicted.

        Returns:
          The node, or None where there is no memory for it.
        """
        extent = self._take(len(tokens))
        if extent is None:
            return None
        adapter = self._model.adapter.digest if self._model.adapter else b""
        node = self.tree.add(parent or self.tree.root, tokens, extent, adapter=adapter)
        for each in node.path():
            each.ref_count += 1
        return node

    def unpin(self, node: Node) -> None:
        """Drops a pinned node that nothing else uses."""
        for each in node.path():
            each.ref_count -= 1
        self.drop_unused()

    def drop_unused(self) -> None:
        """Drops all that no request uses and that is not pinned."""
        while unused := [node for node in self.tree.root.subtree() if node.evictable]:
            for node in unused:
                self.tree.evict_node(node, worth_a_copy=False)
        self.view_changed = True

    # Sessions.

    def lease(self, tokens: int) -> Extent | None:
        """Leases an extent to a session; None if requests use the memory."""
        extent = self._take(tokens) if self.tree.can_be_free(tokens) else None
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

    def _take(self, tokens: int, *, high: bool = False) -> Extent | None:
        """Takes an extent from the pool, after evicting and compacting as far as needed."""
        while (extent := self.pool.take(tokens, high=high)) is None:
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
        others = itertools.chain(self.leased, self._unattached)
        compacted = self.pool.compact(itertools.chain(cached, others), tokens, within)
        self.view_changed |= compacted
        return compacted

    def _evict(self, tokens: int) -> bool:
        """Evicts nodes until `tokens` are free; False if none was evicted."""
        evicted, swapped = self.tree.evicted, self.tree.swapped
        # Fetching a copy takes about as long as making it.
        any_evicted = self.tree.evict(
            tokens,
            worth_a_copy=2 * self.speeds.copy_seconds <= self.speeds.feed_seconds
            or not self.speeds.feed_seconds,
        )
        self._metrics.evicted(self.tree.evicted - evicted, self.tree.swapped - swapped)
        return any_evicted


@contextlib.contextmanager
def _pinned(path: list[Node]) -> Iterator[None]:
    """Keeps these nodes from being evicted."""
    for node in path:
        node.ref_count += 1
    yield
    for node in path:
        node.ref_count -= 1
