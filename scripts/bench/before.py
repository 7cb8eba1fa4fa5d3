"""This checkout against an earlier one: passes of workers, and completions with and without a
common prompt.

    git worktree add ../earlier COMMIT
    python -m scripts.bench.before --earlier ../earlier            # the full measurement
    python -m scripts.bench.before --earlier ../earlier --quick    # within three minutes on two cores
    python -m scripts.bench.before --earlier DIR --json --output FILE

Both run the embedded model in processes of their own, under this Python, and only one at a time.
Texts of both are compared and reported; they may differ where an issue has changed them. How to
read the result is in benchmarks/README.md.
"""

import argparse
import dataclasses
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.lib import (
    ROOT,
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
from scripts.bench.peer import Worker, WorkerError

NOW, EARLIER = "now", "earlier"
COUNTS, ROWS, PROMPT = (1, 2, 4), 64, 512
PASS_GOAL, BRANCHES_GOAL = 1.03, 0.97
WORKER = "scripts.bench.peers.checkout"


@dataclasses.dataclass(frozen=True)
class Scale:
    """The sizes of a measurement.

    Attributes:
      passes: of a session of workers; tokens: of a completion.
      rounds: turns of each side.
    """

    passes: int = 384
    tokens: int = 128
    rounds: int = 7


QUICK = Scale(passes=128, tokens=48, rounds=2)


def cases(scale: Scale, seed: int) -> dict[str, dict[str, Any]]:
    """The requests to a side by their names. Prompts are random bytes, which nothing has cached."""
    rng = random.Random(seed)

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(32, 127) for _ in range(tokens)]

    branches = {"do": "branches", "tokens": scale.tokens}
    return {
        **{
            f"a pass of {n} worker{'s' * (n > 1)}": {
                "do": "workers",
                "count": n,
                "budget": scale.passes,
            }
            for n in COUNTS
        },
        f"{ROWS} rows of one prompt": {**branches, "prompts": [prompt(PROMPT)], "n": ROWS},
        f"{ROWS} rows of {ROWS} prompts": {
            **branches,
            "prompts": [prompt(PROMPT // 4) for _ in range(ROWS)],
            "n": 1,
        },
    }


def measure(
    sides: Mapping[str, Worker], scale: Scale, seed: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """For each case the milliseconds of both sides in every round, a pass or a whole call, and
    whether their texts are the same."""
    results = {}
    for name, request in cases(scale, seed).items():
        digests: dict[str, set[str]] = {side: set() for side in sides}

        def once(side: str, request: Any = request, digests: Any = digests) -> float:
            answer = sides[side].ask(**request)
            digests[side].add(answer["digest"])
            return answer["seconds"] / answer.get("passes", 1) * 1e3

        turns = {side: lambda side=side: once(side) for side in sides}
        say(f"{name}, compile")
        alternate(turns, 1)
        say(name)
        times = alternate(turns, scale.rounds)
        if any(len(found) > 1 for found in digests.values()):
            raise RuntimeError(f"{name}: the same call wrote different texts")
        results[name] = {
            "milliseconds": times,
            "median": {side: statistics.median(found) for side, found in times.items()},
            "now_of_earlier": ratios(times[NOW], times[EARLIER]),
            "faster": ratios(times[EARLIER], times[NOW]),
            "equal_texts": digests[NOW] == digests[EARLIER],
        }
    return results


def goals(results: Mapping[str, Any]) -> list[Goal]:
    return [
        Goal(f"{name}, times as long", r["now_of_earlier"]["median"], PASS_GOAL, at_most=True)
        if "pass" in name
        else Goal(f"{name}, times as fast", r["faster"]["median"], BRANCHES_GOAL)
        for name, r in results.items()
    ]


def as_text(report: Mapping[str, Any]) -> str:
    """The report without its goals."""
    where = report["machine"]
    rows = [
        (
            name,
            *(f"{r['median'][side]:.2f}" for side in (NOW, EARLIER)),
            f"{r['now_of_earlier']['median']:.3f}",
            f"{r['now_of_earlier']['lowest']:.2f} to {r['now_of_earlier']['highest']:.2f}",
            "yes" if r["equal_texts"] else "no",
        )
        for name, r in report["results"].items()
    ]
    header = ("embedded, ms", NOW, EARLIER, "now/earlier", "by round", "equal texts")
    return "\n\n".join(
        [
            f"{where['cpu']}, {where['cores']} cores, load {where['load_average']} at the start; "
            f"jax {report['versions']['jax']}; earlier: {report['earlier']}",
            table(header, rows),
        ]
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="scripts.bench.before", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--earlier", type=Path, required=True, metavar="DIR", help="a checkout of jaxshare"
    )
    parser.add_argument("--quick", action="store_true", help="within three minutes on two cores")
    parser.add_argument("--seed", type=int, default=0, help="of prompts")
    parser.reporting()
    given = parser.parse_args(arguments)
    if not (given.earlier / "jaxshare" / "__init__.py").is_file():
        parser.error(
            f"--earlier is {given.earlier}, but there is no jaxshare in it; name a checkout, such "
            "as `git worktree add` makes"
        )
    parser.at_least(0, seed=given.seed)
    parser.check_output(given.output)
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    asked = own_command(__file__, arguments)
    where, scale = machine(), QUICK if options.quick else Scale()
    folders = {NOW: ROOT, EARLIER: options.earlier.resolve()}
    # Programs that one side has kept would not be compiled there: each compiles its own.
    off = {"JAXSHARE_COMPILE_CACHE": "off"}
    workers: dict[str, Worker] = {}
    try:
        for side, folder in folders.items():
            workers[side] = Worker(sys.executable, WORKER, {**off, "CHECKOUT": str(folder)})
            try:
                workers[side].begin()
            except WorkerError as error:
                print(f"{side} ({folder}): {error}", file=sys.stderr)
                return 1
        with progress(2 * len(cases(scale, 0))) as say:
            results = measure(workers, scale, options.seed, say)
    finally:
        for worker in workers.values():
            worker.close()
    report = {
        "benchmark": "before",
        "command": asked,
        "machine": where,
        "versions": versions(("jax", "jaxlib", "flax", "numpy")),
        "settings": {**dataclasses.asdict(scale), "quick": options.quick, "seed": options.seed},
        "earlier": _commit(folders[EARLIER]),
        "results": results,
    }
    finish(report, as_text(report), goals(results), as_json=options.json, output=options.output)
    return 0


def _commit(folder: Path) -> str:
    """The commit of a checkout, or "unknown"."""
    found = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
