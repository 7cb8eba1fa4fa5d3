"""The command `jaxshare evaluate`: runs, marks and draws.

    jaxshare evaluate MODEL --task gsm8k5 --method workers --workers 1,2,4 \\
        --budgets 1024,2048,4096 --out DIR

DIR gets settings.json, which keeps other evaluations out; runs.jsonl, all texts, a line as each run
finishes; and at the end scores.jsonl, every answer and its marks, result.json, table.txt and
accuracy.png.
"""

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from jaxshare.compile_time import Stopwatch
from jaxshare.models import LoadedModel
from jaxshare.paths import WriteError, whole_file
from jaxshare.serving import checksums, jsonl
from jaxshare.serving.cli import arguments
from jaxshare.serving.cli.evaluation.plan import EvaluationPlan
from jaxshare.serving.cluster import process_mesh, ray_pool
from jaxshare.serving.cluster.model_spec import ModelSpec
from jaxshare.serving.evaluation import folder as evaluation_folder
from jaxshare.serving.evaluation import plot, runs, scoring, tasks
from jaxshare.serving.evaluation.arithmetic import QUESTIONS
from jaxshare.serving.evaluation.baselines import METHODS
from jaxshare.serving.evaluation.checkers import sandbox
from jaxshare.serving.evaluation.checkers.mathematics import Mathematician
from jaxshare.serving.evaluation.checkers.sandbox import Limits
from jaxshare.serving.evaluation.folder import AGAIN, OTHER, PICTURE, RESULT, RUNS, SCORES, TABLE
from jaxshare.serving.evaluation.runs import Execute, Run, RunSpec
from jaxshare.serving.evaluation.scoring import Point, Score, Scorer
from jaxshare.serving.evaluation.tasks import Task
from jaxshare.serving.locks import OutputLock
from jaxshare.serving.workers.layouts import LAYOUTS, MOVES
from jaxshare.serving.workers.prompts import presets
from jaxshare.serving.workers.text.step_automata import STOP_ON

_INCOMPLETE = 3
"""The exit code when some lines of the task or some problems could not be run; the others have
been."""
_GOAL = 0.9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `jaxshare evaluate`."""
    arguments.add_model(parser)
    parser.add_argument(
        "--task",
        required=True,
        metavar="TASK",
        help=f"{', '.join(tasks.TASKS)}, or a file of JSON lines: "
        '{"problem": "...", "answer": "..."} or {"problem": "...", "tests": "Python code"}',
    )
    parser.add_argument(
        "--method",
        default="workers",
        choices=tuple(METHODS),
        help="how problems are solved (default workers)",
    )
    parser.add_argument(
        "--workers",
        metavar="N,N,...",
        help="numbers of workers (default 1,2,4; 1 for methods of one stream)",
    )
    parser.add_argument(
        "--layout", choices=tuple(LAYOUTS), help="layout of the workers' cache (default combined)"
    )
    parser.add_argument(
        "--move", choices=MOVES, help="how finished steps get to the history (default rotate)"
    )
    parser.add_argument(
        "--ask-every", type=int, metavar="TOKENS", help="as in `jaxshare workers` (default 1024)"
    )
    parser.add_argument(
        "--stop-on", choices=STOP_ON, help="as in `jaxshare workers` (default answer)"
    )
    presets.add_arguments(parser)
    parser.add_argument(
        "--budgets",
        required=True,
        metavar="P,P,...",
        help="forward passes after which to answer, all in one run",
    )
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="the first N problems (default: 128 that are generated or grouped, all of a file)",
    )
    parser.add_argument(
        "--questions",
        default=str(QUESTIONS),
        metavar="N or N-M",
        help=f"questions of a generated problem; N-M samples a number for each (default "
        f"{QUESTIONS})",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=1,
        metavar="S",
        help="runs of each problem, which are averaged (default 1)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed that the seeds of all runs follow from (default 0)",
    )
    parser.add_argument(
        "--answer-tokens",
        type=int,
        metavar="N",
        help="maximum tokens of an answer that is requested early, which do not "
        "count as passes (default: by task)",
    )
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
        f"${tasks.DATA_VARIABLE})",
    )
    parser.add_argument(
        "--dates",
        metavar="DATE,DATE",
        help="of LiveCodeBench: problems of contests from the first date to the last",
    )
    parser.add_argument(
        "--beside",
        action="append",
        default=[],
        metavar="DIR",
        help="draw the lines of another evaluation of the same problems too; can be given again",
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="folder for all texts, scores, the table and the plot",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the evaluation that started the folder"
    )
    process_mesh.add_arguments(parser, groups="runs")
    ray_pool.add_arguments(parser)
    arguments.add_json(parser)
    arguments.add_sampling(parser)


def run(options: argparse.Namespace) -> int:
    """Runs `jaxshare evaluate`, here or on a pool of replicas; see `run_evaluation`."""
    workers = arguments.parse_numbers("--workers", options.workers)
    budgets = arguments.parse_numbers("--budgets", options.budgets)
    sampling = arguments.sampling_of(options)
    if pool := ray_pool.of_options(options):
        spec = ModelSpec.of(options)
        with contextlib.ExitStack() as running:

            def make_execute(_: LoadedModel) -> Execute:
                return runs.execute_on(running.enter_context(pool), spec.load)

            return run_evaluation(options, sampling, workers, budgets, spec.outline, make_execute)
    mesh = process_mesh.mesh_of(options)

    def load() -> LoadedModel:
        return arguments.load_model(options, mesh)

    return run_evaluation(options, sampling, workers, budgets, load, runs.execute)


def run_evaluation(
    options: argparse.Namespace,
    sampling: dict[str, Any],
    workers: Sequence[int],
    budgets: Sequence[int],
    load: Callable[[], LoadedModel],
    make_execute: Callable[[LoadedModel], Execute],
) -> int:
    """Runs an evaluation, or what is left of it, and marks it.

    Args:
      options: those of `add_arguments`.
      sampling: fields of `Sampler` that were given; the others are the checkpoint's own.
      workers, budgets: numbers that were given.
      load: gives the model. Errors that do not depend on it are raised before.
      make_execute: gives what makes the runs.

    Returns:
      0, or 3 if lines of the task are bad, or problems that the method refuses or for which the
        model's logits are not finite: they are named on stderr, and the others have been run.

    Raises:
      ValueError: wrong settings, files that cannot be read or written, a folder that is in use or
        belongs to another evaluation, a data set or a package that is not there, or no problem that
        can be run.
    """
    plan, watch = EvaluationPlan.of(options, sampling, workers, budgets), Stopwatch.start()
    task, folder = plan.task, Path(options.out)
    with contextlib.ExitStack() as files:
        files.enter_context(OutputLock.of_folder(folder, OTHER))
        file, made = evaluation_folder.open_runs(
            files, folder, plan.settings, options.resume, plan.keys
        )
        before, refused = {run.key for run in made}, {}
        if len(before) < len(plan.keys):
            model = load()
            identity = evaluation_folder.check_model(folder, model)
            specs = [spec for spec in plan.specs(model) if spec.key not in before]
            if file is None:
                file = evaluation_folder.create_runs(files, folder, plan.settings, identity)
            refused = _execute(make_execute(model), specs, file, made, len(plan.keys), folder)
        made = [run for run in made if run.problem not in refused]
        if not made:
            problem, error = next(iter(refused.items()))
            raise ValueError(f"no problem of {task.name} can be run; the first, {problem}: {error}")
        scores = _mark(task, made, plan.limits)
        points = scoring.points(scores)
        result = _result(plan, made, before, refused, points, watch, folder)
        try:
            jsonl.write(folder / SCORES, map(jsonl.line, map(dataclasses.asdict, scores)), AGAIN)
            jsonl.write(folder / RESULT, [jsonl.line(checksums.sealed(result))], AGAIN)
            _write_report(plan.settings, points, plan.beside, folder)
        finally:  # all is marked, and printed, even where the disk is full now
            _print_report(options, plan.settings, points, folder, result)
    return _INCOMPLETE if task.bad_lines or refused else 0


# The runs.


def _execute(
    execute: Execute,
    specs: Sequence[RunSpec],
    file: BinaryIO,
    made: list[Run],
    total: int,
    folder: Path,
) -> dict[str, str]:
    """Makes runs, adds them to `made` and writes them as they finish.

    Returns:
      The problems that were refused, and why.
    """
    refused: dict[str, str] = {}
    passes = 0
    with tqdm(
        total=sum(spec.budgets[-1] for spec in specs),
        unit=" passes",
        leave=False,
        disable=not sys.stderr.isatty(),
    ) as bar:

        def show(passes_of_run: int) -> None:
            bar.update(passes + passes_of_run - bar.n)

        try:
            for spec, run in execute(specs, show):
                taken = 0
                if isinstance(run, Run):
                    runs.write_run(file, run)
                    made.append(run)
                    taken = run.result["passes"]
                    passes += taken
                elif spec.problem not in refused:
                    refused[spec.problem] = str(run)
                    label = runs.label(spec.method, spec.workers)
                    print(f"problem {spec.problem}, {label}: {run}", file=sys.stderr)
                bar.total -= spec.budgets[-1] - taken  # a run that ends early leaves less to do
                bar.set_postfix_str(f"{len(made)}/{total} runs", refresh=False)
                show(0)
        except KeyboardInterrupt:
            bar.close()
            print(f"{len(made)} of {total} runs are in {folder / RUNS}; {AGAIN}", file=sys.stderr)
            raise
    return refused


def _mark(task: Task, made: Sequence[Run], limits: Limits) -> list[Score]:
    """The marks of all answers. What the sandbox cannot hold here is said on stderr."""
    if any(problem.is_program for problem in task.problems) and (lack := sandbox.notice()):
        print(lack, file=sys.stderr)
    order = {problem.id: place for place, problem in enumerate(task.problems)}
    scores = []
    with Mathematician() as mathematician:
        scorer = Scorer(task.problems, mathematician, limits)
        for run in tqdm(
            sorted(made, key=lambda run: (order[run.problem], run.number, run.workers)),
            "marking",
            unit=" runs",
            leave=False,
            disable=not sys.stderr.isatty(),
        ):
            scores += scorer.score(run)
    return scores


def _result(
    plan: EvaluationPlan,
    made: Sequence[Run],
    before: set[runs.Key],
    refused: Mapping[str, str],
    points: Sequence[Point],
    watch: Stopwatch,
    folder: Path,
) -> dict[str, Any]:
    """The content of result.json and of --json."""
    seconds, compile_seconds = watch.split()
    # Runs on data groups and replicas compile elsewhere, beside the work of others.
    in_runs = sum(run.result.get("compile_seconds", 0.0) for run in made if run.key not in before)
    return {
        "settings": plan.settings,
        "points": [dataclasses.asdict(point) for point in points],
        "passes_to_90": {
            str(count): passes for count, passes in scoring.passes_to(points, _GOAL).items()
        },
        "bad_lines": [*plan.task.bad_lines],
        "refused": [{"problem": problem, "error": error} for problem, error in refused.items()],
        "runs": len(made),
        "resumed": len(before),
        "seconds": seconds,
        "compile_seconds": max(compile_seconds, in_runs),
        "out": str(folder),
    }


# The report.


def _write_report(
    settings: Mapping[str, Any],
    points: Sequence[Point],
    beside: Sequence[Mapping[str, list[Point]]],
    folder: Path,
) -> None:
    """Writes the table and the picture.

    Raises:
      ValueError: one of them cannot be written.
    """
    jsonl.write(folder / TABLE, [scoring.table(points).encode() + b"\n"], AGAIN)
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


def _print_report(
    options: argparse.Namespace,
    settings: Mapping[str, Any],
    points: Sequence[Point],
    folder: Path,
    result: Mapping[str, Any],
) -> None:
    if options.json:
        print(json.dumps(result))
        return
    table = scoring.table(points)
    print(
        f"accuracy in percent, with its interval of 95%, over {points[0].problems} "
        f"problems\n{table}"
    )
    for count, passes in result["passes_to_90"].items():
        reached = "not reached" if passes is None else f"{passes:.0f} forward passes"
        print(f"{100 * _GOAL:.0f}%, {runs.label(settings['method'], int(count))}: {reached}")
    print(f"all texts and scores are in {folder}", file=sys.stderr)
