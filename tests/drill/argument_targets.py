"""The public functions, classes and methods, for calls with wrong types and extreme values.

Run as a program it reads requests, a target, a seed and a number of calls in each line, and answers
each with what is wrong or "": so a call that takes all time or memory ends this process alone.
"""

import contextlib
import dataclasses
import functools
import inspect
import json
import math
import os
import re
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
from hypothesis import strategies as st

import jaxshare
from jaxshare import Sampler, models, serving
from jaxshare.serving import agents, engine, evaluation
from jaxshare.serving.agents import Budget
from jaxshare.serving.agents.journal import Journal
from jaxshare.serving.agents.search_log import SearchLog
from jaxshare.serving.checkpoints import CheckpointStore, SavedCheckpoint
from tests.serving.engine.test_engine import CONFIG, LONG, MODEL, SIZE, WARM, engine_of

MEMORY, SECONDS = 2 * 2**30, 20.0
"""The most bytes and seconds that a call may take, in which it may compile."""
_PROMPT = [5, 6, 7, 8]
_PATHS = ("folder", "path", "file", "source", "data")
_ERRORS = (ValueError, TypeError, engine.EngineError, OSError)
"""Those that are documented; TimeoutError is an OSError."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A public callable.

    Attributes:
      call: the callable.
      given: valid arguments, by name.
      then: uses what the call has returned, and waits for what it has started.
      words: in which an error may name an argument otherwise, by its name.
      skipped: arguments that are not attacked, because they are the caller's own programs.
    """

    call: Callable[[], Callable[..., Any]]
    given: Callable[[], Mapping[str, Any]] = dict
    then: Callable[[Any], object] = lambda result: None
    words: Mapping[str, str] = dataclasses.field(default_factory=dict)
    skipped: tuple[str, ...] = ()


@functools.cache
def running() -> Any:
    """The engine that all calls of this process share."""
    return engine_of(MODEL, kv_bytes=1024 * SIZE, **LONG)


def others() -> list[int]:
    """The tokens of a call of another client of the engine."""
    return running().submit(_PROMPT, WARM, max_new_tokens=12, seed=3).wait(60).tokens


@functools.cache
def _folder() -> Path:
    made = tempfile.TemporaryDirectory(prefix="jaxshare-drill-")
    _kept.append(made)
    return Path(made.name)


_kept: list[Any] = []


_PROMPTS = {
    "prompt": "prompt",
    "text": "prompt|prefix|tokens",
    "stop": "no output can end at a text",
}

TARGETS: dict[str, Target] = {
    "Sampler": Target(lambda: Sampler, words={"forbidden": "ban", "bias": "ban"}),
    "ModelConfig.for_context": Target(
        lambda: CONFIG.for_context,
        lambda: {"positions": 64},
        words={"positions": "a context of"},
    ),
    "Generation.from_json": Target(
        lambda: models.Generation.from_json,
        lambda: {"generation": {}, "config": {}},
        skipped=("generation", "config"),
    ),
    "outline": Target(lambda: models.outline, lambda: {"path": str(models.EMBEDDED)}),
    "Branch": Target(lambda: serving.Branch, lambda: {"text": "one"}),
    "Prefixes": Target(
        lambda: serving.Prefixes,
        lambda: {"model": MODEL, "max_tokens": 64},
        words={
            "max_tokens": "the store|kv|the blocks|Out of memory",
            "max_kv_bytes": "the store|kv|the blocks|Out of memory",
        },
        skipped=("model",),
    ),
    "Prefixes.add": Target(
        lambda: serving.Prefixes(MODEL, max_tokens=64).add,
        lambda: {"text": _PROMPT},
        words=_PROMPTS,
    ),
    "pass_at_k": Target(lambda: serving.pass_at_k, lambda: {"correct": 1, "n": 4, "k": 2}),
    "Engine.submit": Target(
        lambda: running().submit,
        lambda: {"prompt": _PROMPT, "max_new_tokens": 2},
        lambda stream: stream.wait(60),
        words=_PROMPTS,
    ),
    "Engine.lease": Target(
        lambda: running().lease, lambda: {"capacities": [64]}, lambda lease: lease.close()
    ),
    "Stream.wait": Target(
        lambda: running().submit(_PROMPT, max_new_tokens=1).wait, lambda: {"timeout": 30.0}
    ),
    "Hotspot": Target(lambda: engine.Hotspot),
    "llm": Target(
        lambda: agents.llm,
        lambda: {"content": "one"},
        words={"content": "message|content"},
        skipped=("parse",),
    ),
    "ask": Target(lambda: agents.ask, lambda: {"question": "one?"}),
    "Message": Target(lambda: agents.Message, lambda: {"role": "user", "content": "one"}),
    "Budget": Target(lambda: Budget),
    "Journal.load": Target(
        lambda: Journal.load,
        lambda: {"file": _folder() / "none"},
        words={"strict": "No such file", "pickles": "No such file"},
    ),
    "Journal.save": Target(lambda: Journal().save, lambda: {"file": _folder() / "journal"}),
    "SearchLog.load": Target(lambda: SearchLog.load, lambda: {"file": _folder() / "none"}),
    "Trace.load": Target(lambda: jaxshare.Trace.load, lambda: {"path": _folder() / "none"}),
    "CheckpointStore": Target(
        lambda: CheckpointStore, lambda: {"folder": _folder() / "store"}, lambda s: s.close()
    ),
    "SavedCheckpoint": Target(
        lambda: SavedCheckpoint,
        lambda: {"folder": _folder() / "store"},
        words={"number": "no folder|checkpoint"},
    ),
    "wilson": Target(lambda: evaluation.wilson, lambda: {"accuracy": 0.5, "problems": 4}),
}
"""All of them, by name."""

NUMBERS = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([2**31 - 1, 2**31, -(2**31) - 1, 2**40, 2**63, 2**64, 10**40]),
    st.floats(),
    st.sampled_from([math.nan, math.inf, -0.0, 1e39, 5e-324, np.float32(0.5), np.int64(7)]),
)
ODD = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    st.text(max_size=3),
    st.sampled_from(["", "\0", "\ud800", "x" * 10_000, b"ab", object(), int, set(), ..., 1 + 2j]),
    st.sampled_from([Sampler(), np.zeros(()), np.ones((2, 2)), range(10**12), {"role": "user"}]),
    st.lists(NUMBERS | st.text(max_size=2) | st.none(), max_size=3),
    st.dictionaries(NUMBERS | st.text(max_size=1), st.floats() | st.none(), max_size=2),
)
"""Values that no argument expects, and extreme ones."""
PATHS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(10**4, 10**30),  # never a descriptor
    st.floats(),
    st.sampled_from(["", "\0", "x" * 5000, "\ud800", object(), [], {}, b"\xff", ...]),
)
"""Such values for arguments that name files, none of which names one."""


def parameters(target: Target) -> list[str]:
    """The arguments that are attacked."""
    found = inspect.signature(target.call()).parameters.values()
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [p.name for p in found if p.kind not in kinds and p.name not in target.skipped]


@st.composite
def arguments(draw: st.DrawFn, target: Target) -> dict[str, Any]:
    """One or two odd arguments, by name."""
    names = parameters(target)
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))
    return {name: draw(PATHS if name in _PATHS else ODD) for name in chosen}


def wrong(name: str, odd: Mapping[str, Any]) -> str:
    """Calls a target with odd arguments among valid ones; returns what is wrong, or ""."""
    target, start = TARGETS[name], time.monotonic()
    given = {**target.given(), **odd}
    function = target.call()
    signature = inspect.signature(function).parameters.values()
    positional = [p.name for p in signature if p.kind is inspect.Parameter.POSITIONAL_ONLY]
    first = [given.pop(each) for each in positional if each in given]
    try:
        target.then(function(*first, **given))
    except _ERRORS as error:
        said = str(error)
        words = [(key, f"{key}|{target.words.get(key, key)}") for key in odd]
        if isinstance(error, TimeoutError):
            return ""
        if not said or "\n" in said:
            return f"an error in several lines, or none: {type(error).__name__} {said[:200]!r}"
        # Of a path Python itself says what it must be.
        if not any(re.search(word, said) or key in _PATHS for key, word in words):
            return f"an error that names no argument: {type(error).__name__}: {said[:200]}"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    seconds = time.monotonic() - start
    return f"it takes {seconds:.1f} seconds" if seconds > SECONDS else ""


def attack(name: str, seed: int, calls: int) -> tuple[int, str]:
    """Calls a target with odd arguments from a seed; returns how often, and what is wrong."""
    count, found = 0, ""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=calls,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=[*hypothesis.HealthCheck],
    )
    @hypothesis.given(arguments(TARGETS[name]))
    def throw(odd: dict[str, Any]) -> None:
        nonlocal count, found
        if found:
            return
        count += 1
        if what := wrong(name, odd):
            shown = {key: repr(value)[:60] for key, value in odd.items()}
            found = f"{name}({shown}): {what}"

    before = running().submit(_PROMPT, WARM, max_new_tokens=12, seed=3)
    with warnings.catch_warnings():  # the engine's thread draws numbers while hypothesis does
        warnings.simplefilter("ignore", hypothesis.errors.HypothesisDeprecationWarning)
        throw()
    if not before.wait(60).tokens == others() == expected():
        found = found or f"{name}: the calls of others have other tokens"
    return count, found


@functools.cache
def expected() -> list[int]:
    """The tokens of `others`, before any attack."""
    return others()


def main() -> None:
    """Answers requests {"target", "seed", "calls"} with {"calls", "wrong"}, one in a line each."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.chdir(_folder())
    expected()
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, -1))
    for line in sys.stdin:
        request = json.loads(line)
        calls, found = attack(request["target"], request["seed"], request["calls"])
        print(json.dumps({"calls": calls, "wrong": found}), file=replies, flush=True)
    running().shutdown()


if __name__ == "__main__":
    main()
