"""Memory: the pool and the prefix tree under one roof. Finds what is known of a call, makes room
for the rest, and says what passes see."""

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
from jaxshare.serving.kvcache.prefix_tree import LEAST_PIECE, Match, Node, PrefixTree
from jaxshare.serving.kvcache.sharing_cost import PRIVATE_TILE, load_costs

GROWTH = 256
"""Tokens of room that a row is given at a time."""
_SHORT = 16
"""A hole is made by moving what lies within so many times its size, as long as something can leave
instead."""
_SPARE = 16
"""What leaves instead, at most until this part of the memory is free: then what is free is not far
from itself."""


class KVRequest(Protocol):
    """What memory is given to: the tokens that are known of a request, how many may still come, and
    who asks. `jaxshare.serving.engine.request` has it."""

    @property
    def tokens(self) -> np.ndarray: ...
    @property
    def left(self) -> int: ...
    @property
    def agent(self) -> str: ...
    @property
    def priority(self) -> int: ...


class KVMetrics(Protocol):
    """What counts the tokens that leave the accelerator and come back.
    `jaxshare.serving.engine.metrics` does."""

    def fetched(self, tokens: int) -> None: ...
    def evicted(self, tokens: int, swapped: int) -> None: ...


class Wait(enum.Enum):
    """Why a call is not placed yet."""

    ROOM = "there is no room for it"
    OTHERS = "another call is about to read what it begins with"


class KVManager:
    """Where keys and values are.

    Args:
      model: as loaded.
      tokens: that fit on the accelerator; host_tokens: that may be kept in host memory.
      rows: calls that run at a time.
      policy: says what leaves first.
      metrics: is told what leaves and what comes back.

    Attributes:
      pool, tree: what is where.
      lent, lent_tokens: what sessions have, and how many tokens that is.
      width: blocks that a row may list, as far as any has so far.
      moved: whether something else is to be seen than in the last view.
      feed_seconds: a token took to be fed, as measured last; 0 for never. The loop measures it.
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
        self.moved, self.feed_seconds = True, 0.0
        self._copy_seconds = 0.0  # as feed_seconds
        self._model, self._tokens, self._host_tokens, self._policy, self._metrics = (
            model,
            tokens,
            host_tokens,
            policy,
            metrics,
        )
        self.restart()
        self._costs, self._layers = load_costs(model), model.config.num_layers
        self.width, self._slots = 8, 8 * rows

    def restart(self) -> None:
        """Nothing is known any more."""
        self.pool = Pool(self._model, self._tokens)
        self.tree = PrefixTree(self.pool, self._policy, self._host_tokens)
        self.lent: set[Extent] = set()
        self.lent_tokens = 0
        self.moved = True

    # Calls.

    def place(self, call: KVRequest, running: int, *, afresh: bool = False) -> Node | Wait:
        """Gives a call memory: a node of its own, with room for what is to be fed and what may come
        next.

        Args:
          call: which.
          running: calls of its agent that are under way, this one included.
          afresh: look for nothing that is known: that may lie in the way.
        """
        tokens, tree = call.tokens, self.tree
        match = Match(tree.root, 0, 0, 0) if afresh else tree.match(tokens, len(tokens) - 1)
        if match.coming >= LEAST_PIECE:
            return Wait.OTHERS
        base = self._base(match, call)
        path, known = base.path(), base.segment.depth
        rest = tokens[known:]
        extent = self._room_behind(path, len(rest), len(rest) + min(call.left, GROWTH))
        if extent is None:
            return Wait.ROOM
        owned = collections.Counter[str]()
        for node in path:
            owned.update(dict.fromkeys(node.segment.owners.keys() - {call.agent}, len(node.tokens)))
        self._policy.observe(Observation(call.agent, tree.now, len(tokens), known, owned, running))
        node = tree.append(base, rest, extent)
        tree.use(node, call.agent, call.priority)
        self.moved = True
        return node

    def prepare(self, call: KVRequest) -> None:
        """Lets go of what would have to leave for a call that comes next, where that takes no
        copy."""
        tokens = call.tokens
        match = self.tree.match(tokens, len(tokens) - 1)
        wanted = len(tokens) - match.tokens + min(call.left, GROWTH)
        if not self._host_tokens and match.coming < LEAST_PIECE and self.pool.free < wanted:
            with _kept(match.node.path()):
                if self.pool.free + self.tree.idle() >= wanted:
                    self._let_go(wanted)

    def _base(self, match: Match, call: KVRequest) -> Node:
        """The node behind which a call's own tokens come; it is cut where the call leaves it in the
        middle, if that is worth it."""
        node, cut = match.node, match.within < len(match.node.tokens)
        if node is self.tree.root:
            return node
        assert node.parent is not None
        if cut and not self._pays(match.within, node, call):
            return node.parent
        return self.tree.cut(node, match.within) if cut or node.writing else node

    def _pays(self, tokens: int, node: Node, call: KVRequest) -> bool:
        """Whether the first tokens of a node are worth a block of their own, which the call and all
        that use the node now read together.

        The cost rule of branches says what that costs in every pass that the call will need; to be
        set against it is that the tokens need not be fed again. Where nobody else is under way a
        piece is read in one with what stands before it, and costs nothing. A few tokens at the very
        beginning are what all prompts have there, so they would soon be a block of all rows.
        """
        rows, costs = node.users + 1, self._costs
        if rows < 2 or tokens < LEAST_PIECE:
            return rows < 2 and (node.parent is not self.tree.root or tokens >= LEAST_PIECE)
        more = costs.shared(tokens, rows) - rows * (
            costs.private(PRIVATE_TILE + tokens) - costs.private(PRIVATE_TILE)
        )
        return (
            more * 1e-6 * self._layers * call.left <= tokens * self.feed_seconds
            or not self.feed_seconds
        )

    def _room_behind(self, path: list[Node], least: int, wanted: int) -> Extent | None:
        """An extent for what comes behind these nodes, all of which are brought back; None if there
        is no room, and then nothing leaves in vain."""
        with _kept(path):
            there = self.pool.free - sum(len(node.tokens) for node in path if node.copy)
            there += self.tree.idle() if there < wanted else 0
            if there >= least and all(self._bring(node) for node in path):
                return self._room(min(wanted, there)) or self._room(least)
        return None

    def _bring(self, node: Node) -> bool:
        """Fetches a node from host memory if it is there; False if there is no room."""
        if not node.copy:
            return True
        extent = self._room(len(node.tokens))
        if extent is None:
            return False
        begin = time.perf_counter()
        self.tree.fetch(node, extent)
        jax.block_until_ready(self.pool.cache.keys[0])
        self._copy_seconds = ema(
            self._copy_seconds, (time.perf_counter() - begin) / len(node.tokens)
        )
        self._metrics.fetched(len(node.tokens))
        self.moved = True
        return True

    def grow(self, node: Node, wanted: int) -> None:
        """Gives a node that is written more room if what lies behind it is free; for so many
        tokens, or a part of them."""
        assert node.extent is not None
        self.moved |= self.pool.grow(node.extent, min(wanted, GROWTH))

    def more(self, node: Node, wanted: int) -> Node | None:
        """Gives who writes a node more room, there or behind it, for so many tokens or a part of
        them: the node that is written now, or None if nothing is left that can go."""
        assert node.extent is not None
        wanted = min(wanted, GROWTH)
        while not self.pool.grow(node.extent, wanted):
            if extent := self.pool.take(wanted):
                node = self.tree.follow(node, extent)
                break
            if self._clear(wanted):
                continue
            if wanted == 1:
                return None
            wanted //= 2
        self.moved = True
        return node

    def release(self, node: Node) -> None:
        """A call is over, or makes way, that has written this node; what it has written stays, for
        whoever may want it."""
        for each in node.path():
            each.users -= 1
        self.tree.finish(node)
        self.moved = True

    # Sessions.

    def lend(self, tokens: int) -> Extent | None:
        """Room for a session, until it is taken back; None if calls are in the way."""
        extent = self._room(tokens) if self.pool.free + self.tree.idle() >= tokens else None
        if extent:
            self.lent.add(extent)
            self.lent_tokens += tokens
        return extent

    def take_back(self, extent: Extent) -> None:
        """A session has ended."""
        if extent in self.lent:  # else it was there before a failure
            self.lent.remove(extent)
            self.lent_tokens -= extent.capacity
            self.pool.give_back(extent)

    # Room.

    def _room(self, tokens: int) -> Extent | None:
        """An extent for so many tokens. What nobody uses leaves for it until as much is free; what
        lies between is then moved away."""
        while (extent := self.pool.take(tokens)) is None:
            if not self._clear(tokens):
                return None
        return extent

    def _clear(self, tokens: int) -> bool:
        """Gets nearer to a hole of so many tokens; False if nothing more can be done. Where much
        would have to be moved for it, something more leaves instead."""
        return (
            self._pack(tokens, _SHORT * tokens)
            or self._let_go(tokens)
            or self._let_go(self.pool.tokens // _SPARE)
            or self._pack(tokens)
        )

    def _pack(self, tokens: int, within: int | None = None) -> bool:
        """Makes a hole of so many tokens of what is free within so many places; False if it is
        not."""
        if self.pool.free < tokens:
            return False
        # looked through where there is something to move
        held = (node.extent for node in self.tree.root.below() if node.extent)
        packed = self.pool.pack(itertools.chain(held, self.lent), tokens, within)
        self.moved |= packed
        return packed

    def _let_go(self, tokens: int) -> bool:
        """Lets nodes leave until so many tokens are free; False if none leaves."""
        evicted, swapped = self.tree.evicted, self.tree.swapped
        # Fetching a copy takes about as long as making it.
        found = self.tree.make_room(
            tokens,
            worth_a_copy=2 * self._copy_seconds <= self.feed_seconds or not self.feed_seconds,
        )
        self._metrics.evicted(self.tree.evicted - evicted, self.tree.swapped - swapped)
        return found

    # What passes see.

    def view(
        self, nodes: Mapping[int, Node], count: int
    ) -> tuple[KVCache, list[list[int]], dict[int, tuple[int, int]]]:
        """For rows that write these nodes, of `count` in all.

        Runs that were cut are read as one where the same rows see all of them.

        Returns:
          The cache with what they see as its blocks, for each row those that it sees, and for each
            of `nodes` (its own block, tokens in
          that).
        """
        slots: dict[tuple[int, int, int], int] = {}
        spans: list[Extent] = []
        listed: list[list[int]] = [[] for _ in range(count)]
        for row, node in nodes.items():
            for span in _spans(node):
                key = span.offset, span.capacity, span.length
                if key not in slots:
                    slots[key] = len(spans)
                    spans.append(span)
                listed[row].append(slots[key])
        self.width = max(self.width, bucket(max(map(len, listed))))
        self._slots = max(self._slots, bucket(len(spans)))
        own = {row: (listed[row][-1], spans[listed[row][-1]].length) for row in nodes}
        return self.pool.view(spans, self._slots), listed, own


@contextlib.contextmanager
def _kept(path: list[Node]) -> Iterator[None]:
    """These nodes stay meanwhile."""
    for node in path:
        node.users += 1
    yield
    for node in path:
        node.users -= 1


def _spans(node: Node) -> list[Extent]:
    """The blocks that a row sees which writes this node. All rows that see one of two neighbours
    see both where as many use them."""
    spans: list[Extent] = []
    users = -1
    for each in node.path():
        assert each.extent is not None
        if spans and users == each.users and spans[-1].goes_on_in(each.extent):
            spans[-1].capacity += each.extent.capacity
            spans[-1].length += each.extent.length
        else:
            spans.append(dataclasses.replace(each.extent))
        users = each.users
    return spans


def ema(before: float, now: float) -> float:
    """A time that was measured again. The first one is long, since something is compiled: less is
    believed at once, more by and by."""
    return now if not before else min(now, 0.9 * before + 0.1 * now)
