"""The arithmetic and arguments of the engine's benchmark, and that what it times is what it says;
the times are no matter for a test."""

import json

import jax
import pytest

from jaxshare import Sampler
from jaxshare.models import LoadedModel
from jaxshare.models.generation_config import Generation
from scripts.bench import engine as bench
from scripts.bench.parts.engine import sides
from tests.helpers import TINY, tiny_params


def test_calls_share_their_system_prompts_and_nothing_else():
    calls = bench.Calls(1000, seed=3, system_tokens=20)
    made = calls.make(60, (8, 40))
    assert {call.prompt[:20] for call in made} == set(calls.systems) and len(
        set(calls.systems)
    ) == bench.SYSTEMS
    assert all(
        calls.systems[call.system] == call.prompt[:20] and 28 <= len(call.prompt) <= 60
        for call in made
    )
    assert {16 <= call.budget <= 128 for call in made} == {True} and len(
        {call.budget for call in made}
    ) > 20
    assert len({call.seed for call in [*made, *calls.make(5, (1, 1))]}) == 65
    assert bench.Calls(1000, seed=3, system_tokens=20).make(60, (8, 40)) == made


def test_the_raw_loop_has_the_length_of_an_answer_over_all_its_passes():
    def call(budget):
        return sides.Call(0, (1,), budget, 0)

    assert sides.mean_length([call(100)]) == 50
    lengths = [at for budget in (20, 120) for at in range(budget)]
    assert sides.mean_length([call(20), call(120)]) == pytest.approx(
        sum(lengths) / len(lengths), abs=1
    )


def test_a_rate_is_that_of_the_time_in_which_calls_wait():
    seen = [
        (0.0, 0, False),
        (1.0, 5, True),
        (2.0, 5, True),
        (3.0, 25, True),
        (4.0, 25, True),
        (5.0, 65, True),
        (6.0, 66, False),
    ]
    assert sides.steady_rate(seen) == (65 - 25) / (5 - 3)
    with pytest.raises(ValueError, match="too few calls waited"):
        sides.steady_rate(seen[:4])


def test_who_waits_when_a_batch_ends_makes_the_next():
    asked = []

    def run(begin, end):
        asked.append((begin, end))
        return 1.0, 10.0

    waits = sides.batch_waits([0.0, 2.0, 3.0, 4.0, 50.0], 2, run)
    assert asked == [(0, 1), (1, 3), (3, 4), (4, 5)]
    assert waits == [1.0, 10 + 1 - 2, 10 + 1 - 3, 20 + 1 - 4, 1.0]


def test_goals_are_held_against_the_median_of_rounds():
    def result(ratio):
        return {"model": "embedded", "saturation": {"engine_to_raw": {"median": ratio}}}

    assert [goal.met for goal in bench.goals([result(0.9), result(0.89)])] == [True, False]


@pytest.fixture(scope="module")
def tiny():
    return LoadedModel(TINY, jax.tree.map(lambda p: p, tiny_params()), None, Generation())


@pytest.mark.slow
def test_the_engine_and_the_loop_that_are_timed_do_the_work(tiny, monkeypatch):
    calls = bench.Calls(TINY.vocab_size, seed=0, system_tokens=24)
    sampler = Sampler(temperature=0.8)
    served = bench.Served(tiny, calls, 2, sampler, 8)
    forgetful = bench.Served(tiny, calls, 2, sampler, 8, reuse=False)
    asked = calls.make(3, (2, 3))
    for side, reused in ((served, 24), (forgetful, 0)):
        done = side.arriving(asked, [0.0] * 3)
        assert [len(each.tokens) for each in done] == [call.budget for call in asked]
        assert min(each.reused_tokens for each in done) == reused
        seconds, seen = side.at_once(calls.make(24, (2, 3)))
        assert seconds > 0 and sides.steady_rate(seen) > 0
        side.engine.shutdown()
    both = bench.Served(tiny, calls, 2, sampler, 8)
    monkeypatch.setattr(bench, "STREAMED", 64)
    seen, dispatches = [], both.engine._scheduler.decode_rows.under_way
    fetch = both.engine._scheduler.decode_rows.fetch
    monkeypatch.setattr(
        both.engine._scheduler.decode_rows,
        "fetch",
        lambda: seen.append((both.engine._scheduler.follows, len(dispatches))) or fetch(),
    )
    going_on = bench.streams(both, calls, bench.Scale(2, 0, 0, 0, 1))
    assert set(seen) >= {(True, 2), (False, 1)} and (False, 2) not in seen
    assert all(rate > 0 for rate in going_on["tokens_per_second"].values())
    both.engine.shutdown()
    raw = bench.Raw(tiny, calls.make(4, (1, 1)), 24, 2, sampler, 8)
    assert raw.turn(2) > 0 and int(raw.state.passes) == 16
    assert raw.state.cache.lengths[-2:].tolist() == [raw.length + 8] * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--models", "none"], ["--models has 'none'", "embedded, random"]),
        (["--rows", "0"], ["--rows is 0"]),
        (["--passes", "1000"], ["--passes is 1000", "at most 128"]),
        (["--output", "no/such/folder/result.json"], ["--output", "folder that exists"]),
    ],
)
def test_bad_arguments_are_told_in_one_sentence(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    said = capsys.readouterr().err
    assert (
        stopped.value.code == 2
        and said.startswith("scripts.bench.engine: ")
        and said.count("\n") == 1
    )
    assert all(word in said for word in words), said


def test_a_report_has_all_sides_as_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        bench,
        "measure",
        lambda name, *_, **__: {
            "model": name,
            "rows": 2,
            "rounds": 1,
            "saturation": {
                "tokens_per_second": {bench.ENGINE: 90.0, bench.RAW: 100.0},
                "engine_with_the_end": 80.0,
                "engine_to_raw": {"median": 0.9, "lowest": 0.8, "highest": 1.0},
            },
            "streams": {
                "tokens_per_second": {bench.TWO_UNDER_WAY: 12.0, bench.ONE_BY_ONE: 10.0},
                "faster": {"median": 1.2},
            },
            "at_once": {
                "tokens_per_second": {bench.ENGINE: 3.0, bench.BATCHES: 1.5},
                "engine_faster": {bench.BATCHES: {"median": 2.0}},
            },
            "arrivals": [
                {
                    "load": 0.5,
                    "calls_per_second": 1.0,
                    "first_token_milliseconds": {bench.ENGINE: {"p50": 4.0, "p99": 5.0}},
                }
            ],
        },
    )
    output = tmp_path / "result.json"
    assert bench.main(["--quick", "--json", "--output", str(output)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (
        report == json.loads(output.read_text())
        and report["goals"][0]["met"]
        and report["benchmark"] == "engine"
    )
    assert bench.as_text(report)
