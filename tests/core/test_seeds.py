"""Seeds: every stream of every host has a key of its own, and a stream can be drawn again by
itself."""

import asyncio
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import DecodeState, KVCache, Layout, Sampler
from jaxshare.decoding.sampling import uniforms
from jaxshare.seeds import seed_words, stream_seed
from jaxshare.serving import generate
from jaxshare.serving.agents import Reply, Runtime, agent, llm
from jaxshare.serving.branches.run import Branches
from jaxshare.serving.engine import Engine
from jaxshare.serving.evaluation import baselines, streams
from jaxshare.serving.evaluation.runs import run_specs
from jaxshare.serving.evaluation.tasks import Problem
from jaxshare.serving.workers.layouts import worker_names
from tests.helpers import TINY
from tests.serving.branches.test_branches import HOT, TOKENS, model
from tests.serving.workers.test_session import start

SEEDS, EACH = range(8), 8
"""Seeds, and streams under each of them."""


def keys_of(state: DecodeState) -> list[int]:
    return [(int(high) << 32) + int(low) for high, low in np.asarray(state.seeds)]


def check(streams) -> None:
    """There are 64 streams, of 8 seeds x 8 places, and they are pairwise different."""
    streams = list(streams)
    assert len(streams) == len(SEEDS) * EACH == len(set(streams)), sorted(streams)


# The rule.


def test_the_first_stream_of_a_seed_is_the_seed_and_others_are_hashes_that_stay_as_they_are():
    """A saved run (a job, a session, an evaluation) continues with the same texts only if no key
    ever changes."""
    assert [stream_seed(5), stream_seed(5, 0), stream_seed(5, 0, 0)] == [5, 5, 5]
    assert stream_seed(-1) == stream_seed(2**64 - 1) == 2**64 - 1
    assert stream_seed(5, 1) == stream_seed(5 + 2**64, 1) == 632400757327323171
    assert stream_seed(5, "1") == 7091200668651676117
    assert stream_seed(np.int64(5), np.int32(1)) == stream_seed(5, 1)
    with pytest.raises(TypeError):
        stream_seed(5, 0.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError):
        stream_seed(0.5)  # pyright: ignore[reportArgumentType]


def test_different_places_and_seeds_have_different_keys():
    """However their parts are cut, of whatever kind they are, near to each other or far apart."""
    parts = (0, 1, 2, 12, 10**20, -1, "", "1", "12", "a", b"", b"1", b"12")
    places = [
        place
        for count in (1, 2, 3)
        for place in itertools.product(parts, repeat=count)
        if any(part != 0 for part in place)
    ]
    found = [stream_seed(seed, *place) for seed in (0, 1, 2**32, 2**63) for place in places]
    assert len(set(found)) == len(found) == 4 * (13 + 13**2 + 13**3 - 3)
    assert all(0 <= key < 2**63 for key in found)
    many = {
        stream_seed(seed, prompt, index)
        for seed in range(20)
        for prompt in range(50)
        for index in range(50)
    }
    assert len(many) == 20 * 50 * 50


def test_words_are_those_of_a_key_that_jax_makes_of_the_same_seed():
    """A draw is `uniform(fold_in(key(seed), position))` in plain JAX."""
    seeds = [0, 5, 2**32 - 1]
    expected = [
        float(
            jax.random.uniform(
                jax.random.fold_in(jax.random.key(np.uint32(seed), impl="threefry2x32"), 7)
            )
        )
        for seed in seeds
    ]
    found = uniforms(jnp.asarray(seed_words(seeds)), jnp.full(3, 7, jnp.int32))
    assert np.asarray(found).tolist() == expected
    assert seed_words([2**63 + 5, -1, 2**32]).tolist() == [
        [2**31, 5],
        [2**32 - 1, 2**32 - 1],
        [1, 0],
    ]


def test_streams_under_neighbouring_seeds_and_places_are_not_correlated():
    keys = [stream_seed(seed, index) for seed in range(64) for index in range(64)]
    words = jnp.asarray(seed_words(keys))
    u = np.stack(
        [np.asarray(uniforms(words, jnp.full(len(keys), at, jnp.int32))) for at in range(4)]
    ).reshape(4, 64, 64)
    for axis in (1, 2):
        first, second = (np.take(u, range(start, start + 63), axis) for start in (0, 1))
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.025
    assert len(np.unique(u)) > 0.995 * u.size


# Every host: 8 seeds x 8 places.


def test_rows_of_a_decode_state():
    cache = KVCache.create(TINY, [4] * EACH, jnp.float32)
    layout = Layout.from_blocks([[row] for row in range(EACH)])
    check(
        key
        for seed in SEEDS
        for key in keys_of(
            DecodeState.create(cache, layout, [[1]] * EACH, vocab_size=TINY.vocab_size, seeds=seed)
        )
    )


def test_completions_of_a_prompt_and_of_several():
    """The texts themselves, of one prompt eight times and of four equal prompts twice each."""
    for prompts, n in (([TOKENS[:6]], EACH), ([TOKENS[:6]] * 4, 2)):
        found = [
            generate(
                model(),
                prompts,
                n=n,
                max_new_tokens=8,
                sampler=HOT,
                seed=seed,
                share=True,
                max_rows=8,
            )
            for seed in SEEDS
        ]
        check(tuple(c.tokens) for done in found for c in done.completions)


def test_two_seeds_of_a_job_share_no_text():
    """`batch --n 4 --seed 0` and `--seed 1` over twelve prompts."""
    prompts = [[*TOKENS[:3], TOKENS[3 + i]] for i in range(12)]
    texts = [
        {
            (c.prompt, *c.tokens)
            for c in generate(
                model(),
                prompts,
                n=4,
                max_new_tokens=8,
                sampler=HOT,
                seed=seed,
                share=True,
                max_rows=8,
            ).completions
        }
        for seed in (0, 1)
    ]
    assert len(texts[0]) == len(texts[1]) == 48 and not texts[0] & texts[1]


@pytest.mark.slow
def test_a_completion_is_that_of_its_key_alone():
    """Wherever it is among others: what makes texts independent of data groups, replicas and
    resumed jobs."""
    prompts = [TOKENS[:6], TOKENS[6:12]]
    run = Branches(
        model(),
        prompts,
        n=3,
        max_new_tokens=8,
        sampler=HOT,
        seed=11,
        share=True,
        max_rows=4,
        skip={(0, 0), (1, 1)},
    )
    for done in run.stream():
        [alone] = generate(
            model(),
            prompts[done.prompt],
            max_new_tokens=8,
            sampler=HOT,
            share=True,
            seed=stream_seed(11, done.prompt, done.index),
        ).completions
        assert alone.tokens == done.tokens


def test_workers_and_who_is_asked():
    sessions = [start(worker_names(EACH), max_workers=EACH, seed=seed, budget=8) for seed in SEEDS]
    keys = [key for session in sessions for key in keys_of(session._session.state)]
    check(keys)
    asked = [
        (int(high) << 32) + int(low)
        for high, low in (np.asarray(session._session.state.steps.seed[0]) for session in sessions)
    ]
    assert len({*keys, *asked}) == len(keys) + len(SEEDS)


@pytest.mark.slow
def test_a_worker_that_joins_does_not_draw_what_the_one_before_in_its_row_drew():
    session = start(sampler=Sampler(temperature=1.5), budget=40)
    for _ in session.stream(10):
        pass
    before = keys_of(session._session.state)
    row = session._session.roster.row("Bob")
    session.remove("Bob")
    session.add("Carol")
    after = keys_of(session._session.state)
    assert session._session.roster.row("Carol") == row and after[row] not in before
    assert [key for r, key in enumerate(after) if r != row] == [
        key for r, key in enumerate(before) if r != row
    ]


class Enough(Exception):
    """A session has been made, and need not run."""


@pytest.mark.slow
def test_baselines_of_several_streams(monkeypatch):
    found, make = [], streams.independent_streams

    def noted(*args, **settings):
        found.extend(keys_of(make(*args, **settings)._session.state))
        raise Enough

    monkeypatch.setattr(streams, "independent_streams", noted)
    for seed in SEEDS:
        with pytest.raises(Enough):
            baselines.self_consistency(
                model(), "1. 47 + 38", workers=EACH, budget=1, seed=seed, answer_by="vote"
            )
    check(found)


@pytest.mark.slow
def test_parts_of_a_skeleton_of_thought_have_seeds_of_their_own(monkeypatch):
    from tests.serving.evaluation.test_baselines import script

    given, make = [], streams.independent_streams

    def noted(*args, **settings):
        session = make(*args, **settings)
        if settings.get("seed") is not None:
            given.extend(keys_of(session._session.state))
        return session

    monkeypatch.setattr(streams, "independent_streams", noted)
    baselines.skeleton_of_thought(script(), "Solve it.", budget=100, seed=3)
    assert len(given) == len(set(given)) == 1 + 3 + 1  # outline, three points, main


def test_calls_of_an_engine_that_are_given_no_seed(monkeypatch):
    """Eight requests each, of eight engines; a seed that is given is the stream itself."""
    # nothing runs, so that what was submitted can be inspected
    monkeypatch.setattr(Engine, "_work", lambda self: None)
    found = []
    for seed in SEEDS:
        engine = Engine(model(), max_rows=1, kv_bytes=2**20, seed=seed)
        for _ in range(EACH):
            engine.submit([5, 6, 7], HOT, max_new_tokens=4)
        found += [request.seed for request in engine._submitted]
        engine.submit([5, 6, 8], HOT, max_new_tokens=4)
        engine.submit([5, 6, 7], HOT, max_new_tokens=4, seed=seed)
        *_, other, given = engine._submitted
        assert other.seed not in found and given.seed == seed
    check(found)


def test_calls_of_agents():
    @agent
    async def asks():
        return await llm("again?", n=EACH)

    seen: list[int] = []

    class Model:
        async def answer(self, call):
            seen.append(call.seed)
            return Reply("yes", new_tokens=1, prompt_tokens=1)

    for seed in SEEDS:
        asyncio.run(Runtime(Model(), seed=seed).run(asks))
    check(seen)


def test_runs_of_an_evaluation_and_their_workers():
    """Two problems, four runs each; the workers of all runs of one evaluation are different
    streams, too."""
    settings = dict(
        method="workers",
        workers=[2],
        budgets=[8],
        seeds=4,
        answer_tokens=1,
        sampler=Sampler(1.0),
        more={},
    )
    problems = [Problem(str(i), "1. 47 + 38", ("85",)) for i in range(2)]
    found = [piece.seed for seed in SEEDS for piece in run_specs(problems, seed=seed, **settings)]
    check(found)
    workers = {stream_seed(seed, row) for seed in found for row in range(EACH)}
    assert len(workers) == 64 * EACH
