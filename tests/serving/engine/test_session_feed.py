"""Texts of sessions on an engine are fed in its passes over prompts, a piece at a time.

The oracle is the session without an engine, which feeds its texts in passes of its own.
"""

import dataclasses
import functools
import itertools
import signal
import threading
import time

import pytest

from jaxshare.serving import Workers
from jaxshare.serving.engine.prefill import SHORT, PrefillPasses
from tests.helpers import one_layer as model
from tests.serving.engine.test_mixed_load import CALLS, at_once, calls_alone, narrow, run
from tests.serving.workers.test_session import CHAT, NAMES, WARM

LONG = " ".join(f"{n} + {n + 1} is {2 * n + 1}." for n in range(200))
"""A problem of several passes."""
DECODE = ("decode",)
SAID = "Think again. " * 30


def start(problem: str, engine=None, **more) -> Workers:
    settings = {"names": NAMES[:2], "budget": 24, "sampler": WARM, "format": CHAT, "seed": 3}
    return Workers(model(), problem, engine=engine, **{**settings, **more})


@functools.cache
def alone(problem: str) -> tuple:
    with start(problem) as session:
        return run(session)


@pytest.fixture
def passes(monkeypatch):
    """What has run: for each pass over prompts the sessions of its texts, None for those of requests;
    and `DECODE` for each dispatch of the decode loop."""
    log, feed = [], PrefillPasses.run

    def logged(self, pieces, adapters=None):
        of_session = [getattr(piece.node, "feed", None) for piece in pieces]
        log.append([each and each.owner.number for each in of_session])
        return feed(self, pieces, adapters)

    monkeypatch.setattr(PrefillPasses, "run", logged)
    return log


def logging_decodes(engine, log: list) -> None:
    dispatch = engine._scheduler._dispatch
    engine._scheduler._dispatch = lambda *given, **more: (
        log.append(DECODE),
        dispatch(*given, **more),
    )


def test_streams_go_on_while_the_problem_of_a_session_is_read(passes):
    text, seed = CALLS[0]
    with narrow() as engine:
        logging_decodes(engine, passes)
        stops = tuple(model().generation.stop_tokens)
        endless = dataclasses.replace(WARM, forbidden=stops)
        held = _held_until(engine, sessions=1, requests=1)
        stream, session = at_once(
            lambda: engine.submit(text, endless, seed=seed, max_new_tokens=400),
            lambda: start(LONG, engine),
        )
        assert held.is_set()
        with session:
            begun = passes.index(DECODE)  # the pass before it is long, as no stream waits for it
            feeds = [i for i, each in enumerate(passes) if 0 in each and i > begun]
            assert run(session) == alone(LONG)
        stream.cancel()
    assert len(feeds) > 3
    assert all(later - earlier > 1 for earlier, later in itertools.pairwise(feeds))


def test_requests_and_sessions_take_turns_to_be_first(passes):
    prompts = [f"{n} {LONG}" for n in range(3)]
    with narrow() as engine:
        held = _held_until(engine, sessions=1, requests=3)
        session, *_ = at_once(
            lambda: start(LONG, engine),
            *(
                lambda text=text: engine.submit(text, WARM, seed=1, max_new_tokens=4).wait()
                for text in prompts
            ),
        )
        assert held.is_set()
        both = [each for each in passes if each != DECODE]
        while_read = both[: 1 + max(i for i, each in enumerate(both) if 0 in each)]
        first = [each[0] for each in while_read]
        assert all(one != other for one, other in itertools.pairwise(first))
        assert len(first) > 4
        with session:
            assert run(session) == alone(LONG)


def test_texts_of_several_sessions_are_fed_in_one_pass(passes):
    problems = [f"What is {n} + 5?" for n in range(4)]
    with narrow() as engine:
        held = _held_until(engine, sessions=4)
        sessions = at_once(*(functools.partial(start, each, engine) for each in problems))
        assert held.is_set()
        assert max(len({*each}) for each in passes) > 1 and len(passes) < len(sessions)
        for session, problem in zip(sessions, problems, strict=True):
            with session:
                assert run(session) == alone(problem)


def test_what_is_said_is_fed_after_what_the_block_has():
    found = []
    with narrow() as engine:
        for host in (engine, None):
            with start("What is 4 + 5?", host) as session:
                for _ in session.stream(8):
                    pass
                session.say(SAID)
                lengths = session.block_lengths
                found.append((run(session), lengths))
    assert found[0] == found[1]


def test_an_interrupt_ends_the_reading_of_a_long_problem(passes, monkeypatch):
    run_passes = PrefillPasses._run

    def slow(self, *given):
        time.sleep(0.1)
        return run_passes(self, *given)

    def interrupt(*_):
        raise KeyboardInterrupt

    with narrow() as engine:
        engine.warm_up()
        base = engine._scheduler.kv.pool.free
        passes.clear()
        monkeypatch.setattr(PrefillPasses, "_run", slow)
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.25)
            with pytest.raises(KeyboardInterrupt):
                start(LONG, engine)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        monkeypatch.setattr(PrefillPasses, "_run", run_passes)
        needed = len(model().tokenizer.encode(LONG)) // SHORT.size
        assert 0 < len(passes) < needed
        with start("What is 4 + 5?", engine) as session:
            assert run(session) == alone("What is 4 + 5?")
        with engine._leases.exclusive():
            assert engine._scheduler.kv.leased_tokens == 0
            engine._scheduler.kv.drop_unused()
            assert engine._scheduler.kv.pool.free == base


def test_calls_are_as_alone_beside_sessions_whose_problems_are_read():
    with narrow() as engine:
        streams = [engine.submit(text, WARM, seed=seed, max_new_tokens=30) for text, seed in CALLS]
        with start(LONG, engine) as session:
            assert run(session) == alone(LONG)
        assert [stream.wait().tokens for stream in streams] == calls_alone()


def _held_until(engine, *, sessions: int, requests: int = 0) -> threading.Event:
    """Lets no step begin until so many sessions and requests are submitted; then the event is set."""
    ready, submitted = threading.Event(), engine._sessions
    linger, changed = submitted.linger, engine._changed

    def waiting(seconds: float) -> None:
        linger(seconds)
        if not ready.is_set():
            assert changed.wait_for(
                lambda: len(submitted.submitted) >= sessions and len(engine._submitted) >= requests,
                60,
            )
            ready.set()

    submitted.linger = waiting
    return ready
