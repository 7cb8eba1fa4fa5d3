"""The clients of the drill's server: one wave of each kind, and what they find in a wrong server."""

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import Iterator

import pytest

from jaxshare.serving.engine import Engine
from scripts.drill import http_clients, streams
from tests.serving.http.served import ScriptedEngine, served, until


@pytest.fixture(scope="module")
def server():
    """A server of the drill's model with few rows and a short queue."""
    with Engine(http_clients.model(), max_rows=4, max_queue=64) as engine, served(engine) as made:
        yield made


@contextlib.contextmanager
def answered(listening: socket.socket, answer: bytes) -> Iterator[None]:
    """A server that gives one answer to whatever is asked."""

    def serve() -> None:
        client, _ = listening.accept()
        with client:
            while client.recv(65536):
                pass
            client.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    yield
    thread.join(30)
    assert not thread.is_alive()


def port_of(server) -> int:
    return server.http.base_url.port


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [*dict.fromkeys(http_clients.KINDS)], ids=lambda kind: kind.__name__
)
def test_a_server_withstands_each_kind_of_client(server, kind):
    for seed in range(4):
        try:
            kind(port_of(server), random.Random(seed))
        except http_clients.Refused as refused:
            assert "requests wait already, as many as may" in str(refused)
    until(lambda: server.service.num_running == 0 and server.service.is_idle)
    http_clients.right(port_of(server), random.Random(9))


@pytest.mark.slow
def test_streams_at_once_of_which_a_third_vanish_have_the_library_s_texts(server):
    found = asyncio.run(streams.run(port_of(server), 1.0, seed=3, count=40))
    assert found["most"] == 40 and found["finished"] > 10 and found["vanished"] > 10
    assert found["refused"] == 0
    for prompt, seed, tokens, text in found["texts"]:
        assert text == http_clients.expected(prompt, seed, tokens)
    until(lambda: server.service.num_running == 0 and server.service.is_idle)


def test_a_wrong_text_is_found(monkeypatch):
    monkeypatch.setattr(http_clients, "expected", lambda *of: "It snows.")
    with (
        served(ScriptedEngine(answers=["It rains."])) as made,
        pytest.raises(AssertionError, match="and the library's is"),
    ):
        http_clients.right(port_of(made), random.Random(0))


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("500 Internal Server Error", "nonsense has the answer"),
        ("200 OK", None),
        ("503 Service Unavailable", "503"),
    ],
)
def test_nonsense_may_be_refused_but_not_break_the_server(status, words):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def ask() -> int:
            return http_clients.malformed(listening.getsockname()[1], random.Random(2))

        with answered(listening, f"HTTP/1.1 {status}\r\n\r\n".encode()):
            if words is None:
                assert ask() == 1
            else:
                with pytest.raises((AssertionError, http_clients.Refused), match=words):
                    ask()
