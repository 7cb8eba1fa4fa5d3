"""The sizes and the command line of the benchmark of the Logits Cache."""

import dataclasses
import functools
import importlib.util
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from jaxshare.models import LoadedModel
from jaxshare.seeds import stream_seed
from jaxshare.serving.evaluation.arithmetic import make_problem
from jaxshare.serving.inputs import encode
from scripts.bench.lib import (
    ROOT,
    Parser,
)
from scripts.bench.parts.engine.random_model import FORKS

MODELS = ("embedded", "random")
TASKS = ("game24", "sums")
"""The puzzles, and the embedded model's own problems, which the random model is not given."""
SUPERVISORS = ("ToT", "BestOfN", "SelfConsistency", "MCTS")


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


def read_puzzles(file: Path | None, count: int, seed: int) -> list[str]:
    """`count` puzzles, drawn from a file, or the first of those in the example."""
    example = _example()
    numbers = (
        [[*map(int, puzzle.split())] for puzzle in example.PUZZLES]
        if file is None
        else [*example.read(str(file))]
    )
    if file is None or len(numbers) <= count:
        return [" ".join(map(str, each)) for each in numbers[:count]]
    drawn = np.random.default_rng([seed, 1]).choice(len(numbers), count, replace=False)
    return [" ".join(map(str, numbers[i])) for i in sorted(drawn)]


def prompts_of(
    model: LoadedModel, puzzles: Sequence[str], lengths: Sequence[int] | None, seed: int
) -> list[list[int]]:
    """The puzzles in the words of examples/game24.py; random tokens of these lengths where the
    model has no tokenizer."""
    if lengths is None:
        example = _example()
        return [
            encode(model, example.PROPOSE.format(goal=example.GOAL, numbers=puzzle))
            for puzzle in puzzles
        ]
    rng = np.random.default_rng([seed, 3])
    same = rng.integers(0, model.config.vocab_size, max(lengths))
    own = 16  # tokens of the puzzle, which begins with what all have in common
    return [
        [
            *same[: max(0, n - own)].tolist(),
            *rng.integers(0, model.config.vocab_size, min(n, own)).tolist(),
        ]
        for n in lengths
    ]


def sums_of(model: LoadedModel, count: int, seed: int) -> list[list[int]]:
    """So many problems of the embedded model's own kind, as its tokens."""
    rng = random.Random(stream_seed(seed, "sums"))
    return [encode(model, make_problem(rng).prompt()) for _ in range(count)]


@functools.cache
def _example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("game24", ROOT / "examples" / "game24.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
        "--temperatures", metavar="T,T", help="(default 0.2,0.4,0.6,0.8,1.0; quick 0.2,1.0)"
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
    try:
        temperatures = tuple(
            map(
                float,
                (given.temperatures or ("0.2,1.0" if given.quick else "0.2,0.4,0.6,0.8,1.0")).split(
                    ","
                ),
            )
        )
    except ValueError:
        temperatures = ()
    if (
        not temperatures
        or not all(0 < each < 100 for each in temperatures)
        or len(set(temperatures)) < len(temperatures)
    ):
        parser.error(
            f"--temperatures is {given.temperatures!r}, but it must be different numbers above 0 "
            "with commas between, such as 0.2,1.0"
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
    data = (
        given.data
        or Path(os.environ.get("JAXSHARE_DATA") or ROOT.parent / "shared" / "data") / "game24.csv"
    )
    if given.data and not data.is_file():
        parser.error(f"--data is {given.data}, but there is no such file")
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
        data if data.is_file() else None,
        given.quick,
        given.seed,
        given.json,
        given.output,
    )
