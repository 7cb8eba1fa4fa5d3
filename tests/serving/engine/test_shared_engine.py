"""Engines that several processes run together.

Most tests have both engines in this process, each with memory of its own, which agree through a
dictionary as processes do through their store. The last ones have two processes on one mesh.
"""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jaxshare import FinishReason, Sampler
from jaxshare.serving import Workers
from jaxshare.serving.engine import Engine, EngineError, TooLongError, agreement
from jaxshare.serving.engine.agreement import FollowerLock, LeaderLock
from jaxshare.serving.inputs import token_bytes
from tests.helpers import one_layer as model
from tests.processes import free_port
from tests.serving.engine.shared_engine import log_decisions
from tests.serving.engine.test_agreement import DictStore

WARM = Sampler(temperature=1.2, top_p=0.95)
PROMPTS = [[*range(5, 40 + i)] for i in range(4)]
TOKENS = 640


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Short waits, for errors that come after them."""
    monkeypatch.setattr(agreement, "_POLL_SECONDS", 0.05)


def made(tokens: int = TOKENS, **more: Any) -> Engine:
    settings = {"kv_bytes": tokens * token_bytes(model()), "max_rows": 2, "passes": 4, **more}
    return Engine(model(), **settings)


@contextlib.contextmanager
def both(*more: dict[str, Any]) -> Iterator[list[Engine]]:
    """An engine that decides, and one that follows; each with these settings besides."""
    store, engines = DictStore(), list[Engine | None]([None, None])
    locks = [LeaderLock(store, "e", (1,)), FollowerLock(store, "e", 1, 0)]
    given = threading.local()
    settings = more or ({}, {})
    model()  # once, before two threads ask for it

    def make(process: int) -> Engine:
        given.lock = locks[process]
        return made(**settings[process])

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setattr(agreement, "device_lock", lambda mesh: given.lock)
        making = [threads.submit(make, process) for process in range(2)]
        engines = [each.result(60) for each in making]
    with engines[0], engines[1]:
        yield engines


def run_both(engines: list[Engine], program: Callable[[Engine, int], Any]) -> list[Any]:
    """What a program comes to in each process."""
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(program, engine, i) for i, engine in enumerate(engines)]
        return [each.result(200) for each in found]


def ask(engine: Engine, seed: int | None = 1, prompt: list[int] = PROMPTS[0], **more: Any):
    return engine.submit(prompt, WARM, **{"max_new_tokens": 8, "seed": seed, **more})


def test_requests_in_any_order_of_threads_have_the_outputs_of_one_process():
    order = [(0, 1, 2, 3), (3, 1, 0, 2)]

    def program(engine: Engine, process: int) -> list:
        streams = {}
        for i in order[process]:
            time.sleep(0.05 * process)
            streams[i] = ask(engine, i, PROMPTS[i], priority=i % 2, agent_id=f"a{i}")
        return [streams[i].wait(100).tokens for i in range(4)]

    with made() as engine:
        alone = program(engine, 0)
    with both() as engines:
        logs = [log_decisions(engine._scheduler) for engine in engines]
        assert run_both(engines, program) == [alone, alone]
    assert logs[0] == logs[1] and len(logs[0]) > 2


def test_seeds_that_are_derived_are_those_of_the_first_process():
    def program(engine: Engine, process: int) -> list:
        same = [ask(engine, None, max_new_tokens=6) for _ in range(3)]
        return [stream.wait(100).tokens for stream in same]

    with both({"seed": 4}, {"seed": 4}) as engines:
        one, other = run_both(engines, program)
        assert one == other and len({tuple(tokens) for tokens in one}) > 1


def test_the_first_process_alone_decides_what_is_cancelled():
    def program(engine: Engine, process: int) -> Any:
        stream = ask(engine, max_new_tokens=200)
        if process:
            stream.cancel()  # at once, which does not count
        else:
            while not stream._state.chunks:
                time.sleep(0.01)
            stream.cancel()
        return stream.wait(100)

    with both() as engines:
        one, other = run_both(engines, program)
    assert one.finish_reason is other.finish_reason is FinishReason.CANCELLED
    assert one.tokens == other.tokens and 0 < len(one.tokens) < 200


def test_a_process_that_is_late_is_waited_for():
    def program(engine: Engine, process: int) -> Any:
        time.sleep(1.0 * process)
        return ask(engine).wait(100).tokens

    with both() as engines:
        one, other = run_both(engines, program)
    assert one == other


def failure(engine: Engine, stream: Any) -> str:
    with pytest.raises(EngineError) as found:
        stream.wait(100)
    with pytest.raises(EngineError, match="shut down"):  # it takes nothing more
        ask(engine)
    return str(found.value)


@pytest.mark.parametrize("other", [{"prompt": PROMPTS[1]}, {"seed": 2}, {"max_new_tokens": 7}])
def test_another_request_in_another_process_is_an_error_in_both(other, monkeypatch):
    monkeypatch.setattr(agreement, "LATE_SECONDS", 0.5)

    def program(engine: Engine, process: int) -> str:
        return failure(engine, ask(engine, **(other if process else {})))

    with both() as engines:
        first, second = run_both(engines, program)
    missing = "has not submitted request 0 (a prompt of 35 tokens, 8 new ones, seed 1, digest "
    assert missing in first and first.startswith("process 1 cannot go on: it ")
    assert missing in second and ", but request 0 (a prompt of " in second


def test_a_process_that_submits_nothing_is_named(monkeypatch):
    monkeypatch.setattr(agreement, "ANSWER_SECONDS", 0.3)

    def program(engine: Engine, process: int) -> str:
        return "" if process else failure(engine, ask(engine))

    with both() as engines:
        first, _ = run_both(engines, program)
    assert "process 1 has not come to the turn 'step' with request 0 (a prompt of 35" in first


def test_other_settings_in_another_process_are_an_error():
    with (
        pytest.raises(EngineError, match="passes 8, and that of the process that decides 4"),
        both({}, {"passes": 8}),
    ):
        pass


def test_a_process_in_another_state_is_told(monkeypatch):
    def program(engine: Engine, process: int) -> str:
        if process:
            engine._scheduler.kv.pool.take(16)
        return failure(engine, ask(engine))

    with both() as engines:
        found = run_both(engines, program)
    assert all("the same versions and the same kind of device in every process" in f for f in found)


def test_a_failed_step_ends_the_engine_in_both(monkeypatch):
    def fail(admit: bool = True, only_begun: bool = False) -> bool:
        raise RuntimeError("no memory")

    def program(engine: Engine, process: int) -> str:
        stream = ask(engine, max_new_tokens=200)
        with pytest.raises(RuntimeError) as found:
            stream.wait(100)
        return str(found.value)

    with both() as engines:
        monkeypatch.setattr(engines[1]._scheduler, "step", fail)
        assert run_both(engines, program) == ["process 1 cannot go on: no memory", "no memory"]


def test_a_full_queue_waits_and_a_request_too_long_beside_sessions_is_refused_in_both():
    def program(engine: Engine, process: int) -> Any:
        streams = [ask(engine, seed) for seed in range(5)]
        found = [stream.wait(100).tokens for stream in streams]
        lease = engine.lease([400])
        with pytest.raises(EngineError, match="other sessions have 512 of the engine's 640"):
            engine.lease([300])
        long = ask(engine, max_new_tokens=300)
        with pytest.raises(TooLongError, match="sessions have all but 128"):
            long.wait(100)
        lease.close()
        return found, ask(engine, max_new_tokens=300).wait(100).tokens

    with both({"max_queue": 1}, {"max_queue": 1}) as engines:
        one, other = run_both(engines, program)
    assert one == other


@pytest.mark.slow
def test_sessions_of_several_threads_write_what_they_write_alone():
    problems = ("1. 17 + 25", "1. 6 * 7")

    def session(engine: Engine | None, number: int) -> Any:
        with Workers(
            model(),
            problems[number],
            engine=engine,
            budget=16,
            sampler=WARM,
            seed=number,
            history_tokens=64,
            step_tokens=16,
        ) as here:
            here.run()
            return [[step.worker, step.text] for step in here.steps]

    def program(engine: Engine, process: int) -> list:
        with ThreadPoolExecutor(2) as threads:
            found = {}
            for number in (1, 0) if process else (0, 1):
                found[number] = threads.submit(session, engine, number)
                time.sleep(0.2)
            stream = ask(engine)
            return [found[0].result(), found[1].result(), stream.wait(100).tokens]

    with made() as engine:
        tokens = ask(engine).wait(100).tokens
    alone = [session(None, 0), session(None, 1), tokens]
    settings = {"tokens": 2048, "max_rows": 6}
    with both(settings, settings) as engines:
        logs = [log_decisions(engine._scheduler) for engine in engines]
        assert run_both(engines, program) == [alone, alone]
    assert logs[0] == logs[1]


def test_shutting_down_cancels_in_both():
    def program(engine: Engine, process: int) -> Any:
        stream = ask(engine, max_new_tokens=300)
        while not stream._state.chunks:
            time.sleep(0.01)
        time.sleep(0.2 * process)
        engine.shutdown()
        return stream.wait(1)

    with both() as engines:
        one, other = run_both(engines, program)
    assert one.finish_reason is other.finish_reason is FinishReason.CANCELLED
    assert one.tokens == other.tokens


# Two processes.

ROOT = Path(__file__).parents[3]


def start(kind: str, *together: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.serving.engine.shared_engine", kind, *together],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def results(processes: list[subprocess.Popen]) -> list[Any]:
    said = [process.communicate(timeout=900) for process in processes]
    assert not any(process.returncode for process in processes), said
    # Gloo, which connects processes on CPUs, writes to stdout by itself.
    lines = [[line for line in out.splitlines() if line.startswith("{")] for out, _ in said]
    return [json.loads(found) for (found,) in lines]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["turns", "threads"])
def test_two_processes_decide_and_write_what_one_does(kind):
    """In turns, with speeds that are given, the decisions are those of one process, too."""
    (alone,) = results([start(kind)])
    address = f"127.0.0.1:{free_port()}"
    first, second = results([start(kind, address, str(i)) for i in range(2)])
    assert first["log"] == second["log"] and first["texts"] == second["texts"]
    if kind == "turns":
        assert first == alone
        steps = [*itertools.chain(*first["log"])]
        happened = {name for step in steps for name in step}
        assert {"admitted", "preempt", "evict_node", "dispatch", "finish"} <= happened
        ends = [reason for step in steps for _, reason in step.get("finish", ())]
        assert "cancelled" in ends
        assert any(run["sessions"] and run["rows"] for s in steps for run in s.get("dispatch", ()))
        return
    cancelled = [found["texts"].pop("cancelled")[0] for found in (first, alone)]
    shorter, longer = sorted(cancelled, key=len)
    assert first["texts"] == alone["texts"] and longer[: len(shorter)] == shorter


def test_what_several_processes_cannot_have_is_refused(monkeypatch):
    monkeypatch.setattr("jaxshare.serving.engine.validation.is_shared", lambda model: True)
    with pytest.raises(ValueError, match="host_kv_bytes is 4096, but the model is on devices of"):
        made(host_kv_bytes=4096)
    with made() as engine:
        for act in (engine.save, engine.restore):
            with pytest.raises(ValueError, match="the checkpoint in saves would hold keys and"):
                act("saves")
