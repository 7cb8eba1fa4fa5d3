"""The order of eviction: every term against its formula, every policy against a list that does the
same slowly, and the offline optimum against trying everything."""

import functools
import hashlib
import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshare.serving.kvcache import contribution_formulas as formulas
from jaxshare.serving.kvcache.contribution import Contribution
from jaxshare.serving.kvcache.eviction import Belady, make_policy
from jaxshare.serving.kvcache.policy import Observation, Segment, prefix_hash

log, root = math.log, math.sqrt


class Flat:
    """A cache of separate segments, each named by a number; it evicts the lowest rank."""

    def __init__(self, policy, room, tokens=1):
        self.policy, self.room, self.tokens, self.held, self.now = policy, room, tokens, {}, -1

    def use(self, *names, agent="", priority=0):
        """Admits a request that uses these; returns the names of evicted segments, in order."""
        self.now += 1
        left = []
        known = [name for name in names if name in self.held]
        self.policy.observe(
            Observation(agent, self.now, self.tokens * len(names), self.tokens * len(known), {}, 1)
        )
        for name in names:
            if name not in self.held:
                if len(self.held) == self.room:
                    free = self.held.keys() - set(names)
                    leaves = min(
                        free, key=lambda each: (self.policy.rank(self.held[each], self.now), each)
                    )
                    self.policy.evicted(self.held.pop(leaves))
                    left.append(leaves)
                self.held[name] = Segment(self.tokens, prefix_hash([name]), self.tokens, {})
            segment = self.held[name]
            segment.owners[agent] = segment.owners.get(agent, 0) + 1
            segment.last_used, segment.uses, segment.priority = (
                self.now,
                segment.uses + 1,
                max(segment.priority, priority),
            )
            self.policy.touched(segment, self.now)
        return left


def observed(agent, now, prompt=100, reused=0, shared=None, running=1):
    return Observation(agent, now, prompt, reused, shared or {}, running)


def lowest(policy, segments, now):
    return min(segments, key=lambda name: policy.rank(segments[name], now))


# The terms


def test_terms_are_what_their_formulas_say():
    assert formulas.activity(7) == 7
    assert formulas.workload(90, 54) == 12
    assert formulas.efficiency(200, 50) == 0.25 and formulas.efficiency(0, 0) == 0
    assert formulas.concurrency(1.5, 4) == 2.75
    assert formulas.edge(400, 2) == pytest.approx(20 * log(3)) and formulas.edge(0, 0) == 0
    assert formulas.floored({"a": 4, "b": 1, "c": 0}) == pytest.approx(
        {"a": 1, "b": 0.1 + 0.9 / 4, "c": 0.1}
    )
    assert formulas.floored({"a": 0, "b": 0}) == {"a": 1, "b": 1}
    assert formulas.shares({"a": 3, "b": 1}) == {"a": 0.75, "b": 0.25} and formulas.shares(
        {"a": 0}
    ) == {"a": 0}


def test_intrinsic_is_a_product_in_which_no_zero_wipes_an_agent_out():
    found = formulas.intrinsic([{"a": 2, "b": 1}, {"a": 0, "b": 5}, {"a": 0, "b": 0}])
    a, b = 1 * 0.1 * 1, 0.55 * 1 * 1
    assert found == pytest.approx({"a": a / (a + b), "b": b / (a + b)})


def test_collaboration_counts_for_both_sides():
    found = formulas.collaborative(
        {("a", "b"): 3.0, ("b", "a"): 1.0, ("c", "a"): 2.0, ("a", "left"): 4.0}, ["a", "b", "c"]
    )
    # The agent that left shares no more, but what it gave still counts for the one that took it.
    assert found == pytest.approx({"a": 10 / 16, "b": 4 / 16, "c": 2 / 16})
    assert formulas.contribution({"a": 0.5, "b": 0.5}, {"a": 1.0, "b": 0.0}, 0.25) == {
        "a": 0.875,
        "b": 0.125,
    }


def naive_contributions(calls, alpha):
    """The same formulas over a list of (observation, new tokens)."""
    names = sorted({call.agent for call, _ in calls})
    of = {name: [(call, new) for call, new in calls if call.agent == name] for name in names}
    prompt = {n: sum(c.prompt_tokens for c, _ in of[n]) for n in names}
    factors = [
        [len(of[n]) for n in names],
        [root(prompt[n] + sum(new for _, new in of[n])) for n in names],
        [sum(c.reused_tokens for c, _ in of[n]) / prompt[n] for n in names],
        [
            (np.mean([c.running for c, _ in of[n]]) + max(c.running for c, _ in of[n])) / 2
            for n in names
        ],
    ]
    own = np.prod(
        [0.1 + 0.9 * np.asarray(f) / max(f) if max(f) else np.ones(len(names)) for f in factors],
        axis=0,
    )
    weights = np.zeros((len(names) + 9, len(names) + 9))
    order = names + sorted({other for call, _ in calls for other in call.shared} - set(names))
    for i, j in itertools.permutations(range(len(order)), 2):
        shared = [c.shared[order[j]] for c, _ in of.get(order[i], []) if c.shared.get(order[j])]
        weights[i, j] = root(sum(shared)) * log(1 + len(shared))
    together = (weights.sum(0) + weights.sum(1))[: len(names)]
    total = alpha * own / own.sum() + (1 - alpha) * (
        together / together.sum() if together.sum() else 0
    )
    return dict(zip(names, total, strict=True))


calls_of_agents = st.lists(
    st.tuples(
        st.sampled_from("abcd"),
        st.integers(1, 500),
        st.floats(0, 1),
        st.dictionaries(st.sampled_from("abcd"), st.integers(0, 300)),
        st.integers(1, 4),
        st.integers(0, 80),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=60)
@given(calls_of_agents, st.sampled_from([1, 3, 8, 100]), st.sampled_from([0.0, 0.4, 1.0]))
def test_contributions_are_those_of_the_calls_in_the_window(calls, window, alpha):
    policy, seen = Contribution(alpha=alpha, window=window), []
    for now, (agent, prompt, share, shared, running, new) in enumerate(calls):
        shared = {other: tokens for other, tokens in shared.items() if other != agent}
        seen.append((Observation(agent, now, prompt, int(share * prompt), shared, running), new))
        policy.observe(seen[-1][0])
        # The new tokens of this request are not counted yet.
        expected = naive_contributions([*seen[-window:-1], (seen[-1][0], 0)], alpha)
        assert policy.contributions() == pytest.approx(expected)
        policy.finished(agent, new)


def test_rounds_are_the_times_of_update():
    policy = Contribution(round_calls=3)
    of_calls = []
    for now, agent in enumerate("abcabca"):
        policy.observe(observed(agent, now))
        of_calls.append(set(policy.contributions()))
    assert of_calls == [{"a"}] * 3 + [{"a", "b", "c"}] * 4


def test_an_agent_that_is_gone_from_the_window_contributes_nothing():
    policy = Contribution(window=4)
    cache = Flat(policy, 9)
    cache.use(1, agent="old")
    for _ in range(4):
        cache.use(2, agent="new")
    assert policy.contributions().keys() == {"new"}
    assert policy.rank(cache.held[1], cache.now)[0] == 0 < policy.rank(cache.held[2], cache.now)[0]
    policy.finished("old", 5)  # a call that outlived the window
    policy.evicted(cache.held[1])
    for _ in range(6):
        cache.use(2, agent="new")
    cache.use(3, agent="old")
    assert policy.contributions().keys() == {"new", "old"}


def test_thousands_of_agents_that_come_once_are_forgotten():
    policy = Contribution(window=8)
    cache = Flat(policy, 4)
    for number in range(500):
        cache.use(number, agent=f"agent {number}")
    assert len(policy._agents) <= 8 + 4 + 9 and len(policy._evicted) <= 9 and not policy._pairs


# Expected hits


LENGTHS = [1, 1, 2, 4, 8, 16, 32, 10**4]
"""Calls of each stage; the last is as good as endless."""


def naive_density(hazards, stage):
    """The hits per request of the best time to stop waiting."""
    each = np.concatenate(
        [
            np.full(length, hazard)
            for length, hazard in zip(LENGTHS[stage:], hazards[stage:], strict=True)
        ]
    )
    alive = np.cumprod(np.concatenate([[1.0], 1 - each]))
    return max(np.cumsum(alive[:-1] * each) / np.cumsum(alive[:-1]))


@settings(max_examples=30)
@given(st.lists(st.just(0.0) | st.floats(0.005, 1), min_size=8, max_size=8))
def test_density_is_the_best_that_waiting_can_have(hazards):
    assert formulas.hit_density(hazards) == pytest.approx(
        [naive_density(hazards, stage) for stage in range(8)]
    )


def test_densities_that_can_be_told_by_hand():
    assert formulas.hit_density([0.3] * 5) == pytest.approx([0.3] * 5)
    assert formulas.hit_density([0, 0, 1, 0.5]) == pytest.approx([1 / 3, 1 / 2, 1, 0.5])
    assert formulas.hit_density([0.5, 0, 0]) == [0.5, 0, 0]


def test_durability_is_the_rule_of_succession_and_liveliness_falls_after_the_longest_silence():
    assert (
        formulas.durability(0, 0) == 1 / 2
        and formulas.durability(3, 0) == 4 / 5
        and formulas.durability(3, 5) == 4 / 10
    )
    assert formulas.liveliness(6, 6, 3) == 1 and formulas.liveliness(12, 6, 3) == pytest.approx(
        math.exp(-2)
    )


def naive_rank(steps, window, name):
    """The score of a segment that was never evicted, from the list of (agent, names) of all
    requests; 10 tokens per segment."""

    def stage(missed):
        return min(7, math.ceil(math.log2(missed + 1)))

    outcomes = {agent: Counter() for agent, _ in steps}
    state, score = {}, 0.0
    for agent in outcomes:
        when = [now for now, (caller, _) in enumerate(steps) if caller == agent]
        last, uses = {}, Counter()
        for n, now in enumerate(when):
            for each in set(last) | set(steps[now][1]):
                kind = min(3, uses[each].bit_length() - 1)
                if each in last and each in steps[now][1]:
                    if now > len(steps) - 1 - window:
                        outcomes[agent][kind, stage(n - last[each] - 1), True] += 10
                elif each in last and n + 1 < len(when) and when[n + 1] > len(steps) - 1 - window:
                    # A miss is counted when the agent's next request is admitted.
                    outcomes[agent][kind, stage(n - last[each] - 1), False] += 10
                if each in steps[now][1]:
                    last[each] = n
                    uses[each] += 1
        if name in last:
            inside = [now for now in when if now > len(steps) - 1 - window]
            gaps = (
                np.diff(inside)
                if len(inside) > 1
                else [len({agent for agent, _ in steps[-window:]})]
            )
            late = len(steps) - 1 - inside[-1] - max(gaps) if inside else 0
            state[agent] = (
                uses[name],
                len(when) - 1 - last[name],
                math.exp(-max(0, late) / np.mean(gaps)),
            )
    together = sum(outcomes.values(), Counter())
    reused = [(agent, now) for now, (agent, _) in enumerate(steps)]
    observations, known = [], set()
    for agent, now in reused:
        names = set(steps[now][1])
        observations.append(
            (Observation(agent, now, 10 * len(names), 10 * len(names & known), {}, 1), 0)
        )
        known |= names
    contributions = naive_contributions(observations[-window:], 0.4)
    for agent, (used, missed, lively) in state.items():
        kind, hazards = min(3, used.bit_length() - 1), []
        for k, begin in enumerate([0, 1, 2, 4, 8, 16, 32, 64]):
            hazard = 1 / (begin + 2)
            for seen in (together, outcomes[agent]):
                hazard = (seen[kind, k, True] + 256 * hazard) / (
                    seen[kind, k, True] + seen[kind, k, False] + 256
                )
            hazards.append(hazard)
        score += (
            contributions.get(agent, 0)
            * naive_density(hazards, stage(missed))
            * lively
            * (used + 1)
            / (used + missed + 2)
        )
    return score


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sets(st.integers(0, 5), min_size=1)),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from([2, 7, 100]),
)
def test_scores_are_those_of_habits_counted_from_the_whole_log(steps, window):
    policy = Contribution(window=window)
    cache = Flat(policy, 10, tokens=10)
    for agent, names in steps:
        cache.use(*names, agent=agent)
        for each in cache.held.values():
            policy.rank(each, cache.now)  # an earlier rank makes no difference
    for name, segment in cache.held.items():
        score, last_used, _ = policy.rank(segment, cache.now)
        assert (
            score == pytest.approx(naive_rank(steps, window, name))
            and last_used == segment.last_used
        )


def test_what_an_agent_reads_once_leaves_before_what_it_reads_always():
    policy = Contribution()
    cache = Flat(policy, 100, tokens=100)
    for number in range(12):
        cache.use(0, 100 + number, agent="Searcher")
    newest = {"rules": cache.held[0], "document": cache.held[111]}
    assert lowest(policy, newest, 12) == "document"
    # By recency and contribution alone they would be equals.
    plain = Contribution(expect=False)
    again = Flat(plain, 100, tokens=100)
    for number in range(12):
        again.use(0, 100 + number, agent="Searcher")
    assert plain.rank(again.held[0], 12)[0] == plain.rank(again.held[111], 12)[0]


def test_an_abandoned_context_of_a_busy_agent_leaves_before_the_prompt_of_a_quiet_one():
    ranks = {}
    for expect in (True, False):
        policy = Contribution(expect=expect)
        cache = Flat(policy, 1000, tokens=100)
        for task in range(6):
            for _ in range(5):
                cache.use(0, 10 + task, agent="Patcher")
            cache.use(1, agent="Decision")
        cache.use(0, 16, agent="Patcher")
        cache.use(0, 16, agent="Patcher")
        ranks[expect] = lowest(
            policy,
            {"abandoned": cache.held[15], "quiet": cache.held[1], "prompt": cache.held[0]},
            38,
        )
    assert ranks == {True: "abandoned", False: "quiet"}


def test_neither_of_two_nearly_equal_agents_loses_its_system_prompt_to_newest_tokens():
    policy = Contribution()
    cache = Flat(policy, 1000, tokens=100)
    for turn in range(10):
        cache.use(0, *range(100, 100 + turn), agent="Patcher")
        cache.use(1, *range(200, 201 + turn), agent="Viewer")
    contributions = policy.contributions()
    assert 0.9 < contributions["Patcher"] / contributions["Viewer"] < 1
    order = sorted(cache.held, key=lambda name: policy.rank(cache.held[name], 20))
    # The newest tokens of both come first, and the beginning of either prompt comes last.
    assert (
        order.index(0) > order.index(208)
        and order.index(1) > order.index(108)
        and {order[0], order[1]} == {209, 108}
    )


def test_what_an_agent_leaves_behind_when_it_ends_does_not_stay_as_long_as_the_window():
    policy = Contribution()
    cache = Flat(policy, 1000, tokens=100)
    for _ in range(20):
        cache.use(0, agent="ended")
        cache.use(1, agent="quiet")
    for calls in (1, 8):
        for _ in range(calls):
            cache.use(*range(2, 5), agent="busy")
        # Its next request, which the ended agent does not make.
        cache.use(1, agent="quiet")
    assert policy.contributions()["ended"] > policy.contributions()["quiet"] / 2
    assert lowest(policy, {"ended": cache.held[0], "quiet": cache.held[1]}, cache.now) == "ended"
    assert policy.rank(cache.held[0], cache.now)[0] < policy.rank(cache.held[1], cache.now)[0] / 10


def test_a_shared_segment_counts_for_all_owners():
    policy = Contribution(expect=False)
    mine, ours = (
        Segment(10, bytes([n]), 10, owners)
        for n, owners in enumerate([{"a": 1}, {"a": 1, "b": 1, "gone": 1}])
    )
    for now, agent in enumerate("aaab"):
        policy.observe(observed(agent, now))
    contributions = policy.contributions()
    assert policy.rank(mine, 4)[0] == pytest.approx(contributions["a"])
    assert policy.rank(ours, 4)[0] == pytest.approx(contributions["a"] + contributions["b"])


def test_equal_scores_leave_by_recency_and_then_the_deepest_first():
    policy = Contribution()
    old, new, deep = (
        Segment(1, bytes([n]), depth, {}, last_used=last)
        for n, (last, depth) in enumerate([(1, 1), (2, 1), (2, 5)])
    )
    assert sorted([new, old, deep], key=lambda s: policy.rank(s, 3)) == [old, deep, new]


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), min_size=1, max_size=20),
    st.integers(0, 19),
    st.integers(1, 99),
)
def test_a_cut_changes_no_score(steps, when, at):
    """Two caches see the same requests for one segment of 100 tokens and another; in one of them it
    is split on the way."""
    policies = Contribution(), Contribution()
    whole, other = (
        Segment(100, b"whole", 100, {}),
        [Segment(50, b"other", 50, {}) for _ in policies],
    )
    parts = [Segment(100, b"whole", 100, {})]
    for now, (agent, used) in enumerate(steps):
        for policy, pieces, beside in zip(policies, ([whole], parts), other, strict=True):
            policy.observe(observed(agent, now, 150, 0))
            for segment in pieces if used else [beside]:
                segment.owners[agent] = segment.owners.get(agent, 0) + 1
                segment.last_used = now
                policy.touched(segment, now)
        if now == when and parts[0].owners:
            tail = parts[0]
            head = Segment(at, b"head", at, dict(tail.owners), tail.last_used)
            tail.tokens -= at
            parts.insert(0, head)
            policies[1].split(head, tail)
    expected = policies[0].rank(whole, 99)[0]
    assert [policies[1].rank(part, 99)[0] for part in parts] == pytest.approx(
        [expected] * len(parts)
    )


def test_what_returns_after_it_was_dropped_keeps_its_habits():
    scores = []
    for dropped in (False, True):
        policy = Contribution()
        cache = Flat(policy, 3, tokens=100)
        for _ in range(5):
            cache.use(0, agent="a")
        if dropped:
            policy.evicted(cache.held.pop(0))
        cache.use(1, agent="b")
        cache.use(0, agent="a")
        scores.append(policy.rank(cache.held[0], cache.now)[0] / policy.contributions()["a"])
    assert scores[0] == pytest.approx(scores[1])


def test_habits_of_what_was_dropped_end_with_the_window():
    densities = []
    for calls in (2, 40):
        policy = Contribution(window=10)
        cache = Flat(policy, 100, tokens=1000)
        for _ in range(4):
            cache.use(0, agent="a")
        policy.evicted(cache.held.pop(0))
        for number in range(calls):
            cache.use(1 + number, agent="b")
        cache.use(0, agent="a")
        densities.append(policy.rank(cache.held[0], cache.now)[0] / policy.contributions()["a"])
    assert densities[0] > 0.7 > 0.5 > densities[1]


def test_a_segment_nobody_reported_and_a_call_without_an_agent_are_no_trouble():
    policy = Contribution()
    assert policy.rank(Segment(5, b"x", 5, {"never seen": 3}), 0)[0] == 0
    policy.evicted(Segment(5, b"x", 5, {}))
    policy.split(Segment(5, b"x", 5, {}), Segment(5, b"y", 10, {}))
    policy.finished("never seen", 3)
    cache = Flat(policy, 3)
    cache.use(1, agent="")
    assert (
        policy.contributions() == pytest.approx({"": 0.4}) and policy.rank(cache.held[1], 0)[0] > 0
    )


# The others


def naive_lru(held, name, room):
    left = [held.pop(0)] if name not in held and len(held) == room else []
    held[:] = [each for each in held if each != name] + [name]
    return left


requests = st.lists(st.integers(0, 7), max_size=60)


@given(requests, st.integers(1, 5))
def test_lru_is_a_list_in_the_order_of_use(names, room):
    cache, held = Flat(make_policy("lru"), room), []
    for name in names:
        assert cache.use(name) == naive_lru(held, name, room)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 2)), max_size=60), st.integers(1, 5))
def test_lfu_and_priority_let_go_the_least_of_those_not_used_for_longest(calls, room):
    for policy in ("lfu", "priority"):
        cache, held = Flat(make_policy(policy), room), {}
        for name, priority in calls:
            left = []
            if name not in held and len(held) == room:
                least = min(value for value, _ in held.values())
                left = [
                    next(
                        n
                        for n, (value, _) in sorted(held.items(), key=lambda item: item[1][1])
                        if value == least
                    )
                ]
                del held[left[0]]
            assert cache.use(name, priority=priority) == left
            before = held.get(name, (0, 0))[0]
            held[name] = (before + 1 if policy == "lfu" else max(before, priority), cache.now)


@given(requests, st.integers(1, 6), st.sampled_from([0.25, 0.5, 0.8]))
def test_slru_is_two_lists(names, room, share):
    cache, probation, protected = Flat(make_policy("slru", protected=share), room), [], []
    for name in names:
        left = []
        if name in protected:
            protected.remove(name)
            protected.append(name)
        elif name in probation:
            probation.remove(name)
            protected.append(name)
        else:
            if len(probation) + len(protected) == room:
                left = [(probation or protected).pop(0)]
            probation.append(name)
        assert cache.use(name) == left
        while len(protected) > share * (len(probation) + len(protected)):
            probation.append(protected.pop(0))


def test_slru_keeps_its_bound_when_segments_are_cut_and_dropped():
    policy = make_policy("slru", protected=0.5)
    a, b, c = (Segment(100, bytes([n]), 100, {}) for n in range(3))
    for segment in (a, b, c, a):
        policy.touched(segment, 0)
    assert sorted([a, b, c], key=lambda s: policy.rank(s, 0)) == [b, c, a]
    head = Segment(30, b"head", 30, {})
    a.tokens = 70
    policy.split(head, a)
    assert min(policy.rank(a, 0), policy.rank(head, 0)) > policy.rank(c, 0)
    # 200 of 300 tokens would be protected: those that were used before it go back, and there are
    # enough of them then
    policy.touched(b, 1)
    order = sorted([a, head, c, b], key=lambda s: policy.rank(s, 1))
    assert (
        order[0] is c
        and order[-1] is b
        and policy.rank(b, 1)[0]
        and not (policy.rank(a, 1)[0] and policy.rank(head, 1)[0])
    )
    for segment in (c, head, a):
        policy.evicted(segment)
    policy.touched(c, 2)
    policy.touched(c, 3)  # 200 tokens are left, of which 100 may be protected
    assert policy.rank(c, 3)[0] and not policy.rank(b, 3)[0]


# The offline optimum


def fewest_misses(names, room):
    """The fewest misses of all choices."""

    @functools.cache
    def misses(at, held):
        if at == len(names):
            return 0
        if names[at] in held:
            return misses(at + 1, held)
        if len(held) < room:
            return 1 + misses(at + 1, held | {names[at]})
        return 1 + min(misses(at + 1, held - {each} | {names[at]}) for each in held)

    return misses(0, frozenset())


@given(st.lists(st.integers(0, 5), min_size=1, max_size=14), st.integers(1, 4))
def test_belady_misses_as_seldom_as_the_best_of_all_choices(names, room):
    cache = Flat(Belady([[name] for name in names]), room)
    misses = 0
    for name in names:
        misses += name not in cache.held
        cache.use(name)
    assert misses == fewest_misses(names, room)


def test_belady_knows_the_next_call_that_uses_a_part_of_a_segment():
    trace = [[1, 2, 3, 4], [1, 2, 9], [7, 7], [1, 2, 3], [5]]
    policy = Belady(trace)

    def segment(tokens, length):
        prefix_hash = hashlib.blake2b(np.asarray(tokens, "<i4").tobytes(), digest_size=16).digest()
        return Segment(length, prefix_hash, len(tokens), {})

    assert policy.rank(segment([1, 2], 2), 0)[0] == -1
    assert policy.rank(segment([1, 2], 2), 1)[0] == -3
    # up to its 3, which calls 0 and 3 share
    assert policy.rank(segment([1, 2, 3, 4], 2), 0)[0] == -3
    assert policy.rank(segment([1, 2, 3, 4], 1), 0)[0] == -math.inf  # its 4 alone
    assert policy.rank(segment([1, 2], 2), 3)[0] == -math.inf
    assert policy.rank(segment([8, 8, 8], 3), 0) == (-math.inf, -3)  # what no prompt holds
    # Of segments that are never used again the longest is evicted first.
    assert policy.rank(segment([1, 2, 3, 4], 4), 3) < policy.rank(segment([7, 7], 2), 3)


# Names and options


def test_policies_are_made_by_name():
    assert [
        type(make_policy(name)).__name__
        for name in ("contribution", "lru", "lfu", "slru", "priority")
    ] == ["Contribution", "LRU", "LFU", "SLRU", "Priority"]
    assert isinstance(
        make_policy("contribution", alpha=0.2, window=7, round_calls=2, expect=False), Contribution
    )


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("fifo", {}, ["'fifo'", "contribution", "lru", "lfu", "slru", "priority"]),
        ("lru", {"alpha": 0.5}, ["'lru'", "alpha", "none"]),
        (
            "contribution",
            {"protected": 0.5, "alpha": 0.5},
            ["'contribution'", "no option protected", "alpha", "window", "round_calls"],
        ),
        ("contribution", {"alpha": 1.5}, ["alpha is 1.5", "from 0 to 1"]),
        ("contribution", {"alpha": math.nan}, ["alpha is nan"]),
        ("contribution", {"window": 0}, ["window is 0", "at least 1"]),
        ("contribution", {"round_calls": -1}, ["round_calls is -1"]),
        ("slru", {"protected": 1.0}, ["protected share is 1.0", "between 0 and 1"]),
    ],
)
def test_what_is_no_policy_is_refused(name, options, words):
    with pytest.raises(ValueError) as refused:
        make_policy(name, **options)
    assert all(word in str(refused.value) for word in words), refused.value


def test_digests_go_on_from_where_they_were():
    whole = prefix_hash([1, 2**31 - 1, 3])
    begun = hashlib.blake2b(np.asarray([1], "<i4").tobytes(), digest_size=16)
    begun.update(np.asarray([2**31 - 1, 3], "<i4").tobytes())
    assert whole == begun.digest() != prefix_hash([1, 2, 3])
