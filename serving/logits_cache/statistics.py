"""Counts of a Logits Cache."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Counts of a cache so far, and its contents.

    Attributes:
      hits, misses: replays of states that were cached, and of others.
      replayed: tokens that replays gave.
      followed: tokens that `go_on` gave, of requests that followed another one under way.
      ahead: hits that had been computed ahead.
      evicted: runs that were evicted.
      states, runs, bytes: the contents.
    """

    hits: int = 0
    misses: int = 0
    replayed: int = 0
    followed: int = 0
    ahead: int = 0
    evicted: int = 0
    states: int = 0
    runs: int = 0
    bytes: int = 0
