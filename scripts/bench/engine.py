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
   the host does nothing but wait. The engine is given calls whose prompts it has cached but for
   one token, and is timed from when its rows are full to when the last call leaves the queue.
 - Streams that go on: as many calls as there are rows, with answers of 512 tokens, where the next
   dispatch is made before the results of the last are read, and where it is not.
 - Calls with questions, all at once: the engine, the engine without prefix reuse (its tree is made
   to find nothing), and `jaxshare.serving.generate` on one batch of calls after another, in the
   order of their arrival. There a batch lasts as long as its longest answer; tokens after
   the end of an answer do not count.
 - Time to first token: calls arrive at random (Poisson) at a share of the rate that the engine
   serves when calls always wait. Batches run on a clock of their own, with times that were measured
   before, so that compiling them does not count.

How to read the result is in benchmarks/README.md.
"""

import dataclasses
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxshare import Sampler
from jaxshare.models import EMBEDDED, LoadedModel, load
from scripts.bench.lib import (
    Goal,
    alternate,
    finish,
    machine,
    own_command,
    progress,
    ratios,
    table,
    versions,
)
from scripts.bench.parts.engine.options import Scale, parse
from scripts.bench.parts.engine.random_model import MODEL, random_model
from scripts.bench.parts.engine.sides import (
    BATCHES,
    BUDGETS,
    ENGINE,
    FORGETFUL,
    LOADS,
    QUESTIONS,
    RAW,
    SYSTEM_TOKENS,
    SYSTEMS,
    TEMPERATURE,
    Batches,
    Calls,
    Raw,
    Served,
    arrivals,
    steady_rate,
)

SATURATION_GOAL = 0.90
STREAMED = 512
"""Tokens of each answer where all rows go on."""
TWO_UNDER_WAY, ONE_BY_ONE = "two under way", "one by one"


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
        going_on = streams(served, calls, scale)
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
        "streams": going_on,
        "at_once": mixed,
        "arrivals": loads,
    }


def saturation(served: Served, raw: Raw, calls: Calls, scale: Scale, passes: int) -> dict[str, Any]:
    """The engine's tokens a second on calls that it has cached but for a token, and the raw loop's,
    in turn."""
    rates: dict[str, list[float]] = {ENGINE: [], RAW: []}
    whole: list[float] = []
    dispatches = max(1, scale.known * sum(BUDGETS) // 2 // (scale.rows * passes) // 2)

    def engine() -> float:
        asked = calls.make(scale.known, (1, 1))
        seconds, seen = served.at_once(asked)
        rate = steady_rate(seen)
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


def streams(served: Served, calls: Calls, scale: Scale) -> dict[str, Any]:
    """The engine's tokens a second where all rows go on, with the next dispatch made before the results
    of the last are read, and one by one."""

    def side(follows: bool) -> float:
        served.engine._scheduler.follows = follows
        asked = calls.make(scale.rows, (1, 1), (STREAMED, STREAMED))
        return served.at_once(asked)[0]

    side(True)  # compiles
    sides = {TWO_UNDER_WAY: lambda: side(True), ONE_BY_ONE: lambda: side(False)}
    seconds, tokens = alternate(sides, 3 * scale.rounds), scale.rows * STREAMED
    served.engine._scheduler.follows = True
    return {
        "tokens_per_second": {
            each: tokens / statistics.median(found) for each, found in seconds.items()
        },
        "faster": ratios(seconds[ONE_BY_ONE], seconds[TWO_UNDER_WAY]),
        "round_seconds": seconds,
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
            (f"streams of {STREAMED} tokens, dispatches made", "tokens/s"),
            [(side, f"{rate:.1f}") for side, rate in r["streams"]["tokens_per_second"].items()],
        ),
        f"{TWO_UNDER_WAY} to {ONE_BY_ONE}: {r['streams']['faster']['median']:.3f}",
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


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    asked = own_command(__file__, arguments)
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
