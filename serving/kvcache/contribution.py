"""Contribution: evicts segments in the order of what their owners bring to the whole workflow
(Hive, section 7), from the requests of a sliding window."""

import collections
import dataclasses
import itertools
from collections.abc import Mapping

from jaxshare.serving.kvcache.contribution_formulas import (
    ALPHA,
    activity,
    collaborative,
    concurrency,
    contribution,
    durability,
    edge,
    efficiency,
    hit_density,
    intrinsic,
    liveliness,
    workload,
)
from jaxshare.serving.kvcache.policy import Observation, Policy, Segment
from jaxshare.serving.kvcache.search_places import SearchPlaces

WINDOW = 128
STAGES = 8
"""Stages of segments that the last 0, 1, 2 to 3, 4 to 7 ... requests of their agent did not use;
the last stage has no end."""
CLASSES = 4
"""Classes of segments that an agent used 1, 2 to 3, 4 to 7, and more times."""
PRIOR_TOKENS = 256
"""The prior weighs as much as this many observed tokens, about a page of text."""


@dataclasses.dataclass(eq=False, slots=True)
class _ObservedRequest:
    """A request in the window, with what it added to the sums, so that it can be subtracted."""

    observation: Observation
    new_tokens: int = 0
    # (class, stage, used): tokens
    outcomes: dict[tuple[int, int, bool], int] = dataclasses.field(default_factory=dict)


class _AgentCounts:
    """Sums over an agent's requests in the window, and the last uses of its tokens.

    Attributes:
      number: of its latest request, counted from 1 over all time.
      last_uses: number of a request -> for each class the tokens whose last use by this agent it
        was.
      num_segments: segments, those evicted in the window included, that record this agent's use.
      times: the engine's numbers of its requests in the window.
      gaps: the longest and the mean between them; None until they are needed.
    """

    def __init__(self):
        self.number = self.num_segments = self.requests = self.running = 0
        self.prompt_tokens = self.reused_tokens = self.new_tokens = 0
        self.peaks: collections.Counter[int] = collections.Counter()
        self.times: collections.deque[int] = collections.deque()
        self.gaps: tuple[int, float] | None = None
        self.last_uses: dict[int, list[int]] = {}
        self.outcomes: collections.Counter[tuple[int, int, bool]] = collections.Counter()
        self.latest: _ObservedRequest | None = None

    def add_last_use(self, number: int, kind: int, tokens: int) -> None:
        """Adds tokens whose last use is that request, or subtracts them.

        Uses older than all stages are counted together.
        """
        self.last_uses.setdefault(self.clamped(number), [0] * CLASSES)[kind] += tokens

    def clamped(self, number: int) -> int:
        """The request under whose number a last use is counted."""
        return max(number, self.number - 2 ** (STAGES - 2) - 1)


def _stage(missed: int) -> int:
    return min(missed.bit_length(), STAGES - 1)


@dataclasses.dataclass(slots=True)
class _Use:
    """An agent's use of a segment.

    Attributes:
      number: of its last request that used it.
      uses: requests that used it; seen: the same as the engine counts it.
      tokens: of the segment at the last use.
    """

    number: int
    uses: int
    tokens: int
    seen: int

    @property
    def kind(self) -> int:
        """The class of the segment."""
        return min(self.uses.bit_length(), CLASSES) - 1


class Contribution(Policy):
    """Evicts segments by the contribution of their owners, and the chance that those reuse them.

        rank = (sum over owners i of contribution_i * liveliness_i * density_i(segment)
                * durability_i(segment), last use)

    Contributions follow `contribution_formulas.contribution`, from the last `window` requests,
    updated once in `round_calls` requests. Those of all owners are added: they are shares of one
    whole (the Shapley value of a sum of games is the sum of the values), so the sum is the share of
    the workflow that loses something with the segment. 1 - prod(1 - c) would be nearly the same
    while shares are small, and less than either owner's loss where they are not.

    The plain order of the paper is by contribution and recency alone (`expect=False`). Then a hot
    agent's abandoned context, which no request will read again, stays until all that belongs to
    others is gone; and an agent that has ended contributes as long as the window is. So an owner's
    contribution is weighted by the chance that it uses the segment again:

    - `liveliness`, from the gaps between the agent's requests in the window. (For one request: the
      number of active agents, as if they took turns.)
    - density: `hit_density` of the agent's habits in the window. Of its tokens that its last k
      requests did not use (in STAGES), and that it used in as many requests as this segment (in
      CLASSES), how many did its next request use? Habits are counted in tokens, so that splitting a
      segment changes nothing; their prior is that of all agents together, and the prior of these is
      `durability` of unused tokens. The uses of an evicted segment are kept for a window, in case
      it returns.
    - `durability` of the segment itself. A segment that an agent used often is likelier to last
      than one that it used twice, also where neither has missed a use yet. It matters between
      agents that contribute nearly the same: by contributions alone all that one holds, its system
      prompt too, would be evicted before the newest tokens of another that is ahead by a
      thousandth. So both lose their newest tokens first.
    - zero, where the search that alone has used a segment does not come back to it; see
      `jaxshare.serving.kvcache.search_places`.

    Args:
      alpha: the weight of the intrinsic utility; 1 - alpha is that of the collaborative one.
      window: requests, of all agents together, that count.
      round_calls: requests between two updates of the contributions.
      expect: whether expected hits count.

    Raises:
      ValueError: an argument is out of its range.
    """

    def __init__(
        self, alpha: float = ALPHA, window: int = WINDOW, round_calls: int = 1, expect: bool = True
    ):
        if not 0 <= alpha <= 1:
            raise ValueError(
                f"alpha is {alpha}, but it weighs two terms against each other and must be from 0 "
                "to 1"
            )
        for name, given in (("window", window), ("round_calls", round_calls)):
            if given < 1:
                raise ValueError(f"{name} is {given} requests, but it must be at least 1")
        self._alpha, self._window, self._round, self._expect = alpha, window, round_calls, expect
        self._requests: collections.deque[_ObservedRequest] = collections.deque()
        self._agents: dict[str, _AgentCounts] = {}
        self._pairs: dict[tuple[str, str], list[int]] = {}
        self._outcomes: collections.Counter[tuple[int, int, bool]] = collections.Counter()
        self._uses: dict[Segment, dict[str, _Use]] = {}
        self._evicted: collections.OrderedDict[bytes, tuple[int, dict[str, _Use]]] = (
            collections.OrderedDict()
        )
        self._num_observed, self._places = 0, SearchPlaces()
        self._contributions: dict[str, float] = {}
        # Many requests can be admitted before the contributions of hundreds of agents are asked for.
        self._is_due = False
        # Every eviction ranks all segments, again and again: ranks are cached until a change.
        self._now = 0
        self._scores: dict[Segment, float] = {}
        self._densities: dict[tuple[_AgentCounts, int], list[float]] = {}

    def contributions(self) -> dict[str, float]:
        """Every active agent's contribution, as of the last update.

        They add up to 1, or to alpha while nothing is shared. They are never changed: others come in
        their place.
        """
        if self._is_due:
            self._update()
        return self._contributions

    def observe(self, observation: Observation) -> None:
        self._clear_ranks(observation.now)
        self._places.observe(observation.place, observation.prompt_tokens, observation.now)
        self._num_observed += 1
        entry = _ObservedRequest(observation)
        agent = self._agents.setdefault(observation.agent, _AgentCounts())
        # All uses by the agent's previous request were reported by now; tokens that it did not use
        # have waited one request longer.
        waited = [[0] * CLASSES for _ in range(STAGES)]
        for number, tokens in agent.last_uses.items():
            if number < agent.number:
                of_stage = waited[_stage(agent.number - number - 1)]
                for kind, count in enumerate(tokens):
                    of_stage[kind] += count
        for stage, counts in enumerate(waited):
            for kind, count in enumerate(counts):
                if count:
                    self._add_outcome(agent, entry, (kind, stage, False), count)
        agent.number += 1
        oldest = agent.clamped(0)
        for number in [n for n in agent.last_uses if n < oldest]:
            for kind, count in enumerate(agent.last_uses.pop(number)):
                agent.add_last_use(number, kind, count)
        agent.latest = entry
        agent.times.append(observation.now)
        agent.gaps = None
        self._requests.append(entry)
        self._count(entry, 1)
        while len(self._requests) > self._window:
            self._slide()
        self._forget_evicted()
        if (self._num_observed - 1) % self._round == 0:
            self._is_due = True
            if self._round > 1:
                self._update()  # the next request is not to count

    def finished(self, agent: str, new_tokens: int) -> None:
        counts = self._agents.get(agent)
        if counts and counts.latest:
            # Adding to the latest instead of the request that finished changes a sum over the
            # window only at its far end.
            counts.latest.new_tokens += new_tokens
            counts.new_tokens += new_tokens

    def touched(self, segment: Segment, now: int) -> None:
        self._clear_ranks(now)
        self._places.touched(segment, now)
        uses = self._uses.get(segment)
        if uses is None:
            _, uses = self._evicted.pop(segment.prefix_hash, (0, {}))
            for use in uses.values():
                use.seen = 0  # the engine counts anew
            self._uses[segment] = uses
        for name, count in segment.owners.items():
            use = uses.get(name)
            if use and use.seen == count:
                continue
            agent = self._agents.setdefault(name, _AgentCounts())
            if use is None:
                use = uses[name] = _Use(agent.number, 1, segment.tokens, count)
                agent.num_segments += 1
                agent.add_last_use(use.number, use.kind, use.tokens)
                continue
            agent.add_last_use(use.number, use.kind, -use.tokens)
            if agent.number > use.number:
                if agent.latest:
                    stage = _stage(agent.number - use.number - 1)
                    self._add_outcome(agent, agent.latest, (use.kind, stage, True), use.tokens)
                use.number, use.uses = agent.number, use.uses + 1
            use.tokens, use.seen = segment.tokens, count
            agent.add_last_use(use.number, use.kind, use.tokens)

    def split(self, head: Segment, tail: Segment) -> None:
        self._places.split(head, tail)
        self._scores.pop(tail, None)
        uses = self._uses.get(tail)
        if uses is None:
            return
        self._uses[head] = {}
        for name, use in uses.items():
            head_tokens = min(head.tokens, use.tokens)
            self._uses[head][name] = dataclasses.replace(use, tokens=head_tokens)
            use.tokens -= head_tokens
            self._agents[name].num_segments += 1

    def evicted(self, segment: Segment) -> None:
        self._scores.pop(segment, None)
        self._places.evicted(segment)
        uses = self._uses.pop(segment, None)
        if uses is not None:
            _, before = self._evicted.pop(segment.prefix_hash, (0, {}))
            self._forget(before)
            self._evicted[segment.prefix_hash] = self._num_observed, uses

    def rank(self, segment: Segment, now: int) -> tuple:
        if now != self._now:
            self._clear_ranks(now)
        score = self._scores.get(segment)
        if score is None:
            score = self._scores[segment] = self._score(segment, now)
        return score, segment.last_used, -segment.depth

    def may_return(self, segment: Segment) -> bool:
        return not (self._expect and self._places.is_over(segment))

    def _clear_ranks(self, now: int) -> None:
        """Drops cached ranks, which may be outdated."""
        self._now = now
        self._scores.clear()
        self._densities.clear()

    def _score(self, segment: Segment, now: int) -> float:
        uses = self._uses.get(segment, {})
        score = 0.0
        if not self.may_return(segment):
            return score
        contributions = self.contributions()
        for name in segment.owners:
            value = contributions.get(name, 0.0)
            if value and self._expect and name in uses:
                agent, use = self._agents[name], uses[name]
                missed = agent.number - use.number
                value *= (
                    self._density(agent, use.kind)[_stage(missed)]
                    * durability(use.uses, missed)
                    * self._liveliness(agent, now)
                )
            score += value
        return score

    def _update(self) -> None:
        """Computes the contributions from the sums over the window."""
        self._is_due = False
        active = {name: agent for name, agent in self._agents.items() if agent.requests}
        own = intrinsic(
            [
                {name: activity(a.requests) for name, a in active.items()},
                {name: workload(a.prompt_tokens, a.new_tokens) for name, a in active.items()},
                {name: efficiency(a.prompt_tokens, a.reused_tokens) for name, a in active.items()},
                {
                    name: concurrency(a.running / a.requests, max(a.peaks))
                    for name, a in active.items()
                },
            ]
        )
        shared = collaborative({pair: edge(*sums) for pair, sums in self._pairs.items()}, active)
        self._contributions = contribution(own, shared, self._alpha)

    def _count(self, entry: _ObservedRequest, sign: int) -> None:
        """Adds a request to the sums (or subtracts it)."""
        observation = entry.observation
        agent = self._agents[observation.agent]
        agent.requests += sign
        agent.prompt_tokens += sign * observation.prompt_tokens
        agent.reused_tokens += sign * observation.reused_tokens
        agent.running += sign * observation.running
        agent.peaks[observation.running] += sign
        if not agent.peaks[observation.running]:
            del agent.peaks[observation.running]
        for other, tokens in observation.shared.items():
            if tokens and other != observation.agent:
                sums = self._pairs.setdefault((observation.agent, other), [0, 0])
                sums[0] += sign * tokens
                sums[1] += sign
                if not sums[1]:
                    del self._pairs[observation.agent, other]

    def _slide(self) -> None:
        """Takes the oldest request out of the window."""
        entry = self._requests.popleft()
        agent = self._agents[entry.observation.agent]
        self._count(entry, -1)
        agent.new_tokens -= entry.new_tokens
        agent.times.popleft()
        agent.gaps = None
        for key, tokens in entry.outcomes.items():
            for sums in (agent.outcomes, self._outcomes):
                sums[key] -= tokens
        if agent.latest is entry:
            agent.latest = None
        self._retire(entry.observation.agent)

    def _add_outcome(
        self, agent: _AgentCounts, entry: _ObservedRequest, key: tuple[int, int, bool], tokens: int
    ) -> None:
        if tokens:
            entry.outcomes[key] = entry.outcomes.get(key, 0) + tokens
            agent.outcomes[key] += tokens
            self._outcomes[key] += tokens

    def _forget_evicted(self) -> None:
        """Forgets the uses of segments that were evicted more than a window ago."""
        while self._evicted:
            digest, (when, uses) = next(iter(self._evicted.items()))
            if self._num_observed - when <= self._window:
                break
            del self._evicted[digest]
            self._forget(uses)

    def _forget(self, uses: Mapping[str, _Use]) -> None:
        for name, use in uses.items():
            self._agents[name].add_last_use(use.number, use.kind, -use.tokens)
            self._agents[name].num_segments -= 1
            self._retire(name)

    def _retire(self, name: str) -> None:
        """Forgets an agent without requests in the window and segments.

        There may be a new agent for every task.
        """
        agent = self._agents[name]
        if not agent.requests and not agent.num_segments:
            del self._agents[name]

    def _liveliness(self, agent: _AgentCounts, now: int) -> float:
        if not agent.times:
            return 0.0
        if len(agent.times) == 1:
            num_agents = len(self._contributions)
            return liveliness(now - agent.times[0], num_agents, num_agents)
        if agent.gaps is None:
            gaps = [max(1, after - before) for before, after in itertools.pairwise(agent.times)]
            agent.gaps = max(gaps), sum(gaps) / len(gaps)
        return liveliness(now - agent.times[-1], *agent.gaps)

    def _density(self, agent: _AgentCounts, kind: int) -> list[float]:
        """The hit density of an agent's segments of this class, for every stage."""
        densities = self._densities.get((agent, kind))
        if densities is None:
            hazards = []
            for stage in range(STAGES):
                hazard = durability(0, 2 ** (stage - 1) if stage else 0)
                for outcomes in (self._outcomes, agent.outcomes):
                    used, unused = outcomes[kind, stage, True], outcomes[kind, stage, False]
                    hazard = (used + PRIOR_TOKENS * hazard) / (used + unused + PRIOR_TOKENS)
                hazards.append(hazard)
            densities = self._densities[agent, kind] = hit_density(hazards)
        return densities
