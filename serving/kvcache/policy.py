"""Eviction policies: which cached tokens leave the accelerator first.

An engine keeps its tokens as a tree of runs. Of the leaves that no request uses, the one with the
lowest `rank` is evicted first. `contribution` measures what the agents that own a segment bring to
the whole workflow (Hive, section 7); the policies of `eviction` are what it is compared with. All
of this is plain Python on numbers that the engine has anyway, without a model or a device.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """The number of leading tokens that two runs have in common."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    return int(differ.argmax()) if differ.any() else length


def prefix_hash(tokens: Sequence[int] | np.ndarray) -> bytes:
    """16 bytes of BLAKE2b over the tokens from the root on, each as four bytes, low byte first.

    BLAKE2b takes its input in pieces, so a tree may keep the hash object of a node and go on from
    its copy.
    """
    return hashlib.blake2b(np.asarray(tokens, "<i4").tobytes(), digest_size=16).digest()


@dataclasses.dataclass(eq=False, slots=True)
class Segment:
    """A run of cached tokens as a policy sees it; each node of the engine's tree holds one.

    Attributes:
      tokens: its length.
      prefix_hash: `prefix_hash` of all tokens from the root to its end: equal for equal content.
      depth: tokens from the root to its end.
      owners: for each agent, "" for requests without one, the number of its requests that used it.
      last_used: the number of the request that used it last.
      uses: requests that used it.
      priority: the highest of the requests that used it.
    """

    tokens: int
    prefix_hash: bytes
    depth: int
    owners: dict[str, int]
    last_used: int = 0
    uses: int = 0
    priority: int = 0


SearchNode = tuple[int, ...]
"""A node of a search tree: the path of the state after a model's answer; () is before the first."""


@dataclasses.dataclass(frozen=True)
class SearchPlace:
    """The place of a request in the search of an agent's run (Hive, section 5.1.1).

    Attributes:
      run: the id of the run.
      node: the node at which the request asks.
      answer: the node below it that its answer leads to.
      open: the nodes at which the search may ask still, while this request is made; this one is
        among them, or one below it.
    """

    run: str
    node: SearchNode
    answer: SearchNode
    open: tuple[SearchNode, ...]


@dataclasses.dataclass(frozen=True)
class Observation:
    """A request as it is admitted.

    Attributes:
      agent: that it belongs to.
      now: its number; requests are counted from 0.
      prompt_tokens: its length; reused_tokens: those of them that were cached.
      shared: for every other agent, how many of the reused tokens it owns too.
      running: running requests of this agent, this one included.
      place: its place in a search, or None.
    """

    agent: str
    now: int
    prompt_tokens: int
    reused_tokens: int
    shared: Mapping[str, int]
    running: int
    place: SearchPlace | None = None


class Policy(Protocol):
    """An order of eviction.

    For each request the engine calls `observe` first, then `touched` for its segments.
    """

    def touched(self, segment: Segment, now: int) -> None:
        """Called when a request used or created the segment; its fields are updated before."""

    def split(self, head: Segment, tail: Segment) -> None:
        """Called when a segment was split.

        `tail` is the old object and `head` a new one; the fields of both are updated before.
        """

    def evicted(self, segment: Segment) -> None:
        """Called when the segment is in no memory any more."""

    def rank(self, segment: Segment, now: int) -> Any:
        """The sort key of a segment: the LOWEST is evicted first."""
        ...

    def may_return(self, segment: Segment) -> bool:
        """Returns whether a later request may use a segment, so that a copy of it has a use."""
        return True

    def observe(self, observation: Observation) -> None:
        """Called when a request was admitted."""

    def finished(self, agent: str, new_tokens: int) -> None:
        """Called when a request of the agent has finished, with its number of new tokens."""
