"""Runs side by side on one engine: as many as there is room for, and the results of one by one."""

import dataclasses
import threading
import time
import types

import numpy as np
import pytest

from jaxshare import Sampler
from jaxshare.arena import extents
from jaxshare.models import EMBEDDED, load
from jaxshare.serving import Workers
from jaxshare.serving.errors import EngineError, NotANumberError, TooLongError
from jaxshare.serving.evaluation import Run, execute, execution, load_task, run_specs
from jaxshare.serving.workers.layouts import worker_names
from tests.helpers import mostly_slow

FULL = EngineError(
    "the session's blocks take 9 tokens, but other sessions have 9 of the engine's 9"
)


def specs_of(count: int, **more):
    settings = dict(
        method="workers",
        workers=[2],
        budgets=[8],
        seeds=1,
        seed=0,
        answer_tokens=4,
        sampler=Sampler(),
        more={},
    )
    return run_specs(load_task("sums", samples=count).problems, **{**settings, **more})


class Room:
    """In place of an engine and its sessions: runs that last until the test lets them end."""

    def __init__(self, monkeypatch, places: int = 99, replicas: int = 1, **config):
        self.places, self.now, self.most = places, 0, 0
        self.engines, self.alone, self.errors = [], [], {}
        self.lock = threading.Lock()
        config = types.SimpleNamespace(short_rope=None, **config)
        self.model = types.SimpleNamespace(
            config=config, mesh=None, replicas=lambda: [self.model] * replicas
        )
        monkeypatch.setattr(execution, "Engine", self.engine)
        monkeypatch.setattr(execution, "solve", self.solve)
        monkeypatch.setattr(execution, "_most_tokens", lambda model, specs: 10)
        monkeypatch.setattr(execution, "engine_bytes", lambda model, tokens: tokens)
        monkeypatch.setattr(execution, "sessions_that_fit", lambda model, tokens: 5)

    def engine(self, model, *, kv_bytes, max_rows):
        self.engines.append((kv_bytes, max_rows))
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engines.append("closed")

    def solve(self, model, spec, on_pass=None, engine=None):
        if engine is None:
            self.alone.append(spec.problem)
            return self.run(spec)
        with self.lock:
            if self.now >= self.places:
                raise FULL
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            for _ in range(20):
                time.sleep(0.002)
                on_pass(1)
            if error := self.errors.get(spec.problem):
                raise error
            return self.run(spec)
        finally:
            with self.lock:
                self.now -= 1

    def run(self, spec):
        return Run(spec.workers, spec.problem, spec.number, spec.seed, spec.text, {})


def made(room, specs, concurrency=None):
    return {s.problem: r for s, r in execute(room.model, concurrency)(specs, lambda passes: None)}


def test_as_many_run_as_are_asked_for(monkeypatch):
    room, specs = Room(monkeypatch), specs_of(12)
    found = made(room, specs, 4)
    assert {*found} == {s.problem for s in specs} and room.most == 4 and not room.alone
    assert all(isinstance(run, Run) and run.problem == name for name, run in found.items())
    assert room.engines == [(40, 8), "closed"]  # rows for all workers of four runs


def test_by_default_memory_says_how_many(monkeypatch):
    room = Room(monkeypatch)
    made(room, specs_of(9))
    assert room.engines[0] == (50, 10) and room.most == 5
    few = Room(monkeypatch)
    made(few, specs_of(2))
    assert few.engines[0] == (20, 4)
    wide = Room(monkeypatch)
    made(wide, specs_of(9, workers=[24]))  # two runs have 48 of a processor's 64 rows
    assert wide.engines[0] == (20, 48)


def test_one_by_one_has_no_engine(monkeypatch):
    room = Room(monkeypatch)
    assert len(made(room, specs_of(3), 1)) == 3 and room.engines == []
    assert room.alone == ["1", "2", "3"]


def test_every_data_group_has_an_engine(monkeypatch):
    room = Room(monkeypatch, replicas=2)
    assert len(made(room, specs_of(8), 3)) == 8
    assert room.engines.count((30, 6)) == 2 and 3 < room.most <= 6


def test_runs_wait_for_the_memory_of_others(monkeypatch):
    room, specs = Room(monkeypatch, places=2), specs_of(10)
    assert {*made(room, specs, 6)} == {s.problem for s in specs}
    assert room.most == 2 and not room.alone


def test_a_run_that_is_alone_and_has_no_room_is_an_error(monkeypatch):
    room = Room(monkeypatch, places=0)
    with pytest.raises(EngineError, match="other sessions have 9"):
        made(room, specs_of(3), 2)


def test_a_run_that_needs_more_than_the_engine_has_runs_by_itself(monkeypatch):
    room = Room(monkeypatch)
    room.errors["2"] = TooLongError("the session's blocks take 99 tokens")
    assert isinstance(made(room, specs_of(3), 2)["2"], Run) and room.alone == ["2"]


@pytest.mark.parametrize(
    "error", [ValueError("too long"), NotANumberError.of("worker Bob", "3 passes")]
)
def test_a_problem_that_is_refused_leaves_the_others(monkeypatch, error):
    room = Room(monkeypatch)
    room.errors["2"] = error
    found = made(room, specs_of(4), 3)
    assert found["2"] is error and all(isinstance(found[n], Run) for n in ("1", "3", "4"))


def test_other_errors_end_all(monkeypatch):
    room = Room(monkeypatch)
    room.errors["2"] = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        made(room, specs_of(4), 3)
    assert room.engines[-1] == "closed"


def test_a_caller_that_stops_waits_for_no_run_to_its_end(monkeypatch):
    room = Room(monkeypatch)
    results = execute(room.model, 4)(specs_of(40), lambda passes: None)
    next(results)
    results.close()
    assert room.engines[-1] == "closed" and room.now == 0


def test_models_whose_runs_are_made_one_by_one(monkeypatch):
    rope = Room(monkeypatch)
    rope.model.config.short_rope = "of short texts"
    assert len(made(rope, specs_of(2))) == 2 and rope.engines == []
    shared = Room(monkeypatch)
    shared.model.mesh = types.SimpleNamespace(is_multi_process=True)
    assert len(made(shared, specs_of(2), 1)) == 2 and shared.engines == []
    for room, words in ((rope, "rotation depends"), (shared, "several processes")):
        with pytest.raises(ValueError, match=f"--concurrency is 2, but .*{words}"):
            execute(room.model, 2)
    for number in (0, -1, 513):
        with pytest.raises(ValueError, match=f"--concurrency is {number}; give 1 to 512"):
            execute(rope.model, number)


def test_memory_that_is_not_there_names_the_option(monkeypatch):
    room = Room(monkeypatch)

    def engine(model, **_):
        raise ValueError("kv_bytes takes 9 bytes, but the devices have 8 free; give less")

    monkeypatch.setattr(execution, "Engine", engine)
    with pytest.raises(
        ValueError, match=r"^3 runs at the same time need 30 tokens .* --concurrency"
    ):
        made(room, specs_of(3), 3)


TIMES = ("seconds", "prefill_seconds", "compile_seconds", "kv_bytes")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "workers"),
    [("workers", 3), ("sequential", 1), ("self-consistency", 2), ("vote", 2), ("skeleton", 2)],
)
def test_results_are_those_of_one_by_one_in_any_order(method, workers):
    model = load(EMBEDDED)
    specs = specs_of(5, method=method, workers=[workers], budgets=[24, 64], seeds=1)
    sampler = Sampler(temperature=0.8)
    specs = [dataclasses.replace(spec, sampler=sampler) for spec in specs]

    def results(concurrency, given):
        return {
            spec.key: {name: value for name, value in run.result.items() if name not in TIMES}
            for spec, run in execute(model, concurrency)(given, lambda passes: None)
        }

    one_by_one = results(1, specs)
    assert results(None, specs) == one_by_one
    assert results(2, specs[::-1]) == one_by_one


@pytest.mark.parametrize("budget", [8, 192, 1000])
@pytest.mark.parametrize("workers", mostly_slow([2, 1, 4, 7]))
def test_as_many_tokens_are_reckoned_as_a_session_takes(workers, budget):
    model = load(EMBEDDED)
    (spec,) = specs_of(1, workers=[workers], budgets=[budget])
    with Workers(model, spec.text, names=worker_names(workers), budget=budget) as session:
        _, needed = extents(np.asarray(session.cache.capacities))
    reckoned = execution._most_tokens(model, [spec])
    assert needed <= reckoned, "of several, the last would find no room"
    assert reckoned < 1.6 * needed + 1280
