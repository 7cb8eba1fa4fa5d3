"""Requests of one prompt that are submitted together, with the Logits Cache: every text is that of
the request alone, and no distribution is computed twice."""

import random

import pytest

from jaxshare import FinishReason, Sampler
from tests.helpers import mostly_slow
from tests.serving.engine.stepped import small_pieces
from tests.serving.engine.test_engine import LONG, SHORT, STOP, Stepped, check_memory, done, metric

__all__ = ["small_pieces"]  # the fixture

PROMPT = [5, 6, 7, 8, 9] * 6
COOL = Sampler(temperature=0.6, forbidden=(STOP,))
COUNT = 24


@pytest.fixture(scope="module")
def fresh():
    """The tokens of a request without the cache, by sampler, seed and length."""
    engine, known = Stepped(1024), {}

    def tokens(sampler: Sampler, seed: int, count: int) -> tuple[int, ...]:
        key = repr(sampler), seed, count
        if key not in known:
            stream = engine.submit(PROMPT, sampler, max_new_tokens=count, seed=seed)
            engine.settle()
            known[key] = done(stream).tokens
        return known[key]

    return tokens


def prefixes(texts) -> set[tuple[int, ...]]:
    """The states whose next-token distributions the texts were drawn from."""
    return {tuple(text[:length]) for text in texts for length in range(len(text))}


def sampled(engine: Stepped) -> float:
    return metric(engine, "jaxshare_tokens_total", how="sampled")


@pytest.mark.parametrize("count", [1, 2, 6])
def test_each_distribution_is_computed_once(fresh, count):
    engine = Stepped(1024, **LONG)
    streams = [
        engine.submit(PROMPT, COOL, max_new_tokens=COUNT, seed=seed, resample="stepwise")
        for seed in range(count)
    ]
    engine.settle()
    texts = [done(stream).tokens for stream in streams]
    assert texts == [fresh(COOL, seed, COUNT) for seed in range(count)]
    assert sampled(engine) == len(prefixes(texts)) < count * COUNT + (count == 1)
    replayed = sum(done(stream).replayed_tokens for stream in streams)
    assert replayed + sampled(engine) == count * COUNT
    assert engine.logits_cache.statistics.followed == replayed
    check_memory(engine)


def test_greedy_siblings_follow_to_the_end_and_take_no_row():
    engine, rows = Stepped(1024, **LONG), []
    streams = [
        engine.submit(PROMPT, Sampler(), max_new_tokens=COUNT, resample="stepwise")
        for _ in range(5)
    ]
    while engine.step():
        rows.append(len(engine._scheduler.live))
    assert len({done(stream).tokens for stream in streams}) == 1
    assert max(rows) == 1 and sampled(engine) == len(done(streams[0]).tokens)
    assert engine.logits_cache.statistics.hits == 4


def test_a_follower_is_streamed_before_its_leader_has_ended():
    engine = Stepped(1024, **LONG)
    streams = [
        engine.submit(PROMPT, Sampler(), max_new_tokens=COUNT, resample="stepwise")
        for _ in range(2)
    ]
    for _ in range(4):
        engine.step()
    assert all(stream._state.output is None for stream in streams)
    assert len(next(streams[1].chunks()).tokens) > 0
    engine.settle()


def test_one_that_comes_later_follows_what_was_computed_before_it_came(fresh):
    engine = Stepped(1024, **LONG)
    first = engine.submit(PROMPT, COOL, max_new_tokens=COUNT, seed=3, resample="stepwise")
    for _ in range(3):
        engine.step()
    second = engine.submit(PROMPT, COOL, max_new_tokens=COUNT, seed=3, resample="stepwise")
    engine.settle()
    assert done(first).tokens == done(second).tokens == fresh(COOL, 3, COUNT)
    assert done(second).replayed_tokens == COUNT == sampled(engine)


def test_a_leader_that_is_cancelled_leaves_its_followers_going(fresh):
    engine = Stepped(1024, **LONG)
    streams = [
        engine.submit(PROMPT, COOL, max_new_tokens=COUNT, seed=4, resample="stepwise")
        for _ in range(3)
    ]
    for _ in range(3):
        engine.step()
    streams[0].cancel()
    engine.settle()
    assert done(streams[0]).finish_reason is FinishReason.CANCELLED
    assert {done(stream).tokens for stream in streams[1:]} == {fresh(COOL, 4, COUNT)}
    assert sampled(engine) == COUNT


@pytest.mark.slow
def test_where_little_is_kept_no_text_changes(fresh):
    engine = Stepped(1024, **{**SHORT, "logits_cache": 3000})  # a few distributions at a time
    streams = [
        engine.submit(PROMPT, COOL, max_new_tokens=COUNT, seed=seed, resample="stepwise")
        for seed in range(6)
    ]
    engine.settle()
    texts = [done(stream).tokens for stream in streams]
    assert texts == [fresh(COOL, seed, COUNT) for seed in range(6)]
    assert engine.logits_cache.bytes <= 3000


@pytest.mark.parametrize("seed", mostly_slow(range(4)))
def test_any_schedule_gives_the_texts_of_each_alone(fresh, seed):
    rng = random.Random(seed)
    engine = Stepped(256, max_queue=64, **rng.choice([LONG, SHORT]))
    samplers = [Sampler(temperature=t, forbidden=(STOP,)) for t in (0.0, 0.4, 1.0)]
    asked, cancelled = [], []
    for _ in range(14):
        sampler, number, count = rng.choice(samplers), rng.randrange(5), rng.choice([9, COUNT])
        stream = engine.submit(
            PROMPT,
            sampler,
            max_new_tokens=count,
            seed=number,
            priority=rng.choice([0, 0, 1]),
            agent_id=rng.choice("ab"),
            resample=rng.choice(["stepwise", "stepwise", None]),
        )
        asked.append((stream, sampler, number, count))
        if rng.random() < 0.2:
            cancelled.append(rng.choice(asked)[0])
            cancelled[-1].cancel()
        for _ in range(rng.randrange(4)):
            engine.step()
    engine.settle()
    for stream, sampler, number, count in asked:
        whole = fresh(sampler, number, count)
        assert done(stream).tokens == whole[: len(done(stream).tokens)]
        assert done(stream).tokens == whole or stream in cancelled
    check_memory(engine)
