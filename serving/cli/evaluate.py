"""The command `jaxshare evaluate`: runs, marks and draws.

    jaxshare evaluate MODEL --task gsm8k5 --method workers --workers 1,2,4 --budgets 1024,2048,4096 --out DIR

DIR gets settings.json, which keeps other evaluations out; runs.jsonl, all that was written, a line
as each run finishes; and at the end scores.jsonl, every answer and what is right of it,
result.json, table.txt and accuracy.png.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from jaxshare import models
from jaxshare.compile_time import Stopwatch
from jaxshare.models import LoadedModel
from jaxshare.paths import check_folder
from jaxshare.serving import jsonl
from jaxshare.serving.cluster import process_mesh, ray_pool
from jaxshare.serving.cluster.model_spec import ModelSpec
from jaxshare.serving.evaluation import plot, runs, scoring, tasks
from jaxshare.serving.evaluation.arithmetic import QUESTIONS
from jaxshare.serving.evaluation.baselines import METHODS
from jaxshare.serving.evaluation.mathematics import Mathematician
from jaxshare.serving.evaluation.runs import Execute, Run, RunSpec
from jaxshare.serving.evaluation.sandbox import Limits
from jaxshare.serving.evaluation.scoring import Point, Score, Scorer
from jaxshare.serving.evaluation.tasks import Task
from jaxshare.serving.greedy import warn_of_greedy
from jaxshare.serving.inputs import default_sampler
from jaxshare.serving.workers.layouts import LAYOUTS, MOVES
from jaxshare.serving.workers.prompts import presets
from jaxshare.serving.workers.prompts.format import Format
from jaxshare.serving.workers.step_automata import STOP_ON

FORMAT = "jaxshare evaluation 2"
SETTINGS, RUNS, SCORES, RESULT, TABLE, PICTURE = (
    "settings.json",
    "runs.jsonl",
    "scores.jsonl",
    "result.json",
    "table.txt",
    "accuracy.png",
)
_OTHER, _AGAIN = "give another --out", "--resume goes on with the evaluation"
_NOT_ALL = 3
"""The exit code when some lines of the task or some problems could not be run; the others have
been."""
_GOAL = 0.9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `jaxshare evaluate`, without those of sampling."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder or hub id, or `embedded` for the model that comes with jaxshare",
    )
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
        "--workers", metavar="N,N,...", help="how many (default 1,2,4; 1 for methods of one stream)"
    )
    parser.add_argument(
        "--layout", choices=tuple(LAYOUTS), help="of the workers' cache (default combined)"
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
        help=f"of each generated problem; N to M are drawn for each (default {QUESTIONS})",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=1,
        metavar="S",
        help="runs of each problem, which are averaged (default 1)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="that those of all runs are made of (default 0)"
    )
    parser.add_argument(
        "--answer-tokens",
        type=int,
        metavar="N",
        help="most tokens of an answer that is asked for early, which do not "
        "count as passes (default: by task)",
    )
    parser.add_argument(
        "--test-seconds",
        type=float,
        default=Limits().seconds,
        metavar="S",
        help="of processor time that a program and its tests may take (default %(default)g)",
    )
    parser.add_argument(
        "--data-dir",
        metavar="DIR",
        help=f"the folder of the data sets (default ${tasks.DATA_VARIABLE})",
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
        "--resume", action="store_true", help="go on with the evaluation that has begun the folder"
    )
    process_mesh.add_arguments(parser, groups="runs")
    ray_pool.add_arguments(parser)
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on stdout, everything else on stderr"
    )


def run(
    options: argparse.Namespace,
    sampling: dict[str, Any],
    workers: Sequence[int],
    budgets: Sequence[int],
) -> int:
    """Runs an evaluation, here or on a fleet; see `run_evaluation`."""
    if found := ray_pool.of_options(options):
        node = ModelSpec.of(options)
        with contextlib.ExitStack() as running:

            def executes(_: LoadedModel) -> Execute:
                return runs.execute_on(running.enter_context(found), node.load)

            return run_evaluation(options, sampling, workers, budgets, node.outline, executes)
    mesh = process_mesh.mesh_of(options)

    def load() -> LoadedModel:
        return models.load(options.model, dtype=options.dtype, mesh=mesh)

    return run_evaluation(options, sampling, workers, budgets, load, runs.execute)


def run_evaluation(
    options: argparse.Namespace,
    sampling: dict[str, Any],
    workers: Sequence[int],
    budgets: Sequence[int],
    load: Callable[[], LoadedModel],
    executes: Callable[[LoadedModel], Execute],
) -> int:
    """Runs an evaluation, or what is left of it, and marks it.

    Args:
      options: what `add_arguments` has asked for, and `dtype`.
      sampling: fields of `Sampler` that were given; the checkpoint's own stand for the rest.
      workers, budgets: numbers that were given.
      load: gives the model. What can be wrong without it is found before.
      executes: gives what makes the runs.

    Returns:
      0, or 3 if lines of the task are bad or the method refuses problems: they are named on stderr,
        and the others have been run.

    Raises:
      ValueError: wrong settings, files that cannot be read or written, a folder that is in use or
        belongs to another evaluation, a data set or a package that is not there, or no problem that
        can be run.
    """
    workers = _checked(options, workers, budgets)
    check_folder("--out", options.out)
    task = tasks.load_task(
        options.task,
        samples=options.samples,
        questions=_range(options.questions),
        data=options.data_dir,
    )
    if task.needs_mathematics:
        Mathematician.check()
    limits = Limits(seconds=options.test_seconds)
    format = (
        presets.format_named(options.format, plain=options.method != "workers")
        if options.format is not None
        else None
    )
    settings = _settings(options, sampling, workers, budgets, task, format)
    beside = [_read_beside(Path(folder), settings) for folder in options.beside]
    for bad in task.bad_lines:
        print(f"line {bad['line']} of {task.name}: {bad['error']}", file=sys.stderr)

    keys = {
        (count, problem.id, number)
        for problem in task.problems
        for number in range(options.seeds)
        for count in workers
    }
    folder, watch = Path(options.out), Stopwatch.start()
    with contextlib.ExitStack() as files:
        file, made = _open(files, folder, settings, options.resume, keys)
        before, refused, known = len(made), {}, {run.key for run in made}
        if before < len(keys):
            model = load()
            weights = _weights(folder, model)
            wanted = [
                piece
                for piece in _pieces(options, sampling, workers, budgets, task, model, format)
                if piece.key not in known
            ]
            if file is None:
                jsonl.write(
                    folder / SETTINGS,
                    [jsonl.line({"format": FORMAT, "settings": settings, **weights})],
                    _AGAIN,
                )
                file = files.enter_context(jsonl.open_alone(folder / RUNS, "xb", _OTHER))
            refused = _make(executes(model), wanted, file, made, len(keys), folder)
        made = [run for run in made if run.problem not in refused]
        if not made:
            problem, error = next(iter(refused.items()))
            raise ValueError(f"no problem of {task.name} can be run; the first, {problem}: {error}")
        scores = _mark(task, made, limits)
        found = scoring.points(scores)
        seconds, compiled = watch.split()
        # Runs on data groups and replicas compile elsewhere, beside the work of others.
        compiled = max(
            compiled,
            sum(run.result.get("compile_seconds", 0.0) for run in made if run.key not in known),
        )
        result = {
            "settings": settings,
            "points": [dataclasses.asdict(point) for point in found],
            "passes_to_90": {
                str(count): passes for count, passes in scoring.passes_to(found, _GOAL).items()
            },
            "bad_lines": [*task.bad_lines],
            "refused": [{"problem": problem, "error": error} for problem, error in refused.items()],
            "runs": len(made),
            "resumed": before,
            "seconds": seconds,
            "compile_seconds": compiled,
            "out": str(folder),
        }
        try:
            jsonl.write(folder / SCORES, map(jsonl.line, map(dataclasses.asdict, scores)), _AGAIN)
            jsonl.write(folder / RESULT, [jsonl.line(result)], _AGAIN)
            _write_report(settings, found, beside, folder)
        finally:  # all is marked, and said, even where the disk is full now
            _report(options, settings, found, folder, result)
    return _NOT_ALL if task.bad_lines or refused else 0


def _checked(
    options: argparse.Namespace, workers: Sequence[int], budgets: Sequence[int]
) -> list[int]:
    """Finds what is wrong with the numbers; the numbers of workers."""
    if not budgets:
        raise ValueError("--budgets is empty; give numbers of forward passes such as 256,512,1024")
    for name, numbers in (("--workers", workers), ("--budgets", budgets)):
        if wrong := [n for n in numbers if n < 1]:
            raise ValueError(f"{name} has {wrong[0]}; the numbers begin at 1")
    for name in ("seeds", "answer_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if options.method in runs.ALONE and [*workers] not in ([], [1]):
        raise ValueError(
            f"--workers is given, but {options.method} does not ask how many there are; leave it "
            "out"
        )
    for name in ("layout", "move", "ask_every", "stop_on"):
        if options.method != "workers" and getattr(options, name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} is of the method workers, and the method is "
                f"{options.method}; leave it out"
            )
    return sorted(set(workers)) or ([1] if options.method in runs.ALONE else [1, 2, 4])


def _range(text: str) -> tuple[int, int]:
    """The least and the most of "5" or "5-10"."""
    if not (found := re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())):
        raise ValueError(f"--questions is {text!r}; give a number such as 5, or two such as 5-10")
    return int(found[1]), int(found[2] or found[1])


def _settings(
    options: argparse.Namespace,
    sampling: dict[str, Any],
    workers: Sequence[int],
    budgets: Sequence[int],
    task: Task,
    format: Format | None,
) -> dict[str, Any]:
    """What decides the texts and what they are for. Where they are written does not."""
    chosen = {"name": options.format, "texts": _digest(format)} if format else None
    asked = {name: getattr(options, name) for name in ("model", "method", "seeds", "seed", "dtype")}
    return {
        **asked,
        **_of_workers(options),
        **({"format": chosen} if chosen else {}),
        **sampling,
        "task": options.task,
        "problems": task.digest,
        "samples": len(task.problems),
        "workers": [*workers],
        "budgets": sorted(set(budgets)),
        "answer_tokens": options.answer_tokens or task.answer_tokens,
    }


def _digest(format: Format) -> str:
    """A sum over the texts of a format, because those of a file may change, and those of a preset
    may from one version to the next. Fields that have their defaults are left out, so that a field
    which is added later changes nothing."""
    default = dataclasses.asdict(Format("", ""))
    return jsonl.sha256(
        jsonl.line(
            {
                name: value
                for name, value in dataclasses.asdict(format).items()
                if value != default[name]
            }
        )
    )


def _of_workers(options: argparse.Namespace) -> dict[str, Any]:
    if options.method != "workers":
        return {}
    return {
        "layout": options.layout or "combined",
        "move": options.move or "rotate",
        "ask_every": 1024 if options.ask_every is None else options.ask_every,
        "stop_on": options.stop_on or "answer",
    }


def _weights(folder: Path, model: LoadedModel) -> dict[str, str]:
    """What tells the model from others of its name. One that is not on this machine is taken at its
    word.

    Raises:
      ValueError: the evaluation in the folder began with another one.
    """
    now = {"weights": model.fingerprint} if model.params else {}
    if now and os.path.lexists(folder / SETTINGS):
        then = json.loads((folder / SETTINGS).read_bytes()).get("weights", now["weights"])
        if then != now["weights"]:
            raise ValueError(
                f"the evaluation in {folder} began with another model of this name: its parameters "
                f"have changed; {_OTHER}"
            )
    return now


def _pieces(
    options: argparse.Namespace,
    sampling: dict[str, Any],
    workers: Sequence[int],
    budgets: Sequence[int],
    task: Task,
    model: LoadedModel,
    format: Format | None,
) -> list[RunSpec]:
    sampler = dataclasses.replace(default_sampler(model), **sampling)
    warn_of_greedy(model, sampler, discouraged=presets.advises_sampling(options.format))
    if sampler.temperature == 0 and options.seeds > 1:
        raise ValueError(
            f"--seeds is {options.seeds}, but at temperature 0 all of them would write the same; "
            "give a --temperature, or one seed"
        )
    return runs.run_specs(
        task.problems,
        method=options.method,
        workers=workers,
        budgets=budgets,
        seeds=options.seeds,
        seed=options.seed,
        answer_tokens=options.answer_tokens or task.answer_tokens,
        sampler=sampler,
        more={**_of_workers(options), **({"format": format} if format else {})},
    )


# The folder.


def _open(
    files: contextlib.ExitStack,
    folder: Path,
    settings: Mapping[str, Any],
    resume: bool,
    keys: set[runs.Key],
) -> tuple[BinaryIO | None, list[Run]]:
    """The file of runs and those in it, or None where there is none yet."""
    if not os.path.lexists(folder / SETTINGS):
        if os.path.lexists(folder / RUNS):
            raise ValueError(
                f"{folder} has {RUNS} but no {SETTINGS}, so nothing says which evaluation wrote "
                f"it; {_OTHER}"
            )
        return None, []
    if not resume:
        raise ValueError(
            f"{folder} has an evaluation already; --resume goes on with it, or {_OTHER}"
        )
    jsonl.check_settings(
        f"the evaluation in {folder} began", read_settings(folder), settings, _OTHER
    )
    if not os.path.lexists(folder / RUNS):  # it was broken off between the two
        return None, []
    file = files.enter_context(jsonl.open_alone(folder / RUNS, "r+b", _OTHER))
    return file, runs.read_runs(file, folder / RUNS, keys)


def read_settings(folder: Path) -> dict[str, Any]:
    """Of the evaluation in a folder.

    Raises:
      ValueError: there is none, or its file is damaged.
    """
    try:
        return jsonl.read_settings(folder / SETTINGS, FORMAT)
    except ValueError as error:
        raise ValueError(
            f"{folder} has no evaluation that can be read ({error}); name a folder that `jaxshare "
            "evaluate` has written"
        ) from error


def _read_beside(folder: Path, settings: Mapping[str, Any]) -> dict[str, list[Point]]:
    """The lines of another evaluation, by what they are called in the legend."""
    try:
        result = json.loads((folder / RESULT).read_bytes())
        theirs, found = result["settings"], [Point(**point) for point in result["points"]]
        problems, method = theirs["problems"], theirs["method"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--beside is {folder}, which has no finished evaluation ({type(error).__name__}: "
            f"{error}); name a folder with {RESULT} in it"
        ) from error
    if problems != settings["problems"]:
        raise ValueError(
            f"--beside is {folder}, whose problems are others; name an evaluation of the same ones"
        )
    return _lines(method, found)


# The runs.


def _make(
    execute: Execute,
    wanted: Sequence[RunSpec],
    file: BinaryIO,
    made: list[Run],
    total: int,
    folder: Path,
) -> dict[str, str]:
    """Makes runs, adds them to `made` and writes them as they finish; the problems that were
    refused, and why."""
    refused: dict[str, str] = {}
    passes = 0
    with tqdm(
        total=sum(piece.budgets[-1] for piece in wanted),
        unit=" passes",
        leave=False,
        disable=not sys.stderr.isatty(),
    ) as bar:

        def show(now: int) -> None:
            bar.update(passes + now - bar.n)

        try:
            for piece, run in execute(wanted, show):
                if isinstance(run, Run):
                    runs.write_run(file, run)
                    made.append(run)
                    passes += run.result["passes"]
                elif piece.problem not in refused:
                    refused[piece.problem] = str(run)
                    print(
                        f"problem {piece.problem}, {_label(piece.method, piece.workers)}: {run}",
                        file=sys.stderr,
                    )
                # what ends early leaves less to do
                bar.total -= piece.budgets[-1] - (
                    run.result["passes"] if isinstance(run, Run) else 0
                )
                bar.set_postfix_str(f"{len(made)}/{total} runs", refresh=False)
                show(0)
        except KeyboardInterrupt:
            bar.close()
            print(f"{len(made)} of {total} runs are in {folder / RUNS}; {_AGAIN}", file=sys.stderr)
            raise
    return refused


def _mark(task: Task, made: Sequence[Run], limits: Limits) -> list[Score]:
    """The marks of all answers."""
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


# What is said of it.


def _write_report(
    settings: Mapping[str, Any],
    found: Sequence[Point],
    beside: Sequence[Mapping[str, list[Point]]],
    folder: Path,
) -> None:
    """Writes the table and the picture.

    Raises:
      ValueError: one of them cannot be written.
    """
    jsonl.write(folder / TABLE, [scoring.table(found).encode() + b"\n"], _AGAIN)
    lines = dict(_lines(settings["method"], found))
    for more in beside:
        lines |= more
    if plot.available():
        try:
            plot.accuracy_picture(lines, f"{settings['task']}, {settings['model']}").savefig(
                folder / PICTURE, dpi=130
            )
        except OSError as error:
            raise ValueError(
                f"{folder / PICTURE} cannot be written ({error}); make room, and {_AGAIN}"
            ) from error
    else:
        print(
            f"{PICTURE} is left out, because matplotlib is not installed; `pip install "
            "'jaxshare[plot]'` has it, and --resume draws",
            file=sys.stderr,
        )


def _report(
    options: argparse.Namespace,
    settings: Mapping[str, Any],
    found: Sequence[Point],
    folder: Path,
    result: Mapping[str, Any],
) -> None:
    """Prints what came of it."""
    if options.json:
        print(json.dumps(result))
        return
    table = scoring.table(found)
    print(
        f"accuracy in percent, with its interval of 95%, over {found[0].problems} problems\n{table}"
    )
    for count, passes in result["passes_to_90"].items():
        reached = "not reached" if passes is None else f"{passes:.0f} forward passes"
        print(f"{100 * _GOAL:.0f}%, {_label(settings['method'], int(count))}: {reached}")
    print(f"all texts and scores are in {folder}", file=sys.stderr)


def _lines(method: str, found: Sequence[Point]) -> dict[str, list[Point]]:
    return {
        _label(method, count): [point for point in found if point.workers == count]
        for count in sorted({p.workers for p in found})
    }


def _label(method: str, workers: int) -> str:
    if method in runs.ALONE:
        return method
    return (
        f"{workers} worker{'s' * (workers > 1)}" if method == "workers" else f"{method}, {workers}"
    )
