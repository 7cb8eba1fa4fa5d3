"""Tokens in the server's answers (`return_token_ids`): those of the library."""

import openai
import pytest

from jaxshare import Sampler
from jaxshare.serving import generate
from jaxshare.serving.inputs import encode_messages

MESSAGES = [{"role": "user", "content": "1. 17 + 25"}]
ASKED = {"model": "tiny", "temperature": 1.2, "top_p": 0.9, "max_tokens": 8, "seed": 5}
IDS = {"return_token_ids": True}


@pytest.fixture(scope="module")
def client(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def library_of(engine, prompts, n=1, **more):
    sampler = Sampler(temperature=1.2, top_p=0.9)
    options = {"sampler": sampler, "max_new_tokens": 8, "seed": 5, **more}
    return generate(engine.model, prompts, n=n, engine=engine, **options).completions


@pytest.mark.parametrize("more", [{}, {"logprobs": 0}, {"echo": True}])
def test_completions(client, engine, more):
    prompts = ["1. 17 + 25", "2. 3 * 4"]
    library = library_of(engine, prompts, n=2)
    encoded = [engine.model.tokenizer.encode(prompt) for prompt in prompts]
    body = {"prompt": prompts, "n": 2, "extra_body": IDS, **more, **ASKED}
    answer = client.completions.create(**body)
    assert [choice.token_ids for choice in answer.choices] == [[*each.tokens] for each in library]
    assert [choice.prompt_token_ids for choice in answer.choices] == [
        encoded[i // 2] for i in range(4)
    ]
    streamed = {i: [] for i in range(4)}
    heads = {i: [] for i in range(4)}
    for chunk in client.completions.create(stream=True, **body):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.token_ids
        heads[choice.index].append(getattr(choice, "prompt_token_ids", None))
    assert [*streamed.values()] == [[*each.tokens] for each in library]
    for i, told in heads.items():
        assert told == [encoded[i // 2], *[None] * (len(told) - 1)], "once, with the first chunk"


def test_a_prompt_alone_has_no_tokens_of_an_answer(client, engine):
    answer = client.completions.create(
        model="tiny", prompt="1. 17 + 25", max_tokens=0, echo=True, extra_body=IDS
    )
    (choice,) = answer.choices
    assert choice.token_ids == []
    assert choice.prompt_token_ids == engine.model.tokenizer.encode("1. 17 + 25")


@pytest.mark.parametrize("ends", [False, True])
def test_chats(client, engine, ends):
    """Where a stop token ends an answer, it is one of its tokens, and has a log-probability, too."""
    prompt = encode_messages(engine.model, MESSAGES)
    more, stops = {}, ()
    if ends:
        (free,) = library_of(engine, [prompt])
        stops = (free.tokens[2],)
        more = {"stop_token_ids": [*stops]}
    sampler = Sampler(temperature=1.2, top_p=0.9, stop_token_ids=stops)
    (library,) = library_of(engine, [prompt], sampler=sampler, logprobs=True)
    body = {"messages": MESSAGES, "logprobs": True, "extra_body": {**IDS, **more}, **ASKED}
    answer = client.chat.completions.create(**body)
    assert answer.prompt_token_ids == prompt
    (choice,) = answer.choices
    assert choice.token_ids == [*library.tokens] and (choice.finish_reason == "stop") >= ends
    told = [one.logprob for one in choice.logprobs.content]
    assert told == pytest.approx([*library.logprobs], abs=1e-5)
    first, *chunks = client.chat.completions.create(stream=True, **body)
    assert first.prompt_token_ids == prompt
    assert all(getattr(chunk, "prompt_token_ids", None) is None for chunk in chunks)
    choices = [chunk.choices[0] for chunk in chunks]
    assert [
        token for each in choices for token in getattr(each, "token_ids", None) or ()
    ] == choice.token_ids
    streamed = [one.logprob for each in choices if each.logprobs for one in each.logprobs.content]
    assert streamed == pytest.approx(told, abs=1e-6)


def test_they_are_left_out_by_default(client):
    answer = client.completions.create(prompt="1. 17 + 25", **ASKED)
    assert "token_ids" not in answer.choices[0].model_dump()
    chat = client.chat.completions.create(messages=MESSAGES, **ASKED)
    assert "prompt_token_ids" not in chat.model_dump()
