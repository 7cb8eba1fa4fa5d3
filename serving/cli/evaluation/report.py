"""The report of an evaluation: its answers are marked, its table is written, drawn and printed."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxshare import progress
from jaxshare.paths import WriteError, whole_file
from jaxshare.serving import checksums, jsonl
from jaxshare.serving.evaluation import folder as evaluation_folder
from jaxshare.serving.evaluation import plot, provenance, runs, scoring
from jaxshare.serving.evaluation.checkers import sandbox
from jaxshare.serving.evaluation.checkers.mathematics import Mathematician
from jaxshare.serving.evaluation.checkers.sandbox import Limits
from jaxshare.serving.evaluation.folder import AGAIN, PICTURE, RESULT, SCORES, TABLE
from jaxshare.serving.evaluation.problems import Task
from jaxshare.serving.evaluation.runs import Run
from jaxshare.serving.evaluation.scoring import Point, Score, Scorer
from jaxshare.serving.evaluation.tasks import DATA_VARIABLE

_GOAL = 0.9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the limits of judged programs, the place of the data sets, and other evaluations."""
    add_marking_arguments(parser)
    parser.add_argument(
        "--beside",
        action="append",
        default=[],
        metavar="DIR",
        help="draw the lines of another evaluation of the same problems too; can be given again",
    )


def add_marking_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the limits of judged programs, and the place of the data sets."""
    parser.add_argument(
        "--test-seconds",
        type=float,
        default=Limits().seconds,
        metavar="S",
        help="processor time of a program and its tests, or of each case (default %(default)g)",
    )
    parser.add_argument(
        "--test-memory",
        type=int,
        default=Limits().memory >> 20,
        metavar="MIB",
        help="memory of a program and its tests, or of each case (default %(default)d)",
    )
    parser.add_argument(
        "--data-dir",
        metavar="DIR",
        help="the folder of the data sets as they are published, or the task's one file (default "
        f"${DATA_VARIABLE})",
    )


def limits_of(options: argparse.Namespace) -> Limits:
    """The limits of judged programs.

    Raises:
      ValueError: one that is not above 0.
    """
    return Limits(seconds=options.test_seconds, memory=options.test_memory << 20)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of an evaluation before it is marked.

    Attributes:
      task: its problems.
      settings: of the evaluation.
      made: its runs.
      refused: the problems that could not be run, and why.
      resumed: runs that were there before.
      seconds, compile_seconds: of this command.
    """

    task: Task
    settings: Mapping[str, Any]
    made: Sequence[Run]
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    resumed: int = 0
    seconds: float = 0.0
    compile_seconds: float = 0.0


def finish(
    outcome: Outcome,
    folder: Path,
    limits: Limits,
    beside: Sequence[Mapping[str, list[Point]]],
    *,
    as_json: bool,
) -> None:
    """Marks an evaluation and writes and prints its scores, its table and its picture.

    Raises:
      ValueError: a file cannot be written.
    """
    scores = mark(outcome.task, outcome.made, limits)
    points = scoring.points(scores)
    result = _result(outcome, points, limits, folder)
    try:
        jsonl.write(folder / SCORES, map(jsonl.line, map(dataclasses.asdict, scores)), AGAIN)
        jsonl.write(folder / RESULT, [jsonl.line(checksums.sealed(result))], AGAIN)
        _write(outcome.settings, points, beside, folder)
    finally:  # all is marked, and printed, even where the disk is full now
        _print(outcome.settings, points, folder, result, as_json)


def mark(task: Task, made: Sequence[Run], limits: Limits) -> list[Score]:
    """The marks of all answers. What the sandbox cannot hold here is said on stderr."""
    if _has_programs(task) and (lack := sandbox.notice()):
        print(lack, file=sys.stderr)
    order = {problem.id: place for place, problem in enumerate(task.problems)}
    scores = []
    with Mathematician() as mathematician:
        scorer = Scorer(task.problems, mathematician, limits)
        in_order = sorted(made, key=lambda run: (order[run.problem], run.number, run.workers))
        for run in progress.each(in_order, "marking", "runs"):
            scores += scorer.score(run)
    return scores


def _result(
    outcome: Outcome, points: Sequence[Point], limits: Limits, folder: Path
) -> dict[str, Any]:
    """The content of result.json and of --json."""
    return {
        "settings": outcome.settings,
        **evaluation_folder.read_provenance(folder),
        "marked": {
            "problems": outcome.task.digest,
            "versions": provenance.versions(),
            "sandbox": sandbox.ways()[0].name if _has_programs(outcome.task) else None,
            "limits": dataclasses.asdict(limits),
        },
        "points": [dataclasses.asdict(point) for point in points],
        "passes_to_90": {
            str(count): passes for count, passes in scoring.passes_to(points, _GOAL).items()
        },
        "passes_to_90_at_most": scoring.at_smallest_budget(points, _GOAL),
        "bad_lines": [*outcome.task.bad_lines],
        "refused": [
            {"problem": problem, "error": error} for problem, error in outcome.refused.items()
        ],
        "runs": len(outcome.made),
        "resumed": outcome.resumed,
        "seconds": outcome.seconds,
        "compile_seconds": outcome.compile_seconds,
        "out": str(folder),
    }


def _has_programs(task: Task) -> bool:
    return any(problem.is_program for problem in task.problems)


def _write(
    settings: Mapping[str, Any],
    points: Sequence[Point],
    beside: Sequence[Mapping[str, list[Point]]],
    folder: Path,
) -> None:
    """Writes the table and the picture.

    Raises:
      ValueError: one of them cannot be written.
    """
    table = scoring.table(points, settings["method"])
    jsonl.write(folder / TABLE, [table.encode() + b"\n"], AGAIN)
    lines = scoring.lines(settings["method"], points)
    for others in beside:
        lines |= others
    if plot.available():
        try:
            picture = plot.accuracy_picture(lines, f"{settings['task']}, {settings['model']}")
            with whole_file(folder / PICTURE, "wb") as file:
                picture.savefig(file, dpi=130)
        except OSError as error:
            raise ValueError(f"{WriteError.of(folder / PICTURE, error)}; {AGAIN}") from error
    else:
        print(
            f"{PICTURE} is left out, because matplotlib is not installed; `pip install "
            "'jaxshare[plot]'` has it, and --resume draws",
            file=sys.stderr,
        )


def _print(
    settings: Mapping[str, Any],
    points: Sequence[Point],
    folder: Path,
    result: Mapping[str, Any],
    as_json: bool,
) -> None:
    if as_json:
        print(json.dumps(result))
        return
    table = scoring.table(points, settings["method"])
    print(
        f"accuracy in percent, with its interval of 95%, over {points[0].problems} "
        f"problems\n{table}"
    )
    for count, passes in result["passes_to_90"].items():
        reached = "not reached" if passes is None else f"{passes:.0f} forward passes"
        if int(count) in result["passes_to_90_at_most"]:
            reached = f"at most {passes:.0f} forward passes (the smallest budget)"
        print(f"{100 * _GOAL:.0f}%, {runs.label(settings['method'], int(count))}: {reached}")
    print(f"all texts and scores are in {folder}", file=sys.stderr)
