"""Faults that one caller, the device or the program causes: all other calls go on or end with the
cause, and the engine serves the next one or is closed with the cause."""

import asyncio
import math
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxshare import FinishReason, KVCache, Sampler
from jaxshare.serving import Workers
from jaxshare.serving.engine import ClosedError, Engine, EngineError, decode_rows
from jaxshare.serving.kvcache import manager
from tests.serving.engine.mixed_schedules import make, model, start_engine
from tests.serving.engine.stepped import small_pieces
from tests.serving.engine.test_engine import LONG, MODEL, SIZE, WARM, Stepped, engine_of
from tests.serving.engine.test_random_mixed_schedules import visit

__all__ = ["small_pieces"]  # the fixture

PROMPT = [5, 6, 7, 8]
EXPECTED = {"max_new_tokens": 12, "seed": 3}


def small(**more) -> Engine:
    """An engine of a shape that other tests have too."""
    return engine_of(MODEL, kv_bytes=1024 * SIZE, **LONG, **more)


@pytest.fixture(scope="module")
def expected():
    with small() as engine:
        return engine.submit(PROMPT, WARM, **EXPECTED).wait(60).tokens


@pytest.fixture(scope="module")
def engine():
    with small() as engine:
        yield engine


class Growing(dict):
    """The requests of an engine. While they are looked through other threads submit more, four in all:
    two as a step is decided on, and two as it is run."""

    def __init__(self, requests, submit):
        super().__init__(requests)
        self._submit, self.threads = submit, []

    def __iter__(self):
        for request in super().__iter__():
            if len(self.threads) < 4:
                self.threads.append(thread := threading.Thread(target=self._submit))
                thread.start()
                thread.join(0.1)
            yield request


def test_a_request_that_comes_while_another_is_cancelled_is_served(expected):
    engine, late = Stepped(1024, **LONG), []
    kept, cancelled = (engine.submit(PROMPT, WARM, **EXPECTED) for _ in range(2))
    engine.step()
    growing = Growing(
        engine._requests, lambda: late.append(engine.submit(PROMPT, WARM, **EXPECTED))
    )
    engine._requests = engine._decisions.requests = growing
    cancelled.cancel()
    engine.step()
    for thread in growing.threads:
        thread.join()
    engine.settle()
    assert late and {stream.wait(0).tokens for stream in (kept, *late)} == {expected}
    assert cancelled.wait(0).finish_reason is FinishReason.CANCELLED


# What one caller gives.


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"agent_id": [1]}, TypeError, r"agent_id is \[1\]; it must be a text"),
        ({"agent_id": 7}, TypeError, "agent_id is 7; it must be a text"),
        ({"priority": None}, TypeError, "priority is None; it must be an integer"),
        ({"priority": 1.5}, TypeError, r"priority is 1\.5; it must be an integer"),
        ({"priority": 2**70}, ValueError, "priority is 1180591620717411303424; .* at most"),
        ({"max_new_tokens": "9"}, TypeError, "max_new_tokens is '9'; it must be an integer"),
        ({"max_new_tokens": True}, TypeError, "max_new_tokens is True; it must be an integer"),
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens is -1; it must be at least 1"),
        ({"max_new_tokens": 10**30}, ValueError, "the model's context holds"),
        ({"seed": 1.5}, TypeError, r"seed is 1\.5; it must be an integer"),
        ({"stop": 5}, TypeError, "stop is 5; it must be a text or a list of texts"),
        ({"stop": np.ones((2, 2))}, ValueError, "stop is array.*; give texts"),
        ({"prompt": np.array(0.0)}, ValueError, "a prompt is a text"),
        ({"prompt": range(10**30)}, ValueError, "the prompt has more than"),
        ({"stop": [""]}, ValueError, "give texts that are not empty"),
        ({"sampler": 0.7}, TypeError, "sampler is of type float; it must be a Sampler"),
        ({"logprobs": "no"}, ValueError, "logprobs is 'no'; it must be True, False, 'raw', "),
        ({"resample": ["stepwise"]}, ValueError, "resample is"),
        ({"sampler": Sampler(bias={31: 1.0})}, ValueError, "token 31, outside the vocabulary"),
        ({"prompt": 5}, TypeError, "a prompt is a text, messages .*, not int"),
        ({"prompt": {"role": "user", "content": "x"}}, TypeError, "a prompt is .*, not dict"),
        ({"prompt": b"text"}, TypeError, "a prompt is .*, not bytes"),
        ({"prompt": [[1], [2, 3]]}, ValueError, "a prompt is a text"),
        ({"prompt": [1.0, 2.0]}, ValueError, "a prompt is a text"),
        ({"prompt": [10**30]}, ValueError, "a prompt is a text"),
    ],
)
def test_a_wrong_argument_is_refused_and_stops_no_other_call(
    engine, expected, options, error, words
):
    other = engine.submit(PROMPT, WARM, **EXPECTED)
    options = {"prompt": PROMPT, **options}
    with pytest.raises(error, match=words):
        engine.submit(options.pop("prompt"), options.pop("sampler", WARM), **options)
    assert other.wait(60).tokens == expected


def test_numbers_of_other_types_and_extreme_ones_are_taken(engine, expected):
    calls = [
        engine.submit(
            np.asarray(PROMPT, np.uint8),
            Sampler(np.float32(0.7), np.int64(2**31), np.float64(1), np.float16(0)),
            max_new_tokens=np.int64(12),
            seed=np.uint64(3),
            priority=np.int8(1),
            logprobs=np.True_,
        ),
        engine.submit(
            PROMPT,
            Sampler(float(np.float32(0.7)), 10**30),
            seed=3 + 2**64,
            **{"max_new_tokens": 12},
        ),
        engine.submit(PROMPT, Sampler(0.7, top_p=1e-320), max_new_tokens=12),
    ]
    first, second, likeliest = (call.wait(60) for call in calls)
    assert first.tokens == second.tokens == expected
    greedy = engine.submit(PROMPT, max_new_tokens=12, sampler=Sampler()).wait(60)
    assert likeliest.tokens == greedy.tokens


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 40),
    st.sampled_from([2**31 - 1, 2**31, -(2**31) - 1, 2**63, 2**64, 10**40]),
    st.floats(),
    st.sampled_from([math.nan, math.inf, -0.0, 1e39, 5e-324, np.float32(0.5), np.int64(7)]),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(st.integers(-2, 33) | st.text(max_size=2), max_size=3),
    st.dictionaries(st.integers(-2, 33) | st.text(max_size=1), st.floats() | st.none(), max_size=2),
    st.sampled_from([object(), Sampler(), np.zeros(()), np.ones((2, 2)), set(), ...]),
)
OPTIONS = (
    "max_new_tokens", "stop", "seed", "agent_id", "priority", "resample", "logprobs", "sampler",
    "next_seed",
)  # fmt: skip
FIELDS = ("temperature", "top_k", "top_p", "min_p", "bias", "forbidden")


@pytest.mark.parametrize("examples", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_whatever_is_given_is_answered_or_refused_by_name(engine, expected, examples):
    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow])
    @given(
        st.one_of(st.just(PROMPT), ODD),
        st.dictionaries(st.sampled_from(OPTIONS), ODD, max_size=2),
        st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=2),
    )
    def attack(prompt, options, fields):
        try:
            options = {"max_new_tokens": 2, **options}
            if fields:
                options["sampler"] = Sampler(**fields)
            done = engine.submit(prompt, **options).wait(60)
        except (ValueError, TypeError) as refused:
            assert str(refused) and "\n" not in str(refused)
        else:
            assert all(0 <= token < MODEL.config.vocab_size for token in done.tokens)

    other = engine.submit(PROMPT, WARM, **EXPECTED)
    attack()
    again = engine.submit(PROMPT, WARM, **EXPECTED)
    assert other.wait(60).tokens == again.wait(60).tokens == expected


# Faults of the device and of the scheduler.


class Broken(Exception):
    pass


def fail(*_, **__):
    raise Broken("the device is gone")


def test_a_restart_frees_the_old_memory_first(expected, monkeypatch):
    free, made = [], []

    def pool(*arguments):
        old = made[-1].cache if made else None
        free.append(old is None or all(array.is_deleted() for array in (*old.keys, *old.values)))
        made.append(real(*arguments))
        return made[-1]

    real = manager.Pool
    monkeypatch.setattr(manager, "Pool", pool)
    with small() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(decode_rows, "decode", fail)
            with pytest.raises(Broken):
                engine.submit(PROMPT).wait(60)
        assert engine.submit(PROMPT, WARM, **EXPECTED).wait(60).tokens == expected
    assert free == [True, True]


def test_memory_that_does_not_fit_is_refused_before_it_is_taken(monkeypatch):
    for name in ("kv_bytes", "host_kv_bytes"):
        with pytest.raises(
            ValueError, match=rf"{name} takes \d+ bytes, but the .* free; give less"
        ):
            Engine(MODEL, **{"kv_bytes": 1024 * SIZE, name: SIZE * 2**30})

    def full(*_, **__):
        return jnp.zeros(2**50, jnp.int8)

    monkeypatch.setattr(KVCache, "empty", full)
    with pytest.raises(EngineError, match=r"no room for \d+ bytes of keys and values; lower kv_b"):
        small()


def test_where_the_restart_fails_every_call_ends_with_the_cause_and_the_engine_closes(monkeypatch):
    engine = small(passes=1)
    streams = [engine.submit(PROMPT, max_new_tokens=400) for _ in range(ROWS_AND_QUEUE)]
    next_chunk(streams[0])
    monkeypatch.setattr(manager, "Pool", fail)
    monkeypatch.setattr(decode_rows, "decode", fail)
    for stream in streams:
        with pytest.raises((Broken, ClosedError), match="the device is gone"):
            stream.wait(60)
    engine.drain(60)
    with pytest.raises(ClosedError, match=r"has failed .*Broken: the device is gone\); make ano"):
        engine.submit(PROMPT)
    with pytest.raises(ClosedError, match="the device is gone"):
        engine.lease([64])
    engine.shutdown()


@pytest.mark.parametrize("restarts", [True, False])
def test_no_turn_finds_the_arrays_that_a_failed_pass_has_consumed(monkeypatch, restarts):
    engine = small()
    lease, found = engine.lease([64]), []

    def turn():
        try:
            with lease.exclusive():
                found.append(lease.attach().keys[0].is_deleted())
        except ClosedError as error:
            found.append(str(error))

    def consume(*_, **__):
        waiting.start()
        while not engine._leases._lock._tickets:
            time.sleep(0.001)
        for array in engine._scheduler.kv.pool.cache.keys:
            array.delete()
        fail()

    waiting = threading.Thread(target=turn)
    with monkeypatch.context() as patch:
        patch.setattr(decode_rows, "decode", consume)
        if not restarts:
            patch.setattr(manager, "Pool", fail)
        with pytest.raises(Broken):
            engine.submit(PROMPT).wait(60)
        waiting.join(60)
        engine.drain(60)
    assert len(found) == 1 and "the session's memory is gone" in found[0]
    assert engine._closed is not restarts
    engine.shutdown()


ROWS_AND_QUEUE = 9


def next_chunk(stream):
    async def read():
        return await anext(stream)

    return asyncio.run(read())


@pytest.mark.parametrize("error", [Broken, SystemExit])
def test_an_error_between_two_steps_ends_all_calls_and_sessions(monkeypatch, error):
    """Where nothing is expected to fail: not only in the pass."""
    engine = start_engine(make(0), Engine)
    ended = []

    def session():
        try:
            told = visit(budget=400, history_tokens=800)
            with Workers(model(), engine=engine, **told.settings) as workers:
                running.set()
                workers.run()
        except BaseException as failure:
            ended.append(failure)

    running = threading.Event()
    thread = threading.Thread(target=session)
    thread.start()
    assert running.wait(20), ended
    stream = engine.submit(PROMPT, max_new_tokens=100)
    next_chunk(stream)

    def stop(*_):
        raise error("no more")

    monkeypatch.setattr(engine.metrics, "compiled", stop)
    with pytest.raises(ClosedError, match=rf"{error.__name__}: no more"):
        stream.wait(60)
    thread.join(60)
    assert not thread.is_alive() and isinstance(ended[0], ClosedError), ended
    engine.shutdown()


def test_a_call_for_which_the_system_has_no_thread_is_refused_and_leaves_nothing(monkeypatch):
    engine = small()

    def none(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        with pytest.raises(EngineError, match=r"thread cannot be started \(can't start new thread"):
            engine.submit(PROMPT)
    with engine:
        engine.submit(PROMPT, WARM, **EXPECTED).wait(60)
        engine.drain(60)


def test_an_event_loop_that_closes_while_it_is_told_fails_no_other_call(engine, expected):
    """Between the engine's look at it and the message."""

    class Closing(asyncio.SelectorEventLoop):
        looked_at = True

        def is_closed(self):
            return super().is_closed() and not self.looked_at  # it was open a moment ago

    loop = Closing()

    async def read(stream):
        await stream

    stream = engine.submit(PROMPT, WARM, **EXPECTED)
    other = engine.submit(PROMPT, WARM, **EXPECTED)
    task = loop.create_task(read(stream))
    loop.call_soon(loop.stop)
    loop.run_forever()
    task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]
    loop.close()
    assert other.wait(60).tokens == stream.wait(60).tokens == expected
    loop.looked_at = False


INTERRUPTED = """
import signal
from tests.serving.engine.test_engine import MODEL, engine_of

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
engine = engine_of(MODEL, passes=1, max_queue=5000)
streams = [engine.submit([5, 6, 7 + i % 20], max_new_tokens=450, seed=i) for i in range(4000)]
streams[0].wait()
print("ready", flush=True)
streams[-1].wait()
"""


@pytest.mark.slow
def test_ctrl_c_outside_of_the_engine_ends_the_program_at_once():
    root = Path(__file__).parents[3]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED], cwd=root, **pipes) as program:
        try:
            assert program.stdout is not None and program.stdout.readline() == "ready\n"
            program.send_signal(signal.SIGINT)
            begun = time.monotonic()
            _, errors = program.communicate(timeout=60)
        finally:
            program.kill()
    assert time.monotonic() - begun < 5 and program.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors
