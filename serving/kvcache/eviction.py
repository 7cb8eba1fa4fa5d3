"""The order in which cached tokens leave the accelerator: classical policies, and the choice of one
by its name."""

import collections
import inspect
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxshare.serving.kvcache.contribution import Contribution
from jaxshare.serving.kvcache.policy import Policy, Segment, prefix_hash


class LRU(Policy):
    """What was not used for longest leaves first; of one call's segments the deepest."""

    def rank(self, segment: Segment, now: int) -> tuple:
        return segment.last_used, -segment.depth


class LFU(Policy):
    """What the fewest calls used leaves first; among equals, what was not used for longest."""

    def rank(self, segment: Segment, now: int) -> tuple:
        return segment.uses, segment.last_used, -segment.depth


class Priority(Policy):
    """What only calls of a low priority used leaves first; among equals, what was not used for
    longest."""

    def rank(self, segment: Segment, now: int) -> tuple:
        return segment.priority, segment.last_used, -segment.depth


class SLRU(Policy):
    """Segmented LRU: what was used once is on probation, what was used again is protected, and
    probation leaves first.

    Protected segments may hold at most `protected` of all tokens that are kept; beyond, those that
    were not used for longest return to probation, as if they had been used just now. So a flood of
    new tokens passes through probation alone.
    """

    def __init__(self, protected: float = 0.8):
        if not 0 < protected < 1:
            raise ValueError(
                f"the protected share is {protected}, but it must be between 0 and 1, both excluded"
            )
        self._share = protected
        self._clock = self._total = self._held = 0
        self._tokens: dict[Segment, int] = {}
        self._stamps: dict[Segment, int] = {}
        self._protected: collections.OrderedDict[Segment, None] = collections.OrderedDict()

    def used(self, segment: Segment, now: int) -> None:
        again = segment in self._tokens
        self._resize(segment, segment.tokens)
        self._stamp(segment)
        if not again:
            return
        if segment not in self._protected:
            self._protected[segment] = None
            self._held += segment.tokens
        self._protected.move_to_end(segment)
        while self._held > self._share * self._total:
            oldest, _ = self._protected.popitem(last=False)
            self._held -= self._tokens[oldest]
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
            self._held += head.tokens
            for each in order[order.index(tail) :]:
                self._protected.move_to_end(each)

    def gone(self, segment: Segment) -> None:
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
            self._held += more


class Belady(Policy):
    """The offline optimum: knows the prompts of all calls, and lets go first what no call to come
    uses, then what is used last.

    A segment is used by the first call to come that shares more with it than what lies before it;
    segments that are used at the same time leave by length, the longest first. For pieces of one
    size this order is the best there is (Belady, 1966); for pieces of different lengths in a tree
    it is a bound that nothing online can be expected to pass, no proven one.

    Args:
      trace: the prompt of every call, in the order in which the engine counts them from 0.
    """

    def __init__(self, trace: Sequence[Sequence[int]]):
        self._trace = [np.asarray(tokens, np.int64) for tokens in trace]
        self._ends: dict[int, dict[bytes, int]] = {}
        self._common: dict[int, np.ndarray] = {}

    def rank(self, segment: Segment, now: int) -> tuple:
        call = self._found(segment)
        if call is None:
            return -math.inf, -segment.tokens
        uses = np.flatnonzero(self._shared(call)[now + 1 :] > segment.depth - segment.tokens)
        return (-float(now + 1 + uses[0]) if len(uses) else -math.inf), -segment.tokens

    def _found(self, segment: Segment) -> int | None:
        """A call whose prompt runs through the segment; None where no prompt does, as through text
        that was written and never read."""
        ends = self._ends.get(segment.depth)
        if ends is None:
            ends = self._ends[segment.depth] = {
                prefix_hash(tokens[: segment.depth]): i
                for i, tokens in enumerate(self._trace)
                if len(tokens) >= segment.depth
            }
        return ends.get(segment.end)

    def _shared(self, call: int) -> np.ndarray:
        """How many leading tokens each call of the trace has in common with this one."""
        found = self._common.get(call)
        if found is None:
            found = self._common[call] = np.asarray(
                [_common(self._trace[call], other) for other in self._trace]
            )
        return found


def _common(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


POLICIES: Mapping[str, type[Policy]] = {
    "contribution": Contribution,
    "lru": LRU,
    "lfu": LFU,
    "slru": SLRU,
    "priority": Priority,
}


def make_policy(name: str, **options: object) -> Policy:
    """The policy of that name, with its options: those of `Contribution` and `SLRU` are their
    arguments, the others have none.

    Raises:
      ValueError: there is no such policy, it has no such option, or an option is out of its range.
    """
    if name not in POLICIES:
        raise ValueError(
            f"there is no residency policy {name!r}; choose one of {', '.join(POLICIES)}"
        )
    known = (
        inspect.signature(POLICIES[name]).parameters
        if POLICIES[name].__init__ is not Policy.__init__
        else {}
    )
    if unknown := options.keys() - known.keys():
        raise ValueError(
            f"the residency policy {name!r} has no option {', '.join(sorted(unknown))}; "
            f"it has {', '.join(known) or 'none'}"
        )
    return POLICIES[name](**options)
