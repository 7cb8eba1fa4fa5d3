"""Clients that keep many streams open at once, of which a third vanish, in a process of their own.

    python -m scripts.drill.streams PORT SECONDS SEED STREAMS

Prints a JSON object: how many streams have `finished`, have `vanished`, were `refused`, how many were
open at most, and `texts`: [prompt, seed, tokens, text] of all that have finished, each once.
"""

import asyncio
import json
import random
import sys
import time
from typing import Any

PROMPTS = ("1. 17 + 25", "1. 90 - 17\n2. 12 * 7", "1. 47 + 38\n2. 93 - 16\n3. 64 + 19")
LENGTHS = (4, 16, 48)
SEEDS = 3
TEMPERATURE = 0.8
_PATIENCE = 120


class Streams:
    """The clients.

    Args:
      port: of the server.
      rng: random numbers.
    """

    def __init__(self, port: int, rng: random.Random):
        self._port, self._rng, self._open = port, rng, 0
        self.counts = {"finished": 0, "vanished": 0, "refused": 0, "most": 0}
        self.texts: set[tuple[str, int, int, str]] = set()

    async def keep_open(self, end: float) -> None:
        """Opens one stream after the other, until a time."""
        while time.monotonic() < end:
            async with asyncio.timeout(_PATIENCE):
                await self._stream()

    async def _stream(self) -> None:
        rng = self._rng
        prompt, seed = rng.choice(PROMPTS), rng.randrange(SEEDS)
        tokens, vanishes = rng.choice(LENGTHS), rng.random() < 1 / 3
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._open += 1
        self.counts["most"] = max(self.counts["most"], self._open)
        try:
            writer.write(_request(prompt, seed, tokens))
            if vanishes:
                return await self._vanish(reader, writer)
            body = await reader.read()
            if body.startswith((b"HTTP/1.1 429 ", b"HTTP/1.1 503 ")):
                self.counts["refused"] += 1
                return
            self.texts.add((prompt, seed, tokens, _text(body)))
            self.counts["finished"] += 1
        finally:
            writer.close()
            self._open -= 1

    async def _vanish(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Goes away: at once, after a time, after some bytes, or by a reset."""
        self.counts["vanished"] += 1
        way = self._rng.randrange(4)
        if way == 1:
            await asyncio.sleep(self._rng.random())
        elif way == 2:
            await reader.read(self._rng.randrange(1, 3000))
        elif way == 3:
            await reader.read(1)
            writer.transport.abort()


def _request(prompt: str, seed: int, tokens: int) -> bytes:
    fields = {"prompt": prompt, "seed": seed, "max_tokens": tokens, "temperature": TEMPERATURE}
    body = json.dumps({**fields, "ignore_eos": True, "stream": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _text(answer: bytes) -> str:
    """The text of a stream; its error, where it has one."""
    events = [line for line in answer.decode().split("\n") if line.startswith("data: ")]
    if not events or events[-1].strip() != "data: [DONE]":
        return f"a stream without its end: {answer[-300:]!r}"
    found: list[dict[str, Any]] = [json.loads(event[6:]) for event in events[:-1]]
    return "".join(
        each["choices"][0]["text"] if "choices" in each else f"an error: {each}" for each in found
    )


async def run(port: int, seconds: float, seed: int, count: int) -> dict[str, Any]:
    """Keeps so many streams open for some seconds, and lets those that are open then end."""
    streams = Streams(port, random.Random(seed))
    end = time.monotonic() + seconds
    async with asyncio.TaskGroup() as tasks:
        for _ in range(count):
            tasks.create_task(streams.keep_open(end))
    return {**streams.counts, "texts": sorted(streams.texts)}


if __name__ == "__main__":
    given = sys.argv[1:]
    print(
        json.dumps(asyncio.run(run(int(given[0]), float(given[1]), int(given[2]), int(given[3]))))
    )
