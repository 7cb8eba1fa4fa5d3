"""A cache of prompts without a model: a radix tree of tokens under a bound, which counts what a
policy keeps and what it lets go."""

import bisect
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import numpy as np

from jaxshare.serving.kvcache.eviction import Belady
from jaxshare.serving.kvcache.policy import Observation, Policy, Segment
from scripts.bench.parts.residency.workflow import Call


@dataclasses.dataclass(frozen=True)
class Counts:
    """The counts of a run over a trace.

    Attributes:
      prompt, found: tokens of every agent's prompts, and those of them that were on the
        accelerator.
      evicted: tokens that left it.
    """

    prompt: dict[str, int]
    found: dict[str, int]
    evicted: int

    def __add__(self, other: Self) -> Self:
        return Counts(
            dict(Counter(self.prompt) + Counter(other.prompt)),
            dict(Counter(self.found) + Counter(other.found)),
            self.evicted + other.evicted,
        )

    @property
    def computed(self) -> int:
        """Tokens of all prompts that had to be computed."""
        return self.missed(frozenset(self.prompt))

    def missed(self, agents: frozenset[str]) -> int:
        """Tokens of these agents' prompts that had to be computed."""
        return sum(
            self.prompt[name] - self.found.get(name, 0) for name in agents & self.prompt.keys()
        )

    def hit_rate(self, agents: frozenset[str]) -> float:
        """The share of the tokens of these agents' prompts that were found."""
        return 1 - self.missed(agents) / sum(
            self.prompt[name] for name in agents & self.prompt.keys()
        )


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    tokens: np.ndarray
    parent: Self | None
    segment: Segment
    children: dict[int, Self] = dataclasses.field(default_factory=dict)

    def path(self) -> Iterator[Self]:
        """From this node up to the root, which is left out."""
        node = self
        while node.parent:
            yield node
            node = node.parent


class Tree:
    """The prefix tree on the accelerator.

    Leaves are evicted whole, in the order of the policy; those of the call under way stay.

    Args:
      capacity: tokens that it may hold.
      cuts: for each call, at which of its tokens a call before or after it parts from it. A cache
        cuts a segment when that happens; with this it does so beforehand, which takes
        knowledge of the future.
    """

    def __init__(self, capacity: int, policy: Policy, cuts: Sequence[Iterable[int]] | None = None):
        self.capacity, self.policy, self._cuts = capacity, policy, cuts
        self.size = self.evicted = 0
        self._root = Node(np.zeros(0, np.int32), None, Segment(0, b"", 0, {}))

    def admit(self, call: Call, now: int) -> int:
        """Makes room for a call and puts its prompt into the tree; how many leading tokens were
        there already.

        Raises:
          ValueError: the prompt is longer than the tree may ever be.
        """
        tokens = np.asarray(call.tokens, np.int32)
        if len(tokens) > self.capacity:
            raise ValueError(
                f"call {now} of {call.agent} has {len(tokens)} tokens, but there is room for "
                f"{self.capacity}; give a larger capacity"
            )
        last = self._match(tokens)
        path = list(last.path())
        reused = last.segment.depth
        shared = Counter()
        for node in path:
            for owner in node.segment.owners.keys() - {call.agent}:
                shared[owner] += len(node.tokens)
        self.policy.observe(Observation(call.agent, now, len(tokens), reused, shared, 1))
        self._make_room(len(tokens) - reused, now, {last, *path})
        ends = sorted({len(tokens), *(self._cuts[now] if self._cuts else ())})
        for end in ends[bisect.bisect_right(ends, reused) :]:
            begin = last.segment.depth
            node = Node(
                tokens[begin:end], last, Segment(end - begin, _digest(tokens[:end]), end, {})
            )
            last.children[int(tokens[begin])] = node
            last = node
            self.size += end - begin
            path.insert(0, node)
        for node in path:
            segment = node.segment
            segment.owners[call.agent] = segment.owners.get(call.agent, 0) + 1
            segment.last_used, segment.uses, segment.priority = (
                now,
                segment.uses + 1,
                max(segment.priority, call.priority),
            )
            self.policy.touched(segment, now)
        return reused

    def _match(self, tokens: np.ndarray) -> Node:
        """The node at the end of the longest cached prefix; a node is cut in two if the prefix ends
        inside."""
        node = self._root
        while (depth := node.segment.depth) < len(tokens) and (
            child := node.children.get(int(tokens[depth]))
        ):
            rest = tokens[depth : depth + len(child.tokens)]
            differ = np.flatnonzero(child.tokens[: len(rest)] != rest)
            known = int(differ[0]) if len(differ) else len(rest)
            if known < len(child.tokens):
                return self._cut(child, known, tokens)
            node = child
        return node

    def _cut(self, node: Node, length: int, tokens: np.ndarray) -> Node:
        """Makes the first tokens of a node a node of their own; `tokens` is a prompt that runs
        through them."""
        tail, parent = node.segment, node.parent
        depth = tail.depth - tail.tokens + length
        segment = dataclasses.replace(
            tail,
            tokens=length,
            prefix_hash=_digest(tokens[:depth]),
            depth=depth,
            owners=dict(tail.owners),
        )
        tail.tokens -= length
        head = Node(node.tokens[:length], parent, segment, {int(node.tokens[length]): node})
        parent.children[int(node.tokens[0])] = head
        node.tokens, node.parent = node.tokens[length:], head
        self.policy.split(segment, tail)
        return head

    def _make_room(self, tokens: int, now: int, used: set[Node]) -> None:
        while self.size + tokens > self.capacity:
            leaf = min(
                (node for node in self._leaves() if node not in used),
                key=lambda node: self.policy.rank(node.segment, now),
            )
            del leaf.parent.children[int(leaf.tokens[0])]
            self.size -= len(leaf.tokens)
            self.evicted += len(leaf.tokens)
            self.policy.evicted(leaf.segment)

    def _leaves(self) -> Iterator[Node]:
        nodes = list(self._root.children.values())
        while nodes:
            node = nodes.pop()
            if node.children:
                nodes.extend(node.children.values())
            else:
                yield node


def compulsory(trace: Sequence[Call]) -> int:
    """Tokens that any cache must compute at least once: those of every call that no call before it
    began with."""
    found, known = 0, []
    for call in trace:
        tokens = np.asarray(call.tokens)
        found += len(tokens) - max((common(tokens, other) for other in known), default=0)
        known.append(tokens)
    return found


def partings(trace: Sequence[Call]) -> list[set[int]]:
    """For each call the lengths of the prefixes that it has in common with the others, as `Tree`
    takes them."""
    prompts = [np.asarray(call.tokens) for call in trace]
    return [{common(prompt, other) for other in prompts} - {0} for prompt in prompts]


def simulate(trace: Sequence[Call], capacity: int, policy: Policy) -> Counts:
    """Runs the calls one after the other through a cache of `capacity` tokens.

    The offline optimum is given the places where segments will be cut, too.

    Raises:
      ValueError: a prompt is longer than the cache.
    """
    tree = Tree(capacity, policy, partings(trace) if isinstance(policy, Belady) else None)
    prompt, found = Counter(), Counter()
    for now, call in enumerate(trace):
        prompt[call.agent] += len(call.tokens)
        found[call.agent] += tree.admit(call, now)
    return Counts(dict(prompt), dict(found), tree.evicted)


def common(a: np.ndarray, b: np.ndarray) -> int:
    """The number of leading tokens that both have."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


def _digest(tokens: np.ndarray) -> bytes:
    return hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=16).digest()
