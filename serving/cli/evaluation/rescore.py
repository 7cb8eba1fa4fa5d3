"""The command `jaxshare rescore`: marks the runs of an evaluation again, without running any.

    jaxshare rescore DIR

Answers may be compared otherwise by another version, a task's file may have mended answers, and
programs may get other limits; the texts in runs.jsonl stay as they are. DIR gets scores.jsonl,
result.json, table.txt and accuracy.png afresh.
"""

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

from jaxshare.compile_time import Stopwatch
from jaxshare.serving.cli import arguments
from jaxshare.serving.cli.evaluation import report
from jaxshare.serving.evaluation import folder as evaluation_folder
from jaxshare.serving.evaluation import tasks
from jaxshare.serving.evaluation.checkers.mathematics import Mathematician
from jaxshare.serving.evaluation.folder import OTHER, RUNS, SETTINGS
from jaxshare.serving.evaluation.problems import Task
from jaxshare.serving.evaluation.runs import Run
from jaxshare.serving.locks import OutputLock

_INCOMPLETE = 3
"""The exit code when lines of the task are bad, or runs are missing; the others have been marked."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxshare rescore`."""
    parser.add_argument("folder", metavar="DIR", help="folder that `jaxshare evaluate` has written")
    parser.add_argument(
        "--task",
        metavar="TASK",
        help="the task, where its file has another place now (default: as it was)",
    )
    report.add_arguments(parser)
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Runs `jaxshare rescore`.

    Returns:
      0, or 3 if runs of the evaluation are missing or lines of its task are bad.

    Raises:
      ValueError: no evaluation, a damaged file, a task whose problems are others, or a package that
        is not there.
    """
    folder, watch = Path(options.folder), Stopwatch.start()
    settings = evaluation_folder.read_settings(folder)
    limits = report.limits_of(options)
    task = _task(options, folder, settings)
    if task.needs_mathematics:
        Mathematician.check()
    beside = [evaluation_folder.read_lines(Path(name), settings) for name in options.beside]
    total = len(task.problems) * settings["seeds"] * len(settings["workers"])
    with contextlib.ExitStack() as files:
        files.enter_context(OutputLock.of_folder(folder, OTHER))
        _, made = evaluation_folder.open_runs(files, folder, settings, True, _AnyKey())
        _check(folder, task, made)
        if task.digest != settings["problems"]:
            print(
                f"the answers or tests of {task.name} have changed since the runs were made; they "
                "are marked by those of today",
                file=sys.stderr,
            )
        if len(made) < total:
            print(
                f"{total - len(made)} of {total} runs are not in {folder / RUNS}; the others "
                "are marked",
                file=sys.stderr,
            )
        outcome = report.Outcome(
            task=task,
            settings=settings,
            made=made,
            resumed=len(made),
            seconds=watch.split()[0],
        )
        report.finish(outcome, folder, limits, beside, as_json=options.json)
    return _INCOMPLETE if task.bad_lines or len(made) < total else 0


class _AnyKey:
    """The keys of all runs: those that are there are checked against the task afterwards."""

    def __contains__(self, key: object) -> bool:
        return True


def _task(options: argparse.Namespace, folder: Path, settings: dict[str, Any]) -> Task:
    """The task of an evaluation, as its files are today."""
    given = evaluation_folder.read_provenance(folder).get("task_options", {})
    task = tasks.load_task(
        options.task or settings["task"],
        samples=settings["samples"],
        questions=tuple(given.get("questions", (tasks.QUESTIONS, tasks.QUESTIONS))),
        data=options.data_dir,
        dates=given.get("dates"),
    )
    for complaint in task.complaints:
        print(complaint, file=sys.stderr)
    return task


def _check(folder: Path, task: Task, made: list[Run]) -> None:
    """Raises ValueError for a run of a problem that has another text now, and for none at all."""
    if not made:
        raise ValueError(f"{folder} has no runs; `jaxshare evaluate --resume` makes them")
    texts = {problem.id: problem.text for problem in task.problems}
    for run in made:
        if run.text != texts.get(run.problem):
            what = "has another text" if run.problem in texts else "is another problem"
            raise ValueError(
                f"problem {run.problem} of {task.name} {what} than in {folder / SETTINGS}'s "
                "evaluation; give the task's files as they were with --task or --data-dir"
            )
