"""Requests under grammars, beside others: their texts fit, and are those that they have alone."""

import functools
import json
import random

import jax
import jsonschema
import llguidance
import llguidance.numpy
import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshare import FinishReason, Grammar, Sampler, SamplingParams
from jaxshare.models.layers import Decoder
from jaxshare.serving import Branch, Workers, generate
from jaxshare.serving.engine import Engine, NoTokenError
from jaxshare.serving.grammars import compile_grammar
from jaxshare.serving.inputs import token_bytes
from jaxshare.sharding import make_mesh
from tests.helpers import mostly_slow, one_layer, padded
from tests.serving.grammars.schemas import random_schema

MODEL = one_layer()
VOCAB, STOPS, SIZE = MODEL.config.vocab_size, MODEL.generation.stop_tokens, token_bytes(MODEL)
ROWS, PROMPT = 4, "What is 2+2?"
NAMED = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "size": {"type": "integer", "minimum": 0, "maximum": 500},
        "colour": {"enum": ["red", "green"]},
    },
    "required": ["name", "size", "colour"],
    "additionalProperties": False,
}
HOST = Grammar.json_schema(NAMED)
TABLE = Grammar.regex("[a-d]{3,8}(;[a-d]{2}){0,3}")
WORDS = Grammar.choices(["the answer is four", "the answer is five", "no answer"])
_causal = jax.jit(
    lambda params, tokens: Decoder(MODEL.config).apply(params, tokens, method="causal")
)


@pytest.fixture(scope="module")
def engine():
    with Engine(MODEL, max_rows=ROWS, kv_bytes=2**13 * SIZE) as engine:
        yield engine


def sampler(grammar: Grammar, temperature: float = 1.0, **more) -> SamplingParams:
    return SamplingParams(temperature, grammar=grammar, **more)


def pieces() -> list[bytes]:
    made = compile_grammar(MODEL, sampler(TABLE))
    assert made
    return [*made.vocabulary.tokens]


# Greedy texts by the definition, token by token, in Python.


@functools.cache
def logits_after(tokens: tuple[int, ...]) -> np.ndarray:
    row = padded(tokens, (64, 256))
    return np.asarray(_causal(MODEL.params, row), np.float64)[0, len(tokens) - 1]


def greedy(prompt: str, admitted, count: int) -> list[int]:
    assert MODEL.tokenizer
    tokens, out = MODEL.tokenizer.encode(prompt), []
    while len(out) < count and not {*out} & {*STOPS}:
        logits = np.full(VOCAB, -np.inf)
        allowed = sorted(admitted(out))
        logits[allowed] = logits_after((*tokens, *out))[allowed]
        best = np.sort(logits)[-2:]
        assert best[1] - best[0] > 1e-5, "a near tie proves nothing; choose another prompt"
        out.append(int(logits.argmax()))
    return out


def admitted_by_regex(pattern: str):
    """The tokens with which a text can still become one that the pattern matches."""
    vocabulary = pieces()

    def admitted(out: list[int]) -> set[int]:
        text = b"".join(vocabulary[token] for token in out)
        found = {
            number
            for number, piece in enumerate(vocabulary)
            if piece and regex.fullmatch(pattern.encode(), text + piece, partial=True)
        }
        return found | ({*STOPS} if regex.fullmatch(pattern.encode(), text) else set())

    return admitted


def admitted_by_llguidance(grammar: Grammar):
    """The tokens of llguidance's own mask, or the first of those that it forces."""
    made = compile_grammar(MODEL, sampler(grammar))
    assert made and made.table is None
    forced: list[int] = []

    def admitted(out: list[int]) -> set[int]:
        if forced and forced[0] == (out or [None])[-1]:
            forced.pop(0)
        matcher = made.matcher(out)
        forced[:] = forced or matcher.compute_ff_tokens()
        if forced:
            return {forced[0]}
        words = llguidance.numpy.allocate_token_bitmask(1, VOCAB)
        llguidance.numpy.fill_next_token_bitmask(matcher, words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB]
        return {*np.flatnonzero(bits).tolist()}

    return admitted


@pytest.mark.parametrize("prompt", mostly_slow([PROMPT, "Alice has 3 apples.", "x"]))
def test_greedy_texts_are_those_of_the_definition(engine, prompt):
    table = engine.submit(prompt, sampler(TABLE, 0), max_new_tokens=24)
    host = engine.submit(prompt, sampler(HOST, 0), max_new_tokens=64)
    plain = engine.submit(prompt, Sampler(), max_new_tokens=24)
    assert [*table.wait().tokens] == greedy(prompt, admitted_by_regex(TABLE.source), 24)
    assert [*host.wait().tokens] == greedy(prompt, admitted_by_llguidance(HOST), 64)
    everything = {*range(VOCAB)}
    assert [*plain.wait().tokens] == greedy(prompt, lambda out: everything, 24)


# Texts that fit, and are the same whatever else runs.


@pytest.mark.parametrize("grammar", [TABLE, WORDS, HOST], ids=["table", "words", "host"])
def test_forced_tokens_at_once_are_those_that_are_sampled_one_by_one(engine, grammar):
    for seed in range(6):
        once = engine.submit(PROMPT, sampler(grammar), seed=seed).wait()
        one_by_one = engine.submit(PROMPT, sampler(grammar), seed=seed, logprobs=True).wait()
        assert once.tokens == one_by_one.tokens
        assert len(one_by_one.logprobs) == len(once.tokens)
        assert once.finish_reason is FinishReason.STOP


def test_forced_tokens_take_fewer_passes():
    with Engine(MODEL, max_rows=1) as engine:

        def passes(**more) -> tuple[int, tuple[int, ...]]:
            before = int(engine._scheduler.decode_rows.state.passes)
            tokens = engine.submit(PROMPT, params, seed=1, **more).wait().tokens
            return int(engine._scheduler.decode_rows.state.passes) - before, tokens

        params = sampler(Grammar.choices(["the answer is: it depends", "it is all the same"]))
        engine.submit(PROMPT, params, seed=1).wait()
        few, tokens = passes()
        many, same = passes(logprobs=True)
        assert tokens == same and len(tokens) > 8
        assert few <= many / 3


@pytest.mark.slow
def test_texts_are_the_same_beside_others_after_preemption_and_with_little_room(engine):
    samplers = [sampler(TABLE), sampler(WORDS), sampler(HOST), Sampler(1.0), sampler(HOST, 0.7)]
    prompts = [PROMPT, "Bob", "Alice has 3 apples.", PROMPT]

    def options(i: int) -> dict:
        return {"max_new_tokens": 40, "seed": i}

    def request(to: Engine, i: int, **more):
        return to.submit(prompts[i % 4], samplers[i % 5], **options(i), **more)

    alone = [request(engine, i).wait().tokens for i in range(20)]
    rng = random.Random(1)
    for capacity, passes in ((160, 3), (400, 63)):
        with Engine(MODEL, max_rows=ROWS, kv_bytes=capacity * SIZE) as small:
            small._scheduler.passes, small._scheduler._passes_by_speeds = passes, False
            order = rng.sample(range(20), 20)
            streams = {i: request(small, i, priority=rng.randrange(3)) for i in order}
            ended = {i: stream.wait() for i, stream in streams.items()}
        assert [ended[i].tokens for i in range(20)] == alone
        assert capacity > 160 or any(each.preemptions for each in ended.values())


@pytest.mark.slow
def test_penalties_read_forced_tokens_too(engine):
    """A penalty on what the text has had is the same whether its tokens were forced or sampled."""
    grammar = Grammar.choices(["a b a b a b " + end for end in ("a", "b", "c", "d")])
    for penalty in (
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.9},
        {"repetition_penalty": 1.8},
    ):
        params = sampler(grammar, **penalty)
        for seed in range(4):
            once = engine.submit(PROMPT, params, seed=seed).wait()
            one_by_one = engine.submit(PROMPT, params, seed=seed, logprobs=True).wait()
            assert once.tokens == one_by_one.tokens


def test_a_text_ends_by_length_in_the_middle_of_forced_tokens_and_says_so(engine):
    whole = engine.submit(PROMPT, sampler(WORDS), seed=3).wait()
    for count in range(1, len(whole.tokens)):
        part = engine.submit(PROMPT, sampler(WORDS), seed=3, max_new_tokens=count).wait()
        assert part.tokens == whole.tokens[:count]
        assert part.finish_reason is FinishReason.LENGTH
    assert whole.finish_reason is FinishReason.STOP


@pytest.mark.slow
def test_samples_of_a_prompt_trees_and_lines_take_grammars():
    found = generate(MODEL, [PROMPT], n=6, sampler=sampler(WORDS), seed=1)
    assert {each.text for each in found.completions} <= {*json.loads(WORDS.source)}
    tree = Branch(
        "Say", (Branch(" it", sampler=sampler(TABLE)), Branch(" now", sampler=sampler(HOST)))
    )
    texts = [each.text for each in generate(MODEL, [tree], max_new_tokens=80).completions]
    assert regex.fullmatch(TABLE.source, texts[0])
    jsonschema.validate(json.loads(texts[1]), NAMED)


# The proof: all kinds of schemas, at three temperatures.


@pytest.mark.slow
@pytest.mark.parametrize("part", mostly_slow([*range(20)], 1))
def test_every_text_that_ends_is_valid_under_its_schema(part):
    """200 schemas in all, at temperatures 0, 1 and 2, on a model that knows nothing of JSON."""
    ended = 0
    with Engine(MODEL, max_rows=ROWS, kv_bytes=2**13 * SIZE) as engine:
        streams = [
            (
                schema,
                engine.submit(
                    PROMPT,
                    sampler(Grammar.json_schema(schema), warmth),
                    seed=seed,
                    max_new_tokens=300,
                ),
            )
            for seed in range(10 * part, 10 * part + 10)
            for schema in [random_schema(seed)]
            for warmth in (0.0, 1.0, 2.0)
        ]
        for schema, stream in streams:
            completion = stream.wait()
            if completion.finish_reason is FinishReason.LENGTH:
                continue
            assert completion.finish_reason is FinishReason.STOP
            ended += 1
            jsonschema.validate(json.loads(completion.text), schema)
    assert ended >= 0.9 * len(streams)


SETTINGS = st.fixed_dictionaries(
    {
        "grammar": st.sampled_from([TABLE, WORDS, HOST, None]),
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "top_k": st.sampled_from([0, 3]),
        "top_p": st.sampled_from([1.0, 0.8]),
        "repetition_penalty": st.sampled_from([1.0, 1.4]),
        "frequency_penalty": st.sampled_from([0.0, 0.6]),
        "no_repeat_ngram_size": st.sampled_from([0, 6]),
        "bias": st.sampled_from([{}, {70: 2.0}]),
    }
)
CALLS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 9),
        "max_new_tokens": st.sampled_from([5, 40]),
        "stop": st.sampled_from([(), (";",), ('"',)]),
    }
)


@pytest.mark.slow
@settings(max_examples=4)
@given(st.lists(st.tuples(SETTINGS, CALLS), min_size=2, max_size=6))
def test_the_same_seed_writes_the_same_text_whatever_runs_beside_it(engine, requests):
    def submit(given, call):
        return engine.submit(PROMPT, SamplingParams(**given), **call)

    def text(stream):
        try:
            return stream.wait().tokens
        except NoTokenError:
            return "no token"

    alone = [text(submit(*request)) for request in requests]
    assert [text(stream) for stream in [submit(*request) for request in requests]] == alone


@pytest.mark.parametrize("grammar", mostly_slow([HOST, TABLE], 0), ids=["host", "table"])
def test_a_model_on_a_mesh_writes_the_same(engine, grammar):
    expected = engine.submit(PROMPT, sampler(grammar, 0), max_new_tokens=40).wait()
    with Engine(MODEL.on(make_mesh(tensor=2)), max_rows=ROWS, kv_bytes=2**12 * SIZE) as other:
        found = other.submit(PROMPT, sampler(grammar, 0), max_new_tokens=40).wait()
    assert found.tokens == expected.tokens


# What is refused, and what leaves nothing.


def test_a_grammar_and_a_ban_that_leave_no_token_are_one_error(engine):
    assert MODEL.tokenizer
    letter = MODEL.tokenizer.encode("b", add_special_tokens=False)[0]
    never = tuple(n for n, piece in enumerate(pieces()) if piece.startswith(b"b"))
    assert letter in never
    stream = engine.submit(PROMPT, sampler(Grammar.regex("ab"), forbidden=never))
    with pytest.raises(
        NoTokenError, match=r"no token is left to sample for request .* after 1 tokens"
    ):
        stream.wait()
    assert engine.submit(PROMPT, sampler(Grammar.regex("ab"))).wait().text == "ab"


def test_resampling_and_workers_refuse_it_by_name():
    engine = Engine(MODEL, max_rows=ROWS, logits_cache=10**6)
    with engine, pytest.raises(ValueError, match="grammar cannot be had with resample"):
        engine.submit(PROMPT, sampler(TABLE), resample="stepwise")
    with pytest.raises(ValueError, match="the sampler has a grammar, but workers"):
        Workers(MODEL, PROMPT, sampler=sampler(TABLE))


def test_a_grammar_that_does_not_compile_is_refused_before_anything_runs(engine):
    with pytest.raises(ValueError, match="regular expression does not compile"):
        engine.submit(PROMPT, sampler(Grammar.regex("(a")))
    with pytest.raises(ValueError, match="regular expression does not compile"):
        generate(MODEL, [PROMPT], sampler=sampler(Grammar.regex("(a")))
