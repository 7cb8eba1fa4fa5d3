"""The judge of how well workers collaborate: a model at an endpoint with OpenAI's protocol.

Hogwild! Inference, section 4.3 and appendix G.

A trace is laid out worker by worker first, so that the judge does not favour workers with long
turns, and cut to the first tokens of each worker, so that it does not favour those that write more.

An endpoint is not trusted: the key is sent to its address alone and is taken out of what comes
back, and a reply has a deadline and a greatest size.
"""

import asyncio
import concurrent.futures
import dataclasses
import json
import logging
import os
import re
import statistics
import time
import urllib.parse
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxshare.serving.evaluation.judge_texts import LEVELS, TASK
from jaxshare.serving.evaluation.runs import Run

if TYPE_CHECKING:
    import httpx2

_LEVEL = re.compile(r"level\W*([1-6])(?:\s*(?:/|of|out of)\s*6)?", re.IGNORECASE)
_WORD = re.compile(r"\w")
PREFIX_TOKENS = 4096
"""Tokens of each worker that the judge sees (section 4.3)."""
GRADINGS = 3
"""Gradings of each trace, which are averaged (appendix G.2)."""
_RETRIED = (408, 409, 425, 429, *range(500, 600))
_MAX_PAUSE = 60.0
_MAX_BYTES = 4 << 20
"""Bytes of a reply that are read; thousands of tokens of reasoning take tens of kilobytes."""
_DETAILS = 300
"""Characters of an endpoint's error that are shown."""
_HIDDEN = "[the key]"


class JudgeError(ValueError):
    """The judge cannot be reached, or does not answer in the requested form."""


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A model that is reached over HTTP.

    Attributes:
      url: of the API, such as http://localhost:8000/v1, or of its chat/completions.
      model: its name there.
      key: sent with every request, to this address alone, or None.
      temperature: None leaves it to the endpoint.
      max_tokens: of a reply.
      seconds: for one whole reply, from the connection to the last byte.
      attempts: per prompt, before giving up.
      pause: seconds before the second attempt, twice as many before the third, and so on, one
        minute at most.

    Raises:
      ValueError: an invalid address, a key that no header can carry, or numbers out of range.
    """

    url: str
    model: str
    key: str | None = dataclasses.field(default=None, repr=False)
    temperature: float | None = None
    max_tokens: int = 1024
    seconds: float = 120.0
    attempts: int = 5
    pause: float = 1.0

    def __post_init__(self):
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(
                f"the endpoint is {self.url!r}; it must be an address such as "
                "http://localhost:8000/v1"
            )
        if "@" in parts.netloc or parts.query or parts.fragment:
            # Errors show the address, so none of it may be a secret.
            raise ValueError(
                f"the endpoint at {parts.hostname} has a user, a query or a fragment in its "
                "address; leave them out, and give a key in the environment (--key-variable)"
            )
        if self.key is not None and not re.fullmatch(r"[!-~]+", self.key):
            raise ValueError(
                "the key of the endpoint has spaces, line breaks or characters outside ASCII, "
                "which no header can carry; set the variable to the key alone"
            )
        if self.attempts < 1 or self.max_tokens < 1 or not self.seconds > 0 or self.pause < 0:
            raise ValueError(
                f"attempts is {self.attempts}, max_tokens {self.max_tokens}, seconds "
                f"{self.seconds} and pause {self.pause}; a prompt takes at least one attempt, "
                "one token, some time and no negative pause"
            )

    def ask(self, prompt: str, sleep: Callable[[float], None] = time.sleep) -> tuple[str, int]:
        """A reply that ends with a level, and that level. Failures that may pass are tried again.

        Raises:
          JudgeError: the endpoint refuses; or, after all attempts, it cannot be reached or gives no
            level.
        """
        pause = self.pause
        for attempt in range(1, self.attempts + 1):
            try:
                reply = self._reply(prompt)
                return reply, level_of(reply)
            except _TransientError as error:
                if attempt == self.attempts:
                    times = f"{attempt} attempts" if attempt > 1 else "an attempt"
                    raise JudgeError(
                        f"the judge {self.model} at {self.url} gave no grade after {times} "
                        f"({error}); see to the endpoint, or give another --endpoint or --model"
                    ) from error
                sleep(min(_MAX_PAUSE, max(pause, error.wait)))
                pause *= 2
        raise AssertionError("unreachable")

    def _reply(self, prompt: str) -> str:
        """The text of one answer."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self.max_tokens,
        }
        if self.temperature is not None:
            body["temperature"] = self.temperature
        url = self.url.rstrip("/")
        url = url if url.endswith("/chat/completions") else f"{url}/chat/completions"
        reply = _run(_post(url, json.dumps(body).encode(), self.key, self.seconds))
        if 200 <= reply.status < 300:
            return self._hide(_text(reply.body))
        details = self._hide(reply.body.decode(errors="replace")).strip()[:_DETAILS]
        reason = self._hide(f"HTTP {reply.status} {reply.phrase}") + (
            f": {details}" if details else ""
        )
        if reply.status in _RETRIED:
            raise _TransientError(reason, _retry_after(reply.retry_after))
        if 300 <= reply.status < 400:
            raise JudgeError(
                f"the judge {self.model} at {self.url} redirects to another address ({reason}), "
                "which is not followed because the key would go there; give the address of the "
                "API itself as --endpoint"
            )
        raise JudgeError(
            f"the judge {self.model} at {self.url} refuses ({reason}); check the address, the "
            "model's name and the key"
        )

    def _hide(self, text: str) -> str:
        """Takes the key out of what an endpoint sends back."""
        return text.replace(self.key, _HIDDEN) if self.key else text


class _TransientError(Exception):
    """A failure that may pass, after `wait` seconds if the endpoint gives them."""

    def __init__(self, reason: str, wait: float = 0.0):
        super().__init__(reason)
        self.wait = wait


@dataclasses.dataclass(frozen=True)
class _HttpReply:
    """An HTTP reply: its status line, the header Retry-After, and the whole body."""

    status: int
    phrase: str
    retry_after: str
    body: bytes


def _run[T](coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, also within a running event loop, as that of a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


async def _post(url: str, body: bytes, key: str | None, seconds: float) -> _HttpReply:
    """Sends a request and reads the whole reply, within `seconds` and `_MAX_BYTES`.

    The deadline is that of an event loop: a timeout of a socket starts anew with every byte.
    """
    import httpx2  # here, because it takes a tenth of a second that other commands need not wait

    # It logs the headers of replies, and an endpoint may send the key back in one.
    logging.getLogger("httpcore2.http11").setLevel(logging.INFO)
    headers = {
        "Content-Type": "application/json",
        "Accept-Encoding": "identity",  # a compressed reply has no size that can be bounded
        **({"Authorization": f"Bearer {key}"} if key else {}),
    }
    try:
        async with (
            asyncio.timeout(seconds),
            httpx2.AsyncClient(follow_redirects=False, timeout=None) as client,
            client.stream("POST", url, content=body, headers=headers) as response,
        ):
            return _HttpReply(
                response.status_code,
                response.reason_phrase,
                response.headers.get("Retry-After", ""),
                await _read(response),
            )
    except TimeoutError as error:
        raise _TransientError(f"timed out, with no whole reply in {seconds:g} seconds") from error
    except httpx2.InvalidURL as error:
        raise JudgeError(f"the endpoint {url} is no address ({error}); check --endpoint") from error
    # UnicodeError is that of a host name that cannot be looked up.
    except (httpx2.HTTPError, OSError, UnicodeError) as error:
        raise _TransientError(_cause(error)) from error


def _cause(error: BaseException) -> str:
    """The system's own words in a chain of errors; the last says that all attempts failed."""
    message = str(error) or type(error).__name__
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError):  # a name that is not found has a negative number
            number = inner.errno or 0
            message = os.strerror(number) if number > 0 else str(inner)
        inner = inner.__cause__ or inner.__context__
    return message


async def _read(response: "httpx2.Response") -> bytes:
    """Reads a body of at most `_MAX_BYTES`."""
    coding = response.headers.get("Content-Encoding", "identity")
    if coding.lower() != "identity":
        raise _TransientError("the reply is compressed, which was not asked for")
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > _MAX_BYTES:
            raise _TransientError(f"the reply is longer than {_MAX_BYTES >> 20} MiB")
    return bytes(body)


def _retry_after(value: str) -> float:
    """The seconds in Retry-After, or 0."""
    return float(value) if value.isascii() and value.isdigit() else 0.0


def _text(body: bytes) -> str:
    try:
        text = json.loads(body)["choices"][0]["message"]["content"]
        if not isinstance(text, str):
            raise TypeError(f"the content is a {type(text).__name__}, not a text")
    except RecursionError:  # its traceback has thousands of lines
        raise _TransientError("the reply is JSON that is nested too deeply") from None
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise _TransientError(
            f"the reply is no chat completion ({type(error).__name__}: {error})"
        ) from error
    # JSON may escape half of a surrogate pair, which no file can hold.
    return text.encode(errors="replace").decode()


def level_of(reply: str) -> int:
    """The level that a reply ends with, in the last line of that form.

    The number may be on the line after the word. Takes time in proportion to the reply's length.
    """
    below = ""
    for line in reversed(reply.split("\n")):
        core = _core(line)
        if not core:
            continue
        found = _LEVEL.fullmatch(core) or (
            _LEVEL.fullmatch(f"{core} {below}") if core.lower() == "level" else None
        )
        if found:
            return int(found[1])
        below = core
    raise _TransientError(
        f"the reply has no line with a level from 1 to 6 but ends with {reply.strip()[-80:]!r}"
    )


def _core(line: str) -> str:
    """A line from its first word to its last."""
    first, last = _WORD.search(line), _WORD.search(line[::-1])
    return line[first.start() : len(line) - last.start()] if first and last else ""


def trace_of(run: Run, tokens: int = PREFIX_TOKENS) -> dict[str, str]:
    """The text of each worker, its steps in order, cut to its first `tokens`.

    This is the contiguous layout of appendix A. A step that is cut keeps as large a part of its
    characters as of its tokens.
    """
    trace = {}
    for name, steps in run.result["workers"].items():
        texts, left = [], tokens
        for step in steps:
            count, text = len(step["tokens"]), step["text"]
            texts.append(text if count <= left else text[: len(text) * left // count])
            left -= count
            if left <= 0:
                break
        trace[name] = "\n\n".join(text.strip() for text in texts if text.strip())
    return trace


def prompt_of(problem: str, trace: Mapping[str, str]) -> str:
    """The prompt of the judge for a trace."""
    levels = "\n\n".join(f"Level {level}. {words}" for level, words in LEVELS.items())
    texts = "\n\n".join(
        f'<worker name="{name}">\n{text}\n</worker>' for name, text in trace.items()
    )
    names = f"{', '.join([*trace][:-1])} and {[*trace][-1]}"
    return TASK.format(count=len(trace), names=names, levels=levels, problem=problem, trace=texts)


@dataclasses.dataclass(frozen=True)
class Grading:
    """One grading of one run.

    Attributes:
      workers, problem, number: of the run; grading: its own number, from 0.
      level: 1 to 6.
      reply: the judge's words.
    """

    workers: int
    problem: str
    number: int
    grading: int
    level: int
    reply: str


def grade(
    endpoint: Endpoint,
    run: Run,
    grading: int,
    tokens: int = PREFIX_TOKENS,
    sleep: Callable[[float], None] = time.sleep,
) -> Grading:
    """Requests one grading. Gradings of one run are independent of each other.

    Raises:
      JudgeError: see `Endpoint.ask`.
    """
    reply, level = endpoint.ask(prompt_of(run.text, trace_of(run, tokens)), sleep)
    return Grading(run.workers, run.problem, run.number, grading, level, reply)


def average_levels(gradings: Sequence[Grading]) -> list[dict[str, Any]]:
    """Averages the levels of gradings for each number of workers.

    The level is the mean over runs of each run's mean grading, with its standard error over runs.
    """
    runs: dict[int, dict[tuple[str, int], list[int]]] = {}
    for g in gradings:
        runs.setdefault(g.workers, {}).setdefault((g.problem, g.number), []).append(g.level)
    levels = []
    for workers, by_run in sorted(runs.items()):
        means = [statistics.fmean(of_run) for of_run in by_run.values()]
        error = statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else None
        levels.append(
            {
                "workers": workers,
                "level": statistics.fmean(means),
                "standard_error": error,
                "runs": len(means),
            }
        )
    return levels
