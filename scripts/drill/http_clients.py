"""Clients of a server, of which some are right, and others vanish, say nonsense or read slowly."""

import contextlib
import functools
import http.client
import json
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxshare import SamplingParams
from jaxshare.models import EMBEDDED, LoadedModel, load
from jaxshare.serving import generate
from scripts.drill.streams import PROMPTS, TEMPERATURE

COMPLETIONS = "/v1/completions"
PATIENCE = 120


class Refused(Exception):
    """The server does not serve a request now, and has said so, or has gone."""


class Answer(NamedTuple):
    """An answer: its status, its headers in small letters, and its body."""

    status: int
    headers: dict[str, str]
    body: bytes


@functools.cache
def model() -> LoadedModel:
    """The model that the servers of the drill have."""
    return load(EMBEDDED)


def expected(prompt: str, seed: int, tokens: int) -> str:
    """The text of the library, which a server has to give: so many tokens, 48 at most."""
    tokenizer: Any = model().tokenizer
    return tokenizer.decode(_expected(prompt, seed)[:tokens])


@functools.cache
def _expected(prompt: str, seed: int) -> list[int]:
    sampler = SamplingParams(TEMPERATURE, ignore_eos=True)
    done = generate(model(), prompt, n=1, sampler=sampler, seed=seed, max_new_tokens=48)
    return [*done.completions[0].tokens]


def ask(port: int, method: str, path: str, fields: Any = None) -> Answer:
    """Asks the server, over a connection of its own.

    Raises:
      OSError, http.client.HTTPException: there is no whole answer.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        headers = {"Content-Type": "application/json", "Connection": "close"}
        body = None if fields is None else json.dumps(fields).encode()
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, found, answer.read())
    finally:
        connection.close()


def right(port: int, rng: random.Random) -> int:
    """A request that waits for its answer, streamed or whole, which is the library's.

    Raises:
      Refused: there is none, and the server has said so, or has gone.
    """
    fields = _fields(rng)
    try:
        answer = ask(port, "POST", COMPLETIONS, fields)
    except (OSError, http.client.HTTPException) as error:
        raise Refused(str(error)) from error
    if answer.status in (429, 503):
        assert int(answer.headers["retry-after"]) >= 1, f"{answer} does not say when"
        raise Refused(answer.body.decode())
    assert answer.status == 200, f"a right request has the answer {answer}"
    text = _streamed(answer.body) if fields["stream"] else _whole(answer.body)
    wanted = expected(fields["prompt"], fields["seed"], fields["max_tokens"])
    assert text == wanted, f"the text is {text!r}, and the library's is {wanted!r}"
    return 0


def _fields(rng: random.Random) -> dict[str, Any]:
    return {
        "prompt": rng.choice(PROMPTS),
        "seed": rng.randrange(4),
        "max_tokens": rng.choice((1, 8, 40)),
        "temperature": TEMPERATURE,
        "ignore_eos": True,
        "stream": rng.random() < 0.6,
    }


def _whole(body: bytes) -> str:
    found = json.loads(body)
    if "error" in found:
        raise Refused(found["error"]["message"])
    return found["choices"][0]["text"]


def _streamed(body: bytes) -> str:
    events = [part.removeprefix("data: ") for part in body.decode().split("\n\n")]
    found = [json.loads(event) for event in events if event.startswith("{")]
    if failed := [each for each in found if "error" in each]:
        raise Refused(failed[0]["error"]["message"])
    assert "[DONE]" in events, f"a stream has ended without its end: {body[-200:]!r}"
    return "".join(each["choices"][0]["text"] for each in found)


# Clients that do not wait.


def _connected(port: int, data: bytes, buffer: int | None = None) -> socket.socket:
    """A connection on which a request is sent.

    Raises:
      Refused: there is no server.
    """
    made = socket.socket()
    made.settimeout(PATIENCE)
    if buffer is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    try:
        made.connect(("127.0.0.1", port))
        made.sendall(data)
    except OSError as error:
        made.close()
        raise Refused(str(error)) from error
    return made


def _request(body: bytes, more: str = "", length: int | None = None) -> bytes:
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n{more}\r\n"
    )
    return head.encode() + body


def _long(stream: bool, n: int = 1) -> bytes:
    fields = {"prompt": PROMPTS[0], "max_tokens": 400, "ignore_eos": True, "stream": stream}
    return _request(json.dumps({**fields, "n": n}).encode())


def _leave(client: socket.socket, rng: random.Random) -> None:
    """Closes a connection, in order or by a reset."""
    if rng.random() < 0.5:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


@contextlib.contextmanager
def _leaving(client: socket.socket, rng: random.Random) -> Iterator[None]:
    """A client that leaves in the end, and before it where the server closes the connection."""
    try:
        yield
    except OSError:
        pass
    finally:
        _leave(client, rng)


def vanishing(port: int, rng: random.Random) -> int:
    """A client that goes away before its answer, in the midst of it, or of its own request."""
    data = _long(rng.random() < 0.7, rng.choice((1, 1, 3)))
    if rng.random() < 0.2:
        data = data[: rng.randrange(1, len(data))]
    client = _connected(port, data)
    left = rng.choice((0, 0, 1, 500, 5000))
    client.settimeout(rng.random())
    with _leaving(client, rng):
        while left > 0 and (part := client.recv(min(left, 4096))):
            left -= len(part)
        time.sleep(rng.random() * 0.2)
    return 1


def slow(port: int, rng: random.Random) -> int:
    """A client that reads a few bytes now and then, and leaves."""
    client = _connected(port, _long(True, 3), buffer=2048)
    with _leaving(client, rng):
        for _ in range(rng.randrange(1, 20)):
            if not client.recv(rng.randrange(1, 64)):
                break
            time.sleep(rng.random() * 0.1)
    return 1


def crowd(port: int, rng: random.Random) -> int:
    """More requests at once than wait: each is answered, or refused with a time."""
    data = [_long(True, rng.randrange(1, 6)) for _ in range(8)]
    clients = [_connected(port, each) for each in data]
    try:
        for client in clients:
            head = client.recv(4096)
            if not head:
                raise Refused("the server has closed the connection")
            status = int(head.split(b" ", 2)[1])
            assert status in (200, 429, 503), f"a request too many has the answer {head!r}"
            assert status == 200 or b"retry-after: " in head.lower(), f"{head!r} has no time"
    except OSError as error:
        raise Refused(str(error)) from error
    finally:
        for client in clients:
            _leave(client, rng)
    return len(clients)


# Clients that say nonsense.


def _odd_value(rng: random.Random) -> Any:
    return rng.choice(
        (
            None,
            -1,
            2**70,
            1e308,
            "",
            "\x00",
            "\ud800",
            "a" * 5000,
            [],
            [[]],
            {},
            {"a": [None]},
            True,
        )
    )


def _odd_fields(rng: random.Random) -> bytes:
    fields: dict[str, Any] = {"prompt": "1. 17 + 25", "max_tokens": 2}
    names = ("prompt", "max_tokens", "temperature", "n", "stop", "logit_bias", "seed", "stream")
    names += ("guided_regex", "guided_json", "guided_grammar", "response_format", "logprobs")
    for name in rng.sample(names, rng.randrange(1, 4)):
        fields[name] = _odd_value(rng)
    return json.dumps(fields).encode()


def _cut(rng: random.Random) -> bytes:
    whole = _odd_fields(rng)
    return whole[: rng.randrange(len(whole))]


_BODIES: tuple[Callable[[random.Random], bytes], ...] = (
    _odd_fields,
    _odd_fields,
    _cut,
    lambda rng: rng.randbytes(rng.randrange(200)),
    lambda rng: b"[" * 100_000,
    lambda rng: b'{"prompt": ' * 5_000,
    lambda rng: b'{"prompt": "a", "temperature": NaN, "max_tokens": 1e999}',
    lambda rng: b'{"prompt": "\xff\xfe", "max_tokens": 2}',
)
_HEADS: tuple[Callable[[random.Random], bytes], ...] = (
    lambda rng: rng.randbytes(rng.randrange(1, 300)) + b"\r\n\r\n",
    lambda rng: b"GET / HTTP/9.9\r\n\r\n",
    lambda rng: _request(b"{}", length=2**40),
    lambda rng: _request(b"{}", "X-A: " + "a" * 100_000 + "\r\n"),
    lambda rng: _request(b"zz\r\n", "Transfer-Encoding: chunked\r\n"),
)


def malformed(port: int, rng: random.Random) -> int:
    """A request that is none: it is refused by what is wrong with it, or answered."""
    is_body = rng.random() < 0.7
    data = _request(rng.choice(_BODIES)(rng), "Connection: close\r\n") if is_body else b""
    client = _connected(port, data or rng.choice(_HEADS)(rng))
    received = b""
    try:
        client.shutdown(socket.SHUT_WR)
        while part := client.recv(65536):
            received += part
    except OSError as error:
        if not received:
            raise Refused(str(error)) from error
    finally:
        client.close()
    if not received:  # what ends before its end gets no answer
        return 1
    status = int(received.split(b" ", 2)[1])
    if status == 503:
        raise Refused(received.decode(errors="replace"))
    assert status < 500, f"nonsense has the answer {received[:500]!r} to {data[:500]!r}"
    if is_body and status >= 400:
        found = json.loads(received.partition(b"\r\n\r\n")[2])["error"]
        assert found["message"] and found["type"], f"{found} is no error"
    return 1


KINDS: tuple[Callable[[int, random.Random], int], ...] = (
    *(right, right, vanishing, vanishing, slow, malformed, malformed, crowd),
)
"""Each makes its requests, and returns the number of its faults."""
