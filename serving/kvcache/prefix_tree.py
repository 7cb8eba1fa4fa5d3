"""The prefix tree: cached runs of tokens, their keys and values, and the requests that use them
(Hydragen section 5's wish).

A radix tree over tokens. A request uses the cached prefix of its tokens and writes the rest into a
node of its own, which others match while it grows. A node is split where a request parts from it;
nothing is copied then.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Sequence

import numpy as np

from jaxshare.serving.kvcache.policy import Policy, Segment, common_prefix
from jaxshare.serving.kvcache.pool import Extent, Pool
from jaxshare.serving.kvcache.prefix_node import MIN_SHARED_TOKENS, path_hash
from jaxshare.serving.kvcache.prefix_node import Node as Node


@dataclasses.dataclass(frozen=True)
class Match:
    """The cached prefix of a request's tokens.

    Attributes:
      node: the last node that it goes through; the root for none.
      node_tokens: how many of that node's tokens belong to it.
      tokens: its length.
      in_flight: tokens after it that a running request is about to write.
      writer: the node that this request writes, or None; common: its first tokens that are meant.
    """

    node: Node
    node_tokens: int
    tokens: int
    in_flight: int
    writer: Node | None = None
    common: int = 0


class PrefixTree:
    """The nodes, and their tokens on the accelerator and in host memory.

    Args:
      pool: the accelerator's memory.
      policy: the order of eviction.
      host_tokens: the capacity of host memory.

    Attributes:
      now: the number of the request that was admitted last.
      host_used: tokens in host memory.
      evicted: tokens that have left the accelerator; swapped: those of them that went to host
        memory; dropped: tokens that are in no memory any more.
    """

    def __init__(self, pool: Pool, policy: Policy, host_tokens: int):
        self.pool, self.policy, self.host_tokens = pool, policy, host_tokens
        self.root = Node(np.zeros(0, np.int32), None, Segment(0, b"", 0, {}))
        self.now = 0
        self.host_used = self.evicted = self.swapped = self.dropped = 0

    def match(self, tokens: np.ndarray, max_tokens: int, adapter: bytes = b"") -> Match:
        """Matches the first `max_tokens` of these tokens, as computed with an adapter."""
        node, node_tokens, matched = self.root, 0, 0
        while matched < max_tokens:
            best, cached, in_flight, writer = None, 0, 0, None
            for child, common in node.nearest(tokens[matched:max_tokens], adapter):
                if common < MIN_SHARED_TOKENS and common <= cached:
                    break  # all that follow have no more
                if child.private:
                    continue
                if (usable := min(common, child.num_cached)) > cached:
                    best, cached = child, usable
                if child.writing and common > in_flight:
                    in_flight, writer = common, child
            if in_flight > cached or best is None:
                return Match(
                    best or node,
                    cached or node_tokens,
                    matched + cached,
                    in_flight - cached,
                    writer,
                    in_flight,
                )
            node, node_tokens, matched = best, cached, matched + cached
            if cached < len(best.tokens):
                break
        return Match(node, node_tokens, matched, 0)

    def split(self, node: Node, length: int) -> Node:
        """Splits a node.

        Returns:
          A new node of its first `length` tokens, all of them cached; the node itself becomes the
            rest, which may be empty while it is written.
        """
        assert (
            node.parent is not None
            and 0 < length <= node.num_cached
            and (length < len(node.tokens) or node.writing)
        )
        old, parent = node.segment, node.parent
        segment = dataclasses.replace(
            old,
            tokens=length,
            depth=old.depth - old.tokens + length,
            owners=dict(old.owners),
            prefix_hash=b"",
        )
        head = Node(
            node.tokens[:length], None, segment, ref_count=node.ref_count, unmerged=node.unmerged
        )
        head.adapter = node.adapter
        if node.extent:
            head.extent = self.pool.split(node.extent, length)
        if node.copy:
            head.copy, node.copy = node.copy.split(length)
        node.detach()
        node.tokens = node.tokens[length:]
        parent.attach(head)
        head.attach(node)
        old.tokens -= length
        segment.prefix_hash = path_hash(head)
        self.policy.split(head.segment, old)
        return head

    def add(
        self,
        parent: Node,
        tokens: np.ndarray,
        extent: Extent,
        *,
        private: bool = False,
        adapter: bytes = b"",
    ) -> Node:
        """Adds a node that is to be written, by a request that is to `use` it. Below the root its
        adapter is its parent's."""
        segment = Segment(len(tokens), b"", parent.segment.depth + len(tokens), {})
        node = Node(tokens, None, segment, extent=extent, writing=True, private=private)
        node.adapter = parent.adapter or adapter
        parent.attach(node)
        return node

    def append_tokens(self, node: Node, tokens: Sequence[int]) -> None:
        """Appends tokens that are to be written to a node."""
        node.set_tokens(np.concatenate([node.tokens, np.asarray(tokens, np.int32)]))

    def remove_unwritten(self, node: Node) -> np.ndarray:
        """Removes the tokens of a node that are not cached, and returns them."""
        unwritten = node.tokens[node.num_cached :]
        node.set_tokens(node.tokens[: node.num_cached])
        return unwritten

    def continue_in(self, node: Node, extent: Extent) -> Node:
        """Continues a node being written in another extent; returns the node to write."""
        if not node.num_cached:
            assert node.extent is not None
            self.pool.give_back(node.extent)
            node.extent = extent
            return node
        successor = self.add(node, self.remove_unwritten(node), extent, private=node.private)
        node.writing, successor.ref_count = False, 1
        return successor

    def complete(self, node: Node) -> None:
        """Ends the writing of a node that is full, by a request that goes on after it."""
        node.writing = False
        node.segment.prefix_hash = path_hash(node)

    def drop(self, node: Node) -> None:
        """Removes a node that no request uses and that has no children, with its tokens."""
        assert node.extent is not None and not node.ref_count and not node.children
        self.pool.give_back(node.extent)
        node.extent = None
        node.detach()
        self.policy.evicted(node.segment)

    def finish(self, node: Node) -> None:
        """Ends the writing of a node whose request no longer counts in `ref_count`.

        Frees unused capacity and removes duplicates.
        """
        assert node.extent is not None
        node.writing = False
        self.remove_unwritten(node)
        self.pool.shrink(node.extent)
        path = node.path()
        if not len(node.tokens):
            node.detach()
            self.policy.evicted(node.segment)
        for each in path:
            if each.unmerged and len(each.tokens):
                each.segment.prefix_hash = path_hash(each)
                self._merge_duplicates(each)

    def _merge_duplicates(self, node: Node) -> None:
        """Merges the beginning of a node with siblings that hold the same tokens."""
        while True:
            assert node.parent is not None
            siblings = [twin for twin in node.twins() if not twin.private]
            common, index = max(
                (
                    (min(common_prefix(twin.tokens, node.tokens), twin.num_cached), i)
                    for i, twin in enumerate(siblings)
                ),
                default=(0, 0),
            )
            if common < min(MIN_SHARED_TOKENS, len(node.tokens)):
                break
            twin = siblings[index]
            twin = self.split(twin, common) if common < len(twin.tokens) or twin.writing else twin
            head = self.split(node, common) if common < len(node.tokens) else node
            self._merge_into(head, twin)
            if head is node:
                return
        node.unmerged = False

    def _merge_into(self, node: Node, twin: Node) -> None:
        """Replaces a node by another one with the same tokens."""
        assert node.extent is not None
        node.detach()
        if twin.extent:
            self.pool.give_back(node.extent)
        else:
            twin.extent = node.extent
            self._drop_copy(twin)
        twin.ref_count += node.ref_count
        for child in node.child_nodes():
            child.detach()
            twin.attach(child)
        for owner, count in node.segment.owners.items():
            twin.segment.owners[owner] = twin.segment.owners.get(owner, 0) + count
        node.extent = None
        self.policy.evicted(node.segment)
        self.policy.touched(twin.segment, self.now)  # by the node's owners, too

    def use(self, node: Node, agent: str, priority: int) -> None:
        """Counts an admitted request for a node and its path."""
        for each in node.path():
            each.ref_count += 1
            segment = each.segment
            segment.last_used = self.now
            segment.uses += 1
            segment.priority = max(segment.priority, priority)
            segment.owners[agent] = segment.owners.get(agent, 0) + 1
            self.policy.touched(segment, self.now)
        self.now += 1

    def forget(self, adapter: bytes | None = None) -> None:
        """Forgets all cached tokens, or those of an adapter. Those that requests use are theirs alone
        until they end."""
        stack = [self.root]
        while stack:
            for child in stack.pop().child_nodes():
                if adapter not in (None, child.adapter):
                    continue
                if child.ref_count:
                    child.private, child.logits = True, None
                    stack.append(child)
                    continue
                for each in reversed([*child.subtree()]):
                    if each.extent:
                        self.evict_node(each, worth_a_copy=False)
                    else:
                        self._remove(each)

    # Eviction.

    def evict(self, tokens: int, worth_a_copy: bool) -> bool:
        """Evicts nodes in the policy's order until this many tokens are free.

        Only nodes are evicted that no request uses and that have no child on the accelerator.

        Args:
          tokens: to be free; of a node more than twice as large the first part stays.
          worth_a_copy: whether fetching a copy is cheaper than computing the tokens again.

        Returns:
          False if no node was evicted.
        """
        if self.pool.free >= tokens:
            return False
        candidates = [
            (self.policy.rank(node.segment, self.now), n, node)
            for n, node in enumerate(self.root.subtree())
            if node.evictable
        ]
        heapq.heapify(candidates)
        numbers, evicted = itertools.count(-1, -1), False
        while candidates and self.pool.free < tokens:
            _, _, node = heapq.heappop(candidates)
            above, evicted = node.parent, True
            # The end of a long run is its least useful part, since its beginning may begin other
            # requests, too. But each split leaves smaller pieces, and so smaller free runs.
            if len(node.tokens) > 2 * tokens:
                above = self.split(node, len(node.tokens) - tokens)
            self.evict_node(node, worth_a_copy and self.policy.may_return(node.segment))
            if above and above.evictable:
                rank = self.policy.rank(above.segment, self.now)
                heapq.heappush(candidates, (rank, next(numbers), above))
        return evicted

    def can_be_free(self, tokens: int) -> bool:
        """Returns whether so many tokens on the accelerator are free, or used by no request."""
        free = self.pool.free
        return free + self.unused_tokens(tokens - free) >= tokens

    def unused_tokens(self, enough: int) -> int:
        """Tokens on the accelerator that no request uses; of a large tree no more are counted than
        are `enough`, or a node more."""
        found = 0
        for node in self.root.subtree():
            if found >= enough:
                break
            if node.extent and not node.ref_count:
                found += node.extent.length
        return found

    def evict_node(self, node: Node, worth_a_copy: bool) -> None:
        """Takes a node off the accelerator.

        It goes to host memory if it is worth a copy and host memory has space, and is dropped
        otherwise.
        """
        assert node.extent is not None and not node.ref_count
        tokens = node.extent.length
        self.evicted += tokens
        if worth_a_copy and self._evict_host(tokens):
            node.copy = self.pool.read(node.extent)
            self.host_used += tokens
            self.swapped += tokens
        self.pool.give_back(node.extent)
        node.extent = None
        if node.copy is None:
            self.dropped += tokens
            self._remove(node)

    def _evict_host(self, tokens: int) -> bool:
        """Drops copies until host memory has space for `tokens`; False if that is impossible."""
        if tokens > self.host_tokens:
            return False
        while self.host_used + tokens > self.host_tokens:
            copies = [
                node
                for node in self.root.subtree()
                if node.copy and not node.children and not node.ref_count
            ]
            if not copies:
                return False
            node = min(copies, key=lambda node: self.policy.rank(node.segment, self.now))
            self.dropped += len(node.tokens)
            self._remove(node)
        return True

    def swap_in(self, node: Node, extent: Extent) -> None:
        """Fetches a node from host memory into an empty extent of its size."""
        assert node.copy is not None
        self.pool.write(extent, node.copy)
        node.extent = extent
        self._drop_copy(node)

    def _drop_copy(self, node: Node) -> None:
        if node.copy:
            self.host_used -= node.copy.tokens
            node.copy = None

    def _remove(self, node: Node) -> None:
        """Removes a node that is in no memory, and the copies below it, useless without it."""
        assert node.extent is None
        for lost in node.subtree():
            self.dropped += lost.copy.tokens if lost.copy and lost is not node else 0
            self._drop_copy(lost)
            self.policy.evicted(lost.segment)
        node.detach()
