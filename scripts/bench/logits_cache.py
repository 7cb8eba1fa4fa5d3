"""The value of the Logits Cache for repeated prompts: tokens a second, hits and bytes.

    python -m scripts.bench.logits_cache                               # the full measurement
    python -m scripts.bench.logits_cache --quick                       # the embedded model alone, within three minutes on two cores
    python -m scripts.bench.logits_cache --models random --forks 0.2   # a model that is in doubt more often
    python -m scripts.bench.logits_cache --json --output FILE          # one JSON object

The measurement is that of section 8.2 of Hive: every prompt, a puzzle of the game of 24, is
answered once, and then again with other seeds, always with the same number of tokens; and some
prompts are given to agents whose supervisors fire a state several times at once. The baseline is the
same engine without a Logits Cache; it finds the prompt's keys and values as the others do. A
group of prompts runs side by side, one a row, on one side after the other. How to read the result
is in benchmarks/README.md.
"""

import dataclasses
import itertools
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxshare import KVCache, Layout, Sampler
from jaxshare.layout import bucket
from jaxshare.models import EMBEDDED, LoadedModel, load
from jaxshare.seeds import stream_seed
from jaxshare.serving.engine import Engine
from jaxshare.serving.inputs import cache_dtype, token_bytes
from scripts.bench.lib import finish, machine, own_command, progress, versions
from scripts.bench.parts.engine.random_model import MODEL, Profile, forking_model, profile
from scripts.bench.parts.logits_cache.group import Group, engines_of, run_group
from scripts.bench.parts.logits_cache.options import (
    CACHE_BYTES,
    GROWTH,
    PROFILE_ROWS,
    PROFILE_TOKENS,
    TASKS,
    Options,
    Scale,
    parse,
    prompts_of,
    read_puzzles,
    sums_of,
)
from scripts.bench.parts.logits_cache.report import (
    BASELINE,
    SIDES,
    STEPWISE,
    as_text,
    averages,
    goals,
)
from scripts.bench.parts.logits_cache.supervised import search_point


def summarise(temperature: float, groups: Sequence[Group], vocab: int) -> dict[str, Any]:
    """All groups of one temperature. As in the paper, requests that came out of the cache whole are
    counted apart: what they gain has no bound. `speedup_with_all` has them in it. `free_replay` is
    what a replay alone cannot surpass: the speed-up if it had cost nothing, and every other token
    as much as in the baseline."""
    requests = [request for group in groups for request in group.requests]
    sides = {}
    for side in SIDES:
        some = [r for r in requests if side == BASELINE or r.replayed[side] < len(r.tokens[side])]
        rates = [len(r.tokens[side]) / r.seconds[side] for r in some]
        found: dict[str, Any] = {
            "requests": len(some),
            "whole_hits": len(requests) - len(some),
            "mean_tokens_per_second": statistics.fmean(rates) if rates else None,
            "median_tokens_per_second": statistics.median(rates) if rates else None,
            "group_seconds": sum(sum(group.seconds[side]) for group in groups),
        }
        if side != BASELINE:
            speedups = [r.speedup(side) for r in some]
            found |= {
                "speedup": statistics.fmean(speedups) if some else None,
                "median_speedup": statistics.median(speedups) if some else None,
                "free_replay": statistics.fmean(1 / (1 - r.hit_ratio(side)) for r in some)
                if some
                else None,
                "speedup_with_all": statistics.fmean(r.speedup(side) for r in requests),
                "hit_ratio": statistics.fmean(r.hit_ratio(side) for r in some) if some else None,
                "hit_ratio_with_all": statistics.fmean(r.hit_ratio(side) for r in requests),
            }
        sides[side] = found
    distances = [pair for group in groups for pair in group.distances]
    return {
        "temperature": temperature,
        "sides": sides,
        "different_from_baseline": sum(r.tokens[STEPWISE] != r.tokens[BASELINE] for r in requests),
        "storage_of_full_logits": sum(g.bytes for g in groups)
        / (sum(g.positions for g in groups) * vocab * 4),
        "hotspot_distance": {
            "position": statistics.fmean(each for each, _ in distances) if distances else 0.0,
            "sequence": statistics.fmean(each for _, each in distances) if distances else 0.0,
        },
    }


def model_profile(
    model: LoadedModel, prompts: Sequence[Sequence[int]], forbidden: tuple[int, ...], seed: int
) -> Profile:
    """The certainty of the model about its own text at temperature 1."""
    some = [list(prompt) for prompt in prompts[:PROFILE_ROWS]]
    with Engine(
        model,
        max_rows=len(some),
        kv_bytes=len(some) * (len(max(some, key=len)) + 1024) * token_bytes(model),
    ) as engine:
        streams = [
            engine.submit(
                prompt,
                Sampler(temperature=1.0, forbidden=forbidden),
                max_new_tokens=PROFILE_TOKENS,
                seed=stream_seed(seed, "profile", i),
            )
            for i, prompt in enumerate(some)
        ]
        texts = [
            [*prompt, *stream.wait().tokens] for prompt, stream in zip(some, streams, strict=True)
        ]
    length, logits = max(map(len, texts)), []
    for text in texts:
        cache = KVCache.create(model.config, (length,))
        padded = np.zeros((1, length), np.int32)
        padded[0, : len(text)] = text
        found, _ = model.forward(padded, [len(text)], cache, Layout.from_blocks([[0]]), every=True)
        own = np.array(found, np.float32)[0, len(text) - PROFILE_TOKENS - 1 : len(text) - 1]
        own[:, list(forbidden)] = -np.inf
        logits.append(own)
    return profile(np.concatenate(logits))


def measure(
    name: str,
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    scale: Scale,
    *,
    temperatures: Sequence[float],
    tokens: int,
    turns: int,
    seed: int,
    say: Callable[[str], None],
    task: str = TASKS[0],
) -> dict[str, Any]:
    """Measures one model at all temperatures, once everything is compiled: its prompts alone."""
    forbidden = tuple(model.generation.stop_tokens)
    # All answers of a prompt fit beside it, and the capacity of the next one.
    capacity = max(8, scale.rows) * (max(map(len, prompts)) + (turns + 2) * (tokens + GROWTH))
    kv_bytes = bucket(capacity) * token_bytes(model)  # alike for both tasks, which share programs
    groups = [
        range(at, min(at + scale.rows, len(prompts))) for at in range(0, len(prompts), scale.rows)
    ]

    def run(engines: Mapping[str, Engine], group: range, temperature: float, seed: int) -> Group:
        some, sampler = [prompts[i] for i in group], Sampler(temperature, forbidden=forbidden)
        sizes = {"tokens": tokens, "turns": turns, "seed": seed}
        return run_group(engines, some, puzzles=group, sampler=sampler, **sizes)

    say(f"{name}: compile")
    certainty = model_profile(model, prompts, forbidden, seed)
    sizes = {"kept": scale.kept, "kv_bytes": kv_bytes, "rows": scale.rows}
    warm_up(model, prompts, forbidden, **sizes)
    with engines_of(model, **sizes, always=True) as engines:
        for temperature in (0.3, 1.0):  # untimed
            run(engines, groups[0], temperature, stream_seed(seed, "warm up"))
    points = []
    for temperature in temperatures:
        done = []
        # They know nothing at first, and learn from group to group where the Logits Cache pays.
        with engines_of(model, **sizes) as engines:
            for number, group in enumerate(groups):
                say(f"{name}: temperature {temperature}, group {number + 1} of {len(groups)}")
                done.append(run(engines, group, temperature, seed))
        points.append(summarise(temperature, done, model.config.vocab_size))
    return {
        "model": name,
        "task": task,
        "dtype": str(cache_dtype(model)),
        "vocab": model.config.vocab_size,
        **dataclasses.asdict(scale),
        "puzzles": len(prompts),
        "prompt_tokens": statistics.fmean(map(len, prompts)),
        "profile": dataclasses.asdict(certainty),
        "points": points,
        "averages": averages(points),
    }


def warm_up(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    forbidden: tuple[int, ...],
    *,
    kept: int,
    kv_bytes: int,
    rows: int,
) -> None:
    """Lets every number of rows begin together once."""
    with Engine(
        model, max_rows=rows, kv_bytes=kv_bytes, logits_cache=CACHE_BYTES, kept_logits=kept
    ) as engine:
        for count in range(1, rows + 2):
            streams = [
                engine.submit(
                    prompts[i % len(prompts)],
                    Sampler(temperature=1.0, forbidden=forbidden),
                    max_new_tokens=4,
                    seed=count * rows + i,
                    resample=STEPWISE,
                )
                for i in range(count)
            ]
            for stream in streams:
                stream.wait()


def search_all(
    name: str,
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    options: Options,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Measures some of the prompts under each supervisor at all temperatures."""
    scale, found = options.scales[name], []
    for supervisor, temperature in itertools.product(options.supervisors, options.temperatures):
        say(f"{name}: {supervisor} at temperature {temperature}")
        found.append(
            search_point(
                model,
                prompts[: scale.searched],
                supervisor=supervisor,
                temperature=temperature,
                tokens=options.tokens,
                kept=scale.kept,
                seed=options.seed,
            )
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.data is None:
        print(
            "scripts.bench.logits_cache: there is no game24.csv in $JAXSHARE_DATA or "
            "../shared/data, so the puzzles are the few of examples/game24.py; name more with "
            "--data",
            file=sys.stderr,
        )
    asked = own_command(__file__, arguments)
    where = machine()
    try:
        results = measure_all(options)
    except ValueError as error:  # puzzles that are none, or answers longer than the model's context
        print(f"scripts.bench.logits_cache: {error}", file=sys.stderr)
        return 2
    settings = {
        "tokens": options.tokens,
        "turns": options.turns,
        "temperatures": options.temperatures,
        "forks": options.forks,
        "rejoin": options.rejoin,
        "quick": options.quick,
        "seed": options.seed,
        "puzzles": "file" if options.data else "of the example",
        "model": MODEL,
    }
    report = {
        "benchmark": "logits_cache",
        "command": asked,
        "machine": where,
        "versions": versions(("jax", "jaxlib", "flax", "numpy")),
        "settings": settings,
        "results": results,
    }
    finish(report, as_text(report), goals(results), as_json=options.json, output=options.output)
    return 0


def measure_all(options: Options) -> list[dict[str, Any]]:
    """The results, one a model."""
    results = []
    embedded = load(EMBEDDED)
    puzzles = {
        name: read_puzzles(options.data, options.scales[name].puzzles, options.seed)
        for name in options.models
    }
    measured = [
        (name, task)
        for name in options.models
        for task in options.tasks
        if task == TASKS[0] or name == "embedded"
    ]
    steps = sum(
        (-(-len(puzzles[name]) // options.scales[name].rows) + len(options.supervisors))
        * len(options.temperatures)
        + 1
        for name, _ in measured
    )
    with progress(steps) as say:
        for name, task in measured:
            prompts = prompts_of(embedded, puzzles[name], None, options.seed)
            model = embedded
            if task == "sums":
                prompts = sums_of(embedded, len(prompts), options.seed)
            if name == "random":
                model = forking_model(
                    options.seed, dtype=options.dtype, forks=options.forks, rejoin=options.rejoin
                )
                prompts = prompts_of(model, puzzles[name], [*map(len, prompts)], options.seed)
            result = measure(
                name,
                model,
                prompts,
                options.scales[name],
                temperatures=options.temperatures,
                tokens=options.tokens,
                turns=options.turns,
                seed=options.seed,
                say=say,
                task=task,
            )
            results.append(result | {"searches": search_all(name, model, prompts, options, say)})
    return results


if __name__ == "__main__":
    sys.exit(main())
