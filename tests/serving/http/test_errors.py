"""Errors in OpenAI's shape: what was wrong, where, with which status."""

import json
import logging
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxshare.serving.errors import EngineError, NotANumberError, QueueFullError, TooLongError
from jaxshare.serving.http import errors
from tests.serving.http.served import ScriptedEngine, served, sse_events, until

ASK = [{"role": "user", "content": "Rain?"}]
BATCH = b'{"input_file_id": "a", "endpoint": "/v1/completions", "completion_window": "%b"}'
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def tiny():
    with served(
        ScriptedEngine(),
        api_keys=("right", "other"),
        max_body_bytes=20_000,
        max_choices=8,
    ) as made:
        made.http.headers["Authorization"] = "Bearer right"
        yield made


def raising(error):
    """A function that raises an error."""

    def fail(*_, **__):
        raise error

    return fail


def refused(answer, status, param=None, code=None):
    """The message of an answer that has to be an error."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    return error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt.0"),
        (COMPLETIONS, {"prompt": ["a", 5]}, "prompt"),
        (COMPLETIONS, {"prompt": [10**6]}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 5000}, "prompt"),
        (COMPLETIONS, {"prompt": "a" * 5000}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "5"}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
        (COMPLETIONS, {"prompt": "a", "n": 9}, "n"),
        (COMPLETIONS, {"prompt": ["a"] * 9}, "n"),
        (COMPLETIONS, {"prompt": "a", "n": 3, "best_of": 2}, "best_of"),
        (COMPLETIONS, {"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
        (COMPLETIONS, {"prompt": "a", "temperature": 1e300}, "temperature"),
        (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature"),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p"),
        (COMPLETIONS, {"prompt": "a", "top_k": -2}, "top_k"),
        (COMPLETIONS, {"prompt": "a", "seed": 2**64}, "seed"),
        (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop"),
        (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 257}, "stop"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias.5"),
        (COMPLETIONS, {"prompt": "a", "resample": "often"}, "resample"),
        (COMPLETIONS, {"prompt": "a", "stream": "yes"}, "stream"),
        (COMPLETIONS, {"prompt": "\ud800"}, "prompt"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "king", "content": "a"}]}, "messages.0.role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 5000}]}, "messages"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content of type image_url",
        ),
        (CHAT, {"messages": ASK, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": ASK, "functions": [{}]}, "functions"),
        (CHAT, {"messages": ASK, "modalities": ["audio"]}, "modalities.0"),
        (CHAT, {"messages": ASK, "continue_final_message": True}, "continue_final_message"),
        (CHAT, {"messages": ASK, "n": 9}, "n"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": ASK}, "prompt"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/v1/score", {"candidates": []}, "candidates"),
        ("/v1/score", {"candidates": [""]}, "candidates"),
    ],
)
def test_bad_requests_name_the_field(tiny, path, body, param):
    answer = tiny.http.post(
        path, content=as_json(body), headers={"Content-Type": "application/json"}
    )
    refused(answer, 400, param)


def as_json(body):
    """JSON as clients in C write it: half a surrogate pair may be in it."""
    return json.dumps(body).encode()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"1e999", b"[" * 9000, b"\xff"])
def test_bodies_that_are_no_objects_are_bad_requests(tiny, body):
    answer = tiny.http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    refused(answer, 400, answer.json()["error"]["param"])


def test_numbers_that_json_has_not_are_bad_requests(tiny):
    for number in (b"NaN", b"Infinity", b"1e999"):
        body = b'{"prompt": "a", "temperature": %s}' % number
        answer = tiny.http.post(
            COMPLETIONS, content=body, headers={"Content-Type": "application/json"}
        )
        refused(answer, 400, "temperature")


def test_a_body_of_another_type_is_not_read(tiny):
    """So a page of another site cannot send one without being asked first by the browser."""
    answer = tiny.http.post(
        COMPLETIONS, content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"}
    )
    assert answer.status_code == 400
    assert "`Content-Type: application/json`" in answer.json()["error"]["message"]
    preflight = tiny.http.options(
        COMPLETIONS,
        headers={"Origin": "https://example.org", "Access-Control-Request-Method": "POST"},
    )
    assert "access-control-allow-origin" not in preflight.headers


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a"}),
        (CHAT, {"messages": ASK}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/score", {"candidates": ["a"]}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_another_model_is_not_there(tiny, path, body):
    refused(tiny.post(path, {"model": "other", **body}), 404, "model", "model_not_found")


def test_other_paths_and_methods_are_not_there(tiny):
    refused(tiny.http.get("/v1/other"), 404)
    refused(tiny.http.get("/v1/models/other"), 404, "model")
    refused(tiny.http.get(COMPLETIONS), 405)
    refused(tiny.http.delete("/v1/responses/resp_none"), 404)


@pytest.mark.parametrize(
    "header",
    [None, "Bearer wrong", "Basic right", "right", "Bearer righ", "Bearer rightt"],
)
def test_a_key_is_needed(tiny, header, caplog):
    caplog.set_level(logging.DEBUG)
    del tiny.http.headers["Authorization"]
    try:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/v1/other"):
            answer = tiny.http.get(path, headers={"Authorization": header} if header else {})
            message = refused(answer, 401)
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "right" not in message
        for path in ("/health", "/ready"):
            assert tiny.http.get(path).status_code == 200
    finally:
        tiny.http.headers["Authorization"] = "Bearer right"
    assert "wrong" not in caplog.text and "right" not in caplog.text


def test_each_key_has_responses_of_its_own(tiny):
    made = tiny.post("/v1/responses", {"input": "a"}).json()["id"]
    other = {"Authorization": "Bearer other"}
    assert tiny.http.get(f"/v1/responses/{made}").status_code == 200
    for ask in (tiny.http.get, tiny.http.delete):
        refused(ask(f"/v1/responses/{made}", headers=other), 404)
    assert tiny.http.delete(f"/v1/responses/{made}").json()["deleted"] is True


def test_a_body_that_is_too_large_is_not_read(tiny):
    refused(tiny.post(COMPLETIONS, {"prompt": "a" * 30_000}), 413, None, "body_too_large")

    def pieces():
        for _ in range(5):
            yield b" " * 10_000

    try:
        answer = tiny.http.post(COMPLETIONS, content=pieces())
    except OSError:  # it was closed before all of it was sent
        return
    refused(answer, 413)


def test_headers_have_a_bound(tiny):
    address = tiny.http.base_url
    with socket.create_connection((address.host, address.port), timeout=10) as client:
        try:
            client.sendall(b"GET /health HTTP/1.1\r\nX-Long: " + b"a" * 2**20)
            answer = client.recv(64)
        except ConnectionError:  # it was closed before all of it was read
            answer = b""
    assert answer[:12] in (b"HTTP/1.1 400", b"")
    assert tiny.http.get("/health").status_code == 200


def test_a_body_that_does_not_come_is_not_waited_for():
    with served(ScriptedEngine(), body_seconds=0.2) as made:
        address = made.http.base_url
        with socket.create_connection((address.host, address.port), timeout=10) as slow:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 10\r\n\r\n"
            slow.sendall(head.encode() + b"{")
            assert slow.recv(64).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineError("the device is lost"), 503, None),
        (NotANumberError.of("the prompt", "2 tokens"), 500, "not_a_number"),
        (RuntimeError("secret words"), 500, "internal_error"),
    ],
)
def test_errors_of_the_engine_end_answers_and_streams(error, status, code):
    engine = ScriptedEngine(answers=["It rains."])
    engine.broken = error
    with served(engine) as made:
        for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": ASK})):
            assert "secret" not in refused(made.post(path, body), status, None, code)
            text = made.post(path, {**body, "stream": True}).text
            *_, (_, failure), (_, end) = sse_events(text)
            assert json.loads(failure)["error"]["code"] == code and end == "[DONE]"
        events = sse_events(made.post("/v1/responses", {"input": "a", "stream": True}).text)
        assert events[-1][0] == "response.failed"
        until(lambda: made.service.num_running == 0)


@pytest.mark.parametrize(
    ("answered", "begun"), [(False, b""), (False, b"GET /hea"), (True, b"GET /hea")]
)
def test_a_head_that_does_not_come_is_not_waited_for(answered, begun):
    with served(ScriptedEngine(), body_seconds=0.2) as made:
        address = made.http.base_url
        with socket.create_connection((address.host, address.port), timeout=10) as slow:
            if answered:
                slow.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                received = b""
                while b'"ok"' not in received:
                    received += slow.recv(4096)
            slow.sendall(begun)
            assert slow.recv(4096) == b""


def test_bodies_have_a_bound_together():
    with served(ScriptedEngine(), max_body_bytes=2000, max_held_bytes=3000) as made:
        address = made.http.base_url
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1900\r\n\r\n"
        with socket.create_connection((address.host, address.port), timeout=10) as slow:
            slow.sendall(head.encode() + b" " * 1800)
            until(lambda: made.post(COMPLETIONS, {"prompt": "a" * 1500}).status_code == 503)
            assert made.post(COMPLETIONS, {"prompt": "a"}).status_code == 200
        until(lambda: made.post(COMPLETIONS, {"prompt": "a" * 1500}).status_code == 200)


def test_open_requests_have_a_bound():
    with served(ScriptedEngine(), max_open=1) as made:
        address = made.http.base_url
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n"
        with socket.create_connection((address.host, address.port), timeout=10) as slow:
            slow.sendall(head.encode())
            until(lambda: made.http.get("/version").status_code == 503)
            assert made.http.get("/health").status_code == 200
            refused(made.http.get("/version"), 503, None, "too_many_requests")
        until(lambda: made.http.get("/version").status_code == 200)


def test_agents_that_run_at_a_time_have_a_bound():
    """Those that are idle do not count."""
    engine, body = ScriptedEngine(), {"prompt": "a", "max_tokens": 1}
    with served(engine, max_agents=2) as made, ThreadPoolExecutor() as threads:
        for name in "abcdef":
            assert made.post(COMPLETIONS, {**body, "agent_id": name}).status_code == 200
        engine.late = 1.0
        running = [
            threads.submit(made.post, COMPLETIONS, {**body, "agent_id": name}) for name in "ab"
        ]
        until(lambda: made.service.num_running == 2)
        answer = made.post(COMPLETIONS, {**body, "agent_id": "c"})
        message = refused(answer, 429, "agent_id", "too_many_agents")
        assert "2 agents" in message and "--max-agents" in message and answer.headers["retry-after"]
        assert [each.result().status_code for each in running] == [200, 200]
    with served(engine, max_agents=0) as made:
        refused(made.post(COMPLETIONS, {**body, "agent_id": "a"}), 400, "agent_id")


def test_a_full_queue_says_how_full_it_is():
    engine = ScriptedEngine()
    engine.submit = raising(QueueFullError("7 requests wait already, which is max_queue"))
    with served(engine) as made:
        message = refused(made.post(COMPLETIONS, {"prompt": "a"}), 429, None, "queue_full")
    assert message.startswith("7 requests wait already") and "--max-queue" in message


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("make it with logits_cache=BYTES", "--logits-cache"),
        ("raise kv_bytes or shorten them", "--kv-bytes"),
        ("make the model with a larger max_rank", "--max-adapter-rank"),
    ],
)
def test_remedies_are_those_of_an_operator(words, remedy):
    for kind in (ValueError, TooLongError, EngineError):
        message = errors.api_error(kind(f"there is no room; {words}")).message
        assert remedy in message and "=" not in message and "kv_bytes" not in message


def test_unknown_fields_are_left_out_and_told_once(tiny, caplog):
    caplog.set_level(logging.INFO, "jaxshare.http")
    for _ in range(2):
        body = {"prompt": "secret words", "max_tokens": 1, "tempratur": 0.5, "user": "me"}
        assert tiny.post(COMPLETIONS, body).status_code == 200
    told = [record.getMessage() for record in caplog.records if "unknown" in record.getMessage()]
    assert len(told) == 1 and "tempratur" in told[0]
    assert "secret" not in caplog.text


def called(made, host, path="/v1/models"):
    """The answer to a request that calls the server by this name."""
    return made.http.get(path, headers={"Host": host})


def test_a_server_on_this_machine_answers_to_its_names_alone(tiny):
    for host, status in (
        ("localhost:9", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
    ):
        answer = called(tiny, host)
        assert answer.status_code == status
        for path in ("/health", "/ready"):  # of probes, whose answers say nothing
            assert called(tiny, host, path).status_code in (200, 503)
    message = refused(answer, 403, None, "host_not_allowed")
    assert "'127.0.0.1.evil.example'" in message and "--allowed-host" in message


def test_names_that_a_proxy_passes_on_may_be_allowed():
    with served(ScriptedEngine(), allowed_hosts=("LLM.example.org",)) as made:
        for host, status in (
            ("llm.example.org", 200),
            ("llm.example.org:8443", 200),
            ("localhost", 200),
            ("example.org", 403),
        ):
            assert called(made, host).status_code == status


def test_origins_that_are_named_may_ask():
    with served(ScriptedEngine(), allowed_origins=("https://example.org",)) as made:
        for origin, allowed in (("https://example.org", True), ("https://evil.example", False)):
            answer = made.http.get("/health", headers={"Origin": origin})
            assert (answer.headers.get("access-control-allow-origin") == origin) is allowed


@pytest.mark.parametrize(
    ("path", "content", "code", "words"),
    [
        (COMPLETIONS, b'{"prompt": "a",}', "invalid_json", "no JSON at character 1"),
        (COMPLETIONS, b'{"prompt": "', "invalid_json", "no JSON at character 1"),
        (COMPLETIONS, b'{"prompt": "\xff"}', "invalid_json", "no UTF-8 at byte 12"),
        (COMPLETIONS, b'{"prompt": "a\\ud800"}', "invalid_value", "half of a surrogate pair"),
        ("/v1/batches", BATCH % b"1d", "invalid_value", "it must be 1 to 999 hours, such as 24h"),
        ("/v1/weights", b'{"name": "../a"}', "invalid_value", "the name of a folder"),
    ],
)
def test_what_is_wrong_with_a_body_is_told_without_python_s_words(live, path, content, code, words):
    headers = {"Content-Type": "application/json"}
    answer = live.http.post(path, content=content, headers=headers)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == code and words in error["message"] and "^" not in error["message"]


def test_a_head_that_comes_at_once_has_the_same_bound(tiny):
    answer = tiny.http.get("/v1/models", headers={"X-Long": "a" * 100_000})
    assert answer.status_code == 400
    assert tiny.http.get("/v1/models", headers={"X-Long": "a" * 10_000}).status_code == 200


def test_another_method_is_told_which_ones_there_are(tiny):
    message = refused(tiny.http.get(COMPLETIONS), 405)
    assert "POST" in message and "GET" in message
    for path in ("/health", "/ready"):
        answer = tiny.http.head(path)
        assert answer.status_code == tiny.http.get(path).status_code and answer.content == b""
