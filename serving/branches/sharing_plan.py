"""Folding: the tree of what prompts begin with in common, and which of its nodes become blocks that
rows share (Hydragen section 3.3)."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxshare.serving.branches.prompt_tree import Prompt
from jaxshare.serving.kvcache.sharing_cost import DEFAULT, Costs


@dataclasses.dataclass(eq=False)
class PrefixNode:
    """A node of the tree of common prefixes.

    Attributes:
      tokens: that all prompts below have here. Only the root may have none.
      children: no two begin with the same token; in the order of their first prompts.
      ends: the prompts that end here, in order.
      rows: completions of all prompts that end here or below.
      first: place in the folded list of the first of these prompts.
    """

    tokens: tuple[int, ...]
    # a deep tree has no printable form
    children: list["PrefixNode"] = dataclasses.field(default_factory=list, repr=False)
    ends: list[Prompt] = dataclasses.field(default_factory=list)
    rows: int = 0
    first: int = 0


@dataclasses.dataclass(frozen=True)
class SharedPrefix:
    """A block that several rows read together.

    Attributes:
      parent: the block that stands before it, -1 for none.
      tokens: that it holds.
      rows: its fan-in, two or more: rows that list it, directly or below.
    """

    parent: int
    tokens: tuple[int, ...]
    rows: int


@dataclasses.dataclass(frozen=True)
class Sample:
    """One completion, that is, one row.

    Attributes:
      prompt: number of its prompt.
      index: which of the prompt's n completions it is.
      block: the last shared block that it sees, -1 for none.
      own: tokens of the prompt that stand in the row's own block, before those it samples. Empty if
        the prompt ends where the shared block does: then the row samples from the logits at that
        block's end.
    """

    prompt: int
    index: int
    block: int
    own: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class SharingPlan:
    """Where every token of every prompt is kept.

    Attributes:
      blocks: in depth-first order, parents before children.
      streams: in depth-first order, so that rows below one block are neighbours.
    """

    blocks: tuple[SharedPrefix, ...]
    streams: tuple[Sample, ...]

    @property
    def cached_tokens(self) -> int:
        """Tokens kept before anything is sampled."""
        return sum(len(block.tokens) for block in self.blocks) + sum(
            len(stream.own) for stream in self.streams
        )

    @property
    def depth(self) -> int:
        """Blocks of the longest chain from a root."""
        depths: list[int] = []
        for block in self.blocks:
            depths.append(1 + (depths[block.parent] if block.parent >= 0 else 0))
        return max(depths, default=0)

    def path(self, block: int) -> list[int]:
        """The blocks from the root to this one, both included; none for -1."""
        path: list[int] = []
        while block >= 0:
            path.append(block)
            block = self.blocks[block].parent
        return path[::-1]


def fold(prompts: Sequence[Prompt]) -> PrefixNode:
    """The tree of the prompts' common prefixes, as a radix tree over tokens: each different prefix
    is held once.

    Sorted prompts that share a prefix stand next to each other, so one pass over neighbours finds
    every node.
    """
    # sort fast; how tokens are ordered is all one
    keys = [np.asarray(prompt.tokens, np.int32).tobytes() for prompt in prompts]
    root = PrefixNode(())
    # the nodes of the prompt before, and how many tokens stand up to the end of each
    path, ends, before = [root], [0], b""
    for i in sorted(range(len(prompts)), key=keys.__getitem__):
        prompt, common, last = prompts[i], _common(before, keys[i]), root
        while ends[-1] > common:
            last, _ = path.pop(), ends.pop()
        if (kept := common - ends[-1]) > 0:  # they part in the middle of `last`
            path[-1].children[-1] = middle = PrefixNode(
                last.tokens[:kept], [last], first=last.first
            )
            last.tokens = last.tokens[kept:]
            path.append(middle)
            ends.append(common)
        if len(prompt.tokens) > common:
            leaf = PrefixNode(prompt.tokens[common:], first=i)
            path[-1].children.append(leaf)
            path.append(leaf)
            ends.append(len(prompt.tokens))
        path[-1].ends.append(prompt)  # equal prompts keep their order: the sort is stable
        before = keys[i]
    for visit in reversed(_visits(root)):
        node = visit.node
        node.children.sort(key=lambda child: child.first)
        node.rows = sum(prompt.n for prompt in node.ends) + sum(
            child.rows for child in node.children
        )
        node.first = min([node.first, *(child.first for child in node.children[:1])])
    return root


def unique_tokens(root: PrefixNode) -> int:
    """Tokens of the tree: what has to be kept if nothing is kept twice."""
    return sum(len(visit.node.tokens) for visit in _visits(root))


def can_share(root: PrefixNode) -> bool:
    """Whether two rows begin alike, so that there is something to decide."""
    return any(visit.node.rows > 1 and visit.node.tokens for visit in _visits(root))


def plan_sharing(
    root: PrefixNode, costs: Costs | None = None, share: bool | None = None, *, grow: int = 0
) -> SharingPlan:
    """Decides which nodes become blocks that rows share. The tokens of the others are pushed down
    to the blocks and rows below them.

    Args:
      root: from `fold`.
      costs: of a pass on the device; default `costs.DEFAULT`.
      share: True shares every node with two rows or more below, which keeps no token twice; False
        shares none, and each row has a copy of its prompt; None takes the arrangement that costs
        least.
      grow: tokens by which a row's own block is longer on average than what the prompt leaves to
        it: about half of those it will sample.
    """
    visits = _visits(root)
    if share is None:
        shared = _cheapest(visits, costs or DEFAULT, grow)
    else:
        shared = [share and visit.node.rows > 1 and len(visit.node.tokens) > 0 for visit in visits]
    blocks: list[SharedPrefix] = []
    streams: list[Sample] = []
    path: list[int] = []
    # for each node the last block down to it, and how many tokens stand up to the end of that
    above: list[tuple[int, int]] = []
    for visit, is_shared in zip(visits, shared, strict=True):
        node, (block, end) = visit.node, above[visit.parent] if above else (-1, 0)
        path[visit.start :] = node.tokens
        if is_shared:
            blocks.append(SharedPrefix(block, tuple(path[end:]), node.rows))
            block, end = len(blocks) - 1, len(path)
        above.append((block, end))
        for prompt in node.ends:
            own = prompt.tokens[end:]
            streams += [Sample(prompt.number, index, block, own) for index in range(prompt.n)]
    return SharingPlan(tuple(blocks), tuple(streams))


class _Visit(NamedTuple):
    """A node in depth-first order, the place of its parent there (-1: none), nodes above it, and
    tokens above it."""

    node: PrefixNode
    parent: int
    level: int
    start: int


def _visits(root: PrefixNode) -> list[_Visit]:
    """The nodes in depth-first order, parents before children."""
    visits: list[_Visit] = []
    stack = [_Visit(root, -1, 0, 0)]
    while stack:
        visits.append(visit := stack.pop())
        below = visit.level + 1, visit.start + len(visit.node.tokens)
        stack += [_Visit(child, len(visits) - 1, *below) for child in reversed(visit.node.children)]
    return visits


def _cheapest(visits: list[_Visit], costs: Costs, grow: int) -> list[bool]:
    """For each node whether it is shared in the arrangement that costs least; of equals the one
    that shares, which keeps less.

    What a node costs depends on what was pushed down to it, that is, on where the last block above
    ends: where the node itself begins, or where one of those above it does. So a node at level l
    has l + 1 cases, and all of them are worked out at once. Fewer steps than the prompts have
    tokens, and exact.
    """
    children: list[list[int]] = [[] for _ in visits]
    for i, visit in enumerate(visits[1:], start=1):
        children[visit.parent].append(i)
    # tokens above each node on the path to the current one
    starts = np.zeros(max(visit.level for visit in visits) + 1, np.int64)
    # float64[l + 2]: the children's costs by level of where the last block ends
    below: list[np.ndarray | float] = [0.0] * len(visits)
    choices: list[np.ndarray] = [starts] * len(visits)  # bool[l + 1]
    best = math.inf
    stack = [0]
    while stack:
        i = stack.pop()
        if i >= 0:  # on the way down
            starts[visits[i].level] = visits[i].start
            stack += [~i, *children[i]]
            continue
        i = ~i  # on the way up: the children are done
        node, parent, level, start = visits[i]
        tokens = start + len(node.tokens) - starts[: level + 1]
        own = sum(prompt.n for prompt in node.ends)
        after = np.broadcast_to(below[i], level + 2)
        below[i] = 0.0  # frees it
        push = after[:-1] + own * costs.private(tokens + grow)
        share = costs.shared(tokens, node.rows) + after[-1] + own * costs.private(grow)
        choices[i] = (share <= push) & (tokens > 0) & (node.rows > 1)
        cost = np.where(choices[i], share, push)
        if parent >= 0:
            below[parent] = below[parent] + cost
        else:
            best = float(cost[0])
    shared: list[bool] = []
    # for each node the level of the node at whose beginning the last block above ends
    ends: list[int] = []
    for i, visit in enumerate(visits):
        ends.append(0 if i == 0 else visit.level if shared[visit.parent] else ends[visit.parent])
        shared.append(bool(choices[i][ends[i]]))
    unshared = sum(
        prompt.n * costs.private(len(prompt.tokens) + grow)
        for visit in visits
        for prompt in visit.node.ends
    )
    return shared if best + costs.shared_start <= unshared else [False] * len(visits)


def _common(a: bytes, b: bytes) -> int:
    """How many int32 tokens two sequences have in common from the beginning."""
    length = min(len(a), len(b)) // 4
    differ = np.frombuffer(a, np.int32, length) != np.frombuffer(b, np.int32, length)
    return int(differ.argmax()) if differ.any() else length
