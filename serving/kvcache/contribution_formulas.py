"""The terms of a contribution (Hive, section 7), each a function with its formula.

The paper's text has lost most of its formulas, so these are ours, with reasons.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

ALPHA = 0.4
"""The weight of an agent's own use against what it shares. The paper's number is lost; it says that
sharing counts for more."""
FLOOR = 0.1
"""The value of a factor of the intrinsic utility for an agent that has nothing of it: a product
must not vanish at the first zero."""


def floored(values: Mapping[str, float]) -> dict[str, float]:
    """FLOOR + (1 - FLOOR) * x / max x: 1 for the strongest agent, FLOOR for one with nothing.

    All zero: 1 for each, because such a factor distinguishes no agents.
    """
    largest = max(values.values(), default=0)
    return {
        name: FLOOR + (1 - FLOOR) * x / largest if largest else 1.0 for name, x in values.items()
    }


def shares(values: Mapping[str, float]) -> dict[str, float]:
    """x / sum of x, so that the agents' values add up to 1; all zero stay zero."""
    total = sum(values.values())
    return {name: x / total if total else 0.0 for name, x in values.items()}


def activity(requests: int) -> float:
    """A = requests in the window.

    (The paper: scales with the frequency of invocation; the window is the same for all agents.)
    """
    return float(requests)


def workload(prompt_tokens: int, new_tokens: int) -> float:
    """W = sqrt(tokens in + tokens out), summed over the window.

    (The paper: the aggregate volume of input and output.) The root is ours, for the reason the
    paper gives for its own: a large volume of tokens must not decide alone. A retrieval agent reads
    documents of thousands of tokens and none of them twice.
    """
    return math.sqrt(prompt_tokens + new_tokens)


def efficiency(prompt_tokens: int, reused_tokens: int) -> float:
    """E = reused tokens / prompt tokens, 0 without prompts.

    (The paper: productivity through reuse of the cache.)
    """
    return reused_tokens / prompt_tokens if prompt_tokens else 0.0


def concurrency(average: float, peak: float) -> float:
    """P = (average + peak) / 2 of the agent's running requests at each of its requests.

    (The paper: both average and peak.)
    """
    return (average + peak) / 2


def intrinsic(factors: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """I = product of the `floored` factors, then `shares` of it (equation 6).

    Each factor is one of the four above, for every agent.
    """
    levels = [floored(factor) for factor in factors]
    return shares({name: math.prod(level[name] for level in levels) for name in levels[0]})


def edge(shared_tokens: int, events: int) -> float:
    """w = sqrt(shared tokens) * log(1 + reuse events) (equation 8).

    A large volume does not decide alone, and repetition is rewarded.
    """
    return math.sqrt(shared_tokens) * math.log1p(events)


def collaborative(
    edges: Mapping[tuple[str, str], float], agents: Iterable[str]
) -> dict[str, float]:
    """C_i = sum over j of (w_ij + w_ji), then `shares` of it (equation 7).

    Both what i reuses of others' tokens and what others reuse of i's count for i.
    """
    sums = dict.fromkeys(agents, 0.0)
    for pair, weight in edges.items():
        for name in pair:
            if name in sums:
                sums[name] += weight
    return shares(sums)


def contribution(
    own: Mapping[str, float], shared: Mapping[str, float], alpha: float = ALPHA
) -> dict[str, float]:
    """alpha * I + (1 - alpha) * C for every agent (equation 5)."""
    return {name: alpha * own[name] + (1 - alpha) * shared[name] for name in own}


def hit_density(hazards: Sequence[float]) -> list[float]:
    """The highest rate of hits of waiting from the start of each stage, in hits per request.

    hazards[s] is the chance that the agent's next request uses a segment in stage s: one that its
    last k requests did not use, with k.bit_length() = s. Waiting from a stage's start until the end
    of some stage gives hits = P(used by then) for E[requests waited]; the density is the largest
    hits / requests over these ends. (This is Gittins' index of keeping the segment. Within a stage
    the quotient only rises or only falls, so no other time to stop is better.) The last stage has
    no end.
    """
    densities = []
    for start in range(len(hazards)):
        alive, hits, waited, best = 1.0, 0.0, 0.0, 0.0
        for stage in range(start, len(hazards)):
            hazard, requests = hazards[stage], 2 ** max(stage - 1, 0)
            if hazard:
                last = stage == len(hazards) - 1
                used = alive if last else alive * (1 - (1 - hazard) ** requests)
                alive, hits, waited = alive - used, hits + used, waited + used / hazard
                best = max(best, hits / waited)
            else:
                waited += alive * requests
        densities.append(best)
    return densities


def durability(uses: int, missed: int) -> float:
    """(uses + 1) / (uses + missed + 2): the chance that the next request uses a segment.

    `uses` requests used it, and `missed` requests since did not. That is the rule of succession, on
    the segment's own history alone.
    """
    return (uses + 1) / (uses + missed + 2)


def liveliness(silence: float, longest: float, mean: float) -> float:
    """exp(-max(0, silence - longest) / mean): 1 while an agent's silence is not its longest.

    Args:
      silence: requests, of all agents, since the agent's latest.
      longest, mean: of the same between its requests.
    """
    return math.exp(-(silence - longest) / mean) if silence > longest else 1.0
