"""The judge of how well workers collaborate: a model at an endpoint with OpenAI's protocol.

Hogwild! Inference, section 4.3 and appendix G.

A trace is laid out worker by worker first, so that the judge does not favour workers with long
turns, and cut to the first tokens of each worker, so that it does not favour those that write more.
"""

import dataclasses
import email.message
import http.client
import json
import re
import statistics
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxshare.serving.evaluation.judge_texts import LEVELS, TASK
from jaxshare.serving.evaluation.runs import Run

_LEVEL = re.compile(
    r"^\W*level\W*([1-6])(?:\s*(?:/|of|out of)\s*6)?\W*$", re.IGNORECASE | re.MULTILINE
)
PREFIX_TOKENS = 4096
"""Tokens of each worker that the judge sees (section 4.3)."""
GRADINGS = 3
"""Gradings of each trace, which are averaged (appendix G.2)."""
_RETRIED = (408, 409, 425, 429, *range(500, 600))
_MAX_PAUSE = 60.0


class JudgeError(ValueError):
    """The judge cannot be reached, or does not answer in the requested form."""


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A model that is reached over HTTP.

    Attributes:
      url: of the API, such as http://localhost:8000/v1, or of its chat/completions.
      model: its name there.
      key: sent with every request, or None.
      temperature: None leaves it to the endpoint.
      max_tokens: of a reply.
      seconds: timeout of one reply.
      attempts: per prompt, before giving up.
      pause: seconds before the second attempt, twice as many before the third, and so on, one
        minute at most.

    Raises:
      ValueError: an invalid address, or numbers out of range.
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
        headers = {
            "Content-Type": "application/json",
            **({"Authorization": f"Bearer {self.key}"} if self.key else {}),
        }
        # __post_init__ admits http and https alone.
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self.seconds) as response:
                return _text(response.read())
        except urllib.error.HTTPError as error:
            with error:
                details = error.read(300).decode(errors="replace").strip()
            reason = f"HTTP {error.code} {error.reason}{f': {details}' if details else ''}"
            if error.code not in _RETRIED:
                raise JudgeError(
                    f"the judge {self.model} at {self.url} refuses ({reason}); check the address, "
                    "the model's name and the key"
                ) from error
            raise _TransientError(reason, _retry_after(error.headers)) from error
        except (OSError, http.client.HTTPException) as error:  # with URLError and timeouts
            raise _TransientError(
                str(getattr(error, "reason", "")) or str(error) or type(error).__name__
            ) from error


class _TransientError(Exception):
    """A failure that may pass, after `wait` seconds if the endpoint gives them."""

    def __init__(self, reason: str, wait: float = 0.0):
        super().__init__(reason)
        self.wait = wait


def _retry_after(headers: email.message.Message) -> float:
    """The seconds in Retry-After, or 0."""
    value = headers.get("Retry-After", "")
    return float(value) if value.isdigit() else 0.0


def _text(body: bytes) -> str:
    try:
        text = json.loads(body)["choices"][0]["message"]["content"]
        if not isinstance(text, str):
            raise TypeError(f"the content is {json.dumps(text)[:40]}")
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise _TransientError(
            f"the reply is no chat completion ({type(error).__name__}: {error})"
        ) from error
    return text


def level_of(reply: str) -> int:
    """The level that a reply ends with, in the last line of that form."""
    levels = _LEVEL.findall(reply)
    if not levels:
        raise _TransientError(
            f"the reply has no line with a level from 1 to 6 but ends with {reply.strip()[-80:]!r}"
        )
    return int(levels[-1])


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
