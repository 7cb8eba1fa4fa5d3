"""Models of agents: the engine against a plain causal pass; stop texts, errors; scripts."""

import asyncio
import copy
import dataclasses
import random
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import Sampler, models
from jaxshare.models import Generation, LoadedModel
from jaxshare.models.layers import Decoder
from jaxshare.serving import generate
from jaxshare.serving.agents import (
    Message,
    ModelCall,
    Options,
    ParseError,
    Reply,
    Runtime,
    agent,
    llm,
    run,
)
from jaxshare.serving.agents.backends import EngineModel, NoAnswerError, ScriptedModel
from jaxshare.serving.agents.search import BestOfN
from jaxshare.serving.engine import decode_rows
from jaxshare.serving.evaluation import arithmetic
from jaxshare.serving.inputs import token_bytes
from tests.helpers import TINY, init, padded

CONFIG = dataclasses.replace(TINY, vocab_size=402, num_layers=1, max_positions=1024)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """One layer of random weights with the embedded model's tokenizer; it hardly ever stops."""
    return LoadedModel(
        CONFIG, init(CONFIG), models.load(models.EMBEDDED).tokenizer, Generation(stop_tokens=(2,))
    )


def made(loaded: LoadedModel, **more) -> EngineModel:
    """With a Logits Cache, used or not, so that all tests share a program."""
    return EngineModel(loaded, max_rows=4, logits_cache=10**7, **more)


@pytest.fixture(scope="module")
def shared(loaded) -> EngineModel:
    return made(loaded)


def call(text: str = "1. 47 + 38", seed: int = 0, **options) -> ModelCall:
    messages = Message("system", "Alice works alone."), Message("user", text)
    return ModelCall(
        messages, Options(**{"max_new_tokens": 12, **options}), seed, "asker", "asker", (0, seed)
    )


def answers(model, *calls: ModelCall, together: bool = True) -> list[Reply]:
    async def whole():
        if together:
            return await asyncio.gather(*map(model.answer, calls))
        return [await model.answer(one) for one in calls]

    return asyncio.run(whole())


def prompt(loaded: LoadedModel, one: ModelCall) -> list[int]:
    messages = [dataclasses.asdict(message) for message in one.messages]
    return loaded.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )


@jax.jit
def causal(params, tokens):
    return Decoder(CONFIG).apply(params, tokens, method="causal")


def greedy(loaded: LoadedModel, one: ModelCall, room: int = 128) -> list[int]:
    """The most probable tokens, each by a causal pass over the whole text before it."""
    tokens = prompt(loaded, one)
    begin = len(tokens)
    while len(tokens) < begin + one.options.max_new_tokens and tokens[-1] != 2:
        logits = causal(loaded.params, jnp.asarray(padded(tokens, [room])))
        tokens.append(int(np.argmax(logits[0, len(tokens) - 1])))
    return tokens[begin:]


def test_greedy_answers_are_those_of_a_causal_pass(loaded, shared):
    asked = [call("1. 47 + 38"), call("1. 47 - 38\n2. 9 * 9", max_new_tokens=20)]
    for one, reply in zip(asked, answers(shared, *asked), strict=True):
        expected = greedy(loaded, one)
        assert (reply.text, reply.new_tokens) == (
            loaded.tokenizer.decode([t for t in expected if t != 2]),
            len(expected),
        )
        assert reply.prompt_tokens == len(prompt(loaded, one))


def test_an_answer_depends_on_its_own_call_alone(loaded, shared):
    asked = [
        call("1. 47 + 38", seed=seed, temperature=heat, top_k=k, max_new_tokens=tokens)
        for seed, heat, k, tokens in (
            (0, 0.0, None, 12),
            (1, 1.0, None, 20),
            (2, 1.0, 5, 3),
            (3, 3.0, None, 40),
        )
    ]
    asked += [
        call("2. 9 * 9", seed=1, temperature=1.0),
        call("1. 47 + 38", seed=2**31 - 1, temperature=1.0, min_p=0.1),
        call("1. 47", seed=5, temperature=0.8, top_p=0.5),
    ]
    together = answers(shared, *asked)
    assert answers(shared, *asked, together=False) == together
    assert answers(shared, *asked[::-2]) == together[::-2]
    assert len({reply.text for reply in together}) == len(asked)


@pytest.mark.slow
def test_a_small_memory_changes_no_answer(loaded, shared):
    asked = [
        call(f"{n}. 47 + 38", seed=n, temperature=1.0, max_new_tokens=10 * n) for n in (1, 2, 3, 10)
    ]
    tight = EngineModel(loaded, max_rows=4, kv_bytes=256 * token_bytes(loaded))
    assert answers(tight, *asked) == answers(shared, *asked)


def test_a_call_that_a_small_memory_has_no_room_for_is_refused(loaded):
    tight = EngineModel(loaded, max_rows=4, kv_bytes=256 * token_bytes(loaded))
    with pytest.raises(ValueError, match=r"need keys and values of .* tokens.*raise kv_bytes"):
        answers(tight, call(max_new_tokens=300))


@pytest.mark.slow
def test_the_embedded_model_answers_as_generate_does():
    """Compares float32 answers: each prompt by itself there, all together here."""
    embedded = models.load(models.EMBEDDED, dtype="float32")
    rng = random.Random(4)
    made = [arithmetic.make_problem(rng) for _ in range(6)]
    asked = [
        ModelCall(
            tuple(Message(**message) for message in problem.messages()),
            Options(230, temperature=0.9 * (seed % 2)),
            seed,
            "a",
            "a",
            (),
        )
        for seed, problem in enumerate(made)
    ]
    replies = answers(EngineModel(embedded, max_rows=4), *asked)
    for one, problem, reply in zip(asked, made, replies, strict=True):
        (alone,) = generate(
            embedded,
            prompt(embedded, one),
            max_new_tokens=230,
            sampler=Sampler(temperature=one.options.temperature),
            seed=one.seed,
        ).completions
        assert (reply.text, reply.new_tokens) == (alone.text, len(alone.tokens))
        assert one.options.temperature or all(arithmetic.check(reply.text, problem))


def test_calls_run_together_and_carry_who_asks(loaded):
    model = made(loaded)

    @agent(supervisor=BestOfN(3, value=lambda state: len(state.value)))
    async def asker(question):
        first = await llm(question, temperature=1.0, max_new_tokens=4)
        return first + await llm("and now?", temperature=1.0, max_new_tokens=4)

    assert isinstance(run(asker, "1. 47 + 38\n" * 20, model=model), str)
    known, prompts = (
        model.engine.metrics.registry.get_sample_value(
            f"jaxshare_{name}_tokens_total", {"agent": "asker"}
        )
        for name in ("reused", "prompt")
    )
    # the others' first prompt, and each one's own dialogue up to the second question
    assert known > prompts / 2
    assert model.engine.metrics.passes < 6 * 4


def test_agents_that_come_back_are_answered_from_the_logits_cache(loaded):
    model = made(loaded, resample="stepwise", resample_always=True)
    fresh = [answers(made(loaded), call(seed=seed, temperature=0.5))[0] for seed in range(4)]
    assert [answers(model, call(seed=seed, temperature=0.5))[0] for seed in range(4)] == fresh
    assert model.engine.logits_cache.statistics.replayed > 0


def test_a_stop_text_cuts_the_answer_and_ends_it_early(loaded, shared):
    whole = answers(shared, call(max_new_tokens=200))[0]
    assert whole.new_tokens == 200
    stop = loaded.tokenizer.decode(greedy(loaded, call(max_new_tokens=22))[18:22])
    alone = made(loaded)
    asked = call(max_new_tokens=200, stop=("never there", stop))
    cut, again = (
        answers(alone, asked)[0],
        answers(shared, call("2. 9 * 9", max_new_tokens=30), asked)[1],
    )
    assert (
        cut == again and cut.text == whole.text[: whole.text.index(stop)] and cut.new_tokens <= 22
    )
    assert alone.engine.metrics.passes < 64


def test_calls_that_nobody_waits_for_are_ended(loaded):
    model = made(loaded)
    answers(model, call())

    async def whole():
        tasks = [
            asyncio.create_task(model.answer(call(seed=seed, max_new_tokens=500 if seed else 12)))
            for seed in range(3)
        ]
        await asyncio.sleep(0.02)
        tasks[2].cancel()
        await tasks[0]
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return await model.answer(call(seed=9))

    asyncio.run(whole())
    model.engine.drain(60)
    ended = {
        end: model.engine.metrics.registry.get_sample_value("jaxshare_calls_total", {"end": end})
        for end in ("cancelled", "length")
    }
    assert ended == {"cancelled": 2, "length": 3}


def test_the_engines_thread_ends_with_the_work(shared):
    answers(shared, call())
    shared.engine.drain(60)
    assert not any(thread.name == "jaxshare-engine" for thread in threading.enumerate())


def test_errors_go_to_their_callers_alone(loaded, shared):
    async def whole():
        return await asyncio.gather(
            *map(shared.answer, (call("9 " * 2000), call(), call(temperature=-1.0))),
            return_exceptions=True,
        )

    long, fine, cold = asyncio.run(whole())
    assert isinstance(long, ValueError) and "the model's context holds 1024" in str(long)
    assert fine == answers(shared, call())[0]
    assert isinstance(cold, ValueError) and "temperature is -1.0" in str(cold)


def test_a_pass_that_fails_fails_what_is_under_way_and_not_the_next(monkeypatch, loaded, shared):
    def broken(*args, **kwargs):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(decode_rows, "decode", broken)
        answers(shared, call())
    assert answers(shared, call())[0].new_tokens == 12


def test_models_without_a_chat_template_continue_a_plain_text(loaded):
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.chat_template = None
    plain = dataclasses.replace(loaded, tokenizer=tokenizer)
    (reply,) = answers(made(plain), call("1. 47"))
    text = "System: Alice works alone.\n\nUser: 1. 47\n\nAssistant:"
    assert reply.prompt_tokens == len(tokenizer.encode(text)) and "\n\nUser:" not in reply.text
    tokenizer.chat_template = "{{ raise_exception('only two roles') }}"
    with pytest.raises(
        ValueError,
        match=r"template refuses the messages \(only two roles\); their roles are system, user",
    ):
        answers(EngineModel(plain), call("1. 47"))


def test_a_model_must_have_a_tokenizer_and_rows(loaded):
    with pytest.raises(ValueError, match="no tokenizer"):
        EngineModel(dataclasses.replace(loaded, tokenizer=None))
    with pytest.raises(ValueError, match="max_rows is 0"):
        EngineModel(loaded, max_rows=0)


# Scripts.


def test_a_script_is_asked_by_message_then_by_part_then_by_function():
    model = ScriptedModel(
        {
            "cat": "part",
            "a cat": "whole",
            lambda call: call.seed == 7: "seed",
            "dog": lambda call: call.messages[-1].content.upper(),
        }
    )
    asked = [
        call(text, seed)
        for text, seed in (("a cat", 0), ("the cat", 0), ("a cow", 7), ("a dog", 0))
    ]
    assert [reply.text for reply in answers(model, *asked)] == ["whole", "part", "seed", "A DOG"]
    assert model.calls == asked
    with pytest.raises(NoAnswerError, match="no answer to what agent asker asks: 'a cow'"):
        answers(model, call("a cow"))


def test_several_answers_are_taken_in_turn_by_firings_attempts_and_n():
    model = ScriptedModel({"digit": ["one", "2", "3"], "many": ["a", "b"]})

    @agent
    async def counts():
        number = await llm("a digit", parse=int, retries=2)
        return number, await llm("many", n=3)

    @agent(supervisor=BestOfN(3, value=lambda state: -len(state.value)))
    async def fired():
        return await llm("a digit")

    for _ in range(2):  # earlier calls change no answer
        assert run(counts, model=model) == (2, ["a", "b", "a"])
        runtime = Runtime(model)
        asyncio.run(runtime.run(fired))
        assert sorted(state.value for state in runtime.runs[0].states if state.finished) == [
            "2",
            "3",
            "one",
        ]
    with pytest.raises(ParseError, match="3 answers of the model could not be parsed"):

        @agent
        async def never():
            return await llm("many", parse=int, retries=2)

        run(never, model=model)


def test_a_script_minds_stop_texts_and_waits(loaded):
    model = ScriptedModel({"": "one two. three"}, delay=lambda call: 0.05)
    begun = time.perf_counter()
    reply, _ = answers(model, call(stop=("!", ".")), call())
    assert (reply.text, reply.new_tokens) == (
        "one two",
        2,
    ) and 0.05 <= time.perf_counter() - begun < 1
