"""The command `jaxshare evaluate`: runs, marks and draws.

    jaxshare evaluate MODEL --task gsm8k5 --method workers --workers 1,2,4 \\
        --budgets 1024,2048,4096 --out DIR

DIR gets settings.json, which keeps other evaluations out; runs.jsonl, all texts, a line as each run
finishes; and at the end scores.jsonl, every answer and its marks, result.json, table.txt and
accuracy.png.
"""

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from jaxshare import progress
from jaxshare.compile_time import Stopwatch
from jaxshare.models import LoadedModel
from jaxshare.serving.cli import arguments, resuming
from jaxshare.serving.cli.evaluation import report
from jaxshare.serving.cli.evaluation.plan import EvaluationPlan
from jaxshare.serving.cluster import process_mesh, ray_pool
from jaxshare.serving.cluster.model_spec import ModelSpec
from jaxshare.serving.evaluation import execution, runs, tasks
from jaxshare.serving.evaluation import folder as evaluation_folder
from jaxshare.serving.evaluation.arithmetic import QUESTIONS
from jaxshare.serving.evaluation.baselines import METHODS
from jaxshare.serving.evaluation.folder import AGAIN, OTHER, RUNS
from jaxshare.serving.evaluation.runs import Execute, Run, RunSpec
from jaxshare.serving.locks import OutputLock
from jaxshare.serving.workers.layouts import LAYOUTS, MOVES
from jaxshare.serving.workers.prompts import presets
from jaxshare.serving.workers.text.step_automata import STOP_ON

_INCOMPLETE = 3
"""The exit code when some lines of the task or some problems could not be run; the others have
been."""


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
        help="the first N problems (default: up to 128 that are generated or grouped, all of a file)",
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
        "--concurrency",
        type=int,
        metavar="N",
        help="runs at the same time on each data group or replica, in the passes of one engine "
        "(default: as many as memory and processor are good for; 1 makes them one by one)",
    )
    report.add_arguments(parser)
    parser.add_argument(
        "--dates",
        metavar="DATE,DATE",
        help="of LiveCodeBench: problems of contests from the first date to the last",
    )
    parser.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="folder for all texts, scores, the table and the plot",
    )
    resuming.add_resume(parser, "the evaluation that started the folder")
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
                return execution.execute_on(
                    running.enter_context(pool), spec.load, options.concurrency
                )

            return run_evaluation(options, sampling, workers, budgets, spec.outline, make_execute)
    mesh = process_mesh.mesh_of(options)

    def load() -> LoadedModel:
        return arguments.load_model(options, mesh)

    make = functools.partial(execution.execute, concurrency=options.concurrency)
    return run_evaluation(options, sampling, workers, budgets, load, make)


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
            evaluation_folder.check_code(folder)
            model = load()
            identity = evaluation_folder.check_model(folder, model, options.model)
            specs = [spec for spec in plan.specs(model) if spec.key not in before]
            if file is None:
                if options.resume:
                    resuming.say_new("evaluation", folder)
                about = {**identity, **evaluation_folder.provenance_of(plan.task_options)}
                file = evaluation_folder.create_runs(files, folder, plan.settings, about)
            refused = _execute(make_execute(model), specs, file, made, len(plan.keys), folder)
        else:
            evaluation_folder.check_finished(folder, options.model, load)
        made = [run for run in made if run.problem not in refused]
        if not made:
            problem, error = next(iter(refused.items()))
            raise ValueError(f"no problem of {task.name} can be run; the first, {problem}: {error}")
        outcome = _outcome(plan, made, before, refused, watch)
        report.finish(outcome, folder, plan.limits, plan.beside, as_json=options.json)
    return _INCOMPLETE if task.bad_lines or refused else 0


def _outcome(
    plan: EvaluationPlan,
    made: Sequence[Run],
    before: set[runs.Key],
    refused: Mapping[str, str],
    watch: Stopwatch,
) -> report.Outcome:
    seconds, compile_seconds = watch.split()
    # Runs on data groups and replicas compile elsewhere, beside the work of others.
    new = [run for run in made if run.key not in before]
    in_runs = sum(run.result.get("compile_seconds", 0.0) for run in new)
    return report.Outcome(
        task=plan.task,
        settings=plan.settings,
        made=made,
        refused=refused,
        resumed=len(before),
        seconds=seconds,
        compile_seconds=max(compile_seconds, in_runs),
    )


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
    planned = sum(spec.budgets[-1] for spec in specs)
    with progress.work("evaluating", planned, "passes") as work:

        def show(passes_of_run: int) -> None:
            work.done = passes + passes_of_run

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
                    progress.DISPLAY.say(f"problem {spec.problem}, {label}: {run}")
                planned -= spec.budgets[-1] - taken  # a run that ends early leaves less to do
                work.total, work.note = planned, f"{len(made)} of {total} runs"
                show(0)
        except KeyboardInterrupt:
            work.close()
            print(f"{len(made)} of {total} runs are in {folder / RUNS}; {AGAIN}", file=sys.stderr)
            raise
    return refused
