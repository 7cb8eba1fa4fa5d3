"""Compilation is timed apart: spans inside each other count once, threads have clocks of their own,
and no speed counts it."""

import dataclasses
import functools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxshare import Sampler
from jaxshare.compile_time import CompileClock, Stopwatch, compile_seconds
from jaxshare.models import Generation, LoadedModel
from jaxshare.serving.branches.data_parallel import Replicas
from jaxshare.serving.branches.generate import generate
from jaxshare.serving.branches.run import Branches
from jaxshare.serving.cluster.shards import Cost, Shards
from jaxshare.serving.engine import Engine
from tests.helpers import TINY, init

SPANS = st.recursive(st.just([]), lambda inside: st.lists(inside, max_size=3), max_leaves=12)
"""The shape of spans: each is a list of those inside it."""


def laid_out(shape: list, start: int) -> tuple[list[tuple[int, int]], int]:
    """(start, end) of the spans of a shape in the order in which they end, in whole seconds, and
    the time after the last."""
    found, now = [], start + 1
    for inside in shape:
        spans, now = laid_out(inside, now)
        found += spans
    return [*found, (start, now + 1)], now + 2


@given(st.lists(SPANS, max_size=4))
def test_the_clock_counts_every_second_in_a_span_once(shapes):
    spans, now = [], 0
    for shape in shapes:
        more, now = laid_out(shape, now)
        spans += more
    clock, before = CompileClock(), 0.0
    for number, (start, end) in enumerate(spans, 1):
        clock.add(end - start, end)
        covered = {second for a, b in spans[:number] for second in range(a, b)}
        assert clock.seconds == len(covered) and clock.seconds >= before
        before = clock.seconds


def test_each_thread_has_a_clock_of_its_own():
    done = []

    def compile_something():
        start, wall = compile_seconds(), time.perf_counter()
        jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x) + 7)(jnp.ones((5, 5))).block_until_ready()
        done.append((compile_seconds() - start, time.perf_counter() - wall))

    watch = Stopwatch.start()
    thread = threading.Thread(target=compile_something)
    thread.start()
    thread.join()
    (compiled, wall), (seconds, own) = done[0], watch.split()
    assert 0 < compiled <= wall and own == 0 and seconds >= compiled


def test_nested_functions_are_not_counted_twice():
    @jax.jit
    def inner(x):
        return jnp.sin(x) @ jnp.cos(x)

    @jax.jit
    def outer(x):
        for _ in range(20):
            x = inner(jnp.where(x > 0, x, -x))
        return x

    wall, watch = time.perf_counter(), Stopwatch.start()
    outer(np.ones((6, 6), np.float32)).block_until_ready()
    seconds, compiled = watch.split()
    assert compiled > 0 and seconds > 0 and seconds + compiled <= time.perf_counter() - wall
    watch = Stopwatch.start()
    outer(np.ones((6, 6), np.float32)).block_until_ready()
    assert watch.split()[1] == 0


@functools.cache
def model() -> LoadedModel:
    config = dataclasses.replace(TINY, num_layers=1)
    return LoadedModel(config, init(config), None, Generation())


def timed(**settings) -> tuple[float, float, float, float]:
    """(wall time, seconds, compile_seconds, tokens per second) of a run that no other test shares
    programs with."""
    start = time.perf_counter()
    done = generate(
        model(), [[5, 6, 7], [5, 6, 8, 9]], n=3, max_new_tokens=37, sampler=Sampler(), **settings
    )
    return time.perf_counter() - start, done.seconds, done.compile_seconds, done.tokens_per_second


def test_generate_reports_compilation_apart():
    first, second = timed(), timed()
    for wall, seconds, compiled, _ in (first, second):
        assert seconds > 0 and seconds + compiled <= wall
    assert first[2] > 0 and second[2] == 0
    assert first[1] < 0.5 * (first[1] + first[2]), (
        "what compiles takes longer than what runs, and is no part of it"
    )
    assert 0.05 < first[3] / second[3] < 20, "both runs are as fast, compiled by the first"


@pytest.mark.slow
def test_the_engine_reports_compilation_apart():
    start = time.perf_counter()
    with Engine(model(), max_rows=3) as engine:
        engine.submit([5, 6, 7], max_new_tokens=5).wait()
        engine.drain()
        compiled, wall = engine.metrics.compile_seconds, time.perf_counter() - start
        assert 0 < compiled <= wall
        assert (
            engine.metrics.registry.get_sample_value("jaxshare_compile_seconds_total") == compiled
        )
        engine.submit([5, 6, 8], max_new_tokens=5).wait()
        engine.submit([5, 6, 7], max_new_tokens=5).wait()
        engine.drain()
        before = engine.metrics.compile_seconds
        engine.submit([5, 6, 9], max_new_tokens=5).wait()
        engine.drain()
        assert engine.metrics.compile_seconds == before


def run_that_took(seconds: float, compiled: float) -> Branches:
    run = Branches(model(), [[5]], max_new_tokens=1)
    run.seconds, run.compile_seconds = seconds, compiled
    return run


def test_groups_side_by_side_report_the_one_that_took_longest():
    run = object.__new__(Replicas)
    run.runs = [run_that_took(3.0, 2.0), run_that_took(1.0, 5.0)]
    assert (run.seconds, run.compile_seconds) == (1.0, 5.0), "6 seconds of wall time, not 3 + 5"
    run.runs = []
    assert (run.seconds, run.compile_seconds) == (0.0, 0.0)


def test_shards_report_the_replica_that_compiled_longest():
    class Fleet:
        replicas = 2

        def start(self, make, max_replicas):
            pass

        def run(self, shards):
            from jaxshare.serving.cluster.ray_pool import JobResult

            time.sleep(0.2)
            for replica, compiled in ((0, 0.02), (1, 0.03), (0, 0.04)):
                yield JobResult(
                    None,
                    "cost",
                    Cost(passes=1, kv_bytes=10, rows=2, compile_seconds=compiled),
                    replica,
                )

    run = Shards(Fleet(), model, model(), [[5, 6], [5, 7]])
    start = time.perf_counter()
    assert [*run.stream()] == []
    assert run.compile_seconds == 0.06
    assert 0.1 < run.seconds <= time.perf_counter() - start - 0.06
