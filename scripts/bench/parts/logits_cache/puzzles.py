"""Puzzles of the game of 24 and sums, as prompts: of a file, or those of examples/game24.py."""

import functools
import importlib.util
import random
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from jaxshare.models import LoadedModel
from jaxshare.seeds import stream_seed
from jaxshare.serving.evaluation.arithmetic import make_problem
from jaxshare.serving.inputs import encode
from scripts.bench.lib import ROOT, Parser, data_file


def puzzle_file(parser: Parser, given: Path | None) -> Path | None:
    """The file that --data names, or else game24.csv in $JAXSHARE_DATA or ../shared/data; None where
    there is none. Ends the program where a file that is named does not exist."""
    if given is not None and not given.is_file():
        parser.error(f"--data is {given}, but there is no such file")
    found = given or data_file("game24.csv")
    return found if found.is_file() else None


def read_puzzles(file: Path | None, count: int, seed: int) -> list[str]:
    """`count` puzzles, drawn from a file, or the first of those in the example."""
    numbers = (
        [[*map(int, puzzle.split())] for puzzle in example().PUZZLES]
        if file is None
        else [*example().read(str(file))]
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
        words, goal = example().PROPOSE, example().GOAL
        return [encode(model, words.format(goal=goal, numbers=puzzle)) for puzzle in puzzles]
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
def example() -> ModuleType:
    """The module examples/game24.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("game24", ROOT / "examples" / "game24.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
