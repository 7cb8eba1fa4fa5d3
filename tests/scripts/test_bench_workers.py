"""The arithmetic and arguments of the workers' benchmark, and that what it times is what it says;
the times are no matter for a test."""

import dataclasses
import functools
import importlib
import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import block_attention, make_plan
from jaxshare.models import LoadedModel
from jaxshare.models.generation_config import Generation
from scripts.bench import lib as benchlib
from scripts.bench import workers as bench
from scripts.bench.parts.workers import sides
from tests.helpers import TINY, tiny_params

THEIRS = bench.THEIRS
HISTORY, STEPS = 200, 4


@pytest.fixture(scope="module")
def run():
    bfloat16 = jax.tree.map(lambda p: p.astype(jnp.bfloat16), tiny_params())
    made = bench.Run(
        LoadedModel(TINY, bfloat16, None, Generation()),
        workers=2,
        history=HISTORY,
        steps=STEPS,
        seed=0,
    )
    made.compile()
    return made


@pytest.mark.slow
def test_a_turn_decodes_from_steps_of_the_same_length_every_time(run):
    for turn in (1, 2, 3):
        assert run.step() > 0
        assert np.asarray(run.state.cache.lengths).tolist() == [
            HISTORY,
            bench.CURRENT + STEPS,
            bench.CURRENT + STEPS,
        ]
        run.check(turn)
    with pytest.raises(RuntimeError, match="before their 16 passes"):
        run.check(4)


@pytest.mark.slow
def test_the_plan_that_is_timed_is_that_of_a_pass(run):
    cache = sides.random_cache(run.model, 2, HISTORY, seed=0)
    last = np.asarray([HISTORY, *[bench.CURRENT - (bench.PLANS - 1) % 8] * 2], np.int32)
    cache_then = dataclasses.replace(cache, lengths=jnp.asarray(last))
    expected = jax.jit(make_plan, static_argnums=3)(
        cache_then, sides.combined(2), jnp.ones(2, jnp.int32), 1
    )
    for found, wanted in zip(
        jax.tree.leaves(run.plans(cache, sides.combined(2))), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_the_attention_that_is_timed_runs_through_all_layers_each_time(run):
    cache = run.state.cache
    plan = run.plans(cache, run.state.layout)
    attention, q = jax.jit(functools.partial(block_attention, implementation="reference")), run.q
    for _ in range(bench.ATTENTIONS):
        for keys, values in zip(cache.keys, cache.values, strict=True):
            q = attention(q, keys, values, plan)
    found = run.attentions(run.q, cache, plan)
    assert float(jnp.abs(q).max()) > 0
    np.testing.assert_allclose(
        found.astype(jnp.float32), q.astype(jnp.float32), atol=0.1 * float(jnp.abs(q).max())
    )


def test_the_layout_is_the_combined_one():
    assert np.asarray(sides.combined(1).blocks).tolist() == [[0, 1]]
    assert np.asarray(sides.combined(3).blocks).tolist() == [
        [0, 2, 3, 1],
        [0, 1, 3, 2],
        [0, 1, 2, 3],
    ]


TIMES = {
    (1, "pass"): [0.010, 0.010, 0.020],
    (1, "plan"): [1e-4] * 3,
    (1, "attention"): [0.004] * 3,
    (2, "pass"): [0.012, 0.011, 0.020],
    (2, "plan"): [3e-4, 11e-4, 2e-4],
    (2, "attention"): [0.004, 0.006, 0.008],
    (2, THEIRS): [0.12, 0.088, 0.2],
}


def test_summary_has_medians_of_times_and_of_each_rounds_ratios():
    found = bench.summarise(4096, 2, TIMES)
    assert found["history"] == 4096 and list(found["workers"]) == ["1", "2"]
    one, two = found["workers"].values()
    assert (
        one["pass_milliseconds"] == pytest.approx(10)
        and one["tokens_per_second"] == pytest.approx(100)
        and THEIRS not in one
    )
    assert two["pass_milliseconds"] == pytest.approx(12) and two[
        "tokens_per_second"
    ] == pytest.approx(2 / 0.012)
    # the medians' own ratio is 1.2
    assert two["to_one_worker"] == pytest.approx({"median": 1.1, "lowest": 1.0, "highest": 1.2})
    assert two["plan_microseconds"] == pytest.approx(300) and two[
        "attention_microseconds_a_layer"
    ] == pytest.approx(3000)
    assert two["plan_to_pass"] == pytest.approx({"median": 0.025, "lowest": 0.01, "highest": 0.1})
    assert two[THEIRS]["pass_milliseconds"] == pytest.approx(120)
    assert two[THEIRS]["times_slower"] == pytest.approx({"median": 10, "lowest": 8, "highest": 10})


def told(results, streaming) -> list[tuple]:
    return [
        (goal.measured and round(goal.measured, 3), goal.goal, goal.at_most, goal.met)
        for goal in bench.goals(results, streaming)
    ]


def test_goals_are_those_of_what_was_measured():
    results = [
        bench.summarise(4096, 2, TIMES),
        bench.summarise(1024, 2, {key: t for key, t in TIMES.items() if key[1] != THEIRS}),
    ]
    waited = {"passes": 250, "waits": 16}
    assert told(results, waited) == [
        # two workers over 4096 tokens
        (1.1, 1.15, True, True),
        (2.5, 2.0, True, False),
        (10.0, 8.0, False, True),
        # and over 1024, where no goal is set against the authors'
        (1.1, 1.15, True, True),
        (2.5, 2.0, True, False),
        (1.0, 1.0, True, True),
    ]
    assert told([], {"passes": 250, "waits": 17})[0][3] is False
    without = [bench.summarise(4096, 2, {key: t for key, t in TIMES.items() if key[1] != THEIRS})]
    assert told(without, waited)[2] == (None, 8.0, False, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--histories", "0"], ["--histories", "'0'"]),
        (["--histories", "4096,4096"], ["--histories", "different"]),
        (["--histories", "20000"], ["--histories is 20000", "16384"]),
        (["--workers", "2,4"], ["--workers is 2,4", "1 must be among them"]),
        (["--workers", "one"], ["--workers", "'one'"]),
        (["--rounds", "0"], ["--rounds is 0"]),
        (["--steps", "449"], ["--steps 449", "from 1 to 448"]),
        (["--output", "no/such/folder/result.json"], ["--output", "folder that exists"]),
        (
            ["--hogwild", "no/such/folder"],
            ["--hogwild is no/such/folder", "https://github.com/eqimp/hogwild_llm"],
        ),
    ],
)
def test_bad_arguments_are_told_in_one_sentence(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--quick", *arguments])
    said = capsys.readouterr().err
    assert (
        stopped.value.code == 2
        and said.startswith("scripts.bench.workers: ")
        and said.count("\n") == 1
    )
    assert all(word in said for word in words), said


def checkout(folder: Path) -> str:
    (folder / "shared_cache").mkdir()
    return str(folder)


def test_without_an_environment_for_their_code_it_says_how_to_get_one(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(benchlib, "ROOT", tmp_path)
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--quick", "--hogwild", checkout(tmp_path)])
    said = capsys.readouterr().err
    assert (
        stopped.value.code == 2
        and "make parity HOGWILD=DIR" in said
        and "--hogwild-python" in said
        and said.count("\n") == 1
    )


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is not None,
    reason="needs a Python without PyTorch, and this one has it",
)
def test_a_python_without_torch_is_refused_before_any_work(tmp_path, capfd):
    assert (
        bench.main(["--quick", "--hogwild", checkout(tmp_path), "--hogwild-python", sys.executable])
        == 2
    )
    said = capfd.readouterr().err
    assert (
        "No module named 'torch'" in said and "--hogwild-python" in said and said.count("\n") == 1
    )
