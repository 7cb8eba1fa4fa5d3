"""Sessions of workers, branches and calls in the same passes of one engine, against the same work
done host after host.

    python -m scripts.bench.mixed                            # the full measurement
    python -m scripts.bench.mixed --quick                    # the embedded model alone, within three minutes on two cores
    python -m scripts.bench.mixed --json --output FILE       # one JSON object

 - Sessions: sixteen of four workers, each with a problem of its own, at once on an engine, and one
   after the other without one.
 - A mixed load: four sessions of two workers, 32 branches of one prompt and 16 calls of agents,
   which arrive at random within a tenth of the time that the same work takes host after host. On
   one engine, and host after host: the sessions one after the other, `generate`, and an engine that
   serves the calls.

Nothing stops before its length. Texts are compared: each should be the one that the other side has,
and the measurement fails where more than one for 3,000 tokens are not. A few may part in float32, too:
programs of other numbers of rows round differently, and a random number can lie that near to the edge
between two tokens.

How to read the result is in benchmarks/README.md.
"""

import dataclasses
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxshare import Sampler
from jaxshare.models import EMBEDDED, LoadedModel, load
from jaxshare.serving import Workers, generate
from jaxshare.serving.engine import Engine
from jaxshare.serving.evaluation import arithmetic
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

MODELS = ("embedded", "random")
SESSIONS_GOAL = {"embedded": 4.0, "random": 2.5}
MIXED_GOAL = 1.5
ARRIVING = 0.1
"""The part of the time of host after host within which a mixed load arrives."""
TOKENS_TO_PART = 3000
"""Tokens for each text that may differ between the sides; more of these are not rounding. Of the
12,288 random numbers of the embedded model's sessions four lie within two millionths of an edge
between two tokens."""
TOGETHER, IN_TURN = "one engine", "one after the other"
NAMES = ("Alice", "Bob", "Carol", "Dan")


@dataclasses.dataclass(frozen=True)
class Scale:
    """The sizes of a measurement.

    Attributes:
      sessions: at once, of four workers each; budget: their passes.
      tokens: of a branch and of a call.
      rounds: turns of each side.
    """

    sessions: int = 16
    budget: int = 192
    tokens: int = 128
    rounds: int = 3


SCALES = {"embedded": Scale(), "random": Scale(budget=64, tokens=64)}
QUICK = Scale(budget=64, tokens=48, rounds=1)


class Load:
    """The work of a measurement on one model."""

    def __init__(self, model: LoadedModel, scale: Scale, seed: int):
        self.model, self.scale, self.seed = model, scale, seed
        stops = tuple(model.generation.stop_tokens)
        self.sampler = Sampler(temperature=0.7, forbidden=stops)
        rng = random.Random(seed)
        self.problems = [arithmetic.make_problem(rng, 4).prompt() for _ in range(64)]
        self.delays = sorted(rng.uniform(0, 1) for _ in range(4 + 1 + 16))

    def session(self, number: int, workers: int, engine: Engine | None) -> Workers:
        return Workers(
            self.model,
            self.problems[number],
            names=NAMES[:workers],
            budget=self.scale.budget,
            sampler=self.sampler,
            stop_on="never",
            seed=self.seed + number,
            step_tokens=128,
            history_tokens=1536,
            engine=engine,
        )

    def call(self, engine: Engine, number: int) -> Any:
        return engine.submit(
            self.problems[32 + number],
            self.sampler,
            max_new_tokens=self.scale.tokens,
            seed=self.seed + number,
            agent_id=f"agent {number % 4}",
        )

    def branches(self, engine: Engine | None) -> list[tuple[int, ...]]:
        done = generate(
            self.model,
            self.problems[31],
            n=32,
            max_new_tokens=self.scale.tokens,
            sampler=self.sampler,
            seed=self.seed,
            engine=engine,
        )
        return [completion.tokens for completion in done.completions]


def ran(session: Workers) -> list[list[int]]:
    """The tokens of a session that has run to its end."""
    for _ in session.stream():
        pass
    return [step.tokens for step in session.steps]


class Sides:
    """Both sides of both measurements, on engines that are made once.

    Attributes:
      arriving: the seconds within which a mixed load arrives.
    """

    def __init__(self, load_: Load):
        self.load, self.texts, self.arriving = load_, dict[tuple[str, str], Any](), 0.0
        self.engine = Engine(load_.model, kv_bytes=_kv_bytes(load_.model), max_rows=64)
        self.calls = Engine(load_.model, kv_bytes=_kv_bytes(load_.model) // 4, max_rows=16)

    def close(self) -> None:
        self.engine.shutdown()
        self.calls.shutdown()

    def sessions_at_once(self) -> float:
        sessions = [self.load.session(n, 4, self.engine) for n in range(self.load.scale.sessions)]
        begin = time.perf_counter()
        found = at_once([lambda s=s: ran(s) for s in sessions])
        seconds = time.perf_counter() - begin
        for session in sessions:
            session.close()
        self.texts["sessions", TOGETHER] = found
        return seconds

    def sessions_in_turn(self) -> float:
        sessions = [self.load.session(n, 4, None) for n in range(self.load.scale.sessions)]
        begin = time.perf_counter()
        self.texts["sessions", IN_TURN] = [ran(session) for session in sessions]
        return time.perf_counter() - begin

    def mixed_at_once(self) -> float:
        load_, engine = self.load, self.engine
        sessions = [load_.session(n, 2, engine) for n in range(4)]
        works: list[Callable[[], Any]] = [
            *(lambda s=s: ran(s) for s in sessions),
            lambda: load_.branches(engine),
            *(lambda n=n: load_.call(engine, n).wait().tokens for n in range(16)),
        ]
        delays = [self.arriving * delay for delay in load_.delays]
        begin = time.perf_counter()
        found = at_once(works, delays)
        seconds = time.perf_counter() - begin
        branches = len(sessions)  # the place of all of them
        self.texts["mixed", TOGETHER] = [
            *found[:branches],
            *found[branches],
            *found[branches + 1 :],
        ]
        for session in sessions:
            session.close()
        return seconds

    def mixed_in_turn(self) -> float:
        sessions = [self.load.session(n, 2, None) for n in range(4)]
        begin = time.perf_counter()
        found: list[Any] = [ran(session) for session in sessions]
        found += self.load.branches(None)
        streams = [self.load.call(self.calls, n) for n in range(16)]
        found += [stream.wait().tokens for stream in streams]
        self.texts["mixed", IN_TURN] = found
        return time.perf_counter() - begin

    def check(self, what: str) -> dict[str, int]:
        """The number of texts that both sides have written alike, and of all.

        Raises:
          RuntimeError: more of them differ than rounding explains.
        """
        ours, theirs = self.texts[what, TOGETHER], self.texts[what, IN_TURN]
        different = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
        if len(different) > max(sum(map(num_tokens, ours)) // TOKENS_TO_PART, 1):
            raise RuntimeError(
                f"{what}: {len(different)} of {len(ours)} texts differ between the sides"
            )
        return {"alike": len(ours) - len(different), "of": len(ours)}


def num_tokens(text: Sequence[Any]) -> int:
    """The tokens of a text, or of all steps of a session."""
    return sum(num_tokens(part) if isinstance(part, Sequence) else 1 for part in text)


def at_once(works: Sequence[Callable[[], Any]], delays: Sequence[float] = ()) -> list[Any]:
    """The results of functions that run in threads of their own, each after its delay."""
    found: list[Any] = [None] * len(works)

    def run(number: int) -> None:
        if delays:
            time.sleep(delays[number])
        found[number] = works[number]()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _kv_bytes(model: LoadedModel) -> int:
    config = model.config
    return 2 * 4 * config.num_layers * config.num_kv_heads * config.head_dim * 96 * 1024


def measure(name: str, load_: Load, say: Callable[[str], None]) -> dict[str, Any]:
    scale, sides = load_.scale, Sides(load_)
    measured: dict[str, Any] = {}
    try:
        for what, together, in_turn in (
            ("sessions", sides.sessions_at_once, sides.sessions_in_turn),
            ("mixed", sides.mixed_at_once, sides.mixed_in_turn),
        ):
            say(f"{name}: {what}, compile")
            together(), in_turn()
            sides.check(what)
            if what == "mixed":
                sides.arriving = ARRIVING * in_turn()
                together()  # so that programs of other groups of rows are compiled, too
            say(f"{name}: {what}")
            seconds = alternate({TOGETHER: together, IN_TURN: in_turn}, scale.rounds)
            texts = sides.check(what)
            tokens = (
                scale.sessions * 4 * scale.budget
                if what == "sessions"
                else 4 * 2 * scale.budget + (32 + 16) * scale.tokens
            )
            measured[what] = {
                "tokens": tokens,
                "seconds": seconds,
                "tokens_per_second": {
                    side: tokens / statistics.median(found) for side, found in seconds.items()
                },
                "faster": ratios(seconds[IN_TURN], seconds[TOGETHER]),
                "texts": texts,
            }
    finally:
        sides.close()
    return {"model": name, **dataclasses.asdict(scale), **measured}


def goals(results: Sequence[Mapping[str, Any]]) -> list[Goal]:
    return [
        goal
        for r in results
        for goal in (
            Goal(
                f"{r['model']}: {r['sessions']['tokens']} tokens of sessions at once, times faster",
                r["sessions"]["faster"]["median"],
                SESSIONS_GOAL[r["model"]],
            ),
            Goal(
                f"{r['model']}: a mixed load, times faster than host after host",
                r["mixed"]["faster"]["median"],
                MIXED_GOAL,
            ),
        )
    ]


def as_text(report: Mapping[str, Any]) -> str:
    """The report without its goals."""
    where = report["machine"]
    parts = [
        f"{where['cpu']}, {where['cores']} cores, load {where['load_average']} at the start; jax "
        f"{report['versions']['jax']}"
    ]
    for r in report["results"]:
        rows = [
            (
                what,
                *(f"{r[what]['tokens_per_second'][side]:.0f}" for side in (TOGETHER, IN_TURN)),
                f"{r[what]['faster']['median']:.2f}",
                f"{r[what]['faster']['lowest']:.2f} to {r[what]['faster']['highest']:.2f}",
                f"{r[what]['texts']['alike']} of {r[what]['texts']['of']}",
            )
            for what in ("sessions", "mixed")
        ]
        header = (f"{r['model']}, tokens/s", TOGETHER, IN_TURN, "faster", "by round", "same texts")
        parts.append(table(header, rows))
    return "\n\n".join(parts)


def parse(arguments: Sequence[str] | None) -> Any:
    parser = Parser(prog="scripts.bench.mixed", description=(__doc__ or "").split("\n")[0])
    parser.add_models(MODELS)
    parser.add_argument("--quick", action="store_true", help="within three minutes on two cores")
    parser.add_argument("--seed", type=int, default=0, help="of problems, arrivals and texts")
    parser.reporting()
    given = parser.parse_args(arguments)
    given.models = parser.chosen_models(given, MODELS)
    parser.at_least(0, seed=given.seed)
    parser.check_output(given.output)
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    asked = own_command(__file__, arguments)
    where, results = machine(), []
    with progress(4 * len(options.models)) as say:
        for name in options.models:
            model = load(EMBEDDED) if name == "embedded" else _random(options.seed)
            scale = QUICK if options.quick else SCALES[name]
            results.append(measure(name, Load(model, scale, options.seed), say))
    report = {
        "benchmark": "mixed",
        "command": asked,
        "machine": where,
        "versions": versions(("jax", "jaxlib", "flax", "numpy")),
        "settings": {"quick": options.quick, "seed": options.seed, "temperature": 0.7},
        "results": results,
    }
    finish(report, as_text(report), goals(results), as_json=options.json, output=options.output)
    return 0


def _random(seed: int) -> LoadedModel:
    """A random model that is certain of most tokens, in float32, with the embedded model's texts.

    One that is certain of none would draw others where two programs round differently.
    """
    embedded = load(EMBEDDED)
    return dataclasses.replace(
        forking_model(seed, dtype="float32"),
        tokenizer=embedded.tokenizer,
        workers=embedded.workers,
    )


if __name__ == "__main__":
    sys.exit(main())
