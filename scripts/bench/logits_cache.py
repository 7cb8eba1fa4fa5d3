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
from collections.abc import Callable, Sequence
from typing import Any

from jaxshare.models import EMBEDDED, LoadedModel, load
from jaxshare.serving.inputs import cache_dtype
from scripts.bench.lib import finish, machine, own_command, progress, versions
from scripts.bench.parts.engine.random_model import MODEL, forking_model
from scripts.bench.parts.logits_cache.options import TASKS, Options, Scale, parse
from scripts.bench.parts.logits_cache.puzzles import prompts_of, read_puzzles, sums_of
from scripts.bench.parts.logits_cache.replays import Replays
from scripts.bench.parts.logits_cache.report import (
    as_text,
    averages,
    goals,
)
from scripts.bench.parts.logits_cache.supervised import search_point


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
    replays = Replays(model, prompts, scale, tokens=tokens, turns=turns, seed=seed)
    say(f"{name}: compile")
    certainty = replays.profile()
    replays.compile()
    points = [
        replays.point(temperature, lambda step: say(f"{name}: {step}"))
        for temperature in temperatures
    ]
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
