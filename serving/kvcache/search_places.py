"""Places of requests in searches, and the cached tokens that no search comes back to.

A search fires states of an agent many times, keeps some of what they lead to and prunes the rest
(Hive, sections 3.1 and 5.1.1). A request says at which node of the search tree it asks, and at which
nodes the search may still ask. What is cached of a branch without such a node is of no use to it.
"""

import collections
import dataclasses
from collections.abc import Iterable

from jaxshare.serving.kvcache.policy import SearchNode, SearchPlace, Segment

MOST_RUNS = 256
"""Runs of agents whose searches are followed, those with the latest requests."""


@dataclasses.dataclass(frozen=True)
class _PlacedUse:
    """A request's use of cached tokens.

    Attributes:
      node, answer: of its place.
      prompt: the length of its prompt, in tokens; what comes after that is its answer.
    """

    node: SearchNode
    answer: SearchNode
    prompt: int


class SearchPlaces:
    """The places of requests, and the segments of branches that are over.

    A segment is over if all requests that used it are of one search, and no open node is at or below
    any of theirs. What a search has asked before its first answer is never over, since other runs of
    the agent may begin with it; nor is what is left of a search after its last request.
    """

    def __init__(self) -> None:
        # The segments of each run that it alone has used, with its uses.
        self._runs: collections.OrderedDict[str, dict[Segment, set[_PlacedUse]]] = (
            collections.OrderedDict()
        )
        self._needed: dict[str, frozenset[SearchNode]] = {}
        self._run_of: dict[Segment, str | None] = {}  # None: not of one run alone
        self._over: set[Segment] = set()
        self._now, self._run, self._use = -1, "", None

    def is_over(self, segment: Segment) -> bool:
        """Returns whether no open node of the search that used a segment comes back to it."""
        return segment in self._over

    def observe(self, place: SearchPlace | None, prompt: int, now: int) -> None:
        """Takes the place of a request that is admitted; see `Policy.observe`.

        Args:
          place: its place, or None.
          prompt: the tokens of its prompt.
          now: its number.
        """
        self._now, self._use = now, None
        if place is None:
            return
        self._run, self._use = place.run, _PlacedUse(place.node, place.answer, prompt)
        segments = self._runs.setdefault(place.run, {})
        self._runs.move_to_end(place.run)
        self._needed[place.run] = _with_nodes_above(place.open)
        for segment in segments:
            self._judge(segment)
        while len(self._runs) > MOST_RUNS:
            run, left = self._runs.popitem(last=False)
            del self._needed[run]
            for segment in left:
                self._run_of[segment] = None

    def touched(self, segment: Segment, now: int) -> None:
        """Counts the use of a segment; see `Policy.touched`.

        A use that is not of the request observed last is one of unknown place.
        """
        run = self._run if self._use is not None and now == self._now else None
        before = self._run_of.setdefault(segment, run)
        if run is None or before != run:
            if before is not None:
                self._runs[before].pop(segment, None)
            self._run_of[segment] = None
            self._over.discard(segment)
            return
        assert self._use is not None
        self._runs[run].setdefault(segment, set()).add(self._use)
        self._judge(segment)

    def split(self, head: Segment, tail: Segment) -> None:
        """Gives both parts of a segment its uses; see `Policy.split`."""
        if tail not in self._run_of:
            return
        run = self._run_of[head] = self._run_of[tail]
        if run is not None:
            self._runs[run][head] = set(self._runs[run][tail])
            self._judge(head)
            self._judge(tail)
        elif tail in self._over:
            self._over.add(head)

    def evicted(self, segment: Segment) -> None:
        """Forgets a segment; see `Policy.evicted`."""
        self._over.discard(segment)
        run = self._run_of.pop(segment, None)
        if run is not None:
            del self._runs[run][segment]

    def _judge(self, segment: Segment) -> None:
        """Finds out whether a segment of a run is over."""
        run = self._run_of[segment]
        assert run is not None
        needed, start = self._needed[run], segment.depth - segment.tokens
        if any(_is_needed(use, start, needed) for use in self._runs[run][segment]):
            self._over.discard(segment)
        else:
            self._over.add(segment)


def _is_needed(use: _PlacedUse, start: int, needed: frozenset[SearchNode]) -> bool:
    """Returns whether a search comes back to what a request used, from this token on."""
    if start >= use.prompt:
        return use.answer in needed
    return not use.node or use.node in needed


def _with_nodes_above(nodes: Iterable[SearchNode]) -> frozenset[SearchNode]:
    return frozenset(node[:length] for node in nodes for length in range(len(node) + 1))
