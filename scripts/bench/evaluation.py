"""An evaluation's tokens a second, with many sessions in the passes of one engine, against those of
the engine under calls, and against one session after another.

    python -m scripts.bench.evaluation                           # the full measurement: 64 problems, four workers each
    python -m scripts.bench.evaluation --quick                   # eight problems, within three minutes on two cores
    python -m scripts.bench.evaluation --json --output FILE      # one JSON object

 - The evaluation: `jaxshare.serving.evaluation.execute` on all problems, prompts and early answers
   included, with as many runs at once as it chooses by itself or as --concurrency says. Its tokens
   are those that workers have sampled; nothing stops before its budget.
 - The engine: `scripts.bench.engine`'s calls at saturation, with as many rows at a time; their
   prompts are cached but for a token.
 - One by one: the first problems, without an engine.

Texts of all problems that were solved both ways are compared. How to read the result is in
benchmarks/README.md.
"""

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxshare import Sampler
from jaxshare.models import EMBEDDED, LoadedModel, load
from jaxshare.serving.evaluation import Run, RunSpec, execute, load_task, run_specs
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
from scripts.bench.parts.engine.sides import Calls, Served, steady_rate

MODELS = ("embedded", "random")
EVALUATION, ENGINE, ALONE = "evaluation", "engine", "one by one"
OF_ENGINE = 0.85
"""The goal: tokens a second, of the engine's."""
WORKERS, PASSES, TEMPERATURE = 4, 16, 0.7


@dataclasses.dataclass(frozen=True)
class Scale:
    """The sizes of a measurement.

    Attributes:
      problems: of the evaluation; alone: of them one by one.
      budget: passes of each run.
      rounds: turns of each side.
    """

    problems: int = 64
    alone: int = 8
    budget: int = 192
    rounds: int = 3


SCALES = {"embedded": Scale(), "random": Scale(alone=2, budget=64)}
QUICK = Scale(problems=8, alone=2, budget=64, rounds=1)


class Sides:
    """The sides of a measurement of one model, and what they wrote."""

    def __init__(self, model: LoadedModel, scale: Scale, concurrency: int | None, seed: int):
        self.model, self.scale, self.concurrency = model, scale, concurrency
        self.texts: dict[str, dict[Any, Any]] = {}
        self.tokens: dict[str, int] = {}
        stops = tuple(model.generation.stop_tokens)
        self.sampler = Sampler(temperature=TEMPERATURE, forbidden=stops)
        task = load_task("sums", samples=scale.problems)
        self.specs = run_specs(
            task.problems,
            method="workers",
            workers=[WORKERS],
            budgets=[scale.budget],
            seeds=1,
            seed=seed,
            answer_tokens=task.answer_tokens,
            sampler=self.sampler,
            more={"stop_on": "never"},
        )
        rows = WORKERS * (concurrency or 64 // WORKERS)
        self.calls = Calls(model.config.vocab_size, seed)
        self.served = Served(model, self.calls, rows, self.sampler, PASSES)
        self.rates: list[float] = []

    def close(self) -> None:
        self.served.engine.shutdown()

    def evaluation(self) -> float:
        return self._executed(EVALUATION, self.specs, self.concurrency)

    def alone(self) -> float:
        return self._executed(ALONE, self.specs[: self.scale.alone], 1)

    def engine(self) -> float:
        """The seconds that the engine takes for the evaluation's tokens, at saturation."""
        rows = self.served.engine.rows
        _, seen = self.served.at_once(self.calls.make(4 * rows, (1, 1)))
        self.rates.append(steady_rate(seen))
        return self.scale.problems * WORKERS * self.scale.budget / self.rates[-1]

    def _executed(self, side: str, specs: Sequence[RunSpec], concurrency: int | None) -> float:
        begin = time.perf_counter()
        made = [*execute(self.model, concurrency)(specs, lambda passes: None)]
        seconds = time.perf_counter() - begin
        refused = [run for _, run in made if not isinstance(run, Run)]
        if refused:
            raise RuntimeError(f"{side}: {len(refused)} runs were refused, the first: {refused[0]}")
        self.texts[side] = {spec.key: sampled(run) for spec, run in made}
        self.tokens[side] = sum(
            len(tokens) for run in self.texts[side].values() for tokens in run.values()
        )
        return seconds

    def check(self) -> None:
        """Raises RuntimeError where the sides have not written the same."""
        ours, theirs = self.texts[EVALUATION], self.texts[ALONE]
        if different := [key[1] for key, tokens in theirs.items() if ours[key] != tokens]:
            raise RuntimeError(f"the texts of problems {different} differ between the sides")


def sampled(run: Run) -> dict[str, list[int]]:
    """The tokens that each worker of a run has sampled."""
    return {
        name: [token for step in steps for token in step["tokens"]]
        for name, steps in run.result["workers"].items()
    }


def measure(name: str, sides: Sides, say: Callable[[str], None]) -> dict[str, Any]:
    say(f"{name}: compile")
    sides.evaluation(), sides.alone(), sides.engine()
    sides.check()
    say(f"{name}: measure")
    seconds = alternate(
        {EVALUATION: sides.evaluation, ENGINE: sides.engine, ALONE: sides.alone},
        sides.scale.rounds,
    )
    sides.check()
    per_token = {
        side: [each / tokens for each in seconds[side]]
        for side, tokens in (
            (EVALUATION, sides.tokens[EVALUATION]),
            (ENGINE, sides.scale.problems * WORKERS * sides.scale.budget),
            (ALONE, sides.tokens[ALONE]),
        )
    }
    return {
        "model": name,
        **dataclasses.asdict(sides.scale),
        "rows": sides.served.engine.rows,
        "tokens": sides.tokens,
        "seconds": seconds,
        "tokens_per_second": {side: 1 / min(found) for side, found in per_token.items()},
        "of_engine": ratios(per_token[ENGINE], per_token[EVALUATION]),
        "of_one_by_one": ratios(per_token[ALONE], per_token[EVALUATION]),
    }


def goals(results: Sequence[Mapping[str, Any]]) -> list[Goal]:
    return [
        Goal(
            f"{r['model']}: tokens a second of {r['problems']} problems x {WORKERS} workers, of the "
            "engine's",
            r["of_engine"]["median"],
            OF_ENGINE,
        )
        for r in results
    ]


def as_text(report: Mapping[str, Any]) -> str:
    """The report without its goals."""
    where = report["machine"]
    parts = [
        f"{where['cpu']}, {where['cores']} cores, load {where['load_average']} at the start; jax "
        f"{report['versions']['jax']}"
    ]
    for r in report["results"]:
        rows = [(side, f"{rate:.0f}") for side, rate in r["tokens_per_second"].items()]
        parts.append(
            table((f"{r['model']}, {r['rows']} rows, budget {r['budget']}", "tokens/s"), rows)
            + f"\nof the engine's {r['of_engine']['median']:.2f}, of one by one "
            f"{r['of_one_by_one']['median']:.2f}"
        )
    return "\n\n".join(parts)


def parse(arguments: Sequence[str] | None) -> Any:
    parser = Parser(prog="scripts.bench.evaluation", description=(__doc__ or "").split("\n")[0])
    parser.add_models(MODELS)
    parser.add_argument("--quick", action="store_true", help="within three minutes on two cores")
    parser.add_argument(
        "--concurrency", type=int, metavar="N", help="runs at the same time (default: as chosen)"
    )
    parser.add_argument("--budget", type=int, metavar="P", help="passes of each run")
    parser.add_argument("--seed", type=int, default=0, help="of problems' texts and of calls")
    parser.reporting()
    given = parser.parse_args(arguments)
    given.models = parser.chosen_models(given, MODELS)
    for name in ("concurrency", "budget"):
        value = getattr(given, name)
        if value is not None and not 1 <= value <= 4096:
            parser.error(f"--{name} is {value}, but it must be 1 to 4096")
    parser.at_least(0, seed=given.seed)
    parser.check_output(given.output)
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    asked = own_command(__file__, arguments)
    where, results = machine(), []
    with progress(2 * len(options.models)) as say:
        for name in options.models:
            scale = QUICK if options.quick else SCALES[name]
            if options.budget is not None:
                scale = dataclasses.replace(scale, budget=options.budget)
            sides = Sides(_model(name, options.seed), scale, options.concurrency, options.seed)
            try:
                results.append(measure(name, sides, say))
            finally:
                sides.close()
    report = {
        "benchmark": "evaluation",
        "command": asked,
        "machine": where,
        "versions": versions(("jax", "jaxlib", "flax", "numpy")),
        "settings": {
            "quick": options.quick,
            "seed": options.seed,
            "concurrency": options.concurrency,
            "temperature": TEMPERATURE,
        },
        "results": results,
    }
    finish(report, as_text(report), goals(results), as_json=options.json, output=options.output)
    return 0


def _model(name: str, seed: int) -> LoadedModel:
    """The embedded model, or a random one of 108 M parameters in float32 with its texts."""
    embedded = load(EMBEDDED)
    if name == "embedded":
        return embedded
    return dataclasses.replace(
        forking_model(seed, dtype="float32"),
        tokenizer=embedded.tokenizer,
        workers=embedded.workers,
    )


if __name__ == "__main__":
    sys.exit(main())
