"""Contribution: what the agents that own a segment bring to the whole workflow (Hive, section 7),
as an order in which segments leave.

First the terms, each a function of its own with its formula; the paper's text has lost most of its
formulas, so these are ours, with reasons. Then `Contribution`, a
`jaxshare.serving.kvcache.policy.Policy` that feeds them from the calls of a sliding window.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # That module lists all policies, this one too.
    from jaxshare.serving.kvcache.policy import Observation, Segment

ALPHA = 0.4
"""How much an agent's own use counts against what it shares. The paper's number is lost; it says
that sharing counts for more."""
WINDOW = 128
FLOOR = 0.1
"""What a factor of the intrinsic utility is worth for the agent that has nothing of it: a product
must not end at the first zero."""
STAGES = 8
"""Segments that the last 0, 1, 2 to 3, 4 to 7 ... calls of their agent left out are told apart; the
last of these has no end."""
CLASSES = 4
"""Segments that an agent used 1, 2 to 3, 4 to 7, and more times are told apart."""
PRIOR_TOKENS = 256
"""What is known beforehand weighs as much as having watched this many tokens, about a page of
text."""


def floored(values: Mapping[str, float]) -> dict[str, float]:
    """FLOOR + (1 - FLOOR) * x / max x: the strongest agent gets 1, one with nothing FLOOR. All
    zero: 1 for each, it tells none apart."""
    most = max(values.values(), default=0)
    return {name: FLOOR + (1 - FLOOR) * x / most if most else 1.0 for name, x in values.items()}


def shares(values: Mapping[str, float]) -> dict[str, float]:
    """x / sum of x, so that the agents' values add up to 1; all zero stay zero."""
    total = sum(values.values())
    return {name: x / total if total else 0.0 for name, x in values.items()}


def activity(calls: int) -> float:
    """A = calls in the window. (The paper: scales with the frequency of invocation; the window is
    the same for all agents.)"""
    return float(calls)


def workload(prompt_tokens: int, new_tokens: int) -> float:
    """W = sqrt(tokens in + tokens out), summed over the window. (The paper: the aggregate volume of
    input and output.)

    The root is ours, for the reason the paper gives for its own: a large volume of tokens must not
    decide alone. A retrieval agent reads documents of thousands of tokens and none of them twice.
    """
    return math.sqrt(prompt_tokens + new_tokens)


def efficiency(prompt_tokens: int, reused_tokens: int) -> float:
    """E = reused tokens / prompt tokens, 0 without prompts. (The paper: productivity through reuse
    of the cache.)"""
    return reused_tokens / prompt_tokens if prompt_tokens else 0.0


def concurrency(average: float, peak: float) -> float:
    """P = (average + peak) / 2 of the agent's calls under way at each of its calls. (The paper:
    both average and peak.)"""
    return (average + peak) / 2


def intrinsic(factors: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """I = product of the `floored` factors, then `shares` of it. Each factor is one of the four
    above, for every agent (equation 6)."""
    levels = [floored(factor) for factor in factors]
    return shares({name: math.prod(level[name] for level in levels) for name in levels[0]})


def edge(shared_tokens: int, events: int) -> float:
    """w = sqrt(shared tokens) * log(1 + reuse events) (equation 8): a large volume does not decide
    alone, and repetition is rewarded."""
    return math.sqrt(shared_tokens) * math.log1p(events)


def collaborative(
    edges: Mapping[tuple[str, str], float], agents: Iterable[str]
) -> dict[str, float]:
    """C_i = sum over j of (w_ij + w_ji), then `shares` of it (equation 7): what i reuses of
    others', and others of i's, counts for i."""
    found = dict.fromkeys(agents, 0.0)
    for pair, weight in edges.items():
        for name in pair:
            if name in found:
                found[name] += weight
    return shares(found)


def contribution(
    own: Mapping[str, float], shared: Mapping[str, float], alpha: float = ALPHA
) -> dict[str, float]:
    """alpha * I + (1 - alpha) * C for every agent (equation 5)."""
    return {name: alpha * own[name] + (1 - alpha) * shared[name] for name in own}


def hit_density(hazards: Sequence[float]) -> list[float]:
    """For the begin of each stage, the highest rate of hits that waiting from there on can have, in
    hits a call of the agent.

    hazards[s] is the chance that the agent's next call uses a segment that is in stage s: which its
    last k calls left out, with k.bit_length() = s. Waiting from there on, until a stage ends, gives
    hits = P(used by then) for E[calls waited]; the density is the most that hits / calls is for any
    of these ends. (This is Gittins' index of keeping the segment. Within a stage the quotient goes
    only up or only down, so no other time to stop is better.) The last stage goes on for ever.
    """
    found = []
    for begin in range(len(hazards)):
        alive, hits, waited, best = 1.0, 0.0, 0.0, 0.0
        for stage in range(begin, len(hazards)):
            hazard, calls = hazards[stage], 2 ** max(stage - 1, 0)
            if hazard:
                used = alive if stage == len(hazards) - 1 else alive * (1 - (1 - hazard) ** calls)
                alive, hits, waited = alive - used, hits + used, waited + used / hazard
                best = max(best, hits / waited)
            else:
                waited += alive * calls
        found.append(best)
    return found


def durability(uses: int, missed: int) -> float:
    """(uses + 1) / (uses + missed + 2): the chance that what so many calls used, and so many since
    left out, is used by the next.

    That is the rule of succession, on nothing but the segment's own history.
    """
    return (uses + 1) / (uses + missed + 2)


def liveliness(silence: float, longest: float, mean: float) -> float:
    """exp(-max(0, silence - longest) / mean): 1 while an agent is silent no longer than it was
    before, then ever less.

    Args:
      silence: calls, of all agents, since the agent's latest.
      longest, mean: of the same between its calls.
    """
    return math.exp(-(silence - longest) / mean) if silence > longest else 1.0


@dataclasses.dataclass(eq=False, slots=True)
class _ObservedRequest:
    """A call in the window, with what it added to the sums, so that it can be taken from them
    again."""

    observation: "Observation"
    new_tokens: int = 0
    # (class, stage, used): tokens
    outcomes: dict[tuple[int, int, bool], int] = dataclasses.field(default_factory=dict)


class _AgentCounts:
    """What the window knows of an agent, as sums; and how long which of its tokens have been
    waiting for it.

    Attributes:
      number: of its latest call, counted from 1 over all time.
      waiting: number of a call -> for each class the tokens whose last use by this agent it was.
      held: segments, those that were dropped in the window too, that remember this agent's use.
      times: when its calls in the window came, in the engine's count.
      gaps: the longest and the mean between them; None until they are asked for.
    """

    def __init__(self):
        self.held = self.number = self.calls = self.prompt_tokens = self.reused_tokens = (
            self.new_tokens
        ) = self.running = 0
        self.peaks: collections.Counter[int] = collections.Counter()
        self.times: collections.deque[int] = collections.deque()
        self.gaps: tuple[int, float] | None = None
        self.waiting: dict[int, list[int]] = {}
        self.outcomes: collections.Counter[tuple[int, int, bool]] = collections.Counter()
        self.latest: _ObservedRequest | None = None

    def wait(self, number: int, kind: int, tokens: int) -> None:
        """So many tokens more (or fewer) have their last use in that call. What is older than all
        stages stands together."""
        self.waiting.setdefault(self.stood(number), [0] * CLASSES)[kind] += tokens

    def stood(self, number: int) -> int:
        return max(number, self.number - 2 ** (STAGES - 2) - 1)


def _stage(missed: int) -> int:
    return min(missed.bit_length(), STAGES - 1)


@dataclasses.dataclass(slots=True)
class _Use:
    """An agent's use of a segment: the number of its last call that used it, how often, the tokens
    then, and the engine's count."""

    number: int
    uses: int
    tokens: int
    seen: int

    @property
    def kind(self) -> int:
        return min(self.uses.bit_length(), CLASSES) - 1


class Contribution:
    """Segments leave in the order of what their owners contribute, and of whether those will use
    them again; then by recency.

        rank = (sum over owners i of contribution_i * liveliness_i * density_i(segment) * durability_i(segment), last use)

    A contribution is what `contribution` says, from the last `window` calls, once in `round_calls`
    calls. All owners' are added: they are shares of one whole (the Shapley value of a sum of games
    is the sum of the values), so the sum is the share of the workflow that loses something with the
    segment. 1 - prod(1 - c) would be nearly the same while shares are small, and less than either
    owner's loss where they are not.

    The plain order of the paper is by contribution and recency alone (`expect=False`). Then a hot
    agent's abandoned context, which nobody will read again, stays until all that belongs to others
    is gone; and an agent that ended its work contributes as long as the window is. So what an owner
    contributes counts as far as it can be expected to use the segment again:

    - `liveliness`, from the gaps between the agent's calls in the window. (Of one that called once:
      the number of active agents, as if they took turns.)
    - density: `hit_density` of the agent's habits in the window. Of its tokens that its last k
      calls left out (in STAGES), and that it used in as many calls as this segment (in CLASSES),
      how many did its next call use? Habits are counted in tokens, so that cutting a segment in two
      changes nothing; they begin at those of all agents together, and these at `durability` of what
      nobody used yet. What is known of a segment that was dropped is kept for a window, in case it
      returns.
    - `durability` of the segment itself. What an agent used often is likelier to last than what it
      used twice, also where neither has failed yet. It matters between agents that contribute
      nearly the same: by contributions alone all that one holds, its system prompt too, would leave
      before the newest tokens of another that is ahead by a thousandth. So both lose what is newest
      first.

    Args:
      alpha: the weight of the intrinsic utility; 1 - alpha is that of the collaborative one.
      window: calls, of all agents together, that count.
      round_calls: calls between two updates of the contributions.
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
                raise ValueError(f"{name} is {given} calls, but it must be at least 1")
        self._alpha, self._window, self._round, self._expect = alpha, window, round_calls, expect
        self._calls: collections.deque[_ObservedRequest] = collections.deque()
        self._agents: dict[str, _AgentCounts] = {}
        self._pairs: dict[tuple[str, str], list[int]] = {}
        self._outcomes: collections.Counter[tuple[int, int, bool]] = collections.Counter()
        self._uses: dict[Segment, dict[str, _Use]] = {}
        self._dropped: collections.OrderedDict[bytes, tuple[int, dict[str, _Use]]] = (
            collections.OrderedDict()
        )
        self._observed = 0
        self._contributions: dict[str, float] = {}
        # Whoever makes room asks for the ranks of all segments, again and again; so they are kept
        # until there is something new.
        self._now = 0
        self._scores: dict[Segment, float] = {}
        self._densities: dict[tuple[_AgentCounts, int], list[float]] = {}

    def contributions(self) -> dict[str, float]:
        """Every active agent's contribution, as of the last update. They add up to 1, or to alpha
        while nothing is shared."""
        return dict(self._contributions)

    def observe(self, call: "Observation") -> None:
        self._renew(call.now)
        self._observed += 1
        entry = _ObservedRequest(call)
        agent = self._agents.setdefault(call.agent, _AgentCounts())
        # All that the agent's call before this one used has been reported by now; what it left out
        # has waited one stage longer.
        for number, tokens in agent.waiting.items():
            if number < agent.number:
                for kind, count in enumerate(tokens):
                    self._outcome(
                        agent, entry, (kind, _stage(agent.number - number - 1), False), count
                    )
        agent.number += 1
        for number in [n for n in agent.waiting if n < agent.stood(n)]:
            for kind, count in enumerate(agent.waiting.pop(number)):
                agent.wait(number, kind, count)
        agent.latest = entry
        agent.times.append(call.now)
        agent.gaps = None
        self._calls.append(entry)
        self._count(entry, 1)
        while len(self._calls) > self._window:
            self._slide()
        self._forget()
        if (self._observed - 1) % self._round == 0:
            self._update()

    def finished(self, agent: str, new_tokens: int) -> None:
        known = self._agents.get(agent)
        if known and known.latest:
            # Which of the agent's calls ended makes no difference for a sum over the window but at
            # its far end.
            known.latest.new_tokens += new_tokens
            known.new_tokens += new_tokens

    def used(self, segment: "Segment", now: int) -> None:
        self._renew(now)
        uses = self._uses.get(segment)
        if uses is None:
            _, uses = self._dropped.pop(segment.end, (0, {}))
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
                agent.held += 1
                agent.wait(use.number, use.kind, use.tokens)
                continue
            agent.wait(use.number, use.kind, -use.tokens)
            if agent.number > use.number:
                if agent.latest:
                    self._outcome(
                        agent,
                        agent.latest,
                        (use.kind, _stage(agent.number - use.number - 1), True),
                        use.tokens,
                    )
                use.number, use.uses = agent.number, use.uses + 1
            use.tokens, use.seen = segment.tokens, count
            agent.wait(use.number, use.kind, use.tokens)

    def split(self, head: "Segment", tail: "Segment") -> None:
        uses = self._uses.get(tail)
        if uses is None:
            return
        self._uses[head] = {}
        for name, use in uses.items():
            left = min(head.tokens, use.tokens)
            self._uses[head][name] = dataclasses.replace(use, tokens=left)
            use.tokens -= left
            self._agents[name].held += 1

    def gone(self, segment: "Segment") -> None:
        self._scores.pop(segment, None)
        uses = self._uses.pop(segment, None)
        if uses is not None:
            _, before = self._dropped.pop(segment.end, (0, {}))
            self._leave(before)
            self._dropped[segment.end] = self._observed, uses

    def rank(self, segment: "Segment", now: int) -> tuple:
        if now != self._now:
            self._renew(now)
        score = self._scores.get(segment)
        if score is None:
            score = self._scores[segment] = self._score(segment, now)
        return score, segment.last_used, -segment.depth

    def _renew(self, now: int) -> None:
        """What was worked out for ranks may hold no more."""
        self._now = now
        self._scores.clear()
        self._densities.clear()

    def _score(self, segment: "Segment", now: int) -> float:
        uses = self._uses.get(segment, {})
        score = 0.0
        for name in segment.owners:
            value = self._contributions.get(name, 0.0)
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
        """Contributions anew, from the sums over the window."""
        active = {name: agent for name, agent in self._agents.items() if agent.calls}
        own = intrinsic(
            [
                {name: activity(a.calls) for name, a in active.items()},
                {name: workload(a.prompt_tokens, a.new_tokens) for name, a in active.items()},
                {name: efficiency(a.prompt_tokens, a.reused_tokens) for name, a in active.items()},
                {
                    name: concurrency(a.running / a.calls, max(a.peaks))
                    for name, a in active.items()
                },
            ]
        )
        shared = collaborative({pair: edge(*sums) for pair, sums in self._pairs.items()}, active)
        self._contributions = contribution(own, shared, self._alpha)

    def _count(self, entry: _ObservedRequest, sign: int) -> None:
        """Adds a call to the sums (or takes it from them)."""
        call, agent = entry.observation, self._agents[entry.observation.agent]
        agent.calls += sign
        agent.prompt_tokens += sign * call.prompt_tokens
        agent.reused_tokens += sign * call.reused_tokens
        agent.running += sign * call.running
        agent.peaks[call.running] += sign
        if not agent.peaks[call.running]:
            del agent.peaks[call.running]
        for other, tokens in call.shared.items():
            if tokens and other != call.agent:
                sums = self._pairs.setdefault((call.agent, other), [0, 0])
                sums[0] += sign * tokens
                sums[1] += sign
                if not sums[1]:
                    del self._pairs[call.agent, other]

    def _slide(self) -> None:
        """The oldest call leaves the window."""
        entry = self._calls.popleft()
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

    def _outcome(
        self, agent: _AgentCounts, entry: _ObservedRequest, key: tuple[int, int, bool], tokens: int
    ) -> None:
        if tokens:
            entry.outcomes[key] = entry.outcomes.get(key, 0) + tokens
            agent.outcomes[key] += tokens
            self._outcomes[key] += tokens

    def _forget(self) -> None:
        """What was dropped more than a window ago is no habit any more."""
        while self._dropped:
            end, (when, uses) = next(iter(self._dropped.items()))
            if self._observed - when <= self._window:
                break
            del self._dropped[end]
            self._leave(uses)

    def _leave(self, uses: Mapping[str, _Use]) -> None:
        for name, use in uses.items():
            self._agents[name].wait(use.number, use.kind, -use.tokens)
            self._agents[name].held -= 1
            self._retire(name)

    def _retire(self, name: str) -> None:
        """An agent that neither a call of the window nor a segment knows is forgotten: there may be
        a new one for every task."""
        agent = self._agents[name]
        if not agent.calls and not agent.held:
            del self._agents[name]

    def _liveliness(self, agent: _AgentCounts, now: int) -> float:
        if not agent.times:
            return 0.0
        if len(agent.times) == 1:
            turns = len(self._contributions)
            return liveliness(now - agent.times[0], turns, turns)
        if agent.gaps is None:
            gaps = [max(1, after - before) for before, after in itertools.pairwise(agent.times)]
            agent.gaps = max(gaps), sum(gaps) / len(gaps)
        return liveliness(now - agent.times[-1], *agent.gaps)

    def _density(self, agent: _AgentCounts, kind: int) -> list[float]:
        """For every stage the density of hits of an agent's segments of that class, by what was
        watched so far."""
        found = self._densities.get((agent, kind))
        if found is None:
            hazards = []
            for stage in range(STAGES):
                hazard = durability(0, 2 ** (stage - 1) if stage else 0)
                for seen in (self._outcomes, agent.outcomes):
                    used, left = seen[kind, stage, True], seen[kind, stage, False]
                    hazard = (used + PRIOR_TOKENS * hazard) / (used + left + PRIOR_TOKENS)
                hazards.append(hazard)
            found = self._densities[agent, kind] = hit_density(hazards)
        return found
