"""Workers over one shared cache: a pass of 2, 4 and 8 against a pass of one, and against the
authors' implementation of Hogwild! Inference.

    python -m scripts.bench.workers --hogwild DIR                 # the full measurement
    python -m scripts.bench.workers --quick                       # within three minutes on two cores
    python -m scripts.bench.workers --json --output FILE          # one JSON object

DIR is a checkout of https://github.com/eqimp/hogwild_llm, which runs under a Python of its own with
PyTorch and transformers 4.50 (--hogwild-python). Without it the goals that are set against it count
as not measured. How to read the result is in benchmarks/README.md.
"""

import collections
import contextlib
import dataclasses
import functools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxshare import DecodeState, KVCache, Layout, decode
from jaxshare.attention.api import block_attention
from jaxshare.attention.plan import Plan, make_plan
from jaxshare.models import LoadedModel, load
from jaxshare.serving import Workers
from jaxshare.serving.cli import demo
from jaxshare.serving.evaluation import arithmetic
from scripts.bench import decode as bench_decode
from scripts.bench.lib import (
    WAITING,
    Goal,
    Parser,
    Worker,
    WorkerError,
    alternate,
    command,
    cores,
    finish,
    machine,
    progress,
    ratios,
    table,
    torch_python,
    versions,
    write_checkpoint,
)

MODEL = bench_decode.MODEL | {"max_position_embeddings": 32768}
HISTORIES, WORKERS = (1024, 4096, 16384), (1, 2, 4, 8)
CURRENT, STEP_ROOM = 64, 512
"""Tokens of each worker's current step when a turn begins, and room for them as `Workers` gives
it."""
RELATIVE_GOALS = {2: 1.15, 4: 1.3}
PLAN_GOAL = 2.0
HOGWILD_GOALS = {(4096, 2): 8.0, (4096, 4): 15.0, (16384, 2): 12.0, (16384, 4): 25.0}
WAITS_GOAL = 1.0
HOGWILD_PYTHON = ".venv-hogwild/bin/python"
HOGWILD = "the authors' implementation"
WORKER = "scripts.bench.peers.hogwild"
# Sides of one number of workers, as they are called in results.
PASS, PLAN, ATTENTION, THEIRS = "pass", "plan", "attention", "hogwild_llm"
# Of each side in a turn: a plan is short and is repeated many times; one pass of theirs can take
# longer than a turn of the others.
PLANS, ATTENTIONS, THEIR_PASSES = 256, 16, 2
STREAMED_PASSES = 256


def combined(workers: int) -> Layout:
    """Block 0 is the history, which all see first; then the others' current steps, then the
    worker's own."""
    steps = range(1, workers + 1)
    return Layout.from_blocks([[0, *(b for b in steps if b != own), own] for own in steps])


def random_cache(model: LoadedModel, workers: int, history: int, seed: int) -> KVCache:
    """A history that fills its block, and for each worker a current step of CURRENT tokens."""
    cache = KVCache.create(model.config, (history, *[STEP_ROOM] * workers))
    key = jax.random.key(seed)

    def random(arenas: tuple[Array, ...], side: int) -> tuple[Array, ...]:
        return tuple(
            jax.random.normal(jax.random.fold_in(key, 2 * i + side), a.shape, a.dtype)
            for i, a in enumerate(arenas)
        )

    lengths = jnp.asarray([history, *[CURRENT] * workers], jnp.int32)
    return dataclasses.replace(
        cache, keys=random(cache.keys, 0), values=random(cache.values, 1), lengths=lengths
    )


class Run:
    """jaxshare's side for one number of workers and one length of history: the decode loop, and two
    of its parts alone.

    The parts are timed in loops of their own inside jit, as the decode loop runs them.
    """

    def __init__(self, model: LoadedModel, workers: int, history: int, steps: int, seed: int):
        self.model, self.workers, self.steps, self.seed = model, workers, steps, seed
        cache = random_cache(model, workers, history, seed)
        self.lengths = np.asarray(cache.lengths)
        self.state = DecodeState.create(
            cache,
            combined(workers),
            [[1]] * workers,
            vocab_size=model.config.vocab_size,
            budgets=steps + 2,
            max_width=1,
        )

    def compile(self) -> None:
        loop = jax.jit(
            lambda params, state: decode(self.model.module, params, state, passes=self.steps),
            donate_argnums=1,
        )
        self.loop = loop.lower(self.model.params, self.state).compile()
        self.plans = jax.jit(plan_many_times).lower(self.state.cache, self.state.layout).compile()
        config = self.model.config
        self.q = jax.random.normal(
            jax.random.key(self.seed),
            (self.workers, 1, config.num_heads, config.head_dim),
            jnp.bfloat16,
        )
        plan = self.plans(self.state.cache, self.state.layout)
        self.attentions = jax.jit(attend_many_times).lower(self.q, self.state.cache, plan).compile()

    def step(self) -> float:
        """Seconds of `steps` passes of all workers. Every turn begins with current steps of the
        same length."""
        cache = dataclasses.replace(self.state.cache, lengths=jnp.asarray(self.lengths))
        state = jax.block_until_ready(
            dataclasses.replace(self.state, cache=cache, drawn=jnp.zeros(self.workers, jnp.int32))
        )
        begin = time.perf_counter()
        self.state = jax.block_until_ready(self.loop(self.model.params, state))
        return time.perf_counter() - begin

    def plan(self) -> float:
        """Seconds of PLANS plans."""
        begin = time.perf_counter()
        jax.block_until_ready(self.plans(self.state.cache, self.state.layout))
        return time.perf_counter() - begin

    def attend(self) -> float:
        """Seconds of the attention of all layers, ATTENTIONS times."""
        plan = jax.block_until_ready(self.plans(self.state.cache, self.state.layout))
        begin = time.perf_counter()
        jax.block_until_ready(self.attentions(self.q, self.state.cache, plan))
        return time.perf_counter() - begin

    def sides(self) -> dict[str, Callable[[], float]]:
        """What is measured, each to give its seconds for one pass."""
        return {
            PASS: lambda: self.step() / self.steps,
            PLAN: lambda: self.plan() / PLANS,
            ATTENTION: lambda: self.attend() / ATTENTIONS,
        }

    def check(self, turns: int) -> None:
        """Raises RuntimeError where less was done than was to be measured."""
        self.state.cache.check()
        if int(self.state.passes) != turns * self.steps or not bool(jnp.all(self.state.running)):
            raise RuntimeError(
                f"workers ended before their {turns * self.steps} passes were done: "
                f"{np.asarray(self.state.reasons).tolist()}"
            )


def plan_many_times(cache: KVCache, layout: Layout) -> Plan:
    """Plans PLANS passes, each of them for other lengths, and gives the last plan. All of a plan is
    carried on, so all of it is made."""
    lengths, count = cache.lengths, jnp.ones(layout.num_rows, jnp.int32)

    def plan(i: Array | int) -> Plan:
        return make_plan(
            dataclasses.replace(cache, lengths=lengths.at[1:].add(-(i % 8))), layout, count, 1
        )

    return jax.lax.fori_loop(1, PLANS, lambda i, _: plan(i), plan(0))


def attend_many_times(q: Array, cache: KVCache, plan: Plan) -> Array:
    """The attention of all layers, one behind the other and ATTENTIONS times: each answer is the
    next query."""

    def layers(_: Array, q: Array) -> Array:
        return functools.reduce(
            lambda q, arenas: block_attention(q, *arenas, plan),
            zip(cache.keys, cache.values, strict=True),
            q,
        )

    return jax.lax.fori_loop(0, ATTENTIONS, layers, q)


def fastest(
    others: dict[str, Worker], hogwild: str, folder: str, history: int
) -> tuple[Worker, dict[str, Any]]:
    """The authors' implementation with threads that wait in the way, and in the dtype, in which two
    workers are fastest here; how it was set up."""
    passes: dict[str, dict[str, float]] = {}
    for name, other in others.items():
        passes[name] = {}
        for dtype in ("bfloat16", "float32"):
            other.ask("load", hogwild=hogwild, folder=folder, dtype=dtype, threads=cores())
            other.ask("prepare", workers=2, history=history, current=CURRENT)
            other.ask("step", workers=2, passes=1)
            passes[name][dtype] = (
                min(other.ask("step", workers=2, passes=1)["seconds"] for _ in range(3)) * 1e3
            )
    waiting = min(passes, key=lambda name: min(passes[name].values()))
    dtype = min(passes[waiting], key=passes[waiting].__getitem__)
    for name in others.keys() - {waiting}:
        others[name].close()
    threads = others[waiting].ask(
        "load", hogwild=hogwild, folder=folder, dtype=dtype, threads=cores()
    )["threads"]
    return others[waiting], {
        "threads": threads,
        "waiting": waiting,
        "dtype": dtype,
        "pass_milliseconds": passes,
    }


def measure(
    model: LoadedModel,
    other: Worker | None,
    workers: Sequence[int],
    history: int,
    steps: int,
    rounds: int,
    seed: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """All numbers of workers over one length of history. The first turn of each side warms it up
    and is not timed."""
    say("compile")
    begin = time.perf_counter()
    runs = {n: Run(model, n, history, steps, seed) for n in workers}
    with ThreadPoolExecutor(cores()) as pool:
        for done in [pool.submit(run.compile) for run in runs.values()]:
            done.result()
    compiled = time.perf_counter() - begin
    sides = {(n, name): side for n, run in runs.items() for name, side in run.sides().items()}
    for n in [n for n in workers if other and n in RELATIVE_GOALS]:
        other.ask("prepare", workers=n, history=history, current=CURRENT)
        sides[n, THEIRS] = lambda n=n: (
            other.ask("step", workers=n, passes=THEIR_PASSES)["seconds"] / THEIR_PASSES
        )
    say("warm up")
    alternate(sides, 1)
    if other:
        other.reset_idle()
    say("measure in turn")
    times = alternate(sides, rounds)
    for run in runs.values():
        run.check(rounds + 1)
    return {
        **summarise(history, model.config.num_layers, times),
        "compile_seconds": compiled,
        "temp_bytes": {
            str(n): run.loop.memory_analysis().temp_size_in_bytes for n, run in runs.items()
        },
        "cores_busy_while_waiting": {
            "jaxshare": other.idle_here.cores,
            THEIRS: other.idle_there.cores,
        }
        if other
        else {},
    }


def summarise(
    history: int, layers: int, times: Mapping[tuple[int, str], list[float]]
) -> dict[str, Any]:
    """Medians over rounds of each side's time for one pass, and of each round's ratios.

    Args:
      times: seconds for one pass in every round, by number of workers and side; PASS, PLAN and
        ATTENTION of all, PASS of 1 among them.
    """
    found = {}
    for n in sorted({n for n, _ in times}):
        own = times[n, PASS]
        found[str(n)] = {
            "pass_milliseconds": statistics.median(own) * 1e3,
            "tokens_per_second": n / statistics.median(own),
            "to_one_worker": ratios(own, times[1, PASS]),
            "plan_microseconds": statistics.median(times[n, PLAN]) * 1e6,
            "plan_to_pass": ratios(times[n, PLAN], own),
            "attention_microseconds_a_layer": statistics.median(times[n, ATTENTION]) / layers * 1e6,
            "round_seconds": own,
        }
        if (n, THEIRS) in times:
            theirs = times[n, THEIRS]
            found[str(n)][THEIRS] = {
                "pass_milliseconds": statistics.median(theirs) * 1e3,
                "times_slower": ratios(theirs, own),
                "round_seconds": theirs,
            }
    return {"history": history, "workers": found}


def host_waits(budget: int) -> dict[str, int]:
    """Streams two workers of the embedded model; its forward passes, and how often the host waited
    for the device meanwhile."""
    session = Workers(
        demo.load_embedded(),
        arithmetic.make_problem(random.Random(0)).prompt(),
        names=arithmetic.NAMES[:2],
        budget=budget,
    )
    collections.deque(session.stream(), maxlen=0)
    return {"passes": session.passes, "waits": session.host_syncs}


def goals(results: Sequence[dict[str, Any]], streaming: Mapping[str, int]) -> list[Goal]:
    """The goals that these results can be held against; those set against the authors'
    implementation also where it did not run."""
    found = []
    for r in results:
        for n, of_one in RELATIVE_GOALS.items():
            if str(n) not in r["workers"]:
                continue
            what, w = f"{n} workers, {r['history']} tokens of history", r["workers"][str(n)]
            found.append(
                Goal(
                    f"{what}: a pass, times that of one",
                    w["to_one_worker"]["median"],
                    of_one,
                    at_most=True,
                )
            )
            found.append(
                Goal(
                    f"{what}: the plan, percent of a pass",
                    100 * w["plan_to_pass"]["median"],
                    PLAN_GOAL,
                    at_most=True,
                )
            )
            if (r["history"], n) in HOGWILD_GOALS:
                times = w[THEIRS]["times_slower"]["median"] if THEIRS in w else None
                found.append(
                    Goal(
                        f"{what}: times faster than {HOGWILD}",
                        times,
                        HOGWILD_GOALS[r["history"], n],
                    )
                )
    sixteens = -(-streaming["passes"] // 16)  # the last may be cut short by the end of the run
    found.append(
        Goal(
            "streaming: waits of the host in 16 passes",
            streaming["waits"] / sixteens,
            WAITS_GOAL,
            at_most=True,
        )
    )
    return found


def as_text(report: dict[str, Any]) -> str:
    """The report without its goals."""
    settings, where, found = report["settings"], report["machine"], report["versions"]
    other = found.get(THEIRS)
    lines = [
        f"Llama, {settings['parameters'] / 1e6:.1f} M parameters, bfloat16, combined layout, "
        f"current steps of {CURRENT} tokens; medians of {settings['rounds']} rounds of "
        f"{settings['steps']} passes",
        f"{where['cpu']}, {where['cores']} cores, load {where['load_average']} at the start; jax "
        f"{found['jaxshare']['jax']}; "
        + (
            f"{HOGWILD}: {settings['hogwild']['dtype']}, torch {other['torch']}, transformers "
            f"{other['transformers']}"
            if other
            else f"{HOGWILD} did not run: name a checkout of it with --hogwild"
        ),
        "",
    ]
    rows = []
    for r in report["results"]:
        for n, w in r["workers"].items():
            ratio, theirs = w["to_one_worker"], w.get(THEIRS)
            rows.append(
                (
                    f"{r['history']}  {n}",
                    f"{w['pass_milliseconds']:.1f}",
                    f"{w['tokens_per_second']:.1f}",
                    f"{ratio['median']:.2f}",
                    f"{ratio['lowest']:.2f} to {ratio['highest']:.2f}",
                    f"{w['attention_microseconds_a_layer']:.0f}",
                    f"{w['plan_microseconds']:.0f}",
                    f"{100 * w['plan_to_pass']['median']:.1f}",
                    *(
                        (
                            f"{theirs['pass_milliseconds']:.0f}",
                            f"{theirs['times_slower']['median']:.1f}",
                        )
                        if theirs
                        else ("", "")
                    ),
                )
            )
    header = (
        "history  workers",
        "ms a pass",
        "tokens/s",
        "to one",
        "of rounds",
        "attention us",
        "plan us",
        "plan %",
        "theirs ms",
        "times",
    )
    busy = [
        r["cores_busy_while_waiting"] for r in report["results"] if r["cores_busy_while_waiting"]
    ]
    waits = report["streaming"]
    return "\n".join(
        [
            *lines,
            table(header, rows),
            "",
            "attention is that of one layer",
            f"streaming: the host waited {waits['waits']} times in {waits['passes']} forward "
            "passes",
            *(
                f"cores busy while waiting: jaxshare {b['jaxshare']:.2f}, {THEIRS} {b[THEIRS]:.2f}"
                for b in busy
            ),
        ]
    )


@dataclasses.dataclass(frozen=True)
class Options:
    """What was asked for; histories, workers, rounds and steps as `--quick` has them where they
    were not given."""

    histories: tuple[int, ...]
    workers: tuple[int, ...]
    rounds: int
    steps: int
    quick: bool
    seed: int
    hogwild: str | None
    hogwild_python: str
    json: bool
    output: Path | None


def parse(arguments: Sequence[str] | None) -> Options:
    parser = Parser(prog="scripts.bench.workers", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--histories", metavar="S,S", help="tokens of history (default 1024,4096,16384; quick 4096)"
    )
    parser.add_argument(
        "--workers",
        metavar="N,N",
        help="numbers of workers, 1 among them (default 1,2,4,8; quick 1,2,4)",
    )
    parser.add_argument("--rounds", type=int, help="turns of each side (default 7; quick 3)")
    parser.add_argument("--steps", type=int, default=16, help="passes a turn (default %(default)s)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer sizes, fewer turns: within three minutes on two cores",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, keys and values")
    parser.add_argument(
        "--hogwild",
        metavar="DIR",
        help="a checkout of https://github.com/eqimp/hogwild_llm to measure against",
    )
    parser.add_argument(
        "--hogwild-python",
        metavar="PATH",
        help="a Python with PyTorch and transformers 4.50 to run it with (default "
        f"{HOGWILD_PYTHON})",
    )
    parser.reporting()
    given = parser.parse_args(arguments)

    def default(full: Sequence[int], quick: Sequence[int]) -> str:
        return ",".join(map(str, quick if given.quick else full))

    workers = parser.numbers("--workers", given.workers or default(WORKERS, (1, 2, 4)), "1,2,4")
    histories = parser.numbers(
        "--histories", given.histories or default(HISTORIES, (4096,)), "1024,4096"
    )
    rounds = given.rounds if given.rounds is not None else 3 if given.quick else 7
    if 1 not in workers:
        parser.error(
            f"--workers is {given.workers}, but 1 must be among them: the others are held against "
            "one worker"
        )
    if max(histories) > MODEL["max_position_embeddings"] // 2:
        parser.error(
            f"--histories is {given.histories}, but the model's context holds at most "
            f"{MODEL['max_position_embeddings'] // 2}"
        )
    if rounds < 1 or not 1 <= given.steps <= STEP_ROOM - CURRENT or given.seed < 0:
        parser.error(
            f"--rounds is {rounds}, --steps {given.steps} and --seed {given.seed}, but rounds must "
            f"be at least 1, steps from 1 to {STEP_ROOM - CURRENT} and the seed at least 0"
        )
    parser.check_output(given.output)
    if given.hogwild and not (Path(given.hogwild) / "shared_cache").is_dir():
        parser.error(
            f"--hogwild is {given.hogwild}, but it must be a checkout of "
            "https://github.com/eqimp/hogwild_llm"
        )
    python = (
        torch_python(
            parser,
            given.hogwild_python,
            option="--hogwild-python",
            made=HOGWILD_PYTHON,
            made_by="make parity HOGWILD=DIR",
        )
        if given.hogwild
        else ""
    )
    return Options(
        histories,
        workers,
        rounds,
        given.steps,
        given.quick,
        given.seed,
        given.hogwild,
        python,
        given.json,
        given.output,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    asked = command(
        [str(Path(__file__).resolve()), *(sys.argv[1:] if arguments is None else arguments)]
    )
    where, found = machine(), {"jaxshare": versions(("jax", "jaxlib", "flax", "numpy"))}
    with contextlib.ExitStack() as stack:
        others = {}
        if options.hogwild:
            try:
                others = {
                    name: stack.enter_context(Worker(options.hogwild_python, WORKER, environment))
                    for name, environment in WAITING.items()
                }
                found[THEIRS] = [other.begin() for other in others.values()][-1]
            except WorkerError as error:
                print(
                    f"scripts.bench.workers: {options.hogwild_python} cannot run {HOGWILD} "
                    f"({error}): --hogwild-python takes a Python that has PyTorch and transformers "
                    "4.50, such as the one that `make parity HOGWILD=DIR` makes in .venv-hogwild",
                    file=sys.stderr,
                )
                return 2
        try:
            settings, results, streaming = measure_all(options, others)
        except WorkerError as error:
            print(f"scripts.bench.workers: {HOGWILD} could not go on: {error}", file=sys.stderr)
            return 1
    report = {
        "benchmark": "workers",
        "command": asked,
        "machine": where,
        "versions": found,
        "settings": settings,
        "results": results,
        "streaming": streaming,
    }
    finish(
        report,
        as_text(report),
        goals(results, streaming),
        as_json=options.json,
        output=options.output,
    )
    return 0


def measure_all(
    options: Options, others: dict[str, Worker]
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, int]]:
    """What was measured with; the results, one a length of history; and those of streaming."""
    turns = len(options.histories) * 3 + 2 + bool(others)
    with tempfile.TemporaryDirectory() as folder, progress(turns) as say:
        say("weights")
        parameters = write_checkpoint(Path(folder), MODEL, options.seed)
        model, other, hogwild = load(folder), None, None
        if others:
            say("the authors' implementation: load")
            assert options.hogwild is not None
            other, hogwild = fastest(
                others, str(Path(options.hogwild).resolve()), folder, min(options.histories)
            )
        results = [
            measure(
                model,
                other,
                options.workers,
                history,
                options.steps,
                options.rounds,
                options.seed,
                lambda what, history=history: say(f"history {history}, {what}"),
            )
            for history in options.histories
        ]
        say("streaming")
        streaming = host_waits(STREAMED_PASSES)
    settings = {
        "parameters": parameters,
        "dtype": "bfloat16",
        "rounds": options.rounds,
        "steps": options.steps,
        "warm_up_turns": 1,
        "current": CURRENT,
        "step_room": STEP_ROOM,
        "plans_a_turn": PLANS,
        "attentions_a_turn": ATTENTIONS,
        "quick": options.quick,
        "seed": options.seed,
        "hogwild": hogwild and {**hogwild, "passes_a_turn": THEIR_PASSES},
        "model": MODEL,
    }
    return settings, results, streaming


if __name__ == "__main__":
    sys.exit(main())
