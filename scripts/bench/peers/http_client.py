"""The clients of the server's benchmark, all in one process, which the server shares nothing with.
One JSON object a line, in on stdin, out on stdout. It needs nothing but Python.

    (at the start)                                      -> versions
    {"do": "run", "port": N, "temperature": T, "requests": [...]}
                                                        -> seconds; tokens, first (seconds from the request to its first tokens), texts,
                                                           gaps (seconds between each two pieces) and last (to the last piece) of each

Each request has a connection of its own, and is sent at its time. What comes is kept with its time,
and read when all have ended. The rest is as in `torch_decode`.
"""

import asyncio
import bisect
import itertools
import json
import platform
import time
from collections.abc import Sequence
from typing import Any

from scripts.bench.peers.conversation import Conversation


class Client(asyncio.Protocol):
    """One request and its answer.

    Args:
      sent: the bytes of the request.

    Attributes:
      ended: done when the connection is closed.
      began: the time at which it was sent.
    """

    def __init__(self, sent: bytes):
        self.ended = asyncio.get_running_loop().create_future()
        self.began = 0.0
        self._sent, self._parts, self._times = sent, list[bytes](), list[float]()

    def connection_made(self, transport: Any) -> None:
        """Sends the request."""
        self.began = time.perf_counter()
        transport.write(self._sent)

    def data_received(self, data: bytes) -> None:
        """Keeps what has come."""
        self._times.append(time.perf_counter())
        self._parts.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells that the answer has ended."""
        self.ended.set_result(None)

    def events(self) -> list[tuple[float, Any]]:
        """The JSON objects of the answer, each with the time at which it was there.

        Raises:
          RuntimeError: it is no stream of events.
        """
        answer, ends, size = b"".join(self._parts), list[int](), 0
        for part in self._parts:
            size += len(part)
            ends.append(size)
        head = answer[: answer.find(b"\r\n\r\n")]
        if not head.startswith(b"HTTP/1.1 200 ") or b"chunked" not in head.lower():
            raise RuntimeError(f"the server answers {answer[:500]!r}")
        found, at = [], len(head) + 4
        while at < len(answer):
            line = answer.index(b"\r\n", at)
            length = int(answer[at:line], 16)
            part, at = answer[line + 2 : line + 2 + length], line + 4 + length
            when = self._times[bisect.bisect_left(ends, at)]
            for event in part.decode().split("\n\n"):
                if event.startswith("data: ") and event != "data: [DONE]":
                    found.append((when, json.loads(event[6:])))
        return found


async def send_all(
    port: int, temperature: float, requests: Sequence[dict[str, Any]]
) -> tuple[float, list[Client]]:
    """Sends all requests; the seconds from the first one to the last end, and the clients."""
    loop = asyncio.get_running_loop()
    bodies = [_request(each, temperature) for each in requests]

    async def send(body: bytes, at: float) -> Client:
        await asyncio.sleep(max(0.0, at - (time.perf_counter() - begin)))
        client = Client(body)
        await loop.create_connection(lambda: client, "127.0.0.1", port)
        await client.ended
        return client

    begin = time.perf_counter()
    clients = await asyncio.gather(
        *(send(body, each["at"]) for body, each in zip(bodies, requests, strict=True))
    )
    return time.perf_counter() - begin, clients


def _request(request: dict[str, Any], temperature: float) -> bytes:
    fields = {
        **{name: request[name] for name in ("prompt", "max_tokens", "seed")},
        "temperature": temperature,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body = json.dumps(fields).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def read(client: Client) -> dict[str, Any]:
    """The tokens, times and text of an answer."""
    events = client.events()
    texts, times, tokens = [], [], 0
    for when, event in events:
        if "error" in event:
            raise RuntimeError(f"the server says {event['error']['message']}")
        if event.get("usage") is not None:
            tokens = event["usage"]["completion_tokens"]
        if not event["choices"]:
            continue
        (choice,) = event["choices"]
        if choice["finish_reason"] is None:
            texts.append(choice["text"])
            times.append(when)
    return {
        "tokens": tokens,
        "first": times[0] - client.began,
        "last": times[-1] - client.began,
        "gaps": [b - a for a, b in itertools.pairwise(times)],
        "texts": "".join(texts),
    }


class Clients:
    """All requests of a turn."""

    def run(self, port: int, temperature: float, requests: list[dict[str, Any]]) -> dict[str, Any]:
        seconds, clients = asyncio.run(send_all(port, temperature, requests))
        found = [read(client) for client in clients]
        names = ("tokens", "first", "last", "gaps", "texts")
        return {"seconds": seconds, **{name: [each[name] for each in found] for name in names}}


def main() -> None:
    """Answers requests until there are no more."""
    conversation = Conversation()
    conversation.say(versions={"python": platform.python_version()})
    conversation.answer_requests(Clients())


if __name__ == "__main__":
    main()
