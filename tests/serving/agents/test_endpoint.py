"""A model behind an endpoint: the same answers as in the process, and faults of all kinds."""

import asyncio
import gc
import json
import socket
import threading
import time

import pytest

from jaxshare import Grammar
from jaxshare.serving.agents import Message, ModelCall, Options, Reply, Runtime, agent, llm, run
from jaxshare.serving.agents.backends import EngineModel
from jaxshare.serving.agents.endpoint import EndpointError, OpenAIModel
from jaxshare.serving.chat import ToolCall, as_tools
from jaxshare.serving.engine import Engine
from tests.helpers import one_layer
from tests.serving.agents.scripted_endpoint import completion, scripted_endpoint
from tests.serving.http.served import served

SOON = {"retry-after-ms": "5"}
BUSY = (429, SOON, '{"error": {"message": "too many"}}')
BROKEN = (500, SOON, '{"error": {"message": "no memory"}}')


def weather(city: str) -> str:
    """Tells the weather."""
    return f"{city}: rain"


TOOLS = as_tools([weather])


def call_of(*messages: Message, seed: int = 3, options: Options | None = None, **more) -> ModelCall:
    asked = messages or (Message("user", "Hello?"),)
    return ModelCall(asked, options or Options(), seed, "a", "a", (0,), **more)


def ask(url: str, call: ModelCall | None = None, **options) -> Reply:
    with OpenAIModel("m", base_url=url, **options) as model:
        return asyncio.run(model.answer(call or call_of()))


@agent
async def question(text):
    return await llm(text)


@agent
async def talk():
    first = await llm("1. 17 + 25", max_new_tokens=6, temperature=1.2, top_p=0.9)
    several = await llm("2. 3 * 4", n=3, max_new_tokens=4, temperature=1.5, top_k=40)
    last = await llm("And?", max_new_tokens=6, temperature=1.0, min_p=0.01, stop="5")
    return first, several, last


@pytest.fixture(scope="module")
def engine():
    with Engine(one_layer(), max_rows=4, max_queue=64, passes=4) as made:
        yield made


@pytest.fixture(scope="module")
def live(engine):
    with served(engine) as made:
        yield made


def test_an_agent_says_the_same_by_an_endpoint_as_in_the_process(engine, live):
    whole, here = [], []

    async def both(model, pieces):
        runtime = Runtime(model, seed=11, on_token=pieces.append)
        return await runtime.run(talk)

    local = asyncio.run(both(EngineModel(engine), here))
    with OpenAIModel("tiny", base_url=f"{live.url}/v1") as model:
        far = asyncio.run(both(model, whole))
        again = run(talk, model=model, seed=11)  # in another event loop, without pieces
        other = run(talk, model=model, seed=12)
    assert far.accepted.value == local.accepted.value == again != other
    assert len(set(far.accepted.value[1])) > 1
    assert (far.new_tokens, far.prompt_tokens) == (local.new_tokens, local.prompt_tokens)
    assert far.prompt_tokens > 0 < far.new_tokens

    def texts(pieces):
        made: dict = {}
        for piece in pieces:
            key = piece.run, piece.state, piece.seed
            made[key] = made.get(key, "") + piece.text
        return made

    assert texts(whole) == texts(here)
    first, several, last = local.accepted.value
    assert sorted(texts(here).values()) == sorted([first, *several, last])


@pytest.mark.slow
def test_an_answer_of_a_type_is_constrained_at_the_endpoint(live):
    @agent
    async def number():
        return await llm("1. 17 + 25", returns=bool, max_new_tokens=8, temperature=1.5)

    with OpenAIModel("tiny", base_url=f"{live.url}/v1") as model:
        assert isinstance(run(number, model=model), bool)


def test_a_request_has_what_the_call_has():
    dialogue = (
        Message("system", "Be brief."),
        Message("user", "Rain?"),
        Message("assistant", "", "Hm.", (ToolCall("weather", {"city": "Århus"}, "call00001"),)),
        Message("tool", "rain", tool_call_id="call00001", name="weather"),
    )
    options = Options(9, 0.5, 7, 0.9, 0.1, ("\n", "END"))
    call = call_of(
        *dialogue,
        seed=2**63 - 5,
        options=options,
        tools=TOOLS,
        chat_template_kwargs={"enable_thinking": False},
        grammar=Grammar.json_schema({"type": "integer"}),
    )
    with scripted_endpoint(completion()) as endpoint:
        ask(endpoint.url, call, api_key="sk-1", extra_body={"priority": 2})
        [body] = endpoint.asked
    assert endpoint.keys == ["Bearer sk-1"]
    call_sent = body["messages"][2].pop("tool_calls")
    assert body == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": "", "reasoning_content": "Hm."},
            {"role": "tool", "content": "rain", "tool_call_id": "call00001", "name": "weather"},
        ],
        "seed": 2**63 - 5,
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "stop": ["\n", "END"],
        "tools": [TOOLS[0].schema()],
        "chat_template_kwargs": {"enable_thinking": False},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": {"type": "integer"}, "strict": True},
        },
        "priority": 2,
    }
    assert [(one["id"], one["type"], one["function"]["name"]) for one in call_sent] == [
        ("call00001", "function", "weather")
    ]
    assert json.loads(call_sent[0]["function"]["arguments"]) == {"city": "Århus"}


def test_a_plain_request_has_nothing_else():
    with scripted_endpoint(completion()) as endpoint:
        ask(endpoint.url, call_of(seed=2**33 + 5), seed_bits=32)
        ask(endpoint.url, defaults=Options(max_new_tokens=4, temperature=0.0, stop=("x",)))
        grammar = Grammar.choices(["yes", "no"])
        ask(endpoint.url, call_of(grammar=grammar), limit_field="max_completion_tokens")
        ask(endpoint.url, call_of(grammar=grammar), sends_grammars=False)
    plain = {"model": "m", "messages": [{"role": "user", "content": "Hello?"}], "seed": 3}
    assert endpoint.asked == [
        {**plain, "seed": 5},
        {**plain, "max_tokens": 4, "temperature": 0.0, "stop": ["x"]},
        {**plain, "structured_outputs": {"choice": ["yes", "no"]}},
        plain,
    ]


def test_a_reply_has_what_the_answer_has():
    calls = [
        {"id": "x", "type": "function", "function": {"name": name, "arguments": given}}
        for name, given in [
            ("weather", '{"city": "Rome"}'),
            ("weather", '{"town": "Rome"}'),
            ("weather", "{"),
            ("wind", "{}"),
        ]
    ]
    answer = completion(None, finish="tool_calls", tool_calls=calls, reasoning_content="Hm.")
    with scripted_endpoint(answer, completion("cut", finish="length")) as endpoint:
        reply = ask(endpoint.url, call_of(tools=TOOLS))
        cut = ask(endpoint.url)
    assert [(one.name, one.arguments) for one in reply.tool_calls] == [
        ("weather", {"city": "Rome"})
    ]
    assert [one.text for one in reply.broken] == [
        '{"name": "weather", "arguments": {"town": "Rome"}}',
        '{"name": "weather", "arguments": {}',
        '{"name": "wind", "arguments": {}}',
    ]
    assert "no tool 'wind'" in reply.broken[2].reason and "city" in reply.broken[0].reason
    assert reply.text == "\n".join(one.text for one in reply.broken)
    assert (reply.reasoning, reply.new_tokens, reply.prompt_tokens) == ("Hm.", 2, 7)
    assert (reply.is_cut, cut) == (False, Reply("cut", 2, 7, is_cut=True))


def sse(*deltas: dict, finish: str | None = "stop") -> tuple:
    """A stream of deltas, the usage after them."""
    chunks = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None}
        for delta in deltas
    ]
    if finish:
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        chunks.append({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}})
    events = [json.dumps({"id": "c", "object": "chat.completion.chunk", **one}) for one in chunks]
    text = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
    return (200, {"Content-Type": "text/event-stream"}, text)


def streamed(url: str, call: ModelCall) -> tuple[Reply, list]:
    told: list = []

    async def whole(model):
        return await model.stream(call, lambda *piece: told.append(piece))

    with OpenAIModel("m", base_url=url) as model:
        return asyncio.run(whole(model)), told


def test_a_streamed_reply_is_put_together():
    call = {"index": 0, "id": "x", "function": {"name": "weather", "arguments": '{"city"'}}
    rest = {"index": 0, "function": {"arguments": ': "Rome"}'}}
    stream = sse(
        {"role": "assistant", "content": ""},
        {"reasoning_content": "H"},
        {"reasoning_content": "m."},
        {"content": "I "},
        {"content": "look."},
        {"tool_calls": [call]},
        {"tool_calls": [rest]},
        finish="tool_calls",
    )
    with scripted_endpoint(stream) as endpoint:
        reply, told = streamed(endpoint.url, call_of(tools=TOOLS))
        [body] = endpoint.asked
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
    assert told == [("H", True), ("m.", True), ("I ", False), ("look.", False)]
    made = ToolCall("weather", {"city": "Rome"}, "call_1")
    assert reply == Reply("I look.", 2, 7, "Hm.", (made,))


def test_a_stream_that_breaks_off_is_no_answer():
    with (
        scripted_endpoint(sse({"content": "I "}, finish=None)) as endpoint,
        pytest.raises(EndpointError, match="no chat completion, or a part of one"),
    ):
        streamed(endpoint.url, call_of())


def test_a_connection_that_breaks_off_in_a_stream_is_told_of():
    head = {"Content-Type": "text/event-stream", "Content-Length": "100000", "Connection": "close"}
    with (
        scripted_endpoint((200, head, sse({"content": "I "})[2][:300])) as endpoint,
        pytest.raises(EndpointError, match="broke off in its answer"),
    ):
        streamed(endpoint.url, call_of())


def test_what_may_pass_is_tried_again():
    with scripted_endpoint(BUSY, BROKEN, (503, SOON, ""), completion("at last")) as endpoint:
        assert ask(endpoint.url).text == "at last"
    assert len(endpoint.asked) == 4
    assert all(body == endpoint.asked[0] for body in endpoint.asked)


@pytest.mark.parametrize(
    ("answer", "tries", "told"),
    [
        (BUSY, 3, r"refuses \(HTTP 429: .*too many.*\); give fewer most_calls, or more retries"),
        (BROKEN, 3, r"fails \(HTTP 500: .*no memory.*\); see to it"),
        ((401, {}, "the key sk-2 is wrong"), 1, r"the key \[the key\] is wrong\); give the right"),
        ((404, {}, "x" * 5000), 1, r"x\.\.\.\); give another base_url, or another model than m"),
        ((200, {}, "{garbage"), 1, "gives what is no chat completion"),
        ((200, {"Content-Type": "text/html"}, "<html>Hi</html>"), 1, "no chat completion"),
        ((200, {}, '{"choices": []}'), 1, "no chat completion"),
        ((200, {}, '{"choices": [{"message": 5}]}'), 1, "no chat completion"),
        ((200, {}, "null"), 1, "no chat completion"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_an_endpoint_that_fails_is_told_of(answer, tries, told):
    with (
        scripted_endpoint(answer) as endpoint,
        OpenAIModel("m", base_url=endpoint.url, api_key="sk-2", retries=2) as model,
        pytest.raises(EndpointError, match=told) as raised,
    ):
        run(question, "Hello?", model=model)
    assert endpoint.url in str(raised.value) and len(str(raised.value)) < 600
    assert len(endpoint.asked) == tries


def test_an_endpoint_that_is_down_ends_the_path_with_its_address():
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with OpenAIModel("m", base_url=url, retries=1) as model:
        runtime = Runtime(model)
        with pytest.raises(EndpointError, match="cannot be reached in 2 attempts") as raised:
            asyncio.run(runtime.run(question, "Hello?"))
    assert url in str(raised.value) and "start it, or give another base_url" in str(raised.value)
    [state] = [state for state in runtime.runs[0].states if state.error]
    assert state.error is raised.value


def test_an_endpoint_that_hangs_is_left():
    with scripted_endpoint("hang") as endpoint:
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"has not answered within 0.3 seconds"):
            ask(endpoint.url, timeout=0.3)
        assert time.monotonic() - began < 5


def test_a_call_that_is_given_up_is_ended_there_too():
    @agent
    async def hurried():
        try:
            return await llm("Hello?", timeout=0.2)
        except TimeoutError as error:
            return str(error)

    with (
        scripted_endpoint("hang", completion()) as endpoint,
        OpenAIModel("m", base_url=endpoint.url, most_calls=1) as model,
    ):
        assert "within 0.2 seconds" in run(hurried, model=model)
        assert run(question, "Hello?", model=model) == "fine"  # its place is free


def test_calls_beyond_the_limit_wait():
    @agent
    async def many():
        return await llm("Hello?", n=7)

    with scripted_endpoint(completion()) as endpoint:
        endpoint.gate.clear()
        with OpenAIModel("m", base_url=endpoint.url, most_calls=3) as model:

            async def whole():
                task = asyncio.ensure_future(Runtime(model).run(many))
                while endpoint.now < 3:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.05)
                endpoint.gate.set()
                return (await task).accepted.value

            assert asyncio.run(whole()) == ["fine"] * 7
    assert (endpoint.most, len(endpoint.asked)) == (3, 7)


def endpoint_threads() -> int:
    return sum(thread.name == "jaxshare-endpoint" for thread in threading.enumerate())


@pytest.mark.parametrize("is_closed", [True, False])
def test_connections_end_with_the_model(is_closed):
    before = endpoint_threads()
    with scripted_endpoint(completion()) as endpoint:
        model = OpenAIModel("m", base_url=endpoint.url)
        assert run(question, "Hello?", model=model) == "fine"
        assert endpoint_threads() == before + 1
        if is_closed:
            model.close()
            assert endpoint_threads() == before
            assert run(question, "Hello?", model=model) == "fine"  # they are opened again
        del model
        gc.collect()
        assert endpoint_threads() == before


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"base_url": "localhost:8000"}, "base_url is 'localhost:8000'; it must be an address"),
        ({"base_url": "http://me:secret@host/v1"}, "has a user, a query or a fragment"),
        ({"api_key": "a b"}, "api_key is no text, or has spaces"),
        ({"timeout": 0}, "timeout is 0; it must be above 0"),
        ({"retries": -1}, "retries is -1; it must be at least 0"),
        ({"most_calls": 0}, "most_calls is 0; it must be at least 1"),
        ({"seed_bits": 64}, "seed_bits is 64; it must be at most 63"),
        ({"limit_field": "tokens"}, "limit_field is 'tokens'; it must be max_tokens or"),
        ({"model": ""}, "model is ''; give the name"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_arguments_out_of_range_are_refused_at_once(given, told):
    with pytest.raises(ValueError, match=told) as raised:
        OpenAIModel(**{"model": "m", "base_url": "http://host/v1", **given})
    assert "secret" not in str(raised.value)
