"""Several samples of a prompt and the settings of calls that samplers have: on an engine and in a run."""

import asyncio
import dataclasses
import gc

import pytest

from jaxshare import Sampler
from jaxshare.seeds import stream_seed
from jaxshare.serving import Branch, Branches, Workers, generate
from jaxshare.serving.agents.backends import EngineModel
from jaxshare.serving.engine import Engine, QueueFullError, Stream, StreamGroup
from tests.helpers import one_layer
from tests.serving.engine.test_engine import MODEL, ROWS, STOP

PROMPT, HOT = (5, 7, 11, 7, 5), Sampler(temperature=1.5)
LENGTH = 12


@pytest.fixture(scope="module")
def engine():
    with Engine(MODEL, max_rows=ROWS, passes=7) as engine:
        yield engine


def alone(engine: Engine, seed: int, **more) -> tuple[int, ...]:
    """The tokens of one request."""
    return engine.submit(PROMPT, HOT, seed=seed, max_new_tokens=LENGTH, **more).wait().tokens


def tokens_of(completions) -> list[tuple[int, ...]]:
    return [completion.tokens for completion in completions]


@pytest.mark.parametrize("in_sampler", [False, True])
def test_sample_i_is_that_of_generate_and_that_of_a_request_with_its_seed(engine, in_sampler):
    given = {"n": 4, "seed": 9}
    sampler = dataclasses.replace(HOT, **given) if in_sampler else HOT
    more = {"max_new_tokens": LENGTH} | ({} if in_sampler else given)
    group = engine.submit(PROMPT, sampler, **more)
    assert isinstance(group, StreamGroup) and len(group.streams) == 4
    done = group.wait()
    assert [each.index for each in done] == [0, 1, 2, 3]
    assert tokens_of(done) == [alone(engine, stream_seed(9, 0, i)) for i in range(4)]
    assert len({*tokens_of(done)}) > 1
    assert tokens_of(done) == tokens_of(
        generate(MODEL, PROMPT, sampler=sampler, **more).completions
    )
    on_engine = generate(MODEL, PROMPT, sampler=sampler, engine=engine, **more).completions
    assert tokens_of(done) == tokens_of(on_engine)


def test_a_group_of_one_is_a_group_and_no_number_a_stream(engine):
    assert isinstance(engine.submit(PROMPT, HOT, seed=3, max_new_tokens=LENGTH), Stream)
    [one] = engine.submit(PROMPT, HOT, n=1, seed=3, max_new_tokens=LENGTH).wait()
    assert one.tokens == alone(engine, 3)


def test_without_a_seed_samples_are_requests_one_after_the_other():
    def engine():
        return Engine(MODEL, max_rows=ROWS, passes=7, seed=5, sampler=HOT)

    with engine() as one, engine() as other:
        together = one.submit(PROMPT, n=3, max_new_tokens=LENGTH).wait()
        apart = [other.submit(PROMPT, max_new_tokens=LENGTH).wait().tokens for _ in range(3)]
    assert tokens_of(together) == apart and len({*apart}) == 3


@pytest.mark.parametrize("kept", [1, 2, 6])
def test_the_best_are_those_with_the_largest_log_probability(engine, kept):
    every = engine.submit(PROMPT, HOT, n=6, seed=2, max_new_tokens=LENGTH, logprobs=True).wait()
    best = sorted(every, key=lambda c: -sum(c.logprobs))[:kept]
    more = {"n": kept, "best_of": 6, "seed": 2, "max_new_tokens": LENGTH}
    found = engine.submit(PROMPT, HOT, **more).wait()
    assert [(c.index, c.tokens) for c in found] == [(c.index, c.tokens) for c in best]
    for where in ({}, {"engine": engine}):
        run = generate(MODEL, PROMPT, sampler=HOT, **more, **where).completions
        assert [(c.index, c.tokens) for c in run] == [(c.index, c.tokens) for c in best]


def test_prompts_of_a_run_have_numbers_of_their_own(engine):
    """A prompt's own sampler is nearer than the call's, and the others have the call's."""
    own = dataclasses.replace(HOT, n=2, best_of=3, max_tokens=5, seed=4, stop=())
    forest = [Branch(PROMPT, sampler=own), Branch(PROMPT[::-1], n=1), Branch(PROMPT)]
    call = dataclasses.replace(HOT, n=3, max_tokens=LENGTH, seed=8)
    every = generate(MODEL, PROMPT, sampler=HOT, n=3, max_new_tokens=5, seed=4).completions
    best = sorted(every, key=lambda c: -c.logprob)[:2]
    for where in ({}, {"engine": engine}):
        found = generate(MODEL, forest, sampler=call, **where).completions
        assert [c.prompt for c in found] == [0, 0, 1, 2, 2, 2]
        assert tokens_of(found[:2]) == tokens_of(best)
        for number, prompt in ((1, PROMPT[::-1]), (2, PROMPT)):
            for completion in (c for c in found if c.prompt == number):
                seed = stream_seed(8, number, completion.index)
                one = engine.submit(prompt, HOT, seed=seed, max_new_tokens=LENGTH).wait()
                assert completion.tokens == one.tokens


@pytest.mark.slow
def test_an_argument_wins_over_the_field(engine):
    fields = dataclasses.replace(HOT, n=3, max_tokens=3, seed=1, best_of=5)
    more = {"n": 1, "best_of": 1, "max_new_tokens": LENGTH, "seed": 6}
    expected = [alone(engine, 6)]
    assert tokens_of(engine.submit(PROMPT, fields, **more).wait()) == expected
    assert tokens_of(generate(MODEL, PROMPT, sampler=fields, **more).completions) == expected
    run = dataclasses.replace(fields, best_of=None)
    found = Branches(MODEL, PROMPT, sampler=run, n=1, max_new_tokens=LENGTH, seed=6).stream()
    assert tokens_of(found) == expected
    short = Sampler(1.5, max_tokens=3, seed=6)
    assert engine.submit(PROMPT, short).wait().tokens == expected[0][:3]


def test_samplers_that_differ_in_the_seed_alone_write_different_texts(engine):
    samplers = [dataclasses.replace(HOT, seed=seed, max_tokens=LENGTH) for seed in (1, 2, 1)]
    streams = [engine.submit(PROMPT, sampler) for sampler in samplers]
    found = [stream.wait().tokens for stream in streams]
    assert found == [alone(engine, 1), alone(engine, 2), alone(engine, 1)] and found[0] != found[1]
    run = generate(MODEL, [Branch(PROMPT, sampler=each) for each in samplers]).completions
    assert tokens_of(run) == found


def test_the_logits_cache_draws_with_the_seed_of_the_sampler():
    settings = dict(passes=7, logits_cache=10**6, resample_always=True)
    with Engine(MODEL, max_rows=ROWS, **settings) as engine:
        expected = [alone(engine, seed) for seed in (1, 2)]
        for _ in range(2):
            streams = [
                engine.submit(
                    PROMPT,
                    dataclasses.replace(HOT, seed=seed, max_tokens=LENGTH),
                    resample="stepwise",
                )
                for seed in (1, 2)
            ]
            found = [stream.wait() for stream in streams]
            assert tokens_of(found) == expected
        assert min(each.replayed_tokens for each in found) > 0


@pytest.mark.parametrize(("length", "least"), [(0, 0), (5, 0), (9, 4), (12, 7)])
def test_min_length_counts_the_prompt(engine, length, least):
    likely = {"bias": {STOP: 30.0}, "max_tokens": LENGTH}
    for found in (
        engine.submit(PROMPT, Sampler(min_length=length, **likely)).wait(),
        generate(MODEL, PROMPT, sampler=Sampler(min_length=length, **likely)).completions[0],
    ):
        assert len(found.tokens) == least + 1 and found.tokens[-1] == STOP


def test_stop_texts_of_samplers_end_their_own_completions():
    model = one_layer()
    whole = generate(model, "1. 47 + 38", sampler=HOT, max_new_tokens=LENGTH, seed=1)
    text = whole.completions[0].text
    stop = text[3:5]
    before, after = text[: text.index(stop)], text[: text.index(stop) + 2]
    samplers = [
        dataclasses.replace(HOT, stop=stop, seed=1),
        dataclasses.replace(HOT, stop=(stop,), include_stop=True, seed=1),
        dataclasses.replace(HOT, stop=(), seed=1),
    ]
    forest = [Branch("1. 47 + 38", sampler=sampler) for sampler in samplers]
    with Engine(model, max_rows=4, passes=5) as engine:
        streams = [engine.submit("1. 47 + 38", s, max_new_tokens=LENGTH) for s in samplers]
        assert [stream.wait().text for stream in streams] == [before, after, text]
        over = engine.submit(
            "1. 47 + 38", samplers[1], stop="never there", max_new_tokens=LENGTH, seed=1
        )
        assert over.wait().text == text
    found = generate(model, forest, max_new_tokens=LENGTH, stop="never there").completions
    assert [each.text for each in found] == [before, after, text]


def test_groups_are_waited_for_cancelled_and_forgotten(engine):
    async def finished():
        return await engine.submit(PROMPT, HOT, n=2, seed=1, max_new_tokens=4)

    assert [len(each.tokens) for each in asyncio.run(finished())] == [4, 4]
    group = engine.submit(PROMPT, Sampler(1.5, ignore_eos=True), n=2, max_new_tokens=40)
    with pytest.raises(TimeoutError, match="within 0"):
        group.wait(0)
    group.cancel()
    group.wait()
    del group
    dropped = engine.submit(PROMPT, Sampler(1.5, ignore_eos=True), n=2, max_new_tokens=40)
    del dropped
    gc.collect()
    engine.drain()


def test_where_a_sample_is_refused_none_goes_on():
    with Engine(MODEL, max_rows=ROWS, max_queue=2) as engine:
        with pytest.raises(QueueFullError):
            engine.submit(PROMPT, Sampler(1.5, ignore_eos=True), n=64, max_new_tokens=40)
        engine.drain()
        assert engine.metrics.num_sampled < 64


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 0}, "n is 0; it must be at least 1"),
        ({"best_of": 0}, "best_of is 0; it must be at least 1"),
        ({"n": 3, "best_of": 2}, "best_of is 2; it must be at least 3, the number"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"min_length": -1}, "min_length is -1; it must be at least 0"),
        ({"stop": ("",)}, "stop is .*; give texts that are not empty"),
        ({"stop": 5}, "stop is 5; it must be a text or a list of texts"),
        ({"include_stop": "no"}, "include_stop is 'no'; it must be True, False or None"),
        ({"seed": 1.5}, "seed is 1.5; it must be an integer"),
        ({"sequence_bias": [(5, 6)]}, "a sequence of sequence_bias is 5; it must be the numbers"),
        ({"sequence_bias": [((), 1.0)]}, "sequence_bias has an empty sequence"),
        ({"sequence_bias": [5]}, "sequence_bias has 5; it must be pairs of tokens and a number"),
        ({"sequence_bias": [((5, 6), float("inf"))]}, r"sequence_bias of \(5, 6\) is inf"),
    ],
)
def test_fields_out_of_range_are_refused(fields, words):
    with pytest.raises((ValueError, TypeError), match=words):
        Sampler(**fields)


def test_what_cannot_obey_a_field_refuses_it_by_name(engine):
    with pytest.raises(ValueError, match="best_of is 2; it must be at least 3"):
        engine.submit(PROMPT, HOT, n=3, best_of=2)
    with pytest.raises(ValueError, match="best_of cannot be had with resample"):
        engine.submit(PROMPT, HOT, best_of=2, resample="stepwise")
    with pytest.raises(ValueError, match="sampler's best_of is 2, but a run yields all"):
        Branches(MODEL, PROMPT, sampler=Sampler(best_of=2))
    for name, value in {
        "n": 2,
        "best_of": 2,
        "max_tokens": 4,
        "stop": "x",
        "include_stop": True,
    }.items():
        with pytest.raises(ValueError, match=f"sampler's {name} is .*, but a session has"):
            Workers(one_layer(), "1. 47 + 38", sampler=Sampler(**{name: value}))
    for name in ("n", "best_of", "seed"):
        with pytest.raises(ValueError, match=f"sampler's {name} is 2, but each call of an agent"):
            EngineModel(one_layer(), sampler=Sampler(**{name: 2}))
    with pytest.raises(ValueError, match="max_new_tokens is 0; it must be at least 1"):
        generate(MODEL, PROMPT, max_new_tokens=0)
    with pytest.raises(ValueError, match="the model's context holds"):
        generate(MODEL, [Branch(PROMPT, sampler=Sampler(max_tokens=10**6))])


@pytest.mark.slow
def test_a_session_draws_with_the_seed_of_its_sampler():
    def texts(sampler, **more):
        with Workers(one_layer(), "1. 47 + 38", sampler=sampler, budget=12, **more) as session:
            return session.run().texts

    seeded = texts(dataclasses.replace(HOT, seed=3))
    assert seeded == texts(HOT, seed=3) != texts(HOT)
    assert texts(dataclasses.replace(HOT, seed=3), seed=0) == texts(HOT)
