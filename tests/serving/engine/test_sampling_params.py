"""Sampling settings that look at the text, and what ends an output: in the engine, beside others."""

import dataclasses
import functools
import itertools
import math
import random

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshare import FinishReason, Sampler, SamplingParams
from jaxshare.models import Generation
from jaxshare.serving import Branch, Workers, generate
from jaxshare.serving.engine import Engine
from tests.helpers import mostly_slow, one_layer, padded
from tests.serving.engine.test_engine import (
    CONFIG,
    LENGTHS,
    MODEL,
    ROWS,
    STOP,
    Stepped,
    _causal,
    done,
)

VOCAB, PROMPT = CONFIG.vocab_size, (5, 7, 11, 7, 5)
NONE = Sampler()


@functools.cache
def logits_after(tokens: tuple[int, ...]) -> np.ndarray:
    """The next token's logits by plain causal attention over all tokens."""
    row = padded(tokens, LENGTHS)
    return np.asarray(_causal(MODEL.params, row), np.float64)[0, len(tokens) - 1]


def greedy(prompt, params: SamplingParams, count: int) -> tuple[list[int], FinishReason]:
    """The greedy output by the definition of each setting, in Python."""
    tokens, out = list(prompt), []
    stops = {*(() if params.ignore_eos else (STOP,)), *params.stop_token_ids}
    for number in range(count):
        logits = logits_after(tuple(tokens)).copy()
        for token, value in params.bias.items():
            logits[token] += value
        for (*begin, end), value in params.sequence_bias:
            if tokens[len(tokens) - len(begin) :] == begin:
                logits[end] += value
        for token in {*tokens}:
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token in {*out}:
            logits[token] -= params.presence_penalty
            logits[token] -= params.frequency_penalty * out.count(token)
        n = params.no_repeat_ngram_size
        for start in range(len(tokens) - n + 1 if n else 0):
            *begin, end = tokens[start : start + n]
            if begin == tokens[len(tokens) - n + 1 :]:
                logits[end] = -math.inf
        for *begin, end in params.bad_words:
            if tokens[len(tokens) - len(begin) :] == begin:
                logits[end] = -math.inf
        banned = [*params.forbidden, *(params.forbidden_first if not number else ())]
        banned += stops if number < params.min_tokens else ()
        logits[banned] = -math.inf
        best = np.sort(logits)[-2:]
        assert best[1] - best[0] > 1e-4, "a near tie proves nothing; choose another prompt"
        out.append(int(logits.argmax()))
        if out[-1] in stops:
            return out, FinishReason.STOP
        tokens.append(out[-1])
    return out, FinishReason.LENGTH


SETTINGS = {
    "repetition": Sampler(repetition_penalty=1.7),
    "presence": Sampler(presence_penalty=0.6),
    "frequency": Sampler(frequency_penalty=0.4),
    "negative frequency": Sampler(frequency_penalty=-0.3, ignore_eos=True),
    "ngram": Sampler(no_repeat_ngram_size=2, ignore_eos=True),
    "words": Sampler(bad_words=((5, 9), (4,), (11, 7, 3)), ignore_eos=True),
    "sequences": Sampler(
        sequence_bias=(
            ((7, 5, 9), 6.0),
            ((9, 9), -8.0),
            ((9, 12), 3.0),
            ((5, 9, 12), 3.0),
            ((3,), 1),
        ),
        repetition_penalty=1.3,
        ignore_eos=True,
    ),
    "first": Sampler(forbidden_first=tuple(range(12))),
    "min_tokens": Sampler(min_tokens=9, bias={STOP: 4.0}),
    "stops": Sampler(stop_token_ids=(3, 6, 10), ignore_eos=True),
    "min_tokens of stops": Sampler(min_tokens=5, stop_token_ids=tuple(range(0, 31, 2))),
    "all": Sampler(
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.1,
        no_repeat_ngram_size=3,
        bad_words=((8, 8), (9,)),
        forbidden_first=(3,),
        min_tokens=4,
        bias={12: 0.5},
    ),
}


@pytest.fixture(scope="module")
def engine():
    with Engine(MODEL, max_rows=ROWS, passes=7) as engine:
        yield engine


@pytest.mark.parametrize("name", mostly_slow(dict.fromkeys(["all", *SETTINGS])))
def test_each_setting_does_what_its_definition_says(engine, name):
    """Beside requests without any, whose texts are what they always are."""
    params = SETTINGS[name]
    streams = [
        engine.submit(PROMPT, each, max_new_tokens=24) for each in (NONE, params, NONE, params)
    ]
    outputs = [stream.wait() for stream in streams]
    for each, output in zip((NONE, params, NONE, params), outputs, strict=True):
        expected, reason = greedy(PROMPT, each, 24)
        assert (list(output.tokens), output.finish_reason) == (expected, reason)


@pytest.mark.slow
def test_branches_of_one_run_have_settings_of_their_own():
    root = Branch(PROMPT, [Branch((n, n + 1), sampler=s) for n, s in enumerate(SETTINGS.values())])
    found = generate(MODEL, root, max_new_tokens=16).completions
    for n, (params, completion) in enumerate(zip(SETTINGS.values(), found, strict=True)):
        expected, reason = greedy((*PROMPT, n, n + 1), params, 16)
        assert (list(completion.tokens), completion.finish_reason) == (expected, reason)


@pytest.mark.slow
def test_a_preempted_request_goes_on_with_its_text():
    params = SETTINGS["all"]
    engine = Stepped(max_rows=1)
    low = engine.submit(PROMPT, params, max_new_tokens=40)
    while not low._state.chunks:
        engine.step()
    high = engine.submit((1, 4), NONE, max_new_tokens=6, priority=1)
    engine.settle()
    outputs = done(low), done(high)
    assert outputs[0].preemptions == 1 and len(outputs[0].tokens) > 8
    assert list(outputs[0].tokens) == greedy(PROMPT, params, 40)[0]


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10**6))
def test_same_seed_same_text_whatever_runs_beside_it(seed):
    rng = random.Random(seed)

    def some() -> Sampler:
        return Sampler(
            temperature=rng.choice([0.0, 0.8, 1.5]),
            top_k=rng.choice([0, 5]),
            top_p=rng.choice([1.0, 0.8]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            presence_penalty=rng.choice([0.0, 0.5]),
            no_repeat_ngram_size=rng.choice([0, 2]),
            bad_words=rng.choice([(), ((5, 9), (4, 4, 4))]),
            min_tokens=rng.choice([0, 6]),
            stop_token_ids=rng.choice([(), (3, 6)]),
        )

    requests = [([rng.randrange(VOCAB) for _ in range(5)], some(), n) for n in range(6)]

    def texts(rows: int, order: list[int]) -> dict[int, tuple[int, ...]]:
        with Engine(MODEL, max_rows=rows, passes=rng.choice([2, 7])) as engine:
            streams = {
                n: engine.submit(requests[n][0], requests[n][1], seed=n, max_new_tokens=20)
                for n in order
            }
            return {n: stream.wait().tokens for n, stream in streams.items()}

    assert texts(ROWS, rng.sample(range(6), 6)) == texts(ROWS, [*range(6)])


def test_what_no_request_uses_takes_no_place():
    with Engine(MODEL, max_rows=ROWS) as engine:
        engine.submit(PROMPT, NONE, max_new_tokens=4).wait()
        state = engine._scheduler.decode_rows.state
        assert state is not None
        sizes = {array.shape for array in jax.tree.leaves(state.history)}
        assert sizes == {(ROWS, 0), (ROWS,)} and not state.samplers.words.size


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        Sampler(repetition_penalty=1.3, temperature=0.7),
        Sampler(0.7, no_repeat_ngram_size=2),
        Sampler(0.7, bad_words=((3, 4),)),  # and what is written without
    ],
)
def test_workers_write_under_penalties_what_they_write_on_an_engine(params):
    problem, more = "1. 47 + 38\n2. 12 * 3", {"names": ("Alice", "Bob"), "budget": 24, "seed": 1}
    with Workers(one_layer(), problem, sampler=Sampler(0.7), **more) as session:
        without = session.run().steps
    if params.bad_words:
        pairs = [pair for step in without for pair in itertools.pairwise(step.tokens)]
        params = dataclasses.replace(params, bad_words=(*params.bad_words, *pairs[4::5]))
    with Workers(one_layer(), problem, sampler=params, **more) as session:
        alone = session.run().steps
    assert without != alone
    with Engine(one_layer()) as engine:
        # Longer sequences than the workers have, so that theirs are in larger places.
        beside = Sampler(1.0, bad_words=((1, 2, 3, 4, 5),))
        other = engine.submit(problem, beside, max_new_tokens=60)
        with Workers(one_layer(), problem, sampler=params, engine=engine, **more) as session:
            assert session.run().steps == alone
        other.wait()


@pytest.mark.parametrize("name", ["repetition", "ngram", "words", "first", "min_tokens", "stops"])
def test_the_logits_cache_refuses_what_it_cannot_draw_again(name):
    with (
        Engine(MODEL, max_rows=ROWS, logits_cache=10**5) as engine,
        pytest.raises(ValueError, match="cannot be had with resample"),
    ):
        engine.submit(PROMPT, SETTINGS[name], resample="stepwise")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty is 0.0; it must be above 0"),
        ({"typical_p": 0.0}, r"typical_p is 0.0; it must be above 0 and at most 1"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1; it must be at least 0"),
        ({"min_tokens": 1.5}, "min_tokens is 1.5; it must be an integer"),
        ({"bad_words": ((),)}, "bad_words has an empty sequence"),
        ({"bad_words": 5}, "bad_words is 5; it must be a list"),
        ({"stop_token_ids": (-1,)}, "names token -1; tokens are numbered from 0"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan; it must be finite"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no'; it must be True or False"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, words):
    with pytest.raises((ValueError, TypeError), match=words):
        Sampler(**wrong)


def test_tokens_outside_of_the_vocabulary_are_refused(engine):
    for params in (Sampler(stop_token_ids=(99,)), Sampler(bad_words=((3, 99),))):
        with pytest.raises(ValueError, match="names token 99, outside the vocabulary of 31"):
            engine.submit(PROMPT, params)


def test_the_checkpoint_s_own_settings_are_the_default():
    generation = Generation.from_json({"repetition_penalty": 1.7, "min_new_tokens": 3}, {})
    assert generation.sampler == Sampler(repetition_penalty=1.7, min_tokens=3)
