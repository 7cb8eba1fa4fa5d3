"""Fair queue: priority first, then the agent with the fewest served tokens for its share, then the
request with the most cached tokens."""

import bisect
import collections
import heapq
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping

from jaxshare.serving.engine.request import Request

_MAX_AGENTS = 1024
"""Agents that are remembered before those that need not be are forgotten."""
_COMPARED = 8
"""Requests of an agent of which the one with the most cached tokens is admitted first."""
_MOST_PASSED = 8
"""Later requests that are admitted before an agent's first one, at most."""
_EQUAL_PART = 0.5
"""The part of all service that agents get in equal shares; the rest is by what they contribute."""
_NUMBER, _FIRST = operator.attrgetter("number"), operator.itemgetter(0)


class FairQueue:
    """Waiting requests. What is done for one of them takes hardly longer where thousands wait.

    An agent's service is the number of tokens that were read and written for it, divided by its
    share. The agent with the least service comes first (fair queueing by tokens, Sheng et al.
    2024), its requests in the order of submission. An agent that is new, or returns, starts with
    the service of the least served active agent, so that an absent agent saves up no service.

    Of an agent's first requests those are admitted first of which the most is cached (`by_cached`):
    what they share with each other stays for all of them, and is not evicted and computed again in
    between. Agents keep their turns, and no request is passed for long.

    Half of a share is the same for all agents, so that none starves, and half is its contribution
    to the whole workflow (Hive, section 7). One whose contribution is not known yet has an equal
    share.

    Args:
      contributions: gives those of the active agents, which add up to at most 1; None for equal
        shares.
    """

    def __init__(self, contributions: Callable[[], Mapping[str, float]] | None = None) -> None:
        self.contributions = contributions or dict[str, float]
        self._requests: dict[Request, None] = {}
        # The same by priority and agent, each in the order of submission.
        self._groups: dict[tuple[int, str], list[Request]] = {}
        self._served: dict[str, float] = {}
        self._active: dict[str, int] = {}  # waiting and running requests of each agent
        # How many later ones were admitted before a request that is its agent's first.
        self._passed: collections.Counter[Request] = collections.Counter()

    def __len__(self) -> int:
        return len(self._requests)

    def unordered(self) -> list[Request]:
        """The requests in no order, in any thread."""
        return list(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterates in the order of service as it is at the beginning; requests may be taken meanwhile."""
        return self._in_turn(lambda group: group)

    def _in_turn(self, order: Callable[[list[Request]], Iterable[Request]]) -> Iterator[Request]:
        """The requests in the agents' turns, each group's own in the order that is given for it."""

        def turns(group: list[Request]) -> Iterator[tuple[int, Request]]:
            return zip(map(_NUMBER, group), order(group), strict=True)

        equal = collections.defaultdict[tuple[int, float], list[list[Request]]](list)
        for (priority, agent), group in self._groups.items():
            equal[-priority, self._served[agent]].append(group.copy())
        for _, groups in sorted(equal.items()):
            if len(groups) == 1:
                yield from order(groups[0])
            else:
                yield from (each for _, each in heapq.merge(*map(turns, groups), key=_FIRST))

    def by_cached(self, cached: Callable[[Request], int]) -> Iterator[Request]:
        """Iterates in the order of admission.

        The turns of the agents are those of the iteration. Each agent takes its turns with the
        requests of which the most is cached; equal ones, and those that are compared with too many
        others, in the order of submission.

        Args:
          cached: gives the tokens of a request that are cached, asked when its agent's turn comes.
        """
        return self._in_turn(lambda group: self._compared(group, cached))

    def _compared(
        self, group: list[Request], cached: Callable[[Request], int]
    ) -> Iterable[Request]:
        """The requests of one agent and priority, given in the order of submission, in that of
        admission."""
        if len(group) == 1 or self._passed[group[0]] >= _MOST_PASSED:
            return group
        first = sorted(group[:_COMPARED], key=lambda request: (-cached(request), request.number))
        return itertools.chain(first, itertools.islice(group, _COMPARED, None))

    def add(self, request: Request) -> None:
        """Adds a new request."""
        if not self._active.get(request.agent):
            least = min((self._served[agent] for agent in self._active), default=0.0)
            self._served[request.agent] = max(self._served.get(request.agent, 0.0), least)
        self._active[request.agent] = self._active.get(request.agent, 0) + 1
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """Returns a request that was running to the queue."""
        self._requests[request] = None
        group = self._groups.setdefault((request.priority, request.agent), [])
        bisect.insort(group, request, key=_NUMBER)

    def take(self, request: Request) -> None:
        """Removes a request that is to run."""
        self._remove(request)
        group = self._groups.get((request.priority, request.agent))
        if group and group[0].number < request.number:
            self._passed[group[0]] += 1

    def _remove(self, request: Request) -> None:
        del self._passed[request]  # no error of a counter where it is not there
        if request in self._requests:
            del self._requests[request]
            key = request.priority, request.agent
            group = self._groups[key]
            del group[bisect.bisect_left(group, request.number, key=_NUMBER)]
            if not group:
                del self._groups[key]

    def finish(self, request: Request) -> None:
        """Removes a finished request and forgets agents that need not be remembered."""
        self._remove(request)
        self._active[request.agent] -= 1
        if self._active[request.agent]:
            return
        del self._active[request.agent]
        least = min((self._served[agent] for agent in self._active), default=None)
        if least is None:
            self._served.clear()
        elif len(self._served) > _MAX_AGENTS:
            # An absent agent with less service than all active ones counts as a new agent.
            self._served = {
                agent: served
                for agent, served in self._served.items()
                if agent in self._active or served > least
            }

    def serve(self, request: Request, tokens: int) -> None:
        """Counts tokens that were read or written for a request."""
        contributions = self.contributions()
        own, count = contributions.get(request.agent), len(contributions)
        share = 1.0 if own is None else _EQUAL_PART + (1 - _EQUAL_PART) * own * count
        self._served[request.agent] += tokens / share
