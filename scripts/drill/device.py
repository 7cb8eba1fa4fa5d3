"""Faults of the device under a running engine."""

import contextlib
import dataclasses
import functools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from jaxshare import KVCache, Sampler
from jaxshare.models import LoadedModel
from jaxshare.serving.engine import (
    ClosedError,
    Completion,
    Engine,
    EngineError,
    NotANumberError,
    TooLongError,
    decode_rows,
)
from jaxshare.serving.engine.prefill import PrefillPasses
from scripts.drill.drill import Drill
from tests.serving.engine import mixed_schedules
from tests.serving.engine.mixed_schedules import Call, Schedule, Visit, Visited

_PATIENCE = 120


class DeviceFaultError(RuntimeError):
    """The fault that is thrown."""


def _failing_at(
    calls: set[int], real: Callable[..., Any], error: Callable[[str], Exception] = DeviceFaultError
) -> Callable[..., Any]:
    """The function, but for these of its calls, counted from 0."""
    numbers, lock = iter(range(10**9)), threading.Lock()

    def function(*arguments: Any, **options: Any) -> Any:
        with lock:
            number = next(numbers)
        if number in calls:
            raise error(f"call {number} fails")
        return real(*arguments, **options)

    return function


def _full(words: str) -> Exception:
    return jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: Out of memory: {words}")


@contextlib.contextmanager
def _faults(rng: random.Random) -> Iterator[bool]:
    """Lets one to three calls of the device fail; gives whether the restart fails, too."""
    calls = {rng.randrange(12) for _ in range(rng.randrange(1, 4))}
    with contextlib.ExitStack() as patches:
        if rng.random() < 0.6:
            broken = _failing_at(calls, decode_rows.decode)
            patches.enter_context(mock.patch.object(decode_rows, "decode", broken))
        else:
            broken = _failing_at(calls, PrefillPasses.run)
            patches.enter_context(mock.patch.object(PrefillPasses, "run", broken))
        for_good = rng.random() < 0.25
        if for_good:
            full = _failing_at({0}, KVCache.empty, _full)
            patches.enter_context(mock.patch.object(KVCache, "empty", full))
        yield for_good


def throw_device_faults(rng: random.Random, _: Path) -> int:
    """Calls and sessions in threads, while passes fail: each is right, or has the cause."""
    schedule = mixed_schedules.make(rng.randrange(10**6))
    schedule.engine["taken"] = 0
    engine = mixed_schedules.start_engine(schedule, Engine)
    with _faults(rng) as for_good, ThreadPoolExecutor(len(schedule.arrivals)) as threads:
        calls, visits, refused = _submitted(engine, schedule, threads)
        done, failed = [], refused
        for call, tokens, stream in calls:
            try:
                done.append((call, tokens, stream.wait(_PATIENCE)))
            except (DeviceFaultError, ClosedError):
                failed += 1
        seen: list[tuple[Visit, Visited]] = []
        for what, visit in visits:
            try:
                seen.append((what, visit.result(_PATIENCE)))
            except (DeviceFaultError, EngineError):
                failed += 1
    mixed_schedules.check_calls(done)
    for number, (what, found) in enumerate(seen):
        mixed_schedules.check_visit(number, what, found)
    engine.drain(_PATIENCE)
    if engine._closed:
        assert for_good, "the engine has closed, though it could have been started again"
        _check_closed(engine)
        engine = mixed_schedules.start_engine(schedule, Engine)
    mixed_schedules.check_baseline(engine)
    probe = Call(
        (5, 6, 7), -1, 0, {"sampler": mixed_schedules.SAMPLERS[0], "max_new_tokens": 9, "seed": 1}
    )
    answer = engine.submit(probe.tokens, **probe.options).wait(_PATIENCE)
    mixed_schedules.check_calls([(probe, [*probe.tokens], answer)])
    engine.shutdown()
    return failed


def _submitted(
    engine: Engine, schedule: mixed_schedules.Schedule, threads: ThreadPoolExecutor
) -> tuple[list[tuple[Call, list[int], Any]], list[tuple[Visit, Future[Visited]]], int]:
    """Submits all of a schedule at once; counts the calls that came when the engine had closed."""
    calls: list[tuple[Call, list[int], Any]] = []
    visits: list[tuple[Visit, Future[Visited]]] = []
    refused = 0
    for _, what in schedule.arrivals:
        if isinstance(what, Visit):
            visits.append((what, threads.submit(mixed_schedules.visit, engine, what)))
            continue
        try:
            calls.append((what, [*what.tokens], engine.submit(what.tokens, **what.options)))
        except (ClosedError, ValueError):
            refused += 1
    return calls, visits, refused


def _check_closed(engine: Engine) -> None:
    try:
        engine.submit([5])
    except ClosedError as error:
        assert "no room for" in str(error), f"the cause is not said: {error}"
    else:
        raise AssertionError("a closed engine takes a call")
    engine.shutdown()


_LOST = 401
"""The token whose embedding is no number; no session is told it."""


@functools.cache
def _broken_model() -> LoadedModel:
    params = {"params": {**mixed_schedules.model().params["params"]}}
    embedding = params["params"]["embed"]["embedding"]
    params["params"]["embed"] = {"embedding": embedding.at[_LOST].set(jnp.nan)}
    return dataclasses.replace(mixed_schedules.model(), params=params)


def _with_lost(schedule: Schedule, rng: random.Random) -> tuple[Schedule, set[int]]:
    """The schedule in which some prompts have the lost token, and some sessions draw it.

    Returns:
      It, and the numbers of those among its arrivals.
    """
    arrivals, lost = [], set[int]()
    for number, (turn, what) in enumerate(schedule.arrivals):
        hit = rng.random() < 0.3
        if isinstance(what, Visit):
            sampler = _without_lost(what.settings["sampler"], draws=hit)
            what = dataclasses.replace(what, settings={**what.settings, "sampler": sampler})
        else:
            sampler = _without_lost(what.options["sampler"], draws=False)
            at = rng.randrange(len(what.tokens) + 1)
            tokens = (*what.tokens[:at], *[_LOST] * hit, *what.tokens[at:])
            what = dataclasses.replace(
                what, tokens=tokens, options={**what.options, "sampler": sampler}
            )
            hit = _LOST in tokens  # also by chance
        arrivals.append((turn, what))
        lost |= {number} if hit else set()
    return dataclasses.replace(schedule, arrivals=arrivals), lost


def _without_lost(sampler: Sampler, *, draws: bool) -> Sampler:
    if draws:
        return dataclasses.replace(sampler, bias={_LOST: 1e6})
    return dataclasses.replace(sampler, forbidden=(*sampler.forbidden, _LOST))


def throw_lost_logits(rng: random.Random, _: Path) -> int:
    """Calls and sessions in threads, some with logits that are not numbers: those alone end."""
    schedule = mixed_schedules.make(rng.randrange(10**6))
    schedule.engine["taken"] = 0
    schedule, lost = _with_lost(schedule, rng)
    engine = mixed_schedules.start_engine(schedule, Engine, _broken_model())
    found: list[tuple[Call | Visit, Any]] = []
    with engine, ThreadPoolExecutor(len(schedule.arrivals)) as threads:
        for _, what in schedule.arrivals:
            visits = isinstance(what, Visit)
            run = mixed_schedules.visit if visits else _call
            found.append((what, threads.submit(run, engine, what)))
        for number, (what, future) in enumerate(found):
            try:
                result = future.result(_PATIENCE)
            except NotANumberError:
                assert number in lost, f"arrival {number} has numbers alone"
            except EngineError as error:
                assert isinstance(what, Visit) and "other sessions have" in str(error), error
            else:
                _check_arrival(number, what, result, number in lost)
        mixed_schedules.check_baseline(engine)
    return len(lost)


def _call(engine: Engine, call: Call) -> Completion:
    while True:
        try:
            return engine.submit(call.tokens, **call.options).wait(_PATIENCE)
        except TooLongError:  # sessions have the memory
            time.sleep(0.01)


def _check_arrival(number: int, what: Call | Visit, result: Any, is_lost: bool) -> None:
    if isinstance(what, Call):
        assert not is_lost, f"call {number} has a token without logits, and a text"
        mixed_schedules.check_calls([(what, [*what.tokens], result)])
    elif not is_lost:
        mixed_schedules.check_visit(number, what, result)


DRILLS = [
    Drill(
        "device",
        "calls and sessions go on or end with the cause; the engine serves the next call",
        "an exception in up to three dispatches or prefill passes, or in the restart as well",
        throw_device_faults,
    ),
    Drill(
        "logits",
        "calls and sessions without the fault are not touched; those with it end with the cause",
        "logits that are not numbers: of prompts, and in sessions that draw the token that has them",
        throw_lost_logits,
    ),
]
