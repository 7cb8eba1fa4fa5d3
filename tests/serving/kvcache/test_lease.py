"""Sessions of workers in an engine's memory, against the same sessions and requests alone."""

import dataclasses
import gc
import threading
import time

import jax
import numpy as np
import pytest

from jaxshare import FinishReason, Sampler
from jaxshare.serving import Workers
from jaxshare.serving.engine import ClosedError, Completion, Engine, EngineError, TooLongError
from jaxshare.serving.inputs import token_bytes
from jaxshare.serving.kvcache.lease import LeaseTable
from jaxshare.serving.kvcache.manager import KVManager
from tests.serving.branches.test_branches import embedded as model
from tests.serving.branches.test_branches import problem
from tests.serving.workers.test_session import BUDGET, CHAT, WARM, run, start, written

SETTINGS = {
    "names": ("Alice", "Bob"),
    "budget": BUDGET,
    "sampler": WARM,
    "max_workers": 3,
    "format": CHAT,
}
CALLS = [(problem(seed).prompt(), seed) for seed in range(4)]
ROOM = 2048
"""An engine's tokens: for a session and two requests, so that a third one waits."""


def made(tokens: int = ROOM, **more) -> Engine:
    return Engine(
        model(), kv_bytes=tokens * token_bytes(model()), **{"max_rows": 8, "passes": 8, **more}
    )


def session(engine: Engine, **more) -> Workers:
    return Workers(engine.model, problem().prompt(), engine=engine, **{**SETTINGS, **more})


def ask(engine: Engine, count: int = 60) -> list:
    return [engine.submit(text, WARM, seed=seed, max_new_tokens=count) for text, seed in CALLS]


@pytest.fixture(scope="module")
def alone() -> dict:
    """The session's texts without an engine, and the requests' outputs without the session."""
    whole = start()
    found = {"session": run(whole), "answer": whole.finish()}
    with made() as engine:
        found["calls"] = [stream.wait().tokens for stream in ask(engine)]
    return found


@pytest.mark.slow
def test_sessions_and_calls_run_beside_each_other_and_do_not_change_each_other(alone):
    with made() as engine:
        here = session(engine)
        streams, seen = ask(engine), 0
        for _ in here.stream():
            seen = seen or sum(stream._state.output is None for stream in streams)
        assert seen  # calls were under way while workers wrote
        assert written(here) == alone["session"]
        assert here.finish() == alone["answer"]
        assert [stream.wait().tokens for stream in streams] == alone["calls"]


@pytest.mark.slow
def test_blocks_may_be_moved_between_passes(alone):
    with made() as engine:
        # its tokens are before the session's blocks
        stream = engine.submit(CALLS[0][0], WARM, seed=0, max_new_tokens=20)
        stream.wait()
        engine.drain()
        here, memory, moved = session(engine), engine._scheduler.kv, 0
        offset = here._session.lease._extent.offset
        for n, _ in enumerate(here.stream()):
            if n == 2:
                with engine._leases.exclusive():
                    memory.tree.evict(memory.pool.tokens, False)
                    moved += memory._compact(memory.pool.free)
        assert moved and here._session.lease._extent.offset < offset
        assert written(here) == alone["session"] and here.finish() == alone["answer"]


@pytest.mark.slow
def test_a_session_can_be_looked_at_and_spoken_to():
    with made() as engine:
        plain, here = start(), session(engine)
        for each in (plain, here):
            each.run(finish_at=[20])  # answers at 20, and goes on
        assert written(plain) == written(here)
        here.close()
        plain, here = start(), session(engine)
        for each in (plain, here):
            for _ in each.stream(20):
                pass
            each.say("Question 3: 3+4?")
            each.pause("Bob")
            each.add("Carol")
        ask(engine, 5)  # others write to the arena meanwhile
        engine.drain()
        for each in (plain, here):
            each.resume("Bob")
            each.remove("Alice")
        assert run(plain) == run(here)
        copy = here.cache
        np.testing.assert_array_equal(copy.lengths, plain.cache.lengths)
        for b, (at, there, length) in enumerate(
            zip(copy.offsets, plain.cache.offsets, copy.lengths, strict=True)
        ):
            for ours, theirs in zip(copy.keys, plain.cache.keys, strict=True):
                np.testing.assert_allclose(
                    ours[:, int(at) : int(at) + int(length)],
                    theirs[:, int(there) : int(there) + int(length)],
                    atol=2e-5,
                    err_msg=str(b),
                )


def test_memory_goes_back_when_a_session_is_closed_or_forgotten():
    with made() as engine:
        memory = engine._scheduler.kv

        def lent() -> int:
            with engine._leases.exclusive():
                return sum(extent.capacity for extent in memory.leased)

        with session(engine) as here:
            first = lent()
            assert first and memory.pool.free == memory.pool.tokens - first
        assert lent() == 0 and memory.pool.free == memory.pool.tokens
        # its result is still there
        assert here.passes == 0 and here.result().finish_reason is FinishReason.PAUSED
        with pytest.raises(ClosedError, match="memory is gone"):
            next(here.stream())
        other = session(engine)
        next(other.stream())
        assert lent() == first
        del other
        gc.collect()
        assert lent() == 0


def test_a_session_waits_for_calls_that_are_under_way_and_later_ones_wait_for_it(alone):
    with made() as engine:
        streams = [engine.submit(CALLS[0][0], WARM, seed=n, max_new_tokens=100) for n in range(4)]
        while len(engine._scheduler.live) < 4:
            time.sleep(0.001)
        found = []
        waiting = threading.Thread(target=lambda: found.append(session(engine)))
        waiting.start()
        while not engine._leases.num_waiting:
            time.sleep(0.001)
        later = engine.submit(CALLS[1][0], WARM, seed=1, max_new_tokens=60)
        waiting.join()
        assert all(stream.wait() for stream in streams)
        assert run(found[0]) == alone["session"]
        assert later.wait().tokens == alone["calls"][1]


def test_a_session_that_cannot_be_is_refused_at_once():
    with (
        made(1024) as engine,
        pytest.raises(
            TooLongError,
            match=r"blocks take \d+ tokens, \d+ bytes, but the engine has room for 1024",
        ),
    ):
        session(engine)
    with made() as engine:
        first = session(engine)
        with pytest.raises(EngineError, match="other sessions have"):
            session(engine)
        first.close()
        session(engine)
    with pytest.raises(ClosedError, match="shut down"):
        session(engine)
    with made() as engine:
        here = session(engine)
    with pytest.raises(ClosedError, match="shut down"):
        here.finish()
    other = made()
    with other, pytest.raises(ValueError, match="another model"):
        Workers(
            dataclasses.replace(model(), params=jax.tree.map(lambda x: x, model().params)),
            "1+1?",
            engine=other,
            **SETTINGS,
        )


def test_a_failure_takes_the_memory_of_sessions_and_says_so(monkeypatch):
    with made() as engine:
        here = session(engine)
        next(here.stream())
        with monkeypatch.context() as patch:
            patch.setattr("jaxshare.serving.engine.decode_rows.decode", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.submit(CALLS[0][0], WARM, seed=0, max_new_tokens=5).wait()
        with pytest.raises(ClosedError, match="has failed"):
            here.run()
        assert isinstance(
            engine.submit(CALLS[0][0], Sampler(0.0), max_new_tokens=2).wait(), Completion
        )
        run(session(engine))


def test_a_request_is_taken_at_once_while_released_memory_is_not_given_back_yet():
    with made() as engine:
        lease = engine.lease([64])
        with engine._leases.exclusive():
            lease.close()
            thread = threading.Thread(target=ask, args=(engine, 2))
            thread.start()
            thread.join(10)
            assert not thread.is_alive()
        engine.drain(100)
        assert engine._leases.available == ROOM


def test_turns_go_to_who_has_waited_longest():
    class Nothing(KVManager):
        def __init__(self):
            pass

    leases, order, begun = LeaseTable(Nothing()), [], []

    def wait(n: int) -> None:
        begun.append(n)
        with leases.exclusive():
            order.append(n)

    with leases.exclusive():
        threads = []
        for n in range(4):
            threads.append(threading.Thread(target=wait, args=(n,)))
            threads[-1].start()
            while len(leases._lock._tickets) <= n:
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3]
    with pytest.raises(KeyError), leases.exclusive():
        raise KeyError
    with leases.exclusive():  # and is free again after an error
        pass

    def interrupted(*_):
        raise KeyboardInterrupt

    with leases.exclusive(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Condition, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt), leases.exclusive():
            pass
    with leases.exclusive():
        pass
