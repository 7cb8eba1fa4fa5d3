"""Faults of the device under a running engine."""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from jaxshare.serving.engine import ClosedError, Engine, EngineError, decode_rows
from jaxshare.serving.engine.prefill import PrefillPasses
from jaxshare.serving.kvcache import manager
from scripts.drill.drill import Drill
from tests.serving.engine import mixed_schedules
from tests.serving.engine.mixed_schedules import Call, Visit, Visited

_PATIENCE = 120


class DeviceFaultError(RuntimeError):
    """The fault that is thrown."""


def _failing_at(calls: set[int], real: Callable[..., Any]) -> Callable[..., Any]:
    """The function, but for these of its calls, counted from 0."""
    numbers, lock = iter(range(10**9)), threading.Lock()

    def function(*arguments: Any, **options: Any) -> Any:
        with lock:
            number = next(numbers)
        if number in calls:
            raise DeviceFaultError(f"call {number} fails")
        return real(*arguments, **options)

    return function


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
            full = _failing_at({0}, manager.Pool)
            patches.enter_context(mock.patch.object(manager, "Pool", full))
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
        assert "fails" in str(error), f"the cause is not said: {error}"
    else:
        raise AssertionError("a closed engine takes a call")
    engine.shutdown()


DRILLS = [
    Drill(
        "device",
        "calls and sessions go on or end with the cause; the engine serves the next call",
        "an exception in up to three dispatches or prefill passes, or in the restart as well",
        throw_device_faults,
    )
]
