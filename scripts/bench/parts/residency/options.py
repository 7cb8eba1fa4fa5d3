"""The options of the residency benchmark."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jaxshare.serving.kvcache.pool import whole_tiles
from scripts.bench.lib import Parser
from scripts.bench.parts.residency import concurrent
from scripts.bench.parts.residency.workflow import VOCABULARY, workflow

ROUNDS = (7, 21)
CAPACITY = 9000
"""Tokens; the longest prompts have 5,000 to 6,000. The goals are set at the first capacity that is
given."""
CAPACITIES = (CAPACITY, 8000, 10000, 12000)
SEEDS, QUICK_SEEDS = 5, 2
REPEATS = 5
"""Of the agents' part, each with other texts; one if quick."""

ANSWER = (VOCABULARY,) * 8
"""What the engine's model says to everything, since its sampler lets nothing else pass; no prompt
has that token."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a run; seeds and capacities as `--quick` has them where not given."""

    rounds: tuple[int, ...]
    capacities: tuple[int, ...]
    seeds: tuple[int, ...]
    engine: bool
    agents: bool
    repeats: int
    plots: Path | None
    quick: bool
    json: bool
    output: Path | None


def parse(arguments: Sequence[str] | None, description: str) -> Options:
    """The options of these arguments; ends the program where they are wrong."""
    parser = Parser(prog="scripts.bench.residency", description=description)
    parser.add_argument(
        "--rounds",
        default=",".join(map(str, ROUNDS)),
        metavar="N,...",
        help="of the workflow (default %(default)s)",
    )
    parser.add_argument(
        "--capacities",
        metavar="N,...",
        help="tokens that the memory holds; the goals are for the first "
        f"(default {','.join(map(str, CAPACITIES))}; quick {CAPACITY})",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        help=f"workflows with other texts and lengths (default {SEEDS}; quick {QUICK_SEEDS})",
    )
    parser.add_argument(
        "--engine",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run the calls on the engine, too, at the first capacity (quick: the first rounds and "
        "one workflow)",
    )
    parser.add_argument(
        "--agents",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=f"run {concurrent.TASKS} workflows side by side as agents, too, with times (quick: "
        f"{concurrent.QUICK_TASKS} of them, the first rounds, contribution and lru alone)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        help=f"agents' workflows with other texts (default {REPEATS}; quick 1)",
    )
    parser.add_argument(
        "--plots",
        type=Path,
        metavar="DIR",
        help="draw a run of the agents by contribution in the forms of figures 3, 4 and 9",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer workflows and one capacity: within three minutes on two cores",
    )
    parser.reporting()
    given = parser.parse_args(arguments)
    rounds = parser.numbers("--rounds", given.rounds, "7,21")
    default = (CAPACITY,) if given.quick else CAPACITIES
    capacities = (
        default
        if given.capacities is None
        else parser.numbers("--capacities", given.capacities, "9000,12000")
    )
    seeds = given.seeds if given.seeds is not None else QUICK_SEEDS if given.quick else SEEDS
    if seeds < 1:
        parser.error(f"--seeds is {seeds}, but there must be one workflow at least")
    longest = max(len(call.tokens) for seed in range(seeds) for call in workflow(max(rounds), seed))
    if min(capacities) < longest:
        parser.error(
            f"--capacities has {min(capacities)}, but the longest prompt of these workflows has "
            f"{longest} tokens, and a call needs all of its prompt in memory"
        )
    if given.engine and whole_tiles(capacities[0]) < longest + len(ANSWER):
        parser.error(
            f"--capacities begins with {capacities[0]}, which the engine rounds down to "
            f"{whole_tiles(capacities[0])}, but the longest call has {longest + len(ANSWER)} "
            "tokens with its answer; give more, or --no-engine"
        )
    repeats = given.repeats if given.repeats is not None else 1 if given.quick else REPEATS
    if repeats < 1:
        parser.error(f"--repeats is {repeats}, but there must be one at least")
    parser.check_folder("--plots", given.plots)
    if given.plots is not None and not given.agents:
        parser.error("--plots draws a run of the agents, and --no-agents leaves that out")
    parser.check_output(given.output)
    return Options(
        rounds,
        capacities,
        tuple(range(seeds)),
        given.engine,
        given.agents,
        repeats,
        given.plots,
        given.quick,
        given.json,
        given.output,
    )
