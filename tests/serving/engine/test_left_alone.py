"""Requests that the Logits Cache is used for, and those that it leaves by themselves, with costs that
the test sets."""

import pytest

from jaxshare import Sampler
from jaxshare.serving.kvcache.speeds import FixedSpeeds
from jaxshare.serving.logits_cache.payoff import Payoff
from tests.serving.engine.stepped import small_pieces
from tests.serving.engine.test_engine import ROWS, SHORT, STOP, Stepped, done, metric
from tests.serving.logits_cache.test_payoff import Clock

__all__ = ["small_pieces"]  # the fixture

PROMPTS = [[5 + number, 6, 7, 8] for number in range(6)]
HOT, COLD = (Sampler(temperature=t, forbidden=(STOP,)) for t in (1.5, 0.0))
COUNT, TURNS = 20, 4


@pytest.fixture
def engine():
    """One whose passes take a millisecond, as does what the host does for a request."""
    made = Stepped(2048, **SHORT)
    made._scheduler.kv.speeds = speeds = FixedSpeeds()
    speeds.last_pass_seconds = 1e-3
    made._scheduler.output.payoff = Payoff((1, 31, 8), Clock(1e-3))
    return made


def asked(engine: Stepped, sampler: Sampler, resample: str | None, turns=range(TURNS)) -> list:
    """The tokens of all prompts, one request after the other, turn by turn with other seeds."""
    texts = []
    for turn in turns:
        for number, prompt in enumerate(PROMPTS):
            stream = engine.submit(
                prompt,
                sampler,
                max_new_tokens=COUNT,
                seed=100 * turn + number,
                resample=resample,
            )
            engine.settle()
            texts.append(done(stream).tokens)
    return texts


def left_alone(engine: Stepped) -> float:
    return metric(engine, "jaxshare_logits_lookups_total", found="none wanted")


@pytest.mark.slow
def test_where_outputs_part_at_once_nothing_is_ever_kept(engine):
    cached, fresh = (asked(engine, HOT, how) for how in ("stepwise", None))
    assert cached == fresh
    assert left_alone(engine) == len(cached)
    assert engine.logits_cache.statistics.runs == engine.logits_cache.bytes == 0


def test_where_outputs_agree_all_is_kept_after_two_have_come_again(engine):
    asked(engine, COLD, "stepwise", [0])
    assert engine.logits_cache.bytes == 0 and left_alone(engine) == len(PROMPTS)
    cached, fresh = (asked(engine, COLD, how, range(1, TURNS)) for how in ("stepwise", None))
    assert cached == fresh
    found = engine.logits_cache.statistics
    assert left_alone(engine) == len(PROMPTS) + 2 and found.states == len(PROMPTS)
    # The two prompts that came again first were not kept then, so they are once more.
    assert found.hits == (TURNS - 1) * len(PROMPTS) - 2 - len(PROMPTS)
    assert found.replayed == found.hits * COUNT


def test_a_family_under_way_is_left_alone_where_rows_cost_nothing(engine):
    streams = [
        engine.submit(PROMPTS[0], COLD, max_new_tokens=COUNT, seed=seed, resample="stepwise")
        for seed in range(12)
    ]
    engine.settle()
    assert len({done(stream).tokens for stream in streams}) == 1
    assert metric(engine, "jaxshare_tokens_total", how="sampled") == 12 * COUNT
    assert engine.logits_cache.bytes == 0


def test_a_family_follows_its_first_once_outputs_agree_and_rows_are_short(engine):
    def family(seeds: range) -> float:
        before = metric(engine, "jaxshare_tokens_total", how="sampled")
        streams = [
            engine.submit(PROMPTS[0], COLD, max_new_tokens=COUNT, seed=seed, resample="stepwise")
            for seed in seeds
        ]
        engine.settle()
        assert {len(done(stream).tokens) for stream in streams} == {COUNT}
        return metric(engine, "jaxshare_tokens_total", how="sampled") - before

    engine._scheduler.kv.speeds.last_pass_seconds = 1e-1
    # Four have rows, the one that reads the prompt ends first, and another one takes its row; the
    # others wait until these have shown it, and follow one of them.
    assert family(range(12)) == (ROWS + 2) * COUNT
    assert family(range(12, 24)) == 0
