"""One engine that lives through waves of random work, and holds no more after them than before."""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import gc
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxshare.seeds import stream_seed
from jaxshare.serving import Branch, Workers, generate
from jaxshare.serving.agents import Runtime, agent, llm
from jaxshare.serving.agents.backends import EngineModel
from jaxshare.serving.branches.answering import CallAnswering
from jaxshare.serving.branches.on_engine import complete_on
from jaxshare.serving.branches.prompt_tree import Prompt
from jaxshare.serving.engine import Completion, Engine, EngineError, QueueFullError, TooLongError
from scripts.drill import census
from scripts.drill.census import Census
from scripts.drill.drill import Drill
from tests.serving.engine import mixed_schedules
from tests.serving.engine.mixed_schedules import Call, Visit, Visited
from tests.serving.engine.test_engine import check_memory

_PATIENCE, _ROWS = 120, mixed_schedules.ROWS
_SCHEDULES = 300
"""Of so many schedules a wave is one: what it asks is often cached from an earlier wave."""
_WARM_UP = range(_SCHEDULES, _SCHEDULES + 12)
"""Schedules of the waves before the base line is taken."""
_WINDOW = 5
"""Waves of the base line, and of what is compared with it: what a wave leaves varies a little, but
what leaks is more after each of the last waves than after any of the first."""
_FEWEST, _ALLOWED_RESIDENT, _ALLOWED_IN_USE = 100, 192 * 2**20, 16 * 2**20
"""The fewest waves to judge memory by, and the bytes by which what is resident and what is in use may
grow from the second to the last quarter of them. What is resident goes up and down by 100 MiB, since
what is free lies between what is not, and in the first 200 waves programs are compiled."""
_SETTLED, _ALLOWED_LATER = 1_000, 2 * 2**20
"""Waves after which that is over, and the bytes by which memory in use may then grow from the third
quarter to the last. It grows by 2 KiB a wave."""
_PROBE = Call((5, 6, 7), -1, 0, {"sampler": mixed_schedules.SAMPLERS[0], "max_new_tokens": 9})
_PROBE.options["seed"] = 1


@dataclasses.dataclass
class Seen:
    """The things that a client has got, to be compared with the oracle; and its faults.

    Attributes:
      calls: completions, with their calls and prompts.
      visits: sessions that have run to where they leave.
      faults: cancellations, deadlines that have passed, and what was dropped.
    """

    calls: list[tuple[Call, list[int], Completion]] = dataclasses.field(default_factory=list)
    visits: list[tuple[Visit, Visited]] = dataclasses.field(default_factory=list)
    faults: int = 0


Client = Callable[[Engine, random.Random], Seen]


class Soak:
    """The engine of the part, and what the process held after each wave.

    Args:
      engine: of the schedules' model, at rest.

    Attributes:
      first, last: what the process held after the first and the last waves since the warm-up.
      memory: after each wave since, the bytes that are resident, and that are in use.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        engine.warm_up()
        for number in _WARM_UP:
            self._run(random.Random(number), mixed_schedules.make(number))
        self.first: list[Census] = []
        self.last: collections.deque[Census] = collections.deque(maxlen=_WINDOW)
        self.memory: list[tuple[int, int]] = []

    def wave(self, rng: random.Random) -> int:
        """Runs a wave of work, and checks its texts and what is left of it; returns its faults."""
        faults = self._run(rng, mixed_schedules.make(rng.randrange(_SCHEDULES)))
        found = self._at_rest()
        self.memory.append((found.resident, found.allocated))
        if len(self.first) < _WINDOW:
            self.first.append(found)
        else:
            self.last.append(found)
        if len(self.last) == _WINDOW:
            grown = census.growth(self.first, self.last)
            assert not grown, f"after wave {len(self.memory)} there is more of: {grown}"
        self._check_memory()
        return faults

    def _run(self, rng: random.Random, schedule: mixed_schedules.Schedule) -> int:
        clients = _clients(rng, schedule)
        with ThreadPoolExecutor(len(clients)) as threads:
            rngs = [random.Random(rng.random()) for _ in clients]
            work = [threads.submit(c, self.engine, r) for c, r in zip(clients, rngs, strict=True)]
            seen = [done.result(_PATIENCE) for done in work]
        self.engine.drain(_PATIENCE)
        mixed_schedules.check_calls([call for each in seen for call in each.calls])
        for number, visit in enumerate(visit for each in seen for visit in each.visits):
            mixed_schedules.check_visit(number, *visit)
        return sum(each.faults for each in seen)

    def _at_rest(self) -> Census:
        gc.collect()  # sessions that were dropped
        self.engine.drain(_PATIENCE)
        with self.engine._leases.exclusive():
            check_memory(self.engine)
        if len(self.memory) % 3 == 0:  # else the next wave finds what is cached
            mixed_schedules.check_baseline(self.engine)
        # The last dispatch leaves its tables, so it is always of the same calls, one in each row.
        probes = [self.engine.submit(_PROBE.tokens, **_PROBE.options) for _ in range(_ROWS)]
        done = [(_PROBE, [*_PROBE.tokens], probe.wait(_PATIENCE)) for probe in probes]
        mixed_schedules.check_calls(done)
        del probes, done
        self.engine.drain(_PATIENCE)
        return census.take(self.engine)

    def _check_memory(self) -> None:
        """Compares the last quarter of the waves with the second and the third."""
        resident, in_use = ([*each] for each in zip(*self.memory, strict=True))
        if len(in_use) >= _FEWEST:
            _check_growth("resident memory", resident, 1, _ALLOWED_RESIDENT)
            _check_growth("memory in use", in_use, 1, _ALLOWED_IN_USE)
        if len(in_use) >= _SETTLED:
            _check_growth("memory in use", in_use, 2, _ALLOWED_LATER)


def _check_growth(name: str, waves: Sequence[int], quarter: int, allowed: int) -> None:
    """Fails where the last quarter has more bytes than this one, counted from 0."""
    size = len(waves) // 4
    before = statistics.median(waves[quarter * size : (quarter + 1) * size])
    after = statistics.median(waves[-size:])
    assert after - before < allowed, (
        f"{name} has grown from {before / 2**20:.1f} to {after / 2**20:.1f} MiB in "
        f"{len(waves)} waves"
    )


@functools.cache
def _soak() -> Soak:
    schedule = mixed_schedules.make(0)
    schedule.engine.update(host=256, policy="contribution")
    return Soak(mixed_schedules.start_engine(schedule, Engine))


def throw_waves(rng: random.Random, _: Path) -> int:
    """Throws one wave at the engine that all cases share."""
    return _soak().wave(rng)


# Clients.


def _clients(rng: random.Random, schedule: mixed_schedules.Schedule) -> list[Client]:
    """The clients of a wave: those of a schedule, trees and agents."""
    calls = [what for _, what in schedule.arrivals if isinstance(what, Call)]
    visits = [what for _, what in schedule.arrivals if isinstance(what, Visit)]
    count = rng.randrange(1, 4)
    found: list[Client] = [functools.partial(_calls, calls[i::count]) for i in range(count)]
    for visit in visits:
        client = _abandoned if rng.random() < 0.15 else _session
        found.append(functools.partial(client, visit))
    found += rng.choices((_tree, _part_of_a_tree, _agents), k=rng.randrange(1, 3))
    rng.shuffle(found)
    return found


def _when_there_is_room[T](work: Callable[[], T]) -> T:
    """Does it again where other clients have the memory or the queue."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return work()
        except (QueueFullError, TooLongError, EngineError) as error:
            busy = isinstance(error, QueueFullError) or "sessions have" in str(error)
            if not busy or time.monotonic() > deadline:
                raise
        time.sleep(0.02)


def _calls(calls: list[Call], engine: Engine, rng: random.Random) -> Seen:
    """Calls one after the other or at once, some of them cut short in one of four ways."""
    seen, streams = Seen(), list[tuple[Call, list[int], Any]]()
    for call in calls:
        tokens = [*call.tokens]
        if seen.calls and rng.random() < 0.4:  # it goes on where another one has ended
            _, before, done = rng.choice(seen.calls)
            text = [token for token in (*before, *done.tokens) if token != mixed_schedules.STOP]
            tokens = [*text[:90], *tokens[-5:]]
        call = dataclasses.replace(call, cancelled=None)
        stream = _when_there_is_room(
            lambda call=call, tokens=tokens: engine.submit(tokens, **call.options)
        )
        way = rng.choice(("later", "wait", "read", "cancel", "deadline", "drop"))
        if way == "later":
            streams.append((call, tokens, stream))
        elif way == "drop":
            seen.faults += 1
        elif way in ("wait", "read"):
            done = asyncio.run(_read(stream)) if way == "read" else stream.wait(_PATIENCE)
            seen.calls.append((call, tokens, done))
        else:
            seen.faults += 1
            done = _cut_short(stream, way, rng.random() * 0.05)
            seen.calls.append((dataclasses.replace(call, cancelled=0), tokens, done))
        del stream
    seen.calls += [(call, tokens, stream.wait(_PATIENCE)) for call, tokens, stream in streams]
    return seen


async def _read(stream: Any) -> Completion:
    text = "".join([chunk.text async for chunk in stream])
    done = await stream
    assert text == done.text, f"a stream's pieces are {text!r}, and its text is {done.text!r}"
    return done


def _cut_short(stream: Any, way: str, seconds: float) -> Completion:
    """Cancels a call after a while, from another thread or after its deadline."""
    if way == "cancel":
        timer = threading.Timer(seconds, stream.cancel)
        timer.start()
        done = stream.wait(_PATIENCE)
        timer.join()
        return done
    try:
        return stream.wait(seconds)
    except TimeoutError:
        stream.cancel()
        return stream.wait(_PATIENCE)


def _session(visit: Visit, engine: Engine, rng: random.Random) -> Seen:
    time.sleep(rng.random() * 0.03)
    found = _when_there_is_room(lambda: mixed_schedules.visit(engine, visit))
    return Seen(visits=[(visit, found)])


def _abandoned(visit: Visit, engine: Engine, rng: random.Random) -> Seen:
    """A session that is never closed, whose memory comes back when it is collected."""
    session = _when_there_is_room(
        lambda: Workers(engine.model, engine=engine, kind=mixed_schedules.KIND, **visit.settings)
    )
    for _ in session.stream(rng.randrange(1, 6)):
        pass
    del session
    gc.collect()
    return Seen(faults=1)


def _drawn_tree(rng: random.Random) -> tuple[list[int], list[list[int]], dict[str, Any]]:
    """The start of some prompts, how they go on, and the settings."""
    start = [rng.randrange(3, 402) for _ in range(rng.randrange(20, 50))]
    ends = [[rng.randrange(3, 402) for _ in range(rng.randrange(1, 20))] for _ in range(3)]
    sampler = rng.choice(mixed_schedules.SAMPLERS[:3])
    settings = {"max_new_tokens": rng.randrange(1, 20), "sampler": sampler}
    return start, ends, {**settings, "seed": rng.randrange(2**63)}


def _as_call(tokens: list[int], settings: dict[str, Any], done: Completion) -> tuple:
    """A completion of a tree as the call that it is."""
    options = {**settings, "logprobs": True}
    options["seed"] = stream_seed(settings["seed"], done.prompt, done.index)
    return Call(tuple(tokens), -1, 0, options), tokens, done


def _tree(engine: Engine, rng: random.Random) -> Seen:
    start, ends, settings = _drawn_tree(rng)
    tree = Branch(start, [Branch(end) for end in ends], n=1)
    found = _when_there_is_room(
        lambda: generate(engine.model, tree, n=2, engine=engine, **settings)
    )
    prompts = [start, *(start + end for end in ends)]
    return Seen([_as_call(prompts[done.prompt], settings, done) for done in found.completions])


def _part_of_a_tree(engine: Engine, rng: random.Random) -> Seen:
    """The first completions of a tree; the others are cancelled."""
    start, ends, settings = _drawn_tree(rng)
    prompts = [Prompt(number, tuple(start + end), 2) for number, end in enumerate(ends)]
    call = CallAnswering.of(engine.model, **settings, stop=None, include_stop=None)
    answers = call.of_prompts(prompts, 0)
    taken = rng.randrange(1, 4)

    def first() -> list[Completion]:
        completing = complete_on(engine, prompts, answers=answers, top_logprobs=0, logprobs=True)
        with contextlib.closing(completing) as completions:
            return [next(completions) for _ in range(taken)]

    done = _when_there_is_room(first)
    calls = [_as_call([*prompts[each.prompt].tokens], settings, each) for each in done]
    return Seen(calls, faults=6 - taken)


# Agents.


class _Recorded:
    """An engine as agents see it, which remembers their calls."""

    def __init__(self, engine: Engine):
        self.model, self.metrics, self._engine = engine.model, engine.metrics, engine
        self.streams: list[tuple[list[int], dict[str, Any], Any]] = []

    def submit(self, prompt: Any, sampler: Any, **options: Any) -> Any:
        stream = _when_there_is_room(lambda: self._engine.submit(prompt, sampler, **options))
        self.streams.append(([*prompt], {**options, "sampler": sampler}, stream))
        return stream


class _Model(EngineModel):
    """The model of agents, whose calls are remembered."""

    def __init__(self, engine: Engine):
        super().__init__(engine, sampler=mixed_schedules.SAMPLERS[0])
        self.recorded: Any = _Recorded(engine)
        self.engine = self.recorded


@agent
async def _asker(topic, seconds):
    first = await llm(f"{topic} + 1", max_new_tokens=12)
    several = await llm("And 2?", max_new_tokens=8, n=3, temperature=2.0)
    return first, several, await llm("Why?", max_new_tokens=16, timeout=seconds)


def _agents(engine: Engine, rng: random.Random) -> Seen:
    """Agents on one event loop, of which the last calls may come too late."""
    model, waits = _Model(engine), [rng.choice((_PATIENCE, 0.01)) for _ in range(2)]

    async def together() -> list[Any]:
        runs = [
            Runtime(model, seed=rng.randrange(2**31)).run(_asker, str(i), wait)
            for i, wait in enumerate(waits)
        ]
        return await asyncio.gather(*runs, return_exceptions=True)

    found = asyncio.run(together())
    for wait, each in zip(waits, found, strict=True):
        if isinstance(each, BaseException):
            assert isinstance(each, TimeoutError) and wait != _PATIENCE, f"{each!r} of an agent"
    late = sum(isinstance(each, TimeoutError) for each in found)
    calls = [
        (Call(tuple(tokens), -1, 0, options, 0 if late else None), tokens, stream.wait(_PATIENCE))
        for tokens, options, stream in model.recorded.streams
    ]
    return Seen(calls, faults=late)


DRILLS = [
    Drill(
        "soak",
        "texts are those of each alone; memory, rows, threads and handles come back to where "
        "they were, over all cases",
        "waves of sessions, trees, agents and calls on one engine, cut short at random",
        throw_waves,
    )
]
