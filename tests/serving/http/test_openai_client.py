"""OpenAI's own client against a server: texts are those of the library."""

import asyncio

import openai
import pytest

from jaxshare import Sampler
from jaxshare.serving import generate, prompt_logprobs
from jaxshare.serving.inputs import encode_messages

WARM = Sampler(temperature=1.2, top_p=0.9)
MESSAGES = [{"role": "user", "content": "1. 17 + 25"}]
ASKED = {"temperature": 1.2, "top_p": 0.9, "max_tokens": 8, "seed": 5}


@pytest.fixture(scope="module")
def client(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def expected(engine, prompts, n=1, **more):
    """The library's completions."""
    options = {"sampler": WARM, "max_new_tokens": 8, "seed": 5, **more}
    return generate(engine.model, prompts, n=n, engine=engine, **options).completions


def test_models_are_listed(client):
    (model,) = client.models.list().data
    assert model.id == client.models.retrieve("tiny").id == "tiny"


def test_completions_of_several_prompts_are_the_library_s(client, engine):
    prompts = ["1. 17 + 25", "2. 3 * 4"]
    answer = client.completions.create(model="tiny", prompt=prompts, n=2, **ASKED)
    library = expected(engine, prompts, n=2)
    assert [choice.text for choice in answer.choices] == [each.text for each in library]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.finish_reason for choice in answer.choices} <= {"stop", "length"}
    assert answer.usage.completion_tokens == sum(len(each.tokens) for each in library)
    # The tokens of a prompt count once.
    assert answer.usage.prompt_tokens == library[0].prompt_tokens + library[2].prompt_tokens


def test_tokens_are_a_prompt(client, engine):
    tokens = engine.model.tokenizer.encode("1. 17 + 25")
    texts = [
        client.completions.create(model="tiny", prompt=prompt, **ASKED).choices[0].text
        for prompt in ("1. 17 + 25", tokens, [tokens])
    ]
    assert len(set(texts)) == 1


def test_streams_put_together_are_the_whole(client, engine):
    prompts = ["1. 17 + 25", "2. 3 * 4"]
    texts, reasons, usage = {}, {}, None
    stream = client.completions.create(
        model="tiny",
        prompt=prompts,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        **ASKED,
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    library = expected(engine, prompts, n=2)
    assert [texts[i] for i in range(4)] == [each.text for each in library]
    assert set(reasons.values()) <= {"stop", "length"}
    assert usage.completion_tokens == sum(len(each.tokens) for each in library)


def test_chats_are_the_library_s(client, engine):
    prompt = encode_messages(engine.model, MESSAGES)
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, n=2, **ASKED)
    library = expected(engine, [prompt], n=2)
    assert [choice.message.content for choice in answer.choices] == [
        each.text.strip() if "<" in each.text else each.text for each in library
    ]
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(prompt)


def test_a_prompt_that_is_cached_is_counted(client):
    tokens = [(7 * i) % 300 + 20 for i in range(300)]
    used = [
        client.completions.create(model="tiny", prompt=tokens, max_tokens=2).usage for _ in range(2)
    ]
    assert [each.prompt_tokens for each in used] == [300, 300]
    assert used[1].prompt_tokens_details.cached_tokens > 250


def test_chats_are_streamed(client):
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, **ASKED)
    text, reason = "", None
    for chunk in client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, **ASKED
    ):
        text += chunk.choices[0].delta.content or ""
        reason = chunk.choices[0].finish_reason or reason
    assert (text, reason) == (
        whole.choices[0].message.content,
        whole.choices[0].finish_reason,
    )


def test_the_async_client_runs_requests_beside_each_other(live, engine):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as client:

            async def one(seed):
                stream = await client.completions.create(
                    model="tiny", prompt="1. 17 + 25", stream=True, **(ASKED | {"seed": seed})
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(one, range(6)))

    library = [expected(engine, "1. 17 + 25", seed=seed)[0].text for seed in range(6)]
    assert asyncio.run(ask()) == library


def test_best_of_gives_the_likeliest(client, engine):
    found = client.completions.create(model="tiny", prompt="1. 17 + 25", n=1, best_of=3, **ASKED)
    library = expected(engine, "1. 17 + 25", n=3)
    means = [each.logprob / len(each.tokens) for each in library]
    assert [choice.text for choice in found.choices] == [library[means.index(max(means))].text]
    assert found.usage.completion_tokens == sum(len(each.tokens) for each in library)


def test_logprobs_of_completions_are_the_model_s(client, engine):
    """Against the scores of the whole text, which are computed without the engine."""
    body = {"model": "tiny", "prompt": "1. 17 + 25", "logprobs": 2, **ASKED}
    answer = client.completions.create(echo=True, **body).choices[0]
    (library,) = expected(engine, "1. 17 + 25")
    tokens = [*engine.model.tokenizer.encode("1. 17 + 25"), *library.tokens]
    scored = prompt_logprobs(engine.model, tokens, top_logprobs=2)
    assert answer.text == "1. 17 + 25" + library.text
    assert answer.logprobs.token_logprobs[0] is None is scored.logprobs[0]
    assert answer.logprobs.token_logprobs[1:] == pytest.approx(scored.logprobs[1:], abs=1e-3)
    for told, top in zip(answer.logprobs.top_logprobs[1:], scored.top_logprobs[1:], strict=True):
        assert max(told.values()) == pytest.approx(top[0][1], abs=1e-3)
    assert answer.logprobs.text_offset[:2] == [0, len(answer.logprobs.tokens[0])]
    streamed = [
        value
        for chunk in client.completions.create(stream=True, **body)
        for value in chunk.choices[0].logprobs.token_logprobs
    ]
    assert streamed == answer.logprobs.token_logprobs[-len(streamed) :]
    assert len(streamed) == len(library.tokens)


def test_a_prompt_alone_is_scored(client, engine):
    answer = client.completions.create(
        model="tiny", prompt="1. 17 + 25", max_tokens=0, echo=True, logprobs=1
    )
    scored = prompt_logprobs(engine.model, "1. 17 + 25")
    assert answer.choices[0].text == "1. 17 + 25"
    assert answer.choices[0].logprobs.token_logprobs == [*scored.logprobs]
    assert answer.usage.completion_tokens == 0


def test_logprobs_of_chats_are_those_of_the_engine(client, engine):
    prompt = encode_messages(engine.model, MESSAGES)
    (library,) = expected(engine, [prompt], top_logprobs=2)
    shown = len(library.tokens) - (str(library.finish_reason) == "stop")
    options = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **ASKED}
    answer = client.chat.completions.create(model="tiny", **options)
    streamed = [
        one
        for chunk in client.chat.completions.create(model="tiny", stream=True, **options)
        for one in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else ())
    ]
    for found in (answer.choices[0].logprobs.content, streamed):
        assert [one.logprob for one in found] == pytest.approx(
            [*library.logprobs[:shown]], abs=1e-5
        )
        assert [len(one.top_logprobs) for one in found] == [2] * shown
        assert b"".join(bytes(one.bytes) for one in found).decode(errors="replace") == library.text


@pytest.mark.slow
def test_settings_change_texts_as_the_library_has_them(client, engine):
    """Each of OpenAI's and vLLM's settings, beside a Sampler with the same."""
    words = engine.model.tokenizer
    seven = words.encode("7", add_special_tokens=False)[0]
    cases = [
        ({"frequency_penalty": 1.5}, {"frequency_penalty": 1.5}),
        ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
        ({"logit_bias": {str(seven): 30}}, {"bias": {seven: 30.0}}),
        ({"extra_body": {"min_p": 0.2}}, {"min_p": 0.2}),
        ({"extra_body": {"top_k": 3}}, {"top_k": 3}),
        ({"extra_body": {"typical_p": 0.5}}, {"typical_p": 0.5}),
        ({"extra_body": {"repetition_penalty": 1.5}}, {"repetition_penalty": 1.5}),
        ({"extra_body": {"ignore_eos": True}}, {"ignore_eos": True}),
        ({"extra_body": {"stop_token_ids": [seven]}}, {"stop_token_ids": (seven,)}),
        ({"extra_body": {"bad_words": ["7"]}}, {"bad_words": ((seven,), *_spaced(words, "7"))}),
    ]
    for asked, setting in cases:
        sampler = Sampler(**{"temperature": 1.2, "top_p": 0.9, **setting})
        found = client.completions.create(model="tiny", prompt="1. 17 + 25", **ASKED, **asked)
        (library,) = expected(engine, "1. 17 + 25", sampler=sampler)
        assert found.choices[0].text == library.text, asked


def _spaced(words, text):
    return [tuple(words.encode(f" {text}", add_special_tokens=False))]


def test_stop_texts_end_before_or_after_themselves(client, engine):
    (library,) = expected(engine, "1. 17 + 25", max_new_tokens=24)
    stop = library.text[6:8]
    assert stop.strip()
    ends = {}
    for included in (False, True):
        found = client.completions.create(
            model="tiny",
            prompt="1. 17 + 25",
            stop=stop,
            extra_body={"include_stop_str_in_output": included},
            **(ASKED | {"max_tokens": 24}),
        )
        ends[included] = found.choices[0].text
        assert found.choices[0].finish_reason == "stop"
    assert ends[False] == library.text.partition(stop)[0]
    assert ends[True] == ends[False] + stop


def test_the_logits_cache_answers_again(client):
    texts = [
        client.completions.create(
            model="tiny", prompt="5. 5 + 5", extra_body={"resample": "stepwise"}, **ASKED
        )
        .choices[0]
        .text
        for _ in range(2)
    ]
    plain = client.completions.create(model="tiny", prompt="5. 5 + 5", **ASKED).choices[0].text
    assert texts == [plain, plain]
