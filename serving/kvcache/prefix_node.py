"""The nodes of the prefix tree."""

import dataclasses
from collections.abc import Iterator

import numpy as np
from jax import Array

from jaxshare.serving.kvcache.policy import Segment, prefix_hash
from jaxshare.serving.kvcache.pool import Extent, HostCopy


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """A run of tokens after those of its parent.

    Attributes:
      tokens: int32; while the node is written, tokens that are not cached yet, too.
      parent: None for the root, and for nodes that have left the tree.
      children: by their adapter and first token. Siblings with fewer common tokens than are worth a
        node of their own stay as they are.
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
        child.parent = self
        self.children.setdefault(child.key, []).append(child)

    def detach(self) -> None:
        """Takes the node out of its parent's children."""
        assert self.parent is not None
        siblings = self.parent.children[self.key]
        siblings.remove(self)
        if not siblings:
            del self.parent.children[self.key]
        self.parent = None

    def set_tokens(self, tokens: np.ndarray) -> None:
        """Sets the tokens, with a new end but the same beginning, and the segment's sizes."""
        parent, more = self.parent, len(tokens) - len(self.tokens)
        assert parent is not None
        same_key = bool(len(tokens)) == bool(len(self.tokens))
        if not same_key:
            self.detach()
        self.tokens = tokens
        self.segment.tokens += more
        self.segment.depth += more
        if not same_key:
            parent.attach(self)

    def subtree(self) -> "Iterator[Node]":
        """This node and all nodes below it."""
        stack = [self]
        while stack:
            yield (node := stack.pop())
            stack += node.child_nodes()


def path_hash(node: Node) -> bytes:
    """Returns the `prefix_hash` of all tokens up to a node's end, after the digest of its adapter."""
    tokens = np.frombuffer(node.adapter, np.int32), *(each.tokens for each in node.path())
    return prefix_hash(np.concatenate(tokens))
