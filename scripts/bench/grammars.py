"""Measures what rows without a grammar lose beside rows that have one, in the passes of one engine.

    python -m scripts.bench.grammars                            # the full measurement
    python -m scripts.bench.grammars --quick                    # fewer rounds, the large model alone
    python -m scripts.bench.grammars --json --output FILE       # one JSON object

Eight requests without a grammar run beside eight others: without one, too; with a table on the
device; with masks of the host. Timed is until the eight have ended. Nothing ends before its length.
Then one text of a schema is timed alone, its forced tokens fed at once and sampled one by one. How
to read the result is in benchmarks/README.md.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxshare import Grammar, Sampler, SamplingParams
from jaxshare.models import EMBEDDED, LoadedModel, load
from jaxshare.serving.engine import Engine
from jaxshare.serving.grammars import compile_grammar
from scripts.bench.lib import (
    Goal,
    Parser,
    alternate,
    finish,
    machine,
    own_command,
    progress,
    ratios,
    table,
    versions,
)
from scripts.bench.parts.engine.random_model import forking_model

MODELS = ("random", "embedded")
NONE, TABLE, HOST = "without", "table", "host"
FREE = SamplingParams(1.0, ignore_eos=True)
ENDLESS = {
    NONE: FREE,
    TABLE: SamplingParams(1.0, grammar=Grammar.regex("[a-z ]{600,}")),
    HOST: SamplingParams(
        1.0, grammar=Grammar.json_schema({"type": "array", "minItems": 600, "items": {}})
    ),
}
"""Samplers whose texts do not end before their length."""
TEXT = Grammar.json_schema(
    {
        "type": "object",
        "properties": {
            name: {"type": "boolean"}
            for name in ("has_been_paid", "is_a_member", "wants_the_newsletter", "agrees_to_terms")
        },
        "required": ["has_been_paid", "is_a_member", "wants_the_newsletter", "agrees_to_terms"],
        "additionalProperties": False,
    }
)
PROMPT = "Question: what is 2 + 2?"
ROWS, TOKENS = 8, 96
ROUNDS, QUICK_ROUNDS = 9, 3
GOAL = 1.0 / 0.9


def measure(model: LoadedModel, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """The seconds of every side."""
    sides = {name: Engine(model, max_rows=2 * ROWS) for name in ENDLESS}
    one = Engine(model, max_rows=1)
    try:

        def timed(name: str) -> float:
            engine, start = sides[name], time.perf_counter()
            streams = [
                engine.submit(PROMPT, sampler, seed=i, max_new_tokens=TOKENS)
                for i in range(ROWS)
                for sampler in (FREE, ENDLESS[name])
            ]
            for stream in streams[::2]:
                stream.wait()
            seconds = time.perf_counter() - start
            for stream in streams:
                if len(stream.wait().tokens) != TOKENS:
                    raise RuntimeError(f"a text {name} has ended before its length")
            return seconds

        def text(logprobs: bool) -> float:
            start = time.perf_counter()
            sampler = Sampler(1.0, grammar=TEXT)
            for seed in range(4):
                one.submit(PROMPT, sampler, seed=seed, logprobs=logprobs).wait()
            return time.perf_counter() - start

        for name in ENDLESS:
            say(f"compiling {name}")
            timed(name)
        text(True), text(False)
        say("beside each other")
        beside = alternate({name: lambda name=name: timed(name) for name in ENDLESS}, rounds)
        say("forced tokens")
        forced = alternate({way: lambda way=way: text(way) for way in (False, True)}, rounds)
    finally:
        for engine in (*sides.values(), one):
            engine.shutdown()
    return {
        "seconds": beside,
        "to_without": {name: ratios(beside[name], beside[NONE]) for name in (TABLE, HOST)},
        "forced_to_one_by_one": ratios(forced[False], forced[True]),
    }


def goals(results: Mapping[str, Any]) -> list[Goal]:
    """The goals that these results can be held against."""
    return [
        Goal(
            f"{name}: time of rows without a grammar beside {way} to beside their like",
            found["to_without"][way]["median"],
            GOAL,
            at_most=True,
        )
        for name, found in results.items()
        for way in (TABLE, HOST)
    ]


def as_text(report: Mapping[str, Any]) -> str:
    """The report without its goals."""
    where, rows = report["machine"], []
    for name, found in report["results"].items():
        medians = [statistics.median(found["seconds"][side]) for side in ENDLESS]
        shares = [found["to_without"][side]["median"] for side in (TABLE, HOST)]
        cells = [*(f"{m:.3f}" for m in medians), *(f"{s:.3f}" for s in shares)]
        rows.append((name, *cells, f"{found['forced_to_one_by_one']['median']:.3f}"))
    header = ["model", *(f"seconds, {side}" for side in ENDLESS)]
    header += [f"{side} to without" for side in (TABLE, HOST)] + ["forced at once to one by one"]
    return "\n".join(
        [
            f"{ROWS} requests of {TOKENS} tokens without a grammar beside {ROWS} others, "
            f"{report['settings']['rounds']} rounds; {where['cpu']}, {where['cores']} cores, load "
            f"{where['load_average']} at the start; jax {report['versions']['jax']}",
            "",
            table(header, rows),
        ]
    )


def _model(name: str) -> LoadedModel:
    embedded = load(EMBEDDED)
    if name == "embedded":
        return embedded
    # The tokens of the embedded model are the first of 32,000; the others have no bytes.
    made = forking_model(0, dtype="bfloat16")
    return dataclasses.replace(made, tokenizer=embedded.tokenizer, generation=embedded.generation)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="scripts.bench.grammars", description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="default %(default)s")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, the large model alone")
    parser.reporting()
    given = parser.parse_args(arguments)
    models = parser.some_of("--models", given.models, MODELS)
    parser.check_output(given.output)
    asked = own_command(__file__, arguments)
    where, rounds = machine(), QUICK_ROUNDS if given.quick else ROUNDS
    results = {}
    with progress(5 * len(models)) as say:
        for name in models[:1] if given.quick else models:
            model = _model(name)
            for grammar in (TABLE, HOST):
                made = compile_grammar(model, ENDLESS[grammar])
                if made is None or (made.table is None) != (grammar == HOST):
                    raise RuntimeError(f"the grammar of {grammar} is of the other kind")
            results[name] = measure(model, rounds, say)
    report = {
        "benchmark": "grammars",
        "command": asked,
        "machine": where,
        "versions": versions(("jax", "jaxlib", "llguidance")),
        "settings": {"rows": ROWS, "tokens": TOKENS, "rounds": rounds},
        "results": results,
    }
    finish(report, as_text(report), goals(results), as_json=given.json, output=given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
