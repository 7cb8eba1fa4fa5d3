"""Caches that approximate against exact ones: the perplexity of a text, and the speed of decoding.

    python -m scripts.bench.approximate --model FOLDER --text FILE        # both
    python -m scripts.bench.approximate --parts speed --prompts 512,2048
    python -m scripts.bench.approximate --json --output FILE              # one JSON object

Perplexity is that of the end of a text, cut into rows which are scored by passes over caches of each
form: every key and value that is read has been quantised. Speed is that of a random Llama of 125 M
parameters in bfloat16 whose rows have long texts of their own, all forms in turn; caches are set to a
length without being filled, since a step takes as long with any numbers. How to read the result is
in benchmarks/README.md.
"""

import argparse
import dataclasses
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxshare.models import LoadedModel, load
from jaxshare.quantised_cache import APPROXIMATIONS
from jaxshare.serving.scoring import score
from scripts.bench.lib import (
    Goal,
    Parser,
    alternate,
    cores,
    finish,
    machine,
    own_command,
    progress,
    ratios,
    table,
    versions,
    write_checkpoint,
)
from scripts.bench.parts.decode.sides import MODEL, Run

PARTS = PERPLEXITY, SPEED = "perplexity", "speed"
EXACT = "exact"
FORMS: Mapping[str, str | None] = {EXACT: None, **{name: name for name in APPROXIMATIONS}}
"""What `load` takes as `approximate_kv`."""
LENGTH = 512
"""Tokens of a row of the text."""
HELD_OUT = 0.05
"""The part of the text, its end, that a model made by scripts.train.train_bytes has not learnt from."""
GOALS = {"fp8": 0.2}
"""Per cent by which perplexity may grow."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a run."""

    parts: tuple[str, ...]
    model: str | None
    text: Path | None
    tokens: int
    rows: int
    prompts: tuple[int, ...]
    rounds: int
    steps: int
    json: bool
    output: Path | None


def perplexities(options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """The perplexity of each form on the same rows, and by what part it is more than the exact one."""
    assert options.model is not None and options.text is not None
    found: dict[str, float] = {}
    counted = 0
    for name, form in FORMS.items():
        say(f"perplexity, {name}")
        model = load(options.model, approximate_kv=form)
        rows = rows_of(model, options.text.read_text(encoding="utf-8"), options.tokens)
        scores = [each for (each,) in score(model, [[]] * len(rows), [[row] for row in rows])]
        counted = sum(len(each.tokens) - 1 for each in scores)
        found[name] = math.exp(-sum(each.logprob for each in scores) / counted)
    change = {name: found[name] / found[EXACT] - 1 for name in APPROXIMATIONS}
    return {"tokens": counted, "perplexity": found, "change": change}


def rows_of(model: LoadedModel, text: str, tokens: int) -> list[list[int]]:
    """Rows of the end of a text, of at most so many tokens together."""
    assert model.tokenizer is not None
    end = text[int((1 - HELD_OUT) * len(text)) :]
    ids = model.tokenizer.encode(end, add_special_tokens=False, verbose=False)[:tokens]
    return [ids[at : at + LENGTH] for at in range(0, len(ids) - LENGTH + 1, LENGTH)]


def speeds(options: Options, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Measures decode steps of rows with prompts of their own, for each length of these."""
    growth = options.steps * (options.rounds + 1)
    with tempfile.TemporaryDirectory() as folder:
        say("weights")
        write_checkpoint(Path(folder), MODEL, 0)
        plain = load(folder)
    models = {name: dataclasses.replace(plain, approximate_kv=form) for name, form in FORMS.items()}
    for length in options.prompts:
        say(f"prompts of {length}, compile")
        with ThreadPoolExecutor(cores()) as pool:
            preparing = {
                name: pool.submit(_prepared, options, model, length, growth)
                for name, model in models.items()
            }
            runs = {name: each.result() for name, each in preparing.items()}
        say(f"prompts of {length}, decode")
        for run in runs.values():
            run.step()  # once each to warm up
        times = alternate({name: run.step for name, run in runs.items()}, options.rounds)
        for run in runs.values():
            run.check(growth)
        yield {
            "prompt": length,
            "rows": options.rows,
            "tokens_per_second": {
                name: options.rows * options.steps / statistics.median(seconds)
                for name, seconds in times.items()
            },
            "to_exact": {name: ratios(times[EXACT], times[name]) for name in APPROXIMATIONS},
            "memory": {name: run.memory() for name, run in runs.items()},
            "turn_seconds": times,
        }


def _prepared(options: Options, model: LoadedModel, length: int, growth: int) -> Run:
    """The decode loop of rows that have so many tokens each, compiled."""
    rows = options.rows
    run = Run(
        model,
        np.zeros((rows, 1), np.int32),
        [[row] for row in range(rows)],
        (length + growth,) * rows,
        options.steps,
        growth + 2,
        [[5]] * rows,
    )
    cache = run.state.cache
    cache = dataclasses.replace(cache, lengths=jnp.full_like(cache.lengths, length))
    run.state = dataclasses.replace(run.state, cache=cache)
    run.compile_loop()
    run.state = jax.block_until_ready(run.state)
    return run


def goals(report: Mapping[str, Any]) -> list[Goal]:
    """The goals of perplexity; there is none for speed."""
    change = report["results"].get(PERPLEXITY, {}).get("change", {})
    return [
        Goal(f"{name} cache: perplexity, per cent more", 100 * change[name], goal, at_most=True)
        for name, goal in GOALS.items()
        if name in change
    ]


def as_text(report: Mapping[str, Any]) -> str:
    """The report without its goals."""
    where, results = report["machine"], report["results"]
    lines = [
        f"{where['cpu']}, {where['cores']} cores, load {where['load_average']} at the start; jax "
        f"{report['versions']['jax']}"
    ]
    if PERPLEXITY in results:
        found = results[PERPLEXITY]
        rows = [
            (name, f"{value:.4f}", f"{found['change'][name]:+.3%}" if name != EXACT else "")
            for name, value in found["perplexity"].items()
        ]
        title = f"perplexity of {found['tokens']} tokens"
        lines += ["", title, table(("cache", "perplexity", "change"), rows)]
    rows = [
        (
            f"{r['prompt']}",
            name,
            f"{rate:.0f}",
            f"{r['to_exact'][name]['median']:.2f}" if name != EXACT else "",
            f"{r['memory'][name]['cache_bytes'] / 1e6:.0f}",
        )
        for r in results.get(SPEED, ())
        for name, rate in r["tokens_per_second"].items()
    ]
    if rows:
        title = f"decode of {report['settings']['rows']} rows, each with a prompt of its own"
        header = ("prompt", "cache", "tokens/s", "times exact", "MB")
        lines += ["", title, table(header, rows)]
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> Options:
    parser = Parser(prog="scripts.bench.approximate", description=__doc__.splitlines()[0])
    parser.add_argument("--parts", metavar="NAME,NAME", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--model", metavar="MODEL", help="whose perplexity is measured")
    parser.add_argument("--text", type=Path, metavar="FILE", help="its last 5 per cent is scored")
    parser.add_argument("--tokens", type=int, default=32768, help="the most (default 32768)")
    parser.add_argument("--rows", type=int, default=64, help="of a step (default 64)")
    parser.add_argument("--prompts", metavar="N,N", default="512,2048", help="(default 512,2048)")
    parser.add_argument("--rounds", type=int, help="turns of each side (default 5; quick 3)")
    parser.add_argument("--steps", type=int, help="decode steps a turn (default 16; quick 4)")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter turns")
    parser.reporting()
    return _checked(parser, parser.parse_args(arguments))


def _checked(parser: Parser, given: argparse.Namespace) -> Options:
    default = ",".join(PARTS) if given.text else SPEED
    parts = parser.some_of("--parts", given.parts or default, PARTS)
    if PERPLEXITY in parts and not (given.model and given.text):
        parser.error(f"{PERPLEXITY} takes --model and --text; scripts.train.train_bytes makes one")
    if given.text and not given.text.is_file():
        parser.error(f"--text is {given.text}, but there is no such file")
    rounds = given.rounds if given.rounds is not None else 3 if given.quick else 5
    steps = given.steps if given.steps is not None else 4 if given.quick else 16
    if min(rounds, steps, given.rows) < 1 or given.tokens < LENGTH:
        parser.error(
            f"--rounds is {rounds}, --steps {steps}, --rows {given.rows} and --tokens "
            f"{given.tokens}, but they must be at least 1, 1, 1 and {LENGTH}"
        )
    prompts = parser.numbers("--prompts", given.prompts, "512,2048")
    most = MODEL["max_position_embeddings"] - steps * (rounds + 1)
    if max(prompts) > most:
        parser.error(f"--prompts has {max(prompts)}, but with these rounds {most} is the most")
    parser.check_output(given.output)
    return Options(
        parts,
        given.model,
        given.text,
        given.tokens,
        given.rows,
        prompts,
        rounds,
        steps,
        given.json,
        given.output,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    asked = own_command(__file__, arguments)
    where, results = machine(), {}
    with progress(len(FORMS) + 1 + 2 * len(options.prompts)) as say:
        if PERPLEXITY in options.parts:
            results[PERPLEXITY] = perplexities(options, say)
        if SPEED in options.parts:
            results[SPEED] = [*speeds(options, say)]
    report = {
        "benchmark": "approximate",
        "command": asked,
        "machine": where,
        "versions": versions(("jax", "jaxlib", "flax", "numpy", "llvmlite")),
        "settings": {
            "rows": options.rows,
            "rounds": options.rounds,
            "steps": options.steps,
            "length": LENGTH,
            "model": Path(options.model).name if options.model else None,
            "text": options.text.name if options.text else None,
        },
        "results": results,
    }
    finish(report, as_text(report), goals(report), as_json=options.json, output=options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
