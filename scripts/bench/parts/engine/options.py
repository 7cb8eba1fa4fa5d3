"""The sizes and the command line of the benchmark of the engine."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.bench.lib import (
    Parser,
)
from scripts.bench.parts.engine.sides import ROOM

MODELS = ("embedded", "random")


@dataclasses.dataclass(frozen=True)
class Scale:
    """The sizes of a measurement.

    Attributes:
      rows: calls at a time.
      known, calls: calls of the first two measurements, in a round; arrivals: calls of each load.
      rounds: turns of each side; of the first measurement, whose turns are short, three times as
        many.
    """

    rows: int
    known: int
    calls: int
    arrivals: int
    rounds: int


FULL = {"embedded": Scale(16, 160, 64, 128, 5), "random": Scale(16, 64, 48, 48, 3)}


QUICK = {"embedded": Scale(8, 96, 16, 24, 2)}


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a run; counts as `--quick` has them where they were not given."""

    models: tuple[str, ...]
    scales: Mapping[str, Scale]
    passes: int
    dtype: str
    quick: bool
    seed: int
    json: bool
    output: Path | None


def parse(arguments: Sequence[str] | None) -> Options:
    parser = Parser(
        prog="scripts.bench.engine",
        description="Engine under load: against the raw decode loop and against batches of calls.",
    )
    parser.add_models(MODELS)
    parser.add_argument(
        "--rows", type=int, metavar="N", help="calls at a time (default 16; quick 8)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help="turns of each side (default 5 and 3; quick 2), at saturation three times as many",
    )
    parser.add_argument(
        "--passes", type=int, default=16, help="of a dispatch (default %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of the random model (default %(default)s)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the embedded model alone, fewer calls: within three minutes on two cores",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights, calls, arrivals and answers"
    )
    parser.reporting()
    given = parser.parse_args(arguments)
    models = parser.chosen_models(given, MODELS)
    for name, value in (
        ("--rows", given.rows),
        ("--rounds", given.rounds),
        ("--passes", given.passes),
    ):
        if value is not None and value < 1:
            parser.error(f"{name} is {value}, but it must be at least 1")
    if given.passes > ROOM // 2 or given.seed < 0:
        parser.error(
            f"--passes is {given.passes} and --seed {given.seed}, but the first must be at most "
            f"{ROOM // 2} and the last at least 0"
        )
    parser.check_output(given.output)
    changed = {
        name: value for name in ("rows", "rounds") if (value := getattr(given, name)) is not None
    }
    scales = {
        name: dataclasses.replace((QUICK if given.quick else FULL).get(name, FULL[name]), **changed)
        for name in MODELS
    }
    return Options(
        models, scales, given.passes, given.dtype, given.quick, given.seed, given.json, given.output
    )
