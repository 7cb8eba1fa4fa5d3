"""Classical eviction policies, and the choice of a policy by its name."""

import collections
import inspect
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxshare.serving.kvcache.contribution import Contribution
from jaxshare.serving.kvcache.policy import Policy, Segment, common_prefix, prefix_hash


class LRU(Policy):
    """Least recently used: evicts the oldest use first; of one request's segments the deepest."""

    def rank(self, segment: Segment, now: int) -> tuple:
        return segment.last_used, -segment.depth


class LFU(Policy):
    """Least frequently used: evicts the fewest uses first; among equals, the oldest use."""

    def rank(self, segment: Segment, now: int) -> tuple:
        return segment.uses, segment.last_used, -segment.depth


class Priority(Policy):
    """Evicts segments that only requests of a low priority used first; then the oldest use."""

    def rank(self, segment: Segment, now: int) -> tuple:
        return segment.priority, segment.last_used, -segment.depth


class SLRU(Policy):
    """Segmented LRU: segments used once are on probation and are evicted before protected ones.

    A second use protects a segment. Protected segments may hold at most `protected` of all cached
    tokens; beyond that the least recently used ones return to probation, as if they had just been
    used. So a flood of new tokens passes through probation alone.
    """

    def __init__(self, protected: float = 0.8):
        if not 0 < protected < 1:
            raise ValueError(
                f"the protected share is {protected}, but it must be between 0 and 1, both excluded"
            )
        self._share = protected
        self._clock = self._total = self._protected_tokens = 0
        self._tokens: dict[Segment, int] = {}
        self._stamps: dict[Segment, int] = {}
        self._protected: collections.OrderedDict[Segment, None] = collections.OrderedDict()

    def touched(self, segment: Segment, now: int) -> None:
        again = segment in self._tokens
        self._resize(segment, segment.tokens)
        self._stamp(segment)
        if not again:
            return
        if segment not in self._protected:
            self._protected[segment] = None
            self._protected_tokens += segment.tokens
        self._protected.move_to_end(segment)
        while self._protected_tokens > self._share * self._total:
            oldest, _ = self._protected.popitem(last=False)
            self._protected_tokens -= self._tokens[oldest]
            self._stamp(oldest)

    def split(self, head: Segment, tail: Segment) -> None:
        if tail not in self._tokens:
            return
        self._resize(tail, tail.tokens)
        self._resize(head, head.tokens)
        self._stamps[head] = self._stamps[tail]
        if tail in self._protected:
            # It is as old as the tail, and the order of an OrderedDict is the order of age.
            order = list(self._protected)
            self._protected[head] = None
            self._protected_tokens += head.tokens
            for each in order[order.index(tail) :]:
                self._protected.move_to_end(each)

    def evicted(self, segment: Segment) -> None:
        if segment in self._tokens:
            self._resize(segment, 0)
            self._protected.pop(segment, None)
            del self._tokens[segment], self._stamps[segment]

    def rank(self, segment: Segment, now: int) -> tuple:
        return segment in self._protected, self._stamps.get(segment, 0), -segment.depth

    def _stamp(self, segment: Segment) -> None:
        self._clock += 1
        self._stamps[segment] = self._clock

    def _resize(self, segment: Segment, tokens: int) -> None:
        more = tokens - self._tokens.get(segment, 0)
        self._tokens[segment] = tokens
        self._total += more
        if segment in self._protected:
            self._protected_tokens += more


class Belady(Policy):
    """The offline optimum, from the prompts of all requests.

    Evicts segments that no later request uses first, then the one whose next use is latest. A
    segment is used by the first later request that shares more with it than the tokens before it;
    segments with the same next use are evicted by length, the longest first. For pieces of one size
    this order is the best there is (Belady, 1966); for pieces of different lengths in a tree it is
    a bound that no online policy can be expected to pass, not a proven one.

    Args:
      trace: the prompt of every request, in the order in which the engine counts them from 0.
    """

    def __init__(self, trace: Sequence[Sequence[int]]):
        self._trace = [np.asarray(tokens, np.int64) for tokens in trace]
        self._by_depth: dict[int, dict[bytes, int]] = {}
        self._common: dict[int, np.ndarray] = {}

    def rank(self, segment: Segment, now: int) -> tuple:
        prompt = self._prompt_through(segment)
        if prompt is None:
            return -math.inf, -segment.tokens
        start = segment.depth - segment.tokens
        uses = np.flatnonzero(self._common_tokens(prompt)[now + 1 :] > start)
        return (-float(now + 1 + uses[0]) if len(uses) else -math.inf), -segment.tokens

    def _prompt_through(self, segment: Segment) -> int | None:
        """The number of a prompt that contains the segment.

        None where there is none, as for text that was written and never read.
        """
        prompts = self._by_depth.get(segment.depth)
        if prompts is None:
            prompts = self._by_depth[segment.depth] = {
                prefix_hash(tokens[: segment.depth]): i
                for i, tokens in enumerate(self._trace)
                if len(tokens) >= segment.depth
            }
        return prompts.get(segment.prefix_hash)

    def _common_tokens(self, prompt: int) -> np.ndarray:
        """The number of leading tokens that each prompt has in common with this one."""
        counts = self._common.get(prompt)
        if counts is None:
            counts = self._common[prompt] = np.asarray(
                [common_prefix(self._trace[prompt], other) for other in self._trace]
            )
        return counts


POLICIES: Mapping[str, type[Policy]] = {
    "contribution": Contribution,
    "lru": LRU,
    "lfu": LFU,
    "slru": SLRU,
    "priority": Priority,
}


def make_policy(name: str, **options: object) -> Policy:
    """Creates the policy of this name.

    Options are the arguments of `Contribution` and `SLRU`; the others have none.

    Raises:
      ValueError: there is no such policy, it has no such option, or an option is out of its range.
    """
    if name not in POLICIES:
        raise ValueError(
            f"there is no residency policy {name!r}; choose one of {', '.join(POLICIES)}"
        )
    allowed = (
        inspect.signature(POLICIES[name]).parameters
        if POLICIES[name].__init__ is not Policy.__init__
        else {}
    )
    if unknown := options.keys() - allowed.keys():
        raise ValueError(
            f"the residency policy {name!r} has no option {', '.join(sorted(unknown))}; "
            f"it has {', '.join(allowed) or 'none'}"
        )
    return POLICIES[name](**options)
