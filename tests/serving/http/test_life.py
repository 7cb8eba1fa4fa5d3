"""The life of a server: clients that go away, full queues, ends that let requests finish."""

import json
import logging
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from jaxshare.serving import score
from jaxshare.serving.engine import Engine, engine_loop
from jaxshare.serving.errors import ClosedError
from jaxshare.serving.http import sse
from jaxshare.serving.http.endpoints import workers
from jaxshare.serving.inputs import encode_messages
from tests.helpers import mostly_slow, one_layer
from tests.serving.http.served import ScriptedEngine, served, sse_events, until

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "1. 17 + 25", "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def narrow():
    """An engine with one row and two places to wait."""
    with Engine(one_layer(), max_rows=1, max_queue=2, passes=2) as engine:
        yield engine


def counted(server, name, **labels):
    """The value of a counter on the page for Prometheus."""
    wanted = "".join(rf'(?=[^}}]*{key}="{value}")' for key, value in labels.items())
    text = server.http.get("/metrics").text
    found = re.search(rf"^{name}(?:{{{wanted}[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def start_stream(server, **more):
    """A stream that has begun, and its connection."""
    host = server.http.base_url
    client = socket.create_connection((host.host, host.port), timeout=30)
    body = json.dumps({**LONG, "stream": True, **more}).encode()
    client.sendall(
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    received = b""
    while b"data: " not in received:
        received += client.recv(4096)
    return client


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_goes_away_frees_its_row(narrow, streamed):
    """The only row: the next request would not be answered before 4,000 tokens otherwise."""
    with served(narrow) as made:
        gone = counted(made, "jaxshare_http_disconnects_total")
        cancelled = counted(made, "jaxshare_calls_total", end="cancelled")
        if streamed:
            start_stream(made).close()
        else:
            with pytest.raises(httpx2.ReadTimeout):
                made.http.post(COMPLETIONS, json=LONG, timeout=0.5)
        answer = made.post(COMPLETIONS, {"prompt": "2. 3 * 4", "max_tokens": 2})
        assert answer.status_code == 200
        until(lambda: made.service.num_running == 0)
        assert counted(made, "jaxshare_http_disconnects_total") == gone + 1
        assert counted(made, "jaxshare_calls_total", end="cancelled") == cancelled + 1


def test_a_full_queue_is_429_with_a_time(narrow):
    with served(narrow) as made:
        clients = [start_stream(made)]
        threads = [
            threading.Thread(
                target=lambda: made.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2})
            )
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        until(lambda: made.service.num_running == 3)
        answer = made.post(COMPLETIONS, {"prompt": "b", "max_tokens": 2, "n": 2})
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
        assert made.service.num_running == 3
        for client in clients:
            client.close()
        for thread in threads:
            thread.join(30)
        assert made.post(COMPLETIONS, {"prompt": "b", "max_tokens": 2}).status_code == 200


def test_a_server_that_drains_finishes_what_runs_and_refuses_the_rest(narrow):
    with served(narrow) as made:
        client = start_stream(made, max_tokens=300)
        assert made.http.get("/ready").json() == {"status": "ready"}
        made.server.drain()
        for path, body in (
            (COMPLETIONS, {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/responses", {"input": "a"}),
            ("/v1/score", {"candidates": ["a"]}),
        ):
            answer = made.post(path, body)
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
            assert answer.json()["error"]["code"] == "shutting_down"
        assert made.http.get("/ready").status_code == 503
        assert made.http.get("/health").status_code == 200
        received = b""
        while b"[DONE]" not in received:
            received += client.recv(2**16)
        assert b'"finish_reason":"length"' in received
        client.close()
        until(lambda: made.server.should_exit)


def test_what_has_not_finished_within_the_grace_is_told_so(narrow):
    with served(narrow, grace=0.3) as made:
        client = start_stream(made)
        made.server.drain()
        received = b""
        while b"[DONE]" not in received:
            received += client.recv(2**16)
        assert b'"code":"shutting_down"' in received
        client.close()


def test_an_engine_that_compiles_does_not_keep_clients_waiting_after_the_grace():
    """It looks at no request meanwhile: here for longer than the server lives."""
    engine = ScriptedEngine(answers=["It rains."])
    engine.late = 4.0
    with served(engine, grace=0.3) as made, ThreadPoolExecutor() as threads:
        begin = time.monotonic()
        whole = threads.submit(made.post, COMPLETIONS, {"prompt": "a"})
        several = threads.submit(made.post, COMPLETIONS, {"prompt": "a", "stream": True, "n": 3})
        chat = {"messages": [{"role": "user", "content": "a"}], "stream": True}
        streamed = threads.submit(made.post, "/v1/chat/completions", chat)
        until(lambda: made.service.num_running == 3)
        made.server.drain()
        answer = whole.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        for each in (several, streamed):
            *_, (_, error), (_, end) = sse_events(each.result().text)
            assert json.loads(error)["error"]["code"] == "shutting_down" and end == "[DONE]"
        assert time.monotonic() - begin < 3


def test_a_session_that_is_not_made_in_time_is_told_so(monkeypatch):
    """And the events of one that waits for the engine end with an error."""
    going = threading.Event()

    def make(*args, **more):
        going.wait(30)
        raise ClosedError("the engine is shut down")

    monkeypatch.setattr(workers, "Workers", make)
    with served(ScriptedEngine(), grace=0.2) as made, ThreadPoolExecutor() as threads:
        asked = threads.submit(made.post, "/v1/workers", {"problem": "17 + 25"})
        until(lambda: made.service.sessions)
        (identity,) = made.service.sessions
        events = threads.submit(made.http.get, f"/v1/workers/{identity}/events")
        until(lambda: made.service.sessions[identity]._readers)
        made.server.drain()
        assert asked.result().json()["error"]["code"] == "shutting_down"
        (name, error), (_, end) = sse_events(events.result().text)
        assert name == "error" and json.loads(error)["code"] == "shutting_down"
        assert end == "[DONE]"
        going.set()


def test_a_request_ends_after_its_time_with_what_it_has(narrow):
    with served(narrow, request_seconds=0.3) as made:
        answer = made.post(COMPLETIONS, LONG).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert 0 < answer["usage"]["completion_tokens"] < 4000


def test_a_client_that_takes_nothing_is_given_up():
    """The answer is larger than what sockets buffer, so that it is waited for."""
    engine = ScriptedEngine(answers=["a" * 3000])
    engine.piece = 1
    with served(engine, stall_seconds=0.4) as made:
        host = made.http.base_url
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host.host, host.port))
            body = json.dumps({"prompt": "a", "max_tokens": 3500, "n": 64, "stream": True}).encode()
            client.sendall(
                f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n"
                "Content-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            until(lambda: counted(made, "jaxshare_http_disconnects_total") == 1)
            until(lambda: made.service.num_running == 0)


def test_comments_are_sent_while_nothing_comes(monkeypatch):
    monkeypatch.setattr(sse, "_KEEP_ALIVE_SECONDS", 0.1)
    engine = ScriptedEngine(answers=["It rains."])
    engine.late = 0.5
    with served(engine) as made:
        text = made.post(COMPLETIONS, {"prompt": "a", "stream": True}).text
    assert 2 <= text.count(": waiting\n\n") <= 8
    pieces = [json.loads(data) for _, data in sse_events(text) if data != "[DONE]"]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == "It rains."


@pytest.mark.parametrize("broken", [None, RuntimeError("no compiler")])
def test_a_server_is_ready_when_its_engine_is_warm(broken):
    """Where it cannot be warmed up, the first requests compile what they need."""
    engine = ScriptedEngine(answers=["Yes."])
    engine.broken = broken
    with served(engine, warm_up=True) as made:
        assert made.http.get("/ready").json() == {"status": "warming up"}
        assert made.http.get("/ready").status_code == 503
        assert made.http.get("/health").status_code == 200
        engine.warm.set()
        until(lambda: made.http.get("/ready").status_code == 200)


def test_requests_are_logged_without_their_text(caplog):
    caplog.set_level(logging.INFO, "jaxshare.http")
    with served(ScriptedEngine(answers=["secret answer"])) as made:
        answer = made.post(f"{COMPLETIONS}?key=secret", {"prompt": "secret prompt"})
        made.http.get("/secret/path")
    assert re.fullmatch("[0-9a-f]{24}", answer.headers["x-request-id"])
    (line,) = [each for each in caplog.messages if answer.headers["x-request-id"] in each]
    assert line.startswith(f"POST {COMPLETIONS}: 200 after ")
    told = [record for record in caplog.records if record.name.startswith(("jaxshare", "uvicorn"))]
    assert not any("secret" in record.getMessage() for record in told)


def test_requests_that_waited_for_a_program_are_told_with_what_was_new(
    live, engine, caplog, monkeypatch
):
    """A warning names an option once; without a warm-up, waiting is no surprise."""
    monkeypatch.setattr(engine_loop, "_LONG_SECONDS", 0.0)  # each step says how long it compiled
    monkeypatch.setattr(engine, "_options", set())
    caplog.set_level(logging.INFO, "jaxshare.engine")
    for is_warm in (True, False):
        monkeypatch.setattr(engine, "_is_warm", is_warm)
        caplog.clear()
        live.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2, "min_tokens": 1})
        until(lambda: "compiled" in caplog.text)
        told = [each for each in caplog.records if each.getMessage().startswith("compiled")]
        assert ("compiled the decode loop for min_tokens: " in caplog.text) is is_warm
        assert {each.levelno for each in told} == {logging.WARNING if is_warm else logging.INFO}


def test_metrics_have_the_engine_s_counters_and_the_server_s(live):
    assert live.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2}).status_code == 200
    assert live.http.get("/made/up").status_code == 404
    assert counted(live, "jaxshare_calls_total", end="length") >= 1
    assert counted(live, "jaxshare_http_requests_total", path=COMPLETIONS, status="200") >= 1
    assert counted(live, "jaxshare_http_requests_total", path="other", status="404") >= 1
    assert "made/up" not in live.http.get("/metrics").text
    assert live.http.get("/version").json()["version"]


def test_tokens_are_those_of_the_tokenizer(live, engine):
    words = engine.model.tokenizer
    made = live.post("/tokenize", {"prompt": "1. 17 + 25", "return_token_strs": True}).json()
    assert made["tokens"] == words.encode("1. 17 + 25")
    assert made["count"] == len(made["tokens"]) and "".join(made["token_strs"]) == "1. 17 + 25"
    assert made["max_model_len"] == engine.model.config.max_positions
    back = live.post("/detokenize", {"tokens": made["tokens"]}).json()
    assert back == {"prompt": "1. 17 + 25"}
    messages = [{"role": "user", "content": "1. 17 + 25"}]
    chat = live.post("/tokenize", {"messages": messages}).json()
    assert chat["tokens"] == encode_messages(engine.model, messages)
    assert live.post("/tokenize", {"prompt": ""}).json()["tokens"] == []
    assert live.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_scores_are_the_library_s(live, engine):
    candidates = [" 42.", " 43.", "."]
    made = live.post(
        "/v1/score", {"prefix": "1. 17 + 25 =", "candidates": candidates, "top_logprobs": 1}
    ).json()
    library = score(engine.model, "1. 17 + 25 =", candidates, top_logprobs=1)
    for told, found in zip(made["scores"], library, strict=True):
        assert told["logprob"] == found.logprob and told["greedy"] == found.greedy
        assert told["tokens"] == [*found.tokens] and told["logprobs"] == [*found.logprobs]
        assert told["top_logprobs"][0][0][0] == found.top_logprobs[0][0][0]


def test_the_description_of_the_interface_has_all_of_it(live):
    paths = live.http.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models"} <= {*paths}
    assert all("422" not in one["responses"] for path in paths.values() for one in path.values())


@pytest.mark.parametrize(
    "sent", mostly_slow([[signal.SIGTERM], [signal.SIGTERM] * 2, [signal.SIGINT]])
)
def test_the_command_serves_and_ends_on_signals(sent, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# of this test\nright\n")
    command = [sys.executable, "-m", "jaxshare.serving.cli", "serve", "embedded", "--port", "0"]
    command += ["--no-warm-up", "--api-key-file", str(keys), "--max-model-len", "64"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        url = re.search(r"embedded is served at (http://127\.0\.0\.1:\d+)/v1", line)
        assert url, line
        with httpx2.Client(base_url=url[1], headers={"Authorization": "Bearer right"}) as client:
            (model,) = client.get("/v1/models").json()["data"]
            assert (model["id"], model["max_model_len"]) == ("embedded", 64)
            refused = client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 100})
            assert refused.json()["error"]["code"] == "context_length_exceeded"
        for each in sent:
            process.send_signal(each)
            time.sleep(0.05)  # two at a time may come as one
        # A second signal may find that the server has ended, and the process about to.
        assert process.wait(30) in (0, *(-each for each in sent[1:]))
        told = process.stderr.read().splitlines()
        no_request = "jaxshare: draining: no request runs; a second signal ends at once"
        assert told in ([no_request], [])  # none where the second one came before it was said


def test_the_end_of_a_stream_is_sent_at_once():
    """The last choice's reason, the usage and the mark of the end are one piece."""
    with served(ScriptedEngine(answers=["It rains."])) as made:
        host = made.http.base_url
        fields = {"stream": True, "n": 2, "stream_options": {"include_usage": True}}
        for path, given in (
            (COMPLETIONS, {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            body = json.dumps({**given, **fields}).encode()
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            head += f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
            with socket.create_connection((host.host, host.port), timeout=30) as client:
                client.sendall(head.encode() + body)
                received = b""
                while part := client.recv(2**16):
                    received += part
            pieces = re.findall(rb"\r\n[0-9a-f]+\r\n(data: .*?\n\n)(?=\r\n)", received, re.DOTALL)
            last = [data for _, data in sse_events(pieces[-1].decode())]
            assert last[-1] == "[DONE]"
            reason, usage = map(json.loads, last[:-1])
            assert reason["choices"][0]["finish_reason"] == "stop" and usage["choices"] == []
            assert usage["usage"]["completion_tokens"] > 2
            reasons = [
                json.loads(data)["choices"][0]["finish_reason"]
                for piece in pieces[:-1]
                for _, data in sse_events(piece.decode())
            ]
            assert reasons.count("stop") == 1
