"""The arithmetic and arguments of the Logits Cache's benchmark, and that its sides answer alike;
the times are no matter for a test."""

import math

import numpy as np
import pytest

from jaxshare import Sampler
from jaxshare.models import LoadedModel
from jaxshare.models.generation_config import Generation
from scripts.bench import logits_cache as bench
from scripts.bench.parts.engine import random_model as models
from scripts.bench.parts.logits_cache import group, puzzles, replays, report
from scripts.bench.parts.logits_cache.group import Request
from scripts.bench.parts.logits_cache.report import SIDES
from tests.helpers import TINY, tiny_params


@pytest.mark.slow
def test_stepwise_answers_are_the_baselines_and_come_out_of_the_cache_in_part():
    model = LoadedModel(TINY, tiny_params(), None, Generation())
    sizes, cache = (
        {"kv_bytes": 2**22, "max_rows": 2},
        {"logits_cache": 2**30, "kept_logits": 8},
    )
    with group.engines_of(model, sizes, cache, always=True) as engines:
        found = group.run_group(
            engines,
            [[1, 2, 3], [4, 5]],
            puzzles=(0, 1),
            sampler=Sampler(temperature=0.5),
            tokens=12,
            turns=2,
            seed=0,
        )
    assert len(found.requests) == 4 and all(
        r.tokens["stepwise"] == r.tokens["baseline"] for r in found.requests
    )
    assert all(len(r.tokens[side]) == 12 for r in found.requests for side in SIDES)
    assert all(r.replayed["baseline"] == 0 < r.replayed["stepwise"] <= 12 for r in found.requests)
    assert found.positions == 24 and found.bytes >= 24 * (12 * 8 + 16)
    assert len(found.distances) == 2 and all(
        0 <= each <= 1 for pair in found.distances for each in pair
    )


def request(seconds, replayed, same=True):
    tokens = {"baseline": (1,) * 10, "stepwise": (1 if same else 2,) * 10, "hotspot": (3,) * 10}
    return Request(
        0,
        0,
        tokens,
        dict(zip(SIDES, seconds, strict=True)),
        dict(zip(SIDES, replayed, strict=True)),
    )


def test_whole_hits_are_counted_apart_and_the_goals_take_the_rest():
    found = group.Group(
        [request((10, 5, 2), (0, 5, 8)), request((10, 8, 0.1), (0, 2, 10), same=False)],
        positions=20,
        bytes=480,
        distances=[(0.1, 0.4), (0.3, 0.6)],
        seconds={side: [1.0, 2.0] for side in SIDES},
    )
    point = replays.summarise(0.2, [found], vocab=200)
    stepwise, hotspot = point["sides"]["stepwise"], point["sides"]["hotspot"]
    assert stepwise["speedup"] == pytest.approx((2 + 1.25) / 2) and stepwise[
        "hit_ratio"
    ] == pytest.approx(0.35)
    assert (
        hotspot["whole_hits"] == 1
        and hotspot["speedup"] == pytest.approx(5)
        and hotspot["hit_ratio"] == pytest.approx(0.8)
    )
    assert stepwise["free_replay"] == pytest.approx((2 + 1.25) / 2) and hotspot[
        "free_replay"
    ] == pytest.approx(5)
    assert hotspot["speedup_with_all"] == pytest.approx((5 + 100) / 2)
    assert (
        point["sides"]["baseline"]["mean_tokens_per_second"] == pytest.approx(1)
        and point["different_from_baseline"] == 1
    )
    assert point["storage_of_full_logits"] == pytest.approx(480 / (20 * 200 * 4))
    assert point["hotspot_distance"] == pytest.approx({"position": 0.2, "sequence": 0.5})
    whole = replays.summarise(
        0.4, [group.Group([request((10, 5, 1), (0, 5, 10))], 20, 480, [], found.seconds)], vocab=200
    )
    assert whole["sides"]["hotspot"]["speedup"] is None
    result = {"model": "random", "dtype": "float32", "points": [point, whole]}
    assert report.averages(result["points"])["hotspot"]["speedup"] == pytest.approx(5)
    goals = report.goals([result])
    assert [goal.met for goal in goals] == [True, True, True, True, False]
    assert [goal.measured for goal in goals[2:4]] == pytest.approx([(2 + 1.25) / 2, 0.03])


def test_the_worst_search_counts_and_so_does_the_mean():
    def point(stepwise, hotspot):
        sides = {"baseline": 1.0, "stepwise": stepwise, "hotspot": hotspot}
        return {
            "supervisor": "ToT",
            "temperature": 0.2,
            "speedup": sides,
            "hit_ratio": dict.fromkeys(sides, 0.5),
            "different_from_baseline": 0,
        }

    result = {
        "model": "embedded",
        "task": "sums",
        "dtype": "bfloat16",
        "points": [],
        "searches": [point(1.6, 3.0), point(1.2, 0.9)],
    }
    found = {goal.name: (goal.measured, goal.met) for goal in report.goals([result])}
    mean = "embedded, sums: {} under supervisors, times the baseline's speed"
    assert found[mean.format("stepwise")] == (pytest.approx(1.4), True)
    assert found[mean.format("hotspot")] == (pytest.approx(1.95), False)
    assert found["embedded, sums: the worst point under supervisors"] == (0.9, False)


@pytest.mark.slow
@pytest.mark.parametrize("supervisor", ["ToT", "BestOfN", "SelfConsistency", "MCTS"])
def test_searches_are_the_same_with_the_cache_and_have_hits(supervisor):
    model = LoadedModel(TINY, tiny_params(), None, Generation())
    point = bench.search_point(
        model,
        [[1, 2, 3], [4, 5]],
        supervisor=supervisor,
        temperature=0.5,
        tokens=12,
        kept=8,
        seed=0,
        always=True,
    )
    assert point["different_from_baseline"] == 0
    assert point["hit_ratio"]["baseline"] == 0 < point["hit_ratio"]["stepwise"] < 1
    assert all(each > 0 for each in point["seconds"].values())


def test_a_profile_is_that_of_the_distributions():
    even, sure = np.zeros((1, 4)), np.array([[0.0, -math.inf, -math.inf, -math.inf]])
    found = models.profile(np.concatenate([even, sure, sure, sure]))
    assert (
        found.positions == 4
        and found.certain == found.nearly_zero == 0.75
        and found.entropy == pytest.approx(math.log(4) / 4)
    )


@pytest.mark.slow
def test_the_random_model_is_certain_of_most_tokens_and_in_doubt_after_forks():
    small = models.MODEL | {
        "num_hidden_layers": 2,
        "vocab_size": 2000,
        "hidden_size": 256,
        "intermediate_size": 256,
    }
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]
    rare, often = (
        replays.model_profile(
            models.forking_model(0, dtype="float32", forks=forks, model=small), prompts, (), 0
        )
        for forks in (0.05, 0.6)
    )
    again = [
        replays.model_profile(
            models.forking_model(0, dtype="float32", rejoin=share, model=small), prompts, (), 0
        )
        for share in (0.0, 1.0)
    ]
    # as certain, whether texts go on alike or not
    assert again[0] == rare and abs(again[1].certain - rare.certain) < 0.15
    assert (
        rare.certain > 0.8
        and rare.entropy < 0.4
        and often.certain < 0.6
        and often.entropy > 2 * rare.entropy
    )


def test_puzzles_come_from_a_file_or_from_the_example(tmp_path):
    assert puzzles.read_puzzles(None, 2, 0) == ["4 9 10 13", "1 1 4 6"]
    file = tmp_path / "game24.csv"
    file.write_text("Rank,Puzzles\n" + "".join(f"{i},{i} 2 3 4\n" for i in range(30)))
    drawn = puzzles.read_puzzles(file, 5, 0)
    assert len(set(drawn)) == 5 and drawn == puzzles.read_puzzles(
        file, 5, 0
    ) != puzzles.read_puzzles(file, 5, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--models", "none"], ["--models has 'none'", "embedded, random"]),
        (["--temperatures", "0"], ["--temperatures is '0'", "above 0"]),
        (["--tokens", "0"], ["--tokens is 0"]),
        (["--forks", "2"], ["--forks is 2.0"]),
        (["--rejoin", "-1"], ["--rejoin is -1.0"]),
        (["--data", "no/such.csv"], ["--data", "no such file"]),
        (["--output", "no/such/folder/result.json"], ["--output", "folder that exists"]),
    ],
)
def test_bad_arguments_are_told_in_one_sentence(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    said = capsys.readouterr().err
    assert (
        stopped.value.code == 2
        and said.startswith("scripts.bench.logits_cache: ")
        and said.count("\n") == 1
    )
    assert all(word in said for word in words), said
