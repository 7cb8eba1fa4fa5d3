"""Residency: which cached tokens leave the accelerator first.

An engine keeps what it knows as a tree of runs of tokens. Of the leaves that nobody uses, the one
whose `rank` is lowest leaves first. `contribution` asks what the agents that own a segment bring to
the whole workflow (Hive, section 7); the others are what it is compared with. All of this is plain
Python on numbers that the engine has anyway: nothing here knows of a model or a device.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np


def prefix_hash(tokens: Sequence[int] | np.ndarray) -> bytes:
    """What `Segment.end` is: 16 bytes of BLAKE2b over the tokens from the root on, each as four
    bytes, low byte first.

    BLAKE2b takes its input in pieces, so a tree may keep the hash object of a node and go on from
    its copy.
    """
    return hashlib.blake2b(np.asarray(tokens, "<i4").tobytes(), digest_size=16).digest()


@dataclasses.dataclass(eq=False, slots=True)
class Segment:
    """A run of cached tokens as a policy sees it; a node of the engine's tree holds one.

    Attributes:
      tokens: its length.
      end: `prefix_hash` of all tokens from the root to its end: equal where the content is.
      depth: tokens from the root to its end.
      owners: for each agent, "" standing for calls without one, how many of its calls used it.
      last_used: the number of the call that used it last.
      uses: calls that used it.
      priority: the highest of the calls that used it.
    """

    tokens: int
    end: bytes
    depth: int
    owners: dict[str, int]
    last_used: int = 0
    uses: int = 0
    priority: int = 0


@dataclasses.dataclass(frozen=True)
class Observation:
    """A call as it is admitted.

    Attributes:
      now: its number; calls are counted from 0.
      reused_tokens: of its `prompt_tokens`, those that were known.
      shared: for every other agent, how many of the reused tokens it owns too.
      running: calls of this agent that are under way, this one included.
    """

    agent: str
    now: int
    prompt_tokens: int
    reused_tokens: int
    shared: Mapping[str, int]
    running: int


class Policy(Protocol):
    """An order in which segments leave. The engine tells it what happens: for each call `observe`
    first, then `used` for its segments."""

    def used(self, segment: Segment, now: int) -> None:
        """A call used the segment, or made it; its fields say so already."""

    def split(self, head: Segment, tail: Segment) -> None:
        """A segment was cut in two: `tail` is the old object, `head` a new one; the fields of both
        are right already."""

    def gone(self, segment: Segment) -> None:
        """The segment is in no memory any more."""

    def rank(self, segment: Segment, now: int) -> Any:
        """Where the segment stands: the LOWEST leaves first."""
        ...

    def observe(self, call: Observation) -> None:
        """A call was admitted."""

    def finished(self, agent: str, new_tokens: int) -> None:
        """A call of the agent ended, with so many tokens written."""
