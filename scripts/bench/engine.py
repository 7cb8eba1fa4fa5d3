"""The engine under load: tokens a second and time to first token, against the raw decode loop, one
batch at a time, and no reuse.

    python -m scripts.bench.engine                           # the full measurement
    python -m scripts.bench.engine --quick                   # the embedded model alone, within three minutes on two cores
    python -m scripts.bench.engine --json --output FILE      # one JSON object

Calls are like those of a chat service: one of a few long system prompts, a question of its own, and
an answer of 16 to 128 tokens. Stop tokens are forbidden, so every answer has the length it was
given. All sides run under the same process, in turn.

 - Against the raw loop: `jaxshare.decode` over as many rows, all always at work, on prompts of the
   same lengths that are shared in the same way, with as many passes a dispatch; between dispatches
   the host does nothing but wait. The engine is given calls whose prompts it knows but for one
   token, and is timed from when its rows are full to when the last call leaves the queue.
 - Calls with questions, all at once: the engine, the engine without prefix reuse (its tree is made
   to find nothing), and `jaxshare.serving.generate` on one batch of calls after another, in the
   order of their arrival. There a batch lasts as long as its longest answer; tokens that nobody
   asked for do not count.
 - Time to first token: calls arrive at random (Poisson) at a share of the rate that the engine
   serves when calls always wait. Batches run on a clock of their own, with times that were measured
   before, so that compiling them does not count.

How to read the result is in benchmarks/README.md.
"""

import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxshare import DecodeState, KVCache, Layout, Sampler, decode
from jaxshare.models import EMBEDDED, LoadedModel, load
from jaxshare.serving import generate
from jaxshare.serving.engine import Engine, RequestOutput, Stream
from jaxshare.serving.inputs import token_bytes
from jaxshare.serving.kvcache.prefix_tree import Match
from scripts.bench.lib import (
    Goal,
    Parser,
    alternate,
    command,
    finish,
    machine,
    progress,
    ratios,
    table,
    versions,
)
from scripts.bench.parts.engine_model import MODEL, random_model

ENGINE, RAW, BATCHES, FORGETFUL = "engine", "raw loop", "one batch at a time", "no prefix reuse"
MODELS = ("embedded", "random")
SATURATION_GOAL = 0.90
SYSTEMS, SYSTEM_TOKENS = 3, 384
QUESTIONS = (8, 40)
"""Tokens of a question, the fewest and the most."""
BUDGETS = (16, 128)
ROOM = 256
"""Tokens of a row's own block in the raw loop, which is what the engine gives a row at a time."""
TEMPERATURE = 0.8
LOADS = (0.5, 0.8)
"""Arrivals, as shares of the rate that the engine serves when calls always wait."""
POLL_SECONDS = 0.02


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
      rows: calls at a time.
      known, calls: calls of the first two measurements, in a round; arrivals: calls of each load.
      rounds: turns of each side; of the first measurement, whose turns are short, three times as
        many.
    """

    rows: int
    known: int
    calls: int
    arrivals: int
    rounds: int


FULL = {"embedded": Scale(16, 160, 64, 128, 5), "random": Scale(16, 64, 48, 48, 3)}
QUICK = {"embedded": Scale(8, 48, 16, 24, 2)}


@dataclasses.dataclass(frozen=True)
class Call:
    """What is asked: tokens, of which the first belong to the system prompt of that number; and the
    tokens of the answer."""

    system: int
    prompt: tuple[int, ...]
    budget: int
    seed: int


class Calls:
    """Makes calls. System prompts are the same in all of them; questions and budgets are new each
    time."""

    def __init__(self, vocab: int, seed: int, system_tokens: int = SYSTEM_TOKENS):
        self._rng, self._vocab, self._number = (
            np.random.default_rng([seed, 4]),
            vocab,
            itertools.count(),
        )
        self.systems = [
            tuple(self._rng.integers(0, vocab, system_tokens).tolist()) for _ in range(SYSTEMS)
        ]

    def make(self, count: int, questions: tuple[int, int]) -> list[Call]:
        """So many, with questions of so many tokens, at least and at most."""
        found = []
        for _ in range(count):
            system = int(self._rng.integers(SYSTEMS))
            length, budget = (
                int(self._rng.integers(low, high + 1)) for low, high in (questions, BUDGETS)
            )
            question = self._rng.integers(0, self._vocab, length).tolist()
            found.append(
                Call(system, (*self.systems[system], *question), budget, next(self._number))
            )
        return found


class Served:
    """An engine with its system prompts in memory, and what is asked of it."""

    def __init__(
        self,
        model: LoadedModel,
        calls: Calls,
        rows: int,
        sampler: Sampler,
        passes: int,
        *,
        reuse: bool = True,
    ):
        longest = len(calls.systems[0]) + QUESTIONS[1] + BUDGETS[1] + ROOM
        tokens = (2 * rows if reuse else 4 * rows) * longest + SYSTEMS * len(calls.systems[0])
        self.engine = Engine(
            model,
            max_rows=rows,
            kv_bytes=tokens * token_bytes(model),
            passes=passes,
            max_queue=10**6,
            sampler=sampler,
        )
        if not reuse:
            tree = self.engine._scheduler.kv.tree
            tree.match = lambda tokens, most: Match(tree.root, 0, 0, 0)
        for system in calls.systems:
            self.engine.submit(system, max_new_tokens=1).wait()

    def submit(self, call: Call) -> Stream:
        return self.engine.submit(call.prompt, max_new_tokens=call.budget, seed=call.seed)

    def at_once(self, calls: Sequence[Call]) -> tuple[float, float]:
        """(seconds until all have ended, tokens a second while calls waited: then all rows are at
        work)."""
        seen: list[tuple[float, float, bool]] = []
        begin = time.perf_counter()
        streams = [self.submit(call) for call in calls]
        for stream in streams:
            while not _ended(stream):
                seen.append(
                    (
                        time.perf_counter(),
                        self._value("jaxshare_tokens_total", how="sampled"),
                        self._value("jaxshare_queue") > 0,
                    )
                )
        return time.perf_counter() - begin, steady_rate(seen)

    def arriving(self, calls: Sequence[Call], at: Sequence[float]) -> list[RequestOutput]:
        """Submits every call at its time, in seconds from now."""
        begin, streams = time.perf_counter(), []
        for call, due in zip(calls, at, strict=True):
            time.sleep(max(0.0, begin + due - time.perf_counter()))
            streams.append(self.submit(call))
        return [stream.wait() for stream in streams]

    def _value(self, name: str, **labels: str) -> float:
        return self.engine.metrics.registry.get_sample_value(name, labels) or 0.0


def _ended(stream: Stream) -> bool:
    """Waits for a moment; raises what went wrong with the call."""
    try:
        stream.wait(POLL_SECONDS)
    except TimeoutError:
        return False
    return True


def steady_rate(seen: Sequence[tuple[float, float, bool]]) -> float:
    """Tokens a second while calls waited, from a counter that was looked at often.

    Args:
      seen: (seconds, tokens so far, whether calls wait).

    Raises:
      ValueError: calls did not wait for long enough.
    """
    waiting = [each for each in seen if each[2]]
    changes = [later for earlier, later in itertools.pairwise(waiting) if later[1] != earlier[1]]
    if len(changes) < 2:
        raise ValueError("too few calls waited for a rate to be seen; give each row more of them")
    (begin, first, _), (end, last, _) = changes[0], changes[-1]
    return (last - first) / (end - begin)


class Raw:
    """The decode loop by itself: rows below the system prompts, whose own blocks have the length
    that the engine's have on average."""

    def __init__(
        self,
        model: LoadedModel,
        calls: Sequence[Call],
        system_tokens: int,
        rows: int,
        sampler: Sampler,
        passes: int,
    ):
        self.model, self.rows, self.passes = model, rows, passes
        systems = [call.system for call in calls[:rows]]
        self.length = mean_length(calls)
        used = sorted(set(systems))
        cache = KVCache.create(
            model.for_context(model.config.max_positions).config,
            (*[system_tokens] * len(used), *[ROOM] * rows),
        )
        layout = Layout.from_blocks(
            [[used.index(system), len(used) + r] for r, system in enumerate(systems)]
        )
        self._lengths = jnp.asarray(
            [*[system_tokens] * len(used), *[self.length] * rows], jnp.int32
        )
        self.state = DecodeState.create(
            dataclasses.replace(cache, lengths=self._lengths),
            layout,
            [[1]] * rows,
            samplers=sampler,
            vocab_size=model.config.vocab_size,
            budgets=2**20,
            room=1024,
            max_width=1,
        )

    def turn(self, dispatches: int) -> float:
        """Tokens a second."""
        begin = time.perf_counter()
        for _ in range(dispatches):
            # Every dispatch begins with the same lengths, so that its passes are those from the
            # middle of an answer.
            state = dataclasses.replace(
                self.state,
                cache=dataclasses.replace(self.state.cache, lengths=self._lengths + 0),
                drawn=jnp.zeros(self.rows, jnp.int32),
            )
            self.state = jax.block_until_ready(
                decode(self.model.module, self.model.params, state, passes=self.passes)
            )
        seconds = time.perf_counter() - begin
        self.state.cache.check()
        if not bool(jnp.all(self.state.running)):
            raise RuntimeError(
                "rows ended before their passes were done: "
                f"{np.asarray(self.state.reasons).tolist()}"
            )
        return self.rows * self.passes * dispatches / seconds


def mean_length(calls: Sequence[Call]) -> int:
    """Of what a row has written of its answer, over all passes of all calls."""
    return round(sum(call.budget**2 for call in calls) / (2 * sum(call.budget for call in calls)))


class Batches:
    """Serves calls in groups by `generate`, which shares what their prompts have in common, and
    keeps nothing from one to the next."""

    def __init__(self, model: LoadedModel, rows: int, sampler: Sampler):
        self.model, self.rows, self.sampler = model, rows, sampler
        # by size: seconds to the first tokens, and of a token of the longest answer
        self.costs: dict[int, tuple[float, float]] = {}

    def one(self, calls: Sequence[Call]) -> tuple[float, float]:
        """(seconds to the first tokens, seconds) of one batch; compiling is left out."""
        first: list[float] = []
        done = generate(
            self.model,
            [[*call.prompt] for call in calls],
            max_new_tokens=max(call.budget for call in calls),
            sampler=self.sampler,
            seed=calls[0].seed,
            max_rows=self.rows,
            warm_up=True,
            on_tokens=lambda run: first.append(run.seconds),
        )
        return first[0], done.seconds

    def at_once(self, calls: Sequence[Call]) -> float:
        return sum(
            self.one(calls[at : at + self.rows])[1] for at in range(0, len(calls), self.rows)
        )

    def calibrate(self, calls: Sequence[Call]) -> None:
        """Measures a batch of one call, of two, four, and so on: to compile each batch that arrives
        would take minutes."""
        sizes = [
            *itertools.takewhile(lambda size: size < self.rows, (2**i for i in itertools.count())),
            self.rows,
        ]
        for size in sizes:
            first, seconds = self.one(calls[:size])
            self.costs[size] = first, seconds / max(call.budget for call in calls[:size])

    def arriving(self, calls: Sequence[Call], at: Sequence[float]) -> list[float]:
        """Each call's seconds to its first token: whoever waits when a batch has ended makes the
        next one. A batch takes what was measured of the next larger one, in proportion to its
        longest answer."""

        def run(begin: int, end: int) -> tuple[float, float]:
            first, a_token = next(
                cost for size, cost in sorted(self.costs.items()) if size >= end - begin
            )
            return first, a_token * max(call.budget for call in calls[begin:end])

        return batch_waits(at, self.rows, run)


def batch_waits(
    at: Sequence[float], rows: int, run: Callable[[int, int], tuple[float, float]]
) -> list[float]:
    """Seconds from each arrival to the first token where batches follow one another.

    Args:
      at: arrivals, ascending.
      rows: calls of a batch at most.
      run: what runs calls [begin, end) and says (seconds to the first token, seconds).
    """
    waits, now, begin = [], 0.0, 0
    while begin < len(at):
        now = max(now, at[begin])
        end = begin + sum(arrival <= now for arrival in at[begin : begin + rows])
        first, seconds = run(begin, end)
        waits += [now + first - arrival for arrival in at[begin:end]]
        now, begin = now + seconds, end
    return waits


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50 and p99, in milliseconds."""
    return {name: float(np.quantile(seconds, q)) * 1e3 for name, q in (("p50", 0.5), ("p99", 0.99))}


def measure(
    name: str,
    model: LoadedModel,
    scale: Scale,
    *,
    passes: int,
    seed: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """One model."""
    sampler = Sampler(temperature=TEMPERATURE, forbidden=tuple(model.generation.stop_tokens))
    calls = Calls(model.config.vocab_size, seed)
    say(f"{name}: compile")
    served = Served(model, calls, scale.rows, sampler, passes)
    forgetful = Served(model, calls, scale.rows, sampler, passes, reuse=False)
    batches = Batches(model, scale.rows, sampler)
    raw = Raw(model, calls.make(scale.known, (1, 1)), SYSTEM_TOKENS, scale.rows, sampler, passes)
    raw.turn(1)
    try:
        for questions in ((1, 1), QUESTIONS):  # until the memory is full, as it is from then on
            served.at_once(calls.make(scale.known, questions))
        forgetful.at_once(calls.make(2 * scale.rows, QUESTIONS))
        say(f"{name}: saturation")
        known = saturation(served, raw, calls, scale, passes)
        say(f"{name}: all at once")
        mixed = all_at_once(served, forgetful, batches, calls, scale)
        batches.calibrate(calls.make(scale.rows, QUESTIONS))
        loads = []
        for load_ in LOADS:
            say(f"{name}: arrivals at {load_:.0%}")
            loads.append(
                arrivals(
                    served, batches, calls, scale.arrivals, load_, mixed["calls_per_second"], seed
                )
            )
    finally:
        for each in (served, forgetful):
            each.engine.shutdown()
    return {
        "model": name,
        **dataclasses.asdict(scale),
        "saturation": known,
        "at_once": mixed,
        "arrivals": loads,
    }


def saturation(served: Served, raw: Raw, calls: Calls, scale: Scale, passes: int) -> dict[str, Any]:
    """Tokens a second of the engine on calls that it knows but for a token, and of the raw loop, in
    turn."""
    rates: dict[str, list[float]] = {ENGINE: [], RAW: []}
    whole: list[float] = []
    dispatches = max(1, scale.known * sum(BUDGETS) // 2 // (scale.rows * passes) // 2)

    def engine() -> float:
        asked = calls.make(scale.known, (1, 1))
        seconds, rate = served.at_once(asked)
        whole.append(sum(call.budget for call in asked) / seconds)
        rates[ENGINE].append(rate)
        return 1 / rate

    def loop() -> float:
        rates[RAW].append(raw.turn(dispatches))
        return 1 / rates[RAW][-1]

    seconds = alternate({ENGINE: engine, RAW: loop}, 3 * scale.rounds)
    return {
        "tokens_per_second": {side: statistics.median(found) for side, found in rates.items()},
        "round_rates": rates,
        "engine_with_the_end": statistics.median(whole),
        "engine_to_raw": ratios(seconds[RAW], seconds[ENGINE]),
    }


def all_at_once(
    served: Served, forgetful: Served, batches: Batches, calls: Calls, scale: Scale
) -> dict[str, Any]:
    """The same calls on all sides: tokens a second until the last has ended."""
    asked = [calls.make(scale.calls, QUESTIONS) for _ in range(scale.rounds)]
    turns = {side: iter(asked) for side in (ENGINE, FORGETFUL, BATCHES)}
    seconds = alternate(
        {
            ENGINE: lambda: served.at_once(next(turns[ENGINE]))[0],
            FORGETFUL: lambda: forgetful.at_once(next(turns[FORGETFUL]))[0],
            BATCHES: lambda: batches.at_once(next(turns[BATCHES])),
        },
        scale.rounds,
    )
    tokens = [sum(call.budget for call in some) for some in asked]
    return {
        "tokens_per_second": {
            side: statistics.median(n / s for n, s in zip(tokens, found, strict=True))
            for side, found in seconds.items()
        },
        "engine_faster": {
            side: ratios(seconds[side], seconds[ENGINE]) for side in (FORGETFUL, BATCHES)
        },
        "calls_per_second": statistics.median(scale.calls / s for s in seconds[ENGINE]),
        "round_seconds": seconds,
    }


def arrivals(
    served: Served, batches: Batches, calls: Calls, count: int, share: float, rate: float, seed: int
) -> dict[str, Any]:
    """Time to first token at a share of the engine's own rate, in calls a second."""
    asked = calls.make(count, QUESTIONS)
    at = np.cumsum(np.random.default_rng([seed, 5]).exponential(1 / (share * rate), count)).tolist()
    first = [done.first_token_seconds for done in served.arriving(asked, at)]
    return {
        "load": share,
        "calls_per_second": share * rate,
        "calls": count,
        "first_token_milliseconds": {
            ENGINE: quantiles(first),
            BATCHES: quantiles(batches.arriving(asked, at)),
        },
    }


def goals(results: Sequence[Mapping[str, Any]]) -> list[Goal]:
    return [
        Goal(
            f"{r['model']}: tokens a second at saturation, of the raw loop's",
            r["saturation"]["engine_to_raw"]["median"],
            SATURATION_GOAL,
        )
        for r in results
    ]


def as_text(report: Mapping[str, Any]) -> str:
    """The report without its goals."""
    settings, where = report["settings"], report["machine"]
    lines = [
        f"{SYSTEMS} system prompts of {SYSTEM_TOKENS} tokens, questions of {QUESTIONS[0]} to "
        f"{QUESTIONS[1]}, answers of {BUDGETS[0]} to {BUDGETS[1]}; {settings['passes']} passes a "
        "dispatch",
        f"{where['cpu']}, {where['cores']} cores, load {where['load_average']} at the start; jax "
        f"{report['versions']['jax']}",
    ]
    return "\n\n".join(["\n".join(lines), *map(_model_text, report["results"])])


def _model_text(r: Mapping[str, Any]) -> str:
    known, mixed = r["saturation"], r["at_once"]
    ratio = known["engine_to_raw"]
    lines = [
        f"{r['model']}, {r['rows']} rows, medians of {r['rounds']} rounds, at saturation "
        f"{3 * r['rounds']}",
        "",
        table(
            ("prompts known but for a token", "tokens/s"),
            [
                *((side, f"{rate:.1f}") for side, rate in known["tokens_per_second"].items()),
                ("engine, until the last has ended", f"{known['engine_with_the_end']:.1f}"),
            ],
        ),
        f"engine to raw loop: {ratio['median']:.3f}, {ratio['lowest']:.3f} to "
        f"{ratio['highest']:.3f} by round",
        "",
        table(
            ("calls with questions, all at once", "tokens/s", "engine x"),
            [
                (
                    side,
                    f"{rate:.1f}",
                    f"{mixed['engine_faster'][side]['median']:.2f}"
                    if side in mixed["engine_faster"]
                    else "",
                )
                for side, rate in mixed["tokens_per_second"].items()
            ],
        ),
        "",
        table(
            ("time to first token, ms", "calls/s", "p50", "p99"),
            [
                (
                    f"{load['load']:.0%} load, {side}",
                    f"{load['calls_per_second']:.2f}",
                    f"{found['p50']:.0f}",
                    f"{found['p99']:.0f}",
                )
                for load in r["arrivals"]
                for side, found in load["first_token_milliseconds"].items()
            ],
        ),
    ]
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Options:
    """What was asked for; counts as `--quick` has them where they were not given."""

    models: tuple[str, ...]
    scales: Mapping[str, Scale]
    passes: int
    dtype: str
    quick: bool
    seed: int
    json: bool
    output: Path | None


def parse(arguments: Sequence[str] | None) -> Options:
    parser = Parser(prog="scripts.bench.engine", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", metavar="M,M", help=f"of {','.join(MODELS)} (default both; quick embedded)"
    )
    parser.add_argument(
        "--rows", type=int, metavar="N", help="calls at a time (default 16; quick 8)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help="turns of each side (default 5 and 3; quick 2), at saturation three times as many",
    )
    parser.add_argument(
        "--passes", type=int, default=16, help="of a dispatch (default %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of the random model (default %(default)s)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the embedded model alone, fewer calls: within three minutes on two cores",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights, calls, arrivals and answers"
    )
    parser.reporting()
    given = parser.parse_args(arguments)
    models = parser.some_of(
        "--models", given.models or ("embedded" if given.quick else ",".join(MODELS)), MODELS
    )
    for name, value in (
        ("--rows", given.rows),
        ("--rounds", given.rounds),
        ("--passes", given.passes),
    ):
        if value is not None and value < 1:
            parser.error(f"{name} is {value}, but it must be at least 1")
    if given.passes > ROOM // 2 or given.seed < 0:
        parser.error(
            f"--passes is {given.passes} and --seed {given.seed}, but the first must be at most "
            f"{ROOM // 2} and the last at least 0"
        )
    parser.check_output(given.output)
    changed = {
        name: value for name in ("rows", "rounds") if (value := getattr(given, name)) is not None
    }
    scales = {
        name: dataclasses.replace((QUICK if given.quick else FULL).get(name, FULL[name]), **changed)
        for name in MODELS
    }
    return Options(
        models, scales, given.passes, given.dtype, given.quick, given.seed, given.json, given.output
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    asked = command(
        [str(Path(__file__).resolve()), *(sys.argv[1:] if arguments is None else arguments)]
    )
    where, results = machine(), []
    with progress(len(options.models) * (3 + len(LOADS))) as say:
        for name in options.models:
            model = (
                load(EMBEDDED)
                if name == "embedded"
                else random_model(options.seed, dtype=options.dtype)
            )
            results.append(
                measure(
                    name,
                    model,
                    options.scales[name],
                    passes=options.passes,
                    seed=options.seed,
                    say=say,
                )
            )
    settings = {
        "passes": options.passes,
        "temperature": TEMPERATURE,
        "systems": SYSTEMS,
        "system_tokens": SYSTEM_TOKENS,
        "questions": QUESTIONS,
        "budgets": BUDGETS,
        "dtype": options.dtype,
        "quick": options.quick,
        "seed": options.seed,
        "model": MODEL,
    }
    report = {
        "benchmark": "engine",
        "command": asked,
        "machine": where,
        "versions": versions(("jax", "jaxlib", "flax", "numpy")),
        "settings": settings,
        "results": results,
    }
    finish(report, as_text(report), goals(results), as_json=options.json, output=options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
