"""scripts.bench.serve: its goals, its requests, and how its clients read what a server sends."""

import asyncio
import json

import numpy as np
import pytest

from scripts.bench import serve
from scripts.bench.parts.serve import loads
from scripts.bench.peers import http_client


def overhead(streams: int, rate: float, first: float) -> dict:
    def of(value):
        return {"median": value, "lowest": value, "highest": value}

    return {"streams": streams, "rate": of(rate), "first": of(first)}


def test_goals():
    results = [{"model": "embedded", "overhead": [overhead(16, 0.96, 1.1), overhead(64, 0.9, 1.2)]}]
    found = {goal.name: (goal.measured, goal.met) for goal in serve.goals(results)}
    rate, first = "tokens a second over HTTP", "time to the first token"
    own = "to the engine's own"
    assert found == {
        f"embedded, 16 streams: {rate} {own}": (0.96, True),
        f"embedded, 16 streams: {first} {own}": (1.1, True),
        f"embedded, 64 streams: {rate} {own}": (0.9, False),
        f"embedded, 64 streams: {first} {own}": (1.2, False),
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--models", "gpt"], "--models has 'gpt'"),
        (["--seed", "-1"], "--seed is -1"),
        (["--output", "/nowhere/at/all.json"], "--output is /nowhere/at/all.json"),
    ],
)
def test_what_is_refused(given, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        serve.parse(given)
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_requests_of_a_mix_are_log_normal_and_arrive_by_poisson():
    found = loads.mixed(np.random.default_rng(0), 4000, rate=20.0, scale=1.0)
    prompts, outputs = [len(each["prompt"]) for each in found], [e["max_tokens"] for e in found]
    gaps = np.diff([0.0, *(each["at"] for each in found)])
    assert np.median(prompts) == pytest.approx(96, rel=0.06)
    assert np.median(outputs) == pytest.approx(160, rel=0.06)
    assert np.std(np.log(outputs)) == pytest.approx(0.9, rel=0.1)
    assert gaps.min() >= 0
    assert np.mean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert np.std(gaps) == pytest.approx(1 / 20, rel=0.08), "as of Poisson, not at even times"
    assert max(prompts) <= loads.MOST_PROMPT and max(outputs) <= loads.MOST_OUTPUT


def chunk(text, reason=None, usage=None):
    event = {"choices": [{"text": text, "finish_reason": reason}], "usage": usage}
    return event if usage is None else {"choices": [], "usage": usage}


async def answered(parts: list[bytes], begin: float) -> http_client.Client:
    """A client that gets these bytes, one second after the other."""
    client = http_client.Client(b"")
    for part in parts:
        client.data_received(part)
    client.began = begin
    client._times = [begin + 1 + number for number in range(len(parts))]
    return client


def test_an_answer_is_read_with_its_times():
    usage = {"completion_tokens": 7}
    events = [chunk("a"), chunk("b\u00e9"), chunk("", "length"), chunk("", usage=usage)]
    body = [f"data: {json.dumps(each)}\n\n".encode() for each in events] + [b"data: [DONE]\n\n"]
    pieces = [b"%x\r\n%b\r\n" % (len(each), each) for each in body] + [b"0\r\n\r\n"]
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    # The head, the first piece and a part of the second; its rest; all others.
    split = pieces[1][:9], pieces[1][9:]
    parts = [head + pieces[0] + split[0], split[1], b"".join(pieces[2:])]
    found = http_client.read(asyncio.run(answered(parts, 50.0)))
    assert found == {"tokens": 7, "first": 1.0, "last": 2.0, "gaps": [1.0], "texts": "ab\u00e9"}


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 429 Too Many Requests\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    ],
)
def test_an_answer_that_is_no_stream_is_an_error(answer):
    with pytest.raises(RuntimeError, match="the server answers"):
        http_client.read(asyncio.run(answered([answer], 0.0)))
