"""Sharing plans: the blocks that rows share (Hydragen section 3.3).

They are some nodes of the prefix tree, the tree of the prompts' common prefixes.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxshare.serving.branches.prompt_tree import Prompt
from jaxshare.serving.kvcache.sharing_cost import DEFAULT, Costs


@dataclasses.dataclass(eq=False)
class PrefixNode:
    """A node of the prefix tree.

    Attributes:
      tokens: the tokens that all prompts below have here. Only the root may have none.
      children: no two start with the same token; in the order of their first prompts.
      ends: the prompts that end here, in order.
      rows: completions of all prompts that end here or below.
      first: index of the first of these prompts in the list that the tree was built from.
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
      parent: the block before it, -1 for none.
      tokens: its tokens.
      rows: its fan-in, two or more: the rows that list it.
    """

    parent: int
    tokens: tuple[int, ...]
    rows: int


@dataclasses.dataclass(frozen=True)
class Sample:
    """One completion, that is, one row.

    Attributes:
      prompt: number of its prompt.
      index: its number among the prompt's n completions.
      block: the last shared block that it sees, -1 for none.
      suffix: the prompt's tokens after that block; they are in the row's own block, before those it
        samples. Empty if the prompt ends where the shared block does: then the row samples from the
        logits at that block's end.
    """

    prompt: int
    index: int
    block: int
    suffix: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class SharingPlan:
    """The block in which each token of each prompt is stored.

    Attributes:
      blocks: in depth-first order, parents before children.
      samples: in depth-first order, so that rows below one block are neighbours.
    """

    blocks: tuple[SharedPrefix, ...]
    samples: tuple[Sample, ...]

    @property
    def cached_tokens(self) -> int:
        """The number of tokens stored before anything is sampled."""
        return sum(len(block.tokens) for block in self.blocks) + sum(
            len(sample.suffix) for sample in self.samples
        )

    @property
    def depth(self) -> int:
        """The number of blocks of the longest path from a root."""
        depths: list[int] = []
        for block in self.blocks:
            depths.append(1 + (depths[block.parent] if block.parent >= 0 else 0))
        return max(depths, default=0)

    def path(self, block: int) -> list[int]:
        """The blocks from the root to this one, inclusive; none for -1."""
        path: list[int] = []
        while block >= 0:
            path.append(block)
            block = self.blocks[block].parent
        return path[::-1]


def build_prefix_tree(prompts: Sequence[Prompt]) -> PrefixNode:
    """The radix tree of the prompts' tokens: each different prefix is stored once.

    Sorted prompts that share a prefix are adjacent, so one pass over neighbours finds every node.
    """
    # Any total order will do; that of the bytes sorts fastest.
    keys = [np.asarray(prompt.tokens, np.int32).tobytes() for prompt in prompts]
    root = PrefixNode(())
    # the nodes of the previous prompt, and the number of tokens up to the end of each
    path, ends, previous = [root], [0], b""
    for i in sorted(range(len(prompts)), key=keys.__getitem__):
        prompt, common, last = prompts[i], _common_length(previous, keys[i]), root
        while ends[-1] > common:
            last, _ = path.pop(), ends.pop()
        if (head := common - ends[-1]) > 0:  # the two prompts part within `last`: split it
            path[-1].children[-1] = middle = PrefixNode(
                last.tokens[:head], [last], first=last.first
            )
            last.tokens = last.tokens[head:]
            path.append(middle)
            ends.append(common)
        if len(prompt.tokens) > common:
            leaf = PrefixNode(prompt.tokens[common:], first=i)
            path[-1].children.append(leaf)
            path.append(leaf)
            ends.append(len(prompt.tokens))
        path[-1].ends.append(prompt)  # equal prompts keep their order: the sort is stable
        previous = keys[i]
    for visit in reversed(_depth_first(root)):
        node = visit.node
        node.children.sort(key=lambda child: child.first)
        node.rows = sum(prompt.n for prompt in node.ends) + sum(
            child.rows for child in node.children
        )
        node.first = min([node.first, *(child.first for child in node.children[:1])])
    return root


def unique_tokens(root: PrefixNode) -> int:
    """The number of tokens in the tree: those to store if nothing is stored twice."""
    return sum(len(visit.node.tokens) for visit in _depth_first(root))


def can_share(root: PrefixNode) -> bool:
    """True if two rows share a prefix, so that there is something to decide."""
    return any(visit.node.rows > 1 and visit.node.tokens for visit in _depth_first(root))


def plan_sharing(
    root: PrefixNode, costs: Costs | None = None, share: bool | None = None, *, grow: int = 0
) -> SharingPlan:
    """Decides which nodes become blocks that rows share.

    The tokens of the others are pushed down to the blocks and rows below them.

    Args:
      root: from `build_prefix_tree`.
      costs: of a pass on the device; default `sharing_cost.DEFAULT`.
      share: True shares every node with two rows or more, which stores no token twice; False shares
        none, and each row has a copy of its prompt; None takes the cheapest plan.
      grow: the average number of sampled tokens in a row's own block: about half of those it will
        sample.
    """
    visits = _depth_first(root)
    if share is None:
        shared = _cheapest_sharing(visits, costs or DEFAULT, grow)
    else:
        shared = [share and visit.node.rows > 1 and len(visit.node.tokens) > 0 for visit in visits]
    blocks: list[SharedPrefix] = []
    samples: list[Sample] = []
    path: list[int] = []
    # for each node the last block on its path, and the number of tokens up to that block's end
    above: list[tuple[int, int]] = []
    for visit, is_shared in zip(visits, shared, strict=True):
        node, (block, end) = visit.node, above[visit.parent] if above else (-1, 0)
        path[visit.start :] = node.tokens
        if is_shared:
            blocks.append(SharedPrefix(block, tuple(path[end:]), node.rows))
            block, end = len(blocks) - 1, len(path)
        above.append((block, end))
        for prompt in node.ends:
            suffix = prompt.tokens[end:]
            samples += [Sample(prompt.number, index, block, suffix) for index in range(prompt.n)]
    return SharingPlan(tuple(blocks), tuple(samples))


class _Visit(NamedTuple):
    """A node in depth-first order.

    Attributes:
      node: the node.
      parent: index of its parent in that order, -1 for none.
      level: the number of nodes above it.
      start: the number of tokens above it.
    """

    node: PrefixNode
    parent: int
    level: int
    start: int


def _depth_first(root: PrefixNode) -> list[_Visit]:
    """The nodes in depth-first order, parents before children."""
    visits: list[_Visit] = []
    stack = [_Visit(root, -1, 0, 0)]
    while stack:
        visits.append(visit := stack.pop())
        below = visit.level + 1, visit.start + len(visit.node.tokens)
        stack += [_Visit(child, len(visits) - 1, *below) for child in reversed(visit.node.children)]
    return visits


def _cheapest_sharing(visits: list[_Visit], costs: Costs, grow: int) -> list[bool]:
    """For each node, True if the cheapest plan shares it. Ties share, which stores less.

    The cost of a node depends on the tokens that were pushed down to it, that is, on where the last
    block above it ends: at the start of the node itself or of one of its ancestors. So a node at
    level l has l + 1 cases, all computed at once. This is exact, and takes fewer steps than the
    prompts have tokens.
    """
    children: list[list[int]] = [[] for _ in visits]
    for i, visit in enumerate(visits[1:], start=1):
        children[visit.parent].append(i)
    # the number of tokens above each node on the path to the current one
    starts = np.zeros(max(visit.level for visit in visits) + 1, np.int64)
    # float64[l + 2]: the children's costs, by the level at whose start the last block ends
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
    # for each node the level of the node at whose start the last block above it ends
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


def _common_length(a: bytes, b: bytes) -> int:
    """The number of leading int32 tokens that two sequences have in common."""
    length = min(len(a), len(b)) // 4
    differ = np.frombuffer(a, np.int32, length) != np.frombuffer(b, np.int32, length)
    return int(differ.argmax()) if differ.any() else length
