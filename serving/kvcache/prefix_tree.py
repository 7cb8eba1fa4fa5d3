"""The prefix tree: which runs of tokens have their keys and values where, and who may still need
them (Hydragen section 5's wish).

A radix tree over tokens. A call takes what it finds of its tokens, from the root on, and writes the
rest into a node of its own, which others find as it grows. A node is cut where a call leaves it in
the middle; nothing is copied then.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from jaxshare.serving.kvcache.policy import Policy, Segment, prefix_hash
from jaxshare.serving.kvcache.pool import Extent, HostCopy, Pool

LEAST_PIECE = 16
"""So many tokens that calls have in common are worth waiting for, and a block of their own."""


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """A run of tokens behind those of its parent.

    Attributes:
      tokens: int32; of a node that is being written those to come, too.
      parent: None for the root, and for what has left the tree.
      children: by their first token, those that have none yet under -1. Siblings that have less in
        common than is worth a node of its own stay as they are.
      extent: where its keys and values are on the accelerator, or None.
      copy: of them in host memory, or None.
      users: calls under way whose tokens go through it.
      writing: whether a call still writes to it.
      fresh: whether it may hold what a sibling holds, too, since it was begun before that was
        known.
      segment: what policies see of it.
    """

    tokens: np.ndarray
    parent: "Node | None"
    segment: Segment
    children: "dict[int, list[Node]]" = dataclasses.field(default_factory=dict)
    extent: Extent | None = None
    copy: HostCopy | None = None
    users: int = 0
    writing: bool = False
    fresh: bool = True

    @property
    def first(self) -> int:
        """Its first token; -1 where it has none."""
        return int(self.tokens[0]) if len(self.tokens) else -1

    @property
    def known(self) -> int:
        """Tokens whose keys and values are there."""
        return self.extent.length if self.extent else self.copy.tokens if self.copy else 0

    @property
    def may_leave(self) -> bool:
        """Whether it is on the accelerator, and neither a call nor a node below it needs it
        there."""
        return bool(
            self.extent
            and self.extent.length
            and not self.users
            and not any(child.extent for child in self.offspring())
        )

    def path(self) -> "list[Node]":
        """From the root's child to this."""
        path, node = [], self
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def offspring(self) -> "list[Node]":
        """Its children."""
        return [child for alike in self.children.values() for child in alike]

    def adopt(self, child: "Node") -> None:
        """Makes a node its child."""
        child.parent = self
        self.children.setdefault(child.first, []).append(child)

    def leave(self) -> None:
        """Leaves its parent."""
        assert self.parent is not None
        alike = self.parent.children[self.first]
        alike.remove(self)
        if not alike:
            del self.parent.children[self.first]
        self.parent = None

    def become(self, tokens: np.ndarray) -> None:
        """Has these tokens from now on."""
        parent, more = self.parent, len(tokens) - len(self.tokens)
        assert parent is not None
        found = bool(len(tokens)) == bool(len(self.tokens))  # where it was
        if not found:
            self.leave()
        self.tokens = tokens
        self.segment.tokens += more
        self.segment.depth += more
        if not found:
            parent.adopt(self)

    def below(self) -> "Iterator[Node]":
        """This and all below it."""
        stack = [self]
        while stack:
            yield (node := stack.pop())
            stack += node.offspring()


@dataclasses.dataclass(frozen=True)
class Match:
    """What a call finds of its tokens.

    Attributes:
      node: the last node on the way of which it uses something; the root for none.
      within: how many of that node's tokens.
      tokens: how many in all.
      coming: how many more of them will be there once a call that is under way has got to them.
    """

    node: Node
    within: int
    tokens: int
    coming: int


class PrefixTree:
    """The nodes, and what of them is on the accelerator and in host memory.

    Args:
      pool: the accelerator's memory.
      policy: says what leaves first.
      host_tokens: that may be kept in host memory.

    Attributes:
      now: the number of the call that was admitted last.
      evicted: tokens that have left the accelerator, and of those `swapped` that went to host
        memory; dropped: that are nowhere any more.
    """

    def __init__(self, pool: Pool, policy: Policy, host_tokens: int):
        self.pool, self.policy, self.host_tokens = pool, policy, host_tokens
        self.root = Node(np.zeros(0, np.int32), None, Segment(0, b"", 0, {}))
        self.now = 0
        self.host_used = self.evicted = self.swapped = self.dropped = 0

    def match(self, tokens: np.ndarray, most: int) -> Match:
        """What is known of the first `most` of these tokens."""
        node, within, at = self.root, 0, 0
        while at < most:
            best, known, coming = None, 0, 0
            for child in node.children.get(int(tokens[at]), ()):
                common = _common(child.tokens, tokens[at:most])
                if (there := min(common, child.known)) > known:
                    best, known = child, there
                coming = max(coming, common if child.writing else 0)
            if coming > known or best is None:
                return Match(best or node, known or within, at + known, coming - known)
            node, within, at = best, known, at + known
            if known < len(best.tokens):
                break
        return Match(node, within, at, 0)

    def cut(self, node: Node, at: int) -> Node:
        """Makes two of a node: what is returned has its first `at` tokens, all of them known, and
        the node itself the rest. Of a node that is being written that may be nothing yet."""
        assert (
            node.parent is not None
            and 0 < at <= node.known
            and (at < len(node.tokens) or node.writing)
        )
        old, parent = node.segment, node.parent
        segment = dataclasses.replace(
            old, tokens=at, depth=old.depth - old.tokens + at, owners=dict(old.owners), end=b""
        )
        head = Node(node.tokens[:at], None, segment, users=node.users, fresh=node.fresh)
        if node.extent:
            head.extent = self.pool.fork(node.extent, at)
        if node.copy:
            head.copy, node.copy = node.copy.fork(at)
        node.leave()
        node.tokens = node.tokens[at:]
        parent.adopt(head)
        head.adopt(node)
        old.tokens -= at
        segment.end = _digest(head)
        self.policy.split(head.segment, old)
        return head

    def append(self, parent: Node, tokens: np.ndarray, extent: Extent) -> Node:
        """A new node that is to be written, by a call that is to `use` it."""
        segment = Segment(len(tokens), b"", parent.segment.depth + len(tokens), {})
        node = Node(tokens, None, segment, extent=extent, writing=True)
        parent.adopt(node)
        return node

    def extend(self, node: Node, tokens: Sequence[int]) -> None:
        """More tokens are to be written to a node."""
        node.become(np.concatenate([node.tokens, np.asarray(tokens, np.int32)]))

    def shorten(self, node: Node) -> np.ndarray:
        """Takes off a node's tokens what is not written: that."""
        behind = node.tokens[node.known :]
        node.become(node.tokens[: node.known])
        return behind

    def follow(self, node: Node, extent: Extent) -> Node:
        """Who writes a node goes on in another extent: the node that is written now."""
        if not node.known:
            assert node.extent is not None
            self.pool.give_back(node.extent)
            node.extent = extent
            return node
        after = self.append(node, self.shorten(node), extent)
        node.writing, after.users = False, 1
        return after

    def finish(self, node: Node) -> None:
        """A call has ended that has written a node, and was counted off: gives back what it has not
        used, and what is known twice."""
        assert node.extent is not None
        node.writing = False
        self.shorten(node)
        self.pool.trim(node.extent)
        path = node.path()
        if not len(node.tokens):
            node.leave()
            self.policy.gone(node.segment)
        for each in path:
            if each.fresh and len(each.tokens):
                each.segment.end = _digest(each)
                self._settle(each)

    def _settle(self, node: Node) -> None:
        """What a node holds that a sibling holds, too, is held once from now on."""
        while True:
            assert node.parent is not None
            alike = [twin for twin in node.parent.children[int(node.tokens[0])] if twin is not node]
            common, twin = max(
                (
                    (min(_common(twin.tokens, node.tokens), twin.known), i)
                    for i, twin in enumerate(alike)
                ),
                default=(0, 0),
            )
            if common < min(LEAST_PIECE, len(node.tokens)):
                break
            twin = alike[twin]
            twin = self.cut(twin, common) if common < len(twin.tokens) or twin.writing else twin
            head = self.cut(node, common) if common < len(node.tokens) else node
            self._absorb(head, twin)
            if head is node:
                return
        node.fresh = False

    def _absorb(self, node: Node, twin: Node) -> None:
        """A node goes; another one with the same tokens takes its place."""
        assert node.extent is not None
        node.leave()
        if twin.extent:
            self.pool.give_back(node.extent)
        else:
            twin.extent = node.extent
            self._forget_copy(twin)
        twin.users += node.users
        for child in node.offspring():
            child.leave()
            twin.adopt(child)
        for owner, count in node.segment.owners.items():
            twin.segment.owners[owner] = twin.segment.owners.get(owner, 0) + count
        node.extent = None
        self.policy.gone(node.segment)
        self.policy.used(twin.segment, self.now)  # by these, too

    def use(self, node: Node, agent: str, priority: int) -> None:
        """A call is admitted, and goes through a node and all above it."""
        for each in node.path():
            each.users += 1
            segment = each.segment
            segment.last_used, segment.uses, segment.priority = (
                self.now,
                segment.uses + 1,
                max(segment.priority, priority),
            )
            segment.owners[agent] = segment.owners.get(agent, 0) + 1
            self.policy.used(segment, self.now)
        self.now += 1

    # What leaves.

    def make_room(self, wanted: int, worth_a_copy: bool) -> bool:
        """Lets nodes leave the accelerator until so many tokens are free: the least valuable first,
        of those that nobody uses and that have none below them there; False if none leaves.

        Args:
          wanted: tokens; of a node that is more than twice as large the first part stays.
          worth_a_copy: whether fetching a copy is cheaper than reading the tokens in again.
        """
        if self.pool.free >= wanted:
            return False
        leaving = [
            (self.policy.rank(node.segment, self.now), n, node)
            for n, node in enumerate(self.root.below())
            if node.may_leave
        ]
        heapq.heapify(leaving)
        numbers, left = itertools.count(-1, -1), False
        while leaving and self.pool.free < wanted:
            _, _, node = heapq.heappop(leaving)
            above, left = node.parent, True
            # The end of a long run is the least useful part of it: what begins it may begin other
            # calls, too. But what is cut often is in many pieces, and so is what is free.
            if len(node.tokens) > 2 * wanted:
                above = self.cut(node, len(node.tokens) - wanted)
            self.leave(node, worth_a_copy)
            if above and above.may_leave:
                heapq.heappush(
                    leaving, (self.policy.rank(above.segment, self.now), next(numbers), above)
                )
        return left

    def idle(self) -> int:
        """Tokens on the accelerator that nobody uses."""
        return sum(
            node.extent.length for node in self.root.below() if node.extent and not node.users
        )

    def leave(self, node: Node, worth_a_copy: bool) -> None:
        """Takes a node off the accelerator: to host memory if it is worth it and there is room, or
        away."""
        assert node.extent is not None and not node.users
        tokens = node.extent.length
        self.evicted += tokens
        if worth_a_copy and self._make_host_room(tokens):
            node.copy = self.pool.read(node.extent)
            self.host_used += tokens
            self.swapped += tokens
        self.pool.give_back(node.extent)
        node.extent = None
        if node.copy is None:
            self.dropped += tokens
            self._remove(node)

    def _make_host_room(self, tokens: int) -> bool:
        if tokens > self.host_tokens:
            return False
        while self.host_used + tokens > self.host_tokens:
            copies = [
                node
                for node in self.root.below()
                if node.copy and not node.children and not node.users
            ]
            if not copies:
                return False
            node = min(copies, key=lambda node: self.policy.rank(node.segment, self.now))
            self.dropped += len(node.tokens)
            self._remove(node)
        return True

    def fetch(self, node: Node, extent: Extent) -> None:
        """Brings a node from host memory into an empty extent of its size."""
        assert node.copy is not None
        self.pool.write(extent, node.copy)
        node.extent = extent
        self._forget_copy(node)

    def _forget_copy(self, node: Node) -> None:
        if node.copy:
            self.host_used -= node.copy.tokens
            node.copy = None

    def _remove(self, node: Node) -> None:
        """Takes a node that is nowhere any more out of the tree, and the copies below it, which are
        of no use without it."""
        assert node.extent is None
        for lost in node.below():
            self.dropped += lost.copy.tokens if lost.copy and lost is not node else 0
            self._forget_copy(lost)
            self.policy.gone(lost.segment)
        node.leave()


def _digest(node: Node) -> bytes:
    return prefix_hash(np.concatenate([each.tokens for each in node.path()]))


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two runs have in common from the beginning."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    return int(differ.argmax()) if differ.any() else length
