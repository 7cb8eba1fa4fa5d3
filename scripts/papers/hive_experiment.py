"""The form of an experiment of scripts.papers.hive, and options that all of them have."""

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxshare import models
from jaxshare.models import LoadedModel
from jaxshare.serving.cli import agents_options
from scripts.bench.lib import Parser
from scripts.bench.parts.logits_cache.puzzles import example, puzzle_file
from scripts.papers import folder as paper_folder
from scripts.papers.folder import PaperFolder

SCRIPTED = "scripted"
"""The model that is a dictionary of answers."""


@dataclasses.dataclass(frozen=True)
class HivePlan:
    """The work that a command line asks for.

    Attributes:
      settings: all that the points depend on beside the model, as JSON.
      keys: of all points.
      run: adds the points that a folder lacks, with the model.
    """

    settings: dict[str, Any]
    keys: list[dict[str, Any]]
    run: Callable[[LoadedModel, PaperFolder], None]


@dataclasses.dataclass(frozen=True)
class HiveExperiment:
    """One experiment of the paper.

    Attributes:
      summary: says what it is, for --help.
      add_arguments: adds its own options.
      plan: checks all options; a ValueError says what is wrong with them.
      results: what the points of a folder come to, as JSON.
      as_text: the report's tables.
      pictures: by the names of their files, functions that draw the results.
    """

    summary: str
    add_arguments: Callable[[Parser], None]
    plan: Callable[[Parser, argparse.Namespace], HivePlan]
    results: Callable[[PaperFolder], dict[str, Any]]
    as_text: Callable[[Mapping[str, Any]], str]
    pictures: Callable[[Mapping[str, Any]], Mapping[str, Callable[[], Any]]]


def add_common(parser: Parser) -> None:
    """Adds the options that all experiments have."""
    paper_folder.add_arguments(parser)
    agents_options.add_engine(parser)
    parser.add_argument(
        "--quick", action="store_true", help="few and small points: minutes on two cores"
    )
    # Options of `jaxshare agents run` that experiments do not have.
    parser.set_defaults(adapter=None)


def add_data(parser: Parser) -> None:
    """Adds --data, for `puzzles_of`."""
    parser.add_argument(
        "--data",
        dest="puzzles_in",
        type=Path,
        metavar="FILE",
        help="puzzles from easy to hard: CSV with a column `Puzzles`, or a puzzle a line (default "
        "game24.csv in $JAXSHARE_DATA or ../shared/data)",
    )


def puzzles_of(parser: Parser, options: argparse.Namespace) -> Path:
    """The file of puzzles.

    Raises:
      ValueError: there is none, or a line of it, which is named, is no puzzle of four numbers.
    """
    file = puzzle_file(parser, options.puzzles_in)
    if file is None:
        raise ValueError(
            "there is no game24.csv in $JAXSHARE_DATA or ../shared/data; name a file of puzzles with "
            "--data"
        )
    found = [*example().read(str(file))]
    if not found:
        raise ValueError(f"{file} has no puzzles; give a file with four numbers a line")
    for rank, numbers in enumerate(found, 1):
        if len(numbers) != 4:
            raise ValueError(
                f"puzzle {rank} of {file} has {len(numbers)} numbers, "
                f"{' '.join(map(str, numbers))}, but the game of 24 has 4"
            )
    return file


def common_settings(options: argparse.Namespace, engine: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that follow from the options of `add_common`.

    Args:
      options: of the command.
      engine: from `agents_options.check_engine`.
    """
    return {
        "model": paper_folder.model_name(options),
        "dtype": options.dtype,
        "tensor": options.tensor,
        "seed": options.seed,
        "quick": options.quick,
        **engine,
        "resample": agents_options.resample_of(options),
        "max_concurrency": options.max_concurrency,
    }


def scripted_identity() -> LoadedModel:
    """A stand-in for the scripted model where a folder asks for one: no parameters, no tokenizer."""
    return dataclasses.replace(
        models.outline("embedded"), tokenizer=None, generation=models.Generation(), workers=None
    )


def refuse_scripted(options: argparse.Namespace, why: str) -> None:
    """Raises a ValueError where the model is the scripted one, which has no engine."""
    if options.model == SCRIPTED:
        raise ValueError(
            f"--model is {SCRIPTED}, a dictionary of answers, but {why}; give `embedded`, a folder "
            "or a hub id"
        )
