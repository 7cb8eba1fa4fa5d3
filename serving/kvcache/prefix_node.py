"""The nodes of the prefix tree."""

import bisect
import dataclasses
import heapq
import itertools
import operator
from collections.abc import Iterator

import numpy as np
from jax import Array

from jaxshare.serving.kvcache.policy import Segment, common_prefix, prefix_hash
from jaxshare.serving.kvcache.pool import Extent, HostCopy

MIN_SHARED_TOKENS = 16
"""The fewest common tokens that are worth waiting for, and a block of their own."""


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """A run of tokens after those of its parent.

    Attributes:
      tokens: int32; while the node is written, tokens that are not cached yet, too.
      parent: None for the root, and for nodes that have left the tree.
      children: by their adapter and first token, in the order of their `beginning`. Siblings with
        fewer common tokens than are worth a node of their own stay as they are.
      beginning: the first tokens, as many as are worth a node of their own, as bytes whose order is
        that of the tokens. Thousands of prompts may begin with the same few tokens of a chat template:
        those that are alike are next to each other.
      extent: its keys and values on the accelerator, or None.
      copy: its keys and values in host memory, or None.
      ref_count: running requests whose tokens go through it.
      writing: whether a request still writes to it.
      unmerged: whether it may hold tokens that a sibling holds, too, because it was created before
        they were compared.
      private: whether it is for the requests that use it alone, and dropped when those are over.
      logits: float32[V] after its last token, kept where requests start to sample there.
      adapter: the digest of the adapter that computed it, and all below it; empty for none.
      segment: the node as policies see it.
    """

    tokens: np.ndarray
    parent: "Node | None"
    segment: Segment
    children: "dict[tuple[bytes, int], list[Node]]" = dataclasses.field(default_factory=dict)
    beginning: bytes = b""
    extent: Extent | None = None
    copy: HostCopy | None = None
    ref_count: int = 0
    writing: bool = False
    unmerged: bool = True
    private: bool = False
    logits: Array | None = None
    adapter: bytes = b""

    @property
    def key(self) -> tuple[bytes, int]:
        """Its adapter, and its first token or -1."""
        return self.adapter, int(self.tokens[0]) if len(self.tokens) else -1

    @property
    def num_cached(self) -> int:
        """Tokens whose keys and values are cached."""
        return self.extent.length if self.extent else self.copy.tokens if self.copy else 0

    @property
    def is_cached(self) -> bool:
        """Returns whether the keys and values of all its tokens are cached."""
        return self.num_cached == len(self.tokens)

    @property
    def evictable(self) -> bool:
        """Returns whether it is on the accelerator, used by no request, and no child is there."""
        return bool(
            self.extent
            and self.extent.length
            and not self.ref_count
            and not any(child.extent for child in self.child_nodes())
        )

    def path(self) -> "list[Node]":
        """The nodes from the root's child to this one."""
        path, node = [], self
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def child_nodes(self) -> "list[Node]":
        """Its children as a list."""
        return [child for siblings in self.children.values() for child in siblings]

    def attach(self, child: "Node") -> None:
        """Adds a child."""
        child.parent, child.beginning = self, _beginning(child.tokens)
        bisect.insort(self.children.setdefault(child.key, []), child, key=_BEGINNING)

    def detach(self) -> None:
        """Takes the node out of its parent's children."""
        assert self.parent is not None
        siblings = self.parent.children[self.key]
        first = bisect.bisect_left(siblings, self.beginning, key=_BEGINNING)
        del siblings[siblings.index(self, first)]
        if not siblings:
            del self.parent.children[self.key]
        self.parent = None

    def nearest(self, tokens: np.ndarray, adapter: bytes) -> "Iterator[tuple[Node, int]]":
        """The children that begin with the first of these tokens, each with the number of tokens that
        it has in common with them.

        The number never grows again from one to the next, but for those that begin with at least
        `MIN_SHARED_TOKENS` of them, which come first.
        """
        siblings = self.children.get((adapter, int(tokens[0])), ())
        place = bisect.bisect_left(siblings, _beginning(tokens), key=_BEGINNING)
        before, after = range(place - 1, -1, -1), range(place, len(siblings))
        ways = [((siblings[i], common_prefix(siblings[i].tokens, tokens)) for i in way)
                for way in (after, before)]  # fmt: skip
        return heapq.merge(*ways, key=lambda each: -min(each[1], MIN_SHARED_TOKENS))

    def twins(self) -> "Iterator[Node]":
        """Its siblings that begin with all of its tokens, or with the first `MIN_SHARED_TOKENS`."""
        assert self.parent is not None
        siblings = self.parent.children[self.key]
        first = bisect.bisect_left(siblings, self.beginning, key=_BEGINNING)
        for i in range(first, len(siblings)):
            if not siblings[i].beginning.startswith(self.beginning):
                break
            if siblings[i] is not self:
                yield siblings[i]

    def set_tokens(self, tokens: np.ndarray) -> None:
        """Sets the tokens, with a new end but the same beginning, and the segment's sizes."""
        parent, more = self.parent, len(tokens) - len(self.tokens)
        assert parent is not None
        moves = min(len(tokens), len(self.tokens)) < MIN_SHARED_TOKENS and more != 0
        if moves:
            self.detach()
        self.tokens = tokens
        self.segment.tokens += more
        self.segment.depth += more
        if moves:
            parent.attach(self)

    def subtree(self) -> "Iterator[Node]":
        """This node and all nodes below it, which may not change meanwhile. Each is made as it is asked
        for, so that a walk can end early."""
        stack: list[Iterator[Node]] = [iter((self,))]
        while stack:
            for node in stack[-1]:
                yield node
                if node.children:
                    siblings = reversed(node.children.values())
                    stack.append(itertools.chain.from_iterable(map(reversed, siblings)))
                    break
            else:
                stack.pop()


_BEGINNING = operator.attrgetter("beginning")


def _beginning(tokens: np.ndarray) -> bytes:
    return np.asarray(tokens[:MIN_SHARED_TOKENS], ">i4").tobytes()


def path_hash(node: Node) -> bytes:
    """Returns the `prefix_hash` of all tokens up to a node's end, after the digest of its adapter."""
    tokens = np.frombuffer(node.adapter, np.int32), *(each.tokens for each in node.path())
    return prefix_hash(np.concatenate(tokens))
