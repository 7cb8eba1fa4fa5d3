"""The sizes and the command line of the benchmark of the Logits Cache."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.bench.lib import Parser
from scripts.bench.parts.engine.random_model import FORKS
from scripts.bench.parts.logits_cache.puzzles import puzzle_file

MODELS = ("embedded", "random")
TASKS = ("game24", "sums")
"""The puzzles, and the embedded model's own problems, which the random model is not given."""
SUPERVISORS = ("ToT", "BestOfN", "SelfConsistency", "MCTS")


TEMPERATURES = "0.2,0.4,0.6,0.8,1.0"

CACHE_BYTES = 2**30


GROWTH = 256
"""Tokens of room that the engine gives a row beyond what it needs, at most."""


PROFILE_ROWS, PROFILE_TOKENS = 8, 64
"""How many texts of which length tell how certain the model is."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """The sizes of a measurement of one model.

    Attributes:
      puzzles: prompts.
      rows: of them side by side.
      kept: logits of a distribution that are kept.
      searched: prompts under each supervisor.
    """

    puzzles: int
    rows: int
    kept: int
    searched: int


# A pass of the larger model takes 20 times as long: its puzzles are answered side by side.
FULL = {"embedded": Scale(100, 1, 64, 20), "random": Scale(100, 20, 256, 4)}


QUICK = {"embedded": Scale(32, 8, 64, 4), "random": Scale(4, 4, 256, 2)}


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a run; counts as `--quick` has them where they were not given.

    `data` is None for the example's own puzzles.
    """

    models: tuple[str, ...]
    tasks: tuple[str, ...]
    supervisors: tuple[str, ...]
    scales: Mapping[str, Scale]
    temperatures: tuple[float, ...]
    tokens: int
    turns: int
    forks: float
    rejoin: float
    dtype: str
    data: Path | None
    quick: bool
    seed: int
    json: bool
    output: Path | None


def parse(arguments: Sequence[str] | None) -> Options:
    parser = Parser(
        prog="scripts.bench.logits_cache",
        description="The value of the Logits Cache for repeated prompts.",
    )
    parser.add_models(MODELS)
    parser.add_argument("--tasks", metavar="T,T", help=f"of {','.join(TASKS)} (default both)")
    parser.add_argument(
        "--supervisors", metavar="S,S", help=f"of {','.join(SUPERVISORS)} (default all)"
    )
    parser.add_argument(
        "--searches",
        dest="searched",
        type=int,
        metavar="N",
        help="prompts under each supervisor (default 20 and 4; quick 4 and 2)",
    )
    parser.add_argument(
        "--puzzles", type=int, metavar="N", help="of each model (default 100; quick 32 and 4)"
    )
    parser.add_argument(
        "--rows",
        type=int,
        metavar="N",
        help="prompts side by side (default 1 and 20; quick 8 and 4)",
    )
    parser.add_argument(
        "--kept",
        type=int,
        metavar="K",
        help="logits that are kept of a distribution (default 64 and 256)",
    )
    parser.add_argument(
        "--temperatures", metavar="T,T", help=f"(default {TEMPERATURES}; quick 0.2,1.0)"
    )
    parser.add_argument("--tokens", type=int, help="of every answer (default 500; quick 100)")
    parser.add_argument(
        "--turns", type=int, help="answers of each prompt after the first (default 2)", default=2
    )
    parser.add_argument(
        "--forks",
        type=float,
        default=FORKS,
        help="share of tokens after which the random model is in doubt (default %(default)s)",
    )
    parser.add_argument(
        "--rejoin",
        type=float,
        default=0.0,
        help="share of these after which all its texts go on alike (default %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of the random model (default %(default)s)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="puzzles (default game24.csv in $JAXSHARE_DATA or ../shared/data, or else those of "
        "examples/game24.py)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer puzzles and temperatures, shorter answers: within three minutes",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, puzzles and answers")
    parser.reporting()
    given = parser.parse_args(arguments)
    models = parser.chosen_models(given, MODELS)
    tasks = parser.some_of("--tasks", given.tasks or ",".join(TASKS), TASKS)
    supervisors = parser.some_of(
        "--supervisors", given.supervisors or ",".join(SUPERVISORS), SUPERVISORS
    )
    temperatures = temperatures_of(
        parser, given.temperatures or ("0.2,1.0" if given.quick else TEMPERATURES)
    )
    tokens = given.tokens if given.tokens is not None else 100 if given.quick else 500
    for name, value in (
        ("--puzzles", given.puzzles),
        ("--searches", given.searched),
        ("--rows", given.rows),
        ("--kept", given.kept),
        ("--tokens", tokens),
        ("--turns", given.turns),
    ):
        if value is not None and value < 1:
            parser.error(f"{name} is {value}, but it must be at least 1")
    for name, value in (("--forks", given.forks), ("--rejoin", given.rejoin)):
        if not 0 <= value <= 1:
            parser.error(f"{name} is {value}, but it must be from 0 to 1")
    if given.seed < 0:
        parser.error(f"--seed is {given.seed}, but it must be at least 0")
    data = puzzle_file(parser, given.data)
    parser.check_output(given.output)
    changed = {
        name: value
        for name in ("puzzles", "rows", "kept", "searched")
        if (value := getattr(given, name)) is not None
    }
    scales = {
        name: dataclasses.replace(scale, **changed)
        for name, scale in (QUICK if given.quick else FULL).items()
    }
    return Options(
        models,
        tasks,
        supervisors,
        scales,
        temperatures,
        tokens,
        given.turns,
        given.forks,
        given.rejoin,
        given.dtype,
        data,
        given.quick,
        given.seed,
        given.json,
        given.output,
    )


def temperatures_of(parser: Parser, text: str) -> tuple[float, ...]:
    """The temperatures that --temperatures names; ends the program where `text` is something else."""
    try:
        found = tuple(map(float, text.split(",")))
    except ValueError:
        found = ()
    if not found or not all(0 < each < 100 for each in found) or len({*found}) < len(found):
        parser.error(
            f"--temperatures is {text!r}, but it must be different numbers above 0 with commas "
            "between, such as 0.2,1.0"
        )
    return found
