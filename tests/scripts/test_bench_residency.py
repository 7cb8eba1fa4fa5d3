"""The workload and the arithmetic of the residency benchmark, and its cache against slower ones
that share no code with it."""

import functools
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshare.serving.kvcache.eviction import POLICIES, Belady, make_policy
from scripts.bench import residency as bench
from scripts.bench.parts.residency import tree as cache
from scripts.bench.parts.residency import workflow as work
from scripts.bench.parts.residency.options import ANSWER, CAPACITY

prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=25)


def calls(of):
    return [
        work.Call("abc"[number % 3], tuple(prompt), number % 2) for number, prompt in enumerate(of)
    ]


def known(prompt, before):
    """Leading tokens that some prompt before began with."""
    return max(
        n
        for n in range(len(prompt) + 1)
        if n == 0 or any(list(prompt[:n]) == list(other[:n]) for other in before)
    )


def shape(tree):
    """All prefixes that the tree holds, and its segments with the length of each."""
    prefixes, segments, nodes = set(), [], [((), node) for node in tree._root.children.values()]
    while nodes:
        begin, node = nodes.pop()
        whole = (*begin, *node.tokens.tolist())
        prefixes |= {whole[:n] for n in range(len(begin) + 1, len(whole) + 1)}
        segments.append((whole, node.segment))
        nodes += [(whole, child) for child in node.children.values()]
    return prefixes, segments


@settings(max_examples=60)
@given(prompts, st.sampled_from(sorted(POLICIES)))
def test_a_cache_with_room_for_all_finds_the_longest_prefix_there_was(of, policy):
    tree = cache.Tree(10**6, make_policy(policy))
    for now, call in enumerate(calls(of)):
        assert tree.admit(call, now) == known(of[now], of[:now])
    prefixes, segments = shape(tree)
    assert (
        prefixes == {tuple(prompt[:n]) for prompt in of for n in range(1, len(prompt) + 1)}
        and len(prefixes) == tree.size
    )
    for whole, segment in segments:
        users = [number for number, prompt in enumerate(of) if tuple(prompt[: len(whole)]) == whole]
        assert (
            segment.depth == len(whole)
            and segment.last_used == users[-1]
            and segment.uses == len(users)
        )
        assert segment.owners == {
            name: n for name in "abc" if (n := sum("abc"[number % 3] == name for number in users))
        }
        assert segment.priority == max(number % 2 for number in users)
    assert cache.compulsory(calls(of)) == tree.size and tree.evicted == 0


@settings(max_examples=60)
@given(prompts, st.integers(6, 12), st.sampled_from([*sorted(POLICIES), "optimum"]))
def test_a_small_cache_keeps_its_bound_and_every_call_its_prompt(of, room, policy):
    trace = calls(of)
    ahead = policy == "optimum"
    tree = cache.Tree(
        room, Belady(of) if ahead else make_policy(policy), cache.partings(trace) if ahead else None
    )
    held, computed = set(), 0
    for now, call in enumerate(trace):
        found = tree.admit(call, now)
        assert found == max(
            n for n in range(len(call.tokens) + 1) if n == 0 or call.tokens[:n] in held
        )
        computed += len(call.tokens) - found
        held, _ = shape(tree)
        assert call.tokens in held and len(held) == tree.size <= room
    assert computed - tree.evicted == tree.size
    counts = cache.simulate(trace, room, Belady(of) if ahead else make_policy(policy))
    assert counts.computed == computed and counts.evicted == tree.evicted


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(1, 4))
def test_lru_over_prompts_that_share_nothing_is_a_list(names, room):
    tree, held = cache.Tree(7 * room, make_policy("lru")), []
    for now, name in enumerate(names):
        assert tree.admit(work.Call("a", (name, *range(10, 16))), now) == (7 if name in held else 0)
        if name in held:
            held.remove(name)
        elif len(held) == room:
            del held[0]
        held.append(name)


def fewest_computed(of, room):
    """By trying every choice of leaves: prompts of one or two tokens, each token a segment."""

    @functools.cache
    def computed(at, held):
        if at == len(of):
            return 0
        path = {tuple(of[at][:n]) for n in range(1, len(of[at]) + 1)}
        if len(held | path) <= room:
            return len(path - held) + computed(at + 1, held | path)
        leaves = [
            each for each in held - path if not any(other[:1] == each for other in held - {each})
        ]
        return min(computed(at, held - {leaf}) for leaf in leaves)

    return computed(0, frozenset())


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=2), min_size=1, max_size=9),
    st.integers(2, 4),
)
def test_the_optimum_over_segments_of_one_token_is_the_best_of_all_choices(of, room):
    trace = calls(of)
    tree = cache.Tree(room, Belady(of), [range(1, len(prompt) + 1) for prompt in of])
    assert sum(
        len(call.tokens) - tree.admit(call, now) for now, call in enumerate(trace)
    ) == fewest_computed(of, room)


def test_the_workflow_is_fixed_and_its_texts_are_the_seeds():
    seven = work.workflow(7, 3)
    assert seven == work.workflow(9, 3)[: len(seven)] and seven != work.workflow(7, 4)
    assert [call.agent for call in seven] == [call.agent for call in work.workflow(7, 4)]
    one_round = [
        "Decision",
        *["Patcher", "Viewer"] * 4,
        "Decision",
        "Searcher",
        "Searcher",
        "Summary",
    ]
    assert [call.agent for call in seven] == one_round * 7
    assert all(
        call.priority == {"Patcher": 2, "Viewer": 2, "Decision": 1}.get(call.agent, 0)
        for call in seven
    )
    assert len({call.tokens[:240] for call in seven}) == 1 and {
        len(call.tokens) for call in seven
    } <= set(range(450, 6001))


def test_the_record_grows_until_it_is_condensed_and_documents_are_read_once():
    trace = work.workflow(6, 0)
    lengths = [len(call.tokens) for call in trace if call.agent == "Patcher"]
    growing = [after > before for before, after in itertools.pairwise(lengths)]
    assert growing == [number % 12 != 11 for number in range(23)]
    patcher = [call.tokens for call in trace if call.agent == "Patcher"]
    assert all(
        b[: len(a)] == a
        for number, (a, b) in enumerate(itertools.pairwise(patcher))
        if number % 12 != 11
    )
    assert patcher[12][:1720] == patcher[11][:1720] and patcher[12][1720] != patcher[11][1720]
    documents = [call.tokens[500:] for call in trace if call.agent == "Searcher"]
    texts = {
        call.tokens[at : at + 100]
        for call in trace
        if call.agent != "Searcher"
        for at in range(len(call.tokens) - 99)
    }
    assert len(set(documents)) == 12 and not any(text[:100] in texts for text in documents)


def test_contribution_keeps_hot_agents_better_than_lru_under_pressure():
    measured = {"cache": "tree", **bench.measure(bench.simulate, 7, CAPACITY, (0,))}
    found = {each["policy"]: each for each in measured["policies"]}
    assert list(found) == ["contribution", "lru", "lfu", "slru", "priority", "plain", "optimum"]
    assert all(goal.met for goal in bench.goals([measured], CAPACITY)) and not bench.goals(
        [measured], CAPACITY + 1
    )
    assert (
        0
        <= found["optimum"]["recomputed_tokens"]
        <= min(each["recomputed_tokens"] for each in found.values())
    )
    assert found["contribution"]["hot_hit_rate"] == max(
        each["hot_hit_rate"] for name, each in found.items() if name != "optimum"
    )


def test_what_is_compared_is_what_the_words_say():
    def counts(hot, cold, evicted):
        return cache.Counts(
            {"Patcher": 100, "Viewer": 100, "Summary": 100},
            {"Patcher": hot, "Viewer": 20, "Summary": cold},
            evicted,
        )

    sides = {
        "lru": [counts(20, 50, 300)] * 2,
        "contribution": [counts(60, 45, 200), counts(80, 40, 200)],
        "optimum": [counts(90, 60, 100)] * 2,
    }
    rows = {
        row["policy"]: row
        for row in bench.summarise(sides, [30, 40], {name: [1.0, 2.0] for name in sides})
    }
    own = rows["contribution"]
    assert own["hot_hit_rate"] == pytest.approx(180 / 400) and own[
        "cold_hit_rate"
    ] == pytest.approx(85 / 200)
    assert (
        own["evicted_tokens"] == 400
        and own["recomputed_tokens"] == 600 - 265 - 70
        and own["seconds"] == 3
    )
    assert own["hit_rates"] == pytest.approx({"Patcher": 0.7, "Viewer": 0.2, "Summary": 0.425})
    assert own["against_lru"] == pytest.approx(
        {
            "fewer_hot_misses": 1 - 220 / 320,
            "evicted_ratio": 600 / 400,
            "cold_points_lower": 7.5,
            "of_optimum": (420 - 335) / (420 - 260),
        }
    )
    assert [each["fewer_hot_misses"] for each in own["against_lru_by_seed"]] == pytest.approx(
        [1 - 120 / 160, 1 - 100 / 160]
    )
    goals = bench.goals(
        [{"cache": "tree", "rounds": 7, "capacity": 9, "policies": list(rows.values())}], 9
    )
    assert [goal.met for goal in goals] == [False, True, False, False]
    assert (
        len(
            bench.goals(
                [{"cache": "engine", "rounds": 7, "capacity": 9, "policies": list(rows.values())}],
                9,
            )
        )
        == 3
    )
    # Where lru is as good as the optimum there is no gain of which to have a part.
    same = bench.summarise(
        {name: [counts(20, 50, 0)] for name in sides}, [0], {name: [0.0] for name in sides}
    )
    assert (
        same[1]["against_lru"]["of_optimum"] is None
        and same[1]["against_lru"]["evicted_ratio"] is None
    )
    goals = bench.goals([{"cache": "tree", "rounds": 7, "capacity": 9, "policies": same}], 9)
    assert [goal.met for goal in goals] == [False, None, True, None]


def test_a_prompt_longer_than_the_cache_is_refused_with_the_sizes():
    with pytest.raises(ValueError, match="call 1 of b has 6 tokens, but there is room for 5"):
        cache.simulate(calls([[1], [1] * 6]), 5, make_policy("lru"))


def test_common_prefixes():
    assert (
        cache.common(np.asarray([1, 2, 3]), np.asarray([1, 2])) == 2
        and cache.common(np.asarray([1]), np.asarray([2, 2])) == 0
    )
    assert cache.partings(calls([[1, 2, 3], [1, 4], [5]])) == [{1, 3}, {1, 2}, {1}]


def test_a_small_run_reports_as_json(tmp_path, capsys):
    output = tmp_path / "result.json"
    small = [
        "--rounds",
        "2",
        "--seeds",
        "1",
        "--capacities",
        "5000,9000",
        "--no-engine",
        "--no-agents",
    ]
    assert bench.main([*small, "--json", "--output", str(output)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(output.read_text()) and report["benchmark"] == "residency"
    assert [(r["rounds"], r["capacity"], r["calls"]) for r in report["results"]] == [
        (2, 5000, 26),
        (2, 9000, 26),
    ]
    assert len(report["goals"]) == 4 and report["command"].startswith(
        "python -m scripts.bench.residency --rounds 2"
    )
    assert bench.as_text(report)


@functools.cache
def small_model():
    return bench.small_model()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "contribution", "optimum"])
def test_the_engine_with_room_for_all_finds_what_the_tree_finds(policy):
    rng = np.random.default_rng(1)
    rules, document = rng.integers(work.VOCABULARY, size=(2, 300)).tolist()
    trace = calls(
        [[*rules[:64], *document[:at]] for at in (40, 100, 160, 300)]
        + [document, [*rules[:64], *document[:30]]]
    )
    seen = bench.serve(small_model(), trace, 4096, bench.policies(trace, ANSWER)[policy]())
    best = cache.simulate(trace, 4096, make_policy("lru"))
    assert seen.prompt == best.prompt and seen.evicted == best.evicted == 0
    # A prompt that is known whole is fed its last token again, for the logits.
    assert seen.found == best.found | {"c": best.found["c"] - 1}


@pytest.mark.slow
def test_the_engine_under_pressure_lets_go_and_loses_no_call():
    trace = work.workflow(1, 0)
    seen = bench.serve(small_model(), trace, 4096, make_policy("contribution"))
    assert sum(seen.prompt.values()) == sum(len(call.tokens) for call in trace) and seen.evicted > 0
    # What was read in is in memory or has left it; of every answer all but the last token was read
    # in.
    read = seen.computed + 7 * len(trace)
    assert read - 4096 <= seen.evicted <= read and cache.compulsory(trace) <= seen.computed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rounds", "0"], ["--rounds is '0'", "7,21"]),
        (["--capacities", "9000,x"], ["--capacities", "'9000,x'"]),
        (["--capacities", "900"], ["--capacities has 900", "longest prompt"]),
        (
            ["--capacities", "5300", "--rounds", "7", "--seeds", "1"],
            ["5300", "rounds down to 5120", "has 5237 tokens", "--no-engine"],
        ),
        (["--seeds", "0"], ["--seeds is 0"]),
        (["--output", "no/such/folder/result.json"], ["--output", "folder that exists"]),
    ],
)
def test_bad_arguments_are_told_in_one_sentence(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    said = capsys.readouterr().err
    assert (
        stopped.value.code == 2
        and said.startswith("scripts.bench.residency: ")
        and said.count("\n") == 1
    )
    assert all(word in said for word in words), said
