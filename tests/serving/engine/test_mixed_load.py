"""Sessions of workers, calls and branches of one prompt in the same passes of an engine.

The oracle is each of them alone: a session and a call in an engine where nothing else runs, and one
of the sessions without an engine.
"""

import dataclasses
import functools
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxshare import FinishReason
from jaxshare.serving import Branch, Workers, generate
from jaxshare.serving.branches.selection import best_of_n
from jaxshare.serving.engine import ClosedError, Engine
from jaxshare.serving.inputs import token_bytes
from tests.helpers import one_layer as model
from tests.paths import ROOT
from tests.serving.branches.test_branches import problem
from tests.serving.workers.test_session import CHAT, NAMES, WARM, written

BUDGET = 40
KINDS = [
    {"names": NAMES[:2], "max_workers": 3},
    {"names": NAMES[:1], "layout": "contiguous", "ask_every": 5},
    {"names": NAMES[:3], "layout": "interleaved", "together": False, "passes_at_once": 3},
    {"names": NAMES[:2], "stop_on": "never", "ask_every": 3, "passes_at_once": 16},
    {"names": NAMES[:2], "step_tokens": 16, "sampler": dataclasses.replace(WARM, top_k=9)},
]
CALLS = [(problem(seed).prompt(), seed) for seed in range(5)]


def start(kind: int, engine: Engine | None = None, **more) -> Workers:
    settings = {"budget": BUDGET, "sampler": WARM, "format": CHAT, "seed": kind, **KINDS[kind]}
    return Workers(model(), problem(kind).prompt(), engine=engine, **{**settings, **more})


def made(tokens: int = 16384, **more) -> Engine:
    settings = {"max_rows": 16, "passes": 8, **more}
    return Engine(model(), kv_bytes=tokens * token_bytes(model()), **settings)


def narrow(**more) -> Engine:
    """An engine of four rows, of one shape, so that tests share programs."""
    return made(**{"max_rows": 4, "logits_cache": 2**20, **more})


@functools.cache
def alone(kind: int) -> tuple:
    with narrow() as engine, start(kind, engine) as session:
        return run(session)


@functools.cache
def calls_alone() -> list[tuple[int, ...]]:
    with narrow() as engine:
        return [
            engine.submit(text, WARM, seed=seed, max_new_tokens=30).wait().tokens
            for text, seed in CALLS
        ]


def at_once(*works: Callable[[], object]) -> list:
    """Runs functions in threads of their own; their results, or the first error."""
    found: list = [None] * len(works)

    def run(number: int) -> None:
        try:
            found[number] = works[number]()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


def run(session: Workers) -> tuple:
    result = session.run()
    return written(session), result.finish_reason, session.passes


@pytest.mark.slow
def test_sessions_and_calls_share_passes_and_each_is_as_alone():
    with made() as engine:
        sessions = [start(kind, engine) for kind in range(len(KINDS))]
        base = engine._scheduler.kv.pool.free
        streams = [engine.submit(text, WARM, seed=seed, max_new_tokens=30) for text, seed in CALLS]
        found = at_once(*(functools.partial(run, session) for session in sessions))
        passes = engine.metrics.passes
        assert found == [alone(kind) for kind in range(len(KINDS))]
        assert [stream.wait().tokens for stream in streams] == calls_alone()
        # The rows of several sessions were in the same passes.
        assert passes < sum(session.passes for session in sessions)
        own = start(0)
        assert run(own) == alone(0) and own.finish() == sessions[0].finish()
        for session in sessions:
            session.close()
        engine.drain()
        with engine._leases.exclusive():
            assert engine._scheduler.kv.leased_tokens == 0
            engine._scheduler.kv.drop_unused()
            assert engine._scheduler.kv.pool.free == engine._scheduler.kv.pool.tokens >= base


@pytest.mark.slow
def test_rows_of_a_session_may_list_more_blocks_than_those_of_calls():
    more = {"names": tuple("ABCDEFGHI"), "max_workers": 9, "budget": 16, "layout": "interleaved"}
    with made() as engine, start(0, engine, **more) as session, start(0, **more) as own:
        streams = [engine.submit(text, WARM, seed=seed, max_new_tokens=30) for text, seed in CALLS]
        assert run(session) == run(own)
        assert [stream.wait().tokens for stream in streams] == calls_alone()


def test_sessions_join_and_leave_a_running_engine():
    with narrow() as engine:
        stream = engine.submit(CALLS[0][0], WARM, seed=0, max_new_tokens=30)
        first = start(0, engine)
        events = first.stream()
        next(events)
        # Three rows of four are needed, and one has the call: this one has to wait for its turn.
        second = start(2, engine)
        other = threading.Thread(target=second.run)
        other.start()
        for _ in events:
            pass
        other.join(120)
        assert (written(first), written(second)) == (alone(0)[0], alone(2)[0])
        assert stream.wait().tokens == calls_alone()[0]
        with first, second:
            pass
        third = start(0, engine)
        assert run(third) == alone(0)


def test_sessions_that_wait_are_told_of_the_end_of_the_engine():
    with (
        pytest.raises(ValueError, match=r"room for 3 workers, but the engine runs 2 rows"),
        made(max_rows=2) as engine,
    ):
        start(0, engine)
    engine = narrow()
    session = start(0, engine)
    next(session.stream())
    engine.shutdown()
    with pytest.raises(ClosedError):
        session.run()
    assert session.result().finish_reason is FinishReason.PAUSED


def test_a_call_is_not_starved_by_sessions_nor_a_session_by_calls():
    """Four rows are the session's or the calls'; both come to an end."""
    with narrow() as engine:
        session = start(2, engine)
        streams = [engine.submit(text, WARM, seed=seed, max_new_tokens=30) for text, seed in CALLS]
        assert run(session) == alone(2)
        assert [stream.wait().tokens for stream in streams] == calls_alone()


TREE = [
    Branch(CALLS[0][0], [Branch(" Then", n=2), Branch(" Now the next one.")], n=1),
    CALLS[1][0],
]


@functools.cache
def completions_alone() -> list:
    return generate(model(), TREE, n=3, max_new_tokens=20, sampler=WARM, seed=5).completions


@pytest.mark.slow
def test_completions_of_a_tree_on_an_engine_are_those_of_a_run_of_their_own():
    with narrow(max_queue=2) as engine:
        session = start(0, engine)
        options = {"n": 3, "max_new_tokens": 20, "sampler": WARM, "seed": 5, "engine": engine}
        found, worked = at_once(
            functools.partial(generate, model(), TREE, **options), functools.partial(run, session)
        )
        assert worked == alone(0)
        expected = completions_alone()
        assert len(found.completions) == len(expected) == 9
        for ours, theirs in zip(found.completions, expected, strict=True):
            for field in ("text", "tokens", "finish_reason", "prompt", "index", "prompt_tokens"):
                assert getattr(ours, field) == getattr(theirs, field)
            assert ours.logprobs is not None and len(ours.logprobs) == len(ours.tokens)
            np.testing.assert_allclose(ours.logprob, theirs.logprob, atol=2e-4)
        assert best_of_n(found.completions[:2]).tokens == best_of_n(expected[:2]).tokens
        assert engine.submit(CALLS[0][0], WARM, max_new_tokens=2).wait().logprobs is None


def test_what_branches_on_an_engine_cannot_have_is_refused():
    with narrow() as engine:
        with pytest.raises(ValueError, match="logprobs cannot be had with resample"):
            engine.submit(CALLS[0][0], logprobs=True, resample="stepwise")
        for option, value in (("share", True), ("max_rows", 3), ("alone", True), ("warm_up", 1)):
            with pytest.raises(ValueError, match=f"{option} is not for a call with an engine"):
                generate(model(), TREE, engine=engine, **{option: value})
        other = dataclasses.replace(model(), params={**model().params})
        with pytest.raises(ValueError, match="another model"):
            generate(other, TREE, engine=engine)


KILLED = """
    import sys, threading, time
    from tests.serving.engine.test_mixed_load import CALLS, LONG, WARM, made, start

    def wait(event):
        time.sleep(0.02)

    with made() as engine:
        for text, seed in CALLS:
            engine.submit(text, WARM, seed=seed, max_new_tokens=200)
        for kind in map(int, sys.argv[2:]):
            options = {"on_event": wait, "save_to": f"{sys.argv[1]}/{kind}", "save_every": 4}
            session = start(kind, engine, **LONG)
            threading.Thread(target=session.run, kwargs=options).start()
        time.sleep(600)
"""


LONG = {"budget": 120, "stop_on": "never"}


def saves(folder: Path) -> int:
    """The number of the newest complete save in a folder."""
    return max((int(path.name) for path in folder.glob("*") if path.name.isdigit()), default=0)


@pytest.mark.slow
def test_sessions_that_were_killed_on_an_engine_go_on_beside_others_as_unbroken_ones(tmp_path):
    """The process ends by SIGKILL in the midst of their passes and saves."""
    kinds = (0, 1)
    folders = [tmp_path / str(kind) for kind in kinds]
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), *map(str, kinds)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 500
    try:
        while not all(saves(folder) > 1 for folder in folders):
            assert process.poll() is None and time.monotonic() < until, "it saves nothing"
            time.sleep(0.01)
    finally:
        process.kill()
        _, said = process.communicate()
    assert process.returncode == -signal.SIGKILL, said
    with made() as engine:
        stream = engine.submit(CALLS[0][0], WARM, seed=0, max_new_tokens=30)
        sessions = [
            Workers.restore(engine.model, folder, engine=engine) for folder in reversed(folders)
        ]
        assert all(0 < session.passes < 120 for session in sessions)
        found = at_once(*(functools.partial(run, session) for session in sessions))
        assert stream.wait().tokens == calls_alone()[0]
        for session in sessions:
            session.close()
        for kind, each in zip(reversed(kinds), found, strict=True):
            with start(kind, engine, **LONG) as unbroken:
                assert each == run(unbroken)
