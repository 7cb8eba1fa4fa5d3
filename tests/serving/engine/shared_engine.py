"""A program that one process runs alone, or two together: an engine under pressure, with a log of
what its scheduler decides.

    python -m tests.serving.engine.shared_engine KIND [ADDRESS PROCESS]

It writes one line of JSON: {"texts": ..., "log": ...}, of which the log has an entry for each step.
"""

import json
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxshare import Sampler
from jaxshare.models import EMBEDDED, LoadedModel, load
from jaxshare.serving import Workers, generate
from jaxshare.serving.engine import Engine
from jaxshare.serving.engine.scheduler import Scheduler
from jaxshare.serving.inputs import token_bytes
from jaxshare.serving.kvcache.sharing_cost import Costs
from jaxshare.sharding import make_mesh
from tests.serving.engine.stepped import SMALL_PIECES

WARM = Sampler(temperature=1.2, top_p=0.95)
TOKENS = 1280
SEEDS = (1, 5)
"""Of the schedules in turns."""


def log_decisions(scheduler: Scheduler) -> list[dict[str, Any]]:
    """A list that gets an entry for each step: what is admitted, preempted, evicted and run."""
    log: list[dict[str, Any]] = []
    entry: dict[str, Any] = {}

    def watch(owner: Any, name: str, seen: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            entry.setdefault(name.strip("_"), []).append(seen(*args, **options))
            return original(*args, **options)

        setattr(owner, name, watched)

    watch(scheduler.metrics, "admitted", lambda request, cached: [request.number, cached])
    watch(scheduler, "_preempt", lambda row: row.request.number)
    watch(
        scheduler,
        "_prefill",
        lambda rows, texts: {
            "requests": [row.request.number for row in rows],
            "texts": [
                [each.feed.owner.number, len(each.tokens), each.num_cached] for each in texts
            ],
        },
    )
    watch(
        scheduler.decode_rows,
        "dispatch",
        lambda rows, *, passes, stop_on_finish, max_idle, sessions=(): {
            "rows": [[row.index, row.request.number] for row in rows],
            "passes": passes,
            "stop_on_finish": stop_on_finish,
            "max_idle": max_idle,
            "sessions": [[each.owner.number, taken.tolist()] for each, taken, _ in sessions],
        },
    )
    watch(
        scheduler.kv.tree,
        "evict_node",
        lambda node, worth_a_copy: [node.segment.depth, len(node.tokens)],
    )
    watch(scheduler.output, "finish", lambda request, reason, *_: [request.number, str(reason)])
    step = scheduler.step

    def logged(admit: bool = True, only_begun: bool = False) -> bool:
        busy = step(admit, only_begun)
        if entry:
            log.append({**entry, "free": scheduler.kv.pool.free, "busy": busy})
        entry.clear()
        return busy

    scheduler.step = logged
    return log


# With threads.


def play_threads(model: LoadedModel, delay: Callable[[], None]) -> dict[str, Any]:
    """Requests of several priorities, branches and two sessions, from threads of their own.

    Args:
      model: as loaded.
      delay: called before each thing that comes, so that processes differ in time.
    """
    log: list[dict[str, Any]] = []
    with (
        Engine(
            model,
            max_rows=8,
            passes=4,
            kv_bytes=TOKENS * token_bytes(model),
            logits_cache=10**6,
            seed=3,
        ) as engine,
        ThreadPoolExecutor(3) as threads,
    ):
        log = log_decisions(engine._scheduler)
        working = [
            threads.submit(work, engine, seed, problem, delay)
            for seed, problem in enumerate(("1. 17 + 25", "1. 6 * 7 2. 3 + 4"))
        ]
        branching = threads.submit(branch, engine, delay)
        texts = ask(engine, delay)
        texts |= {"workers": [each.result() for each in working], "branches": branching.result()}
    return {"texts": texts, "log": log}


def work(engine: Engine, seed: int, problem: str, delay: Callable[[], None]) -> Any:
    delay()
    with Workers(
        engine.model,
        problem,
        engine=engine,
        budget=30,
        sampler=WARM,
        seed=seed,
        history_tokens=96,
        step_tokens=16,
    ) as session:
        for _ in session.stream(12):
            delay()
        session.pause("Bob")
        session.say("Hurry up.")
        session.resume("Bob")
        session.run()
        return [[step.worker, step.text] for step in session.steps], session.finish().value


def branch(engine: Engine, delay: Callable[[], None]) -> Any:
    delay()
    tree = ["Compute these: 17 + 25 =", "Compute these: 6 * 7 ="]
    done = generate(engine.model, tree, n=2, max_new_tokens=12, sampler=WARM, seed=2, engine=engine)
    return [completion.tokens for completion in done.completions]


def ask(engine: Engine, delay: Callable[[], None]) -> dict[str, Any]:
    rng = np.random.default_rng(4)
    stem = rng.integers(3, 400, 100).tolist()
    streams = []
    for i, (cut, more) in enumerate(((100, 20), (60, 60), (100, 5), (0, 120), (100, 33), (60, 12))):
        delay()
        streams.append(
            engine.submit(
                [*stem[:cut], *rng.integers(3, 400, more).tolist()],
                WARM if i % 2 else None,
                max_new_tokens=14,
                seed=None if i == 2 else i,
                priority=int(i > 3),
                agent_id=f"a{i % 3}",
                resample="stepwise" if i == 3 else None,
            )
        )
    cut_off = engine.submit(stem, WARM, max_new_tokens=80, seed=9)
    while not cut_off._state.chunks and not cut_off._state.output:
        time.sleep(0.01)
    cut_off.cancel()
    first = [stream.wait(300).tokens for stream in streams]
    again = engine.submit(streams_prompt(stem, rng), WARM, max_new_tokens=9, seed=1)
    return {
        "requests": [*first, again.wait(300).tokens],
        "cancelled": [cut_off.wait(300).tokens],
    }


def streams_prompt(stem: list[int], rng: np.random.Generator) -> list[int]:
    return [*stem[:80], *rng.integers(3, 400, 5).tolist()]


def delays(process: int) -> Callable[[], None]:
    rng = random.Random(process)
    lock = threading.Lock()

    def delay() -> None:
        with lock:
            seconds = rng.random() * 0.2 * process
        time.sleep(seconds)

    return delay


# In turns.


def play_turns(mesh: Any) -> dict[str, Any]:
    """Random schedules of sessions and requests, in turns, with speeds that are given."""
    from tests.serving.engine import mixed_schedules  # which uses the device as it is imported

    model = mixed_schedules.model()
    model = model if mesh is None else model.on(mesh)
    for module, name, value in SMALL_PIECES:
        setattr(module, name, value)
    texts, logs = [], []

    def watch(engine: Engine) -> None:
        # What is predicted for a mesh is not what is predicted for one device.
        engine._scheduler.kv.costs = Costs(1.0, 0.5, 0.01, 0.5, 0.5)
        logs.append(log_decisions(engine._scheduler))

    for seed in SEEDS:
        schedule = mixed_schedules.make(seed)
        schedule.engine["host"] = 0
        played = mixed_schedules.play(schedule, model, watch)
        played.engine._thread = None
        played.engine.shutdown()
        mixed_schedules.check_calls(played.calls)
        for number, (what, found) in enumerate(played.visits):
            mixed_schedules.check_visit(number, what, found)
        texts += [done.tokens for _, _, done in played.calls]
        texts += [[visited.written, visited.passes] for _, visited in played.visits]
    return {"texts": texts, "log": logs}


def main(kind: str, address: str = "", process: str = "0") -> None:
    mesh = None
    if address:
        jax.distributed.initialize(address, num_processes=2, process_id=int(process))
        mesh = make_mesh(tensor=2, kv=jax.device_count() // 2)
    kinds = {
        "threads": lambda: play_threads(load(EMBEDDED, mesh=mesh), delays(int(process))),
        "turns": lambda: play_turns(mesh),
    }
    print(json.dumps(kinds[kind]()))


if __name__ == "__main__":
    main(*sys.argv[1:])
